"""The score matrices of all heads, several tokens a query, from as many rows and columns as their rank needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.multi_vector_box import Integers, VectorBox
from keyhole.methods.multi_vector_start import CLEAR, Start
from keyhole.methods.multi_vector_values import LARGEST, Values
from keyhole.numerics.head_cross import choose_columns, crossed, outside, ranks_of, steepness
from keyhole.recovery import Outcome

# Logits of tokens are aimed at this size in the sharpest head.
AIM = 0.7
# Weights are read where their error is at most this part of them and this many times the usual one; tokens of others
# are halved, so often.
SHARPEST, UNUSUAL, HALVINGS = 0.1, 64.0, 30
# So many tokens a query that logits are known to √eps over this, but not fewer than this part of the most possible.
FINE, FEWEST = 16.0, 4
# Columns beyond the rank: one shows that they suffice where logits are known this well, more where they are not.
KNOWN, SPARE_COLUMNS = 1e-6, 8
# A further block tells that rows suffice if what it may err by is at most this part of it.
TELLING = 0.1
# Rows tell further ones where that enlarges their errors by no more than this; else these are read.
STEEPEST = 32.0
# A score that is nowhere more than so many deviations of what was read does not show.
UNSEEN = 8.0
# Errors among the values of tokens, over those seen outside of them: values are as wrong there, and logits round.
INSIDE = 4.0
# Numbers to spare for each correction of a value.
SPARE = 4


@dataclass(frozen=True)
class Scores:
    """The affine maps into logits of all heads."""

    matrices: Floats  # (heads, width, width)
    values: Floats  # (heads, width, outputs) mended
    biases: Floats  # (heads, width)
    bars: Floats  # (heads,) deviation of one entry of a score over a unit token and a unit last token
    dropped: Floats  # (heads,) what a low rank may have left out of such an entry
    bias_bars: Floats  # (heads,)
    shows: list[bool]  # whether any entry of a score is more than what was read may err by
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
        coarse = bool(np.median(bars) > KNOWN * np.median(np.abs(rows)))
        enough = rank + (SPARE_COLUMNS if coarse else 1)
        chosen = choose_columns(rows, ranks, enough) if enough < whole - 1 else every
        more, wide = yield from reader.read(block, chosen)
        if enough < whole - 1:
            allowed = _allowed(rows[:, :, chosen], more, wide, ranks)
            sizes = np.sqrt(np.mean(more**2, axis=(1, 2)))
            telling = rank < rows.shape[1] or bool(np.all(allowed <= TELLING * sizes))
            telling = telling and bool(np.all(steepness(rows[:, :, chosen], more, ranks) <= STEEPEST))
            if telling and np.all(outside(rows[:, :, chosen], more, ranks) <= allowed):
                chosen = chosen if coarse else chosen[:rank]
                dropped = allowed + CLEAR * _spectral(bars)  # what rank and span may have left out
                return (yield from reader.crossed(rows, bars, ranks, chosen, block, more, wide, dropped))
            others = np.setdiff1d(every, chosen)
            rest, wide_rest = yield from reader.read(block, others)
            order = np.argsort(np.concatenate([chosen, others]))
            more = np.concatenate([more, rest], axis=2)[:, :, order]
            wide = np.concatenate([wide, wide_rest], axis=2)[:, :, order]
        rows, bars = np.concatenate([rows, more], axis=1), np.concatenate([bars, wide], axis=1)
    return reader.solved(rows, _ranks(rows, bars), _rms(bars), _rms(bars))


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
        self.own = [tokens_of @ values.matrices for tokens_of in (self.tokens[block] for block in self.blocks)]
        self.inverses = [_inverse(own) for own in self.own]
        self.mended: list[Floats | None] = [None] * len(self.blocks)
        self.condition = max(_worst(inverse) for inverse in self.inverses) * self.size
        # What answers are off by: their rounding, what start and values explain no further, and the values' errors.
        mixed = values.error * self.size * (self.heads / self.per_query) ** 0.5
        self.noise = float(np.hypot(values.noise, mixed))

    def _affordable(self, most: int) -> int:
        """Tokens per query: as many as outputs allow, but for those that cost too much accuracy."""
        values, least = self.values, max(1, most // FEWEST)
        wanted = self.box.signature.space.eps**0.5 / FINE
        for count in range(most, least, -1):
            noise = float(np.hypot(values.noise, values.error * self.size * (self.heads / count) ** 0.5))
            if noise * _worst(_inverse(self.tokens[:count] @ values.matrices)) * (count + 1) <= wanted:
                return count
        return least

    def _mend(self, block: int, answers: Floats) -> None:
        """Correct the values of a block along the weak directions, by what its answers leave over."""
        own, weak = self.own[block], self.values.weak
        heads, count, outputs = own.shape
        flat, spare = own.reshape(-1, outputs), outputs - heads * count
        self.mended[block] = np.zeros((count, weak.shape[0]))
        if weak.shape[0] == 0 or spare * answers.shape[0] < SPARE * count * weak.shape[0]:
            return
        outside = np.linalg.qr(flat.T, mode="complete")[0][:, heads * count :]  # (outputs, spare)
        weights = (answers @ self.inverses[block]).reshape(-1, heads, count)
        effects = np.einsum("nhk,bhs->nskb", weights, weak @ outside, optimize=True).reshape(
            answers.shape[0] * spare, -1
        )
        found = np.linalg.lstsq(effects.T @ effects, effects.T @ (answers @ outside).ravel(), rcond=None)[0]
        change = found.reshape(count, -1)
        self.mended[block] = change
        self.own[block] = own + np.einsum("kb,bho->hko", change, weak)
        self.inverses[block] = _inverse(self.own[block])

    def mended_values(self) -> Floats:  # (heads, width, outputs)
        """The values of all heads with the corrections of all blocks."""
        changes = [change for change in self.mended if change is not None]
        if len(changes) < len(self.blocks) or self.values.weak.shape[0] == 0:
            return self.values.matrices
        shares = np.linalg.solve(self.tokens, np.concatenate(changes))  # (width, n)
        matrices: Floats = self.values.matrices + np.einsum("db,bho->hdo", shares, self.values.weak)
        return matrices

    def _traded(self, block: int, weights: Floats) -> Floats | float:  # (n, heads, k) -> the same
        """Errors of weights by errors that values have together, as drawn."""
        draws = self.tokens[self.blocks[block]] @ self.values.draws  # (draws, heads, k, outputs)
        if draws.shape[0] == 0:
            return 0.0
        moved = np.einsum("nhk,rhko->rno", weights, draws, optimize=True) @ self.inverses[block]
        errors: Floats = np.sqrt(np.mean(moved**2, axis=0)).reshape(weights.shape)
        return errors

    def _noise(self, block: int, answers: Floats) -> float:
        """Errors of answers as far as values explain them, measured where there are answers to spare."""
        heads, count, outputs = self.own[block].shape
        flat, spare = self.own[block].reshape(-1, outputs), outputs - heads * count
        traded = self.values.traded * self.size * (heads / count) ** 0.5
        if spare < heads:
            return float(np.hypot(self.noise, traded))
        rest = answers - (answers @ self.inverses[block]) @ flat
        seen = INSIDE * max(self.box.noise, float(np.sqrt(np.mean(rest**2) * outputs / spare)))
        return float(np.hypot(seen, traded))

    def read(self, block: int, columns: Integers) -> Steps[tuple[Floats, Floats]]:  # -> twice (heads, k, columns)
        """Forms u·(M·g + c) of a block of tokens with some of the last tokens, and their error bars."""
        box, heads = self.box, self.heads
        members = self.blocks[block]
        forms, bars = np.zeros((2, heads, members.size, columns.size))
        scale = np.ones(columns.size)
        left, usual = np.arange(columns.size, dtype=np.int64), np.zeros(heads)
        noise = self.noise
        for _ in range(HALVINGS):
            zeros = np.zeros(left.size, dtype=np.int64)
            added = [(self.tokens[[member]], zeros, scale[left]) for member in members]
            answers = yield from box.ask("scores", self.last, columns[left], added)
            if self.mended[block] is None:
                self._mend(block, answers)
            if np.all(scale == 1.0):
                noise = self._noise(block, answers)
            inverse = self.inverses[block]
            # Errors of weights over those of answers.
            reach = np.linalg.norm(inverse, axis=0).reshape(heads, members.size)
            weights = (answers @ inverse / scale[left][:, None]).reshape(left.size, heads, members.size)
            rest = 1 - np.sum(weights, axis=2, keepdims=True)
            errors = np.hypot(noise * reach[None], self._traded(block, weights)) / scale[left][:, None, None]
            bar = errors / np.abs(weights) + np.linalg.norm(errors, axis=2, keepdims=True) / np.abs(rest)
            usual = np.maximum(usual, np.median(bar, axis=(0, 2)))
            if np.any(usual > SHARPEST):
                raise Unrecoverable(
                    Outcome.TOO_NOISY,
                    f"{int(np.sum(usual > SHARPEST))} of {heads} heads answer too faintly beside the others for their "
                    f"weights to be read: use an oracle of higher precision",
                )
            most = np.minimum(SHARPEST, UNUSUAL * usual)[:, None]
            good = np.all((weights > 0) & (rest > 0) & (bar < most), axis=(1, 2))
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
        self,
        rows: Floats,
        bars: Floats,
        ranks: Integers,
        kept: Integers,
        block: int,
        more: Floats,
        more_bars: Floats,
        dropped: Floats,
    ) -> Steps[Scores]:
        """All other tokens at the last ones that are kept."""
        columns, wide = [rows[:, :, kept], more[:, :, : kept.size]], [bars[:, :, kept], more_bars[:, :, : kept.size]]
        for number in range(block + 1, len(self.blocks)):
            forms, errors = yield from self.read(number, kept)
            columns.append(forms)
            wide.append(errors)
        whole, of_rows, of_columns = crossed(rows, kept, np.concatenate(columns, axis=1), ranks)
        # C·U⁻¹·R with errors in each of the three.
        core = _rms(bars[:, :, kept])
        errors = _rms(bars) * of_rows + _rms(np.concatenate(wide, axis=1)) * of_columns + core * of_rows * of_columns
        return self.solved(whole, ranks, errors, _rms(bars), dropped * (1 + of_rows))

    def solved(
        self,
        forms: Floats,  # (heads, width, width + 1)
        ranks: Integers,
        bars: Floats,
        read_bars: Floats,  # (heads,) of what was read
        dropped: Floats | float = 0.0,
    ) -> Scores:
        """Scores and biases from forms: the last of the last tokens is zero."""
        biases = np.asarray(np.linalg.solve(self.tokens, forms[:, :, -1].T).T)
        linear = forms[:, :, :-1] - forms[:, :, -1:]
        half = np.linalg.solve(self.tokens, linear)  # (heads, width, last tokens)
        matrices = np.asarray(np.linalg.solve(self.last[:-1], half.transpose(0, 2, 1)).transpose(0, 2, 1))
        scale = 2**0.5 / self.box.scale
        return Scores(
            matrices,
            self.mended_values(),
            biases,
            scale * bars / self.size,
            scale * dropped / self.size + 0.0 * bars,
            bars / self.size,
            [
                bool(np.any(np.abs(m) > UNSEEN * b))
                for m, b in zip(matrices, scale * read_bars / self.size, strict=True)
            ],
            ranks,
            self.per_query,
            self.condition,
        )


def _inverse(values: Floats) -> Floats:  # (heads, k, outputs) -> (outputs, heads·k)
    """What takes answers to weights."""
    basis, triangle = np.linalg.qr(values.reshape(-1, values.shape[2]).T)
    inverse: Floats = basis @ np.linalg.inv(triangle).T
    return inverse


def _worst(inverse: Floats) -> float:
    """Errors of a weight over those of an answer."""
    return float(np.max(np.linalg.norm(inverse, axis=0)))
