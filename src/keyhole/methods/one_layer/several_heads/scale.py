"""A last token in a wide cell, and steps around it so long that logits are moderate.

With as many copies of both tokens, y(u) − y(−u) = Σ_h u·v_h whatever the logits, and y(u) + y(−u) is the sum over heads
of tanh(uᵀ·W_h·g/2)·(u·v_h): the odd part is linear as long as the cell is not left, and the even part grows fourfold
for steps twice as long where logits are small, twofold where they are large.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.one_layer.cells import LinearCells
from keyhole.methods.one_layer.several_heads.far_cells import ROOM, FarNet
from keyhole.methods.one_layer.several_heads.queries import CellQueries, PairDesign
from keyhole.recovery import Outcome

STAGE = "heads"
# Directions of which the widest cell is taken.
DIRECTIONS = 96
# Steps that are tried at once, each both ways: of few, what heads add may cancel at one length and look like growth.
TRIED = 6
# Growth of the even part for steps twice as long, if logits are moderate.
LEAST_GROWTH, MOST_GROWTH = 2.3, 3.1
# The even part shows from so many errors of answers on; steps are this much longer where it does not.
CLEAR, LONGER = 64.0, 16.0
MOST_TRIES, MOST_ROOM = 60, 2.0**16
# The odd part is off a line by this many errors of answers where a cell is left; errors may be larger than rounding.
LEFT, LEAST_ERROR, SAFE = 256.0, 0.5, 1.5

SILENT = "what attention adds does not depend on its logits, however long its tokens: score matrices cannot be known"
CROOKED = "what attention adds is not linear in its values in any cell of the net: the box is no net behind heads"


@dataclass(frozen=True)
class Scale:
    """A last token, and how long steps are around it."""

    cell: LinearCells  # one
    size: float  # of steps
    room: float  # how many times as far away kinks must be
    outputs: int  # combinations of outputs that can be independent in the cell
    rows: Floats  # (n, width) steps
    odd: Floats  # (n, outputs) Σ_h u·v_h of these

    @property
    def product(self) -> float:
        """Of the norms of step and last token."""
        return float(self.size * np.linalg.norm(self.cell.points[0]))


def ask_scale(queries: CellQueries, far: FarNet) -> Steps[Scale]:
    """Doubling and halving of steps in the widest of many cells in which the net rises."""
    directions, widths = far.directions(queries.rng, DIRECTIONS)
    direction = directions[[int(np.argmax(widths * far.rises(directions)))]]
    product, low, high, room = 4.0 * queries.width**0.5, 0.0, np.inf, ROOM
    for _ in range(MOST_TRIES):
        cell = far.cells(direction, np.array([2 * product]), room)
        if not cell.width[0] > 0 or not np.isfinite(cell.width[0]):
            break
        size = product / float(np.linalg.norm(cell.points[0]))
        rows, even, odd = yield from _ask_parts(queries, cell, size)
        error = float(queries.error(cell.points)[0] / queries.measured)
        bent = float(np.sqrt(np.mean((odd[1] - 2 * odd[0]) ** 2)) / (10**0.5 * error))
        if bent > LEFT:
            room *= 4
            if room > MOST_ROOM:
                raise Unrecoverable(Outcome.WRONG_FAMILY, CROOKED)
            continue
        queries.measured = max(SAFE * bent, LEAST_ERROR)
        sizes = np.sqrt(np.mean(even**2, axis=(1, 2)))
        if sizes[0] <= CLEAR * queries.measured * error:
            low, product = product, product * LONGER
            continue
        growth = sizes[1] / sizes[0]
        if LEAST_GROWTH <= growth <= MOST_GROWTH or high < 2 * low:
            return Scale(cell, size, room, far.outputs(cell), rows, odd[0])
        low, high = (product, high) if growth > MOST_GROWTH else (low, product)
        product = 2 * low if high == np.inf else high / 2 if low == 0 else float(np.sqrt(low * high))
    raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, SILENT)


def _ask_parts(queries: CellQueries, cell: LinearCells, size: float) -> Steps[tuple[Floats, Floats, Floats]]:
    """Steps (n, width), and the even and odd parts (2, n, outputs) of steps and of those twice as long."""
    rows = queries.rng.standard_normal((TRIED, queries.width))
    rows *= size / np.linalg.norm(rows, axis=1, keepdims=True)
    signed = np.concatenate([factor * rows for factor in (1.0, -1.0, 2.0, -2.0)])
    zeros = np.zeros(len(signed), dtype=np.int64)
    design = PairDesign(zeros, signed, np.ones((len(signed), 2), dtype=np.int64))
    (found,) = yield from queries.ask(STAGE, cell.points, design)
    parts = found.answers.reshape(2, 2, TRIED, -1)
    return rows, parts[:, 0] + parts[:, 1], parts[:, 0] - parts[:, 1]
