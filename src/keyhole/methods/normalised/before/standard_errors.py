"""How much less than their radii say the numbers of heads behind a norm err, where predictions are concerned.

Heads of small logits may trade values among each other at hardly any cost to an answer: radii of single entries say so,
and added up as if they were independent they are far more than answers are off by. Sequences that serve nothing else
say how much more.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keyhole.arrays import ROUNDING_DEVIATIONS, floats
from keyhole.families import F
from keyhole.methods.base import Estimate, Steps, Unrecoverable
from keyhole.methods.certificate import coarseness_of
from keyhole.methods.heldout import draw_heldout, prediction_radii
from keyhole.queries import Measurements, Signature
from keyhole.recovery import Outcome

# Sequences that tell, drawn as those of the certificate are.
HELD_OUT = 24
# Radii are fine enough as they are where a certificate would be this part of what it must be.
FINE = 0.1
# Exact answers are predicted to this part of them, or what was read is not certified.
MOST_OFF = 5e-7
# Where they are predicted to this part of what weights of tokens make of them, they are of such heads all the same.
TOLD = 0.1
# Standard errors are taken for so many times what these sequences show at most, or for as many as leave predictions
# twice the above: where few entries of an answer are off by much more than most, further sequences are off by more.
MARGIN = 4.0
# Radii are compared so much smaller: large ones are those of weights that cannot be larger than one.
LINEAR = 2.0**-40
# What norms around heads and sums of heads have themselves.
OF_WRAPPERS = ("epsilon", "output_bias", "gain", "bias")


def with_standard_errors(estimate: Estimate[F], signature: Signature, rng: np.random.Generator) -> Steps[Estimate[F]]:
    """The estimate with standard errors, where its radii leave predictions unsure; elsewhere as it is, at no query."""
    params, own = estimate.params, estimate.radius.arrays()
    flat = params.without_attention()
    if estimate.standard_error is not None or flat is None:
        return estimate
    asked = draw_heldout(estimate, signature, rng, HELD_OUT)
    near = float(np.max(asked.known)) <= MOST_OFF * float(np.max(np.abs(asked.predictions)))
    if near and coarseness_of(estimate, signature, asked) <= FINE:
        return estimate
    exact = estimate.radius.with_arrays({name: each * _is_around(name) for name, each in own.items()})
    alone = {name: LINEAR * each * (not _is_around(name)) / ROUNDING_DEVIATIONS for name, each in own.items()}
    answers: list[Measurements] = yield [replace(plan, stage="bar") for plan in asked.plans]
    times, most, told = 0.0, 0.0, True
    largest: dict[bool, list[float]] = {True: [0.0, 0.0], False: [0.0, 0.0]}  # rests and bars of single tokens, of all
    for plan, answer in zip(asked.plans, answers, strict=True):
        tokens = plan.tokens(0, plan.count, signature.space, signature.width)
        rest = np.abs(floats(answer.values) - floats(params(tokens)))
        most = max(most, float(np.max(rest)) / float(np.max(np.abs(floats(answer.values)))))
        told &= float(np.max(rest)) <= TOLD * float(np.max(np.abs(floats(answer.values) - floats(flat(tokens)))))
        bar = floats(params.deviation(estimate.radius.with_arrays(alone), tokens)) / LINEAR
        for single in {tokens.shape[1] == 1, False}:
            largest[single] = [max(*pair) for pair in zip(largest[single], (np.max(rest), np.max(bar)), strict=True)]
        rest = np.maximum(rest - prediction_radii(params, exact, tokens, signature), 0.0)
        times = max(times, float(np.max(rest[bar > 0] / bar[bar > 0], initial=0.0)))
    # Of heads that are known to rounding, sequences elsewhere have more of it; of single tokens it is that of values.
    singly, times = (max(times, rest / bar if bar > 0 else 0.0) for rest, bar in (largest[True], largest[False]))
    if most > MOST_OFF:
        error = Unrecoverable(
            Outcome.TOO_NOISY,
            f"heads behind a norm predict answers to {most:.1g} of them, which must be {MOST_OFF:.1g}: they are "
            "too near to each other for the precision of the answers",
        )
        error.told, error.partial = told, params
        raise error
    margin = min(MARGIN, 2 * MOST_OFF / most) if most > 0 else MARGIN
    sizes = {name: margin * (max(singly, times) if name.endswith("value") else times) for name in own}
    scaled = {name: each * (1.0 if _is_around(name) else sizes[name]) for name, each in own.items()}
    errors = {name: each / ROUNDING_DEVIATIONS for name, each in scaled.items()}
    return replace(estimate, standard_error=estimate.radius.with_arrays(errors))


def _is_around(name: str) -> bool:
    """Whether an array is of what wraps heads: single tokens show it, and its radii are near."""
    return name.rpartition(".")[2] in OF_WRAPPERS
