"""Thirteen queries that tell groups of score forms apart: tokens and pairs at extreme norms.

One token: weights that add up to one answer it by a linear map at every norm; a sink or sigmoid only where scores
vanish; unnormalised powers of the score with the third or fifth power of the norm.
A long token beside a tiny one has score zero if the score is a product of both, so that both signs weigh the same; it
weighs nothing or everything if the score has a part of the key alone. Kernels that are powers, and normalised keys,
give such weights at every norm alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Steps
from keyhole.methods.noise_estimation.measure import coarseness
from keyhole.methods.parts.naming.plane import ONE, TWO, Plane, Unnamed, same

# Norms at which scores vanish and at which they saturate, whatever the parameters; products of a long and a tiny token
# vanish too.
TINY, HUGE, LONG, SHORT = 2.0**-60, 2.0**40, 2.0**40, 2.0**-100
# So short that only an output bias is left of an answer.
NOTHING = 2.0**-200
STEP = 2.0**10
# An answer to nothing that is more than this of one to a tiny token is an output bias.
BIASED = 2.0**-20
# A weight this near to nothing or everything is taken for it.
NEAR = 1e-6
# A power this near to a whole number is one: odds that are large have few digits.
WHOLE = 1e-3
PRODUCT, NORMED, KEYS, KERNEL, POWER = "product", "norms do not count", "part of the key", "kernel", "power"


@dataclass(frozen=True)
class FirstLook:
    """What single tokens and pairs show."""

    group: str  # PRODUCT, NORMED, KEYS, KERNEL or POWER
    affine: bool  # whether weights of single tokens are one
    biased: bool  # whether there is an output bias
    degree: int  # by which answers to tiny tokens go with their norm
    values: Floats  # (2,): answers to the basis, over the norm: value by weight, where scores vanish
    pair_degree: int = 0  # by which odds go with the norm of the key


def ask_first_look(plane: Plane) -> Steps[FirstLook]:
    """The group of the score form."""
    answers = yield from plane.ask_all(
        [
            [NOTHING * ONE],
            [TINY * ONE],
            [STEP * TINY * ONE],
            [TINY * TWO],
            [ONE],
            [HUGE * ONE],
            [-HUGE * ONE],
            [HUGE * TWO],
            [HUGE * (ONE + TWO)],
            [LONG * ONE, SHORT * TWO],
            [-LONG * ONE, SHORT * TWO],
            [TINY * ONE, TINY * TWO],
            [STEP * TINY * ONE, TINY * TWO],
        ]
    )
    digits = coarseness(answers[answers != 0], plane.exam.signature.space.eps)
    if digits.evidence:
        raise Unnamed("parts", f"names are told by nine equal digits, and {digits.evidence}", "unknown")
    nothing, tiny = np.max(np.abs(answers[0])), np.max(np.abs(answers[1]))
    biased = bool(nothing > BIASED * tiny)
    if biased:
        plane.output_bias = answers[0]
    read = plane.read(answers)
    bias = float(np.max(np.abs(plane.read(answers) - plane.read(answers + plane.output_bias))))
    long_values = np.array([read[5], read[7]]) / HUGE
    linear = [
        same(read[4], long_values[0], bias),
        same(read[5], -read[6]),
        same(read[8], read[5] + read[7], abs(read[5])),
    ]
    if not biased:
        linear += [same(read[1] / TINY, long_values[0]), same(read[3] / TINY, long_values[1])]
    if biased and not all(linear):
        raise Unnamed("weights", "an output bias hides the weights of tiny tokens, which do not add up to one")
    if nothing == tiny == 0 == np.max(np.abs(answers[3])):  # a power that is cut off where scores are below zero
        return FirstLook(POWER, False, biased, 0, np.zeros(2))
    degree = 1 if biased else _degree(*(read[1:3] if read[1] != 0 else (read[3], read[3] * STEP**3)))
    affine, values = all(linear), long_values if biased else np.array([read[1], read[3]]) / TINY
    if degree in (3, 5):
        return FirstLook(POWER, False, biased, degree, values)
    if degree != 1:
        raise Unnamed("one token", f"tiny tokens are answered with the power {degree} of their norm")
    return _of_pairs(read[9:], FirstLook(PRODUCT, affine, biased, 1, values))


def _degree(before: float, after: float) -> int:
    """The power of the norm by which a number has grown; 0 for none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        power = np.log2(np.abs(np.float64(after) / np.float64(before))) / np.log2(STEP)
    if not np.isfinite(power):
        return 0
    return int(np.round(power)) if np.abs(power - np.round(power)) < WHOLE else 0


def _of_pairs(read: Floats, look: FirstLook) -> FirstLook:
    """The group by the answers to pairs: a long token of both signs, equal norms that are tiny, and that are huge."""
    one, two = look.values

    def with_group(group: str, **more: float) -> FirstLook:
        known = {"affine": look.affine, "biased": look.biased, "degree": 1, "values": look.values}
        return FirstLook(group, **known, **more)  # type: ignore[arg-type]

    right, left = read[0] / (LONG * one), -read[1] / (LONG * one)
    if same(right, left) and right > NEAR and (right < 1 - NEAR or not look.affine):
        return with_group(PRODUCT)
    if not look.affine:
        raise Unnamed("score form", "single tokens weigh less than one, and pairs are not read beside it")
    if any(NEAR < weight < 1 - NEAR for weight in (right, left)):
        return with_group(NORMED)
    if look.biased:
        return with_group(KEYS)
    near = _odds(read[2], TINY * one, TINY * two), _odds(read[3], STEP * TINY * one, TINY * two)
    power = _degree(*near)
    if power > 0:
        return with_group(KERNEL, pair_degree=power)
    if same(near[0], near[1]):
        return with_group(KEYS)
    raise Unnamed("score form", "weights of tiny tokens are neither equal nor go with a power of their norm")


def _odds(answer: float, one: float, two: float) -> float:
    """The odds of a token beside another, by what both answer alone."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return float((np.float64(answer) - two) / (np.float64(one) - answer))
