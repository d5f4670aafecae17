"""Attention modules of transformers with random weights, computing in float64 throughout, and their heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

import keyhole as kh
from keyhole.families.forms import QKNormRotary, Rotary
from keyhole.families.parts import Attention, Sink, Softcap

# Modules, and the options that read them.
KINDS: dict[str, dict[str, Any]] = {
    "Gemma2": {"form": "rotary", "link": "softcap"},
    "GptOss": {"form": "rotary", "normaliser": "sink"},
    "Mistral": {"form": "rotary"},
    "Qwen3": {"form": "qk-norm-rotary"},
    "Gemma3": {"form": "qk-norm-rotary"},
}
HEADS, WIDTH, KEY = 4, 32, 8


@dataclass
class Module:
    """An attention module, its angles per position, and its heads."""

    answer: Callable[[Any], np.ndarray]  # (batch, length, width) -> (batch, width)
    frequencies: np.ndarray
    heads: kh.MultiHead


@contextmanager
def softmax_in_float64() -> Iterator[None]:
    """The modules ask their softmax for float32; here it stays in the dtype of the scores."""
    import torch

    plain = torch.nn.functional.softmax

    def whole(scores: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
        del dtype
        return plain(scores, dim=dim, _stacklevel=_stacklevel)

    torch.nn.functional.softmax = whole  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.nn.functional.softmax = plain


def module(kind: str, keys: int, seed: int, small: float | None = None) -> Module:
    """One of `KINDS` with four heads that share so many keys; biases are zero, `small` is what norms add to squares."""
    import torch
    import transformers

    torch.manual_seed(seed)
    text = "Text" if kind == "Gemma3" else ""
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": keys, "head_dim": KEY}
    more = {"query_pre_attn_scalar": KEY} if kind.startswith("Gemma") else {}
    config = getattr(transformers, f"{kind}{text}Config")(
        **sizes, **more, num_hidden_layers=2, intermediate_size=16, vocab_size=20
    )
    config._attn_implementation = "eager"
    folder = {"GptOss": "gpt_oss"}.get(kind, kind.lower())
    modelling = __import__(f"transformers.models.{folder}.modeling_{folder}", fromlist=["_"])
    layer = getattr(modelling, f"{kind}Attention")(config, 0).double().eval()
    for name, parameter in layer.named_parameters():
        if "bias" in name:
            torch.nn.init.zeros_(parameter)
        elif "norm" in name:
            torch.nn.init.normal_(parameter, mean=0.0 if kind == "Gemma3" else 1.0, std=0.3)
        else:
            torch.nn.init.normal_(parameter, std=1.0 if "sink" in name else WIDTH**-0.5)
    for norm in layer.modules():
        if "RMSNorm" in type(norm).__name__:
            norm.forward = _norm_in_float64(norm, kind, small)
    rotary = getattr(modelling, f"{kind}RotaryEmbedding")(config)
    angles = _angles(rotary)
    factor = float(getattr(rotary, "attention_scaling", 1.0))

    def answer(tokens: Any) -> np.ndarray:
        given = torch.as_tensor(np.asarray(tokens), dtype=torch.float64)
        turns = torch.arange(given.shape[1], dtype=torch.float64)[:, None] * torch.as_tensor(angles)
        turns = turns if kind == "GptOss" else torch.cat([turns, turns], dim=-1)
        positions = (turns.cos()[None] * factor, turns.sin()[None] * factor)
        with torch.no_grad(), softmax_in_float64():
            return layer(given, position_embeddings=positions, attention_mask=None)[0][:, -1].numpy()

    return Module(answer, angles, _heads(layer, kind, keys, angles, factor, small))


def _angles(rotary: Any) -> np.ndarray:
    """Angles per position: of layers with a window, where there are two kinds."""
    named = {name: buffer for name, buffer in rotary.named_buffers() if "inv_freq" in name and "original" not in name}
    near = [name for name in named if "sliding" in name] or list(named)
    return np.asarray(named[near[0]].double())


def _norm_in_float64(norm: Any, kind: str, small: float | None) -> Callable[[Any], Any]:
    gain = 1 + norm.weight if kind == "Gemma3" else norm.weight
    added = _added(norm) if small is None else small
    return lambda rows: rows * (rows.pow(2).mean(-1, keepdim=True) + added).rsqrt() * gain


def _added(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))


def _heads(layer: Any, kind: str, keys: int, angles: np.ndarray, factor: float, small: float | None) -> kh.MultiHead:
    def weights(name: str) -> np.ndarray:
        return np.asarray(getattr(layer, name).weight.detach())

    query, key, value, out = (weights(f"{name}_proj") for name in "qkvo")
    scale = float(layer.scaling) * factor**2
    heads = []
    for head in range(HEADS):
        rows = slice(head * KEY, (head + 1) * KEY)
        shared = slice(head * keys // HEADS * KEY, (head * keys // HEADS + 1) * KEY)
        attention = Attention()
        if kind == "Gemma2":
            attention = Attention(link=Softcap(50.0))
        elif kind == "GptOss":
            attention = Attention(normaliser=Sink(float(layer.sinks[head].detach())))
        if "norm" in KINDS[kind]["form"]:
            own = [np.asarray(each.weight.detach()) + (kind == "Gemma3") for each in (layer.q_norm, layer.k_norm)]
            added = None if small is not None else KEY * _added(layer.q_norm) * np.ones(2)
            form: Any = QKNormRotary(query[rows], key[shared], own[0] * KEY * scale, own[1], angles, added)
        else:
            form = Rotary(query[rows] * scale, key[shared], angles)
        heads.append(kh.FormHead(form, value[shared].T @ out[:, rows].T, attention=attention))
    return kh.MultiHead(heads)
