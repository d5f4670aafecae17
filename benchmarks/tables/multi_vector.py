"""Several heads with several outputs: random layers, layers of a real model, degenerate pairs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.optimize import linear_sum_assignment

import keyhole as kh
from benchmarks.support import minilm
from benchmarks.support.rows import markdown
from keyhole.arrays import floats
from keyhole.gauge.heads import canonical_heads

CASES = ((8, 32, 32), (16, 64, 64), (8, 32, 8))
SEEDS = 3
MODEL_SEEDS = 4
# Tokens that enter the attention of the model have a norm of about 12; none asked is longer than this.
MAX_NORM = 30.0
# Errors are relative to no less than this: a zero score is found as zero.
TINY = 1e-100


def table() -> str:
    parts = ["Random layers (logits of order one, all biases):", random_layers()]
    parts += ["Attention layers of all-MiniLM-L6-v2 in float64, tokens no longer than 30:", model_layers()]
    parts += ["Degenerate pairs of heads (two seeds each; width 10, 8 outputs):", degenerate_pairs()]
    return "\n\n".join(parts)


def random_layer(heads: int, width: int, outputs: int, rng: np.random.Generator) -> kh.MultiHead:
    made = []
    for _ in range(heads):
        score, value = rng.standard_normal((width, width)) / width**0.5, rng.standard_normal((width, outputs))
        made.append(kh.SingleHead(score, value, 0.3 * rng.standard_normal(width)))
    return kh.MultiHead(made, rng.standard_normal(outputs))


def random_layers() -> str:
    rows = []
    for case in CASES:
        results = []
        for seed in range(SEEDS):
            truth = random_layer(*case, np.random.default_rng([seed, *case]))
            result = kh.recover(kh.FunctionOracle(truth, width=case[1]), "multi-head", seed=seed, throw=False)
            results.append((result, errors(result.params, truth)))
        rows.append([case, *_summary(results)])
    return markdown(["(H, d, p)", *COLUMNS], rows)


COLUMNS = ["certified", "queries", "counting bound", "score error, most", "value error, most", "seconds, most"]


def _summary(results: list) -> list[object]:
    runs = [result for result, _ in results]
    queries = sorted({f"{run.stats.queries:,}" for run in runs})
    return [
        f"{sum(run.certified for run in runs)}/{len(runs)}",
        f"{queries[0]} to {queries[-1]}" if len(queries) > 1 else queries[0],
        f"{runs[0].stats.counting_bound:,}",
        f"{max(pair[0] for _, pair in results):.1e}",
        f"{max(pair[1] for _, pair in results):.1e}",
        f"{max(run.stats.seconds for run in runs):.1f}",
    ]


def errors(found: kh.MultiHead | None, truth: kh.MultiHead) -> tuple[float, float]:
    """Largest relative errors of scores and of values, heads matched."""
    if found is None or len(found.heads) != len(truth.heads):
        return float("inf"), float("inf")

    def apart(one: kh.SingleHead, two: kh.SingleHead) -> tuple[float, float]:
        return tuple(
            float(np.linalg.norm(np.asarray(a, np.float64) - b) / max(np.linalg.norm(b), TINY))
            for a, b in ((one.score, two.score), (one.value, two.value))
        )

    pairs = [[apart(one, two) for two in truth.heads] for one in found.heads]
    rows, columns = linear_sum_assignment([[sum(pair) for pair in row] for row in pairs])
    matched = [pairs[i][j] for i, j in zip(rows, columns, strict=True)]
    return max(pair[0] for pair in matched), max(pair[1] for pair in matched)


def model_layers() -> str:
    path = minilm.weights()
    if path is None:
        return minilm.MISSING
    rows = []
    for layer in range(minilm.LAYERS):
        truth, results = minilm.attention(path, layer), []
        for seed in range(MODEL_SEEDS):
            oracle = kh.FunctionOracle(truth, width=truth.width, max_norm=MAX_NORM)
            result = kh.recover(oracle, "multi-head", seed=seed, throw=False)
            results.append((result, errors(result.params, truth)))
        rows.append([layer, *_summary(results)])
    return markdown(["layer", *COLUMNS], rows)


def degenerate_pairs() -> str:
    rows = []
    for name in dict(pairs(np.random.default_rng(0))):
        words = []
        for seed in range(2):
            truth = dict(pairs(np.random.default_rng(seed)))[name]
            result = kh.recover(kh.FunctionOracle(truth, width=10), "multi-head", seed=seed, throw=False)
            plain = canonical_heads(truth)
            worst = max(errors(result.params, plain))
            if not result.certified:
                words.append(f"admitted ({result.outcome.name})")
            else:
                word = "right" if len(plain.heads) == len(truth.heads) else "merged"
                words.append(f"{word}, error {worst:.0e}" if covered(result, plain) else "WRONG")
        rows.append([name, *words])
    return markdown(["pair", "first seed", "second seed"], rows)


def covered(result: kh.Recovery, truth: kh.MultiHead) -> bool:
    """Whether all scores, values and score biases lie within their radii, heads matched."""

    def parts(head: kh.SingleHead) -> list[np.ndarray]:
        bias = np.zeros(truth.width) if head.score_bias is None else floats(head.score_bias)
        return [floats(head.score), floats(head.value), bias]

    def excess(one: kh.SingleHead, wide: kh.SingleHead, two: kh.SingleHead) -> float:
        bars = zip(parts(one), parts(wide), parts(two), strict=True)
        return max(float(np.max(np.abs(a - b) / w)) for a, w, b in bars)

    pairs_of = [(a, w) for a, w in zip(result.params.heads, result.certificate.radius.heads, strict=True)]
    if len(pairs_of) != len(truth.heads):
        return False
    cost = [[excess(one, wide, two) for two in truth.heads] for one, wide in pairs_of]
    rows, columns = linear_sum_assignment(cost)
    return max(cost[i][j] for i, j in zip(rows, columns, strict=True)) <= 1


def pairs(rng: np.random.Generator) -> Iterator[tuple[str, kh.MultiHead]]:
    one, two, three = random_layer(3, 10, 8, rng).heads
    bias, single = rng.standard_normal(8), kh.SingleHead
    other = [rng.standard_normal((10, 10)) * np.linalg.norm(one.score) / 10, rng.standard_normal((10, 8))]

    def layer(*heads: kh.SingleHead) -> kh.MultiHead:
        return kh.MultiHead(heads, bias)

    yield "duplicate head", layer(one, two, single(one.score, three.value, one.score_bias))
    yield "zero value", layer(one, two, single(three.score, 0 * three.value))
    yield "zero score", layer(one, two, single(0 * three.score, three.value))
    yield "W₂ = −W₁", layer(one, single(-one.score, two.value, -one.score_bias))
    yield "W₂ = W₁, other score bias", layer(one, single(one.score, two.value, two.score_bias))
    yield "W₂ = 2·W₁", layer(one, single(2 * one.score, two.value, 2 * one.score_bias))
    yield "OV₂ = OV₁", layer(one, single(two.score, one.value, two.score_bias))
    yield "OV₂ = −OV₁", layer(one, single(two.score, -one.value, two.score_bias))
    for digits in range(1, 7):
        near, size = one.score + 10.0**-digits * other[0], 10.0**-digits
        yield f"W₂ = W₁ + {size:.0e}", layer(one, single(near, two.value, one.score_bias))
    for digits in range(1, 7):
        near, size = one.score + 10.0**-digits * other[0], 10.0**-digits
        values = one.value + size * other[1]
        yield f"W₂ = W₁ + {size:.0e}, OV₂ = OV₁ + {size:.0e}", layer(one, single(near, values, one.score_bias))
