"""What sequences tell whose last token is zero, so that all scores are: values, and what distance adds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.scale import floor_power
from keyhole.methods.forms.value import CLEAR, Value, _rounding, ask_value, check_length, check_nonzero
from keyhole.methods.parts.inverse import POWERS, QUOTIENTS, Number
from keyhole.numerics.domain import LONGEST
from keyhole.queries import Measurements, Plan, Signature, Term, TokenRows
from keyhole.recovery import Outcome

# Sequences of a ramp, that shows a window.
LONGEST_RAMP = 512
# Weights below this may be those of any position bias.
HIDDEN = 2.0**-16
HIDES = "errors of answers hide the weight of a token of score zero: allow longer tokens, or use finer answers"
OUT_OF_SIGHT = "a token is out of sight at a distance of {distance}: name the position bias 'window'"


@dataclass(frozen=True)
class Probe:
    """A token in whose value answers are measured."""

    signature: Signature
    value: Value
    norm: float = CLEAR

    @property
    def token(self) -> TokenRows:
        """The direction of the value."""
        xp = self.signature.space.xp
        return TokenRows((self.value.vector / xp.linalg.vector_norm(self.value.vector))[None, :])

    def share(self, stage: str, scales: Floats) -> Steps[tuple[Floats, Floats]]:  # (n, length), multiples of the token
        """Sums of weight·scale (n,) over tokens of these sizes, and their radii; all scores must be zero."""
        space, rows = self.signature.space, self.token
        index = space.indices(np.zeros(len(scales)))
        positions = [
            [Term(rows, index, space.asarray(self.norm * column))] if np.any(column) else [] for column in scales.T
        ]
        answers: Measurements = yield Plan(stage, len(scales), positions)
        return self.read(answers)

    def read(self, answers: Measurements) -> tuple[Floats, Floats]:
        """Answers over the value of the token."""
        xp, space = self.signature.space.xp, self.signature.space
        size = self.norm * float(xp.linalg.vector_norm(self.value.vector))
        shares = floats(answers.values - self.value.bias) / size
        error = float(xp.linalg.vector_norm(self.value.radius)) * self.norm / size + space.rounding
        own = answers.radius + float(self.value.bias_radius) + 2 * space.eps * abs(float(self.value.bias))
        return shares, np.abs(shares) * error + own / size


def ask_paired_value(signature: Signature) -> Steps[Value]:
    """The value times the weight of the first of two tokens of score zero, from queries [x; 0]."""
    check_length(signature)
    space, xp, width = signature.space, signature.space.xp, signature.width
    norm = CLEAR if signature.max_norm is None else floor_power(min(CLEAR, signature.norm_limit))
    tokens = TokenRows(xp.concat([space.zeros(1, width), norm * space.eye(width)]))
    answers: Measurements = yield Plan("value", width + 1, [[Term(tokens)], []])
    bias, rounding = answers.values[0, ...], _rounding(answers.values, signature)
    bias_radius = rounding[0, ...] + answers.radius
    shows = xp.abs(bias) > bias_radius
    bias_radius = xp.where(shows, bias_radius, bias_radius + xp.abs(bias))
    bias = xp.where(shows, bias, xp.zeros_like(bias))
    vector = (answers.values[1:, ...] - bias) / norm
    rounded = rounding[1:, ...] + rounding[0, ...]
    value = Value(vector, (rounded + answers.radius + bias_radius + space.tiny) / norm, bias, bias_radius)
    check_nonzero(signature, value)
    return value


def ask_values(signature: Signature, paired: bool) -> Steps[Value]:
    """The value, or that times the weight of the first of two tokens of score zero."""
    return (yield from (ask_paired_value(signature) if paired else ask_value(signature)))


def ask_zero_weight(probe: Probe) -> Steps[Number]:
    """The weight of the first of two tokens at a logit of zero, of a head whose weights add up to one."""
    shares, radii = yield from probe.share("positions", np.array([[1.0, 0.0]]))
    if not shares[0] > 4 * radii[0]:
        raise _out_of_sight(1, float(radii[0]))
    if not shares[0] < 1 - 4 * radii[0]:
        raise Unrecoverable(
            Outcome.WRONG_FAMILY,
            "a zero token has no weight beside one before it: there is a score bias, or no such part",
        )
    return Number(float(shares[0]), float(radii[0]))


def _out_of_sight(distance: int, radius: float) -> Unrecoverable:
    """The end where a token has no weight that shows."""
    if radius > HIDDEN:
        return Unrecoverable(Outcome.TOO_NOISY, HIDES)
    return Unrecoverable(Outcome.NOT_IDENTIFIABLE, OUT_OF_SIGHT.format(distance=distance))


def lone_weight(probe: Probe, norm: float) -> Steps[Number]:
    """The weight of a token alone whose score is none, over the unit of the value."""
    short = replace(probe, norm=norm)
    shares, radii = yield from short.share("positions", np.array([[1.0]]))
    return Number(float(shares[0]), float(radii[0]))


def bias_of_weight(weight: Number, normaliser: str, others: list[Number], rest: Number) -> Number:
    """What is added at a distance to the energy of a token of this weight.

    `others` are what is added to the other tokens, the query's own zero among them, `rest` the mass beside them.
    """
    if not 0 < weight.value < (1 if normaliser in (*QUOTIENTS, *POWERS) else math.inf):
        raise Unrecoverable(Outcome.WRONG_FAMILY, "what distance adds makes of a weight what none can be")
    biases = np.array([each.value for each in others])
    known = max((each.radius for each in others), default=0.0)
    if normaliser in QUOTIENTS:
        total = float(np.sum(np.exp(biases))) + rest.value
        away = (sum(each.radius * math.exp(each.value) for each in others) + rest.radius) / total
        made = math.log(weight.value) - math.log1p(-weight.value) + math.log(total)
        return Number(made, weight.radius / (weight.value * (1 - weight.value)) + away)
    if normaliser in POWERS:
        return _bias_of_sparse_weight(weight, POWERS[normaliser], biases, known)
    return Number(math.log(weight.value), weight.radius / weight.value)


def _bias_of_sparse_weight(weight: Number, power: float, biases: Floats, known: float) -> Number:
    """The threshold of the other tokens is where their weights add up to what is left; by bisection."""

    def solve(own: float) -> float:
        low, high = float(np.max(biases)) / power - 1.0, float(np.max(biases)) / power
        for _ in range(200):
            middle = (low + high) / 2
            total = float(np.sum(np.clip(biases / power - middle, 0.0, None) ** power))
            low, high = (middle, high) if total > 1 - own else (low, middle)
        return float(power * (own ** (1 / power) + (low + high) / 2))

    found = weight.through(solve)
    return Number(found.value, found.radius + known)


def ask_table(probe: Probe, normaliser: str, first: Number, rest: Number, unit: float) -> Steps[list[Number]]:
    """What is added at every distance up to the one beyond which it is always the same.

    Of one length, weights of two distances are in proportion to what is added, so that distance is found by bisection.
    """
    longest = min(LONGEST, probe.signature.max_length or LONGEST)
    farthest = longest - 1
    end, low, high = 1, 1, farthest
    if farthest > 1:
        last = yield from _ask_weight(probe, longest, farthest)
        while low < high:
            middle = (low + high) // 2
            here = yield from _ask_weight(probe, longest, middle)
            same = abs(here.value - last.value) <= here.radius + last.radius
            low, high = (low, middle) if same else (middle + 1, high)
        end = low
    found = [Number(0.0, 0.0), first]
    if end > 1:
        scales = [np.eye(1, distance + 1)[0] for distance in range(2, end + 1)]
        for scale in scales:
            shares, radii = yield from probe.share("positions", scale[None, :])
            if not shares[0] > 4 * radii[0]:
                raise _out_of_sight(len(scale) - 1, float(radii[0]))
            weight = Number(float(shares[0]) * unit, float(radii[0]) * unit)
            found.append(bias_of_weight(weight, normaliser, found, rest))
    return found[1:]


def _ask_weight(probe: Probe, length: int, distance: int) -> Steps[Number]:
    shares, radii = yield from probe.share("positions", np.eye(1, length, length - 1 - distance))
    return Number(float(shares[0]), float(radii[0]))


def ask_window(probe: Probe, most: int = LONGEST_RAMP) -> Steps[int | None]:
    """The width of a window; None where sequences of the greatest length show none.

    The last token is zero, so that all in sight weigh the same, and a ramp shows where they are on average.
    """
    length = min(most, probe.signature.max_length or most)
    ramp = np.append(np.arange(1.0, length), 0.0)
    ones = np.append(np.ones(length - 1), 0.0)
    shares, radii = yield from probe.share("positions", np.stack([ramp, ones]))
    if not shares[1] > 4 * radii[1]:
        if radii[1] > HIDDEN:
            raise Unrecoverable(Outcome.TOO_NOISY, HIDES)
        raise Unrecoverable(
            Outcome.NOT_IDENTIFIABLE, "the last token sees no token but itself, so that no answer depends on the score"
        )
    mean, radius = shares[0] / shares[1], (radii[0] + shares[0] / shares[1] * radii[1]) / shares[1]
    width = 2 * (length - mean)
    if abs(width - round(width)) > 2 * radius + 1e-6 * width or round(width) > length:
        raise Unrecoverable(
            Outcome.WRONG_FAMILY, "tokens of score zero within the window do not weigh the same: it is no window"
        )
    return round(width) if round(width) < length else None
