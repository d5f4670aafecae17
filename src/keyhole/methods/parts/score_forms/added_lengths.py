"""The epsilon of one head with normed keys and queries, beside all else of its form."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.families.forms import QKNorm, QKNormRotary
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.epsilon import ask_epsilon
from keyhole.methods.parts.score_forms.readings import PairLogits, finish, radii_of_solutions
from keyhole.recovery import Outcome

Form = TypeVar("Form", QKNorm, QKNormRotary)
# Of tokens this much shorter an epsilon shows.
SHORTER = 2.0**-20
WITHIN = "norms of keys and queries add to squared lengths, which is read from tokens of any length: leave out max_norm"


def check_lengths(reader: PairLogits, rows: Floats, long: float) -> Steps[None]:
    """Unrecoverable for a box of bounded norms whose logits go with the length of tokens."""
    if reader.signature.max_norm is None:
        return
    first = long * rows[0] * np.array([[1.0], [SHORTER], [1.0]])
    last = long * rows[1 % len(rows)] * np.array([[1.0], [1.0], [SHORTER]])
    logits, radius = yield from reader.ask_pairs("epsilon", first, last)
    if np.any(np.abs(logits[1:] - logits[0]) > 8 * (radius[1:] + radius[0])):
        raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, WITHIN)


def with_epsilon(
    form: Form,
    reader: PairLogits,
    long: float,
    solve: Callable[[PairLogits], Steps[Form]],
    rng: np.random.Generator,
) -> Steps[tuple[Form, dict[str, Floats]]]:
    """The form with its epsilon, if any, and how far its arrays move when they are solved for with errors."""

    def ask(first: Floats, last: Floats) -> Steps[tuple[Floats, Floats]]:
        return (yield from reader.ask_pairs("epsilon", first[None], last[None]))

    found = None
    if reader.signature.max_norm is None:
        found = yield from ask_epsilon([form], [floats(reader.value.vector)], ask, long, rng)
    if found is None:
        return form, radii_of_solutions(form, lambda errors: finish(solve(reader.replayed(errors))), rng)

    def again(errors: np.random.Generator) -> Form:
        return found.form(finish(solve(reader.replayed(errors))), 0, errors)

    whole = found.form(form, 0)
    return whole, radii_of_solutions(whole, again, rng)
