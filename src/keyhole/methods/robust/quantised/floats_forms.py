"""The score matrix of a head whose answers are rounded to a dtype: forms that null queries sharpen."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace

import numpy as np

from keyhole.arrays import FLOAT32, Booleans, Floats, Integers
from keyhole.families import SingleHead
from keyhole.methods.base import BiasDetected, Steps, Unrecoverable
from keyhole.methods.forms.scale import NORM_RATIO, floor_power
from keyhole.methods.robust.quantised.floats_value import ValueRatios
from keyhole.methods.robust.quantised.pair_model import (
    ALONG,
    BIAS_ROWS,
    SECOND_ORDER,
    SHRINK_COLUMN,
    ColumnForms,
    SteeredDesign,
    SteeredPairs,
)
from keyhole.methods.robust.quantised.pair_queries import OwnForms, ask_own_forms, pair_plan
from keyhole.queries import Measurements, Signature
from keyhole.recovery import Outcome

CONTRADICTION = (
    "two readings of a form contradict each other: the box is no single head without biases, or its answers are "
    "rounded otherwise than declared; try method single-head"
)

# The largest logit of a column is brought to this size: large against rounding, small against saturation.
AIM = 0.5
# The first probe of a scale where norms are free, and how many forms are probed.
FIRST_PROBE, PROBES = 2.0**-20, 8
MOST_PROBES = 80
# Largest value that may be answered where numbers beyond 65504 do not exist, with room for what is unknown.
HALF_PRECISION_LIMIT = 2.0**14
# Queries that show finer arithmetic than float32's: one side is longer by this than where answers vanish, which float32
# does not see; predictions must be right, and known, within this part of themselves.
CHECKS, SLIGHTLY, RIGHT = 16, 2.0**-27, 0.25


class NullForms:
    """Forms x_kᵀ·W·g_j of a design, in units in which the largest entry of the value is one.

    Radii are known twice, as those of the value are: for arithmetic in the dtype of the space, and in float32.
    """

    def __init__(self, signature: Signature, rng: np.random.Generator, value: ValueRatios) -> None:
        self.signature, self.space, self.rng, self.value = signature, signature.space, rng, value
        self.width = signature.width
        self.design = SteeredDesign(self.space, rng, value.ratio[:, value.main])
        self.wide_design = copy(self.design)
        self.wide_design.space = value.wide.space
        shape = (self.width, self.width + 1)  # a column for the zero token, which stays empty
        self.forms, self.radius, self.common = np.zeros(shape), np.full(shape, np.inf), np.zeros(shape)
        self.wide_radius, self.wide_common = self.radius.copy(), self.common.copy()
        self._learn_value()
        limit = signature.norm_limit
        if signature.noise.name == "float16":  # longer tokens may be answered by infinity
            limit = min(limit, HALF_PRECISION_LIMIT / (abs(value.largest[value.main]) * self.design.norm))
        self.free, self.limit = math.isinf(limit), limit
        self.norm = np.full(self.width + 1, 1.0 if self.free else limit)  # of the pair, by column
        self.last = self.norm.copy()
        self.bias_rows = rng.permutation(self.width)  # those that are still to be read
        self.spent = 0
        self.started = self.silent = False
        self.probed: OwnForms | None = None

    def _learn_value(self) -> None:
        value, main = self.value, self.value.main
        if value.is_wide:
            self.widen()
        self.design.with_value(value.ratio[:, main], value.bounds.radius[:, main])
        self.wide_design.with_value(value.ratio[:, main], value.wide.radius[:, main])

    def widen(self) -> None:
        """Go on with what holds for an oracle that computes in float32."""
        self.value.widen()
        self.space, self.design = self.wide_design.space, self.wide_design
        self.radius, self.common = self.wide_radius, self.wide_common

    def solve_answers(self, measured: Measurements) -> tuple[Floats, Floats]:
        """Answers of the main output and their radii, over the largest entry of the value."""
        value = self.value
        answers, radius = (part[:, value.main] for part in value.solve_answers(measured.by_output))
        largest = value.largest[value.main]
        self.spent += answers.size
        answers, radius = answers / largest, radius / abs(largest)
        return answers, SECOND_ORDER * (radius + value.relative * np.abs(answers))

    def cost(self) -> int:
        """Queries of a round."""
        return self.width**2 + min(BIAS_ROWS, self.width)

    def ask_first(self) -> Steps[None]:
        """Norms, then every form from a pair of equal lengths; columns with saturated ones again, shorter."""
        if self.free:
            yield from self._ask_scale()
        else:
            last = self.last.copy()
            last[-2] *= ALONG
            own_forms = yield from ask_own_forms(self.wide_design, self.rng, self.limit, last, 1, self.solve_answers)
            self.last, self.probed = own_forms.last, own_forms
        columns = np.arange(self.width)
        for number in range(MOST_PROBES):
            large = yield from self._ask(columns, bias=number == 0, steer=False)
            columns = columns[large]
            if not columns.size:
                break
            self.last[columns] *= SHRINK_COLUMN
        else:
            raise Unrecoverable(Outcome.SATURATED, f"{columns.size} columns saturate however short the tokens")
        self.started = True

    def _ask_scale(self) -> Steps[None]:
        """Free norms: their product brings logits to their aim, their ratio makes the last token negligible."""
        few = np.arange(min(PROBES, self.width))
        scale, norm = FIRST_PROBE, 1.0
        quiet, loud = 0.0, math.inf  # scales that are too small and too large
        for _ in range(MOST_PROBES):
            norm = NORM_RATIO * floor_power(math.sqrt(scale))
            self.norm[:], self.last[:] = norm, scale / norm
            pairs = self._pairs(few, few, steer=False)
            answers, _ = self.solve_answers((yield pair_plan(self.design, "scale", pairs)))
            share = np.abs(answers / (norm * self.design.row_values[few]))  # (2/3)·logit where that is small
            size = float(np.max(share))
            if size > 0.5:
                loud = scale
                scale = scale * 2.0**-36 if quiet == 0 else math.sqrt(quiet * loud)
                continue
            if size > 64 * self.space.rounding:
                wanted = scale * AIM / (3 * size)  # the largest of all forms is some times the largest of a few
                self.norm[:] = NORM_RATIO * floor_power(math.sqrt(wanted))
                self.last[:] = wanted / self.norm
                return
            quiet = scale
            scale = scale * 2.0**36 if math.isinf(loud) else math.sqrt(quiet * loud)
            if scale > self.space.huge**0.4:
                self.silent = True  # the score matrix is zero, and its radius will say so
                return
        raise Unrecoverable(
            Outcome.WRONG_FAMILY, "the answers respond at no scale of the tokens as a softmax head's do"
        )

    def ask_finer(self) -> Steps[None]:
        """A round of null queries."""
        self._learn_value()
        self._choose_norms()
        yield from self._ask(np.arange(self.width), bias=True, steer=True)

    def _ask(self, columns: Integers, *, bias: bool, steer: bool) -> Steps[Booleans]:  # (columns,)
        """Read whole columns, and a few rows with the zero token; which columns have saturated forms."""
        row = np.repeat(np.arange(self.width), columns.size)
        column = np.tile(columns, self.width)
        grid = self._pairs(row, column, steer=steer)
        plans = [pair_plan(self.design, "forms", grid)]
        bias = bias and bool(self.bias_rows.size)
        some, self.bias_rows = np.split(self.bias_rows, [BIAS_ROWS if bias else 0])  # others in every round
        few = self._pairs(some, 0 * some + self.width, steer=False)
        if bias:
            plans.append(pair_plan(self.design, "score bias", few))
        measured: list[Measurements] = yield plans
        if bias:
            # Opposite tokens before a zero token answer zero, unless a score bias prefers one of them.
            answers, error = self.solve_answers(measured[1])
            if np.any(np.abs(answers) > error + self.design.rounding_radius(few)):
                raise BiasDetected("the head has a score bias, which null queries do not read: use single-head")
        answers, error = self.solve_answers(measured[0])
        wide_error = error + SECOND_ORDER * self.value.wide.relative[self.value.main] * np.abs(answers)
        known = self.forms[row, column]
        read = self.design.solve_pairs(grid, answers, SECOND_ORDER * error, known)
        wide = self.wide_design.solve_pairs(grid, answers, SECOND_ORDER * wide_error, known)
        again = wide.saturated
        if self.probed is not None:
            again = again | self.probed.contradict(columns, wide)
        usable = ~np.tile(again, self.width)
        self._keep(row[usable], column[usable], read.take(usable), wide.take(usable))
        return again

    def _pairs(self, row: Integers, column: Integers, *, steer: bool) -> SteeredPairs:
        norm, last = self.norm[column], self.last[column]
        if not steer:
            return SteeredPairs(row, column, norm, norm, last, 1)
        own = self.design.own_forms(self.forms)
        pairs, _ = self.design.steer_pairs(row, column, norm, last, 1, self.forms[row, column], own[column], 0.0)
        return pairs

    def _keep(self, row: Integers, column: Integers, read: ColumnForms, wide: ColumnForms) -> None:
        """Keep forms that are better known than before."""
        old = self.radius[row, column] + self.common[row, column]
        apart = np.abs(read.form - self.forms[row, column])
        if np.any(apart > read.radius + read.common + old):
            widest = self.wide_radius[row, column] + self.wide_common[row, column]
            if np.any(apart > wide.radius + wide.common + widest):
                raise Unrecoverable(Outcome.WRONG_FAMILY, CONTRADICTION)
            self.widen()
            read, old = wide, widest
        better = read.radius + read.common < old
        row, column = row[better], column[better]
        self.forms[row, column] = read.form[better]
        self.radius[row, column], self.common[row, column] = read.radius[better], read.common[better]
        self.wide_radius[row, column], self.wide_common[row, column] = wide.radius[better], wide.common[better]

    def ask_arithmetic_check(self) -> Steps[None]:
        """Queries whose answers float32 cannot tell from zero: radii are widened unless these come as predicted."""
        if self.value.is_wide or self.space.eps >= FLOAT32:
            return
        row, column = self.rng.integers(self.width, size=(2, CHECKS))
        norm, last = self.rng.uniform(0.5, 1.0, (2, CHECKS)) * np.stack([self.norm[column], self.last[column]])
        form, own = self.forms[row, column], self.design.own_forms(self.forms)[column]
        pairs, _ = self.design.steer_pairs(row, column, norm, last, 1, form, own, 0.0)
        pairs = replace(pairs, plus=pairs.plus * (1 + SLIGHTLY))
        predicted = self.design.answer(pairs, form, own)
        radius = self.radius + self.common
        own_radius = np.sum(np.abs(self.design.own) * radius, axis=0)[column]
        unsure = self.design.nuisance(pairs, predicted, own_radius)
        unsure = unsure + np.abs(predicted.by_form) * radius[row, column]
        answers, error = self.solve_answers((yield pair_plan(self.design, "arithmetic", pairs)))
        allowed = RIGHT * np.abs(predicted.value)
        if np.any(unsure > allowed) or np.any(np.abs(answers - predicted.value) > allowed + error):
            self.widen()

    def _choose_norms(self) -> None:
        """Bring the largest logit of every column to its aim, as far as norms allow."""
        sizes = np.abs(self.forms)
        largest = np.max(np.where(sizes > self.radius + self.common, sizes, 0.0), axis=0)
        known = largest > 0  # a column of zeros is left as it is
        wanted = AIM / np.where(known, largest, 1.0)
        if self.free:
            norm = NORM_RATIO * np.exp2(np.floor(np.log2(wanted) / 2))
            self.norm, self.last = np.where(known, norm, self.norm), np.where(known, wanted / norm, self.last)
            return
        most = np.full(self.width + 1, self.limit)
        most[-2] *= ALONG
        own = np.maximum(np.abs(self.design.own_forms(self.forms)), self.space.tiny)
        self.last = np.minimum(np.minimum(most, wanted / self.limit), np.sqrt(AIM / own))

    def error(self) -> float:
        """Root-mean-square error of an entry of W, if every form is off by its radius."""
        return self.design.matrix_error(self.radius + self.common)

    @property
    def _zero(self) -> bool:
        """Whether no form can be told from zero: then the score matrix is taken for zero."""
        return bool(np.all(np.abs(self.forms[:, :-1]) <= (self.radius + self.common)[:, :-1]))

    def head(self) -> SingleHead:
        """What is known now."""
        matrix = self.design.matrix(0 * self.forms if self._zero else self.forms)
        return SingleHead(self.space.asarray(matrix), self.value.vector())

    def radius_head(self) -> SingleHead:
        """Radii of that."""
        radius = self.radius + np.abs(self.forms) if self._zero else self.radius
        whole = self.design.matrix_radius(radius, self.common)
        whole = whole + 4 * self.space.rounding * np.linalg.norm(self.design.matrix(self.forms))
        return SingleHead(self.space.asarray(whole), self.value.vector_radius())
