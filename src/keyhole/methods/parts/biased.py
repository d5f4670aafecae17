"""One head with a score bias: tokens of a norm at which no logit is large, read as those of a bounded norm are.

A score bias makes logits of long tokens large, whatever the last one is, so that nothing long can be asked. Beside a
zero token logits are xᵀ·bias, and beside a short one xᵀ·W·g is added.
"""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.value import Value
from keyhole.methods.parts.bounded import Fit, ask_bounded
from keyhole.queries import Measurements, Plan, Signature, Term, TokenRows
from keyhole.recovery import Outcome

# Norms at which logits are looked for, and the power of two between them, first far apart, then near.
LEAST, MOST, COARSE, FINE = -120, 60, 12, 3
# Weights have moved where a token counts for more or less than this part beside what it does where logits vanish.
MOVED = 0.4
# Where links end, weights may move by less in all: then half of that; and if by less than this, none moves.
LEAST_CHANGE = 2.0**-6
# How short the last token may be.
SHORT = 2.0**-8
# An answer to a zero token is an output bias; beside it shorter tokens have no digits left.
DIGITS = 2.0**-30
# The root mean square of residuals over their radii, of a head that explains its answers.
EXPLAINED = 10.0


def ask_biased(
    signature: Signature, rng: np.random.Generator, names: dict[str, str]
) -> Steps[tuple[Fit, Value, dict[str, int | str]] | None]:
    """The head with its score bias; None where there is none that shows."""
    if signature.space.huge < 2.0**MOST:
        return None
    norm = yield from _ask_norm(signature, rng)
    if norm is None:
        return None
    found, value, words = yield from ask_bounded(signature.with_changes(max_norm=norm), rng, names, biased=True)
    if not found.cost**0.5 < EXPLAINED:
        raise Unrecoverable(
            Outcome.WRONG_FAMILY,
            "no head of these parts and a score bias that a fit found explains the answers to tokens of small scores",
        )
    return found, value, words


def _ask_norm(signature: Signature, rng: np.random.Generator) -> Steps[float | None]:
    """The largest norm of tokens whose logits are small, beside a zero token and beside each other."""
    space = signature.space
    pair = rng.standard_normal((2, signature.width))
    tokens = TokenRows(space.asarray(pair / np.linalg.norm(pair, axis=1, keepdims=True)))
    largest = yield from _ask_largest(signature, tokens, 0.0)
    if largest is None:  # nothing moves beside a zero token
        return None
    together = yield from _ask_largest(signature, tokens, SHORT)
    least = largest if together is None else min(largest, together)
    return float(2.0 ** (least - FINE))


def _ask_largest(signature: Signature, tokens: TokenRows, last: float) -> Steps[float | None]:
    """The first exponent at which a token does not count as a faint one does."""
    coarse = np.arange(LEAST, MOST + 1, COARSE, dtype=np.float64)
    found = yield from _ask_moved(signature, tokens, coarse, last)
    if found is None:
        return None
    faint, moved = found
    fine = yield from _ask_moved(signature, tokens, np.append(faint, np.arange(moved - COARSE, moved + 1, FINE)), last)
    return moved if fine is None else fine[1]


def _ask_moved(
    signature: Signature, tokens: TokenRows, exponents: Floats, last: float
) -> Steps[tuple[float, float] | None]:
    """The first exponent at which a token counts for anything, and the first at which it does not count as there."""
    space, norms = signature.space, np.append(0.0, 2.0**exponents)
    index = space.indices(np.zeros(len(norms)))
    first = Term(tokens, index, space.asarray(norms))
    beside = [Term(tokens, space.indices(np.ones(len(norms))), space.asarray(last * norms))] if last else []
    answers: Measurements = yield Plan("norms", len(norms), [[first], beside])
    made = floats(answers.values)
    if made.ndim > 1:  # several outputs are not read beside a score bias
        return None
    clear = np.flatnonzero(np.abs(made[1:] - made[0]) > np.abs(made[0]) * DIGITS)
    if not clear.size:
        return None
    counts = (made[1:] - made[0]) / norms[1:]
    changes = np.abs(counts / counts[clear[0]] - 1)
    changes[: clear[0]] = 0.0
    moved = changes > min(MOVED, float(np.max(changes)) / 2)
    return (float(exponents[clear[0]]), float(exponents[np.argmax(moved)])) if np.max(changes) > LEAST_CHANGE else None
