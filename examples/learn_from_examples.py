"""Learn a layer of several heads from random examples: no box to ask, only inputs with their outputs.

    python examples/learn_from_examples.py

Learns a layer from exact outputs, the number of heads unknown, and from noisy ones, and then meets one that no
efficient method is expected to learn.
"""

from __future__ import annotations

import numpy as np

import keyhole as kh
from keyhole.targets.datasets import parity_layer

WIDTH, TOKENS, HEADS, EXAMPLES = 6, 4, 2, 400


def main() -> None:
    """Learn three layers."""
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((HEADS, WIDTH, WIDTH)) / WIDTH**0.5
    layer = kh.AttentionLayer(scores, rng.standard_normal((HEADS, WIDTH, WIDTH)) / WIDTH**0.5)
    inputs = rng.choice([-1.0, 1.0], size=(EXAMPLES, TOKENS, WIDTH))
    outputs = layer(inputs)

    result = kh.learn(inputs, outputs)
    print(f"exact outputs: {result.outcome.name}, {result.params.heads} heads, {len(inputs)} examples")
    print(f"  relative error below 1e-10: {kh.distance(result.params, layer) < 1e-10}")

    noisy = outputs + 1e-3 * rng.standard_normal(outputs.shape)
    result = kh.learn(inputs, noisy, heads=HEADS, noise=kh.Noise.gaussian(1e-3))
    print(f"normal errors of 0.001: {result.outcome.name}, {result.params.heads} heads")
    print(f"  relative error below 1 %: {kh.distance(result.params, layer) < 0.01}")

    hard, _ = parity_layer(width=8, heads=3, rng=rng)
    inputs = rng.choice([-1.0, 1.0], size=(600, 2, 8))
    result = kh.learn(inputs, hard(inputs), heads=3, restarts=3, throw=False)
    print(f"heads that make a parity: {result.outcome.name}")


if __name__ == "__main__":
    main()
