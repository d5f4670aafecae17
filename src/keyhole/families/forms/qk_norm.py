"""Normed keys and queries, as Qwen 3 and Gemma 3 have them: only directions of tokens matter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from keyhole.arrays import Array, Floats, floats, namespace
from keyhole.errors import UsageError
from keyhole.families.forms.base import Form, check_factors, check_form, entry_radius, products, upright


def unit(rows: Array, epsilon: Array | float = 0.0) -> tuple[Array, Array]:  # (…, r), () -> (…, r), (…, 1)
    """Vectors over √(squared length + epsilon), and what they were multiplied by; a zero vector stays as it is."""
    xp, root = namespace(rows), epsilon**0.5
    largest = xp.max(abs(rows), axis=-1, keepdims=True)  # taken out first, so that no square overflows or vanishes
    largest = xp.maximum(largest, xp.zeros_like(largest) + root)
    there = largest > 0
    largest = xp.where(there, largest, xp.ones_like(largest))
    scaled = rows / largest
    sizes = xp.sqrt(xp.sum(scaled**2, axis=-1, keepdims=True) + (root / largest) ** 2)
    sizes = xp.where(there, sizes, xp.ones_like(sizes))
    return scaled / sizes, xp.where(there, 1 / (largest * sizes), xp.zeros_like(largest))


class Normed(Form):
    """Forms of normed keys and queries, to whose squared lengths modules add an epsilon, or nothing."""

    query: Array  # (d_k, width)
    key: Array  # (d_k, width)
    epsilon: Array | None  # (2,): what is added to squared lengths, of keys and of queries

    def check_epsilon(self) -> None:
        """UsageError for an epsilon of another shape, or below zero."""
        if self.epsilon is None:
            return
        check_form(self, epsilon=(2,))
        if not np.all(floats(self.epsilon) >= 0):
            raise UsageError(f"{type(self).__name__}.epsilon must not be below zero, of keys or of queries")

    def units(self, tokens: Array, queries: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Keys and queries of length one, or less by their epsilon, and what they were multiplied by."""
        added = (0.0, 0.0) if self.epsilon is None else (self.epsilon[0], self.epsilon[1])
        return unit(tokens @ self.key.T, added[0]), unit(queries @ self.query.T, added[1])

    def epsilon_variance(self, radius: Self, logits: Array, shorter: Array, shorter_asked: Array) -> Array | float:
        """Variance of logits by that of epsilon: (batch, queries, length), (batch, length, 1), (batch, queries, 1)."""
        if radius.epsilon is None:
            return 0.0
        of_keys = namespace(logits).matrix_transpose(shorter**2 * radius.epsilon[0])
        return logits**2 / 4 * (of_keys**2 + (shorter_asked**2 * radius.epsilon[1]) ** 2)

    @property
    def shown_epsilon(self) -> dict[str, Floats]:
        """The epsilon over the squared sizes of key and query, which is all of it that logits tell."""
        if self.epsilon is None:
            return {"epsilon": np.zeros(2)}
        sizes = np.array([float(np.sum(floats(each) ** 2)) or 1.0 for each in (self.key, self.query)])
        return {"epsilon": floats(self.epsilon) / sizes}

    def scaled_epsilon(self) -> Floats | None:
        """The epsilon of key and query of size one."""
        return None if self.epsilon is None else self.shown_epsilon["epsilon"]


@dataclass(frozen=True, eq=False)
class QKNorm(Normed):
    """(key·x)ᵀ·diag(gain)·(query·g) / (|key·x|·|query·g|); a token of which the key is zero has logit zero.

    With an epsilon lengths are √(|key·x|² + epsilon[0]) and √(|query·g|² + epsilon[1]).

    The gain holds both learned gains, the factor that makes an RMS norm of a length, and the scale of scores. The sizes
    of key and query make no difference; gains are positive and fall.
    """

    query: Array  # (d_k, width)
    key: Array  # (d_k, width)
    gain: Array  # (d_k,)
    epsilon: Array | None = None  # (2,)

    name: ClassVar[str] = "qk-norm"

    def __post_init__(self) -> None:
        check_factors(self)
        check_form(self, gain=(self.key.shape[0],))
        self.check_epsilon()

    @property
    def width(self) -> int:
        """Numbers per token."""
        return int(self.key.shape[1])

    @property
    def numbers(self) -> int:
        """Two matrices less their sizes, and gains; of more rows than columns, what their products tell."""
        (rows, width), sizes = self.key.shape, 2 if self.epsilon is None else 0
        return int(2 * rows * width + rows - sizes) if rows <= width else int(2 * width**2 + width - sizes)

    def logits_of(self, tokens: Array, queries: Array) -> Array:
        """The logits."""
        (keys, _), (asked, _) = self.units(tokens, queries)
        return products(keys, asked * self.gain)

    def radius(self, radius: QKNorm, tokens: Array, queries: Array, rounding: float) -> Array:
        """Errors of entries add in quadrature; along a key or a query they change nothing."""
        xp = namespace(tokens)
        (keys, shorter), (asked, shorter_asked) = self.units(tokens, queries)
        of_keys = entry_radius(radius.key * 1.0, tokens, self.key, rounding) * shorter**2
        of_queries = entry_radius(radius.query * 1.0, queries, self.query, rounding) * shorter_asked**2
        logits = products(keys, asked * self.gain)
        variance = products(keys**2, asked**2 * (radius.gain**2 + (rounding * self.gain) ** 2))
        variance = variance + across(of_keys, keys, asked * self.gain, logits)
        variance = variance + self.epsilon_variance(radius, logits, shorter, shorter_asked)
        turned = xp.matrix_transpose(logits)
        return xp.sqrt(variance + xp.matrix_transpose(across(of_queries, asked, keys * self.gain, turned)))

    def token_norm(self, logit_size: float) -> float:  # noqa: ARG002
        """Any norm is as good as any other: that of tokens of N(0, 1)."""
        return float(self.width**0.5) if np.any(floats(self.gain)) else float("inf")

    def longest(self, worst: float, logit_radius: float) -> float:
        """Errors of logits do not grow with the norm."""
        return float("inf") if worst <= logit_radius else 1.0

    def canonical(self) -> QKNorm:
        """Key and query of size one, gains positive and falling, the largest entry of every row of the key positive."""
        key, query, gain = (floats(each) for each in (self.key, self.query, self.gain))
        if key.shape[0] > key.shape[1]:
            key, query, gain = _square(key, query, gain)
        order = np.argsort(-np.abs(gain), kind="stable")
        key, query, gain = key[order], (query * np.where(gain < 0, -1.0, 1.0)[:, None])[order], np.abs(gain[order])
        key, query = (each / (float(np.linalg.norm(each)) or 1.0) for each in (key, query))
        key, query = upright(key, query)
        return QKNorm(query, key, gain, self.scaled_epsilon())

    def aligned_to(self, other: QKNorm) -> QKNorm:
        """The canonical form, every row with the sign it has in the other."""
        own = self.canonical()
        if own.key.shape != other.key.shape:
            return own
        signs = np.sum(own.key * floats(other.key), axis=1) + np.sum(own.query * floats(other.query), axis=1)
        signs = np.where(signs < 0, -1.0, 1.0)[:, None]
        return QKNorm(own.query * signs, own.key * signs, own.gain, own.epsilon)

    def sibling(self) -> tuple[QKNorm, str]:
        """Larger keys."""
        return with_longer_keys(self), "the key times two: keys are brought to length one"

    def told(self) -> dict[str, Floats]:
        """Gram matrices of keys and queries of trace one, and what they make of the score."""
        own = self.canonical()
        meeting = own.key.T @ (own.gain[:, None] * own.query)
        return {"keys": own.key.T @ own.key, "score": meeting, "queries": own.query.T @ own.query, **own.shown_epsilon}


def with_longer_keys(form: Any) -> Any:
    """A normed form with keys of twice the size, and an epsilon that goes with them."""
    epsilon = None if form.epsilon is None else form.epsilon * np.array([4.0, 1.0])
    return replace(form, key=2 * form.key, epsilon=epsilon)


def across(variance: Array, keys: Array, asked: Array, logits: Array) -> Array:
    """Variance of logits keysᵀ·asked by errors of keys, which stay of length one.

    (batch, length, r) twice, (batch, queries, r), (batch, queries, length) -> (batch, queries, length).
    """
    xp = namespace(keys)
    along = xp.sum(variance * keys**2, axis=-1)[:, None, :]
    found = products(variance, asked**2) - 2 * logits * products(variance * keys, asked) + logits**2 * along
    return xp.maximum(found, xp.zeros_like(found))


def _square(key: Floats, query: Floats, gain: Floats) -> tuple[Floats, Floats, Floats]:
    """Key and query of as many rows as columns that make the same logits."""
    (left, one), (right, two) = np.linalg.qr(key), np.linalg.qr(query)
    turn, gains, back = np.linalg.svd(left.T @ (gain[:, None] * right))
    return turn.T @ one, back @ two, gains


def of_products(keys: Floats, meeting: Floats, queries: Floats) -> QKNorm:
    """The form of logits xᵀ·meeting·g/√(xᵀ·keys·x·gᵀ·queries·g): (d, d) each, the outer two positive definite."""
    left, right = np.linalg.cholesky(keys), np.linalg.cholesky(queries)
    core = np.linalg.solve(right, np.linalg.solve(left, meeting).T).T
    turn, gains, back = np.linalg.svd(core)
    return QKNorm(back @ right.T, turn.T @ left.T, gains).canonical()
