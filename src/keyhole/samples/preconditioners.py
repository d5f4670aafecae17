"""Approximate inverses of JᵀJ, by which conjugate gradients take fewer products with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.linalg

from keyhole.arrays import Floats
from keyhole.samples.variable_projection import LayerPoint, LayerProblem, paired

# Numbers of the blocks of all heads at most: a quarter of a gigabyte.
LARGEST_BLOCKS = 2**26
# Numbers that a product with JᵀJ works through while one of a factor is read, twice over.
SOLVING = 3.5
# What is added to blocks that are singular in single precision, over their mean eigenvalue.
SINGULAR = 1e-6


@dataclass(frozen=True, eq=False)
class Kronecker:
    """A ⊗ B by its eigenvectors, A over the rows of all scores and B over heads and columns."""

    left: Floats  # (d,)
    left_vectors: Floats  # (d, d)
    right: Floats  # (m·d,)
    right_vectors: Floats  # (m·d, m·d)

    @classmethod
    def of(cls, point: LayerPoint, rng: np.random.Generator) -> Kronecker:
        """JᵀJ as if tokens and covariances were independent: B from one random sign per label."""
        signs = rng.choice([-1.0, 1.0], size=point.problem.labels.shape)
        sensed = point.products.sensed(signs)
        values, vectors = np.linalg.eigh(sensed.T @ sensed / point.problem.rows)
        return cls(*point.problem.token_moments, np.maximum(values, 0.0), vectors)

    @property
    def level(self) -> float:
        """The mean eigenvalue."""
        return float(np.mean(self.left) * np.mean(self.right))

    def dearer(self, problem: LayerProblem) -> float:  # noqa: ARG002
        """How many products with JᵀJ alone take as long as one together with `solve`."""
        return 1.0

    def solve(self, gradient: Floats, damping: float) -> Floats:  # (m, d, d) -> (m, d, d)
        """(A ⊗ B + damping)⁻¹ times a gradient."""
        m, d = gradient.shape[:2]
        flat = gradient.transpose(1, 0, 2).reshape(d, m * d)
        inner = self.left_vectors.T @ flat @ self.right_vectors
        inner /= np.outer(self.left, self.right) + damping
        return np.asarray((self.left_vectors @ inner @ self.right_vectors.T).reshape(d, m, d).transpose(1, 0, 2))


@dataclass(frozen=True, eq=False)
class HeadBlocks:
    """JᵀJ of each head alone, written down and factored: what heads have in common, and projections, are left out.

    Where attention is sharp few rows decide, and tokens and covariances depend on each other: a Kronecker product is
    far from JᵀJ then, and these blocks are as near as ever. They are in single precision.
    """

    factors: tuple[Any, ...]  # Cholesky factors (d², d²), one per head
    damping: float  # that they were made with: they are far from JᵀJ with more

    @staticmethod
    def price(problem: LayerProblem) -> float:
        """How many products with JᵀJ take as long: d⁴ for each token and head and d⁶/3 for factors, over 8·d² each."""
        square = problem.width**2
        return square / 8 * (1 + square / (3 * problem.rows))

    @classmethod
    def of(cls, point: LayerPoint, damping: float) -> HeadBlocks | None:
        """The blocks at a point, with damping; None where they are too large, or beyond single precision."""
        m, d = point.scores.shape[:2]
        if m * d**4 > LARGEST_BLOCKS:
            return None
        factors = []
        for head in range(m):
            block: Any = np.zeros((d, d, d, d), dtype=np.float32)
            with np.errstate(over="ignore", invalid="ignore"):
                for own, sensed, _ in point.sensed_blocks(np.float32, slice(head, head + 1)):
                    block += paired(own, sensed[:, 0])
            size = float(np.einsum("jljl", block)) / d**2
            if not (np.isfinite(size) and size > 0):
                return None
            factors.append(_factor(block.reshape(d * d, d * d), damping, size))
        return cls(tuple(factors), damping)

    def dearer(self, problem: LayerProblem) -> float:
        """How many products with JᵀJ alone take as long as one together with `solve`, which memory limits."""
        return 1 + SOLVING * problem.width**2 / problem.rows

    def solve(self, gradient: Floats, damping: float) -> Floats:  # noqa: ARG002  # (m, d, d) -> (m, d, d)
        """The inverse times a gradient, with the damping that blocks were made with."""
        pairs = zip(self.factors, gradient.astype(np.float32), strict=True)
        found = [scipy.linalg.cho_solve(factor, each.reshape(-1), check_finite=False) for factor, each in pairs]
        return np.asarray(found, dtype=np.float64).reshape(gradient.shape)


def _factor(block: Floats, damping: float, size: float) -> Any:  # (d², d²)
    added = damping + SINGULAR * size
    while True:
        try:
            shifted = block + np.diag(np.full(len(block), added, dtype=block.dtype))
            return scipy.linalg.cho_factor(shifted, lower=True, overwrite_a=True, check_finite=False)
        except np.linalg.LinAlgError:
            added += 100 * SINGULAR * size
