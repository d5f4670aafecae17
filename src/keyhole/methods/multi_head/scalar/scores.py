"""One head's score matrix by the queries of a single head, all other heads being saturated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from keyhole.arrays import Array, Floats, Integers, floats, numpy_space
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.columns import Draft
from keyhole.methods.forms.reader import FormReader, Forms, Probe
from keyhole.methods.forms.scale import AIM
from keyhole.methods.forms.score_matrix import ask_score
from keyhole.methods.multi_head.scalar.gates import HeadGate, gate, solve_crossing
from keyhole.methods.multi_head.scalar.normals_and_values import SaturatedHeads, ScalarValues, saturated_at
from keyhole.methods.multi_head.scalar.queries import Scope
from keyhole.numerics.logit import logit_with_radius
from keyhole.queries import Measurements, Plan, Position, Term, TokenRows
from keyhole.recovery import Outcome

# A saturated head gives the token it does not choose less than one rounding, by ENOUGH in the exponent, or when gates
# are chosen SPARE, plus REACH times what its logits may be larger than those of the head that is read.
ENOUGH, SPARE, REACH = 4.0, 8.0, 10.0
# Base logits are at most this, or brought to zero by moving the point.
LARGEST_BASE = 3.0
# How far a saturated one is moved, in logits: less than SPARE + REACH.
FAR = 16.0
MOST_ROUNDS = 24
# Forms may be this much smaller than expected before they are not read as accurately.
FARTHEST = 4.0
# A matrix is silent if as many random forms are.
SILENT_FORMS = 5


@dataclass(frozen=True)
class HeadScore:
    """The score matrix of one head, with its score bias as a last column where there are such."""

    score: Floats  # (width, size)
    radius: Floats  # (width, size)
    rank: int


@final
class GatedReader(FormReader):
    """Reads rowᵀ·[W c]·point for the points of a gate, as if they were the unit vectors of a head's last tokens."""

    def __init__(
        self, scope: Scope, gate: HeadGate, decided: SaturatedHeads, number: int, row: Floats, expected: float
    ) -> None:
        space = scope.signature.space
        super().__init__(scope.signature, space.asarray(decided.own))
        self.scope, self.gate, self.decided, self.number, self.row = scope, gate, decided, number, row
        self.points = TokenRows(space.asarray(gate.points[:, : scope.signature.width]))
        self.base = np.zeros(gate.levers.size)
        self.base_radius = np.zeros(gate.levers.size)
        self.asked: list[tuple[Floats, Integers, Integers, float]] = []  # rows, their and the points' numbers, reach
        # What the normals say of the size of forms, as if from a few of them.
        self.expected = expected
        self.estimate.update(space.full((4,), expected), 1.0)

    def ask_base(self, normal: Floats, normal_error: float, off: int) -> Steps[None]:  # (size,)
        """The logits of the common row alone, and points moved onto the hyperplane by what these tell of it.

        The normal is uncertain by `normal_error`, relatively. The last `off` points stay where they are. A point whose
        logit saturates is moved until the logit changes its sign, then by half of that, but no farther than other heads
        stay decided.
        """
        width = self.signature.width
        step = normal[:width] / (normal[:width] @ normal[:width])
        open_ = np.arange(self.base.size)
        below, above = np.full(open_.size, -np.inf), np.full(open_.size, np.inf)  # moves, in units of logits
        moved = np.zeros(open_.size)
        start = self.gate.points.copy()
        for _ in range(MOST_ROUNDS):
            logits, radius, _ = yield from self._ask_logits("bases", open_, np.zeros((1, width)), 0 * open_, 0.0)
            self.base[open_], self.base_radius[open_] = logits, radius
            seen = np.isfinite(radius) & (np.abs(logits) <= LARGEST_BASE)
            # Where a logit is small, what it becomes by the move is as good as known.
            fine = seen & ((np.abs(logits) * normal_error <= radius) | (open_ >= self.base.size - off))
            exact = open_[fine & (open_ < self.base.size - off)]
            rest = open_[~fine]
            lost = ~np.isfinite(radius[~fine])
            below[rest] = np.where(self.base[rest] > 0, moved[rest], below[rest])
            above[rest] = np.where(self.base[rest] > 0, above[rest], moved[rest])
            far = np.where(self.base[rest] > 0, FAR, -FAR)
            half = (below[rest] + above[rest]) / 2
            moved[exact] += self.base[exact]
            self.base_radius[exact] += np.abs(self.base[exact]) * normal_error
            moved[rest] = np.where(lost, np.where(np.isfinite(half), half, far), moved[rest] + self.base[rest])
            self.base[exact] = 0.0
            self.gate.points[:, :width] = start[:, :width] - (moved / self.gate.levers)[:, None] * step
            self.points = TokenRows(self.signature.space.asarray(self.gate.points[:, :width]))
            open_ = rest
            if not open_.size:
                return
            if np.any(np.abs(moved) > FAR) or np.any(above - below < LARGEST_BASE):
                break
        raise Unrecoverable(Outcome.SATURATED, "the hyperplane of a head is not where its neighbours let it be read")

    def has_unsaturated(self, scores: Floats, radii: Floats) -> bool:  # (heads, width, size)
        """Whether some row may have unsaturated another head, or it was not decided at all."""
        keys = scores @ self.gate.points.T  # (heads, width, size)
        errors = np.sqrt(self.row**2 @ (radii**2 @ self.gate.points.T**2))
        margins = (np.abs(self.row @ keys) - errors) * self.gate.levers - ENOUGH + np.log(self.signature.space.eps)
        margins[self.number] = np.inf
        known: dict[int, Floats] = {}
        for vectors, number, place, reach in self.asked:
            forms = known.setdefault(id(vectors), np.abs(vectors @ keys))  # (heads, rows, size)
            if np.any(reach * forms[:, number, place] > margins[:, place]):
                return True
        return False

    def ask_probe(self, rows: TokenRows, columns: TokenRows) -> Steps[Probe]:
        """Whether there are forms, at the scale that is known: a head of rank one has none but off its hyperplane."""
        space = self.signature.space
        for tries in range(SILENT_FORMS):
            index = space.indices([tries % rows.vectors.shape[0]])
            forms = yield from self.ask_forms(
                "directions", rows, columns, index, index * 0 + tries % (self.base.size - 1)
            )
            if abs(float(forms.values[0])) > float(forms.radius[0]):
                return Probe(0, forms, responds=True)
        return Probe(0, forms, responds=False)

    def undetected_bias(self, probe: Probe, again: Forms) -> float:  # noqa: ARG002
        """None may be hidden: score biases are part of the forms."""
        return 0.0

    @property
    def scale(self) -> float:
        """The reach that brings logits to their aim, or in smaller forms than expected not much more."""
        return min(self.estimate.aim, FARTHEST * AIM / self.expected)

    def ask_at(
        self,
        stage: str,
        rows: TokenRows,
        columns: TokenRows,  # noqa: ARG002
        row_index: Array,
        column_index: Array,
        scale: float,
    ) -> Steps[Forms]:
        """Forms of rows with points of the gate, one query each, the row of the scale beside the common row."""
        space = self.signature.space
        place = np.asarray(floats(column_index), dtype=np.int64)
        number = np.asarray(floats(row_index), dtype=np.int64)
        vectors = rows.vectors if isinstance(rows.vectors, np.ndarray) else floats(rows.vectors)
        self.asked.append((vectors, number, place, scale))
        logits, radius, saturation = yield from self._ask_logits(stage, place, vectors, number, scale)
        values = (logits - self.base[place]) / scale
        radius = (radius + self.base_radius[place]) / scale
        values, radius, saturation = (space.asarray(array) for array in (values, radius, saturation))
        return Forms(values, radius, 0 * values, saturation)

    def _ask_logits(
        self, stage: str, place: Integers, vectors: Floats, number: Integers, reach: float
    ) -> Steps[tuple[Floats, Floats, Floats]]:
        """Logits of the head, their radii and saturations, at points with rows beside the common one."""
        scope, space, decided = self.scope, self.signature.space, self.decided
        levers = self.gate.levers[place]
        long, short = scope.norms(levers)
        last: Position = [Term(self.points, space.indices(place), space.asarray(short))]
        common = TokenRows(space.asarray(self.row[None, :]))
        first = [Term(common, space.indices(0 * place), space.asarray(long)), *last]
        if reach > 0:
            first.insert(
                1, Term(TokenRows(space.asarray(vectors)), space.indices(number), space.asarray(reach / short))
            )
        answers: Measurements = yield Plan(stage, int(place.size), [first, last])
        levels = scope.levels(answers, levers, self.gate.points[place]) @ decided.mix
        part = (reach / levers)[:, None] * vectors[number] if reach > 0 else 0.0
        token = self.row + part  # (n, width) first tokens over the norm of the common row, without the last
        low = np.sum(token * decided.others[place], axis=1)
        high = low + token @ decided.own
        size = np.linalg.norm(token + 0 * self.row, axis=-1)
        away = np.linalg.norm(self.gate.points[place, : self.signature.width], axis=1)
        bar = np.maximum(away, 1.0) * scope.known_error(levers, decided.mix)
        bar = bar + size * space.rounding * decided.loudness + decided.row_radius + reach / levers * decided.radius
        logits, radius = logit_with_radius(numpy_space(), levels, low, high, bar, bar, 0.0)
        span = np.abs(high - low)
        saturation = radius * span / (8 * bar)
        sides = np.where((levels - low) * (high - low) > span**2 / 2, np.inf, -np.inf)
        logits = np.where(np.isfinite(radius), logits, sides)
        # The oracle's own products behind the logits, of which the last token's is one.
        form = self.estimate.size * self.signature.width**0.5
        return logits, radius + space.rounding * (size + 2 * away * short / long) * levers * form, saturation


@dataclass(frozen=True)
class Columns:
    """A head on its hyperplane, and what the second row sees of it."""

    points: Floats  # (size − 1, size)
    forms: Floats  # (width, size − 1) [W c]·point
    radius: Floats  # of the same shape
    rank: int
    second: Floats  # (size,) u₁ᵀ·[W c], less accurate along the first normal


@final
class HeadReader:
    """Reads heads one by one, in two rounds: first their hyperplanes, which then tell where to read the rest."""

    def __init__(
        self, scope: Scope, normals: Floats, normal_errors: Floats, values: ScalarValues, rng: np.random.Generator
    ) -> None:
        self.scope, self.normals, self.normal_errors, self.values, self.rng = scope, normals, normal_errors, values, rng
        space, width = scope.signature.space, scope.signature.width
        self.rows = space.asarray(values.rows)  # orthonormal, across the common row
        self.lengths = np.linalg.norm(normals[:, :width], axis=1)
        self.radius = 1.0
        if scope.radius is not None:  # as long as it takes for the score to be as large as the biases
            self.radius = min(1.0, width**0.5 * float(np.max(np.abs(normals[:, width]) / self.lengths)))

    def _least_logits(self, number: int, room: float) -> Floats:
        enough = SPARE - float(np.log(self.scope.signature.space.eps))
        return np.asarray(enough + room * REACH * self.lengths / self.lengths[number])

    def _reader(self, gate: HeadGate, number: int, row: Floats, row_radius: Floats) -> GatedReader:
        expected = float(self.lengths[number]) * self.radius / self.scope.signature.width**0.5
        decided = saturated_at(gate, number, self.values, row, row_radius)
        return GatedReader(self.scope, gate, decided, number, row, expected)

    def ask_on_hyperplane(self, number: int, room: float) -> Steps[tuple[Columns, GatedReader]]:
        """The columns of the hyperplane, whose rank is found, and one form off it."""
        scope, space, size = self.scope, self.scope.signature.space, self.scope.size
        doors = gate(
            self.rng, self.normals, number, self._least_logits(number, room), scope.signature.width, self.radius
        )
        reader = self._reader(doors, number, scope.row, self.values.row_radius)
        yield from reader.ask_base(self.normals[number], self.normal_errors[number], off=1)
        score = yield from ask_score(reader, self.rng, Draft(), bases=(self.rows, self.rows.T, space.eye(size - 1)))
        assert score is not None  # forms that cannot disagree with themselves
        one = space.indices([0])
        off = yield from reader.ask_forms("columns", TokenRows(self.rows), reader.points, one, one + size - 1)
        common = (reader.base / doors.levers)[: size - 1]
        forms = floats(score.matrix) + scope.row[:, None] * common
        radius = np.hypot(floats(score.radius), np.abs(scope.row)[:, None] * (reader.base_radius / doors.levers)[:-1])
        seen = np.append(self.values.rows[0] @ forms, floats(off.values))
        second = np.linalg.solve(doors.points, seen)
        return Columns(doors.points[:-1], forms, radius, score.rank, second), reader

    def ask_off_hyperplane(
        self, number: int, columns: list[Columns], near: GatedReader, room: float
    ) -> Steps[tuple[HeadScore, GatedReader]]:
        """The one column that is missing, and with it the head; `near` has read the others."""
        scope, space, width = self.scope, self.scope.signature.space, self.scope.signature.width
        own = columns[number]
        both = np.stack([self.normals, np.stack([each.second for each in columns])])
        pair = np.stack([scope.row, self.values.rows[0]])
        loudness = np.sqrt(np.sum(self.values.vectors**2, axis=(0, 1)))  # (outputs,)
        shares = pair @ self.values.vectors[number] / np.where(loudness > 0, loudness, 1.0)
        least = self._least_logits(number, room)
        doors, mix = solve_crossing(self.rng, both, number, least, shares, width, self.radius)
        row, lever = mix @ pair, float(doors.levers[0])
        reader = self._reader(doors, number, row, np.sqrt(np.tensordot(row**2, self.values.radius**2, (0, 1))))
        every = space.indices(range(width - 1))
        try:
            yield from reader.ask_base(mix @ both[:, number], 0.0, off=1)
        except Unrecoverable:  # a neighbour is so near that the second row is not known well enough
            last = yield from near.ask_forms(
                "columns", TokenRows(self.rows), near.points, every, 0 * every + scope.size - 1
            )
            common, bar = (array[-1] / near.gate.levers[-1] for array in (near.base, near.base_radius))
            return self._assemble(own, near.gate.points[-1], common, bar, last), near
        reader.estimate.update(space.asarray(np.linalg.norm(own.forms, axis=0) / width**0.5), 1.0)
        last = yield from reader.ask_forms("columns", TokenRows(self.rows), reader.points, every, 0 * every)
        # What the combination of rows says, less the second row's part, is the common row's.
        second, second_bar = float(last.values[0]), float(last.radius[0])
        common = (reader.base[0] / lever - mix[1] * second) / mix[0]
        bar = (reader.base_radius[0] / lever + abs(mix[1]) * second_bar) / abs(mix[0])
        return self._assemble(own, doors.points[0], common, bar, last), reader

    def _assemble(self, own: Columns, point: Floats, common: float, bar: float, last: Forms) -> HeadScore:
        """The head from its hyperplane and one more column, given by what each row says of it."""
        basis = np.vstack([self.scope.row, self.values.rows])
        form = basis.T @ np.append(common, floats(last.values))
        radius = np.sqrt((basis.T) ** 2 @ np.append(bar, floats(last.radius)) ** 2)
        back = np.linalg.inv(np.vstack([own.points, point]).T)
        score = np.column_stack([own.forms, form]) @ back
        radius = np.sqrt(np.column_stack([own.radius, radius]) ** 2 @ back**2)
        return HeadScore(score, radius, min(own.rank + 1, self.scope.signature.width))
