"""Norms of vectors of which directions are seen, from what they have in common: they span few dimensions."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats
from keyhole.numerics.svd import least_squares, svd

# A step changes no norm by more than this part of it; so many steps at most, the last of which changes hardly anything.
MOST_CHANGE, MOST_STEPS, SETTLED = 0.5, 60, 2.0**-50


def norms_outside(directions: Floats, known: Floats, span: Floats) -> Floats:  # (n, m), (n, m), (r, m) -> (n,)
    """The s for which s·direction − known lies in an orthonormal span: what lies outside of it agrees."""
    outside, other = (each - (each @ span.T) @ span for each in (directions, known))
    return np.asarray(np.sum(outside * other, axis=1) / np.maximum(np.sum(outside**2, axis=1), 1e-300))


def norms_of_reflections(
    one: Floats, two: Floats, apart: Floats
) -> tuple[Floats, Floats]:  # (n, m), (n, m), (n, m) -> (n,), (n,)
    """The s and t for which s·one − t·two = apart."""
    apart_by = one - two
    little = np.sum(apart_by**2, axis=1) / 2  # 1 − cosine, to all its digits
    squared = np.maximum(little * (2 - little), 1e-300)
    first = np.sum((apart_by + little[:, None] * two) * apart, axis=1) / squared
    return first, np.sum((apart_by - little[:, None] * one) * apart, axis=1) / squared


def fit_norms(
    directions: Floats,  # (n, m)
    known: Floats,  # (n, m)
    rank: int,
    guess: Floats,  # (n,)
    span: Floats | None = None,  # (k, m) orthonormal: a part of what the rest lies in, beyond the rank
) -> tuple[Floats, Floats, float]:
    """The s for which the rows s·direction − known have this rank: (s, orthonormal span, root mean square misfit).

    Gauss-Newton on what lies outside of the leading singular vectors, on both sides.
    """
    if span is not None:
        directions, known = (each - (each @ span.T) @ span for each in (directions, known))
    norms = guess.copy()
    best, best_misfit = norms, np.inf
    for _ in range(MOST_STEPS):
        rows = norms[:, None] * directions - known
        left, _, right = svd(rows)
        inner, outer = left[:, :rank], right[:rank]
        rest = rows - (rows @ outer.T) @ outer
        rest = rest - inner @ (inner.T @ rest)
        misfit = float(np.sqrt(np.sum(rest**2)))
        if not misfit < best_misfit:
            break
        best, best_misfit = norms, misfit
        beyond = directions - (directions @ outer.T) @ outer
        gram = (np.eye(len(rows)) - inner @ inner.T) * (beyond @ beyond.T)
        step = -least_squares(gram, np.sum(rest * beyond, axis=1))
        step *= min(1.0, MOST_CHANGE / max(float(np.max(np.abs(step / norms))), 1e-300))
        norms = norms + step
        if np.max(np.abs(step / norms)) < SETTLED:
            break
    rows = best[:, None] * directions - known
    _, _, right = svd(rows)
    free = max((len(rows) - rank) * (rows.shape[1] - rank) - len(rows), 1)
    return best, right[:rank], best_misfit / free**0.5
