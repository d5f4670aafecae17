"""Normaliser, position bias, window and top-k from the weights of tokens whose scores vanish.

Tiny tokens of one direction, numbered along the sequence, answer Σ weight·number. Numbered backwards they answer the
same where no place counts: then weights are equal, or those of the k of largest score. Else sequences of one numbered
token give the mass of each distance. Σ mass/(Σ mass + sink) of sequences of several lengths gives the sink.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Steps
from keyhole.methods.parts.naming.attention import NONE, KnownAttention
from keyhole.methods.parts.naming.first_look import HUGE, LONG, SHORT, TINY, FirstLook
from keyhole.methods.parts.naming.plane import ONE, TWO, Parts, Plane, same

# Tokens of the longest sequences: no window of more is seen.
LONGEST = 512
# Distances at which masses are read one by one, and a length at which that of the next token is.
NEAR, FARTHER = 4, (8, 16)
# A sink that is less than this of a token's mass is none.
LEAST_SINK = 1e-7


# Tokens whose scores vanish, or are all the same: tiny ones; behind an output bias long ones, beside a tiny last one;
# where norms do not count all tokens of one direction, those of number zero being shorter.
ALL_TINY, LAST_UNSEEN, EQUAL_SCORES = "tiny", "last unseen", "equal scores"
UNITS = {ALL_TINY: TINY, LAST_UNSEEN: LONG, EQUAL_SCORES: HUGE / TINY}


@dataclass(frozen=True)
class ZeroScores:
    """What tokens of score zero show."""

    attention: KnownAttention
    values: Floats  # (2,): what a token of weight one adds for each coordinate; of a sigmoid, of score zero
    background: dict[int, float]  # mass of all but the token at distance one, by length


def ask_zero_scores(plane: Plane, look: FirstLook, kind: str = "") -> Steps[ZeroScores]:
    """Name normaliser and position bias: by tiny tokens, by `LONG` ones beside a tiny last one, or by `NORMED` ones."""
    kind = kind or (LAST_UNSEEN if look.biased else ALL_TINY)
    n = min(LONGEST, plane.exam.signature.max_length or LONGEST)
    up = np.arange(1.0, n + 1)
    unseen = kind == LAST_UNSEEN
    short = [(length, place) for length in (2, 3, NEAR) for place in range(length - (unseen or length == 3))]
    rows = [up, up[::-1].copy(), up**2, *(np.eye(length)[place] for length, place in short)]
    far = [(length, length - 2) for length in FARTHER] + [(n, n - 1 - distance) for distance in (1, NEAR - 1)]
    rows += [np.eye(length)[place] for length, place in far]
    if unseen:
        rows = [np.where(np.arange(row.size) == row.size - 1, 0.0, row) for row in rows]
    read = yield from plane.ask([_sequence(row, kind) for row in rows])
    read = read / (UNITS[kind] * look.values[0])
    single = dict(zip(short, read[3 : 3 + len(short)], strict=True))
    if unseen:  # weights add up to one
        for length in (2, 3, NEAR):
            single[length, length - 1] = 1 - sum(single[length, place] for place in range(length - 1))
    ramps = rows[:3], read[:3]
    pair = single[2, 0] + single[2, 1]
    if same(read[0], read[1]) and same(pair, 1.0) and not same(read[0], float(np.sum(rows[0]) / n)):
        return _of_top(ramps, look)
    return _of_masses(single, ramps, read[-len(far) :], look)


def _sequence(numbers: Floats, kind: str) -> list[Floats]:
    """Tokens of these numbers along one direction."""
    if kind == LAST_UNSEEN:
        return [*(LONG * number * ONE for number in numbers[:-1]), SHORT * TWO]
    if kind == EQUAL_SCORES:  # whatever their norms
        return [(UNITS[kind] * number if number else HUGE) * ONE for number in numbers]
    return [TINY * number * ONE for number in numbers]


def _of_top(ramps: tuple[list[Floats], Floats], look: FirstLook) -> ZeroScores:
    """Tokens weigh by their number, not by their place: the largest or the smallest do."""
    rows, read = ramps
    numbers = np.sort(rows[0])
    for order in (numbers, numbers[::-1]):
        means = np.cumsum(order) / np.arange(1, order.size + 1)
        keep = int(np.argmin(np.abs(means - read[0]))) + 1
        if same(means[keep - 1], read[0]) and same(np.mean(order[:keep] ** 2), read[2]):
            found = KnownAttention(normaliser="top-k", keep=keep)
            background = {length: float(min(length, keep) - 1) for length in (2, 3, NEAR, *FARTHER)}
            return ZeroScores(found, look.values, background)
    raise Parts("normaliser", "other", "which tokens count depends on their number, and not as in the k largest")


def _of_masses(
    single: dict[tuple[int, int], float], ramps: tuple[list[Floats], Floats], farther: Floats, look: FirstLook
) -> ZeroScores:
    """Masses by distance, the sink beside them, and what a longer sequence says of both."""
    own = single[NEAR, NEAR - 1]
    masses = np.array([single[NEAR, NEAR - 1 - distance] / own for distance in range(NEAR)])
    if not (own > 0 and np.all(masses >= 0)):
        raise Parts("normaliser", "other", "tokens of score zero have weights below zero")
    normaliser, sink = _normaliser(own, masses, look)
    amplitude = 1 + sink  # of a weight of one, over the answer to a single token

    def weights(by_distance: Floats) -> Floats:
        if normaliser == NONE:
            return by_distance
        if normaliser == "count":
            return by_distance / by_distance.size
        return by_distance * amplitude / (np.sum(by_distance) + sink)

    for length in (2, 3):
        seen = [distance for distance in range(length) if (length, length - 1 - distance) in single]
        expected = weights(masses[:length])[seen]
        found = np.array([single[length, length - 1 - distance] for distance in seen])
        if not same(expected, found, float(np.max(expected))):
            raise Parts("normaliser", "other", f"weights of {length} tokens of score zero are not those of {NEAR}")
    name, reach = _position_bias(masses, ramps, weights)
    farther, longest = farther[: len(FARTHER)], farther[len(FARTHER) :]
    by_distance = bool(np.any(longest > 0)) and same(longest[1] * masses[1], longest[0] * masses[NEAR - 1])
    if name == "other" or (name == "table" and not by_distance):
        raise Parts("position bias", "other", "weights of tokens of score zero fall into no known pattern")
    found = KnownAttention(
        normaliser="plus-one" if same(sink, 1.0) else normaliser,
        sink=sink,
        position_bias=name,
        masses=tuple(masses),
        reach=reach,
    )
    background = {length: float(np.sum(masses[:length]) - masses[1] + sink) for length in (2, 3, NEAR)}
    for length, weight in zip(FARTHER, farther, strict=True):
        background[length] = float(amplitude * masses[1] / weight - masses[1])
    return ZeroScores(found, look.values * amplitude, background)


def _normaliser(own: float, masses: Floats, look: FirstLook) -> tuple[str, float]:
    """By the weight of the last of four tokens over that of a single one, (1 + sink)/(Σ mass + sink) of a sum."""
    total = float(np.sum(masses))
    if same(own * total, 1.0) and (look.affine or not same(total, float(masses.size))):
        return "sum", 0.0
    if same(own, 1.0):
        return NONE, 0.0
    if same(own, 1 / masses.size):
        return "count", 0.0
    ratio = 1 / own
    sink = (total - ratio) / (ratio - 1)
    if not (ratio > 1 and sink > LEAST_SINK):
        raise Parts("normaliser", "other", "weights of tokens of score zero are those of no sum, with a sink or without")
    return "sink", sink


def _position_bias(masses: Floats, ramps: tuple[list[Floats], Floats], weights: object) -> tuple[str, int]:
    """none, window (with its reach), alibi or table: what predicts the answers to long sequences of numbered tokens."""
    rows, read = ramps
    n = rows[0].size
    distance = np.arange(n)[::-1]

    def fits(by_distance: Floats) -> bool:  # masses by distance
        shares = weights(by_distance)[::-1]  # type: ignore[operator]
        return same(np.array([row @ shares for row in rows]), read)

    whole = 2**30
    if fits(np.ones(n)):
        return NONE, whole
    flat = np.flatnonzero(masses == 0)
    if same(masses[: flat[0] if flat.size else None], 1.0):
        # Σ numbers² − Σ numbers counts the farther tokens: the reach is where both ramps fit.
        for reach in range(1, n):
            if fits((np.arange(n) < reach).astype(float)):
                return "window", reach
    if np.all(masses > 0) and same(np.log(masses[2:]), np.log(masses[1]) * np.arange(2, NEAR), 1.0):
        if fits(masses[1] ** np.arange(n)):
            return "alibi", whole
    del distance
    return ("table", whole) if not same(read[0], read[1]) else ("other", whole)
