"""How far samples of a function are from any polynomial: the discrete Chebyshev approximation."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np
import numpy.typing as npt

from keyhole.arrays import Floats


def distance_from_polynomials(points: Floats, values: Floats, degree: int) -> Floats:  # (n,), (n, m) -> (m,)
    """The least possible largest error of a polynomial of this degree through each column of values.

    De la Vallée Poussin: it is the largest levelled error over all references of degree + 2 points. If
    the values are a polynomial plus errors of at most τ, it is at most τ.
    """
    chosen = _references(len(points), degree + 2)
    nodes = points[chosen]  # (references, degree + 2)
    gaps = nodes[:, :, None] - nodes[:, None, :] + np.eye(degree + 2)
    weights = 1 / np.prod(gaps, axis=2)  # divided differences: they vanish on polynomials of the degree
    weights /= np.sum(np.abs(weights), axis=1, keepdims=True)
    centred = values - np.mean(values, axis=0)  # so that differences of nearly equal numbers lose no digits
    return np.asarray(np.max(np.abs(np.einsum("rk,rkm->rm", weights, centred[chosen])), axis=0))


@cache
def _references(count: int, size: int) -> npt.NDArray[np.int64]:  # -> (references, size)
    return np.array(list(combinations(range(count), size)))
