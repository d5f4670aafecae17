"""Classes with biases of their own, of tokens of bounded norm: V_r·x + b_r is linear in (x, 1).

With that coordinate classes are cones as those without biases are, of which tokens show the part that is not too far
off its axis. A boundary is a plane off the origin, beside which W is read as beside that of a threshold.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keyhole.arrays import Booleans, Floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.labels.bounded.score import Plane
from keyhole.methods.labels.bounded.value import BoundedValue
from keyhole.methods.labels.classes import Boundary, ClassReader, ClassValues
from keyhole.methods.labels.score import Rows
from keyhole.methods.labels.value import Tokens
from keyhole.queries import Position
from keyhole.recovery import Outcome

# Tokens are this long at most in the unit in which they stand beside 1.
LONGEST = 2.0
# Points of a boundary among which the one with most room is taken, and how much of it is used.
CANDIDATES, USED = 400, 0.9


class BiasedReader(ClassReader):
    """Asks for the labels of tokens x by vectors (x, 1), and multiples of these."""

    def __init__(self, tokens: Tokens, bounded: BoundedValue, rng: np.random.Generator) -> None:
        super().__init__(tokens, rng)
        self.bounded, self.unit = bounded, bounded.longest / LONGEST
        self.width = tokens.width + 1
        self.vectors = np.zeros((0, self.width))

    def add_rows(self, rows: Rows) -> None:
        """Take in the longest tokens of some directions, and their opposites."""
        both = LONGEST * np.vstack([rows.vectors, -rows.vectors])
        self.add(np.column_stack([both, np.ones(len(both))]), np.concatenate([rows.yes, rows.no]))

    def draw(self, count: int) -> Floats:  # (count, width + 1)
        """Vectors of norm one, of random tokens of all norms."""
        tokens = self.rng.standard_normal((count, self.tokens.width))
        tokens *= LONGEST * self.rng.uniform(size=(count, 1)) / np.linalg.norm(tokens, axis=1, keepdims=True)
        vectors = np.column_stack([tokens, np.ones(count)])
        return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))

    def has_tokens(self, vectors: Floats) -> Booleans:  # (count, width + 1) -> (count,)
        """Whether tokens are short enough."""
        return np.asarray(np.linalg.norm(vectors[:, :-1], axis=1) <= LONGEST * vectors[:, -1])

    def tokens_of(self, vectors: Floats) -> Floats:  # (count, width + 1) -> (count, width)
        """The tokens that vectors stand for."""
        return np.asarray(self.unit * vectors[:, :-1] / vectors[:, -1:])

    def _positions(self, vectors: Floats, factor: float) -> list[Position]:
        return self.bounded.positions(self.tokens_of(vectors), factor)

    def values_of(self, lifted: ClassValues) -> ClassValues:
        """Values and biases over the largest value, which is then known exactly."""
        matrix, radius = lifted.matrix[:-1], lifted.radius[:-1]
        place = np.unravel_index(int(np.argmax(np.abs(matrix))), matrix.shape)
        largest, off = abs(float(matrix[place])), float(radius[place])
        if largest <= off:
            raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, "the biases of classes decide labels within max_norm")
        own = (radius + np.abs(matrix) * (off / largest)) / largest
        own[place] = 0.0
        bias, wide = self.unit * lifted.matrix[-1] / largest, self.unit * lifted.radius[-1] / largest
        return replace(
            lifted, matrix=matrix / largest, radius=own, bias=bias, bias_radius=wide + np.abs(bias) * (off / largest)
        )

    def plane(self, each: Boundary, point: Floats, room: float) -> Plane:  # (width,)
        """The boundary near a point of it."""
        normal, wide = each.normal[:-1], each.radius
        size = float(np.linalg.norm(normal))
        place = point - normal * ((normal @ point + self.unit * each.normal[-1]) / size**2)

        def off(tokens: Floats) -> Floats:
            return np.asarray((np.abs(tokens) @ wide[:-1] + self.unit * wide[-1]) / size)

        return Plane(place, normal / size, room, off)

    def widest(self, values: ClassValues) -> tuple[Boundary, Floats, float]:
        """A boundary, a point of it, and how far that is from any third class and from tokens that are too long."""
        assert values.bias is not None
        best: tuple[Boundary, Floats, float] | None = None
        matrix, bias, longest = values.matrix.T, values.bias, self.bounded.longest
        for each in (boundary for boundary in self.boundaries if boundary.one != boundary.two):
            normal, step = matrix[each.one] - matrix[each.two], bias[each.one] - bias[each.two]
            (start,) = self.tokens_of(each.point[None])
            points = start + 0.5 * longest * self.rng.standard_normal((CANDIDATES, len(start))) / len(start) ** 0.5
            points = np.vstack([start, points])
            points -= np.outer((points @ normal + step) / (normal @ normal), normal)
            room = longest - np.linalg.norm(points, axis=1)
            others = [n for n in range(len(matrix)) if n not in (each.one, each.two)]
            if others:
                gaps = (points @ matrix[each.one] + bias[each.one])[:, None] - points @ matrix[others].T - bias[others]
                apart = np.maximum(*(np.linalg.norm(matrix[others] - matrix[o], axis=1) for o in (each.one, each.two)))
                room = np.minimum(room, np.min(gaps / apart, axis=1))
            place = int(np.argmax(room))
            if best is None or room[place] > best[2]:
                best = each, points[place], float(room[place])
        assert best is not None
        return best[0], best[1], USED * best[2]

    def refine_normal(self, each: Boundary, fine: float) -> Steps[None]:
        """The normal of a boundary, more accurately."""
        if not (yield from self.ask_normal(each, fine)):
            raise Unrecoverable(Outcome.TOO_NOISY, "a boundary between two classes could not be read: try another seed")
