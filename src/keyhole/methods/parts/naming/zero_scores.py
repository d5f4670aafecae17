"""Normaliser, position bias, window and top-k from the weights of tokens whose scores vanish.

Tiny tokens of one direction, numbered along the sequence, answer Σ weight·number. Numbered backwards they answer the
same where no place counts: then weights are equal, or those of the k of largest score. Else sequences of one numbered
token give the mass of each distance, and Σ mass/(Σ mass + sink) at several lengths gives the sink.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Steps
from keyhole.methods.parts.naming.attention import NONE, KnownAttention
from keyhole.methods.parts.naming.first_look import HUGE, LONG, SHORT, TINY, FirstLook
from keyhole.methods.parts.naming.plane import ONE, TWO, Plane, Unnamed, same

# Tokens of the longest sequences: no window of more is seen.
LONGEST = 512
# Distances at which masses are read one by one, and lengths at which that of the next token alone is.
NEAR, FARTHER = 4, (8, 16)
# A sink that is less than this of a token's mass is none.
LEAST_SINK = 1e-7
# Tokens whose scores vanish, or are all the same: tiny ones; behind an output bias long ones, beside a tiny last one;
# where norms do not count all tokens of one direction, those of number zero being shorter.
ALL_TINY, LAST_UNSEEN, EQUAL_SCORES = "tiny", "last unseen", "equal scores"
UNITS = {ALL_TINY: TINY, LAST_UNSEEN: LONG, EQUAL_SCORES: HUGE / TINY}
# Masses that grow with the distance do not overflow below this at the farthest.
LARGEST_MASS = 1e200
# More tokens than any sequence has.
ALL = 2**30


@dataclass(frozen=True)
class ZeroScores:
    """What tokens of score zero show."""

    attention: KnownAttention
    values: Floats  # (2,): what a token of weight one adds for each coordinate; of a sigmoid, of score zero
    background: dict[int, float]  # mass of all but the token at distance one, by length


@dataclass(frozen=True)
class _Readings:
    """Weights of tokens of score zero, over that of a single one."""

    rows: list[Floats]  # numbers along the longest sequences: up, down, and squares of those up
    ramps: Floats  # the answers to these
    by_length: dict[int, Floats]  # weights by distance in short sequences; nan where they were not read
    next_to_last: dict[int, float]  # in sequences of the lengths `FARTHER`
    longest: Floats  # (2,): at distances one and NEAR − 1 of the longest sequence


def ask_zero_scores(plane: Plane, look: FirstLook, kind: str = "") -> Steps[ZeroScores]:
    """Name normaliser and position bias; `kind` says by which tokens."""
    read = yield from _ask_readings(plane, look, kind or (LAST_UNSEEN if look.biased else ALL_TINY))
    pairs = float(np.sum(read.by_length[2]))
    up = read.rows[0]
    if same(read.ramps[0], read.ramps[1]) and same(pairs, 1.0) and not same(read.ramps[0], float(np.sum(up) / up.size)):
        found, values = _top(read), look.values
        background = {length: float(min(length, found.keep) - 1) for length in (2, 3, NEAR, *FARTHER)}
        said = f"of {up.size} numbered tokens of little score the {found.keep} of the largest count"
        plane.exam.say("normaliser", found.normaliser, said)
        return ZeroScores(found, values, background)
    found = _attention(read, look)
    amplitude = 1 + found.sink  # of a weight of one, over the answer to a single token
    _say(plane, found)
    masses = np.array(found.masses)
    background = {length: float(np.sum(masses[:length]) - masses[1] + found.sink) for length in (2, 3, NEAR)}
    for length, weight in read.next_to_last.items():
        background[length] = float(amplitude * masses[1] / weight - masses[1]) if weight > 0 else float("nan")
    return ZeroScores(found, look.values * amplitude, background)


def _ask_readings(plane: Plane, look: FirstLook, kind: str) -> Steps[_Readings]:
    n = min(LONGEST, plane.exam.signature.max_length or LONGEST)
    up = np.arange(1.0, n + 1)
    unseen = kind == LAST_UNSEEN
    short = [(length, place) for length in (2, 3, NEAR) for place in range(length - (unseen or length == 3))]
    far = [(length, length - 2) for length in FARTHER] + [(n, n - 1 - distance) for distance in (1, NEAR - 1)]
    rows = [up, up[::-1].copy(), up**2]
    if unseen:
        rows = [np.where(np.arange(n) == n - 1, 0.0, row) for row in rows]
    single = [np.eye(length)[place] for length, place in (*short, *far)]
    read = yield from plane.ask([_sequence(row, kind) for row in (*rows, *single)])
    ramps, near, farther = np.split(read / (UNITS[kind] * look.values[0]), [len(rows), len(rows) + len(short)])
    by_length = {length: np.full(length, np.nan) for length in (2, 3, NEAR)}
    for (length, place), weight in zip(short, near, strict=True):
        by_length[length][length - 1 - place] = weight
    if unseen:  # single tokens weigh one at every norm: weights add up to one
        for weights in by_length.values():
            weights[0] = 1 - np.sum(weights[1:])
    return _Readings(rows, ramps, by_length, dict(zip(FARTHER, map(float, farther), strict=False)), farther[-2:])


def _sequence(numbers: Floats, kind: str) -> list[Floats]:
    """Tokens of these numbers along one direction."""
    if kind == LAST_UNSEEN:
        return [*(LONG * number * ONE for number in numbers[:-1]), SHORT * TWO]
    if kind == EQUAL_SCORES:  # whatever their norms
        return [(UNITS[kind] * number if number else HUGE) * ONE for number in numbers]
    return [TINY * number * ONE for number in numbers]


def _top(read: _Readings) -> KnownAttention:
    """Tokens weigh by their number, not by their place: the largest or the smallest do."""
    numbers = np.sort(read.rows[0])
    for order in (numbers, numbers[::-1]):
        means = np.cumsum(order) / np.arange(1, order.size + 1)
        keep = int(np.argmin(np.abs(means - read.ramps[0]))) + 1
        if same(means[keep - 1], read.ramps[0]) and same(float(np.mean(order[:keep] ** 2)), read.ramps[2]):
            return KnownAttention(normaliser="top-k", keep=keep)
    raise Unnamed("normaliser", "which tokens count depends on their number, and not as in the k largest")


def _attention(read: _Readings, look: FirstLook) -> KnownAttention:
    """Normaliser and position bias that agree with all readings."""
    own = float(read.by_length[NEAR][0])
    masses = read.by_length[NEAR] / own
    if not (own > 0 and np.all(masses >= 0)):
        raise Unnamed("normaliser", "tokens of score zero have weights below zero")
    normaliser, sink = _normaliser(own, masses, look)
    known = KnownAttention(normaliser=normaliser, sink=sink, position_bias="table", masses=tuple(masses))
    for length in (2, 3):
        found = read.by_length[length]
        expected = _weights(known, masses[:length])
        seen = np.isfinite(found)
        if not same(expected[seen], found[seen], float(np.max(expected))):
            raise Unnamed("normaliser", f"weights of {length} tokens of score zero are not those of {NEAR}")
    name, reach = _position_bias(known, read)
    if normaliser == "sink" and same(sink, 1.0):
        normaliser = "plus-one"
    return KnownAttention(normaliser=normaliser, sink=sink, position_bias=name, masses=known.masses, reach=reach)


def _normaliser(own: float, masses: Floats, look: FirstLook) -> tuple[str, float]:
    """By the weight of the last of four tokens over that of a single one, (1 + sink)/(Σ mass + sink) of a sum."""
    total = float(np.sum(masses))
    if same(own * total, 1.0) and (look.affine or not same(total, float(masses.size))):
        return "sum", 0.0
    if same(own, 1.0):
        return NONE, 0.0
    if same(own, 1 / masses.size):
        return "count", 0.0
    sink = (total - 1 / own) / (1 / own - 1)
    if not (own < 1 and sink > LEAST_SINK):
        raise Unnamed("normaliser", "weights of tokens of score zero are those of no sum, with a sink or without")
    return "sink", sink


def _weights(known: KnownAttention, masses: Floats) -> Floats:  # by distance
    """Weights of tokens of score zero, over that of a single one."""
    if known.normaliser == NONE:
        return masses
    if known.normaliser == "count":
        return np.asarray(masses / masses.size)
    return np.asarray(masses * (1 + known.sink) / (np.sum(masses) + known.sink))


def _position_bias(known: KnownAttention, read: _Readings) -> tuple[str, int]:
    """None, window (with its reach), alibi or table: what predicts the answers to long sequences of numbered tokens."""
    masses, n = np.array(known.masses), read.rows[0].size
    distance = np.arange(n)

    def fits(by_distance: Floats) -> bool:
        with np.errstate(over="ignore", invalid="ignore"):  # a table may begin with masses that grow
            shares = _weights(known, by_distance)[::-1]
            return same(np.array([row @ shares for row in read.rows]), read.ramps)

    if fits(np.ones(n)):
        return NONE, ALL
    if np.all((masses == 0) | np.isclose(masses, 1.0, rtol=1e-9, atol=0.0)):
        for reach in range(1, n):
            if fits((distance < reach).astype(float)):
                return "window", reach
    if 0 < masses[1] < LARGEST_MASS ** (1 / n) and fits(masses[1] ** distance):
        return "alibi", ALL
    one, last = read.longest
    if not same(read.ramps[0], read.ramps[1]) and one > 0 and same(last * masses[1], one * masses[NEAR - 1]):
        return "table", ALL
    raise Unnamed("position bias", "weights of tokens of score zero fall into no known pattern")


def _say(plane: Plane, found: KnownAttention) -> None:
    """Keep the names with their evidence."""
    beside = f"beside tokens of score zero there is {found.sink:.4g} times the mass of one"
    normalisers = {
        "sum": "weights of tokens of score zero add up to one",
        "count": "weights of tokens of score zero are a constant over their number",
        NONE: "weights of tokens of score zero do not depend on their number",
    }
    plane.exam.say("normaliser", found.normaliser, normalisers.get(found.normaliser, beside))
    listed = f"masses by distance are {', '.join(f'{mass:.4g}' for mass in found.masses)}, ..."
    biases = {
        "window": f"the last {found.reach} tokens count",
        NONE: "tokens of score zero weigh the same wherever they are",
    }
    plane.exam.say("position bias", found.position_bias, biases.get(found.position_bias, listed))
