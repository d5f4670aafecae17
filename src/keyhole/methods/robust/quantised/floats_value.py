"""The value of a head whose answers are rounded to a dtype: ratios that null queries sharpen."""

from __future__ import annotations

import math

import numpy as np

from keyhole.arrays import Array, Floats
from keyhole.methods.base import BiasDetected, Steps, Unrecoverable
from keyhole.methods.forms.scale import floor_power
from keyhole.methods.robust.dtypes import grid_of
from keyhole.methods.robust.quantised.pair_model import SECOND_ORDER
from keyhole.methods.robust.quantised.pair_queries import TokenValues
from keyhole.noise import DIGITS
from keyhole.queries import Signature, Term
from keyhole.recovery import Outcome

# Queries that show whether answers are rounded to the nearest number and not, say, towards zero.
CHECKS = 4
# Thresholds tried at once for the length of the value vector; each round divides its interval by one more than that.
THRESHOLDS = 3


class ValueRatios(TokenValues):
    """The value as ratios to its largest entry, which null queries sharpen, and that entry, which thresholds do."""

    def __init__(self, signature: Signature) -> None:
        super().__init__(signature)
        noise = signature.noise
        self.unit, self.digits = noise.scale, DIGITS[noise.name]
        self.grid = grid_of(noise.name)
        # Whether answers below the smallest normal number lose digits: until one shows that they do not.
        self.flushed = True
        self.norm = 1.0 if signature.max_norm is None else floor_power(signature.norm_limit)

    def solve_answers(self, answers: Floats) -> tuple[Floats, Floats]:  # (n, outputs)
        """Answers and their radii."""
        steps = answers / self.grid.smallest
        if np.any((steps != np.round(steps)) & (np.abs(steps) < 2.0**self.digits)):
            self.flushed = False
        radius = np.abs(answers) * (self.unit / (1 - self.unit))
        return answers, radius + (self.grid.smallest / 2 if self.flushed else 0.0)

    def ask_value(self) -> Steps[None]:
        """One-token queries, the zero token among them, which shows an output bias."""
        answers, radius = self.solve_answers((yield from self.ask_units(self.norm)))
        if np.any(np.abs(answers[0]) > radius[0]):
            raise BiasDetected("the head has an output bias, which null queries do not read: use single-head")
        read, error = answers[1:] / self.norm, radius[1:] / self.norm
        self.choose(read)
        each = np.arange(self.outputs)
        largest, largest_error = read[self.place, each], error[self.place, each]
        if np.abs(largest[self.main]) <= largest_error[self.main]:
            raise Unrecoverable(
                Outcome.NOT_IDENTIFIABLE,
                "the value vector is zero, so every answer is the same whatever the score matrix: it cannot be known",
            )
        silent = np.abs(largest) <= largest_error  # an output that is zero throughout
        self.low = np.where(silent, 0.0, np.abs(largest) - largest_error)
        self.high = np.where(silent, 0.0, np.abs(largest) + largest_error)
        self.sign = np.sign(largest)
        self.silent_radius = np.where(silent, np.max(error, axis=0), 0.0)
        divisor = np.where(silent, np.inf, largest)
        self.ratio = read / divisor
        self.settled = np.zeros(read.shape, dtype=bool)  # ratios that null queries cannot improve
        relative = largest_error / np.abs(divisor)
        self.radius = SECOND_ORDER * (error / np.abs(divisor) + np.abs(self.ratio) * relative)
        self.radius[self.place, each] = 0.0

    @property
    def largest(self) -> Floats:  # (outputs,)
        """The largest entries, with their signs."""
        return np.asarray(self.sign * (self.low + self.high) / 2)

    @property
    def relative(self) -> float:
        """Relative radius of the largest entry of the main output."""
        low, high = self.low[self.main], self.high[self.main]
        return float((high - low) / (high + low))

    def size(self) -> float:
        """The largest entry of all."""
        return float(np.max(self.high))

    def cost(self) -> int:
        """Queries of a round of `refine`."""
        return int(self.ratio.size - self.outputs)

    def ask_finer(self) -> Steps[None]:
        """α·(e_i − ρ·e_k) for the ratio ρ as it is known: the answer is what is wrong with it."""
        row, output = np.nonzero(np.ones_like(self.ratio))
        keep = (row != self.place[output]) & (self.high[output] > 0) & ~self.settled[row, output]
        row, output = row[keep], output[keep]
        if not row.size:
            return
        length = floor_power(self.norm / 1.5)  # the second part is at most as long as the first
        known = self.ratio[row, output]
        index, scale = self.space.indices, self.space.asarray(-length * known)
        token = [Term(self.units, index(row), length), Term(self.units, index(self.place[output]), scale)]
        every, errors = self.solve_answers((yield from self.ask(token, row.size)))
        answers, error = (part[np.arange(row.size), output] for part in (every, errors))
        unit = length * self.largest[output]
        change = answers / unit
        apart = (self.high - self.low)[output] / (self.high + self.low)[output]
        radius = SECOND_ORDER * (error / np.abs(unit) + np.abs(change) * apart)
        radius = radius + 2 * self.space.rounding * np.abs(known) + self.space.tiny
        if np.any(np.abs(change) > radius + self.radius[row, output]):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY, "answers to one token are not linear in it: no head without biases"
            )
        self.settled[row, output] = answers == 0  # the same query would be asked again
        better = radius < self.radius[row, output]
        row, output = row[better], output[better]
        self.ratio[row, output] += change[better]
        self.radius[row, output] = radius[better]

    def sharpening_cost(self) -> int:
        """Queries that `sharpen` may take, at most."""
        bits = max(0.0, math.log2(max(self.relative, self.space.eps) / self.space.eps))
        return int(self.outputs) * THRESHOLDS * math.ceil(bits / math.log2(THRESHOLDS + 1))

    def ask_sharper(self, relative: float, outputs: list[int] | range) -> Steps[None]:
        """Largest entries ρ from t·e_k: t brings a guess of ρ to where answers are rounded up or down."""
        goal = max(relative, 8 * self.space.rounding)
        chosen = np.asarray([number for number in outputs if self.high[number] > 0], dtype=np.int64)
        parts = np.arange(1, THRESHOLDS + 1) / (THRESHOLDS + 1)
        while True:
            chosen = chosen[(self.high - self.low)[chosen] > goal * (self.high + self.low)[chosen]]
            if not chosen.size:
                return
            low, high = self.low[chosen], self.high[chosen]
            guess = low[:, None] + (high - low)[:, None] * parts
            # Halfway between two numbers of the dtype, just above a power of two.
            power = np.exp2(np.floor(np.log2(self.norm * low)) - 1)
            halfway = (power * (1 + 2.0**-self.digits))[:, None]
            scale = self.sign[chosen][:, None] * halfway / guess
            place = np.repeat(self.place[chosen], THRESHOLDS)
            term = Term(self.units, self.space.indices(place), self.space.asarray(scale.reshape(-1)))
            every, _ = self.solve_answers((yield from self.ask([term], place.size)))
            answers = every[np.arange(place.size), np.repeat(chosen, THRESHOLDS)]
            above = answers.reshape(guess.shape) > halfway
            slack = self.space.rounding * guess
            low = np.maximum(low, np.max(np.where(above, guess - slack, 0.0), axis=1))
            high = np.minimum(high, np.min(np.where(above, np.inf, guess + slack), axis=1))
            if np.any(low > high):
                raise Unrecoverable(Outcome.WRONG_FAMILY, "answers to one token do not grow with it, as a value does")
            same = (low == self.low[chosen]) & (high == self.high[chosen])
            self.low[chosen], self.high[chosen] = low, high
            chosen = chosen[~same]

    def ask_rounding_check(self) -> Steps[None]:
        """Answers a quarter of a spacing beside numbers of the dtype, on either side: the nearest must come back."""
        apart = (self.high - self.low)[self.main] / (self.high + self.low)[self.main]
        if apart > self.unit / 8:  # not known well enough to tell
            return
        power = 2.0 ** (math.floor(math.log2(self.norm * self.low[self.main])) - 1)
        spacing = 2 * power * self.unit
        near = power * np.linspace(1.2, 1.8, CHECKS)
        near = np.round(near / spacing) * spacing
        aim = near + np.where(np.arange(CHECKS) % 2, 0.25, -0.25) * spacing
        place = self.space.indices(np.full(CHECKS, self.place[self.main]))
        scale = self.space.asarray(aim / self.largest[self.main])
        answers, _ = self.solve_answers((yield from self.ask([Term(self.units, place, scale)], CHECKS)))
        if np.any(np.abs(answers[:, self.main] - near) > 0.25 * spacing):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY, f"answers are not rounded to the nearest {self.signature.noise.name} number"
            )

    def vector(self) -> Array:
        """The value, as the space holds it."""
        return self.in_shape(self.ratio * self.largest)

    def vector_radius(self) -> Array:
        """Radii of its entries."""
        half = (self.high - self.low) / 2
        whole = self.radius * self.high + np.abs(self.ratio) * half + self.silent_radius
        return self.in_shape(whole + 2 * self.space.eps * np.abs(self.ratio) * self.high)
