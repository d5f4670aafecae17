"""What the number of tokens does: the factors of a length law, and how many tokens a top-k keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Floats, floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.columns import Score
from keyhole.methods.forms.scale import NORM_RATIO
from keyhole.methods.parts.inverse import POWERS, QUOTIENTS, Inverse, Number
from keyhole.methods.parts.zero_scores import Probe
from keyhole.numerics.domain import LONGEST
from keyhole.queries import Measurements, Plan, Term, TokenRows
from keyhole.recovery import Outcome

# A top-k that keeps all of so many tokens is not told from a softmax.
MOST_KEPT = 512


@dataclass(frozen=True)
class Pair:
    """Two tokens with a known logit, between which there may be zero tokens."""

    probe: Probe
    column: Array  # (width,) unit
    form: float  # of the probe's token and the column
    radius: float  # of the form

    @classmethod
    def of(cls, probe: Probe, score: Score) -> Pair:
        """The pair of the probe's token and the last token that it scores most."""
        xp = probe.signature.space.xp
        row = probe.token.vectors[0, :] @ score.matrix
        size = xp.linalg.vector_norm(row)
        if float(size) == 0.0:
            raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, "the score is zero, so that lengths and ranks do not show")
        column = row / size
        token = probe.token.vectors[0, :]
        spread = xp.sqrt((token**2) @ (score.radius**2) @ (column**2))
        return cls(probe, column, float(size), float(spread))

    def weight(self, length: int, logit: float) -> Steps[Number]:
        """The weight of the first of `length` tokens at this logit, in units of the value."""
        signature = self.probe.signature
        scale = abs(logit) / self.form
        first = NORM_RATIO * math.sqrt(scale)
        columns = TokenRows(self.column[None, :])
        token, index = self.probe.token, signature.space.indices([0])
        positions = [[Term(token, index, first)], *([[]] * (length - 2))]
        last = [Term(columns, index, math.copysign(scale / first, logit))]
        answers: Measurements = yield Plan("lengths", 1, [*positions, last])
        size = first * float(signature.space.xp.linalg.vector_norm(self.probe.value.vector))
        share = float(floats(answers.values - self.probe.value.bias)[0]) / size
        relative = float(signature.space.xp.linalg.vector_norm(self.probe.value.radius)) * first / size
        own = (answers.radius + float(self.probe.value.bias_radius)) / size + 2.0**-62
        return Number(share, abs(share) * (relative + signature.space.rounding) + own)


def ask_kept(pair: Pair) -> Steps[int | None]:
    """How many tokens a top-k keeps, by bisection: the token of the lowest score is kept iff there are no more."""
    longest = min(MOST_KEPT, pair.probe.signature.max_length or MOST_KEPT)

    def ask(length: int) -> Steps[bool]:
        weight = yield from pair.weight(length, -1.0)
        return weight.value > 4 * weight.radius

    low, high = 2, 4  # of two tokens both are kept, or no logit would have shown
    while True:
        high = min(high, longest)
        if high <= low:
            return None
        if not (yield from ask(high)):
            break
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if (yield from ask(middle)) else (low, middle)
    return low


def ask_length_table(pair: Pair, inverse: Inverse, logit: float) -> Steps[list[Number]]:
    """What logits are multiplied by at lengths from three on, over that at two, up to where it stays the same."""
    longest = min(LONGEST, pair.probe.signature.max_length or LONGEST)
    if longest < 3:
        raise Unrecoverable(
            Outcome.NOT_IDENTIFIABLE, "a table by length does not show in sequences of two tokens: raise max_length"
        )
    known: dict[int, Number] = {}

    def ask(length: int) -> Steps[Number]:
        if length not in known:
            weight = yield from pair.weight(length, logit)
            known[length] = _factor(weight, length, inverse, logit, pair.radius / pair.form)
        return known[length]

    last = yield from ask(longest)
    low, high = 3, longest
    while low < high:
        middle = (low + high) // 2
        here = yield from ask(middle)
        same = abs(here.value - last.value) <= here.radius + last.radius
        low, high = (low, middle) if same else (middle + 1, high)
    for length in range(3, low + 1):
        yield from ask(length)
    return [known[length] for length in range(3, low + 1)]


def _factor(weight: Number, length: int, inverse: Inverse, logit: float, relative: float) -> Number:
    """The logit that the first of many tokens had, all others but it being zero, over that of two."""
    others = length - 1

    def solve(share: float) -> float:
        own = share * inverse.unit
        if inverse.normaliser in QUOTIENTS:
            # What one other token and all else weigh at zero is (1 − zero)/zero; zero tokens beyond it weigh one each.
            rest = (1 - inverse.zero) / inverse.zero + others - 1
            made = math.log(own) - math.log1p(-own) + math.log(rest)
        elif inverse.normaliser in POWERS:
            power = POWERS[inverse.normaliser]
            made = power * (own ** (1 / power) - ((1 - own) / others) ** (1 / power))
        else:
            made = math.log(own / inverse.zero * (length / 2 if inverse.normaliser == "count" else 1.0))
        if inverse.link == "softcap":
            made = inverse.cap * math.atanh(made / inverse.cap)
        elif inverse.link == "sigmoid":
            mass = made - math.log1p(math.exp(-inverse.bias))
            made = mass - math.log(-math.expm1(mass)) - inverse.bias
        return made / logit

    try:
        found = weight.through(solve)
    except ValueError as error:
        raise Unrecoverable(
            Outcome.SATURATED, f"the logit of a token among {length} is beyond what weights show"
        ) from error
    return Number(found.value, found.radius + relative * abs(found.value) + 4e-16)


def as_arrays(numbers: list[Number]) -> tuple[Floats, Floats]:
    """Values and radii."""
    return np.array([each.value for each in numbers]), np.array([each.radius for each in numbers])
