"""Sums of gated rows: y_i = Σ_h σ(c_i + u_i·k_h)·(u_i·v_h), with gates k_h and values v_h that are not known.

The query [m×(g + u); n×g] of H softmax heads answers g·v̄ + Σ_h σ(ln(m/n) + u·k_h)·(u·v_h) with k_h = W_h·g + c_h: for
one last token g the gates are free vectors, whatever the score matrices are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.special import expit

from keyhole.arrays import Booleans, Floats, Integers


@dataclass(frozen=True)
class GatedQueries:
    """Queries of one last token, and what they answered without what is known of it."""

    rows: Floats  # (n, width) u
    offsets: Floats  # (n,) c
    answers: Floats  # (n, outputs)
    bases: Floats | None = None  # (n, width) tokens whose plain values Σ_h base·v_h the answers have on top; None: none
    centred: bool = False  # whether answers are differences to their mean, which says nothing then

    @property
    def size(self) -> float:
        """Root mean square of the answers."""
        return float(np.sqrt(np.mean(self.answers**2))) if self.answers.size else 0.0

    def without_mean(self) -> GatedQueries:
        """The same where a constant that all answers share is not known."""
        return replace(self, answers=self.answers - np.mean(self.answers, axis=0), centred=True)

    def take(self, index: Integers | Booleans | slice) -> GatedQueries:
        """Some of the queries."""
        bases = None if self.bases is None else self.bases[index]
        return replace(
            self, rows=self.rows[index], offsets=self.offsets[index], answers=self.answers[index], bases=bases
        )

    def beside(self, more: GatedQueries) -> GatedQueries:
        """These queries and some more of the same kind."""
        both = None if self.bases is None or more.bases is None else np.concatenate([self.bases, more.bases])
        pairs = ((self.rows, more.rows), (self.offsets, more.offsets), (self.answers, more.answers))
        rows, offsets, answers = (np.concatenate(pair) for pair in pairs)
        return GatedQueries(rows, offsets, answers, both, self.centred)


@dataclass(frozen=True)
class GatedSum:
    """Heads as gates and values."""

    gates: Floats  # (..., heads, width) k
    values: Floats  # (..., heads, width, outputs) v

    @property
    def heads(self) -> int:
        """How many there are."""
        return int(self.gates.shape[-2])

    def predict(self, queries: GatedQueries) -> Floats:  # -> (..., n, outputs)
        """What the heads answer."""
        columns = value_columns(queries, gate_weights(queries, self.gates))
        return np.asarray(columns @ self.values.reshape(*columns.shape[:-2], columns.shape[-1], -1))

    def rms(self, queries: GatedQueries) -> float:
        """Root mean square of what one sum of heads leaves of the answers."""
        return float(np.sqrt(np.mean((self.predict(queries) - queries.answers) ** 2)))


def gate_weights(queries: GatedQueries, gates: Floats) -> Floats:  # (..., heads, width) -> (..., n, heads)
    """σ(c + u·k)."""
    logits = np.asarray(queries.rows @ np.swapaxes(gates, -1, -2)) + queries.offsets[:, None]
    return np.asarray(expit(logits))


def value_columns(queries: GatedQueries, weights: Floats) -> Floats:  # (..., n, heads) -> (..., n, heads · width)
    """By how much an answer moves with each entry of the values."""
    columns = weights[..., None] * queries.rows[:, None, :]
    if queries.bases is not None:
        columns = columns + queries.bases[:, None, :]
    return _centred(queries, columns.reshape(*columns.shape[:-2], -1))


def gate_columns(
    queries: GatedQueries,
    weights: Floats,  # (..., n, heads)
    values: Floats,  # (..., heads, width, outputs)
) -> Floats:  # -> (..., outputs, n, heads · width)
    """By how much each output moves with each entry of the gates."""
    shares = np.einsum("nd,...hdp->...pnh", queries.rows, values)
    slopes = (weights * (1 - weights))[..., None, :, :] * shares
    columns = slopes[..., None] * queries.rows[:, None, :]
    return _centred(queries, columns.reshape(*columns.shape[:-2], -1))


def _centred(queries: GatedQueries, columns: Floats) -> Floats:  # (..., n, unknowns)
    """Columns as answers are: with their mean over the queries, or without."""
    return np.asarray(columns - np.mean(columns, axis=-2, keepdims=True) if queries.centred else columns)
