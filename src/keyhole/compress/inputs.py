"""The sequences that choose ranks, and others that measure what was chosen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Floats, floats
from keyhole.errors import UsageError
from keyhole.families import Family
from keyhole.numerics.domain import Sampler, draw_from, sampler_of

CHOOSE, MEASURE = 64, 128  # sequences
LENGTHS = (2, 4, 8)
# Logits of random tokens have about this size: attention chooses, and is not saturated.
LOGIT = 2.0


@dataclass(frozen=True)
class Batches:
    """Sequences by length."""

    tokens: tuple[Floats, ...]  # (count, length, width) each

    @classmethod
    def of(cls, sequences: Sequence[Floats]) -> Batches:
        """Those of sequences (length, width)."""
        groups: dict[int, list[Floats]] = defaultdict(list)
        for each in sequences:
            groups[len(each)].append(each)
        return cls(tuple(np.stack(group) for group in groups.values()))

    def answers(self, params: Family) -> Floats:
        """All numbers that parameters answer."""
        return np.concatenate([floats(params(tokens)).ravel() for tokens in self.tokens])

    def moments(self) -> Floats:  # (width, width)
        """Second moments of the tokens."""
        rows = np.concatenate([tokens.reshape(-1, tokens.shape[-1]) for tokens in self.tokens])
        moments: Floats = rows.T @ rows / len(rows)
        return moments


def draw_batches(
    params: Family, domain: Sampler | Sequence[Array] | None, rng: np.random.Generator
) -> tuple[Batches, Batches, str]:
    """Sequences that choose, sequences that measure, and what both are, in words."""
    count = CHOOSE + MEASURE
    if domain is None:
        scale = params.token_norm(LOGIT) / params.width**0.5
        drawn = [scale * rng.standard_normal((LENGTHS[each % len(LENGTHS)], params.width)) for each in range(count)]
        words = f"{MEASURE} random sequences of {LENGTHS[0]} to {LENGTHS[-1]} tokens whose logits are about {LOGIT:g}"
        return Batches.of(drawn[:CHOOSE]), Batches.of(drawn[CHOOSE:]), words
    drawn = draw_from(sampler_of(domain), rng, count, params.width)
    if len(drawn) < 2:  # one for each
        raise UsageError("domain has one sequence only: some choose the ranks and others measure the error")
    half = len(drawn) * CHOOSE // count or 1
    return Batches.of(drawn[:half]), Batches.of(drawn[half:]), f"{len(drawn) - half} of the inputs that were given"


def relative_error(answers: Floats, true: Floats) -> float:
    """Root mean square of the change of answers over that of the answers."""
    size = float(np.linalg.norm(true))
    apart = float(np.linalg.norm(answers - true))
    return apart / size if size else float(apart > 0)
