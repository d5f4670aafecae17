"""What distances do in every head, from the weights of one token whose logit is zero."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.multi_head.vector.parts.first_token import FirstHeads
from keyhole.methods.multi_head.vector.parts.long_tokens import LongQueries
from keyhole.methods.multi_head.vector.scores import inverse_of
from keyhole.queries import Measurements, Plan, Term, TokenRows
from keyhole.recovery import Outcome

# Windows are looked for among this many tokens first, and among this many at most.
FIRST_LENGTH, MOST_LENGTH = 512, 2**15
# Distances of a table that are asked one by one first, and at most; it ends where distances farther by these factors
# add the same, up to so many errors.
FIRST_DISTANCE, MOST_DISTANCE, FARTHER, UNEQUAL = 16, 1024, (1.5, 2.0, 5.0), 64.0


def ask_slopes(queries: LongQueries, start: FirstHeads, *, sink: bool) -> Steps[FirstHeads]:
    """By how much energies fall with each token between; one query, where a sink hides it beside a neighbour."""
    odds, errors = start.odds, start.errors
    if not sink:  # a neighbour weighs less than the last token by this alone
        falls = np.log(odds.rest)
        return replace(start, odds=replace(odds, falls=falls), errors=replace(errors, falls=errors.rest / odds.rest))
    queries.between = 1
    answer = (yield from queries.ask_token("positions", start.token, np.zeros((1, queries.width))))[0]
    queries.between = 0
    inverse = inverse_of(start.values[:, None])
    weight = answer @ inverse
    error = queries.noise * np.linalg.norm(inverse, axis=0)
    # x = exp(−slope), Q = 1 + sink: 1 + rest = 1 + Q/x beside a neighbour, and 1/weight = 1 + 1/x + Q/x² one further.
    steps = (1 / weight - 1) / (1 + odds.rest)
    falls = np.log(steps)
    off = (error / weight**2 / (1 / weight - 1)) + errors.rest / (1 + odds.rest)
    return replace(start, odds=replace(odds, falls=falls), errors=replace(errors, falls=off))


def ask_table(queries: LongQueries, start: FirstHeads) -> Steps[FirstHeads]:
    """What each distance adds, one query each, from a token of logit zero before so many zero ones."""
    inverse = inverse_of(start.values[:, None])
    error = queries.noise * np.linalg.norm(inverse, axis=0)
    zero = np.zeros((1, queries.width))

    def ask(distance: int) -> Steps[tuple[Floats, Floats]]:
        queries.between = distance - 1
        answer = (yield from queries.ask_token("positions", start.token, zero))[0]
        queries.between = 0
        odds = np.asarray(1 / (1 / (answer @ inverse) - 1))
        return odds, (1 + odds) ** 2 / odds * error

    table, off = yield from ask_masses(ask, start.heads, queries.longest - 1)
    known, wide = replace(start.odds, table=table), replace(start.errors, table=off)
    return replace(start, odds=known, errors=wide)


def ask_masses(
    ask: Callable[[int], Steps[tuple[Floats, Floats]]],  # odds (heads,) at a distance against all nearer, and errors
    heads: int,
    longest: float,
) -> Steps[tuple[Floats, Floats]]:  # twice (heads, distances)
    """What each distance adds to energies, and deviations.

    Distances are doubled until much farther ones add what the farthest does. Errors of odds are relative ones.
    """
    most = int(min(longest, MOST_DISTANCE))
    masses, off = np.ones((heads, 1)), np.zeros((heads, 0))  # at distances from zero on
    wanted = min(FIRST_DISTANCE, most)
    while True:
        for distance in range(masses.shape[1], wanted + 1):
            odds, error = yield from ask(distance)
            if not np.all(odds > 0):
                raise Unrecoverable(Outcome.WRONG_FAMILY, f"a token {distance} before the last one weighs nothing")
            nearer = np.sum(masses, axis=1)
            off = np.hstack([off, error[:, None]])
            masses = np.hstack([masses, (odds * nearer)[:, None]])
        same = True
        for distance in sorted({min(int(times * wanted), most) for times in FARTHER} - {wanted}):
            odds, error = yield from ask(distance)
            nearer = np.sum(masses, axis=1) + (distance - 1 - wanted) * masses[:, -1]
            allowed = UNEQUAL * (error + off[:, -1])
            same = same and bool(np.all(np.abs(np.log(odds * nearer / masses[:, -1])) <= allowed))
        if same:
            break
        wanted = min(2 * wanted, most)
    table, off = np.log(masses[:, 1:]), np.sqrt(np.cumsum(off**2, axis=1))
    differs = np.any(np.abs(table - table[:, -1:]) > UNEQUAL * (off + off[:, -1:]), axis=0)
    count = 2 + int(np.flatnonzero(differs)[-1]) if np.any(differs) else 1  # one beyond stands for all farther ones
    return table[:, :count], off[:, :count]


def ask_window(queries: LongQueries, token: Floats, values: Floats, sinks: Floats | float = 0.0) -> Steps[float]:
    """The tokens that the last one sees: of a ramp of tokens, each longer than the one before, before a zero one.

    The token's values are those of heads, (heads, outputs), or their sum where no sink takes part in weights.
    """
    space = queries.signature.space
    length = FIRST_LENGTH
    while True:
        count = int(min(length, (queries.signature.max_length or np.inf) - 1))
        row = TokenRows(space.asarray(queries.long * token[None, :]))
        ramp = [[Term(row, None, float(place))] for place in range(1, count + 1)]
        answers: Measurements = yield Plan("positions", 1, [*ramp, []])
        answer = (floats(answers.values)[0] - queries.bias) / queries.long
        widths = np.arange(1, count + 2)
        sums = (widths - 1) * (2 * count - widths + 2) / 2
        told = (sums[:, None] / (widths[:, None] + sinks)) @ values  # (widths, outputs)
        off = np.linalg.norm(told - answer, axis=1)
        best = int(np.argmin(off))
        if not off[best] <= 1e-9 * np.linalg.norm(answer):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY, "a ramp of tokens is answered as behind no window: the position bias is another"
            )
        if widths[best] <= count:
            return float(widths[best])
        if count < length or length >= MOST_LENGTH:
            raise Unrecoverable(
                Outcome.NOT_IDENTIFIABLE, f"no window shows among {count} tokens: take the position bias 'none'"
            )
        length *= 8
