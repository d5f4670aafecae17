"""Heads behind a norm, and heads with a residual and LayerNorm behind them: random weights of two sizes."""

from __future__ import annotations

import numpy as np

import keyhole as kh
from benchmarks.support.rows import markdown

# Where the norm is, heads, width, size of all weights.
CASES = [("before", 4, 64, 0.2), ("before", 4, 64, 0.02), ("after", 4, 32, 0.1), ("after", 4, 64, 0.1)]
RUNS, EPSILON = 5, 1e-5


def layer_of(place: str, heads: int, width: int, size: float, seed: int) -> kh.Residual | kh.NormAfter:
    """A block of GPT-2 (norm before) or BERT (after), its weights normal with this deviation."""
    rng, inner = np.random.default_rng([seed, heads, width]), width // heads
    made = []
    for _ in range(heads):
        query, key, value, out = size * rng.standard_normal((4, width, inner))
        made.append(kh.SingleHead(key @ query.T / inner**0.5, value @ out.T))
    attention = kh.MultiHead(made, size * rng.standard_normal(width))
    if place == "before":
        return kh.Residual(kh.NormBefore.folded(attention, np.ones(width), EPSILON))
    gain, bias = 1 + 0.3 * rng.standard_normal(width), 0.3 * rng.standard_normal(width)
    return kh.NormAfter(kh.Residual(attention), gain, bias, np.asarray(EPSILON))


def table() -> str:
    columns = ["LayerNorm", "heads, d", "size of weights", "runs", "queries", "distance: median, worst", "certified"]
    return markdown(columns, [_row(*case) for case in CASES])


def _row(place: str, heads: int, width: int, size: float) -> list[object]:
    queries, apart, certified = [], [], 0
    for seed in range(RUNS):
        truth = layer_of(place, heads, width, size, seed)
        result = kh.recover(kh.FunctionOracle(truth, width=width), "normalised", seed=seed, throw=False)
        queries.append(result.stats.queries)
        certified += result.certified
        if result.params is not None and result.params.family == truth.family:
            apart.append(kh.distance(result.params, truth))
    spread = f"{np.median(apart):.1e}, {max(apart):.1e}" if apart else "–"
    return [
        f"{place}, with a residual",
        f"{heads}, {width}",
        f"{size:g}",
        RUNS,
        f"{min(queries):,} to {max(queries):,}",
        spread,
        f"{certified}/{RUNS}",
    ]
