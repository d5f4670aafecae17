"""Several heads with several outputs, from tokens of natural norms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from keyhole.arrays import ROUNDING_DEVIATIONS, Space, floats, namespace
from keyhole.families import MultiHead, SingleHead
from keyhole.methods.base import Estimate, Steps, Unrecoverable
from keyhole.methods.forms.value import Value
from keyhole.methods.multi_head.vector.first_token import FirstToken, ask_first_token
from keyhole.methods.multi_head.vector.pairs import ask_distances
from keyhole.methods.multi_head.vector.probe import VectorQueries
from keyhole.methods.multi_head.vector.refinement import ask_refined
from keyhole.methods.multi_head.vector.scores import Scores
from keyhole.methods.multi_head.vector.scores_all import ask_scores_everywhere
from keyhole.methods.multi_head.vector.scores_last import ask_scores
from keyhole.methods.multi_head.vector.standard_errors import ask_standard_errors
from keyhole.methods.multi_head.vector.values import VectorValues, ask_values
from keyhole.queries import Signature
from keyhole.recovery import Outcome

ASSUMPTIONS = (
    "the box adds up softmax heads over its raw tokens, read at the last position",
    "heads whose logits differ by less than their answers show are one head",
    "answers are right up to the rounding of their dtype and the declared noise",
)
EVERYWHERE = ("the box adds up softmax heads over its raw tokens, all of which every position sees", *ASSUMPTIONS[1:])
# Heads nearer than so many radii of their scores may have traded what a low rank has left out.
TRADED = 1e2


def ask_vector_heads(signature: Signature, rng: np.random.Generator, value: Value) -> Steps[Estimate[MultiHead]]:
    """All heads of f(X) = Σ_h Σ_i softmax_i(x_iᵀ·(M_h·x_N + c_h))·x_iᵀ·V_h + b, for p ≥ H outputs.

    The odds pencil: one token in several multiplicities tells the heads apart without saturating any
    (`ask_first_token`), other tokens beside it tell their values (`ask_values`), and then many tokens a query the
    logits (`ask_scores`). About d + 1 + H²/2 + 6H queries, 2H for each token whose values are asked for, of which there
    are r + r/8 where ranks add up to at most p and d elsewhere, and (d + 1)·d/k for the logits, k ≤ p/H tokens a query,
    or (d + 1)·⌈r/k⌉ + r·d/k for rank r.

    Where all positions are seen, those of the first stages tell twice as much, and logits come from
    `ask_scores_everywhere`: H queries for each token whose values are asked for, and 4·r·d/k² for the logits, 2·d²/k²
    where the rank is full.

    Assumes what `ASSUMPTIONS` says, or `EVERYWHERE`. Raises HeadsHidden where p numbers do not tell the heads apart:
    more heads than outputs, or dependent values.
    """
    queries = VectorQueries(signature, value, rng)
    yield from queries.ask_probes()
    refines = queries.coarse and queries.work.on_cpu
    try:
        start = yield from ask_first_token(queries)
        values = yield from ask_values(queries, start, rough=refines)
        scores = yield from _ask_scores(queries, start, values)
    except Unrecoverable as error:
        raise _with_sum(error, value, queries) from error
    if refines and start.heads > 1:
        refined = yield from ask_refined(queries, value.bias, values, scores)
        if refined is None and values.rough:
            values = yield from ask_values(queries, start)
            scores = yield from _ask_scores(queries, start, values)
            refined = yield from ask_refined(queries, value.bias, values, scores)
        values, scores = refined or (values, scores)
    try:
        found = estimate_heads(queries, value, start, values, scores)
    except Unrecoverable:
        if refines or queries.thorough or queries.everywhere:
            raise
        queries.thorough = True  # then no low rank leaves anything out
        scores = yield from ask_scores(queries, start, values)
        found = estimate_heads(queries, value, start, values, scores)
    apart = yield from ask_distances(queries, found.params, found.radius)
    if not queries.coarse and signature.max_norm is not None:
        return found  # heads that no token of the ball tells from one are one there
    wide = [
        SingleHead(head.score + more, head.value, head.score_bias + more * queries.scale)
        for head, more in zip(found.radius.heads, apart.tolist(), strict=True)
    ]
    found = replace(found, radius=MultiHead(wide, found.radius.output_bias))
    if not queries.coarse:
        return found
    return (yield from ask_standard_errors(queries, found))


def _with_sum(error: Unrecoverable, value: Value, queries: VectorQueries) -> Unrecoverable:
    """The error with what was reached before answers were too coarse: the sum of all values, and the output bias."""
    if error.outcome is not Outcome.TOO_NOISY or error.partial is not None:
        return error
    linear = floats(value.vector)
    off = float(np.linalg.norm(floats(value.radius) + 0 * linear) / max(float(np.linalg.norm(linear)), 1e-300))
    if not off < 1:
        return error
    reached = f"known are the output bias and, to {off:.1g} of it, the sum of all heads' values"
    found = Unrecoverable(error.outcome, f"{error}; {reached}")
    space = queries.signature.space
    silent = space.zeros(queries.width, queries.width)
    found.partial = MultiHead([SingleHead(silent, value.vector)], value.bias if value.has_bias else None)
    return found


def _ask_scores(queries: VectorQueries, start: FirstToken, values: VectorValues) -> Steps[Scores]:
    """The scores from all positions, or from the last one where these do not tell them."""
    scores = (yield from ask_scores_everywhere(queries, start, values)) if queries.everywhere else None
    return scores if scores is not None else (yield from ask_scores(queries, start, values))


def estimate_heads(
    queries: VectorQueries, value: Value, start: FirstToken, values: VectorValues, scores: Scores
) -> Estimate[MultiHead]:
    """Parameters and radii, without the biases that do not show."""
    space, heads = queries.signature.space, start.heads
    errors = ROUNDING_DEVIATIONS * np.stack([scores.errors, scores.bias_errors])
    biased = [bool(np.any(np.abs(scores.biases[h]) > errors[1, h])) for h in range(heads)]
    work = Space.of(scores.values)
    units = work.asarray(queries.units)
    matrices, spread, mended = (
        each * units for each in (scores.values, work.asarray(values.spread), abs(scores.values - values.matrices))
    )
    params, radii = [], []
    for head in range(heads):
        if not scores.shows[head]:  # as much as it may be is its radius
            errors[0, head] += float(work.xp.max(abs(scores.matrices[head])))
            scores.matrices[head, ...] = 0.0
        bias = space.asarray(scores.biases[head]) if biased[head] else None
        score, own_value = (space.asarray(each[head, ...]) for each in (scores.matrices, matrices))
        params.append(SingleHead(score, own_value, bias))
        hidden = 0.0 if biased[head] else np.abs(scores.biases[head])
        own = (  # what mending changed in the values may be an error of its own
            (scores.matrices[head, ...], float(errors[0, head] + ROUNDING_DEVIATIONS * scores.dropped[head])),
            (matrices[head, ...], ROUNDING_DEVIATIONS * spread[head, ...] + mended[head, ...]),
            (
                scores.biases[head],
                errors[1, head] + ROUNDING_DEVIATIONS * scores.dropped[head] * queries.scale + hidden,
            ),
        )
        radii.append(SingleHead(*(space.asarray(error + space.spacing * abs(part)) for part, error in own)))
    layer = MultiHead(params, value.bias if value.has_bias else None)
    _check_apart(layer, scores, radii)
    return Estimate(
        params=layer,
        radius=MultiHead(radii, value.bias_radius),
        counting_bound=_bound(queries, values, scores, biased, value.has_bias),
        assumptions=EVERYWHERE if queries.everywhere else ASSUMPTIONS,
        details=_details(start, values, scores, biased, value) | ({"positions": "all"} if queries.everywhere else {}),
    )


def _check_apart(layer: MultiHead, scores: Scores, radii: list[SingleHead]) -> None:
    """End where two heads differ by little more than what a low rank may have left out: they may have traded it."""
    widest = [float(namespace(radius.score).max(radius.score)) for radius in radii]
    for one in range(len(radii)):
        for two in range(one):
            if not max(scores.dropped[one], scores.dropped[two]) > 0:
                continue
            xp = namespace(scores.matrices)
            apart = float(xp.mean((scores.matrices[one, ...] - scores.matrices[two, ...]) ** 2)) ** 0.5
            unknown = max(widest[one], widest[two])
            biases = float(np.sqrt(np.mean((scores.biases[one] - scores.biases[two]) ** 2)))
            known = biases > TRADED * max(float(np.max(floats(radii[head].score_bias))) for head in (one, two))
            if apart <= TRADED * unknown and not known:
                error = Unrecoverable(
                    Outcome.TOO_NOISY,
                    f"two heads of low rank differ by {apart:.2g} where their scores are known to {unknown:.2g}: too "
                    "near to each other for the precision of the answers",
                )
                error.partial = layer
                raise error


def _bound(queries: VectorQueries, values: VectorValues, scores: Scores, biased: list[bool], offset: bool) -> int:
    """Numbers that determine the heads, over numbers per answer: of all positions of the longest query."""
    width, outputs = queries.width, queries.outputs
    numbers = outputs if offset else 0
    for head, shows in enumerate(biased):
        rank, inner = int(scores.ranks[head]), int(values.ranks[head])
        numbers += rank * (2 * width + int(shows) - rank) + inner * (width + outputs - inner)
    return -(-numbers // (outputs * (queries.asked if queries.everywhere else 1)))


def _details(
    start: FirstToken, values: VectorValues, scores: Scores, biased: list[bool], value: Value
) -> dict[str, Any]:
    return {
        "heads": start.heads,
        "score_ranks": [int(rank) for rank in scores.ranks],
        "value_ranks": [int(rank) for rank in values.ranks],
        "score_bias": any(biased),
        "output_bias": value.has_bias,
        "tokens_per_query": scores.per_query,
        "pencil_condition": start.pencil.condition,
        "logit_condition": scores.condition,
        "merged_below": start.least_distance,
    }
