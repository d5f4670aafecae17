"""Whether a box is the net that was read from it: fresh tokens, and tokens beside its folds far out."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import to_numpy
from keyhole.methods.base import Estimate, Steps
from keyhole.methods.relu_asking import Box, Floats
from keyhole.methods.relu_estimate import fresh_tokens, within_bars
from keyhole.numerics.relu_rings import ring_tokens

# Fresh tokens near the kinks.
CHECKS = 6
# Radii of circles beside all folds, in units of the typical distance of a kink: what a box bends elsewhere than on the
# line that was read, as deeper nets do, mostly shows far out. The nearer one sees folds that end and begin again.
RINGS = (1000.0, 3.0)
# Arcs of a circle that lean results look at from both ends.
ARCS = 20
# Tokens of any length, shortest and longest in the same unit: how many, and up to how many, those of the circle
# counted, where a result is lean.
ANY_LENGTH = (1e-2, 4e3)
FRESH = 48
FRESH_LEAN = 24
# With a norm bound rings have this part of it as their radius.
OUTERMOST = 0.99


def checked(
    box: Box, estimate: Estimate, scale: float, rng: np.random.Generator, thorough: bool
) -> Steps[tuple[Estimate, str]]:
    """The estimate, with wider radii where they were too narrow, and what is wrong with it, if anything is.

    Six tokens, up to 2k + 20 beside the k folds, at least 24 in all; where `thorough`, 8k and 48 fresh ones.
    """
    estimate, reason = yield from within_bars(box, estimate, fresh_tokens(box, scale, CHECKS, rng))
    if reason:
        return estimate, reason
    unit = scale * box.width**0.5
    rings = [_ring(box, estimate, far * unit, thorough, rng) for far in (RINGS if thorough else RINGS[:1])]
    fresh = FRESH if thorough else max(0, FRESH_LEAN - rings[0].shape[0])
    tokens = np.concatenate([*rings, _of_any_length(box, unit, fresh, rng)])
    return (yield from within_bars(box, estimate, tokens, strict=True))


def _of_any_length(box: Box, unit: float, count: int, rng: np.random.Generator) -> Floats:  # (count, width)
    x = rng.standard_normal((count, box.width))
    shortest, longest = np.log(ANY_LENGTH)
    lengths = unit * np.exp(rng.uniform(shortest, longest, count))
    lengths = np.minimum(lengths, OUTERMOST * box.signature.norm_limit)
    return np.asarray(x * (lengths / np.linalg.norm(x, axis=1))[:, None])


def _ring(box: Box, estimate: Estimate, radius: float, thorough: bool, rng: np.random.Generator) -> Floats:
    """Tokens beside all folds that a circle of this radius, or what the box allows of it, crosses."""
    weights = to_numpy(estimate.params.weights_in).astype(np.float64)
    length = np.linalg.norm(weights, axis=1)
    used = length > 0
    offset = to_numpy(estimate.params.bias_in).astype(np.float64)[used] / length[used]
    radius = min(radius, OUTERMOST * box.signature.norm_limit)
    arcs = 2 * offset.size if thorough else ARCS
    return ring_tokens(weights[used] / length[used, None], offset, radius, arcs, rng)
