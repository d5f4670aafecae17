"""Every head of a layer as one jump on a half-circle of last tokens.

With a long first token every head gives all its weight to one of the two tokens, and along a half-circle from g to −g
every head switches from one to the other exactly once. A jump is one head if and only if doubling either token moves
its logit by ±ln 2, which also tells the head's sign.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Booleans, Floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.scale import NO_RESPONSE
from keyhole.methods.multi_head.scalar.gates import homogeneous
from keyhole.methods.multi_head.scalar.jumps import Arc, HalfCircle, JumpReader, Jumps
from keyhole.methods.multi_head.scalar.queries import Scope
from keyhole.recovery import Outcome

# Scales tried, as powers of two: the largest, and ever finer steps.
FARTHEST_POWER, POWER_STEPS = 96, (48, 12, 3)
# Radii tried where there are score biases, and the factor beyond the smallest at which all heads switch.
RADII, RADII_FINE, BEYOND = range(-40, 41, 8), (2, 4, 6), 8.0
# The scale at which a score bias shows, however small; a smaller one does nothing to tokens of ordinary length.
BIAS_SCALE = 2.0**60
# Angles asked first; jumps are then enclosed in intervals of width WIDEST, and never narrower than NARROWEST, or
# than so many eps of the dtype.
FIRST_ANGLES = 17
WIDEST, NARROWEST, NARROWEST_EPS = np.pi * 2.0**-9, 2.0**-31, 2.0**6
# Jumps are searched at the scale that saturates every head at one point, times this over the narrowest interval, so
# that they are sharper than that.
SHARP = 8.0
# More jumps than this are no heads.
MOST_JUMPS = 2048
MOST_ROUNDS = 100

NO_SWITCH = "answers do not turn with the last token as those of softmax heads do, whatever their score biases"
MOST_RADII = 8


class NoSwitch(Unrecoverable):
    """Raised where some head does not turn with the last token: it has a score bias but no score, or is none."""


@dataclass(frozen=True)
class JumpSearch:
    """The jumps of the answers along a half-circle of last tokens."""

    scope: Scope
    jumps: Jumps
    joint: int  # jumps that several heads share
    closest: float  # the smallest angle between jumps


def ask_for_bias(scope: Scope, rng: np.random.Generator) -> Steps[Scope]:
    """The radius of last tokens at which every head switches, where a last token of zero shows score biases."""
    width = scope.signature.width
    scale = np.array([BIAS_SCALE])
    biased = replace(scope, radius=1.0)
    nothing = np.append(np.zeros(width), 1.0)[None, :]
    level = (yield from biased.ask("biases", scale, nothing))[:, :] @ scope.mix
    scope = scope.with_values_of(level)
    whole = float(scope.row @ scope.vector @ scope.mix)
    known_radius = float(biased.known_error(scale, scope.mix)[0])
    if abs(float(level[0]) - whole / 2) <= scope.level_radius + known_radius:
        return scope
    direction = rng.standard_normal(width)
    direction /= np.linalg.norm(direction)

    def ask_switch(powers: list[int]) -> Steps[Booleans]:
        radii = np.exp2(np.array(powers, dtype=np.float64))
        both = np.concatenate([radii, -radii])
        points = np.column_stack([both[:, None] * direction, np.ones(both.size)])
        sums = (yield from biased.ask("biases", np.full(both.size, scale[0]), points)) @ scope.mix
        error = scope.with_values_of(sums).level_radius + known_radius * np.maximum(1, radii)
        return np.abs(sums[: radii.size] + sums[radii.size :] - whole) <= 4 * error

    powers = list(RADII)
    good = yield from ask_switch(powers)
    if not good[-1]:
        raise NoSwitch(Outcome.WRONG_FAMILY, NO_SWITCH)
    first = _start_of_tail(good)
    if first > 0:
        finer = [powers[first - 1] + step for step in RADII_FINE]
        good = yield from ask_switch(finer)
        smallest = [*finer, powers[first]][_start_of_tail(np.append(good, True))]
    else:
        smallest = powers[0]
    return replace(scope, radius=BEYOND * 2.0**smallest)


def ask_jumps(scope: Scope, rng: np.random.Generator) -> Steps[JumpSearch | None]:
    """All jumps of one half-circle; None when no answer depends on the scale."""
    width = scope.signature.width
    start, other = np.linalg.qr(rng.standard_normal((width, 2)))[0].T if width > 1 else np.array([[1.0], [0.0]])
    whole = float(scope.row @ scope.vector @ scope.mix)
    for _ in range(MOST_RADII):
        scope, scale = yield from _ask_saturating(scope, homogeneous(start[None, :], scope.size))
        if scale is None:
            return None
        saturating = scale
        half = _Half(scope, scale, Arc(start, other, scope.size))
        circle = yield from half.ask_first()
        scope = half.scope
        inconsistent = abs(float(circle.levels[0] + circle.levels[-1]) - whole) > 4 * scope.level_radius
        if not inconsistent:
            break
        if scope.radius is None:
            break
        scope = replace(scope, radius=BEYOND * scope.radius)  # some heads did not switch
    if inconsistent:
        raise Unrecoverable(Outcome.WRONG_FAMILY, "answers to opposite tokens do not add up as those of heads do")
    doubled = yield from scope.ask("jumps", np.full(1, half.scale), half.arc.at(np.zeros(1)), copies=(2, 1))
    uniform = 6 * (float(doubled[0] @ scope.mix) - float(circle.levels[0]))
    scope = replace(scope, uniform=uniform if abs(uniform) > 24 * scope.level_radius else 0.0)
    yield from _ask_isolation(circle, half.ask_sums)
    reader = JumpReader(scope, saturating, circle, half.arc)
    yield from reader.run()
    if reader.doubtful.size:
        # Two heads with nearby hyperplanes, or several with the same one.
        yield from _ask_isolation(circle, half.ask_sums, reader.doubtful)
        yield from reader.run()
    closest = float(np.min(circle.gaps(), initial=np.pi))
    return JumpSearch(scope, reader.jumps(), reader.doubtful.shape[0], closest)


class _Half:
    """An arc, asked at one scale."""

    def __init__(self, scope: Scope, scale: float, arc: Arc) -> None:
        self.narrowest = max(NARROWEST, NARROWEST_EPS * scope.signature.space.eps)
        self.scope, self.scale, self.arc = scope, SHARP / self.narrowest * scale, arc

    def ask_sums(self, angles: Floats) -> Steps[Floats]:  # (n,) -> (n,)
        levels = yield from self.scope.ask("jumps", np.full(angles.size, self.scale), self.arc.at(angles))
        return np.asarray(levels @ self.scope.mix)

    def ask_first(self) -> Steps[HalfCircle]:
        angles = np.linspace(0.0, np.pi, FIRST_ANGLES)
        levels = yield from self.ask_sums(angles)
        self.scope = self.scope.with_values_of(levels)
        return HalfCircle(angles, levels, 4 * self.scope.level_radius, self.narrowest)


def _start_of_tail(good: Booleans) -> int:
    """Index from which on all entries are true."""
    bad = np.flatnonzero(~good)
    return int(bad[-1]) + 1 if bad.size else 0


def _ask_saturating(scope: Scope, point: Floats) -> Steps[tuple[Scope, float | None]]:
    """The smallest scale, up to a factor of eight, beyond which levels are constant; None when all levels are equal."""

    def ask_sums(powers: Floats) -> Steps[tuple[Floats, Floats]]:
        scales = np.exp2(powers)
        levels = (yield from scope.ask("scale", scales, np.repeat(point, powers.size, axis=0))) @ scope.mix
        return levels, scope.known_error(scales, scope.mix)

    low, high = -FARTHEST_POWER - POWER_STEPS[0], FARTHEST_POWER
    settled: float | None = None
    for step in POWER_STEPS:
        powers = np.arange(low + step, high + (settled is None), step, dtype=np.float64)
        clear = scope.is_clear(np.exp2(powers))
        powers = powers[clear] if np.any(clear) or settled is not None else powers
        levels, errors = yield from ask_sums(powers)
        if settled is None:
            scope, settled = scope.with_values_of(levels), float(levels[-1])
        same = np.abs(levels - settled) <= scope.level_radius + errors
        if scope.radius is None and step == POWER_STEPS[0] and np.all(same):
            return scope, None
        first = _start_of_tail(same)
        high = int(np.append(powers, high)[first])
        low = int(powers[first - 1]) if first else high - step
    if high > FARTHEST_POWER - POWER_STEPS[1]:
        raise Unrecoverable(Outcome.WRONG_FAMILY, NO_RESPONSE)
    return scope, float(2.0**high)


def _ask_isolation(
    circle: HalfCircle, ask_sums: Callable[[Floats], Steps[Floats]], doubtful: Floats | None = None
) -> Steps[None]:
    """Bisect until every jump is in an interval of its own; in `doubtful` ranges until they show two."""
    for _ in range(MOST_ROUNDS):
        if circle.jumps()[0].size > MOST_JUMPS:
            break
        angles = circle.open_ranges(WIDEST)
        if doubtful is not None:
            angles = np.union1d(angles, circle.wide_ranges(doubtful))
        if not angles.size:
            return
        circle.add(angles, (yield from ask_sums(angles)))
    raise Unrecoverable(
        Outcome.WRONG_FAMILY, "answers to long tokens do not keep to a few levels: the box is no sum of softmax heads"
    )
