"""Attention with its last token beside it: what a layer of a Transformer adds to its residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar

from keyhole.arrays import Array, namespace
from keyhole.errors import UsageError
from keyhole.families.files import save_arrays
from keyhole.families.multi_head import MultiHead
from keyhole.families.single_head import SingleHead


@dataclass(frozen=True, eq=False)
class Residual:
    """f(X) = x_N + attention(X), x_N the last token: answers as wide as tokens are."""

    attention: SingleHead | MultiHead

    family: ClassVar[str] = "residual"

    def __post_init__(self) -> None:
        if not isinstance(self.attention, SingleHead | MultiHead) or self.attention.outputs != self.attention.width:
            raise UsageError("Residual.attention must be a SingleHead or MultiHead with as many outputs as inputs")

    @property
    def width(self) -> int:
        """Numbers per token."""
        return self.attention.width

    @property
    def outputs(self) -> int | None:
        """Numbers per answer."""
        return self.attention.outputs

    @property
    def heads(self) -> Sequence[SingleHead]:
        """Those of the attention."""
        return self.attention.heads if isinstance(self.attention, MultiHead) else (self.attention,)

    @property
    def output_bias(self) -> Array | None:
        """That of the attention."""
        return self.attention.output_bias

    @property
    def words(self) -> dict[str, str]:
        """What determines the layer besides numbers."""
        return {"attention": self.attention.family}

    def __call__(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch, width)
        """Answer a batch of sequences."""
        return self.attention(tokens) + tokens[:, -1, :]

    def at_all_positions(self, tokens: Array) -> Array:  # (batch, length, width) -> the same
        """The answer with each token in turn as the last one, all tokens staying in sight of it."""
        return self.attention.at_all_positions(tokens) + tokens

    def simplest(self) -> Residual:
        """The parameters in the smallest family that holds them: one head inside is a SingleHead."""
        return Residual(self.attention.simplest())

    def without_attention(self) -> Residual:
        """The same layer with all tokens weighing the same."""
        return Residual(self.attention.without_attention())

    def loudest(self) -> Array:  # (width,)
        """The unit token of the largest values."""
        return self.attention.loudest()

    def like(self, tokens: Array) -> Residual:
        """The same layer with its parameters in the library, dtype and device of `tokens`."""
        return Residual(self.attention.like(tokens))

    def error_bar(
        self,
        radius: Residual,  # entrywise radii of the parameters
        tokens: Array,  # (batch, length, width)
        rounding: float,  # relative error of one inner product of unit vectors
    ) -> Array:  # (batch, width)
        """First-order bar on |f_true − f_self| when the parameters are right within `radius`."""
        bar = self.attention.error_bar(radius.attention, tokens, rounding)  # type: ignore[arg-type]
        return bar + rounding * namespace(tokens).abs(tokens[:, -1, :])

    def token_norm(self, logit_size: float) -> float:
        """The norm at which random tokens have logits of about `logit_size` (inf when none has any)."""
        return self.attention.token_norm(logit_size)

    def arrays(self) -> dict[str, Array]:
        """The parameters that are present, as the attention names them."""
        return self.attention.arrays()

    @classmethod
    def of_arrays(cls, *, attention: str, **arrays: Any) -> Residual:
        """The layer of arrays named as `arrays` names them, and the family of its attention."""
        if attention not in (SingleHead.family, MultiHead.family):
            raise TypeError(f"a residual has no attention of the family {attention!r}")
        return cls(SingleHead(**arrays) if attention == SingleHead.family else MultiHead.of_arrays(**arrays))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the parameters to a safetensors file that `keyhole.load` reads."""
        save_arrays(path, self.family, self.arrays(), self.words)
