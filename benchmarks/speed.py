"""Time of a whole recovery over that of the same oracle calls alone, and peak memory, each in its own process."""

from __future__ import annotations

import multiprocessing
import resource
import time

import numpy as np

import keyhole as kh
from benchmarks.heads import Maker, gaussian, low_rank
from benchmarks.tables import markdown

CASES: dict[str, tuple[Maker, int]] = {
    "full rank": (gaussian(1.0), 256),
    "full rank ": (gaussian(1.0), 512),
    "rank 16": (low_rank(16), 1024),
}


def table() -> str:
    rows = []
    for name in CASES:
        # A fresh process each, so that its peak memory is its own.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(_row, (name,)))
    columns = [
        "case",
        "d",
        "queries",
        "total s",
        "oracle s in the run",
        "same calls alone s",
        "total / alone",
        "peak MiB",
    ]
    return markdown(columns, rows)


def _row(name: str) -> list[object]:
    make, width = CASES[name]
    truth = make(width, np.random.default_rng(0))
    kh.recover(kh.FunctionOracle(truth, width=width), seed=0)  # warm up
    best: list[object] = []
    for _ in range(3):
        shapes: list[tuple[int, ...]] = []

        def spy(tokens: np.ndarray, shapes: list[tuple[int, ...]] = shapes) -> np.ndarray:
            shapes.append(tokens.shape)
            return truth(tokens)

        began = time.perf_counter()
        result = kh.recover(kh.FunctionOracle(spy, width=width), seed=0)
        total = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        alone = _alone(truth, shapes)
        row = [
            name.strip(),
            width,
            result.stats.queries,
            total,
            result.stats.oracle_seconds,
            alone,
            total / alone,
            peak,
        ]
        best = row if not best or row[6] < best[6] else best
    return [*best[:3], *(f"{number:.2f}" for number in best[3:7]), f"{best[7]:.0f}"]


def _alone(truth: kh.SingleHead, shapes: list[tuple[int, ...]]) -> float:
    """Seconds for calls of the same shapes, on tokens made beforehand."""
    rng = np.random.default_rng(1)
    tokens = {shape: rng.standard_normal(shape) for shape in set(shapes)}
    began = time.perf_counter()
    for shape in shapes:
        truth(tokens[shape])
    return time.perf_counter() - began
