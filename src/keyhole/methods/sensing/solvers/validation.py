"""When a sensing solution is believed, and how far off it may be."""

from __future__ import annotations

import numpy as np
from scipy.linalg import cho_solve

from keyhole.arrays import Floats
from keyhole.methods.sensing.solvers.problem import (
    EPS,
    HELD_OUT,
    SensingProblem,
    SensingSolution,
    cholesky,
    khatri_rao,
    leading_left,
    numerical_rank,
    parameter_count,
)
from keyhole.methods.sensing.solvers.variable_projection import refine


def _tangent(left: Floats, right: Floats, rank: int) -> Floats:  # (m, d), (m, d) -> (m, r (2 d - r))
    """The measurements on an orthonormal basis of the tangent space, in the frame of the singular vectors."""
    return np.hstack([khatri_rao(left[:, :rank], right), khatri_rao(right[:, :rank], left[:, rank:])])


def standard_error(
    U: Floats,  # (m, d)
    G: Floats,  # (m, d)
    matrix: Floats,  # (d, d)
    rank: int,
) -> Floats:  # (d, d)
    """Standard deviation of every entry of a least-squares solution of this rank, to first order.

    For independent errors of the values with standard deviation one: J the measurements on the tangent space,
    the error of its coordinates has covariance (J^T J)^-1, and an entry is a combination of coordinates.
    """
    d = len(matrix)
    u, _, vt = np.linalg.svd(matrix)
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
    u, spectrum, vt = np.linalg.svd(matrix)
    tangent = _tangent(problem.left @ u, problem.right @ vt.T, rank)
    eigenvalues = np.linalg.eigvalsh(tangent.T @ tangent)
    if eigenvalues[0] <= EPS * len(eigenvalues) * eigenvalues[-1]:
        return False
    radius = problem.floor(matrix) * problem.scale / float(np.sqrt(eigenvalues[0]))
    return bool(radius < spectrum[rank - 1])


def _predicts(held: SensingProblem, matrix: Floats, seen: int, parameters: int) -> bool:
    """Whether ``matrix`` predicts unseen measurements, within four standard errors of a prediction."""
    return held.residual(matrix) <= 4.0 * held.floor(matrix) * float(np.sqrt(seen / (seen - parameters)))


def validate(problem: SensingProblem, search: SensingProblem, held: SensingProblem, found: Floats) -> Floats | None:
    """``found`` refitted on every measurement if it proves right, else None."""
    if search.residual(found) > search.floor(found):
        return None
    rank = numerical_rank(found, problem.floor(found))
    count = parameter_count(problem.width, rank)
    if not 0 < count < search.size or not _predicts(held, found, search.size, count):
        return None
    if rank < problem.width:  # at full rank the linear fit is the answer already
        found = refine(problem, leading_left(found, rank), 4, target=0.0)[0].matrix
    fits = problem.residual(found) <= problem.floor(found)
    return found if fits and _is_determined(problem, found, rank) else None


def finish(problem: SensingProblem, found: Floats, used: int, proven: bool, solver: str) -> SensingSolution:
    """The solution in the caller's units."""
    rank = numerical_rank(found, problem.floor(found))
    return SensingSolution(found * problem.unit, rank, problem.residual(found), used, proven, solver)


def all_zero(problem: SensingProblem, solver: str) -> SensingSolution | None:
    """All measurements zero: W = 0, unless they are too few to tell."""
    if problem.values.any():
        return None
    d = problem.width
    enough = problem.size >= parameter_count(d, 1) + HELD_OUT[0]
    return SensingSolution(np.zeros((d, d)), 0, 0.0, 0, enough, solver)
