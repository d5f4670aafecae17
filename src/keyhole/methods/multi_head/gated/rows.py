"""Random rows beside one last token."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Steps
from keyhole.methods.gated_sum.model import GatedQueries
from keyhole.methods.multi_head.gated.queries import TokenPairs
from keyhole.methods.multi_head.gated.scale import Norms

# Rows have norms from this part of the largest on; errors are averaged out by longer ones.
SHORTEST, SHORTEST_NOISY = 0.5, 0.95


def draw_rows(pairs: TokenPairs, norms: Norms, last: Floats, count: int) -> Floats:  # (width,) -> (count, width)
    """Random rows on the far side of a last token, where g + u is no longer than both together."""
    rng = pairs.rng
    rows = rng.standard_normal((count, pairs.signature.width))
    rows *= (
        norms.row
        * rng.uniform(SHORTEST_NOISY if pairs.noise > 0 else SHORTEST, 1.0, (count, 1))
        / np.linalg.norm(rows, axis=1, keepdims=True)
    )
    return np.asarray(np.where(rows @ last[:, None] > 0, -rows, rows))


def ask_rows(pairs: TokenPairs, norms: Norms, stage: str, last: Floats, count: int) -> Steps[GatedQueries]:
    """Raw answers to random rows beside one last token, in all copies."""
    rows = draw_rows(pairs, norms, last, count)
    kinds = pairs.rng.permutation(np.arange(count) % len(pairs.copies))
    return (yield from pairs.ask(stage, np.tile(last, (count, 1)), rows, kinds))
