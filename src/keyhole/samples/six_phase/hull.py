"""The affine hull of the score matrices, and phase 5 of the six: a net of points over it, certified by the examples."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Any

import numpy as np

from keyhole.arrays import Floats
from keyhole.errors import UsageError
from keyhole.samples.source import Source
from keyhole.samples.variable_projection import LayerProblem, mixture, relative_error

# Points of the net along each direction at most, its radius over that of the proxy, and how often it is refined.
MOST_POINTS = {1: 41, 2: 15, 3: 9}
LEAST_POINTS = 5  # three are the middle and the ends of every direction: no net
RADIUS, REFINEMENTS, FEW_REFINEMENTS = 2.2, 12, 5  # fewer where finer nets take long, of four heads or more
# Numbers of the table that compares points of a net: half a gigabyte.
LARGEST_TABLE = 2**26
# Examples by which points of the net are compared, others by which a set of them is chosen, and what it is chosen from:
# the best pairs, or where exchanges end that begin with random sets.
NET_EXAMPLES, CHOICE_EXAMPLES, CANDIDATES, EXCHANGES = 1000, 500, 12, 12
# Relative ridge of the least squares inside the net: points of it may coincide.
NET_RIDGE = 1e-9


@dataclass(frozen=True)
class Hull:
    """The affine hull of the score matrices: a point and directions."""

    proxy: Floats  # (d, d): the point of least norm
    directions: Floats  # (m − 1, d, d), orthonormal

    @classmethod
    def through(cls, point: Floats, directions: Floats) -> Hull:  # (d, d), (m − 1, d, d)
        """The hull through a point: the part of it along the directions is taken off, which leaves the least norm."""
        flat = directions.reshape(len(directions), point.size)
        return cls(point - ((flat @ point.reshape(-1)) @ flat).reshape(point.shape), directions)

    @classmethod
    def of(cls, scores: Floats) -> Hull:  # (m, d, d)
        """The hull of given score matrices."""
        apart = (scores[1:] - scores[0]).reshape(len(scores) - 1, scores[0].size)
        directions = np.linalg.svd(apart, full_matrices=False)[2].reshape(-1, *scores[0].shape)
        return cls.through(scores[0], directions)

    def at(self, coefficients: Floats) -> Floats:  # (points, m − 1) -> (points, d, d)
        """Points of the hull."""
        return self.proxy + np.tensordot(coefficients, self.directions, axes=(1, 0))

    def coefficients(self, scores: Floats) -> Floats:  # (points, d, d) -> (points, m − 1)
        """Of the points of the hull that are nearest to score matrices."""
        flat = self.directions.reshape(len(self.directions), self.proxy.size)
        return np.asarray((scores - self.proxy).reshape(len(scores), -1) @ flat.T)


@dataclass(frozen=True)
class NetCost:
    """What a net of points over a hull costs: known before it is made."""

    axis: int  # points along each direction
    points: int
    sets: int  # of points, if all are compared
    numbers: int  # of the table of inner products

    @classmethod
    def of(cls, heads: int, width: int) -> NetCost:
        """The finest net that is affordable; UsageError where none is."""
        free = heads - 1
        if free == 0:
            return cls(1, 1, 1, width**2)
        for axis in range(MOST_POINTS.get(free, 7), LEAST_POINTS - 1, -2):
            points = _points(axis, free)
            if (points * width) ** 2 <= LARGEST_TABLE:
                return cls(axis, points, comb(points, heads), (points * width) ** 2)
        points = _points(LEAST_POINTS, free)
        raise UsageError(
            f"a net over the {free} directions of {heads} heads is not affordable: {LEAST_POINTS} points along each "
            f"make {points:,}, and a table of {(points * width) ** 2:.2g} numbers; method='varpro' needs none"
        )

    def __str__(self) -> str:
        return f"a net of {self.points:,} points, of which {self.sets:.3g} sets could be made"


def net(
    source: Source,
    hull: Hull,
    heads: int,
    rng: np.random.Generator,
    near: Floats | None = None,  # (heads, d, d): where to look, if that is known
) -> tuple[Floats, dict[str, Any]]:
    """Phase 5: the points of the hull whose heads together explain the examples best.

    A net of points is laid over the hull; all pairs are compared, or heads are exchanged one by one for better points.
    Around the best set finer nets follow.
    """
    free = heads - 1
    if free == 0:
        return hull.proxy[None], {"points": 1}
    inputs, outputs = source.some(NET_EXAMPLES + CHOICE_EXAMPLES)
    cut = max(1, len(inputs) - min(CHOICE_EXAMPLES, len(inputs) // 3))
    problem, apart = LayerProblem(inputs[:cut], outputs[:cut]), LayerProblem(inputs[cut:], outputs[cut:])
    cost = NetCost.of(heads, source.width)
    radius = RADIUS * float(np.linalg.norm(hull.proxy)) * free**0.5
    found = None if near is None else hull.coefficients(near)
    width, tried = 2 * radius / (cost.axis - 1), 0
    if found is None:
        points = _ball(cost.axis, free) * radius
        table = _Table(problem, hull.at(points))
        if heads == 2:
            sets = np.array(list(combinations(range(len(points)), 2)))
            best = sets[np.argsort(table.errors(sets), kind="stable")[:CANDIDATES]]
        else:
            best = _exchange(table, heads, rng)
        found, tried = _choose(points[best], hull, problem, apart), len(points)
    finer_axis = 5 if (_points(5, free) * heads * source.width) ** 2 <= LARGEST_TABLE else 3
    for _ in range(REFINEMENTS if free < 3 else FEW_REFINEMENTS):
        around = _ball(finer_axis, free) * width
        near = np.concatenate([each + around for each in found])
        finer = _Table(problem, hull.at(near))
        start = np.array([head * len(around) + int(np.argmin(np.sum(around**2, axis=1))) for head in range(heads)])
        chosen = finer.improve(start)
        found, width, tried = near[chosen], width / 2, tried + len(near)
    return hull.at(found), {"points": tried, "sets": cost.sets, "radius": radius}


def _ball(points: int, free: int) -> Floats:  # (some, free)
    axis = np.linspace(-1.0, 1.0, points)
    grid = np.stack(np.meshgrid(*[axis] * free, indexing="ij"), axis=-1).reshape(-1, free)
    return np.asarray(grid[np.linalg.norm(grid, axis=1) <= 1.0 + 1e-9])


def _points(axis: int, free: int) -> int:
    """How many the ball has: whole numbers whose squares add up to no more than that of half an axis."""
    half = axis // 2
    squares = np.bincount(np.arange(-half, half + 1) ** 2).astype(object)  # how often each is met; counts grow large
    sums = np.ones(1, dtype=object)
    for _ in range(free):
        sums = np.convolve(sums, squares)[: half**2 + 1]
    return int(np.sum(sums))


class _Table:
    """Inner products of the mixed tokens of all points of a net, so that any set of them is judged by a small solve."""

    def __init__(self, problem: LayerProblem, scores: Floats) -> None:
        self.width = problem.width
        mixed = np.concatenate(
            [
                mixture(problem.inputs, problem.weights(scores[start : start + 32]))
                for start in range(0, len(scores), 32)
            ],
            axis=1,
        )
        self.products = (mixed.T @ mixed).reshape(len(scores), self.width, len(scores), self.width)
        self.right = (mixed.T @ problem.labels).reshape(len(scores), self.width, -1)
        self.energy = problem.energy

    def errors(self, sets: Floats) -> Floats:  # (sets, m) -> (sets,)
        """Residual sums of squares of sets of points."""
        found: list[Floats] = [self._errors(sets[start : start + 2000]) for start in range(0, len(sets), 2000)]
        return np.concatenate(found)

    def _errors(self, sets: Any) -> Floats:
        count, m = sets.shape
        blocks = self.products[sets[:, :, None], :, sets[:, None, :], :]  # (sets, m, m, d, d)
        matrix = blocks.transpose(0, 1, 3, 2, 4).reshape(count, m * self.width, m * self.width)
        right = self.right[sets].reshape(count, m * self.width, -1)
        ridge = NET_RIDGE * np.trace(matrix, axis1=1, axis2=2)[:, None, None] / matrix.shape[1]
        solution = np.linalg.solve(matrix + ridge * np.eye(matrix.shape[1]), right)
        return np.asarray(self.energy - np.sum(right * solution, axis=(1, 2)))

    def improve(self, chosen: Any) -> Any:  # (m,) -> (m,)
        """Exchange one point at a time for the best, until none is better."""
        chosen, best = np.array(chosen), float(self.errors(np.array(chosen)[None])[0])
        better = True
        while better:
            better = False
            for head in range(len(chosen)):
                sets = np.repeat(chosen[None], len(self.right), axis=0)
                sets[:, head] = np.arange(len(self.right))
                errors = self.errors(sets)
                found = int(np.argmin(errors))
                if errors[found] < best * (1 - 1e-9):
                    chosen, best, better = sets[found], float(errors[found]), True
        return chosen


def _exchange(table: _Table, heads: int, rng: np.random.Generator) -> Any:
    return np.array([table.improve(rng.choice(len(table.right), heads, replace=False)) for _ in range(EXCHANGES)])


def _choose(sets: Floats, hull: Hull, problem: LayerProblem, apart: LayerProblem) -> Floats:  # (sets, m, m − 1)
    """The coefficients of the set whose layer, fitted to some examples, explains others best."""
    errors = [relative_error(apart, problem.at(hull.at(each))) for each in sets]
    return np.asarray(sets[int(np.argmin(errors))])
