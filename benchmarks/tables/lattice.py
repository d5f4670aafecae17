"""Subset sums by lattice reduction: Keyhole's own LLL beside that of FLINT, `pip install python-flint`.

Both solve the same sums: which of k random vectors of d numbers, known to so many digits, add up to a given total. What
is measured is processor time; FLINT is used in the same place, once for each few bits that are added.
"""

from __future__ import annotations

import time
from unittest import mock

import numpy as np

from benchmarks.support.rows import Kept, Row, markdown
from keyhole.methods.relu_net.exact import lattice

CASES = ((16, 1), (32, 1), (32, 8), (64, 4), (64, 16), (128, 16))  # k, d
SUMS = 3
TOLERANCE = 1e-11


def table(kept: Kept) -> str:
    rows = kept.rows_of("", {f"{count} of {width}": lambda c=count, w=width: row(c, w) for count, width in CASES})
    columns = ["vectors", "numbers each", "own: solved", "own: s", "FLINT: solved", "FLINT: s", "own / FLINT"]
    return markdown(columns, rows)


def row(count: int, width: int) -> Row:
    own = solve(count, width)
    with mock.patch.object(lattice, "reduce_lattice", by_flint):
        other = solve(count, width)
    figures = [f"{found} of {SUMS}, {seconds:.3f}".split(", ") for found, seconds in (own, other)]
    return [count, width, *figures[0], *figures[1], f"{own[1] / other[1]:.2f}"]


def solve(count: int, width: int) -> tuple[int, float]:
    """How many sums were solved, and processor seconds for one."""
    solved, began = 0, time.process_time()
    for seed in range(SUMS):
        rng = np.random.default_rng([seed, count, width])
        vectors, taken = rng.standard_normal((count, width)), rng.random(count) < 0.5
        noise = TOLERANCE / 4 * rng.standard_normal(width)
        found = lattice.subset_with_sum(vectors, vectors[taken].sum(axis=0) + noise, TOLERANCE)
        solved += found is not None and bool(np.array_equal(found, taken))
    return solved, (time.process_time() - began) / SUMS


def by_flint(basis: np.ndarray, stop: object = None) -> np.ndarray:  # noqa: ARG001 - it cannot be ended early
    from flint import fmpz_mat

    whole = fmpz_mat([[int(number) for number in each] for each in basis]).lll()
    return np.array([[float(int(whole[i, j])) for j in range(whole.ncols())] for i in range(whole.nrows())])
