"""How much less than their radii say the numbers of heads err, where predictions are concerned.

Radii hold for every entry of every head, whatever the errors of answers were. What predictions are off by adds up as
errors of independent numbers do, and held-out sequences that serve nothing else say how large those are.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keyhole.arrays import ROUNDING_DEVIATIONS, Floats, floats
from keyhole.families import MultiHead
from keyhole.methods.base import Estimate, Steps
from keyhole.methods.multi_head.vector.probe import VectorQueries
from keyhole.numerics.domain import LONGEST
from keyhole.queries import Measurements, sequences

# Sequences that tell, and the logits that tokens of theirs have in the median head; others have entries of N(0, 1).
HELD_OUT = 24
LOGITS = (0.5, 2.0, 6.0)


def draw_tokens(queries: VectorQueries, params: MultiHead, count: int) -> list[Floats]:  # of (length, width)
    """Random sequences of all lengths, every other one with tokens of N(0, 1), within the norms that are allowed."""
    rng, limit = queries.rng, min(queries.signature.norm_limit, queries.signature.space.huge**0.25)
    longest = int(min(queries.longest, LONGEST))
    drawn = []
    for number in range(count):
        length = max(2, round(2 * (longest / 2) ** (number / max(count - 1, 1))))
        tokens = rng.standard_normal((min(length, longest), queries.width))
        if number % 2:
            norm = params.token_norm(LOGITS[number // 2 % len(LOGITS)])
            tokens *= (norm if norm < np.inf else queries.scale) / queries.width**0.5
        sizes = np.linalg.norm(tokens, axis=1, keepdims=True)
        drawn.append(tokens * np.minimum(1.0, limit / sizes))
    return drawn


def ask_standard_errors(queries: VectorQueries, found: Estimate[MultiHead]) -> Steps[Estimate[MultiHead]]:
    """With standard errors of all numbers: what radii are made of, times the most that held-out answers are off by.

    Those of values are never less: they decide where one long token has all weight, which few sequences show. Radii are
    wider where held-out answers are off by more than these say.
    """
    space, own = queries.signature.space, found.radius
    claimed = own.with_arrays({name: each / ROUNDING_DEVIATIONS for name, each in own.arrays().items()})
    plans = [sequences("bar", space.asarray(each[None])) for each in draw_tokens(queries, found.params, HELD_OUT)]
    answers: list[Measurements] = yield plans
    of_scores = claimed.with_arrays({name: (".score" in name) * each for name, each in claimed.arrays().items()})
    times, times_scores = 0.0, 0.0
    for number, (plan, answer) in enumerate(zip(plans, answers, strict=True)):
        tokens = plan.tokens(0, 1, space, queries.width)
        values = floats(answer.values)
        rest = (values if queries.signature.positions == "last" else values[:, -1]) - floats(found.params(tokens))
        size = _rms(floats(found.params.deviation(claimed, tokens)))
        times = max(times, _rms(rest) / size) if size > 0 else times
        # Wide radii of an output bias hide what scores are off by: where logits are moderate these alone explain it.
        size = _rms(floats(found.params.deviation(of_scores, tokens)))
        times_scores = max(times_scores, _rms(rest) / size) if number % 2 and size > 0 else times_scores
    more = max(times, 1.0)
    times = min(max(times, times_scores), more)
    scaled = {name: (times if ".score" in name else more) * each for name, each in claimed.arrays().items()}
    wider = {name: more * each for name, each in own.arrays().items()}
    return replace(found, radius=own.with_arrays(wider), standard_error=claimed.with_arrays(scaled))


def _rms(values: Floats) -> float:
    return float(np.sqrt(np.mean(values**2)))
