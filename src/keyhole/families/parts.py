"""Attention by parts: score form × length law × link × position bias × normaliser, and one head of any parts.

A part other than the form is a frozen dataclass of plain numbers, with a `name` that files know it by.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import ClassVar, Protocol, Self

from keyhole.arrays import Array, namespace
from keyhole.errors import FileError, UsageError
from keyhole.families.base import Family


class ScoreForm(Protocol):
    """The logit of every token for one query per sequence (batch, width), or for several (batch, queries, width)."""

    def logits(self, tokens: Array, queries: Array) -> Array:  # -> (batch, length) or (batch, queries, length)
        """The logits."""
        ...

    def radius(self, radius: Self, tokens: Array, queries: Array, rounding: float) -> Array:
        """First-order bound on the error of each logit, (batch, queries, length), from entrywise radii."""
        ...

    def token_norm(self, logit_size: float) -> float:
        """The norm at which random tokens have logits of about `logit_size`; inf when none has any."""
        ...


@dataclass(frozen=True, eq=False)
class Bilinear:
    """The form xᵀ·score·g + xᵀ·bias of token x and query g."""

    score: Array  # (width, width)
    bias: Array | None = None  # (width,)

    def keys(self, queries: Array) -> Array:  # (..., width) -> (..., width)
        """score·g + bias: what a token is multiplied by."""
        keys = queries @ self.score.T
        return keys if self.bias is None else keys + self.bias

    def logits(self, tokens: Array, queries: Array) -> Array:  # -> (batch, length) or (batch, queries, length)
        """The logits."""
        xp = namespace(tokens)
        keys = self.keys(queries)
        if keys.ndim == 2:
            return xp.vecdot(tokens, keys[:, None, :])
        return xp.matrix_transpose(tokens @ xp.matrix_transpose(keys))

    def radius(self, radius: Bilinear, tokens: Array, queries: Array, rounding: float) -> Array:
        """Errors of entries add in quadrature; rounding is that of the inner product with the key."""
        xp = namespace(tokens)
        variance = queries**2 @ (radius.score**2).T
        if radius.bias is not None:
            variance = variance + radius.bias**2
        norms = xp.linalg.vector_norm(tokens, axis=-1)[:, None, :]  # (batch, 1, length)
        key_norms = xp.linalg.vector_norm(self.keys(queries), axis=-1)[:, :, None]  # (batch, queries, 1)
        return xp.sqrt(variance @ xp.matrix_transpose(tokens**2)) + rounding * norms * key_norms

    def token_norm(self, logit_size: float) -> float:
        """The norm at which random tokens have logits of about `logit_size`; inf when none has any."""
        xp, width = namespace(self.score), self.score.shape[0]
        quadratic = float(xp.linalg.vector_norm(self.score)) / width
        linear = 0.0 if self.bias is None else float(xp.linalg.vector_norm(self.bias)) / width**0.5
        # quadratic·t² + linear·t = logit_size, in the form that does not cancel
        root = (linear**2 + 4 * quadratic * logit_size) ** 0.5
        return 2 * logit_size / (linear + root) if linear + root > 0 else float("inf")


# Logits and energies are (batch, length) for one query per sequence, (batch, queries, length) for several, which are
# then the tokens themselves in their order.


class Link(Protocol):
    """Energies of tokens, the logarithms of what the normaliser weighs, from their logits, entry by entry.

    A length law is of this kind too: logits from logits, by the length of the sequence.
    """

    name: ClassVar[str]

    def __call__(self, logits: Array) -> Array:
        """The energies."""
        ...

    def slopes(self, logits: Array) -> Array | float:
        """The derivative of each energy by its logit."""
        ...


class PositionBias(Protocol):
    """What the distance of a token from its query adds to its energy; −inf hides the token."""

    name: ClassVar[str]

    def __call__(self, energies: Array) -> Array:
        """The energies with what is added."""
        ...


class Normaliser(Protocol):
    """Weights of tokens from their energies."""

    name: ClassVar[str]

    def __call__(self, energies: Array) -> Array:
        """The weights, along the last axis."""
        ...

    def pulls(self, weights: Array, values: Array, answers: Array) -> Array:  # (…, n), (…, n, p), (…, p) -> (…, n, p)
        """The derivative of every answer Σ weight·value by the energy of every token."""
        ...


@dataclass(frozen=True)
class Exp:
    """Weights in proportion to exp(logit): energies are logits."""

    name: ClassVar[str] = "exp"

    def __call__(self, logits: Array) -> Array:
        """The logits."""
        return logits

    def slopes(self, logits: Array) -> Array | float:  # noqa: ARG002
        """One."""
        return 1.0


@dataclass(frozen=True)
class NoLengthLaw(Exp):
    """Logits as they are, whatever the length."""

    name: ClassVar[str] = "none"


@dataclass(frozen=True)
class NoPositionBias:
    """Every distance is like every other."""

    name: ClassVar[str] = "none"

    def __call__(self, energies: Array) -> Array:
        """The energies."""
        return energies


@dataclass(frozen=True)
class Sum:
    """exp(energy) over the sum of it: weights add up to one."""

    name: ClassVar[str] = "sum"

    def __call__(self, energies: Array) -> Array:
        """The weights, along the last axis."""
        xp = namespace(energies)
        weights = xp.exp(energies - xp.max(energies, axis=-1, keepdims=True))
        return weights / xp.sum(weights, axis=-1, keepdims=True)

    def pulls(self, weights: Array, values: Array, answers: Array) -> Array:
        """weight·(value − answer)."""
        return weights[..., None] * (values - answers[..., None, :])


@dataclass(frozen=True)
class Attention:
    """How logits become weights: normaliser(position_bias(link(length_law(logits))))."""

    link: Link = Exp()
    normaliser: Normaliser = Sum()
    position_bias: PositionBias = NoPositionBias()
    length_law: Link = NoLengthLaw()

    def weights(self, logits: Array) -> Array:
        """The weights of tokens, along the last axis."""
        return self.normaliser(self.position_bias(self.link(self.length_law(logits))))

    def slopes(self, logits: Array) -> Array | float:
        """The derivative of each energy by its logit."""
        return self.length_law.slopes(logits) * self.link.slopes(self.length_law(logits))

    @property
    def words(self) -> dict[str, str]:
        """The parts that are not those of softmax attention, as text."""
        found = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        return {kind: json.dumps([own.name, asdict(own)]) for kind, (own, usual) in found.items() if own != usual}

    @classmethod
    def of_words(cls, words: dict[str, str]) -> Attention:
        """The attention of words as `words` gives them; FileError for a part that is not known."""
        return cls(**{kind: _part(kind, text) for kind, text in words.items()})  # type: ignore[arg-type]


SOFTMAX = Attention()
KINDS = tuple(each.name for each in fields(Attention))
PARTS: dict[tuple[str, str], type] = {
    (kind, getattr(SOFTMAX, kind).name): type(getattr(SOFTMAX, kind)) for kind in KINDS
}


def register(kind: str, part: type) -> None:
    """Make a part of this kind (link, normaliser, position_bias, length_law) one that files may name."""
    if kind not in KINDS:
        raise UsageError(f"there is no part {kind!r} of attention; known: {', '.join(KINDS)}")
    PARTS[kind, part.name] = part  # type: ignore[attr-defined]


def _part(kind: str, text: str) -> Link | Normaliser | PositionBias:
    try:
        name, numbers = json.loads(text)
    except ValueError as error:
        raise FileError(f"names the {kind.replace('_', ' ')} of a head in words that cannot be read") from error
    if (kind, name) not in PARTS:
        known = ", ".join(each for own, each in PARTS if own == kind)
        raise FileError(
            f"holds the unknown {kind.replace('_', ' ')} {name!r}; known: {known}: upgrade Keyhole, or register the "
            "part first where it is yours"
        )
    made: Link | Normaliser | PositionBias = PARTS[kind, name](**numbers)
    return made


LARGEST_EXPONENT = 80.0  # of what a float32 holds


class Head(Family):
    """f(X) = Σ_i weight_i · x_iᵀ·value + output_bias, weights by `attention` from the logits of `form`.

    A subclass has the two as attributes or properties, and its arrays.
    """

    value: Array  # (width,) or (width, outputs)
    output_bias: Array | None  # () or (outputs,)
    attention: Attention

    @property
    def form(self) -> ScoreForm:
        """The score form."""
        raise NotImplementedError

    @property
    def outputs(self) -> int | None:
        """Numbers per answer; None when the answer is a plain number."""
        return int(self.value.shape[1]) if self.value.ndim == 2 else None

    @property
    def constant(self) -> Array | None:
        """The output bias."""
        return self.output_bias

    @property
    def words(self) -> dict[str, str]:
        """The parts of attention that are not those of a softmax."""
        return self.attention.words

    @classmethod
    def of_arrays(cls, **arrays: Array) -> Self:
        """The head of arrays by name, and of parts in words."""
        own = {each.name for each in fields(cls)}  # type: ignore[arg-type]
        words = {name: arrays.pop(name) for name in list(arrays) if name not in own and type(arrays[name]) is str}
        return cls(**{**arrays, "attention": Attention.of_words(words)})

    @property
    def value_columns(self) -> Array:  # (width, outputs or 1)
        """The value as a matrix."""
        return self.value if self.value.ndim == 2 else self.value[:, None]

    def __call__(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch,) or (batch, outputs)
        """Answer a batch of sequences."""
        head = self.like(tokens)
        weights = head.attention.weights(head.form.logits(tokens, tokens[:, -1, :]))
        if head.value.ndim == 1:
            answers = namespace(tokens).vecdot(weights, tokens @ head.value)
        else:  # the mixed token first: one product with the value per sequence, not per token
            answers = (weights[:, None, :] @ tokens)[:, 0, :] @ head.value
        return answers if head.output_bias is None else answers + head.output_bias

    def at_all_positions(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch, length[, outputs])
        """The answer with each token in turn as the last one, all tokens staying in sight of it."""
        head = self.like(tokens)
        weights = head.attention.weights(head.form.logits(tokens, tokens))
        answers = weights @ (tokens @ head.value_columns)
        answers = answers if head.value.ndim == 2 else answers[..., 0]
        return answers if head.output_bias is None else answers + head.output_bias

    def error_bar(self, radius: Self, tokens: Array, rounding: float) -> Array:  # -> (batch,) or (batch, outputs)
        """First-order bound on |f_true − f_self| for parameters right within `radius`: errors add in quadrature."""
        return self._bound(radius, tokens, tokens[:, -1:, :], rounding)[:, 0, ...]

    def error_bar_at_all_positions(self, radius: Self, tokens: Array, rounding: float) -> Array:
        """The first-order bound of `error_bar` with each token in turn as the last one: (batch, length[, outputs])."""
        return self._bound(radius, tokens, tokens, rounding)

    def _bound(
        self, radius: Self, tokens: Array, queries: Array, rounding: float
    ) -> Array:  # (batch, queries[, outputs])
        xp = namespace(tokens)
        head, wide = self.like(tokens), radius.like(tokens)
        logits = head.form.logits(tokens, queries)
        weights = head.attention.weights(logits)  # (batch, queries, length)
        energy_radius = xp.abs(head.attention.slopes(logits) * head.form.radius(wide.form, tokens, queries, rounding))
        worst = xp.max(energy_radius, axis=-1)[:, :, None]
        norms = xp.linalg.vector_norm(tokens, axis=-1)[:, :, None]
        values = (tokens @ head.value_columns)[:, None, :, :]  # (batch, 1, length, outputs or 1)
        value_radius = xp.sqrt((tokens**2) @ (wide.value_columns**2))
        value_radius = value_radius + rounding * norms * xp.linalg.vector_norm(head.value_columns, axis=0)
        answers = xp.sum(weights[..., None] * values, axis=2)
        # Energies that are off by e change weights by factors of up to exp(2e). Where that is more than numbers hold,
        # and weights may be less, logits are taken for smaller by a factor that leaves both within what they do, and a
        # bound a bound: exp(2e − gap) ≤ exp((2e − gap)·factor) for every gap that e does not close.
        pulling = weights
        if bool(xp.any(2 * worst > LARGEST_EXPONENT)):
            shrunk = LARGEST_EXPONENT / xp.clip(2 * worst[:, :, 0], LARGEST_EXPONENT, None)
            pulling = head.attention.weights(logits * shrunk[:, :, None])
        pulls = head.attention.normaliser.pulls(pulling, values, answers)
        factor = xp.expm1(xp.clip(2 * worst, None, LARGEST_EXPONENT))
        bound = weights @ value_radius + factor * xp.sum(xp.abs(pulls), axis=2)
        bound = bound if head.value.ndim == 2 else bound[..., 0]
        if wide.output_bias is not None:
            bound = bound + wide.output_bias
        # A small bias may be the sum of larger ones: value biases come through the output matrix.
        return bound if head.output_bias is None else bound + rounding * xp.max(xp.abs(head.output_bias))

    def effects(self, change: Self, tokens: Array) -> Iterator[tuple[str, Array]]:
        """How far a change of score, value or bias alone, of the size of `change`, moves the answers."""
        xp, queries = namespace(tokens), tokens[:, -1:, :]
        head, wide = self.like(tokens), change.like(tokens)
        logits = head.form.logits(tokens, queries)
        weights, slopes = head.attention.weights(logits), head.attention.slopes(logits)
        values = (tokens @ head.value_columns)[:, None, :, :]
        answers = xp.sum(weights[..., None] * values, axis=2)  # (batch, 1, outputs or 1)
        pulled = xp.sum(xp.abs(head.attention.normaliser.pulls(weights, values, answers)), axis=2)
        zeros = {name: 0 * array for name, array in wide.arrays().items() if name not in ("value", "output_bias")}
        for name in self.arrays():
            if name == "value":
                effect = weights @ xp.sqrt((tokens**2) @ (wide.value_columns**2))
            elif name == "output_bias":
                effect = xp.zeros_like(answers) + wide.output_bias
            else:
                alone: Self = replace(wide, **{each: zero for each, zero in zeros.items() if each != name})  # type: ignore[type-var]
                energies = xp.abs(slopes * head.form.radius(alone.form, tokens, queries, 0.0))
                worst = xp.max(energies, axis=-1)[:, :, None]
                effect = xp.expm1(xp.clip(2 * worst, None, LARGEST_EXPONENT)) * pulled
            yield name.replace("_", " "), effect[:, 0, :] if head.value.ndim == 2 else effect[:, 0, 0]

    def token_norm(self, size: float) -> float:
        """The norm at which random tokens have logits of about `size`; inf when none has any."""
        return self.form.token_norm(size)

    def loudest(self) -> Array:  # (width,)
        """The unit token of the largest value."""
        return namespace(self.value).linalg.svd(self.value_columns, full_matrices=False)[0][:, 0]
