"""One multi-head attention layer as a map of whole sequences."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import ClassVar

from keyhole.arrays import Array, namespace, to_numpy
from keyhole.errors import UsageError
from keyhole.families.files import save_arrays


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """F(X) = Σ_i softmax(X·Θ_i·Xᵀ)·X·W_i, the softmax taken along rows: every token attends to all tokens.

    Row a of the answer is what token a makes of the sequence. A scaling such as 1/√d_k belongs to the scores.
    Calling the layer computes F on arrays of any supported library, in the dtype and on the device of the tokens.
    """

    scores: Array  # (heads, width, width): Θ_i
    projections: Array  # (heads, width, outputs): W_i

    family: ClassVar[str] = "attention-layer"

    def __post_init__(self) -> None:
        for name in ("scores", "projections"):
            if not hasattr(getattr(self, name), "ndim"):
                raise UsageError(f"AttentionLayer.{name} must be an array, not {type(getattr(self, name)).__name__}")
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

    def arrays(self) -> dict[str, Array]:
        """The parameters, by name."""
        return {"scores": self.scores, "projections": self.projections}

    def __call__(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch, length, outputs)
        """Answer a batch of sequences."""
        xp = namespace(tokens)
        layer = self.like(tokens)
        turned = xp.matrix_transpose(tokens)
        answers = xp.zeros((*tokens.shape[:2], self.outputs), dtype=tokens.dtype, device=tokens.device)
        for head in range(self.heads):
            logits = tokens @ layer.scores[head, ...] @ turned  # (batch, token, token it attends to)
            weights = xp.exp(logits - xp.max(logits, axis=-1, keepdims=True))
            weights = weights / xp.sum(weights, axis=-1, keepdims=True)
            answers = answers + (weights @ tokens) @ layer.projections[head, ...]
        return answers

    def like(self, tokens: Array) -> AttentionLayer:
        """The same layer with its parameters in the library, dtype and device of `tokens`."""
        xp = namespace(tokens)

        def moved(array: Array) -> Array:
            if namespace(array) is xp and array.dtype == tokens.dtype:
                return array if array.device == tokens.device else array.to(tokens.device)
            return xp.asarray(to_numpy(array), dtype=tokens.dtype, device=tokens.device)

        return AttentionLayer(moved(self.scores), moved(self.projections))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the parameters to a safetensors file that `keyhole.load` reads."""
        save_arrays(path, self.family, self.arrays())
