"""All kinks of a piecewise linear function on a line, from about six values each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import ArrayTable, Booleans, Floats
from keyhole.errors import KeyholeError

# Where an interval is cut, three points span this part of each side (in the angle, see `_angle`). Wider ones know
# slopes better; narrower ones hide fewer kinks between them.
WINDOW = 2e-3
# A kink is looked at from this part of the interval on either side. Two kinks nearer to each other look like one, which
# new answers refute in the end. Where a first line failed answers may be known to few digits: then a kink is looked at
# from where the two lines are so many of their radii apart, at most this part of the interval.
BESIDE = 1e-5
APART, FARTHEST_BESIDE = 4.0, 0.25
# Where kinks may be anywhere up to the ends, slopes there are taken over this part of the way.
END = 1e-3
# An interval whose ends are on one line may hide kinks that cancel. It is looked at in between as long as it is wider
# than this, in the angle: at most some dozen values for a whole line.
WIDE = 0.4
# An interval shorter than this part of its distance from the origin is not cut any more.
SHORTEST = 1e-10
# More open intervals than this for each kink found so far are no sign of kinks but of a curve.
OPEN_PER_KINK, OPEN_AT_FIRST = 8, 600
MOST_ROUNDS = 80


class NotPiecewiseLinear(KeyholeError):
    """The function bends where no kink is, or has kinks too near to each other to be told apart."""


# A cut at the origin of a line is this wide, as a part of the unit.
CUT = 1e-4


@dataclass(frozen=True)
class Kinked:
    """A piecewise linear function on a line: cell i lies between kinks i − 1 and i."""

    kinks: Floats  # (k,) ascending
    slope: Floats  # (k + 1, outputs)
    value: Floats  # (k + 1, outputs) at `at`
    at: Floats  # (k + 1,) a place in each cell
    level: Floats  # (outputs,) how large values are: they stay below level · (1 + |t|/unit); 1 where they are zero
    slope_error: Floats  # (k + 1,) radius of slopes, as a part of `level`
    last: float
    unit: float

    @property
    def ends(self) -> tuple[Floats, Floats]:  # (k + 1,), (k + 1,)
        """Where each cell begins and ends."""
        return np.concatenate([[-self.last], self.kinks]), np.concatenate([self.kinks, [self.last]])

    def growth(self, t: Floats) -> Floats:
        """How large values are at t, as a part of `level`."""
        return np.asarray(1 + np.abs(t) / self.unit)


@dataclass(frozen=True)
class _Lines(ArrayTable):
    """A straight line through each of n places."""

    at: Floats  # (n,)
    value: Floats  # (n,)
    slope: Floats  # (n,)
    value_error: Floats  # (n,)
    slope_error: Floats  # (n,)

    def of(self, t: Floats) -> tuple[Floats, Floats]:
        """Values at t and their errors."""
        away = t - self.at
        return self.value + self.slope * away, self.value_error + self.slope_error * np.abs(away)


@dataclass(frozen=True)
class _Intervals(ArrayTable):
    """Open intervals: the straight lines at their ends, and where the function departs from them."""

    left: _Lines
    right: _Lines
    low: Floats  # (n,) up to here the function is on the left line
    high: Floats  # (n,) from here on it is on the right line
    missed: Booleans  # (n,) the last cut had a kink beside it: try elsewhere


@dataclass(frozen=True)
class _Cuts(ArrayTable):
    """Cuts begun: one or two points are known where three are needed."""

    t: Floats  # (n, 2), nan where not asked yet
    f: Floats  # (n, 2)


class KinkSearch:
    """Ask for `points`, give the values to `receive`, until `done`: then `result` has the kinks.

    An interval is known by the straight lines at its two ends. If they are one line there is no kink in it. Otherwise
    there is a single one only where they cross: that is so if the function is on the left line just before and on the
    right line just after. Else the interval is cut there, or in its middle, and all are looked at again. Where the
    function is still on one of the lines a cut needs no slope: the interval gets shorter.
    """

    def __init__(
        self,
        last: float,  # the line is looked at for |t| ≤ last
        rounding: float,  # relative error of a value
        noise: float,  # its error beyond that
        rng: np.random.Generator,
        *,
        near: float | None = None,  # where most kinks are; None: anywhere up to last
        unit: float = 1.0,  # the length at which |x| starts to grow with t
        cut: float = 0.0,  # half of a piece at the origin where the first two intervals meet; 0: they are one
    ) -> None:
        self.last, self.near, self.unit = last, near, unit
        self.rounding, self.noise = rounding, noise
        self.patience = 1.0  # factor on tolerances
        self.crowd = OPEN_AT_FIRST
        self.rng = rng
        ends = [last, (1 - END) * last] if near is None else [last, last / 2, near, near / 2]
        self.points: Floats = np.concatenate([-np.array(ends), np.array(ends)[::-1]])
        if cut:
            self.points = np.concatenate([self.points, [-cut, cut]])
        self.cut = cut
        self.kinks: list[float] = []
        self.done = False
        self.rounds = 0
        self._t: list[Floats] = []
        self._values: list[Floats] = []
        self._mix: Floats | None = None  # (outputs,): kinks are sought in one combination of outputs
        self._mixed_noise = 1.0
        self._level = 0.0
        self._open: _Intervals | None = None
        # What is asked: of some intervals a pair around the crossing, of some a middle, of some the rest of a cut.
        self._pair = self._middle = self._rest = np.zeros(0, dtype=np.intp)
        self._begun = _Cuts(np.zeros((0, 2)), np.zeros((0, 2)))

    def receive(self, values: Floats) -> None:  # (n, outputs)
        """The values at `points`."""
        if self._mix is None:
            self._mix = _mixture(values, self.rng)
            self._mixed_noise = float(np.sum(np.abs(self._mix)))
        self._t.append(self.points)
        self._values.append(values)
        mixed = values @ self._mix
        self._level = max(self._level, float(np.max(np.abs(mixed) / (1 + np.abs(self.points) / self.unit))))
        self.rounds += 1
        if self._open is None:
            self._open = self._begin(self.points, mixed)
        else:
            self._open = self._sort(self._open, mixed)
        self._settle()

    def _error(self, t: Floats) -> Floats:
        rounding = self.rounding * self._level * (1 + np.abs(t) / self.unit)
        return self.patience * (rounding + self.noise * self._mixed_noise)

    def _begin(self, t: Floats, values: Floats) -> _Intervals:
        if self.cut:
            whole = self._begin_without_cut(t[:-2], values[:-2])
            inner = _through(t[-2:], values[-2:], self._error(t[-2:]))
            no = np.zeros(1, dtype=bool)
            lower = _Intervals(whole.left, inner, whole.low, t[-2:-1], no)
            return _Intervals.concat(lower, _Intervals(inner, whole.right, t[-1:], whole.high, no))
        return self._begin_without_cut(t, values)

    def _begin_without_cut(self, t: Floats, values: Floats) -> _Intervals:
        errors = self._error(t)
        count = t.size // 2
        sides = (np.arange(count), np.arange(t.size)[: count - 1 : -1])  # inwards from the left and the right end
        ends = [_through(t[side[:2]], values[side[:2]], errors[side[:2]]) for side in sides]
        if self.near is not None:
            straight = True
            for side, line in zip(sides, ends, strict=True):
                expected, radius = line.of(t[side])
                straight &= bool(np.all(np.abs(values[side] - expected) <= radius + errors[side]))
            if straight:  # beyond `near` nothing happens: begin where numbers are small
                ends = [_through(t[side[[0, 3]]], values[side[[0, 3]]], errors[side[[0, 3]]]) for side in sides]
        left, right = ends
        return _Intervals(left, right, left.at, right.at, np.zeros(1, dtype=bool))

    def _on(self, lines: _Lines, t: Floats, f: Floats) -> Booleans:
        """Whether points lie on lines, as far as both are known."""
        expected, radius = lines.of(t)
        return np.asarray(np.abs(f - expected) <= radius + self._error(t))

    def _sort(self, intervals: _Intervals, values: Floats) -> _Intervals:
        pairs, middles = self._pair.size, self._middle.size
        t, f = self.points, values
        self._begun_now: list[_Cuts] = []
        parts = [
            self._pairs(intervals.take(self._pair), t[: 2 * pairs].reshape(-1, 2), f[: 2 * pairs].reshape(-1, 2)),
            self._middles(intervals.take(self._middle), t[2 * pairs :][:middles], f[2 * pairs :][:middles]),
        ]
        rest = self._rests(intervals.take(self._rest), t[2 * pairs + middles :], f[2 * pairs + middles :])
        self._begun = _Cuts.concat(*self._begun_now)
        # Intervals with a cut begun come first, in the order of `_begun`.
        waiting = [part[1] for part in parts]
        return _Intervals.concat(*waiting, *(part[0] for part in parts), rest)

    def _pairs(self, intervals: _Intervals, t: Floats, f: Floats) -> tuple[_Intervals, _Intervals]:
        on_left = np.stack([self._on(intervals.left, t[:, i], f[:, i]) for i in (0, 1)], axis=1)
        on_right = np.stack([self._on(intervals.right, t[:, i], f[:, i]) for i in (0, 1)], axis=1)
        single = on_left[:, 0] & on_right[:, 1]
        self.kinks += list(np.mean(t[single], axis=1))
        before, after = ~single & np.all(on_left, axis=1), ~single & np.all(on_right, axis=1)
        low = np.where(before, t[:, 1], intervals.low)
        high = np.where(after, t[:, 0], intervals.high)
        moved = replace(intervals, low=low, high=high)
        cut = ~single & ~before & ~after
        self._begun_now.append(_Cuts(t[cut], f[cut]))
        return moved.take(before | after), intervals.take(cut)

    def _middles(self, intervals: _Intervals, t: Floats, f: Floats) -> tuple[_Intervals, _Intervals]:
        on_left, on_right = self._on(intervals.left, t, f), self._on(intervals.right, t, f)
        before, after = on_left & ~on_right, on_right & ~on_left
        moved = replace(intervals, low=np.where(before, t, intervals.low), high=np.where(after, t, intervals.high))
        # Ends on one line and nothing in between: the halves are looked at where they are wide.
        half = on_left & on_right & self._same(intervals)
        halves = [replace(intervals, high=t).take(half), replace(intervals, low=t).take(half)]
        cut = ~before & ~after & ~half
        nothing = np.full_like(t, np.nan)
        self._begun_now.append(_Cuts(np.stack([t, nothing], axis=1)[cut], np.stack([f, nothing], axis=1)[cut]))
        return _Intervals.concat(moved.take(before | after), *halves), intervals.take(cut)

    def _rests(self, intervals: _Intervals, t: Floats, f: Floats) -> _Intervals:
        """Cut where three points are on a line; otherwise there is a kink between them: cut elsewhere."""
        all_t, all_f = self._begun.t.copy(), self._begun.f.copy()
        # Of a middle one point is known, of a crossing two.
        lone = np.isnan(all_t[:, 1])
        third_t, third_f = np.empty(lone.size), np.empty(lone.size)
        count = int(lone.sum())
        all_t[lone, 1], all_f[lone, 1] = t[:count], f[:count]
        third_t[lone], third_f[lone] = t[count : 2 * count], f[count : 2 * count]
        third_t[~lone], third_f[~lone] = t[2 * count :], f[2 * count :]
        all_t, all_f = np.column_stack([all_t, third_t]), np.column_stack([all_f, third_f])
        order = np.argsort(all_t, axis=1)
        all_t, all_f = np.take_along_axis(all_t, order, axis=1), np.take_along_axis(all_f, order, axis=1)
        errors = self._error(all_t)
        outer = _through_all(all_t[:, [0, 2]], all_f[:, [0, 2]], errors[:, [0, 2]])
        cut = self._on(outer, all_t[:, 1], all_f[:, 1])
        no = np.zeros(lone.size, dtype=bool)
        lower = _Intervals(intervals.left, outer, intervals.low, all_t[:, 0], no)
        upper = _Intervals(outer, intervals.right, all_t[:, 2], intervals.high, no)
        again = replace(intervals, missed=~no)
        return _Intervals.concat(lower.take(cut), upper.take(cut), again.take(~cut))

    def _settle(self) -> None:
        """Close intervals without a kink and choose the queries in the others."""
        assert self._open is not None
        begun = self._begun.t.shape[0]
        now = self._open
        wide = self._angle(now.high) - self._angle(now.low) > WIDE
        same = self._same(now)
        kept = ~same | wide
        kept[:begun] = True
        now = self._open = now.take(kept)
        if now.low.size == 0:
            self.done = True
            self.points = np.zeros(0)
            return
        self._refuse(now)
        numbers = np.arange(now.low.size)
        self._rest, free = numbers[:begun], numbers[begun:]
        with np.errstate(all="ignore"):
            crossing = now.left.at + (now.right.of(now.left.at)[0] - now.left.value) / (
                now.left.slope - now.right.slope
            )
        inside = (crossing > now.low) & (crossing < now.high) & ~now.missed & ~same[kept]
        self._pair, self._middle = free[inside[begun:]], free[~inside[begun:]]
        low, high = self._angle(now.low), self._angle(now.high)
        part = np.where(now.missed, self.rng.uniform(0.3, 0.7, low.size), 0.5)
        middle = np.clip(self._unangle(low + (high - low) * part), now.low, now.high)
        blunt = ~((middle > now.low) & (middle < now.high))  # angles are coarse far out
        middle[blunt] = 0.5 * (now.low + now.high)[blunt]
        beside = self._beside(now, crossing)
        pair = np.stack(
            [
                self._towards(crossing, end, part)[self._pair]
                for end, part in zip((now.low, now.high), beside, strict=True)
            ],
            axis=1,
        )
        self.points = np.concatenate([pair.ravel(), middle[self._middle], self._rest_of_cuts(now.take(self._rest))])

    def _beside(self, now: _Intervals, crossing: Floats) -> tuple[Floats, Floats]:
        """The parts of the ways to both ends from where it is seen on which of two lines the function is."""
        if self.patience == 1.0:
            return np.full_like(crossing, BESIDE), np.full_like(crossing, BESIDE)
        with np.errstate(all="ignore"):
            radius = now.left.of(crossing)[1] + now.right.of(crossing)[1] + 2 * self._error(crossing)
            away = APART * radius / np.abs(now.left.slope - now.right.slope)
            angles = self._angle(crossing - away), self._angle(crossing), self._angle(crossing + away)
            parts = (
                (angles[1] - angles[0]) / (angles[1] - self._angle(now.low)),
                (angles[2] - angles[1]) / (self._angle(now.high) - angles[1]),
            )
        low, high = (np.clip(np.nan_to_num(part, nan=BESIDE), BESIDE, FARTHEST_BESIDE) for part in parts)
        return low, high

    def _rest_of_cuts(self, intervals: _Intervals) -> Floats:
        begun = self._begun.t
        lone = np.isnan(begun[:, 1])
        at = begun[:, 0]
        below, above = self._towards(at, intervals.low, WINDOW), self._towards(at, intervals.high, WINDOW)
        # Beyond the pair around a crossing, on the wider side.
        wide = np.where(at - intervals.low > intervals.high - at, below, above)
        return np.concatenate([below[lone], above[lone], wide[~lone]])

    def _towards(self, t: Floats, end: Floats, part: float | Floats) -> Floats:
        """A place that goes a part of the way from t to an end, as measured in angles."""
        with np.errstate(all="ignore"):
            angle = self._angle(t)
            near = self._unangle(angle + part * (self._angle(end) - angle))
            straight = t + part * (end - t)
            # Angles are coarse far out, and near places differ less by rounding when the step is added.
            step = np.where(np.abs(near - t) < np.abs(straight - t), near - t, straight - t)
            step = np.where(step == 0, straight - t, step)
            return np.asarray(t + step)

    def _refuse(self, now: _Intervals) -> None:
        """Raise when there is no end of cutting."""
        size = np.abs(now.high - now.low)
        place = np.maximum(np.abs(now.low), np.abs(now.high)) + self.unit
        most = self.crowd + OPEN_PER_KINK * len(self.kinks)
        if now.low.size > most or self.rounds > MOST_ROUNDS or np.any(size < SHORTEST * place):
            worst = int(np.argmin(size / place))
            raise NotPiecewiseLinear(f"the answers along a line bend without a kink near {now.low[worst]:.3g}")

    def _same(self, now: _Intervals) -> Booleans:
        """Whether the two ends of an interval are on one line."""
        at_right, radius_right = now.left.of(now.right.at)
        at_left, radius_left = now.right.of(now.left.at)
        close_right = np.abs(at_right - now.right.value) <= radius_right + now.right.value_error
        close_left = np.abs(at_left - now.left.value) <= radius_left + now.left.value_error
        return np.asarray(close_right & close_left)

    def _angle(self, t: Floats) -> Floats:
        return np.asarray(np.arctan(t / self.unit))

    def _unangle(self, angle: Floats) -> Floats:
        return np.asarray(self.unit * np.tan(angle))

    def result(self) -> Kinked:
        """The kinks, with slope and value in every cell from the two values furthest apart in it."""
        assert self._mix is not None
        kinks = np.sort(np.asarray(self.kinks))
        t, values = np.concatenate(self._t), np.concatenate(self._values)
        order = np.argsort(t, kind="stable")
        t, values = t[order], values[order]
        cell = np.searchsorted(kinks, t)
        count = kinks.size + 1
        if not np.array_equal(np.unique(cell), np.arange(count)):
            raise NotPiecewiseLinear("two kinks have nothing between them")
        first = np.searchsorted(cell, np.arange(count), side="left")
        last = np.searchsorted(cell, np.arange(count), side="right") - 1
        span = t[last] - t[first]
        if np.any(span <= 0):
            raise NotPiecewiseLinear("two kinks have nothing between them")
        slope = (values[last] - values[first]) / span[:, None]
        growth = 1 + np.abs(t) / self.unit
        level = np.max(np.abs(values) / growth[:, None], axis=0)
        level = np.where(level > 0, level, 1.0)
        error = self.patience * self.rounding * (growth[first] + growth[last]) / span
        # Kinks anew, from lines that are known over the whole of their cells.
        mixed_slope, mixed = slope @ self._mix, values @ self._mix
        before, after = last[:-1], first[1:]
        with np.errstate(all="ignore"):
            rise = mixed[after] - mixed[before] - mixed_slope[:-1] * (t[after] - t[before])
            crossing = t[after] - rise / (mixed_slope[1:] - mixed_slope[:-1])
        between = (crossing > t[before]) & (crossing < t[after])
        kinks = np.where(between, crossing, kinks)
        # The end nearer to the origin: its value is known better.
        inner = np.where(np.abs(t[first]) < np.abs(t[last]), first, last)
        return Kinked(kinks, slope, values[inner], t[inner], level, error, self.last, self.unit)


def _mixture(values: Floats, rng: np.random.Generator) -> Floats:  # (n, outputs) -> (outputs,)
    """A random combination of the outputs, none of which drowns the others."""
    outputs = values.shape[1]
    if outputs == 1:
        return np.ones(1)
    size = np.max(np.abs(values), axis=0)
    size = np.where(size > 0, size, 1.0)
    mix: Floats = rng.standard_normal(outputs) / size
    return mix / np.linalg.norm(mix * size)


def _through(t: Floats, values: Floats, errors: Floats) -> _Lines:
    """The line through two points, at the second of them."""
    return _through_all(t[None, ::-1], values[None, ::-1], errors[None, ::-1])


def _through_all(t: Floats, values: Floats, errors: Floats) -> _Lines:  # (n, 2) each
    """Lines through pairs of points, each at the first of them."""
    span = t[:, 1] - t[:, 0]
    slope = (values[:, 1] - values[:, 0]) / span
    return _Lines(t[:, 0], values[:, 0], slope, errors[:, 0], (errors[:, 0] + errors[:, 1]) / np.abs(span))
