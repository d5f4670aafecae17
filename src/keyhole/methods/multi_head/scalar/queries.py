"""Queries of two tokens that differ by a multiple of one row: what every stage of reading several heads asks.

The query [T·u₀ + A·u + g; g] answers b + g·v̄ + Σ_h (T·u₀ + A·u)·v_h · σ(T·u₀ᵀ(W_h·g + c_h) + A·uᵀ(W_h·g + c_h)) with
v̄ = Σ v_h, since what both tokens share drops out. Only products of norms enter the logits: for g = R·point the
scale T·R of the common row u₀ and the scale A·R of the other row u. A level is an answer without the known part,
over T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Booleans, Floats, floats
from keyhole.methods.base import Steps
from keyhole.methods.forms.value import Value
from keyhole.queries import Measurements, Plan, Position, Signature, Term, TokenRows

# Without score biases first tokens are longer than last ones by about this over the square root of the scale, so that
# the last tokens' own values cost no digits.
RATIO = 2.0**40
# Levels are read where the known part of an answer is at most this many times what one row may have of the values.
LARGEST_KNOWN = 2.0**10


@dataclass(frozen=True)
class Scope:
    """What all queries share."""

    signature: Signature
    total: Value  # the sum of all values, and the output bias
    row: Floats  # (width,) u₀, of unit length
    mix: Floats  # (outputs,) the combination of the outputs in which jumps are searched
    radius: float | None = None  # R where heads have score biases; None: follows from the scale
    uniform: float = 0.0  # u₀·v of the heads of equal weights, in that combination
    value_norm: float = 0.0  # a bound on the norms of all values together, in that combination

    @property
    def size(self) -> int:
        """Coordinates of a point: the last is one where there are score biases."""
        return self.signature.width + (self.radius is not None)

    @property
    def vector(self) -> Floats:  # (width, outputs)
        """The sum of all values."""
        return columns(floats(self.total.vector))

    def norms(self, scale: Floats) -> tuple[Floats, Floats]:  # (n,) -> (n,), (n,)
        """T and R, exact multiples of powers of two."""
        if self.radius is not None:
            short = np.full(scale.shape, self.radius)
        else:
            short = np.exp2(np.floor(np.log2(scale / RATIO) / 2))
        return scale / short, short

    def plan(
        self,
        stage: str,
        scale: Floats,  # (n,)
        points: Floats,  # (n, size)
        row_scale: Floats | None = None,  # (n,)
        rows: Floats | None = None,  # (n, width)
        copies: tuple[int, int] = (1, 1),
    ) -> Plan:
        """The queries, with the first or the last token repeated."""
        space = self.signature.space
        long, short = self.norms(scale)
        base = TokenRows(space.asarray(self.row[None, :]))
        last = [Term(TokenRows(space.asarray(points[:, : self.signature.width])), None, space.asarray(short))]
        first = [Term(base, space.indices(np.zeros(scale.size)), space.asarray(long)), *last]
        if rows is not None and row_scale is not None:
            first.insert(1, Term(TokenRows(space.asarray(rows)), None, space.asarray(row_scale / short)))
        positions: Sequence[Position] = [first] * copies[0] + [last] * copies[1]
        return Plan(stage, int(scale.size), positions)

    def levels(self, answers: Measurements, scale: Floats, points: Floats) -> Floats:  # -> (n, outputs)
        """Answers without what the last tokens and the output bias add, over T."""
        long, short = self.norms(scale)
        last = points[:, : self.signature.width] * short[:, None]
        known = last @ self.vector + np.ravel(floats(self.total.bias))
        return np.asarray((columns(floats(answers.values)) - known) / long[:, None])

    def ask(
        self,
        stage: str,
        scale: Floats,
        points: Floats,
        row_scale: Floats | None = None,
        rows: Floats | None = None,
        copies: tuple[int, int] = (1, 1),
    ) -> Steps[Floats]:
        """The levels of queries, (n, outputs)."""
        answers: Measurements = yield self.plan(stage, scale, points, row_scale, rows, copies)
        return self.levels(answers, scale, points)

    def is_clear(self, scale: Floats) -> Booleans:  # (n,)
        """At which scales the part of an answer that is known beforehand leaves digits for the first token's."""
        long, short = self.norms(scale)
        own = float(np.linalg.norm(self.vector @ self.mix))
        return np.asarray(
            short * own + abs(float(np.ravel(floats(self.total.bias)) @ self.mix)) <= LARGEST_KNOWN * long * own
        )

    @property
    def level_radius(self) -> float:
        """How far a level in the combination may be off: roundings of the tokens, of their values and of the sum."""
        known = float(np.linalg.norm(columns(floats(self.total.radius)) @ np.abs(self.mix)))
        return 2 * self.signature.space.rounding * self.value_norm + known

    def known_error(self, scale: Floats, mix: Floats) -> Floats:  # (n,), (outputs,) -> (n,)
        """How far a level in some combination may be off because of last tokens, of norm R, and the output bias."""
        long, short = self.norms(scale)
        rounded, size = self.signature.space.rounding, np.abs(mix)
        own = rounded * np.linalg.norm(self.vector @ mix) + np.linalg.norm(columns(floats(self.total.radius)) @ size)
        bias, bias_radius = np.ravel(floats(self.total.bias)), np.ravel(floats(self.total.bias_radius))
        return np.asarray((short * own + (rounded * np.abs(bias) + bias_radius) @ size) / long)

    def with_values_of(self, levels: Floats) -> Scope:  # (n,) in the combination
        """A scope with as large values as these levels make likely: each is one unit row's share of them."""
        own = float(np.linalg.norm(self.vector @ self.mix))
        largest = float(np.max(np.abs(levels), initial=0.0))
        return replace(self, value_norm=max(self.value_norm, own, 2 * self.signature.width**0.5 * largest))


def columns(array: Floats) -> Floats:  # (n,) or (n, outputs) -> (n, outputs)
    """With an axis for outputs."""
    return array[:, None] if array.ndim == 1 else array
