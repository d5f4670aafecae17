"""Heads behind a norm, and heads with a residual and LayerNorm behind them: random weights of two sizes."""

from __future__ import annotations

from typing import Any

import numpy as np

import keyhole as kh
from benchmarks.support.rows import Kept, Row, markdown
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
    return markdown(columns, kept.rows_of("blocks", measured))


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
