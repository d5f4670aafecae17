"""Random layers of several heads, and whether a recovery covers one."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

import keyhole as kh
from keyhole.gauge.heads import canonical_heads


def layer(heads, width, outputs, rng, *, rank=None, bias=True, value_rank=None):
    """Random heads with logits of order one for tokens of norm two or three."""
    made = []
    for _ in range(heads):
        score = rng.standard_normal((width, rank or width)) @ rng.standard_normal((rank or width, width))
        score /= np.linalg.norm(score) / width**0.5
        value = rng.standard_normal((width, outputs))
        if value_rank:
            value = value[:, :value_rank] @ rng.standard_normal((value_rank, outputs))
        made.append(kh.SingleHead(score, value, 0.3 * rng.standard_normal(width) if bias else None))
    return kh.MultiHead(made, rng.standard_normal(outputs) if bias else None)


def covered(result, truth):
    """Whether every entry of every head lies within its radius, heads matched."""
    truth, found, radius = canonical_heads(truth), result.params, result.certificate.radius
    if len(found.heads) != len(truth.heads):
        return False

    def bias(head):
        return np.zeros(truth.width) if head.score_bias is None else np.asarray(head.score_bias)

    def parts(head):
        return [np.asarray(head.score), np.asarray(head.value), bias(head)]

    def excess(one, wide, two):
        with np.errstate(divide="ignore", invalid="ignore"):  # a bias that is known to be none has no radius
            apart = [np.abs(a - b) / w for a, w, b in zip(parts(one), parts(wide), parts(two), strict=True)]
        return max(np.max(np.nan_to_num(each, nan=0.0, posinf=np.inf)) for each in apart)

    costs = np.array(
        [[excess(one, wide, two) for two in truth.heads] for one, wide in zip(found.heads, radius.heads, strict=True)]
    )
    rows, columns = linear_sum_assignment(np.minimum(costs, 1e300))
    return bool(np.all(costs[rows, columns] <= 1.0))
