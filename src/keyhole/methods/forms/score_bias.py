"""The score bias: whether there is one, and what it is."""

from __future__ import annotations

from typing import final

import numpy as np

from keyhole.arrays import ROUNDING_DEVIATIONS, Array
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.reader import SATURATED, Forms, PairValues, ScoreBias, SearchingReader
from keyhole.methods.forms.scale import ScaleEstimate
from keyhole.methods.forms.value import Value
from keyhole.numerics.orthogonal import equal_overlap, random_orthogonal
from keyhole.queries import Signature, Term, TokenRows
from keyhole.recovery import Outcome

# The norm at which any score bias shows, whatever the noise.
VERY_LONG = 2.0**100

NO_BIAS = "a logit does not scale with its tokens, and no score bias shows why"


@final
class BiasReader(SearchingReader):
    """Measures row·score_bias by queries [a·row; 0], where a is the scale."""

    negligible_last = False

    def __init__(self, signature: Signature, value: Value) -> None:
        # A vector has few entries: those measured too cautiously would spoil it.
        super().__init__(signature, value.vector, ScaleEstimate(caution=1))
        self.values = PairValues(signature, value)
        self.largest_scale = self.values.longest

    def first_norm(self, scale: float) -> float:
        """Norm of first tokens."""
        return scale

    def radius_at_zero(self, scale: float) -> float:
        """Radius of a logit of zero, for a row of average overlap with the value."""
        return self.values.radius_at_zero(scale)

    def ask_at(
        self, stage: str, rows: TokenRows, columns: TokenRows, row_index: Array, column_index: Array, scale: float
    ) -> Steps[Forms]:
        """The forms row·score_bias of some rows; columns are of zeros."""
        logits, radius, saturation, _ = yield from self.values.ask_logits(
            stage, Term(rows, row_index, scale), Term(columns, column_index, 0.0)
        )
        own = self.signature.space.rounding * self.estimate.size * self.signature.width**0.5
        return Forms(logits / scale, radius / scale + own, 0 * logits, saturation)


def ask_for_bias(signature: Signature, value: Value, rng: np.random.Generator) -> Steps[tuple[bool, float]]:
    """Whether there is a score bias, and if none is detected, how large it may still be.

    One query [row; 0], as long as it may be: its two tokens weigh the same unless there is a score bias.
    """
    space = signature.space
    rows = TokenRows(equal_overlap(space, random_orthogonal(space, rng, signature.width), value.vector, rng))
    reader, zero = BiasReader(signature, value), space.indices([0])
    nothing = TokenRows(space.zeros(1, signature.width))
    forms = yield from reader.ask_at("scale", rows, nothing, zero, zero, min(reader.largest_scale, VERY_LONG))
    form, radius = abs(float(forms.values[0])), float(forms.radius[0])
    detected = float(forms.saturation[0]) > SATURATED or form > radius
    # One random row sees at least a 32nd of its fair share of the bias, but for one in forty.
    return detected, 32 * signature.width**0.5 * (form + radius / ROUNDING_DEVIATIONS)


def ask_score_bias(signature: Signature, value: Value, rng: np.random.Generator) -> Steps[ScoreBias]:
    """The score bias in an orthonormal basis: the last token is zero, so that the score matrix adds nothing."""
    space, xp = signature.space, signature.space.xp
    rows = TokenRows(equal_overlap(space, random_orthogonal(space, rng, signature.width), value.vector, rng))
    reader = BiasReader(signature, value)
    nothing = TokenRows(space.zeros(signature.width, signature.width))
    yield from reader.ask_probe(rows, nothing)
    every = space.indices(range(signature.width))
    forms = yield from reader.ask_forms("score bias", rows, nothing, every, every)
    vector = rows.vectors.T @ forms.values
    if bool(xp.all(vector == 0)):
        raise Unrecoverable(Outcome.WRONG_FAMILY, NO_BIAS)
    radius = xp.sqrt((rows.vectors.T) ** 2 @ forms.radius**2)
    return ScoreBias(vector, radius + space.rounding * xp.linalg.vector_norm(vector))
