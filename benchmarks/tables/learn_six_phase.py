"""The six phases before and after the polish, and how the error of the hull falls with the number of examples."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from time import process_time

import numpy as np

import keyhole as kh
from benchmarks.support.rows import Kept, Row, markdown
from keyhole.samples.levenberg_marquardt import descend
from keyhole.samples.six_phase.heads import sculpt_heads
from keyhole.samples.six_phase.hull import Hull
from keyhole.samples.six_phase.method import PhaseSettings, crude_sum, six_phase
from keyhole.samples.source import ArraySource
from keyhole.samples.variable_projection import LayerProblem
from keyhole.targets.datasets import random_layer, signs

# (d, k, m): examples, seeds
CASES = {(5, 3, 2): (20_000, 10), (6, 4, 2): (20_000, 10), (6, 4, 3): (20_000, 10), (8, 4, 2): (50_000, 3)}
# σ of layers whose S is refined on large margins, and seeds.
SHARP, SHARP_SEEDS, SHARP_CASES = (2.0, 5.0, 10.0), 3, ((8, 4, 2), (6, 4, 3), (8, 3, 3))
# Hull errors of a prototype, Gaussian inputs, (8, 2, m), σ = 1.
COUNTS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
PROTOTYPE = {2: (0.07, 0.015, 0.0012, 0.0001), 3: (0.46, 0.11, 0.028, 0.007), 4: (0.75, 0.36, 0.12, 0.039)}
GROWTH_SEEDS = {1_000: 3, 10_000: 3, 100_000: 3, 1_000_000: 3, 10_000_000: 1}
PAPER = PhaseSettings(by_head=False)


def layer_of(d: int, m: int, sigma: float, rng: np.random.Generator) -> kh.AttentionLayer:
    layer = random_layer(d, m, d, 1.0, rng)
    sizes = np.linalg.norm(layer.scores, axis=(1, 2), keepdims=True)
    return kh.AttentionLayer(layer.scores * (sigma / sizes), layer.projections)


def table(kept: Kept) -> str:
    boolean, sharp, gaussian = errors(kept), margins(kept), growth(kept)
    return (
        "### Signs, no polish: medians, and the worst of F\n\nF of the phases alone, then with those of each head "
        "sculpted "
        f"by itself (ours).\n\n{boolean}\n\n### S from large margins, 50,000 examples of "
        f"signs\n\n{sharp}\n\n"
        f"### Hull errors, Gaussian inputs\n\n{gaussian}"
    )


def errors(kept: Kept) -> str:
    measured = {
        f"({', '.join(map(str, case))}) {sigma:g}": partial(_errors, case, sigma, count, seeds)
        for case, (count, seeds) in CASES.items()
        for sigma in (0.5, 1.0)
    }
    columns = ["(d, k, m)", "σ", "examples", "seeds", "error of S, hull", "F, phases alone", "F, by head", "ratio"]
    columns += ["sweeps", "F after polish: worst", "s: phases, sweeps"]
    return markdown(columns, kept.rows_of("errors", measured))


def _errors(case: tuple[int, int, int], sigma: float, count: int, seeds: int) -> Row:
    d, k, m = case
    figures, functions, polished, spent, sweeps = [], [], [], [], []
    for seed in range(seeds):
        rng = np.random.default_rng([seed, d, k, m])
        truth = layer_of(d, m, sigma, rng)
        inputs = signs(rng, count, k, d)
        outputs = truth(inputs)
        source = ArraySource(inputs, outputs)
        began = process_time()
        found = six_phase(source, m, seed, PAPER)
        middle = process_time()
        scores, weights, _, made = sculpt_heads(source, found.scores)
        spent.append([middle - began, process_time() - middle])
        sweeps.append(made)
        total = np.sum(truth.projections, axis=0)
        figures.append([relative(found.total, total), from_hull(found.hull, truth)])
        layers = kh.AttentionLayer(found.scores, found.projections), kh.AttentionLayer(scores, weights)
        functions.append([function_error(each, truth, k, rng) for each in layers])
        polished.append(function_error(polish(inputs, outputs, found.scores), truth, k, rng))
    middle = np.median(functions, axis=0)
    alone, by_head = (f"{one:.3f}, {two:.3f}" for one, two in zip(middle, np.max(functions, axis=0), strict=True))
    row = [f"({d}, {k}, {m})", f"{sigma:g}", f"{count:,}", seeds, "{:.3f}, {:.3f}".format(*np.median(figures, axis=0))]
    row += [alone, by_head, f"{middle[1] / middle[0]:.2f}", f"{np.median(sweeps):g}", f"{max(polished):.0e}"]
    return [*row, "{:.1f}, {:.1f}".format(*np.median(spent, axis=0))]


def polish(inputs: np.ndarray, outputs: np.ndarray, scores: np.ndarray) -> kh.AttentionLayer:
    """The descent from the scores of the six phases, to as many examples as `learn` would take."""
    problem = LayerProblem(inputs[:1000], outputs[:1000])
    point = descend(problem, scores, 1e-29 * problem.energy, np.random.default_rng(0)).point
    return kh.AttentionLayer(point.scores, point.projections)


def margins(kept: Kept) -> str:
    measured = {
        f"({', '.join(map(str, case))}) {sigma:g}": partial(_margins, case, sigma)
        for case in SHARP_CASES
        for sigma in SHARP
    }
    columns = ["(d, k, m)", "σ", "seeds", "error of S: crude", "without large margins", "with them: median", "worst"]
    columns += ["F, phases alone", "F, by head"]
    return markdown(columns, kept.rows_of("margins", measured))


def _margins(case: tuple[int, int, int], sigma: float) -> Row:
    found, (d, k, m) = [], case
    for seed in range(SHARP_SEEDS):
        rng = np.random.default_rng([seed, *case])
        truth = layer_of(d, m, sigma, rng)
        inputs = signs(rng, 50_000, k, d)
        source, total = ArraySource(inputs, truth(inputs)), np.sum(truth.projections, axis=0)
        without = six_phase(source, m, seed, replace(PAPER, margins=False)).total
        phases = six_phase(source, m, seed, PAPER)
        sums = [relative(each, total) for each in (crude_sum(source)[0], without, phases.total)]
        scores, weights, _, _ = sculpt_heads(source, phases.scores)
        layers = [kh.AttentionLayer(phases.scores, phases.projections), kh.AttentionLayer(scores, weights)]
        found.append([*sums, *(function_error(each, truth, k, rng) for each in layers)])
    crude, middle, refined, alone, by_head = np.median(found, axis=0)
    return [
        f"({d}, {k}, {m})",
        f"{sigma:g}",
        SHARP_SEEDS,
        *(f"{each:.3f}" for each in (crude, middle, refined, np.max(found, axis=0)[2], alone, by_head)),
    ]


def growth(kept: Kept) -> str:
    measured = {
        f"{count} m = {m}": partial(_growth, count, m, theirs)
        for position, count in enumerate(COUNTS)
        for m, theirs in ((m, each[position] if position < len(each) else None) for m, each in PROTOTYPE.items())
    }
    columns = ["examples", "m", "error of the hull: phases alone", "by head", "prototype's", "ratio of phases alone"]
    columns += ["seeds", "s"]
    return markdown(columns, kept.rows_of("growth", measured))


def _growth(count: int, m: int, theirs: float | None) -> Row:
    found, spent = [], []
    for seed in range(GROWTH_SEEDS[count]):
        rng = np.random.default_rng([seed, m, 77])
        truth = layer_of(8, m, 1.0, rng)
        inputs = rng.standard_normal((count, 2, 8))
        outputs = truth(inputs)
        began = process_time()
        layer = six_phase(ArraySource(inputs, outputs), m, seed, PAPER)
        by_head = Hull.of(sculpt_heads(ArraySource(inputs, outputs), layer.scores)[0])
        found.append([from_hull(layer.hull, truth), from_hull(by_head, truth)])
        spent.append(process_time() - began)
    alone, middle = np.median(found, axis=0)
    prototype = ["", ""] if theirs is None else [f"{theirs:g}", f"{alone / theirs:.2f}"]
    row = [f"{count:,}", m, f"{alone:.2g}", f"{middle:.2g}", *prototype, len(found)]
    return [*row, f"{np.median(spent):.1f}"]


def from_hull(hull: Hull, truth: kh.AttentionLayer) -> float:
    """How far score matrices are from the hull, over their size, root mean squares."""
    return relative(hull.at(hull.coefficients(truth.scores)), truth.scores)


def relative(found: np.ndarray, truth: np.ndarray) -> float:
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


def function_error(layer: kh.AttentionLayer, truth: kh.AttentionLayer, k: int, rng: np.random.Generator) -> float:
    fresh = signs(rng, 500, k, truth.width)
    return relative(layer(fresh), truth(fresh))
