"""Levenberg–Marquardt on the gates of many starts at a time, their values eliminated (variable projection)."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Booleans, Floats
from keyhole.methods.gated_sum.model import GatedQueries, GatedSum, gate_columns, gate_weights, value_columns

# Ridge of the values over the mean curvature: copies of one head leave it to this which of them has the value.
RIDGE = 1e-9
# Damping at the start and at most, over the mean curvature of the gates.
FIRST_DAMPING, LEAST_DAMPING, MOST_DAMPING = 1e-1, 1e-12, 1e8
# A start that gains less than this part in so many steps is in a minimum.
STALLED, LOOK = 0.01, 10
# A step is taken if it lowers the residual; damping falls and rises by these.
CALMER, BOLDER = 4.0, 0.25


def descend(
    queries: GatedQueries,  # rescaled
    gates: Floats,  # (starts, heads, width)
    steps: int,
    enough: float = 0.0,  # root mean square of the residual at which a start has arrived
) -> tuple[GatedSum, Floats]:
    """Where each start gets to in so many steps, and the root mean square of its residual, (starts,)."""
    gates = np.array(gates)
    sums, residual = fit_values(queries, gates)
    rms = _rms(residual)
    damping = np.full(rms.shape, FIRST_DAMPING)
    moving, before = np.ones(rms.shape, dtype=np.bool_), rms.copy()
    for step in range(1, steps + 1):
        active = np.flatnonzero(moving & (damping < MOST_DAMPING))
        if not active.size:
            break
        moves = _moves(queries, GatedSum(sums.gates[active], sums.values[active]), residual[active], damping[active])
        trial, left = fit_values(queries, sums.gates[active] + moves)
        better: Booleans = np.asarray(_rms(left) < rms[active])
        chosen = active[better]
        sums.gates[chosen], sums.values[chosen] = trial.gates[better], trial.values[better]
        residual[chosen], rms[chosen] = left[better], _rms(left)[better]
        damping[active] = np.maximum(damping[active] * np.where(better, BOLDER, CALMER), LEAST_DAMPING)
        if np.any(rms <= enough):
            break
        if step % LOOK == 0:
            moving, before = np.asarray(rms < (1 - STALLED) * before), rms.copy()
    return sums, rms


def fit_values(queries: GatedQueries, gates: Floats) -> tuple[GatedSum, Floats]:  # (starts, heads, width)
    """The values that fit best for given gates, and what is left of the answers, (starts, n, outputs)."""
    columns = value_columns(queries, gate_weights(queries, gates))
    turned = np.swapaxes(columns, -1, -2)
    products = _with_ridge(turned @ columns, RIDGE)
    solved = np.linalg.solve(products, turned @ queries.answers)
    values = np.asarray(solved, dtype=np.float64).reshape(*gates.shape, queries.answers.shape[1])
    return GatedSum(gates, values), queries.answers - columns @ solved


def _moves(queries: GatedQueries, sums: GatedSum, residual: Floats, damping: Floats) -> Floats:
    """One damped step of each start: Kaufman's form, in which values follow the gates to first order."""
    weights = gate_weights(queries, sums.gates)
    of_values = value_columns(queries, weights)
    of_gates = gate_columns(queries, weights, sums.values)  # (starts, outputs, n, heads · width)
    products = _with_ridge(np.swapaxes(of_values, -1, -2) @ of_values, RIDGE)
    turned = np.swapaxes(of_gates, -1, -2)
    mixed = np.swapaxes(of_values, -1, -2)[:, None] @ of_gates
    follow = np.linalg.solve(products[:, None], mixed)
    curvature = np.sum(turned @ of_gates - np.swapaxes(mixed, -1, -2) @ follow, axis=1)
    downhill = np.sum(turned @ np.moveaxis(residual, -1, 1)[..., None], axis=1)
    return np.asarray(np.linalg.solve(_with_ridge(curvature, damping), downhill)[..., 0]).reshape(sums.gates.shape)


def _with_ridge(products: Floats, ridge: float | Floats) -> Floats:  # (starts, m, m)
    """Products with a multiple of their mean diagonal on it, never quite nothing."""
    mean = np.einsum("...ii->...", products) / products.shape[-1]
    lifted = np.array(products)
    index = np.arange(products.shape[-1])
    lifted[..., index, index] += np.maximum(np.asarray(ridge * mean), np.finfo(np.float64).tiny)[..., None]
    return lifted


def _rms(residual: Floats) -> Floats:  # (starts, n, outputs) -> (starts,)
    return np.asarray(np.sqrt(np.mean(residual**2, axis=(-1, -2))))
