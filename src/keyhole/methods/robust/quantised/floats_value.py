"""The value of a head whose answers are rounded to a dtype: ratios that null queries sharpen."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import FLOAT32, Array, Booleans, Floats, Integers, Space
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


@dataclass(eq=False)
class Bounds:
    """What is known of a value if the oracle computes with the rounding of `space`."""

    space: Space
    low: Floats  # (outputs,) of the sizes of the largest entries
    high: Floats  # (outputs,)
    radius: Floats  # (width, outputs) of the ratios to them

    @property
    def relative(self) -> Floats:  # (outputs,)
        """Relative radii of the largest entries; nan where these are zero."""
        return np.asarray((self.high - self.low) / (self.high + self.low))

    def narrow(self, chosen: Integers, guess: Floats, above: Booleans) -> bool:  # (n,), (n, guesses) twice
        """Learn which guesses of largest entries are too small; False where that contradicts itself."""
        slack = self.space.rounding * guess
        self.low[chosen] = np.maximum(self.low[chosen], np.max(np.where(above, guess - slack, 0.0), axis=1))
        self.high[chosen] = np.minimum(self.high[chosen], np.min(np.where(above, np.inf, guess + slack), axis=1))
        return not np.any(self.low > self.high)


class ValueRatios(TokenValues):
    """The value as ratios to its largest entry, which null queries sharpen, and that entry, which thresholds do.

    Everything is known twice: `bounds` holds if the oracle computes in the dtype of its space, `wide` if it does so in
    float32. Where the first contradicts itself, or is not shown to be right, the second takes its place.
    """

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
        self.sign = np.sign(largest)
        self.silent_radius = np.where(silent, np.max(error, axis=0), 0.0)
        divisor = np.where(silent, np.inf, largest)
        self.ratio = read / divisor
        self.settled = np.zeros(read.shape, dtype=bool)  # ratios that null queries cannot improve
        self.bounds, self.wide = (
            self._first_bounds(replace(self.space, coarse=max(self.space.coarse, coarse)), read, error, divisor)
            for coarse in (0.0, FLOAT32)
        )

    def _first_bounds(self, space: Space, read: Floats, error: Floats, divisor: Floats) -> Bounds:
        """What one answer each tells of the entries, (width, outputs), whose ratios are to `divisor`, (outputs,)."""
        each = np.arange(self.outputs)
        error = error + space.rounding * np.abs(read)
        largest, largest_error = np.abs(read[self.place, each]), error[self.place, each]
        silent = np.isinf(divisor)
        low = np.where(silent, 0.0, largest - largest_error)
        high = np.where(silent, 0.0, largest + largest_error)
        radius = SECOND_ORDER * (error + np.abs(self.ratio) * largest_error) / np.abs(divisor)
        radius[self.place, each] = 0.0
        return Bounds(space, low, high, radius)

    def widen(self) -> None:
        """Go on with what holds for an oracle that computes in float32."""
        self.bounds, self.space = self.wide, self.wide.space

    @property
    def is_wide(self) -> bool:
        """Whether what is known holds for an oracle that computes in float32."""
        return self.bounds is self.wide

    @property
    def largest(self) -> Floats:  # (outputs,)
        """The largest entries, with their signs."""
        return np.asarray(self.sign * (self.bounds.low + self.bounds.high) / 2)

    @property
    def relative(self) -> float:
        """Relative radius of the largest entry of the main output."""
        return float(self.bounds.relative[self.main])

    def size(self) -> float:
        """The largest entry of all."""
        return float(np.max(self.bounds.high))

    def cost(self) -> int:
        """Queries of a round of `refine`."""
        return int(self.ratio.size - self.outputs)

    def ask_finer(self) -> Steps[None]:
        """α·(e_i − ρ·e_k) for the ratio ρ as it is known: the answer is what is wrong with it."""
        row, output = np.nonzero(np.ones_like(self.ratio))
        keep = (row != self.place[output]) & (self.bounds.high[output] > 0) & ~self.settled[row, output]
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
        radii = []
        for bounds in (self.bounds, self.wide):
            radius = SECOND_ORDER * (error / np.abs(unit) + np.abs(change) * bounds.relative[output])
            radii.append(radius + 2 * bounds.space.rounding * np.abs(known) + bounds.space.tiny)
        if np.any(np.abs(change) > radii[0] + self.bounds.radius[row, output]):
            if np.any(np.abs(change) > radii[1] + self.wide.radius[row, output]):
                raise Unrecoverable(
                    Outcome.WRONG_FAMILY, "answers to one token are not linear in it: no head without biases"
                )
            self.widen()
            radii[0] = radii[1]
        self.settled[row, output] = answers == 0  # the same query would be asked again
        better = radii[0] < self.bounds.radius[row, output]
        row, output = row[better], output[better]
        self.ratio[row, output] += change[better]
        for bounds, radius in zip((self.bounds, self.wide), radii, strict=True):
            bounds.radius[row, output] = radius[better]

    def sharpening_cost(self) -> int:
        """Queries that `sharpen` may take, at most."""
        bits = max(0.0, math.log2(max(self.relative, self.space.eps) / self.space.eps))
        return int(self.outputs) * THRESHOLDS * math.ceil(bits / math.log2(THRESHOLDS + 1))

    def ask_sharper(self, relative: float, outputs: list[int] | range) -> Steps[None]:
        """Largest entries ρ from t·e_k: t brings a guess of ρ to where answers are rounded up or down."""
        chosen = np.asarray([number for number in outputs if self.bounds.high[number] > 0], dtype=np.int64)
        parts = np.arange(1, THRESHOLDS + 1) / (THRESHOLDS + 1)
        while True:
            goal = max(relative, 8 * self.space.rounding)
            chosen = chosen[self.bounds.relative[chosen] > goal]
            if not chosen.size:
                return
            low, high = self.bounds.low[chosen], self.bounds.high[chosen]
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
            agrees = self.bounds.narrow(chosen, guess, above)
            if not (self.is_wide or self.wide.narrow(chosen, guess, above)) or (self.is_wide and not agrees):
                raise Unrecoverable(Outcome.WRONG_FAMILY, "answers to one token do not grow with it, as a value does")
            same = (low == self.bounds.low[chosen]) & (high == self.bounds.high[chosen])
            if not agrees:
                self.widen()
                continue
            chosen = chosen[~same]

    def ask_rounding_check(self) -> Steps[None]:
        """Answers a quarter of a spacing beside numbers of the dtype, on either side: the nearest must come back."""
        if self.relative > self.unit / 8:  # not known well enough to tell
            return
        power = 2.0 ** (math.floor(math.log2(self.norm * self.bounds.low[self.main])) - 1)
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
        bounds = self.bounds
        whole = bounds.radius * bounds.high + np.abs(self.ratio) * (bounds.high - bounds.low) / 2 + self.silent_radius
        return self.in_shape(whole + 2 * self.space.eps * np.abs(self.ratio) * bounds.high)
