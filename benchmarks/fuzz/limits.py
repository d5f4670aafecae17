"""Boxes of other families within a norm or a length, behind coarse answers, or behind labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.fuzz.boxes import Box, Kind, Kinds, Random, decades, one_of
from benchmarks.fuzz.corners import NEAR_MEMBERS
from benchmarks.fuzz.foreign import FOREIGN
from benchmarks.fuzz.maps import Floats
from benchmarks.fuzz.members import draw_head
from benchmarks.fuzz.noisy import FORMS
from benchmarks.fuzz.terms import TERMS
from benchmarks.fuzz.unusual import CHANGED

LIMITED = Kinds("foreign")
NEAR_BOUNDARY = 1e-9  # of the size of an answer: labels of less are nobody's

Limit = Callable[[Random, Box], Box]


def _norm(rng: Random, box: Box) -> Box:
    return replace(box, max_norm=box.size * box.width**0.5 * decades(rng, -0.5, 1))


def _unit_norm(rng: Random, box: Box) -> Box:
    """Tokens of norm one at most, of which logits are as strong as they are."""
    own, size = box.truth, box.size * box.width**0.5 / decades(rng, -0.3, 0.7)
    return replace(box, max_norm=1.0, size=box.width**-0.5, truth=lambda x: own(size * x), kinks=None)


def _length(rng: Random, box: Box) -> Box:
    return replace(box, max_length=int(one_of(rng, (1, 2, 3, 4, 6, 8, 12, 16, 32, 48, 100))))


def _both(rng: Random, box: Box) -> Box:
    return _norm(rng, _length(rng, box))


def _coarse(name: str) -> Limit:
    return FORMS[name]


def _coarse_within_norm(rng: Random, box: Box) -> Box:
    return FORMS[str(one_of(rng, ("decimals", "normal errors", "bounded errors")))](rng, _unit_norm(rng, box))


def _labels(rng: Random, box: Box) -> Box:
    """The sign of the first output, or which output is largest."""
    own, classes = box.truth, int(rng.integers(2))

    def numbers(x: Floats) -> Floats:
        answers = own(x)
        return answers if classes and answers.shape[1] > 2 else np.hstack([0 * answers[:, :1], answers[:, :1]])

    def truth(x: Floats) -> Floats:  # nan near a boundary
        answers = numbers(x)
        ordered = np.sort(answers, axis=1)
        sure = ordered[:, -1] - ordered[:, -2] > NEAR_BOUNDARY * np.max(np.abs(answers), axis=1)
        return np.where(sure, np.argmax(answers, axis=1), np.nan)[:, None]

    return replace(
        box, truth=truth, answer=lambda x: np.argmax(numbers(x), axis=1) * 1.0, labels=True, scalar=True, kinks=None
    )


def _labels_within_norm(rng: Random, box: Box) -> Box:
    return _labels(rng, _unit_norm(rng, box))


LIMITS: dict[str, Limit] = {
    "norm": _norm,
    "norm one": _unit_norm,
    "length": _length,
    "norm and length": _both,
    "decimals": _coarse("decimals"),
    "normal errors": _coarse("normal errors"),
    "bounded errors": _coarse("bounded errors"),
    "answers in float32": _coarse("answers in float32"),
    "coarse within norm one": _coarse_within_norm,
    "labels": _labels,
    "labels within norm one": _labels_within_norm,
}


def _gated_labels(rng: Random) -> Box:
    """Labels of a head, to which a part of it is added where it is large and the last token on one side."""
    box = draw_head(rng)
    own, side = box.truth, rng.standard_normal(box.width) * decades(rng, -0.3, 0.7) / box.size
    typical = float(np.std(own(box.size * rng.standard_normal((100, 4, box.width))))) or 1.0
    border = typical * rng.uniform(-0.5, 0.5)

    def numbers(x: Floats) -> Floats:
        answers = own(x)[:, :1]
        return answers + np.maximum(answers + border, 0) * (x[:, -1] @ side)[:, None]

    return _labels_within_norm(rng, replace(box, params=None, truth=numbers))


def _limited(rng: Random, kinds: list[Kind], limit: Limit) -> Box:
    box = one_of(rng, kinds).draw(rng)
    while box.max_norm is not None or box.noise or box.answer is not None or box.trapdoor:
        box = one_of(rng, kinds).draw(rng)
    return limit(rng, box)


def _add_limits() -> None:
    sources: dict[str, list[Kind]] = {
        "other attention": [kind for name, kind in FOREIGN.items() if name.startswith("other attention, ")],
        "others": [kind for name, kind in FOREIGN.items() if not name.startswith("other attention, ")],
        "changed": [*NEAR_MEMBERS.values(), *CHANGED.values(), *TERMS.values()],
    }
    for source, kinds in sources.items():
        for name, limit in LIMITS.items():
            LIMITED.add(f"{source}, limited", name, lambda rng, kinds=kinds, limit=limit: _limited(rng, kinds, limit))
    LIMITED.add("others, limited", "labels of a gated head", _gated_labels)


_add_limits()
