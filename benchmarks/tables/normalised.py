"""Heads behind a norm, and heads with a residual and LayerNorm behind them: random weights, and those of MiniLM."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import keyhole as kh
from benchmarks.support import minilm
from benchmarks.support.rows import Kept, Row, markdown
from keyhole.arrays import Floats, floats
from keyhole.families.forms import Rotary, geometric

# Where the norm is, heads, groups that share keys and values (rotary, as Llama has them; 0: plain), width, weights.
CASES = [
    ("LayerNorm before", 4, 0, 64, 0.2),
    ("LayerNorm before", 4, 0, 64, 0.02),
    ("RMSNorm before, rotary", 4, 2, 64, 0.2),
    ("RMSNorm before, rotary", 8, 2, 64, 0.2),
    ("LayerNorm after", 4, 0, 32, 0.1),
    ("LayerNorm after", 4, 0, 64, 0.1),
    ("LayerNorm after", 8, 0, 64, 0.1),
]
RUNS, EPSILON = 5, 1e-5
SEEDS = 3  # of each layer of MiniLM
# Fresh sequences whose answers are compared: how many, and of how many tokens.
FRESH = (100, 8)


def layer_of(place: str, heads: int, groups: int, width: int, size: float, seed: int) -> kh.Residual | kh.NormAfter:
    """A block of GPT-2 or Llama (norm before) or BERT (after), its weights normal with this deviation."""
    rng, inner = np.random.default_rng([seed, heads, width]), width // heads
    made: list[Any] = []
    shared = size * rng.standard_normal((groups, 2, width, inner))
    for head in range(heads):
        query, key, value, out = size * rng.standard_normal((4, width, inner))
        if groups:
            key, value = shared[head * groups // heads]
            made.append(kh.FormHead(Rotary(query.T / inner**0.5, key.T, geometric(inner // 2)), value @ out.T))
        else:
            made.append(kh.SingleHead(key @ query.T / inner**0.5, value @ out.T))
    if groups:
        return kh.Residual(kh.NormBefore(kh.MultiHead(made), np.asarray(EPSILON), "rms"))
    attention = kh.MultiHead(made, size * rng.standard_normal(width))
    if place.endswith("before"):
        return kh.Residual(kh.NormBefore.folded(attention, np.ones(width), EPSILON))
    gain, bias = 1 + 0.3 * rng.standard_normal(width), 0.3 * rng.standard_normal(width)
    return kh.NormAfter(kh.Residual(attention), gain, bias, np.asarray(EPSILON))


def table(kept: Kept) -> str:
    columns = [
        "block",
        "heads, d",
        "size of weights",
        "runs",
        "queries",
        "distance: median, worst",
        "fresh answers off by",
        "certified",
    ]
    measured = {
        f"{place}, {heads} heads, {width} wide, {size:g}": lambda case=(place, heads, groups, width, size): _row(*case)
        for place, heads, groups, width, size in CASES
    }
    random = markdown(columns, kept.rows_of("blocks", measured))
    layers = {f"BertAttention, layer {layer}": lambda layer=layer: _model_row(layer) for layer in range(minilm.LAYERS)}
    named = ["layer", "certified", "queries", "scores", "values", "gain", "fresh answers off by", "processor seconds"]
    trained = markdown(named, kept.rows_of("MiniLM", layers)) if minilm.weights() is not None else minilm.MISSING
    said = (
        f"The complete `BertAttention` of all-MiniLM-L6-v2 in float64 (heads, residual and LayerNorm behind), {SEEDS} "
        "seeds each, by method `auto`; relative Frobenius errors of the worst head, of values but for the mean over "
        "outputs, which no answer shows, and of the gain; all figures are the most:"
    )
    return f"{random}\n\n{said}\n\n{trained}"


def _model_row(layer: int) -> Row:
    """The module itself, asked through the model."""
    path = minilm.weights()
    assert path is not None
    results, figures = [], []
    oracle = kh.TransformersOracle(path.parent, layer, "attention-block", dtype="float64")
    norm = oracle.module.attention.output.LayerNorm
    for seed in range(SEEDS):
        start = time.process_time()
        result = kh.recover(oracle, seed=seed, throw=False)
        seconds = time.process_time() - start
        results.append(result)
        if isinstance(result.params, kh.NormAfter):
            scores, values = _errors(result.params.attention.attention, minilm.attention(path, layer))
            gain = float(np.max(np.abs(floats(result.params.gain) / floats(norm.weight) - 1)))
            tokens = oracle.signature.space.asarray(np.random.default_rng(seed).standard_normal((*FRESH, minilm.WIDTH)))
            expected = floats(oracle(tokens))
            off = float(np.max(np.abs(floats(result.params(tokens)) - expected)) / np.max(np.abs(expected)))
            figures.append((scores, values, gain, off, seconds))
    queries = [result.stats.queries for result in results]
    worst = [max(column) for column in zip(*figures, strict=True)]
    return [
        f"layer {layer}",
        f"{sum(result.certified for result in results)}/{SEEDS}",
        f"{min(queries):,} to {max(queries):,}",
        *(f"{each:.1e}" for each in worst[:-1]),
        f"{worst[-1]:.1f}" if worst else "–",
    ]


def _errors(found: kh.MultiHead, truth: kh.MultiHead) -> tuple[float, float]:
    """Relative Frobenius errors of scores and of values off their means, of the worst head."""
    scores, values = [], []
    for head in truth.heads:
        each = [(_off(_centred(one.value), _centred(head.value)), _off(one.score, head.score)) for one in found.heads]
        value, score = min(each)
        scores.append(score)
        values.append(value)
    return max(scores), max(values)


def _centred(value: Any) -> Floats:
    rows = floats(value)
    return rows - np.mean(rows, axis=1, keepdims=True)


def _off(found: Any, truth: Any) -> float:
    return float(np.linalg.norm(floats(found) - floats(truth)) / np.linalg.norm(floats(truth)))


def _row(place: str, heads: int, groups: int, width: int, size: float) -> Row:
    queries, apart, off, certified = [], [], [], 0
    options = {"form": "rotary", "frequencies": geometric(width // heads // 2)} if groups else {}
    for seed in range(RUNS):
        truth = layer_of(place, heads, groups, width, size, seed)
        result = kh.recover(kh.FunctionOracle(truth, width=width), "normalised", seed=seed, throw=False, **options)
        queries.append(result.stats.queries)
        certified += result.certified
        if result.params is not None and result.params.family == truth.family:
            apart.append(kh.distance(result.params, truth))
            tokens = np.random.default_rng(seed).standard_normal((*FRESH, width))
            expected = truth(tokens)
            off.append(float(np.max(np.abs(result.params(tokens) - expected)) / np.max(np.abs(expected))))
    grouped = f" in {groups} groups" if groups else ""
    return [
        place,
        f"{heads}{grouped}, {width}",
        f"{size:g}",
        RUNS,
        f"{min(queries):,} to {max(queries):,}",
        f"{np.median(apart):.1e}, {max(apart):.1e}" if apart else "–",
        f"{max(off):.1e}" if off else "–",
        f"{certified}/{RUNS}",
    ]
