"""Attention with its last token beside it: what a layer of a Transformer adds to its residual stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from keyhole.arrays import Array, Floats, namespace
from keyhole.errors import UsageError
from keyhole.families.base import Anatomy, Family, Sensitivity
from keyhole.families.files import register
from keyhole.families.multi_head import MultiHead
from keyhole.families.norms.before import NormBefore
from keyhole.families.single_head import SingleHead

if TYPE_CHECKING:
    from keyhole.families.norms.after import NormAfter

# Families that may have a residual; a norm after heads is added by its own module, as it may stand after a residual.
KINDS: dict[str, type[Any]] = {each.family: each for each in (SingleHead, MultiHead, NormBefore)}


@register
@dataclass(frozen=True, eq=False)
class Residual(Family):
    """f(X) = x_N + attention(X), x_N the last token: answers as wide as tokens are."""

    attention: SingleHead | MultiHead | NormBefore | NormAfter

    family: ClassVar[str] = "residual"

    def __post_init__(self) -> None:
        if not isinstance(self.attention, tuple(KINDS.values())) or self.attention.outputs != self.attention.width:
            raise UsageError(
                "Residual.attention must be a SingleHead, MultiHead, NormBefore or NormAfter with as many outputs as "
                "inputs"
            )

    @classmethod
    def around(cls, attention: Any) -> Residual | None:
        """The layer of heads; None of anything else."""
        return cls(attention) if isinstance(attention, tuple(KINDS.values())) else None  # type: ignore[arg-type]

    @property
    def width(self) -> int:
        """Numbers per token."""
        return self.attention.width

    @property
    def outputs(self) -> int | None:
        """Numbers per answer."""
        return self.attention.outputs

    @property
    def heads(self) -> tuple[SingleHead, ...]:
        """Those of the attention."""
        return self.attention.anatomy.heads

    @property
    def output_bias(self) -> Array | None:
        """That of the attention."""
        return self.attention.output_bias

    @property
    def constant(self) -> Array | None:
        """That of the attention."""
        return self.attention.constant

    @property
    def words(self) -> dict[str, str]:
        """The family of the attention, and its words."""
        return {"attention": self.attention.family, **self.attention.words}

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
        """A copy in which all tokens weigh the same."""
        return Residual(self.attention.without_attention())

    def padded(self, absent: Array) -> Residual | None:  # (batch, length)
        """The layer whose attention has no weight on what pads sequences; None where it counts tokens or places."""
        attention = self.attention.padded(absent)
        return None if attention is None else Residual(attention)

    def loudest(self) -> Array:  # (width,)
        """The unit token of the largest values."""
        return self.attention.loudest()

    def error_bar(self, radius: Residual, tokens: Array, rounding: float) -> Array:  # -> (batch, width)
        """First-order bound on `|f_true − f_self|` for parameters right within `radius`."""
        bound = self.attention.error_bar(radius.attention, tokens, rounding)  # type: ignore[arg-type]
        return bound + rounding * namespace(tokens).abs(tokens[:, -1, :])

    def effects(self, change: Residual, tokens: Array) -> Iterator[tuple[str, Array]]:
        """Those of changes of the attention."""
        return self.attention.effects(change.attention, tokens)  # type: ignore[arg-type]

    def token_norm(self, size: float) -> float:
        """The norm at which random tokens have logits of about `size`; inf when none has any."""
        return self.attention.token_norm(size)

    def arrays(self) -> dict[str, Array]:
        """The parameters that are present, as the attention names them: it is all that the layer has."""
        return self.attention.arrays()

    @classmethod
    def of_arrays(cls, *, attention: str = "", **arrays: Array) -> Residual:
        """The layer of arrays named as the attention names them, and the family of that."""
        if attention not in KINDS:
            raise TypeError(f"a residual has no attention of the family {attention!r}")
        return cls(KINDS[attention].of_arrays(**arrays))

    @property
    def anatomy(self) -> Anatomy:
        """The heads of the attention."""
        inner = self.attention.anatomy
        return replace(inner, title=f"{inner.title}, beside a residual")

    @property
    def counting_bound(self) -> int:
        """That of the attention: the last token is known."""
        return self.attention.counting_bound

    def sensitivity(self, tokens: Floats, unit: float, looked_at: Array) -> Sensitivity:
        """That of the attention, the last token added to answers and their rounding."""
        inner, last = self.attention.sensitivity(tokens, unit, looked_at), tokens[:, -1, :]
        return replace(inner, answers=inner.answers + last, rounding=inner.rounding + unit * np.abs(last))
