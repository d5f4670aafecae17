"""Several heads behind few outputs, read all at once: any logits, tokens of bounded norm, answers with errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from keyhole.arrays import Floats, Space, floats
from keyhole.families import MultiHead, SingleHead
from keyhole.methods.base import Estimate, Steps, Unrecoverable
from keyhole.methods.forms.value import Value
from keyhole.methods.gated_sum.joint import JointHeads, fit_joint
from keyhole.methods.gated_sum.radii import JointRadii, joint_radii
from keyhole.methods.multi_head.gated.heads import MOST_UNKNOWN, HeadGates, ask_head_gates, failure
from keyhole.methods.multi_head.gated.queries import AnswerReader, TokenPairs
from keyhole.methods.multi_head.gated.scale import LOGIT, Norms, ask_norms
from keyhole.methods.multi_head.scalar.queries import columns
from keyhole.numerics.svd import singular_values
from keyhole.queries import Signature
from keyhole.recovery import Outcome

ASSUMPTIONS = (
    "the box adds up softmax heads over its raw tokens, read at the last position",
    "heads whose logits differ by less than their answers show are one head, and those whose values show nowhere none",
    "answers are right up to the rounding of their dtype and the declared noise",
)
# The residual of all queries together may exceed the errors of answers by this factor.
SCATTER = 1.5
# Answers are read again by at most this factor more accurately, so that the next fit begins near its end.
FINER = 2.0**10
# Heads whose scores differ relatively by this many errors of answers, over their size, leave a residual.
APART = 64.0


def fits_at_once(total: Value) -> bool:
    """Whether a few heads of such values are few enough numbers to be looked for all at once."""
    width, outputs = columns(floats(total.vector)).shape
    return bool(4 * width * (1 + outputs) <= MOST_UNKNOWN)


def ask_gated_heads(signature: Signature, rng: np.random.Generator, total: Value) -> Steps[Estimate[MultiHead]]:
    """Score matrices, values and biases of f(X) = Σ_h Σ_i softmax_i(x_iᵀ·(W_h·x_N + c_h))·x_iᵀ·V_h + b.

    Beside one last token g, queries [m×(g + u); n×g] answer b + g·v̄ + Σ_h σ(ln(m/n) + u·k_h)·(u·v_h) with gates
    k_h = W_h·g + c_h that are free vectors: least squares from many starts tell their number, gates and values. With
    these values the gates at d − 1 further last tokens follow, which with the first determine W_h, and one Gauss–Newton
    fit of everything its last digits. Some 4.4·H·d + 20 queries for the first last token, with H rounded up to 2, 4, 8
    or 16, and 1.3·H·d + 4 for each of the others.

    Assumes what `ASSUMPTIONS` says.
    """
    if signature.max_length is not None and signature.max_length < 3:
        raise Unrecoverable(
            Outcome.NOT_IDENTIFIABLE,
            "sequences of two tokens do not determine several heads: allow sequences of three (max_length)",
        )
    pairs = TokenPairs(signature, total, rng)
    norms = yield from ask_norms(pairs)
    return _estimate_heads(pairs, norms, *_fitted((yield from ask_head_gates(pairs, norms))))


def ask_read_heads(
    signature: Signature,
    rng: np.random.Generator,
    total: Value,
    reader: AnswerReader,
    last: Floats,  # (width,) the first last token: rows of its norm have moderate logits beside it
    target: float,  # wanted error of an entry over the root mean square of its matrix
) -> Steps[Estimate[MultiHead]]:
    """The same of answers that are read one by one: as accurately as the target needs, or as they can be."""
    pairs = TokenPairs(signature, total, rng, reader)
    norm = float(np.linalg.norm(last))
    norms = Norms(norm, norm, last / norm, LOGIT, has_bias=False)
    found = yield from ask_head_gates(pairs, norms)
    too_coarse: Unrecoverable | None = None
    while True:
        estimate, excess = None, FINER
        found, rms = _fitted(found)
        try:
            estimate = _estimate_heads(pairs, norms, found, rms)
            excess = min(_relative_radius(estimate) / target, FINER)
        except Unrecoverable as error:
            if error.outcome is not Outcome.TOO_NOISY:
                raise
            too_coarse = error
        finer = None if excess <= 1 else (yield from reader.read_finer(found.queries.groups, excess))
        if finer is not None:
            found = replace(found, queries=pairs.together(finer))
        elif estimate is not None:
            return estimate
        elif too_coarse is not None:
            raise too_coarse


def _relative_radius(estimate: Estimate[MultiHead]) -> float:
    """The largest radius of an entry of a score over the root mean square of the entries."""
    pairs = zip(estimate.params.heads, estimate.radius.heads, strict=True)
    sizes = [(float(np.sqrt(np.mean(floats(own.score) ** 2))), floats(wide.score)) for own, wide in pairs]
    return max((float(np.max(wide)) / size for size, wide in sizes if size > 0), default=0.0)


def _fitted(found: HeadGates) -> tuple[HeadGates, float]:
    """The best fit of all queries together, and the root mean square of what it leaves."""
    heads, rms = fit_joint(found.queries, found.heads)
    return replace(found, heads=heads), rms


def _estimate_heads(pairs: TokenPairs, norms: Norms, found: HeadGates, rms: float) -> Estimate[MultiHead]:
    """Parameters and radii of a best fit, which must leave no more than answers err."""
    heads = found.heads
    floor = max(pairs.floor(group, heads.at(number)) for number, group in enumerate(found.queries.groups))
    size = min(pairs.bare(group).size for group in found.queries.groups)
    if rms > SCATTER * floor:
        raise failure(
            norms,
            f"{heads.values.shape[0]} heads leave {rms:.2g} of the answers where these err by {floor:.2g}: the box "
            "is no sum of softmax heads",
            rms / size,
        )
    mixing = np.asarray(np.linalg.inv(found.points), dtype=np.float64).T
    radii = joint_radii(found.queries, heads, pairs.errors(found.queries, heads, rms), mixing)
    scores = np.einsum("ghd,gj->hdj", heads.gates, mixing)
    estimate = _estimate(pairs, scores, heads, radii)
    if not radii.settled:
        error = Unrecoverable(
            Outcome.TOO_NOISY, "answers err too much to tell the heads: the errors of gates and values feed each other"
        )
        error.partial = estimate.params
        raise error
    return replace(estimate, details={**estimate.details, "told_apart": APART * floor / size})


def _estimate(pairs: TokenPairs, scores: Floats, heads: JointHeads, radii: JointRadii) -> Estimate[MultiHead]:
    """Parameters, radii and standard errors; of exact answers what is within its radius of zero is zero."""
    space, width, noise = pairs.signature.space, pairs.signature.width, pairs.signature.noise
    exact = noise.kind == "exact"
    wide = np.moveaxis(radii.gates, 0, -1)  # (heads, width, width or more)
    random = np.moveaxis(radii.deviations.gates, 0, -1)
    ranks = [_rank(score[:, :width], radius[:, :width]) for score, radius in zip(scores, wide, strict=True)]
    biased = scores.shape[2] > width and not (exact and np.all(np.abs(scores[..., width:]) <= wide[..., width:]))
    params, around, errors = [], [], []
    flat = pairs.total.vector.ndim == 1
    for head in range(heads.values.shape[0]):
        score, radius = scores[head], wide[head] + space.spacing * np.abs(scores[head])
        if exact and ranks[head] == 0:
            radius[:, :width] += np.abs(score[:, :width])
            score[:, :width] = 0.0
        if not biased:
            radius[:, width:] += np.abs(score[:, width:])
        value_radius = radii.values[head] + space.spacing * np.abs(heads.values[head])
        params.append(_head(space, score, heads.values[head], width, flat=flat, biased=biased))
        around.append(_head(space, radius, value_radius, width, flat=flat, biased=score.shape[1] > width))
        errors.append(_head(space, random[head], radii.deviations.values[head], width, flat=flat, biased=biased))
    has_bias, shape = pairs.total.has_bias, pairs.total.bias.shape
    outputs = [
        space.asarray(each.reshape(shape)) for each in (heads.constant, radii.constant, radii.deviations.constant)
    ]
    outer = outputs[1] if has_bias else outputs[1] + abs(outputs[0]) if pairs.has_constant else pairs.total.bias_radius
    numbers = sum(rank * (2 * width - rank) for rank in ranks) + width * len(ranks) * biased
    outputs_count = heads.values.shape[2]
    bound = -(-(numbers + outputs_count * (width * len(ranks) + has_bias)) // outputs_count)
    return Estimate(
        params=MultiHead(params, outputs[0] if has_bias else None),
        radius=MultiHead(around, outer),
        counting_bound=bound,
        standard_error=MultiHead(errors, outputs[2]) if noise.kind == "gaussian" else None,
        assumptions=ASSUMPTIONS,
        details=_details(ranks, pairs, biased=biased),
    )


def _head(space: Space, score: Floats, value: Floats, width: int, *, flat: bool, biased: bool) -> SingleHead:
    bias = space.asarray(score[:, width]) if biased else None
    return SingleHead(space.asarray(score[:, :width]), space.asarray(value[:, 0] if flat else value), bias)


def _rank(score: Floats, radius: Floats) -> int:  # (width, width), (width, width)
    """Singular values that errors within radii do not explain."""
    return int(np.sum(singular_values(score) > np.linalg.norm(radius)))


def _details(ranks: list[int], pairs: TokenPairs, *, biased: bool) -> dict[str, Any]:
    return {
        "heads": len(ranks),
        "ranks": ranks,
        "score_bias": biased,
        "output_bias": pairs.total.has_bias,
        "at_once": True,
    }
