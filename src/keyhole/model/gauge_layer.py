"""What a whole-sequence layer cannot reveal, and comparison of layers modulo that; `gauge` hands on to here."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from keyhole.arrays import to_numpy
from keyhole.errors import UsageError
from keyhole.model.layer import AttentionLayer

Floats = npt.NDArray[np.float64]

# Heads whose scores differ by less than this part of their size, which is rounding, are one head.
SAME_SCORES = 4e-15


def distance_of_layers(first: AttentionLayer, second: AttentionLayer) -> float:
    """The larger of the relative Frobenius distances of scores and projections, over the best matching of heads.

    Heads without a projection answer nothing, and heads of the same scores are one whose projection is their sum:
    so they are counted. A head without a partner counts in full.
    """
    if (first.width, first.outputs) != (second.width, second.outputs):
        raise UsageError(
            f"cannot compare layers of width {first.width} with {first.outputs} outputs "
            f"and of width {second.width} with {second.outputs} outputs"
        )
    one, two = merged(first), merged(second)
    heads = max(one[0].shape[0], two[0].shape[0])
    if heads == 0:
        return 0.0
    padded = [[_padded(array, heads) for array in each] for each in (one, two)]
    scales = [max(_norm(padded[0][part]), _norm(padded[1][part])) or 1.0 for part in (0, 1)]
    apart = np.zeros((heads, heads))
    for part in (0, 1):
        difference = (padded[0][part][:, None] - padded[1][part][None]) / scales[part]
        apart += np.sum(difference**2, axis=(2, 3))
    rows, columns = linear_sum_assignment(apart)
    return max(_norm(padded[0][part][rows] - padded[1][part][columns]) / scales[part] for part in (0, 1))


def merged(layer: AttentionLayer) -> tuple[Floats, Floats]:  # (heads, width, width), (heads, width, outputs)
    """The heads that can be told apart: those of the same scores as one, those without a projection left out."""
    scores, projections = _plain(layer.scores), _plain(layer.projections).copy()
    kept: list[int] = []
    for head in range(layer.heads):
        size = SAME_SCORES * np.max(np.abs(scores[head]), initial=0.0)
        twin = next((each for each in kept if np.max(np.abs(scores[head] - scores[each])) <= size), None)
        if twin is None:
            kept.append(head)
        else:
            projections[twin] += projections[head]
    kept = [head for head in kept if np.any(projections[head])]
    return scores[kept], projections[kept]


def _plain(array: Any) -> Floats:
    return np.asarray(to_numpy(array), dtype=np.float64)


def _padded(array: Floats, heads: int) -> Floats:
    return np.concatenate([array, np.zeros((heads - array.shape[0], *array.shape[1:]))])


def _norm(array: Floats) -> float:
    largest = float(np.max(np.abs(array), initial=0.0))
    return largest * float(np.linalg.norm(array / largest)) if largest else 0.0
