"""The affine pieces of an oracle measured again where its cells are wide, and the neurons that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import ArrayTable, Floats
from keyhole.methods.base import Steps
from keyhole.methods.relu_net.exact.estimate import PieceErrors
from keyhole.methods.relu_net.exact.kink_search import Kinked, NotPiecewiseLinear
from keyhole.methods.relu_net.exact.line import LineCells
from keyhole.methods.relu_net.exact.queries import Pieces, QueryLine, TokenQueries
from keyhole.methods.relu_net.exact.token_design import clear_steps, telling_rows, wide_tokens

# Candidates for each cell to be chosen, and their least and largest number.
CANDIDATES, FEWEST, MOST = 20, 400, 4000
# How far out kinks are is told by offsets of more radii than this: at the length of smaller ones it is not known on
# which side of the other kinks a token lies.
KNOWN_OFFSET = 2.0**14
# Wide cells measured beyond the unknowns: a part of them, and at least one.
EXTRA_CELLS = 1 / 12
# Rounding is that of the answers on a line, unless that of the neurons that were read there is so many times as large.
CANCELS = 8.0


@dataclass(frozen=True)
class CellEquations(ArrayTable):
    """Cells as linear equations: the affine map of a cell is the sum over its active neurons, and one for all cells.

    Of scalar answers neuron i contributes jump_i·(x, 1), which is linear in the unknown jumps; so is each output of
    several.
    """

    active: Floats  # (m, k + 1): 0 or 1; the last column, of the affine map that is everywhere, is 1
    centre: Floats  # (m, width)
    value: Floats  # (m, outputs)
    gradient: Floats  # (m, outputs, width)
    value_error: Floats  # (m,)
    gradient_error: Floats  # (m,)


@dataclass(frozen=True)
class NeuronMaps:
    """What equations amount to: the affine maps of neurons, the last one that of no neuron, with their errors."""

    linear: Floats  # (k + 1, outputs, width)
    constant: Floats  # (k + 1, outputs)
    linear_error: Floats  # (k + 1,) radius of entries
    constant_error: Floats  # (k + 1,)
    covariance: Floats  # (k + 1, k + 1)

    @property
    def radii(self) -> PieceErrors:
        """The errors as those of pieces."""
        slope, level = self.linear_error, self.constant_error
        return PieceErrors(slope[:-1], level[:-1], float(slope[-1]), float(level[-1]))


def rows_of_line(queries: TokenQueries, line: QueryLine, kinked: Kinked, cells: LineCells) -> CellEquations:
    """The cells of a line: in cell c neurons before kink c are on."""
    count = kinked.kinks.size
    active = np.tri(count + 1, count + 1, -1)
    active[:, -1] = 1.0
    level = float(np.max(kinked.level))
    t = (cells.centre - line.origin) @ line.direction
    errors = level * queries.rounding * kinked.growth(t) + queries.noise
    return CellEquations(active, cells.centre, cells.value, cells.gradient, errors, level * cells.error)


def allow_for_cancelling(queries: TokenQueries, rows: CellEquations, pieces: Pieces) -> CellEquations:
    """Equations that err by the rounding of neurons that cancel, where these are much larger than the answers."""
    explained = queries.rounding * pieces.size(np.linalg.norm(rows.centre, axis=1))
    factor = explained / rows.value_error
    factor = np.where(factor > CANCELS, factor, 1.0)
    return replace(rows, value_error=factor * rows.value_error, gradient_error=factor * rows.gradient_error)


def solve_neurons(rows: CellEquations) -> NeuronMaps:
    """Weighted least squares: gradients first, then constants that fit the values."""
    unknowns = rows.active.shape[1]
    outputs, width = rows.gradient.shape[1:]
    weights = 1 / rows.gradient_error
    flat = rows.gradient.reshape(-1, outputs * width)
    linear, covariance = _solve(rows.active, flat, weights)
    linear_error = np.sqrt(np.diag(covariance))
    linear = linear.reshape(unknowns, outputs, width)
    there = np.einsum("mi,iod,md->mo", rows.active, linear, rows.centre, optimize=True)
    # What an error of a slope does where it was measured, the constant makes up for: far out it knows little.
    norms = np.linalg.norm(rows.centre, axis=1)
    off = np.hypot(rows.value_error, norms * np.sqrt(rows.active @ linear_error**2))
    constant, spread = _solve(rows.active, rows.value - there, 1 / off)
    constant_error = np.hypot(np.sqrt(np.diag(spread)), np.median(norms) * linear_error)
    return NeuronMaps(linear, constant, linear_error, constant_error, covariance)


def _solve(matrix: Floats, right: Floats, weights: Floats) -> tuple[Floats, Floats]:  # (m, n), (m, r), (m,)
    """Weighted least squares and the covariance of its solution where every row errs by one over its weight."""
    scale = np.max(weights)
    basis, triangle = np.linalg.qr(matrix * (weights / scale)[:, None])
    solution = np.linalg.solve(triangle, basis.T @ (right * (weights / scale)[:, None]))
    inverse = np.linalg.inv(triangle) / scale
    return solution, inverse @ inverse.T


def pieces_of(jumps: NeuronMaps, towards: Floats) -> Pieces:  # towards: (k, width) which side of each kink is on
    """Neurons from jumps: a jump is the weight of a neuron times its normal and offset."""
    linear, constant = jumps.linear[:-1], jumps.constant[:-1]  # (k, outputs, width), (k, outputs)
    count, outputs, width = linear.shape
    affine = np.column_stack([jumps.linear[-1], jumps.constant[-1]])
    if outputs == 1:
        side = np.where(np.einsum("kd,kd->k", linear[:, 0], towards) < 0, -1.0, 1.0)
        weight = side * np.linalg.norm(linear[:, 0], axis=1)
        return Pieces(linear[:, 0] / weight[:, None], constant[:, 0] / weight, weight[:, None], affine)
    whole = np.concatenate([linear, constant[:, :, None]], axis=2)
    weight, normal, offset = np.empty((count, outputs)), np.empty((count, width)), np.empty(count)
    for number, matrix in enumerate(whole):  # of rank one
        right = np.linalg.svd(matrix[:, :-1], full_matrices=False)[2][0]
        normal[number] = -right if right @ towards[number] < 0 else right
        weight[number] = matrix[:, :-1] @ normal[number]
        offset[number] = weight[number] @ matrix[:, -1] / (weight[number] @ weight[number])
    return Pieces(normal, offset, weight, affine)


def typical_distance(pieces: Pieces, radii: Floats, known_to: float) -> float:  # (k,) of weight times offset
    """How far kinks typically are from the origin; where that is error, how far an entry of usual tokens is."""
    offsets = np.abs(pieces.offset)
    known = np.linalg.norm(pieces.weight, axis=1) * offsets > KNOWN_OFFSET * radii
    return float(np.median(offsets[known])) if np.any(known) else known_to / pieces.normal.shape[1] ** 0.5


def ask_wide_cells(
    queries: TokenQueries,
    pieces: Pieces,
    covariance: Floats,
    scale: float,
    count: int,
    rng: np.random.Generator,
    stage: str,
    more: Floats | None = None,  # (n, width) tokens to choose from besides random ones
) -> Steps[CellEquations]:
    """The affine maps of `count` wide cells, chosen for what they add to what is known: d + 1 queries each."""
    width, limit = queries.width, min(queries.signature.norm_limit, np.finfo(float).max ** 0.25)
    candidates = int(np.clip(CANDIDATES * count, FEWEST, MOST))
    x, margin = wide_tokens(pieces.normal, pieces.offset, scale, limit, candidates, rng)
    if more is not None and len(more):
        x = np.concatenate([x, more])
        margin = np.concatenate([margin, np.min(np.abs(pieces.heights(more)), axis=1)])
    errors = queries.rounding * pieces.size(np.linalg.norm(x, axis=1)) + queries.noise
    longest = np.minimum(scale * width**0.5, 0.9 * (limit - np.linalg.norm(x, axis=1)))
    expected = np.minimum(0.5 * margin * width**0.5, longest)
    active = np.column_stack([pieces.heights(x) > 0, np.ones(len(x))]).astype(np.float64)
    usable = expected > 0
    chosen = telling_rows(covariance, active[usable], 2 * errors[usable] / expected[usable], count)
    chosen = np.flatnonzero(usable)[chosen]
    if not chosen.size:
        raise NotPiecewiseLinear("no token lies surely on one side of every kink")
    x, errors, longest, active = x[chosen], errors[chosen], longest[chosen], active[chosen]
    basis, _ = np.linalg.qr(rng.standard_normal((width, width)))
    basis = basis.T
    steps = clear_steps(pieces.normal, pieces.heights(x), basis, longest)
    # The centre itself is a step of nothing.
    every = np.column_stack([np.zeros(chosen.size), steps])
    axes = np.tile(np.concatenate([[0], np.arange(width)]), (chosen.size, 1))
    centre_of = np.repeat(np.arange(chosen.size), width + 1)
    answers = yield from queries.ask_around(stage, x, centre_of, basis, axes.ravel(), every.ravel())
    answers = answers.reshape(chosen.size, width + 1, -1)
    value = answers[:, 0, :]
    rise = (answers[:, 1:, :] - value[:, None, :]) / steps[:, :, None]
    gradient = np.swapaxes(rise, 1, 2) @ basis
    gradient_error = 2 * errors * np.sqrt(np.mean(1 / steps**2, axis=1))
    return CellEquations(active, x, value, gradient, errors, gradient_error)
