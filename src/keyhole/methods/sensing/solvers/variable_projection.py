"""Local search for low-rank sensing: Levenberg-Marquardt on one factor, the other eliminated.

Golub and Pereyra (1973): variable projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import cho_solve, solve_triangular

from keyhole.arrays import Floats
from keyhole.methods.sensing.solvers.problem import (
    EPS,
    SensingProblem,
    cholesky,
    khatri_rao,
    least_squares,
    orthonormal,
    ratio,
)

_FIRST_ITERATIONS = 25  # a good start needs 5 to 10 steps; more are spent better on another start
_WINDOW = 6  # steps over which a refinement must make progress
_PROGRESS = 0.8  # residual ratio over that window below which it does
_FIRST_DAMPING = 1e-3  # relative to the mean curvature; adapted from there


@dataclass(frozen=True, slots=True)
class _Point:
    """Best right factor for a given left one, with what the next step needs."""

    left: Floats  # (d, r) orthonormal
    right: Floats  # (d, r)
    design: Floats  # (m, r d)
    factor: Any
    error: Floats  # (m,)
    cost: float  # relative residual

    @property
    def matrix(self) -> Floats:
        return self.left @ self.right.T


def _project(problem: SensingProblem, left: Floats) -> _Point:
    design = khatri_rao(problem.left @ left, problem.right)
    solution, error, factor = least_squares(design, problem.values)
    right = solution.reshape(left.shape[1], -1).T
    return _Point(left, right, design, factor, error, ratio(float(np.linalg.norm(error)), problem.scale))


def _reduce(problem: SensingProblem, at: _Point, basis: Floats) -> tuple[Floats, Floats]:
    """Gauss-Newton matrix and gradient in the left factor alone, the right one eliminated (Schur complement).

    ``basis`` is orthonormal for the right factor's range, so a step does not see the spread of W's singular
    values. Steps inside range(L) only change the gauge: a penalty there makes the matrix invertible.
    """
    jacobian = khatri_rao(problem.right @ basis, problem.left)
    coupling = solve_triangular(at.factor[0], at.design.T @ jacobian, lower=True, check_finite=False)
    matrix = jacobian.T @ jacobian - coupling.T @ coupling
    weight = float(np.trace(matrix)) / len(matrix)
    matrix += weight * np.kron(np.eye(basis.shape[1]), at.left @ at.left.T)
    return matrix, jacobian.T @ at.error


def refine(problem: SensingProblem, left: Floats, steps: int, target: float | None = None) -> tuple[_Point, int]:
    """Levenberg-Marquardt on the left factor's range; stops at ``target``, on a stall, or after ``steps``.

    ``target`` defaults to the rounding and noise floor.
    """
    at = _project(problem, orthonormal(left))
    damping, used, history = _FIRST_DAMPING, 0, [at.cost]
    while used < steps and at.cost > (problem.floor(at.matrix) if target is None else target):
        basis = np.linalg.svd(at.right, full_matrices=False)[0]
        matrix, gradient = _reduce(problem, at, basis)
        weight = float(np.trace(matrix)) / len(matrix)
        base = at.left @ (at.right.T @ basis)
        accepted = None
        while accepted is None and used < steps and damping < 1.0 / EPS:
            used += 1
            factor = cholesky(matrix + damping * weight * np.eye(len(matrix)))
            move = cho_solve(factor, gradient, check_finite=False).reshape(basis.shape[1], -1).T
            trial = _project(problem, orthonormal(base + move))
            accepted = trial if trial.cost < at.cost else None
            damping = max(damping / 5.0, EPS) if accepted else 4.0 * damping
        if accepted is None:
            break
        at = accepted
        history.append(at.cost)
        if len(history) > _WINDOW and history[-1] > _PROGRESS * history[-1 - _WINDOW]:
            break
    return at, used


def fit(problem: SensingProblem, left: Floats) -> tuple[Floats, int]:  # -> (d, d), steps
    """The best matrix near the range of `left`."""
    at, used = refine(problem, left, _FIRST_ITERATIONS)
    return at.matrix, used
