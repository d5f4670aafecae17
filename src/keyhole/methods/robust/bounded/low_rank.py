"""Answers with any errors of at most τ: a score matrix of low rank from a random sketch of it and a few columns.

With v̂ along the value, W = v̂·(v̂ᵀW) + W_⊥. The first part is read, column by column. Of W_⊥ a few random rows t_k ⊥ v̂
are read, R = T·W_⊥, and r of its columns C, those that pivoted elimination of R chooses. A column b of W_⊥ is
C·m + T_b, where U·m = R_b for the part U of R in the chosen columns, and T_b is what those do not span. Of R more rows
are read than its rank. What they leave of R_b bounds T_b: its image under random rows is small only if it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from scipy.linalg import qr
from scipy.special import gammaincinv

from keyhole.arrays import Floats, Integers
from keyhole.methods.base import Steps
from keyhole.methods.robust.bounded.design import SAFE
from keyhole.methods.robust.bounded.interval import Interval
from keyhole.methods.robust.bounded.reader import MOST_ROUNDS
from keyhole.methods.robust.bounded.score import ScoreReader
from keyhole.numerics.svd import pseudo_inverse, singular_values
from keyhole.queries import Measurements, Plan, Term

# Rows of the sketch beyond its rank. A part that hides from one of them is likely, from all of them it is not.
CHECKS = 5
# Probability that some column has a part that hides from all of them and is larger than its radius says.
UNLUCKY = 1e-5
# Beyond so many standard deviations a row does not meet a column that has nothing to do with it.
DEVIATIONS = 5.0
# Rows of the sketch, and columns but one, that tell whether the rank is low at all: so many, or so much of the width.
PILOT, PILOT_SHARE = 4, 1 / 6
# A sketch that costs more of all entries than this saves too little for what it adds to radii.
WORTH = 0.7
# Rows are added where radii are too wide, up to so many.
MOST_CHECKS = 15


@dataclass(frozen=True, eq=False)
class LowRankScore:
    """A score matrix made of a sketch and some columns."""

    score: Interval  # (width, width)
    rank: int  # that could be told from lower ones
    tail: float  # largest entry that may hide from the sketch


@final
class LowRankReader:
    """Asks for a sketch of the score matrix and for the columns that it chooses."""

    def __init__(self, entries: ScoreReader, rng: np.random.Generator) -> None:
        self.entries, self.table, self.reader, self.rng = entries, entries.table, entries.reader, rng
        self.width = entries.width
        self.rows = np.zeros(0, dtype=np.int64)  # of the table, random ones
        self.along = np.zeros(0)  # (rows,) their part of x_0; the rest is across it
        self.pivots = self.rows  # columns
        self.across = 0.0  # norm of that rest, the same for all

    def ask(self) -> Steps[LowRankScore | None]:
        """The score matrix where its rank is low enough to save queries; None elsewhere."""
        count = max(PILOT, int(PILOT_SHARE * self.width))
        if not self._pays(1):
            return None
        columns = self.rng.permutation(self.width)
        yield from self._ask_rows(count)
        yield from self._ask_table(self.rows, columns[: count + 1])
        if (rank := self._rank(columns[: count + 1])) == count:
            return None
        self.rows, self.along = (
            self.rows[: rank + CHECKS],
            self.along[: rank + CHECKS],
        )  # the others have done their part
        yield from self._ask_table(self.rows, columns[count + 1 :])
        every = np.arange(self.width)
        while (missing := (rank := self._rank(every)) + CHECKS - len(self.rows)) > 0:
            if not self._pays(rank):
                return None
            yield from self._ask_further(missing)
        self.pivots = self._choose_columns(rank)
        yield from self._ask_table(1 + every, self.pivots)
        return self._solve()

    def ask_more(self) -> Steps[LowRankScore | None]:
        """The score matrix from more rows, which make its radii finer; None where that would cost as much as all."""
        rank, checks = len(self.pivots), len(self.rows) - len(self.pivots)
        more = min(CHECKS, MOST_CHECKS - checks, int(WORTH * self.width) - 2 * rank - checks)
        if more <= 0:
            return None
        yield from self._ask_further(more)
        return self._solve()

    def _pays(self, rank: int) -> bool:
        return 2 * rank + CHECKS < WORTH * self.width

    def _ask_further(self, count: int) -> Steps[None]:
        """More random rows, at all columns."""
        yield from self._ask_rows(count)
        yield from self._ask_table(self.rows[-count:], np.arange(self.width))

    def _ask_rows(self, count: int) -> Steps[None]:
        """More random rows, and their values, each from a query of its own."""
        value, design = self.table.value, self.table.design
        tokens, exact, _ = self.reader.random_rows(value, design, self.rng, count)
        answers: Measurements = yield Plan("value", count, [[Term(tokens)]])
        overlap = Interval.around(*self.reader.solve_answers(answers, value, 1))
        number = self.table.add_rows(exact, overlap)
        first = design.rows[0]
        along = exact @ first / (first @ first)
        self.across = float(np.min(np.linalg.norm(exact - along[:, None] * first, axis=1))) / SAFE
        self.rows, self.along = np.concatenate([self.rows, number]), np.concatenate([self.along, along])

    def _ask_table(self, rows: Integers, columns: Integers) -> Steps[None]:
        """Rows at columns, but for what was asked before, then again what was read badly."""
        row, column = (each.ravel() for each in np.meshgrid(rows, columns, indexing="ij"))
        new = ~np.isfinite(self.table.scale[row, column])
        if np.any(new):
            yield from self.entries.ask(row[new], column[new], self.entries.lengths()[column[new]])
            yield from self.entries.ask_again()

    def _sketch(self, columns: Integers, size: Floats | None = None) -> Interval:  # (rows, columns)
        """Forms of the parts of rows that are across the value."""
        diagonal = self.table.diagonal(size)
        forms, first = (self.table.forms(rows[:, None], columns[None, :], diagonal, size) for rows in self._both)
        # Rows are rounded when they are made, which the rounding of forms covers.
        return forms + first.times(-self.along[:, None])

    @property
    def _both(self) -> tuple[Integers, Integers]:
        return self.rows, 0 * self.rows

    def _rank(self, columns: Integers) -> int:
        """How many singular values of the sketch are not errors."""
        sketch = self._sketch(columns)
        if not np.all(np.isfinite(sketch.size)):
            return len(self.rows)  # nothing can be said
        sizes = singular_values(sketch.middle)
        return int(np.sum(sizes > np.linalg.norm(sketch.radius)))

    def _choose_columns(self, rank: int) -> Integers:  # (rank,)
        """Columns that span the others with small coefficients."""
        _, _, order = qr(self._sketch(np.arange(self.width)).middle, mode="economic", pivoting=True)
        return np.asarray(order[:rank], dtype=np.int64)

    def _solve(self) -> LowRankScore | None:
        """The score matrix of least radii, made of all or fewer of the chosen columns, with all rounding."""
        size, every = np.zeros(self.width), np.arange(self.width)
        for _ in range(MOST_ROUNDS):
            sketch, diagonal = self._sketch(every, size), self.table.diagonal(size)
            if not np.all(np.isfinite(sketch.size)):
                return None
            made = [self._assemble(self.pivots[:rank], sketch, diagonal, size) for rank in range(len(self.pivots) + 1)]
            found = min(made, key=lambda each: float(np.linalg.norm(each.score.radius)))
            seen = np.linalg.norm(found.score.size, axis=0)
            if not np.all(np.isfinite(seen)) or np.any(found.score.empty):
                return None
            if np.all(seen <= size):
                return found
            # Rounding is proportional to the columns; twice what they seem covers what rounding adds to them.
            size = np.maximum(size, 2 * seen)
        return None

    def _assemble(self, pivots: Integers, sketch: Interval, diagonal: Interval, size: Floats) -> LowRankScore:
        """The score matrix whose columns are spanned by the chosen ones, for columns of norms of at most `size`."""
        every, table, rank = np.arange(self.width), self.table, len(pivots)
        columns = self._columns(pivots, diagonal, size)
        mixture, wrong, tail = self._mixture(pivots, sketch)
        around = np.abs(columns.middle) @ wrong + columns.radius @ (np.abs(mixture) + wrong) + tail
        rounding = 4 * (rank + 1) * np.finfo(np.float64).eps * np.abs(columns.middle) @ np.abs(mixture)
        first = table.forms(0 * every, every, diagonal, size)  # (width,) x_0·W_b
        along = first[None, :].times(self._unit[:, None])
        score = Interval.around(columns.middle @ mixture, SAFE * around + rounding) + along
        entry = score[every, every].within(diagonal)
        score.low[every, every], score.high[every, every] = entry.low, entry.high
        return LowRankScore(score, rank, float(np.max(tail)))

    def _mixture(self, pivots: Integers, sketch: Interval) -> tuple[Floats, Floats, Floats]:
        """Coefficients (rank, width) of all columns in the chosen ones, their radii, and what is not spanned (width,).

        U·m = R_b − T·T_b for the chosen part U of the sketch R. With N = U⁺ of the centres, an error e of N·R_b has
        |e| ≤ |N·U − 1|·|e| + |N|·(radii) + |N·T·T_b|, so that e acts back on itself.
        """
        rank, part = len(pivots), sketch[:, pivots]
        inverse = pseudo_inverse(part.middle)  # (rank, rows)
        mixture = inverse @ sketch.middle
        left = sketch.middle - part.middle @ mixture
        errors = sketch.radius + part.radius @ np.abs(mixture)
        # What the chosen columns do not span: random rows show all but a small part of it.
        tail = np.linalg.norm(np.abs(left) + errors, axis=0) * SAFE * self._hiding(len(self.rows) - rank)
        met = DEVIATIONS * self.across * (self.width - 1) ** -0.5 * np.linalg.norm(inverse, axis=1)  # (rank,)
        own = np.abs(inverse) @ part.radius + np.abs(inverse @ part.middle - np.eye(rank))
        wrong = np.full(mixture.shape, np.inf)
        if rank == 0 or np.max(np.abs(np.linalg.eigvals(own))) < 1 / SAFE:
            known = np.abs(inverse @ left) + np.abs(inverse) @ errors + met[:, None] * tail
            wrong = np.abs(np.linalg.solve(np.eye(rank) - own, known)) * SAFE
        wrong[:, pivots], mixture[:, pivots], tail[pivots] = 0.0, np.eye(rank), 0.0
        return mixture, wrong, tail

    @property
    def _unit(self) -> Floats:  # (width,)
        """v̂ over the norm of x_0: times a form of x_0 it is the part along the value."""
        first = self.table.design.rows[0]
        return np.asarray(first / (first @ first))

    def _columns(self, pivots: Integers, diagonal: Interval, size: Floats) -> Interval:  # (width, rank)
        """The chosen columns without their part along the value."""
        table, design, every = self.table, self.table.design, np.arange(self.width)
        forms = table.forms(1 + every[:, None], pivots[None, :], diagonal, size)
        first = table.forms(0 * every[:, None], pivots[None, :], diagonal, size)
        own = forms.times(design.own[: self.width, None])
        both = own + first.times((design.first[: self.width] - self._unit)[:, None])
        return both.widen(table.lost[: self.width, None] * size[pivots])

    def _hiding(self, checks: int) -> float:
        """How many times as large as what is left of it in random rows a part may be, but for unlucky ones."""
        chance = UNLUCKY / self.width
        least = float(np.sqrt(2 * gammaincinv(checks / 2, chance)))
        return float((self.width - 1) ** 0.5 / (self.across * least))
