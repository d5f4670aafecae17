"""Attention whose answer is normalised, with the last token added before: what BERT has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from keyhole.arrays import Array, Floats, floats, like, namespace
from keyhole.errors import UsageError
from keyhole.families import residual
from keyhole.families.base import Anatomy, Family, below, check_shapes, under
from keyhole.families.files import register
from keyhole.families.multi_head import MultiHead
from keyhole.families.norms.before import NormBefore
from keyhole.families.norms.normalise import cancellation, centred, check_norm, size_of, step_of
from keyhole.families.residual import Residual
from keyhole.families.single_head import SingleHead

Inner = SingleHead | MultiHead | Residual | NormBefore
KINDS: dict[str, type[Inner]] = {each.family: each for each in (SingleHead, MultiHead, Residual, NormBefore)}


@register
@dataclass(frozen=True, eq=False)
class NormAfter(Family):
    """f(X) = gain·n(attention(X)) + bias, n a norm; `attention` is a `Residual` where the last token is added before.

    LayerNorm: n(h) = (h − mean h)/√(var h + ε). RMSNorm: n(h) = h/√(mean h² + ε).
    """

    attention: Inner
    gain: Array  # (outputs,)
    bias: Array  # (outputs,)
    epsilon: Array  # ()
    norm: str = "layer"  # or rms
    # Of radii only, (width, outputs): those of the sum of all heads' values, which single tokens tell better than each.
    alone: Array | None = None

    family: ClassVar[str] = "norm-after"

    def __post_init__(self) -> None:
        if not isinstance(self.attention, Inner) or self.attention.outputs is None:
            raise UsageError("NormAfter.attention must be heads of several outputs, or such heads with a residual")
        object.__setattr__(self, "epsilon", self.epsilon if hasattr(self.epsilon, "ndim") else np.asarray(self.epsilon))
        check_norm(self.norm, self.epsilon)
        check_shapes(self, gain=(self.attention.outputs,), bias=(self.attention.outputs,))

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
        """That of the attention, inside the norm."""
        return self.attention.output_bias

    @property
    def constant(self) -> Array:
        """The bias behind the norm."""
        return self.bias

    @property
    def words(self) -> dict[str, str]:
        """The norm, the family inside, and its words."""
        return {"norm": self.norm, **under("attention", {"family": self.attention.family, **self.attention.words})}

    def _answer(self, inner: Array) -> Array:  # (…, outputs) -> the same
        seen = centred(inner, self.norm)
        return seen / size_of(seen, self.epsilon) * like(self.gain, inner) + like(self.bias, inner)

    def __call__(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch, outputs)
        """Answer a batch of sequences."""
        return self._answer(self.attention(tokens))

    def at_all_positions(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch, length, outputs)
        """The answer with each token in turn as the last one, all tokens staying in sight of it."""
        return self._answer(self.attention.at_all_positions(tokens))

    def simplest(self) -> NormAfter:
        """The parameters in the smallest family that holds them: one head inside is a SingleHead."""
        return replace(self, attention=self.attention.simplest())

    def without_attention(self) -> NormAfter:
        """A copy in which all tokens weigh the same."""
        return replace(self, attention=self.attention.without_attention())

    def loudest(self) -> Array:  # (width,)
        """The unit token of the largest values."""
        return self.attention.loudest()

    def error_bar(self, radius: NormAfter, tokens: Array, rounding: float) -> Array:  # -> (batch, outputs)
        """First-order bound on `|f_true − f_self|` for parameters right within `radius`."""
        inner = self.attention(tokens)
        errors = self.inner_errors(radius, tokens, rounding)
        xp, rounded = namespace(tokens), rounding * (1.0 + cancellation(inner, self.norm))
        bound = self._moved(inner, errors) + sum(effect for _, effect in self._own_effects(radius, inner))
        return bound + rounded * (
            xp.abs(self._answer(inner) - like(self.bias, tokens)) + xp.abs(like(self.bias, tokens))
        )

    def inner_errors(self, radius: NormAfter, tokens: Array, rounding: float) -> Array:  # (batch, outputs)
        """What is normalised may be off by this."""
        inner = radius.attention
        if radius.alone is None or tokens.shape[1] > 1:
            return self.attention.error_bar(inner, tokens, rounding)  # type: ignore[arg-type]
        exact = inner.with_arrays({name: 0 * array for name, array in inner.arrays().items()})
        rounded = self.attention.error_bar(exact, tokens, rounding)  # type: ignore[arg-type]
        offset = 0.0 if inner.output_bias is None else like(inner.output_bias, tokens)
        return rounded + namespace(tokens).sqrt(tokens[:, 0] ** 2 @ like(radius.alone, tokens) ** 2) + offset

    def _moved(self, inner: Array, errors: Array) -> Array:  # (batch, outputs)
        """How far answers move, at most, where what is normalised moves by up to `errors`."""
        xp, seen = namespace(inner), centred(inner, self.norm)
        size = size_of(seen, self.epsilon)
        unit = xp.abs(seen / size)
        moved = errors + xp.mean(errors, axis=-1, keepdims=True) if self.norm == "layer" else errors
        return xp.abs(like(self.gain, inner)) / size * (moved + unit * xp.mean(unit * errors, axis=-1, keepdims=True))

    def _own_effects(self, change: NormAfter, inner: Array) -> Iterator[tuple[str, Array]]:
        """How far changes of gain, bias and epsilon move answers."""
        xp, step = namespace(inner), step_of(self.epsilon)
        seen = centred(inner, self.norm)
        yield "gain", xp.abs(seen / size_of(seen, self.epsilon)) * like(change.gain, inner)
        yield "bias", 0 * inner + like(change.bias, inner)
        plus, minus = (replace(self, epsilon=abs(self.epsilon + way * step))._answer(inner) for way in (1, -1))
        yield "epsilon", like(change.epsilon, inner) * xp.abs(plus - minus) / (2 * step)

    def effects(self, change: NormAfter, tokens: Array) -> Iterator[tuple[str, Array]]:
        """Those of changes of the attention through the norm, and those of changes of the norm."""
        inner = self.attention(tokens)
        for name, errors in self.attention.effects(change.attention, tokens):  # type: ignore[arg-type]
            yield name, self._moved(inner, errors)
        shows = bool(np.any(floats(self.bias)))  # as that of RMSNorm, which has none, does not
        yield from (each for each in self._own_effects(change, inner) if shows or each[0] != "bias")

    def token_norm(self, size: float) -> float:
        """The norm at which random tokens have logits of about `size`; inf when none has any."""
        return self.attention.token_norm(size)

    def logit_norm(self, radius: NormAfter, logit_radius: float) -> float:
        """The norm up to which the radii leave logits of random tokens known to `logit_radius`."""
        return self.attention.logit_norm(radius.attention, logit_radius)  # type: ignore[arg-type]

    def onto_kinks(self, x: Floats, rng: np.random.Generator) -> Floats:  # (n, width) -> (n, width)
        """Tokens of which, alone, about as much is left to normalise as epsilon is; as they are where none is known."""
        if isinstance(self.attention, NormBefore) or self.outputs != self.width:
            return x
        inner = self.attention
        linear = sum(floats(head.value) for head in self.heads) + isinstance(inner, Residual) * np.eye(self.width)
        linear = centred(linear, self.norm)
        offset = np.zeros(self.width) if inner.output_bias is None else centred(floats(inner.output_bias), self.norm)
        if not np.any(linear):
            return x
        nothing = np.linalg.lstsq(linear.T, -offset, rcond=None)[0]
        ways = rng.standard_normal(x.shape) @ linear.T
        sizes = np.sqrt(np.mean((ways @ linear) ** 2, axis=1, keepdims=True))
        spread = np.exp(rng.uniform(-1.0, 1.0, (len(x), 1)))
        return np.asarray(nothing + spread * float(self.epsilon) ** 0.5 * ways / np.where(sizes > 0, sizes, 1.0))

    def arrays(self) -> dict[str, Array]:
        """Gain, bias and epsilon, and what is inside, by names such as attention.heads.0.score."""
        own = {"gain": self.gain, "bias": self.bias, "epsilon": self.epsilon}
        own = own if self.alone is None else {**own, "alone": self.alone}
        return {**own, **under("attention", self.attention.arrays())}

    @classmethod
    def of_arrays(  # type: ignore[override]
        cls,
        *,
        gain: Array,
        bias: Array,
        epsilon: Array,
        alone: Array | None = None,
        norm: str = "layer",
        **arrays: Array,
    ) -> NormAfter:
        """The layer of arrays and words named by their path."""
        inner = below(cls.family, arrays, "attention")["attention"]
        family = inner.pop("family", "")
        if family not in KINDS:
            raise TypeError(f"a {cls.family} has no attention of the family {family!r}")
        return cls(KINDS[family].of_arrays(**inner), gain, bias, epsilon, norm, alone)

    @property
    def anatomy(self) -> Anatomy:
        """The heads inside."""
        inner = self.attention.anatomy
        return replace(inner, title=f"{inner.title}, then {'LayerNorm' if self.norm == 'layer' else 'RMSNorm'}")

    @property
    def counting_bound(self) -> int:
        """That of what is inside, and gain, bias and epsilon."""
        return self.attention.counting_bound + 3


residual.KINDS[NormAfter.family] = NormAfter
