"""Several recoveries of one box, and what they cost."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from statistics import median
from typing import Any

from keyhole.progress import InterruptCheck
from keyhole.recovery import Recovery
from keyhole.runs.execute import execute
from keyhole.runs.settings import Settings

Measured = tuple[Recovery, float | None]  # and its distance from the truth, where that is known


def measure(settings: Settings) -> Measured:
    """One recovery, here or in a worker. What the code of a box prints is not part of the table."""
    with redirect_stdout(sys.stderr):
        ending = execute(settings, InterruptCheck())
    return ending.result, ending.distance


@dataclass(frozen=True)
class Costs:
    """Several recoveries of one box, which differ in the seed of the method."""

    target: str
    results: tuple[Recovery, ...]
    distances: tuple[float | None, ...]  # from the truth, where it is known

    @classmethod
    def of(cls, target: str, found: list[Measured]) -> Costs:
        """Of what was measured."""
        return cls(target, tuple(result for result, _ in found), tuple(distance for _, distance in found))

    @property
    def certified(self) -> int:
        """How many recoveries were."""
        return sum(result.certified for result in self.results)

    @property
    def queries(self) -> float:
        """The median, without the certificate's."""
        return median(result.stats.queries for result in self.results)

    @property
    def own_seconds(self) -> float:
        """The median of the learner's own time."""
        return median(result.stats.seconds - result.stats.oracle_seconds for result in self.results)

    def summary(self) -> dict[str, Any]:
        """Medians of what it cost, and the worst distance of a certified result from the truth, as plain data."""
        stats = [result.stats for result in self.results]
        own = [stat.seconds / stat.oracle_seconds for stat in stats if stat.oracle_seconds > 0]
        pairs = zip(self.distances, self.results, strict=True)
        known = [distance for distance, result in pairs if distance is not None and result.certified]
        return {
            "target": self.target,
            "method": self.results[0].method,
            "runs": len(self.results),
            "certified": self.certified,
            "outcomes": [result.outcome.name for result in self.results],
            "queries": self.queries,
            "counting_bound": stats[0].counting_bound,
            "ratio": median(stat.ratio for stat in stats) if stats[0].counting_bound else None,
            "heldout_queries": median(stat.heldout_queries for stat in stats),
            "seconds": median(stat.seconds for stat in stats),
            "oracle_seconds": median(stat.oracle_seconds for stat in stats),
            "own_seconds": self.own_seconds,
            "seconds_over_oracle": median(own) if own else None,
            "worst_distance": max(known) if known else None,
        }
