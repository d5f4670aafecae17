"""The numbers of the small floating-point dtypes, as float64 numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats
from keyhole.errors import UsageError


@dataclass(frozen=True)
class Grid:
    """All numbers of a dtype, subnormals included."""

    name: str
    digits: int  # binary digits of a normal number
    lowest: int  # exponent of the smallest normal number, which is 2**lowest
    highest: int  # all numbers are below 2**highest

    @property
    def smallest(self) -> float:
        """The smallest positive number, a subnormal one."""
        return 2.0 ** (self.lowest - self.digits + 1)

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return (2.0 - 2.0 ** (1 - self.digits)) * 2.0 ** (self.highest - 1)

    def spacing(self, numbers: Floats) -> Floats:
        """Distance between neighbours in the binade of each number."""
        _, exponent = np.frexp(numbers)
        return np.asarray(np.exp2(np.maximum(exponent - 1, self.lowest) - (self.digits - 1.0)))

    def within(self, centre: Floats, radius: Floats) -> tuple[Floats, Floats]:
        """The smallest and the largest number of the dtype in each interval; where none is, the first is the larger.

        Intervals are widened by one rounding of float64, so that none is lost to it.
        """
        low, high = np.nextafter(centre - radius, -np.inf), np.nextafter(centre + radius, np.inf)
        limit = 2 * self.largest  # keeps infinities out of the arithmetic; no number of the dtype is that large
        low, high = np.clip(low, -limit, limit), np.clip(high, -limit, limit)
        step_low, step_high = self.spacing(low), self.spacing(high)
        first, last = np.ceil(low / step_low) * step_low, np.floor(high / step_high) * step_high
        first = np.where(first < -self.largest, -self.largest, first)
        return first, np.where(last > self.largest, self.largest, last)


GRIDS = {
    "float32": Grid("float32", 24, -126, 128),
    "bfloat16": Grid("bfloat16", 8, -126, 128),
    "float16": Grid("float16", 11, -14, 16),
}


def grid_of(dtype: str) -> Grid:
    """The numbers of a dtype by its name."""
    if dtype not in GRIDS:
        raise UsageError(f"unknown dtype {dtype!r}; known: {', '.join(GRIDS)}")
    return GRIDS[dtype]
