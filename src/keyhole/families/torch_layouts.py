"""Attention layers of PyTorch and transformers, and the heads that they are: from one to the other and back.

`heads_of(module)` gives the products that answers depend on, to compare a recovery with a layer that one has;
`weights_of(heads, module)` gives tensors that make a module of the same shape compute those heads.
"""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from keyhole.arrays import Floats
from keyhole.errors import UsageError
from keyhole.families import MultiHead, SingleHead
from keyhole.families.projections import Projections, factored

# A bias that a layer has no room for, over the largest number in its matrices, that is taken for an error and left out.
MOST_BIAS = 1e-3
# What modules call the number of their heads.
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads")
# What a module takes or has where logits depend on more than the two tokens.
# Norms that stand around attention, not in it.
AROUND = ("LayerNorm",)
POSITIONS = re.compile("position|rotary|alibi|relative|past_bias")


def heads_of(module: Any) -> MultiHead:
    """The heads of an attention module: `nn.MultiheadAttention`, or one of BERT, ALBERT or GPT-2 kind."""
    return layout_of(module).read(module).products()


def weights_of(heads: SingleHead | MultiHead, module: Any) -> dict[str, Floats]:
    """Tensors by the names of the module's own, with which it computes these heads.

    Query and key matrices are one factorisation of the score among many, value and output matrices one of the value:
    answers are the same, weights are not.
    """
    layout = layout_of(module)
    own = layout.read(module)
    if (heads.width, heads.outputs) != (own.query.shape[1], own.output.shape[0]):
        raise UsageError(
            f"heads of width {heads.width} with outputs {heads.outputs} do not fit in {type(module).__name__}, "
            f"which has width {own.query.shape[1]} and outputs {own.output.shape[0]}"
        )
    return layout.write(factored(heads, own.heads, own.head_width, own.scale), module)


def layout_of(module: Any) -> ModuleLayout:
    """How a module stores its heads; UsageError where that is unknown."""
    for layout in LAYOUTS:
        if layout.matches(module):
            return layout
    known = ", ".join(layout.kind for layout in LAYOUTS)
    raise UsageError(f"{type(module).__name__} is no attention module of a known kind; known: {known}")


class ModuleLayout(ABC):
    """How one kind of attention module stores its heads."""

    kind: str
    marks: tuple[str, ...] = ()  # attributes that modules of this kind have

    def matches(self, module: Any) -> bool:
        """Whether a module is of this kind."""
        return _has(module, *self.marks)

    @abstractmethod
    def read(self, module: Any) -> Projections:
        """The matrices of a module."""

    @abstractmethod
    def write(self, made: Projections, module: Any) -> dict[str, Floats]:
        """Tensors that hold these matrices, by their names in the module."""


class Torch(ModuleLayout):
    """One matrix for queries, keys and values, one below the other."""

    kind = "nn.MultiheadAttention"
    marks = ("in_proj_weight", "out_proj", "num_heads", "head_dim")

    def read(self, module: Any) -> Projections:
        """The matrices of a module."""
        if module.bias_k is not None or module.add_zero_attn:
            raise UsageError("add_bias_kv and add_zero_attn add a token of their own: such layers are no sum of heads")
        if module.in_proj_weight is not None:
            query, key, value = np.split(plain(module.in_proj_weight), 3)
        else:
            query, key, value = (plain(getattr(module, f"{word}_proj_weight")) for word in "qkv")
        if not query.shape[1] == key.shape[1] == value.shape[1]:
            raise UsageError("keys or values have another width than queries: this is no self-attention")
        rows = query.shape[0]
        biases = np.zeros(3 * rows) if module.in_proj_bias is None else plain(module.in_proj_bias)
        output = plain(module.out_proj.weight)
        matrices, all_biases = (query, key, value, output), (*np.split(biases, 3), _bias(module.out_proj, len(output)))
        return Projections.of(module.num_heads, module.head_dim**-0.5, matrices, all_biases)

    def write(self, made: Projections, module: Any) -> dict[str, Floats]:
        """Tensors that hold these matrices, by their names in the module."""
        tensors = {"in_proj_weight": np.vstack([made.query, made.key, made.value]), "out_proj.weight": made.output}
        biases = np.concatenate([made.query_bias, made.key_bias, made.value_bias])
        if module.in_proj_bias is None:
            _refuse_bias(made.query_bias, made.query, module)
        else:
            tensors["in_proj_bias"] = biases
        return tensors | _output_bias(made, module.out_proj, "out_proj", module)


class Separate(ModuleLayout):
    """Four linear maps, for queries, keys, values and the output, and a number that scales logits."""

    kind = "q_proj, k_proj, v_proj and o_proj or out_proj (ViT, CLIP, Bart, Whisper, OPT), q_lin … (DistilBERT)"
    known: tuple[tuple[str, ...], ...] = (
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        ("q_proj", "k_proj", "v_proj", "out_proj"),
        ("q_lin", "k_lin", "v_lin", "out_lin"),
    )

    def names(self, module: Any) -> tuple[str, ...] | None:
        """The names of the four maps in a module of this kind; None of another."""
        return next((names for names in self.known if _has(module, *names)), None)

    def matches(self, module: Any) -> bool:
        """Whether a module is of this kind."""
        return self.names(module) is not None and self.numbers(module) is not None

    def numbers(self, module: Any) -> tuple[int, float] | None:
        """How many heads a module has, and what it multiplies logits by; None where it does not say."""
        heads = next((getattr(module, name) for name in HEAD_COUNTS if hasattr(module, name)), None)
        heads = getattr(getattr(module, "config", None), "num_attention_heads", None) if heads is None else heads
        scale = next((getattr(module, name) for name in ("scaling", "scale") if hasattr(module, name)), None)
        return (int(heads), float(scale)) if isinstance(heads, int) and isinstance(scale, int | float) else None

    def read(self, module: Any) -> Projections:
        """The matrices of a module."""
        names, numbers = self.names(module), self.numbers(module)
        assert names is not None
        assert numbers is not None
        _refuse_positions(module)
        parts = [module.get_submodule(name) for name in names]
        matrices = [plain(part.weight) for part in parts]
        return Projections.of(*numbers, matrices, [_bias(part, len(part.weight)) for part in parts])

    def write(self, made: Projections, module: Any) -> dict[str, Floats]:
        """Tensors that hold these matrices, by their names in the module."""
        names = self.names(module)
        assert names is not None
        _refuse_positions(module)
        matrices = (made.query, made.key, made.value, made.output)
        tensors = {f"{name}.weight": matrix for name, matrix in zip(names, matrices, strict=True)}
        biases = (made.query_bias, made.key_bias, made.value_bias)
        for name, bias in zip(names[:3], biases, strict=True):
            if module.get_submodule(name).bias is not None:
                tensors[f"{name}.bias"] = bias
            else:
                _refuse_bias(bias, made.query, module)
        return tensors | _output_bias(made, module.get_submodule(names[3]), names[3], module)


class Bert(Separate):
    """The same, the first three in a part of their own; the last belongs to a part that adds the residual too."""

    kind = "BertAttention (also RoBERTa, MiniLM, ELECTRA)"

    def names(self, module: Any) -> tuple[str, ...] | None:
        """The names of the four maps in a module of this kind; None of another."""
        inner, outer = getattr(module, "self", None), getattr(module, "output", None)
        own = _has(inner, "query", "key", "value", "num_attention_heads") and _has(outer, "dense")
        return ("self.query", "self.key", "self.value", "output.dense") if own else None

    def numbers(self, module: Any) -> tuple[int, float] | None:
        """How many heads a module has, and what it multiplies logits by."""
        inner = module.get_submodule("self")
        return inner.num_attention_heads, float(getattr(inner, "scaling", inner.attention_head_size**-0.5))


class Albert(Separate):
    """The same in one module, which normalises too."""

    kind = "AlbertAttention"
    known = (("query", "key", "value", "dense"),)

    def numbers(self, module: Any) -> tuple[int, float] | None:
        """How many heads a module has, and what it multiplies logits by; None where it does not say."""
        if not _has(module, "num_attention_heads", "attention_head_size", "LayerNorm"):
            return None
        return module.num_attention_heads, float(getattr(module, "scaling", module.attention_head_size**-0.5))


class Gpt2(ModuleLayout):
    """Matrices are stored transposed, those of queries, keys and values side by side."""

    kind = "GPT2Attention"
    marks = ("c_attn", "c_proj", "num_heads", "head_dim")

    def read(self, module: Any) -> Projections:
        """The matrices of a module."""
        scale = module.head_dim**-0.5 if getattr(module, "scale_attn_weights", True) else 1.0
        if getattr(module, "scale_attn_by_inverse_layer_idx", False):
            scale /= module.layer_idx + 1
        return Projections.of(
            module.num_heads,
            scale,
            [*np.split(plain(module.c_attn.weight).T, 3), plain(module.c_proj.weight).T],
            [*np.split(plain(module.c_attn.bias), 3), plain(module.c_proj.bias)],
        )

    def write(self, made: Projections, module: Any) -> dict[str, Floats]:  # noqa: ARG002 - there is always a bias
        """Tensors that hold these matrices, by their names in the module."""
        return {
            "c_attn.weight": np.vstack([made.query, made.key, made.value]).T,
            "c_attn.bias": np.concatenate([made.query_bias, made.key_bias, made.value_bias]),
            "c_proj.weight": made.output.T,
            "c_proj.bias": made.output_bias,
        }


LAYOUTS: tuple[ModuleLayout, ...] = (Torch(), Bert(), Albert(), Gpt2(), Separate())


def plain(tensor: Any) -> Floats:
    """A tensor of any dtype and device as a NumPy array of float64."""
    return np.asarray(tensor.detach().cpu().double().numpy())


def _refuse_positions(module: Any) -> None:
    """UsageError for a module whose logits are no products of two tokens."""
    taken = [*inspect.signature(module.forward).parameters, *(name for name, _ in module.named_modules())]
    inner = getattr(module, "self", None)
    taken += [] if getattr(inner, "rotary_embeddings", None) is None else ["rotary_embeddings"]
    position = next((name for name in taken if POSITIONS.search(name)), None)
    if position is not None:
        raise UsageError(
            f"{type(module).__name__} reads tokens by their position ({position}): its logits are another product for "
            "every distance of tokens, so it is no sum of heads"
        )
    norm = next((name for name, _ in module.named_modules() if "norm" in name.rpartition(".")[2].lower()), None)
    if norm is not None and norm.rpartition(".")[2] not in AROUND:
        raise UsageError(f"{type(module).__name__} normalises queries or keys ({norm}): it is no sum of heads")


def _has(module: Any, *names: str) -> bool:
    return module is not None and all(hasattr(module, name) for name in names)


def _bias(linear: Any, size: int) -> Floats:
    return np.zeros(size) if linear.bias is None else plain(linear.bias)


def _output_bias(made: Projections, linear: Any, name: str, module: Any) -> dict[str, Floats]:
    if linear.bias is not None:
        return {f"{name}.bias": made.output_bias}
    _refuse_bias(made.output_bias, made.output, module)
    return {}


def _refuse_bias(bias: Floats, beside: Floats, module: Any) -> None:
    largest = float(np.max(np.abs(bias), initial=0.0))
    if largest > MOST_BIAS * float(np.max(np.abs(beside), initial=0.0)):
        raise UsageError(f"{type(module).__name__} was made without a bias, the heads have one of up to {largest:.2g}")
