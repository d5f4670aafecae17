"""Labels only: queries over the entropy and errors, by norm bound, threshold, rate of wrong labels and classes."""

from __future__ import annotations

from time import perf_counter

import numpy as np

import keyhole as kh
from benchmarks.support.rows import Kept, markdown
from keyhole.gauge import align
from keyhole.oracles import Flipped

SEEDS = 20

# Name, width, target error, seeds, and what is special: norm bound, scale, threshold, rate of wrong labels, classes.
CASES = [
    ("free norms", 8, 1e-6, SEEDS, {}),
    ("free norms", 16, 1e-12, SEEDS, {}),
    ("free norms", 32, 1e-6, SEEDS, {}),
    ("free norms", 32, 1e-12, SEEDS, {}),
    ("free norms", 64, 1e-12, 3, {}),
    ("entries × 10⁹", 32, 1e-6, SEEDS, {"scale": 1e9}),
    ("rank one", 32, 1e-6, SEEDS, {"rank": 1}),
    ("one-hot value", 32, 1e-6, SEEDS, {"one_hot": True}),
    ("threshold", 32, 1e-6, SEEDS, {"threshold": 3.0}),
    ("norm ≤ 1", 16, 1e-6, SEEDS, {"max_norm": 1.0}),
    ("norm ≤ 1, entries × 0.01", 16, 1e-6, SEEDS, {"max_norm": 1.0, "scale": 0.01}),
    ("norm ≤ 1, threshold", 16, 1e-6, SEEDS, {"max_norm": 1.0, "threshold": 0.4}),
    ("wrong at a rate of 0.01", 16, 1e-6, SEEDS, {"flips": 0.01}),
    ("wrong at a rate of 0.1", 16, 1e-6, SEEDS, {"flips": 0.1}),
    ("wrong at a rate of 0.1", 16, 1e-12, SEEDS, {"flips": 0.1}),
    ("wrong at a rate of 0.3", 16, 1e-6, SEEDS, {"flips": 0.3}),
    ("3 classes", 16, 1e-6, SEEDS, {"classes": 3}),
    ("5 classes", 16, 1e-6, SEEDS, {"classes": 5}),
    ("10 classes", 16, 1e-6, SEEDS, {"classes": 10}),
    ("5 classes, whole numbers", 8, 1e-6, SEEDS, {"classes": 5, "whole": True}),
    ("4 classes with biases", 8, 1e-6, SEEDS, {"classes": 4, "biases": 1.0}),
    ("norm ≤ 1, 4 classes", 8, 1e-6, SEEDS, {"max_norm": 1.0, "classes": 4}),
    ("norm ≤ 1, 4 classes with biases", 8, 1e-6, SEEDS, {"max_norm": 1.0, "classes": 4, "biases": 0.3}),
    ("2 heads", 8, 1e-6, SEEDS, {"heads": 2}),
    ("2 heads", 8, 1e-11, SEEDS, {"heads": 2}),
    ("2 heads, threshold", 8, 1e-6, SEEDS, {"heads": 2, "threshold": 3.0}),
    ("3 heads", 8, 1e-6, SEEDS, {"heads": 3}),
    ("4 heads", 8, 1e-6, SEEDS, {"heads": 4}),
]


def attempt(width: int, error: float, seed: int, **how: float) -> tuple[float, float, float, bool, float]:
    """Queries, queries over the entropy, worst entry over error · rms, whether all is within its radius, seconds."""
    rng = np.random.default_rng([seed, width, 0x1ABE1])
    score = rng.standard_normal((width, width))
    if how.get("rank") == 1:
        score = np.outer(rng.standard_normal(width), rng.standard_normal(width))
    score *= how.get("scale", 1.0) / (np.linalg.norm(score, 2) if "max_norm" in how else 1.0)
    classes, heads = int(how.get("classes", 0)), int(how.get("heads", 1))
    value = rng.standard_normal((width, classes) if classes else width)
    if how.get("one_hot"):
        value = np.eye(width)[3]
    if how.get("whole"):
        score, value = (np.rint(2 * array) for array in (score, value))
    bias = np.asarray(-how["threshold"]) if "threshold" in how else None
    if "biases" in how:
        bias = how["biases"] * rng.standard_normal(classes)
    attention: kh.SingleHead | kh.MultiHead = kh.SingleHead(score, value, None, bias)
    if heads > 1:
        more = [
            kh.SingleHead(rng.standard_normal((width, width)), rng.standard_normal(width)) for _ in range(heads - 1)
        ]
        attention = kh.MultiHead([kh.SingleHead(score, value), *more], bias)
    truth = kh.Labels(attention, tuple(range(classes))) if classes else kh.Labels(attention)
    oracle = kh.FunctionOracle(truth, width=width, max_norm=how.get("max_norm"), answers="labels")
    asked = Flipped(oracle, how["flips"], seed=seed) if "flips" in how else oracle
    began = perf_counter()
    options = {"heads": "auto"} if heads > 1 else {}
    result = kh.recover(asked, "labels", seed=seed, target_error=error, throw=False, **options)
    seconds = perf_counter() - began
    if not result.certified:
        return result.stats.queries, np.nan, np.nan, False, seconds
    found, radius = result.params.arrays(), result.certificate.radius.arrays()
    off = {name: np.abs(found[name] - true) for name, true in align(result.params, truth).items()}
    inside = all(np.all(off[name] <= radius[name] * (1 + 1e-9) + 1e-15) for name in off)
    sizes = {name: np.sqrt(np.mean(true**2)) for name, true in align(result.params, truth).items() if "score" in name}
    worst = float(max(np.max(off[name]) / size for name, size in sizes.items()) / error)
    rate = how.get("flips", 0.0)
    lost = -rate * np.log2(rate) - (1 - rate) * np.log2(1 - rate) if rate else 0.0
    bits = result.stats.details["entropy_bits"] / (1 - lost)
    return result.stats.queries, result.stats.queries / bits, worst, inside, seconds


def table(kept: Kept) -> str:
    measured = {
        f"{name}, {case[0]}, {case[1]:g}": lambda name=name, case=case: _row(name, *case) for name, *case in CASES
    }
    columns = ["labels", "width", "ε", "certified and all within radii", "queries", "over the entropy: median, most"]
    return markdown([*columns, "worst entry of W over ε·rms", "seconds"], kept.rows_of("labels", measured))


def _row(name: str, width: int, error: float, seeds: int, how: dict[str, float]) -> list[object]:
    runs = [attempt(width, error, 1000 + seed, **how) for seed in range(seeds)]
    queries, ratios, worst, inside, seconds = (np.array(column) for column in zip(*runs, strict=True))
    spread = f"{np.nanmedian(ratios):.3f}, {np.nanmax(ratios):.3f}"
    right = f"{int(np.sum(inside))}/{seeds}"
    figures = f"{int(np.median(queries)):,}", spread, f"{np.nanmax(worst):.2f}", f"{np.median(seconds):.2f}"
    return [name, width, f"{error:g}", right, *figures]
