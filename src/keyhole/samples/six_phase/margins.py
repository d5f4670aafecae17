"""S from large margins: rows in which the proxy lets one token win by far, so that all heads attend to it alone.

There every row of the output is the winner's token times S, up to what is exponentially small in the margin. Where
logits are large such rows abound; where they are small there are none, and S is kept as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from keyhole.arrays import ArrayTable, Floats
from keyhole.samples.source import Source

# Rows of the largest margins that are kept, and the part of them that S is fitted to in the end: in the others some
# head attends elsewhere after all.
MARGIN_ROWS, AGREEING_PART = 10_000, 0.25
# Rounds of reweighting: first every row counts by its distance, not by its square, then the nearest part alone.
DISTANCE_ROUNDS, NEAREST_ROUNDS = 15, 10


@dataclass(frozen=True)
class Winners(ArrayTable):
    """Rows with the token that wins in them."""

    tokens: Floats  # (rows, d)
    outputs: Floats  # (rows, d_out)
    margins: Floats  # (rows,): of the largest logit over the next

    def best(self, count: int) -> Winners:
        """Those that win by most."""
        return self.take(np.argsort(-self.margins, kind="stable")[:count])


def large_margin_sum(source: Source, point: Floats, keep: int = MARGIN_ROWS) -> Floats:  # (d, d) -> (d, d_out)
    """S by least squares on rows of large margins under the proxy, those left out that do not agree with the others."""
    rows = source.reduce(partial(_winners, point, keep), partial(_best_of, keep))
    total = _solve(rows, np.ones(len(rows.margins)))
    for _ in range(DISTANCE_ROUNDS):  # least absolute distances: no minimum but the best
        left = np.linalg.norm(rows.outputs - rows.tokens @ total, axis=1)
        total = _solve(rows, 1.0 / np.maximum(left, 1e-3 * np.median(left) + np.finfo(float).tiny) ** 0.5)
    for _ in range(NEAREST_ROUNDS):
        left = np.linalg.norm(rows.outputs - rows.tokens @ total, axis=1)
        total = _solve(rows, (left <= np.quantile(left, AGREEING_PART)).astype(float))
    return total


def _solve(rows: Winners, weights: Floats) -> Floats:
    return np.asarray(np.linalg.lstsq(rows.tokens * weights[:, None], rows.outputs * weights[:, None], rcond=None)[0])


def _winners(point: Floats, keep: int, inputs: Floats, outputs: Floats) -> Winners:
    if inputs.shape[1] < 2:
        return Winners(inputs[:, 0], outputs[:, 0], np.zeros(len(inputs)))
    logits = inputs @ point @ np.swapaxes(inputs, 1, 2)  # (n, rows, k)
    ordered = np.partition(logits, -2, axis=2)
    margins = ordered[..., -1] - ordered[..., -2]
    chosen = np.argsort(-margins, axis=None, kind="stable")[:keep]
    example, row = np.unravel_index(chosen, margins.shape)
    token = np.argmax(logits, axis=2)[example, row]
    return Winners(inputs[example, token], outputs[example, row], margins[example, row])


def _best_of(keep: int, *parts: Winners) -> Winners:
    return Winners.concat(*parts).best(keep)
