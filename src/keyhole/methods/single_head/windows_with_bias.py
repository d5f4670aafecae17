"""A score bias, and the score matrix beside it, from several logits per query."""

from __future__ import annotations

from functools import partial
from typing import final

import numpy as np

from keyhole.arrays import Array, Integers
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.columns import Score, repel, score_of_columns
from keyhole.methods.forms.reader import ScoreBias, norms_beside_bias
from keyhole.methods.forms.scale import AIM, FIRST_PROBE, ScaleSearch, floor_power
from keyhole.methods.forms.score_bias import NO_BIAS
from keyhole.methods.single_head.window_reader import LARGEST, SHRINK, Weights, WindowReader, windows
from keyhole.numerics.orthogonal import random_orthogonal, split_along
from keyhole.queries import TokenRows
from keyhole.recovery import Outcome

# Norms at which a score bias is looked for.
SHORTEST, LONGEST, STEP = 2.0**-100, 2.0**100, 2.0**30
# Steps of Newton's method for the last tokens' own forms; they converge in a handful or not at all.
NEWTON_STEPS = 50


def ask_window_bias(reader: WindowReader) -> Steps[ScoreBias]:
    """The score bias from queries whose last token is zero, so that the score matrix does not enter."""
    space, xp, width = reader.space, reader.space.xp, reader.signature.width
    offsets = windows(reader)
    vector, radii = space.zeros(width), space.zeros(width)
    norm = yield from _ask_bias_norm(reader)
    open_ = offsets
    while open_.size and norm > SHORTEST:
        logits, radius = yield from _ask_bias(reader, open_, norm)
        lost = []
        for number, offset in enumerate(int(each) for each in open_):
            if not float(xp.max(xp.abs(logits[number, :]))) <= LARGEST:
                lost.append(offset)
                continue
            vector[offset : offset + reader.used] = logits[number, :] / norm
            radii[offset : offset + reader.used] = radius[number, :] / norm
        open_, norm = np.asarray(lost, dtype=np.int64), norm * SHRINK
    bias = reader.inverse @ vector
    if open_.size or float(xp.linalg.vector_norm(bias)) == 0.0:
        raise Unrecoverable(Outcome.WRONG_FAMILY, NO_BIAS)
    spread = xp.sqrt(reader.inverse**2 @ radii**2) + space.rounding * xp.linalg.vector_norm(bias)
    return ScoreBias(bias, spread)


def _ask_bias(reader: WindowReader, offsets: Integers, norm: float) -> Steps[tuple[Array, Array]]:
    space, width = reader.space, reader.signature.width
    nothing, ends = TokenRows(space.zeros(1, width)), space.zeros(offsets.size)
    weights = yield from reader.ask("score bias", offsets, nothing, 0 * offsets, space.full((width,), norm), ends)
    logits, _, radius = weights.logits(ends, reader.zeros - 1)
    return logits, radius + space.rounding * space.xp.abs(logits)


def _ask_bias_norm(reader: WindowReader) -> Steps[float]:
    """The norm that brings logits of the score bias to order one, from the first window."""
    xp, zero = reader.space.xp, np.zeros(1, dtype=np.int64)
    # A bias that takes tokens of any other size to show is none.
    search = ScaleSearch(2.0**-10, smallest=2 * SHORTEST, largest=LONGEST, failure=NO_BIAS)
    for norm in search:
        logits, radius = yield from _ask_bias(reader, zero, norm)
        logit = float(xp.max(xp.abs(logits)))
        if not logit <= LARGEST:
            search.lower_scale(STEP)
        elif logit > 4 * float(xp.max(radius)):
            return floor_power(norm / logit)
        else:
            search.raise_scale(STEP)
    raise AssertionError  # the search ends by itself


@final
class WindowsBesideBias:
    """The score matrix beside a score bias that the reader knows: ⌈d/ρ⌉ queries a direction.

    The last token is no longer too short to matter: its own logit γ²·s + γ·p·c, with s = pᵀ·W·p, is solved for, one
    unknown for each direction.
    """

    def __init__(self, reader: WindowReader, rng: np.random.Generator) -> None:
        assert reader.bias is not None
        space, xp, width = reader.space, reader.space.xp, reader.signature.width
        self.reader, self.space, self.width, self.bias = reader, space, width, reader.bias
        self.right = random_orthogonal(space, rng, width)
        if width > 1:
            across, along = split_along(space, self.right, reader.bias.vector)
            self.right = repel(xp.concat([across, along[None, :]]), reader.inverse)
        self.offsets = windows(reader)
        rows = ((self.offsets[:, None] + np.arange(reader.used)) % width).reshape(-1)
        # Where in the readings of all windows each row stands.
        self.place = space.indices([int(np.nonzero(rows == row)[0][-1]) for row in range(width)])
        self.rows_bias = reader.rows.vectors @ reader.bias.vector
        self.forms, self.radius = space.zeros(width, width), space.zeros(width, width)  # (directions, rows)

    def run(self) -> Steps[Score]:
        """Find the scale, read all directions, assemble."""
        yield from self._ask_scale()
        done = 0
        while done < self.width:
            stop = min(max(1, 2 * done), self.width)
            ask = partial(self._ask_at, "forms")
            yield from self.reader.ask_unsaturated(np.arange(done, stop), ask, self.forms, self.radius)
            done = stop
        return score_of_columns(self.space, self.reader.inverse, self.forms.T, self.radius.T, self.right)

    def _ask_scale(self) -> Steps[None]:
        """The size of the forms; where nothing responds, the largest scale one can read.

        From the direction along the bias where the first, orthogonal to it, does not respond.
        """
        silent = yield from self._ask_response(0)
        if silent is not None and self.width > 1:
            silent = yield from self._ask_response(self.width - 1)
        if silent is not None:
            self.reader.estimate.update(*silent)

    def _ask_response(self, direction: int) -> Steps[tuple[Array, float] | None]:
        """Estimate the size of forms from one direction; if that is silent, forms and scale that it could have had."""
        xp, silent = self.space.xp, None
        search = ScaleSearch(FIRST_PROBE, smallest=self.space.tiny**0.5)
        for scale in search:
            good, forms, radius = yield from self._ask_at("scale", np.asarray([direction]), scale)
            form, error = float(xp.max(xp.abs(forms))), float(xp.max(radius))
            if not bool(good[0]):
                if silent is not None:
                    return silent
                search.scale = scale * 2.0**-10
            elif form > 4 * error or error * scale > 0.1:
                self.reader.estimate.update(xp.reshape(forms, (-1,)), scale)
                return None
            else:
                silent = (AIM / scale + 0 * xp.reshape(forms, (-1,)), scale)
                search.scale = scale * min(2.0**20, 0.5 / (error * scale))
        raise AssertionError  # the search ends by itself

    def _ask_at(self, stage: str, directions: Integers, scale: float) -> Steps[tuple[Array, Array, Array]]:
        """Which directions were read well at this scale (n,), their forms and radii (n, rows)."""
        xp, reader = self.space.xp, self.reader
        first = reader.first_norms(scale)
        right = xp.take(self.right, self.space.indices(directions), axis=0)
        attraction = right @ self.bias.vector
        wanted = scale / float(xp.max(first))
        last = norms_beside_bias(wanted, attraction)
        offsets, windows = np.tile(self.offsets, directions.size), self.offsets.size
        numbers, ends = np.repeat(directions, windows), xp.repeat(last, windows)
        weights = yield from reader.ask(stage, offsets, TokenRows(self.right), numbers, first, ends)
        return self._solve(weights, first, last, right)

    def _solve(self, weights: Weights, first: Array, last: Array, right: Array) -> tuple[Array, Array, Array]:
        """Newton's method for the directions' own forms s, all at once."""
        xp, count = self.space.xp, right.shape[0]
        meeting = (self.reader.inverse.T @ right.T).T  # (n, rows): p in row-coordinates
        attraction = last * (right @ self.bias.vector)
        own = self.space.zeros(count)
        settled = own
        for _ in range(NEWTON_STEPS):
            ends = xp.repeat(last**2 * own + attraction, self.offsets.size)
            arrays = (xp.reshape(each, (count, -1)) for each in weights.logits(ends, self.reader.zeros - 1))
            logits, slopes, radius = (xp.take(each, self.place, axis=1) for each in arrays)  # by row
            forms = (logits / first - self.rows_bias) / last[:, None]
            miss = xp.sum(meeting * forms, axis=1) - own
            slope = last * xp.sum(meeting * slopes / first, axis=1)
            settled = xp.abs(last**2 * miss)
            step = miss / xp.maximum(1 - slope, self.space.full((count,), 0.1))
            own = own + xp.where(xp.isfinite(step), step, xp.zeros_like(step))
            if not bool(xp.any(settled > 4 * self.space.eps)):
                break
        bias_radius = self.space.rounding * self.reader.bias_norm + xp.linalg.vector_norm(self.bias.radius)
        radii = (radius + self.space.rounding * xp.abs(logits) + settled[:, None]) / first + bias_radius
        good = xp.all(xp.abs(logits) <= LARGEST, axis=1) & (settled < self.space.eps**0.5)
        return good, forms, radii / last[:, None]
