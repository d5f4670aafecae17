"""Slow boxes asked by many: workers of a Dask cluster, one of them killed, and 16 requests at a time.

A box of 5 ms takes that for every sequence, as one that computes; one of 20 ms for every request of one sequence, as
one far away. All sleep, so that cores of this machine do not limit them. The same result is one at a distance of
rounding, of as many queries; nothing counted twice, that the journal holds each of them once.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import keyhole as kh
from benchmarks.support.rows import Kept, Row, markdown
from keyhole.oracles import FunctionOracle, Oracle, Wrapper
from keyhole.targets import open_target

COMPUTES, FAR, WORKERS, AT_ONCE = 0.005, 0.02, 4, 16
REMOTE = (
    ("demo:single-head?width=64", "single-head"),
    ("demo:multi-head?heads=4&width=32&outputs=32", "multi-head"),
    ("demo:multi-head?heads=8&width=32&outputs=32", "multi-head"),
    ("demo:multi-head?heads=4&width=32", "multi-head"),
    ("demo:relu-net?width=16&neurons=32", "relu-net"),
    ("demo:single-head?width=16&labels=1", "labels"),
)
SHARED = "demo:single-head?width=128"


class Slow(Wrapper, stateful=False):
    """Takes so many seconds for a sequence."""

    def __init__(self, inner: Oracle, seconds: float) -> None:
        super().__init__(inner)
        self.seconds = seconds

    def answer(self, tokens: Any) -> Any:
        time.sleep(self.seconds * len(tokens))
        return super().answer(tokens)


def table(kept: Kept) -> str:
    shared = kept.rows_of(
        "workers", {"dask": lambda: by_dask(killed=False), "dask, one worker killed": lambda: by_dask(killed=True)}
    )
    columns = ["workers", "queries", "by one, s", "by all, s", "times as fast", "distance", "queries in the journal"]
    first = markdown(columns, shared)
    far = kept.rows_of(
        "remote", {f"{target} {method}": lambda t=target, m=method: remote(t, m) for target, method in REMOTE}
    )
    columns = [
        "box",
        "method",
        "queries",
        "one at a time, s",
        "16 at a time, s",
        "of the processor, s",
        "times as fast",
        "outcome",
    ]
    load = f"Load average at the end: {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores; idle, it would be below 2."
    return (
        f"Dask, {WORKERS} workers, a box of 5 ms.\n\n{first}\n\nA box 20 ms away.\n\n{markdown(columns, far)}\n\n{load}"
    )


@cache
def by_one() -> tuple[Oracle, float, kh.Recovery]:
    oracle = Slow(open_target(SHARED).oracle, COMPUTES)
    return oracle, *timed(lambda: kh.recover(oracle, "single-head"))


def by_dask(*, killed: bool) -> Row:
    from distributed import LocalCluster

    oracle, alone, expected = by_one()
    options: dict[str, Any] = {"threads_per_worker": 1, "dashboard_address": ":0", "silence_logs": 50}
    with LocalCluster(n_workers=WORKERS, **options) as cluster, tempfile.TemporaryDirectory() as folder:
        book = Path(folder) / "book.db"
        kh.recover(open_target("demo:single-head?width=8").oracle, dask=cluster.scheduler_address)  # imports
        victim = next(iter(cluster.workers.values())).process.pid
        timer = threading.Timer(alone / 10, os.kill, (victim, signal.SIGKILL))
        if killed:
            timer.start()
        seconds, found = timed(lambda: kh.recover(oracle, "single-head", journal=book, dask=cluster.scheduler_address))
        with closing(sqlite3.connect(book)) as database:
            ((kept,),) = database.execute("SELECT sum(stop - start) FROM answers")
    all_queries = found.stats.queries + found.stats.heldout_queries
    assert all_queries == expected.stats.queries + expected.stats.heldout_queries
    who = f"{WORKERS}, one killed" if killed else WORKERS
    apart = f"{kh.distance(found.params, expected.params):.1e}"
    return [who, all_queries, f"{alone:.1f}", f"{seconds:.1f}", f"{alone / seconds:.2f}", apart, kept]


def remote(target: str, method: str) -> Row:
    inner = open_target(target).oracle

    def far(tokens: np.ndarray) -> np.ndarray:
        time.sleep(FAR)
        return inner(tokens)

    signature = inner.signature
    oracle = FunctionOracle(far, signature.width, answers=signature.answers, batch_limit=1, name="far away")
    serial, expected = timed(lambda: kh.recover(oracle, method, concurrency=1))
    before = time.process_time()
    together, found = timed(lambda: kh.recover(oracle, method, concurrency=AT_ONCE))
    work = f"{time.process_time() - before:.1f}"
    queries = found.stats.queries + found.stats.heldout_queries
    assert queries == expected.stats.queries + expected.stats.heldout_queries
    times = f"{serial / together:.1f}"
    return [f"`{target}`", method, queries, f"{serial:.1f}", f"{together:.1f}", work, times, found.outcome.name]


def timed(work: Callable[[], kh.Recovery]) -> tuple[float, kh.Recovery]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result
