"""Length laws: what the number of tokens in a sequence multiplies logits by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from keyhole.arrays import Array
from keyhole.errors import UsageError
from keyhole.families.parts.protocols import Link


@dataclass(frozen=True, eq=False)
class NoLengthLaw(Link):
    """Logits as they are, whatever the length."""

    name: ClassVar[str] = "none"

    def factor(self, logits: Array) -> Array | float:  # noqa: ARG002
        """What logits of so many tokens are multiplied by."""
        return 1.0

    def __call__(self, logits: Array) -> Array:
        """The logits times the factor of their length."""
        return logits

    def slopes(self, logits: Array) -> Array | float:
        """The factor."""
        return self.factor(logits)


@dataclass(frozen=True, eq=False)
class LogLength(NoLengthLaw):
    """Logits times the logarithm of the number of tokens."""

    name: ClassVar[str] = "log"

    def factor(self, logits: Array) -> Array | float:
        """Log n."""
        return math.log(logits.shape[-1])

    def __call__(self, logits: Array) -> Array:
        """Logits times log n."""
        return logits * self.factor(logits)


@dataclass(frozen=True, eq=False)
class RootLength(LogLength):
    """Logits over the root of the number of tokens."""

    name: ClassVar[str] = "root"

    def factor(self, logits: Array) -> Array | float:
        """1/√n."""
        return float(logits.shape[-1]) ** -0.5


@dataclass(frozen=True, eq=False)
class LengthTable(LogLength):
    """Logits times a number for every length: the first for three tokens, the last for all beyond; one for fewer.

    What multiplies logits of all lengths belongs to the score: only quotients to length two show.
    """

    table: Array  # (lengths,)

    name: ClassVar[str] = "table"

    def check_shapes(self) -> None:
        """UsageError unless the table is a list of at least one number."""
        if self.table.ndim != 1 or self.table.shape[0] == 0:
            raise UsageError(f"a table by length must have one axis and some entry, not {tuple(self.table.shape)}")

    def factor(self, logits: Array) -> Array | float:
        """The entry of the table."""
        length = logits.shape[-1]
        return self.table[min(length - 3, self.table.shape[0] - 1)] if length > 2 else 0 * self.table[0] + 1
