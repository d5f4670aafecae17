"""Random models of transformers, small enough to be asked many times."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

WIDTH, HEADS = 12, 3
SMALL = {"hidden_size": WIDTH, "num_hidden_layers": 2, "intermediate_size": 10, "vocab_size": 20}
IDS = torch.arange(9)[None]


def config(kind: str, heads: int = HEADS) -> Any:
    if kind == "bert":
        return transformers.BertConfig(**SMALL, num_attention_heads=heads, max_position_embeddings=16)
    if kind == "roberta":
        return transformers.RobertaConfig(**SMALL, num_attention_heads=heads, max_position_embeddings=16)
    if kind == "albert":
        more = {"embedding_size": 6, "num_hidden_groups": 2, "max_position_embeddings": 16}
        return transformers.AlbertConfig(**SMALL | {"num_hidden_layers": 4}, **more, num_attention_heads=heads)
    if kind == "gpt2":
        more = {"n_layer": 2, "vocab_size": 20, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
        return transformers.GPT2Config(n_embd=WIDTH, n_head=heads, scale_attn_by_inverse_layer_idx=True, **more)
    return transformers.LlamaConfig(**SMALL, num_attention_heads=6, num_key_value_heads=3)


def made(kind: str, heads: int = HEADS, seed: int = 0) -> Any:
    """A random model in float64, weights of a size at which attention matters, biases too."""
    torch.manual_seed(seed)
    model = transformers.AutoModel.from_config(config(kind, heads)).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


KINDS = ["bert", "roberta", "albert", "gpt2", "llama"]
MODELS: dict[str, Any] = {}


def model_of(kind: str) -> Any:
    if kind not in MODELS:
        MODELS[kind] = made(kind)
    return MODELS[kind]
