"""Pure tests that tell families of boxes apart."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats, Integers


def affine_misfit(points: Floats, answers: Floats, at_zero: Floats) -> Floats:  # (n,), (n, outputs) -> (n,)
    """How far answers are from a line through `at_zero`, whose slope is taken at the last point."""
    slope = (answers[-1] - at_zero) / points[-1]
    return np.asarray(np.linalg.norm(answers - at_zero - points[:, None] * slope, axis=1))


def rank_above(matrix: Floats, error: float) -> tuple[int, float]:
    """Singular values that errors of this size in every entry do not make, and the gap behind the last of them."""
    values = np.linalg.svd(matrix, compute_uv=False)
    bar = error * sum(matrix.shape) ** 0.5
    rank = int(np.sum(values > bar))
    below = max(float(values[rank]) if rank < values.size else 0.0, bar)
    return rank, float(values[rank - 1] / below) if rank else 0.0


def odds_rank(copies: Integers, added: Floats, error: float) -> int:
    """How many heads explain what m copies of a token add, Σ_h A_h·m/(m + e_h): the degree of a rational function.

    The Loewner matrix of a rational function has its degree as rank; here of the function of 1/m, whose value at
    infinitely many copies is unknown. 0 where the copies say nothing.
    """
    x = 1.0 / copies
    if copies.size < 4:  # too few for a Loewner matrix: 1/added is affine in 1/m behind one head
        if np.any(np.abs(added) <= error) or abs(added[-1] - added[0]) <= error:
            return 0  # flat or saturated: nothing is said
        inverse, bar = 1.0 / added, error / added**2
        left = (inverse[1] - inverse[0]) / (x[1] - x[0]) - (inverse[2] - inverse[1]) / (x[2] - x[1])
        bars = (bar[1] + bar[0]) / abs(x[1] - x[0]) + (bar[2] + bar[1]) / abs(x[2] - x[1])
        return 1 if abs(left) <= bars else 2
    one, two = slice(0, None, 2), slice(1, None, 2)
    steps = x[one][:, None] - x[two][None, :]
    loewner = (added[one][:, None] - added[two][None, :]) / steps
    return rank_above(loewner, float(2 * error / np.min(np.abs(steps))))[0]
