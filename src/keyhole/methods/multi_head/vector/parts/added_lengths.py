"""What the norms of every head add to squared lengths of keys and queries, once all else is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.epsilon import EpsilonReading, ask_epsilon
from keyhole.methods.multi_head.vector.parts.long_tokens import LongQueries
from keyhole.methods.multi_head.vector.values import VectorValues
from keyhole.numerics.svd import pseudo_inverse
from keyhole.queries import Measurements, sequences
from keyhole.recovery import Outcome

# Long tokens beside short ones.
LONG = 2.0**60


def ask_added_lengths(queries: LongQueries, values: VectorValues, forms: Sequence[Any]) -> Steps[EpsilonReading | None]:
    """Logits of short tokens beside long ones in all heads; None where norms add nothing."""
    space = queries.signature.space
    matrices, deviations = values.matrices, np.sum(values.spread, axis=0)  # (heads, width, p), (p,)
    bias = floats(queries.value.bias) if queries.value.has_bias else np.zeros(matrices.shape[-1])

    def ask(first: Floats, last: Floats) -> Steps[tuple[Floats, Floats]]:
        answers: Measurements = yield sequences("epsilon", space.asarray(np.stack([first, last])[None]))
        seen = answers.by_output[0] - bias
        apart = (first - last) @ matrices  # (heads, p)
        inverse = pseudo_inverse(apart.T)
        weights = inverse @ (seen - np.sum(last @ matrices, axis=0))
        size = np.max(np.abs(apart))
        error = 8 * space.eps * (size + np.max(np.abs(seen)) + np.max(np.abs(bias)))
        wide = error + (np.linalg.norm(first) + np.linalg.norm(last)) * deviations
        radius = np.sqrt(np.sum((inverse * wide) ** 2, axis=1))
        if not np.all((weights > 0) & (weights < 1)):
            raise Unrecoverable(Outcome.WRONG_FAMILY, "two tokens are not answered by averages of their values")
        return np.log(weights / (1 - weights)), radius / (weights * (1 - weights))

    return (yield from ask_epsilon(forms, list(matrices), ask, LONG, queries.rng))
