"""What zero tokens between two tokens of bounded norm tell: factors of lengths, and how many tokens a top-k keeps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.families import SingleHead
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.parts.inverse import Number
from keyhole.methods.parts.lengths import MOST_KEPT
from keyhole.methods.parts.zero_scores import Probe
from keyhole.numerics.domain import LONGEST
from keyhole.queries import Measurements, Plan, Term, TokenRows
from keyhole.recovery import Outcome

# The logit that is aimed at, and how much shorter than the bound a last token is whose own score is to be small.
AIM, SHORT = 0.7, 1 / 16
NO_SCORE = "the score is zero, so that lengths and ranks do not show"


@dataclass(frozen=True)
class PaddedPair:
    """A token of the norm bound and a last one of value zero, with zero tokens between them."""

    probe: Probe  # whose norm is the bound
    last: Floats  # (width,)
    first: Floats  # (width,)

    @classmethod
    def of(cls, probe: Probe, head: SingleHead, longest: float) -> PaddedPair:
        """The pair with the last token, of at most this norm, that the probe's token scores most, by a rough head."""
        token = floats(probe.token.vectors)[0]
        row = token @ floats(head.score)
        row = row - (row @ token) * token
        size = float(np.linalg.norm(row)) * probe.norm
        if not size > 0:
            raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, NO_SCORE)
        return cls(probe, min(longest, AIM / size) * row / np.linalg.norm(row), token)

    @classmethod
    def of_bias(cls, probe: Probe, bias: Floats) -> PaddedPair:
        """A token of some value whose logit is negative by this score bias, and a zero last one."""
        value, bias = floats(probe.token.vectors)[0], bias / np.linalg.norm(bias)
        first = value + (1.0 if value @ bias >= 0 else -1.0) * bias  # neither of value zero nor across the bias
        first *= (-1.0 if first @ bias > 0 else 1.0) / np.linalg.norm(first)
        return cls(probe, 0 * first, first)

    def ask_weights(self, length: int, side: float = 1.0) -> Steps[tuple[Floats, Floats]]:
        """Weights (2,) of the first token and of that turned round, over the unit of the value, and their radii."""
        signature, scales = self.probe.signature, self.probe.norm * np.array([1.0, -1.0])
        space, index = signature.space, signature.space.indices([0, 0])
        first = Term(TokenRows(space.asarray(self.first[None, :])), index, space.asarray(scales))
        last = Term(TokenRows(space.asarray(side * self.last[None, :])), index)
        answers: Measurements = yield Plan("lengths", 2, [[first], *([[]] * (length - 2)), [last]])
        shares, radii = self.probe.read(answers)
        return shares * np.sign(scales * (self.first @ floats(self.probe.token.vectors)[0])), radii


def ask_factors(pair: PaddedPair, unit: float) -> Steps[Floats]:
    """What logits are multiplied by at lengths from three on, over that at two, up to where it stays the same."""
    longest = min(LONGEST, pair.probe.signature.max_length or LONGEST)
    if longest < 3:
        message = "a table by length does not show in sequences of two tokens: raise max_length"
        raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, message)
    known: dict[int, Number] = {}

    def ask(length: int) -> Steps[Number]:
        if length not in known:
            shares, radii = yield from pair.ask_weights(length)
            weights, wide = shares * unit, radii * unit
            if not np.all((weights > 0) & (weights < 1)):
                raise Unrecoverable(Outcome.WRONG_FAMILY, f"a token among {length} has no weight between zero and one")
            # Odds e^z/rest and e^−z/rest, whatever all other tokens weigh.
            logit = float(np.log((1 / weights[1] - 1) / (1 / weights[0] - 1))) / 2
            known[length] = Number(logit, float(np.sum(wide / (weights * (1 - weights)))) / 2)
        return known[length]

    start = yield from ask(2)
    if not abs(start.value) > 4 * start.radius:
        raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, NO_SCORE)
    last = yield from ask(longest)
    low, high = 3, longest
    while low < high:
        middle = (low + high) // 2
        here = yield from ask(middle)
        same = abs(here.value - last.value) <= here.radius + last.radius
        low, high = (low, middle) if same else (middle + 1, high)
    for length in range(3, low + 1):
        yield from ask(length)
    return np.array([known[length].value for length in range(3, low + 1)]) / start.value


def ask_most_kept(pair: PaddedPair) -> Steps[int | None]:
    """How many tokens a top-k keeps, by bisection: the token of the lowest score is kept iff there are no more."""
    longest = min(MOST_KEPT, pair.probe.signature.max_length or MOST_KEPT)

    def ask(length: int) -> Steps[bool]:
        shares, radii = yield from pair.ask_weights(length, -1.0)
        return bool(shares[0] > 4 * radii[0])

    if longest < 2 or not (yield from ask(2)):
        return 1
    low, high = 2, min(4, longest)
    while low < high:
        if not (yield from ask(high)):
            break
        low, high = high, min(2 * high, longest)
    if low == high:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if (yield from ask(middle)) else (low, middle)
    return low
