"""Answers with any errors of at most τ: which queries make the radii least, and what is certain of the score."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keyhole.arrays import Floats, Integers
from keyhole.methods.robust.bounded.interval import Interval, PairLayout

EPS = float(np.finfo(np.float64).eps)
# More than what a few roundings in float64 add to a norm or a bound.
SAFE = 1 + 1e-9
# tan of the angle between a row and the value: √2 makes the radius of an entry least, see `leaning_rows`.
BEST_TANGENT = math.sqrt(2)
STEEPEST_TANGENT = 1e3
# The diagonal of the score matrix acts back on its own readings; below this factor that is a contraction.
CONTRACTION = 0.9
CONTRACTIONS = 200  # so many squeeze an interval by 0.9²⁰⁰ = 1e-9
# Going round once more must gain this part of an interval.
LEAST_GAIN = 1e-3
# Roundings of an oracle beyond one for each number of an inner product and each token of a sequence.
EXTRA_ROUNDINGS = 8


@dataclass(frozen=True, eq=False)
class BoundedValue:
    """The value of tokens as read: entries, and the one output that the score is read from."""

    vector: Floats  # (width, outputs)
    radius: Floats  # (width, outputs)
    hidden_bias: Floats  # (outputs,) largest output bias that would not have shown

    @property
    def output(self) -> int:
        """The output of the longest value.

        The errors of outputs may add up, so no combination of outputs shows more for its error.
        """
        return int(np.argmax(np.linalg.norm(self.vector, axis=0)))

    @property
    def used(self) -> Interval:
        """Entries of the output in use, (width,)."""
        return Interval.around(self.vector[:, self.output], self.radius[:, self.output])

    @property
    def norm(self) -> float:
        """At least the norm of the output in use."""
        return float(np.linalg.norm(self.used.size)) * SAFE

    @property
    def direction(self) -> Floats:
        """Along the output in use, (width,)."""
        vector = self.vector[:, self.output] / np.max(np.abs(self.vector[:, self.output]))
        return np.asarray(vector / np.linalg.norm(vector))


def leaning_rows(direction: Floats) -> tuple[Floats, Floats, Floats]:  # (width,) -> (2·width,), (2·width,), (width,)
    """Unit vectors part·v̂ + height·e_a for the direction v̂ of the value, by part and height.

    First those of least radius, then steeper ones for the diagonal; of these also the length of g over that of others.

    A row x_a at an angle φ to v̂ gives W_ab, by e_a = (x_a − p·v̂)/r, with a radius of |1/r|/cos φ + |p/r|. That is
    least at tan φ = √2, or at e_a itself if that is nearer to v̂. A steeper row leans less on v̂, so that with a shorter
    g the diagonal entries are a contraction; of all such pairs of angle and length this takes that of least radius.
    """
    share, sign = np.abs(direction), np.where(direction < 0, -1.0, 1.0)
    across = np.sqrt(np.maximum(1 - share**2, 0.0))
    nearest = np.divide(across, share, out=np.full_like(share, np.inf), where=share > 0)  # tan of the angle of e_a
    part, height = _at_angle(share, across, np.minimum(BEST_TANGENT, nearest))
    tangents = np.minimum(np.geomspace(BEST_TANGENT, STEEPEST_TANGENT, 400)[:, None], nearest)  # (400, width)
    steep_part, steep_height = _at_angle(share, across, tangents)
    own, first = 1 / steep_height, np.abs(steep_part) / steep_height
    shorter = np.minimum(1.0, (CONTRACTION / SAFE - first) / own)
    with np.errstate(divide="ignore"):
        cost = np.where(shorter > 0, own * np.hypot(1.0, tangents) / np.maximum(shorter, 0.0) + first, np.inf)
    best = np.argmin(cost, axis=0), np.arange(len(share))
    heights = np.concatenate([height * sign, steep_height[best] * sign])
    return np.concatenate([part, steep_part[best]]), heights, shorter[best]


def _at_angle(share: Floats, across: Floats, tangent: Floats) -> tuple[Floats, Floats]:
    """The unit vector part·v̂ + height·e at an angle to v̂, or e itself where the angle is that of e."""
    cosine = 1 / np.hypot(1.0, tangent)
    with np.errstate(all="ignore"):
        height = tangent * cosine / across
        part = cosine - height * share
    itself = tangent * share >= across / SAFE
    return np.where(itself, 0.0, part), np.where(itself, 1.0, height)


@dataclass(frozen=True, eq=False)
class PairDesign:
    """First tokens: x_0 along the value, and for every entry a of a token two rows x_a, so that e_a takes x_a and x_0.

    Rows 1 … width are those of least radius, rows width + 1 … 2·width the steeper ones for the diagonal.
    """

    rows: Floats  # (2·width + 1, width) as the oracle gets them
    own: Floats  # (2·width,) e_a = own[a]·x_a + first[a]·x_0
    first: Floats  # (2·width,)
    shorter: Floats  # (width,) length of g with a steeper row over that of other last tokens
    overlap: Interval  # (2·width + 1,) x·v
    tilt: Interval  # (2·width + 1,) x·score_bias, zero unless a hidden bias is to be covered
    bias: Interval  # (width,) entries of the score bias

    @property
    def norm(self) -> float:
        """At least the norm of any row."""
        return float(np.max(np.linalg.norm(self.rows, axis=1))) * SAFE

    @property
    def margin(self) -> float:
        """The least value of a first token over its uncertainty."""
        return float(np.min(self.overlap.middle / self.overlap.radius))


class ScoreTable:
    """Answers to sequences of x_k, −x_k and s·e_b by row k and column b, each with the scale s it was asked at."""

    def __init__(self, value: BoundedValue, design: PairDesign, layout: PairLayout, eps: float) -> None:
        self.value, self.design, self.layout = value, design, layout
        self.width = design.rows.shape[1]
        self.answers, self.radius, self.scale = (np.full(design.rows.shape, np.nan) for _ in range(3))
        # e_a = own·x_a + first·x_0 but for the rounding of the tokens, and that of this difference.
        leaning = design.rows[1 : 2 * self.width + 1]
        made, others = design.own[:, None] * leaning, design.first[:, None] * design.rows[:1]
        lost = np.linalg.norm(np.tile(np.eye(self.width), (2, 1)) - made - others, axis=1)
        self.lost = (lost + 4 * EPS * np.linalg.norm(np.abs(made) + np.abs(others), axis=1)) * SAFE  # (2·width,)
        self.rounding = (self.width + EXTRA_ROUNDINGS) * eps  # of a logit, over the norms of its tokens and of W

    def add_rows(self, rows: Floats, overlap: Interval) -> Integers:  # (n, width), (n,) -> (n,)
        """Make room for further first tokens of these values; their numbers."""
        number = len(self.design.rows) + np.arange(len(rows))
        nothing = Interval(np.zeros(len(rows)), np.zeros(len(rows)))
        self.design = replace(
            self.design,
            rows=np.concatenate([self.design.rows, rows]),
            overlap=self.design.overlap.beside(overlap),
            tilt=self.design.tilt.beside(nothing),
        )
        room = np.full(rows.shape, np.nan)
        self.answers, self.radius, self.scale = (
            np.concatenate([each, room]) for each in (self.answers, self.radius, self.scale)
        )
        return number

    def entries_to_ask(self) -> tuple[Integers, Integers]:
        """Rows and columns there are answers to, without the steeper rows."""
        known = np.isfinite(self.scale)
        known[self.width + 1 : 2 * self.width + 1] = False
        row, column = np.nonzero(known)
        return row.astype(np.int64), column.astype(np.int64)

    def forms(self, row: Any, column: Any, diagonal: Interval, size: Floats | None = None) -> Interval:
        """Forms x_k·W·e_b, given the diagonal entries of W and bounds (width,) on the norms of its columns."""
        scale, design = self.scale[row, column], self.design
        rounding = 0.0 if size is None else self.rounding * size[column] * scale
        answers = Interval.around(self.answers[row, column], self.radius[row, column])
        own = diagonal[column].times(scale**2).widen((rounding + design.bias[column].size) * scale)
        last = self.value.used[column].times(scale)
        logits = self.layout.logit(answers, own, design.overlap[row], last).widen(rounding * design.norm)
        return (logits + design.tilt[row].times(-1.0)).over(scale)

    def diagonal(self, size: Floats | None = None) -> Interval:  # (width,) -> (width,)
        """The diagonal entries W_bb = own·(x_b·W·e_b) + first·(x_0·W·e_b), where both forms depend on W_bb itself.

        A logit moves by at most as much as the logit s²·W_bb of the last token, so that the map from W_bb to W_bb
        is a contraction if Σ |weight|·s < 1, which gives a first interval; going round shrinks it.
        """
        diagonal = Interval(np.full(self.width, -np.inf), np.full(self.width, np.inf))
        for block in (0, 1):
            diagonal = diagonal.within(self._first_diagonal(block, size))
        for _ in range(CONTRACTIONS):
            before = diagonal.high - diagonal.low
            for block in (0, 1):
                diagonal = diagonal.within(self._solve_diagonal(diagonal, block, size))
            after = diagonal.high - diagonal.low
            if not np.any((before - after > LEAST_GAIN * after) & (after > 0)):
                break
        return diagonal

    def _diagonal_rows(self, block: int, size: Floats | None) -> tuple[Integers, Integers, Floats, Floats, Floats]:
        """Rows and columns of the diagonal, steeper ones or not, their weights, and what those leave out."""
        column, entry = np.arange(self.width), block * self.width + np.arange(self.width)
        lost = self.lost[entry] * (0.0 if size is None else size)
        return entry + 1, column, self.design.own[entry], self.design.first[entry], lost

    def _first_diagonal(self, block: int, size: Floats | None) -> Interval:
        """Bounds on the diagonal from nothing but the contraction; infinite ones where there is none."""
        row, column, own, first, lost = self._diagonal_rows(block, size)
        nothing = Interval(np.zeros(self.width), np.zeros(self.width))
        factor = np.abs(own) * self.scale[row, column] + np.abs(first) * self.scale[0]
        parts = [self.forms(each, column, nothing, size).size for each in (row, 0 * row)]
        total = np.abs(own) * parts[0] + np.where(first != 0, np.abs(first) * parts[1], 0.0)
        bound = np.where(factor <= CONTRACTION, (total + lost) / (1 - factor) * SAFE, np.inf)
        bound = np.where(np.isnan(bound), np.inf, bound)  # where nothing was asked
        return Interval(-bound, bound)

    def _solve_diagonal(self, diagonal: Interval, block: int, size: Floats | None) -> Interval:
        """The diagonal, once more, from what is known of it; everything where nothing was asked."""
        row, column, own, first, lost = self._diagonal_rows(block, size)
        entries = self.forms(row, column, diagonal, size).times(own)
        entries = (entries + self.forms(0 * row, column, diagonal, size).times(first)).widen(lost)
        known = ~(np.isnan(entries.low) | np.isnan(entries.high))
        return Interval(np.where(known, entries.low, -np.inf), np.where(known, entries.high, np.inf))

    def logit_rounding(self, score: Interval | None = None) -> Floats:  # (width,)
        """Bound on the rounding of a logit for a last token of norm one, by column of the score matrix."""
        score = score or self._solve(np.zeros(self.width))
        return np.asarray(2 * np.linalg.norm(score.size, axis=0) * self.rounding * self.design.norm)

    def solve(self) -> Interval:  # (width, width)
        """The score matrix, rounding of the oracle and of this included."""
        size = np.zeros(self.width)
        while True:
            score = self._solve(size)
            seen = np.linalg.norm(np.maximum(score.size, np.abs(score.middle)), axis=0)
            # Rounding is proportional to the columns; twice what they seem covers what rounding adds to them.
            if np.all(seen <= size) or not np.all(np.isfinite(seen)):
                return score
            size = np.maximum(size, 2 * seen)

    def _solve(self, size: Floats) -> Interval:
        """Intervals of the score matrix, for columns of norms of at most `size`."""
        design, every = self.design, np.arange(self.width)
        diagonal = self.diagonal(size)
        forms = self.forms(np.arange(self.width + 1)[:, None], every[None, :], diagonal, size)
        own, first = design.own[: self.width, None], design.first[: self.width, None]
        score = forms[1:].times(own) + forms[:1].times(first)
        score = score.widen(self.lost[: self.width, None] * size)
        entry = score[every, every].within(diagonal)
        low, high = score.low.copy(), score.high.copy()
        low[every, every], high[every, every] = entry.low, entry.high
        return Interval(low, high)
