"""Whole-sequence layers modulo what they cannot reveal: row a of an answer is what heads say of a as the last token."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

from keyhole.arrays import Floats, floats
from keyhole.families.attention_layer import AttentionLayer
from keyhole.families.multi_head import MultiHead
from keyhole.families.single_head import SingleHead
from keyhole.gauge.heads import canonical_heads
from keyhole.gauge.tolerance import check_shapes, rounding_of, size


def as_heads(layer: AttentionLayer) -> MultiHead:
    """The heads whose answers at every position the layer computes; one that says nothing where it has none."""
    scores, projections = floats(layer.scores), floats(layer.projections)
    if layer.heads == 0:
        scores, projections = np.zeros((1, layer.width, layer.width)), np.zeros((1, layer.width, layer.outputs))
    return MultiHead([SingleHead(score.T, value) for score, value in zip(scores, projections, strict=True)])


def as_layer(params: MultiHead) -> AttentionLayer:
    """The layer that computes the answers of heads without biases at every position."""
    scores = np.stack([floats(head.score).T for head in params.heads])
    return AttentionLayer(scores, np.stack([floats(head.value) for head in params.heads]))


def distance_of_attention(first: AttentionLayer, second: AttentionLayer) -> float:
    """The larger of the relative Frobenius distances of scores and projections, over the best matching of heads.

    Heads of the same scores are one whose projection is their sum. A head without a partner counts in full.
    """
    check_shapes(first, second, "layers")
    layers = [as_layer(canonical_heads(as_heads(each), rounding_of(each))) for each in (first, second)]
    heads = max(each.heads for each in layers)
    padded = [[_pad(array, heads) for array in (each.scores, each.projections)] for each in layers]
    scales = [max(size(padded[0][part]), size(padded[1][part])) or 1.0 for part in (0, 1)]
    apart = np.zeros((heads, heads))
    for part in (0, 1):
        difference = (padded[0][part][:, None] - padded[1][part][None]) / scales[part]
        apart += np.sum(difference**2, axis=(2, 3))
    rows, columns = linear_sum_assignment(apart)
    return max(size(padded[0][part][rows] - padded[1][part][columns]) / scales[part] for part in (0, 1))


def _pad(array: Floats, heads: int) -> Floats:
    return np.concatenate([array, np.zeros((heads - array.shape[0], *array.shape[1:]))])
