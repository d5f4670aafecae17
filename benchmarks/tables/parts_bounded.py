"""Heads of other parts than a softmax's from tokens of norm at most 3: right, or admitted."""

from __future__ import annotations

from functools import partial

import numpy as np

import keyhole as kh
from benchmarks.support.parts import ATTENTIONS, names_of, random_head
from benchmarks.support.rows import Kept, markdown
from benchmarks.tables.parts import over_radius

WIDTH, NORM, SEEDS, SCALE = 16, 3.0, 20, 4.0  # entries of the score are those of a spectral norm of two


# Runs of two parts with constants, whose fits start from every pair of these: they take longest.
FEW = 4


def table(kept: Kept) -> str:
    columns = ["parts, norms ≤ 3, d = 16", "runs", "certified and right", "certified and wrong", "error: median, worst"]
    rows = kept.rows_of("bounded", {kind: partial(_row, kind) for kind in ATTENTIONS})
    return markdown([*columns, "queries − bound: median"], rows)


def _row(kind: str) -> list[object]:
    errors, extra, right, wrong = [], [], 0, 0
    seeds = FEW if " and " in kind else SEEDS
    for seed in range(seeds):
        truth = random_head(kind, WIDTH, seed, scale=SCALE)
        oracle = kh.FunctionOracle(truth, width=WIDTH, max_norm=NORM)
        result = kh.recover(oracle, "parts", seed=seed, throw=False, **names_of(truth.attention))
        if result.certified:
            good = over_radius(result, truth) <= 1
            right, wrong = right + good, wrong + (not good)
            errors.append(kh.distance(result.params, truth))
            extra.append(result.stats.queries - truth.counting_bound)
    spread = f"{np.median(errors):.1e}, {max(errors):.1e}" if errors else "not read"
    return [kind, seeds, right, wrong, spread, f"+{np.median(extra):.0f}" if extra else "not read"]
