"""What every score form is: named arrays, logits, their radius, and what no logit tells of the arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields
from typing import ClassVar, Self

import numpy as np

from keyhole.arrays import Array, Floats, floats, namespace
from keyhole.errors import UsageError


class Form(ABC):
    """The logit of token x for query g, by arrays that a subclass, a frozen dataclass, declares.

    Queries are (batch, width), one per sequence, which is its last token, or (batch, queries, width), which are then
    its last tokens in their order.
    """

    name: ClassVar[str]
    positional: ClassVar[bool] = False  # whether logits depend on the distance of token and query

    @property
    @abstractmethod
    def width(self) -> int:
        """Numbers per token."""

    @property
    @abstractmethod
    def numbers(self) -> int:
        """How many numbers logits tell, arrays being as general as their shapes allow."""

    @abstractmethod
    def logits_of(self, tokens: Array, queries: Array) -> Array:
        """The logits (batch, queries, length) of tokens for queries (batch, queries, width)."""

    @abstractmethod
    def radius(self, radius: Self, tokens: Array, queries: Array, rounding: float) -> Array:
        """First-order bound on the error of each logit, (batch, queries, length), from entrywise radii."""

    @abstractmethod
    def token_norm(self, logit_size: float) -> float:
        """The norm at which random tokens have logits of about `logit_size`; inf when none has any."""

    @abstractmethod
    def canonical(self) -> Self:
        """The one representative, in NumPy, of all arrays that make the same logits."""

    def aligned_to(self, other: Self) -> Self:
        """Arrays of the same logits, those of them that are closest to the canonical arrays of another form."""
        _ = other
        return self.canonical()

    def without_shift(self) -> Self:
        """The form without arrays that only add the same to the logits of all tokens of a sequence."""
        return self

    def sibling(self) -> tuple[Self, str] | None:
        """Other arrays of the same logits, and why nobody can tell; None where there are none."""
        return None

    def told(self) -> dict[str, Floats]:
        """What logits tell, by which forms of one kind are compared: products of arrays where these are not told."""
        return {name: floats(array) for name, array in self.arrays().items()}

    def logits(self, tokens: Array, queries: Array) -> Array:  # -> (batch, length) or (batch, queries, length)
        """The logits."""
        if queries.ndim == tokens.ndim:
            return self.logits_of(tokens, queries)
        return self.logits_of(tokens, queries[:, None, :])[:, 0, :]

    def arrays(self) -> dict[str, Array]:
        """The arrays by name, those that are present."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]
        return {name: array for name, array in named.items() if array is not None}

    def with_arrays(self, arrays: dict[str, Array]) -> Self:
        """A form of the same kind with other arrays."""
        return type(self)(**arrays)

    def turned(self, turn: Floats) -> Self:  # (new width, width)
        """The form of tokens turnᵀ·w, of the tokens w; of forms that read tokens by a key and a query."""
        own = {name: floats(array) for name, array in self.arrays().items()}
        return self.with_arrays({**own, "query": own["query"] @ turn.T, "key": own["key"] @ turn.T})

    def logit_norm(self, radius: Self, logit_radius: float) -> float:
        """The norm up to which logits of random tokens are known to `logit_radius`; inf where that is any."""
        rng, width = np.random.default_rng(0), self.width
        tokens = rng.standard_normal((1, 2 * width, width)) / width**0.5
        plain = self.with_arrays({name: floats(array) for name, array in self.arrays().items()})
        wide = self.with_arrays({name: floats(array) for name, array in radius.arrays().items()})
        with np.errstate(all="ignore"):
            worst = float(np.max(plain.radius(wide, tokens, tokens, 0.0)))
        if not worst < np.inf:
            return 1.0
        return self.longest(worst, logit_radius) if worst > 0 else float("inf")

    def longest(self, worst: float, logit_radius: float) -> float:
        """The norm at which logits, off by `worst` at norm one, are off by `logit_radius`: they grow as its square."""
        return float((logit_radius / worst) ** 0.5)


def check_form(form: Form, **expected: tuple[int, ...]) -> None:
    """UsageError for arrays of another shape than expected."""
    for name, shape in expected.items():
        array = getattr(form, name)
        if not hasattr(array, "ndim"):
            raise UsageError(f"{type(form).__name__}.{name} must be an array, not {type(array).__name__}")
        if tuple(array.shape) != shape:
            raise UsageError(f"{type(form).__name__}.{name} has shape {tuple(array.shape)}, expected {shape}")


def check_factors(form: Form, *, even: bool = False) -> None:
    """UsageError unless query and key are matrices of one shape, of an even number of rows where they make pairs."""
    query, key = form.query, form.key  # type: ignore[attr-defined]
    for name, array in (("query", query), ("key", key)):
        if not hasattr(array, "ndim") or array.ndim != 2 or 0 in array.shape:
            raise UsageError(f"{type(form).__name__}.{name} must be a matrix (d_k, width)")
    check_form(form, query=tuple(key.shape))
    if even and key.shape[0] % 2:
        raise UsageError(f"{type(form).__name__} turns pairs of rows: d_k must be even, not {key.shape[0]}")


def products(left: Array, right: Array) -> Array:  # (batch, length, r), (batch, queries, r) -> (batch, queries, length)
    """Inner products of every query with every token."""
    return right @ namespace(left).matrix_transpose(left)


def distances(tokens: Array, queries: Array) -> Array:  # -> (queries, length)
    """How far each token stands before each query, the queries being the last tokens."""
    xp, length = namespace(tokens), tokens.shape[1]
    places = xp.arange(length, dtype=tokens.dtype, device=tokens.device)
    return places[length - queries.shape[1] :][:, None] - places[None, :]


def entry_radius(radius: Array, x: Array, rows: Array, rounding: float) -> Array:  # (r, d), (…, d), (r, d) -> (…, r)
    """Variances of rows·x: errors of entries add in quadrature, and with the rounding of the inner product."""
    xp = namespace(x)
    sizes = xp.sum(x**2, axis=-1)[..., None] * xp.sum(rows**2, axis=-1)
    return x**2 @ xp.matrix_transpose(radius**2) + rounding**2 * sizes


def typical_norm(strength: float, logit_size: float) -> float:
    """The norm at which a form that is quadratic in the norm, `strength` at one, is `logit_size`."""
    return (logit_size / strength) ** 0.5 if strength > 0 else float("inf")


def upright(*matrices: Floats) -> list[Floats]:
    """Rows of all matrices with signs such that the largest entry of a row of the first is positive."""
    first = matrices[0]
    places = np.argmax(np.abs(first), axis=1)
    signs = np.where(first[np.arange(len(first)), places] < 0, -1.0, 1.0)
    return [matrix * signs[:, None] for matrix in matrices]
