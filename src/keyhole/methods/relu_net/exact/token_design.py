"""Where to measure a piecewise linear function of roughly known kinks: wide cells that separate its neurons."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats, Integers

# Tokens are pushed away from their nearest kink this often, by steps that get smaller.
PUSHES = 12
PUSH = 0.3
# Tokens lie on shells of these radii, in units of the typical distance of a kink times √width.
NEAREST_SHELL, FARTHEST_SHELL = 0.5, 4.0
# Differences go this part of the way to the next kink.
PART_OF_CELL = 0.5


def wide_tokens(
    normal: Floats, offset: Floats, scale: float, limit: float, count: int, rng: np.random.Generator
) -> tuple[Floats, Floats]:  # (k, width), (k,) -> (count, width), (count,)
    """Random tokens, none longer than `limit`, that are far from all kinks, with their distances from the nearest one.

    `scale` is the typical distance of a kink from the origin.
    """
    width = normal.shape[1]
    shells = np.exp(rng.uniform(np.log(NEAREST_SHELL), np.log(FARTHEST_SHELL), (count, 1)))
    x = rng.standard_normal((count, width)) * np.minimum(scale * shells, 0.5 * limit / width**0.5)
    if offset.size == 0:
        return x, np.full(count, scale * width**0.5)
    # Half of them near a kink, on either side of it: kinks far out would otherwise be seen from one side only.
    some = np.arange(0, count, 2)
    kink, side = rng.integers(offset.size, size=some.size), rng.choice([-1.0, 1.0], some.size)
    x[some] = move_beside(x[some], normal[kink], offset[kink], scale * side, rng)
    best, margin = x.copy(), np.zeros(count)
    for push in range(PUSHES):
        x *= np.minimum(1.0, 0.9 * limit / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), np.finfo(float).tiny))
        heights = x @ normal.T + offset
        nearest = np.argmin(np.abs(heights), axis=1)
        height = heights[np.arange(count), nearest]
        better = np.abs(height) > margin
        best[better], margin[better] = x[better], np.abs(height[better])
        away = PUSH * min(scale, limit) / (1 + push) * np.where(height < 0, -1.0, 1.0)
        x = x + away[:, None] * normal[nearest]
    return best, margin


def move_beside(
    x: Floats, normal: Floats, offset: Floats, height: Floats, rng: np.random.Generator
) -> Floats:  # (n, width), (n, width), (n,), (n,) -> (n, width)
    """Tokens moved straight to either side of a kink each: about `height` from it, whose sign tells the side."""
    wanted = height * rng.uniform(0.3, 1.5, height.size)
    return np.asarray(x + (wanted - np.einsum("nd,nd->n", x, normal) - offset)[:, None] * normal)


def clear_steps(
    normal: Floats, heights: Floats, basis: Floats, longest: Floats
) -> Floats:  # (k, width), (m, k), (r, width), (m,) -> (m, r)
    """Steps along a basis, with signs, that stay well inside the cell of each token of these heights over kinks."""
    if heights.shape[1] == 0:
        return np.tile(longest[:, None], (1, basis.shape[0]))
    speed = basis @ normal.T  # (r, k)
    steps = np.empty((heights.shape[0], basis.shape[0]))
    with np.errstate(divide="ignore", invalid="ignore"):
        for number, height in enumerate(heights):  # one token at a time: (m, r, k) may be large
            time = -height / speed
            forward = np.min(np.where(time > 0, time, np.inf), axis=1)
            backward = np.min(np.where(time < 0, -time, np.inf), axis=1)
            far = np.minimum(PART_OF_CELL * np.maximum(forward, backward), longest[number])
            steps[number] = np.where(forward >= backward, far, -far)
    return steps


def telling_rows(
    covariance: Floats, rows: Floats, errors: Floats, count: int
) -> Integers:  # (n, n), (c, n), (c,) -> (≤ count,)
    """Rows chosen one by one, each for what measuring it within its error adds to the covariance of the unknowns."""
    covariance = covariance.copy()
    unknown = np.einsum("ci,ij,cj->c", rows, covariance, rows, optimize=True)  # variance of what each would measure
    chosen: list[int] = []
    for _ in range(min(count, rows.shape[0])):
        gain = unknown / errors**2
        gain[chosen] = 0.0
        best = int(np.argmax(gain))
        if not gain[best] > 0:
            break
        chosen.append(best)
        spread = covariance @ rows[best]
        total = errors[best] ** 2 + max(float(unknown[best]), 0.0)
        covariance -= np.outer(spread, spread) / total
        unknown = np.maximum(unknown - (rows @ spread) ** 2 / total, 0.0)
    return np.asarray(chosen, dtype=np.int64)
