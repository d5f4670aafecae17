"""Random boxes of many kinds, each with the family that it must be found to be of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import keyhole as kh
from keyhole.methods.diagnosis.diagnose import Diagnosis
from keyhole.targets import random_multi_head, random_net, random_single_head

Random = np.random.Generator
Box = Callable[[Any], Any]


def normalised(x: Any, scale: Any, shift: Any) -> Any:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5) * scale + shift


def _sharpness(rng: Random) -> float:
    return float(10 ** rng.uniform(-0.7, 0.7))


def _one(rng: Random, width: int, **options: Any) -> kh.SingleHead:
    options = {"rank": width, "norm": _sharpness(rng), "seed": int(rng.integers(2**31)), **options}
    return random_single_head(width, **options)


def _several(rng: Random, width: int, **options: Any) -> kh.MultiHead:
    heads = int(rng.integers(2, 9))
    if options.get("outputs"):
        options["value_rank"] = max(1, width // heads)
    return random_multi_head(heads, width, norm=_sharpness(rng), seed=int(rng.integers(2**31)), **options)


def _layer(rng: Random, width: int, residual: bool) -> kh.OneLayer:
    head = kh.SingleHead(_one(rng, width).score, rng.standard_normal((width, width)) / width**0.5)
    return kh.OneLayer(head, random_net(width, 2 * width, None, rng), residual=residual)


def _smooth(rng: Random, width: int, activation: str) -> kh.ReluNet:
    net = random_net(width, 2 * width, None, rng)
    return kh.ReluNet(net.weights_in, net.bias_in, net.weights_out, net.bias_out, activation=activation)


def _smooth_layer(rng: Random, width: int) -> kh.OneLayer:
    layer = _layer(rng, width, residual=bool(rng.integers(2)))
    activation = str(rng.choice(["gelu", "gelu_tanh", "silu"]))
    return kh.OneLayer(layer.attention, replace(layer.ffn, activation=activation), residual=layer.residual)


def _linear(rng: Random, width: int) -> Box:
    value = rng.standard_normal(width)
    return lambda x: x[:, -1] @ value


def _average(rng: Random, width: int) -> Box:
    value = rng.standard_normal(width)
    return lambda x: (x @ value).mean(axis=1)


def _beside(rng: Random, width: int) -> Box:
    heads = _several(rng, width, outputs=width)
    return lambda x: heads(x) + x[:, -1]


def _normalised_after(rng: Random, width: int) -> Box:
    heads, (scale, shift) = _several(rng, width, outputs=width), rng.standard_normal((2, width))
    return lambda x: normalised(heads(x) + x[:, -1], scale, shift)


def _normalised_before(rng: Random, width: int) -> Box:
    heads, (scale, shift) = _several(rng, width, outputs=width), rng.standard_normal((2, width))
    return lambda x: heads(normalised(x, scale, shift)) + x[:, -1]


def _positional(rng: Random, width: int) -> Box:
    heads, places = _several(rng, width), rng.standard_normal((64, width))
    return lambda x: heads(x + places[: x.shape[1]])


KINDS: dict[str, tuple[str, Callable[[Random, int], Box]]] = {
    "linear in the last token": ("linear in the last token", _linear),
    "plain average": ("average", _average),
    "one head": ("single-head", _one),
    "one head of rank 1 to 3": ("single-head", lambda rng, d: _one(rng, d, rank=int(rng.integers(1, 4)))),
    "one head, biases": ("single-head", lambda rng, d: _one(rng, d, score_bias=0.3, output_bias=1.0)),
    "one head, several outputs": ("single-head", lambda rng, d: _one(rng, d, outputs=int(rng.integers(2, d)))),
    "2 to 8 heads, one output": ("multi-head", _several),
    "2 to 8 heads, d outputs": ("multi-head", lambda rng, d: _several(rng, d, outputs=d)),
    "2 to 8 heads, d outputs, biases": (
        "multi-head",
        lambda rng, d: _several(rng, d, outputs=d, score_bias=0.3, output_bias=1.0),
    ),
    "heads with a residual": ("attention with a residual", _beside),
    "heads, then a normalisation": ("normalised", _normalised_after),
    "heads behind a normalisation": ("normalised", _normalised_before),
    "ReLU net": ("relu-net", lambda rng, d: random_net(d, 2 * d, None, rng)),
    "GELU net": ("relu-net", lambda rng, d: _smooth(rng, d, "gelu")),
    "GELU net, tanh form": ("relu-net", lambda rng, d: _smooth(rng, d, "gelu_tanh")),
    "SiLU net": ("relu-net", lambda rng, d: _smooth(rng, d, "silu")),
    "head, then a net": ("one-layer", lambda rng, d: _layer(rng, d, residual=False)),
    "head with a residual, then a net": ("one-layer", lambda rng, d: _layer(rng, d, residual=True)),
    "head, then a GELU or SiLU net": ("one-layer", _smooth_layer),
    "positions count": ("positional", _positional),
}


def right(found: Diagnosis, kind: str, box: Any) -> bool:
    """Whether the family was named, and of a net its activation."""
    net = box.ffn if isinstance(box, kh.OneLayer) else box
    named = not isinstance(net, kh.ReluNet) or found.found("activation") == net.activation
    return found.family == KINDS[kind][0] and named
