"""How many measurements `sensing` needs: share of seeds that are exact, by multiples of r(2d − r), both solvers."""

from __future__ import annotations

import time

import numpy as np

import keyhole as kh
from benchmarks.support.heads import low_rank
from benchmarks.support.rows import markdown

WIDTH = 64
RANKS = (2, 4)
MULTIPLES = (1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
SEEDS = {"factored": 20, "nuclear-norm": 10}
EXACT = 1e-8
NOTE = (
    "The rank is not given. `nuclear-norm` is the convex program, which names rank and start, and the least-squares "
    "polish after it; below 2.5 to 3 × the convex program alone is not exact. At 1.00 × nothing is left to check "
    "a solution with, so none is claimed."
)


def table() -> str:
    rows = [_row(solver, rank, multiple) for solver in SEEDS for rank in RANKS for multiple in MULTIPLES]
    columns = ["solver", "d", "r", "measurements / r(2d − r)", "measurements", "certified and exact (≤ 1e-8)"]
    columns += ["certified but wrong", "relative error: median, worst", "seconds per run"]
    return f"{markdown(columns, rows)}\n\n{NOTE}"


def _row(solver: str, rank: int, multiple: float) -> list[object]:
    count = round(multiple * rank * (2 * WIDTH - rank))
    errors, wrong, began = [], 0, time.perf_counter()
    for seed in range(SEEDS[solver]):
        truth = low_rank(rank)(WIDTH, np.random.default_rng([WIDTH, rank, seed]))
        oracle = kh.FunctionOracle(truth, width=WIDTH)
        result = kh.recover(oracle, "sensing", seed=seed, throw=False, solver=solver, measurements=count)
        if result.certified:
            error = kh.distance(result.params, truth)
            misses = not np.all(np.abs(result.params.score - truth.score) <= result.certificate.radius.score)
            wrong += error > EXACT or misses
            errors += [error] if error <= EXACT else []
    seconds = (time.perf_counter() - began) / SEEDS[solver]
    spread = f"{np.median(errors):.1e}, {max(errors):.1e}" if errors else "–"
    share = f"{len(errors)} / {SEEDS[solver]}"
    return [solver, WIDTH, rank, f"{multiple:.2f}", count, share, wrong, spread, f"{seconds:.2f}"]
