"""Position biases: what the distance of a token from its query adds to its energy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from keyhole.arrays import Array, namespace
from keyhole.errors import UsageError
from keyhole.families.parts.protocols import PositionBias


def places(energies: Array) -> tuple[Array, Array]:  # -> (length,), () or (length, 1)
    """Places of tokens and of their query, counted from the first token, as whole numbers."""
    xp = namespace(energies)
    every = xp.arange(energies.shape[-1], device=energies.device)
    single = energies.ndim == 2 or energies.shape[-2] == 1  # the last token is the query
    return every, every[-1] if single else every[:, None]


@dataclass(frozen=True, eq=False)
class NoPositionBias(PositionBias):
    """Every distance is like every other."""

    name: ClassVar[str] = "none"

    def __call__(self, energies: Array) -> Array:
        """The energies."""
        return energies


@dataclass(frozen=True, eq=False)
class Alibi(PositionBias):
    """A slope down with the distance of a token from its query."""

    slope: Array  # ()

    name: ClassVar[str] = "alibi"

    def __call__(self, energies: Array) -> Array:
        """Energies less slope · distance."""
        xp, (tokens, query) = namespace(energies), places(energies)
        return energies - self.slope * xp.astype(xp.abs(query - tokens), energies.dtype)


@dataclass(frozen=True, eq=False)
class DistanceTable(PositionBias):
    """A number for every distance: the first for neighbours, the last for all beyond; none for the query itself.

    What is added to every energy, the query's own too, does not show: only differences to distance zero do.
    """

    table: Array  # (distances,)

    name: ClassVar[str] = "table"

    def check_shapes(self) -> None:
        """UsageError unless the table is a list of at least one number."""
        if self.table.ndim != 1 or self.table.shape[0] == 0:
            raise UsageError(f"a table by distance must have one axis and some entry, not {tuple(self.table.shape)}")

    def __call__(self, energies: Array) -> Array:
        """Energies with what the table adds."""
        xp, (tokens, query) = namespace(energies), places(energies)
        distances = xp.clip(xp.abs(query - tokens), 0, self.table.shape[0])
        whole = xp.concat([0 * self.table[:1], self.table])
        added = xp.take(whole, xp.reshape(distances, (-1,)), axis=0)
        return energies + xp.reshape(added, distances.shape)


@dataclass(frozen=True, eq=False)
class Window(PositionBias):
    """Tokens at a distance of `width` or more are out of sight; the query itself is at distance zero."""

    width: int

    name: ClassVar[str] = "window"

    def check_shapes(self) -> None:
        """UsageError unless the width is a whole number of at least one."""
        if isinstance(self.width, bool) or not isinstance(self.width, int) or self.width < 1:
            raise UsageError(f"the width of a window must be a whole number of at least 1, not {self.width!r}")

    def __call__(self, energies: Array) -> Array:
        """Energies, −inf where a token is out of sight."""
        xp, (tokens, query) = namespace(energies), places(energies)
        return xp.where(xp.abs(query - tokens) < self.width, energies, -xp.inf * xp.ones_like(energies))


@dataclass(frozen=True, eq=False)
class Causal(PositionBias):
    """Tokens behind their query are out of sight: nothing changes at the last position."""

    name: ClassVar[str] = "causal"

    def __call__(self, energies: Array) -> Array:
        """Energies, −inf where a token comes after its query."""
        xp, (tokens, query) = namespace(energies), places(energies)
        return xp.where(tokens <= query, energies, -xp.inf * xp.ones_like(energies))
