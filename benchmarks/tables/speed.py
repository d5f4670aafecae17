"""Time of a whole recovery over that of the same oracle calls alone, and peak memory, each in its own process."""

from __future__ import annotations

import multiprocessing
import os
import resource
import time

import numpy as np

import keyhole as kh
from benchmarks.support.heads import Maker, gaussian, low_rank
from benchmarks.support.rows import markdown

CASES: list[tuple[str, Maker, int, int]] = [
    (name, make, width, threads)
    for name, make, width in (
        ("full rank", gaussian(1.0), 256),
        ("full rank", gaussian(1.0), 512),
        ("rank 16", low_rank(16), 1024),
    )
    for threads in (1, 2)
]
RUNS = 7
# Tokens for the calls alone are taken from this many numbers made beforehand, so that they come from memory, not cache.
POOL = 2**25


def table() -> str:
    rows = []
    for number, (_, _, _, threads) in enumerate(CASES):
        # A fresh process each, so that its threads and its peak memory are its own.
        os.environ["OPENBLAS_NUM_THREADS"] = str(threads)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(_row, (number,)))
    columns = ["case", "d", "threads", "queries", "total s", "oracle s in the run", "same calls alone s"]
    return markdown([*columns, "total / alone", "peak MiB"], rows)


def _row(number: int) -> list[object]:
    name, make, width, threads = CASES[number]
    truth = make(width, np.random.default_rng(0))
    shapes: list[tuple[int, ...]] = []

    def spy(tokens: np.ndarray) -> np.ndarray:
        shapes.append(tokens.shape)
        return truth(tokens)

    result = kh.recover(kh.FunctionOracle(spy, width=width, name="spy"), "single-head", seed=0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    totals, inside, alone = [], [], []
    pool = np.random.default_rng(1).standard_normal(POOL)
    for _ in range(RUNS if width < 512 else 3):
        began = time.perf_counter()
        stats = kh.recover(kh.FunctionOracle(truth, width=width), "single-head", seed=0).stats
        totals.append(time.perf_counter() - began)
        inside.append(stats.oracle_seconds)
        alone.append(_alone(truth, shapes, pool))
    middle = [float(np.median(each)) for each in (totals, inside, alone)]
    times = [f"{seconds:.3f}" for seconds in middle]
    return [name, width, threads, result.stats.queries, *times, f"{middle[0] / middle[2]:.2f}", f"{peak:.0f}"]


def _alone(truth: kh.SingleHead, shapes: list[tuple[int, ...]], pool: np.ndarray) -> float:
    """Seconds for calls of the same shapes on tokens made beforehand."""
    began, start = time.perf_counter(), 0
    for shape in shapes:
        size = int(np.prod(shape))
        start = start if start + size <= pool.size else 0
        truth(pool[start : start + size].reshape(shape))
        start += size
    return time.perf_counter() - began
