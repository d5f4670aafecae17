"""Worst cases: intervals that hold the truth whatever the errors, rounding included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import Booleans, Floats

# A logit is found in a dozen roundings of relative size eps/2; this many eps cover them and those of exp and log.
LOGIT_ROUNDINGS = 32


@dataclass(frozen=True, eq=False)
class Interval:
    """low ≤ truth ≤ high, entrywise. Every operation rounds outwards by one number, more than IEEE arithmetic errs."""

    low: Floats
    high: Floats

    @classmethod
    def around(cls, centre: Floats | float, radius: Floats | float) -> Interval:
        """The interval centre ± radius."""
        return _outward(np.subtract(centre, radius), np.add(centre, radius))

    @property
    def middle(self) -> Floats:
        """The centre."""
        return np.asarray(self.low / 2 + self.high / 2)

    @property
    def radius(self) -> Floats:
        """The distance from the centre, as computed, to the further end."""
        return np.asarray(np.nextafter(np.maximum(self.high - self.middle, self.middle - self.low), np.inf))

    @property
    def size(self) -> Floats:
        """The largest absolute value inside."""
        return np.asarray(np.maximum(np.abs(self.low), np.abs(self.high)))

    @property
    def empty(self) -> Booleans:
        """Where nothing is left after an intersection."""
        return np.asarray(self.low > self.high)

    def __getitem__(self, index: Any) -> Interval:
        return Interval(self.low[index], self.high[index])

    def __add__(self, other: Interval) -> Interval:
        return _outward(self.low + other.low, self.high + other.high)

    def times(self, factor: Any) -> Interval:
        """The product with numbers that are known exactly."""
        # 0·∞ is zero: what is not used does not matter, whatever it is.
        ends = [np.where(np.equal(factor, 0), 0.0, np.multiply(end, factor)) for end in (self.low, self.high)]
        return _outward(np.minimum(*ends), np.maximum(*ends))

    def over(self, divisor: Any) -> Interval:
        """The quotient by numbers that are known exactly."""
        ends = self.low / divisor, self.high / divisor
        return _outward(np.minimum(*ends), np.maximum(*ends))

    def widen(self, by: Any) -> Interval:
        """Larger by so much at both ends."""
        return _outward(self.low - by, self.high + by)

    def within(self, other: Interval) -> Interval:
        """What both hold."""
        return Interval(np.maximum(self.low, other.low), np.minimum(self.high, other.high))

    def beside(self, other: Interval) -> Interval:
        """Both, one after the other."""
        return Interval(np.concatenate([self.low, other.low]), np.concatenate([self.high, other.high]))


def _outward(low: Any, high: Any) -> Interval:
    return Interval(np.nextafter(low, -np.inf), np.nextafter(high, np.inf))


@dataclass(frozen=True)
class PairLayout:
    """A sequence of `plus` tokens x, `minus` tokens −x and one last token g."""

    plus: int
    minus: int

    @property
    def length(self) -> int:
        """Tokens per sequence."""
        return self.plus + self.minus + 1

    def logit(
        self,
        answer: Interval,  # y
        own: Interval,  # logit q of the last token
        first: Interval,  # α = x·v, which must be positive
        last: Interval,  # β = g·v
    ) -> Interval:
        """All logits z of x at which such an answer is possible; an infinite end where x may take all the weight.

        y = (α(p·t − n/t) + β·E)/(p·t + n/t + E) with t = exp z, E = exp q is a quadratic in t. For |y| < α, z rises
        with y and falls with β, and it is monotonic in α and in q (with |dz/dq| ≤ 1), so the ends lie at corners.
        """
        corners = [(size, weight) for size in (first.low, first.high) for weight in (own.low, own.high)]
        high = np.max([self._root(answer.high, weight, size, last.low) for size, weight in corners], axis=0)
        low = np.min([self._root(answer.low, weight, size, last.high) for size, weight in corners], axis=0)
        # The quadratic has one root only where the answer does not reach the values of the first tokens.
        largest = np.maximum(answer.high, -answer.low) if self.minus else answer.high
        unreadable = (largest >= first.low) | (first.low <= 0)
        high, low = np.where(unreadable, np.inf, high), np.where(unreadable, -np.inf, low)
        slack = LOGIT_ROUNDINGS * np.finfo(np.float64).eps * (1 + np.maximum(np.abs(low), np.abs(high)) + own.size)
        return Interval(low, high).widen(slack)

    def _root(self, answer: Floats, own: Floats, first: Floats, last: Floats) -> Floats:
        # What saturates divides by zero and has no logarithm; `logit` looks for that itself.
        with np.errstate(all="ignore"):
            weight, above, below = np.exp(own), first - answer, first + answer
            pull = (answer - last) * weight
            root = np.sqrt(pull**2 + 4 * self.plus * self.minus * np.maximum(above * below, 0.0))
            # Two forms of one root: each is used where it does not cancel.
            rising = (pull + root) / (2 * self.plus * above)
            falling = 2 * self.minus * below / (root - pull)
            return np.asarray(np.log(np.where(pull >= 0, rising, falling)))
