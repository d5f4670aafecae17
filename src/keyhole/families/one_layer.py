"""One layer of a Transformer: an attention head, then a net of one hidden layer, with or without a residual."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any, ClassVar

import numpy as np

from keyhole.arrays import Array, namespace
from keyhole.errors import UsageError
from keyhole.families.files import save_arrays
from keyhole.families.relu_net import STEEPEST, ReluNet
from keyhole.families.single_head import SingleHead

# The box may compute the net behind the value matrix in two steps where the recovered one takes one, or the other
# way round: its roundings are a few times those of this prediction.
UNKNOWN_ARITHMETIC = 4.0
# Logits that leave one token most of the weight.
NEARLY_SATURATED = 6.0
# So many times as far out as the typical kink nearly all kinks are passed: a net that differs there is found out.
FAR_OUT = 16.0
# Slopes of a net that is only known as a function are taken over this part of the length of its argument.
SLOPE_STEP = 2.0**-16


@dataclass(frozen=True, eq=False)
class OneLayer:
    """f(X) = ffn(attention(X)), or ffn(x_N + attention(X)) with a residual, x_N the last token.

    `ffn` is a `ReluNet`, or anything else that is called like one and has its `error_bar`: a net that a learner of
    yours has found. Only those with a `ReluNet` can be saved.
    """

    attention: SingleHead  # its value is (width, inner); with a residual inner = width
    ffn: ReluNet  # takes tokens of width inner
    residual: bool = False

    family: ClassVar[str] = "one-layer"

    def __post_init__(self) -> None:
        if not isinstance(self.attention, SingleHead) or self.attention.outputs is None:
            raise UsageError("OneLayer.attention must be a SingleHead whose value is a matrix (width, inner)")
        # Radii of a net that a learner has found are its own business, and may be nothing.
        if self.ffn is not None and not callable(self.ffn):
            raise UsageError(f"OneLayer.ffn must be a ReluNet, not {type(self.ffn).__name__}")
        inner = self.attention.outputs
        if self.residual and inner != self.attention.width:
            raise UsageError(
                f"a residual adds tokens of width {self.attention.width} to attention of width {inner}: they must agree"
            )
        if isinstance(self.ffn, ReluNet) and self.ffn.width != inner:
            raise UsageError(f"OneLayer.ffn takes tokens of width {self.ffn.width}, attention makes {inner}")

    @property
    def width(self) -> int:
        """Numbers per token."""
        return self.attention.width

    @property
    def outputs(self) -> int | None:
        """Numbers per answer; None when the answer is a plain number."""
        return self.ffn.outputs

    def without_attention(self) -> OneLayer:
        """The same layer with all tokens weighing the same."""
        return OneLayer(self.attention.without_attention(), self.ffn, self.residual)

    def beside_attention(self) -> ReluNet:
        """The net as a function of the last token and the mixture that attention makes, one behind the other.

        Apart from the score matrix this is all that queries can tell of the layer, whatever its value matrix and the
        weights behind it are.
        """
        net, value = self.ffn, self.attention.value
        xp = namespace(value)

        def seen(weights: Array) -> Array:  # (..., inner) -> (..., 2·width)
            mixture = weights @ value.T
            return xp.concat([weights if self.residual else xp.zeros_like(mixture), mixture], axis=-1)

        bias_in, bias_out = net.bias_in, net.bias_out
        if self.attention.output_bias is not None:
            bias_in = bias_in + net.weights_in @ self.attention.output_bias
            bias_out = bias_out if net.skip is None else bias_out + net.skip @ self.attention.output_bias
        skip = None if net.skip is None else seen(net.skip)
        return ReluNet(seen(net.weights_in), bias_in, net.weights_out, bias_out, skip, net.activation)

    @property
    def words(self) -> dict[str, str]:
        """What determines the layer besides numbers."""
        return {"residual": "true" if self.residual else "false", **self.ffn.words}

    def arrays(self) -> dict[str, Array]:
        """The parameters that are present, by names such as attention.score and ffn.weights_in."""
        return dict(self._named())

    def _named(self) -> Iterator[tuple[str, Array]]:
        for part in ("attention", "ffn"):
            for name, array in getattr(getattr(self, part), "arrays", dict)().items():
                yield f"{part}.{name}", array

    @classmethod
    def of_arrays(cls, *, residual: str = "false", activation: str = "relu", **arrays: Any) -> OneLayer:
        """The layer of arrays named as `arrays` names them, and what a file says in words."""
        known = {
            "attention": {field.name for field in fields(SingleHead)},
            "ffn": {field.name for field in fields(ReluNet)},
        }
        parts: dict[str, dict[str, Any]] = {part: {} for part in known}
        for name, array in arrays.items():
            part, _, inner = name.partition(".")
            if inner not in known.get(part, ()):
                raise TypeError(f"a one-layer has no {name!r}")
            parts[part][inner] = array
        return cls(SingleHead(**parts["attention"]), ReluNet(**parts["ffn"], activation=activation), residual == "true")

    def __call__(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch,) or (batch, outputs)
        """Answer a batch of sequences."""
        return self.ffn(self._into_ffn(tokens)[:, None, :])

    def _into_ffn(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch, inner)
        mixed = self.attention(tokens)
        return mixed + tokens[:, -1, :] if self.residual else mixed

    def like(self, tokens: Array) -> OneLayer:
        """The same layer with its parameters in the library, dtype and device of `tokens`."""
        ffn = self.ffn.like(tokens) if hasattr(self.ffn, "like") else self.ffn
        return OneLayer(self.attention.like(tokens), ffn, self.residual)

    def error_bar(
        self,
        radius: OneLayer,  # entrywise radii of the parameters; of the net whatever its own error_bar takes
        tokens: Array,  # (batch, length, width)
        rounding: float,  # relative error of one inner product of unit vectors
    ) -> Array:  # (batch,) or (batch, outputs)
        """First-order bar on |f_true − f_self| when the parameters are right within `radius`.

        The bar of attention passes through the net in the worst way that its weights allow.
        """
        rounding = UNKNOWN_ARITHMETIC * rounding
        entering = self._into_ffn(tokens)
        moved = self.attention.error_bar(radius.attention, tokens, rounding)
        if self.residual:
            moved = moved + rounding * namespace(tokens).abs(tokens[:, -1, :])
        own = self.ffn.error_bar(radius.ffn, entering[:, None, :], rounding)
        return own + passed_through(self.ffn, entering, moved)

    def simplest(self) -> OneLayer:
        """The parameters in the smallest family that holds them: these."""
        return self

    def token_norm(self, logit_size: float) -> float:
        """The norm at which random tokens have logits of about `logit_size` (inf when none has any).

        Large logits may as well be larger: then tokens are so long that all neurons have kinks among them.
        """
        norm = self.attention.token_norm(logit_size)
        if logit_size < NEARLY_SATURATED or not hasattr(self.ffn, "token_norm"):
            return norm
        return max(norm, float(self.ffn.token_norm(FAR_OUT)))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the parameters to a safetensors file that `keyhole.load` reads."""
        if not isinstance(self.ffn, ReluNet):
            raise UsageError(f"a layer whose net is a {type(self.ffn).__name__} cannot be saved, only with a ReluNet")
        save_arrays(path, self.family, self.arrays(), self.words)


def passed_through(ffn: Any, x: Array, bar: Array) -> Array:  # (n, inner), (n, inner) -> (n,) or (n, outputs)
    """How far the answers of a net may move when the entries of its argument move within `bar`, to first order."""
    xp = namespace(x)
    if isinstance(ffn, ReluNet):
        net = ffn.like(x)
        within = bar @ xp.abs(net.weights_in).T  # (n, neurons)
        if net.activation == "relu":  # a neuron that is surely off passes nothing on
            within = xp.where(x @ net.weights_in.T + net.bias_in > -within, within, xp.zeros_like(within))
        out = STEEPEST[net.activation] * within @ _turned(xp.abs(net.weights_out))
        return out if net.skip is None else out + bar @ _turned(xp.abs(net.skip))
    # Differences in both directions of every entry.
    (count, width), answers = x.shape, ffn(x[:, None, :])
    step = SLOPE_STEP * (xp.linalg.vector_norm(x, axis=-1) + np.finfo(np.float32).tiny)  # (n,)
    total = xp.zeros_like(answers)
    unit = xp.eye(width, dtype=x.dtype, device=x.device)
    for entry in range(width):
        moves = [xp.abs(ffn((x + sign * step[:, None] * unit[entry, :])[:, None, :]) - answers) for sign in (1.0, -1.0)]
        weight = bar[:, entry] / step
        total = total + xp.maximum(*moves) * (weight if answers.ndim == 1 else weight[:, None])
    assert total.shape[0] == count
    return total


def _turned(array: Array) -> Array:  # (outputs, n) -> (n, outputs); (n,) stays
    return array.T if array.ndim == 2 else array
