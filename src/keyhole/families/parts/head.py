"""One head of any parts: forward at the last position or at all of them, and the radius of its predictions."""

from __future__ import annotations

from typing import Self

from keyhole.arrays import Array, namespace
from keyhole.families.base import Family
from keyhole.families.parts.attention import Attention
from keyhole.families.parts.forms import ScoreForm

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
        pulls = head.attention.normaliser.pulls(weights, values, answers)
        # Energies that are off by e change weights by factors of up to exp(2e).
        factor = xp.expm1(xp.clip(2 * worst, None, LARGEST_EXPONENT))
        bound = weights @ value_radius + factor * xp.sum(xp.abs(pulls), axis=2)
        bound = bound if head.value.ndim == 2 else bound[..., 0]
        if wide.output_bias is not None:
            bound = bound + wide.output_bias
        # A small bias may be the sum of larger ones: value biases come through the output matrix.
        return bound if head.output_bias is None else bound + rounding * xp.max(xp.abs(head.output_bias))

    def token_norm(self, size: float) -> float:
        """The norm at which random tokens have logits of about `size`; inf when none has any."""
        return self.form.token_norm(size)

    def loudest(self) -> Array:  # (width,)
        """The unit token of the largest value."""
        return namespace(self.value).linalg.svd(self.value_columns, full_matrices=False)[0][:, 0]
