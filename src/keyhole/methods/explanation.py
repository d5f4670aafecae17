"""Whether some parameters within their radii explain all held-out answers at once, to the precision of these."""

from __future__ import annotations

import math

import numpy as np

from keyhole.arrays import FLOAT32, ROUNDING_DEVIATIONS, Floats, floats, numpy_space
from keyhole.methods.base import Estimate
from keyhole.methods.batches import in_batches
from keyhole.methods.heldout import HeldOut
from keyhole.noise import GAUSSIAN_DEVIATIONS
from keyhole.queries import Signature

# Products of tokens that err by less than this part of their norms are right for anybody.
SEEN = 1e-8
# The most numbers that parameters are looked for among.
MOST_NUMBERS = 400
# Radii of predictions up to this part of an answer are as good as linear in those of parameters.
LINEAR = 0.01
# Corners of the box of radii at which the second order of answers is looked at.
CORNERS = 4


def has_explanation(estimate: Estimate, signature: Signature, asked: HeldOut, answers: Floats) -> bool:
    """Whether parameters within their radii answer as the oracle did, each to rounding and noise.

    Radii of predictions add up what any parameters within radii could be off by, each query for itself: where they are
    wide, answers of another family fit in. Parameters of the family are off by the same changes in all queries, and the
    least of Σ(residual / precision)² + Σ(change / radius)² is at most the number of answers and of parameters. It is
    not looked for where answers are too few to tell.
    """
    outputs, rest = estimate.params.outputs or 1, answers - asked.predictions
    linear = np.repeat(_sizes(asked.known, outputs) <= LINEAR * _sizes(answers, outputs), outputs)
    number, count = int(np.sum(linear)), sum(math.prod(array.shape) for array in estimate.params.arrays().values())
    seen = np.any(_sizes(rest, outputs) > SEEN * _sizes(answers, outputs))
    if not (seen and count < min(MOST_NUMBERS, number)):
        return True
    model = _Model(estimate, signature, asked)
    rest, precision = rest[linear], model.precision(signature, asked)[linear]
    most = float(number + model.count)
    most += GAUSSIAN_DEVIATIONS * (2 * most) ** 0.5 * (signature.noise.kind == "gaussian")
    if np.sum((rest / precision) ** 2) <= most:
        return True
    slopes, bend = (each[linear] for each in model.slopes())
    precision = precision + bend
    rows = np.vstack([slopes / precision[:, None], np.eye(model.count)])
    wanted = np.append(rest / precision, np.zeros(model.count))
    if not (np.all(np.isfinite(rows)) and np.all(np.isfinite(wanted))):
        return True
    change = np.linalg.lstsq(rows, wanted, rcond=0.0)[0]
    return bool(np.sum((wanted - rows @ change) ** 2) <= most)


def _sizes(numbers: Floats, outputs: int) -> Floats:  # (answers,) -> (queries,)
    """The largest output of each answer."""
    return np.asarray(np.max(np.abs(numbers.reshape(-1, outputs)), axis=1))


class _Model:
    """Held-out answers as a function of the numbers that have a radius, in double precision."""

    def __init__(self, estimate: Estimate, signature: Signature, asked: HeldOut) -> None:
        self.outputs = estimate.params.outputs or 1
        self.arrays = {name: floats(array) for name, array in estimate.params.arrays().items()}
        self.params = estimate.params.with_arrays(dict(self.arrays))
        own = {name: floats(array) for name, array in estimate.radius.arrays().items() if name in self.arrays}
        self.where = [(name, tuple(index)) for name, radii in own.items() for index in np.argwhere(radii > 0)]
        self.count = len(self.where)
        sizes = {name: float(np.max(np.abs(array), initial=0.0)) or 1.0 for name, array in self.arrays.items()}
        self.radii = np.array([min(own[name][index], sizes[name]) for name, index in self.where])
        tokens = [floats(plan.tokens(0, plan.count, signature.space, signature.width)) for plan in asked.plans]
        ends = np.cumsum([0] + [len(each) for each in tokens])
        self.groups = [(np.arange(ends[n], ends[n + 1]), each) for n, each in enumerate(tokens)]

    def precision(self, signature: Signature, asked: HeldOut) -> Floats:
        """What answers of the very parameters may be off by."""
        noise = signature.noise
        # What is rounded to decimals may have been computed in float32.
        eps = FLOAT32 if noise.kind in ("rounded", "cut", "dtype") else signature.space.eps
        unit = max(ROUNDING_DEVIATIONS * eps / 2, SEEN)
        exactly = self.params.with_arrays({name: 0 * array for name, array in self.arrays.items()})
        rounding = [np.ravel(floats(self.params.error_bar(exactly, each, unit))) for _, each in self.groups]
        whole = np.repeat(_sizes(np.concatenate(rounding), self.outputs), self.outputs)
        known = whole + noise.smallest + noise.relative * np.abs(asked.predictions)
        return np.asarray(known + (noise.scale if noise.kind == "gaussian" else noise.radius) + signature.space.tiny)

    def answers(self, change: Floats) -> Floats:
        """What parameters changed by so many radii answer."""
        arrays = {name: array.copy() for name, array in self.arrays.items()}
        for (name, index), by in zip(self.where, change * self.radii, strict=True):
            arrays[name][index] += by
        found = np.empty((sum(len(places) for places, _ in self.groups), self.outputs))
        for batch in in_batches(self.params.with_arrays(arrays), self.groups, numpy_space()):
            found[batch.places] = floats(batch.params(batch.tokens)).reshape(len(batch.places), -1)
        return found.ravel()

    def slopes(self) -> tuple[Floats, Floats]:  # (answers, numbers), (answers,)
        """What a change of each number by its radius does to first order, and what is left beyond it."""
        middle, ones = self.answers(np.zeros(self.count)), np.eye(self.count)
        signs = np.random.default_rng(0).choice([-1.0, 1.0], (CORNERS, self.count))
        up, down = (np.array([self.answers(sign * each) for each in [*ones, *signs]]) for sign in (1.0, -1.0))
        bends = np.abs(up + down - 2 * middle) / 2
        beyond = np.sum(bends[: self.count], axis=0) + np.max(bends[self.count :], axis=0)
        return (up - down)[: self.count].T / 2, beyond
