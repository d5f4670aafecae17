"""Epsilon of a norm behind attention, from single tokens of which it normalises next to nothing."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.normalised.after.affine import Affine, Asking
from keyhole.queries import Signature
from keyhole.recovery import Outcome

# What is normalised is made smaller by this factor at a time, until answers are shorter by this part.
RUNG, MOST_RUNGS, LESS = 2.0**6, 24, 0.9
# Then epsilon is read where answers change with it the most.
READS = 4
# Its radius is the largest deviation of these from their mean, so many times.
SCATTER = 4.0


def ask_epsilon(
    signature: Signature, rng: np.random.Generator, affine: Affine, nothing: Floats
) -> Steps[tuple[float, float, float]]:
    """Epsilon, its radius, and what images of tokens are off by, from tokens of which next to nothing is normalised."""
    asking, width = Asking(signature), signature.width
    way = affine.linear.T @ rng.standard_normal(width - 1)
    way /= np.linalg.norm(affine.linear @ way) / width**0.5
    size = 1.0
    for _ in range(MOST_RUNGS):
        tokens = nothing + size * way[None]
        part, _, _ = yield from _ask_part(asking, affine, tokens)
        if part[0] <= LESS:
            break
        size /= RUNG
    else:
        raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, "epsilon is zero, or too small to show in any answer")
    epsilon = size**2 * (1 / part[0] - 1)
    ways = rng.standard_normal((READS, width - 1)) @ affine.linear
    ways /= np.linalg.norm(ways @ affine.linear.T, axis=1, keepdims=True) / width**0.5
    part, squares, off = yield from _ask_part(asking, affine, nothing + epsilon**0.5 * ways)
    read = squares * (1 / part - 1)
    wide = float(np.max(np.abs(read - np.mean(read)))) * SCATTER + 64 * signature.space.eps * epsilon
    return float(np.mean(read)), wide, off


def _ask_part(asking: Asking, affine: Affine, tokens: Floats) -> Steps[tuple[Floats, Floats, float]]:
    """The mean squares of what comes out of the norm, v/(v + ε), and v of what goes in; what directions are off by."""
    answers = yield from asking.ask("epsilon", tokens[:, None])
    width = asking.signature.width
    inside, images = affine.sphere.inside(answers), affine.images(tokens)
    along = inside / np.linalg.norm(inside, axis=1, keepdims=True)
    across = images - np.sum(images * along, axis=1, keepdims=True) * along
    squares = np.sum(images**2, axis=1) / width
    return np.sum(inside**2, axis=1) / width, squares, float(np.sqrt(np.max(np.mean(across**2, axis=1))))
