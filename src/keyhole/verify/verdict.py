"""What comes of a verification: one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from keyhole.optional import on_demand

Conclusion = Literal["same", "different", "inconclusive"]


@dataclass(frozen=True)
class Difference:
    """Where an oracle differs from the parameters, as far as its answers tell."""

    head: int | None  # the number of the head; None where there is one head only, or the part belongs to none
    part: str | None  # score, value, score_bias and so on; None: a head, but which of its parts cannot be said
    size: float  # about how much of the part has changed, relatively

    def __str__(self) -> str:
        part = (self.part or "").replace("_", " ")
        where = part if self.head is None else f"the {part} of head {self.head}" if part else f"head {self.head}"
        return f"{where or 'it'} by about {self.size:.2g}"


@dataclass(frozen=True, repr=False)
class Verdict:
    """Whether an oracle answers like given parameters.

    `same` is a statement about the queries asked, and with the stated probabilities about changes of one part of the
    parameters in a random direction. No finite number of queries excludes an oracle made to deceive.
    """

    conclusion: Conclusion
    message: str  # the particulars: figures, cause, remedy
    queries: int  # sequences asked, journal included
    new_queries: int = 0  # those that reached the oracle now
    worst_error: float = float("nan")  # largest |prediction − answer|
    worst_ratio: float = float("nan")  # largest |prediction − answer| over its radius; different iff above 1
    tolerance: float | None = None  # relative changes of parts up to this do not count
    false_alarm: float = 0.0  # probability of `different` for an oracle that is the same and errs as declared
    miss: float = float("nan")  # probability that a change of `resolution` in one part goes unnoticed, at most
    resolution: float = float("nan")  # the smallest relative change of any part that is noticed but for `miss`
    parts: Mapping[str, float] = field(default_factory=dict)  # the same by part
    differing: tuple[Difference, ...] = ()  # where it differs, where that can be said
    changes: Mapping[str, float] = field(default_factory=dict)  # where different: about how much of each part
    ratios: tuple[float, ...] = ()  # |prediction − answer| over its radius, the largest of each query
    noise: str | None = None  # how answers err, where that was found out and not declared
    noise_evidence: str | None = None

    @property
    def same(self) -> bool:
        """Whether the oracle was found to be the same."""
        return self.conclusion == "same"

    @property
    def confidence(self) -> float:
        """Of `same`, against a change of `resolution` in one part; of `different`, against a false alarm; else 0."""
        if self.conclusion == "inconclusive":
            return 0.0
        return 1.0 - (self.miss if self.same else self.false_alarm)

    def by_head(self) -> dict[str, float]:
        """The largest change of any part of each head, or of each part that belongs to none, by name."""
        heads: dict[str, float] = {}
        for part, size in self.changes.items():
            _, of, head = part.partition(" of ")
            name = head if of else part
            heads[name] = max(size, heads.get(name, 0.0))
        return heads

    def __repr__(self) -> str:
        """The verdict in words, not all of its figures."""
        return f"Verdict({self.conclusion}: {self.message}; {self.queries} queries)"

    def _repr_html_(self) -> str:
        """A card for notebooks."""
        card: str = on_demand("report.notebook").card_of_verdict(self)
        return card

    def summary(self) -> dict[str, Any]:
        """Everything, as plain data for JSON."""
        names = ("conclusion", "message", "queries", "new_queries", "worst_error", "worst_ratio", "tolerance")
        said = {name: getattr(self, name) for name in names}
        said |= {name: getattr(self, name) for name in ("confidence", "false_alarm", "miss", "resolution")}
        said |= {"changes": dict(self.changes), "ratios": list(self.ratios)}
        said |= {"parts": dict(self.parts), "noise": self.noise, "noise_evidence": self.noise_evidence}
        said |= {"differing": [{"head": d.head, "part": d.part, "size": d.size} for d in self.differing]}
        return {
            name: None if isinstance(value, float) and not np.isfinite(value) else value for name, value in said.items()
        }
