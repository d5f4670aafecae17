"""Time of a whole recovery over that of the same oracle calls alone, and peak memory, each in its own process.

Ratios are medians over runs that alternate with the calls alone: of the clock, and of processor time, which other work
on the machine disturbs less.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

import keyhole as kh
from benchmarks.support.heads import Maker, gaussian, low_rank
from benchmarks.support.rows import Kept, Row, markdown

CASES: list[tuple[str, Maker, int, int, bool]] = [
    (name, make, width, threads, kept)
    for name, make, width, kept in (
        ("full rank", gaussian(1.0), 256, False),
        ("full rank", gaussian(1.0), 512, False),
        ("full rank, with a journal", gaussian(1.0), 512, True),
        ("rank 16", low_rank(16), 1024, False),
    )
    for threads in (1, 2)
]
METHOD = "single-head"
RUNS = 7
# Tokens for the calls alone are taken from this many numbers made beforehand, so that they come from memory, not cache.
POOL = 2**25


def table(kept: Kept) -> str:
    measured = {
        f"{name} {width}, {threads} thread{'s' * (threads > 1)}": partial(_apart, number)
        for number, (name, _, width, threads, _) in enumerate(CASES)
    }
    columns = ["case", "d", "threads", "queries", "total s", "oracle s in the run", "same calls alone s"]
    return markdown([*columns, "total / alone", "by processor time", "peak MiB"], kept.rows_of("", measured))


def _apart(number: int) -> Row:
    """A row from a fresh process, so that its threads and its peak memory are its own."""
    os.environ["OPENBLAS_NUM_THREADS"] = str(CASES[number][3])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_row, (number,))


def _row(number: int) -> Row:
    name, make, width, threads, kept = CASES[number]
    truth = make(width, np.random.default_rng(0))
    shapes: list[tuple[int, ...]] = []

    def spy(tokens: np.ndarray) -> np.ndarray:
        shapes.append(tokens.shape)
        return truth(tokens)

    result = kh.recover(kh.FunctionOracle(spy, width=width, name="spy"), METHOD, seed=0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    totals, inside, alone, works = [], [], [], []
    pool = np.random.default_rng(1).standard_normal(POOL)
    for _ in range(RUNS if width < 512 else 3):
        with tempfile.TemporaryDirectory() as folder:
            journal = Path(folder) / "book.db" if kept else None
            began, before = time.perf_counter(), time.process_time()
            stats = kh.recover(kh.FunctionOracle(truth, width=width, name="it"), METHOD, seed=0, journal=journal).stats
            totals.append(time.perf_counter() - began)
            inside.append(stats.oracle_seconds)
            between = time.process_time()
            alone.append(_alone(truth, shapes, pool))
            works.append((between - before) / (time.process_time() - between))
    times = [f"{float(np.median(each)):.3f}" for each in (totals, inside, alone)]
    ratio = float(np.median(np.divide(totals, alone)))
    ratios = [f"{ratio:.2f}", f"{float(np.median(works)):.2f}"]
    return [name, width, threads, result.stats.queries, *times, *ratios, f"{peak:.0f}"]


def _alone(truth: kh.SingleHead, shapes: list[tuple[int, ...]], pool: np.ndarray) -> float:
    """Seconds for calls of the same shapes on tokens made beforehand."""
    began, start = time.perf_counter(), 0
    for shape in shapes:
        size = int(np.prod(shape))
        start = start if start + size <= pool.size else 0
        truth(pool[start : start + size].reshape(shape))
        start += size
    return time.perf_counter() - began
