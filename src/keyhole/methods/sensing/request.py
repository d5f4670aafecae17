"""What is asked of low-rank sensing, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, ArrayTable, Floats, floats
from keyhole.errors import UsageError
from keyhole.methods.forms.reader import Forms
from keyhole.methods.sensing.solvers import parameter_count, recommended_measurements

SOLVERS = ("factored", "nuclear-norm")
# How tokens are drawn: so that every answer shows its weight well, or all entries independent and normal.
ENSEMBLES = ("even", "gaussian")
# A rank that is not given is first looked for among those that this one's recommendation can tell.
FIRST_GUESS = 2
# Batches for it grow to the number of entries, or to this, or to four times the first: then a search takes a minute.
MOST_FOUND = 4096
# From so many times the parameters of the score matrix the least nuclear norm is the score matrix by itself; with fewer
# it is only a start from which a least-squares polish finds it.
CONVEX_MULTIPLE = 2.5


@dataclass(frozen=True)
class Request:
    """The options of low-rank sensing."""

    rank: int | None
    solver: str
    measurements: int | None
    ensemble: str

    def __post_init__(self) -> None:
        for name, known in (("solver", SOLVERS), ("ensemble", ENSEMBLES)):
            if getattr(self, name) not in known:
                raise UsageError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        for name in ("rank", "measurements"):
            number = getattr(self, name)
            if number is not None and (not isinstance(number, int | np.integer) or number < 1):
                raise UsageError(f"{name} must be a whole number of at least 1 or None, not {number!r}")

    def recommended(self, width: int, rank: int) -> int:
        """Measurements from which the solver is sure: 99 of 100 draws, and for the nuclear norm without a polish."""
        least = recommended_measurements(width, rank)
        if self.solver == "factored":
            return least
        return max(least, round(CONVEX_MULTIPLE * parameter_count(width, rank)))

    def totals(self, width: int) -> list[int]:
        """How many measurements there are after each batch: one batch, or doubled until the rank is found.

        Never more than there are entries, but for widths of five or less, where those are too few to check anything.
        """
        if self.measurements is not None or self.rank is not None:
            return [self.measurements or self.recommended(width, self.rank or 1)]
        first = self.recommended(width, min(FIRST_GUESS, width))
        most = max(min(width**2, max(4 * first, MOST_FOUND)), self.recommended(width, 1))
        totals = [min(first, most)]
        while totals[-1] < most:
            totals.append(min(2 * totals[-1], most))
        return totals

    def largest_rank(self, width: int, count: int) -> int:
        """The largest rank that `count` measurements are recommended for; 0 when there is none."""
        return max((rank for rank in range(1, width + 1) if self.recommended(width, rank) <= count), default=0)


@dataclass(frozen=True)
class FormData(ArrayTable):
    """Measurements left[k]ᵀ · score · right[k] as read."""

    left: Floats  # (m, d)
    right: Floats  # (m, d)
    values: Floats  # (m,)
    radius: Floats  # (m,)

    @classmethod
    def of(cls, rows: Array, columns: Array, forms: Forms) -> FormData:
        """The last token is not always short against the first: what is read is (row − ratio·column)ᵀ·score·column."""
        left, right, values, radius, ratio = (
            floats(array) for array in (rows, columns, forms.values, forms.radius, forms.ratio)
        )
        return cls(left - ratio[:, None] * right, right, values, radius)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.values)

    @property
    def silent(self) -> bool:
        """Whether none can be told from zero."""
        return bool(np.all(np.abs(self.values) <= self.radius))

    @property
    def noise(self) -> float:
        """How large the radii are against the values."""
        return float(np.linalg.norm(self.radius) / np.linalg.norm(self.values))

    def even(self) -> FormData:
        """Weighted so that all have the radius of the best one: the weights of a least-squares fit."""
        weights = self.radius.min() / self.radius
        return FormData(self.left * weights[:, None], self.right, self.values * weights, self.radius * weights)
