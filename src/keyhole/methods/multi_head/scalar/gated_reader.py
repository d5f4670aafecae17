"""Forms of one head at points where all other heads are saturated."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import numpy as np

from keyhole.arrays import Array, Floats, Integers, floats, numpy_space
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.reader import Forms, KnownScaleReader
from keyhole.methods.forms.scale import AIM
from keyhole.methods.multi_head.scalar.gates import HeadGate
from keyhole.methods.multi_head.scalar.normals_and_values import SaturatedHeads
from keyhole.methods.multi_head.scalar.queries import Scope
from keyhole.numerics.logit import logit_with_radius
from keyhole.queries import Measurements, Plan, Position, Sketch, Term, TokenRows
from keyhole.recovery import Outcome

# A saturated head gives one of the two tokens less than one rounding, by ENOUGH in the exponent.
ENOUGH = 4.0
# Base logits are at most this, or brought to zero by moving the point.
LARGEST_BASE = 3.0
# How far a saturated one is moved, in logits: less than gates leave room for.
FAR = 16.0
MOST_ROUNDS = 24
# Forms may be this much smaller than expected before they are not read as accurately.
FARTHEST = 4.0


@final
class GatedReader(KnownScaleReader):
    """Reads rowᵀ·[W c]·point for the points of a gate, as if they were the unit vectors of a head's last tokens."""

    def __init__(
        self,
        scope: Scope,
        gate: HeadGate,
        saturated: SaturatedHeads,
        number: int,
        row: Floats,
        expected: float,
        so_far: Callable[[], Sketch | None],
    ) -> None:
        space = scope.signature.space
        super().__init__(scope.signature, space.asarray(saturated.own), so_far=so_far)
        self.scope, self.gate, self.saturated, self.number, self.row = scope, gate, saturated, number, row
        self.points = TokenRows(space.asarray(gate.points[:, : scope.signature.width]))
        self.base = np.zeros(gate.scales.size)
        self.base_radius = np.zeros(gate.scales.size)
        self.asked: list[
            tuple[Floats, Integers, Integers, float]
        ] = []  # rows, their and the points' numbers, row_scale
        # The size of forms by the normals, as if it were that of a few forms.
        self.expected = expected
        self.estimate.update(space.full((4,), expected), 1.0)

    def ask_base(self, normal: Floats, normal_error: float, off: int) -> Steps[None]:  # (size,)
        """The logits of the common row alone, with the points moved onto the hyperplane that they locate.

        The normal is uncertain by `normal_error`, relatively. The last `off` points stay where they are. A point whose
        logit saturates is moved until the logit changes its sign, then by half of that, but no farther than other heads
        stay saturated.
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
            small = np.isfinite(radius) & (np.abs(logits) <= LARGEST_BASE)
            # Where a logit is small, what it becomes by the move is as good as known.
            fine = small & ((np.abs(logits) * normal_error <= radius) | (open_ >= self.base.size - off))
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
            self.gate.points[:, :width] = start[:, :width] - (moved / self.gate.scales)[:, None] * step
            self.points = TokenRows(self.signature.space.asarray(self.gate.points[:, :width]))
            open_ = rest
            if not open_.size:
                return
            if np.any(np.abs(moved) > FAR) or np.any(above - below < LARGEST_BASE):
                break
        raise Unrecoverable(Outcome.SATURATED, "the hyperplane of a head is not where its neighbours let it be read")

    def has_unsaturated(self, scores: Floats, radii: Floats) -> bool:  # (heads, width, size)
        """Whether some row may have unsaturated another head, or it was not saturated at all."""
        keys = scores @ self.gate.points.T  # (heads, width, size)
        errors = np.sqrt(self.row**2 @ (radii**2 @ self.gate.points.T**2))
        margins = (np.abs(self.row @ keys) - errors) * self.gate.scales - ENOUGH + np.log(self.signature.space.eps)
        margins[self.number] = np.inf
        known: dict[int, Floats] = {}
        for vectors, number, place, row_scale in self.asked:
            forms = known.setdefault(id(vectors), np.abs(vectors @ keys))  # (heads, rows, size)
            if np.any(row_scale * forms[:, number, place] > margins[:, place]):
                return True
        return False

    @property
    def scale(self) -> float:
        """The scale that brings logits to their aim, or in smaller forms than expected not much more."""
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
        self, stage: str, place: Integers, vectors: Floats, number: Integers, row_scale: float
    ) -> Steps[tuple[Floats, Floats, Floats]]:
        """Logits of the head, their radii and saturations, at points with rows beside the common one."""
        scope, space, saturated = self.scope, self.signature.space, self.saturated
        scales = self.gate.scales[place]
        long, short = scope.norms(scales)
        last: Position = [Term(self.points, space.indices(place), space.asarray(short))]
        common = TokenRows(space.asarray(self.row[None, :]))
        first = [Term(common, space.indices(0 * place), space.asarray(long)), *last]
        if row_scale > 0:
            first.insert(
                1, Term(TokenRows(space.asarray(vectors)), space.indices(number), space.asarray(row_scale / short))
            )
        answers: Measurements = yield Plan(stage, int(place.size), [first, last], so_far=self.so_far)
        levels = scope.levels(answers, scales, self.gate.points[place]) @ saturated.mix
        part = (row_scale / scales)[:, None] * vectors[number] if row_scale > 0 else 0.0
        token = self.row + part  # (n, width) first tokens over the norm of the common row, without the last
        low = np.sum(token * saturated.others[place], axis=1)
        high = low + token @ saturated.own
        size = np.linalg.norm(token + 0 * self.row, axis=-1)
        away = np.linalg.norm(self.gate.points[place, : self.signature.width], axis=1)
        error = np.maximum(away, 1.0) * scope.known_error(scales, saturated.mix)
        error = error + size * space.rounding * saturated.value_norm + saturated.row_radius
        error = error + row_scale / scales * saturated.radius
        logits, radius = logit_with_radius(numpy_space(), levels, low, high, error, error, 0.0)
        span = np.abs(high - low)
        saturation = radius * span / (8 * error)
        sides = np.where((levels - low) * (high - low) > span**2 / 2, np.inf, -np.inf)
        logits = np.where(np.isfinite(radius), logits, sides)
        # The oracle's own products behind the logits, of which the last token's is one.
        form = self.estimate.size * self.signature.width**0.5
        return logits, radius + space.rounding * (size + 2 * away * short / long) * scales * form, saturation
