"""Logits and values of one token in all heads from its answers in several numbers of copies, where outputs are many.

With m copies against n of the last token, r = m/n, a head of odds e^a gives the weight w = r/(r + e^−a). Answers Y,
one row for each r, are S·Vᵀ, S the weights and V the values. Since r·(1 − w) = w·e^−a, the rows r·(total − y), with the
total of all values known, are S·diag(e^−a)·Vᵀ: the generalised eigenvalues of both matrices are e^−a.
"""

from __future__ import annotations

import numpy as np
from scipy.special import expit

from keyhole.arrays import Floats
from keyhole.numerics.svd import least_squares, svd

# Logits beyond this say nothing.
LARGEST = 12.0


def solve_odds(
    answers: Floats,  # (n, outputs)
    offsets: Floats,  # (n,) ln(m/n)
    total: Floats,  # (outputs,)
    heads: int,
) -> tuple[Floats, Floats] | None:
    """Logits (heads,) and values (heads, outputs), in any order; None where there are no such weights."""
    left, sizes, right = svd(answers)
    if sizes.size < heads or not sizes[heads - 1] > 0:
        return None
    other = np.exp(offsets)[:, None] * (total - answers)
    pencil = left[:, :heads].T @ other @ right[:heads].T / sizes[:heads]
    odds = np.linalg.eigvals(pencil)
    if not np.all(odds.real > 0):
        return None
    logits = np.clip(-np.log(odds.real), -LARGEST, LARGEST)
    weights = expit(offsets[:, None] + logits)  # (n, heads)
    rows = np.concatenate([weights, np.ones((1, heads))])
    return logits, np.asarray(least_squares(rows, np.concatenate([answers, total[None]])))
