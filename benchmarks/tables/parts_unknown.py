"""Queries, errors and radii of heads whose link is an unknown smooth function, by link; and boxes of no such parts."""

from __future__ import annotations

from functools import partial

import numpy as np

import keyhole as kh
from benchmarks.support.attention_zoo import OTHERS
from benchmarks.support.rows import Kept, Row, markdown
from benchmarks.support.unknown_links import LINKS, Box, random_box
from keyhole.arrays import floats

WIDTHS, SEEDS = (8, 16, 32), 5
# Boxes of each kind that has no name, and the options by which each is read.
STRANGE, WAYS = 32, {"parts that are named first": {}, "an unknown link": {"link": "unknown"}}
STRANGE_WIDTH, FRESH = 8, 400


def table(kept: Kept) -> str:
    columns = [
        "unknown link",
        "runs",
        "queries − (d² + d): median, most",
        "error: median, worst",
        "error over its radius, worst",
        "certified and right",
    ]
    links = kept.rows_of("links", {name: partial(_row, name) for name in LINKS})
    strange = {f"{name}, {way}": partial(_strange_row, name, way) for name in OTHERS for way in WAYS}
    rows = kept.rows_of("strange", strange)
    wrong, boxes = (sum(int(row[place]) for row in rows) for place in (4, 2))
    return "\n\n".join(
        [
            markdown(columns, links),
            "Boxes that have no name, a link that folds back (1 + s + s²/2) among them. A certified recovery is wrong "
            f"if it is further from any of {FRESH} fresh answers than its error bar; of some kinds an unknown link is "
            "true:",
            markdown(["box", "read as", "runs", "certified and right", "certified and wrong", "admitted"], rows),
            f"{wrong} of {boxes} were certified wrongly.",
        ]
    )


def _strange_row(name: str, way: str) -> Row:
    right = wrong = 0
    for seed in range(STRANGE):
        rng = np.random.default_rng([seed, *name.encode()])
        box = OTHERS[name].draw(rng, STRANGE_WIDTH)
        oracle = kh.FunctionOracle(box, width=STRANGE_WIDTH)
        result = kh.recover(oracle, "parts", seed=seed, throw=False, **WAYS[way])
        if result.certified:
            true = _holds(result, box, rng)
            right, wrong = right + true, wrong + (not true)
    return [name, way, STRANGE, right, wrong, STRANGE - right - wrong]


def _holds(result: kh.Recovery, box: object, rng: np.random.Generator) -> bool:
    """Whether fresh answers, to tokens of all norms from a tenth to ten, are within error bars of predictions."""
    norms = 10 ** rng.uniform(-1, 1, (FRESH, 1, 1))
    tokens = norms * rng.standard_normal((FRESH, 6, STRANGE_WIDTH))
    bars = result.params.error_bar(result.certificate.radius, tokens, 1e-13)
    seen = np.asarray(box(tokens))  # type: ignore[operator]
    return bool(np.all(np.abs(result.params(tokens) - seen) <= 2 * bars + 1e-12 * np.abs(seen)))


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
