"""Incremental cross approximation: which rows of a growing column space determine the others."""

from __future__ import annotations

from keyhole.arrays import Array, Space


class CrossBasis:
    """Columns reduced as in Gaussian elimination with row pivoting, one at a time.

    After k additions `factors` (size, k) spans the columns added, is the identity-triangular L of the
    elimination at `pivots`, and `inverse` (k, k) undoes it there. The values of a vector of the span at
    the pivots therefore give its coefficients, and with them all its values.
    """

    def __init__(self, space: Space, size: int) -> None:
        self._space = space
        self._size = size
        self._factors = space.zeros(size, 1)
        self._inverse = space.zeros(1, 1)
        self._heights = space.zeros(1)
        self.pivots: list[int] = []

    @property
    def rank(self) -> int:
        """Columns kept."""
        return len(self.pivots)

    @property
    def factors(self) -> Array:  # (size, rank)
        """The reduced columns."""
        return self._factors[:, : self.rank]

    @property
    def inverse(self) -> Array:  # (rank, rank)
        """Takes values at the pivots to coefficients."""
        return self._inverse[: self.rank, : self.rank]

    @property
    def heights(self) -> Array:  # (rank,)
        """The pivot of each column before it was scaled to one."""
        return self._heights[: self.rank]

    def others(self) -> list[int]:
        """The rows that are not pivots, in order."""
        taken = set(self.pivots)
        return [row for row in range(self._size) if row not in taken]

    def add(self, column: Array, radius: float) -> bool:  # (size,)
        """Extend the span by a column; False when it lies in the span within `radius`."""
        xp, rank = self._space.xp, self.rank
        rest = column
        if rank:
            chosen = self._space.indices(self.pivots)
            rest = column - self.factors @ (self.inverse @ xp.take(column, chosen, axis=0))
            rest[chosen] = 0.0  # zero by construction: rounding must not choose a pivot twice
        pivot = int(xp.argmax(xp.abs(rest)))
        height = float(rest[pivot])
        if abs(height) <= radius:
            return False
        if rank == self._factors.shape[1]:
            self._grow()
        self._inverse[rank, :rank] = -(self._factors[pivot, :rank] @ self.inverse)
        self._inverse[rank, rank] = 1.0
        self._factors[:, rank] = rest / height
        self._heights[rank] = height
        self.pivots.append(pivot)
        return True

    def _grow(self) -> None:
        """Double the room, so that adding stays linear in the size."""
        space, xp, rank = self._space, self._space.xp, self.rank
        more = min(rank, self._size - rank)
        self._factors = xp.concat([self._factors, space.zeros(self._size, more)], axis=1)
        wider = xp.concat([self._inverse, space.zeros(rank, more)], axis=1)
        self._inverse = xp.concat([wider, space.zeros(more, rank + more)], axis=0)
        self._heights = xp.concat([self._heights, space.zeros(more)], axis=0)
