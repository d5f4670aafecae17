"""Scores and values of all heads by least squares over all answers that tokens had beside last ones.

What was read stage by stage carries the errors of one stage into the next. All answers together tell scores and values
at once: Gauss–Newton steps from what was read, each solved by conjugate gradients in the tangent space of scores of
their ranks and of values that add up to the known sum. Products with the Jacobian are made in float32, residuals in
float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from keyhole.arrays import Floats, Integers
from keyhole.numerics.svd import pseudo_inverse, svd

# Steps of Gauss and Newton, and of conjugate gradients in each.
STEPS, INNER = 3, 160
# A step is solved until one of conjugate gradients lowers the sum of squares by less than this part of it, and steps go
# on while they lower it by more than that: with a few hundred thousand unknowns the last digits of scores come slowly.
SOLVED, GAIN = 2e-5, 0.01
# A step that does not lower the sum of squares is halved so often.
HALVINGS = 4
# Eigenvalues of blocks of the normal equations are lifted by this part of their mean.
LIFTED = 1e-3
# The sum of values spans as much as those of heads do together where its singular values are no smaller than this.
DEPENDENT = 1e-6
TINY = 1e-300

# Numbers of tangents, and of float32 or float64.
Single = npt.NDArray[np.float32]
Table = npt.NDArray[Any]


@dataclass(frozen=True)
class Block:
    """Some tokens beside some last ones, and what was answered without the share of the last tokens."""

    tokens: Integers  # (k,)
    last: Integers  # (n,)
    scale: Floats  # (n,) of the tokens
    answers: Floats  # (n, outputs)


@dataclass(frozen=True)
class Asked:
    """All queries of several tokens beside a last one."""

    tokens: Floats  # (m, width)
    last: Floats  # (n, width + 1) with a constant at the end
    blocks: list[Block]
    total: Floats  # (width, outputs) the sum of all heads' values


@dataclass(frozen=True)
class Heads:
    """Scores of low rank with their biases, as left·right, and values."""

    left: list[Floats]  # (width, rank)
    right: list[Floats]  # (rank, width + 1) orthonormal rows
    values: Floats  # (heads, width, outputs)
    spans: list[Floats] | None  # (rank, outputs) orthonormal rows, where values are shares of these; else free

    @property
    def scores(self) -> Floats:  # (heads, width, width + 1)
        """Scores, and biases over the constant of last tokens."""
        return np.stack([left @ right for left, right in zip(self.left, self.right, strict=True)])


def with_constant(last: Floats, scale: float) -> Floats:  # (n, width) -> (n, width + 1)
    """Last tokens with a constant as large as their entries, that score biases are multiplied with."""
    return np.column_stack([last, np.full(len(last), constant_of(last, scale))])


def constant_of(last: Floats, scale: float) -> float:  # (n, width)
    """The constant behind last tokens of this norm."""
    return float(scale / last.shape[1] ** 0.5)


def start_heads(
    asked: Asked, scores: Floats, ranks: Integers, values: Floats, value_ranks: Integers
) -> Heads:  # (heads, width, width + 1), (heads,), (heads, width, outputs), (heads,)
    """What was read, cut to its ranks; values as shares of spans where these leave none of the sum out."""
    cut = [_truncated(score, int(rank)) for score, rank in zip(scores, ranks, strict=True)]
    left, right = [each[0] for each in cut], [each[1] for each in cut]
    heads, together = Heads(left, right, values, None), int(np.sum(value_ranks))
    _, sizes, rows = svd(asked.total)
    if together > sizes.size or not sizes[together - 1] > DEPENDENT * sizes[0]:
        return heads
    onto = rows[:together].T @ rows[:together]  # steps turn spans into each other, not out of what the sum spans
    spans = [svd(value @ onto)[2][: int(rank)] for value, rank in zip(values, value_ranks, strict=True)]
    return Heads(left, right, _shares(asked.total, spans), spans)


def polish(asked: Asked, heads: Heads) -> Heads:
    """Least squares from what was read, until the sum of squares falls no further."""
    squares = _squares(asked, heads)
    for _ in range(STEPS):
        tangent = _Tangent(asked, heads)
        step = tangent.solve()
        if not np.all(np.isfinite(step)):  # what answers leave free may overflow
            break
        for halving in range(HALVINGS):
            moved = tangent.move(0.5**halving * step)
            after = _squares(asked, moved)
            if after < squares:
                break
        else:
            break
        gained, heads, squares = squares - after, moved, after
        if gained <= GAIN * squares:
            break
    return heads


def mean_square(asked: Asked, heads: Heads) -> float:
    """What one number of an answer is off by, squared."""
    return _squares(asked, heads) / sum(block.answers.size for block in asked.blocks)


def residuals(asked: Asked, heads: Heads) -> Iterator[Floats]:  # of (n, outputs)
    """What answers are off by."""
    forms = _forms(asked, heads.scores)
    values = asked.tokens @ heads.values
    for block in asked.blocks:
        weights = _weights(forms, block)
        yield block.answers - block.scale[:, None] * (weights @ _rows(values, block))


def _squares(asked: Asked, heads: Heads) -> float:
    return float(sum(np.vdot(rest, rest) for rest in residuals(asked, heads)))


def _forms(asked: Asked, scores: Floats) -> Floats:  # -> (heads, m, n)
    return np.asarray(asked.tokens @ scores @ asked.last.T)


def _weights(forms: Floats, block: Block) -> Floats:  # (heads, m, n) -> (n, heads·k)
    """Weights of tokens: the last one has logit zero."""
    logits = forms[:, block.tokens[:, None], block.last] * block.scale  # (heads, k, n)
    most = np.maximum(np.max(logits, axis=1, keepdims=True), 0.0)
    odds = np.exp(logits - most)
    weights = odds / (np.exp(-most) + np.sum(odds, axis=1, keepdims=True))
    return np.ascontiguousarray(weights.reshape(-1, weights.shape[2]).T)


def _rows(values: Table, block: Block) -> Table:  # (heads, m, outputs) -> (heads·k, outputs)
    return np.ascontiguousarray(values[:, block.tokens].reshape(-1, values.shape[2]))


def _truncated(matrix: Floats, rank: int) -> tuple[Floats, Floats]:
    left, sizes, right = svd(matrix)
    rank = max(rank, 1)
    return left[:, :rank] * sizes[:rank], right[:rank]


def _shares(total: Floats, spans: list[Floats]) -> Floats:  # -> (heads, width, outputs)
    """Values in these spans that add up to the sum."""
    shares = total @ pseudo_inverse(np.concatenate(spans))
    ends = np.cumsum([0, *map(len, spans)])
    return np.stack([shares[:, ends[h] : ends[h + 1]] @ span for h, span in enumerate(spans)])


class _Tangent:
    """Small changes of heads, and what they do to answers: linear maps in float32."""

    def __init__(self, asked: Asked, heads: Heads) -> None:
        self.asked, self.heads = asked, heads
        self.count = heads.values.shape[0]
        self.tokens, self.last = asked.tokens.astype(np.float32), asked.last.astype(np.float32)
        forms, values = _forms(asked, heads.scores), asked.tokens @ heads.values
        self.weights = [_weights(forms, block).astype(np.float32) for block in asked.blocks]
        self.rows = [_rows(values, block).astype(np.float32) for block in asked.blocks]
        self.scale: list[Table] = [block.scale.astype(np.float32)[:, None] for block in asked.blocks]
        self.frames = [np.linalg.qr(each)[0] for each in heads.left]  # (width, rank)
        self.turned = [(right @ asked.last.T).astype(np.float32) for right in heads.right]  # (rank, n)
        self.seen = [(asked.tokens @ frame).astype(np.float32) for frame in self.frames]  # (m, rank)
        self.values = _FreeValues(self) if heads.spans is None else _SharedValues(self, heads.spans)
        shapes = [each.shape for pair in zip(self.frames, heads.right, strict=True) for each in pair]
        self.shapes = [*shapes, self.values.shape]
        self.places = np.cumsum([0, *(int(np.prod(shape)) for shape in self.shapes)])

    def squares(self, apart: int) -> Floats:  # (heads,), or (heads, heads)
        """Mean squares of weights, or of what those of two heads differ by: of one and itself, the largest square."""
        mean = np.zeros((self.count, self.count))
        for weights in self.weights:
            each = weights.reshape(weights.shape[0], self.count, -1)
            mean += np.einsum("nhk,ngk->hg", each, each, optimize=True) / each[:, 0].size / len(self.weights)
        own = np.diag(mean)
        if not apart:
            return np.asarray(own)
        distances = np.maximum(own[:, None] + own - 2 * mean, 0.0)
        distances[np.diag_indices(self.count)] = np.max(own)
        return np.asarray(distances)

    def _parts(self, change: Table) -> list[Table]:
        """Factors of scores, those of a head one after the other, and values."""
        ends = zip(self.places[:-1], self.places[1:], self.shapes, strict=True)
        return [change[first:end].reshape(shape) for first, end, shape in ends]

    def apply(self, change: Floats) -> list[Single]:
        """What a change does to answers."""
        *scores, value = self._parts(change.astype(np.float32))
        forms = np.stack(
            [
                (self.tokens @ x) @ self.turned[h] + self.seen[h] @ (y @ self.last.T)
                for h, (x, y) in enumerate(zip(scores[::2], scores[1::2], strict=True))
            ]
        )
        values = self.values.apply(value)
        return [self._answers(number, forms, values) for number in range(len(self.rows))]

    def _answers(self, number: int, forms: Single, values: Single) -> Single:
        block, weights, scale = self.asked.blocks[number], self.weights[number], self.scale[number]
        logits = forms[:, block.tokens[:, None], block.last].reshape(weights.shape[1], -1).T
        moved = self._moved(weights, np.asarray(scale * logits))
        return np.asarray(scale * (moved @ self.rows[number] + weights @ _rows(values, block)))

    def _moved(self, weights: Table, logits: Table) -> Table:  # (n, heads·k)
        """Changes of weights by those of logits, a symmetric map."""
        each = (weights * logits).reshape(weights.shape[0], self.count, -1)
        shared = weights.reshape(each.shape) * np.sum(each, axis=2, keepdims=True)
        return np.asarray((each - shared).reshape(weights.shape))

    def transpose(self, rests: list[Single]) -> Floats:
        """The gradient of changes by what answers change."""
        forms = np.zeros((self.count, self.tokens.shape[0], self.last.shape[0]), np.float32)
        values = np.zeros((self.count, self.tokens.shape[0], self.asked.total.shape[1]), np.float32)
        for number, rest in enumerate(rests):
            block, weights, scale = self.asked.blocks[number], self.weights[number], self.scale[number]
            scaled = scale * rest
            logits = scale * self._moved(weights, scaled @ self.rows[number].T)
            forms[:, block.tokens[:, None], block.last] += logits.T.reshape(self.count, block.tokens.size, -1)
            values[:, block.tokens] += (weights.T @ scaled).reshape(self.count, block.tokens.size, -1)
        parts: list[Table] = []
        for head in range(self.count):
            parts.append(self.tokens.T @ (forms[head] @ self.turned[head].T))
            parts.append((self.seen[head].T @ forms[head]) @ self.last)
        parts.append(self.values.transpose(values))
        return np.concatenate([part.ravel() for part in parts]).astype(np.float64)

    def solve(self) -> Floats:
        """The step of Gauss and Newton, by preconditioned conjugate gradients on the normal equations."""
        rests = [rest.astype(np.float32) for rest in residuals(self.asked, self.heads)]
        step = np.zeros(int(self.places[-1]))
        gradient = self.transpose(rests)
        known = _Sensitivities(self)
        way = known.divide(gradient)
        size = float(gradient @ way)
        left = sum(float(np.vdot(rest, rest)) for rest in rests)
        for _ in range(INNER):
            moved = self.apply(way)
            length = size / max(sum(float(np.vdot(each, each)) for each in moved), TINY)
            left -= length * size
            if length * size <= SOLVED * left:
                break
            step = step + length * way
            rests = [rest - np.float32(length) * each for rest, each in zip(rests, moved, strict=True)]
            gradient = self.transpose(rests)
            divided = known.divide(gradient)
            before, size = size, float(gradient @ divided)
            way = divided + (size / before) * way
        return step

    def move(self, step: Floats) -> Heads:
        """Heads after a step: scores cut to their ranks again, values in the turned spans."""
        *scores, value = self._parts(step)
        cut = []
        for head, (x, y) in enumerate(zip(scores[::2], scores[1::2], strict=True)):
            own = self.heads.right[head]
            matrix = (self.heads.left[head] + x) @ own + self.frames[head] @ y
            cut.append(_truncated(matrix, own.shape[0]))
        values, spans = self.values.move(value)
        return Heads([left for left, _ in cut], [right for _, right in cut], values, spans)


class _Sensitivities:
    """The diagonal blocks of the normal equations: those of the left and of the right factor of each head."""

    def __init__(self, tangent: _Tangent) -> None:
        self.tangent = tangent
        self.size = float(np.linalg.norm(tangent.tokens)) ** 2 / tangent.tokens.shape[0]
        self.asked = float(np.mean([len(each) for each in tangent.weights]))  # last tokens of a block
        lefts = np.zeros((tangent.count, *(tangent.tokens.shape[0],) * 2))
        for number in range(len(tangent.weights)):
            self._add(number, lefts)
        rights = [seen.T @ left @ seen for seen, left in zip(tangent.seen, lefts, strict=True)]
        self.lefts, self.rights = ([_inverse(each) for each in both] for both in (lefts, rights))

    def _add(self, number: int, lefts: Floats) -> None:  # (heads, m, m)
        """What forms of tokens do to the answers of one block, in each head."""
        tangent, block = self.tangent, self.tangent.asked.blocks[number]
        weights = (tangent.scale[number] * tangent.weights[number]).astype(np.float64)
        weights = weights.reshape(len(weights), tangent.count, -1)
        rows = tangent.rows[number].reshape(tangent.count, block.tokens.size, -1).astype(np.float64)
        part = len(weights) / tangent.last.shape[0]  # of all last tokens, which are about orthonormal
        for head in range(tangent.count):
            own = weights[:, head]
            steep = np.diag(np.mean(own, axis=0)) - own.T @ own / len(own)
            does = part * steep @ (rows[head] @ rows[head].T) @ steep
            lefts[head][np.ix_(block.tokens, block.tokens)] += does

    def divide(self, gradient: Floats) -> Floats:
        """A gradient by what is known of the normal equations."""
        tangent = self.tangent
        *scores, value = tangent._parts(gradient)
        parts: list[Floats] = []
        for head, (x, y) in enumerate(zip(scores[::2], scores[1::2], strict=True)):
            rows = self.lefts[head] @ (tangent.tokens @ x)
            parts += [tangent.tokens.T @ rows / self.size**2, self.rights[head] @ y]
        parts.append(value / self.asked)
        return np.concatenate([part.ravel() for part in parts])


def _inverse(matrix: Floats) -> Floats:  # (n, n)
    """Of a positive semidefinite matrix, its smallest eigenvalues lifted to a part of their mean."""
    lift = LIFTED * float(np.trace(matrix)) / len(matrix) + TINY
    return np.asarray(np.linalg.inv(matrix + lift * np.eye(len(matrix))))


class _FreeValues:
    """Changes of all values that leave their sum."""

    def __init__(self, tangent: _Tangent) -> None:
        self.tokens, self.known = tangent.tokens, tangent.heads.values
        self.shape: tuple[int, ...] = self.known.shape
        size = float(np.linalg.norm(self.tokens)) / self.tokens.shape[0] ** 0.5
        self.unit = np.float32(1 / max(float(np.max(tangent.squares(0))) ** 0.5 * size, TINY))

    def apply(self, change: Single) -> Single:  # -> (heads, m, outputs)
        """Changes of the values of tokens."""
        moved = self.unit * change
        return np.asarray(self.tokens @ (moved - np.mean(moved, axis=0)))

    def transpose(self, rows: Single) -> Single:  # (heads, m, outputs)
        """The transpose of `apply`."""
        gradient = self.tokens.T @ rows
        return np.asarray(self.unit * (gradient - np.mean(gradient, axis=0)))

    def move(self, change: Table) -> tuple[Floats, None]:
        """Values after a change."""
        moved = float(self.unit) * change
        return np.asarray(self.known + moved - np.mean(moved, axis=0)), None


class _SharedValues:
    """Changes of values that are shares of the sum in spans: these turn, and all values with them."""

    def __init__(self, tangent: _Tangent, spans: list[Floats]) -> None:
        self.ends, self.total = np.cumsum([0, *map(len, spans)]), tangent.asked.total
        self.spans = np.concatenate(spans)
        self.shape: tuple[int, ...] = (len(self.spans), len(self.spans))
        shares = tangent.asked.tokens @ (self.total @ pseudo_inverse(self.spans))  # (m, ranks)
        apart = tangent.squares(1) ** 0.5  # what tells values of two heads from each other
        for axis in (0, 1):
            apart = np.repeat(apart, np.diff(self.ends), axis=axis)
        self.units = 1 / np.maximum(np.linalg.norm(shares, axis=0)[:, None] * apart, TINY)
        self.single = tuple(each.astype(np.float32) for each in (self.spans, shares, self.units))

    def _own(self) -> list[slice]:
        return [slice(first, end) for first, end in zip(self.ends[:-1], self.ends[1:], strict=True)]

    def apply(self, change: Single) -> Single:  # (ranks, ranks) -> (heads, m, outputs)
        """Changes of the values of tokens."""
        spans, shares, units = self.single
        turn = units * change
        more, other = turn @ spans, shares @ turn
        return np.stack([shares[:, own] @ more[own] - other[:, own] @ spans[own] for own in self._own()])

    def transpose(self, rows: Single) -> Single:  # (heads, m, outputs)
        """The transpose of `apply`."""
        spans, shares, units = self.single
        gradient = np.zeros(self.shape, np.float32)
        for head, own in enumerate(self._own()):
            gradient[own] += (shares[:, own].T @ rows[head]) @ spans.T
            gradient[:, own] -= shares.T @ (rows[head] @ spans[own].T)
        return np.asarray(units * gradient)

    def move(self, change: Table) -> tuple[Floats, list[Floats]]:
        """Values and spans after a change."""
        turned = self.spans + (self.units * change) @ self.spans
        spans = [np.asarray(np.linalg.qr(turned[own].T)[0].T) for own in self._own()]
        return _shares(self.total, spans), spans
