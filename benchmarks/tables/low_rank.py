"""Queries, errors and ranks found on low-rank targets, thousands of seeds on small ones."""

from __future__ import annotations

import numpy as np

import keyhole as kh
from benchmarks.support.heads import Maker, low_rank
from benchmarks.support.rows import markdown

CASES: dict[str, tuple[int, int, Maker, int]] = {
    "(64, 4)": (64, 4, low_rank(4), 200),
    "(256, 8)": (256, 8, low_rank(8), 20),
    "(512, 16)": (512, 16, low_rank(16), 5),
    "(1024, 16)": (1024, 16, low_rank(16), 2),
    "(16, 3), equal singular values": (16, 3, low_rank(3), 1000),
    "(16, 3), decaying to 1e-6": (16, 3, low_rank(3, 1e-6), 1000),
    "(64, 64), full rank": (64, 64, low_rank(64, 0.1), 20),
}


def table() -> str:
    columns = ["(d, r)", "runs", "queries − (r(2d − r) + d): median, 99 %, most", "error: median, worst", "rank right"]
    return markdown([*columns, "certified"], [_row(name, *case) for name, case in CASES.items()])


def _row(name: str, width: int, rank: int, make: Maker, runs: int) -> list[object]:
    extra, errors, right, certified = [], [], 0, 0
    bound = rank * (2 * width - rank) + width
    for seed in range(runs):
        truth = make(width, np.random.default_rng([seed, width, rank]))
        result = kh.recover(kh.FunctionOracle(truth, width=width), "low-rank", seed=seed, throw=False)
        extra.append(result.stats.queries - bound)
        errors.append(kh.distance(result.params, truth))
        right += result.stats.details.get("rank") == rank
        certified += result.certified
    spread = f"+{np.median(extra):.0f}, +{np.percentile(extra, 99):.0f}, +{max(extra)}"
    return [name, runs, spread, f"{np.median(errors):.1e}, {max(errors):.1e}", f"{right}/{runs}", f"{certified}/{runs}"]
