"""The score matrix beside a score bias, from linear cells of the net.

In a linear cell around a last token g the answers to [g ± u; g] differ from that to [g] by σ(z)·D·u and −σ(−z)·D·u,
where z = uᵀ(W·g + c). Whatever D is, the logarithm of their ratio is z. This takes two queries a form where no bias
takes one, and short tokens: the long ones that read past the net saturate as soon as there is a bias.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import ArrayTable, Booleans, Floats, Integers, floats
from keyhole.families.one_layer import UNKNOWN_ARITHMETIC
from keyhole.families.relu_net import ReluNet
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.columns import Score
from keyhole.methods.forms.reader import ScoreBias
from keyhole.methods.one_layer.cells import (
    SHRINK,
    LinearCells,
    PlainNet,
    ask_points,
    ask_within_cells,
    choose_blocks,
    directions_and_check,
    random_cells,
    solve_weighted,
)
from keyhole.methods.one_layer.rays import Growth
from keyhole.numerics.svd import singular_values
from keyhole.queries import Plan, Signature, Term, TokenRows
from keyhole.recovery import Outcome

STAGE = "score bias"
# Last tokens beyond the d + 1 that W and c need, as a part of them; and how many there are to choose from, for each.
SPARE, CANDIDATES = 0.1, 64
# They lie up to this many times as far out as the typical kink: further out attention saturates.
FARTHEST = 4.0
# Logits beyond this are read again from shorter steps; steps are chosen such that few are half of it.
LARGEST = 6.0
# A cell that is left, or saturated, is asked again with shorter steps, at most so often.
MOST_SHRINKS = 16
# A check goes only half as far, so that a kink does not meet both, and may miss by so many radii.
CHECK_STEP, CHECK = 0.5, 8.0
# Where the net rises little along a direction, its logit is read again together with the one it rises most along.
POOR = 16.0
# A bias is looked for in so many directions, and is one if so many ever shorter steps show it: a kink would be past.
SHOWN = 3
# Slopes that agree with those of the learned net within this part of them belong to a layer without residual.
SAME_SLOPE = 1e-6

SILENT = "what attention adds does not change the answers, so that the score matrix cannot be known"
NO_LOGITS = (
    "the answers around a token are not those of a linear cell with a softmax in front of it, however little the token "
    "is moved: the box is not a net of one hidden layer behind one softmax head"
)


@dataclass(frozen=True)
class _Logits(ArrayTable):
    """z = uᵀ(W·g + c) and D·u over the length of u, for cells and directions."""

    keys: Floats  # (n, directions) qᵀ(W·g + c)
    radii: Floats  # (n, directions)
    slopes: Floats  # (n, directions, outputs) D·q
    slope_radii: Floats  # (n, directions)


def ask_for_score_bias(signature: Signature, rng: np.random.Generator, net: ReluNet, typical: float) -> Steps[bool]:
    """Around a last token of zero both tokens weigh the same, whatever the other one is, unless there is a bias."""
    cells = BiasedCells(signature, rng, net, typical)
    origin = LinearCells.around(
        cells.net, np.zeros((1, signature.width)), min(cells.net.typical, signature.norm_limit / 2)
    )
    if not origin.width[0] > cells.growth.shortest:
        return False
    level = yield from ask_points(STAGE, signature, origin)
    direction = np.arange(min(signature.width, SHOWN))
    for _ in range(SHOWN):
        logits = yield from cells.ask(origin, level, 0 * direction, direction)
        rises = np.linalg.norm(logits.slopes[0], axis=1) > CHECK * logits.slope_radii[0]
        # A logit that cannot be read where the net rises is saturated.
        off = ~(np.abs(logits.keys[0]) <= CHECK * logits.radii[0]) | np.isinf(logits.radii[0])
        if not np.any(rises & off):
            return False
        origin = replace(origin, width=origin.width * SHRINK)
    return True


class BiasedCells:
    """Logits around last tokens in linear cells of a net."""

    def __init__(self, signature: Signature, rng: np.random.Generator, net: ReluNet, typical: float) -> None:
        self.signature, self.rng, self.space = signature, rng, signature.space
        self.net, self.growth = PlainNet.of(net, typical), Growth.of(signature.space, net)
        self.rounding = UNKNOWN_ARITHMETIC * signature.space.rounding
        self.directions = directions_and_check(signature, rng)
        self.directions[-1] *= CHECK_STEP

    def run(self) -> Steps[tuple[Score, ScoreBias, bool]]:
        """The score matrix, the score bias, and whether something passes attention by."""
        cells = self._choose()
        first, logits = yield from self._ask_cells(cells.take(slice(0, 1)))
        # How far to go elsewhere, such that logits stay moderate.
        size = float(np.sqrt(np.mean(logits.keys[:, :-1] ** 2)))
        away = np.linalg.norm(cells.points, axis=1)
        expected = size * np.maximum(1.0, away / max(float(away[0]), self.space.tiny))
        rest = replace(cells, width=np.minimum(cells.width, LARGEST / 4 / np.maximum(expected, self.space.tiny)))
        rest, more = yield from self._ask_cells(rest.take(slice(1, None)))
        cells, logits = LinearCells.concat(first, rest), _Logits.concat(logits, more)
        logits = yield from self._ask_again(cells, logits)
        return self._solve(cells, logits)

    def _choose(self) -> LinearCells:
        """Wide cells in which the net rises, whose points, with a one behind, are well conditioned."""
        width = self.signature.width
        count = width + 1 + int(np.ceil(SPARE * (width + 1)))
        pool = random_cells(self.net, self.rng, CANDIDATES * count, FARTHEST, self.signature.norm_limit)
        rise = np.linalg.norm(self.net.gradients(pool.active), axis=(1, 2))
        weight = rise * pool.width / (np.linalg.norm(pool.points, axis=1) + self.net.typical)
        rows = np.hstack([pool.points / self.net.typical, np.ones((len(weight), 1))]) * weight[:, None]
        chosen = choose_blocks(rows[:, None, :] / max(float(np.max(np.abs(rows))), self.space.tiny), count)
        if chosen.size <= width:
            raise Unrecoverable(Outcome.WRONG_FAMILY, NO_LOGITS)
        return pool.take(chosen)

    def _ask_cells(self, cells: LinearCells) -> Steps[tuple[LinearCells, _Logits]]:
        """Logits in all cells, with shorter steps where one was left or saturated."""
        answers = yield from ask_points(STAGE, self.signature, cells)
        return (yield from ask_within_cells(cells, answers, self._ask_all, MOST_SHRINKS, NO_LOGITS))

    def _ask_all(self, cells: LinearCells, answers: Floats) -> Steps[tuple[_Logits, Booleans]]:
        """Logits along all directions, and where they agree."""
        cell, direction = np.divmod(np.arange(len(cells.points) * len(self.directions)), len(self.directions))
        logits = yield from self.ask(cells, answers, cell, direction)
        if not np.any(np.linalg.norm(logits.slopes, axis=2) > CHECK * logits.slope_radii):
            raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, SILENT)  # shorter steps would show even less
        return logits, self._agrees(cells, logits)

    def ask(
        self, cells: LinearCells, level: Floats, cell: Integers, direction: Integers, beside: Integers | None = None
    ) -> Steps[_Logits]:
        """f([g ± u; g]) for cells and directions, as many for each cell; or, beside others, along the sum of two."""
        space, count = self.space, len(cells.points)
        points, rows = TokenRows(space.asarray(cells.points)), TokenRows(space.asarray(self.directions))
        length = cells.width[cell]
        plans = []
        for sign in (1.0, -1.0):
            along = [Term(rows, space.indices(direction), space.asarray(sign * length))]
            if beside is not None:
                along.append(Term(rows, space.indices(beside), space.asarray(sign * length)))
            last = Term(points, space.indices(cell))
            plans.append(Plan(STAGE, len(cell), [[last, *along], [last]]))
        up, down = yield plans
        values = [floats(each.values).reshape(len(cell), -1) - level[cell] for each in (up, down)]
        size = self.growth.gain * (np.linalg.norm(cells.points, axis=1) + 2 * cells.width) + self.growth.level
        radius = (2 * (self.rounding * size + up.radius))[cell]
        whole = values[0] - values[1]  # D·u
        norm = np.linalg.norm(whole, axis=1)
        towards = whole / np.where(norm > 0, norm, 1.0)[:, None]
        above, below = np.sum(values[0] * towards, axis=1), -np.sum(values[1] * towards, axis=1)
        read = (above > 2 * radius) & (below > 2 * radius)
        above, below = np.where(read, above, 1.0), np.where(read, below, 1.0)
        logits = np.log(above / below)
        radii = np.where(read, radius / above + radius / below + self.rounding * np.abs(logits), np.inf)
        shape = (count, -1) if beside is None else (-1, 1)
        return _Logits(
            (logits / length).reshape(shape),
            (radii / length).reshape(shape),
            (whole / length[:, None]).reshape(*shape, whole.shape[1]),
            (2 * radius / length).reshape(shape),
        )

    def _agrees(self, cells: LinearCells, logits: _Logits) -> Booleans:  # (n,)
        """Whether logits are moderate, and that of the last direction is the combination of the others."""
        share = self.directions[:-1] @ self.directions[-1]
        moderate = np.all(np.abs(logits.keys) * cells.width[:, None] <= LARGEST, axis=1)
        key_radius = np.sqrt(logits.radii[:, :-1] ** 2 @ share**2) + logits.radii[:, -1]
        keys = np.abs(logits.keys[:, :-1] @ share - logits.keys[:, -1]) <= CHECK * key_radius
        slope_radius = np.sqrt(logits.slope_radii[:, :-1] ** 2 @ share**2) + logits.slope_radii[:, -1]
        missed = np.abs(np.einsum("j,njo->no", share, logits.slopes[:, :-1]) - logits.slopes[:, -1])
        read = np.isfinite(np.median(logits.radii, axis=1))
        return np.asarray(read & moderate & keys & np.all(missed <= CHECK * slope_radius[:, None], axis=1))

    def _ask_again(self, cells: LinearCells, logits: _Logits) -> Steps[_Logits]:
        """Directions along which the net hardly rises read again together with the one it rises most along."""
        radii = logits.radii[:, :-1]
        cell, direction = np.nonzero(~(radii <= POOR * np.median(radii, axis=1, keepdims=True)))
        if not cell.size:
            return logits
        best = np.argmin(radii, axis=1)[cell]
        level = yield from ask_points(STAGE, self.signature, cells.take(np.unique(cell)))
        levels = np.zeros((len(cells.points), level.shape[1]))
        levels[np.unique(cell)] = level
        # Half as far along both: the cell is convex, so that it is not left.
        again = yield from self.ask(replace(cells, width=0.5 * cells.width), levels, cell, direction, best)
        keys, spread = logits.keys.copy(), logits.radii.copy()
        new = again.radii[:, 0] + radii[cell, best]
        better = new < spread[cell, direction]
        keys[cell[better], direction[better]] = (again.keys[:, 0] - logits.keys[cell, best])[better]
        spread[cell[better], direction[better]] = new[better]
        return replace(logits, keys=keys, radii=spread)

    def _solve(self, cells: LinearCells, logits: _Logits) -> tuple[Score, ScoreBias, bool]:
        space, width, turn = self.space, self.signature.width, self.directions[:-1]
        system = np.hstack([cells.points, np.ones((len(cells.points), 1))])
        radii = logits.radii[:, :-1]
        solved = solve_weighted(system, logits.keys[:, :-1], radii)
        allowed = np.sqrt(radii**2 + system**2 @ (solved.inverse**2 @ radii**2))
        misfit = float(np.max(solved.residual / allowed, initial=0.0))
        if not misfit <= 1.0:
            raise Unrecoverable(Outcome.WRONG_FAMILY, NO_LOGITS)
        both = solved.values @ turn  # (width + 1, width): Wᵀ above cᵀ
        spread = np.sqrt(solved.inverse**2 @ radii**2 @ turn**2)
        spread += space.rounding * (np.linalg.norm(both, axis=1, keepdims=True) + np.linalg.norm(both, axis=0))
        matrix, radius = both[:width].T, spread[:width].T
        rank = int(np.sum(singular_values(matrix) > np.linalg.norm(radius)))
        expected = np.einsum("now,jw->njo", self.net.gradients(cells.active), turn)
        slope_radius = SAME_SLOPE * np.max(np.abs(expected)) + CHECK * logits.slope_radii[:, :-1, None]
        return (
            Score(space.asarray(matrix), space.asarray(radius), rank),
            ScoreBias(space.asarray(both[width]), space.asarray(spread[width])),
            bool(np.any(np.abs(logits.slopes[:, :-1] - expected) > slope_radius)),
        )
