"""Bilinear forms rowᵀ·score·column, each read off the logit of one query."""

from __future__ import annotations

import math
from dataclasses import dataclass

from keyhole.arrays import Array, namespace
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.scale import FIRST_PROBE, LEVER, MOST_PROBES, NO_RESPONSE, ScaleKeeper, floor_power
from keyhole.methods.forms.value import Value
from keyhole.numerics.logit import logit_with_radius, rounding
from keyhole.queries import Measurements, Plan, Signature, Term, TokenRows
from keyhole.recovery import Outcome

# A first probe is made larger, where that helps, until a logit of this size could be seen.
CLEAR_ENOUGH = 1e-3
# A reading whose radius exceeds that of a balanced one (σ = ½) by more than this is read again at a smaller scale.
WORST_STRAIN = 100.0
# How much smaller.
SHRINK = 2.0**-6
# A norm bound beyond this is as good as none, and longer tokens would only make the last ones vanish.
LONGEST = 2.0**100
# What the score bias adds to a logit is kept within this, by shorter tokens where it attracts them ...
REACH = 1.0
# ... and the errors of tokens orthogonal to it below this many eps.
BIAS_LEVER = 2.0**7


@dataclass(frozen=True)
class ScoreBias:
    """The score bias as read."""

    vector: Array  # (width,)
    radius: Array  # (width,)


@dataclass(frozen=True)
class Forms:
    """Readings of (row − ratio·column)ᵀ · score · column for pairs of unit vectors."""

    values: Array  # (n,)
    radius: Array  # (n,)
    ratio: Array  # (n,) norm of the last token over that of the first
    strain: Array  # (n,) radius of the logit over that of a balanced one (σ = ½): large where the softmax saturates

    def parts(self) -> tuple[Array, Array, Array, Array]:
        """All four arrays, in order."""
        return self.values, self.radius, self.ratio, self.strain


@dataclass(frozen=True)
class Probe:
    """The last form probed: of row and column `number`."""

    number: int
    forms: Forms
    responds: bool  # whether it can be told from zero, or others may be that cannot be told from it

    def agrees(self, again: Forms) -> bool:
        """Whether the same form read at another scale is the same; a score bias scales differently."""
        apart = abs(float(self.forms.values[0]) - float(again.values[0]))
        return apart <= float(self.forms.radius[0]) + float(again.radius[0])


class FormReader(ScaleKeeper):
    """Reads bilinear forms rowᵀ·score·column, one query each, at a scale it keeps adjusting.

    The query [a·row; c·column] with value overlaps r = row·v, s = column·v answers
    c·s + σ(z)·(a·r − c·s), where z = (a·row − c·column)ᵀ(c·score·column + score_bias).
    """

    def __init__(
        self, signature: Signature, value: Value, bias: ScoreBias | None = None, hidden_bias: float = 0.0
    ) -> None:
        super().__init__(signature)
        space, xp = signature.space, signature.space.xp
        self.value = value.vector
        self.output_bias = value.bias
        self.value_norm = float(xp.linalg.vector_norm(value.vector))
        self.value_radius = float(xp.linalg.vector_norm(value.radius))
        self.offset_radius = float(value.bias_radius)
        self.bias = bias
        self._steepness: list[tuple[int, float]] = []  # of each reading: forms, and how the output bias moves them
        self.hidden_bias = hidden_bias  # how large a score bias may be that did not show
        self.bias_norm = 0.0 if bias is None else float(xp.linalg.vector_norm(bias.vector))
        # Tokens stay clear of overflow, also their products and after they met the value vector.
        room = min(space.huge**0.45, 2.0**-24 * space.huge / max(1.0, self.value_norm))
        if signature.max_norm is not None:
            room = min(room, LONGEST)
        self.longest = min(signature.norm_limit, room)
        # Where norms are free and logits bilinear, the first token is so long that the last one does nothing else.
        self.levered = signature.max_norm is None and bias is None
        self.largest_scale = floor_power(self.longest / LEVER) ** 2 if self.levered else self.longest**2
        if self.bias_norm > 0:
            # Also of a last token orthogonal to the bias, the rounding of its logit stays small.
            longest_last = min(self.longest, 0.01 / (rounding(space) * self.bias_norm))
            self.largest_scale = min(BIAS_LEVER / self.bias_norm, self.longest) * longest_last

    @property
    def scale(self) -> float:
        """The product of token norms that brings logits to their aim."""
        aim = self.aim
        if math.isinf(aim):
            return self.largest_scale
        if not self.levered:
            # The last token's own form grows with its norm squared, and may exceed the others √d times.
            longest = self._first_norm(self.largest_scale)
            aim = min(aim, longest * math.sqrt(aim / math.sqrt(self.signature.width)))
        return self.other_scale(min(floor_power(aim), self.largest_scale))

    def _first_norm(self, scale: float) -> float:
        """How long first tokens are, but for those that the score bias attracts."""
        if self.levered:
            return LEVER * floor_power(math.sqrt(scale))
        longest = float(self.longest)
        if self.bias_norm == 0:
            return longest
        root = math.sqrt(self.signature.width)
        wanted = max(2 * math.sqrt(scale * root), 0.5 * root / self.bias_norm)
        return min(wanted, BIAS_LEVER / self.bias_norm, longest)

    def norms(self, scale: float, rows_bias: Array, columns_bias: Array) -> tuple[float | Array, float | Array]:
        """Norms of the first and the last tokens, whose product is `scale` unless the score bias allows less."""
        first = self._first_norm(scale)
        last = min(scale / first, self.longest)
        if self.bias is None:
            return first, last
        return within_reach(first, rows_bias), within_reach(last, columns_bias)

    def probe(self, rows: TokenRows, columns: TokenRows) -> Steps[Probe]:
        """Find the scale. Without a response at any scale the score matrix is zero."""
        space = self.signature.space
        scale = min(FIRST_PROBE, self.largest_scale)
        while self._balanced_radius(scale) > CLEAR_ENOUGH and scale < self.largest_scale:
            scale = min(2 * scale, self.largest_scale)
        silent, saturated = 0.0, math.inf  # scales that are too small and too large
        for tries in range(MOST_PROBES):
            if scale < space.tiny**0.5:
                break
            balanced = self._balanced_radius(scale)
            if balanced > 0.5:
                raise Unrecoverable(
                    Outcome.TOO_NOISY,
                    f"an answer is uncertain by {balanced / 4:.1g} of the difference between two tokens' values",
                )
            step = floor_power(
                max(16.0, 0.1 / max(balanced, self.signature.space.eps))
            )  # shorter than the range of logits one probe can read
            number = tries % rows.vectors.shape[0]
            index = space.indices([number])
            forms = yield from self._ask("scale", rows, columns, index, index, scale)
            if float(forms.strain[0]) > WORST_STRAIN:
                saturated = scale
                scale = scale / step if silent == 0.0 else math.sqrt(silent * saturated)
                continue
            if abs(float(forms.values[0])) > 4 * float(forms.radius[0]):
                self.learn(forms.values, scale)
                self._steepness.clear()
                return Probe(number, forms, responds=True)
            if scale == self.largest_scale or float(forms.radius[0]) * scale > 0.5:
                # Under a norm bound a single form may be too small to see where others are not.
                return Probe(number, forms, responds=self.signature.max_norm is not None)
            silent = scale
            scale = min(scale * step, self.largest_scale) if math.isinf(saturated) else math.sqrt(silent * saturated)
        raise Unrecoverable(Outcome.WRONG_FAMILY, NO_RESPONSE)

    def read(
        self, stage: str, rows: TokenRows, columns: TokenRows, row_index: Array, column_index: Array
    ) -> Steps[Forms]:
        """Read the forms of the given pairs (n,), re-reading saturated ones at smaller scales."""
        xp = self.signature.space.xp
        pieces: list[Forms] = []
        done = 0
        while done < row_index.shape[0]:
            # Each plan at most doubles what is known, so a scale that is off spoils few queries.
            stop = min(done + max(1, self._count), row_index.shape[0])
            scale = self.scale
            forms = yield from self._read_all(
                stage, rows, columns, row_index[done:stop], column_index[done:stop], scale
            )
            self.learn(forms.values, scale)
            pieces.append(forms)
            done = stop
        if len(pieces) == 1:
            return pieces[0]
        return Forms(*(xp.concat(parts) for parts in zip(*(piece.parts() for piece in pieces), strict=True)))

    def read_batch(self, stage: str, rows: TokenRows, columns: TokenRows) -> Steps[Forms]:
        """The forms of row k and column k for all k, in one plan whatever is known of the scale."""
        every = self.signature.space.indices(range(rows.vectors.shape[0]))
        return (yield from self._read_all(stage, rows, columns, every, every, self.scale))

    def _read_all(
        self, stage: str, rows: TokenRows, columns: TokenRows, row_index: Array, column_index: Array, scale: float
    ) -> Steps[Forms]:
        xp = self.signature.space.xp
        forms = yield from self._ask(stage, rows, columns, row_index, column_index, scale)
        while True:
            (bad,) = xp.nonzero(forms.strain > WORST_STRAIN)
            if bad.shape[0] == 0:
                return forms
            scale = scale * SHRINK
            if scale < self.signature.space.tiny**0.5:
                raise Unrecoverable(
                    Outcome.SATURATED, f"{bad.shape[0]} softmax weights stayed at 0 or 1 at every token norm"
                )
            some_rows, some_columns = (xp.take(index, bad, axis=0) for index in (row_index, column_index))
            again = yield from self._ask(stage, rows, columns, some_rows, some_columns, scale)
            pairs = zip(forms.parts(), again.parts(), strict=True)
            forms = Forms(*(_replaced(old, bad, new) for old, new in pairs))

    @property
    def common_radius(self) -> float:
        """How far forms may be off together, on average, because of the output bias."""
        count = sum(number for number, _ in self._steepness)
        return self.offset_radius * sum(total for _, total in self._steepness) / max(count, 1)

    def unseen_bias(self, probe: Probe, again: Forms) -> float:
        """How large a score bias may be whose part in a form, read at two scales, is within the errors of both.

        It adds LEVER/√scale times its share to a form.
        """
        parts = [LEVER / math.sqrt(scale) for scale in (self._probed, self._latest)]
        errors = float(probe.forms.radius[0]) + float(again.radius[0])
        return 32 * math.sqrt(self.signature.width) * errors / abs(parts[0] - parts[1])

    def _balanced_radius(self, scale: float) -> float:
        """Radius of a logit of zero, for a row of average overlap with the value."""
        first = self._first_norm(scale)
        span = first * self.value_norm / math.sqrt(self.signature.width)
        errors = first * (rounding(self.signature.space) * self.value_norm + self.value_radius)
        return 4 * (errors + self._noise(self.signature.noise.radius)) / span if span > 0 else math.inf

    def _noise(self, answer_radius: float) -> float:
        """What an answer is off by, whatever the tokens: its own noise and that of the output bias."""
        own = max(answer_radius, self.signature.noise.spread) + 2 * self.signature.space.eps * abs(
            float(self.output_bias)
        )
        # An error of the output bias is the same in all answers: it does not average out over the √d of a basis.
        return float(own + self.offset_radius * self.signature.width**0.5)

    def _ask(
        self, stage: str, rows: TokenRows, columns: TokenRows, row_index: Array, column_index: Array, scale: float
    ) -> Steps[Forms]:
        """One query per pair, at one scale."""
        space, xp = self.signature.space, self.signature.space.xp
        rows_bias, columns_bias = 0.0, 0.0
        if self.bias is not None:
            rows_bias = xp.take(rows.vectors @ self.bias.vector, row_index, axis=0)
            columns_bias = xp.take(columns.vectors @ self.bias.vector, column_index, axis=0)
        first, last = self.norms(scale, rows_bias, columns_bias)
        positions = [[Term(rows, row_index, first)], [Term(columns, column_index, last)]]
        answers: Measurements = yield Plan(stage, int(row_index.shape[0]), positions)
        values = answers.values - self.output_bias
        high = first * xp.take(rows.vectors @ self.value, row_index, axis=0)
        low = last * xp.take(columns.vectors @ self.value, column_index, axis=0)
        per_norm = rounding(space) * self.value_norm + self.value_radius
        noise = self._noise(answers.radius)
        low_bar, high_bar = last * per_norm, first * per_norm
        logits, radius = logit_with_radius(space, values, low, high, low_bar, high_bar, noise)
        slack = noise + low_bar + high_bar
        if bool(xp.any(xp.isinf(radius))):
            self._check_range(values, low, high, slack)
        span = xp.abs(high - low)
        span = xp.where(span == 0, xp.ones_like(span), span)
        strain = radius * span / (4 * slack)
        # The oracle's own inner product behind the logit is rounded too.
        own = rounding(space) * self.size * self.signature.width**0.5
        if self.bias is not None:
            logits = logits - (first * rows_bias - last * columns_bias)
            spread = rounding(space) * self.bias_norm + float(xp.linalg.vector_norm(self.bias.radius))
            radius = radius + (first + last) * spread
        unit = self._unit(first, last)
        if self.offset_radius > 0:
            # An error of the output bias moves all forms the same way: a logit by 2 + 2·cosh z over the span of values.
            steep = (2 + 2 * xp.cosh(xp.clip(xp.abs(logits), 0.0, 6.0))) / span
            self._steepness.append((values.shape[0], float(xp.sum(steep / unit))))
        if self.hidden_bias > 0:
            radius = radius + (first + last) * (self.hidden_bias / self.signature.width**0.5)
        return Forms(logits / unit, radius / unit + own, xp.zeros_like(values) + last / first, strain)

    def _unit(self, first: float | Array, last: float | Array) -> float | Array:
        """What a logit is divided by to give the form of unit vectors."""
        return first * last

    def _check_range(self, values: Array, low: Array, high: Array, slack: float | Array) -> None:
        """A softmax average lies between the values of its tokens, or there is no softmax average."""
        xp = self.signature.space.xp
        beyond = xp.maximum(values - xp.maximum(low, high), xp.minimum(low, high) - values)
        if bool(xp.any(beyond > 4 * slack)):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                "a softmax weight left [0, 1]: an answer to two tokens does not lie between their values, "
                "so the box is not a softmax average of x·v",
            )


def within_reach(norm: float, bias: Array) -> Array:  # (n,)
    """Norms of at most `norm` at which what the score bias adds to a logit stays of order one."""
    xp = namespace(bias)
    return xp.minimum(xp.full_like(bias, norm), REACH / xp.maximum(xp.abs(bias), xp.full_like(bias, REACH / norm)))


def _replaced(array: Array, index: Array, values: Array) -> Array:
    array = array + 0  # a copy: what came from elsewhere is not changed
    array[index] = values
    return array
