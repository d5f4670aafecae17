"""Answers with any errors of at most τ: the score matrix, entry by entry, each at the length that reads it best."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats, Integers
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.robust.bounded.design import CONTRACTION, EPS, ScoreTable
from keyhole.methods.robust.bounded.interval import Interval
from keyhole.methods.robust.bounded.reader import (
    BEST_LOGIT,
    MOST_ROUNDS,
    PILOT_QUERIES,
    SHOWS,
    SHRINK,
    BoundedReader,
    saturation_error,
)
from keyhole.queries import Measurements, Term
from keyhole.recovery import Outcome

# Where norms are free, queries that compare random forms with the result.
CHECK_QUERIES = 3
# The radius of a form is least at BEST_LOGIT; at this one it is twice that, and then asking again pays.
WORST_LOGIT = 1.5
# Mean logit aimed at: one in forty normal ones is then beyond the worst.
MEAN_LOGIT = 0.5
# While logits cannot be read, the factor by which a token is shortened grows by this power every further time.
STRIDE = 1.5
# A last token is no longer than that the rounding of its logit may be this large.
MOST_ROUNDING = 0.01


class ScoreReader:
    """Asks for the score matrix, and fills its table with answers."""

    def __init__(self, reader: BoundedReader, table: ScoreTable) -> None:
        self.reader, self.table, self.space, self.width = reader, table, reader.space, reader.width

    def ask(self, row: Integers, column: Integers, scale: Floats) -> Steps[None]:
        """Ask rows and columns, (n,) each, at their scales; what was answered before is forgotten."""
        reader, table = self.reader, self.table
        rows, units = reader.vectors(table.design.rows)[0], reader.vectors(np.eye(self.width))[0]
        lengths, exact = reader.vectors(scale)
        first = Term(rows, self.space.indices(row))
        last = Term(units, self.space.indices(column), lengths.vectors)
        answers: Measurements = yield reader.sequences("score", first, [last], len(row))
        centre, radius = reader.solve_answers(answers, table.value, reader.layout.length)
        table.answers[row, column], table.radius[row, column], table.scale[row, column] = centre, radius, exact
        largest = np.maximum(table.design.overlap[row].high, table.value.used[column].times(exact).size)
        if np.any(np.abs(centre) - radius > largest):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                "an answer does not lie between the values of its tokens: the box is not a softmax average of x·v, "
                "or its errors exceed the tolerance",
            )

    def ask_diagonal(self, scale: float) -> Steps[None]:
        """Row x_0 and the diagonal, with a steeper row besides where that alone makes the contraction."""
        every, scales, design = np.arange(self.width), np.full(self.width, scale), self.table.design
        weight = (np.abs(design.own) + np.abs(design.first))[: self.width]
        asking = every
        for _ in range(MOST_ROUNDS):
            steep = asking[weight[asking] * scales[asking] > CONTRACTION]
            self.table.scale[asking + 1 + self.width, asking] = np.nan
            row = np.concatenate([0 * asking, asking + 1, steep + 1 + self.width])
            column = np.concatenate([asking, asking, steep])
            lengths = [scales[asking], scales[asking], design.shorter[steep] * scales[steep]]
            yield from self.ask(row, column, np.concatenate(lengths))
            diagonal = self.table.diagonal()
            forms = self.table.forms(np.stack([0 * every, every + 1]), every, diagonal)
            logits, own = np.max(np.abs(forms.middle), axis=0) * scales, np.maximum(diagonal.middle, 0.0) * scales**2
            unread = ~np.isfinite(np.max(forms.size, axis=0) + diagonal.size)
            again = unread | (logits > WORST_LOGIT) | (own > 2 * self.reader.most_own)
            asking = every[again]
            if len(asking) == 0:
                return
            shorter = np.fmin(np.fmin(BEST_LOGIT / logits, np.sqrt(self.reader.most_own / own)), 0.5)
            scales[again] *= np.where(unread, SHRINK, shorter)[again]
        raise saturation_error(len(asking))

    def ask_rest(self, rng: np.random.Generator) -> Steps[None]:
        """All other entries, a few rows first that determine the norm of each column's last token."""
        order, few = 1 + rng.permutation(self.width), min(PILOT_QUERIES, self.width)
        for some in (order[:few], order[few:]):
            row, column = (each.ravel() for each in np.meshgrid(some, np.arange(self.width), indexing="ij"))
            new = ~np.isfinite(self.table.scale[row, column])
            if np.any(new):
                yield from self.ask(row[new], column[new], self.lengths()[column[new]])
                yield from self.ask_again()
        for _ in range(MOST_ROUNDS):
            # Beside entries that were read at another scale by far, the rounding of a long last token drowns all.
            limit = MOST_ROUNDING / self.table.logit_rounding()
            row, column = self.table.entries_to_ask()
            late = self.table.scale[row, column] > limit[column]
            if not np.any(late):
                return
            yield from self.ask(row[late], column[late], SHRINK * limit[column[late]])
            yield from self.ask_again()

    def lengths(self) -> Floats:  # (width,)
        """Lengths of last tokens from the forms read so far, of a column and of all."""
        row, column = self.table.entries_to_ask()
        diagonal = self.table.diagonal()
        forms = self.table.forms(row, column, diagonal)
        # A form that cannot be told from zero may be as large as its radius is; a third of it is a fair guess.
        sizes = np.maximum(np.abs(forms.middle), forms.radius / 3)
        count, total = np.bincount(column, minlength=self.width), np.bincount(column, sizes, self.width)
        typical = (total + 2 * np.mean(sizes)) / (count + 2)
        own = np.sqrt(self.reader.most_own / np.maximum(diagonal.middle, 0.0))
        return np.asarray(np.fmin(np.fmin(MEAN_LOGIT / typical, own), self.reader.longest_last))

    def ask_again(self) -> Steps[None]:
        """Ask again, with a shorter last token, what saturates or is read badly."""
        row, column = self.table.entries_to_ask()
        shrink, ceiling = np.full(len(row), SHRINK), np.full(len(row), self.reader.longest_last)
        for _ in range(MOST_ROUNDS):
            forms, scale = self.table.forms(row, column, self.table.diagonal()), self.table.scale[row, column]
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
            yield from self.ask(row[again], column[again], better[again])
        raise saturation_error(int(np.sum(again)))

    def ask_form_check(self, score: Interval, rng: np.random.Generator) -> Steps[None]:
        """Random forms at the norms that the score was read at: no held-out answer is as sharp as those radii are."""
        reader, table = self.reader, self.table
        rows, first, overlap = reader.random_rows(table.value, table.design, rng, CHECK_QUERIES)
        directions = rng.standard_normal((CHECK_QUERIES, self.width))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        typical = float(np.sqrt(np.mean(np.sum(first @ score.middle * directions, axis=1) ** 2)))
        limit = np.min(MOST_ROUNDING / table.logit_rounding(score)) / self.width
        scale = min(BEST_LOGIT / max(typical, self.space.tiny), reader.longest_last, float(limit))
        lasts, last = reader.vectors(scale * directions)
        plan = reader.sequences("score", Term(rows), [Term(lasts)], CHECK_QUERIES)
        seen = Interval.around(*reader.solve_answers((yield plan), table.value, reader.layout.length))
        rounding = 2 * table.rounding * np.linalg.norm(score.size) * np.linalg.norm(last, axis=1)

        def form(vectors: Floats) -> Interval:
            centre = np.sum(vectors @ score.middle * last, axis=1)
            radius = np.sum(np.abs(vectors) @ score.radius * np.abs(last), axis=1)
            tilt = np.abs(vectors) @ table.design.bias.size
            return Interval.around(centre, radius + rounding * np.linalg.norm(vectors, axis=1) + tilt)

        spread = np.abs(last) @ table.value.used.radius + 4 * self.width * EPS * scale * table.value.norm
        logits = reader.layout.logit(seen, form(last), overlap, Interval.around(last @ table.value.used.middle, spread))
        if np.any(logits.within(form(first)).empty):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                "random tokens have other logits than the score matrix that was read: the box is no softmax head, or "
                "its errors exceed the tolerance",
            )

    def solve(self) -> Interval:
        """The score matrix, if there is one."""
        score = self.table.solve()
        if np.any(score.empty):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                "answers at two lengths of the last token contradict each other by more than the tolerance: the box "
                "has a score bias, or is no softmax head",
            )
        if not np.all(np.isfinite(score.size)):
            raise saturation_error(int(np.sum(~np.isfinite(score.size))))
        return score
