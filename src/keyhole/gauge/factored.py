"""Heads as implementations hold them: key, query, value and output matrices, of which only products show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from keyhole.arrays import Array, namespace
from keyhole.families.multi_head import MultiHead
from keyhole.families.parts import SOFTMAX, Attention
from keyhole.families.single_head import SingleHead


@dataclass(frozen=True, eq=False)
class Factors:
    """The matrices of one head: its score is key · queryᵀ, its value the product of value and output."""

    key: Array  # (width, inner)
    query: Array  # (width, inner)
    value: Array  # (width, inner)
    output: Array  # (inner,) or (inner, outputs)
    query_bias: Array | None = None  # (inner,); key · query_bias is the score bias
    key_bias: Array | None = None  # (inner,); moves the logits of all tokens alike, which does not show
    value_bias: Array | None = None  # (inner,); value_bias · output is part of the output bias
    attention: Attention = SOFTMAX

    def joined(self) -> SingleHead:
        """The head, as queries see it, without its part of the output bias."""
        bias = None if self.query_bias is None else self.key @ self.query_bias
        return SingleHead(self.key @ self.query.T, self.value @ self.output, bias, attention=self.attention)

    def __call__(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch,) or (batch, outputs)
        """The answer, computed as a Transformer would."""
        xp = namespace(tokens)
        query = tokens[:, -1, :] @ self.query
        query = query if self.query_bias is None else query + self.query_bias
        keys = tokens @ self.key if self.key_bias is None else tokens @ self.key + self.key_bias
        logits = xp.sum(keys * query[:, None, :], axis=-1)
        weights = self.attention.like(logits).weights(logits)
        mixed = xp.sum(weights[:, :, None] * (tokens @ self.value), axis=1)
        return (mixed if self.value_bias is None else mixed + self.value_bias) @ self.output


@dataclass(frozen=True, eq=False)
class FactoredHeads:
    """Several heads in factors, and the sum of their biases."""

    heads: Sequence[Factors]
    output_bias: Array | None = field(default=None)  # () or (outputs,)

    @property
    def width(self) -> int:
        """Numbers per token."""
        return int(self.heads[0].key.shape[0])

    def joined(self) -> MultiHead:
        """The heads, as queries see them."""
        shifts = [head.value_bias @ head.output for head in self.heads if head.value_bias is not None]
        bias = self.output_bias
        for shift in shifts:
            bias = shift if bias is None else bias + shift
        return MultiHead([head.joined() for head in self.heads], bias)

    def __call__(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch,) or (batch, outputs)
        """Answer a batch of sequences."""
        total = sum(head(tokens) for head in self.heads)
        return total if self.output_bias is None else total + self.output_bias
