"""The score bias: whether there is one, and what it is."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Array
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.reader import WORST_STRAIN, FormReader, ScoreBias
from keyhole.methods.forms.value import Value
from keyhole.numerics.logit import ROUNDING_DEVIATIONS, rounding
from keyhole.numerics.orthogonal import equal_overlap, random_orthogonal
from keyhole.queries import Signature, TokenRows
from keyhole.recovery import Outcome

# The norm at which any score bias shows, whatever the noise.
VERY_LONG = 2.0**100

NO_BIAS = "a logit does not scale with its tokens, and no score bias shows why"


class BiasReader(FormReader):
    """Reads row·score_bias from queries [a·row; 0], at a scale a that it keeps adjusting."""

    def __init__(self, signature: Signature, value: Value) -> None:
        super().__init__(signature, value)
        self.levered = False
        self.largest_scale = self.longest
        self.caution = 1  # a vector has few entries: those read too timidly would spoil it

    def _first_norm(self, scale: float) -> float:
        return scale

    def norms(self, scale: float, rows_bias: Array, columns_bias: Array) -> tuple[float, float]:  # noqa: ARG002
        """The last token is zero."""
        return scale, 0.0

    def _unit(self, first: float | Array, last: float | Array) -> float | Array:  # noqa: ARG002
        return first


def bias_that_shows(signature: Signature, value: Value, rng: np.random.Generator) -> Steps[tuple[bool, float]]:
    """Look for a score bias unless it shows for nothing, when the first form is read at a second scale."""
    if signature.max_norm is None and signature.noise.kind == "exact":
        return False, 0.0
    return (yield from look_for_score_bias(signature, value, rng))


def look_for_score_bias(signature: Signature, value: Value, rng: np.random.Generator) -> Steps[tuple[bool, float]]:
    """One query [row; 0], as long as it may be: its two tokens weigh the same unless there is a score bias.

    Whether one shows, and if not, how large it may still be.
    """
    space = signature.space
    rows = TokenRows(equal_overlap(space, random_orthogonal(space, rng, signature.width), value.vector))
    reader, zero = BiasReader(signature, value), space.indices([0])
    nothing = TokenRows(space.zeros(1, signature.width))
    forms = yield from reader._ask("scale", rows, nothing, zero, zero, min(reader.largest_scale, VERY_LONG))
    form, radius = abs(float(forms.values[0])), float(forms.radius[0])
    shows = float(forms.strain[0]) > WORST_STRAIN or form > radius
    # One random row sees at least a 32nd of its fair share of the bias, but for one in forty.
    return shows, 32 * signature.width**0.5 * (form + radius / ROUNDING_DEVIATIONS)


def read_score_bias(signature: Signature, value: Value, rng: np.random.Generator) -> Steps[ScoreBias]:
    """The score bias in an orthonormal basis: the last token is zero, so that the score matrix is silent."""
    space, xp = signature.space, signature.space.xp
    rows = TokenRows(equal_overlap(space, random_orthogonal(space, rng, signature.width), value.vector))
    reader = BiasReader(signature, value)
    nothing = TokenRows(space.zeros(signature.width, signature.width))
    yield from reader.probe(rows, nothing)
    every = space.indices(range(signature.width))
    forms = yield from reader.read("score bias", rows, nothing, every, every)
    vector = rows.vectors.T @ forms.values
    if bool(xp.all(vector == 0)):
        raise Unrecoverable(Outcome.WRONG_FAMILY, NO_BIAS)
    radius = xp.sqrt((rows.vectors.T) ** 2 @ forms.radius**2)
    return ScoreBias(vector, radius + rounding(space) * xp.linalg.vector_norm(vector))
