"""Queries, errors and radii of heads whose link is an unknown smooth function, by link."""

from __future__ import annotations

import numpy as np

import keyhole as kh
from benchmarks.support.rows import markdown
from benchmarks.support.unknown_links import LINKS, Box, random_box
from keyhole.arrays import floats

WIDTHS, SEEDS = (8, 16, 32), 5


def table() -> str:
    columns = [
        "unknown link",
        "runs",
        "queries − (d² + d): median, most",
        "error: median, worst",
        "error over its radius, worst",
        "certified and right",
    ]
    return markdown(columns, [_row(name) for name in LINKS])


def over_radius(result: kh.Recovery, truth: kh.SingleHead) -> float:
    """The worst entry over its radius."""
    true, radius = truth.arrays(), result.certificate.radius.arrays()
    return max(
        float(np.max(np.abs(floats(array) - floats(true[name])) / (floats(radius[name]) + 1e-300)))
        for name, array in result.params.arrays().items()
    )


def _row(name: str) -> list[object]:
    extra, errors, ratios, right = [], [], [], 0
    for width in WIDTHS:
        for seed in range(SEEDS):
            box: Box = random_box(name, width, seed)
            oracle = kh.FunctionOracle(box, width=width)
            result = kh.recover(oracle, "parts", link="unknown", seed=seed, throw=False)
            if not result.certified:
                continue
            truth = box.seen_as(result.params)
            extra.append(result.stats.queries - width**2 - width)
            errors.append(kh.distance(result.params, truth))
            ratios.append(over_radius(result, truth))
            right += ratios[-1] <= 1
    runs = len(WIDTHS) * SEEDS
    spread = f"+{np.median(extra):.0f}, +{max(extra)}"
    return [name, runs, spread, f"{np.median(errors):.1e}, {max(errors):.1e}", f"{max(ratios):.2f}", f"{right}/{runs}"]
