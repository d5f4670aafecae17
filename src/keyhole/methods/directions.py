"""The score matrix from bilinear forms, direction by direction, at the counting bound of whatever rank it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import Array, namespace
from keyhole.measure import Rows
from keyhole.methods.base import Steps
from keyhole.methods.reading import FormReader, Forms
from keyhole.numerics.cross import CrossBasis
from keyhole.numerics.rotation import equal_overlap, random_orthogonal

# Directions that must be consistent with the columns so far before the rank is believed.
CONSISTENT_DIRECTIONS = 3
# Directions are taken one by one while the rank is small, so that not a query is wasted; then in blocks of a
# fraction of the rank so far, which keeps the rounds few and wastes at most rank²/16 queries, none at full rank.
SINGLE_DIRECTIONS = 20
BLOCK_FRACTION = 4
# A denominator of the norm-bounded solve below this amplifies errors too much to judge consistency.
SMALLEST_DENOMINATOR = 0.2


@dataclass(frozen=True)
class Score:
    """The score matrix as read."""

    matrix: Array  # (width, width)
    radius: Array  # (width, width) entrywise
    rank: int


@dataclass
class Draft:
    """What is known so far, for a run that ends early."""

    left: Array | None = None  # (width, width) rows q_i
    right: Array | None = None  # (width, width) rows p_j
    columns: list[tuple[Array, Array]] = field(default_factory=list)  # (direction numbers, left-coordinates)

    def matrix(self) -> Array | None:
        """The score on the directions that are complete, zero on the others."""
        if self.left is None or self.right is None:
            return None
        total = 0 * self.left
        for numbers, columns in self.columns:
            total = total + self.left.T @ (columns @ namespace(numbers).take(self.right, numbers, axis=0))
        return total


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

    def column(self, place: int) -> _Table:
        return self._each(lambda array: array[:, place : place + 1])

    def above(self, other: _Table) -> _Table:
        pairs = ((getattr(self, n), getattr(other, n)) for n in ("values", "radius", "ratio"))
        return _Table(*(namespace(first).concat([first, second]) for first, second in pairs))


def read_score(reader: FormReader, rng: np.random.Generator, draft: Draft) -> Steps[Score]:
    """All of the score matrix, its rank unknown.

    Each new direction is read at the pivot rows that determine the column space so far and at one check
    row. Inconsistent: the column is completed, with nothing wasted. Consistent: it is done; after
    three in a row the rank is believed and the other directions need `rank` queries each.
    """
    return (yield from _ScoreReading(reader, rng, draft).run())


class _ScoreReading:
    def __init__(self, reader: FormReader, rng: np.random.Generator, draft: Draft) -> None:
        self.reader = reader
        self.rng = rng
        self.draft = draft
        self.space = reader.signature.space
        self.width = reader.signature.width
        left = equal_overlap(self.space, random_orthogonal(self.space, rng, self.width), reader.value)
        right = random_orthogonal(self.space, rng, self.width)
        # Under a norm bound the solve divides by 1 − ratio·√d·(p·v̂): the sign makes that at least one.
        xp = self.space.xp
        right = xp.where((right @ reader.value > 0)[:, None], -right, right)
        self.left, self.right = Rows(left), Rows(right)
        self.meeting = left @ right.T  # (rows, directions): q_i·p_j
        self.cross = CrossBasis(self.space, self.width)
        draft.left, draft.right = left, right
        self.radii: list[Array] = []  # beside draft.columns
        self.consistent = 0  # directions in a row that were consistent with the columns so far
        self.pending: list[
            tuple[int, _Table, list[int]]
        ] = []  # (direction, its forms, rows they were read at)

    def run(self) -> Steps[Score]:
        responds = yield from self.reader.probe(self.left, self.right)
        if not responds:
            zero = self.space.zeros(self.width, self.width)
            return Score(zero, zero + 1 / self.reader.largest_scale, 0)
        direction = 0
        while direction < self.width and self.consistent < CONSISTENT_DIRECTIONS:
            rank = self.cross.rank
            block = 1 if rank < SINGLE_DIRECTIONS else rank // BLOCK_FRACTION
            block = min(block, self.width - direction)
            yield from self._take(list(range(direction, direction + block)))
            direction += block
        yield from self._finish_pending()
        if direction < self.width:
            yield from self._second_stage(list(range(direction, self.width)))
        return self._assembled()

    def _read(self, rows: list[int], directions: list[int], stage: str) -> Steps[_Table]:
        numbers = np.repeat(np.asarray(rows, dtype=np.int64), len(directions))
        others = np.tile(np.asarray(directions, dtype=np.int64), len(rows))
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
        if len(directions) > 1 and self._independent(table, checks, directions):
            yield from self._complete(directions, rows, table)
            return
        for place, direction in enumerate(directions):
            yield from self._settle(direction, rows, table.column(place))

    def _settle(self, direction: int, rows: list[int], table: _Table) -> Steps[None]:
        """Complete the column of one direction, unless it is consistent with the columns so far."""
        missing = [row for row in self.cross.pivots if row not in rows]
        if missing:
            table = table.above((yield from self._read(missing, [direction], "directions")))
            rows = rows + missing
        checks = [row for row in rows if row not in self.cross.pivots]
        places = [rows.index(row) for row in [*self.cross.pivots, *checks]]
        table, rows = table.rows(self.space.indices(places)), [rows[place] for place in places]
        if (
            self.cross.rank
            and checks
            and len(rows) < self.width
            and self._consistent(table, checks, [direction])
        ):
            self.pending.append((direction, table, rows))
            self.consistent += 1
        else:
            yield from self._complete([direction], rows, table)

    def _complete(self, directions: list[int], rows: list[int], table: _Table) -> Steps[None]:
        """Read the other rows of some directions: their columns are known then, and span a larger space."""
        taken = set(rows)
        rest = [row for row in range(self.width) if row not in taken]
        if rest:
            table = table.above((yield from self._read(rest, directions, "columns")))
        table = table.rows(self.space.indices(np.argsort(rows + rest)))
        self._keep(directions, *self._solved(table, directions))
        self.consistent = 0

    def _coefficients(self, table: _Table, directions: list[int]) -> tuple[Array, Array, Array]:
        """Coefficients (rank, n) in the cross basis, the last tokens' own forms (n,), and denominators (n,).

        A form is (L_i − ratio_i·h)·a with h = pᵀ·L: the elimination at the pivots, changed by rank one.
        """
        xp, rank = self.space.xp, self.cross.rank
        own = self.cross.factors.T @ xp.take(self.meeting, self.space.indices(directions), axis=1)  # h
        plain = self.cross.inverse @ table.values[:rank]
        shift = self.cross.inverse @ table.ratio[:rank]
        denominator = 1 - xp.sum(own * shift, axis=0)
        form = xp.sum(own * plain, axis=0) / denominator
        return plain + shift * form, form, denominator

    def _residual(
        self, table: _Table, checks: list[int], directions: list[int]
    ) -> tuple[Array, Array, Array]:
        """What the pivots do not predict at the check rows, its error bar, both (checks, n), and denominators."""
        rank = self.cross.rank
        coefficients, form, denominator = self._coefficients(table, directions)
        factors = self.space.xp.take(self.cross.factors, self.space.indices(checks), axis=0)
        predicted = factors @ coefficients - table.ratio[rank:, :] * form
        bar = self._bar(table, factors, coefficients, denominator)
        return table.values[rank:, :] - predicted, bar, denominator

    def _consistent(self, table: _Table, checks: list[int], directions: list[int]) -> bool:
        """Whether the check rows are predicted from the pivots, within the errors of both."""
        xp = self.space.xp
        residual, bar, denominator = self._residual(table, checks, directions)
        return bool(xp.all(xp.abs(residual) <= bar) and xp.all(xp.abs(denominator) > SMALLEST_DENOMINATOR))

    def _independent(self, table: _Table, checks: list[int], directions: list[int]) -> bool:
        """Whether every one of the directions enlarges the column space."""
        xp = self.space.xp
        residual, bar, _ = self._residual(table, checks, directions)
        if len(checks) < len(directions):
            return False
        return bool(xp.min(xp.linalg.svdvals(residual)) > xp.max(bar) * len(directions) ** 0.5)

    def _bar(self, table: _Table, factors: Array, coefficients: Array, denominator: Array) -> Array:
        """Error bars (rows, n) of values predicted from the pivots at the rows of `factors` (rows, rank)."""
        xp = self.space.xp
        weights = factors @ self.cross.inverse
        spread = xp.sqrt(1 + xp.sum(weights**2, axis=1))
        # The columns behind the factors carry errors too, by as much as they are used.
        used = 1 + xp.sqrt(xp.sum((coefficients / self.cross.heights[:, None]) ** 2, axis=0))
        damping = xp.minimum(xp.abs(denominator), xp.ones_like(denominator))
        return float(xp.max(table.radius)) * spread[:, None] * (used / damping)[None, :]

    def _solved(self, table: _Table, directions: list[int]) -> tuple[Array, Array]:
        """Columns score·p in left-coordinates (rows, n) and their radii, from forms at all rows."""
        xp = self.space.xp
        meeting = xp.take(self.meeting, self.space.indices(directions), axis=1)
        denominator = 1 - xp.sum(meeting * table.ratio, axis=0)
        form = xp.sum(meeting * table.values, axis=0) / denominator
        form_radius = xp.sqrt(xp.sum((meeting * table.radius) ** 2, axis=0)) / xp.abs(denominator)
        return table.values + table.ratio * form, table.radius + table.ratio * form_radius

    def _keep(self, directions: list[int], columns: Array, radius: Array) -> None:
        self.draft.columns.append((self.space.indices(directions), columns))
        self.radii.append(radius)
        for place in range(len(directions)):
            bar = float(self.space.xp.max(radius[:, place]))
            self.cross.add(columns[:, place], bar)

    def _finish_pending(self) -> Steps[None]:
        """Columns of the directions that were consistent, from their forms at the pivots."""
        for direction, table, rows in self.pending:
            missing = [row for row in self.cross.pivots if row not in rows]
            if missing:
                table = table.above((yield from self._read(missing, [direction], "directions")))
            places = [(rows + missing).index(row) for row in self.cross.pivots]
            table = table.rows(self.space.indices(places))
            coefficients, _, denominator = self._coefficients(table, [direction])
            bar = self._bar(table, self.cross.factors, coefficients, denominator)
            self.draft.columns.append((self.space.indices([direction]), self.cross.factors @ coefficients))
            self.radii.append(bar)

    def _second_stage(self, directions: list[int]) -> Steps[None]:
        """The other directions, `rank` queries each on an orthonormal basis of the column space.

        The basis is rotated to share the value evenly and tilted along the part of the value outside the
        column space, which adds value and no logit.
        """
        xp, space, reader = self.space.xp, self.space, self.reader
        rank = self.cross.rank
        known = xp.concat([columns for _, columns in self.draft.columns], axis=1)
        known_radius = xp.concat(self.radii, axis=1)
        span, sizes, turn = xp.linalg.svd(known, full_matrices=False)
        span = span[:, :rank]  # (rows, rank) in left-coordinates
        overlaps = self.left.vectors @ reader.value
        inner = equal_overlap(space, span.T, overlaps)  # (rank, rows)
        inside = inner @ overlaps
        outside = overlaps - inner.T @ inside
        outside_norm = float(xp.linalg.vector_norm(outside))
        tilt = 0 * outside
        if outside_norm > space.eps**0.5 * reader.value_norm:
            lacking = (reader.value_norm - float(xp.linalg.vector_norm(inside))) / rank**0.5
            tilt = outside * (lacking / outside_norm**2)
        tilted = inner + tilt[None, :]
        lengths = xp.linalg.vector_norm(tilted, axis=1)
        rows = Rows((tilted / lengths[:, None]) @ self.left.vectors)
        reader.rescale((self.width / rank) ** 0.5)
        numbers = np.repeat(np.arange(rank), len(directions))
        others = np.tile(np.asarray(directions), rank)
        forms = yield from reader.read(
            "rest", rows, self.right, space.indices(numbers), space.indices(others)
        )
        table = _Table.of(forms, rank)

        # (T − ratio·h)·y = forms with T orthogonal up to the lengths, h = pᵀ·span
        values, ratio, errors = (a * lengths[:, None] for a in (table.values, table.ratio, table.radius))
        own = inner @ xp.take(self.meeting, space.indices(directions), axis=1)
        denominator = 1 - xp.sum(own * ratio, axis=0)
        form = xp.sum(own * values, axis=0) / denominator
        coordinates = values + ratio * form
        damping = xp.minimum(xp.abs(denominator), xp.ones_like(denominator))
        # The span itself is as uncertain as the columns it came from, by as much as they are used.
        used = turn[:rank, :].T @ ((span.T @ inner.T @ coordinates) / sizes[:rank, None])
        lean = xp.sqrt(xp.sum(used**2, axis=0))
        radius = xp.sqrt(inner.T**2 @ errors**2) / damping + xp.max(known_radius, axis=1)[:, None] * lean
        self.draft.columns.append((space.indices(directions), inner.T @ coordinates))
        self.radii.append(radius)

    def _assembled(self) -> Score:
        xp = self.space.xp
        order = xp.concat([numbers for numbers, _ in self.draft.columns])
        columns = xp.concat([columns for _, columns in self.draft.columns], axis=1)
        radius = xp.concat(self.radii, axis=1)
        directions = xp.take(self.right.vectors, order, axis=0)
        matrix = self.left.vectors.T @ (columns @ directions)
        # Errors of different forms are independent, so the rotations add them in quadrature.
        spread = xp.sqrt((self.left.vectors**2).T @ (radius**2 @ directions**2))
        return Score(matrix, spread, self.cross.rank)
