"""Small random models of the architectures of transformers whose attention people run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WIDTH = 32
_SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 2, "intermediate_size": 40, "vocab_size": 50}
_HEADS = {"num_attention_heads": 4}
_GROUPS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_LONGEST = {"max_position_embeddings": 96}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_IMAGE = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 8,
}
_ENCODER = _SIZES | _HEADS | _LONGEST
_DECODER = _SIZES | _GROUPS | _LONGEST | _ENDS
_WINDOW = {"sliding_window": 4}
_WINDOW_EVERYWHERE = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
_WIDE_HEADS = {"head_dim": 8}
_PAIR = {
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "vocab_size": 50,
    "decoder_start_token_id": 2,
    **_ENDS,
}
_T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
_GPT = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 96}
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
_LATENT = {
    **_SIZES,
    **_LONGEST,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

# The settings of each, by the name that its config has in transformers.
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "Albert": {**_ENCODER, "embedding_size": 16},
    "Bart": {**_PAIR, **_LONGEST},
    "Bert": _ENCODER,
    "Bloom": {"hidden_size": WIDTH, "n_layer": 2, "n_head": 4, "vocab_size": 50},
    "CLIPText": {**_ENCODER, **_ENDS},
    "CLIPVision": _IMAGE,
    "Cohere": _DECODER,
    "Cohere2": {**_DECODER, **_WINDOW},
    "DebertaV2": {
        **_ENCODER,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 16,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "type_vocab_size": 0,
    },
    "DeepseekV2": _LATENT,
    "DeepseekV3": _LATENT,
    "DistilBert": {
        "dim": WIDTH,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 40,
        "vocab_size": 50,
        "max_position_embeddings": 96,
    },
    "Electra": {**_ENCODER, "embedding_size": 16},
    "Esm": {**_ENCODER, "pad_token_id": 0, "mask_token_id": 3, "position_embedding_type": "rotary"},
    "Falcon": {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50},
    "GPT2": _GPT,
    "GPTJ": {**_GPT, "rotary_dim": 4, "n_inner": 40},
    "GPTNeo": {
        **_LONGEST,
        "hidden_size": WIDTH,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 50,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
        "intermediate_size": 40,
    },
    "GPTNeoX": _ENCODER,
    "Gemma": {**_DECODER, **_WIDE_HEADS},
    "Gemma2": {**_DECODER, **_WIDE_HEADS, **_WINDOW, "query_pre_attn_scalar": 8},
    "Gemma3Text": {**_DECODER, **_WIDE_HEADS, **_WINDOW, "query_pre_attn_scalar": 8},
    "Glm4": {**_DECODER, **_WIDE_HEADS},
    "GptOss": {**_DECODER, **_WIDE_HEADS, **_WINDOW, **_EXPERTS},
    "Granite": {**_DECODER, "attention_multiplier": 0.5, "residual_multiplier": 0.7, "embedding_multiplier": 2.0},
    "Llama": _DECODER,
    "MPNet": _ENCODER,
    "MT5": _T5,
    "Mistral": {**_DECODER, **_WIDE_HEADS, **_WINDOW},
    "Mixtral": {**_DECODER, **_WINDOW, **_EXPERTS},
    "ModernBert": {
        **_ENCODER,
        **_ENDS,
        "local_attention": 4,
        "global_attn_every_n_layers": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "Mpt": {"d_model": WIDTH, "n_layers": 2, "n_heads": 4, "vocab_size": 50, "max_seq_len": 96, "expansion_ratio": 2},
    "Nemotron": {**_DECODER, **_WIDE_HEADS},
    "OPT": {**_ENCODER, **_ENDS, "ffn_dim": 40, "word_embed_proj_dim": WIDTH},
    "Olmo": _DECODER,
    "Olmo2": _DECODER,
    "Phi": _DECODER,
    "Phi3": _DECODER,
    "Qwen2": {**_DECODER, **_WINDOW_EVERYWHERE},
    "Qwen3": {**_DECODER, **_WIDE_HEADS, **_WINDOW_EVERYWHERE},
    "Roberta": _ENCODER,
    "StableLm": _DECODER,
    "Starcoder2": {**_DECODER, **_WINDOW},
    "T5": _T5,
    "ViT": _IMAGE,
    "Whisper": {**_PAIR, "max_source_positions": 64, "max_target_positions": 96, "num_mel_bins": 8},
}


def random_model(name: str, seed: int = 0, std: float = 0.2) -> Any:
    """A random model of an architecture in float64, weights and biases of size `std`, those of norms around one."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**ARCHITECTURES[name])
    model = transformers.AutoModel.from_config(config).double().eval()
    for module in model.modules():
        mean = 1.0 if "norm" in type(module).__name__.lower() else 0.0
        for parameter in module.parameters(recurse=False):
            torch.nn.init.normal_(parameter, mean=mean, std=std)
    return model
