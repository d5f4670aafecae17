"""A head whose answers are rounded to a few binary digits, to the precision of the arithmetic behind them.

Rounding to a floating-point dtype is relative: an answer of nearly zero is known nearly exactly. Queries whose
predicted answer is zero therefore show what is still wrong with the prediction, to all the digits of the dtype, and
each round of them adds that many digits to what is known.
"""

from __future__ import annotations

import math

import numpy as np

from keyhole.errors import KeyholeError, UsageError
from keyhole.families import SingleHead
from keyhole.methods.base import Estimate, Steps, target_details
from keyhole.methods.robust.quantised.floats_forms import NullForms
from keyhole.methods.robust.quantised.floats_value import CHECKS, ValueRatios
from keyhole.methods.robust.quantised.pair_queries import check_lengths
from keyhole.queries import Signature

ASSUMPTIONS = (
    "the box computes one softmax head over its raw tokens, read at the last position, without biases",
    "answers are rounded to the nearest number of the declared dtype and to nothing else",
    "rounding errors of different answers are independent",
)

# A round that does not shrink the error by this factor is the last: the arithmetic has no more digits.
GAIN = 0.5
MOST_ROUNDS = 40
# The first reading wants the length of the value vector so many times sharper than one answer tells it.
SHARPER = 16.0


def by_null_queries(
    signature: Signature, rng: np.random.Generator, *, target_error: float | None = None, budget: float = math.inf
) -> Steps[Estimate[SingleHead]]:
    """W and v of f(X) = Σ softmax_i(x_iᵀ·W·x_N)·(x_i·v) from answers rounded to float32, float16 or bfloat16.

    One query an entry reads W about as well as one answer is; each further round of d² + d multiplies the error by
    about the unit roundoff of the dtype. Rounds go on until the error of an entry is `target_error` (root mean square
    of its radius before it is spread), the budget is spent, or the arithmetic of the oracle has no more digits.
    """
    if signature.noise.kind != "dtype":
        raise UsageError(f"null queries are for answers rounded to a dtype, not {signature.noise}")
    check_lengths(signature)
    value = ValueRatios(signature)
    yield from value.ask_value()
    yield from value.ask_sharper(value.relative / SHARPER, [value.main])
    yield from value.ask_finer()  # one round ahead of the forms, so that its errors do not count
    forms = NullForms(signature, rng, value)
    try:
        yield from forms.ask_first()
        rounds = 1
        while (
            rounds < MOST_ROUNDS
            and not forms.silent
            and not (target_error is not None and forms.error() <= target_error)
        ):
            if value.spent + forms.spent + forms.cost() + value.cost() + value.sharpening_cost() > budget:
                break
            before = forms.error()
            yield from value.ask_finer()
            yield from forms.ask_finer()
            rounds += 1
            if forms.error() > GAIN * before:
                break
        if value.spent + forms.spent + value.sharpening_cost() + CHECKS <= budget:
            goal = forms.error() if target_error is None else target_error
            yield from value.ask_sharper(goal / value.size(), range(value.outputs))
            yield from value.ask_rounding_check()
    except KeyholeError as error:
        error.partial = forms.head() if forms.started else None
        raise
    return Estimate(
        params=forms.head(),
        radius=forms.radius_head(),
        counting_bound=value.counting_bound,
        assumptions=ASSUMPTIONS,
        details={"rounds": rounds, "expected_error": forms.error(), **target_details(target_error, forms.error())},
    )
