"""Two heads that are nearly alike, and others that answer nearly as they do."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.gated_sum.model import GatedSum

# Distances of mirror images, over those of the two heads, to both sides.
DISTANCES = (0.2, 0.5, 1.0, 2.0, 5.0)


def mirror_images(heads: GatedSum) -> Floats:  # -> (starts, heads, width)
    """Gates in which the second of the nearest two heads lies off the first along values instead."""
    apart = np.linalg.norm(heads.gates[:, None] - heads.gates[None], axis=2)
    np.fill_diagonal(apart, np.inf)
    one, two = np.unravel_index(int(np.argmin(apart)), apart.shape)
    values = heads.values[[one, two]].reshape(2, heads.gates.shape[1], -1)
    directions = np.concatenate([*values, values[0] + values[1], values[0] - values[1]], axis=1).T
    directions = directions / np.maximum(np.linalg.norm(directions, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    sizes = apart[one, two] * np.array([sign * each for each in DISTANCES for sign in (1, -1)])
    moves = (sizes[:, None, None] * directions).reshape(-1, directions.shape[1])
    starts = np.repeat(heads.gates[None], len(moves), axis=0)
    starts[:, two] = heads.gates[one] + moves
    return starts
