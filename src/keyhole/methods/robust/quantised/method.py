"""A head whose answers are rounded, to decimals or to a dtype: each form as accurately as queries allow.

Decimals, under a bound on the norm of tokens: one answer tells a form to within a unit of the last decimal. From then
on every query is steered so that the middle of what is left would be answered exactly halfway between two decimals:
whether it is rounded up or down halves what is left. A form whose uncertainty moves the answer by less than one unit
can reveal no more than one bit to a query, so this is about the fewest.

Dtypes: their rounding is relative, so that an answer of nearly zero is known nearly exactly. Queries whose predicted
answer is zero show what is still wrong with the prediction, to all the digits of the dtype, and each round of them adds
that many digits to what is known, to the precision of the arithmetic behind the answers.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from keyhole.arrays import FLOAT32
from keyhole.errors import UsageError
from keyhole.families import SingleHead
from keyhole.methods.arithmetic import partial_result
from keyhole.methods.base import Estimate, Steps, target_details
from keyhole.methods.robust.quantised.decimals_forms import FormIntervals
from keyhole.methods.robust.quantised.decimals_value import CHECK_COST, ValueIntervals
from keyhole.methods.robust.quantised.floats_forms import CHECKS as CHECKS_OF_FORMS
from keyhole.methods.robust.quantised.floats_forms import NullForms
from keyhole.methods.robust.quantised.floats_value import CHECKS, ValueRatios
from keyhole.methods.robust.quantised.pair_queries import check_lengths
from keyhole.queries import Signature

FAMILY = "the box computes one softmax head over its raw tokens, read at the last position, without biases"
ASSUMPTIONS_DECIMALS = (
    FAMILY,
    "answers are computed in float32 or finer and rounded to the nearest multiple of the unit",
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
    yield from value.ask_rounding_check()
    coarse = signature.space.coarse >= FLOAT32 > signature.space.spacing
    if coarse and value.spent + CHECK_COST + signature.width**2 <= budget and (yield from value.ask_arithmetic_check()):
        signature = signature.with_changes(space=replace(signature.space, coarse=0.0))
        value.space = signature.space
    forms = FormIntervals(signature, rng, value)
    with partial_result(lambda _: forms.head() if forms.started else None):
        yield from forms.ask_first()
        goal = forms.goal(target_error, budget - value.spent - forms.spent)
        yield from value.ask_narrower(forms.value_goal(goal))
        yield from forms.ask_narrower(goal, budget - value.spent - forms.spent)
    return Estimate(
        params=forms.head(),
        radius=forms.radius_head(),
        counting_bound=value.counting_bound,
        assumptions=ASSUMPTIONS_DECIMALS,
        details={
            "expected_error": forms.error(),
            "halvings": forms.rounds,
            **target_details(target_error, forms.error()),
        },
    )


ASSUMPTIONS_DTYPE = (
    FAMILY,
    "answers are computed in float32 or finer and rounded to the nearest number of the declared dtype",
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
    with partial_result(lambda _: forms.head() if forms.started else None):
        yield from forms.ask_first()
        rounds = 1
        while rounds < MOST_ROUNDS and not forms.silent and forms.error() > (target_error or 0.0):
            if value.spent + forms.spent + forms.cost() + value.cost() + value.sharpening_cost() > budget:
                break
            before = forms.error()
            yield from value.ask_finer()
            yield from forms.ask_finer()
            rounds += 1
            if forms.error() > GAIN * before:
                break
        if value.spent + forms.spent + CHECKS_OF_FORMS <= budget:
            yield from forms.ask_arithmetic_check()
        else:
            forms.widen()
        if value.spent + forms.spent + value.sharpening_cost() + CHECKS <= budget:
            goal = forms.error() if target_error is None else target_error
            yield from value.ask_sharper(goal / value.size(), range(value.outputs))
            yield from value.ask_rounding_check()
    return Estimate(
        params=forms.head(),
        radius=forms.radius_head(),
        counting_bound=value.counting_bound,
        assumptions=ASSUMPTIONS_DTYPE,
        details={"rounds": rounds, "expected_error": forms.error(), **target_details(target_error, forms.error())},
    )
