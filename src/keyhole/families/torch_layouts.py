"""Attention layers of PyTorch and transformers, and the heads that they are: from one to the other and back.

`heads_of(module)` gives the products that answers depend on, to compare a recovery with a layer that one has;
`weights_of(heads, module)` gives tensors that make a module of the same shape compute those heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import Floats
from keyhole.errors import UsageError
from keyhole.families import MultiHead, SingleHead
from keyhole.families.projections import Projections, factored

# A bias that a layer has no room for, over the largest number in its matrices, that is taken for an error and left out.
MOST_BIAS = 1e-3


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


@dataclass(frozen=True)
class Place:
    """An attention module inside a model, and the layer around it."""

    name: str  # of the module, as the model's tensors begin
    module: Any
    layer: Any
    layout: ModuleLayout


def attention_in(model: Any) -> list[Place]:
    """All self-attention modules of a model in its own order, each once though it may be used several times."""
    modules = dict(model.named_modules())
    found: list[Place] = []
    for name, module in modules.items():
        inside = any(name.startswith(f"{place.name}.") for place in found)
        layout = next((layout for layout in LAYOUTS if layout.matches(module)), None)
        if layout is not None and not inside and not _crosses(name, module):
            found.append(Place(name, module, modules[name.rpartition(".")[0]], layout))
    return found


def _crosses(name: str, module: Any) -> bool:
    """Whether a module attends to another sequence than its own."""
    last = name.rpartition(".")[2].lower()
    return bool(getattr(module, "is_cross_attention", False)) or "cross" in last or last == "encoder_attn"


class ModuleLayout(ABC):
    """How one kind of attention module stores its heads."""

    kind: str
    marks: tuple[str, ...] = ()  # attributes that modules of this kind have
    usually_causal = False  # where a module does not say so
    rotary = False  # whether logits depend on the distance of tokens

    def matches(self, module: Any) -> bool:
        """Whether a module is of this kind."""
        return _has(module, *self.marks)

    @abstractmethod
    def read(self, module: Any) -> Projections:
        """The matrices of a module."""

    @abstractmethod
    def write(self, made: Projections, module: Any) -> dict[str, Floats]:
        """Tensors that hold these matrices, by their names in the module."""

    def inner(self, module: Any) -> Any:
        """The part of a module that says whether it is causal."""
        return module

    def causal(self, module: Any) -> bool:
        """Whether a position sees only those before it and itself."""
        return bool(getattr(self.inner(module), "is_causal", self.usually_causal))


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


class Bert(ModuleLayout):
    """Four linear maps; the last belongs to a part that also adds the residual and normalises."""

    kind = "BertAttention (also RoBERTa, MiniLM, ELECTRA)"
    names = ("self.query", "self.key", "self.value", "output.dense")

    def matches(self, module: Any) -> bool:
        """Whether a module is of this kind."""
        inner, outer = getattr(module, "self", None), getattr(module, "output", None)
        return _has(inner, "query", "key", "value", "num_attention_heads") and _has(outer, "dense")

    def inner(self, module: Any) -> Any:
        """The part with queries, keys and values."""
        return module.get_submodule(self.names[0].rpartition(".")[0])

    def read(self, module: Any) -> Projections:
        """The matrices of a module."""
        inner = self.inner(module)
        if getattr(inner, "rotary_embeddings", None) is not None:
            raise UsageError(f"{type(module).__name__} turns queries and keys by their position: it is no sum of heads")
        parts = [module.get_submodule(name) for name in self.names]
        return Projections.of(
            inner.num_attention_heads,
            float(getattr(inner, "scaling", inner.attention_head_size**-0.5)),
            [plain(part.weight) for part in parts],
            [_bias(part, part.weight.shape[0]) for part in parts],
        )

    def write(self, made: Projections, module: Any) -> dict[str, Floats]:
        """Tensors that hold these matrices, by their names in the module."""
        matrices = (made.query, made.key, made.value, made.output)
        tensors = {f"{name}.weight": matrix for name, matrix in zip(self.names, matrices, strict=True)}
        biases = (made.query_bias, made.key_bias, made.value_bias)
        for name, bias in zip(self.names[:3], biases, strict=True):
            if module.get_submodule(name).bias is not None:
                tensors[f"{name}.bias"] = bias
            else:
                _refuse_bias(bias, made.query, module)
        return tensors | _output_bias(made, module.get_submodule(self.names[3]), self.names[3], module)


class Albert(Bert):
    """The same four linear maps in one module."""

    kind = "AlbertAttention"
    marks = ("query", "key", "value", "dense", "num_attention_heads", "LayerNorm")
    names = ("query", "key", "value", "dense")

    def matches(self, module: Any) -> bool:
        """Whether a module is of this kind."""
        return ModuleLayout.matches(self, module)


class Gpt2(ModuleLayout):
    """Matrices are stored transposed, those of queries, keys and values side by side."""

    kind = "GPT2Attention"
    usually_causal = True  # `is_causal` came with later versions of transformers
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


class Llama(ModuleLayout):
    """Queries and keys are turned by their position, so logits depend on distances too."""

    kind = "LlamaAttention"
    usually_causal = True
    marks = ("q_proj", "k_proj", "v_proj", "o_proj")
    rotary = True

    def read(self, module: Any) -> Projections:
        """Refused: there is no one product per head."""
        raise UsageError(
            f"{type(module).__name__} turns queries and keys by their position: its logits are a different product for "
            "every distance of tokens, so it is no sum of heads"
        )

    def write(self, made: Projections, module: Any) -> dict[str, Floats]:  # noqa: ARG002 - whatever they are
        """Refused: heads without positions do not fit."""
        raise UsageError(f"{type(module).__name__} turns queries and keys by their position: heads do not fit in it")


LAYOUTS: tuple[ModuleLayout, ...] = (Torch(), Bert(), Albert(), Gpt2(), Llama())


def plain(tensor: Any) -> Floats:
    """A tensor of any dtype and device as a NumPy array of float64."""
    return np.asarray(tensor.detach().cpu().double().numpy())


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
