"""Queries of opposite pairs, [m × p·x_k; m × −q·x_k; μ·g_j]: what they answer, and how to steer the answer.

With forms F_kj = x_kᵀ·W·g_j and S_j = g_jᵀ·W·g_j, values b_k = x_k·v and c_j = g_j·v, the answer is

    y = (m·p·b·e^(pμF) − m·q·b·e^(−qμF) + μ·c·e^(μ²S)) / (m·e^(pμF) + m·e^(−qμF) + e^(μ²S)).

Rows x_k = (v̂ + ε_k)/√2, ε_k the vertices of a simplex orthogonal to v, are near the best for W under noise; all but
the last column are orthogonal to v, so that c vanishes. S is a sum of forms of the same column.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Booleans, Floats, Integers, Space, floats, numpy_space, to_numpy
from keyhole.numerics.orthogonal import equal_overlap, random_orthogonal, split_along

# Halvings after which a bisection of [0, LONGEST_RATIO] has no digit left to find.
HALVINGS = 56
# The minus side of a pair is at most this many times as long as the plus side.
LONGEST_RATIO = 4.0
# Logits beyond this are saturated, whatever the precision.
LARGEST_LOGIT = 40.0
# Logits beyond this are read so badly that it is better to ask again with shorter tokens.
LARGEST_READ = 2.5
# Logits that are known no better than this may be saturated ones: radii of first order do not hold for them.
WIDEST_READ = 0.75
# A whole column that saturates is read again with a last token shorter by this.
SHRINK_COLUMN = 1 / 16
# The last token along the value vector is so much shorter than others, so that its value can be balanced.
ALONG = 0.25
# Rows that are also read with a zero last token, where only a score bias has a form.
BIAS_ROWS = 3
# Second-order terms of radii, which are first order, stay within this factor.
SECOND_ORDER = 1.1
# Steps of Newton's method from anywhere within the reach of logits to full precision.
NEWTON_STEPS = 40
# Independent errors within ±r add up to more than this many times their quadrature once in 10¹³ (Hoeffding).
QUADRATURES = 8.0


@dataclass(frozen=True)
class SteeredPairs:
    """n queries of one number of copies."""

    row: Integers  # (n,)
    column: Integers  # (n,)
    plus: Floats  # (n,) p
    minus: Floats  # (n,) q; negative where the pair is turned round
    last: Floats  # (n,) μ
    copies: int


@dataclass(frozen=True)
class Answer:
    """Predicted answers and how they move with everything behind them, (n,) each."""

    value: Floats
    by_form: Floats
    by_own: Floats  # by S, the last token's own form
    by_row: Floats  # by b
    by_column: Floats  # by c


@dataclass(frozen=True)
class ColumnForms:
    """Forms of whole columns as read, (n,) each."""

    form: Floats
    radius: Floats  # from the error of its own answer
    common: Floats  # from what it shares with others
    saturated: Booleans  # (columns,)
    own: Floats  # (columns,) S_j as their sum
    own_radius: Floats  # (columns,)

    def take(self, some: Booleans) -> ColumnForms:  # (n,)
        """Some of the forms; columns as they are."""
        return replace(self, form=self.form[some], radius=self.radius[some], common=self.common[some])


class SteeredDesign:
    """Rows and columns, and what is known of their values.

    One more column than the width: the zero token, at which only a score bias has a form.
    """

    def __init__(self, space: Space, rng: np.random.Generator, value: Floats) -> None:  # (width,)
        self.space, width = space, value.size
        plain = numpy_space()
        direction = value / np.linalg.norm(value)
        even = to_numpy(equal_overlap(plain, random_orthogonal(plain, rng, width), value))
        vertices = even - np.outer(even @ direction, direction)
        norms = np.linalg.norm(vertices, axis=1, keepdims=True)
        rows = direction[None, :] + (vertices / norms if width > 1 else vertices)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        others, along = split_along(plain, random_orthogonal(plain, rng, width), value)
        columns = np.concatenate([to_numpy(others), to_numpy(along)[None, :], np.zeros((1, width))])
        # As the space holds them, so that what is asked is what is solved.
        self.rows, self.columns = (floats(space.asarray(array)) for array in (rows, columns))
        self.inverse, self.columns_inverse = np.asarray(np.linalg.inv(self.rows)), np.linalg.inv(self.columns[:-1])
        self.own: Floats = self.inverse.T @ self.columns.T  # (rows, columns): S_j = Σ_k own_kj·F_kj
        self.with_value(value, np.zeros(width))

    def with_value(self, value: Floats, radius: Floats) -> None:  # (width,), (width,)
        """Take note of the value vector."""
        self.value, self.norm = value, float(np.linalg.norm(value))
        self.row_values, self.column_values = self.rows @ value, self.columns @ value
        self.row_radius, self.column_radius = np.abs(self.rows) @ radius, np.abs(self.columns) @ radius

    def answer(self, pairs: SteeredPairs, form: Floats, own: Floats) -> Answer:  # (n,) F, (n,) S
        """Predicted answers and derivatives."""
        p, q, mu, copies = pairs.plus, pairs.minus, pairs.last, pairs.copies
        b, c = self.row_values[pairs.row], mu * self.column_values[pairs.column]
        logits = np.stack([p * mu * form, -q * mu * form, mu * mu * own])
        weights = np.exp(logits - np.max(logits, axis=0))
        up, down, rest = copies * weights[0], copies * weights[1], weights[2]
        total = up + down + rest
        up, down, rest = up / total, down / total, rest / total
        value = p * b * up - q * b * down + c * rest
        return Answer(
            value,
            by_form=mu * (p * up * (p * b - value) + q * down * (q * b + value)),
            by_own=mu * mu * rest * (c - value),
            by_row=p * up - q * down,
            by_column=mu * rest,
        )

    def rounding_radius(self, pairs: SteeredPairs) -> Floats:  # (n,)
        """How far the oracle's own rounding takes an answer."""
        longest = np.maximum(np.maximum(np.abs(pairs.plus), np.abs(pairs.minus)), np.abs(pairs.last))
        return 2 * self.space.rounding * longest * self.norm

    def nuisance(self, pairs: SteeredPairs, answer: Answer, own_radius: Floats) -> Floats:  # (n,)
        """How far what is not the form itself may take an answer."""
        return (
            np.abs(answer.by_own) * own_radius
            + np.abs(answer.by_row) * self.row_radius[pairs.row]
            + np.abs(answer.by_column) * self.column_radius[pairs.column]
            + self.rounding_radius(pairs)
        )

    def steer_pairs(
        self,
        row: Integers,  # (n,)
        column: Integers,  # (n,)
        norm: Floats,  # (n,) of the longer side
        last: Floats,  # (n,)
        copies: int,
        form: Floats,  # (n,) F
        own: Floats,  # (n,) S
        aim: float,
    ) -> tuple[SteeredPairs, Floats]:
        """Queries that would answer ±aim if the forms were `form`, and which of the two.

        The pair is turned so that its form repels the plus side: then the answer falls as the minus side grows.
        """
        turn = np.where(form > 0, -1.0, 1.0)
        b, c = turn * self.row_values[row], last * self.column_values[column]
        target = np.where(b > 0, aim, -aim)
        slope, rest = -np.abs(form) * last, np.exp(last * last * own)
        low, high = np.zeros(row.size), np.full(row.size, LONGEST_RATIO)
        for _ in range(HALVINGS):
            ratio = (low + high) / 2
            plus, minus = norm / np.maximum(1.0, ratio), norm * np.minimum(1.0, ratio)
            up, down = copies * np.exp(plus * slope), copies * np.exp(-minus * slope)
            above = up * (plus * b - target) + down * (-minus * b - target) + rest * (c - target)
            more = above * b > 0
            low, high = np.where(more, ratio, low), np.where(more, high, ratio)
        ratio = (low + high) / 2
        plus, minus = norm / np.maximum(1.0, ratio), norm * np.minimum(1.0, ratio)
        return SteeredPairs(row, column, turn * plus, turn * minus, last, copies), target

    def solve_columns(self, pairs: SteeredPairs, answers: Floats, start: Floats) -> Floats:  # (n,), (n,) -> (n,)
        """The forms behind answers, by Newton's method; huge ones where an answer is out of range.

        Whole columns, row by row, because S is a sum of forms of its column.
        """
        shape, index = (self.rows.shape[0], -1), pairs.column
        own = self.own[pairs.row, index].reshape(shape)
        form, largest_form = (
            start.copy(),
            LARGEST_LOGIT / (np.maximum(np.abs(pairs.plus), np.abs(pairs.minus)) * pairs.last),
        )
        for _ in range(NEWTON_STEPS):
            sums = np.sum(own * form.reshape(shape), axis=0)
            predicted = self.answer(pairs, form, np.tile(sums, shape[0]))
            slope = np.where(predicted.by_form == 0, np.inf, predicted.by_form)
            # The derivative of a column is diagonal but for what S adds, which has rank one.
            plain, through = ((part / slope).reshape(shape) for part in (answers - predicted.value, predicted.by_own))
            step = plain - through * np.sum(own * plain, axis=0) / (1 + np.sum(own * through, axis=0))
            step = np.where(np.isfinite(step), step, 0.0).reshape(-1)
            form = np.clip(form + np.clip(step, -largest_form / 8, largest_form / 8), -largest_form, largest_form)
        return form

    def solve_pairs(
        self, pairs: SteeredPairs, answers: Floats, error: Floats, start: Floats
    ) -> ColumnForms:  # (n,) each
        """Forms of whole columns with their radii, and which columns saturate."""
        form = self.solve_columns(pairs, answers, start)
        radius, common = self._column_radii(pairs, form, form, error)
        # Again where answers are flattest within these radii, since they are of first order.
        largest_form = np.where(np.isfinite(radius + common), radius + common, 0.0)
        low, high = (self._column_radii(pairs, form, end, error) for end in (form - largest_form, form + largest_form))
        radius, common = (SECOND_ORDER * np.maximum(*parts) for parts in zip(low, high, strict=True))
        scale = np.maximum(np.abs(pairs.plus), np.abs(pairs.minus)) * pairs.last
        readable = (np.abs(form) * scale <= LARGEST_READ) & ((radius + common) * scale <= WIDEST_READ)
        shape = (self.rows.shape[0], -1)
        own = np.sum(self.own[pairs.row, pairs.column].reshape(shape) * form.reshape(shape), axis=0)
        missed = np.abs(
            answers - self.answer(pairs, form, np.tile(own, shape[0])).value
        ) > error + self.rounding_radius(pairs)
        bad = ~readable | missed
        spread = np.sum(np.abs(self.own[pairs.row, pairs.column] * (radius + common)).reshape(shape), axis=0)
        return ColumnForms(form, radius, common, np.any(bad.reshape(shape), axis=0), own, spread)

    def _column_radii(self, pairs: SteeredPairs, form: Floats, at_form: Floats, error: Floats) -> tuple[Floats, Floats]:
        """Radii to first order, with the slopes at other forms: from errors of their own answers, and shared ones."""
        shape = (self.rows.shape[0], -1)
        own = self.own[pairs.row, pairs.column].reshape(shape)
        at = self.answer(pairs, at_form, np.tile(np.sum(own * form.reshape(shape), axis=0), shape[0]))
        known = np.abs(at.by_row) * self.row_radius[pairs.row] + np.abs(at.by_column) * self.column_radius[pairs.column]
        slope = np.abs(at.by_form)
        alone, shared = ((part / slope).reshape(shape) for part in (error + self.rounding_radius(pairs), known))
        through = (at.by_own / at.by_form).reshape(shape)
        coupling = np.abs(through / (1 + np.sum(own * through, axis=0)))
        size = np.abs(own)
        spread = np.minimum(np.sum(size * alone, axis=0), QUADRATURES * np.sqrt(np.sum((size * alone) ** 2, axis=0)))
        shared = shared + coupling * (spread + np.sum(size * shared, axis=0))
        # The oracle's own product behind the logit is rounded too.
        key = np.linalg.norm(self.inverse @ form.reshape(shape), axis=0)
        return (alone + self.space.rounding * key).reshape(-1), shared.reshape(-1)

    def own_forms(self, forms: Floats) -> Floats:  # (rows, columns) -> (columns,)
        """S_j of every column."""
        return np.asarray(np.sum(self.own * forms, axis=0))

    def matrix(self, forms: Floats) -> Floats:  # (rows, columns) -> (width, width)
        """The score matrix that has these forms."""
        return np.asarray(self.inverse @ forms[:, :-1] @ self.columns_inverse.T)

    def matrix_radius(self, radius: Floats, common: Floats) -> Floats:  # (rows, columns) twice -> (width, width)
        """Radii of its entries from those of forms: independent ones, and errors they may share."""
        left, right = np.abs(self.inverse), np.abs(self.columns_inverse.T)
        own, shared = radius[:, :-1], common[:, :-1]
        whole = left @ own @ right
        quadrature = QUADRATURES * np.sqrt(left**2 @ own**2 @ right**2)
        return np.asarray(np.minimum(whole, quadrature) + left @ shared @ right)

    def matrix_error(self, deviation: Floats) -> float:  # (rows, columns)
        """Root-mean-square error of its entries, from standard deviations of the forms."""
        square = self.inverse**2 @ deviation[:, :-1] ** 2 @ (self.columns_inverse.T) ** 2
        return float(np.sqrt(np.mean(square)))
