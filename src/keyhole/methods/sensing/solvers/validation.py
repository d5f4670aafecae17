"""Local search for low-rank sensing, when its result is believed, and how far off that may be.

Golub and Pereyra (1973): variable projection, Levenberg-Marquardt on one factor with the other eliminated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import cho_solve, solve_triangular

from keyhole.arrays import Floats
from keyhole.methods.sensing.solvers.problem import (
    EPS,
    SensingProblem,
    SensingSolution,
    cholesky,
    khatri_rao,
    leading_left,
    least_squares,
    make_problem,
    numerical_rank,
    parameter_count,
    ratio,
)
from keyhole.numerics.svd import svd

HELD_OUT = (4, 8)  # fewest and most held out: a wrong answer passes each with probability near the floor
FIRST_STEPS = 25  # a good start needs 5 to 10 steps; more are spent better on another start
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


def refine(problem: SensingProblem, left: Floats, steps: int, target: float | None = None) -> Floats:
    """The best matrix near the range of ``left``, by Levenberg-Marquardt.

    Stops at ``target``, on a stall, or after ``steps``; ``target`` defaults to the rounding and noise floor.
    """
    at = _project(problem, np.linalg.qr(left)[0])
    damping, used, history = _FIRST_DAMPING, 0, [at.cost]
    while used < steps and at.cost > (problem.floor(at.matrix) if target is None else target):
        basis = svd(at.right)[0]
        matrix, gradient = _reduce(problem, at, basis)
        weight = float(np.trace(matrix)) / len(matrix)
        base = at.left @ (at.right.T @ basis)
        accepted = None
        while accepted is None and used < steps and damping < 1.0 / EPS:
            used += 1
            factor = cholesky(matrix + damping * weight * np.eye(len(matrix)))
            move = cho_solve(factor, gradient, check_finite=False).reshape(basis.shape[1], -1).T
            trial = _project(problem, np.linalg.qr(base + move)[0])
            accepted = trial if trial.cost < at.cost else None
            damping = max(damping / 5.0, EPS) if accepted else 4.0 * damping
        if accepted is None:
            break
        at = accepted
        history.append(at.cost)
        if len(history) > _WINDOW and history[-1] > _PROGRESS * history[-1 - _WINDOW]:
            break
    return at.matrix


def _tangent(left: Floats, right: Floats, rank: int) -> Floats:  # (m, d), (m, d) -> (m, r (2 d - r))
    """The measurements on an orthonormal basis of the tangent space, in the frame of the singular vectors."""
    return np.hstack([khatri_rao(left[:, :rank], right), khatri_rao(right[:, :rank], left[:, rank:])])


def standard_error(U: Floats, G: Floats, matrix: Floats, rank: int) -> Floats:  # (m, d), (m, d), (d, d) -> (d, d)
    """Standard deviation of every entry of a least-squares solution of this rank, to first order.

    For independent errors of the values with standard deviation one: J the measurements on the tangent space,
    the error of its coordinates has covariance (J^T J)^-1, and an entry is a combination of coordinates.
    """
    d = len(matrix)
    u, _, vt = svd(matrix, full_matrices=True)
    v = vt.T
    tangent = _tangent(U @ u, G @ v, rank)
    covariance = cho_solve(cholesky(tangent.T @ tangent), np.eye(tangent.shape[1]), check_finite=False)
    rows, columns = (rank, d), (rank, d - rank)
    cut = rank * d
    within = covariance[:cut, :cut].reshape(*rows, *rows)
    across = covariance[:cut, cut:].reshape(*rows, *columns)
    beyond = covariance[cut:, cut:].reshape(*columns, *columns)
    # An entry (i, j) has the coordinates u_ia v_jb (a <= rank) and v_jc u_ie (c <= rank < e).
    near, far, leading = u[:, :rank], u[:, rank:], v[:, :rank]
    by_column = _contract("jb,abce,je->jac", v, within, v)
    variance = _contract("ia,jac,ic->ij", near, by_column, near)
    mixed = _contract("jb,abce,jc->jae", v, across, leading)
    variance += 2.0 * _contract("ia,jae,ie->ij", near, mixed, far)
    by_row = _contract("ie,cedf,if->icd", far, beyond, far)
    variance += _contract("jc,icd,jd->ij", leading, by_row, leading)
    return np.asarray(np.sqrt(np.maximum(variance, 0.0)))


def _contract(subscripts: str, *arrays: Floats) -> Floats:
    return np.asarray(np.einsum(subscripts, *arrays, optimize=True), dtype=np.float64)


def _is_determined(problem: SensingProblem, matrix: Floats, rank: int) -> bool:
    """Whether the measurements are injective on the tangent space, and no singular value kept is noise."""
    u, spectrum, vt = svd(matrix, full_matrices=True)
    tangent = _tangent(problem.left @ u, problem.right @ vt.T, rank)
    eigenvalues = np.linalg.eigvalsh(tangent.T @ tangent)
    if eigenvalues[0] <= EPS * len(eigenvalues) * eigenvalues[-1]:
        return False
    radius = problem.floor(matrix) * problem.scale / float(np.sqrt(eigenvalues[0]))
    return bool(radius < spectrum[rank - 1])


def _validate(problem: SensingProblem, search: SensingProblem, held: SensingProblem, matrix: Floats) -> Floats | None:
    """``matrix`` refitted on every measurement if it is validated, else None."""
    if search.residual(matrix) > search.floor(matrix):
        return None
    rank = numerical_rank(matrix, problem.floor(matrix))
    count = parameter_count(problem.width, rank)
    if not 0 < count < search.size:
        return None
    # Unseen measurements must be predicted within four standard errors of a prediction.
    if held.residual(matrix) > 4.0 * held.floor(matrix) * float(np.sqrt(search.size / (search.size - count))):
        return None
    if rank < problem.width:  # at full rank the linear fit is the answer already
        matrix = refine(problem, leading_left(matrix, rank), 4, target=0.0)
    fits = problem.residual(matrix) <= problem.floor(matrix)
    return matrix if fits and _is_determined(problem, matrix, rank) else None


def solve(
    U: Floats,
    G: Floats,
    b: Floats,
    noise: float,
    rng: np.random.Generator | None,
    candidates: Callable[[SensingProblem, np.random.Generator], Iterator[tuple[Floats | None, Floats]]],
) -> SensingSolution:
    """The first candidate that validates, of those proposed from all measurements but a few.

    Candidates come with what to return unconverged if none validates; without it, that is the one of least residual.
    """
    problem = make_problem(U, G, b, noise)
    best = np.zeros((problem.width, problem.width))
    if not problem.values.any():  # W = 0, unless the measurements are too few to tell
        return SensingSolution(best, 0, 0.0, problem.size >= parameter_count(problem.width, 1) + HELD_OUT[0])
    rng = np.random.default_rng(0) if rng is None else rng
    order, held = rng.permutation(problem.size), int(np.clip(problem.size // 20, *HELD_OUT))
    search, rest = problem.rows(order[held:]), problem.rows(order[:held])
    proven = None
    for fallback, candidate in candidates(search, rng):
        proven = _validate(problem, search, rest, candidate)
        if proven is not None:
            break
        best = min(best, candidate, key=problem.residual) if fallback is None else fallback
    matrix = best if proven is None else proven
    rank = numerical_rank(matrix, problem.floor(matrix))
    return SensingSolution(matrix * problem.unit, rank, problem.residual(matrix), proven is not None)
