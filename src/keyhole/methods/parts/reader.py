"""Bilinear forms from the weights of any link and normaliser."""

from __future__ import annotations

import math
from typing import final

from keyhole.arrays import Array
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.reader import Forms, PairValues, SearchingReader, overlaps
from keyhole.methods.forms.scale import NORM_RATIO, ScaleEstimate, floor_power
from keyhole.methods.forms.value import Value
from keyhole.methods.parts.inverse import Inverse
from keyhole.queries import Measurements, Plan, Signature, Term, TokenRows
from keyhole.recovery import Outcome

# An answer further outside what weights can be than this many times its radius is of another family.
OUTSIDE = 4.0


@final
class PartReader(SearchingReader):
    """Measures forms by queries [a·row; c·column] whose last token is so short that only the first one counts.

    `value` is that of one token in units of `inverse.unit`, and `factor` what the length law makes of logits of two.
    """

    def __init__(self, signature: Signature, value: Value, inverse: Inverse, factor: float) -> None:
        super().__init__(signature, value.vector, ScaleEstimate(target=inverse.typical))
        self.values, self.inverse, self.factor = PairValues(signature, value), inverse, factor
        self.largest_scale = floor_power(self.values.longest / NORM_RATIO) ** 2
        self.relative = 0.0  # how far forms may be off together, in proportion to their size, by errors of constants
        self._shifts = (0, 0.0)

    def first_norm(self, scale: float) -> float:
        """Norm of first tokens."""
        return NORM_RATIO * floor_power(math.sqrt(scale))

    def radius_at_zero(self, scale: float) -> float:
        """Radius of a logit of zero, for a row of average overlap with the value."""
        first = self.first_norm(scale)
        return self.inverse.steepness() * self._answer_radius_at_zero(first, self.signature.noise.radius)

    def _answer_radius_at_zero(self, first: float, answer_radius: float) -> float:
        span = first * self.values.norm / math.sqrt(self.signature.width)
        own = self.values.noise(answer_radius) + self.inverse.at_zero * first * self.values.error
        return own / span if span > 0 else math.inf

    def ask_at(
        self, stage: str, rows: TokenRows, columns: TokenRows, row_index: Array, column_index: Array, scale: float
    ) -> Steps[Forms]:
        """The forms of the given pairs (n,) from queries [a·row; c·column] with a·c = scale."""
        xp, space = self.signature.space.xp, self.signature.space
        first = self.first_norm(scale)
        last = min(scale / first, self.values.longest)
        answers: Measurements = yield Plan(
            stage,
            int(row_index.shape[0]),
            [[Term(rows, row_index, first)], [Term(columns, column_index, last)]],
            so_far=self.so_far,
        )
        span = first * overlaps(rows, row_index, self.values.value.vector)
        span = xp.where(span == 0, xp.ones_like(span), span)
        shares = (answers.values - self.values.value.bias) / span
        error = (self.values.noise(answers.radius) + abs(shares) * first * self.values.error) / abs(span)
        # The last token's own value is left out: it shows where the first one has hardly any weight.
        left_out = last * abs(overlaps(columns, column_index, self.values.value.vector)) / self.inverse.unit
        error = error + 2 * space.eps * abs(shares) + left_out / abs(span)
        check_weights(shares, error, self.inverse)
        logits, steep = self.inverse.logits(shares)
        own = steep * error + space.rounding * xp.abs(logits)
        own = xp.where(is_saturated(shares, error, self.inverse), xp.inf * xp.ones_like(own), own)
        saturation = own / (self.inverse.steepness() * self._answer_radius_at_zero(first, answers.radius))
        common, shift = self.inverse.errors(shares)
        self._note(stage, logits, common, shift, scale)
        unit = first * last * self.factor
        radius = own + xp.where(xp.isfinite(own), common, xp.zeros_like(common))
        rounded = space.rounding * self.estimate.size * self.signature.width**0.5
        return Forms(logits / unit, radius / unit + rounded, xp.zeros_like(logits) + last / first, saturation)

    def _note(self, stage: str, logits: Array, common: Array, shift: Array, scale: float) -> None:
        """Keep how far forms are off together."""
        if stage == "scale" or not (self.inverse.radii or self.inverse.table):
            return
        xp, (count, total) = self.signature.space.xp, self._shifts
        # Sizes below this say little of what is in proportion to them.
        sizes = xp.clip(xp.abs(logits), 0.1 * self.inverse.typical, None)
        rest = xp.abs(common - shift) / sizes
        self.relative = max(self.relative, float(xp.max(xp.where(xp.isfinite(rest), rest, xp.zeros_like(rest)))))
        self._shifts = (count + logits.shape[0], total + float(xp.sum(shift)) / (scale * self.factor))
        self.common_radius = self._shifts[1] / self._shifts[0]


def is_saturated(shares: Array, error: Array, inverse: Inverse) -> Array:
    """Whether a weight may be zero or one, as sparse ones are for all logits from some size on."""
    none = shares <= OUTSIDE * error
    if inverse.normaliser in ("none", "count"):  # the link says where masses end
        return none
    return none | (shares * inverse.unit >= 1 - OUTSIDE * error * inverse.unit)


def check_weights(shares: Array, error: Array, inverse: Inverse) -> None:
    """Raise unless answers are what a weight can make of them."""
    below = shares < -OUTSIDE * error
    above = shares * inverse.unit > 1 + OUTSIDE * error * inverse.unit
    if inverse.normaliser in ("none", "count") and inverse.link == "exp":
        above = below
    if bool((below | above).any()):
        raise Unrecoverable(
            Outcome.WRONG_FAMILY,
            "an answer to two tokens is no weight of the first one times its value: the box is no head of these parts",
        )
