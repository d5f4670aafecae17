"""A head whose answers are rounded to a few decimals, under a bound on the norm of tokens.

One answer tells a form to within a unit of the last decimal. From then on every query is steered so that the middle
of what is left would be answered exactly halfway between two decimals: whether it is rounded up or down halves what is
left. A form whose uncertainty moves the answer by less than one unit can reveal no more than one bit to a query, so
this is about the fewest.
"""

from __future__ import annotations

import math

import numpy as np

from keyhole.errors import KeyholeError, UsageError
from keyhole.families import SingleHead
from keyhole.methods.base import Estimate, Steps, target_details
from keyhole.methods.robust.quantised.decimals_forms import FormIntervals
from keyhole.methods.robust.quantised.decimals_value import ValueIntervals
from keyhole.methods.robust.quantised.pair_queries import check_lengths
from keyhole.queries import Signature

ASSUMPTIONS = (
    "the box computes one softmax head over its raw tokens, read at the last position, without biases",
    "answers are rounded to the nearest multiple of the declared unit and to nothing else",
    "what is left of different forms after halving is independent",
)

# Before forms are read, the value is known so many times sharper than one answer tells it.
FIRST_SHARPER = 64.0


def by_thresholds(
    signature: Signature, rng: np.random.Generator, *, target_error: float | None = None, budget: float = math.inf
) -> Steps[Estimate[SingleHead]]:
    """W and v of f(X) = Σ softmax_i(x_iᵀ·W·x_N)·(x_i·v) from answers rounded to decimals, tokens of bounded norm.

    One query an entry, then one for every bit of every entry: intervals are halved until the root-mean-square error of
    an entry is `target_error` or `budget` queries are spent, whichever is first; without either until it is a millionth
    of a typical entry. The value costs about d queries a bit and is kept sharper than the forms.
    """
    if signature.noise.kind != "rounded":
        raise UsageError(f"thresholds are for answers rounded to decimals, not {signature.noise}")
    if signature.max_norm is None:
        raise UsageError("thresholds are for tokens of bounded norm: without max_norm use method single-head")
    check_lengths(signature)
    value = ValueIntervals(signature, rng)
    yield from value.ask_value()
    yield from value.ask_narrower(np.full(value.outputs, 2 * value.half / (signature.norm_limit * FIRST_SHARPER)))
    forms = FormIntervals(signature, rng, value)
    try:
        yield from forms.ask_first()
        goal = forms.goal(target_error, budget - value.spent - forms.spent)
        yield from value.ask_narrower(forms.value_goal(goal))
        yield from forms.ask_narrower(goal, budget - value.spent - forms.spent)
    except KeyholeError as error:
        error.partial = forms.head() if forms.started else None
        raise
    return Estimate(
        params=forms.head(),
        radius=forms.radius_head(),
        counting_bound=value.counting_bound,
        assumptions=ASSUMPTIONS,
        details={
            "expected_error": forms.error(),
            "halvings": forms.rounds,
            **target_details(target_error, forms.error()),
        },
    )
