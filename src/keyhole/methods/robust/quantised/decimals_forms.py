"""The score matrix of a head whose answers are rounded to decimals: intervals of forms that thresholds halve."""

from __future__ import annotations

import math

import numpy as np

from keyhole.arrays import Floats, Integers
from keyhole.families import SingleHead
from keyhole.methods.base import BiasDetected, Steps, Unrecoverable
from keyhole.methods.robust.quantised.decimals_value import AUDIBLE, BIASED, DITHER, STUCK, ValueIntervals
from keyhole.methods.robust.quantised.pair_model import (
    ALONG,
    BIAS_ROWS,
    SECOND_ORDER,
    SHRINK_COLUMN,
    SteeredDesign,
    SteeredPairs,
)
from keyhole.methods.robust.quantised.pair_queries import OwnForms, ask_own_forms, pair_plan
from keyhole.queries import Measurements, Signature
from keyhole.recovery import Outcome

# Without target or budget: error of an entry over the root mean square of all entries.
DEFAULT_ACCURACY = 1e-6
# The value is read so many times sharper than the forms, to which it is a nuisance.
SHARPER = 32.0
# Copies of a pair in the first reading: with 8 the last token takes 1/17 of the weight, and more gain little.
COPIES = 8
# Largest logits of a column that is steered to thresholds, and of the one along the value vector.
STEERED, STEERED_ALONG = 1.5, 0.5
MOST_ROUNDS = 200
# Standard deviation of what is left of an interval, over its width.
UNIFORM = 12**-0.5
# Root mean square of widths that are off by up to half a bit, over their aim, with some room.
ROUNDED_BITS = 1.06


class FormIntervals:
    """Intervals of the forms x_kᵀ·W·g_j of a design; the last column is the zero token."""

    def __init__(self, signature: Signature, rng: np.random.Generator, value: ValueIntervals) -> None:
        self.signature, self.space, self.rng, self.value = signature, signature.space, rng, value
        self.width, self.half, self.norm = signature.width, value.half, signature.norm_limit
        self.design = SteeredDesign(self.space, rng, value.entries[0][:, value.main])
        self._learn_value()
        room = (signature.max_length or math.inf) - 1
        self.copies = int(min(COPIES, room // 2))
        self.few_copies = self._fewest_copies()
        shape = (self.width, self.width + 1)
        self.low, self.high = np.full(shape, -np.inf), np.full(shape, np.inf)
        self.last = np.full(self.width + 1, self.norm)
        self.own, self.own_radius = np.zeros(self.width + 1), np.zeros(self.width + 1)
        rows = rng.permutation(self.width)[:BIAS_ROWS]
        self.asked = np.ones(shape, dtype=bool)
        self.asked[:, -1] = np.isin(np.arange(self.width), rows)
        self.spent = self.rounds = 0
        self.started = False

    def _learn_value(self) -> None:
        centre, radius = self.value.entries
        self.design.with_value(centre[:, self.value.main], radius[:, self.value.main])

    def _fewest_copies(self) -> int:
        """Copies with which a pair of unequal lengths can reach a threshold."""
        loudest = self.norm * float(np.min(self.design.row_values))
        for copies in range(1, self.copies + 1):
            if loudest * copies / (2 * copies + 1) >= AUDIBLE * self.half:
                return copies
        raise Unrecoverable(
            Outcome.TOO_NOISY,
            f"the values of tokens are at most {loudest:.2g}, answers are rounded by up to {self.half:.2g}: "
            "no threshold is within reach",
        )

    def solve_answers(self, measured: Measurements) -> tuple[Floats, Floats]:
        """Answers of the main output and their radii."""
        answers = measured.by_output[:, self.value.main]
        self.spent += answers.size
        return answers, np.full(answers.size, self.half)

    def ask_first(self) -> Steps[None]:
        """Norms of last tokens, then every form from one pair; columns with saturated ones again, shorter."""
        start = self.last.copy()
        start[-2] *= ALONG
        own_forms = yield from ask_own_forms(self.design, self.rng, self.norm, start, 1, self.solve_answers)
        self.last, self.own, self.own_radius = own_forms.last, own_forms.form, own_forms.radius
        columns = np.arange(self.width)
        for _ in range(MOST_ROUNDS):
            columns = yield from self._ask_columns(columns, own_forms)
            if not columns.size:
                break
            self.last[columns] *= SHRINK_COLUMN
        else:
            raise Unrecoverable(Outcome.SATURATED, f"{columns.size} columns saturate however short the tokens")
        # Last tokens so short that thresholds are within reach of every form of their column.
        aim = np.append(np.full(self.width - 1, STEERED), STEERED_ALONG)
        largest = np.max(np.abs(self._middle()[:, :-1]), axis=0)
        self.last[:-1] = np.minimum(self.last[:-1], aim / np.maximum(self.norm * largest, self.space.tiny))
        yield from self._ask_for_bias()
        self.started = True

    def _ask_columns(self, columns: Integers, probed: OwnForms) -> Steps[Integers]:
        """Whole columns, one query a form; returns those that saturate."""
        row, column = np.repeat(np.arange(self.width), columns.size), np.tile(columns, self.width)
        norm = np.full(row.size, self.norm)
        pairs = SteeredPairs(row, column, norm, norm, self.last[column], self.copies)
        answers, error = self.solve_answers((yield pair_plan(self.design, "forms", pairs)))
        read = self.design.solve_pairs(pairs, answers, error, np.zeros(row.size))
        again = read.saturated | probed.contradict(columns, read)
        good = ~np.tile(again, self.width)
        radius = read.radius + read.common
        self.low[row[good], column[good]] = (read.form - radius)[good]
        self.high[row[good], column[good]] = (read.form + radius)[good]
        return columns[again]

    def _ask_for_bias(self) -> Steps[None]:
        """Opposite tokens before a zero token answer zero, unless a score bias prefers one of them."""
        row = np.nonzero(self.asked[:, -1])[0]
        norm, column = np.full(row.size, self.norm), np.full(row.size, self.width)
        pairs = SteeredPairs(row, column, norm, norm, norm, self.copies)
        answers, error = self.solve_answers((yield pair_plan(self.design, "score bias", pairs)))
        if np.any(np.abs(answers) > error):
            raise BiasDetected(BIASED.format("a score"))
        slope = self.design.answer(pairs, np.zeros(row.size), np.zeros(row.size)).by_form
        radius = SECOND_ORDER**2 * (self.half + self.design.rounding_radius(pairs)) / slope
        self.low[row, -1], self.high[row, -1] = -radius, radius

    @property
    def widths(self) -> Floats:  # (width, width + 1)
        """Widths of the intervals, of the zero column where it is asked."""
        return np.where(self.asked, self.high - self.low, 0.0)

    def goal(self, target_error: float | None, budget: float) -> float:
        """The width at which to stop, from an error or from what is left of the budget."""
        per_width = self.design.matrix_error(np.full(self.low.shape, UNIFORM))
        if target_error is None and math.isinf(budget):
            size = float(np.sqrt(np.mean(self.design.matrix(self._middle()) ** 2)))
            target_error = DEFAULT_ACCURACY * max(size, self.error())
        wanted = 0.0 if target_error is None else target_error / (per_width * ROUNDED_BITS)
        finest = 64 * self.space.spacing * (1 + float(np.max(np.abs(self._middle()))))
        wanted = max(wanted, finest)
        most = max(float(np.max(self.widths)), wanted)
        step = 2**0.125
        while self._cost(wanted * step) > budget and wanted < most:
            wanted *= step
        return min(wanted, most)

    def _cost(self, goal: float) -> float:
        bits = np.log2(np.maximum(self.widths[self.asked], goal) / goal)
        return float(np.sum(np.round(bits))) + self.value.cost(self.value_goal(goal))

    def value_goal(self, goal: float) -> Floats:  # (outputs,)
        """Widths of the value's intervals at which they do not blur forms of this width."""
        row, column = np.nonzero(self.asked[:, :-1])
        norm = np.full(row.size, self.norm)
        pairs = SteeredPairs(row, column, norm, norm, self.last[column], self.few_copies)
        at = self.design.answer(pairs, self._middle()[row, column], self.own[column])
        blur = float(np.max(np.abs(at.by_column / at.by_form))) * self.width**0.5
        goals = np.full(self.value.outputs, 2 * goal)
        goals[self.value.main] = min(2 * goal / (SHARPER * blur), 2 * goal)
        return goals

    def ask_narrower(self, goal: float, budget: float) -> Steps[None]:
        """Halve intervals until none is much wider than the goal: bits are rounded, not counted up. Widest first."""
        self._learn_value()
        row, column = np.nonzero(self.asked)
        most = self.spent + budget
        for _ in range(MOST_ROUNDS):
            before = self.widths[row, column]
            wide = before > goal * 2**0.5
            row, column, before = row[wide], column[wide], before[wide]
            first = np.argsort(-before)[: int(min(max(most - self.spent, 0), row.size))]
            row, column, before = row[first], column[first], before[first]
            if not row.size:
                return
            yield from self._ask_halves(row, column)
            moving = self.widths[row, column] < STUCK * before
            row, column = row[moving], column[moving]
            self.rounds += 1

    def _ask_halves(self, row: Integers, column: Integers) -> Steps[None]:
        """One query a form, steered to a threshold at the middle of its interval."""
        # The last token's own form is a sum of forms: that is taken where it is known better.
        radius = np.sum(np.abs(self.design.own) * self.widths / 2, axis=0)
        better = radius < self.own_radius
        self.own = np.where(better, self.design.own_forms(self._middle()), self.own)
        self.own_radius = np.where(better, radius, self.own_radius)
        low, high, own = self.low[row, column], self.high[row, column], self.own[column]
        middle = low + (high - low) * (0.5 + self.rng.uniform(-DITHER, DITHER, row.size))
        norm = np.full(row.size, self.norm)
        pairs, threshold = self.design.steer_pairs(
            row, column, norm, self.last[column], self.few_copies, middle, own, self.half
        )
        answers, _ = self.solve_answers((yield pair_plan(self.design, "thresholds", pairs)))
        at = self.design.answer(pairs, middle, own)
        point = middle + (threshold - at.value) / at.by_form
        nuisance = self.design.nuisance(pairs, at, self.own_radius[column]) / at.by_form
        keys = np.linalg.norm(self.design.inverse @ self._middle(), axis=0)  # |W·g_j| as known
        point_radius = SECOND_ORDER * nuisance + self.space.rounding * keys[column]
        # A threshold out of reach tells nothing.
        reached = np.abs(point - middle) <= high - low
        above = answers > threshold
        self.low[row, column] = np.where(above & reached, np.maximum(low, point - point_radius), low)
        self.high[row, column] = np.where(~above & reached, np.minimum(high, point + point_radius), high)
        self._check_consistent()

    def _check_consistent(self) -> None:
        if np.any(self.low[self.asked] > self.high[self.asked]):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                "answers on both sides of a threshold contradict each other: the box is no single head without biases, "
                "or its answers are rounded otherwise than declared",
            )
        bias = self.asked[:, -1]
        if np.any(self.low[bias, -1] > 0) or np.any(self.high[bias, -1] < 0):
            raise BiasDetected(BIASED.format("a score"))

    def _middle(self) -> Floats:  # (width, width + 1)
        return np.where(self.asked & np.isfinite(self.high - self.low), (self.low + self.high) / 2, 0.0)

    def error(self) -> float:
        """Root-mean-square error of an entry of W that is to be expected."""
        return self.design.matrix_error(UNIFORM * self.widths)

    @property
    def silent(self) -> bool:
        """Whether no form can be told from zero: then the score matrix is taken for zero."""
        return bool(np.all(self.low[self.asked] <= 0) and np.all(self.high[self.asked] >= 0))

    def head(self) -> SingleHead:
        """What is known now."""
        matrix = self.design.matrix(np.zeros(self.low.shape) if self.silent else self._middle())
        return SingleHead(self.space.asarray(matrix), self.value.in_shape(self.value.entries[0]))

    def radius_head(self) -> SingleHead:
        """Radii of that."""
        size = np.linalg.norm(self.design.matrix(self._middle()))
        half = self.widths if self.silent else self.widths / 2
        radius = self.design.matrix_radius(half, 0 * half) + 4 * self.space.rounding * size
        centre, half = self.value.entries
        return SingleHead(self.space.asarray(radius), self.value.in_shape(half + 2 * self.space.eps * np.abs(centre)))
