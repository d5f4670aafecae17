"""One attention head from value queries, exactly and at the counting bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keyhole.errors import KeyholeError
from keyhole.measure import Signature
from keyhole.methods.base import Estimate, Method, Steps, Unrecoverable
from keyhole.methods.directions import Draft, Score, read_score
from keyhole.methods.entrywise import read_score_entrywise
from keyhole.methods.reading import FormReader, ScoreBias, Value, look_for_score_bias, read_score_bias, read_value
from keyhole.model import SingleHead
from keyhole.recovery import Outcome

ASSUMPTIONS = (
    "the box computes one softmax head over its raw tokens, read at the last position",
    "answers are right up to the rounding of their dtype and the declared noise",
)


def single_head(signature: Signature, rng: np.random.Generator, *, entrywise: bool = False) -> Steps[Estimate]:
    """Score matrix and value vector of f(X) = Σ softmax(X·W·x_N)_i (x_i·v).

    Theorem 4.1 of *Provably Learning Attention with Queries* (arXiv 2601.16873): W and v are determined
    exactly by O(d²) value queries. Here by r(2d − r) + d + 4 queries for a score matrix of rank r,
    which is not known before, and by d² + d + 1 for full rank.

    Assumes what `ASSUMPTIONS` says; v = 0 is reported as not identifiable.
    """
    value = yield from read_value(signature)
    _refuse_other_shapes(value)
    _refuse_zero_value(signature, value)
    draft = Draft()
    bias: ScoreBias | None = None
    try:
        if entrywise:
            score = yield from read_score_entrywise(signature, value, rng)
        else:
            bias, score = yield from _read_logits(signature, value, rng, draft)
    except KeyholeError as error:
        partial = draft.matrix()
        if partial is not None:
            error.partial = SingleHead(partial, value.vector)
        raise
    return _estimate(signature, value, bias, score)


def _read_logits(
    signature: Signature, value: Value, rng: np.random.Generator, draft: Draft
) -> Steps[tuple[ScoreBias, Score]]:
    """The score matrix, after the score bias where one shows."""
    shows, hidden = False, 0.0
    if signature.max_norm is not None or signature.noise.kind != "exact":
        # Otherwise a bias shows for nothing, when the first form is read at a second scale.
        shows, hidden = yield from look_for_score_bias(signature, value, rng)
    if not shows:
        score = yield from read_score(FormReader(signature, value, hidden_bias=hidden), rng, draft)
        if score is not None:
            nothing = signature.space.zeros(signature.width)
            return ScoreBias(nothing, nothing + hidden), score
    bias = yield from read_score_bias(signature, value, rng)
    score = yield from read_score(FormReader(signature, value, bias), rng, draft)
    assert score is not None  # a reader that knows the bias is not levered
    return bias, score


def _estimate(signature: Signature, value: Value, bias: ScoreBias | None, score: Score) -> Estimate:
    width, rank = signature.width, score.rank
    bound = rank * (2 * width - rank) + width
    params = SingleHead(score.matrix, value.vector)
    radius = SingleHead(score.radius, value.radius)
    biased = False
    if bias is not None:
        radius = replace(radius, score_bias=bias.radius)
        biased = bool(signature.space.xp.any(bias.vector != 0))
        if biased:
            params = replace(params, score_bias=bias.vector)
            bound += width
    if value.biased:
        params, radius = replace(params, output_bias=value.bias), replace(radius, output_bias=value.bias_radius)
        bound += 1
    return Estimate(
        params=params,
        radius=radius,
        counting_bound=bound,
        assumptions=ASSUMPTIONS,
        details={"rank": rank, "score_bias": biased, "output_bias": value.biased},
    )


def _refuse_other_shapes(value: Value) -> None:
    if value.vector.ndim != 1:
        raise Unrecoverable(
            Outcome.WRONG_FAMILY,
            f"the box answers {tuple(value.vector.shape[1:])} numbers per sequence, this method reads one: "
            "let the oracle return one of them, or a fixed combination",
        )


def _refuse_zero_value(signature: Signature, value: Value) -> None:
    xp = signature.space.xp
    if bool(xp.all(xp.abs(value.vector) <= value.radius)):
        raise Unrecoverable(
            Outcome.NOT_IDENTIFIABLE,
            "the value vector is zero, so every answer is zero whatever the score matrix: it cannot be known",
        )


SINGLE_HEAD = Method(
    name="single-head",
    summary="one softmax head, rank unknown, at the counting bound",
    run=single_head,
    options={"entrywise": "relative accuracy for every entry of a graded score matrix, for up to 2.1 × the queries"},
)
