"""One head by factors of its logits and values, and what changes of these do to answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keyhole.arrays import Array, Floats, floats
from keyhole.families import FormHead, SingleHead
from keyhole.families.forms import Rotary
from keyhole.families.forms.rotary import turned
from keyhole.families.parts import Alibi, DistanceTable, PositionBias, Window
from keyhole.numerics.svd import svd

TINY = 1e-300


@dataclass(frozen=True)
class Answered:
    """Sequences of one length and their answers without the output bias."""

    tokens: Floats  # (n, length, width)
    answers: Floats  # (n, outputs)

    def with_constant(self) -> Floats:  # (n, length, width + 1)
        """Tokens with a last number of one, that biases are multiplied with."""
        return np.concatenate([self.tokens, np.ones((*self.tokens.shape[:2], 1))], axis=2)


@dataclass(frozen=True)
class FactoredHead:
    """One head by factors: logits are keysᵀ·R_Δ·queries and what distances add, values a product."""

    key: Floats  # (r, width + 1), biases last
    query: Floats  # (r, width + 1)
    angles: Floats  # (r/2,)
    left: Floats  # (width, rank)
    right: Floats  # (rank, outputs)
    added: Floats  # (k,) parameters of what distances add
    distances: PositionBias

    @property
    def parts(self) -> tuple[Floats, ...]:
        """What is fitted."""
        return self.key, self.query, self.left, self.right, self.added

    def moved(self, step: Sequence[Floats]) -> FactoredHead:
        """The head after a step."""
        key, query, left, right, added = (own + each for own, each in zip(self.parts, step, strict=True))
        return replace(self, key=key, query=query, left=left, right=right, added=added)

    def with_logits(self, step: Floats) -> FactoredHead:
        """The head after a step of key, query and what distances add, one behind the other."""
        key, query, added = np.split(step, np.cumsum([self.key.size, self.query.size]))
        return replace(
            self,
            key=self.key + key.reshape(self.key.shape),
            query=self.query + query.reshape(self.query.shape),
            added=self.added + added,
        )

    def design(self, length: int) -> Floats:  # (k, length)
        """What each parameter adds by place."""
        away = np.arange(length)[::-1]
        if isinstance(self.distances, Alibi):
            return -away[None].astype(float)
        if isinstance(self.distances, DistanceTable):
            count = self.added.size
            return np.asarray(np.minimum(away, count) == np.arange(1, count + 1)[:, None], dtype=float)
        return np.zeros((0, length))

    def seen(self, length: int) -> Floats:  # (length,)
        """Zero for what is seen, else minus infinity."""
        away = np.arange(length)[::-1]
        width = self.distances.width if isinstance(self.distances, Window) else length
        return np.where(away < width, 0.0, -np.inf)


class LinearisedHead:
    """One head at all tokens of one length."""

    def __init__(self, head: FactoredHead, tokens: Floats) -> None:  # (n, length, width + 1)
        self.head, self.tokens = head, tokens
        length = tokens.shape[1]
        turns = -np.arange(length)[::-1, None] * head.angles
        self.last = np.ascontiguousarray(tokens[:, -1])
        self.keys = turned(tokens @ head.key.T, turns, 1.0)  # (n, length, r)
        queries = (self.last @ head.query.T)[:, None]
        self.queries = turned(np.broadcast_to(queries, self.keys.shape), turns, -1.0)  # for keys as they are
        self.design = head.design(length)
        logits = (self.keys @ queries[:, 0, :, None])[..., 0] + head.added @ self.design + head.seen(length)
        odds = np.exp(logits - np.max(logits, axis=1, keepdims=True))
        self.weights = odds / np.sum(odds, axis=1, keepdims=True)
        self.values = tokens[:, :, :-1] @ head.left  # (n, length, rank)
        self.mean = (self.weights[:, None] @ tokens[:, :, :-1])[:, 0]
        self.shares = self.mean @ head.left

    def answers(self) -> Floats:  # (n, outputs)
        """What the head adds to answers."""
        return np.asarray(self.shares @ self.head.right)

    def apply(self, step: Sequence[Floats]) -> Floats:  # -> (n, outputs)
        """What a step does to answers."""
        key, query, left, right, added = step
        logits = np.sum((self.tokens @ key.T) * self.queries, axis=2) + added @ self.design
        logits += (self.keys @ (self.last @ query.T)[..., None])[..., 0]
        shares = (self._moved(logits)[:, None] @ self.values)[:, 0] + self.mean @ left
        return np.asarray(shares @ self.head.right + self.shares @ right)

    def _moved(self, logits: Floats) -> Floats:
        """Changes of weights by those of logits, a symmetric map."""
        scaled = self.weights * logits
        return np.asarray(scaled - self.weights * np.sum(scaled, axis=1, keepdims=True))

    def transpose(self, rest: Floats) -> Iterator[Floats]:  # (n, outputs)
        """The gradient of each part."""
        shares, width = rest @ self.head.right.T, self.tokens.shape[2]
        logits = self._moved((self.values @ shares[..., None])[..., 0])
        keys = (logits[:, :, None] * self.queries).reshape(-1, self.queries.shape[2])
        yield keys.T @ self.tokens.reshape(-1, width)
        yield (logits[:, None] @ self.keys)[:, 0].T @ self.last
        yield self.mean.T @ shares
        yield self.shares.T @ rest
        yield self.design @ np.sum(logits, axis=0)

    def slopes(self) -> Floats:  # (n, rank, numbers of key, query and what distances add)
        """What each number of the logits does to shares: the key bias of pairs that do not turn does nothing."""
        moved = self.weights[:, :, None] * (self.values - self.shares[:, None])
        moved = moved.transpose(0, 2, 1)  # (n, rank, length)
        count, length = self.weights.shape
        products = self.queries[:, :, :, None] * self.tokens[:, :, None, :]
        products[:, :, np.tile(self.head.angles == 0, 2), -1] = 0.0
        of_keys = moved @ products.reshape(count, length, -1)
        of_queries = (moved @ self.keys)[:, :, :, None] * self.last[:, None, None, :]
        of_queries = of_queries.reshape(count, moved.shape[1], -1)
        return np.concatenate([of_keys, of_queries, moved @ self.design.T], axis=2)

    def moments(self) -> Iterator[tuple[Floats, Floats]]:
        """Of each part of two axes what its rows and columns do to answers, as if they did it independently."""
        apart = self.values - self.shares[:, None]
        steep = self.weights**2 * np.sum(apart**2, axis=2)  # (n, length) what a logit does, squared
        keys = self.queries.reshape(-1, self.queries.shape[2]), self.tokens.reshape(-1, self.tokens.shape[2])
        for rows, columns in (keys, (self.keys.reshape(keys[0].shape), np.repeat(self.last, self.tokens.shape[1], 0))):
            own = steep.ravel()
            yield _moment(rows, own), _moment(columns, own) / max(float(np.sum(own)), TINY)
        yield self.mean.T @ self.mean, np.eye(self.values.shape[2])
        yield self.shares.T @ self.shares, np.eye(self.head.right.shape[1])


def _moment(vectors: Floats, weights: Floats) -> Floats:  # (n, k), (n,) -> (k, k)
    return np.asarray((vectors * weights[:, None]).T @ vectors)


def factored(head: SingleHead | FormHead, score_rank: int, value_rank: int) -> FactoredHead:
    """A head of these ranks."""
    value = floats(head.value)
    left, sizes, right = svd(value)
    halves = left[:, :value_rank] * sizes[:value_rank], right[:value_rank]
    bias = head.attention.position_bias
    added = np.zeros(0)
    if isinstance(bias, Alibi):
        added = np.atleast_1d(floats(bias.slope))
    elif isinstance(bias, DistanceTable):
        added = floats(bias.table)
    if isinstance(head, FormHead):
        form = head.form
        assert isinstance(form, Rotary)
        key, query = (_with_bias(each, own) for each, own in ((form.key, form.key_bias), (form.query, form.query_bias)))
        return FactoredHead(key, query, floats(form.frequencies), *halves, added, bias)
    scores = _with_bias(head.score, head.score_bias)  # (width, width + 1)
    left, sizes, right = svd(scores)
    rank = max(score_rank, 1)
    keys = np.zeros((rank + rank % 2, scores.shape[1]))
    queries = np.zeros_like(keys)
    keys[:rank, :-1] = (left[:, :rank] * sizes[:rank] ** 0.5).T
    queries[:rank] = sizes[:rank, None] ** 0.5 * right[:rank]
    return FactoredHead(keys, queries, np.zeros(len(keys) // 2), *halves, added, bias)


def _with_bias(matrix: Array, bias: Array | None) -> Floats:
    own = floats(matrix)
    return np.column_stack([own, np.zeros(len(own)) if bias is None else floats(bias)])


def whole(head: Any, found: FactoredHead) -> Any:
    """The head of these factors, of the kind of another one."""
    bias: PositionBias = head.attention.position_bias
    if isinstance(bias, Alibi):
        bias = Alibi(found.added[0])
    elif isinstance(bias, DistanceTable):
        bias = DistanceTable(found.added)
    attention, value = replace(head.attention, position_bias=bias), found.left @ found.right
    if isinstance(head, FormHead):
        own = {"key": found.key[:, :-1], "query": found.query[:, :-1]}
        own |= {"key_bias": found.key[:, -1], "query_bias": found.query[:, -1]}
        arrays = {name: own.get(name, floats(array)) for name, array in head.form.arrays().items()}
        return replace(head, form=head.form.with_arrays(arrays), value=value, attention=attention)
    score = found.key[:, :-1].T @ found.query
    return replace(
        head,
        score=score[:, :-1],
        score_bias=None if head.score_bias is None else score[:, -1],
        value=value,
        attention=attention,
    )
