"""Logits of normed heads: all tokens beside a few last ones, a few tokens beside all last ones.

Values of tokens in all heads are known, so [u₁; …; u_k; g] tells the weights of k tokens in every head, hence their
logits less that of g of itself, which a token and its opposite in the same place tell. Logits have the rank of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats, Integers
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.multi_head.vector import scores as common
from keyhole.methods.multi_head.vector.first_token import CLEAR
from keyhole.methods.multi_head.vector.parts.long_tokens import LongQueries
from keyhole.methods.multi_head.vector.parts.normed_forms import NormedLogits
from keyhole.methods.multi_head.vector.parts.rotary import choose_between, room_between
from keyhole.methods.multi_head.vector.values import VectorValues
from keyhole.numerics.svd import pseudo_inverse, svd
from keyhole.recovery import Outcome

# Tokens and last tokens beyond those that keys and lengths take, and columns beyond the rank.
SPARE, SPARE_COLUMNS = 8, 2
# Weights whose errors are more than this part of them tell no logit.
SHARPEST = 0.05


@dataclass(frozen=True)
class NormedScores:
    """What was read of all heads: left factors from columns, right ones from rows."""

    tokens: Floats  # (n, width): those of the rows first, as they were asked
    last: Floats  # (m, width)
    distances: Integers  # (n,)
    rows: Floats  # (heads, k, m) logits of the first tokens with all last ones
    row_errors: Floats
    columns: Floats  # (heads, n, c) logits of all tokens with the first last ones
    column_errors: Floats
    far: Floats | None  # (heads, k, c) of the first tokens, with zero tokens between
    far_errors: Floats | None
    between: int
    rank: int
    per_query: int
    condition: float

    def logits(self, head: int, rng: np.random.Generator | None = None) -> NormedLogits:
        """Those of one head in factors, with errors as large as they may be if they are drawn."""

        def read(values: Floats, errors: Floats) -> Floats:
            own: Floats = values[head]
            return own if rng is None else own + errors[head] * rng.standard_normal(own.shape)

        rows, columns = read(self.rows, self.row_errors), read(self.columns, self.column_errors)
        right = svd(rows)[2][: self.rank]
        few = pseudo_inverse(right[:, : columns.shape[1]])
        left = columns @ few
        left[: rows.shape[0]] = rows @ right.T
        turn = None
        if self.far is not None and self.far_errors is not None:
            turn = pseudo_inverse(left[: rows.shape[0]]) @ read(self.far, self.far_errors) @ few
        return NormedLogits(self.tokens, self.last, left, right, turn, self.distances.astype(np.float64))


def ask_normed_scores(queries: LongQueries, values: VectorValues, angles: Floats | None) -> Steps[NormedScores]:
    """Logits as factors; with `angles` also those of tokens farther apart."""
    queries.between = room_between(queries) if angles is not None else 0  # left free, to be filled later
    reader = _Reader(queries, values)
    queries.between = 0
    width = queries.width
    last = _tokens(queries, width + SPARE)
    rows, errors, own = yield from reader.ask_rows(last, blocks=2)
    while (rank := reader.rank(rows, errors)) >= rows.shape[1]:
        if rows.shape[1] >= width:
            break
        rows, errors, own = yield from reader.ask_rows(last, blocks=reader.blocks + 1)
    if angles is not None:
        rank = 2 * angles.size
    if rank < 2:
        raise Unrecoverable(
            Outcome.WRONG_FAMILY, f"logits of normed heads have rank {rank}, which shows directions only"
        )
    lengths = 3 * rank // 2 if angles is not None else rank * (rank + 1) // 2
    count = max(lengths, width + -(-width // (rank - 1))) + SPARE
    if count > last.shape[0]:
        more = _tokens(queries, count)[width:][: count - last.shape[0]]
        new, new_errors, new_own = yield from reader.ask_rows(more, blocks=reader.blocks)
        rows, errors = np.concatenate([rows, new], axis=2), np.concatenate([errors, new_errors], axis=2)
        last, own = np.vstack([last, more]), np.concatenate([own, new_own], axis=1)
    few = min(rank + SPARE_COLUMNS, last.shape[0])
    columns, column_errors = yield from reader.ask_columns(last[:few], own[:, :few], count)
    far, far_errors, between = None, None, 0
    if angles is not None:
        between = choose_between(angles, queries.longest - reader.per_query - 1)
        queries.between = between
        masses = np.log(np.exp(own[:, :few]) + between)
        far, far_errors = yield from reader.ask_blocks(last[:few], reader.row_blocks(), masses)
        queries.between = 0
    columns = np.concatenate([rows[:, :, :few], columns], axis=1)
    column_errors = np.concatenate([errors[:, :, :few], column_errors], axis=1)
    tokens, distances = reader.all_tokens(columns.shape[1])
    return NormedScores(
        tokens, last, distances, rows, errors, columns, column_errors, far, far_errors, between, rank,
        reader.per_query, reader.condition,
    )  # fmt: skip


def _tokens(queries: LongQueries, count: int) -> Floats:
    """An orthonormal basis, and unit tokens beyond it."""
    width = queries.width
    basis = np.linalg.qr(queries.rng.standard_normal((width, width)))[0]
    more = queries.rng.standard_normal((max(count - width, 0), width))
    return np.vstack([basis, more / np.linalg.norm(more, axis=1, keepdims=True)])


class _Reader:
    """Logits of blocks of tokens, all of one size; the second block starts with the opposite of the first token."""

    def __init__(self, queries: LongQueries, values: VectorValues) -> None:
        self.queries, self.values = queries, values
        self.heads, width = values.matrices.shape[0], queries.width
        basis = _tokens(queries, 0)
        self.per_query = max(1, common.affordable(queries, values, basis, queries.filled))
        self.blocks = 0
        drawn = _tokens(queries, 4 * width * width)  # more than any rank takes
        self.drawn = np.vstack([drawn[: self.per_query], -drawn[:1], drawn[self.per_query :]])
        self.condition = 0.0

    def row_blocks(self) -> list[int]:
        return list(range(self.blocks))

    def ask_blocks(
        self, last: Floats, blocks: list[int], own: Floats | None
    ) -> Steps[tuple[Floats, Floats]]:  # -> (heads, tokens, last) twice
        """Logits of blocks, with what the last tokens weigh of themselves if it is known; without the opposite."""
        every, found, errors = np.arange(last.shape[0], dtype=np.int64), [], []
        zeros, ones = 0 * every, np.ones(every.size)
        for block in blocks:
            tokens = self.drawn[block * self.per_query : (block + 1) * self.per_query]
            values = tokens @ self.values.matrices
            inverse = common.inverse_of(values)
            self.condition = max(self.condition, common.worst_of(inverse))
            answers = (
                yield from self.queries.ask("scores", last, every, [(each[None], zeros, ones) for each in tokens])
            )[:, 0]
            noise = float(np.hypot(self.queries.noise, self.values.error * (self.heads / len(tokens)) ** 0.5))
            weights = (answers @ inverse).reshape(every.size, self.heads, len(tokens))
            off = common.weight_errors(self.values, tokens, weights, inverse, noise)
            rest = 1 - np.sum(weights, axis=2, keepdims=True)
            if not (np.all(weights > off / SHARPEST) and np.all(rest > 0)):
                raise Unrecoverable(Outcome.SATURATED, "some tokens of normed heads have too little weight to be read")
            logits = np.log(weights / rest)
            off = np.hypot(off / weights, np.linalg.norm(off, axis=2, keepdims=True) / rest)
            logits, off = logits.transpose(1, 2, 0), off.transpose(1, 2, 0)
            found.append(logits if own is None else logits + own[:, None])
            errors.append(off)
        whole, wide = np.concatenate(found, axis=1), np.concatenate(errors, axis=1)
        if own is None or 1 not in blocks:
            return whole, wide
        kept = np.arange(whole.shape[1]) != (blocks.index(1)) * self.per_query
        return whole[:, kept], wide[:, kept]

    def ask_rows(self, last: Floats, blocks: int) -> Steps[tuple[Floats, Floats, Floats]]:
        """Logits of the tokens of so many blocks, their errors, and the last tokens' logits of themselves."""
        self.blocks = blocks
        whole, wide = yield from self.ask_blocks(last, self.row_blocks(), None)
        other = self.per_query
        own = -(whole[:, 0] + whole[:, other]) / 2  # (heads, last)
        off = np.hypot(wide[:, 0], wide[:, other]) / 2
        kept = np.arange(whole.shape[1]) != other
        return whole[:, kept] + own[:, None], np.hypot(wide[:, kept], off[:, None]), own

    def ask_columns(self, last: Floats, own: Floats, count: int) -> Steps[tuple[Floats, Floats]]:
        """Logits of all further tokens, in blocks of the same size, until there are so many in all."""
        needed = -(-(count + 1) // self.per_query)
        return (yield from self.ask_blocks(last, list(range(self.blocks, needed)), own))

    def all_tokens(self, count: int) -> tuple[Floats, Integers]:
        """All tokens asked but for the opposite one, and their distances."""
        kept = np.arange(count + 1) != self.per_query
        distances = self.per_query - np.arange(count + 1) % self.per_query
        return self.drawn[: count + 1][kept], distances[kept].astype(np.int64)

    def rank(self, rows: Floats, errors: Floats) -> int:
        return int(np.max(common.ranks_above(rows, CLEAR * errors)))
