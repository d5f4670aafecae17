"""Heads with a residual and LayerNorm behind them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keyhole.arrays import ROUNDING_DEVIATIONS, Floats, floats
from keyhole.families import MultiHead, NormAfter, Residual
from keyhole.methods.base import Estimate, Steps
from keyhole.methods.multi_head.vector.first_token import ask_first_token
from keyhole.methods.multi_head.vector.method import estimate_heads
from keyhole.methods.multi_head.vector.scores_last import ask_scores
from keyhole.methods.multi_head.vector.values import ask_values
from keyhole.methods.normalised.after.affine import Affine, ask_affine
from keyhole.methods.normalised.after.epsilon import ask_epsilon
from keyhole.methods.normalised.after.queries import WITHIN, NormedQueries
from keyhole.numerics.svd import least_squares
from keyhole.queries import Signature

# Score biases of which more than this part of scores is unknown, since few forms told the others, are read from all
# forms: beside a residual, attention of small logits is so little that no certificate bore it.
BIAS_KNOWN = 5e-5
ASSUMPTIONS = (
    "the box adds its last token to what softmax heads make of its raw tokens, and normalises the sum (LayerNorm)",
    "what heads add to all numbers of an answer alike shows in none, as the norm takes it off",
    "heads whose logits differ by less than their answers show are one head",
    "answers are right up to the rounding of their dtype",
)


def ask_before_norm(signature: Signature, rng: np.random.Generator) -> Steps[Estimate[NormAfter]]:
    """All of f(X) = γ·LayerNorm_ε(x_N + Σ_h head_h(X) + b) + β but the mean of what heads add over an answer.

    Single tokens tell γ, β and x + Σ_h OV_h·x + b (`ask_affine`), 2.2·d + 40 queries. Then `ask_first_token`,
    `ask_values` and `ask_scores` read the heads, of answers whose norms are solved for (`NormedQueries`), and tokens
    that are normalised from nearly nothing tell ε.
    """
    affine = yield from ask_affine(signature, rng)
    queries = NormedQueries(signature, affine.as_value(), rng, affine=affine)
    yield from queries.ask_probes()
    # What single tokens of natural norms are off by tells more than what the fit left over.
    affine = replace(affine, error=max(affine.error, queries.noise / queries.scale))
    queries.value = affine.as_value()
    start = yield from ask_first_token(queries)
    queries.start = start
    values = yield from ask_values(queries, start)
    queries.expect(values.matrices)
    scores = yield from ask_scores(queries, start, values)
    sizes = np.sqrt(np.mean(scores.matrices**2, axis=(1, 2)))
    if np.any((scores.dropped > scores.errors) & (scores.bias_errors > BIAS_KNOWN * sizes)):
        queries.thorough = True
        scores = yield from ask_scores(queries, start, values)
    found = estimate_heads(queries, queries.value, start, values, scores)
    nothing = least_squares(affine.linear, -affine.offset)
    epsilon, wide, off = yield from ask_epsilon(signature, rng, affine, nothing)
    length = max(float(np.linalg.norm(nothing)), queries.scale)
    affine = replace(affine, error=max(affine.error, WITHIN * off / length))
    whole = _whole(found, affine, epsilon, wide)
    # What errors of single tokens would hide of epsilon is not claimed to be known.
    hidden = float(
        np.sqrt(np.mean(whole.params.inner_errors(whole.radius, nothing[None, None], signature.space.rounding) ** 2))
    )
    wider = np.asarray(wide + hidden * (hidden + 2 * epsilon**0.5))
    return replace(whole, radius=replace(whole.radius, epsilon=wider))


def _whole(found: Estimate[MultiHead], affine: Affine, epsilon: float, wide: float) -> Estimate[NormAfter]:
    gain, bias, part = affine.sphere.gain, affine.sphere.bias, ROUNDING_DEVIATIONS * affine.error
    errors = NormAfter(
        _turned_radius(found, affine),
        part * np.abs(gain),
        part * (np.abs(gain) + np.abs(bias)),
        np.asarray(wide),
        # Errors that go along one direction are as much larger there than entry by entry.
        alone=np.full((gain.size, gain.size), part * gain.size**0.5),
    )
    return Estimate(
        params=NormAfter(Residual(_turned(found.params, affine.sphere.basis)), gain, bias, np.asarray(epsilon)),
        radius=errors,
        counting_bound=found.counting_bound + 3,
        assumptions=ASSUMPTIONS,
        details={**found.details, "norm": "layer", "epsilon": epsilon, "residual": True},
    )


def _turned(heads: MultiHead, basis: Floats) -> MultiHead:
    """The heads with as many outputs as tokens have numbers."""
    made = [replace(head, value=floats(head.value) @ basis.T) for head in heads.heads]
    return MultiHead(made, None if heads.output_bias is None else floats(heads.output_bias) @ basis.T)


def _turned_radius(found: Estimate[MultiHead], affine: Affine) -> Residual:
    """Radii of heads with as many outputs as tokens have numbers."""

    def turned(radii: Floats) -> Floats:
        return np.asarray(np.sqrt(floats(radii) ** 2 @ (affine.sphere.basis**2).T))

    made = [replace(head, value=turned(head.value)) for head in found.radius.heads]
    bias = found.radius.output_bias
    return Residual(MultiHead(made, None if bias is None else turned(bias)))
