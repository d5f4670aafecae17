"""Jumps of single heads on a half-circle: isolated, located, and shown to be one head each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import ArrayTable, Booleans, Floats, Integers
from keyhole.methods.base import Steps
from keyhole.methods.multi_head.scalar.gates import homogeneous
from keyhole.methods.multi_head.scalar.queries import Scope
from keyhole.queries import Measurements

# A jump is isolated when all others are farther from it than this many times the interval it is known to lie in.
ISOLATED = 8.0


class HalfCircle:
    """Points on [0, π] in order, with their levels; two neighbours of different levels enclose a jump.

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


@dataclass(frozen=True)
class Arc:
    """The half-circle of last tokens from `first` through `second` to −`first`."""

    first: Floats  # (width,)
    second: Floats  # (width,)
    size: int  # coordinates of a point

    def at(self, angles: Floats) -> Floats:  # (n,) -> (n, size)
        """The points at these angles."""
        points = np.cos(angles)[:, None] * self.first + np.sin(angles)[:, None] * self.second
        return homogeneous(points, self.size)


# In units of one over the gap to the next jump, the scale at which all but one head are saturated in its interval,
# over that which saturates all heads at one point.
OPEN = 4.0
# Logits within CENTRE locate a jump, those at ±PROBE certify it: at zero, proportional heads would pass for one.
CENTRE, PROBE = 1.0, 1.5
# A weight is taken for zero or one within this many times its error.
SATURATED = 2.0**8
# A certified shift may differ from ln 2 by this many times the errors of its logits.
SHIFT_ERRORS = 4.0
MOST_ROUNDS = 100


@dataclass(frozen=True)
class Jumps(ArrayTable):
    """Jumps of single heads, one entry each."""

    ranges: Floats  # (n, 2) angles that enclose them
    points: Floats  # (n, size) where the logit is small
    logits: Floats  # (n,) the logits there, of the first token
    slopes: Floats  # (n,) of the logit along the half-circle
    scales: Floats  # (n,) the scales they were read at: every other head is saturated
    shares: Floats  # (n,) u₀·v in the combination of outputs
    base: Floats  # (n,) level of all other heads there
    errors: Floats  # (n,) radius of a logit near zero

    def __len__(self) -> int:
        return int(self.shares.size)

    def solve_logits(self, levels: Floats, which: Integers) -> tuple[Floats, Floats]:  # (n,), (n,) -> (n,), (n,)
        """Logits of the first token behind levels near some jumps, and their radii; infinite ones where saturated."""
        weights = (levels - self.base[which]) / self.shares[which]
        return logits_of(weights, self.errors[which] / 4)


def logits_of(weights: Floats, radius: Floats) -> tuple[Floats, Floats]:  # (n,), (n,) -> (n,), (n,)
    """Logits of weights and their radii; ±inf where the weight is 0 or 1 within its error."""
    inside = (weights > SATURATED * radius) & (1 - weights > SATURATED * radius)
    safe = np.where(inside, weights, 0.5)
    logits = np.where(inside, np.log(safe / (1 - safe)), np.where(weights < 0.5, -np.inf, np.inf))
    return logits, np.where(inside, radius / (safe * (1 - safe)), np.inf)


class JumpReader:
    """Reads the jumps of a half-circle; may be run again after more of its points are known."""

    def __init__(self, scope: Scope, scale: float, circle: HalfCircle, arc: Arc) -> None:
        self.scope, self.scale, self.circle, self.arc = scope, scale, circle, arc
        self.certified: Jumps | None = None
        self.doubtful: Floats = np.zeros((0, 2))  # ranges of jumps that are not those of one head

    def jumps(self) -> Jumps:
        """All that are certified, in order."""
        if self.certified is None:
            nothing = np.zeros(0)
            return Jumps(np.zeros((0, 2)), np.zeros((0, self.scope.size)), *(nothing,) * 6)
        return self.certified.take(np.argsort(self.certified.ranges[:, 0]))

    def run(self) -> Steps[None]:
        """Locate and certify the jumps that are not certified yet."""
        circle = self.circle
        before, after = circle.jumps()
        gaps = circle.gaps()
        if self.certified is not None:
            known = self.certified.ranges
            inside = (circle.angles[before, None] >= known[:, 0]) & (circle.angles[after, None] <= known[:, 1])
            new = ~np.any(inside, axis=1)
            before, after, gaps = before[new], after[new], gaps[new]
        if not before.size:
            self.doubtful = np.zeros((0, 2))
            return
        batch = _Batch(self, before, after, OPEN * self.scale / gaps)
        jumps, good = yield from batch.ask()
        self.doubtful = jumps.ranges[~good]
        single = jumps.take(np.flatnonzero(good))
        self.certified = single if self.certified is None else Jumps.concat(self.certified, single)


class _Batch:
    """Locates and tests some jumps, all in the same plans."""

    def __init__(self, reader: JumpReader, before: Integers, after: Integers, scales: Floats) -> None:
        circle = reader.circle
        self.scope, self.at, self.scales = reader.scope, reader.arc.at, scales
        self.left, self.right = circle.angles[before], circle.angles[after]
        self.ranges = np.stack([self.left, self.right], axis=1)
        self.before = circle.levels[before]
        self.step = circle.levels[after] - self.before
        self.weight_radius = (4 * self.scope.level_radius + self.scope.known_error(scales, self.scope.mix)) / np.abs(
            self.step
        )

    def _weights(self, levels: Floats, which: Integers) -> tuple[Floats, Floats]:
        weights = (levels - self.before[which]) / self.step[which]
        return logits_of(weights, self.weight_radius[which])

    def _ask_location(self) -> Steps[tuple[Floats, Floats, Floats, Booleans]]:
        """Angles with small logits, the logits, the slopes, and which jumps have them."""
        count = self.scales.size
        low, high = np.full(count, -np.inf), np.full(count, np.inf)
        angle, logit = np.zeros(count), np.full(count, np.inf)
        left, right = self.left.copy(), self.right.copy()
        open_ = np.arange(count)
        for _ in range(MOST_ROUNDS):
            if not open_.size:
                break
            guess = next_guess(left[open_], right[open_], low[open_], high[open_])
            levels = (yield from self.scope.ask("jumps", self.scales[open_], self.at(guess))) @ self.scope.mix
            logits, _ = self._weights(levels, open_)
            below = logits < 0
            left[open_[below]], low[open_[below]] = guess[below], logits[below]
            right[open_[~below]], high[open_[~below]] = guess[~below], logits[~below]
            better = np.abs(logits) < np.abs(logit[open_])
            angle[open_[better]], logit[open_[better]] = guess[better], logits[better]
            sloped = np.isfinite(low[open_]) & np.isfinite(high[open_])
            narrow = right[open_] - left[open_] < 8 * self.scope.signature.space.eps
            open_ = open_[~((np.abs(logit[open_]) <= CENTRE) & sloped) & ~narrow]
        good = np.isfinite(low) & np.isfinite(high) & (np.abs(logit) <= CENTRE)
        slopes = np.where(good, (high - low) / (right - left), 1.0)
        return angle, logit, slopes, good

    def ask(self) -> Steps[tuple[Jumps, Booleans]]:
        """The jumps, and which of them are those of one head."""
        angle, logit, slopes, good = yield from self._ask_location()
        angle, logit = np.where(good, angle, self.left), np.where(good, logit, 0.0)
        above, below = angle + (PROBE - logit) / slopes, angle - (PROBE + logit) / slopes
        scope, scales = self.scope, self.scales
        high, low = self.at(above), self.at(below)
        plans = [
            scope.plan("one head", scales, high),
            scope.plan("one head", scales, low),
            scope.plan("one head", scales, high, copies=(2, 1)),
            scope.plan("one head", scales, low, copies=(1, 2)),
        ]
        answers: list[Measurements] = yield plans
        every = np.arange(scales.size)
        # Heads of equal weights give two thirds to a token that is doubled, and one to the other.
        extra = np.array([0.0, 0.0, 1.0, -1.0]) * scope.uniform / 6
        (up, up_radius), (down, down_radius), (first, first_radius), (last, last_radius) = (
            self._weights(scope.levels(answer, scales, points) @ scope.mix - more, every)
            for answer, points, more in zip(answers, (high, low, high, low), extra, strict=True)
        )
        width = scope.signature.width
        # The oracle's product behind a logit is rounded at the size of its factors, of which a slope shows its share.
        long, short = scope.norms(scales)
        own = scope.signature.space.rounding * np.abs(slopes) * width**0.5 * (1 + 2 * short / long)
        shift, shift_back = first - up, down - last
        shift_radius = SHIFT_ERRORS * (up_radius + down_radius + first_radius + last_radius + 2 * own)
        sign = np.sign(shift)
        good &= np.abs(shift - sign * math.log(2)) <= shift_radius
        good &= np.abs(shift_back - sign * math.log(2)) <= shift_radius
        good &= shift_radius < 0.1  # false for nan
        shares = sign * self.step
        base = np.where(sign > 0, self.before, self.before + self.step)
        errors = 4 * self.weight_radius + own
        jumps = Jumps(self.ranges, self.at(angle), sign * logit, sign * slopes, scales, shares, base, errors)
        return jumps, good
