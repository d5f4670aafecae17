"""Links: energies from logits. The mass of a token, which the normaliser weighs, is the exponential of its energy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from keyhole.arrays import Array, namespace
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


@dataclass(frozen=True, eq=False)
class Relu(Power):
    """Masses are positive logits; tokens of negative ones have none."""

    name: ClassVar[str] = "relu"

    def signs(self, logits: Array) -> Array:
        """One for positive logits, zero for others."""
        xp = namespace(logits)
        return xp.astype(logits > 0, logits.dtype)
