"""The composite of a net's first layer with the value of attention, beside a residual.

Single tokens tell a net F(x_N + Vᵀ·mixture) as one of weights B = A·(I + Vᵀ). In a linear cell of it, around a last
token g,

    f([g + u; g]) − f([g]) = s·D(g)·u   with s = σ(uᵀ·W·g) known and   D(g) = Σ_active w_i·M_i + Λ,

where M = A·Vᵀ is what neurons see of attention and Λ what a skip does. Which neurons are active is known, so that cells
of different patterns give M and Λ by least squares, and A = B − M.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keyhole.arrays import Array, ArrayTable, Booleans, Floats, floats
from keyhole.families import SingleHead
from keyhole.families.one_layer import UNKNOWN_ARITHMETIC, OneLayer
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
    solve_value,
    solve_weighted,
)
from keyhole.methods.one_layer.rays import Growth
from keyhole.queries import Measurements, Plan, Signature, Term, TokenRows
from keyhole.recovery import Outcome

STAGE = "attention cells"

# Cells asked over those that have as many equations as unknowns: the more, the better conditioned.
SPARE = 1.1
# Cells to choose from, for each that is needed, and at least.
CANDIDATES, LEAST_CANDIDATES = 16, 64
# Cells lie up to this many times as far out as the typical kink: further out they are wider.
FARTHEST = 2.0**8
# The first cells find out how far one may go in them; then all others.
PILOT = 4
# A cell that is left is asked again with shorter steps, at most so often.
MOST_SHRINKS = 12
# A check goes only half as far, so that a kink does not meet both.
CHECK_STEP = 0.5
# A check may miss by so many radii.
CHECK = 8.0
# Of a neuron whose part in all equations is another's, no more than half is told.
TOLD = 0.75

NOT_LINEAR = (
    "what attention adds does not change the answers linearly, however little it is: the box is not a net of one "
    "hidden layer behind one softmax head"
)
SAME_CELLS = (
    "a neuron is on in all cells that tokens reach, or in those in which another one is, so that what it sees of "
    "attention cannot be known"
)
CONTRADICTION = (
    "what attention adds in some linear cells of the net contradicts what it adds in others: the box is not a net of "
    "one hidden layer behind one softmax head"
)


@dataclass(frozen=True)
class _Slopes(ArrayTable):
    """D(g)·q for the directions q, in each cell."""

    values: Floats  # (n, directions, outputs)
    radii: Floats  # (n, directions, outputs)
    reach: Floats  # (n, directions) length of what was added to attention


class ResidualCells:
    """Slopes around last tokens in linear cells of a net, once attention is known."""

    def __init__(
        self,
        signature: Signature,
        rng: np.random.Generator,
        net: ReluNet,
        net_radius: ReluNet,
        typical: float,
        score: Score,
        bias: ScoreBias | None,
    ) -> None:
        self.signature, self.rng, self.space = signature, rng, signature.space
        self.original, self.original_radius = net, net_radius
        self.net, self.radius = PlainNet.of(net, typical), PlainNet.of(net_radius, typical)
        self.head = SingleHead(score.matrix, signature.space.eye(signature.width), bias.shown if bias else None)
        self.head_radius = replace(
            self.head, score=score.radius, value=0 * self.head.value, score_bias=bias.radius if bias else None
        )
        nothing = np.zeros(signature.width)
        self.score, self.score_radius = floats(score.matrix), floats(score.radius)
        self.bias, self.bias_radius = (floats(bias.vector), floats(bias.radius)) if bias else (nothing, nothing)
        self.growth = Growth.of(signature.space, net)
        self.rounding = UNKNOWN_ARITHMETIC * signature.space.rounding
        self.directions = directions_and_check(signature, rng)

    def run(self) -> Steps[tuple[OneLayer, OneLayer, dict[str, Any]]]:
        """The net and the value matrix, separated as far as they are identifiable, their radii, and details."""
        cells = self._choose()
        pilot, slopes = yield from self._ask_cells(cells.take(slice(0, PILOT)))
        shrunk = float(np.min(pilot.width / cells.width[: len(pilot.width)]))
        rest = cells.take(slice(PILOT, None))
        rest, more = yield from self._ask_cells(replace(rest, width=rest.width * shrunk))
        cells, slopes = LinearCells.concat(pilot, rest), _Slopes.concat(slopes, more)
        for _ in range(MOST_SHRINKS):
            inner, inner_radius, skip, skip_radius, misfit = self._solve(cells, slopes)
            # A cell that was left by less than the check could see is left all the same.
            moves = slopes.reach[:, :, None] * np.abs(self.directions @ inner.T)[None, :, :]  # (n, directions, k)
            left = np.any(moves > cells.room[:, None, :], axis=(1, 2))
            if not np.any(left):
                break
            again = cells.take(left)
            again, more = yield from self._ask_cells(replace(again, width=again.width * SHRINK))
            cells, slopes = LinearCells.concat(cells.take(~left), again), _Slopes.concat(slopes.take(~left), more)
        if not misfit <= 1.0:
            raise Unrecoverable(Outcome.WRONG_FAMILY, CONTRADICTION)
        return self._assemble(inner, inner_radius, skip, skip_radius, misfit)

    def _choose(self) -> LinearCells:
        """Cells whose patterns of active neurons separate all neurons, wide ones first."""
        outputs, neurons = self.net.outer.shape
        needed = -(-(neurons + outputs) // outputs)
        count = CANDIDATES * needed + LEAST_CANDIDATES
        pool = random_cells(self.net, self.rng, count, FARTHEST, self.signature.norm_limit)
        away = np.linalg.norm(pool.points, axis=1) + self.growth.level / max(self.growth.gain, self.space.tiny)
        weight = pool.width / np.where(away > 0, away, 1.0)
        blocks = self._equations(pool) * weight[:, None, None]
        chosen = choose_blocks(
            blocks / max(float(np.max(np.abs(blocks), initial=0.0)), self.space.tiny),
            int(np.ceil(SPARE * (neurons + outputs) / outputs)),
        )
        return pool.take(chosen)

    def _equations(self, cells: LinearCells) -> Floats:  # (n, outputs, k + outputs)
        """D(g) of a cell as a combination of its active neurons' composites with the value and of the skip's."""
        seen = cells.active[:, None, :] * self.net.outer[None, :, :]
        outputs = self.net.outer.shape[0]
        return np.concatenate([seen, np.broadcast_to(np.eye(outputs), (len(seen), outputs, outputs))], axis=2)

    def _ask_cells(self, cells: LinearCells) -> Steps[tuple[LinearCells, _Slopes]]:
        """Slopes in all cells, with shorter steps where a check shows that a cell was left."""
        if not len(cells.points):
            nothing = np.zeros((0, len(self.directions), len(self.net.outer)))
            return cells, _Slopes(nothing, nothing, nothing[:, :, 0])
        answers = yield from ask_points(STAGE, self.signature, cells)
        return (yield from ask_within_cells(cells, answers, self._ask, MOST_SHRINKS, NOT_LINEAR))

    def _ask(self, cells: LinearCells, level: Floats) -> Steps[tuple[_Slopes, Booleans]]:
        """f([g + u; g]) for all directions, the sign of u such that attention prefers it."""
        space, (count, directions) = self.space, (len(cells.points), len(self.directions))
        keys = cells.points @ self.score.T + self.bias  # (n, width): W·g + c
        attraction = keys @ self.directions.T  # (n, directions)
        length = cells.width[:, None] * np.append(np.ones(directions - 1), CHECK_STEP)  # (n, directions)
        step = np.where(attraction < 0, -1.0, 1.0) * length
        cell, direction = (space.indices(each) for each in np.divmod(np.arange(count * directions), directions))
        points, rows = TokenRows(space.asarray(cells.points)), TokenRows(space.asarray(self.directions))
        positions = [[Term(points, cell), Term(rows, direction, space.asarray(step.reshape(-1)))], [Term(points, cell)]]
        answers: Measurements = yield Plan(STAGE, count * directions, positions)
        values = floats(answers.values).reshape(count, directions, -1) - level[:, None, :]
        logits = step * attraction
        weight = 1 / (1 + np.exp(-logits))
        key_variance = cells.points**2 @ (self.score_radius**2).T + self.bias_radius**2  # (n, width)
        sure = np.sqrt(key_variance @ (self.directions**2).T)  # (n, directions)
        lengths = np.linalg.norm(keys, axis=1)[:, None] * space.rounding
        logit_radius = length * (sure + lengths)
        size = self.growth.gain * (np.linalg.norm(cells.points, axis=1) + cells.width) + self.growth.level
        slopes = values / (weight * step)[:, :, None]
        radii = (2 * (self.rounding * size + answers.radius))[:, None] / (weight * length)
        measured = _Slopes(
            slopes,
            radii[:, :, None] + np.abs(slopes) * ((1 - weight) * logit_radius)[:, :, None],
            np.abs(weight * step),
        )
        return measured, self._agrees(measured)

    def _agrees(self, slopes: _Slopes) -> Booleans:  # (n,)
        """Whether the slope in the last direction is the combination of those in the others."""
        share = self.directions[:-1] @ self.directions[-1]
        predicted = np.einsum("j,njo->no", share, slopes.values[:, :-1])
        radius = np.sqrt(np.einsum("j,njo->no", share**2, slopes.radii[:, :-1] ** 2)) + slopes.radii[:, -1]
        return np.asarray(np.all(np.abs(slopes.values[:, -1] - predicted) <= CHECK * radius, axis=1))

    def _solve(self, cells: LinearCells, slopes: _Slopes) -> tuple[Floats, Floats, Floats | None, Floats, float]:
        """M and Λ with their radii; Λ is None where the net has no skip and none shows."""
        inner, inner_radius, skip, skip_radius, misfit = self._solve_with(cells, slopes, self._equations(cells))
        if self.net.skip is None and np.all(np.abs(skip) <= skip_radius):
            fewer = self._equations(cells)[:, :, : len(self.net.inner)]
            inner, inner_radius, _, _, misfit = self._solve_with(cells, slopes, fewer)
            return inner, inner_radius, None, skip_radius, misfit
        return inner, inner_radius, skip, skip_radius, misfit

    def _solve_with(
        self, cells: LinearCells, slopes: _Slopes, equations: Floats
    ) -> tuple[Floats, Floats, Floats, Floats, float]:
        count, outputs, unknowns = equations.shape
        neurons, width = self.net.inner.shape
        turn = self.directions[:width]

        def flat(array: Floats) -> Floats:  # (n, directions, outputs) -> (n·outputs, width)
            return array[:, :width].transpose(0, 2, 1).reshape(count * outputs, width)

        radii = flat(slopes.radii)
        system = equations.reshape(count * outputs, unknowns)
        solved = solve_weighted(system, flat(slopes.values), radii)
        told = np.einsum("ue,eu->u", solved.inverse, system[:, :unknowns])
        if np.any(told[:neurons] < TOLD):
            raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, SAME_CELLS)
        values = solved.values @ turn
        # The weights behind the neurons are only known within their own radius.
        seen = (cells.active[:, None, :] * self.radius.outer[None, :, :] ** 2).reshape(count * outputs, neurons)
        unsure = seen @ values[:neurons] ** 2
        # Beyond that, equations that are too many by some must agree.
        allowed = np.sqrt(radii**2 + seen @ solved.values[:neurons] ** 2 + system**2 @ (solved.inverse**2 @ radii**2))
        misfit = float(np.max(solved.residual / np.maximum(allowed, self.space.tiny), initial=0.0))
        spread = np.sqrt(solved.inverse**2 @ (radii**2 @ turn**2 + unsure))
        spread += self.space.rounding * np.linalg.norm(values, axis=1, keepdims=True)
        return values[:neurons], spread[:neurons], values[neurons:], spread[neurons:], misfit

    def _assemble(
        self, seen: Floats, seen_radius: Floats, passed: Floats | None, passed_radius: Floats, misfit: float
    ) -> tuple[OneLayer, OneLayer, dict[str, Any]]:
        """A = B − M and V from A·Vᵀ = M, with a skip S = (S + Λ) − Λ beside it."""
        net, outputs, width = self.net, self.net.outer.shape[0], self.signature.width
        inner, inner_radius = net.inner - seen, np.hypot(self.radius.inner, seen_radius)
        skip = net.skip if net.skip is not None else np.zeros((outputs, width))
        whole_radius = self.radius.skip if self.radius.skip is not None else np.zeros((outputs, width))
        stack = [(inner, inner_radius, seen, seen_radius)]
        own: Floats | None = None
        own_radius = np.hypot(whole_radius, passed_radius)
        if passed is not None:
            own = skip - passed
            stack.append((own, own_radius, passed, passed_radius))
        value, value_radius, missed, explained, unique = solve_value(
            *(np.vstack(parts) for parts in zip(*stack, strict=True))
        )
        if np.any(missed > explained):  # not one value for all neurons
            raise Unrecoverable(Outcome.WRONG_FAMILY, CONTRADICTION)
        inner_radius, below = inner_radius + missed[: len(inner)], missed[len(inner) :]
        own_radius = own_radius + below if len(below) else own_radius
        asarray, shape = self.space.asarray, self.original.weights_out.shape[:-1]

        def outer(array: Floats | None) -> Array | None:
            return None if array is None else asarray(array.reshape(*shape, width))

        params = replace(self.original, weights_in=asarray(inner), skip=outer(own))
        skip_radius = None if own is None else outer(own_radius)
        radius = replace(self.original_radius, weights_in=asarray(inner_radius), skip=skip_radius)
        layer = OneLayer(replace(self.head, value=asarray(value)), params, residual=True)
        layer_radius = OneLayer(replace(self.head_radius, value=asarray(value_radius)), radius, residual=True)
        return layer, layer_radius, {"value": "identified" if unique else "of least norm", "misfit": misfit}
