"""Several logits per query, for heads with several outputs: [A·q_1; …; A·q_ρ; zeros; last token].

An answer of ρ independent numbers tells the softmax weights of ρ tokens apart, and the ratio of each to the weight of a
zero token, whose logit and value are nothing, is the exponential of its logit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from keyhole.arrays import Array, namespace
from keyhole.measure import Measurements, Plan, Rows, Signature, Term
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.directions import Score
from keyhole.methods.reading import (
    FIRST_PROBE,
    LEVER,
    MOST_PROBES,
    NO_BIAS,
    ScaleKeeper,
    ScoreBias,
    Value,
    floor_power,
    within_reach,
)
from keyhole.numerics.logit import rounding
from keyhole.numerics.outputs import Outputs, choose_outputs, window_rows
from keyhole.numerics.rotation import random_orthogonal, split_along
from keyhole.recovery import Outcome

Integers = npt.NDArray[np.int64]

# A logit beyond this is read again with a shorter last token.
LARGEST = 8.0
SHRINK = 2.0**-3
# A scale beyond this many times the square of the first tokens' norm lets last tokens mix in more ways than one.
STRONGEST_COUPLING = 2.0
# Steps of Newton's method for the last tokens' own forms; they converge in a handful or not at all.
NEWTON_STEPS = 50


@dataclass(frozen=True)
class Weights:
    """What a batch of answers says of its softmax weights, given the last tokens' own logits."""

    first: Array  # (n, used) weights of the long tokens where the last token has none
    share: Array  # (n, used) how much of that a unit of the last token's weight takes
    bar: Array  # (n, used) error bars of `first`
    sum_bar: Array  # (n,) error bar of its sum

    def logits(self, own: Array, zeros: int) -> tuple[Array, Array, Array]:
        """Logits (n, used), their derivatives by the last token's own logit, and radii; nan where saturated."""
        xp = namespace(self.first)
        last = xp.exp(own)[:, None]
        free = 1 - xp.sum(self.share, axis=1, keepdims=True)
        total = zeros + last * free
        zero = (1 - xp.sum(self.first, axis=1, keepdims=True)) / total
        weights = self.first - self.share * last * zero
        good = (weights > 0) & (zero > 0)
        one = xp.ones_like(weights)
        safe, safe_zero = xp.where(good, weights, one), xp.where(good, zero + 0 * weights, one)
        slope = -last * free / total
        logits = xp.where(good, xp.log(safe / safe_zero), xp.nan * one)
        slopes = -self.share * last * zero * (1 + slope) / safe - slope
        radius = self.bar / safe + self.sum_bar[:, None] / (safe_zero * total)
        return logits, slopes, radius


class BundleReader(ScaleKeeper):
    """Reads the forms of `used` neighbouring rows with a last token, one query each."""

    def __init__(self, signature: Signature, value: Value, rng: np.random.Generator) -> None:
        super().__init__(signature)
        space, xp = signature.space, signature.space.xp
        self.space = space
        self.value = value
        self.outputs: Outputs = choose_outputs(space, value.vector)
        self.used = self.outputs.used
        self.rows = Rows(window_rows(space, rng, self.outputs.basis))
        self.inverse = self.rows.vectors.T
        # About √ρ zero tokens keep the error of their weight below that of the others.
        self.zeros = max(1, round(math.sqrt(self.used)))
        self.bias: ScoreBias | None = None
        self.bias_norm = 0.0
        norm = float(xp.linalg.vector_norm(value.vector))
        self.longest = min(space.huge**0.45, 2.0**-24 * space.huge / max(1.0, norm))
        self.largest_scale = floor_power(self.longest / LEVER) ** 2

    def learn_bias(self, bias: ScoreBias, rng: np.random.Generator) -> None:
        """From now on expect this score bias."""
        self.bias = bias
        self.bias_norm = float(self.space.xp.linalg.vector_norm(bias.vector))
        self.forget()
        if self.used == self.signature.width > 1:
            # With one window for all rows they are free: all but one orthogonal to the bias may be long.
            across, along = split_along(self.space, random_orthogonal(self.space, rng, self.used), bias.vector)
            self.rows = Rows(self.space.xp.concat([across, along[None, :]]))
            self.inverse = self.rows.vectors.T

    def first_norms(self, scale: float) -> Array:  # (width,)
        """How long the token of each row is."""
        width = self.signature.width
        if self.bias is None:
            return self.space.full((width,), LEVER * floor_power(math.sqrt(scale)))
        root = math.sqrt(width)
        if self.used < width:  # windows share a norm, or they would be badly conditioned
            return self.space.full((width,), min(0.5 * root / self.bias_norm, self.longest))
        longest = min(max(2 * math.sqrt(scale * root), 0.5 * root / self.bias_norm), 16.0 * root / self.bias_norm)
        return within_reach(longest, self.rows.vectors @ self.bias.vector)

    @property
    def scale(self) -> float:
        """The product of norms that brings logits to their aim."""
        aim = self.aim
        if self.bias is not None:
            # The last token's own form grows with its norm squared, and may exceed the others √d times.
            longest = float(self.space.xp.max(self.first_norms(self.largest_scale)))
            aim = min(aim, longest * math.sqrt(aim / math.sqrt(self.signature.width)))
        return self.other_scale(min(floor_power(aim), self.largest_scale))

    def ask(
        self,
        stage: str,
        offsets: Integers,  # (n,) the first row of each query's window
        directions: Rows,
        index: Integers,  # (n,) which direction the last token takes
        first: Array,  # (width,) norms of the long tokens by row
        last: Array,  # (n,) norms of the last tokens
    ) -> Steps[Weights]:
        """Ask one query for each window and last token."""
        space, xp = self.space, self.space.xp
        width, picked = self.signature.width, space.indices(index)
        rows = (offsets[:, None] + np.arange(self.used)) % width
        positions: list[list[Term]] = []
        for place in range(self.used):
            number = space.indices(rows[:, place])
            positions.append([Term(self.rows, number, xp.take(first, number, axis=0))])
        positions += [[]] * (self.zeros - 1)
        positions.append([Term(directions, picked, last)])
        answers: Measurements = yield Plan(stage, offsets.size, positions)

        windows, which = np.unique(offsets, return_inverse=True)
        tokens = self.rows.vectors * first[:, None]
        spread = space.indices((windows[:, None] + np.arange(self.used)) % width)
        long = xp.reshape(xp.take(tokens, xp.reshape(spread, (-1,)), axis=0), (windows.size, self.used, width))
        inverse = xp.linalg.inv(long @ self.outputs.basis)  # (windows, used, used)
        mine = xp.take(inverse, space.indices(which), axis=0)
        mixture = self.outputs.mixture(answers.values - self.value.bias)
        ends = (last[:, None] * xp.take(directions.vectors, picked, axis=0)) @ self.outputs.basis
        bars, sum_bars = self._bars(inverse, float(xp.max(first)), float(xp.max(last)), answers.radius)
        return Weights(
            (mixture[:, None, :] @ mine)[:, 0, :],
            (ends[:, None, :] @ mine)[:, 0, :],
            xp.take(bars, space.indices(which), axis=0),
            xp.take(sum_bars, space.indices(which), axis=0),
        )

    def _bars(self, inverse: Array, first: float, last: float, noise: float) -> tuple[Array, Array]:
        """Error bars of weights by window (windows, used), and of their sums (windows,)."""
        xp, space = self.space.xp, self.space
        error = rounding(space) * (first + last) * self.outputs.error + noise
        error = error + 2 * space.eps * xp.abs(self.value.bias) + self.value.bias_radius
        weigh = (self.outputs.turn / self.outputs.sizes)[None, :, :] @ inverse  # (windows, outputs, used)
        square = (error**2)[None, :, None]
        return xp.sqrt(xp.sum(square * weigh**2, axis=1)), xp.sqrt(
            xp.sum(square[..., 0] * xp.sum(weigh, axis=2) ** 2, axis=1)
        )


def read_bundled(
    signature: Signature, value: Value, rng: np.random.Generator
) -> Steps[tuple[ScoreBias | None, Score | None]]:
    """Score bias and score matrix of a head with several outputs, ρ forms per query.

    No score where a bias is so strong that answers of less than full rank do not tell what the last token adds.
    """
    reader = BundleReader(signature, value, rng)
    right = random_orthogonal(signature.space, rng, signature.width)
    responds, shown = yield from _probe(reader, Rows(right))
    if not responds:
        return None, _zero(signature, reader)
    reading = _PackedReading(reader, right)
    agrees = yield from reading.start(shown)
    if agrees:
        return None, (yield from reading.finish())
    bias = yield from _read_bias(reader)
    reader.learn_bias(bias, rng)
    score = yield from _BesideBias(reader, rng).run()
    return bias, score


def _zero(signature: Signature, reader: BundleReader) -> Score:
    zero = signature.space.zeros(signature.width, signature.width)
    return Score(zero, zero + 1 / reader.largest_scale, 0)


def _probe(reader: BundleReader, directions: Rows) -> Steps[tuple[bool, tuple[Array, Array]]]:
    """Find the scale from the first window and direction; False when nothing responds at any scale."""
    space, xp = reader.space, reader.space.xp
    scale, silent, saturated = FIRST_PROBE, 0.0, math.inf
    zero = np.zeros(1, dtype=np.int64)
    for _ in range(MOST_PROBES):
        first = reader.first_norms(scale)
        last = space.full((1,), scale / float(xp.max(first)))
        weights = yield from reader.ask("scale", zero, directions, zero, first, last)
        forms, radius = _bilinear(reader, weights, first, last)
        logits = forms * scale
        size, bar = float(xp.max(xp.abs(logits))), float(xp.max(radius)) * scale
        if not size <= LARGEST:  # also when saturated
            saturated = scale
            scale = scale * 2.0**-38 if silent == 0.0 else math.sqrt(silent * saturated)
        elif size > 4 * bar:
            reader.learn(forms, scale)
            return True, (forms, radius)
        elif scale >= reader.largest_scale:
            return False, (forms, radius)
        else:
            silent = scale
            scale = (
                min(scale * 2.0**38, reader.largest_scale) if math.isinf(saturated) else math.sqrt(silent * saturated)
            )
    raise Unrecoverable(Outcome.WRONG_FAMILY, "the answers respond at no scale of the tokens as a softmax head's do")


def _bilinear(reader: BundleReader, weights: Weights, first: Array, last: Array) -> tuple[Array, Array]:  # (n, used)
    """Forms q·W·p and radii where the last token is so short that nothing else matters."""
    xp, width = reader.space.xp, reader.signature.width
    logits, _, radius = weights.logits(0 * last, reader.zeros - 1)
    unit = float(xp.max(first)) * last[:, None]
    own = rounding(reader.space) * reader.size * width**0.5
    return logits / unit, (radius + rounding(reader.space) * xp.abs(logits)) / unit + own


class _PackedReading:
    """d²/ρ queries for d² forms: where a window straddles two columns, the last token is the sum of two directions."""

    def __init__(self, reader: BundleReader, right: Array) -> None:
        xp, width, used = reader.space.xp, reader.signature.width, reader.used
        self.reader, self.right, self.width, self.used = reader, right, width, used
        sums = (right[:-1, :] + right[1:, :]) / 2**0.5 if width > 1 else right[:0, :]
        self.directions = Rows(xp.concat([right, sums]))
        count = -(-width * width // used)
        start = np.arange(count, dtype=np.int64) * used
        start[-1] = width * width - used  # the last window ends with the last column
        self.column, self.offset = np.divmod(start, width)
        self.straddles = self.offset + used > width
        self.index = np.where(self.straddles, width + self.column, self.column)
        self.forms = reader.space.zeros(count, used)
        self.radius = reader.space.zeros(count, used)

    def start(self, shown: tuple[Array, Array]) -> Steps[bool]:
        """Read the first query, which is that of the probe at another scale; False when the two disagree."""
        xp = self.reader.space.xp
        yield from self._read(np.zeros(1, dtype=np.int64))
        apart = xp.abs(self.forms[0, :] - shown[0][0, :])
        return bool(xp.all(apart <= self.radius[0, :] + shown[1][0, :]))

    def finish(self) -> Steps[Score]:
        """Read all others and solve."""
        done, count = 1, self.column.size
        while done < count:
            stop = min(2 * done, count)
            yield from self._read(np.arange(done, stop, dtype=np.int64))
            done = stop
        return self._solved()

    def _read(self, queries: Integers) -> Steps[None]:
        """Read some queries, again with shorter last tokens where they saturate."""
        reader, space, xp = self.reader, self.reader.space, self.reader.space.xp
        scale, open_ = reader.scale, queries
        while open_.size:
            if scale < space.tiny**0.5:
                raise Unrecoverable(Outcome.SATURATED, f"{open_.size} queries stayed saturated at every token norm")
            first = reader.first_norms(scale)
            last = space.full((open_.size,), scale / float(xp.max(first)))
            offsets = self.offset[open_]
            weights = yield from reader.ask("forms", offsets, self.directions, self.index[open_], first, last)
            forms, radius = _bilinear(reader, weights, first, last)
            good = xp.all(xp.abs(forms * scale) <= LARGEST, axis=1)  # false for nan too
            (kept,) = xp.nonzero(good)
            (lost,) = xp.nonzero(~good)
            self.forms[space.indices(open_)[kept], :] = forms[kept, :]
            self.radius[space.indices(open_)[kept], :] = radius[kept, :]
            reader.learn(xp.reshape(forms[kept, :], (-1,)), scale)
            open_ = open_[np.asarray([int(number) for number in lost], dtype=np.int64)]
            scale = scale * SHRINK

    def _solved(self) -> Score:
        """Undo the sums: tails of a column need the next column, heads the one before, and both end in pure ones."""
        space, xp, width, used = self.reader.space, self.reader.space.xp, self.width, self.used
        values, radius = space.zeros(width, width), space.zeros(width, width)  # (columns, rows)
        partner = np.zeros((width, width), dtype=np.int64)  # the column each form was read together with, if any
        for query, (column, offset) in enumerate(zip(self.column, self.offset, strict=True)):
            own = min(used, width - int(offset))
            parts = [(int(column), slice(int(offset), int(offset) + own), slice(0, own), 1)]
            if own < used:
                parts.append((int(column) + 1, slice(0, used - own), slice(own, used), -1))
            for number, rows, places, other in parts:
                values[number, rows] = self.forms[query, places]
                radius[number, rows] = self.radius[query, places]
                partner[number, rows] = other if self.straddles[query] else 0
        root = 2**0.5
        for sweep, towards in ((range(width - 2, -1, -1), 1), (range(1, width), -1)):
            for number in sweep:
                joined = space.asarray((partner[number] == towards).astype(np.float64))
                other = number + towards
                values[number, :] = values[number, :] * (1 + joined * (root - 1)) - joined * values[other, :]
                square = radius[number, :] ** 2 * (1 + joined) + joined * radius[other, :] ** 2
                radius[number, :] = xp.sqrt(square)
        return assemble(self.reader, values.T, radius.T, self.right)


def assemble(reader: BundleReader, columns: Array, radius: Array, right: Array) -> Score:
    """Score from columns (rows, directions) in row-coordinates; independent errors add in quadrature."""
    xp, space = reader.space.xp, reader.space
    matrix = reader.inverse @ (columns @ right)
    spread = xp.sqrt(reader.inverse**2 @ (radius**2 @ right**2))
    rows, sides = xp.linalg.vector_norm(matrix, axis=1), xp.linalg.vector_norm(matrix, axis=0)
    average = float(xp.linalg.vector_norm(rows)) / matrix.shape[0] ** 0.5
    spread = spread + rounding(space) * (rows[:, None] + sides[None, :] + average)
    sizes = xp.linalg.svdvals(matrix)
    rank = int(xp.sum(xp.astype(sizes > float(xp.linalg.vector_norm(spread)), xp.int64)))
    return Score(matrix, spread, rank)


def _windows(reader: BundleReader) -> Integers:
    """Offsets of windows that cover all rows; the last may overlap the one before."""
    width, used = reader.signature.width, reader.used
    offsets = np.arange(-(-width // used), dtype=np.int64) * used
    offsets[-1] = width - used
    return offsets


def _read_bias(reader: BundleReader) -> Steps[ScoreBias]:
    """The score bias from queries whose last token is zero, so that the score matrix is silent."""
    space, xp, width = reader.space, reader.space.xp, reader.signature.width
    offsets = _windows(reader)
    vector, bars = space.zeros(width), space.zeros(width)
    norm = yield from _bias_norm(reader)
    open_ = offsets
    while open_.size and norm > space.tiny**0.5:
        logits, radius = yield from _ask_bias(reader, open_, norm)
        lost = []
        for number, offset in enumerate(int(each) for each in open_):
            if not float(xp.max(xp.abs(logits[number, :]))) <= LARGEST:
                lost.append(offset)
                continue
            vector[offset : offset + reader.used] = logits[number, :] / norm
            bars[offset : offset + reader.used] = radius[number, :] / norm
        open_, norm = np.asarray(lost, dtype=np.int64), norm * SHRINK
    found = reader.inverse @ vector
    if open_.size or bool(xp.all(found == 0)):
        raise Unrecoverable(Outcome.WRONG_FAMILY, NO_BIAS)
    spread = xp.sqrt(reader.inverse**2 @ bars**2) + rounding(space) * xp.linalg.vector_norm(found)
    return ScoreBias(found, spread)


def _ask_bias(reader: BundleReader, offsets: Integers, norm: float) -> Steps[tuple[Array, Array]]:
    space, width = reader.space, reader.signature.width
    nothing, ends = Rows(space.zeros(1, width)), space.zeros(offsets.size)
    weights = yield from reader.ask("score bias", offsets, nothing, 0 * offsets, space.full((width,), norm), ends)
    logits, _, radius = weights.logits(ends, reader.zeros - 1)
    return logits, radius + rounding(space) * space.xp.abs(logits)


def _bias_norm(reader: BundleReader) -> Steps[float]:
    """The norm that brings logits of the score bias to order one, from the first window."""
    xp, zero = reader.space.xp, np.zeros(1, dtype=np.int64)
    norm, silent, saturated = 2.0**-10, 0.0, math.inf
    for _ in range(MOST_PROBES):
        logits, radius = yield from _ask_bias(reader, zero, norm)
        size = float(xp.max(xp.abs(logits)))
        if not size <= LARGEST:
            saturated = norm
            norm = norm * 2.0**-30 if silent == 0.0 else math.sqrt(silent * saturated)
        elif size > 4 * float(xp.max(radius)):
            return floor_power(norm / size)
        else:
            silent = norm
            norm = norm * 2.0**30 if math.isinf(saturated) else math.sqrt(silent * saturated)
    raise Unrecoverable(Outcome.WRONG_FAMILY, NO_BIAS)


class _BesideBias:
    """The score matrix beside a score bias: ⌈d/ρ⌉ queries a direction.

    The last token is no longer too short to matter: its own logit γ²·s + γ·p·c, with s = pᵀ·W·p, is solved for, one
    unknown for each direction.
    """

    def __init__(self, reader: BundleReader, rng: np.random.Generator) -> None:
        assert reader.bias is not None
        space, xp, width = reader.space, reader.space.xp, reader.signature.width
        self.reader, self.space, self.width, self.bias = reader, space, width, reader.bias
        self.right = random_orthogonal(space, rng, width)
        if width > 1:
            across, along = split_along(space, self.right, reader.bias.vector)
            self.right = xp.concat([across, -along[None, :]])
        self.offsets = _windows(reader)
        rows = ((self.offsets[:, None] + np.arange(reader.used)) % width).reshape(-1)
        # Where in the readings of all windows each row stands.
        self.place = space.indices([int(np.nonzero(rows == row)[0][-1]) for row in range(width)])
        self.rows_bias = reader.rows.vectors @ reader.bias.vector
        self.forms, self.radius = space.zeros(width, width), space.zeros(width, width)  # (directions, rows)

    def run(self) -> Steps[Score | None]:
        """Find the scale, read all directions, assemble."""
        yield from self._find_scale()
        longest = float(self.space.xp.max(self.reader.first_norms(self.reader.scale)))
        if self.reader.used < self.width and self.reader.scale > STRONGEST_COUPLING * longest**2:
            return None
        done = 0
        while done < self.width:
            stop = min(max(1, 2 * done), self.width)
            yield from self._read(np.arange(done, stop, dtype=np.int64))
            done = stop
        return assemble(self.reader, self.forms.T, self.radius.T, self.right)

    def _find_scale(self) -> Steps[None]:
        xp, scale = self.space.xp, FIRST_PROBE
        for _ in range(MOST_PROBES):
            good, forms, radius = yield from self._try("scale", np.zeros(1, dtype=np.int64), scale)
            size, bar = float(xp.max(xp.abs(forms))), float(xp.max(radius))
            if not bool(good[0]):
                scale = scale * 2.0**-10
            elif size > 4 * bar or bar * scale > 0.1:
                self.reader.learn(xp.reshape(forms, (-1,)), scale)
                return
            else:
                scale = scale * min(2.0**20, 0.5 / (bar * scale))
        raise Unrecoverable(
            Outcome.WRONG_FAMILY, "the answers respond at no scale of the tokens as a softmax head's do"
        )

    def _read(self, directions: Integers) -> Steps[None]:
        xp, scale, open_ = self.space.xp, self.reader.scale, directions
        while open_.size:
            if scale < self.space.tiny**0.5:
                raise Unrecoverable(Outcome.SATURATED, f"{open_.size} queries stayed saturated at every token norm")
            good, forms, radius = yield from self._try("forms", open_, scale)
            (kept,), (lost,) = xp.nonzero(good), xp.nonzero(~good)
            self.forms[self.space.indices(open_)[kept], :] = forms[kept, :]
            self.radius[self.space.indices(open_)[kept], :] = radius[kept, :]
            self.reader.learn(xp.reshape(forms[kept, :], (-1,)), scale)
            open_ = open_[np.asarray([int(number) for number in lost], dtype=np.int64)]
            scale = scale * SHRINK

    def _try(self, stage: str, directions: Integers, scale: float) -> Steps[tuple[Array, Array, Array]]:
        """Which directions were read well at this scale (n,), their forms and radii (n, rows)."""
        xp, reader = self.space.xp, self.reader
        first = reader.first_norms(scale)
        right = xp.take(self.right, self.space.indices(directions), axis=0)
        attraction = right @ self.bias.vector
        wanted = scale / float(xp.max(first))
        last = within_reach(wanted, attraction)
        windows = self.offsets.size
        weights = yield from reader.ask(
            stage,
            np.tile(self.offsets, directions.size),
            Rows(self.right),
            np.repeat(directions, windows),
            first,
            xp.repeat(last, windows),
        )
        return self._solve(weights, first, last, right)

    def _solve(self, weights: Weights, first: Array, last: Array, right: Array) -> tuple[Array, Array, Array]:
        """Newton's method for the directions' own forms s, all at once."""
        xp, count = self.space.xp, right.shape[0]
        meeting = (self.reader.inverse.T @ right.T).T  # (n, rows): p in row-coordinates
        attraction = last * (right @ self.bias.vector)
        own = self.space.zeros(count)
        settled = own
        for _ in range(NEWTON_STEPS):
            logits, slopes, radius = (self._by_row(a, count) for a in self._logits(weights, last**2 * own + attraction))
            forms = (logits / first - self.rows_bias) / last[:, None]
            miss = xp.sum(meeting * forms, axis=1) - own
            slope = last * xp.sum(meeting * slopes / first, axis=1)
            settled = xp.abs(last**2 * miss)
            step = miss / xp.maximum(1 - slope, self.space.full((count,), 0.1))
            own = own + xp.where(xp.isfinite(step), step, xp.zeros_like(step))
            if not bool(xp.any(settled > 4 * self.space.eps)):
                break
        bias_bar = rounding(self.space) * self.reader.bias_norm + xp.linalg.vector_norm(self.bias.radius)
        bars = (radius + rounding(self.space) * xp.abs(logits) + settled[:, None]) / first + bias_bar
        good = xp.all(xp.abs(logits) <= LARGEST, axis=1) & (settled < self.space.eps**0.5)
        return good, forms, bars / last[:, None]

    def _logits(self, weights: Weights, own: Array) -> tuple[Array, Array, Array]:
        return weights.logits(self.space.xp.repeat(own, self.offsets.size), self.reader.zeros - 1)

    def _by_row(self, array: Array, count: int) -> Array:  # (n·windows, used) -> (n, rows)
        xp = self.space.xp
        return xp.take(xp.reshape(array, (count, -1)), self.place, axis=1)
