"""Several heads of any positions within a bound on token norms: behind a norm there are no long tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from keyhole.arrays import Array, floats, like
from keyhole.families import MultiHead
from keyhole.methods.base import Estimate, Steps, Unrecoverable, adapt
from keyhole.methods.forms.value import Value, ask_value
from keyhole.methods.multi_head.vector.parts.biased.method import ask_biased_scores
from keyhole.methods.multi_head.vector.parts.bounded.factors import Answered
from keyhole.methods.multi_head.vector.parts.bounded.refit import refit
from keyhole.methods.multi_head.vector.parts.bounded.sight import ask_bounded_sight
from keyhole.methods.multi_head.vector.parts.bounded.values import KnownValues, ask_bounded_values
from keyhole.methods.multi_head.vector.parts.long_tokens import FILLED
from keyhole.methods.multi_head.vector.probe import HeadsHidden, VectorQueries
from keyhole.queries import Measurements, Plan, Signature
from keyhole.recovery import Outcome

# Tokens are as long as the bound allows, or shorter by this at a time where weights saturate, so often.
SHORTER, ATTEMPTS = 2.0**-3, 4
# Values are asked for with other tokens where answers are off by more than this part of them, so often in all; where it
# is more than that, all logits are read, and more of them at a second distance.
ENOUGH, TRIES, PRECISE = 1e-8, 3, 1e-10
# Biases that heads need not have, and how many times farther off answers may be without those that do not show.
BIASES, AS_NEAR = ("query_bias", "key_bias", "score_bias"), 4.0
# How tokens that are too long show.
TOO_LONG = (Outcome.SATURATED, Outcome.WRONG_FAMILY, Outcome.TOO_NOISY)


def ask_bounded_heads(signature: Signature, rng: np.random.Generator, *parts: Any) -> Steps[Estimate[MultiHead]]:
    """Heads as `_ask_heads` reads them, by least squares over all that was answered (`refit`)."""
    kept: list[tuple[Plan, Measurements]] = []

    def keep(plan: Plan, answers: Measurements) -> Measurements:
        kept.append((plan, answers))
        return answers

    found = yield from adapt(_ask_heads(signature, rng, *parts), incoming=keep)
    constant = 0.0 if found.params.output_bias is None else floats(found.params.output_bias)
    asked = [
        Answered(floats(plan.tokens(0, plan.count, signature.space, signature.width)), answers.by_output - constant)
        for plan, answers in kept
    ]
    ranks = list(zip(found.details["score_ranks"], found.details["value_ranks"], strict=True))
    params = refit(found.params, ranks, asked, signature.space.eps)
    before, wide = found.params.arrays(), found.radius.arrays()
    arrays = {name: like(array, before[name]) for name, array in params.arrays().items()}
    # Where draws of errors tell nothing, an array is off by no more than its size.
    sizes = {name: float(np.sqrt(np.mean(floats(array) ** 2))) for name, array in arrays.items()}
    radii = {name: like(np.minimum(floats(each), sizes.get(name, np.inf)), each) for name, each in wide.items()}
    shown = _shown(params.with_arrays(arrays), asked)
    own = {name: array for name, array in radii.items() if name not in arrays or name in shown.arrays()}
    return replace(found, params=shown, radius=found.radius.with_arrays(own))


def _shown(heads: MultiHead, asked: Sequence[Answered]) -> MultiHead:
    """The heads without biases that answers do not show: about as near to them without."""
    for bias in BIASES:
        arrays = {name: array for name, array in heads.arrays().items() if name.rpartition(".")[2] != bias}
        bare = heads.with_arrays(arrays)
        if _misfit(bare, asked) <= AS_NEAR * _misfit(heads, asked):
            heads = bare
    return heads


def _misfit(heads: MultiHead, asked: Sequence[Answered]) -> float:
    constant = 0.0 if heads.output_bias is None else floats(heads.output_bias)
    off = (float(np.sum((each.answers + constant - floats(heads(each.tokens))) ** 2)) for each in asked)
    return float(sum(off) ** 0.5)


def _ask_heads(
    signature: Signature,
    rng: np.random.Generator,
    names: Mapping[str, str],
    form: str,
    frequencies: Array | None = None,
) -> Steps[Estimate[MultiHead]]:
    """All heads of f(X) = Σ_h Σ_i weight_hi·x_iᵀ·V_h + b, |x_i| bounded, the logit of x being affine in x and in x_N.

    Heads and values come from what weights of two tokens have in common beside any others (`ask_bounded_values`),
    whatever positions, biases or slopes do. Then logits are read as those of heads with biases are
    (`ask_biased_scores`).
    """
    if names["link"] != "exp" or names["normaliser"] != "sum" or signature.noise.kind != "exact":
        raise Unrecoverable(
            Outcome.TOO_NOISY,
            "within a bound on token norms (max_norm) several heads are read from exact answers, and without caps and "
            "sinks",
        )
    value = yield from ask_value(signature)
    if floats(value.vector).ndim == 1:
        raise Unrecoverable(Outcome.WRONG_FAMILY, "several heads are read from several outputs: the box has one")
    plain = Value(floats(value.vector), floats(value.radius), floats(value.bias), floats(value.bias_radius))
    scale = float(min(signature.norm_limit / 2, signature.width**0.5))
    for attempt in range(ATTEMPTS):
        queries = VectorQueries(signature, plain, rng, filled=FILLED)
        queries.scale = scale * SHORTER**attempt
        yield from queries.ask_precision()
        try:
            if names["position_bias"] == "window":
                queries.window = yield from ask_bounded_sight(queries)
            start = yield from _ask_precise(queries)
            queries.thorough = start.relative_error > PRECISE
            return (yield from ask_biased_scores(queries, start, start.known, names, form, frequencies, rough=True))
        except HeadsHidden:
            raise
        except Unrecoverable as error:
            if error.outcome not in TOO_LONG or attempt + 1 == ATTEMPTS:
                raise
    raise AssertionError  # pragma: no cover - the last attempt returns or raises


def _ask_precise(queries: VectorQueries) -> Steps[KnownValues]:
    """Values that are known well enough, or the best of a few tries: how well is a matter of luck with tokens."""
    tries: list[KnownValues] = []
    for _ in range(TRIES):
        tries.append((yield from ask_bounded_values(queries)))
        if tries[-1].relative_error <= ENOUGH:
            break
    return min(tries, key=lambda each: each.relative_error)
