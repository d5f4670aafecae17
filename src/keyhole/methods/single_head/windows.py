"""All d² forms of a head with several outputs from d²/ρ queries."""

from __future__ import annotations

from typing import final

import numpy as np

from keyhole.arrays import Array, Integers
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.columns import Score, score_of_columns
from keyhole.methods.forms.reader import ScoreBias
from keyhole.methods.forms.scale import FIRST_PROBE, ScaleSearch
from keyhole.methods.forms.value import Value
from keyhole.methods.single_head.window_reader import LARGEST, Weights, WindowReader
from keyhole.methods.single_head.windows_with_bias import WindowsBesideBias, ask_window_bias
from keyhole.numerics.orthogonal import random_orthogonal
from keyhole.queries import Signature, TokenRows

# Within the logits that one probe can show.
STEP = 2.0**38


def ask_windows(signature: Signature, value: Value, rng: np.random.Generator) -> Steps[tuple[ScoreBias | None, Score]]:
    """Score bias and score matrix of a head with several outputs, ρ forms per query."""
    reader = WindowReader(signature, value, rng)
    right = random_orthogonal(signature.space, rng, signature.width)
    try:
        responds, probe = yield from _ask_probe(reader, TokenRows(right))
        if not responds:
            zero = signature.space.zeros(signature.width, signature.width)
            return None, Score(zero, zero + 1 / reader.largest_scale, 0)
        reading = _Windows(reader, right)
        agrees = yield from reading.ask_first(probe)
    except Unrecoverable:  # a score bias may saturate every probe
        agrees = False
    if agrees:
        return None, (yield from reading.ask_rest())
    bias = yield from ask_window_bias(reader)
    reader.expect_bias(bias, rng)
    return bias, (yield from WindowsBesideBias(reader, rng).run())


def _ask_probe(reader: WindowReader, directions: TokenRows) -> Steps[tuple[bool, tuple[Array, Array]]]:
    """Search for the scale with the first window and direction; False when nothing responds at any scale."""
    space, xp = reader.space, reader.space.xp
    zero = np.zeros(1, dtype=np.int64)
    search = ScaleSearch(FIRST_PROBE, smallest=space.tiny**0.5)
    for scale in search:
        first = reader.first_norms(scale)
        last = space.full((1,), scale / float(xp.max(first)))
        weights = yield from reader.ask("scale", zero, directions, zero, first, last)
        forms, radius = _solve_bilinear(reader, weights, first, last)
        logit = float(xp.max(xp.abs(forms * scale)))
        if not logit <= LARGEST:  # also when saturated
            search.lower_scale(STEP)
        elif logit > 4 * float(xp.max(radius)) * scale:
            reader.estimate.update(forms, scale)
            return True, (forms, radius)
        elif scale >= reader.largest_scale:
            return False, (forms, radius)
        else:
            search.raise_scale(STEP, reader.largest_scale)
    raise AssertionError  # the search ends by itself


def _solve_bilinear(reader: WindowReader, weights: Weights, first: Array, last: Array) -> tuple[Array, Array]:
    """Forms q·W·p and radii, both (n, used), where the last token is so short that nothing else matters."""
    xp, width = reader.space.xp, reader.signature.width
    logits, _, radius = weights.logits(0 * last, reader.zeros - 1)
    unit = float(xp.max(first)) * last[:, None]
    own = reader.space.rounding * reader.estimate.size * width**0.5
    return logits / unit, (radius + reader.space.rounding * xp.abs(logits)) / unit + own


@final
class _Windows:
    """d²/ρ queries for d² forms: where a window straddles two columns, the last token is the sum of two directions."""

    def __init__(self, reader: WindowReader, right: Array) -> None:
        xp, width, used = reader.space.xp, reader.signature.width, reader.used
        self.reader, self.right, self.width, self.used = reader, right, width, used
        sums = (right[:-1, :] + right[1:, :]) / 2**0.5 if width > 1 else right[:0, :]
        self.directions = TokenRows(xp.concat([right, sums]))
        count = -(-width * width // used)
        start = np.arange(count, dtype=np.int64) * used
        start[-1] = width * width - used  # the last window ends with the last column
        self.column, self.offset = np.divmod(start, width)
        self.straddles = self.offset + used > width
        self.index = np.where(self.straddles, width + self.column, self.column)
        self.forms = reader.space.zeros(count, used)
        self.radius = reader.space.zeros(count, used)

    def ask_first(self, probe: tuple[Array, Array]) -> Steps[bool]:
        """Read the first query, which is that of the probe at another scale; False when the two disagree."""
        xp = self.reader.space.xp
        try:
            yield from self.reader.ask_unsaturated(np.arange(1), self._ask_at, self.forms, self.radius)
        except Unrecoverable:  # tokens as long as these stay saturated beside a score bias
            return False
        apart = xp.abs(self.forms[0, :] - probe[0][0, :])
        return bool(xp.all(apart <= self.radius[0, :] + probe[1][0, :]))

    def ask_rest(self) -> Steps[Score]:
        """Read all others and solve."""
        done, count = 1, self.column.size
        while done < count:
            stop = min(2 * done, count)
            yield from self.reader.ask_unsaturated(np.arange(done, stop), self._ask_at, self.forms, self.radius)
            done = stop
        return self._solve()

    def _ask_at(self, queries: Integers, scale: float) -> Steps[tuple[Array, Array, Array]]:
        """Which queries were read well at this scale (n,), their forms and radii (n, used)."""
        reader, xp = self.reader, self.reader.space.xp
        first = reader.first_norms(scale)
        last = reader.space.full((queries.size,), scale / float(xp.max(first)))
        offsets = self.offset[queries]
        weights = yield from reader.ask("forms", offsets, self.directions, self.index[queries], first, last)
        forms, radius = _solve_bilinear(reader, weights, first, last)
        return xp.all(xp.abs(forms * scale) <= LARGEST, axis=1), forms, radius  # false for nan too

    def _solve(self) -> Score:
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
        return score_of_columns(space, self.reader.inverse, values.T, radius.T, self.right)
