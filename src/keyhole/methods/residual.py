"""Attention with a residual: the last token, which whoever asks knows, is taken off every answer.

What is left is attention, for the methods that read it. An oracle of this kind rounds the sum, so that its answers tell
attention to fewer digits the smaller it is beside its tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from keyhole.arrays import floats
from keyhole.errors import UsageError
from keyhole.families import MultiHead, Residual, SingleHead
from keyhole.methods.arithmetic import partial_result
from keyhole.methods.base import Estimate, Method, Steps, Unrecoverable, adapt
from keyhole.methods.multi_head.method import MULTI_HEAD, multi_head
from keyhole.methods.options import check_whole
from keyhole.methods.single_head.method import single_head
from keyhole.queries import Measurements, Plan, Signature, sequences
from keyhole.recovery import Outcome

ASSUMPTION = "the box adds its last token to what attention makes of the sequence"
# Tokens that show how much of an answer attention is, and what it may be less of it than for the worst of them.
SHARE_TOKENS = 4
LESS = 2.0


def residual(
    signature: Signature, rng: np.random.Generator, *, heads: int | None = None, **parts: Any
) -> Steps[Estimate[Residual]]:
    """Heads behind f(X) = x_N + Σ_h heads[h](X) + b, by what reads them without x_N.

    Identifiable as the heads alone are, since x_N is known. `SHARE_TOKENS` queries more than `multi-head`, or than
    `single-head` where there is one head only (heads=1), tell how many digits of attention an answer has. The options
    of `multi-head` name parts of attention that are not those of a softmax.
    """
    check_whole("heads", heads, 1)
    if heads == 1 and parts:
        raise UsageError("parts of attention are named of several heads: leave heads=1 out")
    share = yield from _ask_share(signature, rng)
    space = replace(signature.space, coarse=min(1.0, LESS * signature.space.eps / share))
    with partial_result(Residual.around):
        inner = signature.with_changes(space=space)
        steps: Steps[Estimate[SingleHead | MultiHead]] = (
            single_head(inner, rng) if heads == 1 else multi_head(inner, rng, **parts)
        )
        estimate = yield from adapt(steps, incoming=lambda plan, answers: _attention_alone(plan, answers, signature))
    return Estimate(
        params=Residual(estimate.params),
        radius=Residual(estimate.radius),
        counting_bound=estimate.counting_bound,
        standard_error=Residual.around(estimate.standard_error),
        assumptions=(*estimate.assumptions, ASSUMPTION),
        details={**estimate.details, "residual": True, "attention_share": share},
    )


def _ask_share(signature: Signature, rng: np.random.Generator) -> Steps[float]:
    """The least part that attention is of the answer to a single token; the rest is the token."""
    tokens = rng.standard_normal((SHARE_TOKENS, 1, signature.width))
    tokens *= min(1.0, signature.norm_limit / float(np.max(np.linalg.norm(tokens, axis=-1))))
    plan = sequences("residual", signature.space.asarray(tokens))
    answers: Measurements = yield plan
    left = _attention_alone(plan, answers, signature)
    last = left.values if signature.positions == "last" else left.values[:, -1, ...]
    attention, token = np.linalg.norm(floats(last), axis=1), np.linalg.norm(tokens[:, 0], axis=1)
    return float(max(np.min(attention / (attention + token)), signature.space.eps))


def _attention_alone(plan: Plan, answers: Measurements, signature: Signature) -> Measurements:
    """What attention makes of the queries: answers without last tokens, or all where all positions show."""
    values, everywhere = answers.values, signature.positions == "all"
    if values.ndim != (3 if everywhere else 2) or values.shape[-1] != signature.width:
        numbers = values.shape[2 if everywhere else 1 :]
        raise Unrecoverable(
            Outcome.WRONG_FAMILY,
            f"the box answers {numbers[0] if numbers else 'one number'} where tokens have {signature.width}: there is "
            "no residual in that",
        )
    shown = plan if everywhere else replace(plan, positions=plan.positions[-1:])
    space = signature.space
    tokens = shown.tokens(0, plan.count, space, signature.width)
    # The sum was rounded: by as much as the token has it, however little of it attention is.
    rounded = space.eps * float(space.xp.max(space.xp.abs(tokens))) if plan.count else 0.0
    return Measurements(values - (tokens if everywhere else tokens[:, 0, :]), answers.radius + rounded)


RESIDUAL = Method(
    name="residual",
    summary="softmax heads added to the last token",
    run=residual,
    families=("residual",),
    options={"heads": "1: there is one head only, which takes fewer queries", **MULTI_HEAD.options},
)
