"""From the weight of the first of two tokens back to its logit, whatever link and normaliser are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import final

from keyhole.arrays import Array, namespace
from keyhole.methods.parts.link_table import LinkTable

# Constants are moved by at least this, relatively, to see what their errors do: less, and rounding is what is seen.
STEP = 1e-6
# Weights add up to one whatever the logits: a token alone shows its value.
COMPLETE = ("sum", "sparsemax", "entmax", "top-k")
# The weight at zero of the first of two tokens, where nothing is added to either.
AT_ZERO = {"sink": math.nan, "plus-one": 1 / 3, "none": 1.0, "count": 0.5}
# Weights are masses over a sum of masses and of something else.
QUOTIENTS = ("sum", "sink", "plus-one", "top-k")
# 1/(order − 1), the power of heights that weights are.
POWERS = {"sparsemax": 1.0, "entmax": 2.0}


def _height(weight: Array, normaliser: str) -> Array:
    """The energy over that of the other token, but for a constant: what grows with the weight."""
    xp = namespace(weight)
    if normaliser in QUOTIENTS:
        return xp.log(weight) - xp.log1p(-weight)
    if normaliser in POWERS:
        power = POWERS[normaliser]
        return power * (weight ** (1 / power) - (1 - weight) ** (1 / power))
    return xp.log(weight)


def _height_slope(weight: Array, normaliser: str) -> Array:
    """The derivative of `_height` by the weight."""
    if normaliser in QUOTIENTS:
        return 1 / (weight * (1 - weight))
    if normaliser in POWERS:
        share = 1 / POWERS[normaliser]
        return weight ** (share - 1) + (1 - weight) ** (share - 1)
    return 1 / weight


@dataclass(frozen=True)
class Inverse:
    """What is known of two tokens of which the last is too short to matter: [A·row; (scale/A)·column].

    An answer over A·row·v is the weight of the first token over `unit`. With energies E(z) of logits and the weight
    `zero` at z = 0, its height says E(z) − E(0), and the link says z.
    """

    link: str
    normaliser: str
    zero: float = 0.5
    unit: float = 1.0  # the weight that the answer is measured in: 1, or that at zero
    cap: float = math.inf
    bias: float = 0.0  # of a sigmoid
    radii: dict[str, float] = field(default_factory=dict)  # of the numbers above that were measured
    table: LinkTable | None = None  # of an unknown link

    @property
    def paired(self) -> bool:
        """Whether weights are measured in that at zero."""
        return self.normaliser not in COMPLETE

    def changed(self, **numbers: float) -> Inverse:
        """A copy with other numbers."""
        made = replace(self, **numbers)  # type: ignore[arg-type]
        return replace(made, unit=made.zero) if self.paired else made

    def with_constant(self, name: str, value: float, radius: float) -> Inverse:
        """A copy with a number that was measured."""
        return replace(self.changed(**{name: value}), radii={**self.radii, name: radius})

    @property
    def at_zero(self) -> float:
        """The answer at a logit of zero."""
        return self.zero / self.unit

    @property
    def typical(self) -> float:
        """The root mean square that logits should have: large against rounding, small against what saturates."""
        if self.table is not None:
            return self.table.typical
        size = {"sparsemax": 0.15, "entmax": 0.3}.get(self.normaliser, 0.6)
        return min(size, 0.5 * self.cap)

    def logits(self, answers: Array) -> tuple[Array, Array]:  # (n,) -> (n,), (n,)
        """Logits, and their derivatives by the answers; infinite derivatives where a weight is saturated."""
        xp = namespace(answers)
        weight, one = answers * self.unit, xp.ones_like(answers)
        low = weight > 0
        inside = low if self.normaliser in ("none", "count") else low & (weight < 1)
        weight = xp.where(inside, weight, self.zero * one)
        zero = self.zero * one
        energy = _height(weight, self.normaliser) - _height(zero, self.normaliser)
        slope = _height_slope(weight, self.normaliser) * self.unit
        logits, steep, inside = self._through_link(energy, slope, inside)
        return logits, xp.where(inside, steep, xp.inf * one)

    def _through_link(self, energy: Array, slope: Array, inside: Array) -> tuple[Array, Array, Array]:
        xp = namespace(energy)
        if self.table is not None:
            logits, slopes, known = self.table.logits(energy)
            return logits, slope / slopes, inside & known
        if self.link == "softcap":
            part = energy / self.cap
            inside = inside & (xp.abs(part) < 1)
            part = xp.where(inside, part, xp.zeros_like(part))
            return self.cap * xp.atanh(part), slope / (1 - part**2), inside
        if self.link == "sigmoid":
            log_mass = energy - math.log1p(math.exp(-self.bias)) if self.bias > -700 else energy + self.bias
            inside = inside & (log_mass < 0)
            log_mass = xp.where(inside, log_mass, -xp.ones_like(log_mass))
            rest = -xp.expm1(log_mass)
            return log_mass - xp.log(rest) - self.bias, slope / rest, inside
        return energy, slope, inside

    def steepness(self) -> float:
        """The derivative of a logit of zero by its answer."""
        ends = {"softcap": 1.0, "sigmoid": 1 + math.exp(min(self.bias, 700.0))}.get(self.link, 1.0)
        if self.normaliser in QUOTIENTS:
            slope = 1 / (self.zero * (1 - self.zero))
        elif self.normaliser in POWERS:
            share = 1 / POWERS[self.normaliser]
            slope = self.zero ** (share - 1) + (1 - self.zero) ** (share - 1)
        else:
            slope = 1 / self.zero
        return slope * self.unit * ends

    def errors(self, answers: Array) -> tuple[Array, Array]:  # (n,) -> (n,), (n,)
        """How far logits are off by the radii of the constants: all together, and by a shift that all of them share."""
        logits, _ = self.logits(answers)
        total, shift = 0 * logits, 0 * logits
        if self.table is not None:
            total = total + self.table.errors(logits)
        for name, radius in self.radii.items():
            number = getattr(self, name)
            step = max(radius, STEP * max(1.0, abs(number)) if name != "zero" else STEP * min(number, 1 - number))
            other = self.changed(**{name: number + step})
            start = namespace(answers).zeros_like(answers) + self.at_zero
            total = total + abs(other.logits(answers)[0] - logits) * (radius / step)
            shift = shift + abs(other.logits(start)[0] - self.logits(start)[0]) * (radius / step)
        return total, shift


@final
@dataclass(frozen=True)
class Number:
    """A constant and its radius."""

    value: float
    radius: float

    def through(self, function: Callable[[float], float]) -> Number:
        """A smooth function of it, by its derivative here."""
        here = function(self.value)
        step = max(self.radius, STEP * abs(self.value), 1e-300)
        return Number(here, abs(function(self.value + step) - here) * (self.radius / step))
