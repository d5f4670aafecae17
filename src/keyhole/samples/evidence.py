"""A fit, what the examples say of it, and how far its parameters may be from the truth given errors of labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from keyhole.arrays import Floats
from keyhole.families import AttentionLayer
from keyhole.samples.levenberg_marquardt import conjugate_gradients
from keyhole.samples.preconditioners import HeadBlocks, Kronecker
from keyhole.samples.variable_projection import LayerPoint

# Curvature matrices up to this many entries of the scores are written down; beyond, errors are sampled.
DENSE = 1100
# Random labels by which errors are sampled, the accuracy of what they lead to, and the products each may take.
SAMPLES, SAMPLE_ACCURACY, SAMPLE_PRODUCTS = 4, 1e-2, 300
# Curvatures below this part of the largest are rounding: such directions are not determined.
FLAT = 1e-13


@dataclass(frozen=True)
class StandardErrors:
    """Standard errors of the parameters for labels with independent errors of standard deviation one."""

    scores: Floats  # (m, d, d)
    projections: Floats  # (m, d, d_out)
    entrywise: bool  # each entry has its own; else all entries of a head have their root mean square
    determined: bool  # no direction is flat
    unsettled: float  # root of the sum of squares that the scores, to first order, could still take off the residual
    draws: tuple[tuple[Floats, Floats], ...]  # errors of scores and projections that such labels lead to


class Evidence(Protocol):
    """A fitted layer with what it leaves over."""

    @property
    def layer(self) -> AttentionLayer:
        """The parameters."""

    @property
    def examples(self) -> int:
        """Examples that the parameters rest on."""

    @property
    def numbers(self) -> int:
        """Numbers in the outputs that the residual was taken of."""

    @property
    def rss(self) -> float:
        """Residual sum of squares."""

    @property
    def energy(self) -> float:
        """Sum of squares of the outputs."""

    @property
    def scale(self) -> float:
        """Root mean square of what the heads add up to, without cancelling."""

    def standard_errors(self, rng: np.random.Generator) -> StandardErrors:
        """Standard errors of the parameters for errors of standard deviation one."""


@dataclass(frozen=True)
class PointEvidence:
    """The fit to examples in memory."""

    point: LayerPoint

    @cached_property
    def layer(self) -> AttentionLayer:
        """The parameters."""
        return AttentionLayer(self.point.scores, self.point.projections)

    @property
    def examples(self) -> int:
        """Examples that the parameters rest on."""
        return int(self.point.problem.inputs.shape[0])

    @property
    def numbers(self) -> int:
        """Numbers in the outputs that the residual was taken of."""
        return self.point.residual.size

    @property
    def rss(self) -> float:
        """Residual sum of squares."""
        return self.point.rss

    @property
    def energy(self) -> float:
        """Sum of squares of the outputs."""
        return self.point.problem.energy

    @property
    def scale(self) -> float:
        """Root mean square of what the heads add up to, without cancelling."""
        sizes = np.abs(self.point.mixed) @ np.abs(self.point.stacked)
        return float(np.sqrt(np.mean(sizes**2)))

    def standard_errors(self, rng: np.random.Generator) -> StandardErrors:
        """Standard errors of the parameters for errors of standard deviation one."""
        return standard_errors(self.point, rng)


def standard_errors(point: LayerPoint, rng: np.random.Generator) -> StandardErrors:
    """Standard errors, by the covariance of least squares; sampled where that would be too large."""
    return _dense(point, rng) if point.scores.size <= DENSE else _sample(point, rng)


def held_still(curvature: Floats, directions: Floats) -> Floats:  # (c, c), (d, some) -> (c, c)
    """Curvature of all scores, which end with their columns, with as much as is usual where scores are zero anyway."""
    if not directions.size:
        return curvature
    usual = np.trace(curvature) / len(curvature) * directions @ directions.T
    return curvature + np.kron(np.eye(len(curvature) // len(usual)), usual)


def _dense(point: LayerPoint, rng: np.random.Generator) -> StandardErrors:
    problem = point.problem
    (m, d, _), outputs = point.scores.shape, problem.labels.shape[1]
    count = m * d * d
    curvature, inside = point.gram_matrices
    curvature = held_still(curvature, problem.shared)
    values, vectors = np.linalg.eigh(curvature)
    determined = bool(values[0] > FLAT * values[-1])
    gradient = point.products.backward(point.residual).transpose(1, 0, 2).reshape(-1)
    root = vectors / np.sqrt(np.maximum(values, FLAT * max(values[-1], np.finfo(float).tiny)))
    scores = np.sqrt(np.sum(root**2, axis=1)).reshape(d, m, d).transpose(1, 0, 2)
    # dW = Z⁺·(label errors − J·dΘ)
    inverse = np.linalg.pinv(point.mixed)  # (m·d, rows)
    own = np.sum(inverse**2, axis=1)
    carried = (inverse @ point.basis) @ inside.reshape(point.basis.shape[1], -1)
    carried = carried.reshape(-1, count)
    through = np.sum((carried @ root) ** 2, axis=1).reshape(m, d, outputs)
    projections = np.sqrt(through + own.reshape(m, d, 1))
    draws = []
    for _ in range(SAMPLES):
        moved = root @ rng.standard_normal(count)
        stacked = inverse @ rng.standard_normal(problem.labels.shape) - (carried @ moved).reshape(m * d, outputs)
        draws.append((moved.reshape(d, m, d).transpose(1, 0, 2), np.asarray(stacked).reshape(m, d, outputs)))
    return StandardErrors(scores, projections, True, determined, float(np.linalg.norm(gradient @ root)), tuple(draws))


def _sample(point: LayerPoint, rng: np.random.Generator) -> StandardErrors:
    kronecker = Kronecker.of(point, rng)
    least = FLAT * kronecker.level
    inverse = HeadBlocks.of(point, least) or kronecker
    draws: list[tuple[Floats, Floats]] = []

    def solve(gradient: Floats) -> Floats:
        return conjugate_gradients(
            lambda move: point.products.curvature(move) + least * move,
            gradient,
            lambda each: inverse.solve(each, least),
            SAMPLE_ACCURACY,
            SAMPLE_PRODUCTS,
        )[0]

    for _ in range(SAMPLES):
        labels = rng.standard_normal(point.problem.labels.shape)
        moved = solve(point.products.backward(point.products.outside(labels)))
        left = point.basis.T @ (labels - point.products.forward(moved))
        stacked = np.asarray(np.linalg.lstsq(point.basis.T @ point.mixed, left, rcond=None)[0])
        draws.append((moved, stacked.reshape(point.projections.shape)))

    def pool(errors: Sequence[Floats]) -> Floats:
        level = np.sqrt(np.mean(np.square(errors), axis=(0, 2, 3)))[:, None, None]
        return np.broadcast_to(level, errors[0].shape).copy()

    gradient = point.products.backward(point.residual)
    unsettled = max(0.0, float(np.vdot(gradient, solve(gradient)))) ** 0.5
    # Dependent tokens leave directions free that no random label shows. What is held still is none of them.
    sensed = np.sort(kronecker.right)[point.scores.shape[0] * point.problem.shared.shape[1] :]
    determined = all(each[0] > FLAT * each[-1] for each in (np.sort(kronecker.left), sensed))
    scores, projections = (pool(errors) for errors in zip(*draws, strict=True))
    return StandardErrors(scores, projections, False, determined, unsettled, tuple(draws))
