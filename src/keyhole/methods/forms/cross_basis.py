"""Incremental cross approximation: which rows of a growing column space determine the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from keyhole.arrays import Array, Space, floats, lu_factor, namespace

# As many columns at least are added by one decomposition where that is faster than one by one.
AT_ONCE = 4


@dataclass(frozen=True)
class ShiftedSolution:
    """Solutions a of A·a − ratio·(own·a) = values, one per column."""

    coefficients: Array  # (rank, n)
    form: Array  # (n,) own·a
    damping: Array  # (n,) at most one: errors are amplified by up to its inverse


def solve_shifted(inverse: Array, own: Array, values: Array, ratio: Array) -> ShiftedSolution:
    """Solve linear systems changed by rank one, column by column, with the Sherman–Morrison formula.

    The change is what a last token that is not short against the first adds to a form. Shapes: the inverse of A is
    (rank, m), own (rank, n), values and ratio (m, n).
    """
    xp = namespace(values)
    plain, shift = inverse @ values, inverse @ ratio
    denominator = 1 - xp.sum(own * shift, axis=0)
    form = xp.sum(own * plain, axis=0) / denominator
    return ShiftedSolution(plain + shift * form, form, xp.minimum(xp.abs(denominator), xp.ones_like(denominator)))


@final
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
        self._show()

    def _show(self) -> None:
        rank = len(self.pivots)
        self.factors = self._factors[:, :rank]  # (size, rank) the reduced columns
        self.inverse = self._inverse[:rank, :rank]  # takes values at the pivots to coefficients
        self.heights = self._heights[:rank]  # (rank,) the pivot of each column before it was scaled to one

    def add(self, columns: Array, radii: Array | Sequence[float]) -> int:  # (size, n), (n,)
        """Extend the span by columns; how many do not lie in it within their radius."""
        xp, before = self._space.xp, len(self.pivots)
        radii = self._space.asarray(radii)
        rest = columns
        if before:
            chosen = self._space.indices(self.pivots)
            rest = columns - self.factors @ (self.inverse @ xp.take(columns, chosen, axis=0))
            rest[chosen, :] = 0.0  # zero by construction: rounding must not choose a pivot twice
        else:
            rest = columns + 0.0  # a copy: it is changed below
        if not self._add_at_once(rest, radii):
            self._add_each(rest, floats(radii).tolist())
        return len(self.pivots) - before

    def _add_at_once(self, rest: Array, radii: Array) -> bool:
        """Add all columns by one decomposition; False, with nothing added, where one lies in the span of the others.

        On a device a kernel for every column, and a look at its pivot, would take longer than their queries.
        """
        count, xp = int(radii.shape[0]), self._space.xp
        if count < AT_ONCE or count > rest.shape[0]:
            return False
        found = lu_factor(rest)
        if found is None:
            return False
        packed, order = found
        heights = xp.linalg.diagonal(packed)
        if not bool(xp.all(xp.abs(heights) > radii)):
            return False
        rank, rows = len(self.pivots), self._space.indices(order)
        lower = xp.tril(packed, k=-1) + xp.eye(*packed.shape, dtype=packed.dtype, device=packed.device)
        factors = xp.empty_like(rest)
        factors[rows, :] = lower
        within = xp.linalg.inv(lower[:count, :])
        stop = rank + count
        while stop > self._factors.shape[1]:
            self._grow()
        self._inverse[rank:stop, :rank] = -(within @ (xp.take(self.factors, rows[:count], axis=0) @ self.inverse))
        self._inverse[rank:stop, rank:stop] = within
        self._factors[:, rank:stop] = factors
        self._heights[rank:stop] = heights
        self.pivots += order[:count].tolist()
        self._show()
        return True

    def _add_each(self, rest: Array, radii: list[float]) -> None:
        """Add columns one by one, but for those that lie in the span of what was added before within their radius."""
        xp = self._space.xp
        for place, radius in enumerate(radii):
            column = rest[:, place]
            pivot = int(xp.argmax(xp.abs(column)))
            height = float(column[pivot])
            if abs(height) <= radius:
                continue
            factor = column / height
            later = rest[:, place + 1 :]
            later -= factor[:, None] * later[pivot : pivot + 1, :]
            later[pivot, :] = 0.0
            self._append(factor, pivot, height)

    def _append(self, factor: Array, pivot: int, height: float) -> None:
        rank = len(self.pivots)
        if rank == self._factors.shape[1]:
            self._grow()
        self._inverse[rank, :rank] = -(self._factors[pivot, :rank] @ self.inverse)
        self._inverse[rank, rank] = 1.0
        self._factors[:, rank] = factor
        self._heights[rank] = height
        self.pivots.append(pivot)
        self._show()

    def _grow(self) -> None:
        """Double the room, so that adding stays linear in the size."""
        space, xp = self._space, self._space.xp
        rank = self._factors.shape[1]
        more = min(rank, self._size - rank)
        self._factors = xp.concat([self._factors, space.zeros(self._size, more)], axis=1)
        wider = xp.concat([self._inverse, space.zeros(rank, more)], axis=1)
        self._inverse = xp.concat([wider, space.zeros(more, rank + more)], axis=0)
        self._heights = xp.concat([self._heights, space.zeros(more)], axis=0)
