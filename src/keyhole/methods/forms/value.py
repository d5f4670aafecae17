"""The value of a token, from queries of one token."""

from __future__ import annotations

from dataclasses import dataclass

from keyhole.arrays import Array, namespace
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.scale import floor_power
from keyhole.queries import Measurements, Plan, Signature, Term, UnitRows
from keyhole.recovery import Outcome

# Where norms are free, one-token queries have this norm, so that an output bias does not drown the value ...
CLEAR = 2.0**20
# ... or this one, so that noise does not.
LOUD = 2.0**40


@dataclass(frozen=True)
class Value:
    """An estimate of the affine map from a token to its value: x·vector + bias."""

    vector: Array  # (width,) or (width, outputs)
    radius: Array  # of the same shape
    bias: Array  # () or (outputs,)
    bias_radius: Array  # of the same shape

    @property
    def has_bias(self) -> bool:
        """Whether the bias can be told from zero."""
        return bool(namespace(self.bias).any(abs(self.bias) > self.bias_radius))

    def along(self, direction: Array) -> Value:  # (outputs,)
        """The value of one combination of the outputs."""
        size = abs(direction)
        return Value(self.vector @ direction, self.radius @ size, self.bias @ direction, self.bias_radius @ size)


def unit_plan(signature: Signature, norm: float, repeats: int = 1, first_repeat: int = 0) -> Plan:
    """The zero token, then every norm·e_i, one token a query."""
    rows = UnitRows(signature.space, signature.width, norm)
    return Plan("value", rows.count, [[Term(rows)]], repeats, first_repeat)


def ask_value(signature: Signature, *, nonzero: bool = True) -> Steps[Value]:
    """The value from one-token queries: attention on a single token is the identity, so the answer is its value.

    The zero token gives the output bias; the others are long where they may, so that the bias does not drown them.
    Ends where the score matrix cannot be known: sequences of one token, or, if it shall be `nonzero`, a value of zero.
    """
    check_length(signature)
    space, xp = signature.space, signature.space.xp
    norm = LOUD if signature.noise.kind != "exact" else CLEAR
    norm = norm if signature.max_norm is None else floor_power(min(LOUD, signature.norm_limit))
    answers: Measurements = yield unit_plan(signature, norm)
    bias, rounding = answers.values[0, ...], _rounding(answers.values, signature)
    bias_radius = rounding[0, ...] + answers.radius
    shows = xp.abs(bias) > bias_radius
    # Taken for zero, it is off by what was measured besides.
    bias_radius = xp.where(shows, bias_radius, bias_radius + xp.abs(bias))
    bias = xp.where(shows, bias, xp.zeros_like(bias))
    vector = (answers.values[1:, ...] - bias) / norm
    rounded = rounding[1:, ...] + rounding[0, ...]
    value = Value(vector, (rounded + answers.radius + bias_radius + space.tiny) / norm, bias, bias_radius)
    if nonzero:
        check_nonzero(signature, value)
    return value


def _rounding(answers: Array, signature: Signature) -> Array:  # (count[, outputs]) -> the same
    """How far answers are off by the oracle's own arithmetic.

    It weighs by a softmax, adds a bias and may round in another unit: a few roundings of its dtype. Where there are
    several outputs they are mostly a product of two matrices, so sums over up to `width` inner numbers, whose terms are
    as large as the other outputs however small the sum is.
    """
    xp, eps, sizes = signature.space.xp, signature.space.eps, abs(answers)
    if sizes.ndim == 1:
        return 3 * eps * sizes
    return (3 + signature.width**0.5) * eps * xp.broadcast_to(xp.max(sizes, axis=-1, keepdims=True), sizes.shape)


def is_nonzero(signature: Signature, value: Value) -> bool:
    """Whether the value can be told from zero."""
    return not bool(signature.space.xp.all(abs(value.vector) <= value.radius))


def check_nonzero(signature: Signature, value: Value) -> None:
    """Raise where the value cannot be told from zero, so that no answer depends on the score matrix."""
    if not is_nonzero(signature, value):
        if signature.noise.kind != "exact":
            raise Unrecoverable(Outcome.TOO_NOISY, "the value vector cannot be told from zero in the declared noise")
        raise Unrecoverable(
            Outcome.NOT_IDENTIFIABLE,
            "the value vector is zero, so every answer is the same whatever the score matrix: it cannot be known",
        )


def check_length(signature: Signature) -> None:
    """Raise where sequences have one token only, so that attention never has a choice."""
    if signature.max_length == 1:
        raise Unrecoverable(
            Outcome.NOT_IDENTIFIABLE,
            "attention on one token is the identity whatever the score matrix: allow sequences of two (max_length)",
        )
