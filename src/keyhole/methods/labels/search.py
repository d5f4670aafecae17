"""Bisection of many numbers at once, by comparisons of which some may be answered wrongly. Nothing here asks.

Every number has a prior, and the next comparison is with the median of what is known of it, moved to the nearest edge
of a grid: with right answers each gains nearly a bit, and a number is found once it lies within one cell. Of answers
that are wrong at a known rate the posterior is kept, piecewise between the numbers compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import ndtr

from keyhole.arrays import Booleans, Floats, Integers

# The prior of matrix entries: normal, but for a share of a Cauchy law, so that outliers are found too.
OUTLIERS = 0.05
# Entries are sought within so many scales. No entry of d² is larger than d root mean squares.
LIMIT = 1e9
# Within so small a part of the scale, or of the number itself, the prior is flat.
FLAT = 1.0 / 16.0
TABLE = 8192
CENTRE = 1e-3  # points this near to the centre, over the scale, are the centre
# Intervals this much larger than the spacing of floating-point numbers can still be halved.
SPACINGS = 4.0
# Intervals of a posterior beyond which those that hardly count are made one, and how many stay.
MOST_INTERVALS, KEPT_INTERVALS = 96, 24


@dataclass(frozen=True)
class Prior:
    """What is known of each number beforehand: it lies between two bounds, with all values equally likely."""

    low: float
    high: float
    sure: bool = True  # whether no number can lie beyond the bounds

    def mass(self, low: Floats, high: Floats) -> Floats:
        """Probabilities of intervals, up to a common factor."""
        return high - low

    def point(self, low: Floats, high: Floats, share: Floats | float) -> Floats:
        """The points below which a share of the mass of each interval lies."""
        return low + share * (high - low)

    def share(self, low: Floats, high: Floats, at: Floats) -> Floats:
        """The part of the mass of each interval below a point of it."""
        return self.mass(low, at) / self.mass(low, high)


@dataclass(frozen=True)
class HeavyPrior(Prior):
    """A normal law of a centre and a scale with Cauchy tails, cut off at the bounds."""

    centre: float = 0.0
    scale: float = 1.0

    @classmethod
    def around(cls, centre: float, scale: float) -> HeavyPrior:
        """The law of matrix entries."""
        return cls(centre - LIMIT * scale, centre + LIMIT * scale, False, centre, scale)

    def _below(self, at: Floats) -> Floats:
        units = (at - self.centre) / self.scale
        return (1 - OUTLIERS) * ndtr(units) + OUTLIERS * (0.5 + np.arctan(units) / np.pi)

    @cached_property
    def _table(self) -> tuple[Floats, Floats]:
        """Points, denser near the centre, and the probability below each."""
        points = self.centre + self.scale * np.sinh(np.linspace(-1.0, 1.0, TABLE) * np.arcsinh(2 * LIMIT))
        return points, self._below(points)

    def _flat(self, low: Floats, high: Floats) -> Booleans:
        size = np.minimum(np.abs(low - self.centre), np.abs(high - self.centre))
        return np.asarray(high - low <= FLAT * np.maximum(size, self.scale))

    def mass(self, low: Floats, high: Floats) -> Floats:
        """Probabilities of intervals: of narrow ones density times length, which loses no digits."""
        units = (0.5 * (low + high) - self.centre) / self.scale
        density = (1 - OUTLIERS) * np.exp(-0.5 * units**2) / (2 * np.pi) ** 0.5 + OUTLIERS / (np.pi * (1 + units**2))
        narrow = density * (high - low) / self.scale
        return np.where(self._flat(low, high), narrow, self._below(high) - self._below(low))

    def point(self, low: Floats, high: Floats, share: Floats | float) -> Floats:
        """The points below which a share of the mass of each interval lies."""
        points, below = self._table
        first, last = self._below(low), self._below(high)
        curved = np.interp(first + share * (last - first), below, points)
        curved = np.where(np.abs(curved - self.centre) < CENTRE * self.scale, self.centre, curved)
        return np.where(self._flat(low, high), low + share * (high - low), np.clip(curved, low, high))


class Search:
    """What is known of `count` numbers: edges in rising order, and how likely the numbers are between them."""

    def __init__(self, prior: Prior, count: int, flip_rate: float = 0.0, doubt: float = 0.0, eps: float = 2.0**-52):
        self.prior, self.flip_rate, self.doubt, self.eps = prior, flip_rate, doubt, eps
        self.edges = np.tile([prior.low, prior.high], (count, 1))  # (count, intervals + 1)
        self.weights = np.ones((count, 1))  # (count, intervals): what answers say, beside the prior
        self.before = prior.mass(self.edges[:, :-1], self.edges[:, 1:])  # (count, intervals): what the prior says
        self.streak = np.zeros(count, np.int64)  # last answers of one kind, negative for below
        self.beyond = np.zeros(count)  # how far out of their intervals numbers may lie, which lie on their bounds

    @property
    def best(self) -> tuple[Floats, Floats]:  # (count,), (count,)
        """The interval that each number most likely lies in, or nearly surely once it is found."""
        place = np.argmax(self._masses(), axis=1)[:, None]
        return tuple(np.take_along_axis(self.edges, place + step, axis=1)[:, 0] for step in (0, 1))  # type: ignore[return-value]

    @property
    def centres(self) -> Floats:  # (count,)
        """The middles of these intervals."""
        low, high = self.best
        return 0.5 * (low + high)

    @property
    def radii(self) -> Floats:  # (count,)
        """Half the lengths of these intervals, and how far beyond them numbers may lie."""
        low, high = self.best
        return 0.5 * (high - low) + self.beyond

    def _masses(self, rows: Integers | slice = slice(None)) -> Floats:
        """Probabilities between the edges of some numbers, which add up to one."""
        if not self.flip_rate:
            return np.ones_like(self.weights[rows])
        masses = self.weights[rows] * self.before[rows]
        return np.asarray(masses / np.sum(masses, axis=1, keepdims=True))

    def unfinished(self, cell: Floats | float) -> Integers:
        """The numbers that are not known to lie within one cell of a grid: (open,)."""
        low, high = self.best
        fine = high - low <= SPACINGS * self.eps * np.maximum(np.abs(low), np.abs(high))
        done = fine | ~(next_edge(low, cell) < high)
        if self.flip_rate:
            done &= np.max(self._masses(), axis=1) >= 1 - self.doubt
        return np.flatnonzero(~done)

    def thresholds(self, rows: Integers, cell: Floats | float | None) -> Floats:  # -> as rows
        """What to compare some numbers with next: medians, on edges of the grid where one is given."""
        masses, edges = self._masses(rows), self.edges[rows]
        total = np.cumsum(masses, axis=1)
        place = np.argmax(total >= 0.5, axis=1)[:, None]
        low, high = (np.take_along_axis(edges, place + step, axis=1)[:, 0] for step in (0, 1))
        own, until = (np.take_along_axis(each, place, axis=1)[:, 0] for each in (masses, total))
        median = self.prior.point(low, high, 1 - (until - 0.5) / own)
        if cell is None:
            return median
        if self.flip_rate:
            # Of the two edges around the median the one that parts the probability more evenly: in one cell that is
            # the side where more is left.
            number = np.floor(median / cell)
            around = number * cell, (number + 1) * cell
            shares = [self.prior.share(low, high, np.clip(at, low, high)) for at in around]
            uneven = [np.abs(until - own + own * share - 0.5) for share in shares]
            return np.where(uneven[0] <= uneven[1], around[0], around[1])
        nearest = np.round(median / cell) * cell
        # Strictly inside: of a number between two edges neither tells anything.
        first = next_edge(low, cell)
        last = -next_edge(-high, cell)
        return np.asarray(np.clip(nearest, first, np.maximum(first, last)))

    def update(self, rows: Integers, thresholds: Floats, votes: Floats) -> None:
        """Take in answers: 1 where a number is larger than its threshold, −1 where it is smaller, 0 for nothing."""
        self.streak[rows] = np.where(np.sign(self.streak[rows]) == np.sign(votes), self.streak[rows] + votes, votes)
        if not self.flip_rate:
            above = votes > 0
            self.edges[rows, np.where(above, 0, 1)] = thresholds
            return
        self._split(rows, thresholds)
        above = self.edges[rows, :-1] >= thresholds[:, None]
        likely = np.where(above == (votes[:, None] > 0), 1 - self.flip_rate, self.flip_rate)
        weights = self.weights[rows] * np.where(votes[:, None] == 0, 1.0, likely)
        self.weights[rows] = weights / np.max(weights, axis=1, keepdims=True)
        if self.weights.shape[1] > MOST_INTERVALS:
            self._merge()

    def _split(self, rows: Integers, thresholds: Floats) -> None:
        """A new edge for every number: those without a threshold have their first twice, and nothing between."""
        new = self.edges[:, 0].copy()
        new[rows] = thresholds
        place = np.sum(self.edges <= new[:, None], axis=1)[:, None] - 1
        place = np.clip(place, 0, self.weights.shape[1] - 1)
        columns = np.arange(self.weights.shape[1] + 1)[None, :]
        source = columns - (columns > place)
        self.weights, self.before = (np.take_along_axis(each, source, axis=1) for each in (self.weights, self.before))
        self.edges = np.sort(np.column_stack([self.edges, new]), axis=1)
        for step in (0, 1):
            low, high = (np.take_along_axis(self.edges, place + step + end, axis=1) for end in (0, 1))
            np.put_along_axis(self.before, place + step, self.prior.mass(low, high), axis=1)

    def _merge(self) -> None:
        """Keep the edges of the likeliest intervals; those between become one each, as likely as they are together."""
        masses = self._masses()
        least = -np.partition(-masses, KEPT_INTERVALS, axis=1)[:, KEPT_INTERVALS, None]
        likely = masses > least
        kept = np.zeros(self.edges.shape, bool)
        kept[:, [0, -1]] = True
        kept[:, :-1] |= likely
        kept[:, 1:] |= likely
        order = np.argsort(~kept, axis=1, kind="stable")[:, : int(np.max(np.sum(kept, axis=1)))]
        last = self.edges.shape[1] - 1
        order = np.where(np.take_along_axis(kept, order, axis=1), order, last)
        total = np.column_stack([np.zeros(len(masses)), np.cumsum(masses, axis=1)])
        self.edges = np.take_along_axis(self.edges, order, axis=1)
        merged = np.diff(np.take_along_axis(total, order, axis=1), axis=1)
        self.before = self.prior.mass(self.edges[:, :-1], self.edges[:, 1:])
        self.weights = np.where(self.before > 0, merged / np.where(self.before > 0, self.before, 1.0), 0.0)


def next_edge(low: Floats, cell: Floats | float) -> Floats:
    """The first edge of the grid above each number."""
    number = np.floor(low / cell)
    above = (number + 1) * cell
    return np.where(above <= low, (number + 2) * cell, above)
