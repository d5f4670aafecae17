"""From an answer back to the logit behind it, with a radius."""

from __future__ import annotations

from keyhole.arrays import Array, Space


def logit_with_radius(
    space: Space,
    answer: Array,  # (n,) = low + σ(z)·(high − low)
    low: Array,  # (n,) the answer at z = −∞
    high: Array,  # (n,) the answer at z = +∞
    low_radius: float | Array,
    high_radius: float | Array,
    noise: float,  # radius of the answer beyond rounding
) -> tuple[Array, Array]:
    """The logits z and their radii, to first order. A saturated entry has an infinite radius."""
    xp = space.xp
    span = high - low
    one = xp.ones_like(span)
    span = xp.where(span == 0, one, span)
    above, below = (answer - low) / span, (high - answer) / span  # the softmax weights, of sum one
    inside = (above > 0) & (below > 0)
    above, below = xp.where(inside, above, one), xp.where(inside, below, one)
    logit = xp.log(above / below)
    answer_radius = above * high_radius + below * low_radius + noise
    radius = ((answer_radius + low_radius) / above + (answer_radius + high_radius) / below) / xp.abs(span)
    radius = radius + space.rounding * xp.abs(logit)  # the oracle's own rounding of the logit
    return logit, xp.where(inside, radius, xp.inf * one)
