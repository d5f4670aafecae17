"""Queries and errors of `single-head` over easy and nasty targets."""

from __future__ import annotations

import numpy as np

import keyhole as kh
from benchmarks.support.heads import NASTY, Maker, gaussian, low_rank
from benchmarks.support.rows import markdown

SEEDS = {8: 200, 32: 200, 64: 100, 128: 30, 256: 5}


def table() -> str:
    rows = []
    for norm in (1e-3, 1.0, 1e3):
        rows += [_row(f"Gaussian, norm {norm:g}", gaussian(norm), width) for width in (8, 32, 128, 256)]
    for name, make in NASTY.items():
        rows += [_row(name, make, width) for width in (32, 128)]
    rows += [_row("Gaussian, norm 1, tokens of norm ≤ 1", gaussian(1.0), width, max_norm=1.0) for width in (32, 128)]
    rows += [_row(f"rank {rank}", low_rank(rank), width) for width, rank in ((64, 4), (128, 8), (256, 8))]
    columns = ["target", "d", "runs", "queries − bound: median, most", "relative error: median, worst", "uncertified"]
    return markdown([*columns, "radius misses"], rows)


def _row(name: str, make: Maker, width: int, max_norm: float | None = None) -> list[object]:
    extra, errors, uncertified, misses = [], [], 0, 0
    for seed in range(SEEDS[width]):
        truth = make(width, np.random.default_rng([width, seed]))
        result = kh.recover(
            kh.FunctionOracle(truth, width=width, max_norm=max_norm), "single-head", seed=seed, throw=False
        )
        uncertified += not result.certified
        extra.append(result.stats.queries - result.stats.counting_bound)
        errors.append(kh.distance(result.params, truth))
        misses += not np.all(np.abs(result.params.score - truth.score) <= result.certificate.radius.score)
    spread = f"+{np.median(extra):.0f}, +{max(extra)}"
    return [name, width, len(errors), spread, f"{np.median(errors):.1e}, {max(errors):.1e}", uncertified, misses]
