"""How coarse numbers are: digits and decimals that all of them can do with, and distance from any polynomial."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np

from keyhole.arrays import Floats, Integers

MANTISSA = 53  # binary digits of a float64
# A decimal is no longer told from the rounding of the dtype when its unit is fewer spacings of a number than this.
FEWEST_SPACINGS = 8.0
# Units of decimals are numbers themselves: there is none with more digits before or behind the point.
MOST_PLACES = int(np.log10(np.finfo(float).max))


def binary_digits(values: Floats) -> int:
    """The fewest significant binary digits that hold all values exactly."""
    mantissa, _ = np.frexp(values[values != 0])
    whole = np.abs(np.ldexp(mantissa, MANTISSA)).astype(np.int64)
    if not whole.size:
        return 0
    trailing = whole & -whole  # the lowest bit that is set
    return MANTISSA - int(np.min(np.log2(trailing)))


def decimals(values: Floats, spacing: float) -> int | None:
    """The fewest decimals (negative: zeros before the point) that all values can do with, within their `spacing`.

    None where every number of decimals that is coarser than the spacing loses something.
    """
    largest = float(np.max(np.abs(values), initial=0.0))
    if largest == 0.0:
        return None
    finest = int(np.floor(-np.log10(FEWEST_SPACINGS * spacing) - np.log10(largest)))  # the product may vanish
    fewest = -int(np.ceil(np.log10(largest)))
    for places in range(max(fewest, -MOST_PLACES), min(finest, MOST_PLACES) + 1):
        unit = 10.0 ** abs(places)  # a whole number, exact up to 10²²
        counts = values * unit if places >= 0 else values / unit
        if np.all(np.abs(counts - np.round(counts)) <= spacing * np.abs(counts)):
            return places
    return None


def bits_lost_to_decimals(values: Floats, places: int, spacing: float) -> float:
    """How many binary digits of all values together rounding to decimals explains away."""
    counts = np.maximum(np.abs(values) * 10.0**places, 1.0)
    return float(np.sum(-np.log2(spacing * counts)))


def bits_lost_to_digits(values: Floats, digits: int, spacing: float) -> float:
    """How many binary digits of all values together a shorter mantissa explains away; it makes no zeros."""
    return float(np.count_nonzero(values) * (1 - np.log2(spacing) - digits))


def distance_from_polynomials(points: Floats, values: Floats, degree: int) -> Floats:  # (n,), (n, m) -> (m,)
    """The discrete Chebyshev approximation: least largest error of a polynomial of this degree through each column.

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
def _references(count: int, size: int) -> Integers:  # -> (references, size)
    return np.array(list(combinations(range(count), size)))
