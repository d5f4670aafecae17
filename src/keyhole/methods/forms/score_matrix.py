"""The score matrix from bilinear forms, direction by direction, at the counting bound of whatever rank it has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from keyhole.arrays import Array, Space, namespace
from keyhole.methods.base import Steps, with_sketch
from keyhole.methods.forms.cross_basis import CrossBasis
from keyhole.methods.forms.reader import FormReader, Forms
from keyhole.methods.forms.shifted import ShiftedSolution, solve_shifted
from keyhole.numerics.logit import rounding
from keyhole.numerics.orthogonal import equal_overlap, random_orthogonal, split_along
from keyhole.queries import Sketch, TokenRows

# Directions that must be consistent with the columns so far before the rank is believed.
CONSISTENT_DIRECTIONS = 4
# Directions are taken one by one while the rank is small, so that not a query is wasted; then in blocks of a
# fraction of the rank so far, which keeps the rounds few and wastes some rank²/16 queries, none at full rank.
SINGLE_DIRECTIONS = 17
BLOCK_FRACTION = 4
# With less than this part of the value across the score bias, rows orthogonal to the bias show too little of it.
LEAST_CONTRAST = 0.1
# The one row that is not orthogonal to the score bias leans this much towards the value across it, so that it can be
# longer and shows more value.
LEAN = 4.0
# A norm-bounded solve that amplifies errors by more than the inverse of this is no basis to judge consistency.
SMALLEST_DAMPING = 0.2
# Singular values below the errors of the checks may hide: what they add to an unread form is at most some
# times the error bar of the checks, or this many times the largest of four residuals that happened to be small.
TAIL_FACTOR = 64.0
TOLERATED_TAIL_FACTOR = 16.0  # a tail that is there for all to see does not happen to be small four times
# Columns that would carry more than this many times the errors of the columns read are not worth the queries saved:
# the column space was read along unlucky directions, and one more column mends it.
LONGEST_LEAN = 512.0
LONGEST_LEAN_OVER_TAIL = 8.0  # what was left out on purpose is larger than rounding, and should not be amplified
MOST_EXTRA_COLUMNS = 8


@dataclass(frozen=True)
class Score:
    """The score matrix as read."""

    matrix: Array  # (width, width)
    radius: Array  # (width, width) entrywise
    rank: int
    hidden_bias: float = 0.0  # how large a score bias may be that did not show


@dataclass
class Draft:
    """What is known so far, for a run that ends early."""

    inverse: Array | None = None  # (width, width) takes left-coordinates back
    right: Array | None = None  # (width, width) rows p_j
    columns: list[tuple[Array, Array]] = field(default_factory=list)  # (direction numbers, left-coordinates)
    radius: float = 0.0  # the largest of those of the columns: first readings are timid

    def matrix(self) -> Array | None:
        """The score on the directions that are complete, zero on the others."""
        if self.inverse is None or self.right is None:
            return None
        total = 0 * self.inverse
        for numbers, columns in self.columns:
            total = total + self.inverse @ (columns @ namespace(numbers).take(self.right, numbers, axis=0))
        return total

    def sketch(self) -> Sketch | None:
        """The same for people who watch; its error is that of what was read."""
        matrix = self.matrix()
        if matrix is None or self.right is None or not self.columns:
            return None
        read = sum(int(numbers.shape[0]) for numbers, _ in self.columns)
        largest = max(float(namespace(columns).max(abs(columns))) for _, columns in self.columns)
        error = self.radius / largest if largest > 0 else math.nan
        return Sketch({"score": matrix}, read / self.right.shape[0], error)


@dataclass(frozen=True)
class _Table:
    """Forms of some directions at some rows, as matrices (rows, directions)."""

    values: Array
    radius: Array
    ratio: Array

    @classmethod
    def of(cls, forms: Forms, rows: int) -> _Table:
        return cls(*(array.reshape(rows, -1) for array in (forms.values, forms.radius, forms.ratio)))

    def _each(self, change: Callable[[Array], Array]) -> _Table:
        return _Table(change(self.values), change(self.radius), change(self.ratio))

    def rows(self, index: Array) -> _Table:
        return self._each(lambda array: namespace(array).take(array, index, axis=0))

    def columns(self, part: slice) -> _Table:
        return self._each(lambda array: array[:, part])

    def column(self, place: int) -> _Table:
        return self.columns(slice(place, place + 1))

    def without(self, place: int) -> _Table:
        return self._each(lambda array: namespace(array).concat([array[:, :place], array[:, place + 1 :]], axis=1))

    def above(self, other: _Table) -> _Table:
        pairs = ((getattr(self, n), getattr(other, n)) for n in ("values", "radius", "ratio"))
        return _Table(*(namespace(first).concat([first, second]) for first, second in pairs))


@dataclass(frozen=True)
class _Partial:
    """Directions read at as many rows as the rank needs."""

    directions: list[int]
    rows: Array  # (m, width) in left-coordinates
    table: _Table  # (m, directions)

    def without(self, place: int) -> _Partial:
        left = self.directions[:place] + self.directions[place + 1 :]
        return _Partial(left, self.rows, self.table.without(place))


def read_score(
    reader: FormReader,
    rng: np.random.Generator,
    draft: Draft,
    tolerance: float = 0.0,
    bases: tuple[Array, Array, Array] | None = None,
) -> Steps[Score | None]:
    """All of the score matrix, its rank unknown; None when a score bias that a levered reader cannot know shows.

    Each new direction is read at the pivot rows that determine the column space so far and at one check
    row. Inconsistent: the column is completed, with nothing wasted. Consistent: it is done; after
    four in a row the rank is believed and the other directions need `rank` queries each. What is below `tolerance`
    of the whole, relatively, counts as nothing. `bases` are rows, the inverse of their matrix and orthonormal
    directions where the reader has its own, of either only some if it knows the others.
    """
    reading = _ScoreReading(reader, rng, draft, tolerance, bases)
    # In the bases of a reader columns are of its own making, which nobody who watches would know.
    return (yield from (with_sketch(reading.run(), draft.sketch) if bases is None else reading.run()))


class _ScoreReading:
    def __init__(
        self,
        reader: FormReader,
        rng: np.random.Generator,
        draft: Draft,
        tolerance: float,
        bases: tuple[Array, Array, Array] | None,
    ) -> None:
        self.reader = reader
        self.tolerance = tolerance
        self.rng = rng
        self.draft = draft
        self.space = reader.signature.space
        left, self.inverse, right = _bases(reader, rng) if bases is None else bases
        self.width = int(left.shape[0])  # rows to read
        self.left, self.right = TokenRows(left), TokenRows(right)
        # (rows, directions): p_j in left-coordinates, for last tokens that are not short against the first
        self.meeting = None if reader.levered else self.inverse.T @ right.T
        self.cross = CrossBasis(self.space, self.width)
        draft.inverse, draft.right = self.inverse, right
        self.radii: list[Array] = []  # beside draft.columns
        self.consistent = 0  # directions in a row that were consistent with the columns so far
        self.hidden_bias = 0.0
        self.tail = 0.0  # how large forms may be that were taken for zero
        self.partial: list[_Partial] = []
        self.pending: list[tuple[int, _Table, list[int]]] = []  # (direction, its forms, rows they were read at)

    def run(self) -> Steps[Score | None]:
        probe = yield from self.reader.probe(self.left, self.right)
        if not probe.responds:
            zero = self.space.zeros(self.inverse.shape[0], self.right.vectors.shape[0])
            return Score(zero, zero + 4 * self.width * probe.forms.radius[0], 0)
        # The form of the probe is wanted anyway, and read at another scale it shows a score bias.
        first = probe.number
        index = self.space.indices([first])
        forms = yield from self.reader.read("directions", self.left, self.right, index, index)
        if self.reader.levered:
            if not probe.agrees(forms):
                return None
            self.hidden_bias = self.reader.unseen_bias(probe, forms)
        yield from self._resolve([first], [first], _Table.of(forms, 1))
        left = [direction for direction in range(self.right.vectors.shape[0]) if direction != first]
        while left and self.consistent < CONSISTENT_DIRECTIONS:
            rank = self.cross.rank
            block = 1 if rank < SINGLE_DIRECTIONS else rank // BLOCK_FRACTION
            yield from self._take(left[:block])
            left = left[block:]
        yield from self._complete_doubtful()
        yield from self._read_by_rank(left)
        score = yield from self._within_span()
        return replace(score, hidden_bias=self.hidden_bias)

    def _complete_doubtful(self) -> Steps[None]:
        """Directions that were consistent, but not enough of them in a row, may have been so by chance."""
        sure = self.consistent if self.consistent >= CONSISTENT_DIRECTIONS else 0
        doubtful = self.pending[: len(self.pending) - sure]
        self.pending = self.pending[len(doubtful) :]
        for direction, table, rows in doubtful:
            yield from self._complete([direction], rows, table)

    def _read(self, rows: list[int], directions: list[int], stage: str) -> Steps[_Table]:
        numbers, others = _pairs(rows, directions)
        forms = yield from self.reader.read(
            stage, self.left, self.right, self.space.indices(numbers), self.space.indices(others)
        )
        return _Table.of(forms, len(rows))

    def _take(self, directions: list[int]) -> Steps[None]:
        """Read new directions at the pivots and at as many check rows, then whatever else they need."""
        free = self.cross.others()
        checks = [int(row) for row in self.rng.permutation(free)[: len(directions)]]
        rows = [*self.cross.pivots, *checks]
        table = yield from self._read(rows, directions, "directions")
        yield from self._resolve(directions, rows, table)

    def _resolve(self, directions: list[int], rows: list[int], table: _Table) -> Steps[None]:
        """Complete the columns of directions that enlarge the column space, and put off those that do not."""
        known = set(rows)
        missing = [row for row in self.cross.pivots if row not in known]
        if missing:
            table = table.above((yield from self._read(missing, directions, "directions")))
        pivots = set(self.cross.pivots)
        checks = [row for row in rows if row not in pivots]
        place = {row: number for number, row in enumerate(rows + missing)}
        rows = [*self.cross.pivots, *checks]
        table = table.rows(self.space.indices([place[row] for row in rows]))
        if self.cross.rank == 0 or len(rows) == self.width:
            yield from self._complete(directions, rows, table)
        elif checks and self._consistent(table, checks, directions):
            self.pending += [(direction, table.column(n), rows) for n, direction in enumerate(directions)]
            self.consistent += len(directions)
        elif len(directions) == 1 or self._independent(table, checks, directions):
            yield from self._complete(directions, rows, table)
        else:
            half = len(directions) // 2
            for part in (slice(0, half), slice(half, len(directions))):
                yield from self._resolve(directions[part], rows, table.columns(part))

    def _complete(self, directions: list[int], rows: list[int], table: _Table) -> Steps[None]:
        """Read the other rows of some directions: their columns are known then, and span a larger space."""
        taken = set(rows)
        rest = [row for row in range(self.width) if row not in taken]
        if rest:
            table = table.above((yield from self._read(rest, directions, "columns")))
        table = table.rows(self.space.indices(np.argsort(rows + rest)))
        self._keep(directions, *self._solved(table, directions))
        self.consistent = 0

    def _solve(self, inverse: Array, factors: Array, directions: list[int], table: _Table) -> ShiftedSolution:
        """Coefficients of columns in the span of `factors` (width, rank), `inverse` (rank, m) taking forms to them."""
        if self.meeting is None:
            coefficients = inverse @ table.values
            return ShiftedSolution(coefficients, 0 * coefficients[0, :], 0 * coefficients[0, :] + 1)
        own = factors.T @ self.space.xp.take(self.meeting, self.space.indices(directions), axis=1)
        return solve_shifted(inverse, own, table.values, table.ratio)

    def _residual(self, table: _Table, checks: list[int], directions: list[int]) -> tuple[Array, Array, Array]:
        """What the pivots do not predict at the check rows, its error bar, both (checks, n), and the damping."""
        xp, rank = self.space.xp, self.cross.rank
        pivots = table.rows(self.space.indices(range(rank)))
        solution = self._solve(self.cross.inverse, self.cross.factors, directions, pivots)
        factors = xp.take(self.cross.factors, self.space.indices(checks), axis=0)
        predicted = factors @ solution.coefficients - table.ratio[rank:, :] * solution.form
        spread = xp.sqrt(1 + xp.sum((factors @ self.cross.inverse) ** 2, axis=1))
        # The columns behind the factors carry errors too, by as much as they are used.
        used = 1 + xp.sqrt(xp.sum((solution.coefficients / self.cross.heights[:, None]) ** 2, axis=0))
        largest = max(float(xp.max(table.radius)), self.draft.radius)
        bar = largest * spread[:, None] * (used / solution.damping)[None, :] + self._negligible
        return table.values[rank:, :] - predicted, bar, solution.damping

    def _consistent(self, table: _Table, checks: list[int], directions: list[int]) -> bool:
        """Whether the check rows are predicted from the pivots, within the errors of both."""
        xp = self.space.xp
        residual, bar, damping = self._residual(table, checks, directions)
        fits = bool(xp.all(xp.abs(residual) <= bar) and xp.all(damping > SMALLEST_DAMPING))
        if fits:
            unseen = 8 * (float(xp.max(bar)) - self._negligible)
            factor = TAIL_FACTOR if self.tolerance == 0 else TOLERATED_TAIL_FACTOR
            self.tail = max(self.tail, factor * float(xp.max(xp.abs(residual))), unseen)
        return fits

    def _independent(self, table: _Table, checks: list[int], directions: list[int]) -> bool:
        """Whether every one of the directions enlarges the column space."""
        xp = self.space.xp
        residual, bar, _ = self._residual(table, checks, directions)
        if len(checks) < len(directions):
            return False
        return bool(xp.min(xp.linalg.svdvals(residual)) > xp.max(bar) * len(directions) ** 0.5)

    def _solved(self, table: _Table, directions: list[int]) -> tuple[Array, Array]:
        """Columns score·p in left-coordinates (rows, n) and their radii, from forms at all rows."""
        if self.meeting is None:
            return table.values, table.radius
        xp = self.space.xp
        meeting = xp.take(self.meeting, self.space.indices(directions), axis=1)
        denominator = 1 - xp.sum(meeting * table.ratio, axis=0)
        form = xp.sum(meeting * table.values, axis=0) / denominator
        form_radius = xp.sqrt(xp.sum((meeting * table.radius) ** 2, axis=0)) / xp.abs(denominator)
        return table.values + table.ratio * form, table.radius + table.ratio * form_radius

    def _keep(self, directions: list[int], columns: Array, radius: Array, *, new: bool = True) -> None:
        """Keep complete columns; `new` ones enlarge the column space."""
        self.draft.columns.append((self.space.indices(directions), columns))
        self.radii.append(radius)
        self.draft.radius = max(self.draft.radius, float(self.space.xp.max(radius)))
        if new:
            bars = self.space.xp.max(radius, axis=0) + self._negligible
            self.cross.add(columns, [float(bar) for bar in bars])

    @property
    def _negligible(self) -> float:
        """The size of forms that count as nothing: several times their root mean square, which few exceed."""
        return 4 * self.tolerance * self.reader.size

    def _read_by_rank(self, directions: list[int]) -> Steps[None]:
        """Whatever the directions without a complete column still need, given that the rank is known."""
        for direction, read, rows in self.pending:
            missing = [row for row in self.cross.pivots if row not in rows]
            table = read.above((yield from self._read(missing, [direction], "directions"))) if missing else read
            units = self.space.xp.take(self.space.eye(self.width), self.space.indices(rows + missing), axis=0)
            self.partial.append(_Partial([direction], units, table))
        if directions:
            rows = self._span_rows()
            self.reader.rescale((self.width / self.cross.rank) ** 0.5)
            numbers, others = _pairs(range(self.cross.rank), directions)
            forms = yield from self.reader.read(
                "rest",
                TokenRows(rows @ self.left.vectors),
                self.right,
                self.space.indices(numbers),
                self.space.indices(others),
            )
            self.partial.append(_Partial(directions, rows, _Table.of(forms, self.cross.rank)))

    def _span_rows(self) -> Array:  # (rank, width)
        """Unit rows that determine a vector of the column space, as combinations of the left rows.

        An orthonormal basis of it, rotated to share the value evenly and tilted along the part of the value
        outside the column space, which adds value and no logit.
        """
        xp, reader, rank = self.space.xp, self.reader, self.cross.rank
        basis, _, _ = self._span()
        overlaps = self.left.vectors @ reader.value
        rows = equal_overlap(self.space, basis.T, overlaps)
        inside = rows @ overlaps
        outside = overlaps - rows.T @ inside
        outside_norm = float(xp.linalg.vector_norm(outside))
        if outside_norm > self.space.eps**0.5 * reader.value_norm:
            lacking = (reader.value_norm - float(xp.linalg.vector_norm(inside))) / rank**0.5
            rows = rows + outside[None, :] * (lacking / outside_norm**2)
        return rows / xp.linalg.vector_norm(rows @ self.left.vectors, axis=1)[:, None]

    def _span(self) -> tuple[Array, Array, Array]:
        """Singular value decomposition of the complete columns, cut at the rank: (width, r), (r,), (r, columns)."""
        xp, rank = self.space.xp, self.cross.rank
        columns = xp.concat([columns for _, columns in self.draft.columns], axis=1)
        basis, sizes, turn = xp.linalg.svd(columns, full_matrices=False)
        return basis[:, :rank], sizes[:rank], turn[:rank, :]

    def _within_span(self) -> Steps[Score]:
        """All columns, those of partly read directions within the span of the complete ones."""
        xp = self.space.xp
        for _ in range(MOST_EXTRA_COLUMNS):
            lean = [self._leans(part) for part in self.partial]
            worst = max((float(xp.max(each)), number) for number, each in enumerate(lean)) if lean else (0.0, 0)
            if worst[0] <= (LONGEST_LEAN if self.tolerance == 0 else LONGEST_LEAN_OVER_TAIL):
                break
            part = self.partial[worst[1]]
            place = int(xp.argmax(lean[worst[1]]))
            table = yield from self._read(list(range(self.width)), [part.directions[place]], "extra columns")
            self._keep([part.directions[place]], *self._solved(table, [part.directions[place]]), new=False)
            self.partial[worst[1]] = part.without(place)
            self.partial = [part for part in self.partial if part.directions]
        return self._assembled()

    def _leans(self, part: _Partial) -> Array:  # (directions,)
        """How many times the errors of the complete columns a column carries that is made of them."""
        basis, sizes, _ = self._span()
        inverse = self.space.xp.linalg.pinv(part.rows @ basis)
        solution = self._solve(inverse, basis, part.directions, part.table)
        return self.space.xp.linalg.vector_norm(solution.coefficients / sizes[:, None], axis=0)

    def _assembled(self) -> Score:
        xp = self.space.xp
        complete, radius = (
            xp.concat([columns for _, columns in self.draft.columns], axis=1),
            xp.concat(self.radii, axis=1),
        )
        directions = xp.take(self.right.vectors, xp.concat([numbers for numbers, _ in self.draft.columns]), axis=0)
        matrix = self.inverse @ (complete @ directions)
        # Errors of different forms are independent, so the rotations add them in quadrature ...
        squares = self.inverse**2
        variance = squares @ (radius**2 @ directions**2)
        shared = self._shared_error()
        if not self.partial:
            return Score(matrix, xp.sqrt(variance) + shared + _rotation_error(self.space, matrix), self.cross.rank)
        basis, sizes, _ = self._span()
        uses = 0.0
        for part in self.partial:
            directions = xp.take(self.right.vectors, self.space.indices(part.directions), axis=0)
            inverse = xp.linalg.pinv(part.rows @ basis)
            solution = self._solve(inverse, basis, part.directions, part.table)
            matrix = matrix + (self.inverse @ basis) @ (solution.coefficients @ directions)
            spread = (part.table.radius / solution.damping) ** 2 @ directions**2
            hidden = self.tail**2 * xp.sum(directions**2, axis=0)
            variance = variance + xp.sum(squares, axis=1)[:, None] * hidden[None, :]
            variance = variance + (squares @ (basis @ inverse) ** 2) @ spread
            uses = uses + (solution.coefficients / sizes[:, None]) @ directions
        # ... while those of the complete columns return in all that were made of them.
        carried = xp.sqrt(squares @ (xp.max(radius, axis=1) + self.tail) ** 2)
        common = carried[:, None] * xp.linalg.vector_norm(uses, axis=0)[None, :]
        spread = xp.sqrt(variance) + common + shared
        return Score(matrix, spread + _rotation_error(self.space, matrix), self.cross.rank)

    def _shared_error(self) -> Array:
        """An error that all forms share adds up where the sums of the rows and of the directions point."""
        xp = self.space.xp
        rows, directions = xp.sum(self.inverse, axis=1), xp.sum(self.right.vectors, axis=0)
        return self.reader.common_radius * xp.abs(rows)[:, None] * xp.abs(directions)[None, :]


def turned_back(space: Space, inverse: Array, columns: Array, radius: Array, right: Array) -> Score:
    """The score from all its columns in left-coordinates, for orthonormal directions `right`."""
    xp = space.xp
    matrix = inverse @ (columns @ right)
    # Errors of different forms are independent, so the rotations add them in quadrature.
    spread = xp.sqrt(inverse**2 @ (radius**2 @ right**2)) + _rotation_error(space, matrix)
    seen = xp.linalg.svdvals(matrix) > float(xp.linalg.vector_norm(spread))
    return Score(matrix, spread, int(xp.sum(xp.astype(seen, xp.int64))))


def _rotation_error(space: Space, matrix: Array) -> Array:
    """What the two rotations and their own rounding add: some eps of the row and the column of an entry."""
    xp = space.xp
    rows, columns = xp.linalg.vector_norm(matrix, axis=1), xp.linalg.vector_norm(matrix, axis=0)
    average = float(xp.linalg.vector_norm(rows)) / matrix.shape[0] ** 0.5
    return rounding(space) * (rows[:, None] + columns[None, :] + average)


def _bases(reader: FormReader, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Rows of unit length that share the value evenly, the inverse of their matrix, and orthonormal directions.

    With a score bias all but one row and one direction are orthogonal to it, so that their tokens may be long.
    """
    space, width = reader.signature.space, reader.signature.width
    xp = space.xp
    left, right = random_orthogonal(space, rng, width), random_orthogonal(space, rng, width)
    if reader.bias is None or width == 1:
        left = equal_overlap(space, left, reader.value)
        return left, left.T, _repelled(right, left.T)
    left, along = split_along(space, left, reader.bias.vector)
    across = reader.value - along * xp.vecdot(along, reader.value)
    across_norm = float(xp.linalg.vector_norm(across))
    if across_norm > LEAST_CONTRAST * reader.value_norm:
        leaning = along + across * (LEAN / across_norm)
        leaning = leaning / xp.linalg.vector_norm(leaning)
        left = xp.concat([equal_overlap(space, left, reader.value), leaning[None, :]])
    else:  # the value lies along the bias: rows that shall show value must lean that way
        left = xp.concat([(left + along[None, :]) / 2**0.5, along[None, :]])
    others, along = split_along(space, right, reader.bias.vector)
    inverse = xp.linalg.inv(left)
    return left, inverse, xp.concat([_repelled(others, inverse), -along[None, :]])


def _repelled(directions: Array, inverse: Array) -> Array:
    """Directions with their signs chosen so that the solve divides by one plus, not minus, the ratio of the norms."""
    xp = namespace(directions)
    return xp.where((directions @ xp.sum(inverse, axis=1) > 0)[:, None], -directions, directions)


def _pairs(rows: Iterable[int], directions: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """All pairs of a row and a direction, row by row."""
    some = np.fromiter(rows, dtype=np.int64)
    return np.repeat(some, len(directions)), np.tile(np.asarray(directions, dtype=np.int64), some.size)
