"""One head's score matrix by the queries of a single head, all other heads being saturated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.columns import Draft
from keyhole.methods.forms.reader import Forms
from keyhole.methods.forms.score_matrix import ask_score
from keyhole.methods.multi_head.scalar.gated_reader import GatedReader
from keyhole.methods.multi_head.scalar.gates import HeadGate, choose_gate, solve_crossing
from keyhole.methods.multi_head.scalar.normals_and_values import ScalarValues, saturated_heads
from keyhole.methods.multi_head.scalar.queries import Scope
from keyhole.queries import Sketch, TokenRows

# At the points of a gate other heads give one of the two tokens less than one rounding, by SPARE in the exponent, plus
# ROW_LOGIT times what their logits may be larger than those of the head that is read.
SPARE, ROW_LOGIT = 8.0, 10.0
# Rows that have less than this part of a head's value tell too little of its weights.
FAINT = 1e-3


@dataclass(frozen=True)
class HeadScore:
    """The score matrix of one head, with its score bias as a last column where there are such."""

    score: Floats  # (width, size)
    radius: Floats  # (width, size)
    rank: int


@dataclass(frozen=True)
class Columns:
    """A head on its hyperplane, and its forms with the second row."""

    points: Floats  # (size − 1, size)
    forms: Floats  # (width, size − 1) [W c]·point
    radius: Floats  # of the same shape
    rank: int
    second: Floats  # (size,) u₁ᵀ·[W c], less accurate along the first normal


@final
class HeadReader:
    """Reads heads one by one, in two rounds: on their hyperplanes, then off them at points that those determine."""

    def __init__(
        self,
        scope: Scope,
        normals: Floats,
        normal_errors: Floats,
        values: ScalarValues,
        rng: np.random.Generator,
        so_far: Callable[[], Sketch | None],
    ) -> None:
        self.scope, self.normals, self.normal_errors, self.values, self.rng = scope, normals, normal_errors, values, rng
        self.so_far = so_far
        space, width = scope.signature.space, scope.signature.width
        self.rows = space.asarray(values.rows)  # orthonormal, across the common row
        self.lengths = np.linalg.norm(normals[:, :width], axis=1)
        self.radius = 1.0
        if scope.radius is not None:  # as long as it takes for the score to be as large as the biases
            self.radius = min(1.0, width**0.5 * float(np.max(np.abs(normals[:, width]) / self.lengths)))

    def _least_logits(self, number: int, room: float) -> Floats:
        enough = SPARE - float(np.log(self.scope.signature.space.eps))
        return np.asarray(enough + room * ROW_LOGIT * self.lengths / self.lengths[number])

    def _reader(self, gate: HeadGate, number: int, row: Floats, row_radius: Floats) -> GatedReader:
        expected = float(self.lengths[number]) * self.radius / self.scope.signature.width**0.5
        saturated = saturated_heads(gate, number, self.values, row, row_radius)
        return GatedReader(self.scope, gate, saturated, number, row, expected, self.so_far)

    def ask_on_hyperplane(self, number: int, room: float) -> Steps[tuple[Columns, GatedReader]]:
        """The columns of the hyperplane and their rank, and one form off it."""
        scope, space, size = self.scope, self.scope.signature.space, self.scope.size
        gate = choose_gate(
            self.rng, self.normals, number, self._least_logits(number, room), scope.signature.width, self.radius
        )
        reader = self._reader(gate, number, scope.row, self.values.row_radius)
        yield from reader.ask_base(self.normals[number], self.normal_errors[number], off=1)
        score = yield from ask_score(reader, self.rng, Draft(), bases=(self.rows, self.rows.T, space.eye(size - 1)))
        assert score is not None  # forms that cannot disagree with themselves
        one = space.indices([0])
        off = yield from reader.ask_forms("columns", TokenRows(self.rows), reader.points, one, one + size - 1)
        common = (reader.base / gate.scales)[: size - 1]
        forms = floats(score.matrix) + scope.row[:, None] * common
        radius = np.hypot(floats(score.radius), np.abs(scope.row)[:, None] * (reader.base_radius / gate.scales)[:-1])
        forms_of_second = np.append(self.values.rows[0] @ forms, floats(off.values))
        second = np.linalg.solve(gate.points, forms_of_second)
        return Columns(gate.points[:-1], forms, radius, score.rank, second), reader

    def ask_off_hyperplane(
        self, number: int, columns: list[Columns], near: GatedReader, room: float
    ) -> Steps[tuple[HeadScore, GatedReader]]:
        """The missing column, and with it the head; `near` is the reader of the others."""
        scope, space, width = self.scope, self.scope.signature.space, self.scope.signature.width
        own = columns[number]
        both = np.stack([self.normals, np.stack([each.second for each in columns])])
        pair = np.stack([scope.row, self.values.rows[0]])
        value_norm = np.sqrt(np.sum(self.values.vectors**2, axis=(0, 1)))  # (outputs,)
        shares = pair @ self.values.vectors[number] / np.where(value_norm > 0, value_norm, 1.0)
        least = self._least_logits(number, room)
        gate, mix = solve_crossing(self.rng, both, number, least, shares, width, self.radius)
        row, scale = mix @ pair, float(gate.scales[0])
        every = space.indices(range(width - 1))
        # A head whose value is a multiple of what its score has on the left has none where its logit is zero.
        if np.linalg.norm(mix @ shares) <= FAINT * np.linalg.norm(shares):
            return (yield from self._ask_near(own, near))
        reader = self._reader(gate, number, row, np.sqrt(np.tensordot(row**2, self.values.radius**2, (0, 1))))
        try:
            yield from reader.ask_base(mix @ both[:, number], 0.0, off=1)
        except Unrecoverable:  # a neighbour is so near that the second row is not known well enough
            return (yield from self._ask_near(own, near))
        reader.estimate.update(space.asarray(np.linalg.norm(own.forms, axis=0) / width**0.5), 1.0)
        last = yield from reader.ask_forms("columns", TokenRows(self.rows), reader.points, every, 0 * every)
        # The form of the combination of rows, less the second row's part, is the common row's.
        second, second_radius = float(last.values[0]), float(last.radius[0])
        common = (reader.base[0] / scale - mix[1] * second) / mix[0]
        radius = (reader.base_radius[0] / scale + abs(mix[1]) * second_radius) / abs(mix[0])
        return self._assemble(own, gate.points[0], common, radius, last), reader

    def _ask_near(self, own: Columns, near: GatedReader) -> Steps[tuple[HeadScore, GatedReader]]:
        """The missing column at the point of the gate that is off the hyperplane, where the logit is not zero."""
        every = self.scope.signature.space.indices(range(self.scope.signature.width - 1))
        off = 0 * every + self.scope.size - 1
        last = yield from near.ask_forms("columns", TokenRows(self.rows), near.points, every, off)
        common, radius = (array[-1] / near.gate.scales[-1] for array in (near.base, near.base_radius))
        return self._assemble(own, near.gate.points[-1], common, radius, last), near

    def _assemble(self, own: Columns, point: Floats, common: float, common_radius: float, last: Forms) -> HeadScore:
        """The head from its hyperplane and one more column, given by its forms with all rows."""
        basis = np.vstack([self.scope.row, self.values.rows])
        form = basis.T @ np.append(common, floats(last.values))
        radius = np.sqrt((basis.T) ** 2 @ np.append(common_radius, floats(last.radius)) ** 2)
        back = np.linalg.inv(np.vstack([own.points, point]).T)
        score = np.column_stack([own.forms, form]) @ back
        radius = np.sqrt(np.column_stack([own.radius, radius]) ** 2 @ back**2)
        return HeadScore(score, radius, min(own.rank + 1, self.scope.signature.width))
