"""The kinks of an oracle on one line, and its gradient in the cells between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats, Integers
from keyhole.methods.base import Steps
from keyhole.methods.relu_net.exact.kink_search import OPEN_AT_FIRST, Kinked, KinkSearch, NotPiecewiseLinear
from keyhole.methods.relu_net.exact.queries import QueryLine, TokenQueries

Known = Callable[[Floats], Floats]  # what of the answers is understood already, at tokens (n, width)

# Without a norm bound a line is looked at up to this many times the norm of its origin: a neuron whose kink is further
# out changes nothing nearer by. The second figure: most kinks of neurons of the usual size are nearer than this.
FARTHEST, NEAR = 1e9, 1e4
# With a norm bound the origin of a line lies this part of the way out.
OUT = 0.3
# Differences are taken over this part of the way to the next kink on the line. Other directions may lead into a kink
# sooner: about three cells in a hundred have to be measured again.
STEP = 0.01
# Of many directions more lead into a kink: from this width on steps shrink like the root of it.
MANY_DIRECTIONS = 100
SHRINK = 0.1
MOST_SHRINKS = 5
# From this width on steps are tried before a cell is measured, which costs less than to measure one in twenty again:
# along this many random directions, both ways, this many times as far. Of d directions the worst leads to a kink about
# three times as fast as a random one.
TRIED_FROM = 200
TRIALS, TRIED_FARTHER = 3, 10.0


def random_line(queries: TokenQueries, rng: np.random.Generator, through: Floats | None = None) -> QueryLine:
    """A line that no neuron is parallel to; within a norm bound a chord, through a token where one is given."""
    origin, direction = rng.standard_normal((2, queries.width))
    limit = queries.signature.norm_limit
    if not np.isfinite(limit):
        if through is not None:
            origin = through
        unit = max(float(np.linalg.norm(origin)), queries.width**0.5)
        return QueryLine(origin, direction / np.linalg.norm(direction), unit, FARTHEST * unit, NEAR * unit)
    origin *= OUT * limit / np.linalg.norm(origin)
    if through is not None:
        direction = through - origin
    direction /= np.linalg.norm(direction)
    origin = origin - direction * (direction @ origin)  # the middle of the chord
    last = (1 - queries.signature.space.spacing**0.5) * float(np.sqrt(limit**2 - origin @ origin))
    return QueryLine(origin, direction, limit, last, None)


def ask_line(
    queries: TokenQueries,
    line: QueryLine,
    rng: np.random.Generator,
    *,
    known: Known | None = None,  # to be taken off the answers
    error: float = 0.0,  # how far that may be off
    patience: float = 1.0,  # factor on tolerances
    crowd: int = OPEN_AT_FIRST,  # kinks to be expected on one line
    cut: float = 0.0,  # half the length of a piece at the origin, where a kink is to be expected nearby
) -> Steps[Kinked]:
    """All kinks on a line; NotPiecewiseLinear where there are others than kinks."""
    search = KinkSearch(line.last, queries.rounding, queries.noise, rng, near=line.near, unit=line.unit, cut=cut)
    search.patience, search.crowd = patience, crowd
    while not search.done:
        x = line.at(search.points)
        values = yield from queries.ask("line", x)
        if known is not None:
            values = values - known(x)
        search.noise = queries.noise + error
        search.receive(values)
    return search.result()


@dataclass(frozen=True)
class LineCells:
    """The oracle in cells: value at a token and gradient there."""

    centre: Floats  # (m, width)
    value: Floats  # (m, outputs)
    gradient: Floats  # (m, outputs, width)
    error: Floats  # (m,) radius of entries of the gradient, as a part of the level of the answers


def ask_cells(
    queries: TokenQueries, line: QueryLine, kinked: Kinked, chosen: Integers, rng: np.random.Generator
) -> Steps[LineCells]:  # (m,)
    """Gradients in the chosen cells of a line: d queries each, as that along the line is known."""
    t, distance = _centres(kinked, chosen)
    centres = line.at(t)
    if kinked.kinks.size == 0:  # the values that are known are far out
        values = yield from queries.ask("cells", centres)
    else:
        values = kinked.value[chosen] + kinked.slope[chosen] * (t - kinked.at[chosen])[:, None]
    errors = queries.rounding * kinked.growth(t) + queries.noise / float(np.min(kinked.level))
    # Random orthonormal axes across the line: its own first, then left out.
    matrix = rng.standard_normal((queries.width, queries.width))
    matrix[:, 0] = line.direction
    axes = np.asarray(np.linalg.qr(matrix)[0].T[1:])
    along = kinked.slope[chosen][:, :, None] * line.direction, kinked.slope_error[chosen]
    return (yield from ask_gradients(queries, centres, distance, values, kinked.level, errors, axes, along, rng))


def ask_gradients(
    queries: TokenQueries,
    centres: Floats,  # (m, width)
    distance: Floats,  # (m,) how far the next known kink is
    values: Floats,  # (m, outputs)
    level: Floats,  # (outputs,) how large answers are
    errors: Floats,  # (m,) of answers, as a part of the level
    axes: Floats,  # (r, width) directions in which slopes are not known
    known: tuple[Floats, Floats],  # (m, outputs, width) part of the gradients, and its radius (m,) over the level
    rng: np.random.Generator,
) -> Steps[LineCells]:
    """Gradients by differences. One more query for each is a check in a random direction.

    Where it fails a difference has crossed a kink, and the cell is measured again with smaller steps.
    """
    count, width, (rest, rest_error) = axes.shape[0] + 1, queries.width, known
    gradient = np.zeros_like(rest)
    todo, step = np.arange(centres.shape[0]), STEP * min(1.0, (MANY_DIRECTIONS / width) ** 0.5) * distance
    if width >= TRIED_FROM:
        step = yield from _ask_trial(queries, centres, step, values, level, errors, rng)
    for _ in range(MOST_SHRINKS):
        checks = rng.standard_normal((todo.size, width))
        checks /= np.linalg.norm(checks, axis=1, keepdims=True)
        centre_of = np.repeat(todo, count)
        own = np.tile(np.arange(count), (todo.size, 1))
        own[:, -1] += np.arange(todo.size)
        moves = np.concatenate([axes, checks])
        answers = yield from queries.ask_around("cells", centres, centre_of, moves, own.ravel(), step[centre_of])
        rise = ((answers - values[centre_of]) / step[centre_of][:, None]).reshape(todo.size, count, -1)
        gradient[todo] = np.swapaxes(rise[:, :-1, :], 1, 2) @ axes + rest[todo]
        error = 2 * errors / step + rest_error
        off = np.abs(rise[:, -1, :] - np.einsum("cod,cd->co", gradient[todo], checks))
        todo = todo[np.any(off > (2 + width**0.5) * error[todo, None] * level, axis=1)]
        if todo.size == 0:
            return LineCells(centres, values, gradient, error)
        step[todo] *= SHRINK
    raise NotPiecewiseLinear("the answers near a line bend where no kink is on the line")


def _ask_trial(
    queries: TokenQueries,
    centres: Floats,
    step: Floats,  # (m,)
    values: Floats,
    level: Floats,
    errors: Floats,
    rng: np.random.Generator,
) -> Steps[Floats]:  # (m,)
    """Steps that do not lead into a kink, as far as some random directions tell: 6 queries a cell, or a few times that.

    In between kinks the answers on both sides of a token have the one at it as their mean.
    """
    step, todo = step.copy(), np.arange(centres.shape[0])
    for _ in range(MOST_SHRINKS):
        moves = rng.standard_normal((TRIALS * todo.size, queries.width))
        moves /= np.linalg.norm(moves, axis=1, keepdims=True)
        centre_of = np.repeat(todo, 2 * TRIALS)
        both = np.tile([TRIED_FARTHER, -TRIED_FARTHER], TRIALS * todo.size)
        own = np.repeat(np.arange(moves.shape[0]), 2)
        answers = yield from queries.ask_around("cells", centres, centre_of, moves, own, both * step[centre_of])
        means = np.mean(answers.reshape(todo.size, TRIALS, 2, -1), axis=2)
        off = np.max(np.abs(means - values[todo, None, :]) / level, axis=(1, 2))
        todo = todo[off > 4 * errors[todo]]
        if todo.size == 0:
            break
        step[todo] *= SHRINK
    return step


def _centres(kinked: Kinked, chosen: Integers) -> tuple[Floats, Floats]:
    """Where to measure a cell, and how far the next kink on the line is from there."""
    low, high = kinked.ends
    if kinked.kinks.size == 0:
        distance = min(kinked.unit / STEP, 0.5 * kinked.last)
        return np.zeros(chosen.size), np.full(chosen.size, distance)
    # The outer cells have no end that matters.
    low[0] = max(low[0], high[0] - 2 * (kinked.unit + abs(high[0])))
    high[-1] = min(high[-1], low[-1] + 2 * (kinked.unit + abs(low[-1])))
    return (0.5 * (low + high))[chosen], (0.5 * (high - low))[chosen]
