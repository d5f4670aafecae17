"""Maximum likelihood of a head from noisy answers to pairs, by Gauss–Newton, with the Fisher information.

What all queries share, the value, the output bias and the score bias, is the border of the normal equations. Where
every last token is along one of d orthonormal directions p_j, a query sees the score matrix only through the column
q_j = W·p_j: the rest is d blocks of size d, and eliminating them leaves a system of the border's size. For a
score matrix of given rank the unknowns are a step in the tangent space of that rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from keyhole.arrays import ArrayTable, Floats, Integers
from keyhole.methods.robust.gaussian.pair_design import PairAnswers, pair_answers
from keyhole.numerics.svd import svd

# Gauss–Newton ends when a step lowers the squared misfit by less than this, or after so many steps.
SMALL_GAIN = 1e-4
MOST_STEPS = 30
# A step that does not lower the misfit is halved so many times before it is given up.
MOST_HALVINGS = 12
# Queries whose slopes in the tangent space are looked at together: bounds the memory.
TANGENT_SLICE = 2**12


@dataclass(frozen=True)
class PairQueries(ArrayTable):
    """Queries [plus × B·x; minus × (−B·x); t·p] with what was answered; one entry per query, repeats averaged."""

    row: Integers  # (n,) which x
    column: Integers  # (n,) which p
    norm: Floats  # (n,) t, of either sign; 0 for a zero token
    plus: Floats  # (n,)
    minus: Floats  # (n,)
    answer: Floats = field(default_factory=lambda: np.empty(0))  # (n,)
    repeats: Floats = field(default_factory=lambda: np.empty(0))  # (n,)


@dataclass(frozen=True)
class Frame:
    """What is fixed: the tokens, how values and biases enter, and what is known of them beforehand."""

    rows: Floats  # (rows, width) unit vectors x_k
    columns: Floats  # (columns, width) unit vectors p_j
    max_norm: float  # B
    noise: float  # standard deviation of one answer
    row_map: Floats  # (rows, values) what x_k is worth, along the outputs it is looked at, by the fitted values
    last_map: Floats  # (columns, values) the same for p_j ...
    last_values: Floats  # (columns, rows) ... and what it is worth besides, as row k is looked at
    bias_map: Floats  # (rows, biases) output bias in the answers of row k
    known: Floats  # (values + biases,) prior mean of fitted values and output biases
    covariance: Floats  # (values + biases, values + biases)
    score_bias: bool  # whether there is one to be fitted

    @property
    def width(self) -> int:
        """Numbers per token."""
        return int(self.rows.shape[1])


@dataclass(frozen=True)
class HeadPoint:
    """Parameters at which the likelihood is evaluated."""

    score: Floats  # (width, width) W
    shared: Floats  # (values + biases,)
    score_bias: Floats  # (width,)


@dataclass(frozen=True)
class HeadFit:
    """The best point, and how sure it is."""

    point: HeadPoint
    misfit: float  # squared residuals over their variances
    score_variance: Floats  # (width, width)
    shared_covariance: Floats  # (values + biases, values + biases)
    score_bias_variance: Floats  # (width,)


def predict(frame: Frame, point: HeadPoint, pairs: PairQueries) -> PairAnswers:
    """What the pairs answer at a point, output bias included."""
    seen = frame.columns @ point.score.T  # (columns, width) W·p_j
    own = np.sum(seen * frame.columns, axis=1)
    values, biases = np.split(point.shared, [frame.row_map.shape[1]])
    row, column, norm = pairs.row, pairs.column, pairs.norm
    forms = (seen @ frame.rows.T)[column, row]
    answers = pair_answers(
        frame.max_norm * (norm * forms + (frame.rows @ point.score_bias)[row]),
        norm * (norm * own[column] + (frame.columns @ point.score_bias)[column]),
        pairs.plus,
        pairs.minus,
        frame.max_norm * (frame.row_map @ values)[row],
        norm * (frame.last_values[column, row] + (frame.last_map @ values)[column]),
    )
    return replace(answers, answer=answers.answer + (frame.bias_map @ biases)[row])


def misfit(frame: Frame, point: HeadPoint, pairs: PairQueries) -> float:
    """Squared residuals of answers and of prior knowledge, over their variances."""
    residual = (pairs.answer - predict(frame, point, pairs).answer) / frame.noise
    off = point.shared - frame.known
    prior = float(off @ np.linalg.solve(frame.covariance, off)) if off.size else 0.0
    return float(np.sum(pairs.repeats * residual**2)) + prior


def _slopes(frame: Frame, answers: PairAnswers, pairs: PairQueries, mine: Integers) -> tuple[Floats, Floats]:
    """Derivatives of some answers: by W·p_j over the norm, (n, width), and by the border, (n, border)."""
    row, column, norm = pairs.row[mine], pairs.column[mine], pairs.norm[mine, None]
    by_logits = frame.max_norm * answers.by_pair[mine, None] * frame.rows[row]
    by_logits = by_logits + norm * (answers.by_last[mine, None] * frame.columns[column])
    parts = [
        frame.max_norm * answers.pair_weight[mine, None] * frame.row_map[row]
        + norm * answers.last_weight[mine, None] * frame.last_map[column],
        frame.bias_map[row],
    ]
    if frame.score_bias:
        parts.append(by_logits)
    return by_logits, np.concatenate(parts, axis=1)


def _with_prior(frame: Frame, point: HeadPoint, matrix: Floats, side: Floats) -> None:
    """Add what is known beforehand to the border's equations."""
    size = frame.known.size
    if size:
        information = np.linalg.inv(frame.covariance)
        matrix[:size, :size] += information
        side[:size] += information @ (frame.known - point.shared)


class _Columns:
    """The normal equations by columns W·p_j, for orthonormal p_j."""

    def __init__(self, frame: Frame, point: HeadPoint, pairs: PairQueries) -> None:
        self.frame = frame
        width = frame.width
        predicted = predict(frame, point, pairs)
        weight = pairs.repeats / frame.noise**2
        residual = pairs.answer - predicted.answer
        border = frame.known.size + (width if frame.score_bias else 0)
        blocks, coupling = np.zeros((width, width, width)), np.zeros((width, width, border))
        whole, block_side, border_side = np.zeros((border, border)), np.zeros((width, width)), np.zeros(border)
        order = np.argsort(pairs.column, kind="stable")
        ends = np.searchsorted(pairs.column[order], np.arange(width + 1))
        for column in range(width):  # d blocks of d² numbers and more: the slopes of one at a time
            mine = order[ends[column] : ends[column + 1]]
            by_logits, shared = _slopes(frame, predicted, pairs, mine)
            keys = pairs.norm[mine, None] * by_logits
            heavy, side = weight[mine, None], weight[mine] * residual[mine]
            blocks[column] = keys.T @ (heavy * keys)
            coupling[column] = keys.T @ (heavy * shared)
            whole += shared.T @ (heavy * shared)
            block_side[column] = keys.T @ side
            border_side += shared.T @ side
        _with_prior(frame, point, whole, border_side)
        self.inverse = np.linalg.inv(blocks)
        self.through = self.inverse @ coupling
        self.covariance = np.linalg.inv(whole - np.einsum("jas,jat->st", coupling, self.through))
        self.border = self.covariance @ (border_side - np.einsum("jas,ja->s", self.through, block_side))
        keys = (self.inverse @ block_side[:, :, None])[:, :, 0] - self.through @ self.border
        self.step = keys.T @ frame.columns

    def score_variance(self) -> Floats:  # (width, width)
        """Of W = Σ_j (W·p_j)·p_jᵀ: what columns have of their own, and what they share through the border."""
        own = np.einsum("jaa,jb->ab", self.inverse, self.frame.columns**2)
        if not self.covariance.size:
            return np.asarray(own)
        half = np.linalg.cholesky(self.covariance)
        shared = np.tensordot(self.frame.columns, self.through @ half, axes=(0, 0))  # (b, a, border)
        return np.asarray(own + np.sum(shared**2, axis=2).T)


class _Tangent:
    """The normal equations in the tangent space of a rank: W + U·Yᵀ + N·X·Vᵀ, N orthogonal to U."""

    def __init__(self, frame: Frame, point: HeadPoint, pairs: PairQueries, rank: int) -> None:
        width = frame.width
        left, _, right = svd(point.score, full_matrices=True)
        self.rank, self.range, self.null, self.right = rank, left[:, :rank], left[:, rank:], right[:rank]
        predicted = predict(frame, point, pairs)
        weight, residual = pairs.repeats / frame.noise**2, pairs.answer - predicted.answer
        self.size = width * rank + (width - rank) * rank
        border = frame.known.size + (width if frame.score_bias else 0)
        matrix, side = np.zeros((self.size + border,) * 2), np.zeros(self.size + border)
        for start in range(0, pairs.row.size, TANGENT_SLICE):
            mine = np.arange(start, min(start + TANGENT_SLICE, pairs.row.size))
            by_logits, shared = _slopes(frame, predicted, pairs, mine)
            keys = pairs.norm[mine, None] * by_logits
            last = frame.columns[pairs.column[mine]]
            first = (last[:, :, None] * (keys @ self.range)[:, None, :]).reshape(mine.size, -1)
            second = ((keys @ self.null)[:, :, None] * (last @ self.right.T)[:, None, :]).reshape(mine.size, -1)
            slopes = np.concatenate([first, second, shared], axis=1)
            matrix += slopes.T @ (weight[mine, None] * slopes)
            side += slopes.T @ (weight[mine] * residual[mine])
        edge = slice(self.size, None)
        _with_prior(frame, point, matrix[edge, edge], side[edge])
        self.whole = np.linalg.inv(matrix)
        found_step = self.whole @ side
        self.covariance, self.border = self.whole[edge, edge], found_step[edge]
        self.step = self._matrix(found_step[: self.size])

    def _matrix(self, numbers: Floats) -> Floats:  # (size,) -> (width, width)
        width = self.range.shape[0]
        y = numbers[: width * self.rank].reshape(width, self.rank)
        x = numbers[width * self.rank :].reshape(width - self.rank, self.rank)
        return np.asarray(self.range @ y.T + self.null @ x @ self.right)

    def score_variance(self) -> Floats:  # (width, width)
        """Of the entries of W, row by row."""
        width, rank = self.range.shape[0], self.rank
        covariance, place = self.whole[: self.size, : self.size], np.arange(width)
        variance = np.zeros((width, width))
        for row in range(width):
            slopes = np.zeros((width, self.size))
            by_y = slopes[:, : width * rank].reshape(width, width, rank)
            by_y[place, place, :] = self.range[row]
            slopes[:, width * rank :] = (self.null[row][None, :, None] * self.right.T[:, None, :]).reshape(width, -1)
            variance[row] = np.sum((slopes @ covariance) * slopes, axis=1)
        return variance


def fit(frame: Frame, start: HeadPoint, pairs: PairQueries, rank: int | None = None) -> HeadFit:
    """The likeliest point, from a start, and its covariances; LinAlgError where the pairs do not determine it.

    Without `rank`, the columns of the frame must be orthonormal.
    """
    size = frame.known.size

    def equations(point: HeadPoint) -> _Columns | _Tangent:
        return _Columns(frame, point, pairs) if rank is None else _Tangent(frame, point, pairs, rank)

    def move(point: HeadPoint, system: _Columns | _Tangent, by: float) -> HeadPoint:
        score, shared = point.score + by * system.step, point.shared + by * system.border[:size]
        bias = point.score_bias + by * system.border[size:] if frame.score_bias else point.score_bias
        return HeadPoint(score if rank is None else of_rank(score, rank), shared, bias)

    point = start if rank is None else replace(start, score=of_rank(start.score, rank))
    best, system = misfit(frame, point, pairs), equations(point)
    for _ in range(MOST_STEPS):
        lengths = 0.5 ** np.arange(MOST_HALVINGS)
        tried = ((there, misfit(frame, there, pairs)) for there in (move(point, system, by) for by in lengths))
        there, reached = next((trial for trial in tried if trial[1] < best), (point, best))
        gain, point, best = best - reached, there, reached
        if gain > 0:
            system = equations(point)
        if gain <= SMALL_GAIN:
            break
    variance = system.score_variance()
    if not np.all(variance >= 0):  # also nan: what is not determined is known to no digit
        raise np.linalg.LinAlgError("singular")
    biases = np.diag(system.covariance)[size:] if frame.score_bias else np.zeros(frame.width)
    return HeadFit(point, best, variance, np.asarray(system.covariance[:size, :size]), biases)


def of_rank(matrix: Floats, rank: int) -> Floats:
    """The nearest matrix of a rank."""
    left, sizes, right = svd(matrix, full_matrices=True)
    return np.asarray((left[:, :rank] * sizes[:rank]) @ right[:rank])
