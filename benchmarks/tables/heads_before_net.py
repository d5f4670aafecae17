"""Queries, errors and seconds of `one-layer` on several heads before a net, and heads that are hard to tell apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import process_time

import numpy as np

import keyhole as kh
from benchmarks.support.rows import Kept, Row, markdown
from benchmarks.tables.one_layer import function_error
from keyhole.families.one_layer import OneLayer
from keyhole.gauge.one_layer import match_heads
from keyhole.targets.demos import random_layer

# (width, neurons, outputs, heads): runs
CASES = {
    (8, 16, 1, 2): 20,
    (16, 32, 1, 4): 10,
    (16, 32, 16, 4): 20,
    (32, 64, 32, 4): 10,
    (32, 64, 32, 8): 2,
    (16, 32, 1, 8): 2,
}
NETS = ("ReLU", "no biases", "GELU")
STAGES = ("heads", "scores", "cells behind heads")
# Attention queries of a prototype: what these counts are to be measured against.
PROTOTYPE = {
    (8, 16, 1, 2): "577 to 782",
    (16, 32, 1, 4): "4,658",
    (16, 32, 16, 4): "1,032",
    (32, 64, 32, 4): "2,507 to 2,620",
    (16, 32, 1, 8): "8,447",
}
HARD_RUNS = 40
# Largest error of a function that counts as right.
RIGHT = 1e-5


def with_net(layer: OneLayer, net: str) -> OneLayer:
    """The layer with another kind of net."""
    if net == "no biases":
        return replace(layer, ffn=replace(layer.net, bias_in=0 * layer.net.bias_in, bias_out=0 * layer.net.bias_out))
    return replace(layer, ffn=replace(layer.net, activation="gelu")) if net == "GELU" else layer


def table(kept: Kept) -> str:
    measured = {
        f"{case} {net} {residual}": partial(_row, case, net, residual, runs)
        for case, runs in CASES.items()
        for net in NETS
        for residual in (False, True)
    }
    columns = ["d, k, p, H", "net", "residual", "certified", "queries: net + attention", "prototype's attention"]
    columns += [
        "counting bound",
        "W error, worst",
        "function error, worst",
        "radius misses",
        "processor seconds, median",
    ]
    rows = markdown(columns, kept.rows_of("generic", measured))
    hard = {name: partial(_hard_row, name, change) for name, change in HARD.items()}
    columns = ["heads", "runs", "certified", "certified and wrong", "radius misses", "otherwise"]
    return (
        f"{rows}\n\nRandom layers of width 2 to 8, 1 to 3d neurons, 2 to 4 heads, one output or up to 8, with and "
        "without residual, ReLU with and without biases and GELU, scores of spectral norm 0.1 to 30:\n\n"
        f"{markdown(columns, kept.rows_of('hard', hard))}"
    )


def recover(truth: OneLayer, seed: int) -> kh.Recovery:
    oracle = kh.FunctionOracle(truth, width=truth.width)
    return kh.recover(oracle, "one-layer", seed=seed, throw=False, activation=truth.net.activation)


def score_errors(result: kh.Recovery, truth: OneLayer) -> tuple[float, bool]:
    """The largest error of a score matrix, relatively, and whether all radii hold."""
    order = match_heads(truth.heads, result.params.heads)
    places = [next(n for n, head in enumerate(result.params.heads) if head is own) for own in order]
    radii = [result.certificate.radius.heads[place].score for place in places]
    misses = [np.abs(own.score - true.score) for own, true in zip(order, truth.heads, strict=True)]
    sizes = [np.linalg.norm(true.score) or 1.0 for true in truth.heads]
    errors = [np.linalg.norm(miss) / size for miss, size in zip(misses, sizes, strict=True)]
    return max(errors), all(bool(np.all(miss <= radius)) for miss, radius in zip(misses, radii, strict=True))


def _row(case: tuple[int, int, int, int], net: str, residual: bool, runs: int) -> Row:
    width, neurons, outputs, heads = case
    spent, others, seconds, errors, function_errors, bounds, certified, misses = [], [], [], [], [], [], 0, 0
    for seed in range(runs):
        rng = np.random.default_rng([seed, *case, NETS.index(net)])
        truth = random_layer(width, neurons, None if outputs == 1 else outputs, rng, residual=residual, heads=heads)
        truth = with_net(truth, net)
        began = process_time()
        result = recover(truth, seed)
        seconds.append(process_time() - began)
        spent.append(sum(count for stage, count in result.stats.stages.items() if stage in STAGES))
        others.append(result.stats.queries - spent[-1])
        bounds.append(result.stats.counting_bound)
        certified += result.certified
        if not result.certified or len(result.params.heads) != heads:
            continue
        error, holds = score_errors(result, truth)
        errors.append(error)
        misses += not holds
        function_errors.append(function_error(result.params, truth, rng))
    return [
        ", ".join(map(str, case)),
        net,
        "yes" if residual else "no",
        f"{certified}/{runs}",
        f"{np.median(others):,.0f} + {np.median(spent):,.0f}",
        PROTOTYPE.get(case, ""),
        f"{np.median(bounds):,.0f}",
        f"{max(errors, default=np.nan):.1e}",
        f"{max(function_errors, default=np.nan):.1e}",
        misses,
        f"{np.median(seconds):.1f}",
    ]


# --- heads that are hard to tell apart --------------------------------------------------------------------------------

Heads = list[kh.SingleHead]


def _rank_one(heads: Heads, rng: np.random.Generator) -> Heads:
    return [replace(head, score=np.outer(head.score[0], rng.standard_normal(head.width))) for head in heads]


HARD: dict[str, Callable[[Heads, np.random.Generator], Heads]] = {
    "generic": lambda heads, _: heads,
    "W₂ = −W₁": lambda heads, _: [heads[0], replace(heads[1], score=-heads[0].score), *heads[2:]],
    "W₂ = 2W₁": lambda heads, _: [heads[0], replace(heads[1], score=2 * heads[0].score), *heads[2:]],
    "scores of rank one": _rank_one,
    "W₁ = 0": lambda heads, _: [replace(heads[0], score=0 * heads[0].score), *heads[1:]],
    "V₂ = V₁": lambda heads, _: [heads[0], replace(heads[1], value=heads[0].value), *heads[2:]],
    "values of 0.1 to 10": lambda heads, rng: [
        replace(head, value=10 ** rng.uniform(-1, 1) * head.value) for head in heads
    ],
}


def hard_layer(change: Callable[[Heads, np.random.Generator], Heads], rng: np.random.Generator) -> OneLayer:
    """A small random layer whose heads are changed."""
    width = int(rng.integers(2, 9))
    outputs = None if rng.integers(2) else int(rng.integers(1, 9))
    neurons, heads, norm = int(rng.integers(1, 3 * width)), int(rng.integers(2, 5)), float(10 ** rng.uniform(-1, 1.5))
    layer = random_layer(width, neurons, outputs, rng, norm, bool(rng.integers(2)), heads)
    layer = with_net(layer, str(rng.choice(NETS)))
    return replace(layer, attention=kh.MultiHead(change(list(layer.heads), rng)))


def _hard_row(name: str, change: Callable[[Heads, np.random.Generator], Heads]) -> Row:
    certified, wrong, misses, otherwise = 0, 0, 0, Counter[str]()
    for seed in range(HARD_RUNS):
        rng = np.random.default_rng([seed, 15, *name.encode()])
        truth = hard_layer(change, rng)
        result = recover(truth, seed)
        if not result.certified:
            otherwise[result.outcome.name] += 1
            continue
        certified += 1
        wrong += function_error(result.params, truth, rng) > RIGHT and not _within_bars(result, truth, rng)
        misses += len(result.params.heads) == len(truth.heads) and not score_errors(result, truth)[1]
    others = ", ".join(f"{count} {outcome}" for outcome, count in otherwise.most_common())
    return [name, HARD_RUNS, certified, wrong, misses, others or "none"]


def _within_bars(result: kh.Recovery, truth: OneLayer, rng: np.random.Generator) -> bool:
    """Whether answers are predicted within what the result says of itself."""
    tokens = rng.standard_normal((500, 4, truth.width))
    bars = result.params.error_bar(result.certificate.radius, tokens, 1e-15)
    return bool(np.all(np.abs(result.params(tokens) - truth(tokens)) <= bars))
