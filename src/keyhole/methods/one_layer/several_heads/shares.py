"""What neurons see of each head, M_h = A·V_hᵀ, from values in cells of different patterns, once scores are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import qr
from scipy.special import expit

from keyhole.arrays import Booleans, Floats, Integers
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.gated_sum.model import GatedQueries, GatedSum
from keyhole.methods.one_layer.cells import LinearCells, PlainNet, choose_blocks, solve_weighted
from keyhole.methods.one_layer.several_heads.far_cells import FarNet
from keyhole.methods.one_layer.several_heads.heads_at_point import EXPLAINED, PointHeads
from keyhole.methods.one_layer.several_heads.queries import CellQueries, PairDesign
from keyhole.methods.one_layer.several_heads.scale import Scale
from keyhole.methods.one_layer.several_heads.scores import DRAWS, Scores, draw_errors
from keyhole.numerics.svd import condition, pseudo_inverse
from keyhole.recovery import Outcome

STAGE = "cells behind heads"
# Cells over those that have as many equations as unknowns, and besides; directions to choose each from.
SPARE_CELLS, MORE_CELLS, CANDIDATES = 1.15, 1, 16
# Queries in a cell over its unknowns, and besides; queries to choose each from.
SPARE, BESIDES, POOL = 1.02, 4, 3
# Logits of steps in other cells, where scores are known.
LOGIT = 2.5
# Patterns whose equations are worse conditioned than this do not tell neurons apart.
MOST_CONDITION = 1e8
# A cell that is left is asked again with kinks so many times as far away, so often.
FARTHER, MOST_FARTHER = 8.0, 4
# If none of more cells than this is explained, or none again, it is not that they were left.
FEW_CELLS = 3

ALIKE = (
    "neurons that bend along parallel kinks are on and off together in all wide cells: what each of them sees of the "
    "heads cannot be told"
)
CONTRADICTION = (
    "what heads add in some linear cells of the net contradicts what they add in others: the box is no net of one "
    "hidden layer behind softmax heads"
)


class CellsContradict(Unrecoverable):
    """Scores do not explain the answers in any other cell."""


@dataclass(frozen=True)
class Shares:
    """What neurons, and a skip behind them, see of each head."""

    matrices: Floats  # (heads, neurons + skipped outputs, width)
    draws: Floats  # (draws, heads, neurons + skipped outputs, width) errors that they may have


@dataclass(frozen=True)
class _CellValues:
    """Values of heads in one cell."""

    active: Floats  # (k,)
    values: Floats  # (heads, width, outputs)
    draws: Floats  # (draws, heads, width, outputs)


class ShareReader:
    """Asks in cells of different patterns."""

    def __init__(
        self, queries: CellQueries, far: FarNet, scale: Scale, scores: Scores, radius: PlainNet, residual: bool
    ) -> None:
        self.queries, self.far, self.scale, self.scores = queries, far, scale, scores
        self.net, self.radius, self.residual = far.net, radius, residual
        self.heads = len(scores.matrices)

    def run(self, first: PointHeads) -> Steps[Shares]:
        """Cells of which the patterns tell all neurons, their values, and what these amount to."""
        known = _CellValues(self.scale.cell.active[0], first.heads.values, self.scores.value_draws)
        found, room = [known], self.scale.room
        cells, sizes = self._choose(room)
        if not len(sizes):  # the first cell tells all neurons
            return self._solve(found)
        for number in range(MOST_FARTHER):
            more, good = yield from self._ask(cells, sizes)
            found += more
            if np.all(good):
                return self._solve(found)
            if not np.any(good) and (len(good) > FEW_CELLS or number > 0):
                raise CellsContradict(Outcome.WRONG_FAMILY, CONTRADICTION)
            room *= FARTHER
            directions = cells.points[~good] / np.linalg.norm(cells.points[~good], axis=1, keepdims=True)
            cells, sizes = self._place(directions, room)
        raise Unrecoverable(Outcome.WRONG_FAMILY, CONTRADICTION)

    def _choose(self, room: float) -> tuple[LinearCells, Floats]:
        """Wide cells whose patterns, with that of the first, determine all neurons, and the length of steps there."""
        outputs, neurons = self.net.outer.shape
        skipped = 0 if self.net.skip is None else outputs
        count = int(np.ceil(SPARE_CELLS * (neurons + skipped) / outputs)) + MORE_CELLS - 1
        drawn = self.queries.rng.standard_normal((CANDIDATES * count, self.queries.width))
        directions, widths = self.far.middles(np.concatenate([drawn, self.far.across(self.queries.rng)]))
        cells, sizes = self._place(directions, room)
        inside = cells.width > 0
        cells, sizes, widths = cells.take(inside), sizes[inside], widths[inside]
        blocks = np.sqrt(widths)[:, None, None] * self._equations(cells.active)
        blocks = np.concatenate([self._equations(self.scale.cell.active) * np.max(widths) * 4, blocks])
        chosen = choose_blocks(blocks, count + 1)
        if (
            not condition(self._equations_of(np.concatenate([self.scale.cell.active, cells.active])[chosen]))
            < MOST_CONDITION
        ):
            raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, ALIKE)
        chosen = chosen[chosen > 0] - 1
        return cells.take(chosen), sizes[chosen]

    def _place(self, directions: Floats, room: float) -> tuple[LinearCells, Floats]:
        """Cells so far out that steps of moderate logits stay inside, and the length of these."""
        keys = np.einsum("hij,nj->nhi", self.scores.matrices, directions)
        typical = np.median(np.linalg.norm(keys, axis=2), axis=1) / self.queries.width**0.5
        products = LOGIT / np.maximum(typical, np.finfo(float).tiny)
        cells = self.far.cells(directions, 2 * products, room)
        return cells, products / np.linalg.norm(cells.points, axis=1)

    def _equations(self, active: Floats) -> Floats:  # (n, k) -> (n, outputs, unknowns)
        """By how much the values of a head in cells move with what each neuron, and the skip, sees of it."""
        found = active[:, None, :] * self.net.outer
        if self.net.skip is None:
            return np.asarray(found)
        unit = np.broadcast_to(np.eye(len(self.net.outer)), (len(active), *[len(self.net.outer)] * 2))
        return np.concatenate([found, unit], axis=2)

    def _equations_of(self, active: Floats) -> Floats:  # (n, k) -> (n · outputs, unknowns)
        each = self._equations(active)
        return np.asarray(each.reshape(-1, each.shape[2]))

    # --- one cell -------------------------------------------------------------------------------------------------

    def _weights(self, rows: Floats, offsets: Floats, point: Floats) -> Floats:  # -> (n, heads)
        return np.asarray(expit(offsets[:, None] + rows @ self.scores.gates(point).T))

    def _system(self, rows: Floats, weights: Floats) -> Floats:  # -> (n, unknowns)
        """Equations of the values in a cell: of all heads, or of all but the last where their sum is known."""
        free = weights if self.residual else weights[:, :-1] - weights[:, -1:]
        return np.asarray((free[:, :, None] * rows[:, None, :]).reshape(len(rows), -1))

    def _ask(self, cells: LinearCells, sizes: Floats) -> Steps[tuple[list[_CellValues], Booleans]]:
        """Values in each cell, where it is not left."""
        unknowns = (self.heads - (not self.residual)) * self.queries.width
        count = int(np.ceil(SPARE * unknowns)) + BESIDES
        designs = [self._design(point, size, count) for point, size in zip(cells.points, sizes, strict=True)]
        place = np.repeat(np.arange(len(designs), dtype=np.int64), count)
        rows, copies = (np.concatenate(parts) for parts in zip(*designs, strict=True))
        asked = yield from self.queries.ask(STAGE, cells.points, PairDesign(place, rows, copies))
        found, good = [], []
        for number, own in enumerate(asked):
            values, fits = self._fit(cells.take(slice(number, number + 1)), own)
            good.append(fits)
            found += [values] if fits else []
        return found, np.asarray(good)

    def _design(self, point: Floats, size: float, count: int) -> tuple[Floats, Integers]:
        """Steps (count, width) and copies (count, 2), chosen so that the values are told well."""
        queries = self.queries
        rows, copies = queries.random_rows(POOL * count, size), queries.usual_copies(POOL * count)
        weights = self._weights(rows, np.log(copies[:, 0] / copies[:, 1]), point)
        order = qr(self._system(rows, weights).T, mode="r", pivoting=True)[1][:count]
        return rows[order], copies[order]

    def _fit(self, cell: LinearCells, asked: GatedQueries) -> tuple[_CellValues, bool]:
        """Values in a cell, errors that they may have, and whether they explain the answers."""
        point, rows = cell.points[0], asked.rows
        weights = self._weights(rows, asked.offsets, point)
        system = self._system(rows, weights)
        inverse = pseudo_inverse(system)
        total = self.net.gradients(cell.active)[0].T  # (width, outputs)
        right = asked.answers if self.residual else asked.answers - weights[:, -1:] * (rows @ total)
        free = inverse @ right
        free = free + inverse @ (right - system @ free)
        rest, error = right - system @ free, float(self.queries.error(cell.points)[0])
        excess = max(len(rows) - system.shape[1], 1)
        values = self._complete(free.reshape(-1, *total.shape), total)
        errors = draw_errors(self.queries, point, asked, GatedSum(self.scores.gates(point), values))
        turned = np.einsum("nd,ehd->enh", rows, self.scores.gate_draws(point), optimize=True)
        shares = np.einsum("nd,hdp->nhp", rows, values)
        bent = np.einsum("nh,enh,nhp->enp", weights * (1 - weights), turned, shares, optimize=True)
        draws = (inverse @ (errors - bent)).reshape(DRAWS, -1, *total.shape)
        # Scores that are slightly off leave a residual too.
        allowed = EXPLAINED * (error + float(np.sqrt(np.mean(bent**2))))
        fits = np.sqrt(np.sum(rest**2) / (excess * rest.shape[1])) <= allowed
        return _CellValues(cell.active[0], values, self._complete(draws, 0 * total)), bool(fits)

    def _complete(self, free: Floats, total: Floats) -> Floats:  # (..., unknown heads, width, outputs)
        """The values of all heads."""
        if self.residual:
            return free
        return np.concatenate([free, (total - np.sum(free, axis=-3))[..., None, :, :]], axis=-3)

    # --- all cells ------------------------------------------------------------------------------------------------

    def _solve(self, found: Sequence[_CellValues]) -> Shares:
        """What every neuron sees of every head, by least squares over cells."""
        active = np.stack([each.active for each in found])
        system = self._equations_of(active)  # (cells · outputs, unknowns)

        def flat(values: Floats) -> Floats:  # (cells, heads, width, outputs) -> (cells · outputs, heads · width)
            turned = np.moveaxis(values, -1, 1)
            return np.asarray(turned.reshape(system.shape[0], -1))

        right = flat(np.stack([each.values for each in found]))
        drawn = np.stack([flat(np.stack([each.draws[n] for each in found])) for n in range(DRAWS)])
        radii = np.sqrt(np.mean(drawn**2, axis=(0, 2)))[:, None] + 0 * right
        solution = solve_weighted(system, right, radii)
        missed = np.sqrt(np.mean(solution.residual**2)) / np.sqrt(np.mean(radii**2))
        if missed > EXPLAINED**2:
            raise Unrecoverable(Outcome.WRONG_FAMILY, CONTRADICTION)
        # Weights out of neurons are known within their radius.
        outer = self.queries.rng.standard_normal((DRAWS, *self.net.outer.shape)) * self.radius.outer / 2
        neurons = self.net.outer.shape[1]
        off = np.einsum("cj,eoj,ji->ecoi", active, outer, solution.values[:neurons], optimize=True)
        draws = solution.inverse @ (drawn - off.reshape(drawn.shape))
        shape = system.shape[1], self.heads, self.queries.width
        return Shares(
            np.moveaxis(solution.values.reshape(shape), 1, 0), np.moveaxis(draws.reshape(DRAWS, *shape), 2, 1)
        )
