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


def ask_epsilon(
    signature: Signature, rng: np.random.Generator, affine: Affine, nothing: Floats
) -> Steps[tuple[float, float]]:
    """Epsilon and its radius, from tokens near one of which nothing is left to normalise."""
    asking, width = Asking(signature), signature.width
    way = affine.linear.T @ rng.standard_normal(width - 1)
    way /= np.linalg.norm(affine.linear @ way) / width**0.5
    size = 1.0
    for _ in range(MOST_RUNGS):
        tokens = nothing + size * way[None]
        part, _ = yield from _ask_part(asking, affine, tokens)
        if part[0] <= LESS:
            break
        size /= RUNG
    else:
        raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, "epsilon is zero, or too small to show in any answer")
    epsilon = size**2 * (1 / part[0] - 1)
    ways = rng.standard_normal((READS, width - 1)) @ affine.linear
    ways /= np.linalg.norm(ways @ affine.linear.T, axis=1, keepdims=True) / width**0.5
    part, squares = yield from _ask_part(asking, affine, nothing + epsilon**0.5 * ways)
    read = squares * (1 / part - 1)
    return float(np.mean(read)), float(np.max(np.abs(read - np.mean(read))) * 4 + 64 * signature.space.eps * epsilon)


def _ask_part(asking: Asking, affine: Affine, tokens: Floats) -> Steps[tuple[Floats, Floats]]:
    """The mean squares of what comes out of the norm, v/(v + ε), and v of what goes in."""
    answers = yield from asking.ask("epsilon", tokens[:, None])
    width = asking.signature.width
    out = np.sum(affine.sphere.inside(answers) ** 2, axis=1) / width
    return out, np.sum(affine.images(tokens) ** 2, axis=1) / width
