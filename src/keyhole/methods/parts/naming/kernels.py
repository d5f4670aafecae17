"""Weights in proportion to a power of the score, over their sum: linear, squared, and features of ReLU.

Odds o(x, g) = κ(x, g)/κ(g, g) are the same at every norm but for a power, and are read at one. Of a linear score they
add up; squared ones follow from two of them; features of ReLU make them convex, and linear but for few kinks.
"""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Steps
from keyhole.methods.parts.naming.attention import KnownAttention
from keyhole.methods.parts.naming.plane import EQUAL, ONE, TWO, Plane, Unnamed, same, words
from keyhole.methods.parts.naming.products import PREDICTED, Named

CHECKED = (2, 3, 4)
# Roots of squared odds are differences of these, which lose so much relative to the largest of them.
LOST = 2.0**-42
# Second differences of odds that rounding explains, over the largest.
ROUNDED = 1e-11
# Steps to both sides between which features of ReLU have kinks at few places, and places that are looked at.
BESIDE, SPOTS = 2.0**-12, 4


class _Odds:
    """Odds of tokens beside a last one; they may be below zero."""

    def __init__(self, plane: Plane, values: Floats) -> None:
        self.plane, self.values = plane, values

    def ask(self, pairs: list[tuple[Floats, Floats]]) -> Steps[Floats]:
        """One for each pair."""
        read = yield from self.plane.ask(pairs)
        own, last = (np.array([pair[place] @ self.values for pair in pairs]) for place in (0, 1))
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray((read - last) / (own - read))


def ask_kernel(plane: Plane, values: Floats, degree: int) -> Steps[Named]:
    """The kernel whose odds go with this power of the norm of the key."""
    odds = _Odds(plane, values)
    pairs = [(TWO, ONE), (ONE + TWO, ONE), (ONE - TWO, ONE), (ONE, TWO), (ONE + TWO, TWO), (TWO - ONE, TWO)]
    read = yield from odds.ask([*pairs, (ONE, ONE + TWO), (TWO, ONE + TWO)])
    first, second = read[:3], read[3:6]
    if degree == 1 and _adds_up(first) and _adds_up(second):
        ratios = float(first[0]), float(second[0]), float(read[6])
        return (yield from _predict(odds, _matrix(*ratios), "linear"))
    if degree == 2:
        roots = [0.25 * (each[1] - each[2]) for each in (first, second)]
        squares = [(root**2, 1 + root**2 + 2 * root) for root in roots]
        few = max(EQUAL, LOST * float(np.max(np.abs(read))))
        if all(same(each[:2], np.array(two), 1.0, few) for each, two in zip((first, second), squares, strict=True)):
            share = 0.5 * (1 + read[6] - read[7])
            return (yield from _predict(odds, _matrix(float(roots[0]), float(roots[1]), float(share)), "squared"))
    if degree == 1:
        return (yield from _ask_relu_features(odds))
    raise Unnamed("link", f"odds go with the power {degree} of the norm of a token, and are those of no known kernel")


def _adds_up(odds: Floats) -> bool:  # of y, g + y, g − y beside g
    return same(odds[1:], np.array([1 + odds[0], 1 - odds[0]]), 1.0)


def _matrix(below: float, beside: float, share: float) -> Floats:  # -> (2, 2)
    """The score matrix of the plane but for a factor: W21/W11, W12/W22, and the odds of e1 beside e1 + e2."""
    corner = (share * (1 + below) - 1) / (beside - share * (1 + beside))
    return np.array([[1.0, beside * corner], [below, corner]])


def _predict(odds: _Odds, score: Floats, link: str) -> Steps[Named]:
    """Predict random sequences."""
    queries = [odds.plane.points(length) for length in CHECKED]
    read = yield from odds.plane.ask([list(tokens) for tokens in queries])
    worst = 0.0
    for tokens, answer in zip(queries, read, strict=True):
        masses = (tokens @ score @ tokens[-1]) ** (1 if link == "linear" else 2)
        values = tokens @ odds.values
        cancels = np.sum(np.abs(masses)) / abs(np.sum(masses))  # sums that nearly vanish enlarge errors
        off = abs(masses @ values / np.sum(masses) - answer) / (np.max(np.abs(values)) * cancels**2)
        worst = max(worst, float(off)) if np.isfinite(off) else np.inf
    said = f"{len(CHECKED)} random sequences are answered as predicted, but for {words(worst, 2)} of their values"
    if worst > PREDICTED:
        raise Unnamed("prediction", said.replace("but for", "off by"))
    odds.plane.exam.say("link", link, said)
    return Named("bilinear", KnownAttention(link=link))


def _ask_relu_features(odds: _Odds) -> Steps[Named]:
    """Whether odds are never below zero, convex, and linear but for kinks; and whether two tokens' odds add up."""
    points = odds.plane.points(SPOTS)
    across = np.stack([-points[:, 1], points[:, 0]], axis=1)
    tokens = [point + sign * BESIDE * way for point, way in zip(points, across, strict=True) for sign in (-1, 0, 1)]
    tokens += [-points[0], ONE + TWO, ONE - TWO, 2.0 * ONE]
    read = yield from odds.ask([(token, ONE) for token in tokens])
    left, here, right = read[: 3 * SPOTS].reshape(SPOTS, 3).T
    bends = (left + right - 2 * here) / np.max(np.abs(here))
    straight = np.abs(bends) <= ROUNDED
    size = float(np.max(np.abs(read)))
    least = ROUNDED * size
    fits = np.all(read >= -least) and np.all(bends >= -ROUNDED) and 2 * np.sum(straight) > SPOTS
    convex = read[-3] + read[-2] >= read[-1] - least
    if not (fits and convex):
        raise Unnamed("score form", "odds go with the norm of a token, and are neither linear nor those of features")
    one, two = points[0], points[1]
    (both,) = yield from odds.plane.ask([[one, two, ONE]])
    masses = np.array([here[0], here[1], 1.0])
    expected = masses @ (np.stack([one, two, ONE]) @ odds.values) / np.sum(masses)
    if not same(both, expected, float(np.max(np.abs(np.stack([one, two, ONE]) @ odds.values))), PREDICTED):
        raise Unnamed("normaliser", "odds of two tokens do not add up")
    said = f"odds are above zero, convex, and linear at {np.sum(straight)} of {SPOTS} places"
    odds.plane.exam.say("score form", "relu-features", said)
    return Named("relu-features", KnownAttention())
