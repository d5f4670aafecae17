"""A layer and everything a Gauss–Newton step needs to know of the examples, as sums over them.

With residual r, mixed tokens Z and the Jacobian J of the outputs in the scores, projections fixed, the sums are ZᵀZ,
ZᵀJ, JᵀJ, Zᵀr, Jᵀr and ‖r‖². They are small whatever the number of examples, and add up over blocks of them. The step
in the projections is eliminated: what is left for the scores is (JᵀJ − JᵀZ(ZᵀZ)⁻¹ZᵀJ)·δΘ = Jᵀr − JᵀZ(ZᵀZ)⁻¹Zᵀr.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from operator import add
from typing import Self

import numpy as np

from keyhole.arrays import Floats
from keyhole.families import AttentionLayer
from keyhole.samples.evidence import FLAT, SAMPLES, StandardErrors, held_still
from keyhole.samples.source import Source
from keyhole.samples.variable_projection import LayerProblem, mixture, paired, sensed_maps

# Entries of the scores up to which JᵀJ is written down: 2 GiB at the most with all its parts would be too much by far.
MOST_ENTRIES = 3000
# Numbers of a block of rows in the largest of the products.
ROWS = 2**21
# Directions of ZᵀZ below this part of the largest hold no tokens, and projections are free there.
EMPTY = 1e-14
# What makes a matrix that is definite up to rounding definite, over its trace.
TINY = 16 * np.finfo(float).eps


@dataclass(frozen=True)
class LayerSums:
    """The sums of some examples at a layer; those of others are added with `+`."""

    examples: Floats  # ()
    numbers: Floats  # (): in the outputs
    energy: Floats  # (): sum of squares of the outputs
    rss: Floats  # (): of the residual
    scale: Floats  # (): sum of squares of what the heads add up to, without cancelling
    mixed: Floats  # (m·d, m·d): ZᵀZ
    along_mixed: Floats  # (m·d, d_out): Zᵀr
    curvature: Floats  # (d, m·d, d, m·d): JᵀJ; empty where only the residual is asked for
    gradient: Floats  # (d, m·d): Jᵀr
    inside: Floats  # (m·d, d, m·d, d_out): ZᵀJ

    def __add__(self, other: Self) -> LayerSums:
        return LayerSums(*(add(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)))


@dataclass(frozen=True)
class LayerAt:
    """Sums at given scores and projections: what is mapped over blocks of examples."""

    scores: Floats  # (m, d, d)
    projections: Floats  # (m, d, d_out)
    full: bool  # with the Jacobian

    def __call__(self, inputs: Floats, outputs: Floats) -> LayerSums:
        """The sums of one block."""
        m, d, p = self.projections.shape
        step = max(1, ROWS // (inputs.shape[1] * m * d * max(p, d)))
        parts = (slice(start, start + step) for start in range(0, len(inputs), step))
        total = None
        for part in parts:
            sums = self._block(LayerProblem(inputs[part], outputs[part]))
            total = sums if total is None else total + sums
        assert total is not None
        return total

    def _block(self, problem: LayerProblem) -> LayerSums:
        m, d, p = self.projections.shape
        weights = problem.weights(self.scores)
        mixed = mixture(problem.inputs, weights)
        stacked = self.projections.reshape(m * d, p)
        residual = problem.labels - mixed @ stacked
        scale = np.sum((np.abs(mixed) @ np.abs(stacked)) ** 2)
        counted = (problem.inputs.shape[0], problem.labels.size, problem.energy, np.sum(residual**2), scale)
        common = [np.asarray(each, dtype=np.float64) for each in (*counted, mixed.T @ mixed, mixed.T @ residual)]
        if not self.full:
            return LayerSums(*common, *[np.zeros(0)] * 3)
        own, sensed = problem.tokens, sensed_maps(problem.inputs, weights, self.projections)
        sensed = sensed.reshape(problem.rows, m * d, p)  # J of row a is x_a ⊗ sensed
        gradient = own.T @ (sensed @ residual[:, :, None])[..., 0]
        crossed = (mixed[:, :, None] * own[:, None, :]).reshape(problem.rows, -1)
        inside = (crossed.T @ sensed.reshape(problem.rows, -1)).reshape(m * d, d, m * d, p)
        curvature = paired(own, sensed)
        return LayerSums(*common, *(np.ascontiguousarray(each) for each in (curvature, gradient, inside)))


@dataclass(frozen=True)
class SummedFit:
    """A layer with the sums of all examples at it."""

    scores: Floats  # (m, d, d)
    projections: Floats  # (m, d, d_out)
    sums: LayerSums
    shared: Floats  # (d, some): directions in which scores are zero, since no key shows them

    @classmethod
    def of(
        cls, source: Source, scores: Floats, projections: Floats, shared: Floats | None = None, *, full: bool = True
    ) -> SummedFit:
        """The sums over all examples of a source; without the Jacobian where that would be too large, or on request."""
        at = LayerAt(scores, projections, full=full and scores.size <= MOST_ENTRIES)
        hidden = np.zeros((scores.shape[1], 0)) if shared is None else shared
        return cls(scores, projections, source.reduce(at, add), hidden)

    @property
    def layer(self) -> AttentionLayer:
        """The parameters."""
        return AttentionLayer(self.scores, self.projections)

    @property
    def examples(self) -> int:
        """Examples that were added up."""
        return int(self.sums.examples)

    @property
    def numbers(self) -> int:
        """Numbers in their outputs."""
        return int(self.sums.numbers)

    @property
    def rss(self) -> float:
        """Residual sum of squares."""
        return float(self.sums.rss)

    @property
    def energy(self) -> float:
        """Sum of squares of the outputs."""
        return float(self.sums.energy)

    @property
    def scale(self) -> float:
        """Root mean square of what the heads add up to, without cancelling."""
        return float(np.sqrt(self.sums.scale / self.sums.numbers))

    @cached_property
    def _inverse(self) -> Floats:  # (m·d, m·d): of ZᵀZ
        values, vectors = np.linalg.eigh(self.sums.mixed)
        fine = values > EMPTY * values[-1]
        return np.asarray((vectors[:, fine] / values[fine]) @ vectors[:, fine].T)

    @cached_property
    def _eliminated(self) -> tuple[Floats, Floats, Floats]:
        """Curvature (c, c) and gradient (c,) of the scores without the projections, and (ZᵀZ)⁻¹ZᵀJ (m·d, d_out, c)."""
        size, p = self.sums.mixed.shape[0], self.projections.shape[2]
        inside = self.sums.inside.reshape(size, -1, p).transpose(0, 2, 1)  # (m·d, d_out, c)
        carried = np.tensordot(self._inverse, inside, axes=1)
        count = inside.shape[2]
        curvature = self.sums.curvature.reshape(count, count)
        curvature = curvature - inside.reshape(-1, count).T @ carried.reshape(-1, count)
        gradient = self.sums.gradient.reshape(-1) - carried.reshape(-1, count).T @ self.sums.along_mixed.reshape(-1)
        return held_still((curvature + curvature.T) / 2, self.shared), gradient, carried

    @cached_property
    def _root(self) -> tuple[Floats, Floats]:
        """Eigenvalues of the curvature, and a root of its inverse (c, c)."""
        values, vectors = np.linalg.eigh(self._eliminated[0])
        return values, vectors / np.sqrt(np.maximum(values, FLAT * max(values[-1], np.finfo(float).tiny)))

    def _scores_of(self, flat: Floats) -> Floats:  # (c,) -> (m, d, d)
        m, d = self.scores.shape[:2]
        return np.asarray(flat.reshape(d, m, d).transpose(1, 0, 2))

    def step(self) -> tuple[Floats, Floats, float]:
        """The Gauss–Newton step in scores and projections, and the decrease of the sum of squares that it promises."""
        _, gradient, carried = self._eliminated
        root = self._root[1]
        inner = gradient @ root
        moved = root @ inner
        own = self._inverse @ self.sums.along_mixed
        stacked = own - carried @ moved
        promised = float(inner @ inner) + float(np.vdot(own, self.sums.along_mixed))
        return self._scores_of(moved), stacked.reshape(self.projections.shape), promised

    def standard_errors(self, rng: np.random.Generator) -> StandardErrors:
        """Standard errors by the covariance of least squares."""
        values, root = self._root
        _, gradient, carried = self._eliminated
        scores = self._scores_of(np.sqrt(np.sum(root**2, axis=1)))
        through = np.sum((carried @ root) ** 2, axis=2)  # (m·d, d_out)
        projections = np.sqrt(through + np.diag(self._inverse)[:, None]).reshape(self.projections.shape)
        determined = bool(values[0] > FLAT * values[-1])
        half = np.linalg.cholesky(self._inverse + TINY * np.trace(self._inverse) * np.eye(len(self._inverse)))
        draws = []
        for _ in range(SAMPLES):
            moved = root @ rng.standard_normal(len(root))
            stacked = half @ rng.standard_normal((len(half), self.projections.shape[2])) - carried @ moved
            draws.append((self._scores_of(moved), stacked.reshape(self.projections.shape)))
        unsettled = float(np.linalg.norm(gradient @ root))
        return StandardErrors(scores, projections, True, determined, unsettled, tuple(draws))
