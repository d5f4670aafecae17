"""The cap of one head, where logits are cap·tanh(logit/cap): from last tokens that are sums of others."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats

# Reciprocals of caps that are tried first, in units of the largest energy seen, and steps from the best of them.
RECIPROCALS = np.geomspace(1e-5, 0.9999, 240)
REFINEMENTS, FINER = 4, 17
# No cap below this is looked for where that is all one knows.
LEAST_CAP = 0.05
# Energies may be beyond a cap by so many times what is uncertain of them.
BEYOND = 16.0
MOST_STEPS, SMALLEST_STEP = 60, 1e-15


def rest_and_height(cap: float, middle: float, *, rest_known: bool) -> tuple[float, float]:
    """What is beside a token of logit zero, and how high its weight jumps, by the middle of the jump; nan where none.

    The weight is 1/(1 + rest·exp(−energy)), and a cap keeps energies within ±cap.
    """
    low = np.exp(-cap)
    if rest_known:
        return 1.0, float(np.tanh(cap / 2))
    # rest²·(middle·2·sinh − 1) + rest·(middle·2·sinh − 2·cosh) = 1, divided by exp(cap)
    rise = middle * (1 - low**2)
    square, linear = rise - low, rise - (1 + low**2)
    root = linear**2 + 4 * square * low
    if not (square > 0 and root >= 0):
        return float("nan"), float("nan")
    rest = float((-linear + np.sqrt(root)) / (2 * square))
    return rest, 1 / (1 + rest * low) - low / (low + rest)


def solve_cap(
    shares: Floats,  # (width + spare,) weights over the height of their jump
    mixes: Floats,  # (spare, width) the further last tokens as sums of the first
    middle: float,
    error: float,  # of each share
    *,
    rest_known: bool,
) -> tuple[float, float, float, float]:
    """Cap, its deviation, the rest and the height of the jump: logits of sums of last tokens are sums of logits."""
    width = mixes.shape[1]

    def misfit(reciprocal: float) -> tuple[Floats, Floats]:
        """How far logits of sums are off, and how uncertain that is."""
        cap = 1 / reciprocal
        rest, height = rest_and_height(cap, middle, rest_known=rest_known)
        weights = shares * height
        with np.errstate(all="ignore"):
            part = np.log(rest * weights / (1 - weights)) / cap
            spread = error * height / (weights * (1 - weights))
            if not np.all(np.abs(part) - 1 <= BEYOND * spread / cap):
                return np.full(part.size - width, np.inf), np.ones(part.size - width)
            logits, spread = cap * np.arctanh(part), spread / (1 - part**2)
        logits[width:] -= mixes @ logits[:width]
        return logits[width:], np.hypot(spread[width:], np.sqrt(mixes**2 @ spread[:width] ** 2))

    def cost(reciprocal: float, step: float) -> float:
        """Of a likelihood in which logits are as far off as a cap that is off by this part of it may make them."""
        off, spread = misfit(reciprocal)
        variances = spread**2 + (step * size) ** 2
        told = np.isfinite(variances) & ~np.isnan(off)  # not so where a weight is at its end
        return float(np.mean(off[told] ** 2 / variances[told] + np.log(variances[told]))) if np.any(told) else np.inf

    largest = _largest_energy(shares[:width], middle, rest_known=rest_known)
    size, best = 0.5 * np.linalg.norm(mixes, axis=1), 1.0 / largest
    grid = RECIPROCALS
    for _ in range(REFINEMENTS):
        step = float(grid[1] / grid[0] - 1)
        best = best * float(grid[int(np.argmin([cost(best * each, step) for each in grid]))])
        grid = np.linspace(1 - step, 1 + step, FINER)
    slope, spread = np.ones(1), np.ones(1)
    for _ in range(MOST_STEPS):
        off, spread = misfit(best)
        if not np.all(np.isfinite(off)):
            break
        slope = (misfit(best * (1 + 1e-6))[0] - misfit(best * (1 - 1e-6))[0]) / (2e-6 * best)
        told = np.isfinite(off + slope + spread)
        slope, spread = slope[told], spread[told]
        if not slope.size:
            break
        step = -float(np.sum(off[told] * slope / spread**2) / max(np.sum(slope**2 / spread**2), 1e-300))
        step = float(np.clip(step, -0.5 * best, 0.5 * best))
        best += step
        if abs(step) <= SMALLEST_STEP * best:
            break
    deviation = 1 / float(np.sqrt(max(np.sum(slope**2 / spread**2), 1e-300)))
    return (1 / best, deviation / best**2, *rest_and_height(1 / best, middle, rest_known=rest_known))


def _largest_energy(shares: Floats, middle: float, *, rest_known: bool) -> float:
    """Of the weights seen, if the cap is as wide as it may be: no cap is lower than what it lets through."""
    height = 1 / (2 * middle) if rest_known else 1.0
    weights = np.clip(shares * height, 1e-12, 1 - 1e-12)
    energies = np.abs(np.log(weights / (1 - weights)) - np.log(middle * height / (1 - middle * height + 1e-300)))
    return float(np.max(energies, initial=1e-3)) if rest_known else LEAST_CAP
