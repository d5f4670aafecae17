"""The score matrices of all heads, several tokens a query, from as many rows and columns as their rank needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.multi_vector_box import Floats, Integers, VectorBox
from keyhole.methods.multi_vector_start import CLEAR, Start
from keyhole.methods.multi_vector_values import LARGEST, Values
from keyhole.numerics.head_cross import choose_columns, crossed, outside, ranks_of
from keyhole.recovery import Outcome

# Logits of tokens are aimed at this size in the sharpest head.
AIM = 0.7
# Weights are read where their error is at most this part of them and this many times the usual one; tokens of others
# are halved, so often.
SHARPEST, UNUSUAL, HALVINGS = 0.1, 64.0, 30
# Errors of weights may be this many times as large as those of half as many tokens a query.
DEARER = 5.0


@dataclass(frozen=True)
class Scores:
    """The affine maps into logits of all heads."""

    matrices: Floats  # (heads, width, width)
    biases: Floats  # (heads, width)
    bars: Floats  # (heads,) deviation of one entry of a score over a unit token and a unit last token
    bias_bars: Floats  # (heads,)
    ranks: Integers  # (heads,) of score and bias together
    per_query: int  # tokens
    condition: float  # errors of answers over errors of logits


def _spectral(bars: Floats) -> Floats:  # (heads, m, n) -> (heads,)
    """What independent errors of these deviations make of the largest singular value, a few of them large or not."""
    squares = bars**2
    found: Floats = np.sqrt(np.max(np.sum(squares, axis=2), axis=1)) + np.sqrt(np.max(np.sum(squares, axis=1), axis=1))
    return found


def read_scores(box: VectorBox, start: Start, values: Values) -> Steps[Scores]:
    """Rows for all last tokens, block by block, until further blocks lie in their span; then columns."""
    reader = _ScoreReader(box, start, values)
    whole = reader.width + 1
    every = np.arange(whole, dtype=np.int64)
    rows, bars = yield from reader.read(0, every)
    for block in range(1, len(reader.blocks)):
        ranks = _ranks(rows, bars)
        rank = int(np.max(ranks))
        chosen = choose_columns(rows, ranks, rank + 1) if rank + 1 < whole - 1 else every
        more, wide = yield from reader.read(block, chosen)
        if rank + 1 < whole - 1:
            if np.all(outside(rows[:, :, chosen], more, ranks) <= _allowed(rows[:, :, chosen], more, wide, ranks)):
                return (yield from reader.crossed(rows, bars, ranks, chosen, block, more))
            others = np.setdiff1d(every, chosen)
            rest, wide_rest = yield from reader.read(block, others)
            order = np.argsort(np.concatenate([chosen, others]))
            more = np.concatenate([more, rest], axis=2)[:, :, order]
            wide = np.concatenate([wide, wide_rest], axis=2)[:, :, order]
        rows, bars = np.concatenate([rows, more], axis=1), np.concatenate([bars, wide], axis=1)
    return reader.solved(rows, _ranks(rows, bars), _rms(bars))


def _ranks(rows: Floats, bars: Floats) -> Integers:  # (heads, m, n)
    return np.maximum(ranks_of(rows, CLEAR * _spectral(bars)), 1)


def _rms(bars: Floats) -> Floats:  # (heads, m, n) -> (heads,)
    found: Floats = np.sqrt(np.mean(bars**2, axis=(1, 2)))
    return found


def _allowed(rows: Floats, more: Floats, bars: Floats, ranks: Integers) -> Floats:  # (heads,)
    """What lies outside a span by errors alone: those of the new rows, and those of the span that they use."""
    found = []
    for head, rank in enumerate(ranks):
        singular = np.linalg.svd(rows[head], compute_uv=False)
        used = float(np.sqrt(np.mean(more[head] ** 2))) * rows.shape[2] ** 0.5 / max(singular[rank - 1], 1e-300)
        found.append(1 + used)
    allowed: Floats = 2 * CLEAR * _rms(bars) * np.array(found)
    return allowed


class _ScoreReader:
    def __init__(self, box: VectorBox, start: Start, values: Values) -> None:
        self.box, self.start, self.values = box, start, values
        self.width, self.heads = box.width, start.heads
        most = min(box.outputs // self.heads, int(np.min(values.ranks)), int(min(box.longest - 1, box.width)))
        self.last = box.gridded(np.vstack([box.scale * box.directions(self.width), np.zeros((1, self.width))]))
        sizes = np.sqrt(np.mean(np.minimum(start.logits**2, LARGEST**2), axis=0))
        self.size = box.scale * min(1.0, AIM / max(float(np.max(sizes)), 1e-300))
        self.tokens = box.gridded(self.size * box.directions(self.width))
        self.per_query = self._affordable(max(most, 1))
        starts = range(0, self.width, self.per_query)
        self.blocks = [np.arange(first, min(first + self.per_query, self.width)) for first in starts]
        self.inverses = [self._inverse(self.tokens[block]) for block in self.blocks]
        self.condition = max(_worst(inverse) for inverse in self.inverses) * self.size
        # What answers are off by: their rounding, what start and values explain no further, and the values' errors.
        mixed = values.error * self.size * (self.heads / self.per_query) ** 0.5
        self.noise = float(np.hypot(values.noise, mixed))

    def _affordable(self, most: int) -> int:
        """Tokens per query: as many as outputs allow, but for those that cost too much accuracy."""
        half = _worst(self._inverse(self.tokens[: (most + 1) // 2]))
        for count in range(most, (most + 1) // 2, -1):
            if _worst(self._inverse(self.tokens[:count])) <= DEARER * half:
                return count
        return (most + 1) // 2

    def _inverse(self, tokens: Floats) -> Floats:  # (k, width) -> (outputs, heads·k)
        """What takes answers to weights."""
        values = (tokens @ self.values.matrices).reshape(-1, self.box.outputs)
        basis, triangle = np.linalg.qr(values.T)
        inverse: Floats = basis @ np.linalg.inv(triangle).T
        return inverse

    def read(self, block: int, columns: Integers) -> Steps[tuple[Floats, Floats]]:  # -> twice (heads, k, columns)
        """Forms u·(M·g + c) of a block of tokens with some of the last tokens, and their error bars."""
        box, heads = self.box, self.heads
        members, inverse = self.blocks[block], self.inverses[block]
        reach = np.linalg.norm(inverse, axis=0).reshape(heads, members.size)  # errors of weights over those of answers
        forms, bars = np.zeros((2, heads, members.size, columns.size))
        scale = np.ones(columns.size)
        left, usual = np.arange(columns.size, dtype=np.int64), 0.0
        for _ in range(HALVINGS):
            zeros = np.zeros(left.size, dtype=np.int64)
            added = [(self.tokens[[member]], zeros, scale[left]) for member in members]
            answers = yield from box.ask("scores", self.last, columns[left], added)
            weights = (answers @ inverse / scale[left][:, None]).reshape(left.size, heads, members.size)
            rest = 1 - np.sum(weights, axis=2, keepdims=True)
            errors = self.noise * reach[None] / scale[left][:, None, None]
            bar = errors / np.abs(weights) + np.linalg.norm(errors, axis=2, keepdims=True) / np.abs(rest)
            usual = max(usual, float(np.median(bar)))
            good = np.all((weights > 0) & (rest > 0) & (bar < min(SHARPEST, UNUSUAL * usual)), axis=(1, 2))
            taken = left[good]
            if taken.size:
                logits = np.log(weights[good] / rest[good])
                forms[:, :, taken] = (logits / scale[taken][:, None, None]).transpose(1, 2, 0)
                bars[:, :, taken] = (bar[good] / scale[taken][:, None, None]).transpose(1, 2, 0)
            left = left[~good]
            if not left.size:
                return forms, bars
            scale[left] /= 2
        raise Unrecoverable(
            Outcome.SATURATED, f"the weights of {left.size} queries stayed at 0 or 1 however short the tokens were"
        )

    def crossed(
        self, rows: Floats, bars: Floats, ranks: Integers, chosen: Integers, block: int, more: Floats
    ) -> Steps[Scores]:
        """All other tokens at the chosen last ones, but the one that only served to see that they suffice."""
        kept = chosen[: int(np.max(ranks))]
        columns, wide = [rows[:, :, kept], more[:, :, : kept.size]], []
        for number in range(block + 1, len(self.blocks)):
            forms, errors = yield from self.read(number, kept)
            columns.append(forms)
            wide.append(errors)
        whole, enlarged = crossed(rows, kept, np.concatenate(columns, axis=1), ranks)
        return self.solved(whole, ranks, _rms(np.concatenate([bars[:, :, kept], *wide], axis=1)) * enlarged)

    def solved(self, forms: Floats, ranks: Integers, bars: Floats) -> Scores:  # (heads, width, width + 1)
        """Scores and biases from forms: the last of the last tokens is zero."""
        biases = np.asarray(np.linalg.solve(self.tokens, forms[:, :, -1].T).T)
        linear = forms[:, :, :-1] - forms[:, :, -1:]
        half = np.linalg.solve(self.tokens, linear)  # (heads, width, last tokens)
        matrices = np.asarray(np.linalg.solve(self.last[:-1], half.transpose(0, 2, 1)).transpose(0, 2, 1))
        scale = 2**0.5 / self.box.scale
        return Scores(
            matrices, biases, scale * bars / self.size, bars / self.size, ranks, self.per_query, self.condition
        )


def _worst(inverse: Floats) -> float:
    """Errors of a weight over those of an answer."""
    return float(np.max(np.linalg.norm(inverse, axis=0)))
