"""Queries and errors on heads whose logits are not bilinear, or whose masses are powers of them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np

import keyhole as kh
from benchmarks.support.rows import Kept, Row, markdown
from benchmarks.support.score_forms import FORMS
from keyhole.arrays import floats
from keyhole.gauge import align

# Runs by width.
RUNS = {8: 20, 16: 20, 32: 20, 64: 20}
# Logits and values right to this, relatively.
RIGHT = 1e-7


def table(kept: Kept) -> str:
    columns = ["head", "(d, d_k)", "runs", "queries − bound: median, most", "bound"]
    cases = [
        (name, size) for width in RUNS for name, (_, _, sizes) in FORMS.items() for size in sizes if size[0] == width
    ]
    measured = {f"{name} {size}": partial(_row, name, size, RUNS[size[0]]) for name, size in cases}
    found = kept.rows_of("forms", measured)
    rows = [row for name in FORMS for row in found if row[0] == name]
    return markdown([*columns, "error: median, worst", "right", "certified", "within radii"], rows)


def _row(name: str, size: tuple[int, int], runs: int) -> Row:
    make, options, _ = FORMS[name]
    extra, errors, certified, covered, bounds = [], [], 0, 0, set()
    for seed in range(runs):
        truth = make(*size, np.random.default_rng([seed, *size, *name.encode()]))
        result = kh.recover(kh.FunctionOracle(truth, width=size[0]), "parts", seed=seed, throw=False, **options)
        bound = truth.counting_bound - (1 if options.get("link") in ("linear", "squared", "relu") else 0)
        bounds.add(bound)
        extra.append(result.stats.queries - bound)
        errors.append(1.0 if result.params is None else kh.distance(result.params, truth))
        certified += result.certified
        covered += _is_covered(result, truth)
    spread = f"+{np.median(extra):.0f}, +{max(extra)}"
    error = f"{np.median(errors):.0e}, {max(errors):.0e}"
    right = sum(each <= RIGHT for each in errors)
    counts = (f"{each}/{runs}" for each in (right, certified, covered))
    return [name, size, runs, spread, *bounds, error, *counts]


def _is_covered(result: kh.Recovery, truth: kh.FormHead | kh.SingleHead) -> bool:
    """Whether the true arrays, in the gauge of those recovered, lie within their radii."""
    radius = result.certificate.radius
    if radius is None:
        return False
    own, wide = result.params.arrays(), radius.arrays()
    return all(
        bool(np.all(np.abs(floats(own[name]) - array) <= floats(wide[name]))) for name, array in _pairs(result, truth)
    )


def _pairs(result: kh.Recovery, truth: kh.FormHead | kh.SingleHead) -> Iterable[tuple[str, np.ndarray]]:
    aligned = align(result.params, truth)
    if isinstance(truth, kh.SingleHead):  # a factor of the score is not told
        score, own = aligned["score"], floats(result.params.score)
        factor = float(np.sum(own * score) / np.sum(score**2))
        aligned["score"] = factor * score
        if truth.attention.normaliser.name != "sum":
            aligned["value"] = aligned["value"] / factor
    return aligned.items()
