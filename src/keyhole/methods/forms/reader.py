"""Bilinear forms rowᵀ·score·column, each measured as the logit of one query."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import final
from weakref import WeakKeyDictionary

from keyhole.arrays import Array, ArrayTable, Space, namespace, numbers
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.scale import FIRST_PROBE, NORM_RATIO, ScaleEstimate, ScaleSearch, floor_power
from keyhole.methods.forms.value import Value
from keyhole.numerics.logit import logit_with_radius
from keyhole.queries import Measurements, Plan, Signature, Sketch, Term, TokenRows
from keyhole.recovery import Outcome

# A first probe is made larger, where that helps, until a logit of this size could be told from zero.
CLEAR_ENOUGH = 1e-3
# A form whose radius exceeds that at a logit of zero by more than this is asked for again at a smaller scale.
SATURATED = 100.0
# How much smaller.
SHRINK = 2.0**-6
# Where the scale is known, a matrix is taken for zero if as many of its forms are zero within their radii.
ZERO_FORMS = 5
# A norm bound beyond this is as good as none, and longer tokens would only make the last ones vanish.
LONGEST = 2.0**100
# What the score bias adds to a logit is kept within this, by shorter tokens where it attracts them ...
LARGEST_BIAS_LOGIT = 1.0
# ... and the errors of tokens orthogonal to it below this many eps.
BIAS_NORM_RATIO = 2.0**7


@dataclass(frozen=True)
class ScoreBias:
    """An estimate of the score bias with entrywise radii."""

    vector: Array  # (width,)
    radius: Array  # (width,)

    @property
    def shown(self) -> Array | None:  # (width,)
        """The bias; None where it is zero."""
        return self.vector if bool(namespace(self.vector).any(self.vector != 0)) else None

    def zero_within_radius(self) -> ScoreBias:
        """Zero where no entry is beyond its radius, which then covers what was left out."""
        size = abs(self.vector)
        if bool(namespace(size).any(size > self.radius)):
            return self
        return ScoreBias(0 * self.vector, self.radius + size)


@dataclass(frozen=True)
class Forms(ArrayTable):
    """Measurements of (row − ratio·column)ᵀ · score · column for pairs of unit vectors."""

    values: Array  # (n,)
    radius: Array  # (n,)
    ratio: Array  # (n,) norm of the last token over that of the first
    saturation: Array  # (n,) radius of the logit over that at zero (σ = ½): large where the softmax saturates


@dataclass(frozen=True)
class Probe:
    """The last form that the scale search measured, of row and column `number`."""

    number: int
    forms: Forms
    responds: bool  # whether it can be told from zero, or others may be that cannot be told from it

    def is_same(self, again: Forms) -> bool:
        """Whether the form measured at another scale is the same within its errors; a score bias scales differently."""
        apart = abs(float(self.forms.values[0]) - float(again.values[0]))
        return apart <= float(self.forms.radius[0]) + float(again.radius[0])


@dataclass(eq=False)
class FormReader(ABC):
    """Measures bilinear forms rowᵀ·score·column, one query each, at a scale it keeps adjusting.

    A subclass knows what tokens to send for a pair at a scale and how to solve its answer for the form.
    """

    signature: Signature
    guide: Array  # (width,) what rows must overlap with for their answers to show the softmax weight
    estimate: ScaleEstimate = field(default_factory=ScaleEstimate)
    bias: ScoreBias | None = None
    so_far: Callable[[], Sketch | None] | None = None  # offered to those who watch, with every plan
    # Whether last tokens are so short against first ones that their own forms vanish.
    negligible_last = True
    # How far forms may be off together, on average, because of the output bias.
    common_radius = 0.0

    @cached_property
    def guide_norm(self) -> float:
        """Norm of the guide."""
        return float(self.signature.space.xp.linalg.vector_norm(self.guide))

    @property
    @abstractmethod
    def scale(self) -> float:
        """The product of token norms that brings logits to their aim."""

    @abstractmethod
    def ask_at(
        self, stage: str, rows: TokenRows, columns: TokenRows, row_index: Array, column_index: Array, scale: float
    ) -> Steps[Forms]:
        """The forms of the given pairs (n,) from one query each, at one scale."""

    @abstractmethod
    def ask_probe(self, rows: TokenRows, columns: TokenRows) -> Steps[Probe]:
        """Settle the scale with forms of row k and column k. Without a response the score matrix is zero."""

    @abstractmethod
    def undetected_bias(self, probe: Probe, again: Forms) -> float | None:
        """How large a score bias may be, given that a form agrees with itself at two scales; None where it does not."""

    @final
    def ask_forms(
        self, stage: str, rows: TokenRows, columns: TokenRows, row_index: Array, column_index: Array
    ) -> Steps[Forms]:
        """The forms of the given pairs (n,), at smaller scales again where they saturate."""
        pieces: list[Forms] = []
        done = 0
        while done < row_index.shape[0]:
            # Each plan at most doubles what is known, so a scale that is off spoils few queries.
            stop = min(done + max(1, self.estimate.count), row_index.shape[0])
            scale = self.scale
            forms = yield from self._ask_unsaturated(
                stage, rows, columns, row_index[done:stop], column_index[done:stop], scale
            )
            self.estimate.update(forms.values, scale)
            pieces.append(forms)
            done = stop
        return Forms.concat(*pieces)

    @final
    def ask_batch(self, stage: str, rows: TokenRows, columns: TokenRows) -> Steps[Forms]:
        """The forms of row k and column k for all k, in one plan whatever is known of the scale."""
        every = self.signature.space.indices(range(rows.vectors.shape[0]))
        return (yield from self._ask_unsaturated(stage, rows, columns, every, every, self.scale))

    def _ask_unsaturated(
        self, stage: str, rows: TokenRows, columns: TokenRows, row_index: Array, column_index: Array, scale: float
    ) -> Steps[Forms]:
        xp = self.signature.space.xp
        forms = yield from self.ask_at(stage, rows, columns, row_index, column_index, scale)
        while True:
            saturated = forms.saturation > SATURATED
            if not bool(xp.any(saturated)):
                return forms
            (bad,) = xp.nonzero(saturated)
            scale = scale * SHRINK
            if scale < self.signature.space.tiny**0.5:
                raise Unrecoverable(
                    Outcome.SATURATED, f"{bad.shape[0]} softmax weights stayed at 0 or 1 at every token norm"
                )
            some_rows, some_columns = (xp.take(index, bad, axis=0) for index in (row_index, column_index))
            again = yield from self.ask_at(stage, rows, columns, some_rows, some_columns, scale)
            old = Forms(*(array + 0 for array in vars(forms).values()))  # a copy: what came from elsewhere stays
            for name, array in vars(again).items():
                getattr(old, name)[bad] = array
            forms = old


class KnownScaleReader(FormReader):
    """A reader of forms whose size is known, score biases being part of them."""

    @final
    def ask_probe(self, rows: TokenRows, columns: TokenRows) -> Steps[Probe]:
        """Whether any of a few forms can be told from zero."""
        space = self.signature.space
        for tries in range(ZERO_FORMS):
            row, column = (space.indices([tries % side.vectors.shape[0]]) for side in (rows, columns))
            forms = yield from self.ask_forms("directions", rows, columns, row, column)
            if abs(float(forms.values[0])) > float(forms.radius[0]):
                return Probe(0, forms, responds=True)
        return Probe(0, forms, responds=False)

    @final
    def undetected_bias(self, probe: Probe, again: Forms) -> float:  # noqa: ARG002
        """None may be hidden."""
        return 0.0


class SearchingReader(FormReader):
    """A reader that has to search for the scale."""

    largest_scale: float

    @abstractmethod
    def first_norm(self, scale: float) -> float:
        """Norm of first tokens, but for those that the score bias attracts."""

    @abstractmethod
    def radius_at_zero(self, scale: float) -> float:
        """Radius of a logit of zero, for a row of average overlap with the guide."""

    @property
    def scale(self) -> float:
        """The product of token norms that brings logits to their aim."""
        longest = None if self.negligible_last else self.first_norm(self.largest_scale)
        return self.estimate.next_scale(self.largest_scale, longest, self.signature.width)

    @final
    def ask_probe(self, rows: TokenRows, columns: TokenRows) -> Steps[Probe]:
        """Search for the scale with the form of the first row and column. Without a response the score matrix is zero.

        Beside a score bias tokens may be too short for a response: then the second row and column are tried, which
        may be orthogonal to it and so make longer ones.
        """
        probe = yield from self._ask_probe(rows, columns, 0)
        if self.bias is not None and not probe.responds and rows.vectors.shape[0] > 1:
            probe = yield from self._ask_probe(rows, columns, 1)
        return probe

    def _ask_probe(self, rows: TokenRows, columns: TokenRows, number: int) -> Steps[Probe]:
        space, index = self.signature.space, self.signature.space.indices([number])
        scale = min(FIRST_PROBE, self.largest_scale)
        while self.radius_at_zero(scale) > CLEAR_ENOUGH and scale < self.largest_scale:
            scale = min(2 * scale, self.largest_scale)
        search = ScaleSearch(scale, smallest=space.tiny**0.5)
        for scale in search:
            radius = self.radius_at_zero(scale)
            if radius > 0.5:
                raise Unrecoverable(
                    Outcome.TOO_NOISY,
                    f"an answer is uncertain by {radius / 4:.1g} of the difference between two tokens' values",
                )
            step = floor_power(max(16.0, 0.1 / max(radius, space.eps)))  # within the logits one probe can show
            forms = yield from self.ask_at("scale", rows, columns, index, index, scale)
            if float(forms.saturation[0]) > SATURATED:
                search.lower_scale(step)
            elif abs(float(forms.values[0])) > 4 * float(forms.radius[0]):
                self.estimate.update(forms.values, scale)
                return Probe(number, forms, responds=True)
            elif scale == self.largest_scale or float(forms.radius[0]) * scale > 0.5:
                # Under a norm bound a single form may be too small to see where others are not.
                return Probe(number, forms, responds=self.signature.max_norm is not None)
            else:
                search.raise_scale(step, self.largest_scale)
        raise AssertionError  # the search ends by itself

    @final
    def undetected_bias(self, probe: Probe, again: Forms) -> float | None:
        """How large a score bias may be, given that a form agrees with itself at two scales; None where it does not.

        It adds its share times the norm of the first token over the scale to a form, so that it shows as a difference.
        """
        if not probe.is_same(again):
            return None
        errors = float(probe.forms.radius[0]) + float(again.radius[0])
        parts = [self.first_norm(scale) / scale for scale in (self.estimate.first, self.estimate.latest)]
        apart = abs(parts[0] - parts[1])  # none where both forms were asked for at one scale: then nothing is known
        return 32 * math.sqrt(self.signature.width) * errors / apart if apart > 0 else math.inf


@final
class PairValues:
    """The softmax weight between two tokens from an answer, given their values.

    The query [a·row; c·column] with value overlaps r = row·v, s = column·v answers c·s + σ(z)·(a·r − c·s), where
    z = (a·row − c·column)ᵀ(c·score·column + score_bias).
    """

    def __init__(self, signature: Signature, value: Value) -> None:
        xp = signature.space.xp
        self.signature, self.value = signature, value
        self.norm = float(xp.linalg.vector_norm(value.vector))
        # Error of the value of a token, over its norm.
        self.error = signature.space.rounding * self.norm + float(xp.linalg.vector_norm(value.radius))
        self.bias_radius, self.bias_size = (abs(each) for each in numbers(value.bias_radius, value.bias))
        self.longest = longest_token(signature.space, self.norm)
        if signature.max_norm is not None:
            self.longest = min(self.longest, LONGEST, signature.norm_limit)
        self._known: WeakKeyDictionary[TokenRows, Array] = WeakKeyDictionary()

    def noise(self, answer_radius: float) -> float:
        """Error of an answer whatever the tokens: its own noise and that of the output bias."""
        eps, width = self.signature.space.eps, self.signature.width
        own = max(answer_radius, self.signature.noise.spread) + 2 * eps * self.bias_size
        # An error of the output bias is the same in all answers: it does not average out over the √d of a basis.
        return float(own + self.bias_radius * width**0.5)

    def _of_rows(self, rows: TokenRows) -> Array:
        """The values of all rows, worked out once for all plans that take some of them."""
        if rows not in self._known:
            self._known[rows] = rows.vectors @ self.value.vector
        return self._known[rows]

    def radius_at_zero(self, first: float) -> float:
        """Radius of a logit of zero, for a first token of this norm and average overlap with the value."""
        span = first * self.norm / math.sqrt(self.signature.width)
        return 4 * (first * self.error + self.noise(self.signature.noise.radius)) / span if span > 0 else math.inf

    def ask_logits(
        self, stage: str, first: Term, last: Term, so_far: Callable[[], Sketch | None] | None = None
    ) -> Steps[tuple[Array, Array, Array, Array]]:
        """Logits (n,) of scaled rows and columns, radii, saturation, and how far apart the two tokens' values are."""
        space, xp = self.signature.space, self.signature.space.xp
        high, low = (term.scale * xp.take(self._of_rows(term.rows), term.places, axis=0) for term in (first, last))
        answers: Measurements = yield Plan(stage, int(high.shape[0]), [[first], [last]], so_far=so_far)
        values = answers.values - self.value.bias
        noise, low_radius, high_radius = self.noise(answers.radius), last.scale * self.error, first.scale * self.error
        logits, radius = logit_with_radius(space, values, low, high, low_radius, high_radius, noise)
        total = noise + low_radius + high_radius
        if bool(xp.any(xp.isinf(radius))):
            check_average(values, low, high, total)
        span = xp.abs(high - low)
        span = xp.where(span == 0, xp.ones_like(span), span)
        return logits, radius, radius * span / (4 * total), span


@final
class PairReader(SearchingReader):
    """Measures forms of a head with one output by queries [a·row; c·column]."""

    def __init__(
        self, signature: Signature, value: Value, bias: ScoreBias | None = None, hidden_bias: float = 0.0
    ) -> None:
        super().__init__(signature, value.vector)
        space = signature.space
        self.values = PairValues(signature, value)
        self.bias = bias
        self.hidden_bias = hidden_bias  # how large a score bias may be that was not detected
        self.longest = self.values.longest
        # Where norms are free and logits bilinear, the first token is so long that the last one does nothing else.
        self.negligible_last = signature.max_norm is None and bias is None
        self.largest_scale = floor_power(self.longest / NORM_RATIO) ** 2 if self.negligible_last else self.longest**2
        self._steepness = (0, 0.0)  # of all forms: their number, and how the output bias moves them together
        self.bias_norm = 0.0 if bias is None else float(space.xp.linalg.vector_norm(bias.vector))
        if self.bias_norm > 0:
            # Also of a last token orthogonal to the bias, the rounding of its logit stays small.
            longest_last = min(self.longest, 0.01 / (space.rounding * self.bias_norm))
            self.largest_scale = min(BIAS_NORM_RATIO / self.bias_norm, self.longest) * longest_last

    def first_norm(self, scale: float) -> float:
        """Norm of first tokens, but for those that the score bias attracts."""
        if self.negligible_last:
            return NORM_RATIO * floor_power(math.sqrt(scale))
        if self.bias_norm == 0:
            return float(self.longest)
        root = math.sqrt(self.signature.width)
        wanted = max(2 * math.sqrt(scale * root), 0.5 * root / self.bias_norm)
        return min(wanted, BIAS_NORM_RATIO / self.bias_norm, float(self.longest))

    def radius_at_zero(self, scale: float) -> float:
        """Radius of a logit of zero, for a row of average overlap with the value."""
        return self.values.radius_at_zero(self.first_norm(scale))

    def ask_at(
        self, stage: str, rows: TokenRows, columns: TokenRows, row_index: Array, column_index: Array, scale: float
    ) -> Steps[Forms]:
        """The forms of the given pairs (n,) from queries [a·row; c·column] with a·c = scale, or less beside a bias."""
        space, xp = self.signature.space, self.signature.space.xp
        first: float | Array = self.first_norm(scale)
        last: float | Array = min(scale / first, self.longest)
        if self.bias is not None:
            row_bias = overlaps(rows, row_index, self.bias.vector)
            column_bias = overlaps(columns, column_index, self.bias.vector)
            first, last = norms_beside_bias(first, row_bias), norms_beside_bias(last, column_bias)
        logits, radius, saturation, span = yield from self.values.ask_logits(
            stage, Term(rows, row_index, first), Term(columns, column_index, last), self.so_far
        )
        # The oracle's own inner product behind the logit is rounded too.
        own = space.rounding * self.estimate.size * self.signature.width**0.5
        if self.bias is not None:
            logits = logits - (first * row_bias - last * column_bias)
            error = space.rounding * self.bias_norm + float(xp.linalg.vector_norm(self.bias.radius))
            radius = radius + (first + last) * error
        unit = first * last
        if self.values.bias_radius > 0 and stage != "scale":
            # An error of the output bias moves all forms the same way: a logit by 2 + 2·cosh z over the span of values.
            steep = (2 + 2 * xp.cosh(xp.clip(xp.abs(logits), 0.0, 6.0))) / span
            count, total = self._steepness
            self._steepness = (count + logits.shape[0], total + float(xp.sum(steep / unit)))
            self.common_radius = self.values.bias_radius * self._steepness[1] / self._steepness[0]
        if self.hidden_bias > 0:
            radius = radius + (first + last) * (self.hidden_bias / self.signature.width**0.5)
        return Forms(logits / unit, radius / unit + own, xp.zeros_like(logits) + last / first, saturation)


def overlaps(rows: TokenRows, index: Array, vector: Array) -> Array:  # (n,), (width,) -> (n,)
    """Inner products of some rows with a vector."""
    return namespace(vector).take(rows.vectors @ vector, index, axis=0)


def longest_token(space: Space, value_norm: float) -> float:
    """A norm of tokens that keeps clear of overflow, also their products and after they met the value vector."""
    return float(min(space.huge**0.45, 2.0**-24 * space.huge / max(1.0, value_norm)))


def check_average(values: Array, low: Array, high: Array, radius: float | Array) -> None:  # (n,)
    """Raise unless answers lie between the values of their two tokens, as a softmax average does."""
    xp = namespace(values)
    beyond = xp.maximum(values - xp.maximum(low, high), xp.minimum(low, high) - values)
    if bool(xp.any(beyond > 4 * radius)):
        raise Unrecoverable(
            Outcome.WRONG_FAMILY,
            "a softmax weight left [0, 1]: an answer to two tokens does not lie between their values, "
            "so the box is not a softmax average of x·v",
        )


def norms_beside_bias(norm: float, bias: Array) -> Array:  # (n,)
    """Norms of at most `norm` at which what the score bias adds to a logit stays of order one."""
    xp, most = namespace(bias), LARGEST_BIAS_LOGIT
    return xp.minimum(xp.full_like(bias, norm), most / xp.maximum(xp.abs(bias), xp.full_like(bias, most / norm)))
