"""A half-circle on which a function is constant but for jumps: which points to look at next to isolate every jump."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats, Integers

# A jump is isolated when all others are farther from it than this many times the interval it is known to lie in.
ISOLATED = 8.0


class HalfCircle:
    """Points on [0, π] in order, with the levels seen there; two neighbours of different levels enclose a jump.

    Intervals are not made narrower than `narrowest`: there a jump may have more than one, if it is not that sharp.
    """

    def __init__(self, angles: Floats, levels: Floats, tolerance: float, narrowest: float) -> None:
        self.angles, self.levels = angles, levels
        self.tolerance, self.narrowest = tolerance, narrowest

    def jumps(self) -> tuple[Integers, Integers]:  # (jumps,), (jumps,)
        """The points before and after each jump."""
        changes = np.abs(np.diff(self.levels)) > self.tolerance
        fine = changes & (np.diff(self.angles) <= self.narrowest)
        joined = np.append(False, fine[1:] & fine[:-1])  # with the one before
        return np.flatnonzero(changes & ~joined), np.flatnonzero(changes & ~np.append(joined[1:], False)) + 1

    def gaps(self) -> Floats:  # (jumps,)
        """How far the nearest other jump is at least; the end of the half-circle continues at its beginning."""
        before, after = self.jumps()
        if before.size < 2:
            return np.full(before.size, np.pi)
        left, right = self.angles[before], self.angles[after]
        gaps = np.append(left[1:], left[0] + np.pi) - right
        return np.maximum(np.minimum(gaps, np.roll(gaps, 1)), self.narrowest)

    def open_ranges(self, widest: float) -> Floats:
        """Midpoints of intervals of jumps that are too wide, or too near to others."""
        before, after = self.jumps()
        widths = self.angles[after] - self.angles[before]
        wide = (widths > widest) | (ISOLATED * widths > self.gaps())
        return self._middles(before[wide & (after == before + 1)])

    def wide_ranges(self, ranges: Floats) -> Floats:  # (n, 2) -> (m,)
        """Midpoints of intervals of jumps that are the only ones within a range."""
        before, after = self.jumps()
        inside = (self.angles[before] >= ranges[:, :1]) & (self.angles[after] <= ranges[:, 1:])  # (ranges, jumps)
        alone = np.any(inside & (np.sum(inside, axis=1, keepdims=True) == 1), axis=0)
        return self._middles(before[alone & (after == before + 1)])

    def _middles(self, before: Integers) -> Floats:
        left, right = self.angles[before], self.angles[before + 1]
        return np.asarray(((left + right) / 2)[right - left > self.narrowest])

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
