"""Several logits per query, for heads with several outputs: [A·q_1; …; A·q_ρ; zeros; last token].

An answer of ρ independent numbers tells the softmax weights of ρ tokens apart, and the ratio of each to the weight of a
zero token, whose logit and value are nothing, is the exponential of its logit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from keyhole.arrays import Array, Integers, namespace
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.outputs import Outputs, choose_outputs, window_rows
from keyhole.methods.forms.reader import ScoreBias, longest_token, norms_beside_bias
from keyhole.methods.forms.scale import NORM_RATIO, ScaleEstimate, floor_power
from keyhole.methods.forms.value import Value
from keyhole.numerics.orthogonal import random_orthogonal, split_along
from keyhole.queries import Measurements, Plan, Signature, Term, TokenRows
from keyhole.recovery import Outcome

# A logit beyond this is read again with a shorter last token.
LARGEST = 8.0
SHRINK = 2.0**-3
# Norm of the last token over that of the first, at most, where answers have less than full rank.
LONGEST_LAST = 0.5

# Asks at a scale: which queries, or directions, of these numbers are not saturated, their forms and radii.
AskAt = Callable[[Integers, float], Steps[tuple[Array, Array, Array]]]


@dataclass(frozen=True)
class Weights:
    """Softmax weights from a batch of answers, given the last tokens' own logits."""

    first: Array  # (n, used) weights of the long tokens where the last token has none
    share: Array  # (n, used) how much of that a unit of the last token's weight takes
    radius: Array  # (n, used) radii of `first`
    sum_radius: Array  # (n,) radius of its sum

    def logits(self, own: Array, zeros: int) -> tuple[Array, Array, Array]:
        """Logits (n, used), their derivatives by the last token's own logit, and radii; nan where saturated."""
        xp = namespace(self.first)
        last = xp.exp(own)[:, None]
        free = 1 - xp.sum(self.share, axis=1, keepdims=True)
        total = zeros + last * free
        zero = (1 - xp.sum(self.first, axis=1, keepdims=True)) / total
        weights = self.first - self.share * last * zero
        good = (weights > 0) & (zero > 0)
        one = xp.ones_like(weights)
        safe, safe_zero = xp.where(good, weights, one), xp.where(good, zero + 0 * weights, one)
        slope = -last * free / total
        logits = xp.where(good, xp.log(safe / safe_zero), xp.nan * one)
        slopes = -self.share * last * zero * (1 + slope) / safe - slope
        # The oracle's own weights sum to one but for a few eps, which the zero tokens' share magnifies.
        own = 8 * float(xp.finfo(weights.dtype).eps)
        radius = self.radius / safe + own + (self.sum_radius[:, None] + own) / (safe_zero * total)
        return logits, slopes, radius


@final
class WindowReader:
    """Reads the forms of `used` neighbouring rows with a last token, one query each."""

    def __init__(self, signature: Signature, value: Value, rng: np.random.Generator) -> None:
        self.signature = signature
        self.estimate = ScaleEstimate()
        space, xp = signature.space, signature.space.xp
        self.space = space
        self.value = value
        self.outputs: Outputs = choose_outputs(space, value.vector, even=True, radius=value.radius)
        self.used = self.outputs.used
        self.rows = TokenRows(window_rows(space, rng, self.outputs.basis))
        self.inverse = self.rows.vectors.T
        # About √ρ zero tokens keep the error of their weight below that of the others.
        self.zeros = max(1, round(math.sqrt(self.used)))
        self.bias: ScoreBias | None = None
        self.bias_norm = 0.0
        norm = float(xp.linalg.vector_norm(value.vector))
        self.longest = longest_token(space, norm)
        self.largest_scale = floor_power(self.longest / NORM_RATIO) ** 2

    def expect_bias(self, bias: ScoreBias, rng: np.random.Generator) -> None:
        """From now on expect this score bias."""
        self.bias = bias
        self.bias_norm = float(self.space.xp.linalg.vector_norm(bias.vector))
        self.estimate = ScaleEstimate()
        if self.used == self.signature.width > 1:
            # With one window for all rows they are free: all but one orthogonal to the bias may be long.
            across, along = split_along(self.space, random_orthogonal(self.space, rng, self.used), bias.vector)
            self.rows = TokenRows(self.space.xp.concat([across, along[None, :]]))
            self.inverse = self.rows.vectors.T

    def first_norms(self, scale: float) -> Array:  # (width,)
        """How long the token of each row is."""
        width = self.signature.width
        if self.bias is None:
            return self.space.full((width,), NORM_RATIO * floor_power(math.sqrt(scale)))
        root = math.sqrt(width)
        if self.used < width:  # windows share a norm, or they would be badly conditioned
            return self.space.full((width,), min(0.5 * root / self.bias_norm, self.longest))
        longest = min(max(2 * math.sqrt(scale * root), 0.5 * root / self.bias_norm), 16.0 * root / self.bias_norm)
        return norms_beside_bias(longest, self.rows.vectors @ self.bias.vector)

    @property
    def scale(self) -> float:
        """The product of norms that brings logits to their aim."""
        if self.bias is None:
            return self.estimate.next_scale(self.largest_scale)
        longest, largest = float(self.space.xp.max(self.first_norms(self.largest_scale))), self.largest_scale
        if self.used < self.signature.width:
            # Answers of less than full rank tell what a last token adds only while it is short.
            largest = min(largest, floor_power(LONGEST_LAST * longest**2))
        return self.estimate.next_scale(largest, longest, self.signature.width)

    def ask_unsaturated(self, numbers: Integers, ask: AskAt, forms: Array, radius: Array) -> Steps[None]:
        """Fill rows of forms and radii by `ask` at a scale, again with shorter last tokens where weights saturate."""
        space, xp, scale = self.space, self.space.xp, self.scale
        while numbers.size:
            if scale < space.tiny**0.5:
                raise Unrecoverable(Outcome.SATURATED, f"{numbers.size} queries stayed saturated at every token norm")
            good, solved, errors = yield from ask(numbers, scale)
            (kept,), (lost,) = xp.nonzero(good), xp.nonzero(~good)
            forms[space.indices(numbers)[kept], :] = solved[kept, :]
            radius[space.indices(numbers)[kept], :] = errors[kept, :]
            self.estimate.update(xp.reshape(solved[kept, :], (-1,)), scale)
            numbers = numbers[np.asarray([int(number) for number in lost], dtype=np.int64)]
            scale = scale * SHRINK

    def ask(
        self,
        stage: str,
        offsets: Integers,  # (n,) the first row of each query's window
        directions: TokenRows,
        index: Integers,  # (n,) which direction the last token takes
        first: Array,  # (width,) norms of the long tokens by row
        last: Array,  # (n,) norms of the last tokens
    ) -> Steps[Weights]:
        """Ask one query for each window and last token."""
        space, xp = self.space, self.space.xp
        width, picked = self.signature.width, space.indices(index)
        rows = (offsets[:, None] + np.arange(self.used)) % width
        positions: list[list[Term]] = []
        for place in range(self.used):
            number = space.indices(rows[:, place])
            positions.append([Term(self.rows, number, xp.take(first, number, axis=0))])
        positions += [[]] * (self.zeros - 1)
        positions.append([Term(directions, picked, last)])
        answers: Measurements = yield Plan(stage, offsets.size, positions)

        windows, which = np.unique(offsets, return_inverse=True)
        tokens = self.rows.vectors * first[:, None]
        spread = space.indices((windows[:, None] + np.arange(self.used)) % width)
        long = xp.reshape(xp.take(tokens, xp.reshape(spread, (-1,)), axis=0), (windows.size, self.used, width))
        inverse = xp.linalg.inv(long @ self.outputs.in_outputs)  # (windows, used, used)
        mine = xp.take(inverse, space.indices(which), axis=0)
        mixture = self.outputs.mixture(answers.values - self.value.bias)
        ends = (last[:, None] * xp.take(directions.vectors, picked, axis=0)) @ self.outputs.in_outputs
        radii, sum_radii = self._radii(inverse, float(xp.max(first)), float(xp.max(last)), answers.radius)
        return Weights(
            (mixture[:, None, :] @ mine)[:, 0, :],
            (ends[:, None, :] @ mine)[:, 0, :],
            xp.take(radii, space.indices(which), axis=0),
            xp.take(sum_radii, space.indices(which), axis=0),
        )

    def _radii(self, inverse: Array, first: float, last: float, noise: float) -> tuple[Array, Array]:
        """Radii of weights by window (windows, used), and of their sums (windows,)."""
        xp, space = self.space.xp, self.space
        # Beside a large output bias a value is known less well than it is rounded.
        known = xp.sqrt((space.rounding * self.outputs.error) ** 2 + xp.sum(self.value.radius**2, axis=0))
        error = (first + last) * known + noise
        error = error + 2 * space.eps * xp.abs(self.value.bias) + self.value.bias_radius
        weigh = (self.outputs.turn / self.outputs.sizes)[None, :, :] @ inverse  # (windows, outputs, used)
        square, sums = (error**2)[None, :], xp.sum(weigh, axis=2)
        # The decomposition of the value is rounded too, relative to its largest part.
        own = (space.rounding * (first + last) * self.outputs.sizes[0] / self.outputs.sizes)[None, :] ** 2
        radii = xp.sum(square[:, :, None] * weigh**2, axis=1) + xp.sum(own[:, :, None] * inverse**2, axis=1)
        sum_radii = xp.sum(square * sums**2, axis=1) + xp.sum(own * xp.sum(inverse, axis=2) ** 2, axis=1)
        return xp.sqrt(radii), xp.sqrt(sum_radii)


def windows(reader: WindowReader) -> Integers:
    """Offsets of windows that cover all rows; the last may overlap the one before."""
    width, used = reader.signature.width, reader.used
    offsets = np.arange(-(-width // used), dtype=np.int64) * used
    offsets[-1] = width - used
    return offsets
