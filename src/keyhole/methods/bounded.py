"""One head from answers with any errors of at most τ: every entry with a radius that no adversary can leave."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from keyhole.arrays import Floats, Integers, floats
from keyhole.measure import Measurements, Plan, Rows, Signature, Term
from keyhole.methods.base import Estimate, Steps, Unrecoverable
from keyhole.methods.bounded_sheet import (
    CONTRACTION,
    EPS,
    EXTRA_ROUNDINGS,
    Design,
    Sheet,
    Value,
    leaning_rows,
)
from keyhole.methods.scale import floor_power
from keyhole.methods.value import refuse_single_tokens
from keyhole.model import SingleHead
from keyhole.numerics.interval import Interval, Layout
from keyhole.recovery import Outcome

FAMILY = (
    "the box computes one softmax head over its raw tokens, read at the last position",
    "every answer is right up to the rounding of its dtype and an error of at most the declared tolerance",
)
ASSUMPTIONS = (
    *FAMILY,
    "the head has no biases: one that the tolerance hides (details say how large it may be) is not within the radii",
)
ASSUMPTIONS_COVERED = (*FAMILY, "biases did not show: those that the tolerance hides are within the radii")

# Copies of each token of a pair, where none are asked for: more gain little.
COPIES = 16
# Where norms are free, tokens are this long: no tolerance is left beside rounding, and squares do not overflow.
FREE_NORM = 2.0**100
# Questions with a zero last token, which show a score bias, and questions that find the size of logits.
BIAS_QUERIES = 3
PILOT_QUERIES = 3
# Where norms are free, questions that compare random forms with the result.
CHECK_QUERIES = 3
# Without tokens −x an answer tells the logit of x over that of g only, so that g must be shorter than x.
SHORT_LAST = 0.25
# The radius of a form is least where its logit is 0.6; at 1.5 it is twice that, and then asking again pays.
BEST_LOGIT = 0.6
WORST_LOGIT = 1.5
# Mean logit aimed at: one in forty normal ones is then beyond the worst.
MEAN_LOGIT = 0.5
# A logit shows when it is so many times its radius.
SHOWS = 4.0
# Scales move by this factor while logits cannot be read, and by this power of it every further time ...
SHRINK = 1 / 8
STRIDE = 1.5
# ... or by this one, where norms are free, while nothing shows.
GROW = 2.0**20
# A last token is no longer than that the rounding of its logit may be this large.
MOST_ROUNDING = 0.01
# More rounds than the range of floating-point numbers needs.
MOST_ROUNDS = 120
# A first token must have a value of so many times its uncertainty: below, not even a logit of zero is well readable.
# Without tokens −x a logit of zero lies half-way between the values of two tokens.
LEAST_MARGIN = 4.0
LEAST_MARGIN_UNPAIRED = 10.0


def bounded(
    signature: Signature, rng: np.random.Generator, *, copies: int = COPIES, cover_biases: bool = False
) -> Steps[Estimate]:
    """Score matrix and value of f(X) = Σ_i softmax_i(x_iᵀ·W·x_N) · x_iᵀ·V from answers with any errors |e| ≤ τ.

    The robust version of theorem 4.1 of *Provably Learning Attention with Queries* (arXiv 2601.16873): ε-accuracy
    under additive tolerance, given margin and norm conditions, which are checked and reported. Sequences hold
    `copies` tokens x, as many −x, and one g = s·e_b; with x_a = p·v̂ + r·e_a an entry of W takes two of them,
    x_a and x_0 ∥ v, and its radius is 2√2·τ/(B³|v|) for tokens of norm B: √2 times the spectral norm that errors of
    τ hide from any questions. d² + 3d + 8 queries, a few more where logits are large; d² + 2d + 11
    where norms are free, and then rounding is all that is left of the radius.

    Biases that show are refused. With `cover_biases` the radii, four to six times as wide and for d − 2 queries more,
    also hold for heads whose biases hide in the tolerance. Assumes what `ASSUMPTIONS` says.
    """
    refuse_single_tokens(signature)
    reader = Reader(signature, copies, cover_biases)
    value, shape = yield from reader.read_value()
    design = yield from reader.read_overlap(value)
    if cover_biases:
        design = yield from reader.bound_score_bias(value, design)
        hidden: float | None = float(np.max(design.bias.size))
    else:
        hidden = yield from reader.refuse_score_bias(value, design, rng)
    scale = yield from reader.pilot(value, design, rng)
    sheet = Sheet(value, design, reader.layout, signature.space.eps)
    yield from reader.read_diagonal(sheet, scale)
    yield from reader.read_rest(sheet, rng)
    score, forms = reader.solved(sheet)
    if reader.free:
        yield from reader.refuse_other_forms(sheet, score, rng)
    return reader.estimated(sheet, score, forms, shape, hidden)


class Reader:
    """Knows the oracle: which tokens it takes, and how far its answers may be off."""

    def __init__(self, signature: Signature, copies: int, cover_biases: bool) -> None:
        self.signature, self.space, self.width = signature, signature.space, signature.width
        self.free, self.cover_biases = signature.max_norm is None, cover_biases
        pairs = copies if signature.max_length is None else min(copies, (signature.max_length - 1) // 2)
        # Long first tokens drown the last one without any copies.
        self.layout = Layout(1, 0) if pairs == 0 else Layout(1, 1) if self.free else Layout(pairs, pairs)
        self.longest = floor_power(min(FREE_NORM, self.space.huge ** (1 / 3))) if self.free else signature.norm_limit
        last = self.longest / GROW if self.free else self.longest
        self.longest_last = last if self.layout.minus else last * SHORT_LAST
        # The most that g may weigh against m pairs of tokens without drowning them.
        self.most_own = math.log(max(2.0, self.layout.plus / 2))
        self.least_margin = LEAST_MARGIN if self.layout.minus else LEAST_MARGIN_UNPAIRED

    def _vectors(self, vectors: Any) -> tuple[Rows, Floats]:
        """Vectors as the oracle gets them, and as exact numbers."""
        there = self.space.asarray(vectors)
        return Rows(there), floats(there)

    def _sequences(self, stage: str, first: Term, last: list[Term], count: int) -> Plan:
        other = Term(first.rows, first.index, -1.0)
        return Plan(stage, count, [*[[first]] * self.layout.plus, *[[other]] * self.layout.minus, last])

    def _answered(self, answers: Measurements, value: Value, tokens: int) -> tuple[Floats, float]:
        """Answers of the output in use, and how far they may be off: tolerance, hidden bias and the box's rounding."""
        roundings = (self.width + tokens + EXTRA_ROUNDINGS) * self.space.eps
        hidden = float(value.hidden_bias[value.output]) if self.cover_biases else 0.0
        radius = answers.radius + hidden + roundings * self.longest * value.norm + self.space.tiny
        return answers.by_output[:, value.output], radius

    # --- value, biases and the size of logits -------------------------------------------------------------------

    def read_value(self) -> Steps[tuple[Value, tuple[int, ...]]]:
        """One-token queries: the zero token, which shows an output bias, then every entry."""
        rows, exact = self._vectors(np.concatenate([np.zeros((1, self.width)), self.longest * np.eye(self.width)]))
        answers: Measurements = yield Plan("value", self.width + 1, [[Term(rows)]])
        values = answers.by_output
        radius = answers.radius + EXTRA_ROUNDINGS * self.space.eps * np.abs(values) + self.space.tiny
        if np.any(np.abs(values[0]) > radius[0]):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                f"the zero token is answered {np.max(np.abs(values[0])):.3g}, more than the tolerance "
                f"{answers.radius:.3g}: the box has an output bias, and worst-case radii are for heads without biases",
            )
        hidden = np.abs(values[0]) + radius[0]
        entries = Interval.around(values[1:], radius[1:] + (hidden if self.cover_biases else 0.0))
        entries = entries.over(np.diag(exact[1:])[:, None])
        value = Value(entries.middle, entries.radius, hidden)
        used = np.abs(value.used.middle) / value.used.radius
        if np.all(used <= 1):
            raise self._no_margin(float(np.linalg.norm(used)))
        return value, tuple(answers.values.shape[1:])

    def read_overlap(self, value: Value) -> Steps[Design]:
        """Choose the first tokens, and ask for the value of x_0, which that of all others follows from."""
        rows, along_value = self._vectors(self.longest * value.direction[None, :])
        answers: Measurements = yield Plan("value", 1, [[Term(rows)]])
        along = Interval.around(*self._answered(answers, value, 1))
        leaning = leaning_rows(value.direction)
        height = leaning.height * self.longest
        made = leaning.part[:, None] * along_value + np.tile(np.eye(self.width), (2, 1)) * height[:, None]
        _, exact = self._vectors(np.concatenate([along_value, made]))
        others = along.times(leaning.part) + value.used[np.arange(2 * self.width) % self.width].times(height)
        # What was rounded when rows were made, and the rounding of that difference.
        lost = np.abs(exact[1:] - made) @ value.used.size + 4 * EPS * self.longest * value.norm
        nothing = Interval(np.zeros(2 * self.width + 1), np.zeros(2 * self.width + 1))
        overlap, bias = along.beside(others.widened(lost)), nothing[: self.width]
        design = Design(exact, 1 / height, -leaning.part / height, leaning.shorter, overlap, nothing, bias)
        if not design.margin >= self.least_margin:
            raise self._no_margin(design.margin)
        return design

    def _no_margin(self, margin: float) -> Unrecoverable:
        factor = self.least_margin / max(margin, self.space.tiny)
        remedy = f"a tolerance of at most {self.signature.noise.radius / factor:.2g}"
        if not self.free:
            remedy += f", or a max_norm of at least {self.longest * factor:.2g}"
        return Unrecoverable(
            Outcome.TOO_NOISY,
            f"the margin condition fails: the value of a token is {margin:.2g} times its uncertainty, and "
            f"{self.least_margin:g} times are needed: it takes {remedy}",
        )

    def refuse_score_bias(self, value: Value, design: Design, rng: np.random.Generator) -> Steps[float | None]:
        """A few random tokens at 45° to the value, before a zero last token: their logits are those of the bias alone.

        The largest bias along those tokens that would not have shown, None if no bias would.
        """
        rows, _, overlap = self._random_rows(value, design, rng, BIAS_QUERIES)
        logits = yield from self._before_zero(value, rows, overlap)
        largest = float(np.max(logits.size)) / self.longest
        return largest if math.isfinite(largest) else None

    def _random_rows(
        self, value: Value, design: Design, rng: np.random.Generator, count: int
    ) -> tuple[Rows, Floats, Interval]:
        """Random first tokens at 45° to the value, (count, width), and their values."""
        along, across = design.rows[0] / self.longest, rng.standard_normal((count, self.width))
        across -= (across @ along)[:, None] * along
        size = np.linalg.norm(across, axis=1, keepdims=True)
        both = along + across / np.where(size > 0, size, 1.0)
        rows, exact = self._vectors(self.longest * both / np.linalg.norm(both, axis=1, keepdims=True))
        spread = np.abs(exact) @ value.used.radius + 4 * self.width * self.space.eps * self.longest * value.norm
        return rows, exact, Interval.around(exact @ value.used.middle, spread)

    def bound_score_bias(self, value: Value, design: Design) -> Steps[Design]:
        """The same for all rows, so that every entry of a score bias that did not show has its bound."""
        width, rows = self.width, self._vectors(design.rows[: self.width + 1])[0]
        tilt = yield from self._before_zero(value, rows, design.overlap[: width + 1])
        if not np.all(np.isfinite(tilt.size)):
            raise self._no_margin(design.margin)
        bias = tilt[1:].times(design.own[:width]) + tilt[:1].times(design.first[:width])
        # Rows are rounded when they are made, and so are these differences.
        rounding = 8 * width * self.space.eps * np.linalg.norm(bias.size)
        bias = bias.widened(rounding)
        steep = (bias + tilt[:1].times(-design.first[width:])).over(design.own[width:])
        return replace(design, tilt=tilt.beside(steep.widened(rounding * self.longest)), bias=bias)

    def _before_zero(self, value: Value, rows: Rows, overlap: Interval) -> Steps[Interval]:
        """Logits of rows before a zero last token; refused where they are not zero."""
        count = int(rows.vectors.shape[0])
        answers: Measurements = yield self._sequences("score bias", Term(rows), [], count)
        seen = Interval.around(*self._answered(answers, value, self.layout.length))
        even = overlap.times((self.layout.plus - self.layout.minus) / self.layout.length)
        if np.any(seen.within(even).empty):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                "tokens before a zero token do not all weigh the same: the box has a score bias or is no softmax head, "
                "and worst-case radii are for heads without biases",
            )
        nothing = Interval(np.zeros(count), np.zeros(count))
        return self.layout.logit(seen, nothing, overlap, nothing)

    def pilot(self, value: Value, design: Design, rng: np.random.Generator) -> Steps[float]:
        """The length of last tokens at which typical logits have their aim, from random ones."""
        row = 1 + rng.integers(self.width, size=PILOT_QUERIES)
        directions = rng.standard_normal((PILOT_QUERIES, self.width))
        rows, _ = self._vectors(design.rows[row])
        units, exact = self._vectors(directions / np.linalg.norm(directions, axis=1, keepdims=True))
        scale, limit = 1 / (GROW * self.longest) if self.free else self.longest_last, self.longest_last
        nothing = Interval(np.zeros(PILOT_QUERIES), np.zeros(PILOT_QUERIES))
        for _ in range(MOST_ROUNDS):
            plan = self._sequences("scale", Term(rows), [Term(units, None, scale)], PILOT_QUERIES)
            seen = Interval.around(*self._answered((yield plan), value, self.layout.length))
            last = Interval.around(scale * (exact @ value.used.middle), 0.0)
            logits = self.layout.logit(seen, nothing, design.overlap[row], last)
            if not np.all(np.isfinite(logits.size)):
                limit, scale = scale * SHRINK, scale * SHRINK
            elif np.any(np.abs(logits.middle) > SHOWS * logits.radius) or scale >= limit:
                typical = float(np.sqrt(np.mean(logits.middle**2)))
                return min(limit, scale * BEST_LOGIT / max(typical, self.space.tiny))
            else:
                scale = min(GROW * scale, limit)
        raise self._saturated(PILOT_QUERIES)

    # --- the score matrix ---------------------------------------------------------------------------------------

    def _ask(self, sheet: Sheet, row: Integers, column: Integers, scale: Floats) -> Steps[None]:
        """Ask rows and columns, (n,) each, at their scales; what was answered before is forgotten."""
        rows, units = self._vectors(sheet.design.rows)[0], self._vectors(np.eye(self.width))[0]
        lengths, exact = self._vectors(scale)
        first = Term(rows, self.space.indices(row))
        last = Term(units, self.space.indices(column), lengths.vectors)
        answers: Measurements = yield self._sequences("score", first, [last], len(row))
        centre, radius = self._answered(answers, sheet.value, self.layout.length)
        sheet.answers[row, column], sheet.radius[row, column], sheet.scale[row, column] = centre, radius, exact
        largest = np.maximum(sheet.design.overlap[row].high, sheet.value.used[column].times(exact).size)
        if np.any(np.abs(centre) - radius > largest):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                "an answer does not lie between the values of its tokens: the box is not a softmax average of x·v, "
                "or its errors exceed the tolerance",
            )

    def read_diagonal(self, sheet: Sheet, scale: float) -> Steps[None]:
        """Row x_0 and the diagonal, with a steeper row besides where that alone makes the contraction."""
        every, scales, design = np.arange(self.width), np.full(self.width, scale), sheet.design
        weight = (np.abs(design.own) + np.abs(design.first))[: self.width]
        asking = every
        for _ in range(MOST_ROUNDS):
            steep = asking[weight[asking] * scales[asking] > CONTRACTION]
            sheet.scale[asking + 1 + self.width, asking] = np.nan
            row = np.concatenate([0 * asking, asking + 1, steep + 1 + self.width])
            column = np.concatenate([asking, asking, steep])
            lengths = [scales[asking], scales[asking], design.shorter[steep] * scales[steep]]
            yield from self._ask(sheet, row, column, np.concatenate(lengths))
            diagonal = sheet.diagonal()
            forms = sheet.forms(np.stack([0 * every, every + 1]), every, diagonal)
            logits, own = np.max(np.abs(forms.middle), axis=0) * scales, np.maximum(diagonal.middle, 0.0) * scales**2
            unread = ~np.isfinite(np.max(forms.size, axis=0) + diagonal.size)
            again = unread | (logits > WORST_LOGIT) | (own > 2 * self.most_own)
            asking = every[again]
            if len(asking) == 0:
                return
            shorter = np.fmin(np.fmin(BEST_LOGIT / logits, np.sqrt(self.most_own / own)), 0.5)
            scales[again] *= np.where(unread, SHRINK, shorter)[again]
        raise self._saturated(len(asking))

    def read_rest(self, sheet: Sheet, rng: np.random.Generator) -> Steps[None]:
        """All other entries, a few rows first that tell how long the last token of a column should be."""
        order, few = 1 + rng.permutation(self.width), min(PILOT_QUERIES, self.width)
        for some in (order[:few], order[few:]):
            row, column = (each.ravel() for each in np.meshgrid(some, np.arange(self.width), indexing="ij"))
            other = row != column + 1
            if np.any(other):
                yield from self._ask(sheet, row[other], column[other], self._lengths(sheet)[column[other]])
                yield from self._settle(sheet)
        for _ in range(MOST_ROUNDS):
            # Beside entries that were read at another scale by far, the rounding of a long last token drowns all.
            limit = MOST_ROUNDING / sheet.logit_rounding
            row, column = sheet.asked()
            late = sheet.scale[row, column] > limit[column]
            if not np.any(late):
                return
            yield from self._ask(sheet, row[late], column[late], SHRINK * limit[column[late]])
            yield from self._settle(sheet)

    def _lengths(self, sheet: Sheet) -> Floats:  # (width,)
        """Lengths of last tokens from the forms read so far, of a column and of all."""
        row, column = sheet.asked()
        diagonal = sheet.diagonal()
        forms = sheet.forms(row, column, diagonal)
        # A form that cannot be told from zero may be as large as its radius is; a third of it is a fair guess.
        sizes = np.maximum(np.abs(forms.middle), forms.radius / 3)
        count, total = np.bincount(column, minlength=self.width), np.bincount(column, sizes, self.width)
        typical = (total + 2 * np.mean(sizes)) / (count + 2)
        own = np.sqrt(self.most_own / np.maximum(diagonal.middle, 0.0))
        return np.asarray(np.fmin(np.fmin(MEAN_LOGIT / typical, own), self.longest_last))

    def _settle(self, sheet: Sheet) -> Steps[None]:
        """Ask again, with a shorter last token, what saturates or is read badly."""
        row, column = sheet.asked()
        shrink, ceiling = np.full(len(row), SHRINK), np.full(len(row), self.longest_last)
        for _ in range(MOST_ROUNDS):
            forms, scale = sheet.forms(row, column, sheet.diagonal()), sheet.scale[row, column]
            unread = ~np.isfinite(forms.size)
            logits = np.where(unread, np.inf, np.abs(forms.middle) * scale)
            ceiling = np.where(unread, np.minimum(ceiling, scale / 2), ceiling)
            # Every time in the dark the step is larger, so that no scale is far away ...
            better = np.where(unread, scale * shrink, np.minimum(scale * BEST_LOGIT / logits, ceiling))
            # ... but then a token may have become too short to be read well.
            faint = (shrink < SHRINK) & (better * SHRINK > scale) & (np.abs(forms.middle) > SHOWS * forms.radius)
            again = unread | faint | (logits > WORST_LOGIT)
            if not np.any(again):
                return
            shrink = np.where(unread, shrink**STRIDE, np.where(faint, SHRINK, shrink))
            yield from self._ask(sheet, row[again], column[again], better[again])
        raise self._saturated(int(np.sum(again)))

    def refuse_other_forms(self, sheet: Sheet, score: Interval, rng: np.random.Generator) -> Steps[None]:
        """Random forms at the norms that the score was read at: no held-out answer is as sharp as those radii are."""
        rows, first, overlap = self._random_rows(sheet.value, sheet.design, rng, CHECK_QUERIES)
        directions = rng.standard_normal((CHECK_QUERIES, self.width))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        typical = float(np.sqrt(np.mean(np.sum(first @ score.middle * directions, axis=1) ** 2)))
        limit = np.min(MOST_ROUNDING / sheet.logit_rounding) / self.width
        scale = min(BEST_LOGIT / max(typical, self.space.tiny), self.longest_last, float(limit))
        lasts, last = self._vectors(scale * directions)
        plan = self._sequences("score", Term(rows), [Term(lasts)], CHECK_QUERIES)
        seen = Interval.around(*self._answered((yield plan), sheet.value, self.layout.length))
        rounding = 2 * sheet.rounding * np.linalg.norm(score.size) * np.linalg.norm(last, axis=1)

        def form(vectors: Floats) -> Interval:
            centre = np.sum(vectors @ score.middle * last, axis=1)
            radius = np.sum(np.abs(vectors) @ score.radius * np.abs(last), axis=1)
            tilt = np.abs(vectors) @ sheet.design.bias.size
            return Interval.around(centre, radius + rounding * np.linalg.norm(vectors, axis=1) + tilt)

        spread = np.abs(last) @ sheet.value.used.radius + 4 * self.width * EPS * scale * sheet.value.norm
        logits = self.layout.logit(seen, form(last), overlap, Interval.around(last @ sheet.value.used.middle, spread))
        if np.any(logits.within(form(first)).empty):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                "random tokens have other logits than the score matrix that was read: the box is no softmax head, or "
                "its errors exceed the tolerance",
            )

    @staticmethod
    def _saturated(count: int) -> Unrecoverable:
        return Unrecoverable(
            Outcome.SATURATED,
            f"the norm condition fails: {count} logits stayed at their saturation bound however short the last token: "
            "the box is no softmax head of the declared tolerance, or it takes a smaller tolerance",
        )

    # --- the result ---------------------------------------------------------------------------------------------

    def solved(self, sheet: Sheet) -> tuple[Interval, Interval]:
        """The score matrix and the forms behind it, if there is one."""
        score, forms = sheet.solve()
        if np.any(score.empty):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                "answers at two lengths of the last token contradict each other by more than the tolerance: the box "
                "has a score bias, or is no softmax head",
            )
        if not np.all(np.isfinite(score.size)):
            raise self._saturated(int(np.sum(~np.isfinite(score.size))))
        return score, forms

    def estimated(
        self, sheet: Sheet, score: Interval, forms: Interval, shape: tuple[int, ...], hidden: float | None
    ) -> Estimate:
        """Parameters, radii, and the conditions they rest on."""
        value, design = sheet.value, sheet.design
        vector, around = (part.reshape((self.width, *shape)) for part in (value.vector, value.radius))
        # What cannot be told from nothing is taken for nothing: tokens made for its logits would be of any length.
        silent = bool(np.all(np.abs(score.middle) <= score.radius))
        matrix, reach = (0 * score.middle, score.size) if silent else (score.middle, score.radius)
        radius = SingleHead(self._radius(matrix, reach), self._radius(vector, around))
        if self.cover_biases:
            biases = self._radius(0.0, design.bias.size), self._radius(0.0, value.hidden_bias.reshape(shape))
            radius = replace(radius, score_bias=biases[0], output_bias=biases[1])
        return Estimate(
            params=SingleHead(self.space.asarray(matrix), self.space.asarray(vector)),
            radius=radius,
            counting_bound=self.width**2 + self.width,
            assumptions=ASSUMPTIONS_COVERED if self.cover_biases else ASSUMPTIONS,
            details=self._details(sheet, score, forms, hidden),
        )

    def _radius(self, centre: Floats | float, radius: Floats) -> Any:
        """Radii that also cover the rounding of centre and radius to the oracle's dtype."""
        eps = self.space.spacing
        return self.space.asarray((radius + eps * np.abs(centre)) * (1 + 4 * eps) + self.space.tiny)

    def _details(self, sheet: Sheet, score: Interval, forms: Interval, hidden: float | None) -> dict[str, Any]:
        """Conditions of the theorem in plain numbers."""
        value, design, asked = sheet.value, sheet.design, slice(self.width + 1)
        logits = np.abs(forms.middle) * sheet.scale[asked]
        # The logit at which the answer comes within its own errors of the value of the first token.
        overlap = design.overlap[asked]
        gap = (overlap.radius[:, None] + sheet.radius[asked]) / overlap.middle[:, None]
        strain = float(np.max(logits / np.arctanh(1 - gap)))
        floor = 0.0 if self.free else 2 * self.signature.noise.radius / (self.longest**3 * value.norm)
        return {
            "margin": design.margin,
            "norm": strain,
            "floor": floor,
            "largest_radius": float(np.max(score.radius)),
            "largest_logit": float(np.max(logits)),
            "copies": self.layout.plus,
            "output": value.output,
            "hidden_output_bias": float(np.max(value.hidden_bias)),
            "hidden_score_bias": hidden,
            "conditions": {
                "margin": {"value": design.margin, "needed": self.least_margin, "holds": True},
                "norm": {"value": strain, "needed": 1.0, "holds": strain <= 1.0},
            },
        }
