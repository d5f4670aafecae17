"""Networks that may only be queried inside a ball: a line misses kinks there, so several lines are searched."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Steps
from keyhole.methods.relu_net.exact.cells import CellEquations, NeuronMaps, pieces_of, solve_neurons
from keyhole.methods.relu_net.exact.kink_search import OPEN_AT_FIRST, Kinked, NotPiecewiseLinear
from keyhole.methods.relu_net.exact.line import LineCells, ask_gradients, ask_line, random_line
from keyhole.methods.relu_net.exact.queries import Pieces, QueryLine, TokenQueries
from keyhole.numerics.svd import svd

# Lines looked at before the neurons are said to be too many.
LINES = 60
# New tokens on the surface that must be understood to stop: a kink that cuts off a twentieth may stay unseen.
CHECKS, OUTERMOST = 64, 0.999
# Lines in a row that may fail by chance.
FAILURES = 3
# More open intervals than this at first are no kinks that were missed but errors of what is known.
CROWD = 40
# Predictions err by at most this many times their radius, which holds for single entries.
DEVIATIONS = 10.0


@dataclass(frozen=True)
class InBall:
    """Equations from several lines, their solution, and for each kink the side on which the neuron is active."""

    rows: CellEquations
    jumps: NeuronMaps
    pieces: Pieces
    towards: Floats  # (k, width)
    lines: int

    def error(self, limit: float) -> float:
        """How far the pieces may be off inside the ball."""
        variance = np.einsum("mi,ij,mj->m", self.rows.active, self.jumps.covariance, self.rows.active, optimize=True)
        return DEVIATIONS * limit * float(np.sqrt(np.max(variance)))


def ask_in_ball(
    queries: TokenQueries, rng: np.random.Generator, patience: float, places: Floats | None = None
) -> Steps[InBall]:  # (n, width)
    """Neurons line by line: on each, the kinks that those known so far leave unexplained.

    What is not understood shows most on the surface of the ball; the next line goes through such a token. So do those
    of `places` where an earlier net was not that of the oracle.
    """
    limit = queries.signature.norm_limit
    fit: InBall | None = None
    through: Floats | None = None
    failures = 0
    for _ in range(LINES):
        try:
            fit = yield from _ask_another_line(queries, rng, patience, fit, through)
        except NotPiecewiseLinear:  # a kink at the very end of a line, or two of them too near to each other
            failures += 1
            if failures == FAILURES:
                raise
            continue
        failures = 0
        x = rng.standard_normal((CHECKS, queries.width))
        x *= OUTERMOST * limit / np.linalg.norm(x, axis=1, keepdims=True)
        x = x if places is None else np.concatenate([x, places])
        answers = yield from queries.ask("checks", x)
        off = np.max(np.abs(answers - fit.pieces(x)), axis=1)
        allowed = fit.error(limit) + queries.noise + queries.rounding * float(fit.pieces.size(np.asarray(limit)))
        if np.all(off <= allowed):
            return fit
        through = x[np.argmax(off)]
    raise NotPiecewiseLinear(f"{LINES} lines inside the ball did not meet all of its kinks")


def _ask_another_line(
    queries: TokenQueries, rng: np.random.Generator, patience: float, before: InBall | None, through: Floats | None
) -> Steps[InBall]:
    line = random_line(queries, rng, through)
    limit = queries.signature.norm_limit
    pieces, error, crowd = None, 0.0, OPEN_AT_FIRST
    if before is not None:
        pieces, crowd = before.pieces, CROWD
        error = before.error(limit) + queries.rounding * float(pieces.size(np.asarray(limit)))
    kinked = yield from ask_line(queries, line, rng, known=pieces, error=error, patience=patience, crowd=crowd)
    if before is not None and kinked.kinks.size == 0:
        return replace(before, lines=before.lines + 1)
    centres, distance = _widest(line, kinked, pieces)
    values = yield from queries.ask("cells", centres)
    level = np.max(np.abs(values), axis=0) + kinked.level
    errors = np.full(distance.size, queries.rounding + queries.noise / float(np.min(level)))
    axes = np.linalg.qr(rng.standard_normal((queries.width, queries.width)))[0].T
    nothing = np.zeros((distance.size, values.shape[1], queries.width)), np.zeros(distance.size)
    cells = yield from ask_gradients(queries, centres, distance, values, level, errors, axes, nothing, rng)
    return _with_line(queries, line, kinked, cells, float(np.max(level)), before)


def _widest(line: QueryLine, kinked: Kinked, pieces: Pieces | None) -> tuple[Floats, Floats]:
    """For each cell of new kinks the middle of its widest part without known ones, and how far it is to either end."""
    known = np.zeros(0)
    if pieces is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            known = -pieces.heights(line.origin[None, :])[0] / (pieces.normal @ line.direction)
        known = known[np.abs(known) < line.last]
    ends = np.concatenate([[-line.last], kinked.kinks, [line.last]])
    places, distance = np.empty(ends.size - 1), np.empty(ends.size - 1)
    for number in range(ends.size - 1):
        low, high = ends[number : number + 2]
        parts = np.concatenate([[low], np.sort(known[(known > low) & (known < high)]), [high]])
        widest = int(np.argmax(np.diff(parts)))
        places[number], distance[number] = np.mean(parts[widest : widest + 2]), 0.5 * np.diff(parts)[widest]
    return line.at(places), distance


def _with_line(
    queries: TokenQueries, line: QueryLine, kinked: Kinked, cells: LineCells, level: float, before: InBall | None
) -> InBall:
    """The equations of a line added to those before, and the neurons of all."""
    count = cells.value.shape[0]
    jumps = cells.gradient
    if before is not None:
        active = before.pieces.heights(cells.centre) > 0
        linear = before.pieces.weight[:, :, None] * before.pieces.normal[:, None, :]
        jumps = jumps - np.einsum("mk,kod->mod", active, linear, optimize=True)
    normal, offset, weight = _new_neurons(np.diff(jumps, axis=0), line.direction, line.at(kinked.kinks))
    errors = np.full(count, level * queries.rounding + queries.noise)
    rows = CellEquations(np.zeros((count, 1)), cells.centre, cells.value, cells.gradient, errors, level * cells.error)
    towards = np.tile(line.direction, (count - 1, 1))
    if before is not None:
        rows = CellEquations.concat(replace(before.rows, active=before.rows.active[:, :1]), rows)
        towards = np.concatenate([before.towards, towards])
        normal = np.concatenate([before.pieces.normal, normal])
        offset = np.concatenate([before.pieces.offset, offset])
        weight = np.concatenate([before.pieces.weight, weight])
    pieces = Pieces(normal, offset, weight, np.zeros((cells.value.shape[1], queries.width + 1)))
    on = np.column_stack([pieces.heights(rows.centre) > 0, np.ones(rows.centre.shape[0])]).astype(np.float64)
    if np.linalg.matrix_rank(on) < on.shape[1]:
        raise NotPiecewiseLinear("kinks of several lines contradict each other")
    rows = replace(rows, active=on)
    neurons = solve_neurons(rows)
    return InBall(rows, neurons, pieces_of(neurons, towards), towards, 1 if before is None else before.lines + 1)


def _new_neurons(jumps: Floats, direction: Floats, at: Floats) -> tuple[Floats, Floats, Floats]:
    """Normals (k, width), offsets (k,) and weights (k, outputs) of jumps (k, outputs, width) at tokens (k, width)."""
    count, outputs, width = jumps.shape
    normal, weights = np.zeros((count, width)), np.zeros((count, outputs))
    for number, jump in enumerate(jumps):  # of rank one
        right = svd(jump)[2][0]
        normal[number] = right if right @ direction > 0 else -right
        weights[number] = jump @ normal[number]
    return normal, -np.einsum("kd,kd->k", normal, at), weights
