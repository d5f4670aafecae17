"""Gauss–Newton to the last digit, values eliminated by orthogonal factors."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.gated_sum.model import GatedQueries, GatedSum, gate_columns, gate_weights, value_columns
from keyhole.numerics.svd import least_squares

# Steps at most, and how often one is halved before it is given up.
MOST_STEPS, MOST_HALVINGS = 12, 5
# A step that lowers the residual by less than this part is the last.
SETTLED = 0.1


def polish(queries: GatedQueries, gates: Floats) -> tuple[GatedSum, float]:  # (heads, width)
    """The nearest best fit, and the root mean square of its residual."""
    fit, residual, basis = _fit_values(queries, gates)
    best = float(np.sum(residual**2))
    for _ in range(MOST_STEPS):
        columns = gate_columns(queries, gate_weights(queries, fit.gates), fit.values)  # (outputs, n, heads · width)
        across = columns - basis @ (basis.T @ columns)
        move = least_squares(across.reshape(-1, fit.gates.size), residual.T.ravel()).reshape(fit.gates.shape)
        before = best
        for halving in range(MOST_HALVINGS):
            trial, left, other = _fit_values(queries, fit.gates + move * 0.5**halving)
            if float(np.sum(left**2)) < best:
                fit, residual, basis, best = trial, left, other, float(np.sum(left**2))
                break
        if best > (1 - SETTLED) * before:
            break
    return fit, float(np.sqrt(best / residual.size))


def _fit_values(queries: GatedQueries, gates: Floats) -> tuple[GatedSum, Floats, Floats]:
    """Values of given gates, what is left of the answers, and an orthonormal basis of what values can explain."""
    columns = value_columns(queries, gate_weights(queries, gates))
    basis, factor = np.linalg.qr(columns)
    values = least_squares(factor, basis.T @ queries.answers)
    fit = GatedSum(gates, values.reshape(*gates.shape, queries.answers.shape[1]))
    return fit, queries.answers - columns @ values, basis
