"""The value of a head whose answers are rounded to decimals: intervals that thresholds halve."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Booleans, Floats, Integers
from keyhole.methods.base import BiasDetected, Steps, Unrecoverable
from keyhole.methods.robust.quantised.pair_queries import TokenValues
from keyhole.queries import Signature, Term
from keyhole.recovery import Outcome

# Intervals are divided at a random place this far from their middle, so that those of equal forms do not stay equal.
DITHER = 0.05
# Answers must span this many half units for a threshold to be within reach.
AUDIBLE = 4.0
# An interval that shrinks less than this has met the precision of the oracle's arithmetic.
STUCK = 0.75
# Whether arithmetic is finer than float32's is seen by thresholds: guesses at once, how sharply an entry is told, other
# thresholds, the fewest of them, and how far beside them tokens are.
GUESSES, FINEST, CHECKS, FEWEST, APART = 3, 2.0**-36, 8, 3, 2.0**-30
# Queries that this takes at most.
CHECK_COST = 72

BIASED = "the head has {} bias, which thresholds do not read: allow tokens of any norm and use method single-head"


class ValueIntervals(TokenValues):
    """Intervals of the entries of the value. Items are entries, and the largest of each output once more from behind.

    The largest entry is read with both signs of its token: an output bias moves the two apart.
    """

    def __init__(self, signature: Signature, rng: np.random.Generator) -> None:
        super().__init__(signature)
        self.rng = rng
        self.half = signature.noise.scale
        self.norm = signature.norm_limit

    def ask_value(self) -> Steps[None]:
        """One-token queries, the zero token among them."""
        answers = yield from self.ask_units(self.norm)
        if np.any(np.abs(answers[0]) > self.half):
            raise BiasDetected(BIASED.format("an output"))
        read = answers[1:]
        self.choose(read)
        each = np.arange(self.outputs)
        self.audible = np.abs(read[self.place, each]) >= AUDIBLE * self.half
        if not self.audible[self.main]:
            raise Unrecoverable(
                Outcome.TOO_NOISY,
                f"values of tokens are at most {np.max(np.abs(read)):.2g}, answers are rounded by up to "
                f"{self.half:.2g}: no threshold is within reach",
            )
        row, output = np.divmod(np.arange(read.size), self.outputs)
        self.row, self.output = np.concatenate([row, self.place]), np.concatenate([output, each])
        self.sign = np.concatenate([np.ones(read.size), -np.ones(self.outputs)])
        centre = self.sign * read[self.row, self.output] / self.norm
        slack = self.half / self.norm + self.space.rounding * np.abs(centre)
        # From behind nothing was asked yet: an output bias within the rounding may hide.
        slack[read.size :] *= 4
        self.low, self.high = centre - slack, centre + slack

    @property
    def entries(self) -> tuple[Floats, Floats]:  # (width, outputs) twice
        """Entries and radii."""
        shape, count = (self.signature.width, self.outputs), self.signature.width * self.outputs
        low, high = self.low[:count].reshape(shape), self.high[:count].reshape(shape)
        return (low + high) / 2, (high - low) / 2

    def cost(self, goal: Floats) -> float:  # (outputs,) widths
        """Queries that `narrow` takes, about."""
        bits = np.log2((self.high - self.low) / goal[self.output])
        return float(np.sum(np.ceil(np.maximum(bits, 0.0))[self.audible[self.output]]))

    def ask_narrower(self, goal: Floats) -> Steps[None]:  # (outputs,) widths
        """Halve intervals until none is wider than its goal."""
        open_ = np.nonzero(self.audible[self.output])[0]
        while True:
            open_ = open_[(self.high - self.low)[open_] > goal[self.output[open_]]]
            if not open_.size:
                break
            before = (self.high - self.low)[open_]
            yield from self._ask_halves(open_)
            open_ = open_[(self.high - self.low)[open_] < STUCK * before]
        largest, behind = self.place * self.outputs + np.arange(self.outputs), slice(-self.outputs, None)
        apart = np.maximum(self.low[largest] + self.low[behind], -self.high[largest] - self.high[behind])
        if np.any(apart > 0):
            raise BiasDetected(BIASED.format("an output"))

    def ask_rounding_check(self) -> Steps[None]:
        """Answers a quarter of a unit beside one unit, on either side of zero: the nearest must come back."""
        place = self.place[self.main] * self.outputs + self.main
        largest = (self.low + self.high)[place] / 2
        near = np.repeat([2 * self.half, -2 * self.half], 2)
        scale = (near + np.tile([0.5, -0.5], 2) * self.half) / largest
        index = self.space.indices(np.full(near.size, self.place[self.main]))
        answers = yield from self.ask([Term(self.units, index, self.space.asarray(scale))], near.size)
        if np.any(np.abs(answers[:, self.main] - near) > 0.5 * self.half):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY, "answers are not rounded to the nearest: declare cut:DECIMALS, or a tolerance"
            )

    def ask_arithmetic_check(self) -> Steps[bool]:
        """Whether the oracle computes more finely than in float32.

        One threshold tells the largest entry far below the spacing of float32; others must then lie where that says.
        """
        place, main = self.place[self.main], self.main
        low, high = np.sort(np.abs([self.low[place * self.outputs + main], self.high[place * self.outputs + main]]))
        sign = np.sign((self.low + self.high)[place * self.outputs + main])
        largest = 2 * int((self.norm * low / self.half - 1) // 2) + 1  # the longest threshold, over half a unit

        def ask_above(odd: Floats, value: Floats) -> Steps[Booleans]:  # (n,), (n,) -> (n,)
            scale = self.space.asarray(sign * odd * self.half / value)
            index = self.space.indices(np.full(odd.size, place))
            answers = yield from self.ask([Term(self.units, index, scale)], odd.size)
            return np.asarray(answers[:, main] > odd * self.half)

        parts = np.arange(1, GUESSES + 1) / (GUESSES + 1)
        while high - low > FINEST * high:
            guess = low + (high - low) * parts
            above = yield from ask_above(np.full(GUESSES, float(largest)), guess)
            low, high = np.max(guess[above], initial=low), np.min(guess[~above], initial=high)
            if not low < high:
                return False
        odd = np.unique(2.0 * self.rng.integers(max(largest // 2, 1), size=CHECKS) + 1)  # shorter ones
        if odd.size < FEWEST:
            return False
        value = (low + high) / 2 * np.repeat([1 - APART, 1 + APART], odd.size)
        above = yield from ask_above(np.tile(odd, 2), value)
        return bool(np.all(above[: odd.size]) and not np.any(above[odd.size :]))

    def _ask_halves(self, items: Integers) -> Steps[None]:
        """a·e_i + β·e_k: the largest entry k, hardly used, brings the middle of an interval to a threshold."""
        row, output, low, high = self.row[items], self.output[items], self.low[items], self.high[items]
        middle = low + (high - low) * (0.5 + self.rng.uniform(-DITHER, DITHER, items.size))
        place = self.place[output] * self.outputs + output  # the item of the largest entry
        largest, largest_radius = (self.low + self.high)[place] / 2, (self.high - self.low)[place] / 2
        direct = row == self.place[output]  # the largest entry itself, brought there by its length
        most_lent = self.half / np.abs(largest)
        length = np.where(direct, self.norm, np.sqrt(np.maximum(self.norm**2 - most_lent**2, 0.0)))
        aim = np.where(direct, (self.norm * np.abs(middle) / self.half - 1) / 2, (length * middle / self.half - 1) / 2)
        # Thresholds are the odd multiples of half a unit.
        threshold = self.half * (2 * np.where(direct, np.floor(aim), np.round(aim)) + 1)
        threshold = np.where(direct, np.sign(middle) * threshold, threshold)
        length = np.where(direct, threshold / middle, length)
        lent = np.where(direct, 0.0, (threshold - length * middle) / largest)
        lent = np.clip(lent, -most_lent, most_lent)
        index = self.space.indices
        token = [
            Term(self.units, index(row), self.space.asarray(self.sign[items] * length)),
            Term(self.units, index(self.place[output]), self.space.asarray(lent)),
        ]
        answers = (yield from self.ask(token, items.size))[np.arange(items.size), output]
        slack = 2 * self.space.rounding * (np.abs(length * middle) + np.abs(lent * largest) + np.abs(threshold))
        point = (threshold - lent * largest) / length
        point_radius = (np.abs(lent) * largest_radius + slack) / np.abs(length)
        above = answers > threshold
        self.low[items] = np.where(above, np.maximum(low, point - point_radius), low)
        self.high[items] = np.where(above, high, np.minimum(high, point + point_radius))
        if np.any(self.low > self.high):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY, "answers to one token are not linear in it: no head without biases"
            )
