"""Columns of a score matrix: what is known of them, what they determine, and the matrix they make."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import final

import numpy as np

from keyhole.arrays import Array, ArrayTable, Space, namespace, row_blocks
from keyhole.methods.forms.cross_basis import CrossBasis, ShiftedSolution, solve_shifted
from keyhole.methods.forms.reader import FormReader
from keyhole.numerics.orthogonal import UNEVEN, equal_overlap, random_orthogonal, split_along
from keyhole.numerics.svd import least_singular_value_exceeds, left_vectors, pseudo_inverse_of
from keyhole.queries import Sketch, TokenRows

# With less than this part of the value across the score bias, rows orthogonal to the bias show too little of it.
LEAST_CONTRAST = 0.1
# The one row that is not orthogonal to the score bias leans about this much towards the value across it, so that it can
# be longer and shows more value.
LEAN = 4.0
# A norm-bounded solve that amplifies errors by more than the inverse of this is no basis to judge consistency.
SMALLEST_DAMPING = 0.2
# Singular values below the errors of the checks may hide: what they add to a form that was not asked for is at most
# some times the radius of the checks, or some times the largest of four residuals that happened to be small.
UNSEEN_FACTOR = 8.0
TAIL_FACTOR = 64.0
# A column of the direction along a score bias is no basis for others where it is smaller than this beside them: they
# would carry its errors, and need nothing that they do not show themselves.
FAINT = 2.0**-8
TOLERATED_TAIL_FACTOR = 16.0  # a tail that is there for all to see does not happen to be small four times


@dataclass(frozen=True)
class Score:
    """An estimate of the score matrix."""

    matrix: Array  # (width, width)
    radius: Array  # (width, width) entrywise
    rank: int
    hidden_bias: float = 0.0  # how large a score bias may be that was not detected
    factors: tuple[Array, Array] | None = None  # (width, k), (k, width): the matrix is their product, where k is less


@dataclass
class Draft:
    """What is known so far, for a run that ends early."""

    inverse: Array | None = None  # (width, width) takes left-coordinates back
    right: Array | None = None  # (width, width) rows p_j
    columns: list[tuple[Array, Array]] = field(default_factory=list)  # (direction numbers, left-coordinates)
    radius: float = 0.0  # the largest of those of the columns

    def matrix(self) -> Array | None:
        """The score on the directions that are complete, zero on the others."""
        if self.inverse is None or self.right is None:
            return None
        total = 0 * self.inverse
        for numbers, columns in self.columns:
            total = total + self.inverse @ (columns @ namespace(numbers).take(self.right, numbers, axis=0))
        return total

    def sketch(self) -> Sketch | None:
        """The matrix so far, the part of it that is known and its relative error, for people who watch."""
        matrix = self.matrix()
        if matrix is None or self.right is None or not self.columns:
            return None
        known = sum(int(numbers.shape[0]) for numbers, _ in self.columns)
        largest = max(float(namespace(columns).max(abs(columns))) for _, columns in self.columns)
        error = self.radius / largest if largest > 0 else math.nan
        return Sketch({"score": matrix}, known / self.right.shape[0], error)


@dataclass(frozen=True)
class FormTable(ArrayTable):
    """Forms of some directions at some rows, as matrices (rows, directions)."""

    values: Array
    radius: Array
    ratio: Array

    def columns(self, part: slice) -> FormTable:
        """Some directions."""
        return FormTable(*(array[:, part] for array in vars(self).values()))

    @classmethod
    def beside(cls, *parts: FormTable) -> FormTable:
        """The directions of all parts, at the same rows."""
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return parts[0] if len(parts) == 1 else cls(*(namespace(each[0]).concat(each, axis=1) for each in columns))


@dataclass(frozen=True)
class PartialColumns:
    """Directions whose forms are known at as many rows as the rank needs."""

    directions: list[int]
    rows: Array  # (m, width) in left-coordinates
    table: FormTable  # (m, directions)

    def without(self, place: int) -> PartialColumns:
        """All directions but one."""
        left = self.directions[:place] + self.directions[place + 1 :]
        pairs = [(array[:, :place], array[:, place + 1 :]) for array in vars(self.table).values()]
        return PartialColumns(left, self.rows, FormTable(*(namespace(p[0]).concat(p, axis=1) for p in pairs)))


@final
class ScoreColumns:
    """Columns score·p_j in the coordinates of the rows, complete or within the span of the complete ones."""

    def __init__(
        self,
        reader: FormReader,
        rng: np.random.Generator,
        draft: Draft,
        tolerance: float,
        bases: tuple[Array, Array, Array] | None,
    ) -> None:
        self.reader, self.draft, self.tolerance = reader, draft, tolerance
        self.space = reader.signature.space
        self._own_bases = bases is None
        left, self.inverse, right = _bases(reader, rng) if bases is None else bases
        self.width = int(left.shape[0])  # rows to ask for
        self.left, self.right = TokenRows(left), TokenRows(right)
        # (rows, directions): p_j in left-coordinates, for last tokens that are not short against the first
        self.meeting = None if reader.negligible_last else self.inverse.T @ right.T
        self.cross = CrossBasis(self.space, self.width)
        draft.inverse, draft.right = self.inverse, right
        self.radii: list[Array] = []  # beside draft.columns
        self._largest_radii: Array | None = None  # of complete columns by row
        self._residuals: list[float] = []  # of directions that were consistent: what was left of them ...
        self._resolved: list[float] = []  # ... and what could have been told from zero
        self.partial: list[PartialColumns] = []
        self._spanned: tuple[int, Array, Array] | None = None  # what `_span` found for so many columns
        self.faint = 0  # how many of the first columns are known, but no basis for others

    @property
    def special(self) -> list[int]:
        """Rows, and directions, that are not in general position: where all others are orthogonal to a score bias."""
        return [0] if self._own_bases and self.reader.bias is not None and self.width > 1 else []

    def probes(self, rng: np.random.Generator) -> tuple[TokenRows, TokenRows]:
        """Rows and directions to find the scale with: in general position, then such that tokens may be long."""
        if not self.special:
            return self.left, self.right
        xp, mixed = self.space.xp, []
        for each in (self.left.vectors, self.right.vectors):
            between = each[0, :] + rng.uniform(0.5, 1.0) * each[1, :]
            mixed.append(TokenRows(xp.stack([between / xp.linalg.vector_norm(between), each[1, :]])))
        return mixed[0], mixed[1]

    def add(self, directions: list[int], table: FormTable, *, new: bool = True) -> None:
        """Add columns of which the forms at all rows are known; `new` ones enlarge the column space."""
        columns, radius = self._solve_complete(table, directions)
        self.draft.columns.append((self.space.indices(directions), columns))
        self.radii.append(radius)
        most = self.space.xp.max(radius, axis=1)
        before = self._largest_radii
        self._largest_radii = most if before is None else self.space.xp.maximum(before, most)
        self.draft.radius = max(self.draft.radius, float(self.space.xp.max(radius)))
        if directions == self.special and float(self.space.xp.max(abs(columns))) < FAINT * self.reader.estimate.size:
            self.faint = 1
        elif new:
            largest = self.space.xp.max(radius, axis=0) + self._negligible
            self.cross.add(columns, largest)

    def coarse(self, radius: float, size: float) -> tuple[Array, Array]:
        """Rows and directions (n,) of forms below `size` whose radii are above `radius` and those of most."""
        xp = self.space.xp
        numbers, columns, radii = self._complete()
        wide = (radii > radius) & (xp.abs(columns) < size)
        if bool(xp.any(wide)):  # the median takes longer than all else here
            typical = float(xp.sort(xp.reshape(radii, (-1,)))[radii.shape[0] * radii.shape[1] // 2])
            wide &= radii > 8 * typical
        rows, places = xp.nonzero(wide)
        return rows, xp.take(numbers, places, axis=0)

    def replace(self, rows: Array, directions: Array, values: Array, radius: Array) -> None:
        """Put other forms (n,) in the place of some of complete columns, where last tokens do not matter."""
        numbers, columns, radii = self._complete()
        (_, places) = self.space.xp.nonzero(directions[:, None] == numbers[None, :])
        columns[rows, places], radii[rows, places] = values, radius
        self.draft.columns, self.radii = [(numbers, columns)], [radii]
        self._largest_radii = self.space.xp.max(radii, axis=1)

    def _complete(self) -> tuple[Array, Array, Array]:
        """Numbers of the directions whose columns are complete, the columns and their radii."""
        xp = self.space.xp
        numbers, columns = ([each[part] for each in self.draft.columns] for part in range(2))
        return xp.concat(numbers), xp.concat(columns, axis=1), xp.concat(self.radii, axis=1)

    def is_consistent(self, table: FormTable, checks: list[int], directions: list[int]) -> bool:
        """Whether the check rows are predicted from the pivots, within the errors of both."""
        xp = self.space.xp
        residual, radius, damping = self._residual(table, checks, directions)
        fits = bool(xp.all(xp.abs(residual) <= radius) and xp.all(damping > SMALLEST_DAMPING))
        if fits:
            self._residuals.append(float(xp.max(xp.abs(residual))))
            self._resolved.append(max(float(xp.max(radius)) - self._negligible, self.space.tiny))
        return fits

    @property
    def tail(self) -> float:
        """How large forms may be that were taken for zero: all directions that were consistent missed them."""
        if not self._residuals:
            return 0.0
        factor = TAIL_FACTOR if self.tolerance == 0 else TOLERATED_TAIL_FACTOR
        # What hides from several checks hides from each, so their chances multiply.
        unseen = UNSEEN_FACTOR * math.exp(sum(math.log(each) for each in self._resolved) / len(self._resolved))
        return max(factor * max(self._residuals), unseen)

    def is_independent(self, table: FormTable, checks: list[int], directions: list[int]) -> bool:
        """Whether every one of the directions enlarges the column space."""
        xp = self.space.xp
        residual, radius, _ = self._residual(table, checks, directions)
        if len(checks) < len(directions):
            return False
        least = float(xp.max(radius)) * len(directions) ** 0.5
        return least_singular_value_exceeds(residual, least)

    def span_rows(self) -> Array:  # (rank, width)
        """Unit rows that determine a vector of the column space, as combinations of the left rows.

        An orthonormal basis of it, rotated to share the guide evenly and tilted along the part of the guide
        outside the column space, which adds value and no logit.
        """
        xp, rank = self.space.xp, len(self.cross.pivots)
        basis, _ = self._span()
        overlaps = self.left.vectors @ self.reader.guide
        rows = equal_overlap(self.space, basis.T, overlaps)
        inside = rows @ overlaps
        outside = overlaps - rows.T @ inside
        outside_norm = float(xp.linalg.vector_norm(outside))
        whole = float(xp.linalg.vector_norm(overlaps))
        if outside_norm > self.space.eps**0.5 * whole:
            lacking = (whole - float(xp.linalg.vector_norm(inside))) / rank**0.5
            rows = rows + outside[None, :] * (lacking / outside_norm**2)
        return rows / xp.linalg.vector_norm(rows @ self.left.vectors, axis=1)[:, None]

    def amplification(self, part: PartialColumns) -> Array:  # (directions,)
        """How many times the errors of the complete columns a column carries that is made of them."""
        basis, sizes = self._span()
        inverse = pseudo_inverse_of(part.rows @ basis)
        solution = self._solve(inverse, basis, part.directions, part.table)
        return self.space.xp.linalg.vector_norm(solution.coefficients / sizes[:, None], axis=0)

    def assemble(self, hidden_bias: float) -> Score:
        """The score matrix, partly known columns being of the span of the complete ones."""
        xp = self.space.xp
        numbers, complete, radius = self._complete()
        spanned = self._span() if self.partial else None
        rank = len(self.cross.pivots)
        if self.faint:
            rank += self.cross.add(complete[:, :1], xp.max(radius[:, :1], axis=0) + self._negligible)
        self.draft.columns, self.radii = [(numbers, complete)], [radius]  # as one, the pieces being gone
        directions = xp.take(self.right.vectors, numbers, axis=0)
        # Pairs whose products add up: to the matrix, and to variances. Errors of different forms are independent, so
        # the rotations add them in quadrature ...
        matrix = [(self._turned(complete), directions)]
        variance = [(self._turned(radius**2, squared=True), directions**2)]
        # An error that all forms share adds up where the sums of the rows and of the directions point.
        ends = xp.abs(xp.sum(self.inverse, axis=1)), xp.abs(xp.sum(self.right.vectors, axis=0))
        common = [(ends[0][:, None], self.reader.common_radius * ends[1][None, :])]
        if spanned is not None:
            (basis, sizes), uses, made = spanned, 0.0, 0.0
            unseen = self.space.zeros(int(self.right.vectors.shape[1]))
            for part in self.partial:
                directions = xp.take(self.right.vectors, self.space.indices(part.directions), axis=0)
                inverse = pseudo_inverse_of(part.rows @ basis)
                solution = self._solve(inverse, basis, part.directions, part.table)
                made = made + solution.coefficients @ directions
                unseen = unseen + self.tail**2 * xp.sum(directions**2, axis=0)
                own = (part.table.radius / solution.damping) ** 2 @ directions**2
                variance.append((self._turned((basis @ inverse) ** 2, squared=True), own))
                uses = uses + (solution.coefficients / sizes[:, None]) @ directions
            matrix.append((self._turned(basis), made))
            ones = xp.ones_like(self.inverse[0, :])[:, None]
            variance.append((self._turned(ones, squared=True), unseen[None, :]))
            # ... while those of the complete columns return in all that were made of them.
            carried = self._turned(((xp.max(radius, axis=1) + self.tail) ** 2)[:, None], squared=True) ** 0.5
            common.append((carried, xp.linalg.vector_norm(uses, axis=0)[None, :]))
        self._release()
        del directions, complete, radius
        return _score_of_factors(self.space, matrix, variance, common, rank, hidden_bias)

    def _turned(self, columns: Array, *, squared: bool = False) -> Array:  # (rows, n) -> (width, n)
        """The product with the inverse, or with the squares of its entries."""
        if not squared:
            return self.inverse @ columns
        blocks = row_blocks(*self.inverse.shape)
        parts = [self.inverse[some, :] ** 2 @ columns for some in blocks]
        return parts[0] if len(parts) == 1 else self.space.xp.concat(parts)

    def _release(self) -> None:
        """Let go of the bases, which may be as large as the score each, and of what was worked out in them."""
        self.draft.inverse = self.draft.right = self.reader.so_far = None
        self.draft.columns, self.radii, self.partial = [], [], []
        nothing = self.space.zeros(0, 0)
        self.inverse, self.left, self.right = nothing, TokenRows(nothing), TokenRows(nothing)
        self.cross = CrossBasis(self.space, 1)

    @property
    def _negligible(self) -> float:
        """The size of forms that count as nothing: several times their root mean square, which few exceed."""
        return 4 * self.tolerance * self.reader.estimate.size

    def _solve(self, inverse: Array, factors: Array, directions: list[int], table: FormTable) -> ShiftedSolution:
        """Coefficients of columns in the span of `factors` (width, rank), `inverse` (rank, m) taking forms to them."""
        if self.meeting is None:
            coefficients = inverse @ table.values
            return ShiftedSolution(coefficients, 0 * coefficients[0, :], 0 * coefficients[0, :] + 1)
        own = factors.T @ self.space.xp.take(self.meeting, self.space.indices(directions), axis=1)
        return solve_shifted(inverse, own, table.values, table.ratio)

    def _solve_complete(self, table: FormTable, directions: list[int]) -> tuple[Array, Array]:
        """Columns score·p in left-coordinates (rows, n) and their radii, from forms at all rows."""
        if self.meeting is None:
            return table.values, table.radius
        xp = self.space.xp
        meeting = xp.take(self.meeting, self.space.indices(directions), axis=1)
        denominator = 1 - xp.sum(meeting * table.ratio, axis=0)
        form = xp.sum(meeting * table.values, axis=0) / denominator
        form_radius = xp.sqrt(xp.sum((meeting * table.radius) ** 2, axis=0)) / xp.abs(denominator)
        return table.values + table.ratio * form, table.radius + table.ratio * form_radius

    def _residual(self, table: FormTable, checks: list[int], directions: list[int]) -> tuple[Array, Array, Array]:
        """What the pivots do not predict at the check rows, its radius, both (checks, n), and the damping."""
        xp, cross, rank = self.space.xp, self.cross, len(self.cross.pivots)
        pivots = table.take(slice(0, rank))
        solution = self._solve(cross.inverse, cross.factors, directions, pivots)
        factors = xp.take(cross.factors, self.space.indices(checks), axis=0)
        predicted = factors @ solution.coefficients - table.ratio[rank:, :] * solution.form
        # The columns behind the factors carry errors too, by as much as they are used.
        used = 1 + xp.sqrt(xp.sum((solution.coefficients / cross.heights[:, None]) ** 2, axis=0))
        known = xp.take(self._largest_radii, self.space.indices([*cross.pivots, *checks]), axis=0)
        squares = xp.maximum(known, xp.max(table.radius, axis=1)) ** 2
        carried = xp.sqrt(squares[rank:] + (factors @ cross.inverse) ** 2 @ squares[:rank])
        radius = carried[:, None] * (used / solution.damping)[None, :] + self._negligible
        return table.values[rank:, :] - predicted, radius, solution.damping

    def _span(self) -> tuple[Array, Array]:
        """Orthonormal basis (width, rank) of the complete columns and their singular values, cut at the rank."""
        xp, rank = self.space.xp, len(self.cross.pivots)
        columns = xp.concat([columns for _, columns in self.draft.columns[self.faint :]], axis=1)
        if self._spanned is None or self._spanned[0] != columns.shape[1]:
            self._spanned = columns.shape[1], *left_vectors(columns)
        _, basis, sizes = self._spanned
        return basis[:, :rank], sizes[:rank]


Pairs = list[tuple[Array, Array]]  # of matrices whose products add up


def _sum_of_products(pairs: Pairs, rows: slice) -> Array:
    """Some rows of a sum of products."""
    total = pairs[0][0][rows, :] @ pairs[0][1]
    for left, right in pairs[1:]:
        total = total + left[rows, :] @ right
    return total


def _score_of_factors(
    space: Space, matrix: Pairs, variance: Pairs, common: Pairs, rank: int, hidden_bias: float
) -> Score:
    """The score, its radius the root of variances and what errors have in common, worked out some rows at a time."""
    xp, width, count = space.xp, int(matrix[0][1].shape[1]), int(matrix[0][0].shape[0])
    score, radius = (xp.empty((count, width), dtype=space.dtype, device=space.device) for _ in range(2))
    for some in row_blocks(count, width):
        score[some, :] = _sum_of_products(matrix, some)
        radius[some, :] = xp.sqrt(_sum_of_products(variance, some)) + _sum_of_products(common, some)
    _add_rotation_error(space, score, radius)
    ends = [xp.concat(each, axis=axis) for axis, each in ((1, [p[0] for p in matrix]), (0, [p[1] for p in matrix]))]
    factors = (ends[0], ends[1]) if ends[0].shape[1] < min(count, width) else None
    return Score(score, radius, rank, hidden_bias, factors)


def score_of_columns(space: Space, inverse: Array, columns: Array, radius: Array, right: Array) -> Score:
    """The score from all its columns in left-coordinates, for orthonormal directions `right`."""
    xp = space.xp
    matrix = inverse @ (columns @ right)
    # Errors of different forms are independent, so the rotations add them in quadrature.
    total = xp.sqrt(inverse**2 @ (radius**2 @ right**2))
    _add_rotation_error(space, matrix, total)
    seen = xp.linalg.svdvals(matrix) > float(xp.linalg.vector_norm(total))
    return Score(matrix, total, int(xp.sum(xp.astype(seen, xp.int64))))


def _add_rotation_error(space: Space, matrix: Array, radius: Array) -> None:
    """Add, in place, what two rotations and their own rounding do: some eps of the row and the column of an entry."""
    xp = space.xp
    rows, columns = xp.linalg.vector_norm(matrix, axis=1), xp.linalg.vector_norm(matrix, axis=0)
    average = float(xp.linalg.vector_norm(rows)) / matrix.shape[0] ** 0.5
    for some in row_blocks(*matrix.shape):
        radius[some, :] += space.rounding * (rows[some, None] + columns[None, :] + average)


def _bases(reader: FormReader, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Rows of unit length that share the guide evenly, the inverse of their matrix, and orthonormal directions.

    With a score bias all but the first row and direction are orthogonal to it, so that their tokens may be long.
    """
    space, width = reader.signature.space, reader.signature.width
    lean, tilts = LEAN * rng.uniform(1 - UNEVEN, 1 + UNEVEN), space.asarray(rng.uniform(1 - UNEVEN, 1, (width - 1, 1)))
    xp = space.xp
    left, right = random_orthogonal(space, rng, width), random_orthogonal(space, rng, width)
    if reader.bias is None or width == 1:
        left = equal_overlap(space, left, reader.guide, rng)
        return left, left.T, repel(right, left.T)
    left, along = split_along(space, left, reader.bias.vector)
    across = reader.guide - along * xp.vecdot(along, reader.guide)
    across_norm = float(xp.linalg.vector_norm(across))
    if across_norm > LEAST_CONTRAST * reader.guide_norm:
        leaning = along + across * (lean / across_norm)
        leaning = leaning / xp.linalg.vector_norm(leaning)
        left = xp.concat([leaning[None, :], equal_overlap(space, left, reader.guide, rng)])
    else:  # the value lies along the bias: rows that shall show value must lean that way
        left = xp.concat([along[None, :], (left + tilts * along[None, :]) / (1 + tilts**2) ** 0.5])
    others, along = split_along(space, right, reader.bias.vector)
    inverse = xp.linalg.inv(left)
    return left, inverse, xp.concat([-along[None, :], repel(others, inverse)])


def repel(directions: Array, inverse: Array) -> Array:
    """Directions with signs such that the solve divides by one plus, not minus, the ratio of the norms."""
    xp = namespace(directions)
    one = xp.ones_like(directions[:, 0])
    return directions * xp.where(directions @ xp.sum(inverse, axis=1) > 0, -one, one)[:, None]
