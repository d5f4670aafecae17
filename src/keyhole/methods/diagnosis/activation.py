"""Which smooth activation a net has: the bend of one neuron, measured where all others are affine.

From far away the bends of a net lie far apart on a line: halving it finds one of them, and what the answer does there
is an affine map and one neuron, c·act(s·(t − t₀)). The activation that fits it to the last digits is the net's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Booleans, Floats
from keyhole.methods.base import Steps
from keyhole.methods.diagnosis.family_tests import BendFit, bend_fit
from keyhole.methods.examination import Examination

# (count, width) points -> answers (count, outputs) to single tokens
Ask = Callable[[Floats], Steps[Floats]]

# Spots at which curvature is looked for.
SPOTS = 4
# Steps between tokens over their norm: small beside the pieces of a net, large beside rounding.
STEP = 2.0**-10
# Where nothing bends they are looked for at norms of so many times as much: neurons bend over lengths of their own, and
# are seen to from a thousandth of these up to some of them.
NORMS = (1.0, 2.0**11, 2.0**-11)
# How far bends over shorter steps may be from going with their squares, relatively.
SQUARES = 0.1
# Norms from which the bends of smooth neurons are looked at, over the square root of the width: where they are wide, or
# many, from farther away. It takes answers of so many digits.
FARTHER, FINE = (2.0**16, 2.0**26, 2.0**36), 1e-14
CANDIDATES = ("gelu", "gelu_tanh", "silu")
# A slope is taken over this part of an interval, at its ends and in its middle.
PART = 1 / 64
# In the middle of a bend the slope is between those of both ends by more than this part.
BETWEEN = 0.02
# Halves without a bend that must have been seen before: an interval with many bends looks like one with a wide one.
LEAST_SHARP = 2
MOST_HALVINGS = 60
# A first look at an interval takes so many points, and fits any smooth activation; so many looks are made on a line.
FIRST_POINTS, FIRST, MOST_LOOKS = 12, "silu", 8
# The second look takes more, over so many widths of the bend to either side.
POINTS, SPREAD = 24, 8.0
# The activation is named where it fits so much better than every other, others miss this part of the bend, and it
# itself no more than that: of the nearest pair, the two forms of GELU, one misses 2e-4 of the other.
CLEARLY, APART, WELL = 20.0, 5e-5, 1e-5
# A bend over fewer points than this leaves of them may be that of anything, and is looked at more closely.
WIDEST, MOST_NEARER = 30.0, 4
# An interval of a smaller part of its place has too few numbers in it.
NARROWEST = 1e-10
# Fits that a first look at an interval makes worth another look.
PROMISING = 0.1


@dataclass(frozen=True)
class Named:
    """The activation that fits the bend of a neuron."""

    name: str
    misfit: float  # of the bend
    next_best: str
    next_misfit: float


def name_activation(ask: Ask, origin: Floats, direction: Floats, farthest: float) -> Steps[Named | None]:
    """The activation of a net from one bend on origin + t·direction, |t| ≤ farthest; None where no bend shows it."""

    def along(t: Floats) -> Steps[Floats]:
        return (yield from ask(origin + t[:, None] * direction))

    low, high = -farthest, farthest
    left, right = yield from _slopes(along, np.array([low, high]), PART * (high - low))
    looks = sharp = 0
    for _ in range(MOST_HALVINGS):
        middle, step = 0.5 * (low + high), PART * (high - low)
        (here,) = yield from _slopes(along, np.array([middle]), step)
        jump = right - left
        size = float(jump @ jump)
        if size == 0.0 or step <= NARROWEST * farthest:
            return None
        share = float((here - left) @ jump) / size
        between = BETWEEN < share < 1 - BETWEEN
        if between and sharp >= LEAST_SHARP:
            named, looks = (yield from _ask_bend(along, low, high)), looks + 1
            if named is not None or looks == MOST_LOOKS:
                return named
        sharp += not between
        if np.linalg.norm(here - left) >= np.linalg.norm(right - here):
            high, right = middle, here
        else:
            low, left = middle, here
    return None


def _slopes(along: Ask, at: Floats, step: float) -> Steps[list[Floats]]:
    answers = yield from along(np.concatenate([at - 0.5 * step, at + 0.5 * step]))
    return list((answers[at.size :] - answers[: at.size]) / step)


def _ask_bend(along: Ask, low: float, high: float) -> Steps[Named | None]:
    """A first fit to the whole interval, and others nearer and nearer to the bend where there seems to be one."""
    (best,) = yield from _fits(along, low, high, FIRST_POINTS, (FIRST,))
    for _ in range(MOST_NEARER):
        if not (best.misfit < PROMISING and low < best.centre < high):
            return None
        width = SPREAD / best.sharpness
        low, high = best.centre - width, best.centre + width
        if not high - low > NARROWEST * max(abs(low), abs(high)):
            return None
        fits = yield from _fits(along, low, high, POINTS, CANDIDATES)
        best, second = sorted(fits, key=lambda fit: fit.misfit)[:2]
        if best.sharpness * (high - low) <= WIDEST:
            clear = best.misfit <= WELL and second.misfit >= max(APART, CLEARLY * best.misfit)
            return Named(best.name, best.misfit, second.name, second.misfit) if clear else None
    return None


def _fits(along: Ask, low: float, high: float, count: int, names: tuple[str, ...]) -> Steps[list[BendFit]]:
    t = np.linspace(low, high, count)
    answers = yield from along(t)
    return [bend_fit(name, t, answers) for name in names]


def ask_activation(exam: Examination) -> Steps[str]:
    """The activation of a net: relu, one of `CANDIDATES`, or smooth where it cannot be named."""
    curved = yield from ask_curvature(exam, SPOTS, NORMS)
    return (yield from ask_smooth_activation(exam)) if curved else "relu"


def ask_curvature(exam: Examination, spots: int, norms: tuple[float, ...] = NORMS[:1]) -> Steps[bool]:
    """Whether answers bend over short steps: nets of ReLU are affine there but for some kinks, smooth ones are not.

    Steps are those of tokens of the usual norm, times the first of `norms` where any answer bends.
    """
    if exam.noise.kind != "exact":
        exam.say("activation", "unknown", "noise hides how the map bends")
        return False
    bent, curved = np.zeros(spots, dtype=bool), False
    for norm in dict.fromkeys(min(times * exam.norm, exam.most) for times in norms):
        points, ways = (1 - 2 * STEP) * norm * exam.directions(2 * spots).reshape(2, spots, -1)
        bent, curved = yield from _ask_curved(exam, points, STEP * ways)
        if np.any(bent):
            break
    if not curved:
        said = f"over short steps answers bend at {np.sum(bent)} of {spots} places" + ", by kinks" * bool(np.any(bent))
        exam.say("activation", "relu", said)
    return curved


def _ask_curved(exam: Examination, points: Floats, steps: Floats) -> Steps[tuple[Booleans, bool]]:
    """At which points answers bend over these steps, and whether they do as those of smooth maps."""
    bends, sizes, middle = yield from _ask_bends(exam, points, steps)
    bar = exam.error(sizes)
    bent = bends > bar
    if not np.any(bent) or np.all(bent):
        return bent, bool(np.any(bent))
    # Steps half as long bend a quarter as much where the map is smooth, and anything where there is a kink.
    smooth = np.full(np.sum(bent), True)
    for shorter in (0.5, 0.25):
        less, _, _ = yield from _ask_bends(exam, points[bent], shorter * steps[bent], middle[bent])
        off = np.abs(less / bends[bent] - shorter**2)
        smooth &= off <= SQUARES * shorter**2 + bar[bent] / bends[bent]
    return bent, bool(2 * np.sum(smooth) > smooth.size)


def _ask_bends(
    exam: Examination, points: Floats, steps: Floats, middle: Floats | None = None
) -> Steps[tuple[Floats, Floats, Floats]]:  # (spots,), (spots,), (spots, outputs)
    """How far answers at points are from the mean of those at both ends of steps, their sizes, and the answers."""
    queries = [[point + sign * step] for sign in (-1, 1) for point, step in zip(points, steps, strict=True)]
    queries += [[point] for point in points] if middle is None else []
    answers = (yield from exam.ask(queries)).reshape(-1, len(points), exam.outputs)
    here = answers[2] if middle is None else middle
    bend = np.linalg.norm(answers[0] - 2 * here + answers[1], axis=1)
    return bend, np.linalg.norm(here, axis=1), here


def ask_smooth_activation(exam: Examination) -> Steps[str]:
    """The activation from a bend at long tokens, where those of different neurons lie far apart."""
    if exam.signature.max_norm is not None or exam.signature.space.eps > FINE:
        exam.say("activation", "smooth", "answers bend everywhere; which it is only long tokens and many digits tell")
        return "smooth"

    def ask(points: Floats) -> Steps[Floats]:
        return (yield from exam.ask([[point] for point in points]))

    for far in FARTHER:
        farthest = far * exam.signature.width**0.5
        along, beside = exam.directions(2)
        beside = beside - (beside @ along) * along  # nothing where tokens are single numbers
        named = yield from name_activation(ask, farthest * beside, along, farthest)
        if named is not None:
            said = f"the bend of a neuron is off {named.name} by {named.misfit:.1g} of it, off {named.next_best}"
            exam.say("activation", named.name, f"{said} by {named.next_misfit:.1g}")
            return named.name
    exam.say("activation", "smooth", f"no neuron was found that bends as {', '.join(CANDIDATES)} do")
    return "smooth"
