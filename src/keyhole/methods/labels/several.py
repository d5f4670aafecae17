"""Several heads behind signs: numbers are read by bisection, and heads fitted to these.

Copies of the tokens A·u + g/A and g/A answer A·F + (g·v̄)/A − b: all keys u·(W_h·g) stay as they are, whatever A is, and
so does F = Σ_h σ(ln(m/n) + u·W_h·g)·(u·v_h), what m copies of the first beside n of the second make of the values.
Where F and g·v̄ have opposite signs the label changes at one A, found by bisection, and F = (A·b − g·v̄)/A² there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keyhole.arrays import Floats, Integers, floats
from keyhole.families import MultiHead
from keyhole.methods.base import Estimate, Steps, Unrecoverable
from keyhole.methods.forms.value import Value
from keyhole.methods.gated_sum import GatedQueries
from keyhole.methods.labels.score import bits_of_ball
from keyhole.methods.labels.search import HeavyPrior, Search
from keyhole.methods.labels.value import SPACINGS, LabelValue, Tokens
from keyhole.methods.multi_head.gated.method import ask_read_heads
from keyhole.queries import Position, Term, TokenRows
from keyhole.recovery import Outcome

STAGE = "heads"
# Numbers are first read to this relative error, or to the target over what a fit makes of errors, if that is less.
FIRST_ERROR, FIT_GROWTH = 2.0**-26, 2.0**6
# The first last token has this part of its norm along v̄, so that all of them have a part to compare F with.
ALONG = 0.75
# Rounds of new rows in place of those that answer with one sign on either side, and how much shorter they are.
ROUNDS, SHORTER = 16, 0.75
# A cell of log2 A in which numbers are known well enough to tell how large they are.
COARSE = 2.0**-16
# Pairs of dense tokens whose labels show the scale of logits, the longer of two over the other, and logits there.
PAIRS, KAPPA = 6, 1.0 + 2.0**-4
# Copies of the other one, and logits there: those of heads that cancel show beside an odd number of long tokens only.
EVEN, ODD = 1, 2
SEEN_LOGIT = {EVEN: math.log(KAPPA) / (1 + KAPPA), ODD: 1.5}
# Logits that are aimed at.
LOGIT = 2.0
# Octaves on either side of the typical scale A within which most lie.
OCTAVES = 1.0
# Finer readings than asked for, as what a fit makes of errors is known to some tens of per cent.
SPARE = 1.5

SILENT = "attention makes no difference to labels at tokens of any norm"


def ask_several(
    tokens: Tokens, value: LabelValue, accuracy: float, rng: np.random.Generator
) -> Steps[Estimate[MultiHead]]:
    """As many heads as it takes, and an output bias minus the threshold."""
    signature, space = tokens.comparer.signature, tokens.space
    norm = yield from _ask_norm(tokens, value, rng)
    if norm is None and (signature.max_length or ODD + 2) >= ODD + 2:
        norm = yield from _ask_norm(tokens, value, rng, ODD)
    if norm is None:
        raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, SILENT)
    error = min(FIRST_ERROR, accuracy / FIT_GROWTH)
    reader = NumberReader(tokens, value, error, rng)
    bias = np.asarray(-value.threshold), np.asarray(value.threshold_radius)
    total = Value(*(space.asarray(each) for each in (value.matrix, value.radius, *bias)))
    return (yield from ask_read_heads(signature, rng, total, reader, norm * _direction(value, rng), accuracy))


def _direction(value: LabelValue, rng: np.random.Generator) -> Floats:  # (width,)
    """A last token g: the part of g·v̄ in the answer has the sign of −b, so that where F meets it nothing cancels."""
    along = value.matrix / np.linalg.norm(value.matrix)
    across = rng.standard_normal(along.size)
    across -= along * (along @ across)
    size = float(np.linalg.norm(across))
    side = 1.0 if value.threshold <= 0 else -1.0
    direction = side * ALONG * along + (across * ((1 - ALONG**2) ** 0.5 / size) if along.size > 1 else 0.0)
    return np.asarray(direction / np.linalg.norm(direction))


def _ask_norm(tokens: Tokens, value: LabelValue, rng: np.random.Generator, copies: int = EVEN) -> Steps[float | None]:
    """The norm of both tokens at which logits are about two, from null queries of dense tokens; None if none show.

    Of long tokens x and −κx the second decides, until a last token is so long that logits show. With κ near 1 logits
    are small then, so that heads add up: for every x they show beside g or beside −g. Heads of opposite logits and one
    value add up to nothing there. Beside two copies of x, which decide at first, all heads attend to x or to −κx once
    logits are large, and of as many of both the second decides.
    """
    draws = rng.standard_normal((2, PAIRS, tokens.width))
    left, right = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in draws)
    both = np.vstack([left, left]), np.vstack([right, -right])
    rows, lasts = (TokenRows(tokens.space.asarray(each)) for each in both)
    yes = left @ value.matrix > 0
    low, high = np.full(PAIRS, -tokens.range), np.full(PAIRS, tokens.range)
    while np.max(high - low) > 1:
        middle = np.round(0.5 * (low + high))
        size = np.tile(np.exp2(middle) / tokens.long_norm, 2)

        def make(some: Integers, factor: float, size: Floats = size) -> list[Position]:
            index, long = tokens.space.indices(some), factor * tokens.long_norm
            scales = np.full(some.size, long), np.full(some.size, -KAPPA * long)
            one, other = ([Term(rows, index, tokens.space.asarray(scale))] for scale in scales)
            return [*[one] * copies, other, [Term(lasts, index, tokens.space.asarray(size[some] / factor))]]

        positive = yield from tokens.comparer.decide("scale", make, 2 * PAIRS)
        shows = np.any(positive.reshape(2, PAIRS) == (yes == (copies == EVEN)), axis=0)
        low, high = np.where(shows, low, middle), np.where(shows, middle, high)
    found = high[high < tokens.range]
    return float((2.0 ** float(np.median(found)) * LOGIT / SEEN_LOGIT[copies]) ** 0.5) if found.size else None


@dataclass(frozen=True, eq=False)
class _Batch:
    """Numbers that are bisected together: they have as many copies of both tokens."""

    rows: Floats  # (n, width)
    lasts: Floats  # (n, width)
    copies: tuple[int, int]
    signs: Floats  # (n,) of F
    search: Search  # for log2 A


class NumberReader:
    """Reads from signs what heads answer to pairs of tokens."""

    def __init__(self, tokens: Tokens, value: LabelValue, error: float, rng: np.random.Generator) -> None:
        self.tokens, self.comparer, self.value, self.rng = tokens, tokens.comparer, value, rng
        self.least = SPACINGS * tokens.space.eps
        self.error = max(error, self.least)
        self.places: dict[bytes, tuple[_Batch, int]] = {}

    @property
    def _cell(self) -> float:
        """Cells of log2 A in which F, which goes with the square of A at most, has that error."""
        return self.error * 3**0.5 / math.log(2)

    def _make(
        self, rows: Floats, lasts: Floats, copies: tuple[int, int], exponents: Floats, factor: float
    ) -> list[Position]:
        """Copies of A·u + g/A and g/A, twice as many where they are to be another query."""
        space = self.tokens.space
        row, last = TokenRows(space.asarray(rows)), TokenRows(space.asarray(lasts))
        base = Term(last, None, space.asarray(np.exp2(-exponents)))
        first: Position = [Term(row, None, space.asarray(np.exp2(exponents))), base]
        most = (self.comparer.signature.max_length or 2 * sum(copies)) // sum(copies)
        times = min(2 if factor != 1 else 1, most)
        second: Position = [base]
        return [first] * (copies[0] * times) + [second] * (copies[1] * times)

    def read(self, stage: str, lasts: Floats, rows: Floats, copies: Integers) -> Steps[GatedQueries]:
        """Raw answers to rows, or to others in their place."""
        rows, signs = np.array(rows), np.sign(lasts @ self.value.matrix)
        yield from self._choose(stage, lasts, rows, copies, signs)
        answers, offsets = np.empty(len(rows)), np.log(copies[:, 0] / copies[:, 1])
        for own in np.unique(copies, axis=0):
            some = np.flatnonzero(np.all(copies == own, axis=1))
            reach = self.tokens.range
            search = self.comparer.search(HeavyPrior(-reach, reach, False, 0.0, OCTAVES), some.size)
            batch = _Batch(rows[some], lasts[some], (int(own[0]), int(own[1])), -signs[some], search)
            yield from self._bisect(stage, batch)
            answers[some] = self._numbers(batch)
            for place, number in enumerate(some):
                self.places[_key(rows[number], lasts[number], offsets[number])] = batch, place
        return GatedQueries(rows, offsets, self._raw(answers, lasts), np.array(lasts))

    def _choose(self, stage: str, lasts: Floats, rows: Floats, copies: Integers, signs: Floats) -> Steps[None]:
        """Rows, in place, for which F and g·v̄ have opposite signs: turned round or drawn again where they have not."""
        left = np.arange(len(rows))
        for turn in range(ROUNDS):
            for own in np.unique(copies[left], axis=0):
                some = left[np.all(copies[left] == own, axis=1)]
                pair = int(own[0]), int(own[1])

                def make(part: Integers, factor: float, some: Integers = some, pair: tuple[int, int] = pair) -> Any:
                    chosen = some[part]
                    return self._make(rows[chosen], lasts[chosen], pair, np.full(part.size, self.tokens.range), factor)

                positive = yield from self.comparer.decide(stage, make, some.size)
                wrong = some[np.where(positive, 1.0, -1.0) == signs[some]]
                left = np.setdiff1d(left, np.setdiff1d(some, wrong))
            if not left.size:
                return
            if turn % 2:  # neither the row nor its opposite: of short ones F is about u·v̄/2, which changes its sign
                sizes = SHORTER * np.linalg.norm(rows[left], axis=1, keepdims=True)
                drawn = self.rng.standard_normal((left.size, rows.shape[1]))
                rows[left] = drawn * (sizes / np.linalg.norm(drawn, axis=1, keepdims=True))
            else:
                rows[left] *= -1
        raise Unrecoverable(
            Outcome.WRONG_FAMILY,
            f"{left.size} rows are answered by one label whichever way they are turned, as by no sum of softmax heads",
        )

    def _bisect(self, stage: str, batch: _Batch) -> Steps[None]:
        """The scale A at which the label changes, to a cell: beyond it that of F is told."""

        def make(some: Integers, at: Floats, factor: float) -> tuple[list[Position], Floats]:
            return self._make(batch.rows[some], batch.lasts[some], batch.copies, at, factor), -batch.signs[some]

        cell = self._cell
        coarse = cell * 2.0 ** max(0, math.floor(math.log2(COARSE / cell)))  # cells within cells
        yield from self.comparer.bisect(stage, batch.search, make, coarse)
        # What heads add may cancel in F, and then arithmetic tells no more of it than of the largest of them.
        numbers = np.abs(self._numbers(batch))
        least = self.least * np.max(numbers) / np.maximum(numbers, np.finfo(np.float64).tiny)
        wider = 2.0 ** np.ceil(np.log2(np.maximum(least / self.error, 1.0)))
        yield from self.comparer.bisect(stage, batch.search, make, np.minimum(cell * wider, coarse))

    def _numbers(self, batch: _Batch) -> Floats:
        """F for each of them."""
        scale = np.exp2(batch.search.centres)
        return np.asarray((self.value.threshold * scale - batch.lasts @ self.value.matrix) / scale**2)

    def _raw(self, numbers: Floats, lasts: Floats) -> Floats:  # -> (n, 1)
        return np.asarray((numbers + lasts @ self.value.matrix - self.value.threshold)[:, None])

    def read_finer(self, queries: Sequence[GatedQueries], factor: float) -> Steps[Sequence[GatedQueries] | None]:
        """The same answers, bisected on."""
        if self.error <= self.least:
            return None
        self.error = max(self.error * 2.0 ** -math.ceil(math.log2(SPARE * factor)), self.least)
        found = [self._places(each) for each in queries]
        numbers: dict[_Batch, Floats] = {}
        for batch, _ in (place for places in found for place in places):
            if batch not in numbers:
                yield from self._bisect(STAGE, batch)
                numbers[batch] = self._numbers(batch)
        finer = []
        for each, places in zip(queries, found, strict=True):
            assert each.bases is not None
            own = np.array([numbers[batch][place] for batch, place in places])
            finer.append(replace(each, answers=self._raw(own, each.bases)))
        return finer

    def _places(self, queries: GatedQueries) -> list[tuple[_Batch, int]]:
        """Where the numbers of queries are."""
        assert queries.bases is not None
        return [self.places[_key(*each)] for each in zip(queries.rows, queries.bases, queries.offsets, strict=True)]


def _key(row: Floats, last: Floats, offset: float) -> bytes:
    return row.tobytes() + last.tobytes() + np.float64(offset).tobytes()


def entropy_of_heads(found: Estimate[MultiHead], accuracy: float) -> tuple[float, float]:
    """Bits of scores and values to the accuracy over their root mean square, or that reached; the latter, of scores."""
    bits, worst = 0.0, 0.0
    for own, wide in zip(found.params.heads, found.radius.heads, strict=True):
        for array, radius in ((own.score, wide.score), (own.value, wide.value)):
            rms = float(np.sqrt(np.mean(floats(array) ** 2)))
            error = float(np.max(floats(radius))) / rms if rms else 0.0
            worst = max(worst, error) if array is own.score else worst
            bits += bits_of_ball(floats(array).size, rms, 2 * max(accuracy, error) * rms)
    return bits, worst
