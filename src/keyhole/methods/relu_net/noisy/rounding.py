"""What rounding does to a fitted net: its errors follow from the answers, so that they are not independent."""

from __future__ import annotations

from typing import final

import numpy as np

from keyhole.arrays import Floats, Integers
from keyhole.methods.relu_net.noisy.covariance import CHUNK, Covariance

# The largest rounding error, in standard deviations of a uniform one.
LARGEST = 3**0.5


def radii_of_rounding(covariance: Covariance, deviations: float) -> tuple[Floats, Floats]:
    """Radii of planes of length one (neurons, width + 1) and of the output layer (neurons + beside, outputs).

    Equal answers err alike, as where a net is constant; different ones independently, up to `deviations` standard
    deviations of their sum and never more than all for the worst. Besides, answers that are cut off and not rounded to
    the nearest err by half a unit more, all in one direction or all towards zero.
    """
    problem = covariance.fit.problem
    answers = problem.answers / problem.rows[:, -1:]  # in their own unit again
    sums = _Sums()
    for column in range(answers.shape[1]):
        order = np.argsort(answers[:, column], kind="stable")
        own = answers[order, column]
        for part in _groups(own):
            sums.add(covariance.responses(order[part], column), own[part])
    radii = np.minimum(LARGEST * sums.alike, deviations * np.sqrt(sums.squares))
    radii = radii + LARGEST * np.maximum(np.abs(sums.up), np.abs(sums.away))
    neurons, size = covariance.fit.planes.shape
    return radii[: neurons * size].reshape(neurons, size), radii[neurons * size :].reshape(-1, answers.shape[1])


def _groups(answers: Floats) -> list[slice]:  # (n,), in order
    """Parts of about a chunk each that end where answers change."""
    (changes,) = np.nonzero(np.diff(answers))
    ends = np.append(changes + 1, answers.size)
    chosen = ends[np.append(np.flatnonzero(np.diff(ends // CHUNK)), ends.size - 1)]
    return [slice(start, end) for start, end in zip(np.append(0, chosen[:-1]), chosen, strict=True)]


@final
class _Sums:
    """Sums over answers of what their errors do to each parameter."""

    def __init__(self) -> None:
        self.alike: Floats | float = 0.0  # of sizes
        self.squares: Floats | float = 0.0  # of the sizes of equal answers
        self.up: Floats | float = 0.0
        self.away: Floats | float = 0.0  # from zero

    def add(self, responses: Floats, answers: Floats) -> None:  # (n, parameters), (n,)
        """More answers, equal ones behind each other."""
        starts: Integers = np.flatnonzero(np.append(True, np.diff(answers) != 0))
        sizes = np.add.reduceat(np.abs(responses), starts, axis=0)
        self.alike = self.alike + np.sum(sizes, axis=0)
        self.squares = self.squares + np.sum(sizes**2, axis=0)
        self.up = self.up + np.sum(responses, axis=0)
        self.away = self.away + np.sign(answers) @ responses
