"""Layers in float32: what is certified, how wide the bars of predictions are, and whether they hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

import keyhole as kh
from benchmarks.support import minilm
from benchmarks.support.rows import Kept, markdown
from keyhole.arrays import Floats

SEEDS, WIDTH, HEADS = 20, 64, 4
MAX_NORM = 30.0
# Other queries that bars are tried on: sequences of N(0, 1) tokens, of these lengths.
OTHERS, BATCH, LENGTHS = 1000, 20, (2, 4, 8, 12, 24)
BAR = 8.0
COLUMNS = [
    "certified",
    "queries",
    "function error ÷ attention: median, most",
    "bar ÷ attention, most",
    "error ÷ bar, most",
    "processor seconds, most",
    "outcomes",
]


@dataclass(frozen=True)
class Layer:
    """Projections of one attention layer, heads side by side."""

    query: Floats  # (width, width), rows by head
    key: Floats
    value: Floats
    out: Floats  # (width, width)
    query_bias: Floats
    value_bias: Floats
    out_bias: Floats
    heads: int

    def truth(self) -> kh.MultiHead:
        """The same as heads, in float64."""
        size = len(self.query) // self.heads
        parts = [slice(number * size, (number + 1) * size) for number in range(self.heads)]
        made = [
            kh.SingleHead(
                self.key[part].T @ self.query[part] / size**0.5,
                self.value[part].T @ self.out[:, part].T,
                self.key[part].T @ self.query_bias[part] / size**0.5,
            )
            for part in parts
        ]
        return kh.MultiHead(made, self.out @ self.value_bias + self.out_bias)

    def answer(self, everywhere: bool) -> Callable[[Floats], Floats]:
        """The whole forward pass in float32, as real models run it."""
        names = (self.query, self.key, self.value, self.out, self.query_bias, self.value_bias, self.out_bias)
        query, key, value, out, query_bias, value_bias, out_bias = (each.astype(np.float32) for each in names)
        size = len(query) // self.heads

        def heads_of(rows: np.ndarray) -> np.ndarray:  # (batch, n, width) -> (batch, heads, n, size)
            return rows.reshape(*rows.shape[:2], self.heads, size).transpose(0, 2, 1, 3)

        def answer(tokens: Floats) -> Floats:
            x = np.asarray(tokens, np.float32)
            asking = heads_of((x if everywhere else x[:, -1:]) @ query.T + query_bias)
            logits = asking @ heads_of(x @ key.T).transpose(0, 1, 3, 2) * np.float32(size**-0.5)
            weights = np.exp(logits - np.max(logits, axis=-1, keepdims=True))
            weights /= np.sum(weights, axis=-1, keepdims=True)
            mixed = (weights @ heads_of(x @ value.T + value_bias)).transpose(0, 2, 1, 3)
            answers = mixed.reshape(*mixed.shape[:2], -1) @ out.T + out_bias
            return answers if everywhere else answers[:, 0]

        return answer


def table(kept: Kept) -> str:
    rows = {
        f"nn.MultiheadAttention({WIDTH}, {HEADS}), {SEEDS} seeds, {place}": lambda place=place: random_layers(place)
        for place in ("last position", "all positions")
    }
    if minilm.weights() is not None:
        rows |= {
            f"all-MiniLM-L6-v2, layer {layer}, {place}": lambda layer=layer, place=place: model_layer(layer, place)
            for place in ("last position", "all positions")
            for layer in range(minilm.LAYERS)
        }
    found = [[name, *row] for name, row in zip(rows, kept.rows_of("float32", rows), strict=False)]
    notes = [
        f"Answers and all arithmetic in float32. Error and bar ({BAR:g} standard deviations) over what attention does, "
        f"root mean squares over {OTHERS} other sequences of N(0, 1) tokens; the last figure is over all numbers."
    ]
    missing = [] if minilm.weights() is not None else [minilm.MISSING]
    return "\n\n".join([markdown(["layer", *COLUMNS], found), *missing, *notes])


def random_layers(place: str) -> list[object]:
    return summary([measured(random_layer(seed), place, seed) for seed in range(SEEDS)])


def random_layer(seed: int) -> Layer:
    """Weights as PyTorch draws them: uniform, and biases of 0.1."""
    rng = np.random.default_rng(seed)
    inner, outer = (6 / (4 * WIDTH)) ** 0.5, WIDTH**-0.5
    query, key, value = (rng.uniform(-inner, inner, (WIDTH, WIDTH)) for _ in range(3))
    biases = 0.1 * rng.standard_normal((3, WIDTH))
    return Layer(query, key, value, rng.uniform(-outer, outer, (WIDTH, WIDTH)), *biases, HEADS)


def model_layer(layer: int, place: str) -> list[object]:
    from safetensors.numpy import load_file

    path = minilm.weights()
    assert path is not None
    tensors = load_file(path)
    end = f"encoder.layer.{layer}.attention.self.query.weight"
    start = next(name for name in tensors if name.endswith(end)).removesuffix("self.query.weight")
    names = ("self.query.weight", "self.key.weight", "self.value.weight", "output.dense.weight")
    biases = ("self.query.bias", "self.value.bias", "output.dense.bias")
    made = Layer(*(tensors[start + name].astype(np.float64) for name in (*names, *biases)), minilm.HEADS)
    return summary([measured(made, place, layer, MAX_NORM)])


@dataclass(frozen=True)
class Measured:
    """One recovery, and its errors on other queries."""

    result: kh.Recovery
    error: float  # over attention
    bar: float
    worst: float  # error over bar
    seconds: float  # of the processor, the oracle's included


def measured(layer: Layer, place: str, seed: int, max_norm: float | None = None) -> Measured:
    everywhere, width = place == "all positions", layer.query.shape[1]
    oracle = kh.FunctionOracle(
        layer.answer(everywhere),
        width,
        max_norm,
        positions="all" if everywhere else "last",
        like=np.zeros(1, np.float32),
    )
    start = time.process_time()
    result = kh.recover(oracle, "multi-head", seed=seed, throw=False)
    seconds = time.process_time() - start
    if result.params is None or result.certificate.standard_error is None:
        return Measured(result, float("nan"), float("nan"), float("nan"), seconds)
    return Measured(result, *on_others(result, layer.truth(), seed), seconds)


def on_others(result: kh.Recovery, truth: kh.MultiHead, seed: int) -> tuple[float, float, float]:
    """Error and bar over attention, and the largest error over its bar."""
    squares, worst = np.zeros(3), 0.0
    for tokens in others(truth.width, np.random.default_rng([seed, 32])):
        exact = truth(tokens)
        errors = np.abs(result.params(tokens) - exact)
        bars = BAR * np.asarray(result.params.deviation(result.certificate.standard_error, tokens))
        moved = exact - truth.without_attention()(tokens)
        squares += [np.sum(errors**2), np.sum(bars**2), np.sum(moved**2)]
        worst = max(worst, float(np.max(errors / bars)))
    return float((squares[0] / squares[2]) ** 0.5), float((squares[1] / squares[2]) ** 0.5), worst


def others(width: int, rng: np.random.Generator) -> Iterator[Floats]:
    for number in range(OTHERS // BATCH):
        tokens = rng.standard_normal((BATCH, LENGTHS[number % len(LENGTHS)], width)).astype(np.float32)
        yield tokens.astype(np.float64) * min(1.0, 0.99 * MAX_NORM / float(np.max(np.linalg.norm(tokens, axis=2))))


def summary(runs: list[Measured]) -> list[object]:
    queries = sorted(run.result.stats.queries for run in runs)
    errors = [run.error for run in runs]
    return [
        f"{sum(run.result.certified for run in runs)}/{len(runs)}",
        f"{queries[0]:,} to {queries[-1]:,}" if queries[-1] > queries[0] else f"{queries[0]:,}",
        f"{np.median(errors):.1e}, {max(errors):.1e}",
        f"{max(run.bar for run in runs):.1e}",
        f"{max(run.worst for run in runs):.2f}",
        f"{max(run.seconds for run in runs):.0f}",
        ", ".join(sorted({run.result.outcome.name for run in runs})),
    ]
