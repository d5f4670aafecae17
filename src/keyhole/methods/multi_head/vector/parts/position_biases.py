"""What distances do in every head, from the weights of one token whose logit is zero."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keyhole.arrays import floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.multi_head.vector.parts.first_token import FirstHeads
from keyhole.methods.multi_head.vector.parts.long_tokens import LongQueries
from keyhole.methods.multi_head.vector.scores import inverse_of
from keyhole.queries import Measurements, Plan, Term, TokenRows
from keyhole.recovery import Outcome

# Windows are looked for among this many tokens first, and among this many at most.
FIRST_LENGTH, MOST_LENGTH = 512, 2**15


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


def ask_window(queries: LongQueries, start: FirstHeads) -> Steps[float]:
    """The tokens that the last one sees: of a ramp of tokens, each longer than the one before, before a zero one."""
    space = queries.signature.space
    sinks = start.odds.rest - 1  # (heads,) of which a window leaves the rest known
    length = FIRST_LENGTH
    while True:
        count = int(min(length, (queries.signature.max_length or np.inf) - 1))
        row = TokenRows(space.asarray(queries.long * start.token[None, :]))
        ramp = [[Term(row, None, float(place))] for place in range(1, count + 1)]
        answers: Measurements = yield Plan("positions", 1, [*ramp, []])
        answer = (floats(answers.values)[0] - queries.bias) / queries.long
        widths = np.arange(1, count + 2)
        sums = (widths - 1) * (2 * count - widths + 2) / 2
        told = (sums[:, None] / (widths[:, None] + sinks)) @ start.values  # (widths, outputs)
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
