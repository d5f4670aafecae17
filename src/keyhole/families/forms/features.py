"""Kernels of positive features: a token weighs Σ φ(key·x)·φ(query·g)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from scipy.optimize import linear_sum_assignment

from keyhole.arrays import Array, floats, namespace
from keyhole.families.forms.base import Form, check_factors, entry_radius, products


@dataclass(frozen=True, eq=False)
class _Features(Form):
    """Logits log Σ_r φ(key_r·x)·φ(query_r·g), whatever the order of the features."""

    query: Array  # (d_k, width)
    key: Array  # (d_k, width)

    def __post_init__(self) -> None:
        check_factors(self)

    @property
    def width(self) -> int:
        """Numbers per token."""
        return int(self.key.shape[1])

    def _moved(self, radius: Self, tokens: Array, queries: Array, rounding: float) -> tuple[Array, Array]:
        """Variances of what the features are of: (batch, length, r), (batch, queries, r)."""
        of_keys = entry_radius(radius.key, tokens, self.key, rounding)
        return of_keys, entry_radius(radius.query, queries, self.query, rounding)

    def _order_of(self, other: Self) -> Array:
        """The own features in the order of another's."""
        mine = np.concatenate([floats(self.key), floats(self.query)], axis=1)
        theirs = np.concatenate([floats(other.key), floats(other.query)], axis=1)
        costs = np.sum(mine**2, axis=1)[None, :] - 2 * theirs @ mine.T
        return linear_sum_assignment(costs)[1]

    def _reordered(self, order: Array) -> Self:
        return type(self)(floats(self.query)[order], floats(self.key)[order])

    def sibling(self) -> tuple[Self, str] | None:
        """The features in another order."""
        if self.key.shape[0] == 1:
            return None
        other = np.roll(np.arange(self.key.shape[0]), 1)
        return self._reordered(other), "the features in another order: they are added up"

    def aligned_to(self, other: Self) -> Self:
        """The canonical form with its features in the order of the other's."""
        own = self.canonical()
        return own if own.key.shape != other.key.shape else own._reordered(own._order_of(other))


class EluFeatures(_Features):
    """Features φ = elu + 1, as linear attention has them: logits log Σ_r φ(key_r·x)·φ(query_r·g)."""

    name: ClassVar[str] = "elu-features"

    @property
    def numbers(self) -> int:
        """Two matrices."""
        rows, width = self.key.shape
        return int(2 * rows * width)

    def logits_of(self, tokens: Array, queries: Array) -> Array:
        """The logits; a token of which all features are dead has the least mass that is no zero."""
        xp = namespace(tokens)
        masses = products(_elu(tokens @ self.key.T)[0], _elu(queries @ self.query.T)[0])
        return xp.log(xp.maximum(masses, xp.full_like(masses, float(xp.finfo(masses.dtype).smallest_normal))))

    def radius(self, radius: Self, tokens: Array, queries: Array, rounding: float) -> Array:
        """Errors of entries add in quadrature."""
        xp = namespace(tokens)
        (keys, steep), (asked, steep_asked) = _elu(tokens @ self.key.T), _elu(queries @ self.query.T)
        of_keys, of_queries = self._moved(radius, tokens, queries, rounding)
        total = products(keys, asked)
        variance = products(of_keys * steep**2, asked**2) + products(keys**2, of_queries * steep_asked**2)
        return xp.sqrt(variance) / total + rounding

    def token_norm(self, logit_size: float) -> float:
        """The norm at which features are of about `logit_size`; logits grow with its logarithm."""
        strength = float(np.linalg.norm(floats(self.key))) / (self.key.shape[0] * self.width) ** 0.5
        return logit_size / strength if strength > 0 else float("inf")

    def longest(self, worst: float, logit_radius: float) -> float:
        """Errors of logits do not grow with the norm beyond the size of one."""
        return float("inf") if worst <= logit_radius / 2**10 else 1.0

    def canonical(self) -> Self:
        """The largest key first."""
        return self._reordered(np.argsort(-np.linalg.norm(floats(self.key), axis=1), kind="stable"))


class ExpFeatures(_Features):
    """Features φ = exp: logits log Σ_r exp(key_r·x + query_r·g). What is added to all queries makes no difference."""

    name: ClassVar[str] = "exp-features"

    @property
    def numbers(self) -> int:
        """Two matrices less what is added to all rows of the query."""
        rows, width = self.key.shape
        return int(2 * rows * width - width)

    def _energies(self, tokens: Array, queries: Array) -> Array:  # (batch, queries, length, r)
        return (tokens @ self.key.T)[:, None, :, :] + (queries @ self.query.T)[:, :, None, :]

    def logits_of(self, tokens: Array, queries: Array) -> Array:
        """The logits."""
        xp, energies = namespace(tokens), self._energies(tokens, queries)
        top = xp.max(energies, axis=-1, keepdims=True)
        return xp.log(xp.sum(xp.exp(energies - top), axis=-1)) + top[..., 0]

    def radius(self, radius: Self, tokens: Array, queries: Array, rounding: float) -> Array:
        """Errors of entries add in quadrature, weighed by the share of each feature."""
        xp, energies = namespace(tokens), self._energies(tokens, queries)
        shares = xp.exp(energies - xp.max(energies, axis=-1, keepdims=True))
        shares = shares / xp.sum(shares, axis=-1, keepdims=True)
        of_keys, of_queries = self._moved(radius, tokens, queries, rounding)
        return xp.sqrt(xp.sum(shares**2 * (of_keys[:, None, :, :] + of_queries[:, :, None, :]), axis=-1))

    def token_norm(self, logit_size: float) -> float:
        """The norm at which random tokens have logits of about `logit_size`; inf when none has any."""
        strength = float(np.linalg.norm(floats(self.key))) / (self.key.shape[0] * self.width) ** 0.5
        return logit_size / strength if strength > 0 else float("inf")

    def longest(self, worst: float, logit_radius: float) -> float:
        """Logits grow with the norm."""
        return logit_radius / worst

    def canonical(self) -> Self:
        """Queries of sum zero, the largest key first."""
        query, key = floats(self.query), floats(self.key)
        order = np.argsort(-np.linalg.norm(key, axis=1), kind="stable")
        return type(self)((query - np.mean(query, axis=0))[order], key[order])


def _elu(x: Array) -> tuple[Array, Array]:
    """Elu + 1 and its slope."""
    xp = namespace(x)
    low = xp.exp(xp.minimum(x, xp.zeros_like(x)))
    return xp.maximum(x, xp.zeros_like(x)) + low, xp.where(x > 0, xp.ones_like(x), low)
