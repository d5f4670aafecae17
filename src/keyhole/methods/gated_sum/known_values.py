"""Gates of heads whose values are known, as at any last token after the first."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.gated_sum.model import GatedQueries, GatedSum, gate_columns, gate_weights

# Steps at most; damping at the start, at least and at most, over the mean curvature; how it falls and rises.
MOST_STEPS = 80
FIRST_DAMPING, LEAST_DAMPING, MOST_DAMPING = 1e-3, 1e-14, 1e8
CALMER, BOLDER = 4.0, 0.2
# A step that lowers the residual by less than this part while damping is least is the last.
SETTLED = 0.1


def fit_known_values(
    queries: GatedQueries,
    values: Floats,  # (heads, width, outputs)
    gates: Floats,  # (heads, width) start
    enough: float = 0.0,  # root mean square of the residual that is no worse than the errors of answers
) -> tuple[Floats, float]:
    """The gates nearest to a start that fit best, in the order of the values, and the rms of the residual."""
    residual = queries.answers - GatedSum(gates, values).predict(queries)
    best, damping = float(np.sum(residual**2)), FIRST_DAMPING
    for _ in range(MOST_STEPS):
        columns = gate_columns(queries, gate_weights(queries, gates), values).reshape(-1, gates.size)
        curvature = columns.T @ columns
        index = np.arange(gates.size)
        mean = float(np.mean(np.diag(curvature))) or 1.0
        downhill = columns.T @ residual.T.ravel()
        before, was_least = best, damping <= LEAST_DAMPING
        while damping < MOST_DAMPING:
            lifted = curvature.copy()
            lifted[index, index] += damping * mean
            trial = gates + np.linalg.solve(lifted, downhill).reshape(gates.shape)
            left = queries.answers - GatedSum(trial, values).predict(queries)
            if float(np.sum(left**2)) < best:
                gates, residual, best = trial, left, float(np.sum(left**2))
                damping = max(damping * BOLDER, LEAST_DAMPING)
                break
            damping *= CALMER
        rms = float(np.sqrt(best / residual.size))
        if best == before or (rms <= enough and best > (1 - SETTLED) * before) or (was_least and best == 0):
            break
    return gates, float(np.sqrt(best / residual.size))
