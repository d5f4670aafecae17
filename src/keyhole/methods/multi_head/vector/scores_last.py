"""The score matrices of all heads, several tokens a query, from as many rows and columns as their rank needs."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from keyhole.arrays import Array, Floats, Integers, Space, floats, like, median, namespace, to_numpy
from keyhole.methods.base import Steps, Unrecoverable, together
from keyhole.methods.multi_head.vector import scores as common
from keyhole.methods.multi_head.vector.first_token import CLEAR
from keyhole.methods.multi_head.vector.polish import Asked, Block, with_constant
from keyhole.methods.multi_head.vector.probe import VectorQueries
from keyhole.methods.multi_head.vector.scores import Scores
from keyhole.methods.multi_head.vector.values import VectorValues
from keyhole.numerics.svd import svd
from keyhole.recovery import Outcome

# Logits of tokens are aimed at this size in the sharpest head.
AIM = 0.7
# Weights are read where their error is at most this many times the usual one; tokens of others are halved, so often.
UNUSUAL, HALVINGS = 64.0, 30
# A further block tells that rows suffice if what it may err by is at most this part of it.
TELLING = 0.1
# Rows tell further ones where that enlarges their errors by no more than this; else these are read.
STEEPEST = 32.0
# Where least squares over all answers follow, tokens beyond so many times as many as ranks are read beside this part of
# the last ones, but beside so many times as many as those tokens.
SPARE_ROWS, SOME, SPARE_COLUMNS = 1.25, 0.5, 2
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
        if reader.values.rough and SPARE_ROWS * rank <= rows.shape[1]:
            return (yield from reader.ask_rest(block, rows, errors))
        coarse = reader.queries.thorough or bool(median(errors) > common.KNOWN * median(abs(rows)))
        enough = whole if coarse else rank + 1
        chosen = common.choose_columns(rows, ranks, enough) if enough < whole - 1 else every
        more, wide = yield from reader.ask(block, chosen)
        xp = namespace(rows)
        if enough < whole - 1:
            known, further = floats(common.some(rows, chosen)), floats(more)
            allowed = common.errors_outside(known, further, floats(wide), ranks)
            sizes = np.sqrt(np.mean(further**2, axis=(1, 2)))
            telling = rank < rows.shape[1] or bool(np.all(allowed <= TELLING * sizes))
            telling = telling and bool(np.all(common.steepness(known, further, ranks) <= STEEPEST))
            if telling and np.all(common.outside(known, further, ranks) <= allowed):
                chosen = chosen[:rank]
                dropped = allowed + CLEAR * common.spectral(errors)  # what rank and span may have left out
                return (yield from reader.ask_columns(rows, errors, ranks, chosen, block, more, wide, dropped))
            others = np.setdiff1d(every, chosen)
            rest, wide_rest = yield from reader.ask(block, others)
            order = np.argsort(np.concatenate([chosen, others]))
            more = common.some(xp.concat([more, rest], axis=2), order)
            wide = common.some(xp.concat([wide, wide_rest], axis=2), order)
        rows, errors = xp.concat([rows, more], axis=1), xp.concat([errors, wide], axis=1)
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
        self.work = Space.of(values.matrices)
        self.own = [self.work.asarray(self.tokens[block]) @ values.matrices for block in self.blocks]
        self.inverses = [common.inverse_of(own) for own in self.own]
        self.mended: list[Floats | None] = [None] * len(self.blocks)
        self.answered: list[Block] = []
        self.noises: list[float] = []  # of answers, as errors were made of
        self.condition = max(common.worst_of(inverse) for inverse in self.inverses) * self.size
        # What answers are off by: their rounding, what start and values explain no further, and the values' errors.
        mixed = values.error * self.size * (self.heads / self.per_query) ** 0.5
        self.noise = float(np.hypot(values.noise, mixed))

    def _correct(self, block: int, answers: Array) -> None:
        """Correct the values of a block along the weak directions, by what its answers leave over."""
        own, weak = self.own[block], self.values.weak
        heads, count, outputs = own.shape
        xp, spare = self.work.xp, outputs - heads * count
        self.mended[block] = np.zeros((count, weak.shape[0]))
        if weak.shape[0] == 0 or spare * answers.shape[0] < SPARE * count * weak.shape[0]:
            return
        flat = xp.reshape(own, (-1, outputs))
        beyond = self._beyond(flat, self.inverses[block])
        weights = xp.reshape(answers @ self.inverses[block], (-1, heads, count))
        shown = xp.permute_dims(self.work.asarray(weak) @ beyond, (1, 2, 0))  # (heads, spare, n)
        effects = xp.permute_dims(weights, (0, 2, 1)) @ xp.reshape(shown, (heads, -1))
        effects = xp.permute_dims(xp.reshape(effects, (answers.shape[0], count, spare, -1)), (0, 2, 1, 3))
        effects = xp.reshape(effects, (answers.shape[0] * spare, -1))
        # As much as values may be off by, no more: where nothing of them shows outside, answers tell nothing of it.
        likely = self.size * float(np.max(self.values.spread))
        held = (self.noise / likely) ** 2 * np.eye(effects.shape[1])
        squares, right = floats(effects.T @ effects), floats(effects.T @ xp.reshape(answers @ beyond, (-1,)))
        change = floats(np.linalg.solve(squares + held, right)).reshape(count, -1)
        self.mended[block] = change
        self.own[block] = own + self.work.asarray(np.einsum("kb,bho->hko", change, weak))
        self.inverses[block] = common.inverse_of(self.own[block])

    def _beyond(self, flat: Array, inverse: Array) -> Array:  # (n, outputs), (outputs, n) -> (outputs, outputs − n)
        """Orthonormal directions of answers that the values of a block do not reach."""
        xp, (count, outputs) = self.work.xp, flat.shape
        if self.work.on_cpu:
            return xp.linalg.qr(flat.T, mode="complete")[0][:, count:]
        drawn = self.work.normal(self.queries.rng, outputs, outputs - count)
        for _ in range(2):  # the second time takes what the first has left by rounding
            drawn = xp.linalg.qr(drawn - inverse @ (flat @ drawn))[0]
        return drawn

    def corrected_values(self) -> Array:  # (heads, width, outputs)
        """The values of all heads with the corrections of all blocks."""
        changes = [change for change in self.mended if change is not None]
        if len(changes) < len(self.blocks) or self.values.weak.shape[0] == 0:
            return self.values.matrices
        shares = np.linalg.solve(self.tokens, np.concatenate(changes))  # (width, n)
        weak = self.work.asarray(self.values.weak.transpose(1, 0, 2))  # (heads, n, outputs)
        return self.values.matrices + self.work.asarray(shares) @ weak

    def ask(self, block: int, columns: Integers) -> Steps[tuple[Array, Array]]:  # -> twice (heads, k, columns)
        """Forms u·(M·g + c) of a block of tokens with some of the last tokens, and their radii."""
        logits, errors, scale = yield from self.ask_logits(block, columns)
        scales = self.work.asarray(scale)
        return logits / scales, errors / scales

    def ask_logits(
        self, block: int, columns: Integers, sign: float = 1.0
    ) -> Steps[tuple[Array, Array, Floats]]:  # -> twice (heads, k, columns), (columns,)
        """Logits of a block of tokens, or of their opposites, their radii, and by what tokens were shortened."""
        queries, heads, work, xp = self.queries, self.heads, self.work, self.work.xp
        members = self.blocks[block]
        forms, form_errors = (work.zeros(heads, members.size, columns.size) for _ in range(2))
        scale = np.ones(columns.size)
        left, usual = np.arange(columns.size, dtype=np.int64), np.zeros(heads)
        noise = self.noise
        for _ in range(HALVINGS):
            zeros = np.zeros(left.size, dtype=np.int64)
            added = [(self.tokens[[member]], zeros, sign * scale[left]) for member in members]
            answers = work.asarray((yield from queries.ask("scores", self.last, columns[left], added))[:, 0])
            if self.mended[block] is None:
                self._correct(block, answers)
            if np.all(scale == 1.0):
                share = self.size * (heads / members.size) ** 0.5
                noise = common.answer_noise(
                    queries, self.values, answers, self.own[block], self.inverses[block], share, self.noise
                )
                self.noises.append(noise)
            inverse = self.inverses[block]
            scales = work.asarray(scale[left])[:, None]
            weights = xp.reshape(answers @ inverse / (sign * scales), (left.size, heads, members.size))
            rest = 1 - xp.sum(weights, axis=2, keepdims=True)
            errors = common.weight_errors(self.values, self.tokens[members], weights, inverse, noise)
            errors = errors / scales[:, :, None]
            some = (weights > 0) & (rest > 0)
            ones = xp.ones_like(weights)
            logits, steep = queries.logits(xp.where(some, weights, ones) / xp.where(some, rest, ones))
            lengths = xp.linalg.vector_norm(errors, axis=2, keepdims=True)
            form_error = steep * xp.hypot(errors / weights, lengths / rest)
            even = (members.size + 1) * median(lengths[:, :, 0], (0,))  # where all weights are equal
            usual = np.maximum(usual, np.minimum(median(form_error, (0, 2)), self.unusual * even))
            if np.any(even > common.SHARPEST):
                raise Unrecoverable(
                    Outcome.TOO_NOISY,
                    f"{int(np.sum(even > common.SHARPEST))} of {heads} heads answer too faintly beside the others for "
                    f"their weights to be read: use an oracle of higher precision",
                )
            most = work.asarray(np.minimum(common.SHARPEST, self.unusual * usual))[:, None]
            good = to_numpy(xp.all(some & (form_error < most), axis=(1, 2)))
            taken = left[good]
            if taken.size:
                if work.on_cpu:
                    self.answered.append(Block(members, columns[taken], scale[taken], answers[good]))
                places = work.indices(np.flatnonzero(good))
                for found, each in ((forms, logits), (form_errors, form_error)):
                    found[:, :, work.indices(taken)] = xp.permute_dims(xp.take(each, places, axis=0), (1, 2, 0))
            left = left[~good]
            if not left.size:
                return forms, form_errors, scale
            scale[left] /= 2
        raise Unrecoverable(
            Outcome.SATURATED, f"the weights of {left.size} queries stayed at 0 or 1 however short the tokens were"
        )

    def ask_rest(self, block: int, rows: Floats, errors: Floats) -> Steps[Scores]:  # (heads, m, width + 1)
        """All further tokens beside some last ones, at random but for the zero one: the others by what rows span."""
        whole, frames = rows.shape[2], svd(rows)[2]
        some = min(max(int(SOME * whole), SPARE_COLUMNS * rows.shape[1]), whole)
        read, filled = [np.mean(errors**2, axis=(1, 2))], [rows]
        for number in range(block, len(self.blocks)):
            chosen = np.append(np.sort(self.queries.rng.permutation(whole - 1)[: some - 1]), whole - 1)
            more, wide = yield from self.ask(number, chosen)
            inverses = np.linalg.pinv(frames[:, :, chosen])  # (heads, some, m)
            filled.append((more @ inverses) @ frames)
            read.append(np.mean(wide**2, axis=(1, 2)))
        known = np.sqrt(np.mean(read, axis=0))
        forms = np.concatenate(filled, axis=1)
        ranks = common.ranks_above(forms, np.broadcast_to(known[:, None, None], forms.shape))
        return self.solve(forms, ranks, known, known)

    def ask_columns(
        self,
        rows: Array,
        row_errors: Array,
        ranks: Integers,
        kept: Integers,
        block: int,
        more: Array,
        more_errors: Array,
        dropped: Floats,
    ) -> Steps[Scores]:
        """All other tokens at the last ones that are kept."""
        columns, wide = (
            [common.some(rows, kept), more[:, :, : kept.size]],
            [common.some(row_errors, kept), more_errors[:, :, : kept.size]],
        )
        others = yield from together([self.ask(number, kept) for number in range(block + 1, len(self.blocks))])
        for forms, errors in others:
            columns.append(forms)
            wide.append(errors)
        every, every_error = (self.work.xp.concat(each, axis=1) for each in (columns, wide))
        whole, errors, left_out = common.cross_scores(rows, row_errors, kept, every, every_error, ranks, dropped)
        return self.solve(whole, ranks, errors, common.rms(row_errors), left_out)

    def solve(
        self,
        forms: Array,  # (heads, width, width + 1)
        ranks: Integers,
        errors: Floats,
        read_errors: Floats,  # (heads,) of what was read
        dropped: Floats | float = 0.0,
    ) -> Scores:
        """Scores and biases from forms: the last of the last tokens is zero."""
        shown, known = (self.per_query, self.condition), self.corrected_values()
        asked = Asked(self.tokens, with_constant(self.last, self.queries.scale), self.answered, self.queries.linear)
        origin = self.last[-1]
        found = common.scores_of(
            forms, self.tokens, self.last[:-1] - origin, known, ranks, errors, read_errors, shown, dropped
        )
        found = replace(found, asked=asked, noise=float(np.median(self.noises)))
        if not np.any(origin):
            return found
        wider = found.bias_errors + (found.errors + found.dropped) * float(np.linalg.norm(origin))
        return replace(
            found, biases=found.biases - floats(found.matrices @ like(origin, found.matrices)), bias_errors=wider
        )
