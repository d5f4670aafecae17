"""Queries, errors and radii of heads of other parts than a softmax's, by part, and behind float32 answers."""

from __future__ import annotations

import numpy as np

import keyhole as kh
from benchmarks.support.parts import ATTENTIONS, names_of, random_head
from benchmarks.support.rows import markdown
from keyhole.arrays import floats

WIDTHS, SEEDS, SEEDS_FLOAT32 = (8, 16, 32, 64), 20, 10


def table() -> str:
    columns = ["parts", "runs", "queries − bound: median, most", "error: median, worst", "error over its radius, worst"]
    exact = [_row(kind) for kind in ATTENTIONS]
    rounded = ["parts, answers of float32", "runs", "certified", "right within their radii", "error: median, worst"]
    return (
        markdown([*columns, "certified and right"], exact)
        + "\n\n"
        + markdown(rounded, [_float32_row(kind) for kind in ATTENTIONS])
    )


def over_radius(result: kh.Recovery, truth: kh.SingleHead) -> float:
    """The worst entry over its radius; infinite where arrays do not correspond."""
    true, radius = truth.arrays(), result.certificate.radius.arrays()
    worst = 0.0
    for name, array in result.params.arrays().items():
        if array.shape != true[name].shape:
            return float("inf")
        worst = max(worst, float(np.max(np.abs(floats(array) - floats(true[name])) / (floats(radius[name]) + 1e-300))))
    return worst


def _row(kind: str) -> list[object]:
    extra, errors, ratios, right = [], [], [], 0
    for width in WIDTHS:
        for seed in range(SEEDS):
            truth = random_head(kind, width, seed)
            oracle = kh.FunctionOracle(truth, width=width)
            result = kh.recover(oracle, "parts", seed=seed, throw=False, **names_of(truth.attention))
            if not result.certified:
                continue
            extra.append(result.stats.queries - truth.counting_bound)
            errors.append(kh.distance(result.params, truth))
            ratios.append(over_radius(result, truth))
            right += ratios[-1] <= 1
    runs = len(WIDTHS) * SEEDS
    spread = f"+{np.median(extra):.0f}, +{max(extra)}"
    return [kind, runs, spread, f"{np.median(errors):.1e}, {max(errors):.1e}", f"{max(ratios):.2f}", f"{right}/{runs}"]


def _float32_row(kind: str) -> list[object]:
    errors, right, certified = [], 0, 0
    for seed in range(SEEDS_FLOAT32):
        truth = random_head(kind, 16, seed, scale=1.0)

        def answer(tokens: np.ndarray, truth: kh.SingleHead = truth) -> np.ndarray:
            return truth(tokens).astype(np.float32).astype(np.float64)

        oracle = kh.FunctionOracle(answer, width=16, noise=kh.Noise.dtype("float32"))
        result = kh.recover(oracle, "parts", seed=seed, throw=False, **names_of(truth.attention))
        if result.certified:
            certified += 1
            errors.append(kh.distance(result.params, truth))
            right += over_radius(result, truth) <= 1
    spread = f"{np.median(errors):.1e}, {max(errors):.1e}" if errors else "none"
    return [kind, SEEDS_FLOAT32, f"{certified}/{SEEDS_FLOAT32}", f"{right}/{certified}", spread]
