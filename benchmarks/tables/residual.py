"""Heads behind a residual: queries beside those of the same heads without it, and digits by the size of attention."""

from __future__ import annotations

import numpy as np

import keyhole as kh
from benchmarks.support.rows import markdown
from keyhole.targets import random_multi_head

CASES = [(2, 8, 1.0), (4, 16, 1.0), (4, 16, 1e-2), (4, 16, 1e-4), (8, 32, 1.0)]
RUNS = 5


def heads_of(heads: int, width: int, size: float, seed: int) -> kh.MultiHead:
    """Random heads whose values are of the given size beside tokens."""
    made = random_multi_head(heads=heads, width=width, outputs=width, seed=seed, score_bias=0.2)
    return kh.MultiHead([kh.SingleHead(head.score, size * head.value, head.score_bias) for head in made.heads])


def table() -> str:
    columns = ["heads, d", "size of attention", "runs", "queries", "without the residual", "score error: median, worst"]
    return markdown([*columns, "certified", "outside their radius"], [_row(*case) for case in CASES])


def _row(heads: int, width: int, size: float) -> list[object]:
    queries, plain, errors, certified, outside = [], [], [], 0, 0
    for seed in range(RUNS):
        truth = heads_of(heads, width, size, seed)
        bare = kh.FunctionOracle(truth, width=width, max_norm=20.0)
        box = kh.FunctionOracle(kh.Residual(truth), width=width, max_norm=20.0)
        result = kh.recover(box, "residual", seed=seed, throw=False)
        plain.append(kh.recover(bare, "multi-head", seed=seed, throw=False).stats.queries)
        queries.append(result.stats.queries)
        certified += result.certified
        if result.params is None:
            continue
        for head, found, radius in matched_scores(truth, result):
            apart = np.abs(found - head)
            errors.append(float(np.linalg.norm(apart) / np.linalg.norm(head)))
            outside += result.certified and bool(np.any(apart > radius))
    spread = f"{np.median(errors):.1e}, {max(errors):.1e}" if errors else "–"
    asked = [f"{min(each):,} to {max(each):,}" for each in (queries, plain)]
    return [f"{heads}, {width}", f"{size:g}", RUNS, *asked, spread, f"{certified}/{RUNS}", outside]


def matched_scores(truth: kh.MultiHead, result: kh.Recovery) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Score, its estimate and its radii for each head, which come back in another order."""
    found = [np.asarray(head.score) for head in result.params.attention.heads]
    radii = result.certificate.radius.attention.heads
    matched = []
    for head in truth.heads:
        nearest = int(np.argmin([np.linalg.norm(each - head.score) for each in found]))
        matched.append((np.asarray(head.score), found[nearest], np.asarray(radii[nearest].score)))
    return matched
