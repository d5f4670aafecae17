"""Sculpting head by head (ours): with what the other heads add taken off, certified rows constrain one head alone.

What is left of an output, F_a − Σ_j≠i W_jᵀXᵀp_j = W_iᵀXᵀp_i, is solved for the weights of head i as phase 2 solves
for those of all, and gives the same linear constraints, here on Θ_i alone, which no hull is left of. Projections
follow by least squares. There is no descent: each sweep is a linear solve per head, and it is kept where fresh
examples say it is better.
"""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats
from keyhole.samples.six_phase.rows import Rows, certified, constraints, least_norm
from keyhole.samples.source import Source
from keyhole.samples.variable_projection import LayerPoint, LayerProblem, relative_error

# Examples that sweeps use, a part of them to judge by; numbers per parameter where that is more.
SWEEP_EXAMPLES, JUDGED_PART, SWEEP_RATIO = 3000, 1 / 4, 20
# The part of all rows that constrains a head in one sweep.
ROWS_PART = 1 / 4
# Sweeps at most, and the part of the error that one must take off to go on.
SWEEPS, WORTH = 40, 0.02


def sculpt_heads(source: Source, scores: Floats, sweeps: int = SWEEPS) -> tuple[Floats, Floats, float, int]:
    """Scores and projections, their relative error on examples apart, and the sweeps made."""
    m, d = scores.shape[:2]
    inputs, outputs = source.some(max(SWEEP_EXAMPLES, SWEEP_RATIO * 2 * m * d // source.length))
    cut = max(1, len(inputs) - int(JUDGED_PART * len(inputs)))
    problem, judged = LayerProblem(inputs[:cut], outputs[:cut]), LayerProblem(inputs[cut:], outputs[cut:])
    best = problem.at(scores)
    error, made = relative_error(judged, best), 0
    while made < sweeps:
        point = best
        for head in range(m):
            point = _with_head(problem, point, head)
        made, found = made + 1, relative_error(judged, point)
        if not found < error:
            break
        before, best, error = error, point, found
        if found > (1 - WORTH) * before:
            break
    return best.scores, best.projections, error, made


def _with_head(problem: LayerProblem, point: LayerPoint, head: int) -> LayerPoint:
    """The fit with the scores of one head solved for anew."""
    m, d = point.scores.shape[:2]
    mixed = point.mixed.reshape(problem.rows, m, d).copy()
    mixed[:, head] = 0.0
    rest = problem.labels - mixed.reshape(problem.rows, m * d) @ point.stacked
    own = point.projections[head]
    rows: Rows = certified(problem.inputs, rest.reshape(problem.outputs.shape), own)
    rows = rows.best(max(4 * d, int(ROWS_PART * problem.rows)))
    if len(rows.scores) < d:  # nothing certifies this head
        return point
    matrix, right = constraints(rows)
    scores = point.scores.copy()
    scores[head] = least_norm(matrix.T @ matrix, matrix.T @ right, 1, np.zeros((d, d)))[0]
    return problem.at(scores)
