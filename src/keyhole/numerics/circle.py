"""A half-circle on which a function is constant but for jumps: which points to look at next to isolate every jump."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

# A jump is isolated when all others are farther from it than this many times the interval it is known to lie in.
ISOLATED = 8.0


class HalfCircle:
    """Points on [0, π] in order, with the levels seen there; two neighbours of different levels enclose a jump."""

    def __init__(self, angles: Floats, levels: Floats, tolerance: float) -> None:
        self.angles, self.levels, self.tolerance = angles, levels, tolerance

    def jumps(self) -> Integers:  # (jumps,)
        """The intervals, by the number of their left end, over which the level changes."""
        return np.flatnonzero(np.abs(np.diff(self.levels)) > self.tolerance)

    def gaps(self, jumps: Integers) -> Floats:  # (jumps,)
        """How far the nearest other jump is at least; the end of the half-circle continues at its beginning."""
        if jumps.size < 2:
            return np.full(jumps.size, np.pi)
        left, right = self.angles[jumps], self.angles[jumps + 1]
        after = np.append(left[1:], left[0] + np.pi) - right
        return np.minimum(after, np.roll(after, 1))

    def unsettled(self, widest: float, narrowest: float) -> Floats:
        """Midpoints of intervals of jumps that are too wide, or too near to others, and wider than `narrowest`."""
        jumps = self.jumps()
        widths = self.angles[jumps + 1] - self.angles[jumps]
        wide = (widths > widest) | (ISOLATED * widths > self.gaps(jumps))
        chosen = jumps[wide & (widths > narrowest)]
        return (self.angles[chosen] + self.angles[chosen + 1]) / 2

    def undivided(self, ranges: Floats, narrowest: float) -> Floats:  # (n, 2) -> (m,)
        """Midpoints of intervals of jumps that are the only ones within a range, and wider than `narrowest`."""
        jumps = self.jumps()
        left, right = self.angles[jumps], self.angles[jumps + 1]
        inside = (left >= ranges[:, :1]) & (right <= ranges[:, 1:])  # (ranges, jumps)
        alone = np.any(inside & (np.sum(inside, axis=1, keepdims=True) == 1), axis=0)
        chosen = alone & (right - left > narrowest)
        return np.asarray((left[chosen] + right[chosen]) / 2)

    def add(self, angles: Floats, levels: Floats) -> None:
        """Put more points in."""
        order = np.argsort(np.append(self.angles, angles), kind="stable")
        self.angles = np.append(self.angles, angles)[order]
        self.levels = np.append(self.levels, levels)[order]


def next_guess(
    left: Floats,  # (n,) brackets of a root
    right: Floats,
    left_logit: Floats,  # (n,) logits there, infinite where they are not known
    right_logit: Floats,
    aim: Floats | float = 0.0,
) -> Floats:
    """Where the logit is `aim` by interpolation, kept inside the bracket; its middle where an end is not known."""
    known = np.isfinite(left_logit) & np.isfinite(right_logit)
    with np.errstate(invalid="ignore", divide="ignore"):
        part = np.where(known, (aim - left_logit) / (right_logit - left_logit), 0.5)
    inside = np.clip(np.nan_to_num(part, nan=0.5), 0.02, 0.98)
    return np.asarray(left + inside * (right - left))


def cross_section(first: Floats, second: Floats, angles: Floats) -> Floats:  # (width,), (width,), (n,) -> (n, width)
    """Points of the half-circle that goes from `first` through `second` to −`first`."""
    return np.cos(angles)[:, None] * first + np.sin(angles)[:, None] * second
