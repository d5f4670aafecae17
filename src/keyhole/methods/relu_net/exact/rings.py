"""Tokens that tell whether the folds of a net go on for ever: a circle far out, beside every kink that it crosses."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats

# How far beside a kink tokens lie, as a part of the way to the next one on the circle.
BESIDE = 0.02


def ring_tokens(
    normal: Floats,  # (k, width) unit vectors
    offset: Floats,  # (k,)
    radius: float,
    both_ends: int,  # of so many arcs tokens lie at both ends, of the others at one of them by chance
    rng: np.random.Generator,
) -> Floats:  # (n, width)
    """Tokens on a random circle around the origin, beside the places where it crosses kinks: 2k, and up to 2k more.

    Between two neighbouring kinks a net of one hidden layer is affine. Of a function that folds once more in between,
    or less, at least one of the two tokens of that arc tells, however narrow it is; of two folds more it may not.
    """
    width = normal.shape[1]
    if width == 1 or offset.size == 0:
        return np.zeros((0, width))
    plane, _ = np.linalg.qr(rng.standard_normal((width, 2)))
    across = normal @ plane  # (k, 2)
    size = radius * np.linalg.norm(across, axis=1)
    meets = size > np.abs(offset)
    towards = np.arctan2(across[meets, 1], across[meets, 0])
    half = np.arccos(-offset[meets] / size[meets])
    at = np.sort(np.concatenate([towards - half, towards + half]) % (2 * np.pi))
    if at.size == 0:
        return np.zeros((0, width))
    arc = np.diff(at, append=at[0] + 2 * np.pi)
    begin, end = at + BESIDE * arc, at + (1 - BESIDE) * arc
    order = rng.permutation(at.size)
    both, one = order[:both_ends], order[both_ends:]
    angle = np.concatenate([begin[both], end[both], np.where(rng.random(one.size) < 0.5, begin[one], end[one])])
    return np.asarray(radius * np.stack([np.cos(angle), np.sin(angle)], axis=1) @ plane.T)
