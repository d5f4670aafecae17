"""Boxes of growing size, and the exponents with which queries and time grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.cli.bench.costs import Costs

# Sizes that a fit takes, the largest: below them constants tell more than growth.
FITTED = 3


@dataclass(frozen=True)
class Series:
    """Boxes that differ in one size."""

    name: str
    letter: str  # of the size
    target: str  # with {} for the size
    method: str
    sizes: tuple[int, ...]
    quick: tuple[int, ...]  # sizes that take seconds
    law: float  # the exponent of the counting bound

    def boxes(self, *, quick: bool) -> list[tuple[int, str]]:
        """Sizes and their boxes."""
        return [(size, self.target.format(size)) for size in (self.quick if quick else self.sizes)]


SERIES = (
    Series("full rank", "d", "demo:single-head?width={}", "single-head", (64, 128, 256, 512), (64, 128, 256), 2.0),
    Series(
        "rank 8", "d", "demo:single-head?width={}&rank=8", "single-head", (128, 256, 512, 1024), (64, 128, 256), 1.0
    ),
    Series(
        "d = 256, rank r",
        "r",
        "demo:single-head?width=256&rank={}",
        "single-head",
        (2, 4, 8, 16, 32),
        (2, 4, 8, 16),
        1.0,
    ),
    Series(
        "d = 32, H heads",
        "H",
        "demo:multi-head?heads={}&width=32&outputs=32",
        "multi-head",
        (2, 4, 8, 16),
        (2, 4, 6),
        1.0,
    ),
)


@dataclass(frozen=True)
class Growth:
    """How costs grow with a size: queries, the counting bound of the same boxes, and the learner's own time."""

    series: Series
    sizes: tuple[int, ...]
    costs: tuple[Costs, ...]

    @property
    def queries(self) -> float:
        """The exponent of queries."""
        return exponent(self.sizes, [each.queries for each in self.costs])

    @property
    def bound(self) -> float:
        """The exponent of the counting bound."""
        return exponent(self.sizes, [each.results[0].stats.counting_bound for each in self.costs])

    @property
    def own_seconds(self) -> float:
        """The exponent of the learner's own time."""
        return exponent(self.sizes, [each.own_seconds for each in self.costs])

    def summary(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "series": self.series.name,
            "size": self.series.letter,
            "sizes": self.sizes,
            "law": self.series.law,
            "queries": self.queries,
            "counting_bound": self.bound,
            "own_seconds": self.own_seconds,
        }


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """The slope of costs over sizes, both logarithms, of the largest sizes; nan where a cost is none."""
    some = slice(-FITTED, None)
    if min(costs[some]) <= 0:
        return float("nan")
    return float(np.polyfit(np.log(sizes[some]), np.log(costs[some]), 1)[0])
