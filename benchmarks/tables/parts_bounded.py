"""Heads of other parts than a softmax's from tokens of norm at most 3, and with a score bias: right, or admitted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

import keyhole as kh
from benchmarks.support.parts import ATTENTIONS, names_of, random_head
from benchmarks.support.rows import Kept, markdown
from benchmarks.tables.parts import over_radius

WIDTH, NORM, SEEDS, SCALE = 16, 3.0, 20, 4.0  # entries of the score are those of a spectral norm of two


NARROW, SEEDS_BIASED = 8, 10
# Runs of two parts with constants, whose fits start from every pair of these: they take longest.
FEW = 4


def table(kept: Kept) -> str:
    columns = ["parts, norms ≤ 3, d = 16", "runs", "certified and right", "certified and wrong", "error: median, worst"]
    rows = kept.rows_of("bounded", {kind: partial(_row, kind) for kind in ATTENTIONS})
    biased = ["parts and a score bias, d = 8", *columns[1:], "queries − bound: median"]
    with_bias = kept.rows_of("biased", {kind: partial(_biased_row, kind) for kind in ATTENTIONS})
    said = "Tokens of any norm, scores and score biases of sizes from 1e-2 to 1e2, every fourth with an output bias:"
    bounded = markdown([*columns, "queries − bound: median"], rows)
    return f"{bounded}\n\n{said}\n\n{markdown(biased, with_bias)}"


def _row(kind: str) -> list[object]:
    seeds = FEW if " and " in kind else SEEDS
    return _tried(kind, [random_head(kind, WIDTH, seed, scale=SCALE) for seed in range(seeds)], max_norm=NORM)


def _biased_row(kind: str) -> list[object]:
    truths = []
    for seed in range(SEEDS_BIASED):
        rng, head = np.random.default_rng(seed), random_head(kind, NARROW, 1000 + seed)
        bias = rng.standard_normal(NARROW) * 10 ** rng.uniform(-2, 2)
        constant = rng.standard_normal(()) if seed % 4 == 3 else None
        truths.append(replace(head, score_bias=bias, output_bias=constant))
    return _tried(kind, truths)


def _tried(kind: str, truths: list[kh.SingleHead], **limits: float) -> list[object]:
    errors, extra, right, wrong = [], [], 0, 0
    for seed, truth in enumerate(truths):
        oracle = kh.FunctionOracle(truth, width=truth.width, **limits)
        result = kh.recover(oracle, "parts", seed=seed, throw=False, **names_of(truth.attention))
        if result.certified:
            good = over_radius(result, truth) <= 1
            right, wrong = right + good, wrong + (not good)
            errors.append(kh.distance(result.params, truth))
            extra.append(result.stats.queries - truth.counting_bound)
    spread = f"{np.median(errors):.1e}, {max(errors):.1e}" if errors else "not read"
    return [kind, len(truths), right, wrong, spread, f"+{np.median(extra):.0f}" if extra else "not read"]
