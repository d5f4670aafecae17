"""Short vectors of integer lattices: LLL with whole sweeps of swaps at once, and subset sums by it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from keyhole.arrays import Booleans, Floats

# Two neighbours are swapped when that shortens the first by more than this (squared lengths).
LOVASZ = 0.99
# Full reductions cost as much as this many sweeps of swaps, which only keep neighbours reduced.
SWEEPS = 4
# Bits are added to the equations little by little, so that all numbers stay exact in floating point.
BITS_AT_ONCE = 4
MOST_SWEEPS = 200_000
# Sums of so many bits and of some hundred terms are exact in 64.
MOST_BITS = 48.0


def reduce_lattice(
    basis: Floats, stop: Callable[[Floats], bool] | None = None
) -> Floats:  # (n, m) rows of whole numbers
    """An LLL-reduced basis of the same lattice; `stop` looks at it now and then and may end the reduction.

    All pairs of neighbours at even places are swapped where that helps, then all at odd ones: the array operations of
    one sweep take the time of a single swap.
    """
    basis = basis.copy()
    count = basis.shape[0]
    for sweep in range(MOST_SWEEPS):
        if sweep % SWEEPS == 0:
            triangle = _triangle(basis)
            _size_reduce(basis, triangle, 0, count)
            triangle = _triangle(basis)
            if count < 2 or (stop is not None and stop(basis)) or not np.any(_wrong(triangle)):
                break
        _shorten_by_neighbour(basis, triangle)
        swaps = np.flatnonzero(_wrong(triangle))
        _swap(basis, triangle, swaps[swaps % 2 == sweep % 2])
    return basis


def _triangle(basis: Floats) -> Floats:
    """R of the QR decomposition of the vectors as columns: column i is what vector i has along those before."""
    return np.asarray(np.linalg.qr(basis.T, mode="r"))


def _size_reduce(basis: Floats, triangle: Floats, low: int, high: int) -> None:
    """Subtract multiples of earlier vectors from later ones, halves at a time (Seysen): products of matrices only."""
    if high - low < 2:
        return
    middle = (low + high) // 2
    _size_reduce(basis, triangle, low, middle)
    _size_reduce(basis, triangle, middle, high)
    times = np.rint(np.linalg.solve(triangle[low:middle, low:middle], triangle[low:middle, middle:high]))
    if np.any(times):
        triangle[:middle, middle:high] -= triangle[:middle, low:middle] @ times
        basis[middle:high] -= times.T @ basis[low:middle]


def _shorten_by_neighbour(basis: Floats, triangle: Floats) -> None:
    times = np.rint(np.diagonal(triangle, 1) / np.diagonal(triangle)[:-1])
    used = np.flatnonzero(times)
    for parity in (0, 1):  # one after the other, so that no vector changes while another one is made of it
        now = used[used % 2 == parity]
        triangle[:, now + 1] -= triangle[:, now] * times[now]
        basis[now + 1] -= basis[now] * times[now, None]


def _wrong(triangle: Floats) -> Booleans:  # (n − 1,)
    """Neighbours in the wrong order."""
    diagonal, above = np.diagonal(triangle), np.diagonal(triangle, 1)
    return np.asarray(diagonal[1:] ** 2 + above**2 < LOVASZ * diagonal[:-1] ** 2)


def _swap(basis: Floats, triangle: Floats, first: npt.NDArray[np.intp]) -> None:
    """Swap neighbours, and turn the triangle back into one."""
    if first.size == 0:
        return
    second = first + 1
    basis[np.concatenate([first, second])] = basis[np.concatenate([second, first])]
    triangle[:, np.concatenate([first, second])] = triangle[:, np.concatenate([second, first])]
    top, bottom = triangle[first, first], triangle[second, first]
    length = np.hypot(top, bottom)
    cosine, sine = (top / length)[:, None], (bottom / length)[:, None]
    upper, lower = triangle[first], triangle[second]
    triangle[first] = cosine * upper + sine * lower
    triangle[second] = cosine * lower - sine * upper
    triangle[second, first] = 0.0


def subset_with_sum(vectors: Floats, total: Floats, tolerance: float) -> Booleans | None:  # (k, d), (d,) -> (k,)
    """Which of the vectors add up to the total within a tolerance; None where lattice reduction does not find out.

    With signs ±1 for taken and left out, the sum is twice the total less that of all vectors. Rows [e_i, N·vector_i]
    and [e, −N·that] make a lattice in which the signs are the coordinates of a vector much shorter than all others,
    if the vectors are known well enough. More bits make the gap wider and the reduction longer: they are added in turn.
    """
    count = vectors.shape[0]
    target = 2 * total - vectors.sum(axis=0)
    largest = float(np.max(np.abs(vectors)))
    rows, bits = np.vstack([vectors, -target]) / largest, min(float(np.log2(largest / tolerance)), MOST_BITS)
    coordinates = np.eye(count + 1, dtype=np.int64)

    def signs(basis: Floats) -> Floats | None:
        plain = np.all(np.abs(basis[:, : count + 1]) == 1, axis=1)
        solution = basis[plain, : count + 1]
        # Signs that fit as far as bits have been added need not fit the rest of them.
        right = np.all(np.abs(solution @ rows) <= 2 * tolerance / largest, axis=1)
        return solution[right][0] * solution[right][0, -1] if np.any(right) else None

    now = 0.0
    while now < bits:
        now = min(now + BITS_AT_ONCE, bits)
        # Products of large numbers wrap around, and back: the reduced sums are small.
        equations = coordinates @ np.rint(rows * 2.0**now).astype(np.int64)
        basis = reduce_lattice(np.hstack([coordinates, equations]).astype(float), lambda rows: signs(rows) is not None)
        solution = signs(basis)
        if solution is not None:
            return np.asarray(solution[:-1] > 0)
        coordinates = np.rint(basis[:, : count + 1]).astype(np.int64)
    return None
