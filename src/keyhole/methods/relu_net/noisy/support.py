"""Where a fitted net rests on too few answers: tokens that would confirm or refute it there."""

from __future__ import annotations

import math

import numpy as np

from keyhole.arrays import Floats, Integers
from keyhole.methods.relu_net.noisy.covariance import Covariance
from keyhole.methods.relu_net.noisy.least_squares import NEARLY_EQUAL, NetFit
from keyhole.methods.relu_net.noisy.samples import Samples

# Answers on either side of every kink, for each number of its plane: fewer would fit some plane or other.
SUPPORT = 2.0
# Neurons whose weights are known no better than to this part, noise leaves so: more answers are no remedy.
UNRESOLVED = 0.5
# Of others, so many more answers on either side.
BESIDE_UNRESOLVED = 2
# An answer whose own error the fit follows to this part is not tested by the others: so many more beside it.
UNTESTED, BESIDE_UNTESTED = 0.99, 2
# Radii say which answers tell which side of a kink they are on, and those answers how wide radii are: so often in turn.
DOUBTS = 3
# Of planes of more numbers than this, which takes seconds each time, once; and no more answers are asked for it.
MOST_NUMBERS = 800


def tokens_on_short_sides(fit: NetFit, samples: Samples) -> Floats:  # -> (n, width)
    """Tokens on sides of kinks that few answers are on."""
    need = math.ceil(SUPPORT * (samples.width + 1))
    on = np.sum(fit.before > 0, axis=0)
    short = np.maximum(need - np.stack([on, fit.before.shape[0] - on]), 0)
    neurons = np.arange(fit.neurons)
    return _beside(fit, samples, np.repeat(neurons, short[0]), np.repeat(neurons, short[1]))


def tokens_beside_unresolved(covariance: Covariance, samples: Samples, deviations: float) -> Floats:  # -> (n, width)
    """Tokens on both sides of kinks of neurons that may be nothing, and would not be for the noise alone."""
    sure = sure_covariance(covariance, deviations)
    noisy = doubts(covariance, deviations * covariance.output()) > UNRESOLVED
    (chosen,) = np.nonzero(~noisy & (doubts(sure, deviations * sure.output()) > 1))
    often = np.tile(chosen, BESIDE_UNRESOLVED)
    return _beside(covariance.fit, samples, often, often)


def tokens_beside_some(fit: NetFit, samples: Samples, count: int) -> Floats:  # -> (count, width)
    """Tokens beside kinks chosen at random."""
    chosen = samples.rng.integers(max(1, fit.neurons), size=count if fit.neurons else 0)
    return _beside(fit, samples, chosen[::2], chosen[1::2])


def _beside(fit: NetFit, samples: Samples, on: Integers, off: Integers) -> Floats:  # (n,), (m,) -> (n + m, width)
    planes = fit.raw_planes()[np.concatenate([on, off])]
    return samples.draw_beside(planes, np.repeat([1.0, -1.0], [on.size, off.size]))


def tokens_beside_untested(covariance: Covariance, samples: Samples) -> Floats:  # -> (n, width)
    """Tokens near those whose answers the fit follows, in the same cell of it."""
    rows, raw = covariance.fit.problem.rows, covariance.raw
    leverage = np.max(covariance.predictions(rows, doubt=0.0), axis=1) ** 2
    chosen = np.repeat(np.flatnonzero(leverage > UNTESTED), BESIDE_UNTESTED)
    tokens = rows[chosen, :-1] / rows[chosen, -1:]
    heights = np.abs(tokens @ raw[:, :-1].T + raw[:, -1]) / np.linalg.norm(raw[:, :-1], axis=1)
    room = np.min(heights, axis=1, initial=samples.kinks)
    moved = tokens + samples.directions(chosen.size) * (room * samples.rng.random(chosen.size))[:, None]
    sizes = np.maximum(np.linalg.norm(moved, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return np.asarray(moved * np.minimum(1.0, min(samples.largest_norm, samples.longest) / sizes))


def sure_covariance(covariance: Covariance, deviations: float) -> Covariance:
    """The covariance that answers leave which tell for sure on which side of every kink they are."""
    for _ in range(DOUBTS if is_small(covariance.fit) else 1):
        covariance = covariance.without_doubtful(deviations)
    return covariance


def is_small(fit: NetFit) -> bool:
    """Whether a covariance takes less than a second."""
    return fit.planes.size <= MOST_NUMBERS


def doubts(covariance: Covariance, radii: Floats) -> Floats:  # (neurons + beside, outputs) -> (neurons,)
    """Radii of weights over the weights, by neuron: its own, or that of one so much alike that they may be mixed up."""
    fit, lengths = covariance.fit, np.linalg.norm(covariance.raw[:, :-1], axis=1)
    sizes = np.linalg.norm(fit.weights, axis=1) * lengths
    own = np.linalg.norm(radii[: fit.neurons], axis=1) / np.where(sizes > 0, sizes, np.inf)
    alike = np.abs(fit.planes @ fit.planes.T) > NEARLY_EQUAL
    return np.asarray(np.max(np.where(alike, own, 0.0), axis=1, initial=0.0))
