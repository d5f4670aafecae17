"""Rounds of plans that wait for each other, by method, and what they leave of 16 requests at a time.

A request is one sequence. The critical path is how many requests follow one another where 16 are under way at most:
the time of a recovery over that of one request, where the endpoint is slow and the learner quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any
from unittest import mock

import keyhole as kh
from benchmarks.support.rows import Kept, Row, markdown
from keyhole.oracles import Oracle
from keyhole.queries import Measurements, Plan
from keyhole.session import Session
from keyhole.targets import open_target

AT_ONCE = 16
CASES = (
    ("demo:single-head?width=16", "single-head"),
    ("demo:single-head?width=32", "single-head"),
    ("demo:single-head?width=64", "single-head"),
    ("demo:single-head?width=64&rank=4", "single-head"),
    ("demo:single-head?width=16&noise=1e-3", "robust"),
    ("demo:multi-head?heads=4&width=16&outputs=16", "multi-head"),
    ("demo:multi-head?heads=4&width=32&outputs=32", "multi-head"),
    ("demo:multi-head?heads=8&width=32&outputs=32", "multi-head"),
    ("demo:multi-head?heads=4&width=16", "multi-head"),
    ("demo:multi-head?heads=4&width=32", "multi-head"),
    ("demo:relu-net?width=8&neurons=16", "relu-net"),
    ("demo:relu-net?width=16&neurons=32", "relu-net"),
    ("demo:one-layer?width=8&neurons=16", "one-layer"),
    ("demo:single-head?width=8&labels=1", "labels"),
    ("demo:single-head?width=16&labels=1", "labels"),
    ("demo:single-head?alphabet=32", "alphabet"),
)


class Rounds(Session):
    """Counts what is asked together."""

    def __init__(self, oracle: Oracle, **options: Any) -> None:
        super().__init__(oracle, **options)
        COUNTS.clear()

    def measure_all(self, plans: Sequence[Plan]) -> list[Measurements]:
        COUNTS.append(sum(plan.count * plan.repeats for plan in plans))
        return super().measure_all(plans)


COUNTS: list[int] = []


def counted(oracle: Oracle, method: str) -> tuple[kh.Recovery, list[int]]:
    """A recovery, and the queries of each of its rounds."""
    with mock.patch("keyhole.recover.Session", Rounds):
        return kh.recover(oracle, method, throw=False), list(COUNTS)


def table(kept: Kept) -> str:
    rows = kept.rows_of("", {f"{target} {method}": lambda t=target, m=method: row(t, m) for target, method in CASES})
    columns = ["box", "method", "outcome", "queries", "rounds", "critical path at 16", "at most so many times as fast"]
    return markdown(columns, rows)


def row(target: str, method: str) -> Row:
    result, counts = counted(open_target(target).oracle, method)
    queries, path = sum(counts), sum(ceil(count / AT_ONCE) for count in counts)
    times = f"{queries / path:.1f}"
    return [f"`{target}`", method, result.outcome.name, queries, len([each for each in counts if each]), path, times]
