"""Several heads behind one number: queries, errors, seconds; spread scales; heads that hardly differ; other boxes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from scipy.optimize import linear_sum_assignment

import keyhole as kh
from benchmarks.support.rows import markdown
from keyhole.arrays import floats
from keyhole.gauge.heads import canonical_heads, into_logits
from keyhole.gauge.tolerance import relative

# (heads, width, rank): seeds, and queries per parameter of sink gating, the method before.
SIZES: dict[tuple[int, int, int | None], tuple[int, float | None]] = {
    (1, 8, None): (20, None),
    (4, 16, None): (20, 1.24),
    (16, 16, None): (20, None),
    (16, 32, None): (20, 1.08),
    (24, 8, None): (20, 5.8),
    (8, 64, 8): (20, None),
    (32, 32, None): (5, None),
    (12, 64, None): (5, 1.04),
}
SPREADS = ((4, 16), (8, 16), (16, 32))
SPREAD, SPREAD_SEEDS = 100.0, 20
ODD_SEEDS, ODD_HEADS, ODD_WIDTH = 10, 4, 12


def random_heads(
    heads: int, width: int, seed: int, *, rank: int | None = None, spread: float = 1.0, bias: bool = False
) -> kh.MultiHead:
    """Gaussian heads, the sizes of scores and values each spread log-uniformly over `spread`."""
    rng = np.random.default_rng([seed, heads, width])
    made = []
    for _ in range(heads):
        inner = rank or width
        score = rng.standard_normal((width, width))
        if rank:
            score = rng.standard_normal((width, inner)) @ rng.standard_normal((inner, width)) / inner**0.5
        sizes = spread ** rng.uniform(-0.5, 0.5, 2)
        made.append(
            kh.SingleHead(
                sizes[0] * score / width**0.5,
                sizes[1] * rng.standard_normal(width),
                rng.standard_normal(width) if bias else None,
            )
        )
    return kh.MultiHead(made, np.asarray(rng.standard_normal()) if bias else None)


@dataclass(frozen=True)
class Run:
    """One recovery, and what is true of it."""

    result: kh.Recovery
    verdict: str  # right, merged, admitted or WRONG
    score_error: float
    value_error: float
    seconds: float


def run(truth: kh.MultiHead, seed: int, merged_below: float = 0.0) -> Run:
    """Recover and judge; heads of a distance below `merged_below` may count as one."""
    began = perf_counter()
    result = kh.recover(kh.FunctionOracle(truth, width=truth.width), "multi-head", seed=seed, throw=False)
    seconds = perf_counter() - began
    if not result.certified:
        return Run(result, "admitted", np.nan, np.nan, seconds)
    expected, found = canonical_heads(truth), result.params
    if len(expected.heads) != len(found.heads):
        near = merged_below < result.stats.details.get("told_apart", 0.0)
        return Run(result, "merged" if near else "WRONG", np.nan, np.nan, seconds)
    order, score_error, value_error = matched(found, expected)
    inside = all(
        covers(found.heads[a], result.certificate.radius.heads[a], expected.heads[b]) for a, b in enumerate(order)
    )
    return Run(result, "right" if inside else "WRONG", score_error, value_error, seconds)


def matched(found: kh.MultiHead, truth: kh.MultiHead) -> tuple[list[int], float, float]:
    """Which true head each one found is, and the largest relative errors of scores and values."""
    scores = np.array([[relative(into_logits(a), into_logits(b)) for b in truth.heads] for a in found.heads])
    values = np.array([[relative(floats(a.value), floats(b.value)) for b in truth.heads] for a in found.heads])
    rows, columns = linear_sum_assignment(scores + values)
    return list(columns), float(np.max(scores[rows, columns])), float(np.max(values[rows, columns]))


def covers(head: kh.SingleHead, radius: kh.SingleHead, truth: kh.SingleHead) -> bool:
    """Whether score, value and score bias are within their radii, entry by entry."""
    score = np.abs(into_logits(head) - into_logits(truth)) <= into_logits(radius)
    return bool(np.all(score) and np.all(np.abs(floats(head.value) - floats(truth.value)) <= floats(radius.value)))


def table() -> str:
    return "\n\n".join([_sizes(), _spreads(), _odd(), _strangers()])


def _summary(runs: list[Run]) -> list[object]:
    right = [each for each in runs if each.verdict == "right"]
    wrong = sum(each.verdict not in ("right", "admitted") for each in runs)
    scores, values = [each.score_error for each in right], [each.value_error for each in right]
    return [
        f"{len(right)}/{len(runs)}",
        wrong,
        f"{np.median(scores):.0e}, {np.max(scores):.0e}",
        f"{np.median(values):.0e}, {np.max(values):.0e}",
        f"{np.median([each.seconds for each in runs]):.1f}",
    ]


def _sizes() -> str:
    rows = []
    for (heads, width, rank), (seeds, before) in SIZES.items():
        runs = [run(random_heads(heads, width, seed, rank=rank), seed) for seed in range(seeds)]
        ratios = [each.result.stats.ratio for each in runs]
        name = f"({heads}, {width})" + (f", rank {rank}" if rank else "")
        queries = int(np.median([each.result.stats.queries for each in runs]))
        ratio = f"{np.median(ratios):.3f}, {np.max(ratios):.3f}"
        rows.append([name, queries, ratio, "" if before is None else before, *_summary(runs)])
    columns = ["(H, d)", "queries", "per parameter: median, most", "sink gating", "right", "wrong"]
    return markdown([*columns, "W error: median, worst", "v error: median, worst", "seconds"], rows)


def _spreads() -> str:
    rows = []
    for heads, width in SPREADS:
        runs = [run(random_heads(heads, width, seed, spread=SPREAD), seed) for seed in range(SPREAD_SEEDS)]
        rows.append([f"({heads}, {width})", *_summary(runs)])
    columns = ["(H, d), sizes of W and v over a factor of 100", "right", "wrong"]
    return markdown([*columns, "W error: median, worst", "v error: median, worst", "seconds"], rows)


Change = Callable[[list[kh.SingleHead], np.random.Generator], kh.SingleHead]


def _near(delta: float) -> Change:
    def change(heads: list[kh.SingleHead], rng: np.random.Generator) -> kh.SingleHead:
        away = rng.standard_normal(heads[0].score.shape)
        size = delta * np.linalg.norm(heads[0].score) / np.linalg.norm(away)
        return kh.SingleHead(heads[0].score + size * away, heads[1].value)

    return change


ODD: dict[str, tuple[Change, float]] = {
    "W₂ = W₁": (lambda heads, _: kh.SingleHead(heads[0].score, heads[1].value), np.inf),
    "W₂ = W₁, v₂ = −v₁": (lambda heads, _: kh.SingleHead(heads[0].score, -heads[0].value), np.inf),
    "v₂ = 0": (lambda heads, _: kh.SingleHead(heads[1].score, 0 * heads[1].value), np.inf),
    "W₂ = 0": (lambda heads, _: kh.SingleHead(0 * heads[1].score, heads[1].value), np.inf),
    "W₂ = −W₁": (lambda heads, _: kh.SingleHead(-heads[0].score, heads[1].value), np.inf),
    "W₂ = −W₁, v₂ = v₁": (lambda heads, _: kh.SingleHead(-heads[0].score, heads[0].value), np.inf),
    "W₂ = 2·W₁": (lambda heads, _: kh.SingleHead(2 * heads[0].score, heads[1].value), np.inf),
    "v₂ = v₁": (lambda heads, _: kh.SingleHead(heads[1].score, heads[0].value), np.inf),
    "v₂ = −v₁": (lambda heads, _: kh.SingleHead(heads[1].score, -heads[0].value), np.inf),
    **{f"δ = {10.0**-k:.0e}": (_near(10.0**-k), 10.0**-k) for k in (1, 2, 3, 4, 5, 6, 8, 10, 12)},
}


def odd_heads(name: str, seed: int) -> tuple[kh.MultiHead, float]:
    """Random heads of which two are related, and how far apart those are."""
    change, apart = ODD[name]
    heads = list(random_heads(ODD_HEADS, ODD_WIDTH, seed).heads)
    heads[1] = change(heads, np.random.default_rng([seed, 1]))
    return kh.MultiHead(heads), apart


def _odd() -> str:
    rows = []
    for name in ODD:
        runs = []
        for seed in range(ODD_SEEDS):
            truth, apart = odd_heads(name, seed)
            runs.append(run(truth, seed, apart))
        counts = [sum(each.verdict == word for each in runs) for word in ("right", "merged", "admitted", "WRONG")]
        errors = [each.score_error for each in runs if each.verdict == "right"]
        why = sorted({each.result.outcome.name for each in runs if each.verdict == "admitted"})
        rows.append([name, *counts, f"{max(errors):.0e}" if errors else "", ", ".join(why)])
    columns = [f"two of {ODD_HEADS} heads, d = {ODD_WIDTH}", "right", "merged", "admitted", "certified but wrong"]
    return markdown([*columns, "W error, worst", "admitted as"], rows)


def strangers(seed: int, width: int = 8) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Boxes that are no sum of heads."""
    rng = np.random.default_rng(seed)
    layer = random_heads(3, width, seed)
    inner, offsets, outer = rng.standard_normal((width, 20)), rng.standard_normal(20), rng.standard_normal(20)
    value = rng.standard_normal(width)
    embedded = kh.SingleHead(layer.heads[0].score, rng.standard_normal((width, width)) / width**0.5)
    return {
        "ReLU net of the mean": lambda tokens: np.maximum(tokens.mean(axis=1) @ inner + offsets, 0) @ outer,
        "ReLU net of the last token": lambda tokens: np.maximum(tokens[:, -1] @ inner + offsets, 0) @ outer,
        "ReLU net of each token, added up": lambda tokens: np.sum(np.maximum(tokens @ inner, 0) @ outer, axis=1),
        "one-layer: a net behind a head": lambda tokens: np.maximum(embedded(tokens) @ inner + offsets, 0) @ outer,
        "two layers": lambda tokens: layer.heads[1](tokens + embedded.at_all_positions(tokens)),
        "heads and a residual": lambda tokens: layer(tokens) + tokens[:, -1] @ value,
        "heads of normalised tokens": lambda tokens: layer(
            tokens / (1 + np.linalg.norm(tokens, axis=-1, keepdims=True))
        ),
        "tanh of heads": lambda tokens: np.tanh(layer(tokens)),
        "the largest value": lambda tokens: np.max(tokens @ value, axis=1),
    }


def _strangers() -> str:
    counts: dict[str, list[str]] = {}
    for seed in range(ODD_SEEDS):
        for name, box in strangers(seed).items():
            result = kh.recover(kh.FunctionOracle(box, width=8), "multi-head", seed=seed, throw=False)
            counts.setdefault(name, []).append(result.outcome.name)
    rows = [
        [name, sum(outcome == "CERTIFIED" for outcome in outcomes), ", ".join(sorted(set(outcomes)))]
        for name, outcomes in counts.items()
    ]
    return markdown([f"other boxes, {ODD_SEEDS} seeds each", "certified", "outcomes"], rows)
