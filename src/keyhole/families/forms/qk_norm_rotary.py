"""Normed keys and queries with rotary positions, as Qwen 3 and Gemma 3 have both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from keyhole.arrays import Array, Floats, floats, namespace
from keyhole.families.forms.base import check_factors, check_form, entry_radius, products
from keyhole.families.forms.qk_norm import Normed, with_longer_keys
from keyhole.families.forms.rotary import check_frequencies, pair_sums, rotary_products, told_pairs, turning_variance


@dataclass(frozen=True, eq=False)
class QKNormRotary(Normed):
    """k̂ᵀ·diag(key_gain)·R_Δ·diag(query_gain)·q̂, with k̂ = key·x/|key·x|, q̂ = query·g/|query·g|, R_Δ as in Rotary.

    Sizes of key and query make no difference, nor does a factor per pair of the one gain against the other.
    """

    query: Array  # (d_k, width)
    key: Array  # (d_k, width)
    query_gain: Array  # (d_k,)
    key_gain: Array  # (d_k,)
    frequencies: Array  # (d_k/2,) angle per position
    epsilon: Array | None = None  # (2,): added to squared lengths of keys and of queries

    name: ClassVar[str] = "qk-norm-rotary"
    positional: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_factors(self, even=True)
        rows = self.key.shape[0]
        check_form(self, query_gain=(rows,), key_gain=(rows,))
        check_frequencies(self)
        self.check_epsilon()

    @property
    def width(self) -> int:
        """Numbers per token."""
        return int(self.key.shape[1])

    @property
    def numbers(self) -> int:
        """Two matrices less their sizes, two gains less a factor per pair."""
        rows, width = self.key.shape
        return int(2 * rows * width - (2 if self.epsilon is None else 0) + 2 * rows - rows // 2)

    def logits_of(self, tokens: Array, queries: Array) -> Array:
        """The logits."""
        (keys, _), (asked, _) = self.units(tokens, queries)
        return rotary_products(keys * self.key_gain, asked * self.query_gain, self.frequencies)

    def radius(self, radius: QKNormRotary, tokens: Array, queries: Array, rounding: float) -> Array:
        """Errors of entries, gains and angles add in quadrature; those along a key or a query count as well."""
        (keys, shorter), (asked, shorter_asked) = self.units(tokens, queries)
        of_epsilon = (
            0.0
            if self.epsilon is None
            else self.epsilon_variance(radius, self.logits_of(tokens, queries), shorter, shorter_asked)
        )
        of_keys = _variance(radius.key, radius.key_gain, tokens, self.key, self.key_gain, keys, shorter, rounding)
        of_queries = _variance(
            radius.query, radius.query_gain, queries, self.query, self.query_gain, asked, shorter_asked, rounding
        )
        keys, asked = pair_sums((keys * self.key_gain) ** 2), pair_sums((asked * self.query_gain) ** 2)
        variance = products(of_keys, asked + of_queries) + products(keys, of_queries)
        variance = variance + turning_variance(keys, asked, self.frequencies, radius.frequencies, rounding) + of_epsilon
        return namespace(tokens).sqrt(variance)

    def token_norm(self, logit_size: float) -> float:  # noqa: ARG002
        """Any norm is as good as any other: that of tokens of N(0, 1)."""
        some = np.any(floats(self.key_gain)) and np.any(floats(self.query_gain))
        return float(self.width**0.5) if some else float("inf")

    def longest(self, worst: float, logit_radius: float) -> float:
        """Errors of logits do not grow with the norm."""
        return float("inf") if worst <= logit_radius else 1.0

    def canonical(self) -> QKNormRotary:
        """Pairs by falling angle, positive gains of one size per pair, the larger first, key and query of size one."""
        names = ("query", "key", "query_gain", "key_gain", "frequencies")
        query, key, query_gain, key_gain, frequencies = (floats(getattr(self, name)) for name in names)
        order = np.argsort(-frequencies)
        rows = np.concatenate([order, order + len(order)])
        query, key, query_gain, key_gain = (each[rows] for each in (query, key, query_gain, key_gain))
        key, key_gain = key * _signs(key_gain), np.abs(key_gain)
        query, query_gain = query * _signs(query_gain), np.abs(query_gain)
        half = len(order)
        # A quarter turn of both puts the larger gain of a key first.
        swap = key_gain[:half] < key_gain[half:]
        key, query = (_quarter_turned(each, swap) for each in (key, query))
        key_gain, query_gain = (_swapped(each, swap) for each in (key_gain, query_gain))
        sizes = [np.sqrt(pair_sums(each**2)) for each in (key_gain, query_gain)]
        silent = (sizes[0] == 0) | (sizes[1] == 0)
        ratio = np.sqrt(np.where(silent, 0.0, sizes[1]) / np.where(silent, 1.0, sizes[0]))
        key_gain = key_gain * np.tile(ratio, 2)
        query_gain = query_gain / np.tile(np.where(silent, np.inf, ratio), 2)
        pairs = np.concatenate([key[:half], key[half:]], axis=1)
        largest = pairs[np.arange(half), np.argmax(np.abs(pairs), axis=1)]
        signs = np.tile(np.where(largest < 0, -1.0, 1.0), 2)[:, None]
        key, query = (each / (float(np.linalg.norm(each)) or 1.0) * signs for each in (key, query))
        return QKNormRotary(query, key, query_gain, key_gain, frequencies[order], self.scaled_epsilon())

    def aligned_to(self, other: QKNormRotary) -> QKNormRotary:
        """The canonical form, every pair with the signs it has in the other."""
        own = self.canonical()
        if own.key.shape != other.key.shape:
            return own
        meeting = pair_sums((own.key * floats(other.key) + own.query * floats(other.query)).T)
        signs = np.tile(np.where(meeting.sum(axis=0) < 0, -1.0, 1.0), 2)[:, None]
        return replace(own, query=own.query * signs, key=own.key * signs)

    def sibling(self) -> tuple[QKNormRotary, str]:
        """Larger keys."""
        return with_longer_keys(self), "the key times two: keys are brought to length one"

    def told(self) -> dict[str, Floats]:
        """Gram matrices of keys and queries of trace one, and what every pair makes of the score."""
        own = self.canonical()
        score = told_pairs(own.key * own.key_gain[:, None], own.query * own.query_gain[:, None])
        grams = {"keys": own.key.T @ own.key, "queries": own.query.T @ own.query}
        return {**grams, "score": score, "frequencies": own.frequencies, **own.shown_epsilon}


def _variance(
    radius: Array, gain_radius: Array, x: Array, rows: Array, gain: Array, units: Array, shorter: Array, rounding: float
) -> Array:  # (…, r/2)
    """Variance of gain·rows·x/|rows·x|, pair by pair."""
    own = entry_radius(radius, x, rows, rounding) * shorter**2
    along = namespace(x).sum(own * units**2, axis=-1)[..., None] * units**2
    return pair_sums((own + along) * gain**2 + (gain_radius**2 + (rounding * gain) ** 2) * units**2)


def _signs(gain: Floats) -> Floats:  # (r,) -> (r, 1)
    return np.where(gain < 0, -1.0, 1.0)[:, None]


def _swapped(gain: Floats, swap: Array) -> Floats:  # (r,), (r/2,)
    half = len(swap)
    one, two = gain[:half], gain[half:]
    return np.concatenate([np.where(swap, two, one), np.where(swap, one, two)])


def _quarter_turned(rows: Floats, swap: Array) -> Floats:  # (r, d), (r/2,)
    half = len(swap)
    one, two, some = rows[:half], rows[half:], swap[:, None]
    return np.concatenate([np.where(some, -two, one), np.where(some, one, two)])
