"""What members of the families compute, in NumPy: heads, nets, a net behind a head."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Floats = np.ndarray
Map = Callable[[Floats], Floats]  # (n, length, width) -> (n,) or (n, outputs)
Mixture = Callable[[Floats, Floats, Floats], Floats]  # tokens, score, score bias -> (n, width)

_ERF = np.frompyfunc(math.erf, 1, 1)


def relu(z: Floats) -> Floats:
    return np.maximum(z, 0.0)


def gelu(z: Floats) -> Floats:
    return 0.5 * z * (1 + _ERF(z / math.sqrt(2)).astype(z.dtype))


def gelu_tanh(z: Floats) -> Floats:
    return 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def silu(z: Floats) -> Floats:
    return z / (1 + np.exp(-np.clip(z, -700, None)))


ACTIVATIONS: dict[str, Map] = {"relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu}


def logits(tokens: Floats, score: Floats, bias: Floats) -> Floats:  # (n, N, d), (d, d), (d,) -> (n, N)
    keys = tokens[:, -1, :] @ score.T + bias
    return np.einsum("nid,nd->ni", tokens, keys)


def softmax(z: Floats) -> Floats:
    weights = np.exp(z - np.max(z, axis=-1, keepdims=True))
    return weights / np.sum(weights, axis=-1, keepdims=True)


def mix(weights: Floats, tokens: Floats) -> Floats:  # (n, N), (n, N, d) -> (n, d)
    return np.einsum("ni,nid->nd", weights, tokens)


def attention(tokens: Floats, score: Floats, bias: Floats) -> Floats:
    """The mixture of tokens that softmax attention makes."""
    return mix(softmax(logits(tokens, score, bias)), tokens)


@dataclass(frozen=True)
class Head:
    score: Floats  # (d, d)
    bias: Floats  # (d,)
    value: Floats  # (d, p)


@dataclass(frozen=True)
class Heads:
    """Heads added up, an output bias, and the last token beside them where `residual`."""

    heads: tuple[Head, ...]
    constant: Floats  # (p,)
    residual: bool = False

    def map(self, mixture: Mixture = attention) -> Map:
        def answers(tokens: Floats) -> Floats:
            total = np.zeros((len(tokens), len(self.constant)), tokens.dtype) + self.constant
            for head in self.heads:
                total = total + mixture(tokens, head.score, head.bias) @ head.value
            return total + tokens[:, -1, :] if self.residual else total

        return answers


@dataclass(frozen=True)
class Net:
    """C·act(A·x + a) + c + S·x, x the last token."""

    inner: Floats  # (k, d)
    inner_bias: Floats  # (k,)
    outer: Floats  # (p, k)
    constant: Floats  # (p,)
    skip: Floats  # (p, d)
    activation: str = "relu"

    def on_vectors(self, x: Floats) -> Floats:  # (n, d) -> (n, p)
        hidden = ACTIVATIONS[self.activation](x @ self.inner.T + self.inner_bias)
        return hidden @ self.outer.T + self.constant + x @ self.skip.T

    def map(self) -> Map:
        return lambda tokens: self.on_vectors(tokens[:, -1, :])


@dataclass(frozen=True)
class Layer:
    """Heads, then a net; with `residual` the last token is added before the net."""

    heads: tuple[Head, ...]
    constant: Floats  # (inner,) of attention
    net: Net
    residual: bool = False

    @property
    def width(self) -> int:
        return len(self.heads[0].value)

    def map(self, mixture: Mixture = attention) -> Map:
        def answers(tokens: Floats) -> Floats:
            inner = sum(mixture(tokens, head.score, head.bias) @ head.value for head in self.heads) + self.constant
            return self.net.on_vectors(inner + tokens[:, -1, :] if self.residual else inner)

        return answers


Params = Heads | Net | Layer


# Words that name parts of attention which are not those of a softmax.
PARTS = ("form", "link", "normaliser", "position_bias", "length_law")


def params_of(family: str, arrays: Mapping[str, Floats], words: Mapping[str, str]) -> Params | None:
    """Parameters from the arrays of a result by their names; what is absent is zero.

    None for another family, and for attention of other parts than a softmax's, which is judged by its function alone.
    """
    if set(words) & set(PARTS):
        return None
    arrays = {name: np.asarray(array, dtype=float) for name, array in arrays.items()}
    if family == "relu-net":
        return _net(arrays, words)
    if family == "one-layer":
        attended, net = _below("attention.", arrays), _net(_below("ffn.", arrays), words)
        heads, constant = _heads(attended)
        return Layer(heads, constant, net, words.get("residual") == "true")
    if family in ("single-head", "multi-head", "residual"):
        heads, constant = _heads(arrays)
        return Heads(heads, constant, family == "residual")
    return None


def _below(start: str, arrays: Mapping[str, Floats]) -> dict[str, Floats]:
    return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}


def _net(arrays: Mapping[str, Floats], words: Mapping[str, str]) -> Net:
    inner = arrays["weights_in"]
    outer = np.atleast_2d(arrays["weights_out"])
    skip = arrays.get("skip")
    skip = np.zeros((len(outer), inner.shape[1])) if skip is None else np.atleast_2d(skip)
    constant = np.atleast_1d(arrays["bias_out"])
    return Net(inner, arrays["bias_in"], outer, constant, skip, words.get("activation", "relu"))


def _heads(arrays: Mapping[str, Floats]) -> tuple[tuple[Head, ...], Floats]:
    arrays = {name.removeprefix("attention."): array for name, array in arrays.items()}
    names = sorted({name.rpartition(".")[0] for name in arrays if name.endswith("score")})
    heads = []
    for name in names:
        own = _below(f"{name}." if name else "", arrays)
        value = own["value"] if own["value"].ndim == 2 else own["value"][:, None]
        heads.append(Head(own["score"], own.get("score_bias", np.zeros(len(value))), value))
    constant = np.atleast_1d(arrays.get("output_bias", np.zeros(heads[0].value.shape[1])))
    return tuple(heads), constant
