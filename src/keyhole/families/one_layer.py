"""One layer of a Transformer: attention, then a net of one hidden layer, with or without a residual."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import ClassVar

import numpy as np

from keyhole.arrays import Array, Floats, floats, namespace
from keyhole.errors import UsageError
from keyhole.families.base import Anatomy, Family, Sensitivity, below, is_family, under
from keyhole.families.files import register
from keyhole.families.multi_head import MultiHead
from keyhole.families.relu_net import ReluNet
from keyhole.families.sensitivity import sensitivity_of_layer
from keyhole.families.single_head import SingleHead

# The oracle may compute the net behind the value matrix in two steps where the recovered one takes one, or the other
# way round: its roundings are a few times those of this prediction.
UNKNOWN_ARITHMETIC = 4.0
# Logits that leave one token most of the weight.
NEARLY_SATURATED = 6.0
# So many times as far out as the typical kink nearly all kinks are passed: a net that differs there is found out.
FAR_OUT = 16.0

# Singular values below this part of the largest may be errors of an estimate.
SURE_RANK = 1e-6
# Slopes are taken over this part of the length of the argument.
SLOPE_STEP = 2.0**-16
# What logits are linear in.
LOGIT_ARRAYS = ("score", "score_bias")


@dataclass(frozen=True, eq=False)
class OpaqueNet(Family):
    """f(X) = function(x_N), x_N the last token; of radii, whatever the function's `error_bar` takes."""

    function: Family  # or anything that is called like one and has its `error_bar`
    inner: int = 0  # numbers per token

    family: ClassVar[str] = "opaque-net"

    @property
    def width(self) -> int:
        """Numbers per token."""
        return self.inner

    @property
    def outputs(self) -> int | None:
        """Numbers per answer, where the function says so."""
        return getattr(self.function, "outputs", None)

    def arrays(self) -> dict[str, Array]:
        """None: they are the function's own."""
        return {}

    def __call__(self, tokens: Array) -> Array:  # (batch, 1, width) -> (batch,) or (batch, outputs)
        """Answer single tokens."""
        return self.function(tokens)

    def with_arrays(self, named: dict[str, Array]) -> OpaqueNet:  # noqa: ARG002
        """The net itself: its arrays are not known."""
        return self

    def like(self, tokens: Array) -> OpaqueNet:  # noqa: ARG002
        """The net itself: its arrays are not known."""
        return self

    def error_bar(self, radius: OpaqueNet, tokens: Array, rounding: float) -> Array:
        """The function's own bound."""
        return self.function.error_bar(radius.function, tokens, rounding)

    def token_norm(self, size: float) -> float:
        """The function's own norm at which something happens; 0 where it does not say."""
        own = getattr(self.function, "token_norm", None)
        return 0.0 if own is None else float(own(size))

    def propagate_radius(self, x: Array, radius: Array) -> Array:  # (n, width), (n, width) -> (n,) or (n, outputs)
        """How far answers may move when the entries of their argument move within `radius`, by differences."""
        xp, answers = namespace(x), self(x[:, None, :])
        step = SLOPE_STEP * (xp.linalg.vector_norm(x, axis=-1) + np.finfo(np.float32).tiny)  # (n,)
        total = xp.zeros_like(answers)
        unit = xp.eye(x.shape[1], dtype=x.dtype, device=x.device)
        for entry in range(x.shape[1]):
            ends = [(x + sign * step[:, None] * unit[entry, :])[:, None, :] for sign in (1.0, -1.0)]
            weight = radius[:, entry] / step
            steepest = xp.maximum(*(xp.abs(self(end) - answers) for end in ends))
            total = total + steepest * (weight if answers.ndim == 1 else weight[:, None])
        return total


@register
@dataclass(frozen=True, eq=False)
class OneLayer(Family):
    """f(X) = ffn(attention(X)), or ffn(x_N + attention(X)) with a residual, x_N the last token.

    `ffn` is a `ReluNet`, or anything else that is called like one and has its `error_bar`: a net that a learner of
    yours has found, which becomes an `OpaqueNet`. Only layers with a `ReluNet` can be saved.
    """

    attention: SingleHead | MultiHead  # values are (width, inner); with a residual inner = width
    ffn: ReluNet | OpaqueNet  # takes tokens of width inner
    residual: bool = False

    family: ClassVar[str] = "one-layer"

    def __post_init__(self) -> None:
        if not isinstance(self.attention, SingleHead | MultiHead) or self.attention.outputs is None:
            raise UsageError(
                "OneLayer.attention must be a SingleHead or a MultiHead, the value of a head a matrix (width, inner)"
            )
        # Radii of a net that a learner has found are its own business, and may be nothing.
        if self.ffn is not None and not callable(self.ffn):
            raise UsageError(f"OneLayer.ffn must be a ReluNet, not {type(self.ffn).__name__}")
        inner = self.attention.outputs
        object.__setattr__(self, "ffn", as_net(self.ffn, inner))
        if self.residual and inner != self.attention.width:
            raise UsageError(
                f"a residual adds tokens of width {self.attention.width} to attention of width {inner}: they must agree"
            )
        if self.ffn.width != inner:
            raise UsageError(f"OneLayer.ffn takes tokens of width {self.ffn.width}, attention makes {inner}")

    @property
    def width(self) -> int:
        """Numbers per token."""
        return self.attention.width

    @property
    def outputs(self) -> int | None:
        """Numbers per answer; None when the answer is a plain number."""
        return self.ffn.outputs

    @property
    def net(self) -> ReluNet:
        """The net; UsageError where it is known as a function only."""
        if not isinstance(self.ffn, ReluNet):
            kind = type(self.ffn.function).__name__
            raise UsageError(
                f"a layer whose net is a {kind} cannot be compared and cannot be saved, only with a ReluNet"
            )
        return self.ffn

    @property
    def heads(self) -> tuple[SingleHead, ...]:
        """The heads of attention, without its output bias."""
        return tuple(MultiHead.of(self.attention).heads)

    def without_attention(self) -> OneLayer:
        """A copy in which all tokens weigh the same."""
        return OneLayer(self.attention.without_attention(), self.ffn, self.residual)

    def _softer(self) -> OneLayer | None:
        """A copy with logits half as large; None where they are zero, or not those of a score matrix."""
        arrays = self.attention.arrays()
        halved = {name: 0.5 * array for name, array in arrays.items() if name.rpartition(".")[2] in LOGIT_ARRAYS}
        if not any(bool(namespace(array).any(array != 0)) for array in halved.values()):
            return None
        return OneLayer(self.attention.with_arrays({**arrays, **halved}), self.ffn, self.residual)

    def beside_attention(self) -> ReluNet:
        """The net as a function of the last token and of the mixture that each head makes, one behind the other.

        Apart from score matrices this is all that queries can tell of the layer, whatever its values and the weights
        behind them are.
        """
        net, heads = self.net, self.heads
        xp = namespace(heads[0].value)

        def seen(weights: Array) -> Array:  # (..., inner) -> (..., (1 + heads)·width)
            mixtures = [weights @ head.value.T for head in heads]
            return xp.concat([weights if self.residual else xp.zeros_like(mixtures[0]), *mixtures], axis=-1)

        bias_in, bias_out = net.bias_in, net.bias_out
        if self.attention.output_bias is not None:
            bias_in = bias_in + net.weights_in @ self.attention.output_bias
            bias_out = bias_out if net.skip is None else bias_out + net.skip @ self.attention.output_bias
        skip = None if net.skip is None else seen(net.skip)
        return ReluNet(seen(net.weights_in), bias_in, net.weights_out, bias_out, skip, net.activation)

    @property
    def words(self) -> dict[str, str]:
        """Whether there is a residual, the activation, and the parts of attention that are not those of a softmax."""
        own = {"residual": "true" if self.residual else "false", **self.ffn.words}
        return own | under("attention", self.attention.words)

    def arrays(self) -> dict[str, Array]:
        """The parameters that are present, by names such as attention.score and ffn.weights_in."""
        return under("attention", self.attention.arrays()) | under("ffn", self.ffn.arrays())

    @classmethod
    def of_arrays(cls, *, residual: str = "false", activation: str = "relu", **arrays: Array) -> OneLayer:
        """The layer of arrays named by their path, and of its words."""
        parts = below(cls.family, arrays, "attention", "ffn")
        net = ReluNet(**parts["ffn"], activation=activation)
        several = any(name.startswith("heads.") for name in parts["attention"])
        attention = (MultiHead if several else SingleHead).of_arrays(**parts["attention"])
        return cls(attention, net, residual == "true")

    def with_arrays(self, named: dict[str, Array]) -> OneLayer:
        """A copy with other arrays; a net that is a function stays as it is."""
        parts = below(self.family, named, "attention", "ffn")
        attention = self.attention.with_arrays(parts["attention"])
        return OneLayer(attention, self.ffn.with_arrays(parts["ffn"]), self.residual)

    @property
    def constant(self) -> Array:
        """The answer to a token of zero."""
        like = self.heads[0].value
        xp = namespace(like)
        return self(xp.zeros((1, 1, self.width), dtype=like.dtype, device=like.device))[0]

    def padded(self, absent: Array) -> OneLayer | None:  # (batch, length)
        """The layer whose attention has no weight on what pads sequences; None where it counts tokens or places."""
        attention = self.attention.padded(absent)
        return None if attention is None else OneLayer(attention, self.ffn, self.residual)

    def as_single_tokens(self, tokens: Array) -> Array | None:  # (batch, length, width) -> (batch, width)
        """What the only head mixes of their tokens; None beside a residual, or of several heads."""
        return None if self.residual else self.attention.as_single_tokens(tokens)

    def onto_kinks(self, x: Floats, rng: np.random.Generator) -> Floats:  # (n, width) -> (n, width)
        """The points moved, as single tokens, onto a kink of the net each."""
        if not isinstance(self.ffn, ReluNet):
            return x
        seen = self.beside_attention()
        weights = floats(seen.weights_in)
        # A single token is both the last and every mixture.
        weights = np.sum(weights.reshape(-1, 1 + len(self.heads), self.width), axis=1)
        return ReluNet(weights, floats(seen.bias_in), floats(seen.weights_out), floats(seen.bias_out)).onto_kinks(
            x, rng
        )

    def __call__(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch,) or (batch, outputs)
        """Answer a batch of sequences."""
        return self.ffn(self._into_ffn(tokens)[:, None, :])

    def _into_ffn(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch, inner)
        mixed = self.attention(tokens)
        return mixed + tokens[:, -1, :] if self.residual else mixed

    def like(self, tokens: Array) -> OneLayer:
        """A copy with all arrays in the library, dtype and device of `tokens`."""
        return OneLayer(self.attention.like(tokens), self.ffn.like(tokens), self.residual)

    def error_bar(self, radius: OneLayer, tokens: Array, rounding: float) -> Array:  # -> (batch,) or (batch, outputs)
        """First-order bound on `|f_true − f_self|` for parameters right within `radius`.

        The bound of attention passes through the net in the worst way that its weights allow.
        """
        rounding = UNKNOWN_ARITHMETIC * rounding
        entering = self._into_ffn(tokens)
        moved = self.attention.error_bar(radius.attention, tokens, rounding)  # type: ignore[arg-type]
        if self.residual:
            moved = moved + rounding * namespace(tokens).abs(tokens[:, -1, :])
        own = self.ffn.error_bar(radius.ffn, entering[:, None, :], rounding)  # type: ignore[arg-type]
        return own + self.ffn.propagate_radius(entering, moved)

    def effects(self, change: OneLayer, tokens: Array) -> Iterator[tuple[str, Array]]:
        """How far a change of each part of the head, passed through the net, and of the net moves the answers."""
        xp, entering, softer = namespace(tokens), self._into_ffn(tokens), self._softer()
        surely = None if softer is None else xp.abs(softer(tokens) - self(tokens))
        for name, moved in self.attention.effects(change.attention, tokens):  # type: ignore[arg-type]
            effect = self.ffn.propagate_radius(entering, moved)
            # A change of the worst kind turns neurons on, and other tokens up, that no change of the logits' size does.
            yield name, xp.minimum(effect, surely) if name.startswith("score") and surely is not None else effect
        yield from self.ffn.effects(change.ffn, entering[:, None, :])  # type: ignore[arg-type]

    def token_norm(self, size: float) -> float:
        """The norm at which random tokens have logits of about `size`; inf when none has any.

        Large logits may as well be larger: then tokens are so long that all neurons have kinks among them.
        """
        norm = self.attention.token_norm(size)
        return norm if size < NEARLY_SATURATED else max(norm, float(self.ffn.token_norm(FAR_OUT)))

    @property
    def anatomy(self) -> Anatomy:
        """Heads with a net behind them."""
        net, inner = self.ffn.anatomy.net, self.attention.anatomy
        many = [f"{len(inner.heads)} heads"] if inner.numbered else []
        many += [] if net is None else [f"{net.neurons} neurons"]
        title = f"One layer of a Transformer of width {self.width}{' with ' * bool(many)}{' and '.join(many)}"
        return Anatomy(title, inner.heads, inner.numbered, net, behind=True)

    @property
    def counting_bound(self) -> int:
        """The fewest queries that tell the forms of heads, and the net as a function of the mixtures they make."""
        if isinstance(self.attention, SingleHead) or (net := self.ffn.anatomy.net) is None:
            return -(-(self.attention.counting_bound - self.width) // (self.outputs or 1)) + self.ffn.counting_bound
        inner, several = floats(net.weights_in), len(self.heads) * self.width
        if self.residual:  # the weights, and of each value what they look at
            products = inner.size + several * _rank(inner)
        else:  # a matrix of this rank: the products of weights and values
            rank = _rank(inner @ np.hstack([floats(head.value).T for head in self.heads]))
            products = rank * (net.neurons + several - rank)
        numbers = sum(head.numbers_in_logits for head in self.heads) + products
        return -(-(numbers - inner.size) // (self.outputs or 1)) + self.ffn.counting_bound

    def sensitivity(self, tokens: Floats, unit: float, looked_at: Array) -> Sensitivity:
        """Predictions, their rounding, and the first-order effect of every array of head and net."""
        return sensitivity_of_layer(self, tokens, unit, looked_at)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the parameters to a safetensors file that `keyhole.load` reads."""
        _ = self.net  # a function has no arrays that a file could hold
        super().save(path)


def _rank(matrix: Floats) -> int:
    """The rank, errors of an estimate not counted."""
    return int(np.linalg.matrix_rank(matrix, rtol=SURE_RANK))


def as_net(net: object, inner: int) -> ReluNet | OpaqueNet:
    """A net as a family: one of neurons as it is, a function as an `OpaqueNet` on tokens of width `inner`."""
    return net if is_family(net) else OpaqueNet(net, inner)  # type: ignore[return-value, arg-type]
