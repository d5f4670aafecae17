"""One token in all heads where queries have biases: its values from long tokens, its logits at natural norms.

A long token beside a last one of any norm has all of the weight or none, by the sign of u·(W·g + c). Far out, where
W·g outweighs c, each head changes its side once along a half-circle of last tokens, as without biases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.scale import floor_power
from keyhole.methods.multi_head.vector.first_token import CLEAR
from keyhole.methods.multi_head.vector.parts.first_token import FirstHeads, ask_jumps
from keyhole.methods.multi_head.vector.parts.long_tokens import FAR, LongQueries, Odds
from keyhole.methods.multi_head.vector.probe import HeadsHidden, VectorQueries
from keyhole.methods.multi_head.vector.scores import inverse_of
from keyhole.numerics.svd import singular_values
from keyhole.recovery import Outcome

# Last tokens that are asked first, how many more than heads there must be, and so many times as many at most.
FIRST, SPARE, MOST = 16, 8, 16
# Roundings of an answer to a long token.
ROUNDED = 4.0
# Far out weights are zero or one within this.
DECIDED = 1e-6
# Logits of the sharpest head are brought to about this size, within a factor, and what distances add below another.
AIM, WITHIN, LARGEST_OFFSET = 0.7, 2.0, 4.0
PROBES, MOST_STEPS, STEEPEST = 4, 60, 8.0
SHORTER = (1 / 2, 1 / 4)
# Weights nearer than this to an end tell no logit.
EDGE = 1e-9
# Distances at which a window is looked for.
MOST_DISTANCE = 2**15


class Decided(Odds):
    """Weights of long tokens: all or nothing, and all of it where logits are zero."""

    def weights(self, logits: Floats) -> Floats:  # (…, heads) -> the same
        """The weight of a lone long token."""
        return np.where(logits < 0, 0.0, 1.0)


@dataclass(frozen=True)
class BiasedToken:
    """One token in all heads."""

    token: Floats  # (width,) of about norm one
    values: Floats  # (heads, outputs)
    keys: Floats  # (heads, width): logits of the token are products of the last one with these, and biases
    biases: Floats  # (heads,)
    scale: float  # norm of tokens and of last ones at natural norms

    @property
    def heads(self) -> int:
        """Heads that show."""
        return int(self.values.shape[0])

    @property
    def logit_sizes(self) -> Floats:  # (heads,)
        """Root mean squares of logits at natural norms."""
        from_last = np.linalg.norm(self.keys, axis=1) * self.scale / self.keys.shape[1] ** 0.5
        return np.asarray(self.scale * np.hypot(from_last, self.biases))

    def among_long(self, queries: LongQueries) -> FirstHeads:
        """The token as values of others are read beside it, which are long."""
        nothing = Odds(np.zeros(self.heads))
        decided = Decided(np.ones(self.heads))
        return FirstHeads(self.token, self.values, self.keys, decided, nothing, queries.noise, queries.scale)


def ask_long_jumps(queries: LongQueries, token: Floats) -> Steps[Floats]:  # (heads, outputs)
    """The values of a unit token in all heads; queries are told what answers err by."""
    answers, count = np.zeros((0, queries.outputs)), FIRST
    while True:
        last = FAR * queries.rng.standard_normal((count - answers.shape[0], queries.width))
        answers = np.vstack([answers, (yield from queries.ask_token("heads", token, last))])
        queries.noise = max(queries.noise, ROUNDED * queries.signature.space.eps * float(np.max(np.abs(answers))))
        floor = CLEAR * queries.noise * (count**0.5 + queries.outputs**0.5)
        heads = int(np.sum(singular_values(answers) > floor))
        if heads == 0:
            raise HeadsHidden(Outcome.WRONG_FAMILY, "no last token gives a long one any weight")
        if heads + SPARE <= count or heads == queries.outputs:
            try:
                return _upright((yield from ask_jumps(queries, token, heads)), answers)
            except HeadsHidden:  # some heads may have been on the same side of all last tokens so far
                if count >= MOST * (heads + SPARE):
                    raise
        count = 2 * count


def _upright(jumps: Floats, answers: Floats) -> Floats:
    """Jumps with the signs of values: far out a head takes all or nothing."""
    shares = answers @ inverse_of(jumps[:, None])
    signs = np.sign(np.sum(shares, axis=0))
    jumps, shares = jumps * signs[:, None], shares * signs
    if not np.all(np.minimum(np.abs(shares), np.abs(shares - 1)) <= DECIDED):
        raise HeadsHidden(
            Outcome.WRONG_FAMILY, "far out a long token has neither all nor nothing of the weight in some head"
        )
    return jumps


def ask_keys(queries: VectorQueries, token: Floats, values: Floats) -> Steps[BiasedToken]:
    """Settle the norm at which logits are of order one, and read those of the token there."""
    inverse = inverse_of(values[:, None])
    yield from _ask_scale(queries, token, inverse)
    last = np.vstack([queries.scale * queries.directions(queries.width), np.zeros((1, queries.width))])
    last = queries.on_grid(last)
    for_both = yield from _ask_halves(queries, token, inverse, last)
    if for_both is None:
        raise Unrecoverable(Outcome.SATURATED, "weights stay at their ends at the norm where others do not")
    logits = for_both[0] / queries.scale
    biases = logits[-1]
    keys = np.linalg.solve(last[:-1], logits[:-1] - biases)
    return BiasedToken(token, values, np.array(keys.T), np.asarray(biases), queries.scale)


def _ask_halves(
    queries: VectorQueries, token: Floats, inverse: Floats, last: Floats
) -> Steps[tuple[Floats, Floats] | None]:  # twice (n, heads)
    """Logits of the token, and what is beside them in those of both it and its opposite; None of weights at an end."""
    every, zeros = np.arange(last.shape[0], dtype=np.int64), np.zeros(last.shape[0], dtype=np.int64)
    found = []
    for sign in (1.0, -1.0):
        rows = (queries.scale * token[None, :], zeros, sign * np.ones(every.size))
        answers = (yield from queries.ask("scale", last, every, [rows]))[:, 0]
        weights = answers @ inverse / (sign * queries.scale)
        if not np.all((weights > EDGE) & (weights < 1 - EDGE)):
            return None
        found.append(np.log(weights / (1 - weights)))
    return (found[0] - found[1]) / 2, (found[0] + found[1]) / 2


def _ask_scale(queries: VectorQueries, token: Floats, inverse: Floats) -> Steps[None]:
    """A power of two as the norm of tokens: logits of order one, and less where last tokens add much with distance."""
    ways, scale, low, high = queries.directions(PROBES), 1.0, 0.0, np.inf
    costs: dict[float, float] = {}

    def ask(scale: float) -> Steps[float | None]:
        """The size of logits; None where weights are at an end."""
        queries.scale = scale
        read = yield from _ask_halves(queries, token, inverse, queries.on_grid(scale * ways))
        if read is None:
            return None
        size = max(float(np.max(np.sqrt(np.mean(read[0] ** 2, axis=0)))), 1e-300)
        costs[scale] = abs(float(np.log(size / AIM))) + max(0.0, float(np.max(np.abs(read[1]))) - LARGEST_OFFSET)
        return size

    for _ in range(MOST_STEPS):
        size = yield from ask(scale)
        if size is not None and AIM / WITHIN <= size <= AIM * WITHIN:
            break
        low, high = (low, scale) if size is None or size > AIM else (scale, high)
        between = STEEPEST * low if high == np.inf else high / STEEPEST if low == 0.0 else (low * high) ** 0.5
        new = floor_power(between)
        if new in (low, high) or not 2.0**-300 < new < 2.0**300:
            break
        scale = new
    for shorter in SHORTER:
        yield from ask(shorter * scale)
    if not costs:
        raise Unrecoverable(
            Outcome.SATURATED, "the weights of a token stay at their ends at every norm: biases of logits are large"
        )
    queries.scale = min(costs, key=lambda scale: costs[scale])


def ask_sight(queries: LongQueries, token: Floats) -> Steps[float]:
    """How many tokens the last one sees, itself included: a long token or its opposite has some weight where seen."""
    zero = np.zeros((1, queries.width))
    most = int(min((queries.signature.max_length or MOST_DISTANCE) - 1, MOST_DISTANCE))

    def is_seen(distance: int) -> Steps[bool]:
        queries.between = distance - 1
        one = yield from queries.ask_token("positions", token, zero)
        two = yield from queries.ask_token("positions", -token, zero)
        queries.between = 0
        return bool(max(np.max(np.abs(one)), np.max(np.abs(two))) > CLEAR * queries.noise)

    return (yield from ask_last_seen(is_seen, most))


def ask_last_seen(is_seen: Callable[[int], Steps[bool]], most: int) -> Steps[float]:
    """How many tokens the last one sees, itself included, by whether those at a distance of at most `most` show."""
    seen, hidden = 1, 2
    while hidden <= most and (yield from is_seen(hidden)):
        seen, hidden = hidden, 2 * hidden
    if hidden > most:
        if seen == most or (yield from is_seen(most)):
            raise Unrecoverable(
                Outcome.NOT_IDENTIFIABLE, f"no window shows among {most + 1} tokens: take the position bias 'none'"
            )
        hidden = most
    while hidden - seen > 1:
        middle = (seen + hidden) // 2
        if (yield from is_seen(middle)):
            seen = middle
        else:
            hidden = middle
    return float(hidden)
