"""Steps that the single-head methods share: the value, the scale, and bilinear forms read off logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from keyhole.arrays import Array
from keyhole.measure import Measurements, Plan, Rows, Signature, Term
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.numerics.logit import logit_with_radius, rounding
from keyhole.recovery import Outcome

# Logits are aimed at this size: large against their rounding, small against saturation.
AIM = 0.75
# After n readings the aim is n/(n + CAUTION) of that, since the scale is known from n samples only.
CAUTION = 10
# A reading whose radius exceeds that of a balanced one (σ = ½) by more than this is read again at a smaller scale.
WORST_RADIUS = 100.0
# How much smaller.
SHRINK = 2.0**-6
# The first token is longer than the last by 2³² · √scale, so that whatever the last adds by itself is below 2⁻⁶⁴.
LEVER = 2.0**32
# The first probe. In float64 one probe reads the scale over about 13 decades, so that most boxes need one only.
FIRST_PROBE = 2.0**-20
# Noisy answers are drowned by tokens of this norm where norms are free.
LOUD = 2.0**40


@dataclass(frozen=True)
class Value:
    """The value vector as read."""

    vector: Array  # (width,)
    radius: Array  # (width,)


@dataclass(frozen=True)
class Forms:
    """Readings of (row − ratio·column)ᵀ · score · column for pairs of unit vectors."""

    values: Array  # (n,)
    radius: Array  # (n,)
    ratio: Array  # (n,) norm of the last token over that of the first


def floor_power(number: float) -> float:
    """The largest power of two that is at most `number`: scaling by it is exact."""
    return 2.0 ** math.floor(math.log2(number))


def read_value(signature: Signature) -> Steps[Value]:
    """One-token queries: attention on a single token is the identity, so the answer is its value."""
    space = signature.space
    norm = 1.0 if signature.noise.kind == "exact" else LOUD
    norm = floor_power(min(norm, signature.norm_limit)) if signature.max_norm is not None else norm
    units = Rows(space.eye(signature.width))
    answers: Measurements = yield Plan("value", signature.width, [[Term(units, scale=norm)]])
    vector = answers.values / norm
    radius = space.eps * space.xp.abs(vector) + (answers.radius + space.tiny) / norm
    return Value(vector, radius)


class FormReader:
    """Reads bilinear forms rowᵀ·score·column, one query each, at a scale it keeps adjusting.

    The query [a·row; c·column] with value overlaps r = row·v, s = column·v answers
    c·s + σ(z)·(a·r − c·s), where z = a·c·(row − (c/a)·column)ᵀ·score·column.
    """

    def __init__(self, signature: Signature, value: Value) -> None:
        space = signature.space
        self.signature = signature
        self.value = value.vector
        self.value_norm = float(space.xp.linalg.vector_norm(value.vector))
        self.value_radius = float(space.xp.linalg.vector_norm(value.radius))
        # Tokens stay clear of overflow, also their products and after they met the value vector.
        room = min(space.huge**0.45, 2.0**-24 * space.huge / max(1.0, self.value_norm))
        self.longest = min(signature.norm_limit, room)
        free = signature.max_norm is None
        self.largest_scale = floor_power(self.longest / LEVER) ** 2 if free else self.longest**2
        self._count = 0
        self._mean_square = 0.0

    @property
    def size(self) -> float:
        """Root mean square of the forms read so far."""
        return math.sqrt(self._mean_square)

    def rescale(self, factor: float) -> None:
        """Expect forms of `factor` times the size from now on."""
        self._mean_square *= factor**2

    def _learn(self, values: Array) -> None:
        count = self._count + values.shape[0]
        added = float(self.signature.space.xp.sum((values / count**0.5) ** 2))
        self._mean_square = self._mean_square * (self._count / count) + added
        self._count = count

    @property
    def scale(self) -> float:
        """The product of token norms that brings logits to their aim."""
        if self.size == 0.0:
            return self.largest_scale
        aim = AIM * self._count / (self._count + CAUTION)
        return min(floor_power(aim / self.size), self.largest_scale)

    def norms(self, scale: float) -> tuple[float, float]:
        """Norms of the first and the last token whose product is `scale`."""
        if self.signature.max_norm is not None:
            return self.longest, scale / self.longest
        first = LEVER * floor_power(math.sqrt(scale))
        return first, scale / first

    def probe(self, rows: Rows, columns: Rows) -> Steps[bool]:
        """Find the scale; False when there is no response at any scale: the score matrix is zero."""
        space = self.signature.space
        balanced = 4 * self._answer_radius()
        step = floor_power(max(16.0, 0.1 / balanced))  # shorter than the range of logits one probe can read
        scale = min(FIRST_PROBE, self.largest_scale)
        tried: list[float] = []
        while scale not in tried:
            index = space.indices([len(tried) % rows.vectors.shape[0]])
            tried.append(scale)
            forms = yield from self._ask("scale", rows, columns, index, index, scale)
            logit, radius = abs(float(forms.values[0]) * scale), float(forms.radius[0]) * scale
            if radius > max(1.0, WORST_RADIUS * balanced):
                scale = scale / step
            elif logit > 4 * radius:
                self._learn(forms.values)
                return True
            elif scale == self.largest_scale:
                # Under a norm bound a single form may be too small to see where others are not.
                return self.signature.max_norm is not None
            else:
                scale = min(scale * step, self.largest_scale)
        raise Unrecoverable(
            Outcome.WRONG_FAMILY,
            "the answers saturate at one scale of the tokens and do not respond at the next",
        )

    def read(self, stage: str, rows: Rows, columns: Rows, row_index: Array, column_index: Array) -> Steps[Forms]:
        """Read the forms of the given pairs (n,), re-reading saturated ones at smaller scales."""
        xp = self.signature.space.xp
        pieces: list[Forms] = []
        done = 0
        while done < row_index.shape[0]:
            # Each plan at most doubles what is known, so a scale that is off spoils few queries.
            stop = min(done + max(1, self._count), row_index.shape[0])
            forms = yield from self._read_all(
                stage, rows, columns, row_index[done:stop], column_index[done:stop], self.scale
            )
            self._learn(forms.values)
            pieces.append(forms)
            done = stop
        if len(pieces) == 1:
            return pieces[0]
        return Forms(*(xp.concat([getattr(p, name) for p in pieces]) for name in ("values", "radius", "ratio")))

    def _read_all(
        self, stage: str, rows: Rows, columns: Rows, row_index: Array, column_index: Array, scale: float
    ) -> Steps[Forms]:
        xp = self.signature.space.xp
        forms = yield from self._ask(stage, rows, columns, row_index, column_index, scale)
        balanced = 4 * self._answer_radius() / scale
        while True:
            (bad,) = xp.nonzero(forms.radius > WORST_RADIUS * balanced)
            if bad.shape[0] == 0:
                return forms
            scale = scale * SHRINK
            balanced = balanced / SHRINK
            if scale < self.signature.space.tiny / SHRINK:
                raise Unrecoverable(
                    Outcome.SATURATED, f"{bad.shape[0]} softmax weights stayed at 0 or 1 at every token norm"
                )
            again = yield from self._ask(
                stage,
                rows,
                columns,
                xp.take(row_index, bad, axis=0),
                xp.take(column_index, bad, axis=0),
                scale,
            )
            forms = Forms(
                *(_replaced(getattr(forms, n), bad, getattr(again, n)) for n in ("values", "radius", "ratio"))
            )

    def _answer_radius(self) -> float:
        """Radius of an answer over the span of answers, for a row of average overlap."""
        errors = rounding(self.signature.space) * self.value_norm + self.value_radius
        if self.signature.max_norm is not None:
            errors += self.signature.noise.radius / self.longest
        return errors * math.sqrt(self.signature.width) / self.value_norm

    def _ask(
        self, stage: str, rows: Rows, columns: Rows, row_index: Array, column_index: Array, scale: float
    ) -> Steps[Forms]:
        """One query per pair, at one scale."""
        space, xp = self.signature.space, self.signature.space.xp
        first, last = self.norms(scale)
        positions = [[Term(rows, row_index, first)], [Term(columns, column_index, last)]]
        answers: Measurements = yield Plan(stage, int(row_index.shape[0]), positions)
        high = first * xp.take(rows.vectors @ self.value, row_index, axis=0)
        low = last * xp.take(columns.vectors @ self.value, column_index, axis=0)
        per_norm = rounding(space) * self.value_norm + self.value_radius
        logits, radius = logit_with_radius(
            space,
            answers.values,
            low,
            high,
            low * 0 + last * per_norm,
            high * 0 + first * per_norm,
            answers.radius,
        )
        self._check_range(answers, low, high, (first + last) * per_norm)
        # The oracle's own inner product behind the logit is rounded too.
        own = rounding(space) * self.size * self.signature.width**0.5
        ratio = space.full((int(row_index.shape[0]),), last / first)
        return Forms(logits / scale, radius / scale + own, ratio)

    def _check_range(self, answers: Measurements, low: Array, high: Array, rounding_radius: float) -> None:
        """A softmax average lies between the values of its tokens, or there is no softmax average."""
        xp = self.signature.space.xp
        slack = rounding_radius + answers.radius
        beyond = xp.maximum(answers.values - xp.maximum(low, high), xp.minimum(low, high) - answers.values)
        if bool(xp.any(beyond > 4 * slack)):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                "a softmax weight left [0, 1]: an answer to two tokens does not lie between their values, "
                "so the box is not a softmax average of x·v",
            )


def _replaced(array: Array, index: Array, values: Array) -> Array:
    array = array + 0  # a copy: what came from elsewhere is not changed
    array[index] = values
    return array
