"""Attention heads modulo what no query can tell: their order, heads of equal logits, heads that say nothing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from keyhole.arrays import Array, to_numpy
from keyhole.errors import UsageError
from keyhole.model.head import SingleHead
from keyhole.model.multi_head import MultiHead

Floats = npt.NDArray[np.float64]

# Affine maps into logits that agree this far, relatively, are one: the rounding of their making.
SAME_LOGITS = 4e-15


def canonical_heads(params: SingleHead | MultiHead) -> MultiHead:
    """Heads of equal logits merged, those without a value dropped, the loudest first: the same for the same map."""
    if isinstance(params, SingleHead):
        bare = SingleHead(params.score, params.value, params.score_bias)
        params = MultiHead([bare], params.output_bias)
    merged: list[tuple[Floats, Floats]] = []  # (width, width + 1) into logits, (width[, outputs]) values
    for head in params.heads:
        logits, value = into_logits(head), plain(head.value)
        for number, (known, total) in enumerate(merged):
            if relative(known, logits) <= SAME_LOGITS:
                merged[number] = (known, total + value)
                break
        else:
            merged.append((logits, value))
    merged = [(logits, value) for logits, value in merged if np.any(value)]
    merged.sort(key=lambda head: (-np.linalg.norm(head[1]), tuple(head[0].ravel())))
    nothing = (np.zeros((params.width, params.width + 1)), 0.0 * plain(params.heads[0].value))
    heads = [
        SingleHead(logits[:, :-1], value, logits[:, -1] if np.any(logits[:, -1]) else None)
        for logits, value in merged or [nothing]
    ]
    bias = None if params.output_bias is None else plain(params.output_bias)
    return MultiHead(heads, bias if bias is not None and np.any(bias) else None)


def distance_of_heads(first: SingleHead | MultiHead, second: SingleHead | MultiHead) -> float:
    """The largest relative distance of two matched heads, of logits or of values, and of the output biases.

    1 when the numbers of heads differ: no head of one then corresponds to some head of the other.
    """
    if first.width != second.width or first.outputs != second.outputs:
        raise UsageError(
            f"cannot compare heads of width {first.width} with outputs {first.outputs} "
            f"and width {second.width} with outputs {second.outputs}"
        )
    one, two = canonical_heads(first), canonical_heads(second)
    zeros = 0.0 * plain(one.heads[0].value).sum(axis=0)
    biases = [zeros if each.output_bias is None else plain(each.output_bias) for each in (one, two)]
    # A bias is small or large beside what the values are.
    loudness = max(float(np.max(np.abs(plain(head.value)))) for head in (*one.heads, *two.heads))
    offset = float(np.max(np.abs(biases[0] - biases[1]), initial=0.0))
    scale = max(loudness, *(float(np.max(np.abs(bias), initial=0.0)) for bias in biases))
    apart = offset / scale if scale else 0.0
    if len(one.heads) != len(two.heads):
        return 1.0
    costs = np.array([[_apart(a, b) for b in two.heads] for a in one.heads])
    rows, columns = linear_sum_assignment(costs)
    return max(apart, float(np.max(costs[rows, columns])))


def _apart(first: SingleHead, second: SingleHead) -> float:
    values = relative(plain(first.value), plain(second.value))
    if not np.any(plain(first.value)) and not np.any(plain(second.value)):
        return values
    return max(values, relative(into_logits(first), into_logits(second)))


def into_logits(head: SingleHead) -> Floats:  # (width, width + 1)
    """The affine map of the last token whose product with a token is its logit."""
    bias = np.zeros(head.width) if head.score_bias is None else plain(head.score_bias)
    return np.column_stack([plain(head.score), bias])


def plain(array: Array) -> Floats:
    """A NumPy array of float64."""
    return np.asarray(to_numpy(array), dtype=np.float64)


def relative(first: Floats, second: Floats) -> float:
    """Relative Frobenius distance; 0 for two zeros."""
    scale = max(np.max(np.abs(first), initial=0.0), np.max(np.abs(second), initial=0.0))
    if scale == 0.0:
        return 0.0
    # Divided first, so that squares neither overflow nor vanish.
    first, second = first / scale, second / scale
    return float(np.linalg.norm(first - second) / max(np.linalg.norm(first), np.linalg.norm(second)))
