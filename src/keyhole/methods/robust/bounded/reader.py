"""Answers with any errors of at most τ: the tokens an oracle takes, its value, its biases and the size of logits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.methods.base import BiasDetected, Steps, Unrecoverable
from keyhole.methods.forms.scale import floor_power
from keyhole.methods.robust.bounded.design import EPS, EXTRA_ROUNDINGS, BoundedValue, PairDesign, leaning_rows
from keyhole.methods.robust.bounded.interval import Interval, PairLayout
from keyhole.queries import Measurements, Plan, Signature, Term, TokenRows
from keyhole.recovery import Outcome

# Where norms are free, tokens are this long: no tolerance is left beside rounding, and squares do not overflow.
FREE_NORM = 2.0**100
# Queries with a zero last token, which show a score bias, and queries that find the size of logits.
BIAS_QUERIES = 3
PILOT_QUERIES = 3
# Without tokens −x an answer tells the logit of x over that of g only, so that g must be shorter than x.
SHORT_LAST = 0.25
# The radius of a form is least where its logit is this.
BEST_LOGIT = 0.6
# A logit shows when it is so many times its radius.
SHOWS = 4.0
# Scales move by this factor while logits cannot be read ...
SHRINK = 1 / 8
# ... or by this one, where norms are free, while nothing shows.
GROW = 2.0**20
# More rounds than the range of floating-point numbers needs.
MOST_ROUNDS = 120
# A first token must have a value of so many times its uncertainty: below, not even a logit of zero is well readable.
# Without tokens −x a logit of zero lies half-way between the values of two tokens.
LEAST_MARGIN = 4.0
LEAST_MARGIN_UNPAIRED = 10.0


class BoundedReader:
    """Knows the oracle: which tokens it takes, and how far its answers may be off."""

    def __init__(self, signature: Signature, copies: int, cover_biases: bool) -> None:
        self.signature, self.space, self.width = signature, signature.space, signature.width
        self.free, self.cover_biases = signature.max_norm is None, cover_biases
        pairs = copies if signature.max_length is None else min(copies, (signature.max_length - 1) // 2)
        # Long first tokens drown the last one without any copies.
        self.layout = PairLayout(1, 0) if pairs == 0 else PairLayout(1, 1) if self.free else PairLayout(pairs, pairs)
        self.longest = floor_power(min(FREE_NORM, self.space.huge ** (1 / 3))) if self.free else signature.norm_limit
        last = self.longest / GROW if self.free else self.longest
        self.longest_last = last if self.layout.minus else last * SHORT_LAST
        # The most that g may weigh against m pairs of tokens without drowning them.
        self.most_own = math.log(max(2.0, self.layout.plus / 2))
        self.least_margin = LEAST_MARGIN if self.layout.minus else LEAST_MARGIN_UNPAIRED

    def vectors(self, vectors: Any) -> tuple[TokenRows, Floats]:
        """Vectors as the oracle gets them, and as exact numbers."""
        there = self.space.asarray(vectors)
        return TokenRows(there), floats(there)

    def sequences(self, stage: str, first: Term, last: list[Term], count: int) -> Plan:
        """Copies of a first token and of its opposite, then a last token."""
        other = Term(first.rows, first.index, -1.0)
        return Plan(stage, count, [*[[first]] * self.layout.plus, *[[other]] * self.layout.minus, last])

    def solve_answers(self, answers: Measurements, value: BoundedValue, tokens: int) -> tuple[Floats, float]:
        """Answers of the output in use, and how far they may be off: tolerance, hidden bias and rounding."""
        roundings = (self.width + tokens + EXTRA_ROUNDINGS) * self.space.eps
        hidden = float(value.hidden_bias[value.output]) if self.cover_biases else 0.0
        radius = answers.radius + hidden + roundings * self.longest * value.norm + self.space.tiny
        return answers.by_output[:, value.output], radius

    def ask_value(self) -> Steps[tuple[BoundedValue, tuple[int, ...]]]:
        """One-token queries: the zero token, which shows an output bias, then every entry."""
        rows, exact = self.vectors(np.concatenate([np.zeros((1, self.width)), self.longest * np.eye(self.width)]))
        answers: Measurements = yield Plan("value", self.width + 1, [[Term(rows)]])
        values = answers.by_output
        radius = answers.radius + EXTRA_ROUNDINGS * self.space.eps * np.abs(values) + self.space.tiny
        if np.any(np.abs(values[0]) > radius[0]):
            raise BiasDetected(
                f"the zero token is answered {np.max(np.abs(values[0])):.3g}, more than the tolerance "
                f"{answers.radius:.3g}: the box has an output bias, and worst-case radii are for heads without biases"
            )
        hidden = np.abs(values[0]) + radius[0]
        entries = Interval.around(values[1:], radius[1:] + (hidden if self.cover_biases else 0.0))
        entries = entries.over(np.diag(exact[1:])[:, None])
        value = BoundedValue(entries.middle, entries.radius, hidden)
        used = np.abs(value.used.middle) / value.used.radius
        if np.all(used <= 1):
            raise self._no_margin(float(np.linalg.norm(used)))
        return value, tuple(answers.values.shape[1:])

    def ask_overlap(self, value: BoundedValue) -> Steps[PairDesign]:
        """Choose the first tokens, and ask for the value of x_0, which that of all others follows from."""
        rows, along_value = self.vectors(self.longest * value.direction[None, :])
        answers: Measurements = yield Plan("value", 1, [[Term(rows)]])
        along = Interval.around(*self.solve_answers(answers, value, 1))
        part, height, shorter = leaning_rows(value.direction)
        height = height * self.longest
        made = part[:, None] * along_value + np.tile(np.eye(self.width), (2, 1)) * height[:, None]
        _, exact = self.vectors(np.concatenate([along_value, made]))
        others = along.times(part) + value.used[np.arange(2 * self.width) % self.width].times(height)
        # What was rounded when rows were made, and the rounding of that difference.
        lost = np.abs(exact[1:] - made) @ value.used.size + 4 * EPS * self.longest * value.norm
        nothing = Interval(np.zeros(2 * self.width + 1), np.zeros(2 * self.width + 1))
        overlap, bias = along.beside(others.widen(lost)), nothing[: self.width]
        design = PairDesign(exact, 1 / height, -part / height, shorter, overlap, nothing, bias)
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

    def ask_bias_check(self, value: BoundedValue, design: PairDesign, rng: np.random.Generator) -> Steps[float | None]:
        """A few random tokens at 45° to the value, before a zero last token: their logits are those of the bias alone.

        The largest bias along those tokens that would not have shown, None if no bias would.
        """
        rows, _, overlap = self.random_rows(value, design, rng, BIAS_QUERIES)
        logits = yield from self._ask_before_zero(value, rows, overlap)
        largest = float(np.max(logits.size)) / self.longest
        return largest if math.isfinite(largest) else None

    def random_rows(
        self, value: BoundedValue, design: PairDesign, rng: np.random.Generator, count: int
    ) -> tuple[TokenRows, Floats, Interval]:
        """Random first tokens at 45° to the value, (count, width), and their values."""
        along, across = design.rows[0] / self.longest, rng.standard_normal((count, self.width))
        across -= (across @ along)[:, None] * along
        size = np.linalg.norm(across, axis=1, keepdims=True)
        both = along + across / np.where(size > 0, size, 1.0)
        rows, exact = self.vectors(self.longest * both / np.linalg.norm(both, axis=1, keepdims=True))
        spread = np.abs(exact) @ value.used.radius + 4 * self.width * self.space.eps * self.longest * value.norm
        return rows, exact, Interval.around(exact @ value.used.middle, spread)

    def ask_bias_bound(self, value: BoundedValue, design: PairDesign) -> Steps[PairDesign]:
        """A design that bounds every entry of a score bias that was not detected, from all rows beside a zero token."""
        width, rows = self.width, self.vectors(design.rows[: self.width + 1])[0]
        tilt = yield from self._ask_before_zero(value, rows, design.overlap[: width + 1])
        if not np.all(np.isfinite(tilt.size)):
            raise self._no_margin(design.margin)
        bias = tilt[1:].times(design.own[:width]) + tilt[:1].times(design.first[:width])
        # Rows are rounded when they are made, and so are these differences.
        rounding = 8 * width * self.space.eps * np.linalg.norm(bias.size)
        bias = bias.widen(rounding)
        steep = (bias + tilt[:1].times(-design.first[width:])).over(design.own[width:])
        return replace(design, tilt=tilt.beside(steep.widen(rounding * self.longest)), bias=bias)

    def _ask_before_zero(self, value: BoundedValue, rows: TokenRows, overlap: Interval) -> Steps[Interval]:
        """Logits of rows before a zero last token; refused where they are not zero."""
        count = int(rows.vectors.shape[0])
        answers: Measurements = yield self.sequences("score bias", Term(rows), [], count)
        seen = Interval.around(*self.solve_answers(answers, value, self.layout.length))
        even = overlap.times((self.layout.plus - self.layout.minus) / self.layout.length)
        if np.any(seen.within(even).empty):
            raise BiasDetected(
                "tokens before a zero token do not all weigh the same: the box has a score bias or is no softmax head, "
                "and worst-case radii are for heads without biases"
            )
        nothing = Interval(np.zeros(count), np.zeros(count))
        return self.layout.logit(seen, nothing, overlap, nothing)

    def ask_scale(self, value: BoundedValue, design: PairDesign, rng: np.random.Generator) -> Steps[float]:
        """The length of last tokens at which typical logits have their aim, from random ones."""
        row = 1 + rng.integers(self.width, size=PILOT_QUERIES)
        directions = rng.standard_normal((PILOT_QUERIES, self.width))
        rows, _ = self.vectors(design.rows[row])
        units, exact = self.vectors(directions / np.linalg.norm(directions, axis=1, keepdims=True))
        scale, limit = 1 / (GROW * self.longest) if self.free else self.longest_last, self.longest_last
        nothing = Interval(np.zeros(PILOT_QUERIES), np.zeros(PILOT_QUERIES))
        for _ in range(MOST_ROUNDS):
            plan = self.sequences("scale", Term(rows), [Term(units, None, scale)], PILOT_QUERIES)
            seen = Interval.around(*self.solve_answers((yield plan), value, self.layout.length))
            last = Interval.around(scale * (exact @ value.used.middle), 0.0)
            logits = self.layout.logit(seen, nothing, design.overlap[row], last)
            if not np.all(np.isfinite(logits.size)):
                limit, scale = scale * SHRINK, scale * SHRINK
            elif np.any(np.abs(logits.middle) > SHOWS * logits.radius) or scale >= limit:
                typical = float(np.sqrt(np.mean(logits.middle**2)))
                return min(limit, scale * BEST_LOGIT / max(typical, self.space.tiny))
            else:
                scale = min(GROW * scale, limit)
        raise saturation_error(PILOT_QUERIES)


def saturation_error(count: int) -> Unrecoverable:
    """What to raise where logits cannot be read."""
    return Unrecoverable(
        Outcome.SATURATED,
        f"the norm condition fails: {count} logits stayed at their saturation bound however short the last token: "
        "the box is no softmax head of the declared tolerance, or it takes a smaller tolerance",
    )
