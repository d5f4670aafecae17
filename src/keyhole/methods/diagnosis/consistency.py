"""What holds for every softmax attention and for every net: a family is named only where it does.

- Tokens that are nearly equal weigh the same, however many they are; only a residual tells the last from the others.
- With logits linear in the token, the weights of g + u and of g − u beside a last token g add up to one. So
  f(g + u, g) − f(g − u, g) = (f(g + u) − f(g − u))/2, behind any number of heads that answer single tokens affinely.
- Far from the origin a net of one hidden layer is affine, along a ray and beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Steps
from keyhole.methods.examination import ROUNDING, Examination

# (count, width) -> (count, outputs): answers to single tokens, where they are known
Predict = Callable[[Floats], Floats]

# Distances of nearly equal tokens over their norm, as powers of the spacing: so near that logits hardly differ, and not
# so near that rounding hides more than a part of what is left.
DISTANCES, HIDDEN = (0.3, 0.45, 0.6), 0.05
# Uneven weights of nearly equal tokens even out with their distance, to this part at the next one; these are even.
FALLEN, EVEN = 0.25, 1e-3
# Tokens beside a ray, and tokens turned, over the distance from the origin: few neurons have a kink so near.
BESIDE, TURN = 2.0**-12, 2.0**-10
# What is normalised does not grow with its tokens, but for this part.
STILL = 1e-3
# Where a net is not yet affine, it is looked at from so many times as far.
FARTHER = (1.0, 2.0**10, 2.0**20)


@dataclass(frozen=True)
class NearTokens:
    """What nearly equal tokens show, as parts of what their difference makes."""

    last: float  # how much more the last of two counts, which is a residual
    uneven: float  # how far off their mean the answer is otherwise
    added: Floats  # (spots, outputs): what the last one adds for a step of one
    radius: float  # of what is added


def ask_near_tokens(
    exam: Examination,
    points: Floats,  # (spots, width)
    steps: Floats,  # (2, spots, width), of norm one or so
    predict: Predict | None,  # asked where it is not known
) -> Steps[tuple[NearTokens, bool]]:
    """What tokens around each point show whose mean it is, and whether their weights even out with their distance."""
    eps = exam.signature.space.eps
    fits = [power for power in DISTANCES if ROUNDING * eps ** (1 - power) <= HIDDEN] or DISTANCES[:1]
    wide, near = (eps**power * exam.norm for power in (fits[-2:] * 2)[:2])
    found = yield from _ask_at(exam, points, wide * steps, predict)
    if found.uneven <= EVEN or wide == near:
        return found, True
    nearer = yield from _ask_at(exam, points, near * steps, predict)
    return nearer, nearer.uneven <= max(EVEN, FALLEN * found.uneven)


def _ask_at(exam: Examination, points: Floats, steps: Floats, predict: Predict | None) -> Steps[NearTokens]:
    """The pair p ∓ s in both orders tells the last from the other; p + s, p + r, p − s − r, p tell how four weigh."""
    one, two = steps
    queries: list[list[Floats]] = [[p - s, p + s] for p, s in zip(points, one, strict=True)]
    queries += [[p + s, p - s] for p, s in zip(points, one, strict=True)]
    if exam.longest >= 4:
        queries += [[p + s, p + r, p - s - r, p] for p, s, r in zip(points, one, two, strict=True)]
    if predict is None:
        queries += [[point] for point in (*points, *(points + one))]
    answers = (yield from exam.ask(queries)).reshape(-1, len(points), exam.outputs)
    alone, moved = answers[-2:] if predict is None else (predict(points), predict(points + one))
    last = 0.5 * (answers[0] - answers[1])
    uneven = 0.5 * (answers[0] + answers[1]) - alone
    if exam.longest >= 4:
        uneven = np.maximum(np.abs(uneven), np.abs(answers[2] - alone))
    whole = np.linalg.norm(moved - alone, axis=1)
    bar = exam.error(np.linalg.norm(answers[0], axis=1))

    def part(of: Floats) -> float:
        size = np.linalg.norm(of, axis=1)
        return float(np.median(np.where(size > 4 * bar, size / np.maximum(whole, bar), 0.0)))

    lengths = np.linalg.norm(one, axis=1, keepdims=True)
    return NearTokens(part(last), part(uneven), last / lengths, float(np.max(bar[:, None] / lengths)))


def ask_reflection(
    exam: Examination,
    points: Floats,  # (spots, width)
    steps: Floats,  # (spots, width)
    slopes: Sequence[Floats],  # (spots, outputs) each: what steps may add to the answers of single tokens
    radius: float,  # of that, for steps of norm one
) -> Steps[list[float]]:
    """How far f(g + u, g) − f(g − u, g) is from each of what u may add, over what rounding and noise explain."""
    answers = yield from exam.ask(
        [[g + sign * u, g] for g, u in zip(points, steps, strict=True) for sign in (1.0, -1.0)]
    )
    difference = answers[0::2] - answers[1::2]
    sizes = np.max(np.abs(answers), axis=1).reshape(-1, 2).max(axis=1) + np.max(np.abs(slopes[0]), axis=1)
    bar = exam.error(sizes) + radius * np.linalg.norm(steps, axis=1)
    return [float(np.max(np.linalg.norm(difference - slope, axis=1) / bar)) for slope in slopes]


@dataclass(frozen=True)
class FarTokens:
    """What a map does far from the origin."""

    growth: float  # what a token twice as long changes, over the answer
    identity: bool  # whether answers grow as the tokens themselves do
    turns: bool  # whether they follow the direction of a token, besides
    turned: float  # by how much, over the answer
    bent: float  # how far they are from an affine map, over what rounding and noise explain


def ask_far_tokens(exam: Examination, ways: Floats, times: float = 1.0) -> Steps[FarTokens]:  # (count, width)
    """Tokens along rays, twice and four times as far, and beside them."""
    far = times * exam.far
    beside = exam.directions(len(ways))
    factors = [[1.0, 0.0], [2.0, 0.0], [4.0, 0.0], [1.0, BESIDE], [1.0, -BESIDE], [1.0, TURN]]
    queries = [
        [far * (along * way + aside * other)]
        for along, aside in factors
        for way, other in zip(ways, beside, strict=True)
    ]
    once, twice, fourfold, left, right, turned = (yield from exam.ask(queries)).reshape(
        len(factors), len(ways), exam.outputs
    )
    bar = exam.error(np.linalg.norm(fourfold, axis=1) + np.linalg.norm(once, axis=1))
    line = np.linalg.norm(fourfold - twice - 2 * (twice - once), axis=1)
    curve = np.linalg.norm(left + right - 2 * once, axis=1)
    size = np.maximum(np.linalg.norm(once, axis=1), np.linalg.norm(twice, axis=1))
    tiny = exam.signature.space.tiny
    growth = float(np.max(np.linalg.norm(twice - once, axis=1) / np.maximum(size, tiny)))
    identity = False
    followed = turned - once
    if exam.outputs == exam.signature.width:
        identity = bool(np.linalg.norm((twice - once) / far - ways) <= STILL)
        followed = followed - far * TURN * beside if identity else followed
    moved = np.linalg.norm(followed, axis=1)
    turns = bool(np.min(moved / exam.error(size)) > 1.0)  # along every ray: what saturates jumps beside a few
    bent = float(max(np.max(line / bar), np.median(curve / bar)))  # a kink beside a ray may be near
    return FarTokens(growth, identity, turns, float(np.median(moved / np.maximum(size, tiny))), bent)
