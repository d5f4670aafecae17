"""One attention head from value queries, exactly and at the counting bound."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from keyhole.errors import UsageError
from keyhole.families import SingleHead
from keyhole.methods.arithmetic import partial_result
from keyhole.methods.base import Estimate, Method, Steps, Unrecoverable, last_only
from keyhole.methods.forms.columns import Draft, Score
from keyhole.methods.forms.outputs import Outputs, ask_along, choose_outputs, most_informative
from keyhole.methods.forms.reader import PairReader, ScoreBias
from keyhole.methods.forms.score_bias import ask_for_bias, ask_score_bias
from keyhole.methods.forms.score_matrix import ask_score
from keyhole.methods.forms.value import Value, ask_value, check_nonzero
from keyhole.methods.single_head.all_positions import ask_positions
from keyhole.methods.single_head.entrywise import ask_score_entrywise
from keyhole.methods.single_head.windows import ask_windows
from keyhole.queries import Signature

ASSUMPTIONS = (
    "the box computes one softmax head over its raw tokens, read at the last position",
    "answers are right up to the rounding of their dtype and the declared noise",
)


def single_head(
    signature: Signature, rng: np.random.Generator, *, entrywise: bool = False
) -> Steps[Estimate[SingleHead]]:
    """Score matrix, value and biases of f(X) = Σ_i softmax_i(x_iᵀ·W·x_N + x_iᵀ·c) · x_iᵀ·V + b.

    Theorem 4.1 of *Provably Learning Attention with Queries* (arXiv 2601.16873): W and v are determined
    exactly by O(d²) value queries. Here by d² + d + 2 for one output, r(2d − r) + d + 6 when the score
    has rank r < d, which is not known before, and d + d²/ρ + 2 for outputs of rank ρ. Biases are found
    without being told, for about as many queries more as they have numbers.

    Assumes what `ASSUMPTIONS` says; a zero value is reported as not identifiable.
    """
    if not isinstance(entrywise, bool):
        raise UsageError(f"entrywise must be true or false, not {entrywise!r}")
    if signature.positions == "all":
        return (yield from _ask_all_positions(signature, rng, entrywise))
    value, bias, score, details = yield from ask_head(signature, rng, windows=not entrywise, entrywise=entrywise)
    return head_estimate(signature, value, bias, score, details)


def _ask_all_positions(signature: Signature, rng: np.random.Generator, entrywise: bool) -> Steps[Estimate[SingleHead]]:
    """Ask at every position where that works, else at the last one only."""
    observed = None if entrywise else (yield from ask_positions(signature, rng))
    if observed is None:
        return (yield from last_only(single_head(signature.with_changes(positions="last"), rng, entrywise=entrywise)))
    check_nonzero(signature, observed.value)
    width = signature.width
    outputs = observed.value.vector.shape[1] if observed.value.vector.ndim == 2 else 1
    numbers = observed.score.rank * (2 * width - observed.score.rank) + width * outputs
    estimate = head_estimate(signature, observed.value, None, observed.score, {"positions": "all"})
    return replace(estimate, counting_bound=-(-numbers // (observed.longest * outputs)))


def ask_head(
    signature: Signature, rng: np.random.Generator, *, windows: bool, **options: Any
) -> Steps[tuple[Value, ScoreBias | None, Score, dict[str, Any]]]:
    """Value, score bias and score, with a sketch of them left behind where a run ends early.

    With several outputs, `windows` of logits from each query where tokens may be long, else one logit from the
    combination of outputs that says most.
    """
    value = yield from ask_value(signature)
    draft, details = Draft(), dict[str, Any]()
    outputs: Outputs | None = None
    if value.vector.ndim == 2:
        exact = signature.noise.kind == "exact"
        outputs = choose_outputs(signature.space, value.vector, even=exact, radius=value.radius)
        details = {"output_rank": outputs.rank, "outputs_used": outputs.used}
        enough = (signature.max_length or math.inf) >= outputs.used + outputs.used**0.5 + 1
        if windows and signature.max_norm is None and exact and outputs.used > 1 and enough:
            bias, score = yield from ask_windows(signature, value, rng)
            return value, bias, score, details
        details["outputs_used"] = 1
    with partial_result(lambda known: _draft_head(draft, value) or known):
        bias, score = yield from ask_score_along(signature, value, rng, draft, outputs, **options)
    return value, bias, score, details


def _draft_head(draft: Draft, value: Value) -> SingleHead | None:
    """The columns that are known so far, as a head."""
    score = draft.matrix()
    return None if score is None else SingleHead(score, value.vector)


def ask_score_along(
    signature: Signature, value: Value, rng: np.random.Generator, draft: Draft, outputs: Outputs | None, **options: Any
) -> Steps[tuple[ScoreBias | None, Score]]:
    """Score bias and score from the one output, or from the most informative combination of several."""
    if outputs is None:
        return (yield from _ask_score(signature, value, rng, draft, **options))
    direction = most_informative(outputs)
    if options.get("entrywise"):
        # One output as it is: the rounding of a combination would drown small values.
        largest = int(signature.space.xp.argmax(outputs.error))
        direction = signature.space.eye(outputs.error.shape[0])[:, largest]

    def ask(plain: Signature, along: Value) -> Steps[tuple[ScoreBias | None, Score]]:
        return _ask_score(plain, along, rng, draft, **options)

    return (yield from ask_along(signature, value, direction, ask))


def _ask_score(
    signature: Signature,
    value: Value,
    rng: np.random.Generator,
    draft: Draft,
    *,
    entrywise: bool = False,
    tolerance: float = 0.0,
) -> Steps[tuple[ScoreBias | None, Score]]:
    """Score bias and score from a single output, the bias first where there is one."""
    if entrywise:
        return None, (yield from ask_score_entrywise(signature, value, rng))
    biased, hidden = False, 0.0
    if signature.max_norm is not None or signature.noise.kind != "exact":
        # Elsewhere it shows for nothing, when the first form is measured at a second scale.
        biased, hidden = yield from ask_for_bias(signature, value, rng)
    if not biased:
        try:
            score = yield from ask_score(PairReader(signature, value, hidden_bias=hidden), rng, draft, tolerance)
        except Unrecoverable:
            if draft.columns:
                raise
            score = None  # a score bias may saturate every probe
        if score is not None:
            nothing = signature.space.zeros(signature.width)
            return ScoreBias(nothing, nothing + max(hidden, score.hidden_bias)), score
    bias = yield from ask_score_bias(signature, value, rng)
    score = yield from ask_score(PairReader(signature, value, bias), rng, draft, tolerance)
    assert score is not None  # a reader that knows the bias does not look for another
    return bias, score


def head_estimate(
    signature: Signature, value: Value, bias: ScoreBias | None, score: Score, details: dict[str, Any]
) -> Estimate[SingleHead]:
    """Parameters and radii, without the biases that were not detected."""
    xp, width, rank = signature.space.xp, signature.width, score.rank
    per_query = details.get("output_rank", 1)
    bound = -(-rank * (2 * width - rank) // per_query) + width
    params = SingleHead(score.matrix, value.vector)
    radius = SingleHead(score.radius, value.radius)
    score_biased = bias is not None and bool(xp.any(bias.vector != 0))
    if bias is not None:
        radius = replace(radius, score_bias=bias.radius)
        if score_biased:
            params = replace(params, score_bias=bias.vector)
            bound += -(-width // per_query)
    if bool(xp.any(value.bias_radius > 0)):
        radius = replace(radius, output_bias=value.bias_radius)
    output_biased = bool(xp.any(abs(value.bias) > value.bias_radius))
    if output_biased:
        params = replace(params, output_bias=value.bias)
        bound += 1
    details = {"rank": rank, "score_bias": score_biased, "output_bias": output_biased, **details}
    return Estimate(params, radius, bound, assumptions=ASSUMPTIONS, details=details)


SINGLE_HEAD = Method(
    name="single-head",
    summary="one softmax head, rank unknown, at the counting bound",
    run=single_head,
    families=("single-head",),
    options={
        "entrywise": "relative accuracy for every entry of a graded score matrix, at one to three queries an entry"
    },
)
