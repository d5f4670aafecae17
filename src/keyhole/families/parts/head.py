"""One head of any score form and any parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Self

import numpy as np

from keyhole.arrays import Array, Floats, namespace, row_norms
from keyhole.families.base import Family
from keyhole.families.parts.attention import KINDS, Attention
from keyhole.families.parts.bilinear import ScoreForm

# Arrays of a head that logits do not depend on.
NOT_OF_LOGITS = ("value", "output_bias")
# Typical logits over the largest of a sequence.
WITHIN_REACH = 0.25


class Head(Family):
    """f(X) = Σ_i weight_i · x_iᵀ·value + output_bias, weights by `attention` from the logits of `form`.

    A subclass has the two as attributes or properties, and its arrays.
    """

    value: Array  # (width,) or (width, outputs)
    output_bias: Array | None  # () or (outputs,)
    attention: Attention

    if TYPE_CHECKING:  # a property would stand in the way of a field of that name

        @property
        def form(self) -> ScoreForm:
            """The score form."""

    @property
    def outputs(self) -> int | None:
        """Numbers per answer; None when the answer is a plain number."""
        return int(self.value.shape[1]) if self.value.ndim == 2 else None

    @property
    def constant(self) -> Array | None:
        """The output bias."""
        return self.output_bias

    @property
    def has_poles(self) -> bool:
        """Masses that are powers may add up to zero."""
        return self.attention.link.is_power

    @property
    def words(self) -> dict[str, str]:
        """The parts of attention that are not those of a softmax."""
        return self.attention.words

    def arrays(self) -> dict[str, Array]:
        """The parameters that are present, by name; constants of parts of attention by names such as link.cap."""
        return {**super().arrays(), **self.attention.arrays()}

    @classmethod
    def of_arrays(cls, **arrays: Array) -> Self:
        """The head of arrays by name, and of parts in words."""
        own = {each.name for each in fields(cls)}  # type: ignore[arg-type]
        words = {name: arrays.pop(name) for name in list(arrays) if name in KINDS and type(arrays[name]) is str}
        constants = {name: arrays.pop(name) for name in list(arrays) if name not in own and name.partition(".")[1]}
        return cls(**{**arrays, "attention": Attention.of_words(words, constants)})

    def check(self) -> None:
        """UsageError for constants out of their range."""
        self.attention.check()

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
        """First-order bound on `|f_true − f_self|` for parameters right within `radius`: errors add in quadrature."""
        return self._bound(radius, tokens, tokens[:, -1:, :], rounding)[:, 0, ...]

    def error_bar_at_all_positions(self, radius: Self, tokens: Array, rounding: float) -> Array:
        """The first-order bound of `error_bar` with each token in turn as the last one: (batch, length[, outputs])."""
        return self._bound(radius, tokens, tokens, rounding)

    def _bound(
        self, radius: Self, tokens: Array, queries: Array, rounding: float
    ) -> Array:  # (batch, queries[, outputs])
        xp = namespace(tokens)
        head, wide = self.like(tokens), radius.like(tokens)
        attention, constants = head.attention, wide.attention.arrays()
        logits = head.form.logits(tokens, queries)
        weights = attention.weights(logits)  # (batch, queries, length)
        radii = attention.energy_radii(logits, head.form.radius(wide.form, tokens, queries, rounding))
        radii = radii + attention.constant_radii(constants, logits) + attention.energy_rounding(logits, rounding)
        norms = row_norms(tokens)[:, :, None]
        values = (tokens @ head.value_columns)[:, None, :, :]  # (batch, 1, length, outputs or 1)
        value_radius = xp.sqrt((tokens**2) @ (wide.value_columns**2))
        value_radius = value_radius + rounding * norms * xp.linalg.vector_norm(head.value_columns, axis=0)
        answers = xp.sum(weights[..., None] * values, axis=2)
        bound = xp.abs(weights) @ value_radius
        bound = bound + attention.answer_radii(logits, weights, values, answers, radii, surely=True)
        if constants:
            moved = attention.weight_radii(constants, logits, weights)
            bound = bound + xp.sum((moved + 0 * weights)[..., None] * xp.abs(values), axis=2)
        bound = bound if head.value.ndim == 2 else bound[..., 0]
        if wide.output_bias is not None:
            bound = bound + wide.output_bias
        # A small bias may be the sum of larger ones: value biases come through the output matrix.
        return bound if head.output_bias is None else bound + rounding * xp.max(xp.abs(head.output_bias))

    def effects(self, change: Self, tokens: Array) -> Iterator[tuple[str, Array]]:
        """How far a change of score, value, bias or constant alone, of the size of `change`, moves the answers."""
        xp, queries = namespace(tokens), tokens[:, -1:, :]
        head, wide = self.like(tokens), change.like(tokens)
        attention, constants = head.attention, wide.attention.arrays()
        logits = head.form.logits(tokens, queries)
        weights = attention.weights(logits)
        values = (tokens @ head.value_columns)[:, None, :, :]
        answers = xp.sum(weights[..., None] * values, axis=2)  # (batch, 1, outputs or 1)
        arrays = wide.arrays()
        for name in self.arrays():
            if name == "value":
                effect = xp.abs(weights) @ xp.sqrt((tokens**2) @ (wide.value_columns**2))
            elif name == "output_bias":
                effect = xp.zeros_like(answers) + wide.output_bias
            elif name.startswith("normaliser."):
                moved = attention.weight_radii({name: constants[name]}, logits, weights)
                effect = xp.sum((moved + 0 * weights)[..., None] * xp.abs(values), axis=2)
            else:
                if name in constants:
                    radii = attention.constant_radii({name: constants[name]}, logits)
                else:
                    others = {each: array for each, array in arrays.items() if each not in (name, *NOT_OF_LOGITS)}
                    alone = wide.with_arrays({**arrays, **{each: 0 * array for each, array in others.items()}})
                    radii = attention.energy_radii(logits, head.form.radius(alone.form, tokens, queries, 0.0))
                effect = attention.answer_radii(logits, weights, values, answers, radii)
            label = name.replace("_", " ").replace(".", " ")
            yield label, effect[:, 0, :] if head.value.ndim == 2 else effect[:, 0, 0]

    def token_norm(self, size: float) -> float:
        """The norm at which random tokens have logits of about `size`, or as a link's reach allows; inf if none has."""
        return self.form.token_norm(min(size, WITHIN_REACH * self.attention.link.reach))

    def loudest(self) -> Array:  # (width,)
        """The unit token of the largest value."""
        return namespace(self.value).linalg.svd(self.value_columns, full_matrices=False)[0][:, 0]

    @property
    def jumping_length(self) -> int | None:
        """One token more than have a weight."""
        most = self.attention.normaliser.most
        return None if most is None else most + 1

    def onto_boundary(self, tokens: Floats, rng: np.random.Generator) -> Floats:  # noqa: ARG002 - (length, width)
        """The last token that has a weight and the first that has none made one: which has it an oracle decides."""
        most, last = self.attention.normaliser.most, len(tokens) - 1
        if most is None or most > last:
            return tokens
        head = self.like(tokens)
        energies = head.attention.energies(head.form.logits(tokens[None], tokens[None, -1, :]))
        inside, outside = (int(place) for place in np.argsort(-energies[0], kind="stable")[most - 1 : most + 1])
        tokens = tokens.copy()
        if inside == last:
            tokens[outside] = tokens[inside]
        else:
            tokens[inside] = tokens[outside]
        return tokens
