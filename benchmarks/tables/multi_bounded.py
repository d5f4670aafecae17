"""Several heads behind one number, tokens of norm ≤ 3, any logits: queries, errors, seconds; answers that err."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np

import keyhole as kh
from benchmarks.support.related_heads import related_heads
from benchmarks.support.rows import Kept, Row, markdown
from benchmarks.tables.multi_scalar import Run, covers, matched
from keyhole.gauge.heads import canonical_heads

NORM = 3.0
SIZES = ((2, 8), (4, 8), (6, 8), (2, 16), (4, 16), (6, 16))
SEEDS = 20
# Heads, tolerance and seeds of answers that err; how they do.
NOISY_SIZES, TOLERANCE, NOISY_SEEDS, NOISY_WIDTH = (2, 4), 1e-6, 200, 8
ODD_HEADS, ODD_WIDTH, ODD_SEEDS = 4, 8, 4

Errors = Callable[[np.random.Generator, int], np.ndarray]
ERRORS: dict[str, Errors] = {
    "uniform": lambda rng, count: rng.uniform(-1.0, 1.0, count),
}


def heads_of(kind: str, heads: int, width: int, seed: int) -> kh.MultiHead:
    """Gaussian heads, two or all of which are related."""
    return related_heads(kind, heads, width, [seed, heads, width, *kind.encode()])


KINDS = {"gaussian": "Gaussian", "double": "W₂ = 2·W₁", "opposite": "W₂ = −W₁", "factor": "W_h = a_h·bᵀ"}
ODD = {
    "cancel": "v₂ = −v₁",
    "equal": "v₂ = v₁",
    "mirror": "W₂ = −W₁, v₂ = v₁",
    "near 1e-1": "‖W₂ − W₁‖ = 1e-1",
    "near 1e-2": "‖W₂ − W₁‖ = 1e-2",
    "near 1e-3": "‖W₂ − W₁‖ = 1e-3",
    "quiet 1e-3": "v₂ of 1e-3",
    "quiet 1e-6": "v₂ of 1e-6",
}


def run(truth: kh.MultiHead, seed: int, noise: kh.Noise | None = None, errors: Errors | None = None) -> Run:
    """Recover behind errors of answers and judge: right where every entry is within its radius."""
    rng = np.random.default_rng([seed, 1])
    noise = noise or kh.Noise.exact()

    def answer(tokens: np.ndarray) -> np.ndarray:
        exact = truth(tokens)
        return exact if errors is None else exact + noise.scale * errors(rng, exact.shape[0])

    oracle = kh.FunctionOracle(answer, width=truth.width, max_norm=NORM, noise=noise)
    began = perf_counter()
    result = kh.recover(oracle, "multi-head", seed=seed, throw=False)
    seconds = perf_counter() - began
    if not result.certified:
        return Run(result, "admitted", np.nan, np.nan, seconds)
    expected, found = canonical_heads(truth), result.params
    if len(expected.heads) != len(found.heads):
        return Run(result, "WRONG", np.nan, np.nan, seconds)
    order, score, value = matched(found, expected)
    inside = all(
        covers(found.heads[a], result.certificate.radius.heads[a], expected.heads[b]) for a, b in enumerate(order)
    )
    return Run(result, "right" if inside else "WRONG", score, value, seconds)


def table(kept: Kept) -> str:
    exact = {
        f"{kind} {heads} {width}": lambda kind=kind, heads=heads, width=width: _exact(kind, heads, width)
        for heads, width in SIZES
        for kind in KINDS
    }
    noisy = {
        f"{name} {heads}": lambda name=name, heads=heads: _noisy(name, heads)
        for name in ERRORS
        for heads in NOISY_SIZES
    }
    odd = {kind: lambda kind=kind: _odd(kind) for kind in ODD}
    errors = ["W error: median, worst", "v error: median, worst"]
    queries = ["queries per parameter: median, most", "most over 4Hd²"]
    return "\n\n".join(
        [
            markdown(["heads", "(H, d)", "right", "wrong", *queries, *errors, "seconds"], kept.rows_of("exact", exact)),
            markdown(
                ["errors of at most τ = 1e-6", "(H, d)", "right", "wrong", *queries, *errors, "radius of W: median"],
                kept.rows_of("noisy", noisy),
            ),
            markdown(
                [
                    f"two of {ODD_HEADS} heads, d = {ODD_WIDTH}",
                    "right",
                    "admitted",
                    "wrong",
                    "W error, worst",
                    "seconds",
                ],
                kept.rows_of("odd", odd),
            ),
        ]
    )


def _figures(runs: list[Run], heads: int, width: int) -> list[object]:
    right = [each for each in runs if each.verdict == "right"]
    asked = np.array([each.result.stats.queries for each in runs])
    pairs = [[each.score_error for each in right] or [np.nan], [each.value_error for each in right] or [np.nan]]
    per = asked / (heads * (width**2 + width))
    return [
        f"({heads}, {width})",
        f"{len(right)}/{len(runs)}",
        sum(each.verdict == "WRONG" for each in runs),
        f"{np.median(per):.2f}, {np.max(per):.2f}",
        f"{np.max(asked) / (4 * heads * width**2):.2f}",
        *(f"{np.median(each):.1e}, {np.max(each):.1e}" for each in pairs),
    ]


def _exact(kind: str, heads: int, width: int) -> Row:
    runs = [run(heads_of(kind, heads, width, seed), seed) for seed in range(SEEDS)]
    return [KINDS[kind], *_figures(runs, heads, width), f"{np.median([each.seconds for each in runs]):.1f}"]


def _noisy(name: str, heads: int) -> Row:
    noise = kh.Noise.bounded(TOLERANCE)
    runs = [
        run(heads_of("gaussian", heads, NOISY_WIDTH, seed), seed, noise, ERRORS[name]) for seed in range(NOISY_SEEDS)
    ]
    radii = [
        np.max([np.max(head.score) for head in each.result.certificate.radius.heads])
        for each in runs
        if each.result.certificate.radius is not None
    ]
    return [name, *_figures(runs, heads, NOISY_WIDTH), f"{np.median(radii):.1e}"]


def _odd(kind: str) -> Row:
    runs = [run(heads_of(kind, ODD_HEADS, ODD_WIDTH, seed), seed) for seed in range(ODD_SEEDS)]
    counts = [sum(each.verdict == word for each in runs) for word in ("right", "admitted", "WRONG")]
    errors = [each.score_error for each in runs if each.verdict == "right"]
    seconds = f"{np.median([each.seconds for each in runs]):.1f}"
    return [ODD[kind], *counts, f"{max(errors):.0e}" if errors else "", seconds]
