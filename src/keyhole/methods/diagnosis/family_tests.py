"""Pure tests that tell families of oracles apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from keyhole.arrays import Floats, Integers
from keyhole.families.activations import activate
from keyhole.numerics.svd import singular_values, svd

# Where the fit of a bend begins: the best of these places in the interval and sharpnesses over it.
BEND_PLACES, BEND_SHARPNESS, BEND_STARTS = np.linspace(-0.9, 0.9, 13), 2.0 ** np.arange(-1, 8), 2


def affine_misfit(points: Floats, answers: Floats, at_zero: Floats) -> Floats:  # (n,), (n, outputs) -> (n,)
    """How far answers are from a line through `at_zero`, whose slope is taken at the last point."""
    slope = (answers[-1] - at_zero) / points[-1]
    return np.asarray(np.linalg.norm(answers - at_zero - points[:, None] * slope, axis=1))


def rank_above(matrix: Floats, error: float) -> tuple[int, float]:
    """Singular values that errors of this size in every entry do not make, and the gap behind the last of them."""
    values = singular_values(matrix)
    floor = error * sum(matrix.shape) ** 0.5
    rank = int(np.sum(values > floor))
    below = max(float(values[rank]) if rank < values.size else 0.0, floor)
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
        inverse, inverse_error = 1.0 / added, error / added**2
        left = (inverse[1] - inverse[0]) / (x[1] - x[0]) - (inverse[2] - inverse[1]) / (x[2] - x[1])
        allowed = (inverse_error[1] + inverse_error[0]) / abs(x[1] - x[0]) + (
            inverse_error[2] + inverse_error[1]
        ) / abs(x[2] - x[1])
        return 1 if abs(left) <= allowed else 2
    one, two = slice(0, None, 2), slice(1, None, 2)
    steps = x[one][:, None] - x[two][None, :]
    loewner = (added[one][:, None] - added[two][None, :]) / steps
    return rank_above(loewner, float(2 * error / np.min(np.abs(steps))))[0]


@dataclass(frozen=True)
class BendFit:
    """A neuron of some activation fitted to answers along a line."""

    name: str
    centre: float
    sharpness: float
    misfit: float  # root mean square, over that of what an affine map misses


def bend_fit(name: str, t: Floats, answers: Floats) -> BendFit:  # (n,), (n, outputs)
    """The best fit of α + β·t + c·act(s·(t − t₀)) to what answers do along a line, but for an affine map."""
    middle, half_length = 0.5 * (t[0] + t[-1]), 0.5 * (t[-1] - t[0])
    u = (t - middle) / half_length
    affine, _ = np.linalg.qr(np.column_stack([np.ones_like(u), u]))

    def without_affine(columns: Floats) -> Floats:
        once = columns - affine @ (affine.T @ columns)
        return np.asarray(once - affine @ (affine.T @ once))  # twice: answers are far larger than what is left of them

    left = without_affine(answers)
    column = left @ svd(left)[2][0]  # one neuron moves all outputs alike
    size = float(np.linalg.norm(column))
    if size == 0.0:
        return BendFit(name, float(middle), 1.0, float("inf"))
    column = column / size

    def residual(guess: Floats) -> Floats:
        shape = without_affine(activate(name, np.exp(guess[1]) * (u - guess[0])))
        norm = float(shape @ shape)
        return np.asarray(column - shape * ((shape @ column) / norm if norm > 0 else 0.0))

    starts = [(place, np.log(sharp)) for place in BEND_PLACES for sharp in BEND_SHARPNESS]
    best = sorted(starts, key=lambda start: float(np.linalg.norm(residual(np.array(start)))))[:BEND_STARTS]
    fits = [least_squares(residual, start, xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=60) for start in best]
    fit = min(fits, key=lambda each: float(each.cost))
    place, sharp = fit.x
    return BendFit(
        name, float(middle + half_length * place), float(np.exp(sharp) / half_length), float(np.sqrt(2 * fit.cost))
    )
