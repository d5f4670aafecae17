"""Adaptive cross approximation of the score matrix from bilinear forms, at the counting bound of its rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from keyhole.arrays import Array, Space
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.columns import Draft, FormTable, PartialColumns, Score, ScoreColumns
from keyhole.methods.forms.cross_basis import CrossBasis
from keyhole.methods.forms.reader import FormReader, Forms
from keyhole.queries import TokenRows
from keyhole.recovery import Outcome

# Directions that must be consistent with the columns so far before the rank is believed.
CONSISTENT_DIRECTIONS = 4
# Directions are taken one by one while the rank is small, so that not a query is wasted; then in blocks of a
# fraction of the rank so far, which keeps the rounds few and wastes some rank²/16 queries, none at full rank.
SINGLE_DIRECTIONS = 17
BLOCK_FRACTION = 4
LARGEST_BLOCK = 512  # which bounds the memory of a block beside that of the matrix
# Columns that would carry more than this many times the errors of the complete columns are not worth the queries saved:
# the column space is known along unlucky directions, and one more column mends it.
LARGEST_AMPLIFICATION = 512.0
LARGEST_AMPLIFICATION_OF_TAIL = 8.0  # what was left out on purpose is larger than rounding, and stays as it is
COARSEST = 2.0**-6  # part of a form that an error may become, amplified
MOST_EXTRA_COLUMNS = 8
# A score is taken for zero when so many forms more than the probe are zero within four radii. Of a matrix of rank one,
# whose forms are the smallest, one form is below x of its usual size with a chance of about x·(1 + log 1/x)·2/π: five
# forms of a matrix with an entry of this many radii times the width are all so small once in some 5,000.
MORE_ZEROS, ZERO_RADII = 4, 64.0


def ask_score(
    reader: FormReader,
    rng: np.random.Generator,
    draft: Draft,
    tolerance: float = 0.0,
    bases: tuple[Array, Array, Array] | None = None,
) -> Steps[Score | None]:
    """Adaptive cross approximation of the score matrix, of unknown rank; None when an unexpected score bias shows.

    Each new direction is asked for at the pivot rows that determine the column space so far and at one check
    row. Inconsistent: the column is completed, with nothing wasted. Consistent: it is done; after
    four in a row the rank is believed and the other directions need `rank` queries each. What is below `tolerance`
    of the whole, relatively, counts as nothing. `bases` are rows, the inverse of their matrix and orthonormal
    directions where the reader has its own, of either only some if it knows the others.
    """
    if bases is None:  # in the bases of a reader columns are of its own making, which nobody who watches would know
        reader.so_far = draft.sketch
    return (yield from _CrossApproximation(reader, rng, ScoreColumns(reader, rng, draft, tolerance, bases)).run())


@final
class _CrossApproximation:
    def __init__(self, reader: FormReader, rng: np.random.Generator, columns: ScoreColumns) -> None:
        self.reader, self.rng, self.columns = reader, rng, columns
        self.space, self.width = columns.space, columns.width
        self.unchecked = columns.special  # rows whose consistency says what that of others does not
        self.consistent = 0  # directions in a row that were consistent with the columns so far
        self.pending: list[tuple[int, FormTable, list[int]]] = []  # (direction, its forms, rows they are known at)

    @property
    def cross(self) -> CrossBasis:
        """The basis of the columns."""
        return self.columns.cross

    @property
    def left(self) -> TokenRows:
        """The rows."""
        return self.columns.left

    @property
    def right(self) -> TokenRows:
        """The directions."""
        return self.columns.right

    def run(self) -> Steps[Score | None]:
        special = self.columns.special
        probe = yield from self.reader.ask_probe(*self.columns.probes(self.rng))
        if not probe.responds:
            return (yield from self._ask_zeros(float(probe.forms.radius[0])))
        # The form of the probe is wanted anyway, and at another scale it shows a score bias.
        first = 0 if special else probe.number
        index = self.space.indices([first])
        forms = yield from self.reader.ask_forms("directions", self.left, self.right, index, index)
        hidden_bias = self.reader.undetected_bias(probe, forms) if self.reader.negligible_last else 0.0
        if hidden_bias is None:
            return None
        yield from self._ask_completion([first], [first], _table(forms, 1))
        left = [direction for direction in range(self.right.vectors.shape[0]) if direction != first]
        while left and self.consistent < CONSISTENT_DIRECTIONS:
            rank = len(self.cross.pivots)
            block = 1 if rank < SINGLE_DIRECTIONS else min(rank // BLOCK_FRACTION, LARGEST_BLOCK)
            yield from self._ask_directions(left[:block])
            left = left[block:]
        yield from self._ask_unsure()
        yield from self._ask_by_rank(left)
        yield from self._ask_extra_columns()
        yield from self._ask_coarse()
        return self.columns.assemble(hidden_bias)

    def _ask_zeros(self, radius: float) -> Steps[Score]:
        """A score of zero, when further forms cannot be told from zero either."""
        xp, count = self.space.xp, self.right.vectors.shape[0]
        zero = self.space.zeros(self.columns.inverse.shape[0], count)
        pairs = [(row, other) for other in range(1, count) for row in range(self.width) if row != other][:MORE_ZEROS]
        if pairs:  # of a score of one number the probe has told all
            rows, directions = (self.space.indices(each) for each in zip(*pairs, strict=True))
            forms = yield from self.reader.ask_forms("scale", self.left, self.right, rows, directions)
            if bool(xp.any(xp.abs(forms.values) > 4 * forms.radius)):
                message = "some forms of the score can be told from zero and others cannot: allow longer tokens"
                raise Unrecoverable(Outcome.TOO_NOISY, message)
            radius = max(radius, float(xp.max(forms.radius)))
        return Score(zero, zero + ZERO_RADII * self.width * radius, 0)

    def _ask_table(self, rows: list[int], directions: list[int], stage: str) -> Steps[FormTable]:
        forms = yield from self.reader.ask_forms(stage, self.left, self.right, *_pairs(self.space, rows, directions))
        return _table(forms, len(rows))

    def _ask_directions(self, directions: list[int]) -> Steps[None]:
        """Ask for new directions at the pivots and at as many check rows, then for whatever else they need."""
        pivots = set(self.cross.pivots)
        apart = pivots.union(self.unchecked)
        others = [row for row in range(self.width) if row not in apart]
        checks = [row for row in self.unchecked if row not in pivots]
        checks = [*checks, *self.rng.permutation(others)[: len(directions)].tolist()][: len(directions)]
        rows = [*self.cross.pivots, *checks]
        table = yield from self._ask_table(rows, directions, "directions")
        yield from self._ask_completion(directions, rows, table)

    def _ask_completion(self, directions: list[int], rows: list[int], table: FormTable) -> Steps[None]:
        """Complete the columns of directions that enlarge the column space, and put off those that do not."""
        known = set(rows)
        missing = [row for row in self.cross.pivots if row not in known]
        if missing:
            table = FormTable.concat(table, (yield from self._ask_table(missing, directions, "directions")))
        pivots = set(self.cross.pivots)
        checks = [row for row in rows if row not in pivots]
        place = {row: number for number, row in enumerate(rows + missing)}
        before, rows = rows, [*self.cross.pivots, *checks]
        table = table if rows == before else table.take(self.space.indices([place[row] for row in rows]))
        if not pivots or len(rows) == self.width:
            yield from self._ask_columns(directions, rows, table)
        elif checks and self.columns.is_consistent(table, checks, directions):
            self.pending += [
                (direction, table.columns(slice(place, place + 1)), rows) for place, direction in enumerate(directions)
            ]
            self.consistent += len(directions)
            self.unchecked = [row for row in self.unchecked if row not in checks]
        elif len(directions) == 1 or self.columns.is_independent(table, checks, directions):
            yield from self._ask_columns(directions, rows, table)
        else:
            half = len(directions) // 2
            for part in (slice(0, half), slice(half, len(directions))):
                yield from self._ask_completion(directions[part], rows, table.columns(part))

    def _ask_columns(self, directions: list[int], rows: list[int], table: FormTable) -> Steps[None]:
        """Ask for the other rows of some directions: their columns are known then, and span a larger space."""
        known = set(rows)
        rest = [row for row in range(self.width) if row not in known]
        if rest:
            table = FormTable.concat(table, (yield from self._ask_table(rest, directions, "columns")))
        self.columns.add(directions, table.take(self.space.indices(np.argsort(rows + rest))))
        self.consistent = 0

    def _ask_unsure(self) -> Steps[None]:
        """Complete directions that were consistent, but not enough of them in a row: that may be by chance."""
        sure = self.consistent if self.consistent >= CONSISTENT_DIRECTIONS else 0
        unsure = self.pending[: len(self.pending) - sure]
        self.pending = self.pending[len(unsure) :]
        for direction, table, rows in unsure:
            yield from self._ask_columns([direction], rows, table)

    def _ask_by_rank(self, directions: list[int]) -> Steps[None]:
        """Whatever the directions without a complete column still need, given that the rank is known."""
        rank, partial = len(self.cross.pivots), self.columns.partial
        for alike, known, rows in self._pending_alike():
            missing = [row for row in self.cross.pivots if row not in set(rows)]
            table = known
            if missing:
                table = FormTable.concat(known, (yield from self._ask_table(missing, alike, "directions")))
            units = self.space.zeros(len(rows) + len(missing), self.width)
            units[self.space.indices(range(units.shape[0])), self.space.indices(rows + missing)] = 1.0
            partial.append(PartialColumns(alike, units, table))
        if directions:
            span_rows = self.columns.span_rows()
            self.reader.estimate.expect((self.width / rank) ** 0.5)
            tokens = TokenRows(span_rows @ self.left.vectors)
            pairs = _pairs(self.space, range(rank), directions)
            forms = yield from self.reader.ask_forms("rest", tokens, self.right, *pairs)
            partial.append(PartialColumns(directions, span_rows, _table(forms, rank)))

    def _pending_alike(self) -> list[tuple[list[int], FormTable, list[int]]]:
        """The directions put off, those whose forms are known at the same rows together."""
        found: list[tuple[list[int], list[FormTable], list[int]]] = []
        for direction, table, rows in self.pending:
            if not found or found[-1][2] != rows:
                found.append(([], [], rows))
            found[-1][0].append(direction)
            found[-1][1].append(table)
        return [(directions, FormTable.beside(*tables), rows) for directions, tables, rows in found]

    def _ask_extra_columns(self) -> Steps[None]:
        """Complete the partly known columns that would amplify the errors of the complete ones most."""
        xp, columns = self.space.xp, self.columns
        errors, largest = columns.draft.radius + columns.tail, COARSEST * self.reader.estimate.size
        most = LARGEST_AMPLIFICATION if columns.tolerance == 0 else LARGEST_AMPLIFICATION_OF_TAIL
        for _ in range(MOST_EXTRA_COLUMNS):
            each = [columns.amplification(part) for part in columns.partial]
            worst, number = max((float(xp.max(one)), number) for number, one in enumerate(each)) if each else (0.0, 0)
            if worst <= most and (worst * errors <= largest or worst <= LARGEST_AMPLIFICATION_OF_TAIL):
                break
            part = columns.partial[number]
            place = int(xp.argmax(each[number]))
            table = yield from self._ask_table(list(range(self.width)), [part.directions[place]], "extra columns")
            columns.add([part.directions[place]], table, new=False)
            columns.partial[number] = part.without(place)
            columns.partial = [part for part in columns.partial if part.directions]

    def _ask_coarse(self) -> Steps[None]:
        """Ask again for the first forms, read while their size was not known, where few digits make that matter."""
        if not self.reader.negligible_last:
            return
        columns = self.columns
        rows, directions = columns.coarse(COARSEST / 16 * self.reader.estimate.size, 1 / self.reader.scale)
        if rows.shape[0]:
            forms = yield from self.reader.ask_forms("columns", self.left, self.right, rows, directions)
            columns.replace(rows, directions, forms.values, forms.radius)


def _table(forms: Forms, rows: int) -> FormTable:
    """Forms that were asked for row by row."""
    return FormTable(*(array.reshape(rows, -1) for array in (forms.values, forms.radius, forms.ratio)))


def _pairs(space: Space, rows: Sequence[int], directions: Sequence[int]) -> tuple[Array, Array]:
    """All pairs of a row and a direction, row by row."""
    xp, shape = space.xp, (len(rows), len(directions))
    some, others = space.indices(np.asarray(rows)), space.indices(np.asarray(directions))
    pairs = (xp.broadcast_to(some[:, None], shape), xp.broadcast_to(others[None, :], shape))
    first, second = (xp.reshape(each, (-1,)) for each in pairs)
    return first, second
