"""Heads whose score is a product of key and query, bilinear or turned by the distance: all their parts, and a check.

Weights of the named parts predict the answers to random sequences of usual norm, where tokens are far from all the
special ones that the names came from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Steps
from keyhole.methods.parts.naming.attention import KnownAttention
from keyhole.methods.parts.naming.plane import ONE, TWO, ZERO, Plane, Unnamed, same, words
from keyhole.methods.parts.naming.rays import ask_entries, ask_length_law, ask_link
from keyhole.methods.parts.naming.zero_scores import ZeroScores

# Logits of random tokens.
USUAL = 1.5
# Lengths and norms of the sequences that are predicted; those whose scores turn with the distance are shorter.
CHECKS = ((2, 1.0), (3, 0.4), (4, 1.0), (6, 1.0), (3, 2.5))
TURNED_CHECKS = ((2, 1.0), (3, 0.4), (3, 1.0), (3, 2.5))
# Scores at two distances that are nearer than this to each other are taken for the same: no rotation is so slow.
TURNED = 1e-7
# Predictions are off by what errors of entries, exponentials and sums make of rounding.
PREDICTED = 1e-7


@dataclass(frozen=True)
class Named:
    """Form and attention of a head."""

    form: str
    attention: KnownAttention


def ask_products(plane: Plane, zero: ZeroScores, step: float) -> Steps[Named]:
    """Link, length law, and whether scores turn with the distance; then the check."""
    known = yield from ask_link(plane, zero, step)
    known = replace(known, length_law=(yield from ask_length_law(plane, known, zero, step)))
    far = 2
    seen = known.position_masses(far + 1)[0] > 0  # not by a window of two tokens
    entries = yield from ask_entries(plane, known, zero, step, (1, far) if seen else (1,))
    size = float(np.max(np.abs(entries[1])))
    if not seen or same(entries[1], entries[far], size, TURNED):
        plane.exam.say("score form", "bilinear", "scores are the same at distances one and two")
        yield from _check(
            plane,
            zero,
            known,
            dict.fromkeys(range(max(length for length, _ in CHECKS)), entries[1]),
            CHECKS,
        )
        return Named("bilinear", known)
    apart = float(np.max(np.abs(entries[1] - entries[far]))) / size
    own = yield from _ask_own(plane, zero, known, size)
    plane.exam.say("score form", "rotary", f"scores at distances one and two are {apart:.2g} of them apart")
    yield from _check(plane, zero, known, {0: own, **entries}, TURNED_CHECKS)
    if same(entries[far] * entries[1][0, 0], entries[1] * entries[far][0, 0], size**2):
        raise Unnamed("score form", "scores go with the distance by a factor")
    return Named("rotary", known)


def _ask_own(plane: Plane, zero: ZeroScores, known: KnownAttention, size: float) -> Steps[Floats]:  # -> (2, 2)
    """The symmetric part of the scores of the last token with itself, from its weight beside a zero token."""
    norm = (USUAL / size) ** 0.5
    points = [norm * ONE, norm * TWO, norm * (ONE + TWO)]
    read = yield from plane.ask([[ZERO, point] for point in points])
    # Read as the first of two tokens whose places are exchanged.
    masses = known.position_masses(2)
    turned = replace(known, position_bias="table", masses=(masses[0], masses[1]))
    scores = [
        turned.score_of_weight(float(answer / (point @ zero.values)), 2, masses[0] + known.sink) / norm**2
        for point, answer in zip(points, read, strict=True)
    ]
    cross = 0.5 * (scores[2] - scores[0] - scores[1])
    return np.array([[scores[0], cross], [cross, scores[1]]])


def _check(
    plane: Plane,
    zero: ZeroScores,
    known: KnownAttention,
    entries: dict[int, Floats],
    checks: tuple[tuple[int, float], ...],
) -> Steps[None]:
    """Predict random sequences; Unnamed where an answer is another."""
    size = float(np.max(np.abs(entries[1])))
    norm = (USUAL / size) ** 0.5
    most = len(known.masses) if known.position_bias == "table" else max(length for length, _ in checks)
    queries = [times * norm * plane.points(min(length, most)) for length, times in checks]
    read = yield from plane.ask([list(tokens) for tokens in queries])
    worst = 0.0
    for tokens, answer in zip(queries, read, strict=True):
        count = len(tokens)
        scores = np.array([tokens[place] @ entries[count - 1 - place] @ tokens[-1] for place in range(count)])
        values = tokens @ zero.values
        off = abs(known.weights(scores) @ values - answer) / np.max(np.abs(values))
        worst = max(worst, float(off)) if np.isfinite(off) else np.inf
    said = f"{len(checks)} random sequences are answered as predicted, but for {words(worst, 2)} of their values"
    if worst > PREDICTED:
        raise Unnamed("prediction", said.replace("but for", "off by"))
    plane.exam.say("prediction", "right", said)
