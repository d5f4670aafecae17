"""Values and threshold from labels of single tokens, up to one positive factor, where tokens may be of any norm."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Booleans, Floats, Integers
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.labels.comparisons import TURNS, Comparer
from keyhole.methods.labels.search import Prior
from keyhole.queries import Position, Term, TokenRows
from keyhole.recovery import Outcome

# Ratios of values are known this well before their root mean square sets the cells.
COARSE = 1.0 / 16.0
# Cells are at least so many spacings of the largest number, below which arithmetic decides.
SPACINGS = 16.0


@dataclass(frozen=True)
class LabelValue:
    """Values over the largest of them, and the threshold in the same unit."""

    matrix: Floats  # (width,)
    radius: Floats  # (width,)
    pivot: int  # whose value is 1 or −1
    threshold: float = 0.0
    threshold_radius: float = 0.0
    bits: float = 0.0  # of what was found, by counting cells


class Tokens:
    """Unit tokens and their multiples, which are longer than any threshold by a power of two."""

    def __init__(self, comparer: Comparer) -> None:
        self.comparer, self.space = comparer, comparer.space
        self.width = comparer.signature.width
        self.units = TokenRows(self.space.eye(self.width))
        wide = self.space.huge > 2.0**1000
        self.bound = comparer.signature.norm_limit
        # Tokens this long hide a threshold, and are beside those this short as if these were not there.
        self.long_norm = 2.0 ** (100 if wide else int(0.315 * np.log2(self.space.huge)))
        self.range = 100.0 if wide else 30.0  # exponents of scales that are looked for, up and down
        if self.bound < np.inf:
            self.long_norm = 0.5 * self.bound

    def long(self, factor: float) -> float:
        """The norm of long tokens, changed by a factor: shorter where it is bounded."""
        return self.long_norm * factor if self.bound == np.inf else self.long_norm / factor

    def term(self, index: Integers, scale: Floats | float) -> Term:
        """Multiples of unit tokens, one per query."""
        scales = np.broadcast_to(np.asarray(scale, float), index.shape)
        return Term(self.units, self.space.indices(index), self.space.asarray(np.array(scales)))


def ask_value(tokens: Tokens, signs: Floats, accuracy: float) -> Steps[LabelValue]:  # (width,), 0 of no value
    """Ratios of values by bisection on tokens s_i·e_i − r·s_k·e_k, after a tournament for the largest, k."""
    if not np.any(signs):
        raise Unrecoverable(
            Outcome.INCONSISTENT,
            "labels contradict each other: some change with the sign of a token, but with that of no unit token",
        )
    comparer, width = tokens.comparer, tokens.width
    pivot = yield from _ask_largest(tokens, signs)
    others = np.flatnonzero((np.arange(width) != pivot) & (signs != 0))

    def make(rows: Integers, at: Floats, factor: float) -> tuple[list[Position], Floats]:
        long = factor * tokens.long_norm
        own = tokens.term(others[rows], long * signs[others[rows]])
        return [[own, tokens.term(np.full(rows.size, pivot), -long * at * signs[pivot])]], np.ones(rows.size)

    search = comparer.search(Prior(0.0, 1.0), others.size)
    vector, radius = np.zeros(width), np.zeros(width)
    vector[pivot] = signs[pivot]
    cell = 2 * accuracy
    if others.size:
        if not comparer.flip_rate:
            yield from comparer.bisect("values", search, make, COARSE)
            rms = float(np.sqrt((1 + np.sum(search.centres**2)) / width))
            cell = 2 * accuracy * max(rms, 0.5 / width**0.5)
        else:
            cell = 2 * accuracy / width**0.5
        cell = max(cell, SPACINGS * tokens.space.eps)
        yield from comparer.bisect("values", search, make, cell)
        vector[others], radius[others] = signs[others] * search.centres, search.radii
    radius = radius + tokens.space.rounding * np.linalg.norm(vector)
    bits = np.log2(2 * width) + (width - 1) * np.log2(2 / cell)
    return LabelValue(vector, radius, pivot, bits=float(bits))


def _ask_largest(tokens: Tokens, signs: Floats) -> Steps[int]:
    """The value of the largest size, by a tournament: sizes are compared on tokens s_i·e_i − s_j·e_j."""
    left = np.flatnonzero(signs)
    while left.size > 1:
        half = left.size // 2
        one, two = left[:half], left[half : 2 * half]

        def make(rows: Integers, factor: float, one: Integers = one, two: Integers = two) -> list[Position]:
            long = factor * tokens.long_norm
            terms = ((one[rows], long), (two[rows], -long))
            return [[tokens.term(index, scale * signs[index]) for index, scale in terms]]

        first: Booleans = yield from tokens.comparer.decide("values", make, half)
        left = np.concatenate([np.where(first, one, two), left[2 * half :]])
    return int(left[0])


def ask_threshold(tokens: Tokens, value: LabelValue, accuracy: float) -> Steps[LabelValue]:
    """The threshold over the largest value, by bisection along the token of that: its exponent first."""
    comparer, sign = tokens.comparer, value.matrix[value.pivot]

    def at(scale: Floats, factor: float = 1.0) -> list[Position]:
        # Copies of one token are answered like the token, and are another query.
        copies = min(1 + int(np.log2(factor)), comparer.signature.max_length or TURNS)
        return [[tokens.term(np.full(scale.size, value.pivot), scale * sign)]] * copies

    tiny = 2.0 ** (-3 * tokens.range)
    both = np.array([tiny, -tiny])
    yes = yield from comparer.decide("threshold", lambda rows, factor: at(factor * both[rows]), 2)
    if yes[0] and not yes[1]:
        return LabelValue(value.matrix, value.radius, value.pivot, 0.0, 2 * tiny * 2.0**16, value.bits + 2)
    side = -1.0 if yes[0] else 1.0  # of zero on which the threshold lies

    def sized(_: Integers, exponents: Floats, factor: float) -> tuple[list[Position], Floats]:
        return at(side * np.exp2(exponents), factor), np.full(
            1, -side
        )  # the exponent is larger where the label is not reached

    search = comparer.search(Prior(-3 * tokens.range, tokens.range), 1)
    yield from comparer.bisect("threshold", search, sized, 1.0)
    low, high = (float(np.exp2(each[0])) for each in search.best)

    def fine(_: Integers, sizes: Floats, factor: float) -> tuple[list[Position], Floats]:
        return at(side * sizes, factor), np.full(1, -side)

    search = comparer.search(Prior(low, high), 1)
    cell = 2 * max(accuracy, SPACINGS * tokens.space.eps) * low
    yield from comparer.bisect("threshold", search, fine, cell)
    size, radius = float(search.centres[0]), float(search.radii[0])
    radius += 8 * tokens.space.rounding * size
    bits = value.bits + np.log2(8 * tokens.range) + np.log2((high - low) / cell)
    return LabelValue(value.matrix, value.radius, value.pivot, side * size, radius, float(bits))
