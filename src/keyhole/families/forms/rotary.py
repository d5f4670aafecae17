"""Rotary positions: keys and queries turned pair by pair, by angles that grow with the position."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from keyhole.arrays import Array, Floats, Integers, floats, namespace
from keyhole.errors import UsageError
from keyhole.families.forms.base import (
    Form,
    check_factors,
    check_form,
    distances,
    entry_radius,
    products,
    typical_norm,
)

BASE = 10000.0
Complex = npt.NDArray[np.complex128]


def geometric(pairs: int, base: float = BASE) -> Floats:  # (pairs,)
    """The angles per position that most models have: base^(−j/pairs) for pair j."""
    return np.asarray(base ** (-np.arange(pairs) / pairs))


def check_frequencies(form: Form) -> None:
    """UsageError unless there is an angle for every pair."""
    check_form(form, frequencies=(form.key.shape[0] // 2,))  # type: ignore[attr-defined]


def refuse_equal_frequencies(frequencies: Floats) -> None:
    """UsageError unless the angles are different and between 0 and π: others are not told apart by positions."""
    steps = np.diff(np.sort(frequencies))
    if not (np.all(frequencies > 0) and np.all(frequencies < np.pi) and np.all(steps > 0)):
        raise UsageError("frequencies of rotary positions must be different numbers between 0 and π")


def turned(pairs: Array, angles: Array, sign: float) -> Array:  # (…, r), (…, r/2) -> (…, r)
    """Every pair (j, j + r/2) turned by its angle, or back."""
    xp, half = namespace(pairs), pairs.shape[-1] // 2
    one, two = pairs[..., :half], pairs[..., half:]
    c, s = xp.cos(angles), sign * xp.sin(angles)
    return xp.concat([one * c - two * s, one * s + two * c], axis=-1)


def rotary_products(keys: Array, queries: Array, frequencies: Array) -> Array:
    """keysᵀ·R_Δ·queries: (batch, length, r), (batch, queries, r) -> (batch, queries, length)."""
    xp, length = namespace(keys), keys.shape[1]
    # Places count back from the last one, so that the angles there are zero and those near it small.
    places = xp.arange(length, dtype=keys.dtype, device=keys.device) - (length - 1)
    angles = places[:, None] * frequencies
    return products(turned(keys, angles, 1.0), turned(queries, angles[length - queries.shape[1] :, :], 1.0))


def pair_sums(squares: Array) -> Array:  # (…, r) -> (…, r/2)
    """Sums over the two of each pair."""
    half = squares.shape[-1] // 2
    return squares[..., :half] + squares[..., half:]


def turning_variance(keys: Array, queries: Array, frequencies: Array, radius: Array, rounding: float) -> Array:
    """Variance of logits (batch, queries, length) by errors of angles; keys and queries are squares of pairs."""
    own = (radius + rounding * abs(frequencies)) ** 2
    return products(keys, queries * own) * distances(keys, queries) ** 2


def as_complex(pairs: Floats) -> Complex:  # (r, d) -> (r/2, d)
    """Pairs of rows as one complex row each."""
    half = len(pairs) // 2
    return np.asarray(pairs[:half] + 1j * pairs[half:])


def as_pairs(rows: Complex) -> Floats:  # (r/2, d) -> (r, d)
    """Complex rows as pairs of real ones."""
    return np.concatenate([rows.real, rows.imag])


@dataclass(frozen=True, eq=False)
class Rotary(Form):
    """(key·x + key_bias)ᵀ·R_Δ·(query·g + query_bias), R_Δ turning pair (j, j + d_k/2) by Δ·frequencies[j].

    x stands Δ tokens before g. The pairs are those of Llama, half a key apart; those of GPT-J, beside each other, are
    the same form with rows in another order. A complex factor per pair, of its key against its query, makes no
    difference. Pairs of angle zero do not turn, as those that partial rotary positions leave alone: of them the product
    of keys and queries is known, and their key bias adds the same to the logits of all tokens.
    """

    query: Array  # (d_k, width)
    key: Array  # (d_k, width)
    frequencies: Array  # (d_k/2,) angle per position
    query_bias: Array | None = None  # (d_k,)
    key_bias: Array | None = None  # (d_k,)

    name: ClassVar[str] = "rotary"
    positional: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_factors(self, even=True)
        check_frequencies(self)
        biases = {name: (self.key.shape[0],) for name in ("query_bias", "key_bias") if getattr(self, name) is not None}
        check_form(self, **biases)

    @property
    def width(self) -> int:
        """Numbers per token."""
        return int(self.key.shape[1])

    @property
    def numbers(self) -> int:
        """Two matrices less a complex factor per pair that turns, a matrix of the others, and biases; angles are known.

        The key bias of pairs that do not turn is left out: a softmax does not show it.
        """
        (rows, width), still = self.key.shape, len(_still_rows(floats(self.frequencies)))
        biases = (0 if self.query_bias is None else rows) + (0 if self.key_bias is None else rows - still)
        return int(2 * rows * width - (rows - still) - still**2) + biases

    def keys(self, tokens: Array) -> Array:  # (…, width) -> (…, d_k)
        """Keys of tokens, before they are turned."""
        keys = tokens @ self.key.T
        return keys if self.key_bias is None else keys + self.key_bias

    def queries(self, tokens: Array) -> Array:  # (…, width) -> (…, d_k)
        """Queries of tokens, before they are turned."""
        queries = tokens @ self.query.T
        return queries if self.query_bias is None else queries + self.query_bias

    def logits_of(self, tokens: Array, queries: Array) -> Array:
        """The logits."""
        return rotary_products(self.keys(tokens), self.queries(queries), self.frequencies)

    def radius(self, radius: Rotary, tokens: Array, queries: Array, rounding: float) -> Array:
        """Errors of entries and angles add in quadrature."""
        keys, turned_by = pair_sums(self.keys(tokens) ** 2), pair_sums(self.queries(queries) ** 2)
        of_keys = entry_radius(radius.key, tokens, self.key, rounding)
        of_queries = entry_radius(radius.query, queries, self.query, rounding)
        if self.key_bias is not None:
            of_keys = of_keys + (rounding * self.key_bias) ** 2
        if self.query_bias is not None:
            of_queries = of_queries + (rounding * self.query_bias) ** 2
        of_keys = pair_sums(of_keys if radius.key_bias is None else of_keys + radius.key_bias**2)
        of_queries = pair_sums(of_queries if radius.query_bias is None else of_queries + radius.query_bias**2)
        variance = products(of_keys, turned_by + of_queries) + products(keys, of_queries)
        variance = variance + turning_variance(keys, turned_by, self.frequencies, radius.frequencies, rounding)
        return namespace(tokens).sqrt(variance)

    def token_norm(self, logit_size: float) -> float:
        """The norm at which random tokens have logits of about `logit_size`; inf when none has any."""
        key, query = pair_sums(floats(self.key).T ** 2), pair_sums(floats(self.query).T ** 2)
        key, query = key.sum(axis=0) / self.width, query.sum(axis=0) / self.width
        bias = np.zeros_like(query) if self.query_bias is None else pair_sums(floats(self.query_bias) ** 2)
        # Logits have the variance square·n⁴ + line·n² at the norm n, less what is the same for all tokens.
        square, line = float(np.sum(key * query)) / 2, float(np.sum(key * bias)) / 2
        if not square > 0:
            return logit_size / line**0.5 if line > 0 else float("inf")
        if not line > 0:
            return typical_norm(square**0.5, logit_size)
        return float((2 * logit_size**2 / (line + (line**2 + 4 * square * logit_size**2) ** 0.5)) ** 0.5)

    def canonical(self) -> Rotary:
        """Pairs by falling angle, key and query of one size, the largest entry of the key's real and positive."""
        (key, query), frequencies = self._whole(), floats(self.frequencies)
        order = np.argsort(-frequencies)
        keys, queries = as_complex(key)[order], as_complex(query)[order]
        own = keys[:, : self.width]
        largest = own[np.arange(len(own)), np.argmax(np.abs(own), axis=1)]
        phases = np.conj(largest) / np.where(largest == 0, 1.0, np.abs(largest))
        key, query = _factored(keys, queries, np.where(largest == 0, 1.0, phases))
        rows = _still_rows(frequencies[order])
        key[rows], query[rows] = _balanced(key[rows], query[rows])
        return self._of_whole(key, query, frequencies[order])

    def aligned_to(self, other: Rotary) -> Rotary:
        """Sizes as in the canonical form, phases as in the other."""
        own = self.canonical()
        if own.key.shape != other.key.shape:
            return own
        (key, query), (other_key, other_query) = own._whole(), other._whole()
        keys, queries = as_complex(key), as_complex(query)
        meeting = np.sum(np.conj(keys) * as_complex(other_key), axis=1)
        meeting = meeting + np.sum(np.conj(queries) * as_complex(other_query), axis=1)
        rows = _still_rows(floats(own.frequencies))
        turn = other_key[rows] @ np.linalg.pinv(key[rows])
        still = turn @ key[rows], np.linalg.pinv(turn).T @ query[rows]
        key, query = _factored(keys, queries, np.exp(1j * np.angle(meeting)))
        key[rows], query[rows] = still
        return self._of_whole(key, query, own.frequencies)

    def sibling(self) -> tuple[Rotary, str]:
        """Larger keys and smaller queries."""
        biases = {
            "query_bias": None if self.query_bias is None else self.query_bias / 2,
            "key_bias": None if self.key_bias is None else 2 * self.key_bias,
        }
        same = Rotary(self.query / 2, 2 * self.key, self.frequencies, **biases)
        return same, "the key times two, the query over two: only their product makes logits"

    def without_shift(self) -> Rotary:
        """The form without the key bias of pairs that do not turn."""
        still = _still_rows(floats(self.frequencies))
        if self.key_bias is None or not still.size:
            return self
        bias = floats(self.key_bias).copy()
        bias[still] = 0.0
        return replace(self, key_bias=bias)

    def told(self) -> dict[str, Floats]:
        """The product of key and query of every pair; of those that do not turn together, in place of the first."""
        own = self.canonical()
        key, query = own._whole()
        score, frequencies = told_pairs(key, query), floats(own.frequencies)
        still, rows = np.flatnonzero(frequencies == 0), _still_rows(frequencies)
        if still.size:
            score[still] = 0.0
            score[still[0], :, : query.shape[1]] = key[rows].T @ query[rows]
        return {"score": score, "frequencies": frequencies}

    def _whole(self) -> tuple[Floats, Floats]:  # twice (d_k, width + 1)
        """Key and query with their biases as a last column: tokens have a last entry of one."""
        pairs = ((self.key, self.key_bias), (self.query, self.query_bias))
        key, query = (
            np.column_stack([floats(each), np.zeros(each.shape[0]) if bias is None else floats(bias)])
            for each, bias in pairs
        )
        return key, query

    def _of_whole(self, key: Floats, query: Floats, frequencies: Floats) -> Rotary:
        """The form of such matrices, with the biases that this one has."""
        return Rotary(
            query[:, :-1],
            key[:, :-1],
            frequencies,
            None if self.query_bias is None else query[:, -1],
            None if self.key_bias is None else key[:, -1],
        )


def told_pairs(key: Floats, query: Floats) -> Floats:  # (r, d) -> (r/2, d, 2d)
    """Products of keys and queries, a complex matrix per pair."""
    products = np.conj(as_complex(key))[:, :, None] * as_complex(query)[:, None, :]
    return np.concatenate([products.real, products.imag], axis=2)


def _still_rows(frequencies: Floats) -> Integers:  # (n,)
    """Rows of keys and queries that are not turned."""
    still = np.flatnonzero(frequencies == 0)
    return np.concatenate([still, still + frequencies.size])


def _balanced(key: Floats, query: Floats) -> tuple[Floats, Floats]:  # twice (n, width)
    """Rows of the same product: orthogonal, of one size, the largest entry of each row of the key positive."""
    if not len(key):
        return key, query
    (one, upper), (two, lower) = np.linalg.qr(key.T), np.linalg.qr(query.T)
    left, sizes, right = np.linalg.svd(upper @ lower.T)
    key, query = (one @ left * sizes**0.5).T, (two @ right.T * sizes**0.5).T
    signs = np.sign(key[np.arange(len(key)), np.argmax(np.abs(key), axis=1)])[:, None]
    return key * signs, query * signs


def _factored(keys: Complex, queries: Complex, phases: Complex) -> tuple[Floats, Floats]:
    """Key and query of one size per pair, both turned by a phase."""
    sizes = [np.linalg.norm(each, axis=1) for each in (keys, queries)]
    nothing = (sizes[0] == 0) | (sizes[1] == 0)
    ratio = np.sqrt(np.where(nothing, 0.0, sizes[1]) / np.where(nothing, 1.0, sizes[0]))
    inverse = np.sqrt(np.where(nothing, 0.0, sizes[0]) / np.where(nothing, 1.0, sizes[1]))
    return as_pairs(keys * (phases * ratio)[:, None]), as_pairs(queries * (phases * inverse)[:, None])
