"""The score matrix read through a net that was learned, whatever its shape.

A query [g + u; g] answers φ(g + s·u) with s = σ(uᵀ·W·g). Where s ↦ φ(g + s·u) is strictly monotone, which is looked
up in the learned net before anything is asked, its inverse takes the answer back to s, and the logit of s is uᵀ·W·g. A
path that is monotone, and strictly so around s = ½, serves for short tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import final

import numpy as np

from keyhole.arrays import Array, ArrayTable, Space
from keyhole.families.one_layer import UNKNOWN_ARITHMETIC, OpaqueNet
from keyhole.families.relu_net import ReluNet
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.reader import CLEAR_ENOUGH, Forms, SearchingReader
from keyhole.queries import Measurements, Plan, Signature, Term, TokenRows
from keyhole.recovery import Outcome

# Lengths of u that are looked at, over the typical length at which the net bends.
LENGTHS = tuple(2.0**power for power in range(-12, 13, 2))
# A net that is flat at the scale of moderate logits may rise at that of smaller ones.
SHARES = (1.0, 2.0**-3, 2.0**-6)
# Softmax weights at which a path must rise: more of them cost only arithmetic.
GRID = tuple(np.linspace(0.0, 1.0, 17))
# Pairs of tokens whose paths are looked at together: limits memory.
CHUNK = 256
# Weights nearer than this to 0 or 1 are read again from a shorter last token.
SATURATED = 1 / 400
# A path that is flat at an end tells weights that are further than this from 0 and 1, less readily than others.
MARGIN, LESS_READILY = 0.25, 0.1
# Steps of regula falsi in its Illinois form: a bracket that does not shrink to the last digit in so many belongs to a
# function with a step, whose root is known no better than that.
MOST_STEPS = 80


@dataclass(frozen=True)
class Net:
    """A net that was learned, as one function of single tokens to single numbers or several."""

    params: ReluNet | OpaqueNet  # called with (n, 1, width)
    radius: ReluNet | OpaqueNet  # what its error_bar takes

    def __call__(self, x: Array) -> Array:  # (n, width) -> (n, outputs)
        """Answer single tokens."""
        answers = self.params(x[:, None, :])
        return answers if answers.ndim == 2 else answers[:, None]

    def answer_radius(self, x: Array, rounding: float) -> Array:  # (n, width) -> (n, outputs)
        """Radius of predicted answers."""
        radius = self.params.error_bar(self.radius, x[:, None, :], rounding)  # type: ignore[arg-type]
        return radius if radius.ndim == 2 else radius[:, None]


@dataclass(frozen=True)
class _Paths(ArrayTable):
    """For pairs of tokens the first that reads best: g + sign·length·row, where g is along the column or opposite."""

    step: Array  # (n,) sign times length
    direction: Array  # (n, outputs) of the answer that is looked at
    last: Array  # (n,) sign times norm of g
    slope: Array  # (n,) the least of the path, between weights of `margin` and 1 − margin
    margin: Array  # (n,) weights nearer than this to 0 or 1 are not told
    sharpness: Array  # (n,) how well it tells a form: slope times |u|·|g| over radius


@final
class PathReader(SearchingReader):
    """Reads bilinear forms rowᵀ·score·column through a learned net, one query each."""

    def __init__(self, signature: Signature, guide: Array, net: Net, length: float) -> None:
        super().__init__(signature, guide)  # the last token adds nothing by itself: u is what the first has beyond it
        self.net = net
        self.most = signature.norm_limit / 2
        self.lengths = [length * each for each in LENGTHS if length * each <= self.most] or [self.most]
        self.largest_scale = min(self.lengths[-1] ** 2 * 2.0**40, self.lengths[-1] * self.most)

    def first_norm(self, scale: float) -> float:  # noqa: ARG002 - it is chosen for each pair
        """The typical length of u."""
        return self.lengths[len(self.lengths) // 2]

    def radius_at_zero(self, scale: float) -> float:  # noqa: ARG002 - it is known for each pair
        """A radius at which the search for a scale starts."""
        return CLEAR_ENOUGH

    def ask_at(
        self, stage: str, rows: TokenRows, columns: TokenRows, row_index: Array, column_index: Array, scale: float
    ) -> Steps[Forms]:
        """The forms of the given pairs (n,) from queries [g + u; g], u along the row and g along the column."""
        space, xp = self.signature.space, self.signature.space.xp
        row, column = xp.take(rows.vectors, row_index, axis=0), xp.take(columns.vectors, column_index, axis=0)
        paths = self._best(row, column, scale)
        last = paths.last
        positions = [
            [Term(columns, column_index, last), Term(rows, row_index, paths.step)],
            [Term(columns, column_index, last)],
        ]
        answers: Measurements = yield Plan(stage, int(row_index.shape[0]), positions, so_far=self.so_far)
        values = answers.values if answers.values.ndim == 2 else answers.values[:, None]
        values = xp.sum(values * paths.direction, axis=1)
        begin, along = last[:, None] * column, paths.step[:, None] * row

        def path(weight: Array) -> Array:  # (n,) -> (n,)
            return xp.sum(self.net(begin + weight[:, None] * along) * paths.direction, axis=1)

        low, high = path(xp.zeros_like(values)), path(xp.ones_like(values))
        weight = monotone_roots(space, path, low, high, values)
        error = xp.sum(
            self.net.answer_radius(begin + weight[:, None] * along, self._rounding) * xp.abs(paths.direction), axis=1
        )
        error = error + answers.radius * xp.sum(xp.abs(paths.direction), axis=1)
        beyond = xp.maximum(values - xp.maximum(low, high), xp.minimum(low, high) - values)
        if bool(xp.any(beyond > 64 * error)):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                "an answer to two tokens is not what the learned net makes of any mixture of them: "
                "the box is not a net behind one softmax head",
            )
        inside = xp.clip(weight, SATURATED, 1 - SATURATED)
        spread = inside * (1 - inside)
        logits = xp.log(inside / (1 - inside))
        radius = error / (paths.slope * spread)
        radius = radius + space.rounding * xp.abs(logits)
        saturated = (weight < paths.margin) | (weight > 1 - paths.margin)
        saturation = xp.where(saturated, xp.full_like(weight, xp.inf), xp.ones_like(weight))
        own = space.rounding * self.estimate.size * self.signature.width**0.5
        unit = paths.step * last
        return Forms(logits / unit, radius / xp.abs(unit) + own, 0 * values, saturation)

    @property
    def _rounding(self) -> float:
        return UNKNOWN_ARITHMETIC * self.signature.space.rounding

    def _best(self, row: Array, column: Array, scale: float) -> _Paths:  # (n, width), (n, width)
        """Sign and length of u, and the sign of g, for each pair: the path whose least slope tells most."""
        xp, pieces = self.signature.space.xp, []
        for start in range(0, row.shape[0], CHUNK):
            best: _Paths | None = None
            part = slice(start, start + CHUNK)
            for length in self.lengths:
                for sign, side, share in product((1.0, -1.0), (1.0, -1.0), SHARES):
                    tried = self._try_step(row[part, :], side * column[part, :], sign * length, share * scale)
                    tried = replace(tried, last=side * tried.last)
                    best = tried if best is None else _better(self.signature.space, tried, best)
            assert best is not None  # there is a length
            pieces.append(best)
        best = _Paths.concat(*pieces)
        if not bool(xp.all(best.sharpness > 0)):
            raise Unrecoverable(
                Outcome.TOO_NOISY,
                "the learned net is flat, or turns, along every mixture of two tokens that was looked at, so that its "
                "answers do not tell the weights of attention",
            )
        return best

    def _try_step(self, row: Array, column: Array, step: float, scale: float) -> _Paths:
        xp, count = self.signature.space.xp, row.shape[0]
        last = min(scale / abs(step), self.most)
        begin = last * column
        points = xp.concat([begin + weight * step * row for weight in GRID])
        answers = xp.reshape(self.net(points), (len(GRID), count, -1))
        whole = answers[-1, :, :] - answers[0, :, :]
        size = xp.linalg.vector_norm(whole, axis=1)
        direction = whole / xp.where(size > 0, size, xp.ones_like(size))[:, None]
        line = xp.sum(answers * direction, axis=2)
        rises = (line[1:, :] - line[:-1, :]) * (len(GRID) - 1)
        ends = xp.concat([points[:count, :], points[-count:, :]])
        errors = xp.reshape(self.net.answer_radius(ends, self._rounding), (2, count, -1))
        error = xp.max(xp.sum(errors * xp.abs(direction), axis=2), axis=0)
        least, quarter = xp.min(rises, axis=0), int(MARGIN * (len(GRID) - 1))
        slope = xp.where(least > 0, least, xp.min(rises[quarter:-quarter, :], axis=0))
        readily = xp.where(least > 0, xp.ones_like(least), xp.full_like(least, LESS_READILY))
        readily = xp.where(least >= -len(GRID) * error, readily, xp.zeros_like(least))  # a path that turns tells none
        margin = xp.where(least > 0, xp.full_like(least, SATURATED), xp.full_like(least, MARGIN))
        sharpness = abs(step) * last * readily * slope / xp.where(error > 0, error, xp.ones_like(error))
        return _Paths(0 * slope + step, direction, 0 * slope + last, slope, margin, sharpness)


def _better(space: Space, one: _Paths, two: _Paths) -> _Paths:
    xp = space.xp
    first = one.sharpness > two.sharpness
    both = zip(vars(one).values(), vars(two).values(), strict=True)
    return _Paths(*(xp.where(first if a.ndim == 1 else first[:, None], a, b) for a, b in both))


def monotone_roots(
    space: Space, function: Callable[[Array], Array], low: Array, high: Array, aim: Array
) -> Array:  # (n,), (n,), (n,) -> (n,)
    """Arguments in [0, 1] where functions, monotone entry by entry, take the values aimed at; 0 or 1 if outside.

    `low` and `high` are the values at 0 and 1.
    """
    xp = space.xp
    left, right = xp.zeros_like(aim), xp.ones_like(aim)
    miss_left, miss_right = low - aim, high - aim
    inside = miss_left * miss_right < 0
    # An end where the value is taken, or else the nearer one.
    end = xp.where(xp.abs(miss_left) <= xp.abs(miss_right), left, right)
    root = xp.where(inside, 0.5 + 0 * aim, end)
    for _ in range(MOST_STEPS):
        apart = miss_right - miss_left
        guess = right - miss_right * (right - left) / xp.where(apart == 0, xp.ones_like(apart), apart)
        guess = xp.where((guess > left) & (guess < right), guess, 0.5 * (left + right))
        root = xp.where(inside, guess, root)
        if not bool(xp.any(inside & (right - left > 2 * space.spacing * right))):
            break
        miss = function(root) - aim
        exact = inside & (miss == 0)
        same = miss * miss_right > 0
        # The end that stays counts half next time, so that both ends close in.
        miss_left = xp.where(exact, 0 * miss, xp.where(same, 0.5 * miss_left, miss))
        miss_right = xp.where(exact, 0 * miss, xp.where(same, miss, 0.5 * miss_right))
        left = xp.where(exact | ~same, guess, left)
        right = xp.where(exact | same, guess, right)
    return root
