"""S from large margins: rows in which the proxy lets one token win by far, so that all heads attend to it alone.

There every row of the output is the winner's token times S, up to what is exponentially small in the margin. Where
logits are large such rows abound; where they are small there are none, and S is kept as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from keyhole.arrays import ArrayTable, Floats
from keyhole.samples.source import Source

# Rows of the largest margins that are kept.
MARGIN_ROWS = 10_000
# Rounds of reweighting: first every row counts by its distance, not by its square, then the nearest part alone. Which
# part of the rows has one winner in all heads is not known: each of these is tried.
DISTANCE_ROUNDS, NEAREST_ROUNDS = 15, 10
AGREEING_PARTS = (0.5, 0.25, 0.1)
# Rows this near, over the size of outputs, agree with S; in the end it is fitted to those that agree ever more closely,
# as long as there are so many for each number of a token.
NEAR, NEARER, ROWS_PER_NUMBER = 0.05, (0.05, 0.02, 0.01, 0.005), 8
# S is another one where at least this part of the rows agrees with it, and so many times as many as with that before.
# Signs repeat, so that another sum than S may agree with half of the rows that S does: in random layers it was further
# from the crude one, by .53 of that and more, where S was no further than .41.
AGREED, MORE, FARTHEST = 0.02, 2, 0.47


@dataclass(frozen=True)
class Winners(ArrayTable):
    """Rows with the token that wins in them."""

    tokens: Floats  # (rows, d)
    outputs: Floats  # (rows, d_out)
    margins: Floats  # (rows,): of the largest logit over the next

    def best(self, count: int) -> Winners:
        """Those that win by most."""
        return self.take(np.argsort(-self.margins, kind="stable")[:count])


def large_margin_sum(
    source: Source, point: Floats, total: Floats, crude: Floats, keep: int = MARGIN_ROWS
) -> tuple[Floats, bool]:
    """S by least squares on rows of large margins under the proxy, and whether enough of them agree to all but know it.

    Of several the one that most rows agree with; `total` as it was where these are few, or no more than before.
    """
    rows = source.reduce(partial(_winners, point, keep), partial(_best_of, keep))
    size = float(np.sqrt(np.mean(np.sum(rows.outputs**2, axis=1))))
    if not size > 0:
        return total, False
    rows = replace(rows, outputs=rows.outputs / size)
    best, agreeing, crude = total / size, 0.0, crude / size
    for part in AGREEING_PARTS:
        fitted = _fit(rows, part)
        count = float(np.mean(_left(rows, fitted) <= NEAR))
        if count > agreeing and np.linalg.norm(fitted - crude) <= FARTHEST * np.linalg.norm(crude):
            best, agreeing = fitted, count
    if agreeing < AGREED or agreeing < MORE * float(np.mean(_left(rows, total / size) <= NEAR)):
        return total, False
    for near in NEARER:
        close = _left(rows, best) <= near
        if np.sum(close) < ROWS_PER_NUMBER * best.shape[0]:
            return size * best, False
        best = _solve(rows, close.astype(float))
    return size * best, True


def _fit(rows: Winners, part: float) -> Floats:
    """S from the part of the rows that agrees best with it."""
    total = _solve(rows, np.ones(len(rows.margins)))
    for _ in range(DISTANCE_ROUNDS):  # least absolute distances: no minimum but the best
        left = _left(rows, total)
        total = _solve(rows, 1.0 / np.maximum(left, 1e-3 * np.median(left) + np.finfo(float).tiny) ** 0.5)
    for _ in range(NEAREST_ROUNDS):
        left = _left(rows, total)
        total = _solve(rows, (left <= np.quantile(left, part)).astype(float))
    return total


def _left(rows: Winners, total: Floats) -> Floats:
    return np.asarray(np.linalg.norm(rows.outputs - rows.tokens @ total, axis=1))


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
