"""Rotary positions: keys and queries turned pair by pair, by angles that grow with the position."""

from __future__ import annotations

from dataclasses import dataclass
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
    """xᵀ·keyᵀ·R_Δ·query·g, R_Δ turning pair (j, j + d_k/2) by Δ·frequencies[j] where x stands Δ tokens before g.

    The pairs are those of Llama, half a key apart; those of GPT-J, beside each other, are the same form with rows in
    another order. A complex factor per pair, of its key against its query, makes no difference. Pairs of angle zero do
    not turn, as those that partial rotary positions leave alone: of them the product of keys and queries is known.
    """

    query: Array  # (d_k, width)
    key: Array  # (d_k, width)
    frequencies: Array  # (d_k/2,) angle per position

    name: ClassVar[str] = "rotary"
    positional: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_factors(self, even=True)
        check_frequencies(self)

    @property
    def width(self) -> int:
        """Numbers per token."""
        return int(self.key.shape[1])

    @property
    def numbers(self) -> int:
        """Two matrices less a complex factor per pair that turns, and a matrix of the others; the angles are known."""
        (rows, width), still = self.key.shape, len(_still_rows(floats(self.frequencies)))
        return int(2 * rows * width - (rows - still) - still**2)

    def logits_of(self, tokens: Array, queries: Array) -> Array:
        """The logits."""
        return rotary_products(tokens @ self.key.T, queries @ self.query.T, self.frequencies)

    def radius(self, radius: Rotary, tokens: Array, queries: Array, rounding: float) -> Array:
        """Errors of entries and angles add in quadrature."""
        keys, turned_by = pair_sums((tokens @ self.key.T) ** 2), pair_sums((queries @ self.query.T) ** 2)
        of_keys = pair_sums(entry_radius(radius.key, tokens, self.key, rounding))
        of_queries = pair_sums(entry_radius(radius.query, queries, self.query, rounding))
        variance = products(of_keys, turned_by + of_queries) + products(keys, of_queries)
        variance = variance + turning_variance(keys, turned_by, self.frequencies, radius.frequencies, rounding)
        return namespace(tokens).sqrt(variance)

    def token_norm(self, logit_size: float) -> float:
        """The norm at which random tokens have logits of about `logit_size`; inf when none has any."""
        key, query = pair_sums(floats(self.key).T ** 2), pair_sums(floats(self.query).T ** 2)
        strength = float(np.sum(key.sum(axis=0) * query.sum(axis=0)) / 2) ** 0.5 / self.width
        return typical_norm(strength, logit_size)

    def canonical(self) -> Rotary:
        """Pairs by falling angle, key and query of one size, the largest entry of the key's real and positive."""
        key, query, frequencies = (floats(each) for each in (self.key, self.query, self.frequencies))
        order = np.argsort(-frequencies)
        keys, queries = as_complex(key)[order], as_complex(query)[order]
        largest = keys[np.arange(len(keys)), np.argmax(np.abs(keys), axis=1)]
        phases = np.conj(largest) / np.where(largest == 0, 1.0, np.abs(largest))
        made = _factored(keys, queries, np.where(largest == 0, 1.0, phases), frequencies[order])
        return _with_still(made, *_balanced(*_still_of(made)))

    def aligned_to(self, other: Rotary) -> Rotary:
        """Sizes as in the canonical form, phases as in the other."""
        own = self.canonical()
        if own.key.shape != other.key.shape:
            return own
        keys, queries = as_complex(own.key), as_complex(own.query)
        meeting = np.sum(np.conj(keys) * as_complex(floats(other.key)), axis=1)
        meeting = meeting + np.sum(np.conj(queries) * as_complex(floats(other.query)), axis=1)
        made = _factored(keys, queries, np.exp(1j * np.angle(meeting)), own.frequencies)
        key, query = _still_of(own)
        turn = floats(_still_of(other)[0]) @ np.linalg.pinv(key)
        return _with_still(made, turn @ key, np.linalg.pinv(turn).T @ query)

    def sibling(self) -> tuple[Rotary, str]:
        """Larger keys and smaller queries."""
        same = Rotary(self.query / 2, 2 * self.key, self.frequencies)
        return same, "the key times two, the query over two: only their product makes logits"

    def told(self) -> dict[str, Floats]:
        """The product of key and query of every pair; of those that do not turn together, in place of the first."""
        own = self.canonical()
        score, (key, query) = told_pairs(own.key, own.query), _still_of(own)
        still = np.flatnonzero(floats(own.frequencies) == 0)
        if still.size:
            score[still] = 0.0
            score[still[0], :, : own.width] = key.T @ query
        return {"score": score, "frequencies": floats(own.frequencies)}


def told_pairs(key: Floats, query: Floats) -> Floats:  # (r, d) -> (r/2, d, 2d)
    """Products of keys and queries, a complex matrix per pair."""
    products = np.conj(as_complex(key))[:, :, None] * as_complex(query)[:, None, :]
    return np.concatenate([products.real, products.imag], axis=2)


def _still_rows(frequencies: Floats) -> Integers:  # (n,)
    """Rows of keys and queries that are not turned."""
    still = np.flatnonzero(frequencies == 0)
    return np.concatenate([still, still + frequencies.size])


def _still_of(form: Rotary) -> tuple[Floats, Floats]:  # twice (n, width)
    """The rows of key and query that are not turned."""
    rows = _still_rows(floats(form.frequencies))
    return floats(form.key)[rows], floats(form.query)[rows]


def _with_still(form: Rotary, key: Floats, query: Floats) -> Rotary:
    """The form with other rows that are not turned."""
    rows, keys, queries = _still_rows(floats(form.frequencies)), floats(form.key).copy(), floats(form.query).copy()
    keys[rows], queries[rows] = key, query
    return Rotary(queries, keys, form.frequencies)


def _balanced(key: Floats, query: Floats) -> tuple[Floats, Floats]:  # twice (n, width)
    """Rows of the same product: orthogonal, of one size, the largest entry of each row of the key positive."""
    if not len(key):
        return key, query
    (one, upper), (two, lower) = np.linalg.qr(key.T), np.linalg.qr(query.T)
    left, sizes, right = np.linalg.svd(upper @ lower.T)
    key, query = (one @ left * sizes**0.5).T, (two @ right.T * sizes**0.5).T
    signs = np.sign(key[np.arange(len(key)), np.argmax(np.abs(key), axis=1)])[:, None]
    return key * signs, query * signs


def _factored(keys: Complex, queries: Complex, phases: Complex, frequencies: Floats) -> Rotary:
    """Key and query of one size per pair, both turned by a phase."""
    sizes = [np.linalg.norm(each, axis=1) for each in (keys, queries)]
    nothing = (sizes[0] == 0) | (sizes[1] == 0)
    ratio = np.sqrt(np.where(nothing, 0.0, sizes[1]) / np.where(nothing, 1.0, sizes[0]))
    inverse = np.sqrt(np.where(nothing, 0.0, sizes[0]) / np.where(nothing, 1.0, sizes[1]))
    return Rotary(
        as_pairs(queries * (phases * inverse)[:, None]), as_pairs(keys * (phases * ratio)[:, None]), frequencies
    )
