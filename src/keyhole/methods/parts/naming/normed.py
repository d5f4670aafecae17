"""Keys and queries divided by their norms: s(x, g) = xᵀMg/(√xᵀKx · √gᵀQg).

Norms do not count, and s(−x, g) = −s(x, g), so that the log-odds of x and −x beside g add up to −2·s(g, g) for every x.
Scores of four directions of a plane give M, K but for a scale, and predict a fifth. Tokens are long, so that an epsilon
below the norm is lost.
"""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Steps
from keyhole.methods.parts.naming.attention import NONE, KnownAttention
from keyhole.methods.parts.naming.first_look import HUGE
from keyhole.methods.parts.naming.plane import EQUAL, ONE, TWO, Plane, Unnamed, same, words
from keyhole.methods.parts.naming.products import Named
from keyhole.methods.parts.naming.zero_scores import ZeroScores

# Of two tokens the one whose weight is read is longer by this, so that nothing is seen of the other.
SEEN = 2.0**60
FURTHER = 2.0**20
# Tokens before the pair whose odds must be what they are alone.
FILLERS = 2
# Errors of log-odds, of the roots of a quadratic equation and of the products with both.
PREDICTED = 1e-7


def ask_normed(plane: Plane, zero: ZeroScores) -> Steps[Named]:
    """Whether scores are products over both norms, and whether they turn with the distance."""
    known, form = zero.attention, "qk-norm"
    if known.normaliser != "sum" or known.length_law != NONE:
        raise Unnamed("normaliser", "of normalised keys only weights over their sum are named")
    if (yield from _turns(plane, zero)):
        form = "qk-norm-rotary"
        known = KnownAttention()  # what looked like masses by distance were scores
    five = [ONE, TWO, ONE + TWO, ONE - TWO, 2 * ONE + TWO]
    signed = [*five, -ONE, -TWO]
    queries = [[SEEN * HUGE * x, HUGE * TWO] for x in signed]
    queries += [[SEEN * HUGE * FURTHER * ONE, HUGE * TWO], [SEEN * HUGE * ONE, HUGE * FURTHER * TWO]]
    fill = [HUGE * TWO] * FILLERS
    queries += [[*fill, SEEN * HUGE * ONE, HUGE * TWO], [*fill, HUGE * ONE, SEEN * HUGE * TWO]]
    read = yield from plane.ask(queries)
    tokens = np.array([*signed, FURTHER * ONE, ONE, ONE, TWO])
    weights = read / (SEEN * HUGE * (tokens @ zero.values))
    with np.errstate(invalid="ignore", divide="ignore"):
        odds = np.log(weights / (1 - weights))
        longer = float(np.log(weights[-2] / weights[-1]))
        rounding = float(np.max(2.0**-50 / (weights * (1 - weights))[:-2]))
    if not rounding < PREDICTED:
        raise Unnamed("score form", "tokens of a plane weigh nothing or everything beside each other")
    size = 1.0 + rounding / EQUAL  # weights near one tell few digits of their odds
    if not (same(odds[7], odds[0], size) and same(odds[8], odds[0], size)):
        raise Unnamed("score form", "odds of long tokens depend on their norms after all")
    if np.all(np.abs(odds) < EQUAL):
        raise Unnamed("score form", "no token has a score that shows")
    twice = odds[0] + odds[5], odds[1] + odds[6]
    if not same(twice[0], twice[1], size):
        raise Unnamed("score form", "log-odds of tokens and their reflections have different sums")
    if not same(longer, odds[0], size):
        raise Unnamed("length law", "odds of two tokens change with tokens before them")
    off = _misfit(odds[:5] - 0.5 * twice[0])
    said = f"the score of a fifth direction is off what four predict by {words(off, 2)}"
    if not off <= PREDICTED:
        raise Unnamed("score form", said)
    plane.exam.say("score form", form, f"norms do not count; {said}")
    return Named(form, known)


def _turns(plane: Plane, zero: ZeroScores) -> Steps[bool]:
    """Whether the odds of equal tokens at distances two and one depend on which token it is."""
    queries, points = [], (ONE, TWO, ONE + TWO)
    for x in points:
        queries += [[SEEN * HUGE * x, HUGE * x, HUGE * TWO], [HUGE * x, SEEN * HUGE * x, HUGE * TWO]]
    read = yield from plane.ask(queries)
    ratios = np.log(read[0::2] / read[1::2])
    masses = zero.attention.position_masses(3)
    if same(ratios, float(np.log(masses[0] / masses[1])), 1.0):
        return False
    if same(ratios, ratios[0], 1.0):
        if zero.attention.position_bias != NONE:
            return False
        raise Unnamed("position bias", "places count for some tokens only")
    return True


def _misfit(scores: Floats) -> float:  # of e1, e2, e1 + e2, e1 − e2, 2e1 + e2 beside one last token
    """How far the fifth score is from what the quotients xᵀm/√xᵀKx through the first four make it."""
    one, two, both, apart, fifth = scores
    if not np.all(np.isfinite(scores)) or both == 0 or apart == 0:
        return float("inf")
    with np.errstate(invalid="ignore", divide="ignore"):
        # K11 = 1 and K22 = r²: both squares of denominators add up to 2(1 + r²).
        a, b = 1 / both**2, 1 / apart**2
        quadratic = [two**2 * (a + b) - 2, 2 * one * two * (a - b), one**2 * (a + b) - 2]
        roots = np.roots(quadratic)
        worst = np.inf
        for r in roots[np.abs(roots.imag) < PREDICTED].real:
            if r <= 0:
                continue
            m1, m2 = one, two * r
            cross = 0.25 * ((m1 + m2) ** 2 * a - (m1 - m2) ** 2 * b)
            square = 4 + r**2 + 4 * cross
            if square > 0 and abs(cross) <= r:
                worst = min(worst, abs((2 * m1 + m2) / square**0.5 - fifth))
    return float(worst)
