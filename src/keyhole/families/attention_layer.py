"""One multi-head attention layer as a map of whole sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from keyhole.arrays import Array, namespace
from keyhole.errors import UsageError
from keyhole.families.base import Anatomy, Family, check_arrays
from keyhole.families.files import register
from keyhole.families.single_head import SingleHead


@register
@dataclass(frozen=True, eq=False)
class AttentionLayer(Family):
    """F(X) = Σ_i softmax(X·Θ_i·Xᵀ)·X·W_i, the softmax taken along rows: every token attends to all tokens.

    Row a of the answer is what token a makes of the sequence. A scaling such as 1/√d_k belongs to the scores.
    Calling the layer computes F on arrays of any supported library, in the dtype and on the device of the tokens.
    """

    scores: Array  # (heads, width, width): Θ_i
    projections: Array  # (heads, width, outputs): W_i

    family: ClassVar[str] = "attention-layer"

    def __post_init__(self) -> None:
        check_arrays(self, "scores", "projections")
        scores, projections = tuple(self.scores.shape), tuple(self.projections.shape)
        fitting = len(scores) == len(projections) == 3 and scores[1] == scores[2] and scores[:2] == projections[:2]
        if not fitting or 0 in scores[1:] + projections[1:]:
            raise UsageError(
                f"AttentionLayer needs scores (heads, width, width) and projections (heads, width, outputs), "
                f"not {scores} and {projections}"
            )

    @property
    def heads(self) -> int:
        """Number of heads."""
        return int(self.scores.shape[0])

    @property
    def width(self) -> int:
        """Numbers per token."""
        return int(self.scores.shape[1])

    @property
    def outputs(self) -> int:
        """Numbers per answer and token."""
        return int(self.projections.shape[2])

    def read_at_last(self) -> list[SingleHead]:
        """Heads whose answers at all positions add up to the layer's."""
        scores = namespace(self.scores).matrix_transpose(self.scores)
        return [SingleHead(scores[n, ...], self.projections[n, ...]) for n in range(self.heads)]

    def __call__(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch, length, outputs)
        """Answer a batch of sequences."""
        total = self._nothing(tokens)
        for head in self.like(tokens).read_at_last():
            total = total + head.at_all_positions(tokens)
        return total

    def error_bar(self, radius: AttentionLayer, tokens: Array, rounding: float) -> Array:  # -> (batch, length, outputs)
        """First-order bound on `|F_true − F_self|` for parameters right within `radius`, head by head."""
        total, xp = self._nothing(tokens), namespace(tokens)
        for head, wide in zip(self.like(tokens).read_at_last(), radius.read_at_last(), strict=True):
            total = total + head.error_bar_at_all_positions(wide, tokens, rounding)
            total = total + rounding * xp.abs(head.at_all_positions(tokens))
        return total

    def _nothing(self, tokens: Array) -> Array:
        return namespace(tokens).zeros((*tokens.shape[:2], self.outputs), dtype=tokens.dtype, device=tokens.device)

    def token_norm(self, size: float) -> float:
        """The norm at which random tokens have logits of about `size` in the sharpest head; inf when none has any."""
        return min((head.token_norm(size) for head in self.read_at_last()), default=float("inf"))

    @property
    def positions(self) -> str:
        """All: there is an answer for every token."""
        return "all"

    @property
    def anatomy(self) -> Anatomy:
        """Heads by number, scores as the layer holds them: those of heads read at the last position are transposed."""
        heads = (SingleHead(self.scores[n, ...], self.projections[n, ...]) for n in range(self.heads))
        title = f"A layer of {self.heads} attention head{'s' * (self.heads != 1)} of width {self.width}"
        return Anatomy(title, tuple(heads), numbered=True)
