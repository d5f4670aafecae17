"""Matrices of several heads, all of low rank, from the same few rows and columns of each."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats, Integers


def ranks_of(matrices: Floats, floors: Floats) -> Integers:  # (heads, m, n), (heads,) -> (heads,)
    """Singular values above those that errors can make."""
    ranks: Integers = np.sum(np.linalg.svd(matrices, compute_uv=False) > floors[:, None], axis=1)
    return ranks


def choose_columns(rows: Floats, ranks: Integers, count: int) -> Integers:  # (heads, m, n) -> (count,)
    """Columns that span those of every head well: each time the one that adds most, as a product over heads."""
    _, _, right = np.linalg.svd(rows, full_matrices=False)
    spaces = [right[head, : max(int(rank), 1)].copy() for head, rank in enumerate(ranks)]
    chosen: list[int] = []
    for _ in range(count):
        logs = np.zeros(rows.shape[2])
        for space in spaces:
            left = np.sum(space**2, axis=0)
            if np.max(left) > 1e-6:  # else this head is spanned
                logs += np.log(np.maximum(left, 1e-300))
        logs[chosen] = -np.inf
        pick = int(np.argmax(logs))
        chosen.append(pick)
        for number, space in enumerate(spaces):
            column = space[:, pick]
            size = np.linalg.norm(column)
            if size > 1e-6:
                spaces[number] = space - np.outer(column, column @ space) / size**2
    return np.array(chosen, dtype=np.int64)


def outside(rows: Floats, more: Floats, ranks: Integers) -> Floats:  # (heads, m, c), (heads, k, c) -> (heads,)
    """How much of further rows lies outside the span of the first `rank` directions of the known, rms per entry."""
    _, _, right = np.linalg.svd(rows, full_matrices=False)
    found = []
    for head, rank in enumerate(ranks):
        span = right[head, :rank]
        rest = more[head] - (more[head] @ span.T) @ span
        found.append(float(np.sqrt(np.mean(rest**2))))
    return np.array(found)


def crossed(
    rows: Floats, chosen: Integers, columns: Floats, ranks: Integers
) -> tuple[Floats, Floats, Floats]:  # (heads, size, n), (heads,), (heads,)
    """Whole matrices from rows (heads, m, n) and columns (heads, size, chosen).

    And how much that enlarges errors of rows, and errors of columns.
    """
    whole, of_rows, of_columns = [], [], []
    for head, rank in enumerate(ranks):
        inverse = _inverse(rows[head][:, chosen], int(rank))
        whole.append(columns[head] @ inverse @ rows[head])
        of_rows.append(float(np.linalg.norm(columns[head] @ inverse, 2)))
        of_columns.append(float(np.linalg.norm(inverse @ rows[head], 2)))
    return np.stack(whole), np.array(of_rows), np.array(of_columns)


def steepness(rows: Floats, more: Floats, ranks: Integers) -> Floats:  # (heads, m, c), (heads, k, c) -> (heads,)
    """How much errors of rows are enlarged where further ones are told by them."""
    return np.array(
        [np.linalg.norm(more[head] @ _inverse(rows[head], int(rank)), 2) for head, rank in enumerate(ranks)]
    )


def _inverse(matrix: Floats, rank: int) -> Floats:  # (m, n) -> (n, m)
    left, sizes, right = np.linalg.svd(matrix, full_matrices=False)
    kept = max(rank, 1)
    inverse: Floats = (right[:kept].T / np.maximum(sizes[:kept], 1e-300)) @ left[:, :kept].T
    return inverse
