"""How many digits the arithmetic behind rounded answers has.

Answers rounded to decimals may have been computed in float32 first. That shows where they are long: a float32 number of
more than 2²⁶ units of the last decimal has no digits of that size, one of float64 has.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keyhole.arrays import FLOAT32, floats
from keyhole.methods.base import Steps
from keyhole.queries import Measurements, Signature, sequences

# Norms of tokens whose answers are long enough, whatever the unit; longer ones may overflow in float32.
NORMS = (2.0**20, 2.0**40)
TOKENS = 4  # of each norm
LONG = 2.0**26  # units of the last decimal
# So many long answers that float32 does not hold show finer arithmetic.
LEAST = 3


def ask_precision(signature: Signature, rng: np.random.Generator) -> Steps[Signature]:
    """The signature, coarse where arithmetic finer than float32 does not show behind answers rounded to decimals."""
    if signature.noise.kind != "rounded" or signature.space.eps >= FLOAT32 or signature.alphabet is not None:
        return signature
    directions = rng.standard_normal((len(NORMS), TOKENS, signature.width))
    directions /= np.linalg.norm(directions, axis=2, keepdims=True)
    norms = np.minimum(NORMS, signature.norm_limit)
    tokens = (norms[:, None, None] * directions).reshape(-1, 1, signature.width)
    answers: Measurements = yield sequences("noise", signature.space.asarray(tokens))
    values, unit = floats(answers.values).ravel(), 2 * signature.noise.scale
    with np.errstate(over="ignore"):
        apart = np.abs(values - values.astype(np.float32))
    if np.count_nonzero((np.abs(values) > LONG * unit) & (apart > unit)) >= LEAST:
        return signature
    return signature.with_changes(space=replace(signature.space, coarse=FLOAT32))
