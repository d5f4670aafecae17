"""A head observed at all positions: every token acts as the last one, so that one query reads a form for each.

[A·q; 0; γ·p_1; …; γ·p_d]: at the zero token attention is uniform and tells the value of A·q; at γ·p_j the weight of
A·q tells qᵀ·W·p_j, because the other tokens are too short to matter. d queries read everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np

from keyhole.arrays import Array
from keyhole.methods.base import Steps
from keyhole.methods.forms.columns import Score, score_of_columns
from keyhole.methods.forms.scale import NORM_RATIO, floor_power
from keyhole.methods.forms.value import LOUD, Value
from keyhole.numerics.orthogonal import random_orthogonal
from keyhole.queries import Measurements, Plan, Position, Signature, Term, TokenRows

# Every direction appears at these sizes, so that heavy tails cost no query: the largest that does not saturate counts.
SIZES = (1.0, 2.0**-4, 2.0**-8)
LARGEST = 6.0
# One probe asks for the scale over 28 decades at once, a few directions each.
PROBE_DECADES = range(-14, 15, 2)
PROBE_DIRECTIONS = 4
PROBE_NORM = 2.0**56


@dataclass(frozen=True)
class AllPositions:
    """All that was read at all positions."""

    value: Value
    score: Score
    longest: int  # tokens of the longest sequence


def ask_positions(signature: Signature, rng: np.random.Generator) -> Steps[AllPositions | None]:
    """Value and score from d + 4 queries; None where this does not work: score biases, masks, short sequences."""
    width, space = signature.width, signature.space
    longest = 2 + len(SIZES) * width
    probed = 2 + len(PROBE_DECADES) * min(PROBE_DIRECTIONS, width)
    room = signature.max_length or math.inf
    if signature.max_norm is not None or signature.noise.kind != "exact" or room < max(longest, probed):
        return None
    reading = _Positions(signature, rng)
    if (yield from reading.ask_for_bias()):
        return None
    scale = yield from reading.ask_scale()
    if scale is None:
        return None
    first = NORM_RATIO * floor_power(math.sqrt(scale))
    ends = [TokenRows(reading.right * (size * scale / first)) for size in SIZES]
    every = space.indices(range(width))
    tails: list[Position] = [[Term(rows, every * 0 + place)] for rows in ends for place in range(width)]
    answers: Measurements = yield Plan("forms", width, [[Term(reading.left, every, first)], [], *tails])
    return reading.solve(reading.flat(answers), first, scale, longest)


@final
class _Positions:
    def __init__(self, signature: Signature, rng: np.random.Generator) -> None:
        self.signature, self.space = signature, signature.space
        width = signature.width
        self.left = TokenRows(random_orthogonal(self.space, rng, width))
        self.right = random_orthogonal(self.space, rng, width)
        self.scalar = False
        self.bias: Array = self.space.zeros(1)

    def flat(self, answers: Measurements) -> Array:  # (n, length) or (n, length, outputs) -> (n, length, outputs)
        """Answers with an axis for outputs, without their bias."""
        self.scalar = answers.values.ndim == 2
        return (answers.values[..., None] if self.scalar else answers.values) - self.bias

    def ask_for_bias(self) -> Steps[bool]:
        """Whether tokens are attracted by themselves, or hidden from earlier ones by a causal mask.

        A zero token after [x; −x; 0] answers the output bias, however long x, unless a score bias attracts x or repels
        it; and before x it does not, unless it cannot see x.
        """
        space, xp, width = self.space, self.space.xp, self.signature.width
        one = space.indices([0])
        pairs = [
            Plan("value", 1, [[Term(self.left, one, norm)], [Term(self.left, one, -norm)], [], []])
            for norm in (LOUD, 4 * LOUD)
        ]
        pair, longer, behind = yield [*pairs, Plan("scale", 1, [[], [Term(self.left, one, LOUD)]])]
        self.bias = self.flat(pair)[0, 3, :] + self.bias
        attracted = float(xp.max(xp.abs(self.flat(longer)[0, 3, :])))
        seen = float(xp.max(xp.abs(self.flat(behind)[0, 0, :])))
        noise = 4 * width * space.eps * (float(xp.max(xp.abs(self.bias))) + space.tiny)
        return attracted > noise or seen <= noise

    def ask_scale(self) -> Steps[float | None]:
        """The scale that brings logits to order one; None when token norms cannot attain it."""
        space, xp = self.space, self.space.xp
        count = min(PROBE_DIRECTIONS, self.signature.width)
        one = space.indices([0])
        positions: list[Position] = [[Term(self.left, one, PROBE_NORM)], []]
        for decade in PROBE_DECADES:
            ends = TokenRows(self.right[:count, :] * (10.0**decade / PROBE_NORM))
            positions += [[Term(ends, one + place)] for place in range(count)]
        answers: Measurements = yield Plan("scale", 1, positions)
        logits, _ = self._logits(self.flat(answers), PROBE_NORM)
        sizes = xp.reshape(logits, (len(PROBE_DECADES), count))
        best = None
        for number, decade in enumerate(PROBE_DECADES):
            size = float(xp.linalg.vector_norm(sizes[number, :])) / count**0.5
            if 2.0**8 * space.eps < size < LARGEST / 2:  # false for nan
                best = floor_power(10.0**decade / size)
        return best

    def _logits(self, answers: Array, first: float) -> tuple[Array, Array]:  # (n, length, outputs) -> (n, length − 2)
        """Logits at the short tokens and their radii; nan where the long one has no weight or all of it."""
        xp, others = self.space.xp, answers.shape[1] - 1
        plain = answers[:, 1, :]  # uniform attention
        square = xp.sum(plain**2, axis=1)[:, None]
        safe = xp.where(square == 0, xp.ones_like(square), square)
        weights = xp.sum(answers[:, 2:, :] * plain[:, None, :], axis=2) / safe / (others + 1)
        good = (weights > 0) & (weights < 1) & (square > 0)
        weights = xp.where(good, weights, 0.5 * xp.ones_like(weights))
        logits = xp.where(good, xp.log(weights / (1 - weights)) + math.log(others), xp.nan * weights)
        own = xp.sqrt(safe) * (others + 1) / first  # |q·V|
        value = xp.max(own)  # rounding is relative to the value, not to the row's share of it
        weight_radius = 2 * self.space.rounding * value * self.signature.width**0.5 / own + 2 * self.space.eps
        return logits, weight_radius / (1 - weights) + self.space.rounding * xp.abs(logits)

    def solve(self, answers: Array, first: float, scale: float, longest: int) -> AllPositions | None:
        """Value and score from all rows; None where some forms saturate at all sizes."""
        xp, space, width = self.space.xp, self.space, self.signature.width
        logits, radius = self._logits(answers, first)
        forms, radii = logits[:, :width] / scale, radius[:, :width] / scale
        for number, size in enumerate(SIZES[1:], start=1):
            part = slice(number * width, (number + 1) * width)
            saturated = ~(xp.abs(forms * (scale * SIZES[number - 1])) <= LARGEST)  # also nan
            forms = xp.where(saturated, logits[:, part] / (scale * size), forms)
            radii = xp.where(saturated, radius[:, part] / (scale * size), radii)
        if not bool(xp.all(xp.isfinite(forms))):
            return None
        rows = answers[:, 1, :] * (longest / first)  # q·V
        left = self.left.vectors
        score = score_of_columns(space, left.T, forms, radii, self.right)
        vector = left.T @ rows
        sizes = xp.linalg.vector_norm(vector, axis=0)
        rounded = space.eps * xp.abs(self.bias) * (longest / first)  # the bias drowns what is below it
        vector_radius = 2 * space.rounding * sizes[None, :] + 4 * rounded[None, :] + 0 * vector
        bias_radius = space.eps * xp.abs(self.bias)
        if self.scalar:
            value = Value(vector[:, 0], vector_radius[:, 0], self.bias[0], bias_radius[0])
        else:
            value = Value(vector, vector_radius, self.bias, bias_radius)
        return AllPositions(value, score, longest)
