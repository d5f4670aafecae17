"""Normed keys and queries from logits of tokens and last tokens, up to what these show. No queries."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats, Integers
from keyhole.families.forms import QKNorm, QKNormRotary
from keyhole.methods.base import Unrecoverable
from keyhole.methods.multi_head.vector.parts.rotary import match_turns
from keyhole.numerics.svd import least_squares, pseudo_inverse, svd
from keyhole.recovery import Outcome

NO_LENGTHS = "keys or queries of no length explain the logits: they are not normed"


@dataclass(frozen=True)
class NormedLogits:
    """Logits of one head, left·right, between tokens and last tokens; the first of each are an orthonormal basis."""

    tokens: Floats  # (n, width)
    last: Floats  # (m, width)
    left: Floats  # (n, rank)
    right: Floats  # (rank, m)
    turn: Floats | None = None  # (rank, rank): left·turn·right are those with further tokens between
    distances: Floats | None = None  # (n,) from each token to the last one


def solve_normed(logits: NormedLogits) -> QKNorm:
    """Keys and queries that are normed, without positions."""
    keys, key_shape = _on_sphere(logits.left, _full(logits.left.shape[1]))
    queries, query_shape = _on_sphere(logits.right.T, _full(logits.right.shape[0]))
    core = np.linalg.solve(key_shape.T, np.linalg.inv(query_shape))  # left·right = keys·core·queries
    turn, gains, back = svd(core)
    key, query = _through(keys, logits.tokens), _through(queries, logits.last)
    return QKNorm(back @ query, turn.T @ key, gains).canonical()


def solve_normed_turns(logits: NormedLogits, angles: Floats, between: int) -> QKNormRotary:
    """Keys and queries that are normed and turned by their positions."""
    assert logits.turn is not None
    assert logits.distances is not None
    sizes, vectors = np.linalg.eig(logits.turn.T)
    rows = vectors[:, match_turns(sizes, angles, between)].T  # (pairs, rank)
    pairs = np.concatenate([rows.real, rows.imag])
    keys, queries = logits.left @ np.linalg.inv(pairs), (pairs @ logits.right).T
    half = angles.size
    whole = (keys[:, :half] + 1j * keys[:, half:]) * np.exp(1j * logits.distances[:, None] * angles)
    keys = np.concatenate([whole.real, whole.imag], axis=1)
    shapes = [_shape(each, _pairwise(half)) for each in (keys, queries)]
    # The axes of both gains are the same: by the sum of what neither sign nor a quarter turn changes.
    bends = [
        (np.diagonal(s[:half, :half]) - np.diagonal(s[half:, half:])) / 2 + 1j * np.diagonal(s[:half, half:])
        for s in shapes
    ]
    means = [(np.diagonal(s[:half, :half]) + np.diagonal(s[half:, half:])) / 2 for s in shapes]
    phases = np.exp(1j * np.angle(sum((bend / mean) ** 2 for bend, mean in zip(bends, means, strict=True))) / 4)
    gains, upright = [], []
    for each, bend, mean in zip((keys, queries), bends, means, strict=True):
        pair = (each[:, :half] + 1j * each[:, half:]) * np.conj(phases)
        across = np.real(bend * np.conj(phases**2))
        squares = np.concatenate([mean + across, mean - across])
        if not np.all(squares > 0):
            raise Unrecoverable(Outcome.WRONG_FAMILY, NO_LENGTHS)
        gains.append(1 / np.sqrt(squares))
        upright.append(np.concatenate([pair.real, pair.imag], axis=1) / gains[-1])
    key, query = _through(upright[0], logits.tokens), _through(upright[1], logits.last)
    return QKNormRotary(query, key, gains[1], gains[0], np.array(angles)).canonical()


def _full(rank: int) -> tuple[Integers, Integers]:
    """Places of all entries of a symmetric matrix."""
    every = np.arange(rank, dtype=np.int64)
    i, j = np.meshgrid(every, every, indexing="ij")
    return i[i <= j], j[i <= j]


def _pairwise(half: int) -> tuple[Integers, Integers]:
    """Places of those entries that couple the two of a pair."""
    every = np.arange(half, dtype=np.int64)
    return np.concatenate([every, every + half, every]), np.concatenate([every, every + half, every + half])


def _shape(points: Floats, places: tuple[Integers, Integers]) -> Floats:
    """The symmetric matrix C with xᵀ·C·x = 1 for all points, and entries in these places only."""
    i, j = places
    design = points[:, i] * points[:, j] * np.where(i == j, 1.0, 2.0)
    entries = least_squares(design, np.ones(len(points)))
    shape = np.zeros((points.shape[1], points.shape[1]))
    shape[i, j] = shape[j, i] = entries
    return shape


def _on_sphere(points: Floats, places: tuple[Integers, Integers]) -> tuple[Floats, Floats]:
    """The points brought to unit length by a matrix, and that matrix: points·matrixᵀ are on the sphere."""
    try:
        root = np.linalg.cholesky(_shape(points, places)).T
    except np.linalg.LinAlgError as error:
        raise Unrecoverable(Outcome.WRONG_FAMILY, NO_LENGTHS) from error
    return points @ root.T, np.asarray(root, dtype=np.float64)


def _through(directions: Floats, tokens: Floats) -> Floats:  # (n, rank), (n, width) -> (rank, width)
    """The matrix, up to a factor, that takes every token along its direction; the first tokens are a basis."""
    width = tokens.shape[1]
    ways = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    basis, own = ways[:width], tokens[:width]
    shares = np.linalg.solve(own.T, tokens[width:].T).T  # further tokens as sums of the basis
    rows = []
    for share, way in zip(shares, ways[width:], strict=True):
        made = (share[:, None] * basis).T  # (rank, width): times lengths it lies along the way
        rows.append(made - np.outer(way, way @ made))
    lengths = svd(np.concatenate(rows), full_matrices=True)[2][-1]
    lengths = lengths * np.sign(np.sum(lengths))
    if not np.all(lengths > 0):
        raise Unrecoverable(Outcome.WRONG_FAMILY, NO_LENGTHS)
    return np.asarray((pseudo_inverse(own) @ (lengths[:, None] * basis)).T)
