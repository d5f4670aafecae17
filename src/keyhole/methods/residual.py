"""Attention with a residual: the last token, which whoever asks knows, is taken off every answer.

What is left is attention, for the methods that read it. An oracle of this kind rounds the sum, so that its answers tell
attention to fewer digits the smaller it is beside its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from keyhole.arrays import Array, floats
from keyhole.errors import KeyholeError, UsageError
from keyhole.families import MultiHead, Residual, SingleHead
from keyhole.methods.base import Estimate, Method, Steps, Unrecoverable
from keyhole.methods.multi_head.method import multi_head
from keyhole.methods.single_head.method import single_head
from keyhole.queries import Measurements, Plan, Signature, sequences
from keyhole.recovery import Outcome

ASSUMPTION = "the box adds its last token to what attention makes of the sequence"
# Tokens that show how much of an answer attention is, and what it may be less of it than for the worst of them.
SHARE_TOKENS = 4
LESS = 2.0


def residual(signature: Signature, rng: np.random.Generator, *, heads: int | None = None) -> Steps[Estimate]:
    """Heads behind f(X) = x_N + Σ_h heads[h](X) + b, by what reads them without x_N.

    Identifiable as the heads alone are, since x_N is known. `SHARE_TOKENS` queries more than `multi-head`, or than
    `single-head` where there is one head only (heads=1), tell how many digits of attention an answer has.
    """
    if heads is not None and (isinstance(heads, bool) or not isinstance(heads, int) or heads < 1):
        raise UsageError(f"heads must be a whole number of at least 1, not {heads!r}")
    read = single_head if heads == 1 else multi_head
    share = yield from _ask_share(signature, rng)
    space = replace(signature.space, coarse=min(1.0, LESS * signature.space.eps / share))
    try:
        found = yield from _without_last_token(read(signature.with_changes(space=space), rng), signature)
    except KeyholeError as error:
        if isinstance(error.partial, SingleHead | MultiHead):
            error.partial = Residual(error.partial)
        raise
    return replace(
        found,
        params=Residual(found.params),
        radius=Residual(found.radius),
        assumptions=(*found.assumptions, ASSUMPTION),
        details={**found.details, "residual": True, "attention_share": share},
    )


def _ask_share(signature: Signature, rng: np.random.Generator) -> Steps[float]:
    """The least part that attention is of the answer to a single token; the rest is the token."""
    tokens = rng.standard_normal((SHARE_TOKENS, 1, signature.width))
    tokens *= min(1.0, signature.norm_limit / float(np.max(np.linalg.norm(tokens, axis=-1))))
    plan = sequences("residual", signature.space.asarray(tokens))
    answers: Measurements = yield plan
    (left,) = _attention_alone([plan], [answers], signature)
    last = left.values if signature.positions == "last" else left.values[:, -1, ...]
    attention, token = np.linalg.norm(floats(last), axis=1), np.linalg.norm(tokens[:, 0], axis=1)
    return float(max(np.min(attention / (attention + token)), signature.space.eps))


def _without_last_token(steps: Steps[Estimate], signature: Signature) -> Steps[Estimate]:
    """Run a method that is told what attention makes of its queries, where the oracle adds the last token to it."""
    try:
        request = next(steps)
        while True:
            alone = isinstance(request, Plan)
            try:
                reply = yield request
            except KeyholeError as error:
                request = steps.throw(error)
                continue
            plans: Sequence[Plan] = [request] if isinstance(request, Plan) else request
            left = _attention_alone(plans, [reply] if alone else reply, signature)
            request = steps.send(left[0] if alone else left)
    except StopIteration as stop:
        found: Estimate = stop.value
        return found


def _attention_alone(
    plans: Sequence[Plan], answers: Sequence[Measurements], signature: Signature
) -> list[Measurements]:
    return [
        replace(each, values=each.values - _last_tokens(plan, each.values, signature))
        for plan, each in zip(plans, answers, strict=True)
    ]


def _last_tokens(plan: Plan, values: Array, signature: Signature) -> Array:
    """The tokens beside the answers: the last ones, or all where every position is observed."""
    everywhere = signature.positions == "all"
    if values.ndim != (3 if everywhere else 2) or values.shape[-1] != signature.width:
        numbers = values.shape[2 if everywhere else 1 :]
        raise Unrecoverable(
            Outcome.WRONG_FAMILY,
            f"the box answers {numbers[0] if numbers else 'one number'} where tokens have {signature.width}: there is "
            "no residual in that",
        )
    shown = plan if everywhere else replace(plan, positions=plan.positions[-1:])
    tokens = shown.tokens(0, plan.count, signature.space, signature.width)
    return tokens if everywhere else tokens[:, 0, :]


RESIDUAL = Method(
    name="residual",
    summary="softmax heads added to the last token",
    run=residual,
    options={"heads": "1: there is one head only, which takes fewer queries"},
)
