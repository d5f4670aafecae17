"""The search for a net of one hidden layer that explains answers to within their noise: descend, slim, enlarge, turn.

Turned, |z| beside an affine part becomes ReLU(z) or ReLU(−z), so that no affine part is left.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from scipy.linalg import cho_solve
from scipy.spatial import cKDTree

from keyhole.arrays import Floats
from keyhole.methods.relu_net.noisy.least_squares import (
    NEARLY_EQUAL,
    NetFit,
    NetProblem,
    descend,
    enlarge,
    fit_planes,
    slim,
)
from keyhole.numerics.svd import least_squares

# Squares may exceed what noise leaves by this many standard deviations.
MISFIT_DEVIATIONS = 4.0
# No answer may be missed by more than this many standard deviations, or bounds: its own error, and those of the others
# that the fit follows. A kink that few answers see shows there first.
LARGEST_RESIDUAL = 6.5
BOUNDED_RESIDUAL = 2.0
# A neuron stays if it explains this many standard deviations more than one fitted to noise would.
NEURON_DEVIATIONS = 4.0
# Steps of a descent, and rounds of slimming and of enlarging.
STEPS = 40
SLIM_ROUNDS = 4
LAST_STEPS = 60
# New neurons of a round, as a fraction of those there are.
ENLARGED_BY = 1 / 6
# While far from the noise, fewer neurons may do if squares grow by no more than this factor.
SLIM_LOSS = 1.05
# A fit is given up while it leaves this fraction of what an affine map leaves, unless noise is nearly as large.
HOPELESS = 0.05**2
NEAR_NOISE = 4.0
# While far from the noise, neurons are dropped that are worth less than this fraction of the squares.
WORTHLESS = 0.5
# Signs are found by meeting in the middle up to this many neurons: 2^12 half sums on either side.
MOST_SEARCHED = 24
# Signs are unique beyond doubt when others add up to the same with this probability (minus a power of 2).
DOUBT_BITS = 10.0
# Steps of the descent once neurons are turned.
TURNED_STEPS = 20


def least_worth(problem: NetProblem) -> float:
    """By how much squares grow where a neuron is missed; of all places for one, noise makes the best look good."""
    own = problem.rows.shape[1] - 1 + problem.answers.shape[1]
    return float(own + NEURON_DEVIATIONS * math.sqrt(2 * own) + 2 * math.log(problem.answers.size))


def noise_ceiling(problem: NetProblem, neurons: int, bounded: bool) -> float:
    """Squares that noise alone hardly ever exceeds; bounded errors may all be as large as they can."""
    if bounded:
        return float(problem.answers.size)
    freedom = max(problem.freedom(neurons), 1)
    return float(freedom + MISFIT_DEVIATIONS * math.sqrt(2 * freedom))


def is_at_noise(fit: NetFit, bounded: bool) -> bool:
    """Whether noise explains what is left, of every answer and of all of them."""
    largest = float(np.max(np.abs(fit.residual), initial=0.0))
    if largest > (BOUNDED_RESIDUAL if bounded else LARGEST_RESIDUAL):
        return False
    return fit.squares <= noise_ceiling(fit.problem, fit.neurons, bounded)


def fit_residuals(
    problem: NetProblem,
    planes: Floats,  # (neurons, width + 1): where to start, in whitened coordinates
    rng: np.random.Generator,
    *,
    rounds: int,
    most_neurons: int,
    bounded: bool,
    flat: float = math.inf,  # squares that an affine map leaves
) -> NetFit:
    """Descend, slim, and enlarge where the residual asks for it, until noise explains the rest or rounds are over."""
    fit = fit_planes(problem, planes)
    best = fit
    for number in range(rounds):
        if number > 0:
            room = min(max(2, int(ENLARGED_BY * fit.neurons)), most_neurons - fit.neurons)
            if room < 1:
                break
            fit = fit_planes(problem, enlarge(fit, room, rng))
        fit = descend(fit, STEPS, problem.freedom(fit.neurons))
        if not is_hopeless(fit, flat, bounded):
            fit = _slim(fit, bounded)
        best = fit if fit.squares < best.squares else best
        if is_at_noise(fit, bounded):
            return fit
        if is_hopeless(fit, flat, bounded):
            break
    return best


def is_hopeless(fit: NetFit, flat: float, bounded: bool) -> bool:
    """Whether so much is left that a few more neurons will not do."""
    return fit.squares > max(HOPELESS * flat, NEAR_NOISE * noise_ceiling(fit.problem, fit.neurons, bounded))


def _slim(fit: NetFit, bounded: bool) -> NetFit:
    """As few neurons as explain the answers as well."""
    for _ in range(SLIM_ROUNDS):
        smaller = slim(fit, WORTHLESS * max(fit.squares, fit.problem.freedom(fit.neurons)))
        if smaller.neurons == fit.neurons:
            break
        smaller = descend(smaller, STEPS, fit.problem.freedom(smaller.neurons))
        if smaller.squares > SLIM_LOSS * fit.squares and not is_at_noise(smaller, bounded):
            break
        fit = smaller
    return fit


def fit_finally(fit: NetFit, rng: np.random.Generator, *, most_neurons: int, bounded: bool) -> NetFit:
    """At the noise already: to the bottom; neurons that are missed come back, those that are not go."""
    fit = descend(fit, LAST_STEPS)
    need = least_worth(fit.problem)
    for _ in range(fit.neurons):
        if fit.neurons == 0 or fit.squares > noise_ceiling(fit.problem, fit.neurons, bounded):
            break
        tries = (descend(fit_planes(fit.problem, planes), LAST_STEPS) for planes in _with_one_less(fit))
        smaller = next(
            (each for each in tries if each.squares <= fit.squares + need and is_at_noise(each, bounded)), None
        )
        if smaller is None:
            break
        fit = smaller
    while fit.neurons < most_neurons:
        larger = descend(fit_planes(fit.problem, enlarge(fit, 1, rng)), LAST_STEPS)
        if larger.squares > fit.squares - need:
            break
        fit = larger
    return fit


def _with_one_less(fit: NetFit) -> list[Floats]:
    """Planes without the least useful neuron, and with one in place of the two that are most alike."""
    fewer = [np.delete(fit.planes, int(np.argmin(fit.worth())), axis=0)]
    cosines = np.triu(fit.planes @ fit.planes.T, 1)
    one, two = np.unravel_index(int(np.argmax(np.abs(cosines))), cosines.shape)
    if abs(cosines[one, two]) > NEARLY_EQUAL:
        sizes = np.linalg.norm(fit.weights[[one, two]], axis=1)
        merged = fit.planes.copy()
        merged[one] = sizes[0] * merged[one] + np.sign(cosines[one, two]) * sizes[1] * merged[two]
        fewer.append(np.delete(merged, two, axis=0))
    return fewer


def as_relu(fit: NetFit) -> NetFit:
    """A fit of one function as one of ReLU neurons, as they happen to face, beside the affine part."""
    return fit_planes(replace(fit.problem, absolute=False), fit.planes)


def orient(fit: NetFit) -> NetFit | None:
    """A fit without an affine part, the best for the likeliest signs; None where they cannot be found."""
    signs = _signs(fit)
    if signs is None:
        return None
    try:
        turned = fit_planes(replace(fit.problem, absolute=False, affine=False), fit.planes * signs[:, None])
    except np.linalg.LinAlgError:
        return None
    return descend(turned, TURNED_STEPS)


def _signs(fit: NetFit) -> Floats | None:  # -> (neurons,)
    """Signs s with Σ s_i·c_i·a_i = the linear part, as well as they can be: c|z| = 2c·ReLU(s·z) − s·c·z."""
    if fit.neurons == 0:
        return np.zeros(0)
    planes = fit.raw_planes()[:, :-1]
    linear = fit.output[fit.neurons : -1]  # (width, outputs)
    each = (planes[:, :, None] * fit.weights[:, None, :]).reshape(fit.neurons, -1)  # (neurons, width · outputs)
    errors = np.sqrt(np.diag(cho_solve((fit.factor, True), np.eye(fit.scale.size)))) / fit.scale
    size = float(np.max(np.abs(each), initial=0.0))
    bits = math.log2(max(1.0, size / (MISFIT_DEVIATIONS * float(np.max(errors[fit.neurons : -1])))))
    if min(each.shape) * bits < fit.neurons + DOUBT_BITS:
        return None
    if fit.neurons <= each.shape[1]:
        shares = least_squares(each.T, linear.reshape(-1))
        return np.where(shares >= 0, 1.0, -1.0)
    return _meet_in_the_middle(each, linear.reshape(-1)) if fit.neurons <= MOST_SEARCHED else None


def _meet_in_the_middle(each: Floats, whole: Floats) -> Floats:  # (neurons, n), (n,) -> (neurons,)
    """The signs with Σ s_i·each_i nearest to the whole: half sums of one half, looked up among those of the other."""
    half = each.shape[0] // 2
    first, second = _all_signs(half), _all_signs(each.shape[0] - half)
    distances, nearest = cKDTree(first @ each[:half]).query(whole - second @ each[half:])
    best = int(np.argmin(distances))
    return np.concatenate([first[int(np.asarray(nearest)[best])], second[best]])


def _all_signs(count: int) -> Floats:  # -> (2^count, count)
    bits = (np.arange(2**count)[:, None] >> np.arange(count)) & 1
    return np.where(bits == 1, 1.0, -1.0)
