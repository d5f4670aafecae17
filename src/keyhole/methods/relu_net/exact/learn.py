"""The pieces of a box with sharp kinks: line, cells, wide cells."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Steps
from keyhole.methods.relu_net.exact.bounded_norm import learn_in_ball
from keyhole.methods.relu_net.exact.cells import jumps_of, measure_wide, pieces_of, rows_of_line, typical_distance
from keyhole.methods.relu_net.exact.estimate import Bars
from keyhole.methods.relu_net.exact.kink_search import OPEN_AT_FIRST
from keyhole.methods.relu_net.exact.line import random_line, read_cells, read_line
from keyhole.methods.relu_net.exact.queries import Box, Pieces
from keyhole.methods.relu_net.exact.several_outputs import learn_several

# Wide cells measured beyond the unknowns: a part of them, and at least one.
EXTRA_CELLS = 1 / 12
# Lean results measure again the cells between close kinks where the expected error of the function is above this part
# of its size, up to this part of all cells.
LEAN_ERROR = 1e-8
LEAN_EXTRA = 1 / 24
# Error bars are about this many times the errors.
PESSIMISM = 10.0


@dataclass(frozen=True)
class Learned:
    """What a line, or several, told of a box."""

    pieces: Pieces
    bars: Bars
    scale: float  # typical distance of a kink from the origin
    lines: int


def learn(
    box: Box, rng: np.random.Generator, *, polish: bool, patience: float = 1.0, crowd: int = OPEN_AT_FIRST
) -> Steps[Learned]:
    """Kinks on a line, then gradients between them, then wide cells; NotPiecewiseLinear where that fails."""
    if box.signature.max_norm is not None:
        inside = yield from learn_in_ball(box, rng, patience)
        rows, towards, lines = inside.rows, inside.towards, inside.lines
        unit = box.signature.norm_limit
    else:
        line, lines = random_line(box, rng), 1
        unit = line.unit
        kinked = yield from read_line(box, line, rng, patience=patience, crowd=crowd)
        if kinked.slope.shape[1] > 1:
            several = yield from learn_several(box, line, kinked, rng, polish)
            return Learned(several.pieces, several.bars, several.scale, lines)
        cells = yield from read_cells(box, line, kinked, np.arange(kinked.kinks.size + 1), rng)
        rows = rows_of_line(box, line, kinked, cells)
        towards = np.tile(line.direction, (kinked.kinks.size, 1))
    jumps = jumps_of(rows)
    pieces = pieces_of(jumps, towards)
    scale = min(typical_distance(pieces, unit), unit)
    count = pieces.count
    more = count + 2 + int(EXTRA_CELLS * count) if polish else _imprecise(box, pieces, jumps.covariance, scale)
    if more and float(pieces.size(np.asarray(unit))) > 0:
        stage = "polish" if polish else "cells"
        rows = rows.joined((yield from measure_wide(box, pieces, jumps.covariance, scale, more, rng, stage)))
        jumps = jumps_of(rows)
        pieces = pieces_of(jumps, towards)
    slope, level = jumps.linear_error, jumps.constant_error
    return Learned(pieces, Bars(slope[:-1], level[:-1], float(slope[-1]), float(level[-1])), scale, lines)


def _imprecise(box: Box, pieces: Pieces, covariance: Floats, scale: float) -> int:
    """How many cells a lean result should measure again: those whose error is far above that of the others."""
    variance = np.diag(covariance)[:-1] * (scale * box.width**0.5) ** 2
    size = float(pieces.size(np.asarray(scale * box.width**0.5)))
    poor = np.sum(np.sqrt(variance) > PESSIMISM * LEAN_ERROR * size)
    # A narrow cell spoils the neurons on both of its sides.
    return int(min(-(-poor // 2), np.ceil(LEAN_EXTRA * variance.size)))
