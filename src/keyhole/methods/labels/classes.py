"""Values of several outputs of which the largest is told, up to a common row and a positive factor.

The label of a long token y is that of the largest V_r·y, so classes are cones, and V_r − V_s is the normal of the
boundary between two of them. Normals of a tree of boundaries are read in the neighbourhood of one point each; their
lengths follow from one point on every other boundary, where the differences along the tree must add up to zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import Booleans, Floats, Integers
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.labels.comparisons import OtherLabel
from keyhole.methods.labels.score import Rows
from keyhole.methods.labels.search import Prior, Search
from keyhole.methods.labels.value import Tokens
from keyhole.numerics.svd import svd
from keyhole.queries import Position, Term, TokenRows
from keyhole.recovery import Outcome

STAGE = "values"
# Random tokens of a round in which classes are looked for, and more for every class; rounds without a new one that
# end this, and how many there are at most.
LOOKS, LOOKS_PER_CLASS = 48, 8
QUIET_ROUNDS, MOST_LOOKS = 2, 12
# Tokens for each class where known classes meet, and steps on which such a place is found.
MEETINGS, MEETING_STEPS = 4, 4
# Rounds in which more boundaries are looked for.
TURNS = 4
# Pairs of classes between which boundaries are looked for, for each class.
PAIRS = 6
# A boundary is first found to this part of the way between two tokens.
COARSE = 2.0**-12
# The neighbourhood of a boundary point in which its normal is read, over the norm of the point: halved so often, while
# other classes reach into it.
ROOM, HALVINGS = 0.25, 16
# Tangents of the angle between a normal and the direction it is read along, and how well it is read: first along the
# way between two tokens, then along the normal found there.
FIRST_TANGENT, FIRST_CELL, TANGENT = 16.0, 2.0**-5, 0.25
# Singular values of the equations for lengths that are smaller than so many times their accuracy leave some open.
OPEN = 30.0
# Cells are at least so many spacings of tokens of norm one, below which arithmetic decides.
SPACINGS = 16.0


@dataclass(eq=False)
class Boundary:
    """A boundary of two classes: a point on it, between two tokens, and its normal."""

    one: int  # class on the side of the first token
    two: int
    start: Floats  # (width,), of class one
    end: Floats  # (width,)
    low: float = 0.0  # part of the way up to which the label is that of class one
    high: float = 1.0
    normal: Floats = field(default_factory=lambda: np.empty(0))  # (width,), points to class one
    radius: Floats = field(default_factory=lambda: np.empty(0))

    @property
    def point(self) -> Floats:
        """The point, of norm one or less."""
        return self.start + 0.5 * (self.low + self.high) * (self.end - self.start)

    @property
    def point_radius(self) -> float:
        """How far the boundary is from it at most."""
        return float(0.5 * (self.high - self.low) * np.linalg.norm(self.end - self.start)) + 1e-15


@dataclass(frozen=True)
class ClassValues:
    """Values of all classes, that of the first being zero."""

    matrix: Floats  # (width, classes)
    radius: Floats  # (width, classes)
    bits: float
    threshold: float = 0.0
    threshold_radius: float = 0.0
    bias: Floats | None = None  # (classes,)
    bias_radius: Floats | None = None  # (classes,)


class _NewClass(OtherLabel):
    """Raised where a label is answered that was not seen before."""

    def __init__(self, label: float, vector: Floats) -> None:
        super().__init__(label)
        self.vector = vector


class ClassReader:
    """Asks for labels of long tokens, and for the boundaries between classes."""

    def __init__(self, tokens: Tokens, rng: np.random.Generator) -> None:
        self.tokens, self.comparer, self.rng = tokens, tokens.comparer, rng
        self.width = tokens.width  # of vectors, which stand for tokens
        self.vectors, self.seen = np.zeros((0, self.width)), np.zeros(0)  # of norm one, and the labels of their tokens

    def add(self, vectors: Floats, labels: Floats) -> None:
        """Take in tokens whose labels are known."""
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        self.vectors, self.seen = np.vstack([self.vectors, vectors]), np.concatenate([self.seen, labels])

    def add_rows(self, rows: Rows) -> None:
        """Take in tokens and their opposites."""
        self.add(np.vstack([rows.vectors, -rows.vectors]), np.concatenate([rows.yes, rows.no]))

    def draw(self, count: int) -> Floats:  # (count, width)
        """Random vectors of norm one."""
        vectors = self.rng.standard_normal((count, self.width))
        return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))

    def has_tokens(self, vectors: Floats) -> Booleans:  # (count, width) -> (count,)
        """Whether there are tokens that the vectors stand for."""
        return np.ones(len(vectors), bool)

    @property
    def kind(self) -> tuple[float, ...]:
        """The labels of all classes that were seen."""
        return tuple(float(label) for label in np.unique(self.seen))

    def _positions(self, vectors: Floats, factor: float) -> list[Position]:
        rows = TokenRows(self.tokens.space.asarray(vectors))
        return [[Term(rows, None, self.tokens.long(factor))]]

    def _ask(self, vectors: Floats) -> Steps[Floats]:  # (count, width) -> (count,)
        return self.comparer.ask_labels(
            STAGE, lambda some, factor: self._positions(vectors[some], factor), len(vectors)
        )

    def ask_numbers(self, vectors: Floats) -> Steps[Integers]:  # (count, width) -> (count,)
        """The number of the class of each token."""
        labels = yield from self._ask(vectors)
        new = np.flatnonzero(~np.isin(labels, self.seen))
        if new.size:
            raise _NewClass(float(labels[new[0]]), vectors[new[0]])
        return np.searchsorted(self.kind, labels)

    def number_of(self, label: float) -> int:
        """The number of a class; Unrecoverable where it was not seen among long tokens."""
        if label not in self.kind:
            raise Unrecoverable(
                Outcome.NOT_IDENTIFIABLE,
                f"class {label:g} was answered to short tokens and to no long ones: its values show too rarely, or "
                "are never the largest, and only its bias shows",
            )
        return self.kind.index(label)

    def ask_inside(self, rows: Rows) -> Steps[None]:
        """The labels of some tokens, and of random ones until they show no more new classes."""
        self.add_rows(rows)
        quiet = 0
        for _ in range(MOST_LOOKS):
            known = len(self.kind)
            drawn = self.draw(LOOKS + LOOKS_PER_CLASS * known)
            self.add(drawn, (yield from self._ask(drawn)))
            quiet = quiet + 1 if len(self.kind) == known else 0
            if quiet == QUIET_ROUNDS:
                break

    def ask_all(self, rows: Rows, accuracy: float) -> Steps[ClassValues]:
        """The values of all classes; begins again where a class shows that random tokens did not meet."""
        yield from self.ask_inside(rows)
        while True:
            try:
                values = yield from self.ask_values(accuracy)
                yield from self.ask_numbers(self._meetings(values.matrix))
            except _NewClass as seen:
                self.add(seen.vector[None], np.array([seen.label]))
            else:
                return values

    def _meetings(self, matrix: Floats) -> Floats:  # (width, classes) -> (tokens, width)
        """Tokens where several classes are as likely: a class of few tokens lies where those that are known meet."""
        width, count = matrix.shape
        drawn = self.draw(MEETINGS * count)
        for number in range(len(drawn)):
            most = int(self.rng.integers(2, min(count, width) + 1)) if width > 1 else 1
            for _ in range(MEETING_STEPS):
                first = np.argsort(-(drawn[number] @ matrix))[:most]
                normals = np.linalg.qr(matrix[:, first[1:]] - matrix[:, first[:1]])[0]
                drawn[number] -= normals @ (normals.T @ drawn[number])
        drawn = drawn[self.has_tokens(drawn)]
        return np.asarray(drawn / np.linalg.norm(drawn, axis=1, keepdims=True))

    def ask_values(self, accuracy: float) -> Steps[ClassValues]:
        """The values of all classes that were seen."""
        fine = accuracy / 4
        # Well inside a class is the mean of its tokens, as classes are convex.
        inside = np.stack([np.mean(self.vectors[self.seen == label], axis=0) for label in self.kind])
        self.boundaries: list[Boundary] = []
        boundaries = self.boundaries
        for turn in range(TURNS):
            boundaries += yield from self._ask_boundaries(inside, of_means=turn == 0)
            tree = yield from self._ask_tree(boundaries, len(inside), fine)
            rest = [each for each in boundaries if all(each is not one for one in tree)]
            if len(tree) == len(inside) - 1:
                yield from self.refine(rest, fine)
                values = _solve_lengths(tree, [each for each in rest if each.one != each.two], len(inside), accuracy)
                if values is not None:
                    return values
        raise Unrecoverable(
            Outcome.NOT_IDENTIFIABLE,
            f"{len(inside)} classes meet in too few boundaries to tell how long the differences of their values are",
        )

    def _ask_boundaries(self, inside: Floats, *, of_means: bool) -> Steps[list[Boundary]]:  # (classes, width)
        """Boundaries that are met on the way out of each class towards others, one for each pair of classes."""
        count = len(inside)
        pairs = [(one, two) for one in range(count) for two in range(count) if one != two]
        if len(pairs) > PAIRS * count:
            pairs = [pairs[n] for n in self.rng.permutation(len(pairs))[: PAIRS * count]]
        numbers = np.searchsorted(self.kind, self.seen)

        def token(number: int) -> Floats:
            some = np.flatnonzero(numbers == number)
            return np.asarray(inside[number] if of_means else self.vectors[some[self.rng.integers(some.size)]])

        found = [Boundary(one, two, token(one), token(two)) for one, two in pairs]
        yield from self.refine(found, COARSE)
        kept: dict[tuple[int, int], Boundary] = {}
        for each in found:
            if each.two != each.one:
                kept.setdefault((min(each.one, each.two), max(each.one, each.two)), each)
        return list(kept.values())

    def _ask_tree(self, boundaries: list[Boundary], count: int, fine: float) -> Steps[list[Boundary]]:
        """Boundaries that connect all classes as far as they do, with their normals; what cannot be read is removed."""
        while True:
            # Those whose normal is known come first. A closer look may have shown another class behind a boundary.
            boundaries.sort(key=lambda each: not each.normal.size)
            tree, group = [], np.arange(count)
            for each in boundaries:
                if group[each.one] != group[each.two]:
                    tree.append(each)
                    group[group == group[each.two]] = group[each.one]
            unknown = [each for each in tree if not each.normal.size]
            if not unknown:
                return tree
            if not (yield from self.ask_normal(unknown[0], fine)):
                boundaries.remove(unknown[0])

    def refine(self, some: list[Boundary], cell: float) -> Steps[None]:
        """Bisect the way out of the first class until its end is known to this part of the way; look what follows."""
        cell = max(cell, SPACINGS * self.tokens.space.eps)
        some = [each for each in some if each.high - each.low > cell]
        if not some:
            return
        starts, ends = (np.stack([getattr(each, name) for each in some]) for name in ("start", "end"))
        first, last = (np.array([getattr(each, name) for each in some]) for name in ("low", "high"))
        yes, no = np.asarray(self.kind)[[each.one for each in some]], np.full(len(some), np.nan)

        def at_part(rows: Integers, part: Floats) -> Floats:  # -> (rows, width)
            way = (first[rows] + part * (last - first)[rows])[:, None]
            return np.asarray(starts[rows] + way * (ends - starts)[rows])

        def make(rows: Integers, at: Floats, factor: float) -> tuple[list[Position], Floats]:
            return self._positions(at_part(rows, at), factor), np.ones(rows.size)

        search = self.comparer.search(Prior(0.0, 1.0), len(some))
        cells = np.minimum(cell / (last - first), 0.5)
        yield from self.comparer.bisect(STAGE, search, make, cells, yes=yes, no=no)
        low, high = search.best
        numbers = yield from self.ask_numbers(at_part(np.arange(len(some)), high))
        for each, start, width, down, up, two in zip(some, first, last - first, low, high, numbers, strict=True):
            each.low, each.high, each.two = start + down * width, start + up * width, int(two)

    def ask_normal(self, each: Boundary, fine: float) -> Steps[bool]:
        """Whether the normal of a boundary could be read: it is kept with how well it is known."""
        first = yield from self._ask_normal(each, each.start - each.end, FIRST_TANGENT, FIRST_CELL)
        second = None if first is None else (yield from self._ask_normal(each, first[0], TANGENT, fine))
        if second is not None:
            each.normal, each.radius = second
        return second is not None

    def _ask_normal(
        self, each: Boundary, along: Floats, tangent: float, cell: float
    ) -> Steps[tuple[Floats, Floats] | None]:
        """The normal w + Σ τ_i·q_i, where steps y + ρ(q_i − τ_i·w) return to the boundary, w the direction `along`."""
        width = self.width
        room = ROOM * float(np.linalg.norm(each.point)) / tangent
        for _ in range(HALVINGS):
            yield from self.refine([each], cell * room / 16)
            centre = each.point
            frame = np.linalg.qr(np.column_stack([centre, along, np.eye(width)]))[0].T[:width]
            normal = frame[1] * np.sign(frame[1] @ along)
            others = frame[2:]
            if not len(others):
                return normal, np.full(width, each.point_radius / float(np.linalg.norm(centre)))
            search = yield from self._ask_tangents(each, normal, others, room, (tangent, cell))
            if search is not None:
                off = search.radii + (1 + tangent) * each.point_radius / room + self.tokens.space.rounding / room
                radius = off @ np.abs(others) + each.point_radius / float(np.linalg.norm(centre))
                return normal + search.centres @ others, np.asarray(radius)
            room /= 2
        return None

    def _ask_tangents(
        self, each: Boundary, normal: Floats, others: Floats, room: float, cells: tuple[float, float]
    ) -> Steps[Search | None]:
        """The steps τ_i, within ±cells[0] and to cells[1]; None where another class reaches into the neighbourhood."""
        tangent, cell = cells[0], max(cells[1], SPACINGS * self.tokens.space.eps / room)

        def at(rows: Integers, steps: Floats) -> Floats:
            return np.asarray(each.point + room * (others[rows] - steps[:, None] * normal))

        def make(rows: Integers, steps: Floats, factor: float) -> tuple[list[Position], Floats]:
            return self._positions(at(rows, steps), factor), np.ones(rows.size)

        every = np.arange(len(others))
        ends = np.repeat([-tangent, tangent], len(others))
        corners = at(np.tile(every, 2), ends)
        if not np.all(self.has_tokens(corners)):
            return None
        labels = yield from self.ask_numbers(corners)
        if not np.array_equal(labels, np.repeat([each.one, each.two], len(others))):
            return None
        search = self.comparer.search(Prior(-tangent, tangent), len(others))
        yes, no = np.full(len(others), self.kind[each.one]), np.full(len(others), np.nan)
        coarse = cell * 2.0 ** max(0, int(np.log2(tangent / 16 / cell)))  # cells within cells
        for goal in dict.fromkeys((coarse, cell)):  # looked at early, before much is asked in vain
            yield from self.comparer.bisect(STAGE, search, make, goal, yes=yes, no=no)
            labels = yield from self.ask_numbers(at(every, search.best[1]))
            if not np.all(labels == each.two):
                return None
        return search


def _solve_lengths(tree: list[Boundary], rest: list[Boundary], count: int, accuracy: float) -> ClassValues | None:
    """Values along the tree, the lengths of whose normals points on other boundaries tell; None if they do not."""
    paths = np.zeros((count, len(tree)))  # V_r − V_0 = Σ_e paths[r, e]·length_e·normal_e
    known = {0}
    while len(known) < count:
        for number, each in enumerate(tree):
            for new, old, sign in ((each.one, each.two, 1.0), (each.two, each.one, -1.0)):
                if old in known and new not in known:
                    paths[new] = paths[old]
                    paths[new, number] += sign
                    known.add(new)
    normals, radii = np.stack([each.normal for each in tree]), np.stack([each.radius for each in tree])
    points = np.stack([each.point for each in rest]) if rest else np.zeros((0, normals.shape[1]))
    points_radii = np.array([each.point_radius for each in rest])
    steps = np.array([paths[each.one] - paths[each.two] for each in rest]).reshape(-1, len(tree))
    equations = steps * (points @ normals.T)
    left, sizes, vectors = svd(equations, full_matrices=True)
    rank = len(tree) - 1
    if len(sizes) < rank or (rank and not sizes[rank - 1] > OPEN * accuracy * sizes[0]):  # of two classes one is free
        return None
    lengths = vectors[-1] * np.sign(np.sum(vectors[-1]))
    doubts = (
        np.abs(steps) * lengths * (np.abs(points) @ radii.T + points_radii[:, None] * np.linalg.norm(normals, axis=1))
    )
    inverse = vectors[:rank].T @ (left[:, :rank] / sizes[:rank]).T
    lengths_radii = np.abs(inverse) @ np.sum(doubts, axis=1)
    if np.any(lengths + lengths_radii < 0):
        raise Unrecoverable(Outcome.WRONG_FAMILY, "boundaries of classes are not those of linear outputs")
    if np.any(lengths <= lengths_radii):
        return None
    matrix = (paths * lengths) @ normals
    radius = np.abs(paths * lengths) @ radii + np.abs(paths) @ (lengths_radii[:, None] * np.abs(normals))
    place = np.unravel_index(int(np.argmax(np.abs(matrix))), matrix.shape)
    largest = float(np.abs(matrix[place]))
    # Over the largest of them, which is then known exactly.
    radius = (radius + np.abs(matrix) * (radius[place] / largest)) / largest
    radius[place] = 0.0
    numbers = (count - 1) * matrix.shape[1]
    bits = np.log2(2 * numbers) + (numbers - 1) * np.log2(1 / accuracy)
    return ClassValues((matrix / largest).T, radius.T, float(bits))
