"""One attention head from value queries, exactly and at the counting bound."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from keyhole.errors import KeyholeError, UsageError
from keyhole.families import SingleHead
from keyhole.methods.base import Estimate, Method, Steps, last_only, map_measurements
from keyhole.methods.forms.outputs import Outputs, choose_outputs
from keyhole.methods.forms.reader import FormReader, ScoreBias
from keyhole.methods.forms.score_bias import bias_that_shows, read_score_bias
from keyhole.methods.forms.score_matrix import Draft, Score, read_score
from keyhole.methods.forms.value import Value, read_value, refuse_single_tokens, refuse_zero_value
from keyhole.methods.single_head.all_positions import read_positions
from keyhole.methods.single_head.entrywise import read_score_entrywise
from keyhole.methods.single_head.windows import read_bundled
from keyhole.queries import Measurements, Signature

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
    refuse_single_tokens(signature)
    if signature.positions == "all":
        return (yield from _observe_all(signature, rng, entrywise))
    value = yield from read_value(signature)
    refuse_zero_value(signature, value)
    draft = Draft()
    bias: ScoreBias | None = None
    details: dict[str, Any] = {}
    try:
        if value.vector.ndim == 1:
            bias, score = yield from read_logits(signature, value, rng, draft, entrywise=entrywise)
        else:
            bias, score, details = yield from _read_vector(signature, value, rng, draft, entrywise)
    except KeyholeError as error:
        partial = draft.matrix()
        if partial is not None:
            error.partial = SingleHead(partial, value.vector)
        raise
    return estimated(signature, value, bias, score, details)


def _observe_all(signature: Signature, rng: np.random.Generator, entrywise: bool) -> Steps[Estimate[SingleHead]]:
    """Read every position where that works, else the last one only."""
    observed = None if entrywise else (yield from read_positions(signature, rng))
    if observed is None:
        return (yield from last_only(single_head(signature.with_changes(positions="last"), rng, entrywise=entrywise)))
    refuse_zero_value(signature, observed.value)
    width = signature.width
    outputs = observed.value.vector.shape[1] if observed.value.vector.ndim == 2 else 1
    numbers = observed.score.rank * (2 * width - observed.score.rank) + width * outputs
    estimate = estimated(signature, observed.value, None, observed.score, {"positions": "all"})
    return replace(estimate, counting_bound=-(-numbers // (observed.longest * outputs)))


def _read_vector(
    signature: Signature, value: Value, rng: np.random.Generator, draft: Draft, entrywise: bool
) -> Steps[tuple[ScoreBias | None, Score, dict[str, Any]]]:
    """Several logits per query where tokens may be long, else one, from the combination of outputs that says most."""
    outputs = choose_outputs(signature.space, value.vector, even=signature.noise.kind == "exact")
    details: dict[str, Any] = {"output_rank": outputs.rank, "outputs_used": outputs.used}
    free = signature.max_norm is None and signature.noise.kind == "exact" and not entrywise
    if free and outputs.used > 1 and (signature.max_length or math.inf) >= outputs.used + outputs.used**0.5 + 1:
        bias, score = yield from read_bundled(signature, value, rng)
        return bias, score, details
    bias, score = yield from read_logits_along(signature, value, rng, draft, outputs, entrywise=entrywise)
    return bias, score, {**details, "outputs_used": 1}


def read_logits_along(
    signature: Signature, value: Value, rng: np.random.Generator, draft: Draft, outputs: Outputs, **options: Any
) -> Steps[tuple[ScoreBias | None, Score]]:
    """The score matrix from the one combination of the outputs that says most."""
    direction = outputs.turn[:, 0]
    if options.get("entrywise"):
        # One output as it is: the rounding of a combination would drown small values.
        largest = int(signature.space.xp.argmax(outputs.error))
        direction = signature.space.eye(outputs.error.shape[0])[:, largest]
    # Noise that is not independent between outputs may add up.
    total = float(signature.space.xp.sum(signature.space.xp.abs(direction)))
    stretch = 1.0 if signature.noise.kind == "gaussian" else total
    plain = signature.with_changes(noise=replace(signature.noise, scale=stretch * signature.noise.scale))
    steps = read_logits(plain, value.along(direction), rng, draft, **options)
    return (
        yield from map_measurements(
            steps, lambda answers: Measurements(answers.values @ direction, stretch * answers.radius)
        )
    )


def read_logits(
    signature: Signature,
    value: Value,
    rng: np.random.Generator,
    draft: Draft,
    *,
    entrywise: bool = False,
    tolerance: float = 0.0,
) -> Steps[tuple[ScoreBias | None, Score]]:
    """The score matrix from single numbers, after the score bias where one shows."""
    if entrywise:
        return None, (yield from read_score_entrywise(signature, value, rng))
    shows, hidden = yield from bias_that_shows(signature, value, rng)
    if not shows:
        score = yield from read_score(FormReader(signature, value, hidden_bias=hidden), rng, draft, tolerance)
        if score is not None:
            nothing = signature.space.zeros(signature.width)
            return ScoreBias(nothing, nothing + max(hidden, score.hidden_bias)), score
    bias = yield from read_score_bias(signature, value, rng)
    score = yield from read_score(FormReader(signature, value, bias), rng, draft, tolerance)
    assert score is not None  # a reader that knows the bias is not levered
    return bias, score


def estimated(
    signature: Signature, value: Value, bias: ScoreBias | None, score: Score, details: dict[str, Any]
) -> Estimate[SingleHead]:
    """Parameters and radii, without the biases that did not show."""
    width, rank = signature.width, score.rank
    per_query = details.get("output_rank", 1)
    bound = -(-rank * (2 * width - rank) // per_query) + width
    params = SingleHead(score.matrix, value.vector)
    radius = SingleHead(score.radius, value.radius)
    biased = False
    if bias is not None:
        radius = replace(radius, score_bias=bias.radius)
        biased = bool(signature.space.xp.any(bias.vector != 0))
        if biased:
            params = replace(params, score_bias=bias.vector)
            bound += -(-width // per_query)
    if bool(signature.space.xp.any(value.bias_radius > 0)):
        radius = replace(radius, output_bias=value.bias_radius)
    if value.biased:
        params = replace(params, output_bias=value.bias)
        bound += 1
    return Estimate(
        params=params,
        radius=radius,
        counting_bound=bound,
        assumptions=ASSUMPTIONS,
        details={"rank": rank, "score_bias": biased, "output_bias": value.biased, **details},
    )


SINGLE_HEAD = Method(
    name="single-head",
    summary="one softmax head, rank unknown, at the counting bound",
    run=single_head,
    families=("single-head",),
    options={
        "entrywise": "relative accuracy for every entry of a graded score matrix, at one to three queries an entry"
    },
)
