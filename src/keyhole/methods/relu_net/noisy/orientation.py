"""Which way neurons face: |z| beside an affine part becomes ReLU(z) or ReLU(−z), so that no affine part is left."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy.spatial import cKDTree

from keyhole.arrays import Floats
from keyhole.methods.relu_net.noisy.least_squares import NetFit, descend, fit_planes

# Signs are found by meeting in the middle up to this many neurons: 2^12 half sums on either side.
MOST_SEARCHED = 24
STEPS = 20


def unfold(fit: NetFit) -> NetFit:
    """A fit of one function as one of ReLU neurons, as they happen to face, beside the affine part."""
    return fit_planes(replace(fit.problem, folded=False), fit.planes)


def orient(fit: NetFit) -> NetFit | None:
    """A fit without an affine part, the best for the likeliest signs; None where they cannot be found."""
    signs = _signs(fit)
    if signs is None:
        return None
    try:
        turned = fit_planes(replace(fit.problem, folded=False, affine=False), fit.planes * signs[:, None])
    except np.linalg.LinAlgError:
        return None
    return descend(turned, STEPS)


def _signs(fit: NetFit) -> Floats | None:  # -> (neurons,)
    """Signs s with Σ s_i·c_i·a_i = the linear part, as well as they can be: c|z| = 2c·ReLU(s·z) − s·c·z."""
    if fit.neurons == 0:
        return np.zeros(0)
    planes = fit.raw_planes()[:, :-1]
    linear = fit.output[fit.neurons : -1]  # (width, outputs)
    each = (planes[:, :, None] * fit.weights[:, None, :]).reshape(fit.neurons, -1)  # (neurons, width · outputs)
    if fit.neurons <= each.shape[1]:
        found = np.linalg.lstsq(each.T, linear.reshape(-1), rcond=None)[0]
        return np.where(found >= 0, 1.0, -1.0)
    return _met_in_the_middle(each, linear.reshape(-1)) if fit.neurons <= MOST_SEARCHED else None


def _met_in_the_middle(each: Floats, whole: Floats) -> Floats:  # (neurons, n), (n,) -> (neurons,)
    """The signs with Σ s_i·each_i nearest to the whole: half sums of one half, looked up among those of the other."""
    half = each.shape[0] // 2
    first, second = _all_signs(half), _all_signs(each.shape[0] - half)
    distances, nearest = cKDTree(first @ each[:half]).query(whole - second @ each[half:])
    best = int(np.argmin(distances))
    return np.concatenate([first[int(np.asarray(nearest)[best])], second[best]])


def _all_signs(count: int) -> Floats:  # -> (2^count, count)
    bits = (np.arange(2**count)[:, None] >> np.arange(count)) & 1
    return np.where(bits == 1, 1.0, -1.0)
