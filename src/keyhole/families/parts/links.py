"""Links: energies from logits. The mass of a token, which the normaliser weighs, is the exponential of its energy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from keyhole.arrays import Array, Floats, floats, like, namespace
from keyhole.errors import UsageError
from keyhole.families.parts.protocols import Link


@dataclass(frozen=True, eq=False)
class Exp(Link):
    """Weights in proportion to exp(logit): energies are logits."""

    name: ClassVar[str] = "exp"

    def __call__(self, logits: Array) -> Array:
        """The logits."""
        return logits

    def slopes(self, logits: Array) -> Array | float:  # noqa: ARG002
        """One."""
        return 1.0


@dataclass(frozen=True, eq=False)
class Softcap(Link):
    """Energies cap·tanh(logit/cap), as Gemma 2 has them."""

    cap: Array  # ()

    name: ClassVar[str] = "softcap"

    def check(self) -> None:
        """UsageError unless the cap is positive."""
        if not float(self.cap) > 0:
            raise UsageError(f"the cap of a softcap must be positive, not {float(self.cap)}")

    def __call__(self, logits: Array) -> Array:
        """cap·tanh(logit/cap)."""
        return self.cap * namespace(logits).tanh(logits / self.cap)

    def slopes(self, logits: Array) -> Array:
        """1/cosh²(logit/cap), of which 1 − tanh² would leave few digits."""
        xp = namespace(logits)
        small = xp.exp(-2 * xp.abs(logits / self.cap))
        return 4 * small / (1 + small) ** 2


@dataclass(frozen=True, eq=False)
class Sigmoid(Link):
    """Masses 1/(1 + exp(−logit − bias)); with the normaliser `none` this is sigmoid attention."""

    bias: Array = 0.0  # ()

    name: ClassVar[str] = "sigmoid"

    def __call__(self, logits: Array) -> Array:
        """Log σ(logit + bias)."""
        xp, z = namespace(logits), logits + self.bias
        return xp.minimum(z, xp.zeros_like(z)) - xp.log1p(xp.exp(-xp.abs(z)))

    def slopes(self, logits: Array) -> Array:
        """σ(−logit − bias)."""
        xp, z = namespace(logits), logits + self.bias
        small = xp.exp(-xp.abs(z))
        return xp.where(z > 0, small, xp.ones_like(z)) / (1 + small)


@dataclass(frozen=True, eq=False)
class Power(Link):
    """Base of links whose masses are powers of logits."""

    name: ClassVar[str] = "linear"
    is_power: ClassVar[bool] = True
    exponent: ClassVar[float] = 1.0

    def _sizes(self, logits: Array) -> Array:
        """|logit|, but not so small that the derivative of its logarithm times a weight overflows."""
        xp = namespace(logits)
        return xp.clip(xp.abs(logits), float(xp.finfo(logits.dtype).smallest_normal) ** 0.5, None)

    def __call__(self, logits: Array) -> Array:
        """The logarithm of the size of the power."""
        return self.exponent * namespace(logits).log(self._sizes(logits))

    def slopes(self, logits: Array) -> Array:
        """exponent/logit, of the sign that a change of the size has."""
        return self.exponent * namespace(logits).sign(logits) / self._sizes(logits)


@dataclass(frozen=True, eq=False)
class Linear(Power):
    """Masses are logits, negative ones too."""

    name: ClassVar[str] = "linear"

    def signs(self, logits: Array) -> Array:
        """The signs of logits."""
        return namespace(logits).sign(logits)


@dataclass(frozen=True, eq=False)
class Squared(Power):
    """Masses are squares of logits."""

    name: ClassVar[str] = "squared"
    exponent: ClassVar[float] = 2.0

    def signs(self, logits: Array) -> Array:
        """One, but zero for logits of zero."""
        return namespace(logits).abs(namespace(logits).sign(logits))


@dataclass(frozen=True, eq=False)
class Relu(Power):
    """Masses are positive logits; tokens of negative ones have none."""

    name: ClassVar[str] = "relu"

    def signs(self, logits: Array) -> Array:
        """One for positive logits, zero for others."""
        xp = namespace(logits)
        return xp.astype(logits > 0, logits.dtype)


@dataclass(frozen=True, eq=False)
class Tabulated(Link):
    """Energies of an unknown smooth link where it was seen: Chebyshev polynomials of logit/reach from −1 to 1.

    Nothing is claimed beyond: energies go on in a straight line there, and predictions that need them have error bars
    as wide as values allow. A factor of logits belongs to the score: methods make energies zero and slopes one at zero.
    """

    coefficients: Array  # (degree + 1,)
    reach: float = 1.0

    name: ClassVar[str] = "unknown"

    @classmethod
    def of(cls, link: Link, count: int, reach: float, slope: float = 1.0) -> Tabulated:
        """The energies over that of zero of another link, whose logits times `slope` are its own."""
        places = np.cos(np.pi * np.arange(count) / (count - 1))
        energies = floats(link(places * reach / slope)) - floats(link(np.zeros(1)))
        return cls(chebyshev_coefficients(count) @ energies, reach)

    def check_shapes(self) -> None:
        """UsageError unless there is a list of coefficients and a positive reach."""
        if self.coefficients.ndim != 1 or self.coefficients.shape[0] == 0:
            raise UsageError(f"coefficients must have one axis and some entry, not {tuple(self.coefficients.shape)}")
        if not 0 < self.reach < math.inf:
            raise UsageError(f"the reach of a link must be a positive number, not {self.reach}")

    @property
    def numbers(self) -> int:
        """None are counted: coefficients follow from what accuracy is wanted."""
        return 0

    def is_known(self, logits: Array) -> Array:
        """Whether logits are within reach."""
        return namespace(logits).abs(logits) <= self.reach

    def moved(self, name: str, change: Array) -> Tabulated:  # noqa: ARG002
        """A copy whose energies are all off by as much as such changes of coefficients can make any of them."""
        total = change[:1] * 0 + abs(change).sum()
        xp = namespace(self.coefficients)
        return Tabulated(xp.concat([self.coefficients[:1] + total, self.coefficients[1:]]), self.reach)

    def __call__(self, logits: Array) -> Array:
        """The polynomial, and straight lines beyond its ends."""
        inside = namespace(logits).clip(logits / self.reach, -1.0, 1.0)
        beyond = logits - self.reach * inside
        return _chebyshev(self.coefficients, inside) + beyond * self.slopes(logits)

    def slopes(self, logits: Array) -> Array:
        """The derivative of the polynomial, beyond its ends that at the nearer one."""
        inside = namespace(logits).clip(logits / self.reach, -1.0, 1.0)
        derivative = np.polynomial.chebyshev.chebder(floats(self.coefficients))
        return _chebyshev(like(derivative, logits), inside) / self.reach


def chebyshev_coefficients(count: int) -> Floats:  # (count, count)
    """From values at the places cos(πj/(count − 1)) to the coefficients of the polynomial through them."""
    steps = np.arange(count)
    matrix = 2 / (count - 1) * np.cos(np.pi * np.outer(steps, steps) / (count - 1))
    matrix[:, [0, -1]] /= 2
    matrix[[0, -1], :] /= 2
    return np.asarray(matrix)


def _chebyshev(coefficients: Array, places: Array) -> Array:
    """The sum of Chebyshev polynomials at places, by Clenshaw's recurrence."""
    one, two = 0 * places, 0 * places
    for k in range(coefficients.shape[0] - 1, 0, -1):
        one, two = coefficients[k] + 2 * places * one - two, one
    return coefficients[0] + places * one - two
