"""Targets that benchmarks share: random heads, easy and nasty."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from keyhole import SingleHead

Maker = Callable[[int, np.random.Generator], SingleHead]


def gaussian(norm: float) -> Maker:
    """Gaussian score of the given spectral norm."""

    def make(width: int, rng: np.random.Generator) -> SingleHead:
        score = rng.standard_normal((width, width))
        return SingleHead(score * (norm / np.linalg.norm(score, 2)), rng.standard_normal(width))

    return make


def low_rank(rank: int, decay: float = 1.0) -> Maker:
    """Orthogonal factors and singular values from 1 down to `decay`."""

    def make(width: int, rng: np.random.Generator) -> SingleHead:
        left, _ = np.linalg.qr(rng.standard_normal((width, rank)))
        right, _ = np.linalg.qr(rng.standard_normal((width, rank)))
        return SingleHead(left * np.geomspace(1.0, decay, rank) @ right.T, rng.standard_normal(width))

    return make


def _scored(score_of: Callable[[int, np.random.Generator], np.ndarray]) -> Maker:
    return lambda width, rng: SingleHead(score_of(width, rng), rng.standard_normal(width))


def _valued(value_of: Callable[[int, np.random.Generator], np.ndarray]) -> Maker:
    return lambda width, rng: SingleHead(rng.standard_normal((width, width)), value_of(width, rng))


def _one_entry(width: int, rng: np.random.Generator) -> np.ndarray:
    score = np.zeros((width, width))
    score[rng.integers(width), rng.integers(width)] = 1.0
    return score


NASTY: dict[str, Maker] = {
    "Cauchy entries": _scored(lambda width, rng: rng.standard_cauchy((width, width))),
    "exp(5·N) entries": _scored(
        lambda width, rng: np.exp(5 * rng.standard_normal((width, width))) * rng.choice([-1, 1], (width, width))
    ),
    "condition 1e10": lambda width, rng: low_rank(width, 1e-10)(width, rng),
    "rank one": low_rank(1),
    "one non-zero entry": _scored(_one_entry),
    "one-hot value": _valued(lambda width, rng: np.eye(width)[rng.integers(width)]),
    "value over 12 decades": _valued(lambda width, rng: rng.standard_normal(width) * np.geomspace(1, 1e-12, width)),
    "norm 1e-12": gaussian(1e-12),
    "norm 1e+12": gaussian(1e12),
}
