"""Vector outputs, biases and all positions: queries over the bound, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import keyhole as kh
from benchmarks.support.rows import markdown

RUNS = 20


def _value(width: int, outputs: int, rank: int | None = None, condition: float | None = None) -> Callable[..., Any]:
    def make(rng: np.random.Generator) -> np.ndarray:
        if condition is not None:
            left, _ = np.linalg.qr(rng.standard_normal((width, width)))
            right, _ = np.linalg.qr(rng.standard_normal((outputs, outputs)))
            return left[:, :outputs] * np.geomspace(1, 1 / condition, outputs) @ right
        if rank is not None:
            return rng.standard_normal((width, rank)) @ rng.standard_normal((rank, outputs))
        return rng.standard_normal((width, outputs))

    return make


def _scalar(width: int) -> Callable[..., Any]:
    return lambda rng: rng.standard_normal(width)


# name: width, value, size of the biases, all positions observed
CASES: dict[str, tuple[int, Callable[..., Any], float, bool]] = {
    "64 × 64": (64, _value(64, 64), 0, False),
    "256 × 256": (256, _value(256, 256), 0, False),
    "64 × 24": (64, _value(64, 24), 0, False),
    "64 × 64 of rank 20": (64, _value(64, 64, rank=20), 0, False),
    "64 × 64, condition 1e6": (64, _value(64, 64, condition=1e6), 0, False),
    "scalar, d = 64, biases 0.1": (64, _scalar(64), 0.1, False),
    "scalar, d = 64, biases 1": (64, _scalar(64), 1, False),
    "scalar, d = 64, biases 10": (64, _scalar(64), 10, False),
    "64 × 64, biases 0.1": (64, _value(64, 64), 0.1, False),
    "64 × 64, biases 1": (64, _value(64, 64), 1, False),
    "64 × 64, biases 10": (64, _value(64, 64), 10, False),
    "64 × 24, biases 1": (64, _value(64, 24), 1, False),
    "all positions, scalar, d = 64": (64, _scalar(64), 0, True),
    "all positions, 64 × 64": (64, _value(64, 64), 0, True),
}


def table() -> str:
    columns = ["head", "runs", "bound", "queries: median, most", "error: median, worst", "certified", "radius misses"]
    return markdown(columns, [_row(name, *case) for name, case in CASES.items()])


def _row(name: str, width: int, value: Callable[..., Any], biases: float, everywhere: bool) -> list[object]:
    queries, errors, certified, misses, bound = [], [], 0, 0, 0
    for seed in range(RUNS if width < 256 else 3):
        truth = _head(width, value, biases, np.random.default_rng([seed, width]))
        box = truth.at_all_positions if everywhere else truth
        oracle = kh.FunctionOracle(box, width=width, positions="all" if everywhere else "last", name=name)
        result = kh.recover(oracle, "single-head", seed=seed, throw=False)
        queries.append(result.stats.queries)
        errors.append(kh.distance(result.params, truth))
        certified += result.certified
        misses += not np.all(np.abs(result.params.score - truth.score) <= result.certificate.radius.score)
        bound = result.stats.counting_bound
    asked = f"{np.median(queries):.0f}, {max(queries)}"
    spread = f"{np.median(errors):.1e}, {max(errors):.1e}"
    return [name, len(queries), bound, asked, spread, f"{certified}/{len(queries)}", misses]


def _head(width: int, value: Callable[..., Any], biases: float, rng: np.random.Generator) -> kh.SingleHead:
    matrix = value(rng)
    score_bias = biases * rng.standard_normal(width) if biases else None
    output_bias = biases * rng.standard_normal(matrix.shape[1:]) if biases else None
    return kh.SingleHead(rng.standard_normal((width, width)), matrix, score_bias, output_bias)
