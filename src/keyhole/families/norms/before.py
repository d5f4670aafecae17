"""Attention on normalised tokens: what GPT-2 and Llama have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from keyhole.arrays import Array, Floats, floats, like, namespace
from keyhole.errors import UsageError
from keyhole.families.base import Anatomy, Family, Part, Sensitivity, below, under
from keyhole.families.files import register
from keyhole.families.multi_head import MultiHead
from keyhole.families.norms.inside import Heads, folded, seen_by, turned
from keyhole.families.norms.normalise import (
    cancellation,
    check_norm,
    mean_free,
    normalise,
    step_of,
    undone_norm,
)
from keyhole.families.single_head import SingleHead

KINDS: dict[str, type[Heads]] = {each.family: each for each in (SingleHead, MultiHead)}
# Tokens of this many times √(width·ε) are normalised to all but the same norm.
SATURATED = 32.0


@register
@dataclass(frozen=True, eq=False)
class NormBefore(Family):
    """f(X) = attention(n(x_1), …, n(x_N)), n a norm without gain and bias, which belong to the heads (`folded`).

    LayerNorm: n(x) = (x − mean x)/√(var x + ε). RMSNorm: n(x) = x/√(mean x² + ε).
    """

    attention: Heads
    epsilon: Array  # ()
    norm: str = "layer"  # or rms

    family: ClassVar[str] = "norm-before"

    def __post_init__(self) -> None:
        if not isinstance(self.attention, SingleHead | MultiHead):
            raise UsageError("NormBefore.attention must be a SingleHead or MultiHead")
        object.__setattr__(self, "epsilon", self.epsilon if hasattr(self.epsilon, "ndim") else np.asarray(self.epsilon))
        check_norm(self.norm, self.epsilon)

    @classmethod
    def folded(
        cls, attention: Heads, gain: Array, epsilon: float, bias: Array | None = None, norm: str = "layer"
    ) -> NormBefore:
        """The layer that normalises with gain and bias: they belong to the heads, what the norm takes off to none."""
        return cls(seen_by(folded(attention, gain, bias), norm), np.asarray(float(epsilon)), norm)

    @property
    def width(self) -> int:
        """Numbers per token."""
        return self.attention.width

    @property
    def outputs(self) -> int | None:
        """Numbers per answer; None when the answer is a plain number."""
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
        """The norm, the family of the attention, and its words."""
        return {"norm": self.norm, **under("attention", {"family": self.attention.family, **self.attention.words})}

    def normalise(self, tokens: Array) -> Array:  # (batch, length, width) -> the same
        """What the heads receive."""
        return normalise(tokens, self.epsilon, self.norm)

    def __call__(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch,) or (batch, outputs)
        """Answer a batch of sequences."""
        return self.attention(self.normalise(tokens))

    def at_all_positions(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch, length[, outputs])
        """The answer with each token in turn as the last one, all tokens staying in sight of it."""
        return self.attention.at_all_positions(self.normalise(tokens))

    def simplest(self) -> NormBefore:
        """The parameters in the smallest family that holds them: one head inside is a SingleHead."""
        return replace(self, attention=self.attention.simplest())

    def without_attention(self) -> NormBefore:
        """A copy in which all tokens weigh the same."""
        return replace(self, attention=self.attention.without_attention())

    def loudest(self) -> Array:  # (width,)
        """The unit token of the largest values."""
        return self.attention.loudest()

    def error_bar(self, radius: NormBefore, tokens: Array, rounding: float) -> Array:  # -> as answers
        """First-order bound on `|f_true − f_self|` for parameters right within `radius`."""
        seen, rounded = self.normalise(tokens), rounding * (1.0 + cancellation(tokens, self.norm))
        bound = self.attention.error_bar(radius.attention, seen, rounded)  # type: ignore[arg-type]
        return bound + like(radius.epsilon, tokens) * self._slope(tokens)

    def _slope(self, tokens: Array) -> Array:  # as answers
        """How fast answers move with epsilon."""
        step = step_of(self.epsilon)
        plus, minus = (replace(self, epsilon=abs(self.epsilon + way * step))(tokens) for way in (1, -1))
        return namespace(tokens).abs(plus - minus) / (2 * step)

    def effects(self, change: NormBefore, tokens: Array) -> Iterator[tuple[str, Array]]:
        """Those of changes of the attention, and that of one of epsilon."""
        yield from self.attention.effects(change.attention, self.normalise(tokens))  # type: ignore[arg-type]
        yield "epsilon", like(change.epsilon, tokens) * self._slope(tokens)

    def token_norm(self, size: float) -> float:
        """The norm at which random tokens have logits of about `size`, or as large as they get; inf if none has."""
        inner, longest = self.attention.token_norm(size), SATURATED * (self.width * float(self.epsilon)) ** 0.5
        if not inner < float("inf"):
            return inner
        return float(min(undone_norm(inner, self.width, float(self.epsilon)), max(longest, self.width**0.5)))

    def logit_norm(self, radius: NormBefore, logit_radius: float) -> float:
        """The norm up to which the radii leave logits of random tokens known to `logit_radius`; inf for any."""
        inner = self.attention.logit_norm(radius.attention, logit_radius)  # type: ignore[arg-type]
        return undone_norm(inner, self.width, float(self.epsilon)) if inner < self.width**0.5 else float("inf")

    def arrays(self) -> dict[str, Array]:
        """Epsilon, and what the attention has, by names such as attention.heads.0.score."""
        return {"epsilon": self.epsilon, **under("attention", self.attention.arrays())}

    @classmethod
    def of_arrays(  # type: ignore[override]
        cls, *, epsilon: Array, norm: str = "layer", **arrays: Array
    ) -> NormBefore:
        """The layer of arrays and words named by their path."""
        inner = below(cls.family, arrays, "attention")["attention"]
        family = inner.pop("family", "")
        if family not in KINDS:
            raise TypeError(f"a {cls.family} has no attention of the family {family!r}")
        return cls(KINDS[family].of_arrays(**inner), epsilon, norm)

    @property
    def anatomy(self) -> Anatomy:
        """The heads of the attention."""
        inner = self.attention.anatomy
        return replace(inner, title=f"{inner.title}, behind {'LayerNorm' if self.norm == 'layer' else 'RMSNorm'}")

    @property
    def counting_bound(self) -> int:
        """That of the heads in the coordinates that the norm sees, and epsilon."""
        return turned(self.attention, mean_free(self.width, self.norm).T).counting_bound + 1

    def sensitivity(self, tokens: Floats, unit: float, looked_at: Array) -> Sensitivity:
        """That of the attention on normalised tokens, and the effect of epsilon."""
        rounded = unit * (1.0 + cancellation(tokens, self.norm))
        inner = self.attention.sensitivity(floats(self.normalise(tokens)), rounded, looked_at)
        slope = floats(self._slope(tokens)).reshape(len(tokens), -1)
        rows = slope[:, looked_at].reshape(-1, 1)
        own = Part("epsilon", None, float(self.epsilon), 1, rows, np.ones_like(rows), slope)
        return replace(inner, parts=(*inner.parts, own))
