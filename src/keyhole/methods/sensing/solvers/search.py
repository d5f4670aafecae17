"""Searches for low-rank sensing: by W = L R^T, and by nuclear-norm minimisation.

The first is local, from the spectral start, with reweighted least squares where that fails; the second is ADMM, then a
polish on the rank it names.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.linalg import cho_solve

from keyhole.arrays import Floats
from keyhole.methods.sensing.solvers.problem import (
    EPS,
    SensingProblem,
    SensingSolution,
    cholesky,
    gap_rank,
    gram_part,
    largest_rank,
    leading_left,
    linear,
    parameter_count,
)
from keyhole.methods.sensing.solvers.validation import FIRST_STEPS, refine, solve
from keyhole.numerics.svd import singular_values, svd

_LOCAL_RANKS = 8  # ranks tried one by one; beyond, letting the reweighted iteration name the rank is cheaper


def _reweigh(problem: SensingProblem, shrink: float, start: Floats | None) -> Iterator[tuple[Floats, Floats]]:
    """Iterates (W, spectrum) of harmonic-mean reweighted least squares for the log-det surrogate of the rank.

    Each step minimises <X, H X> subject to A(X) = b, H^-1 X = (M1 X + X M2) / 2 with M1 = W W^T + s^2 and
    M2 = W^T W + s^2, while s shrinks. Needs no rank, and gets far closer to the counting bound than a local
    search, at the price of an (m, m) Cholesky factor per step.
    """
    left_gram, right_gram = problem.left @ problem.left.T, problem.right @ problem.right.T
    matrix = problem.adjoint(cho_solve(cholesky(left_gram * right_gram), problem.values, check_finite=False))
    if start is not None:
        matrix = matrix + start * float(np.linalg.norm(matrix))
    smoothing = float(np.linalg.norm(matrix, 2))
    last = np.sqrt(EPS) * smoothing
    while smoothing > last:
        u, spectrum, vt = svd(matrix, full_matrices=True)
        smoothing *= shrink
        weights = (spectrum**2 + smoothing**2) / 2.0
        a, c = problem.left @ u, problem.right @ vt.T
        gram = ((a * weights) @ a.T) * right_gram + left_gram * ((c * weights) @ c.T)
        dual = problem.adjoint(cho_solve(cholesky(gram), problem.values, check_finite=False))
        matrix = (u * weights) @ (u.T @ dual) + (dual @ vt.T * weights) @ vt
        yield matrix, spectrum


def _second_pass(
    search: SensingProblem, rank: int | None, limit: int, starts: int, rng: np.random.Generator
) -> Iterator[Floats]:
    """Reweighted starts, each polished whenever its spectral gap has grown enough to name a rank."""
    d = search.width
    part = gram_part(search)
    for attempt in range(starts):
        start = rng.standard_normal((d, d)) / d if attempt else None
        shrink = 0.85 if attempt == 0 else 0.9  # slower is safer and dearer
        wanted = 100.0
        for matrix, spectrum in _reweigh(part, shrink, start):
            guess, ratio = gap_rank(spectrum, rank or limit)
            if rank:
                below = EPS * float(spectrum[0]) if rank < len(spectrum) else np.inf
                gap = float(spectrum[rank - 1] / max(float(spectrum[min(rank, len(spectrum) - 1)]), below))
                guess, ratio = (rank, gap) if gap > wanted else (guess, ratio)
            if guess and ratio > wanted:
                wanted *= 30.0
                yield refine(part, leading_left(matrix, guess), FIRST_STEPS)


def factored(
    U: Floats,  # (m, d)
    G: Floats,  # (m, d)
    b: Floats,  # (m,)
    rank: int | None = None,
    *,
    rng: np.random.Generator | None = None,
    noise: float = 0.0,
    max_rank: int | None = None,
    starts: int = 4,  # of reweighted least squares; 0: the local search alone
) -> SensingSolution:
    """Low-rank W from ``b[k] = U[k] @ W @ G[k]``, rank given or found.

    Ranks are tried upwards by Levenberg-Marquardt with the right factor eliminated; if none validates,
    reweighted least squares proposes rank and start. A rank that is given is tried first, and may turn out
    lower. A rank with as many parameters as measurements is never accepted. ``noise`` is the relative error
    ||e|| / ||b|| of the values; without it only a fit down to rounding counts.

    Measured from the same spectral start at 2 x the parameter count, d = 64, r = 2, each 6 of 6 exact:
    variable projection 0.011 s, alternating least squares 0.087 s, ``scipy.optimize.least_squares`` 0.55 s.
    The time is bounded by ``max_rank`` and ``starts``.
    """

    def candidates(search: SensingProblem, rng: np.random.Generator) -> Iterator[tuple[None, Floats]]:
        d, limit = search.width, min(largest_rank(search), max_rank or search.width)
        ranks = range(1, min(limit, _LOCAL_RANKS) + 1) if rank is None else range(rank, min(rank, limit) + 1)
        for tried in ranks:  # from the spectral start, on no more measurements than the rank needs
            part = search.rows(slice(0, 4 * parameter_count(d, tried) + 4 * d))
            yield None, refine(part, leading_left(part.adjoint(part.values), tried), FIRST_STEPS)
        yield from ((None, matrix) for matrix in linear(search))
        if ranks:
            yield from ((None, matrix) for matrix in _second_pass(search, rank, limit, starts, rng))

    return solve(U, G, b, noise, rng, candidates)


def _admm(problem: SensingProblem, steps: int) -> Iterator[tuple[Floats, Floats, float]]:
    """Iterates (feasible X, low-rank Z, disagreement) of ADMM for min ||Z||_* with A(X) = b and X = Z."""
    factor = cholesky((problem.left @ problem.left.T) * (problem.right @ problem.right.T))
    low = np.zeros((problem.width, problem.width))
    dual, threshold = np.zeros_like(low), 0.0
    for _ in range(steps):
        point = low - dual
        miss = cho_solve(factor, problem.forward(point) - problem.values, check_finite=False)
        feasible = point - problem.adjoint(miss)
        u, spectrum, vt = svd(feasible + dual)
        threshold = threshold or float(spectrum[0]) / 4.0
        previous, low = low, (u * np.maximum(spectrum - threshold, 0.0)) @ vt
        dual += feasible - low
        size = max(float(np.linalg.norm(feasible)), float(np.finfo(np.float64).tiny))
        primal, change = float(np.linalg.norm(feasible - low)), float(np.linalg.norm(low - previous))
        yield feasible, low, max(primal, change) / size
        factor_up = 2.0 if change > 10.0 * primal else 0.5 if primal > 10.0 * change else 1.0
        threshold, dual = threshold * factor_up, dual * factor_up  # balance; the scaled dual follows


def _convex(search: SensingProblem, steps: int, max_rank: int) -> Iterator[tuple[Floats, Floats]]:
    """(feasible point, polished candidate) at each tolerance met and at the end."""
    part, limit = gram_part(search), min(largest_rank(search), max_rank)
    if not limit:
        return
    feasible = low = part.adjoint(part.values)
    wanted = EPS**0.25  # the spectral gap shows early; the last digits are left to the polish
    for feasible, low, gap in _admm(part, steps):
        rank, _ = gap_rank(np.asarray(singular_values(low)), limit) if gap <= wanted else (0, 1.0)
        if rank:
            yield feasible, refine(part, leading_left(low, rank), FIRST_STEPS)
            if wanted <= np.sqrt(EPS):
                return
            wanted *= EPS**0.125
    yield feasible, low


def nuclear_norm(
    U: Floats,  # (m, d)
    G: Floats,  # (m, d)
    b: Floats,  # (m,)
    *,
    rng: np.random.Generator | None = None,
    noise: float = 0.0,
    max_rank: int | None = None,
    max_iterations: int = 2000,
) -> SensingSolution:
    """W of least nuclear norm with ``U[k] @ W @ G[k] = b[k]``, by ADMM.

    The convex program names the rank (largest gap in its spectrum); a short least-squares polish on that rank
    then removes the first-order method's error. The polish is legitimate because its answer must still
    predict held-out measurements; where no polish validates, the convex solution is returned, unconverged.
    The convex program alone is right from 2.5 to 3 x the parameter count (d = 64, r = 2 and 4); between 1.5 x
    and there it only supplies the start from which the polish finds W.

    Measured at 3 x the parameter count, r = 2, d = 16 / 32 / 64: this ADMM takes 0.01 / 0.05 / 0.37 s to
    3e-8, cvxpy with SCS 0.13 / 0.83 / 7.2 s to 1e-6, with Clarabel 0.22 / 4.3 / over 150 s to 3e-8.
    """

    def candidates(search: SensingProblem, _: np.random.Generator) -> Iterator[tuple[Floats, Floats]]:
        for matrix in linear(search):  # where measurements outnumber the entries, the feasible set is one point
            yield matrix, matrix
        yield from _convex(search, max_iterations, max_rank or search.width)

    return solve(U, G, b, noise, rng, candidates)
