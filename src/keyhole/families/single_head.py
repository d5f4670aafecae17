"""One attention head read at the last position."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from keyhole.arrays import Array, Floats, floats, namespace
from keyhole.errors import UsageError
from keyhole.families.base import Anatomy, Sensitivity, check_arrays, check_shapes
from keyhole.families.files import register
from keyhole.families.parts import SOFTMAX, Attention, Bilinear, Head
from keyhole.families.sensitivity import sensitivity_of_heads

# Answers follow logits to first order as long as these have standard errors of no more than this.
FIRST_ORDER = 0.03

NAMES = ("score", "value", "score_bias", "output_bias")


@register
@dataclass(frozen=True, eq=False)
class SingleHead(Head):
    """f(X) = Σ_i softmax_i(x_iᵀ·score·x_N + x_iᵀ·score_bias) · x_iᵀ·value + output_bias, x_N the last token.

    A key bias or any other term that is the same for every token i drops out of the softmax, and a
    scaling such as 1/√d_k belongs to `score`. Calling the head computes f on arrays of any supported
    library, in the dtype and on the device of the tokens. `attention` has other parts than those of a softmax.
    """

    score: Array  # (width, width)
    value: Array  # (width,) for one number per sequence, (width, outputs) for several
    score_bias: Array | None = None  # (width,)
    output_bias: Array | None = None  # () or (outputs,), as the value has it
    attention: Attention = SOFTMAX

    family: ClassVar[str] = "single-head"

    def __post_init__(self) -> None:
        check_arrays(self, *NAMES)
        if self.score.ndim != 2 or self.value.ndim not in (1, 2) or 0 in self.score.shape + self.value.shape:
            raise UsageError(
                f"SingleHead needs a score (width, width) and a value (width,) or (width, outputs), "
                f"not {tuple(self.score.shape)} and {tuple(self.value.shape)}"
            )
        width, outputs = self.score.shape[0], tuple(self.value.shape[1:])
        check_shapes(self, score=(width, width), value=(width, *outputs), score_bias=(width,), output_bias=outputs)

    @property
    def width(self) -> int:
        """Numbers per token."""
        return int(self.score.shape[0])

    @cached_property
    def form(self) -> Bilinear:
        """The bilinear form of score and score bias."""
        return Bilinear(self.score, self.score_bias)

    def simplest(self) -> SingleHead:
        """The parameters in the smallest family that holds them."""
        return self

    def without_attention(self) -> SingleHead:
        """A copy in which all tokens weigh the same."""
        parts = SOFTMAX if self.attention.link.is_power else self.attention  # powers of zero are no weights
        return SingleHead(0 * self.score, self.value, None, self.output_bias, parts)

    def padded(self, absent: Array) -> SingleHead | None:  # (batch, length)
        """The head with no weight on what pads sequences; None where it counts tokens or places."""
        head = self.like(absent)
        return replace(head, attention=replace(head.attention, absent=absent)) if self.attention.can_pad else None

    def as_single_tokens(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch, width)
        """What the head mixes of its tokens."""
        eye = namespace(tokens).eye(self.width, dtype=tokens.dtype, device=tokens.device)
        return replace(self, value=eye, output_bias=None)(tokens)

    def variance(self, errors: SingleHead, tokens: Array) -> Array:  # (batch, length, width) -> (batch, outputs or 1)
        """Of softmax answers whose numbers err independently by these standard errors, to first order.

        Where logits are off by too much for a first order it is the square of what they may do at worst.
        """
        xp, last = namespace(tokens), tokens[:, -1, :]
        head, wide = self.like(tokens), errors.like(tokens)
        logits = head.form.logits(tokens, last)
        weights = head.attention.weights(logits)  # (batch, length)
        values = tokens @ head.value_columns
        answers = (weights[:, None, :] @ values)[:, 0, :]
        pulls = weights[:, :, None] * (values - answers[:, None, :])
        moved = xp.matrix_transpose(tokens) @ pulls  # (batch, width, outputs): by what a token is multiplied with
        keys = last**2 @ (wide.score**2).T + (0.0 if wide.score_bias is None else wide.score_bias**2)
        known = (keys[:, None, :] @ moved**2)[:, 0, :]
        unknown = head.form.radius(wide.form, tokens, last[:, None, :], 0.0)[:, 0, :]  # (batch, length) of logits
        worst = head.attention.answer_radii(logits, weights, values, answers, unknown, surely=True)
        sure = xp.max(unknown, axis=1) <= FIRST_ORDER
        mixed = (weights[:, None, :] @ tokens)[:, 0, :]
        return xp.where(sure[:, None], known, worst**2) + mixed**2 @ wide.value_columns**2

    @property
    def anatomy(self) -> Anatomy:
        """One head."""
        return Anatomy(f"One attention head of width {self.width}", (self,))

    @property
    def numbers_in_logits(self) -> int:
        """Numbers that a score of this rank, its bias and the constants of the parts of attention have."""
        width, rank = self.width, int(np.linalg.matrix_rank(floats(self.score)))
        return rank * (2 * width - rank) + (0 if self.score_bias is None else width) + self.attention.numbers

    @property
    def counting_bound(self) -> int:
        """Queries below which a head of this rank has more unknown numbers than answers: d² + d at full rank."""
        width, numbers = self.width, self.numbers_in_logits
        shown = max(1, int(np.linalg.matrix_rank(floats(self.value_columns))))
        return -(-numbers // shown) + width + (0 if self.output_bias is None else 1)

    def sensitivity(self, tokens: Floats, unit: float, looked_at: Array) -> Sensitivity:
        """Predictions, their rounding, and the first-order effect of score, value and biases."""
        return sensitivity_of_heads((self,), self.output_bias, tokens, unit, looked_at, numbered=False)
