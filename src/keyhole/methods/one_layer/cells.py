"""Linear cells of a net: which to ask for, how far one may go from a point inside, and what answers there amount to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from keyhole.arrays import ArrayTable, Booleans, Floats, Integers, floats
from keyhole.families.relu_net import ReluNet
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.numerics.orthogonal import random_orthogonal
from keyhole.numerics.svd import pseudo_inverse, svd
from keyhole.queries import Measurements, Plan, Signature, Term, TokenRows
from keyhole.recovery import Outcome

# Smooth activations are straight, to the last digit, from this argument on.
SMOOTH_BEND = 45.0
# Points lie at least this many times as far out as the typical kink.
NEAREST = 2.0**-1
TINY = float(np.finfo(np.float64).tiny)
# Within a norm, random points are no longer than this part of it, and steps take half of what is left beside any.
INSIDE = 0.75
# A cell that is left, or saturated, is asked again with steps so many times as short.
SHRINK = 1 / 8
# What is left of a block of rows, relative to the largest of all, once others explain it.
EXPLAINED = 1e-9
# Each step of refinement gains as many digits as the inverse has.
REFINEMENTS = 2
# Singular values below so many times the errors of their matrix cannot be told from zero.
SURE = 4.0

Measured = TypeVar("Measured", bound=ArrayTable)


@dataclass(frozen=True)
class PlainNet:
    """A net in plain arrays; outputs are always a matrix."""

    inner: Floats  # (k, width)
    bias: Floats  # (k,)
    outer: Floats  # (outputs, k)
    skip: Floats | None  # (outputs, width)
    bend: float  # its neurons are straight from this argument on
    typical: float  # norm of tokens at which they bend

    @classmethod
    def of(cls, net: ReluNet, typical: float) -> PlainNet:
        """A net in plain arrays that bends at tokens of this norm; of radii, only the arrays mean anything."""
        inner, skip = floats(net.weights_in), None if net.skip is None else np.atleast_2d(floats(net.skip))
        bend = 0.0 if net.activation == "relu" else SMOOTH_BEND
        norms = np.linalg.norm(inner, axis=1)
        if bend and norms.size:
            typical = max(typical, bend * norms.size * net.width**0.5 / float(np.median(norms)))
        return cls(inner, floats(net.bias_in), np.atleast_2d(floats(net.weights_out)), skip, bend, typical)

    @property
    def norms(self) -> Floats:  # (k,)
        """How steep neurons are."""
        norms: Floats = np.linalg.norm(self.inner, axis=1)
        return norms

    def gradients(self, active: Floats) -> Floats:  # (n, k) -> (n, outputs, width)
        """Slopes in linear cells."""
        slopes: Floats = (active[:, None, :] * self.outer[None, :, :]) @ self.inner
        return slopes if self.skip is None else slopes + self.skip


@dataclass(frozen=True)
class LinearCells(ArrayTable):
    """Points in linear cells of a net."""

    points: Floats  # (n, width)
    active: Floats  # (n, k) of 0 and 1
    room: Floats  # (n, k) how far the argument of each neuron may move
    width: Floats  # (n,) how far a point may move if neurons see as much of attention as of everything

    @classmethod
    def around(cls, net: PlainNet, points: Floats, most: float | Floats) -> LinearCells:
        """The cells of points; of points in none the width is not positive."""
        argument = points @ net.inner.T + net.bias
        room = np.abs(argument) - net.bend
        distance = room / np.where(net.norms > 0, net.norms, TINY)
        return cls(
            points, np.where(argument > 0, 1.0, 0.0), room, np.minimum(np.min(distance, axis=1, initial=np.inf), most)
        )


def random_cells(net: PlainNet, rng: np.random.Generator, count: int, farthest: float, limit: float) -> LinearCells:
    """Cells to choose from, up to `farthest` times as far out as the typical kink, and some on both sides of each.

    Nothing in them is as far out as `limit`.
    """
    width = net.inner.shape[1]
    points = rng.standard_normal((count, width)) / width**0.5
    points *= net.typical * np.exp(rng.uniform(np.log(NEAREST), np.log(farthest), (count, 1)))
    points *= np.minimum(1.0, INSIDE * limit / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), TINY))
    if net.norms.size:
        # A kink near the limit has only what lies beside it.
        times = width + 2 if np.isfinite(limit) else 1
        points = np.concatenate([points, *(side for _ in range(times) for side in _across(net, rng, limit))])
    left = (limit - np.linalg.norm(points, axis=1)) / 2
    cells = LinearCells.around(net, points, np.minimum(net.typical * farthest, left))
    return cells.take(cells.width > 0)


def _across(net: PlainNet, rng: np.random.Generator, limit: float) -> list[Floats]:
    """Points on both sides of every kink within the limit, half-way to the next: cells that differ by one neuron."""
    steep = net.norms[:, None]
    normal = net.inner / np.where(steep > 0, steep, 1.0)
    foot = -net.bias[:, None] / np.where(steep > 0, steep, np.inf)
    size = np.maximum(np.abs(foot), net.typical)
    points = rng.standard_normal(net.inner.shape) / net.inner.shape[1] ** 0.5 * size
    points -= normal * np.sum(points * normal, axis=1, keepdims=True)
    inside = np.abs(foot) < limit
    normal, foot, size, points = (each[inside[:, 0]] for each in (normal, foot, size, points))
    most = np.sqrt(limit - np.abs(foot)) * np.sqrt(limit + 3 * np.abs(foot)) / 2  # to half-way between foot and limit
    points *= np.minimum(1.0, most / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), TINY))
    points += normal * foot
    size = np.minimum(size, (limit - np.linalg.norm(points, axis=1, keepdims=True)) / 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        away = -(points @ net.inner.T + net.bias) / (normal @ net.inner.T)  # (n, k) to all kinks, along the normal
    away[np.arange(len(away)), np.flatnonzero(inside)] = np.nan
    sides = []
    for side in (1.0, -1.0):
        ahead = np.where(side * away > 0, side * away, np.inf)
        sides.append(points + 0.5 * side * np.minimum(np.min(ahead, axis=1, keepdims=True), size) * normal)
    return sides


def directions_and_check(signature: Signature, rng: np.random.Generator) -> Floats:  # (width + 1, width)
    """Orthonormal directions in which cells are left, and one more to check that they are not left."""
    directions = floats(random_orthogonal(signature.space, rng, signature.width))
    check = directions.T @ rng.choice([-1.0, 1.0], signature.width) / signature.width**0.5
    return np.vstack([directions, check])


def ask_points(stage: str, signature: Signature, cells: LinearCells) -> Steps[Floats]:  # (n, outputs)
    """The answers to the points of cells."""
    count = len(cells.points)
    answers: Measurements = yield Plan(stage, count, [[Term(TokenRows(signature.space.asarray(cells.points)))]])
    return floats(answers.values).reshape(count, -1)


def ask_within_cells(
    cells: LinearCells,
    answers: Floats,  # (n, outputs) to the points
    ask: Callable[[LinearCells, Floats], Steps[tuple[Measured, Booleans]]],
    most: int,
    failure: str,
) -> Steps[tuple[LinearCells, Measured]]:
    """What is asked around the points of all cells, with ever shorter steps, `most` times, where a cell was left.

    `ask` returns what it measured, and where a check agrees with it.
    """
    done: list[tuple[LinearCells, Measured]] = []
    for _ in range(most):
        measured, good = yield from ask(cells, answers)
        done.append((cells.take(good), measured.take(good)))
        cells, answers = cells.take(~good), answers[~good]
        if not len(cells.points):
            return LinearCells.concat(*(each for each, _ in done)), type(measured).concat(*(each for _, each in done))
        cells = replace(cells, width=cells.width * SHRINK)
    raise Unrecoverable(Outcome.WRONG_FAMILY, failure)


def choose_blocks(blocks: Floats, count: int) -> Integers:  # (n, rows, unknowns) -> (≥ count,) places
    """Blocks of rows that determine all unknowns, greedily: each time the block with most that is new.

    For blocks of one row this is elimination with pivoting. Once nothing is new, the others count anew, until there are
    `count` of them and all unknowns are determined as far as any choice could.
    """
    chosen: list[int] = []
    left, free, all_told = blocks.copy(), np.ones(len(blocks), dtype=bool), False
    largest = float(np.max(np.sum(blocks**2, axis=(1, 2)), initial=0.0)) ** 0.5
    begun = 0  # how many were chosen when all counted anew
    while free.any() and not (all_told and len(chosen) >= count):
        news = np.where(free, np.sum(left**2, axis=(1, 2)), -1.0)
        best = int(np.argmax(news))
        if news[best] <= (EXPLAINED * largest) ** 2:
            if begun == len(chosen):
                break  # the others tell nothing, even by themselves
            left, all_told, begun = blocks.copy(), True, len(chosen)
            continue
        chosen.append(best)
        free[best] = False
        _, sizes, basis = svd(left[best])
        basis = basis[sizes > EXPLAINED * largest]
        left = left - (left @ basis.T) @ basis
    return np.asarray(chosen, dtype=np.int64)


@dataclass(frozen=True)
class WeightedSolution:
    """The least-squares solution of a linear system and what its errors amount to."""

    values: Floats  # (unknowns, n)
    inverse: Floats  # (unknowns, equations)
    residual: Floats  # (equations, n)


def solve_weighted(system: Floats, right: Floats, radii: Floats) -> WeightedSolution:  # (m, unknowns), (m, n), (m, n)
    """Least squares, equations weighed by the inverse of their radii."""
    weight = 1 / np.maximum(np.max(radii, axis=1), np.finfo(np.float64).tiny)
    weighed = system * weight[:, None]
    inverse = pseudo_inverse(weighed) * weight
    values = inverse @ right
    for _ in range(REFINEMENTS):  # weights of many sizes cost the inverse digits, which the residual gives back
        values = values + inverse @ (right - system @ values)
    return WeightedSolution(values, inverse, np.abs(system @ values - right))


def solve_value(
    inner: Floats, inner_radius: Floats, product: Floats, product_radius: Floats
) -> tuple[Floats, Floats, Floats, Floats, bool]:
    """V of least norm from A and A·Vᵀ (n, width), its radius, |A·Vᵀ − product|, how far errors go, if V is unique."""
    both = np.linalg.norm(np.hstack([inner, product]), axis=1)
    errors = np.linalg.norm(np.hstack([inner_radius, product_radius]), axis=1)
    errors = np.maximum(errors, np.finfo(np.float64).eps * both)
    # Equations weigh by the inverse of their errors: one that is nothing but error must not count.
    scale = 1 / np.where(errors > 0, errors, 1.0)[:, None]
    left, values, right = svd(inner * scale)
    shown = np.linalg.norm(left.T @ (product * scale), axis=1)
    cut = SURE * float(inner.size) ** 0.5 / inner.shape[1] ** 0.5
    # A direction that the net cannot tell from nothing is left out, unless the product shows something there.
    known = (values > cut) | ((shown > cut) & (values > 0))
    inverse = (right[known].T / values[known]) @ left[:, known].T * scale.T  # (width, n)
    turned = inverse @ product  # Vᵀ
    spread = np.sqrt(inverse**2 @ (product_radius**2 + inner_radius**2 @ turned**2))
    explained = np.sqrt(product_radius**2 + inner_radius**2 @ turned**2) + np.abs(inner) @ spread + errors[:, None]
    missed = np.abs(inner @ turned - product)
    return turned.T, spread.T, missed, explained, int(np.sum(known)) == inner.shape[1]
