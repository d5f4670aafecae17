"""Levenberg–Marquardt of one start to the last digit, values eliminated by orthogonal factors."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.gated_sum.model import GatedQueries, GatedSum, gate_columns, gate_weights, value_columns
from keyhole.numerics.svd import least_squares, svd

# Steps at most. Damping at the start and at most, over the largest singular value; how it falls and rises.
MOST_STEPS = 60
FIRST_DAMPING, MOST_DAMPING, CALMER, BOLDER = 1e-4, 1.0, 10.0, 0.01
# Undamped steps that lower the residual by less than this part are the last; so are damped ones, so many in a row.
SETTLED, IN_A_ROW = 0.1, 6


def polish(queries: GatedQueries, gates: Floats) -> tuple[GatedSum, float]:  # (heads, width)
    """The nearest best fit, and the root mean square of its residual."""
    fit, residual, basis = _fit_values(queries, gates)
    best, damping, slow = float(np.sum(residual**2)), FIRST_DAMPING, 0
    for _ in range(MOST_STEPS):
        columns = gate_columns(queries, gate_weights(queries, fit.gates), fit.values)  # (outputs, n, heads · width)
        across = columns - basis @ (basis.T @ columns)
        left, sizes, right = svd(across.reshape(-1, fit.gates.size))
        onto, before = left.T @ residual.T.ravel(), best
        while damping <= MOST_DAMPING:
            least = max(damping, np.finfo(np.float64).eps) * float(np.max(sizes, initial=0.0))
            move = right.T @ (onto * sizes / np.maximum(sizes**2 + least**2, np.finfo(np.float64).tiny))
            trial, after, other = _fit_values(queries, fit.gates + move.reshape(fit.gates.shape))
            if float(np.sum(after**2)) < best:
                fit, residual, basis, best = trial, after, other, float(np.sum(after**2))
                damping *= BOLDER
                break
            damping *= CALMER
        slow = slow + 1 if best > (1 - SETTLED) * before else 0
        if slow >= IN_A_ROW or damping > MOST_DAMPING or (slow and damping < np.finfo(np.float64).eps):
            break
    return fit, float(np.sqrt(best / residual.size))


def _fit_values(queries: GatedQueries, gates: Floats) -> tuple[GatedSum, Floats, Floats]:
    """Values of given gates, what is left of the answers, and an orthonormal basis of what values can explain."""
    columns = value_columns(queries, gate_weights(queries, gates))
    basis, factor = np.linalg.qr(columns)
    values = least_squares(factor, basis.T @ queries.answers)
    fit = GatedSum(gates, values.reshape(*gates.shape, queries.answers.shape[1]))
    return fit, queries.answers - columns @ values, basis
