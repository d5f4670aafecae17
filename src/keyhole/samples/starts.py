"""Where fits begin: random scores, or those that a moment of the examples points to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats
from keyhole.samples.variable_projection import LayerProblem

# Standard deviation of the entries of a random start, times the width: logits of about a third.
RANDOM_SIZE = 0.3
# Entries of the moment that are kept at most; wider tokens are not worth the memory.
MOST_ENTRIES = 2**25


def random_start(problem: LayerProblem, heads: int, rng: np.random.Generator) -> Floats:  # (heads, d, d)
    """Small random scores."""
    return rng.standard_normal((heads, problem.width, problem.width)) * (RANDOM_SIZE / problem.width)


@dataclass(frozen=True)
class Moment:
    """The singular vectors of E[F ⊗ x_a ⊗ Cov(X)], unfolded such that scores stand on the left."""

    left: Floats  # (d·d, some): combinations of the scores, nearly
    values: Floats  # (some,)

    def gap(self, heads: int) -> float:
        """How far the values fall after those of the heads; 1 for not at all."""
        if len(self.values) <= heads or self.values[heads] <= 0:
            return float("inf")
        return float(self.values[heads - 1] / self.values[heads])


def moment(problem: LayerProblem, most: int) -> Moment | None:
    """First order in Θ, F_a = X̄·S + Σ_i x_aᵀΘ_i·Cov(X)·W_i: its coefficients, for tokens that are nearly independent.

    Only Θ_i[j, l]·W_i[l', o] + Θ_i[j, l']·W_i[l, o] shows; unfolded to (j, l) × (l', o), the first term has rank m and
    the second none that stands out. None where the moment would not fit into memory.
    """
    n, k, d = problem.inputs.shape
    outputs = problem.labels.shape[1]
    if d**3 * outputs > MOST_ENTRIES:
        return None
    centred = problem.inputs - np.mean(problem.inputs, axis=1, keepdims=True)
    covariance = (np.swapaxes(centred, 1, 2) @ centred / k).reshape(n, d * d)
    covariance = covariance - np.mean(covariance, axis=0)
    mean = np.repeat(np.mean(problem.inputs, axis=1), k, axis=0)  # (rows, d)
    both = np.hstack([mean, problem.tokens])
    rest = problem.labels - both @ np.linalg.lstsq(both, problem.labels, rcond=None)[0]
    # Σ over tokens of x_a ⊗ F_a first: (n, d, d_out).
    paired = problem.turned @ rest.reshape(n, k, outputs)
    unfolded = covariance.T @ paired.reshape(n, d * outputs) / problem.rows  # (l·l', j·o)
    tensor = unfolded.reshape(d, d, d, outputs).transpose(2, 0, 1, 3)  # (j, l, l', o)
    left, values, _ = np.linalg.svd(tensor.reshape(d * d, d * outputs), full_matrices=False)
    return Moment(left[:, :most], values[:most])


def spectral_start(found: Moment, problem: LayerProblem, heads: int, rng: np.random.Generator) -> Floats:
    """Random combinations of the scores that the moment shows, as large as a random start."""
    d = problem.width
    known = found.left[:, :heads]
    turn = np.linalg.qr(rng.standard_normal((known.shape[1], known.shape[1])))[0]
    scores = (known @ turn).T.reshape(-1, d, d) * RANDOM_SIZE
    missing = heads - scores.shape[0]
    return np.concatenate([scores, random_start(problem, missing, rng)]) + 0.1 * random_start(problem, heads, rng)
