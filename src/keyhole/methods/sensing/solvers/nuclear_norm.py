"""Low-rank sensing by nuclear-norm minimisation: ADMM, then a polish on the rank it names."""

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
)
from keyhole.methods.sensing.solvers.validation import FIRST_STEPS, refine, solve


def _admm(problem: SensingProblem, steps: int) -> Iterator[tuple[Floats, Floats, float]]:
    """Iterates (feasible X, low-rank Z, disagreement) of ADMM for min ||Z||_* with A(X) = b and X = Z."""
    factor = cholesky((problem.left @ problem.left.T) * (problem.right @ problem.right.T))
    low = np.zeros((problem.width, problem.width))
    dual, threshold = np.zeros_like(low), 0.0
    for _ in range(steps):
        point = low - dual
        miss = cho_solve(factor, problem.forward(point) - problem.values, check_finite=False)
        feasible = point - problem.adjoint(miss)
        u, spectrum, vt = np.linalg.svd(feasible + dual, full_matrices=False)
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
        rank, _ = gap_rank(np.asarray(np.linalg.svd(low, compute_uv=False)), limit) if gap <= wanted else (0, 1.0)
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
        for found in linear(search):  # where measurements outnumber the entries, the feasible set is one point
            yield found, found
        yield from _convex(search, max_iterations, max_rank or search.width)

    return solve(U, G, b, noise, rng, candidates)
