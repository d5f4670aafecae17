"""The six phases before and after the polish, and how the error of the hull falls with the number of examples."""

from __future__ import annotations

from functools import partial
from time import process_time

import numpy as np

import keyhole as kh
from benchmarks.support.rows import Kept, Row, markdown
from keyhole.samples.levenberg_marquardt import descend
from keyhole.samples.six_phase.method import six_phase
from keyhole.samples.variable_projection import LayerProblem
from keyhole.targets.datasets import random_layer, signs

# (d, k, m): examples, and medians of a prototype for σ = .5 and 1: S, hull, F
CASES = {
    (4, 2, 1): (143, ("0, 0, 0", "0, 0, 0")),
    (6, 3, 2): (140_000, (".006, .08, .023", ".013, .09, .046")),
    (8, 4, 2): (200_000, ("–, .05, .018", "–, .07, .031")),
    (8, 3, 3): (297_000, ("–, .19, .05", "–, .25, .095")),
}
SEEDS = 5
# Hull errors of a prototype, Gaussian inputs, (8, 2, m), σ = 1.
COUNTS = (1_000, 10_000, 100_000, 1_000_000)
PROTOTYPE = {2: (0.07, 0.015, 0.0012, 0.0001), 3: (0.46, 0.11, 0.028, 0.007), 4: (0.75, 0.36, 0.12, 0.039)}
GROWTH_SEEDS = {1_000: 5, 10_000: 5, 100_000: 5, 1_000_000: 3}


def layer_of(d: int, m: int, sigma: float, rng: np.random.Generator) -> kh.AttentionLayer:
    layer = random_layer(d, m, d, 1.0, rng)
    sizes = np.linalg.norm(layer.scores, axis=(1, 2), keepdims=True)
    return kh.AttentionLayer(layer.scores * (sigma / sizes), layer.projections)


def table(kept: Kept) -> str:
    boolean, gaussian = errors(kept), growth(kept)
    return (
        f"### Boolean inputs, medians of {SEEDS} seeds\n\n{boolean}\n\n### Hull errors, Gaussian inputs\n\n{gaussian}"
    )


def errors(kept: Kept) -> str:
    measured = {
        f"({', '.join(map(str, case))}) {sigma:g}": partial(_errors, case, sigma, count, theirs)
        for case, (count, before) in CASES.items()
        for sigma, theirs in zip((0.5, 1.0), before, strict=True)
    }
    columns = ["(d, k, m)", "σ", "examples", "errors of S, hull, F", "prototype's", "rounds"]
    columns += ["F after polish: median, worst", "s"]
    return markdown(columns, kept.rows_of("errors", measured))


def _errors(case: tuple[int, int, int], sigma: float, count: int, theirs: str) -> Row:
    d, k, m = case
    figures, polished, spent, rounds = [], [], [], []
    for seed in range(SEEDS):
        rng = np.random.default_rng([seed, d, k, m])
        truth = layer_of(d, m, sigma, rng)
        inputs = signs(rng, count, k, d)
        outputs = truth(inputs)
        began = process_time()
        found = six_phase(inputs, outputs, m, seed=seed)
        spent.append(process_time() - began)
        rounds.append(found.figures["1 crude sum"]["rounds"])
        total = np.sum(truth.projections, axis=0)
        function = function_error(kh.AttentionLayer(found.scores, found.projections), truth, k, rng)
        figures.append([relative(found.total, total), found.hull.distance(truth.scores), function])
        polished.append(function_error(polish(inputs, outputs, found.scores), truth, k, rng))
    middle = ", ".join(f"{number:.3f}" for number in np.median(figures, axis=0))
    last = f"{np.median(polished):.0e}, {max(polished):.0e}"
    row = [f"({d}, {k}, {m})", f"{sigma:g}", f"{count:,}", middle, theirs, ", ".join(map(str, rounds)), last]
    return [*row, f"{np.median(spent):.1f}"]


def polish(inputs: np.ndarray, outputs: np.ndarray, scores: np.ndarray) -> kh.AttentionLayer:
    """The descent from the scores of the six phases, to as many examples as `learn` would take."""
    problem = LayerProblem(inputs[:2000], outputs[:2000])
    point = descend(problem, scores, 1e-29 * problem.energy, np.random.default_rng(0)).point
    return kh.AttentionLayer(point.scores, point.projections)


def growth(kept: Kept) -> str:
    measured = {
        f"{count} m = {m}": partial(_growth, count, m, theirs)
        for position, count in enumerate(COUNTS)
        for m, theirs in ((m, PROTOTYPE[m][position]) for m in PROTOTYPE)
    }
    columns = ["examples", "m", "error of the hull, median", "prototype's", "ratio", "seeds", "s"]
    return markdown(columns, kept.rows_of("growth", measured))


def _growth(count: int, m: int, theirs: float) -> Row:
    found, spent = [], []
    for seed in range(GROWTH_SEEDS[count]):
        rng = np.random.default_rng([seed, m, 77])
        truth = layer_of(8, m, 1.0, rng)
        inputs = rng.standard_normal((count, 2, 8))
        outputs = truth(inputs)
        began = process_time()
        found.append(six_phase(inputs, outputs, m, seed=seed).hull.distance(truth.scores))
        spent.append(process_time() - began)
    middle = float(np.median(found))
    row = [f"{count:,}", m, f"{middle:.2g}", f"{theirs:g}", f"{middle / theirs:.2f}", len(found)]
    return [*row, f"{np.median(spent):.1f}"]


def relative(found: np.ndarray, truth: np.ndarray) -> float:
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


def function_error(layer: kh.AttentionLayer, truth: kh.AttentionLayer, k: int, rng: np.random.Generator) -> float:
    fresh = signs(rng, 500, k, truth.width)
    return relative(layer(fresh), truth(fresh))
