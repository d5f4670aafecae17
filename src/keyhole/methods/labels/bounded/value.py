"""Values and threshold from labels of single tokens of bounded norm, up to one positive factor.

Along a token e_k the label changes at b/v_k, and along a·e_i + r·e_k at r = (b − a·v_i)/v_k. Values that turn out to be
needed more accurately are bisected on.
"""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats, Integers
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.labels.comparisons import TURNS, Comparer
from keyhole.methods.labels.search import Prior, Search
from keyhole.queries import Position, Term, TokenRows
from keyhole.recovery import Outcome

STAGE = "values"
# The part of the way to the boundary to which it is first known.
COARSE = 2.0**-5
# Rounds of as many dense tokens as the width where all labels are the same.
MORE_LOOKS = 16
# A threshold that is closer to zero than this part of the longest token is none.
NO_THRESHOLD = 2.0**-60
# The value of the pivot is the largest but for this part.
CLOSE = 2.0**-3
# No value is larger than that of the pivot but for this factor.
LARGER = 1.25
# Cells are at least so many spacings of the longest tokens, below which arithmetic decides.
SPACINGS = 16.0


class BoundedValue:
    """The plane v·x = b by its values over that of a pivot, in an orthonormal basis of tokens."""

    def __init__(self, comparer: Comparer, longest: float, rng: np.random.Generator) -> None:
        self.comparer, self.space, self.longest = comparer, comparer.space, longest
        width = comparer.signature.width
        self.basis, self.rng = np.eye(width), rng  # (width, width): rows are tokens
        self.pivot, self.side = 0, 1.0  # the row along which the label changes, and where it is yes
        self.at = self.at_radius = 0.0  # where along the pivot
        self.search_at: Search | None = None  # None where it changes at zero
        self.ratios: Search | None = None
        self.step = self.cell = 0.0
        self.others = np.empty(0, np.int64)

    def copies(self, positions: list[Position], factor: float) -> list[Position]:
        """Copies of all tokens, which are answered alike and are another query."""
        most = (self.comparer.signature.max_length or TURNS) // len(positions)
        count = max(1, min(1 + int(np.log2(factor)), most))
        return [position for position in positions for _ in range(count)]

    def positions(self, vectors: Floats, factor: float) -> list[Position]:  # (count, width)
        """Queries of one token."""
        return self.copies([[Term(TokenRows(self.space.asarray(vectors)))]], factor)

    def ask_sides(self, dense: Floats) -> Steps[None]:  # (n, width), unit vectors
        """The labels of the longest tokens, along the basis and some more; a direction along which they differ."""
        width = len(self.basis)
        vectors = np.vstack([self.basis, dense])
        self.vectors, self.yes, self.no = vectors, *(yield from self._ask_both(vectors))
        for _ in range(MORE_LOOKS):
            if np.any(self.yes != self.no):
                break
            vectors = self.rng.standard_normal((width, width))
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            more = yield from self._ask_both(vectors)
            self.vectors = np.vstack([self.vectors, vectors])
            self.yes, self.no = (np.append(own, new) for own, new in zip((self.yes, self.no), more, strict=True))

    def _ask_both(self, vectors: Floats) -> Steps[tuple[Floats, Floats]]:  # (count, width) -> (count,), (count,)
        """The labels of the longest tokens in some directions, and in the opposite ones."""
        both = self.longest * np.vstack([vectors, -vectors])
        labels = yield from self.comparer.ask_labels(
            STAGE, lambda some, factor: self.positions(both[some], factor), len(both)
        )
        return labels[: len(vectors)], labels[len(vectors) :]

    def ask_pivot(self, negative: float, positive: float) -> Steps[None]:
        """A pivot whose value is about the largest, and where along it the label changes."""
        self.comparer.negative, self.comparer.positive = negative, positive
        width = len(self.basis)
        signs = np.where(self.yes == self.no, 0.0, np.where(self.yes == positive, 1.0, -1.0))
        if not np.any(signs[:width]):
            dense = width + int(np.argmax(signs[width:] != 0))
            if not signs[dense]:
                raise Unrecoverable(
                    Outcome.NOT_IDENTIFIABLE,
                    f"no token of norm {self.longest:.3g} changes its label with its sign: the threshold is out of "
                    "their range; allow longer tokens (max_norm)",
                )
            self.basis = np.linalg.qr(np.column_stack([self.vectors[dense], np.eye(width)]))[0].T[:width]
            along = float(np.sign(self.basis[0] @ self.vectors[dense]))
            signs = np.concatenate([[along * signs[dense]], np.zeros(width - 1)])
        rows = np.flatnonzero(signs[:width])
        tiny = NO_THRESHOLD * self.longest
        first = self.basis[rows[0]] * signs[rows[0]]
        ends = yield from self.comparer.decide(
            STAGE, lambda some, factor: self.positions(np.array([tiny, -tiny])[some, None] * first, factor), 2
        )
        if ends[0] and not ends[1]:
            self.at, self.at_radius = 0.0, 2 * tiny
            self.pivot = int(rows[0]) if rows.size == 1 else (yield from self._ask_largest(rows, signs))
            self.side = float(signs[self.pivot])
            return
        cell = COARSE * self.longest
        search = yield from self._ask_along(rows, signs, None, cell)
        nearest = int(np.argmin(np.abs(search.centres)))
        while cell > CLOSE * abs(search.centres[nearest]):  # until the nearest is about that
            cell *= COARSE
            low, high = np.abs(search.best)
            rows = rows[np.minimum(low, high) <= np.min(np.maximum(low, high))]
            search = yield from self._ask_along(rows, signs, None, cell)
            nearest = int(np.argmin(np.abs(search.centres)))
        self.pivot, self.side = int(rows[nearest]), float(signs[rows[nearest]])
        self.search_at = self.comparer.search(Prior(-self.longest, self.longest), 1)
        yield from self.refine_at(COARSE**2 * self.longest)

    def refine_at(self, cell: float) -> Steps[None]:
        """Where along the pivot the label changes, to a cell."""
        if self.search_at is None:
            return
        cell = max(cell, SPACINGS * self.space.eps * self.longest)
        cell = self.longest * 2.0 ** np.floor(np.log2(cell / self.longest))  # cells within cells
        rows = np.array([self.pivot])
        signs = np.zeros(len(self.basis))
        signs[self.pivot] = self.side
        yield from self._ask_along(rows, signs, self.search_at, cell)
        self.at, self.at_radius = float(self.search_at.centres[0]), float(self.search_at.radii[0])

    def _ask_along(self, rows: Integers, signs: Floats, search: Search | None, cell: float) -> Steps[Search]:
        """Where along some rows the label becomes yes."""
        search = search or self.comparer.search(Prior(-self.longest, self.longest), rows.size)

        def make(some: Integers, at: Floats, factor: float) -> tuple[list[Position], Floats]:
            vectors = (at * signs[rows[some]])[:, None] * self.basis[rows[some]]
            return self.positions(vectors, factor), -np.ones(some.size)

        yield from self.comparer.bisect(STAGE, search, make, cell)
        return search

    def _ask_largest(self, rows: Integers, signs: Floats) -> Steps[int]:
        """The row of the largest value, by a tournament."""
        left, long = rows, 0.5 * self.longest
        while left.size > 1:
            half = left.size // 2
            one, two = left[:half], left[half : 2 * half]
            tokens = long * (signs[one, None] * self.basis[one] - signs[two, None] * self.basis[two])

            def make(some: Integers, factor: float, tokens: Floats = tokens) -> list[Position]:
                return self.positions(tokens[some], factor)

            first = yield from self.comparer.decide(STAGE, make, half)
            left = np.concatenate([np.where(first, one, two), left[2 * half :]])
        return int(left[0])

    def ask_ratios(self, accuracy: float) -> Steps[None]:
        """All values over that of the pivot, to an accuracy over it; goes on where it was left."""
        width = len(self.basis)
        if self.ratios is None:
            self.step = 0.5 * (self.longest - abs(self.at))
            self.others = np.flatnonzero(np.arange(width) != self.pivot)
            reach = LARGER * self.step + self.at_radius
            self.ratios = self.comparer.search(Prior(self.at - reach, self.at + reach), width - 1)
            self.cell = 2 * self.step * COARSE
        # Cells of one grid within those of the last, so that edges stay edges.
        wanted = max(accuracy * self.step, SPACINGS * self.space.eps * self.longest)
        self.cell *= 2.0 ** -max(0, int(np.floor(np.log2(self.cell / wanted))))
        yield from self.refine_at(self.cell)
        pivot = self.side * self.basis[self.pivot]

        def make(some: Integers, at: Floats, factor: float) -> tuple[list[Position], Floats]:
            vectors = self.step * self.basis[self.others[some]] + at[:, None] * pivot
            return self.positions(vectors, factor), -np.ones(some.size)

        if width > 1:
            yield from self.comparer.bisect(STAGE, self.ratios, make, self.cell)

    @property
    def matrix(self) -> Floats:  # (width,)
        """The values, that of the pivot being one or minus one."""
        assert self.ratios is not None
        values = np.zeros(len(self.basis))
        values[self.pivot] = self.side
        values[self.others] = (self.at - self.ratios.centres) / self.step
        return np.asarray(values @ self.basis)

    @property
    def radius(self) -> Floats:  # (width,)
        """How far each may be off."""
        assert self.ratios is not None
        radii = np.zeros(len(self.basis))
        radii[self.others] = (self.at_radius + self.ratios.radii) / self.step
        own = radii @ np.abs(self.basis)
        return np.asarray(own + self.space.rounding * np.linalg.norm(self.matrix) * self.longest / self.step)

    @property
    def threshold(self) -> float:
        """The threshold in the same unit."""
        return self.at

    @property
    def threshold_radius(self) -> float:
        """How far it may be off."""
        return self.at_radius + self.space.rounding * abs(self.at) * 4
