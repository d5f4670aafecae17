"""How far the last token sees, where tokens may not be long."""

from __future__ import annotations

import numpy as np

from keyhole.methods.base import Steps
from keyhole.methods.multi_head.vector.parts.biased.first_token import MOST_DISTANCE, ask_last_seen
from keyhole.methods.multi_head.vector.probe import VectorQueries

# What is seen moves an answer by more than so many times what it may err by, over its distance.
SHOWN = 2.0**8


def ask_bounded_sight(queries: VectorQueries) -> Steps[float]:
    """How many tokens the last one sees, itself included: a token before copies of it has some weight where seen."""
    token, last = queries.on_grid(queries.scale * queries.directions(2))
    index, ones = np.zeros(1, dtype=np.int64), np.ones(1)
    most = int(min((queries.signature.max_length or MOST_DISTANCE) - 1, MOST_DISTANCE))

    def is_seen(distance: int) -> Steps[bool]:
        queries.between = distance - 1
        moved = []
        for way in (token, -token):
            added = [(way[None], index, ones)]
            moved.append((yield from queries.ask("positions", last[None], index, added)))
        queries.between = 0
        return bool(np.max(np.abs(moved)) > SHOWN * queries.noise)

    return (yield from ask_last_seen(is_seen, most))
