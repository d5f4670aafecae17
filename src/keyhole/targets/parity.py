"""Layers that are hard to learn from examples: two tokens, and heads whose steps add up to a parity.

With S a set of m coordinates, Θ_i = β·(1_S − t_i·e_1)·e_0ᵀ and thresholds t_i = −(m − 1), …, m − 1 in steps of two,
head i tells whether more coordinates of x_a in S agree with x_a1 than t_i says. Projections of alternating signs, ±e_0,
leave of these steps the parity of x_a on S, on pairs of tokens that differ in coordinate 0, and something linear else;
for even m it is the parity on S and coordinate 1, and x_a1 is added.
Parities are what no statistical-query algorithm learns efficiently; with equal signs, the control, the same steps add
up to a staircase, which is easy.
"""

from __future__ import annotations

import numpy as np

from keyhole.errors import UsageError
from keyhole.families.attention_layer import AttentionLayer

# Coordinates that the construction itself needs.
RESERVED = 2
# β: steps are so sharp that what is left of a parity is within a few thousandths of it.
SHARPNESS = 3.0


def parity_layer(
    width: int, heads: int, rng: np.random.Generator, sharpness: float = SHARPNESS, *, control: bool = False
) -> tuple[AttentionLayer, tuple[int, ...]]:
    """A layer of the family with one output, and the coordinates S of its parity."""
    if heads > width - RESERVED:
        raise UsageError(
            f"a parity of {heads} coordinates needs tokens of width {heads + RESERVED} or more, not {width}"
        )
    chosen = np.sort(rng.choice(np.arange(RESERVED, width), size=heads, replace=False))
    thresholds = np.arange(-(heads - 1), heads, 2)
    scores = np.zeros((heads, width, width))
    scores[:, chosen, 0] = sharpness
    scores[:, 1, 0] = -sharpness * thresholds
    projections = np.zeros((heads, width, 1))
    projections[:, 0, 0] = 1.0 if control else (-1.0) ** np.arange(heads)
    return AttentionLayer(scores, projections), tuple(int(each) for each in chosen)
