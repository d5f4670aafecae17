"""Heads of any positions by least squares over all answers there are, from what was read stage by stage.

What was read carries the errors of one stage into the next. All answers together tell values, keys, queries and what
distances add at once: Gauss-Newton steps from what was read, each solved by LSMR with products of the Jacobian.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.sparse.linalg import LinearOperator, lsmr

from keyhole.arrays import Array, Floats, floats
from keyhole.families import FormHead, MultiHead, SingleHead
from keyhole.families.forms import Rotary
from keyhole.families.forms.rotary import turned
from keyhole.families.parts import Alibi, DistanceTable, PositionBias, Window
from keyhole.numerics.svd import svd

# Steps of Gauss and Newton, and of LSMR in each; a step that does not lower the sum of squares is halved so often.
STEPS, INNER, HALVINGS = 4, 300, 3
# Steps go on while answers are off by more than this part of them, or so many roundings, and while a step lowers that
# to less than half.
ENOUGH, ROUNDINGS, GAIN = 1e-9, 8.0, 0.5
# LSMR ends where what it has left of a residual is this part of it.
SOLVED = 1e-6
# Eigenvalues of moments are lifted to this part of the largest.
LIFTED = 1e-10
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
class _Head:
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

    def moved(self, step: Sequence[Floats]) -> _Head:
        """The head after a step."""
        key, query, left, right, added = (own + each for own, each in zip(self.parts, step, strict=True))
        return replace(self, key=key, query=query, left=left, right=right, added=added)

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


class _Linearised:
    """One head at all tokens of one length."""

    def __init__(self, head: _Head, tokens: Floats) -> None:  # (n, length, width + 1)
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


def refit(heads: MultiHead, ranks: Sequence[tuple[int, int]], asked: Sequence[Answered], rounding: float) -> MultiHead:
    """Heads that answer what was asked better, of the same ranks of scores and values; those given where none do."""
    found = [_factored(head, *each) for head, each in zip(heads.heads, ranks, strict=True)]
    tokens = [each.with_constant() for each in asked]
    answers = [each.answers for each in asked]
    enough = max(ENOUGH, ROUNDINGS * rounding) * sum(float(np.vdot(own, own)) for own in answers) ** 0.5

    def fit(heads: Sequence[_Head]) -> tuple[list[list[_Linearised]], list[Floats], float]:
        parts = [[_Linearised(head, each) for head in heads] for each in tokens]
        rests = [own - sum(part.answers() for part in each) for own, each in zip(answers, parts, strict=True)]
        return parts, rests, sum(float(np.vdot(rest, rest)) for rest in rests) ** 0.5

    parts, rests, off = fit(found)
    start = off
    for _ in range(STEPS):
        if off <= enough:
            break
        step = _step(found, parts, rests)
        for halving in range(HALVINGS):
            moved = [head.moved([0.5**halving * part for part in own]) for head, own in zip(found, step, strict=True)]
            after = fit(moved)
            if after[2] < off:
                break
        else:
            break
        gained = after[2] < GAIN * off
        found, (parts, rests, off) = moved, after
        if not gained:
            break
    if not off < start:
        return heads
    return replace(heads, heads=[_whole(own, head) for own, head in zip(heads.heads, found, strict=True)])


def _step(heads: Sequence[_Head], parts: list[list[_Linearised]], rests: list[Floats]) -> list[list[Floats]]:
    """The step of Gauss and Newton of every part of every head."""
    shapes = [[part.shape for part in head.parts] for head in heads]
    evens = [_Even(own) for own in zip(*parts, strict=True)]
    ends = np.cumsum([int(np.prod(shape)) for own in shapes for shape in own])
    rows = np.cumsum([rest.size for rest in rests])

    def split(step: Floats) -> list[list[Floats]]:
        each = iter(np.split(np.ravel(step), ends[:-1]))
        return [
            even.apart([next(each).reshape(shape) for shape in own]) for even, own in zip(evens, shapes, strict=True)
        ]

    def apply(step: Floats) -> Floats:
        own = split(step)
        moved = [sum(part.apply(one) for part, one in zip(each, own, strict=True)) for each in parts]
        return np.concatenate([np.ravel(each) for each in moved])

    def transpose(rest: Floats) -> Floats:
        total = np.zeros(ends[-1])
        for each, own, usual in zip(parts, np.split(np.ravel(rest), rows[:-1]), rests, strict=True):
            answers = own.reshape(usual.shape)
            gradients = [even.transposed(part.transpose(answers)) for even, part in zip(evens, each, strict=True)]
            total += np.concatenate([part.ravel() for gradient in gradients for part in gradient])
        return total

    operator = LinearOperator((rows[-1], ends[-1]), matvec=apply, rmatvec=transpose, dtype=float)
    right = np.concatenate([rest.ravel() for rest in rests])
    return split(lsmr(operator, right, atol=SOLVED, btol=SOLVED, maxiter=INNER)[0])


class _Even:
    """Changes of one head in coordinates in which all do about as much to answers."""

    def __init__(self, parts: Sequence[_Linearised]) -> None:
        every = [list(part.moments()) for part in parts]
        pairs = [list(zip(*own, strict=True)) for own in zip(*every, strict=True)]  # rows, then columns, of each part
        self.sides = [tuple(_root(np.sum(side, axis=0)) for side in pair) for pair in pairs]

    def apart(self, step: list[Floats]) -> list[Floats]:
        """The change that a vector of these coordinates is."""
        return [*(one @ part @ two.T for part, (one, two) in zip(step[:-1], self.sides, strict=True)), step[-1]]

    def transposed(self, gradient: Iterator[Floats]) -> list[Floats]:
        """The gradient in these coordinates."""
        *parts, added = gradient
        return [*(one.T @ part @ two for part, (one, two) in zip(parts, self.sides, strict=True)), added]


def _root(moment: Floats) -> Floats:
    """A root of the inverse, small eigenvalues lifted."""
    sizes, vectors = np.linalg.eigh(moment)
    sizes = np.maximum(sizes, LIFTED * sizes[-1]) if sizes[-1] > 0 else np.ones_like(sizes)
    return np.asarray(vectors * sizes**-0.5)


def _factored(head: SingleHead | FormHead, score_rank: int, value_rank: int) -> _Head:
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
        return _Head(key, query, floats(form.frequencies), *halves, added, bias)
    whole = _with_bias(head.score, head.score_bias)  # (width, width + 1)
    left, sizes, right = svd(whole)
    rank = max(score_rank, 1)
    keys = np.zeros((rank + rank % 2, whole.shape[1]))
    queries = np.zeros_like(keys)
    keys[:rank, :-1] = (left[:, :rank] * sizes[:rank] ** 0.5).T
    queries[:rank] = sizes[:rank, None] ** 0.5 * right[:rank]
    return _Head(keys, queries, np.zeros(len(keys) // 2), *halves, added, bias)


def _with_bias(matrix: Array, bias: Array | None) -> Floats:
    own = floats(matrix)
    return np.column_stack([own, np.zeros(len(own)) if bias is None else floats(bias)])


def _whole(head: Any, found: _Head) -> Any:
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
