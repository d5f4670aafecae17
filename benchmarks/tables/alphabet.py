"""One head behind a finite alphabet of tokens: queries over the bound, and what is known of all logits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import keyhole as kh
from benchmarks.support import minilm
from benchmarks.support.rows import Kept, markdown
from keyhole.arrays import Floats

WIDTH, SEEDS, SATURATED_SEEDS = 32, 5, 5
ALPHABETS: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "Gaussian, m = d/2": lambda rng, d: rng.standard_normal((d // 2, d)),
    "Gaussian, m = d": lambda rng, d: rng.standard_normal((d, d)),
    "Gaussian, m = 2d": lambda rng, d: rng.standard_normal((2 * d, d)),
    "one-hot": lambda _, d: np.eye(d),
    "signs, m = 2d": lambda rng, d: rng.choice([-1.0, 1.0], (2 * d, d)),
}
# Largest differences of logits, but for one in a hundred, of the saturated cases.
LARGE = (25.0, 80.0, 130.0)
# Tokens and outputs of the embeddings of the model.
TOKENS, OUTPUTS = 1500, 32
COLUMNS = ["certified", "queries", "over the bound: median, most", "logit error, most", "radius misses"]


def table(kept: Kept) -> str:
    plain = (
        {name: lambda name=name: row(name, WIDTH, SEEDS) for name in ALPHABETS}
        | {
            f"{name}, {outputs} outputs": lambda name=name, outputs=outputs: row(name, WIDTH, SEEDS, outputs=outputs)
            for name, outputs in (("Gaussian, m = 2d", 4), ("one-hot", 4))
        }
        | {"Gaussian, m = 2d, both biases": lambda: row("Gaussian, m = 2d", WIDTH, SEEDS, biases=True)}
    )
    large = {
        f"differences up to {size:g}": lambda size=size: row("Gaussian, m = 2d", 16, SATURATED_SEEDS, size=size)
        for size in LARGE
    }
    parts = [f"Logits of order one, width {WIDTH}, {SEEDS} seeds each:"]
    parts += [markdown(["alphabet", *COLUMNS], named(kept.rows_of("plain", plain), plain))]
    parts += [f"Logits that saturate, Gaussian alphabets, d = 16, m = 2d, {SATURATED_SEEDS} seeds each:"]
    parts += [markdown(["logits", *COLUMNS], named(kept.rows_of("large", large), large))]
    parts += [f"{TOKENS} token embeddings of all-MiniLM-L6-v2 behind one head of its layers, {OUTPUTS} outputs:"]
    layers = {f"layer {layer}, head 0": lambda layer=layer: embeddings(layer) for layer in (0,)}
    found = kept.rows_of("embeddings", layers) if minilm.weights() else []
    parts += [markdown(["head", *COLUMNS], named(found, layers)) if found else minilm.MISSING]
    parts += [
        "The bound: numbers that the alphabet shows, r·r₀ + r, over numbers per answer. The error of a logit is that "
        "of its difference from the last token's own, over all pairs of tokens."
    ]
    return "\n\n".join(parts)


def named(rows: list[list[str]], names: dict[str, Callable[[], list[object]]]) -> list[list[str]]:
    return [[name, *row] for name, row in zip(names, rows, strict=False)]


def row(
    name: str, width: int, seeds: int, *, outputs: int | None = None, size: float = 2.0, biases: bool = False
) -> list[object]:
    runs = []
    for seed in range(seeds):
        rng = np.random.default_rng([seed, width])
        rows = ALPHABETS[name](rng, width)
        score = rng.standard_normal((width, width))
        score *= size / np.percentile(np.abs(differences(score, rows)), 99)
        shape = () if outputs is None else (outputs,)
        value = rng.standard_normal((width, *shape))
        bias = rng.standard_normal(width) * size / width if biases else None
        head = kh.SingleHead(score, value, bias, np.asarray(rng.standard_normal(shape)) if biases else None)
        runs.append(run(head, rows, seed))
    return summary(runs)


def differences(score: Floats, rows: Floats) -> Floats:  # (m, m)
    """Logits of all tokens beside each last one, less that of the last one itself."""
    logits = rows @ score @ rows.T
    return logits - np.diag(logits)


def run(head: kh.SingleHead, rows: Floats, seed: int) -> tuple[kh.Recovery, float, bool]:
    result = kh.recover(kh.FunctionOracle(head, width=rows.shape[1], alphabet=rows), seed=seed, throw=False)
    if result.params is None:
        return result, float("nan"), False
    truth, found, radius = kh.on_alphabet(head, rows), result.params, result.certificate.radius
    off = differences(found.score - truth.score, rows)
    if truth.score_bias is not None:
        own = rows @ (truth.score_bias - (0 if found.score_bias is None else found.score_bias))
        off = off + own - own[:, None]
    missed = bool(np.any(np.abs(found.score - truth.score) > radius.score))
    return result, float(np.max(np.abs(off))), missed or bool(np.any(np.abs(found.value - truth.value) > radius.value))


def summary(runs: list[tuple[kh.Recovery, float, bool]]) -> list[object]:
    sure = [each for each in runs if each[0].certified] or runs
    ratios = [result.stats.ratio for result, _, _ in sure]
    queries = sorted(result.stats.queries for result, _, _ in sure)
    return [
        f"{sum(result.certified for result, _, _ in runs)}/{len(runs)}",
        f"{queries[0]:,} to {queries[-1]:,}" if queries[-1] > queries[0] else f"{queries[0]:,}",
        f"{np.median(ratios):.3f}, {max(ratios):.3f}",
        f"{max(error for _, error, _ in sure):.1e}",
        sum(missed for _, _, missed in runs),
    ]


def embeddings(layer: int) -> list[object]:
    """One head of the model, its own values before the output projection, on embeddings of its tokens."""
    from safetensors.numpy import load_file

    path = minilm.weights()
    assert path is not None
    tensors = load_file(path)
    words = next(tensors[name] for name in tensors if name.endswith("word_embeddings.weight")).astype(np.float64)
    rows = words[np.random.default_rng(layer).permutation(len(words))[:TOKENS]]
    head = minilm.attention(path, layer).heads[0]
    values = np.linalg.svd(head.value)[0][:, :OUTPUTS]
    return summary([run(kh.SingleHead(head.score, values, head.score_bias), rows, layer)])
