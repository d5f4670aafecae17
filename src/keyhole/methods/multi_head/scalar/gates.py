"""Where to ask so that all heads but one are saturated: points on one hyperplane, far from all others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import qr

from keyhole.arrays import Booleans, Floats, Integers
from keyhole.numerics.svd import singular_values

# Random points to choose from, and how many of the best for each one that is taken.
CANDIDATES = 4096
CHOICE = 6
# Points tried between two neighbouring hyperplanes.
NEIGHBOURS = 64
# Patterns of heads are independent if their smallest singular value is above this; their entries are of order one.
DEPENDENT = 1e-3
# The logit that the last of the points, which is off the hyperplane, gives the head it belongs to.
OFF_LOGIT = 2.0


@dataclass(frozen=True)
class HeadGate:
    """Points at which the logit of one head is small and every other head is saturated."""

    points: Floats  # (size, size) homogeneous where heads have score biases
    scales: Floats  # (size,) scales of the common row that saturate the other heads there
    first: Booleans  # (size, heads) which heads then attend to the first token


def homogeneous(points: Floats, size: int) -> Floats:  # (n, width) -> (n, size)
    """Points with a coordinate one at the end where `size` has room for it."""
    return points if points.shape[1] == size else np.column_stack([points, np.ones(points.shape[0])])


def spread_points(
    rng: np.random.Generator, normals: Floats, width: int, radius: float, onto: int | None = None
) -> Floats:  # (heads, size) -> (n, size)
    """Random points of norm about `radius`; those on the hyperplane of head `onto` where it is given."""
    points = rng.standard_normal((CANDIDATES, width))
    points *= radius / np.linalg.norm(points, axis=1, keepdims=True)
    if onto is not None:
        normal = normals[onto, :width]
        offset = homogeneous(points, normals.shape[1]) @ normals[onto]
        points -= (offset / (normal @ normal))[:, None] * normal
    return homogeneous(points, normals.shape[1])


def choose_gate(
    rng: np.random.Generator,
    normals: Floats,  # (heads, size) of the hyperplanes on which the logit of each head is zero
    head: int,
    saturating: Floats,  # (heads,) the logit from which on each head counts as saturated
    width: int,
    radius: float,
) -> HeadGate:
    """As many points as a matrix has columns, independent, all but the last on the hyperplane of `head`."""
    size = normals.shape[1]
    points = spread_points(rng, normals, width, radius, head)
    others = np.delete(np.arange(normals.shape[0]), head)
    margins = np.min(np.abs(points @ normals[others].T) / saturating[others], axis=1, initial=np.inf)
    best = np.argsort(-margins)[: max(CHOICE * size, CANDIDATES // 16)]
    weights = np.append(np.ones(width), np.full(size - width, radius))
    chosen = best[choose_independent(points[best] * weights, size - 1)]
    chosen = chosen[np.argsort(-margins[chosen])]
    scales = 1 / margins[chosen]
    slope = float(np.linalg.norm(normals[head, :width]))
    scales = np.where(np.isfinite(scales) & (scales > 0), scales, 1 / (slope * radius))
    step = np.zeros(size)
    step[:width] = normals[head, :width] * (OFF_LOGIT / (scales[0] * slope**2))
    points = np.vstack([points[chosen], points[chosen[:1]] + step])
    return HeadGate(points, np.append(scales, scales[0]), points @ normals.T > 0)


def solve_crossing(
    rng: np.random.Generator,
    normals: Floats,  # (2, heads, size) of the hyperplanes of two orthonormal rows
    head: int,
    saturating: Floats,  # (heads,)
    shares: Floats,  # (2, outputs) u·v of the head for each row, over the norm of all values
    width: int,
    radius: float,
) -> tuple[HeadGate, Floats]:
    """One point along the first normal of `head`, and the combination (2,) of the rows whose logit is zero there.

    Of all such points the one where that combination saturates all other heads best.
    """
    size = normals.shape[2]
    away = normals[0, head, :width] / np.linalg.norm(normals[0, head, :width])
    points = rng.standard_normal((CANDIDATES, width))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    points += np.where(points @ away > 0, 1.0, -1.0)[:, None] * away
    points *= radius / np.linalg.norm(points, axis=1, keepdims=True)
    points = homogeneous(points, size)
    first, second = points @ normals[0].T, points @ normals[1].T  # (n, heads)
    mixes = np.stack([second[:, head], -first[:, head]], axis=1)
    mixes /= np.linalg.norm(mixes, axis=1, keepdims=True)
    logits = mixes[:, :1] * first + mixes[:, 1:] * second  # (n, heads)
    logits[:, head] = np.inf
    typical = radius * float(np.linalg.norm(normals[0, head, :width]))
    margins = np.minimum(np.min(np.abs(logits) / saturating, axis=1), typical)
    # Errors are those of a large scale and of a small share; the first row's part tells the form along the normal.
    with np.errstate(divide="ignore"):
        costs = (typical / margins + 1 / np.linalg.norm(mixes @ shares, axis=1)) / np.abs(mixes[:, 0])
    best = int(np.argmin(costs))
    logits[:, head] = 0.0
    return HeadGate(points[[best]], 1 / margins[[best]], logits[[best]] > 0), mixes[best]


def choose_independent(vectors: Floats, count: int) -> Integers:  # (n, size) -> (count,)
    """Which vectors span the most, taken one after the other."""
    _, _, order = qr(vectors.T, mode="economic", pivoting=True)
    return np.asarray(order[:count], dtype=np.int64)


def choose_points(
    rng: np.random.Generator, normals: Floats, width: int, radius: float, count: int, uniform: int
) -> tuple[Floats, Floats]:
    """Points far from all hyperplanes, (count, size), and the margin of the worst head there over what is typical.

    Which heads attend to the first token there, with the `uniform` heads that give it half of their weight, and the sum
    of all together determine the answer of each head.
    """
    points = np.vstack([spread_points(rng, normals, width, radius), _points_between(rng, normals, width, radius)])
    sizes = np.linalg.norm(normals[:, :width], axis=1) * radius / width**0.5
    margins = np.min(np.abs(points @ normals.T) / sizes, axis=1, initial=np.inf)
    order = np.argsort(-margins)
    weights = weights_of(points[order], normals, uniform)
    centred = weights - np.mean(weights, axis=1, keepdims=True)  # across the sum of all
    _, first = np.unique(weights[:, : normals.shape[0]], axis=0, return_index=True)
    first = np.sort(first)  # the best of each kind, the best kinds first
    for some in (first[: CHOICE * count], first):
        chosen = some[choose_independent(centred[some], count)]
        sizes = singular_values(centred[chosen])
        if chosen.size == count and np.min(sizes, initial=1.0) > DEPENDENT:
            break
    return points[order[chosen]], margins[order[chosen]]


def _points_between(rng: np.random.Generator, normals: Floats, width: int, radius: float) -> Floats:  # -> (n, size)
    """Points between the hyperplane of each head and the one nearest to it, where random points are rare."""
    if normals.shape[0] < 2:
        return np.zeros((0, normals.shape[1]))
    units = normals / np.linalg.norm(normals[:, :width], axis=1, keepdims=True)
    cosines = units[:, :width] @ units[:, :width].T
    np.fill_diagonal(cosines, 0.0)
    nearest = np.argmax(np.abs(cosines), axis=1)
    middle = units + np.sign(cosines[np.arange(nearest.size), nearest])[:, None] * units[nearest]
    return np.vstack([spread_points(rng, middle, width, radius, head)[:NEIGHBOURS] for head in range(nearest.size)])


def weights_of(points: Floats, normals: Floats, uniform: int) -> Floats:  # -> (n, heads + uniform)
    """The weight that each head gives the first token at points far from all hyperplanes."""
    weights = np.asarray(points @ normals.T > 0, dtype=np.float64)
    return np.column_stack([weights, np.full((points.shape[0], uniform), 0.5)])
