"""From an answer back to the logit behind it, with an error bar."""

from __future__ import annotations

from keyhole.arrays import Array, Space

# Rounding errors of an inner product of n terms behave like a random walk: one standard deviation is about
# half an eps of |x|·|y| whatever n. Eight of them hold for every entry of the largest matrix one can read.
ROUNDING_DEVIATIONS = 8.0


def rounding(space: Space) -> float:
    """Relative error bar of one inner product, over the product of the two norms."""
    return ROUNDING_DEVIATIONS * space.eps / 2


def logit_with_radius(
    space: Space,
    answer: Array,  # (n,) = low + σ(z)·(high − low)
    low: Array,  # (n,) the answer at z = −∞
    high: Array,  # (n,) the answer at z = +∞
    low_radius: Array,
    high_radius: Array,
    noise: float,  # radius of the answer beyond rounding
) -> tuple[Array, Array]:
    """The logits z and their radii, to first order. A saturated entry has an infinite radius."""
    xp = space.xp
    span = high - low
    weight = xp.clip((answer - low) / xp.where(span == 0, xp.ones_like(span), span), 0.0, 1.0)
    answer_radius = weight * high_radius + (1 - weight) * low_radius + noise
    above, below = xp.abs(answer - low), xp.abs(high - answer)
    inside = ((answer - low) * span > 0) & ((high - answer) * span > 0)
    above = xp.where(inside, above, xp.ones_like(above))
    below = xp.where(inside, below, xp.ones_like(below))
    logit = xp.log(above / below)
    radius = (answer_radius + low_radius) / above + (answer_radius + high_radius) / below
    radius = radius + rounding(space) * xp.abs(logit)  # the oracle's own rounding of the logit
    never = xp.asarray(xp.inf, dtype=space.dtype, device=space.device)
    return xp.where(inside, logit, xp.zeros_like(logit)), xp.where(inside, radius, never)
