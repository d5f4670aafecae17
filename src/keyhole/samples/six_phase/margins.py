"""S from large margins: rows in which one token wins by far, so that all heads attend to it alone.

There every row of the output is the winner's token times S, up to what is exponentially small in the margin. Where
logits are large such rows abound; where they are small there are none, and S is kept as it was. The proxy says which
token wins (the paper's). Where heads are several and few rows are certified, it errs; then (ours) rows are taken from
examples in which tokens repeat, where heads agree most often, and whichever token explains a row best is its winner.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from keyhole.arrays import ArrayTable, Floats
from keyhole.samples.source import Source

# Rows of the largest margins that are kept, and examples of the fewest different tokens.
MARGIN_ROWS, REPEATING_EXAMPLES = 10_000, 1000
# Which part of the rows has one winner in all heads is not known: S is fitted to ever smaller parts, those nearest to
# it, each so many times. No part has fewer rows than so many for each number of a token.
PARTS = (0.5, 0.35, 0.25, 0.18, 0.12, 0.09, 0.06, 0.045, 0.03, 0.02)
FITS, ROWS_PER_NUMBER = 8, 8
# Rows this near, over the size of outputs, agree with S; in the end it is fitted to those that agree ever more closely.
NEAR, NEARER = 0.05, (0.05, 0.02, 0.01, 0.005)
# S is another one where at least this part of the rows agrees with it, and so many times as many as with that before.
# Signs repeat, so that another sum than S may agree with half of the rows that S does: in random layers it was further
# from the crude one, by .51 of that and more, where S was no further than .41.
AGREED, MORE, FARTHEST = 0.02, 2, 0.47


@dataclass(frozen=True)
class Winners(ArrayTable):
    """Rows with the tokens that may win in them."""

    tokens: Floats  # (rows, candidates, d)
    outputs: Floats  # (rows, d_out)
    order: Floats  # (rows,): the smaller, the more likely that one token wins in all heads

    def best(self, count: int) -> Winners:
        """The most likely ones."""
        return self.take(np.argsort(self.order, kind="stable")[:count])

    def nearest(self, total: Floats) -> tuple[Floats, Floats]:  # (d, d_out) -> (rows, d), (rows,)
        """The candidate of each row that explains its output best, and how far from it."""
        left = np.linalg.norm(self.outputs[:, None] - self.tokens @ total, axis=2)
        rows, chosen = np.arange(len(left)), np.argmin(left, axis=1)
        return self.tokens[rows, chosen], left[rows, chosen]

    def agreeing(self, total: Floats) -> int:
        """How many rows agree with a sum."""
        return int(np.sum(self.nearest(total)[1] <= NEAR * self.size))

    def solve(self, tokens: Floats, chosen: Any) -> Floats:  # (rows, d), (rows,) -> (d, d_out)
        """The sum by least squares, if these tokens win in the chosen rows."""
        return np.asarray(np.linalg.lstsq(tokens[chosen], self.outputs[chosen], rcond=None)[0])

    @property
    def needed(self) -> int:
        """Rows that a sum must at least rest on."""
        return ROWS_PER_NUMBER * int(self.tokens.shape[2])

    @cached_property
    def size(self) -> float:
        """Root mean square norm of the outputs."""
        return float(np.sqrt(np.mean(np.sum(self.outputs**2, axis=1)))) if len(self.outputs) else 0.0


def large_margin_sum(
    source: Source, point: Floats, total: Floats, crude: Floats, keep: int = MARGIN_ROWS
) -> tuple[Floats, bool]:
    """S by least squares on rows that one token wins, and whether it is known better than certified rows would say.

    From the winners of the proxy, and from examples with repeating tokens: of two sums the one that more rows of the
    latter agree with. Where it is theirs the proxy errs, and so do rows that it certified. `total` as it was where few
    rows agree with either, or no more than before.
    """
    of_proxy = source.reduce(partial(_of_proxy, point, keep), partial(_best_of, keep))
    repeating = source.reduce(_of_repeating, partial(_best_of, REPEATING_EXAMPLES * source.length))
    one, two = (_sum_of(rows, total, crude) for rows in (of_proxy, repeating))
    if two is not None and (one is None or repeating.agreeing(two) > repeating.agreeing(one)):
        return _closer(repeating, two)[0], True
    return (total, False) if one is None else _closer(of_proxy, one)


def _sum_of(rows: Winners, total: Floats, crude: Floats) -> Floats | None:
    """The sum that most rows agree with, near the crude one; None where they are few, or no more than with another."""
    found, enough = crude, max(rows.needed, AGREED * len(rows.outputs), MORE * rows.agreeing(total))
    best, most = None, enough
    for part in (each for each in PARTS if each * len(rows.outputs) >= rows.needed):
        for _ in range(FITS):
            tokens, left = rows.nearest(found)
            found = rows.solve(tokens, left <= np.quantile(left, part))
        far = np.linalg.norm(found - crude) > FARTHEST * np.linalg.norm(crude)
        if (agreeing := rows.agreeing(found)) >= most and not far:
            best, most = found, agreeing
    return best


def _closer(rows: Winners, found: Floats) -> tuple[Floats, bool]:
    """The sum fitted to rows that agree ever more closely, and whether there are enough to the end."""
    for near in NEARER:
        tokens, left = rows.nearest(found)
        close = left <= near * rows.size
        if np.sum(close) < rows.needed:
            return found, False
        found = rows.solve(tokens, close)
    return found, True


def _of_proxy(point: Floats, keep: int, inputs: Floats, outputs: Floats) -> Winners:
    """Rows of the largest margins under the proxy, whose winner is the only candidate."""
    if inputs.shape[1] < 2:
        return Winners(inputs, outputs[:, 0], np.zeros(len(inputs)))
    logits = inputs @ point @ np.swapaxes(inputs, 1, 2)  # (n, rows, k)
    ordered = np.partition(logits, -2, axis=2)
    margins = ordered[..., -1] - ordered[..., -2]
    chosen = np.argsort(-margins, axis=None, kind="stable")[:keep]
    example, row = np.unravel_index(chosen, margins.shape)
    token = np.argmax(logits, axis=2)[example, row]
    return Winners(inputs[example, token][:, None], outputs[example, row], -margins[example, row])


def _of_repeating(inputs: Floats, outputs: Floats) -> Winners:
    """Rows of examples that have fewer different tokens than tokens."""
    k = inputs.shape[1]
    first = np.ones(inputs.shape[:2], dtype=bool)
    for one in range(k):
        for two in range(one):
            first[:, one] &= np.any(inputs[:, one] != inputs[:, two], axis=1)
    different = np.sum(first, axis=1)
    chosen = np.argsort(different, kind="stable")[:REPEATING_EXAMPLES]
    chosen = chosen[different[chosen] < k]
    tokens = np.repeat(inputs[chosen], k, axis=0)
    return Winners(
        tokens, outputs[chosen].reshape(len(tokens), outputs.shape[2]), np.repeat(different[chosen], k).astype(float)
    )


def _best_of(keep: int, *parts: Winners) -> Winners:
    return Winners.concat(*parts).best(keep)
