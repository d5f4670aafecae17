"""The score matrix from labels of two tokens of bounded norm, on either side of a plane where labels change.

With y on the plane, u·n = q·n = 1/√d for its unit normal n, and g = y − β·q, the mixture of g + τ·u and g lies on the
plane where the logit τ·uᵀWg is ln(β/(τ − β)). So the label compares uᵀWg with ln(β/(τ − β))/τ, which τ sets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Booleans, Floats, Integers, numpy_space
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.labels.comparisons import Comparer
from keyhole.methods.labels.score import (
    CAUTION,
    FORMS,
    PRIOR_ROUNDS,
    SCALE_ROUNDS,
    LabelScore,
    bits_of_ball,
    root_mean_square,
    scaled_prior,
)
from keyhole.methods.labels.search import HeavyPrior, Search
from keyhole.numerics.orthogonal import equal_overlap, random_orthogonal
from keyhole.queries import Position, Term, TokenRows
from keyhole.recovery import Outcome

# The form in units of 1/β can be compared with more than −0.2785, ln(β/(τ − β))·β/τ at τ = 4.59 β, and with less than
# what brings the first token too near to the plane.
LEAST_FORM, MOST_FORM, LONGEST_STEP = -0.27, 3.0, 4.2
HALVINGS = 60  # of the interval in which τ is found
# Of all forms few are larger than this in those units, or tokens are taken closer together by the factor.
TYPICAL_FORM, CLOSER, FEW_LARGE, MOST_CLOSER = 0.04, 4.0, 2, 60
# Octaves below that in which the scale of forms is looked for at once, and the median size of a normal number.
OCTAVES_DOWN, MEDIAN = 12, 0.6745
# Forms are this much larger than what errors of the plane make of them, or it is read more accurately.
CLEAR = 16.0
# Cells of forms are smaller by this than those of entries: of many entries some are sums of errors of one sign.
FINER_FORMS = 0.8


@dataclass(frozen=True)
class Plane:
    """Where labels change, near a point on it."""

    point: Floats  # (width,)
    normal: Floats  # (width,), of norm one, to the side of the label for yes
    room: float  # tokens this near to the point are answered by the two labels only
    radius: Callable[[Floats], Floats]  # (count, width) -> (count,): how far tokens may be off their place beside it
    cone: bool = False  # whether all of it may be scaled


class NearPlane:
    """Compares forms uᵀWg by two tokens beside a plane."""

    def __init__(self, comparer: Comparer, copies: Callable[[list[Position], float], list[Position]]) -> None:
        self.comparer, self.space, self.copies = comparer, comparer.space, copies
        self.closeness = 1.0

    def place(self, plane: Plane, rng: np.random.Generator | None = None) -> None:
        """Choose tokens beside a plane, at random with `rng`: forms of unit tokens may be mostly zero."""
        width = len(plane.point)
        closer = self.closeness
        if plane.cone:  # logits go with the square of what tokens are scaled by
            plane, closer = replace(plane, point=plane.point / closer**0.5, room=plane.room / closer**0.5), 1.0
        self.plane = plane
        # The side for which the tokens g are farthest from linear dependence.
        self.side = -1.0 if plane.normal @ plane.point > 0 else 1.0
        space = numpy_space()
        bases = [np.eye(width) if rng is None else random_orthogonal(space, rng, width) for _ in range(2)]
        turned = [equal_overlap(space, basis, plane.normal) for basis in bases]
        self.left, self.right = (basis * np.sign(basis @ plane.normal)[:, None] for basis in turned)
        self.beta = np.full(width, plane.room / (1 + LONGEST_STEP) / closer)  # of each column

    @property
    def last(self) -> Floats:  # (width, width)
        """The last tokens g, as rows."""
        return np.asarray(self.plane.point - self.side * self.beta[:, None] * self.right)

    def _pairs(self, row: Integers, column: Integers, at: Floats) -> tuple[Floats, Floats, Floats]:
        """First and last tokens that compare forms σ·u_iᵀWg_j with thresholds, and the steps between them over β."""
        steps, last = step_of(at * self.beta[column]), self.last[column]
        return last + (self.side * self.beta[column] * steps)[:, None] * self.left[row], last, steps

    def compare(self, row: Integers, column: Integers, at: Floats, factor: float) -> tuple[list[Position], Floats]:
        """Queries that compare forms with thresholds."""
        first, last, _ = self._pairs(row, column, at)
        tokens = [TokenRows(self.space.asarray(each)) for each in (first, last)]
        return self.copies([[Term(each)] for each in tokens], factor), np.full(row.size, self.side)

    def errors(self, row: Integers, column: Integers, at: Floats) -> Floats:
        """What forms may be off by, as the plane is not known better and arithmetic rounds."""
        first, last, steps = self._pairs(row, column, at)
        beta = self.beta[column]
        away = beta / len(self.plane.point) ** 0.5  # of g from the plane
        rounding = self.space.rounding * (np.linalg.norm(self.plane.point) + (1 + LONGEST_STEP) * beta)
        off = [self.plane.radius(each) + rounding for each in (first, last)]
        logits = off[0] / (away * (steps - 1)) + off[1] / away
        return np.asarray(logits / (steps * beta) + 4 * self.space.rounding * np.abs(at))

    def ask_scale(self, plane: Plane, rng: np.random.Generator) -> Steps[float | None]:
        """The size of forms of tokens so close together that few are out of range; None below errors of the plane."""
        every = np.arange(len(plane.point))
        for _ in range(MOST_CLOSER):
            self.place(plane, rng)
            row, column = rng.choice(every, FORMS), rng.choice(every, FORMS)
            unit = TYPICAL_FORM / float(self.beta[0])
            least = CLEAR * float(np.max(self.errors(row, column, np.zeros(FORMS))))
            if least > unit:
                return None
            large = yield from self._are_larger(row, column, unit)
            if np.sum(large) <= FEW_LARGE:
                break
            self.closeness *= CLOSER
        else:
            raise Unrecoverable(Outcome.SATURATED, "logits of the closest tokens are too large to be read")
        low, high = -OCTAVES_DOWN, 0
        while unit * 2.0**low > least:  # half of the forms are smaller still
            large = yield from self._are_larger(row, column, unit * 2.0**low)
            if 2 * np.sum(large) >= FORMS:
                break
            low, high = 2 * low, low
        else:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            large = yield from self._are_larger(row, column, unit * 2.0**middle)
            low, high = (middle, high) if 2 * np.sum(large) >= FORMS else (low, middle)
        return float(unit * 2.0 ** (0.5 * (low + high)) / MEDIAN)

    def _are_larger(self, row: Integers, column: Integers, size: float) -> Steps[Booleans]:
        """Whether forms are larger than a size, on either side of zero."""
        both = np.repeat([size, -size], row.size)
        rows, columns = np.tile(row, 2), np.tile(column, 2)

        def make(some: Integers, factor: float) -> list[Position]:
            return self.compare(rows[some], columns[some], both[some], factor)[0]

        above = (yield from self.comparer.decide("scale", make, both.size)) == (self.side > 0)
        return np.asarray(above[: row.size] | ~above[row.size :])

    def cell(self, scale: float, accuracy: float) -> float:
        """The cells of forms that make entries of the matrix as accurate over their root mean square."""
        last = self.last
        return float(
            2 * accuracy * scale / np.linalg.norm(last[0]) / np.max(np.linalg.norm(np.linalg.inv(last), axis=1))
        )

    def ask_score(self, scale: float, accuracy: float) -> Steps[LabelScore]:
        """All forms by bisection; columns with forms that are out of range are read again with closer tokens."""
        width = len(self.plane.point)
        forms, radius, cells = np.zeros((width, width)), np.zeros((width, width)), np.zeros(width)
        columns = np.arange(width)
        for _ in range(MOST_CLOSER):
            row, column = (each.ravel() for each in np.meshgrid(np.arange(width), columns, indexing="ij"))
            search, cell = yield from self._ask_forms(row, column, scale, accuracy)
            low, high = search.best
            out = (low == search.prior.low) | (high == search.prior.high)
            at = np.where(out, 0.0, search.centres)
            forms[row, column], cells[columns] = at, cell
            radius[row, column] = search.radii + self.errors(row, column, at)
            columns = np.unique(column[out])
            if not columns.size:
                return self._solve(forms, radius, cells)
            self.beta[columns] /= CLOSER
        raise Unrecoverable(Outcome.SATURATED, f"logits of {columns.size} columns are too large to be read")

    def _ask_forms(self, row: Integers, column: Integers, scale: float, accuracy: float) -> Steps[tuple[Search, float]]:
        """Forms of some columns, which have tokens as close together, and their cells."""

        def compare(some: Integers, at: Floats, factor: float) -> tuple[list[Position], Floats]:
            return self.compare(row[some], column[some], at, factor)

        beta, comparer = float(self.beta[column[0]]), self.comparer
        search = comparer.search(HeavyPrior(LEAST_FORM / beta, MOST_FORM / beta, True, 0.0, scale), row.size)
        cell = CAUTION * self.cell(scale, accuracy)
        if not comparer.flip_rate:
            yield from comparer.bisect("entries", search, compare, rounds=SCALE_ROUNDS)
            search.prior = scaled_prior(search, scale)
            yield from comparer.bisect("entries", search, compare, rounds=PRIOR_ROUNDS)
            cell = FINER_FORMS * self.cell(root_mean_square(search, scale), accuracy)
        yield from comparer.bisect("entries", search, compare, cell)
        return search, cell

    def _solve(self, forms: Floats, radius: Floats, cells: Floats) -> LabelScore:
        """F = σ·U·W·Gᵀ solved for W."""
        inverse = np.linalg.inv(self.last).T
        matrix = self.side * self.left.T @ forms @ inverse
        wide = np.abs(self.left.T) @ radius @ np.abs(inverse)
        rms = float(np.sqrt(np.mean(matrix**2)))
        # Cells of forms are cells of the matrix of this size.
        volume = float(np.mean(np.log2(cells))) - np.linalg.slogdet(self.last)[1] / np.log(2) / len(cells)
        wide = wide + self.space.rounding * (
            np.linalg.norm(matrix) + np.abs(self.left.T) @ np.abs(forms) @ np.abs(inverse)
        )
        return LabelScore(matrix, wide, rms, bits_of_ball(forms.size, rms, float(2.0**volume)))


def step_of(form: Floats) -> Floats:
    """The step τ over β at which a form over 1/β is compared: −ln(τ/β − 1)·β/τ, by bisection."""
    low, high = np.full(form.shape, -2.0 * MOST_FORM), np.full(form.shape, np.log(LONGEST_STEP - 1))
    for _ in range(HALVINGS):  # for the logarithm of τ/β − 1
        middle = 0.5 * (low + high)
        larger = middle + form * (1 + np.exp(middle)) < 0
        low, high = np.where(larger, middle, low), np.where(larger, high, middle)
    return np.asarray(1 + np.exp(0.5 * (low + high)))
