"""Recover a PyTorch attention layer from its answers, and put what was found into a fresh layer.

    python examples/recover_torch_layer.py

Needs the `torch` extra. Put a layer of your own in the place of `make_layer`.
"""

from __future__ import annotations

import torch

import keyhole as kh
from keyhole.families.torch_layouts import heads_of, weights_of

WIDTH, HEADS = 24, 4


def make_layer(seed: int) -> torch.nn.MultiheadAttention:
    """Any nn.Module from (batch, length, width) will do; this one is PyTorch's own, in float64."""
    torch.manual_seed(seed)
    layer = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double().eval()
    torch.nn.init.normal_(layer.in_proj_bias, std=0.3)  # PyTorch starts with biases of zero; that would be too easy
    return layer


def main() -> None:
    """Recover, compare, rebuild."""
    layer = make_layer(seed=0)
    result = kh.recover(kh.TorchOracle(layer))  # asked with vectors, never looked into
    stats = result.stats
    print(f"{result.outcome.name}: {stats.details['heads']} heads by the method {result.method}")
    print(f"{stats.queries} queries where {stats.counting_bound} is the fewest possible")

    error = kh.distance(result.params, heads_of(layer))  # the layer is ours, so we may look after all
    print(f"relative error within 1e-8: {error < 1e-8}")

    copy = make_layer(seed=1)  # other weights
    weights = weights_of(result.params, copy)
    copy.load_state_dict({name: torch.as_tensor(array) for name, array in weights.items()})
    tokens = torch.randn(8, 50, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        apart = (layer(tokens, tokens, tokens)[0] - copy(tokens, tokens, tokens)[0]).abs().max()
    print(f"a fresh layer with the recovered weights answers the same within 1e-8: {bool(apart < 1e-8)}")


if __name__ == "__main__":
    main()
