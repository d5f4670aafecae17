"""The score matrices of all heads, several tokens a query, from as many rows and columns as their rank needs."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from keyhole.arrays import Floats, Integers
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.multi_head.vector import scores as common
from keyhole.methods.multi_head.vector.first_token import CLEAR
from keyhole.methods.multi_head.vector.probe import VectorQueries
from keyhole.methods.multi_head.vector.scores import Scores
from keyhole.methods.multi_head.vector.values import VectorValues
from keyhole.recovery import Outcome

# Logits of tokens are aimed at this size in the sharpest head.
AIM = 0.7
# Weights are read where their error is at most this many times the usual one; tokens of others are halved, so often.
UNUSUAL, HALVINGS = 64.0, 30
# A further block tells that rows suffice if what it may err by is at most this part of it.
TELLING = 0.1
# Rows tell further ones where that enlarges their errors by no more than this; else these are read.
STEEPEST = 32.0
# Numbers to spare for each correction of a value.
SPARE = 4


def ask_scores(queries: VectorQueries, start: common.KnownHeads, values: VectorValues) -> Steps[Scores]:
    """Rows for all last tokens, block by block, until further blocks lie in their span; then columns."""
    return (yield from ask_forms(ScoreReader(queries, start, values)))


def ask_forms(reader: ScoreReader) -> Steps[Scores]:
    """All forms of a reader, and the scores that they are of."""
    whole = reader.width + 1
    every = np.arange(whole, dtype=np.int64)
    rows, errors = yield from reader.ask(0, every)
    for block in range(1, len(reader.blocks)):
        ranks = common.ranks_above(rows, errors)
        rank = int(np.max(ranks))
        coarse = reader.queries.thorough or bool(np.median(errors) > common.KNOWN * np.median(np.abs(rows)))
        enough = whole if coarse else rank + 1
        chosen = common.choose_columns(rows, ranks, enough) if enough < whole - 1 else every
        more, wide = yield from reader.ask(block, chosen)
        if enough < whole - 1:
            allowed = common.errors_outside(rows[:, :, chosen], more, wide, ranks)
            sizes = np.sqrt(np.mean(more**2, axis=(1, 2)))
            telling = rank < rows.shape[1] or bool(np.all(allowed <= TELLING * sizes))
            telling = telling and bool(np.all(common.steepness(rows[:, :, chosen], more, ranks) <= STEEPEST))
            if telling and np.all(common.outside(rows[:, :, chosen], more, ranks) <= allowed):
                chosen = chosen[:rank]
                dropped = allowed + CLEAR * common.spectral(errors)  # what rank and span may have left out
                return (yield from reader.ask_columns(rows, errors, ranks, chosen, block, more, wide, dropped))
            others = np.setdiff1d(every, chosen)
            rest, wide_rest = yield from reader.ask(block, others)
            order = np.argsort(np.concatenate([chosen, others]))
            more = np.concatenate([more, rest], axis=2)[:, :, order]
            wide = np.concatenate([wide, wide_rest], axis=2)[:, :, order]
        rows, errors = np.concatenate([rows, more], axis=1), np.concatenate([errors, wide], axis=1)
    return reader.solve(rows, common.ranks_above(rows, errors), common.rms(errors), common.rms(errors))


class ScoreReader:
    """Forms of all heads, blocks of tokens beside last ones."""

    unusual: ClassVar[float] = UNUSUAL

    def __init__(self, queries: VectorQueries, start: common.KnownHeads, values: VectorValues) -> None:
        self.queries, self.start, self.values = queries, start, values
        self.width, self.heads = queries.width, start.heads
        self.last = queries.on_grid(
            np.vstack([queries.scale * queries.directions(self.width), queries.scale * queries.origin(self.width)])
        )
        sharpest = max(float(np.max(start.logit_sizes)), 1e-300)
        self.size = queries.scale * min(1.0, AIM / sharpest)
        self.tokens = queries.on_grid(self.size * queries.directions(self.width))
        self.per_query = common.affordable(queries, values, self.tokens, queries.filled, common.FINER)
        starts = range(0, self.width, self.per_query)
        self.blocks = [np.arange(first, min(first + self.per_query, self.width)) for first in starts]
        self.own = [tokens_of @ values.matrices for tokens_of in (self.tokens[block] for block in self.blocks)]
        self.inverses = [common.inverse_of(own) for own in self.own]
        self.mended: list[Floats | None] = [None] * len(self.blocks)
        self.condition = max(common.worst_of(inverse) for inverse in self.inverses) * self.size
        # What answers are off by: their rounding, what start and values explain no further, and the values' errors.
        mixed = values.error * self.size * (self.heads / self.per_query) ** 0.5
        self.noise = float(np.hypot(values.noise, mixed))

    def _correct(self, block: int, answers: Floats) -> None:
        """Correct the values of a block along the weak directions, by what its answers leave over."""
        own, weak = self.own[block], self.values.weak
        heads, count, outputs = own.shape
        flat, spare = own.reshape(-1, outputs), outputs - heads * count
        self.mended[block] = np.zeros((count, weak.shape[0]))
        if weak.shape[0] == 0 or spare * answers.shape[0] < SPARE * count * weak.shape[0]:
            return
        beyond = np.linalg.qr(flat.T, mode="complete")[0][:, heads * count :]  # (outputs, spare)
        weights = (answers @ self.inverses[block]).reshape(-1, heads, count)
        effects = np.einsum("nhk,bhs->nskb", weights, weak @ beyond, optimize=True).reshape(
            answers.shape[0] * spare, -1
        )
        # As much as values may be off by, no more: where nothing of them shows outside, answers tell nothing of it.
        likely = self.size * float(np.max(self.values.spread))
        held = (self.noise / likely) ** 2 * np.eye(effects.shape[1])
        solution = np.linalg.solve(effects.T @ effects + held, effects.T @ (answers @ beyond).ravel())
        change = solution.reshape(count, -1)
        self.mended[block] = change
        self.own[block] = own + np.einsum("kb,bho->hko", change, weak)
        self.inverses[block] = common.inverse_of(self.own[block])

    def corrected_values(self) -> Floats:  # (heads, width, outputs)
        """The values of all heads with the corrections of all blocks."""
        changes = [change for change in self.mended if change is not None]
        if len(changes) < len(self.blocks) or self.values.weak.shape[0] == 0:
            return self.values.matrices
        shares = np.linalg.solve(self.tokens, np.concatenate(changes))  # (width, n)
        return np.asarray(self.values.matrices + np.einsum("db,bho->hdo", shares, self.values.weak))

    def ask(self, block: int, columns: Integers) -> Steps[tuple[Floats, Floats]]:  # -> twice (heads, k, columns)
        """Forms u·(M·g + c) of a block of tokens with some of the last tokens, and their radii."""
        logits, errors, scale = yield from self.ask_logits(block, columns)
        return logits / scale, errors / scale

    def ask_logits(
        self, block: int, columns: Integers, sign: float = 1.0
    ) -> Steps[tuple[Floats, Floats, Floats]]:  # -> twice (heads, k, columns), (columns,)
        """Logits of a block of tokens, or of their opposites, their radii, and by what tokens were shortened."""
        queries, heads = self.queries, self.heads
        members = self.blocks[block]
        forms, form_errors = np.zeros((2, heads, members.size, columns.size))
        scale = np.ones(columns.size)
        left, usual = np.arange(columns.size, dtype=np.int64), np.zeros(heads)
        noise = self.noise
        for _ in range(HALVINGS):
            zeros = np.zeros(left.size, dtype=np.int64)
            added = [(self.tokens[[member]], zeros, sign * scale[left]) for member in members]
            answers = (yield from queries.ask("scores", self.last, columns[left], added))[:, 0]
            if self.mended[block] is None:
                self._correct(block, answers)
            if np.all(scale == 1.0):
                share = self.size * (heads / members.size) ** 0.5
                noise = common.answer_noise(
                    queries, self.values, answers, self.own[block], self.inverses[block], share, self.noise
                )
            inverse = self.inverses[block]
            weights = (answers @ inverse / (sign * scale[left][:, None])).reshape(left.size, heads, members.size)
            rest = 1 - np.sum(weights, axis=2, keepdims=True)
            errors = common.weight_errors(self.values, self.tokens[members], weights, inverse, noise)
            errors = errors / scale[left][:, None, None]
            some = (weights > 0) & (rest > 0)
            logits, steep = queries.logits(np.where(some, weights, 1.0) / np.where(some, rest, 1.0))
            form_error = steep * np.hypot(errors / weights, np.linalg.norm(errors, axis=2, keepdims=True) / rest)
            even = (members.size + 1) * np.median(np.linalg.norm(errors, axis=2), axis=0)  # where all weights are equal
            usual = np.maximum(usual, np.minimum(np.median(form_error, axis=(0, 2)), self.unusual * even))
            if np.any(even > common.SHARPEST):
                raise Unrecoverable(
                    Outcome.TOO_NOISY,
                    f"{int(np.sum(even > common.SHARPEST))} of {heads} heads answer too faintly beside the others for "
                    f"their weights to be read: use an oracle of higher precision",
                )
            most = np.minimum(common.SHARPEST, self.unusual * usual)[:, None]
            good = np.all(some & (form_error < most), axis=(1, 2))
            taken = left[good]
            if taken.size:
                forms[:, :, taken] = logits[good].transpose(1, 2, 0)
                form_errors[:, :, taken] = form_error[good].transpose(1, 2, 0)
            left = left[~good]
            if not left.size:
                return forms, form_errors, scale
            scale[left] /= 2
        raise Unrecoverable(
            Outcome.SATURATED, f"the weights of {left.size} queries stayed at 0 or 1 however short the tokens were"
        )

    def ask_columns(
        self,
        rows: Floats,
        row_errors: Floats,
        ranks: Integers,
        kept: Integers,
        block: int,
        more: Floats,
        more_errors: Floats,
        dropped: Floats,
    ) -> Steps[Scores]:
        """All other tokens at the last ones that are kept."""
        columns, wide = (
            [rows[:, :, kept], more[:, :, : kept.size]],
            [row_errors[:, :, kept], more_errors[:, :, : kept.size]],
        )
        for number in range(block + 1, len(self.blocks)):
            forms, errors = yield from self.ask(number, kept)
            columns.append(forms)
            wide.append(errors)
        whole, errors, left_out = common.cross_scores(
            rows, row_errors, kept, np.concatenate(columns, axis=1), np.concatenate(wide, axis=1), ranks, dropped
        )
        return self.solve(whole, ranks, errors, common.rms(row_errors), left_out)

    def solve(
        self,
        forms: Floats,  # (heads, width, width + 1)
        ranks: Integers,
        errors: Floats,
        read_errors: Floats,  # (heads,) of what was read
        dropped: Floats | float = 0.0,
    ) -> Scores:
        """Scores and biases from forms: the last of the last tokens is zero."""
        shown, known = (self.per_query, self.condition), self.corrected_values()
        origin = self.last[-1]
        found = common.scores_of(
            forms, self.tokens, self.last[:-1] - origin, known, ranks, errors, read_errors, shown, dropped
        )
        if not np.any(origin):
            return found
        wider = found.bias_errors + (found.errors + found.dropped) * float(np.linalg.norm(origin))
        return replace(found, biases=found.biases - found.matrices @ origin, bias_errors=wider)
