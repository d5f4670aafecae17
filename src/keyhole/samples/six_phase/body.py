"""The convex body of phase 2 as the paper has it: a polytope around the hull of the scores, asked by linear programs.

A row is certified by a linear program too: the weights p on the simplex with the least ‖F_a − SᵀXᵀp‖_∞. Certified rows
say of every Θ_i that |A·Θ_i − b| ≤ τ; the body K is all Θ of which they say so. It is long along Θ_i − Θ_j, where the
rows are flat, and thin elsewhere. How far rows that were certified by a residual err is not known: τ is chosen from the
point that violates them least, so that K shows the hull, and heads far from that point may lie outside of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import linprog, nnls

from keyhole.arrays import Floats
from keyhole.samples.six_phase.rows import Rows, constraints

# The slack of the body over the least that leaves a point in it.
SLACK = 2.0
# Entries of scores are within this many times the largest of a point of the body: it is bounded where no row bounds it.
BOX = 8.0
# Directions in which the body is measured for every entry of a score matrix.
DIRECTIONS = 2
# What the programs find lies on the border, up to their own tolerance.
TOUCHES = 1 + 1e-5
# Rows that make the body: linear programs of more would take long.
BODY_ROWS = 400


@dataclass(frozen=True)
class Body:
    """K = {Θ : |A·Θ − b| ≤ slack, |Θ_jl| ≤ box}."""

    matrix: Floats  # (rows, d²)
    right: Floats  # (rows,)
    slack: float
    box: float

    @classmethod
    def of(cls, rows: Rows) -> Body:
        """The body of certified rows: its slack is that of the point that violates them least, with a margin."""
        matrix, right = constraints(rows.best(BODY_ROWS))
        size = matrix.shape[1]
        one = np.ones((len(matrix), 1))
        solved = linprog(
            np.append(np.zeros(size), 1.0),
            A_ub=np.vstack([np.hstack([matrix, -one]), np.hstack([-matrix, -one])]),
            b_ub=np.concatenate([right, -right]),
            bounds=[(None, None)] * size + [(0, None)],
            method="highs",
        )
        assert solved.x is not None  # any point is feasible: the slack is free
        tiny = 64 * np.finfo(float).eps * max(float(np.max(np.abs(right))), 1e-300)
        return cls(
            matrix, right, SLACK * float(solved.x[-1]) + tiny, BOX * max(float(np.max(np.abs(solved.x[:-1]))), tiny)
        )

    @cached_property
    def half_spaces(self) -> tuple[Floats, Floats]:
        """G and h of the half-spaces G·Θ ≤ h."""
        return np.vstack([self.matrix, -self.matrix]), np.concatenate([self.right, -self.right]) + self.slack

    def contains(self, scores: Floats) -> bool:  # (d, d)
        """The membership oracle."""
        flat = scores.reshape(-1)
        slack, box = (TOUCHES * each for each in (self.slack, self.box))
        return bool(np.all(np.abs(self.matrix @ flat - self.right) <= slack) and np.max(np.abs(flat)) <= box)

    def furthest(self, direction: Floats) -> Floats:  # (d²,) -> (d²,)
        """The point of the body that is furthest along a direction, by a linear program."""
        above, below = self.half_spaces
        bounds = [(-self.box, self.box)] * len(direction)
        solved = linprog(-direction, A_ub=above, b_ub=below, bounds=bounds, method="highs")
        return np.asarray(solved.x if solved.x is not None else np.zeros(len(direction)))

    def least_norm(self) -> Floats:  # (d²,)
        """Phase 3: the point of least norm, by the dual problem of non-negative least squares (Lawson and Hanson)."""
        above, below = self.half_spaces
        dual = np.vstack([-above.T, -below[None]])
        wanted = np.append(np.zeros(above.shape[1]), 1.0)
        found, _ = nnls(dual, wanted, maxiter=50 * dual.shape[1])
        left = dual @ found - wanted
        return np.asarray(-left[:-1] / left[-1])

    def span(self, count: int, rng: np.random.Generator) -> Floats:  # -> (count, d²), orthonormal
        """Phase 4: the directions in which the body is longest, by its furthest points in random directions."""
        size = self.matrix.shape[1]
        directions = rng.standard_normal((DIRECTIONS * size, size))
        ends = np.array([self.furthest(sign * each) for each in directions for sign in (1.0, -1.0)])
        return np.asarray(np.linalg.svd(ends - np.mean(ends, axis=0), full_matrices=False)[2][:count])


def certify(tokens: Floats, output: Floats, total: Floats) -> tuple[Floats, float]:  # (k, d), (d_out,), (d, d_out)
    """Phase 2, one row: the weights on the simplex that come nearest to the output, and how far they leave it.

    A linear program; a row counts as certified where what is left is small.
    """
    answers = (tokens @ total).T  # (d_out, k)
    one = np.ones((len(output), 1))
    k = len(tokens)
    solved = linprog(
        np.append(np.zeros(k), 1.0),
        A_ub=np.vstack([np.hstack([answers, -one]), np.hstack([-answers, -one])]),
        b_ub=np.concatenate([output, -output]),
        A_eq=np.append(np.ones(k), 0.0)[None],
        b_eq=[1.0],
        bounds=(0, None),
        method="highs",
    )
    assert solved.x is not None  # any point of the simplex is feasible
    return np.asarray(solved.x[:k]), float(solved.x[k])
