"""The link from the weight of a token along a ray: eight scores between −3 and 3, and both ends.

A first token A·x beside a last one g/A adds A·x·value times its weight, and nothing else is seen. The weight is a
function of the score alone, and along t·g the score is t times one number: a link fits if its inverse is linear in t.
Its constants are seen at both ends, where it saturates.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Steps
from keyhole.methods.parts.naming.attention import LAWS, NONE, KnownAttention
from keyhole.methods.parts.naming.first_look import SHORT
from keyhole.methods.parts.naming.plane import ONE, TWO, Plane, Unnamed, same, words
from keyhole.methods.parts.naming.zero_scores import FARTHER, ZeroScores

# First tokens are longer by this, last ones shorter: what last ones add, and their own scores, are lost in rounding.
FAR = 2.0**100
# At which a score is so small that its weight is linear in it, and still many digits above rounding.
FIRST_STEPS, FEEBLE, FAINT = (2.0**-10, 2.0**-30), 0.05, 1e-12
# Scores along a ray, and one beyond the end of every link.
SCORES, END = np.array([-3.0, -1.6, -0.8, -0.3, 0.3, 0.8, 1.6, 3.0]), 2.0**30
# Above zero, so that a top-k keeps it, and little, so that sparse weights of the others do not vanish.
ABOVE = 0.1
# A token of less than minus this has no weight that is seen.
HIDDEN = 30.0
# A score is read where one more rounding of the weight changes it by less than this.
ROUNDING, READABLE = 2.0**-50, 1e-11
# A weight nearer than this to nothing or everything is at an end.
SEEN = 1e-12
# What the last token leaves of a weight of nothing.
NOTHING = 1e-40
# Scores at which entries are read, and between which they may be; how often they are asked again until they are.
ENTRY, WITHIN, ROUNDS = 0.06, (1e-3, 0.4), 4


def far_pair(plane_point: Floats, last: Floats, before: int = 0, after: int = 0) -> list[Floats]:
    """A·x and g/A, with tokens that are nearly zero before and between."""
    fill = [number * SHORT * plane_point for number in range(1, before + after + 1)]  # no two of one score
    return [*fill[:before], FAR * plane_point, *fill[before:], last / FAR]


def ask_steps(plane: Plane, zero: ZeroScores) -> Steps[float]:
    """The norm of g for which scores are about one; nan where g/A gives A·x no score."""
    read = yield from plane.ask([far_pair(ONE, step * TWO) for step in FIRST_STEPS])
    base = replace(zero.attention, normaliser=_plain(zero.attention.normaliser))
    scores = [base.score_of_weight(float(weight), 2) for weight in read / (FAR * zero.values[0])]
    if base.normaliser in (NONE, "count"):
        scores = [float(np.log(weight * 2 ** (base.normaliser == "count"))) for weight in read / (FAR * zero.values[0])]
    for step, score in zip(FIRST_STEPS, scores, strict=True):
        if FAINT < abs(score) < FEEBLE:
            return float(step / score)
    return float("nan")


def _plain(normaliser: str) -> str:
    return "sum" if normaliser == "top-k" else normaliser


def ask_link(plane: Plane, zero: ZeroScores, step: float) -> Steps[KnownAttention]:
    """The attention with its link, from the ray of t·g, |t| being `step` where scores are one."""
    nodes = np.concatenate([SCORES * step, [-END * abs(step), END * abs(step)]])
    read = yield from plane.ask([far_pair(ONE, node * TWO) for node in nodes])
    weights, ends = np.split(read / (FAR * zero.values[0]), [SCORES.size])
    if step < 0:
        ends = ends[::-1]
    known = zero.attention
    candidates = [known]
    if known.normaliser == "sum" and known.position_bias == NONE:
        candidates += [replace(known, normaliser=each) for each in ("sparsemax", "entmax")]
    candidates += _capped(known, ends)
    for each in candidates:
        if _fits(each, weights, ends):
            said = f"weights from {weights[0]:.4g} to {weights[-1]:.4g} along a ray fit it, and so do both ends"
            plane.exam.say("link", each.link, said)
            if each.normaliser != known.normaliser:
                plane.exam.say("normaliser", each.normaliser, f"{said[:-14]}, {_words(ends)}")
            return each
    raise Unnamed("link", f"no link fits weights from {words(weights[0])} to {words(weights[-1])}, {_words(ends)}")


def _words(ends: Floats) -> str:
    return f"which end at {words(ends[0])} and {words(ends[1])}"


def _capped(known: KnownAttention, ends: Floats) -> list[KnownAttention]:
    """Links that saturate, with the constants that both ends show."""
    low, high = ends
    if known.normaliser in (NONE, "count"):
        high = high * (2 if known.normaliser == "count" else 1) / known.position_masses(2)[0]
        if abs(low) < NOTHING and high > 1:  # over the weight σ(b) of score zero
            return [replace(known, link="sigmoid", gate=-float(np.log(high - 1)))]
        return []
    if not 0 < low < 1:
        return []
    mass = low / (1 - low) * (1 + known.sink) / known.position_masses(2)[0]
    return [replace(known, link="softcap", cap=-float(np.log(mass)))] if mass < 1 else []


def _fits(known: KnownAttention, weights: Floats, ends: Floats) -> bool:
    """Whether scores are linear along the ray, and both ends as they must be."""
    scores = np.array([known.score_of_weight(float(weight), 2) for weight in weights])
    beside = np.array([known.score_of_weight(float(weight) * (1 - ROUNDING), 2) for weight in weights])
    inner = np.isfinite(scores) & (np.abs(beside - scores) < READABLE)
    if known.normaliser not in (NONE, "count"):
        inner &= (weights > SEEN) & (weights < 1 - SEEN)
    if np.sum(inner) < 4:
        return False
    slope = float(scores[inner] @ SCORES[inner] / (SCORES[inner] @ SCORES[inner]))
    if not same(scores[inner], slope * SCORES[inner], 1.0):
        return False
    expected = np.array([known.weights(np.array([score, 0.0]))[0] for score in (*(slope * SCORES), -END, END)])
    lowest = np.maximum([expected[-2], ends[0]], NOTHING)
    return same(expected, np.concatenate([weights, ends]), 1.0) and same(lowest[0], lowest[1])


def ask_length_law(plane: Plane, known: KnownAttention, zero: ZeroScores, step: float) -> Steps[str]:
    """How the score of one token at distance one goes with the number of zero tokens before it."""
    lengths = (2, 3, 4, *FARTHER)
    gentle = ABOVE * step
    read = yield from plane.ask([far_pair(ONE, gentle * TWO, before=length - 2) for length in lengths])
    weights = read / (FAR * zero.values[0])

    def scores(law: str) -> Floats:
        attention, background = replace(known, length_law=law), zero.background
        found = zip(weights, lengths, strict=True)
        return np.array([attention.score_of_weight(float(one), length, background[length]) for one, length in found])

    plain = scores(NONE)
    factors = ", ".join(f"{words(score / plain[0])} at {length}" for length, score in zip(lengths, plain, strict=True))
    said = f"scores over those of two tokens: {factors}"
    for law in LAWS:
        if same(scores(law), scores(law)[0]):
            plane.exam.say("length law", law, said)
            return law
    raise Unnamed("length law", said)


def ask_entries(
    plane: Plane, known: KnownAttention, zero: ZeroScores, step: float, distances: tuple[int, ...]
) -> Steps[dict[int, Floats]]:
    """The score matrix of the plane, (2, 2), for tokens at each of these distances."""
    places = [(distance, i, j) for distance in distances for i in (0, 1) for j in (0, 1)]
    axes = (ONE, TWO)
    found = {distance: np.zeros((2, 2)) for distance in distances}
    norms = dict.fromkeys(places, ENTRY * abs(step))
    for _ in range(ROUNDS):
        read = yield from plane.ask([far_pair(axes[i], norms[d, i, j] * axes[j], after=d - 1) for d, i, j in norms])
        again = {}
        for (distance, i, j), answer in zip(norms, read, strict=True):
            norm, weight = norms[distance, i, j], float(answer / (FAR * zero.values[i]))
            score = _as_if_next(known, distance).score_of_weight(weight, distance + 1)
            found[distance][i, j] = score / norm
            if not score > -HIDDEN:  # a top-k does not keep it: ask for the opposite score, and a small one
                again[distance, i, j] = -norm * FIRST_STEPS[0]
            elif abs(score) > WITHIN[1]:
                again[distance, i, j] = norm * (ENTRY / abs(score) if np.isfinite(score) else FIRST_STEPS[0])
            elif abs(score) < WITHIN[0]:
                again[distance, i, j] = norm / max(abs(score) / ENTRY, FIRST_STEPS[1])
        if not again:
            return found
        norms = again
    raise Unnamed("scores", "some scores of a plane vanish")


def _as_if_next(known: KnownAttention, distance: int) -> KnownAttention:
    """The attention for which a token at this distance is read as if it were at distance one."""
    if distance == 1 or known.position_bias == NONE:
        return known
    masses = known.position_masses(distance + 1)[::-1].copy()
    masses[[1, distance]] = masses[[distance, 1]]
    return replace(known, position_bias="table", masses=tuple(masses))
