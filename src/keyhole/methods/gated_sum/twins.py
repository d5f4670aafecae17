"""Two heads that are nearly alike, and others that answer nearly as they do."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.gated_sum.model import GatedSum

# Distances of mirror images, over those of the two heads, in so many directions.
DISTANCES, ANGLES = (0.3, 1.0, 3.0), 16
# Heads whose gates are nearer than this, over their size, are nearly alike.
NEAR = 0.3
# More heads than this are not looked at in pairs.
MOST_HEADS = 6


def has_twins(heads: GatedSum) -> bool:
    """Whether two heads are nearly alike."""
    if not 2 <= heads.heads <= MOST_HEADS or heads.gates.shape[1] < 2:  # one number has no plane of values
        return False
    one, two, apart = _nearest(heads)
    return apart <= NEAR * float(np.linalg.norm(heads.gates[[one, two]]))


def mirror_images(heads: GatedSum) -> Floats:  # -> (starts, heads, width)
    """Gates in which the second of the nearest two heads lies off the first in the plane of their values instead.

    With s = v₁ + v₂ the two add σ·(u·s) + σ'·((u·η)(u·s) + (u·δ)(u·v₂)): where u·s = 0 that is a product of two linear
    forms, so that δ is known up to a multiple of s, or it is v₂ that is.
    """
    one, two, apart = _nearest(heads)
    values = np.sum(heads.values[[one, two]], axis=2)  # (2, width)
    plane = np.linalg.qr(np.stack([values[0] + values[1], values[1]], axis=1))[0]  # (width, 2)
    angles = np.arange(ANGLES) * (2 * np.pi / ANGLES)
    directions = np.stack([np.cos(angles), np.sin(angles)], axis=1) @ plane.T
    moves = np.concatenate([apart * each * directions for each in DISTANCES])
    starts = np.repeat(heads.gates[None], len(moves), axis=0)
    starts[:, two] = heads.gates[one] + moves
    return starts


def _nearest(heads: GatedSum) -> tuple[int, int, float]:
    """The nearest two heads and how far their gates are apart."""
    apart = np.linalg.norm(heads.gates[:, None] - heads.gates[None], axis=2)
    np.fill_diagonal(apart, np.inf)
    one, two = divmod(int(np.argmin(apart)), apart.shape[1])
    return one, two, float(apart[one, two])
