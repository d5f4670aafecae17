"""What reading scores at the last position and at all of them have in common: forms, their radii, their ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from keyhole.arrays import Array, Floats, Integers, Space, floats, like, lu_factor, namespace, times
from keyhole.methods.multi_head.vector.first_token import CLEAR
from keyhole.methods.multi_head.vector.polish import Asked
from keyhole.methods.multi_head.vector.probe import HeadsHidden, VectorQueries
from keyhole.methods.multi_head.vector.values import VectorValues
from keyhole.numerics.svd import singular_values, spectral_norm, svd
from keyhole.recovery import Outcome

# Weights are read where their error is at most this part of them.
SHARPEST = 0.1
# So many tokens a query that logits are known to √eps over this, but not fewer than fill this part of the outputs, nor
# more where answers are coarse.
FINE, COARSELY_FILLED = 16.0, 0.5
# The same of so many tokens that they leave no outputs to spare, and errors of answers show in none: read from the last
# position alone, one layer in forty had radii too wide for a certificate otherwise.
FINER = 256.0
# Few rows and columns tell the others where logits are known this well: elsewhere too much may hide below the rank.
KNOWN = 1e-6
# A score that is nowhere more than so many deviations of what was read does not show.
UNSEEN = 8.0
# Steps that mend an inverse, and how far it may be off, at most, for them to do so.
MENDED, CONVERGES = 2, 0.1
# What is left of a head that the chosen columns span.
SPANNED = 1e-6
# Errors among the values of tokens, over those seen outside of them: values are as wrong there, and logits round.
INSIDE = 4.0


class KnownHeads(Protocol):
    """What is known of the heads before their scores are read."""

    @property
    def heads(self) -> int:
        """Heads that show."""
        ...

    @property
    def logit_sizes(self) -> Floats:  # (heads,)
        """Root mean squares of the logits of tokens at the norm that is asked at."""
        ...


@dataclass(frozen=True)
class Scores:
    """The affine maps into logits of all heads."""

    matrices: Array  # (heads, width, width), where large matrices are worked with
    values: Array  # (heads, width, outputs) mended, there too
    biases: Floats  # (heads, width)
    errors: Floats  # (heads,) deviation of one entry of a score over a unit token and a unit last token
    dropped: Floats  # (heads,) what a low rank may have left out of such an entry
    bias_errors: Floats  # (heads,)
    shows: list[bool]  # whether any entry of a score is more than what was read may err by
    ranks: Integers  # (heads,) of score and bias together
    per_query: int  # tokens
    condition: float  # errors of answers over errors of logits
    asked: Asked | None = None  # all queries of several tokens, for least squares over them
    noise: float = 0.0  # deviation of their answers that errors were made of


def spectral(errors: Array) -> Floats:  # (heads, m, n) -> (heads,)
    """What independent errors of these deviations make of the largest singular value, a few of them large or not."""
    xp, squares = namespace(errors), errors**2
    ends = (xp.max(xp.sum(squares, axis=axis), axis=1) for axis in (2, 1))
    return np.asarray(sum(np.sqrt(floats(end)) for end in ends))


def ranks_above(rows: Array, errors: Array) -> Integers:  # (heads, m, n)
    """Singular values that errors do not make, one at least."""
    floors = CLEAR * spectral(errors)[:, None]
    sizes = singular_values(rows) if isinstance(rows, np.ndarray) else wide_svd(rows)[0]
    return np.asarray(np.maximum(np.sum(sizes > floors, axis=1), 1))


def rms(errors: Array) -> Floats:  # (heads, m, n) -> (heads,)
    """Over all forms of a head."""
    return np.sqrt(floats(namespace(errors).mean(errors**2, axis=(1, 2))))


def errors_outside(rows: Floats, more: Floats, errors: Floats, ranks: Integers) -> Floats:  # (heads,)
    """What lies outside a span by errors alone: those of the new rows, and those of the span that they use."""
    factors = []
    for head, rank in enumerate(ranks):
        singular = singular_values(rows[head])
        used = float(np.sqrt(np.mean(more[head] ** 2))) * rows.shape[2] ** 0.5 / max(singular[rank - 1], 1e-300)
        factors.append(1 + used)
    return np.asarray(2 * CLEAR * rms(errors) * np.array(factors))


def inverse_of(values: Array) -> Array:  # (heads, k, outputs) -> (outputs, heads·k)
    """What takes answers to weights."""
    xp = namespace(values)
    if not isinstance(values, np.ndarray) and (found := _inverse_by_squares(xp.reshape(values, (-1, values.shape[2])))):
        return found[0]
    basis, triangle = xp.linalg.qr(xp.reshape(values, (-1, values.shape[2])).T)
    if not bool(xp.all(xp.linalg.diagonal(triangle) != 0)):
        raise HeadsHidden(Outcome.WRONG_FAMILY, "the values of some token are the same in two heads, or zero in one")
    return basis @ xp.linalg.inv(triangle).T


def _inverse_by_squares(rows: Array) -> tuple[Array] | None:  # (n, outputs) -> (outputs, n)
    """The right inverse by rows times their transpose, which a device has at once, mended by steps of Newton's method.

    None where squares lose too much for that.
    """
    xp, eye = namespace(rows), Space.of(rows).eye(rows.shape[0])
    square = rows @ rows.T
    factors = lu_factor(square)
    if factors is None or not bool(xp.all(xp.linalg.diagonal(factors[0]) != 0)):
        return None
    inverse = rows.T @ xp.linalg.inv(square)
    for _ in range(MENDED):
        rest = eye - rows @ inverse
        if not float(xp.max(xp.abs(rest))) * rows.shape[0] <= CONVERGES:
            return None
        inverse = inverse + inverse @ rest
    return (inverse,)


def worst_of(inverse: Array) -> float:
    """Errors of a weight over those of an answer."""
    xp = namespace(inverse)
    return float(xp.max(xp.linalg.vector_norm(inverse, axis=0)))


def worst_of_first(values: Array) -> Floats:  # (heads, k, outputs) -> (k,)
    """The same for the first token alone, for the first two and so on, from one decomposition."""
    xp, (heads, count, outputs) = namespace(values), values.shape
    count = min(count, outputs // heads)
    if count == 0:
        return np.zeros(0)
    rows = xp.reshape(xp.permute_dims(values[:, :count, :], (1, 0, 2)), (-1, outputs))
    triangle = xp.linalg.qr(rows.T)[1]
    if not bool(xp.all(xp.linalg.diagonal(triangle) != 0)):
        return np.full(count, np.inf)
    # The inverse of a leading block is that block of the inverse: norms of its rows grow from token to token.
    squares = xp.linalg.inv(triangle) ** 2
    each = floats(xp.sum(xp.reshape(squares, (heads * count, count, heads)), axis=2))
    sums = np.cumsum(each, axis=1).reshape(count, heads, count)
    return np.asarray(np.sqrt([np.max(sums[: n + 1, :, n]) for n in range(count)]))


def most_tokens(queries: VectorQueries, values: VectorValues, filled: float) -> int:
    """Tokens per query that this part of the outputs separates, and that a sequence has room for beside another."""
    each = filled * queries.outputs // values.matrices.shape[0]
    return max(1, int(min(each, np.min(values.ranks), queries.longest - 1, queries.width)))


def are_independent(tokens: Floats, values: VectorValues, worst: float = np.inf) -> bool:  # (k, width)
    """Whether the values of tokens in all heads are: not where heads write to fewer outputs than there are.

    `worst` is how many times as large errors of weights may be as those of answers, where that is known. The least
    singular value is at least one over the norm of the inverse, whose columns are no longer than that.
    """
    error, (heads, _, outputs) = values.error * float(np.linalg.norm(tokens[0])), values.matrices.shape
    count = heads * len(tokens)
    if count > outputs:
        return False
    floor = CLEAR * error * (count**0.5 + outputs**0.5)
    if 1 / (worst * count**0.5) > floor:
        return True
    return bool(singular_values(times(tokens, values.matrices).reshape(count, outputs))[-1] > floor)


def affordable(
    queries: VectorQueries,
    values: VectorValues,
    tokens: Floats,  # (width, width)
    filled: float,
    unspared: float = FINE,  # in place of FINE where fewer outputs than heads are left
) -> int:
    """Tokens per query: as many as that part of the outputs allows, but for those that cost too much accuracy."""
    size, heads = float(np.linalg.norm(tokens[0])), values.matrices.shape[0]
    least = most_tokens(queries, values, COARSELY_FILLED)
    most = most_tokens(queries, values, filled)
    worst = worst_of_first(like(tokens[: max(least, most)], values.matrices) @ values.matrices)

    def independent(count: int) -> bool:
        known = worst[count - 1] if count <= worst.size else np.inf
        return are_independent(tokens[:count], values, known)

    least = next(count for count in range(least, 0, -1) if count == 1 or independent(count))
    for count in range(0 if queries.coarse else min(most, worst.size), least, -1):
        wanted = queries.signature.space.eps**0.5 / (FINE if queries.outputs - heads * count >= heads else unspared)
        noise = float(np.hypot(values.noise, values.error * size * (heads / count) ** 0.5))
        if noise * worst[count - 1] * (count + 1) <= wanted and independent(count):
            return count
    return least


def answer_noise(
    queries: VectorQueries,
    values: VectorValues,
    answers: Array,  # (n, outputs)
    own: Array,  # (heads, k, outputs) values of the tokens
    inverse: Array,  # (outputs, heads·k)
    share: float,  # errors of answers over those of the value of a unit token
    otherwise: float,
) -> float:
    """Errors of answers by what weights leave of them, or `otherwise` where there are no outputs to spare."""
    heads, count, outputs = own.shape
    spare = outputs - heads * count
    noise = otherwise
    if spare >= heads:
        xp = namespace(own)
        rest = answers - (answers @ inverse) @ xp.reshape(own, (-1, outputs))
        noise = INSIDE * max(queries.noise, (float(xp.mean(rest**2)) * outputs / spare) ** 0.5)
    return float(np.hypot(noise, values.traded * share))


def weight_errors(
    values: VectorValues,
    tokens: Floats,  # (k, width)
    weights: Array,  # (n, heads, k)
    inverse: Array,  # (outputs, heads·k)
    noise: float,  # of answers
) -> Array:  # (n, heads, k)
    """Errors of weights by those of answers, and by errors that values have together, as drawn."""
    xp = namespace(weights)
    errors = noise * xp.reshape(xp.linalg.vector_norm(inverse, axis=0), (1, *weights.shape[1:]))
    if values.draws.shape[0] == 0:
        return errors
    draws = tokens @ values.draws  # (draws, heads, k, outputs)
    moved = np.einsum("nhk,rhko->rno", weights, draws, optimize=True) @ inverse
    return np.asarray(np.hypot(errors, np.sqrt(np.mean(moved**2, axis=0)).reshape(weights.shape)))


def cross_scores(
    rows: Array,  # (heads, m, width + 1)
    row_errors: Array,
    kept: Integers,  # (k,) columns
    columns: Array,  # (heads, width, k)
    wide: Array,
    ranks: Integers,
    dropped: Floats,  # (heads,)
) -> tuple[Array, Floats, Floats]:
    """All forms of low rank, their radii, and what may have been left out of them."""
    xp, heads = namespace(rows), range(len(ranks))
    inverses = [_inverse(head, int(rank)) for head, rank in zip(floats(some(rows, kept)), ranks, strict=True)]
    lefts = [columns[h, :, :] @ like(inverses[h], columns) for h in heads]
    whole = xp.stack([lefts[h] @ rows[h, :, :] for h in heads])
    # How much that enlarges errors of rows, and errors of columns.
    of_rows = np.array([largest_of(left) for left in lefts])
    of_columns = np.array([largest_of(like(inverses[h], rows) @ rows[h, :, :]) for h in heads])
    # C·U⁻¹·R with errors in each of the three.
    core = rms(some(row_errors, kept))
    errors = rms(row_errors) * of_rows + rms(wide) * of_columns + core * of_rows * of_columns
    return whole, errors, dropped * (1 + of_rows)


def scores_of(
    forms: Array,  # (heads, width, width + 1) of tokens with last tokens and, at the end, the zero token
    tokens: Floats,  # (width, width)
    last: Floats,  # (width, width)
    values: Array,
    ranks: Integers,
    errors: Floats,  # (heads,)
    read_errors: Floats,  # (heads,) of what was read
    shown: tuple[int, float],  # tokens per query, condition
    dropped: Floats | float = 0.0,
) -> Scores:
    """Scores and biases from forms."""
    biases = np.asarray(np.linalg.solve(tokens, floats(forms[:, :, -1]).T).T)
    matrices = _between(forms[:, :, :-1] - forms[:, :, -1:], tokens, last)
    size, far = float(np.linalg.norm(tokens[0])), float(np.linalg.norm(last[0]))
    scale = 2**0.5 / far
    return Scores(
        matrices,
        values,
        biases,
        scale * errors / size,
        scale * dropped / size + 0.0 * errors,
        errors / size,
        [
            bool(namespace(matrices).any(abs(matrix) > UNSEEN * error))
            for matrix, error in zip(matrices, (scale * read_errors / size).tolist(), strict=True)
        ],
        ranks,
        *shown,
    )


def _between(linear: Array, tokens: Floats, last: Floats) -> Array:  # (heads, width, width)
    """What forms of tokens with last tokens are made of."""
    if isinstance(linear, np.ndarray):
        half = np.linalg.solve(tokens, linear)  # (heads, width, last tokens)
        return np.asarray(np.linalg.solve(last, half.transpose(0, 2, 1)).transpose(0, 2, 1))
    xp = namespace(linear)  # tokens are orthogonal, but for their digits
    return xp.linalg.inv(like(tokens, linear)) @ linear @ xp.linalg.inv(like(last, linear)).T


def some(rows: Array, columns: Integers) -> Array:  # (heads, m, n), (k,) -> (heads, m, k)
    """Some columns of all heads."""
    return rows[:, :, columns] if isinstance(rows, np.ndarray) else rows[:, :, Space.of(rows).indices(columns)]


def largest_of(matrix: Array) -> float:
    """The largest singular value; elsewhere than on the host that of the matrix times its transpose tells it."""
    if isinstance(matrix, np.ndarray):
        return spectral_norm(matrix)
    square = matrix @ matrix.T if matrix.shape[0] < matrix.shape[1] else matrix.T @ matrix
    return float(np.sqrt(np.linalg.eigvalsh(floats(square))[-1]))


def wide_svd(rows: Array) -> tuple[Floats, Array]:  # (heads, m, n), m < n -> (heads, m), (heads, m, n)
    """Singular values and right singular vectors of wide matrices on a device, those of their triangles on the host."""
    xp = namespace(rows)
    basis, triangle = xp.linalg.qr(xp.matrix_transpose(rows))
    turn, sizes, _ = np.linalg.svd(floats(triangle), full_matrices=False)
    return sizes, xp.matrix_transpose(basis @ like(turn, rows))


def choose_columns(rows: Array, ranks: Integers, count: int) -> Integers:  # (heads, m, n) -> (count,)
    """Columns that span those of every head well: each time the one that adds most, as a product over heads."""
    if not isinstance(rows, np.ndarray):
        return _choose_elsewhere(wide_svd(rows)[1], ranks, count)
    _, _, right = svd(rows)
    spaces = [right[head, : max(int(rank), 1)].copy() for head, rank in enumerate(ranks)]
    chosen: list[int] = []
    for _ in range(count):
        logs = np.zeros(rows.shape[2])
        for space in spaces:
            left = np.sum(space**2, axis=0)
            if np.max(left) > SPANNED:  # else this head is spanned
                logs += np.log(np.maximum(left, 1e-300))
        logs[chosen] = -np.inf
        pick = int(np.argmax(logs))
        chosen.append(pick)
        for number, space in enumerate(spaces):
            column = space[:, pick]
            size = np.linalg.norm(column)
            if size > SPANNED:
                spaces[number] = space - np.outer(column, column @ space) / size**2
    return np.array(chosen, dtype=np.int64)


def _choose_elsewhere(right: Array, ranks: Integers, count: int) -> Integers:  # (heads, m, n) -> (count,)
    """The same on a device, for all heads at once."""
    space, xp = Space.of(right), namespace(right)
    within = np.arange(right.shape[1]) < np.maximum(ranks, 1)[:, None]
    spaces = right * space.asarray(within.astype(float))[:, :, None]
    taken = xp.zeros_like(right[0, 0, :])
    chosen: list[int] = []
    for _ in range(count):
        left = xp.sum(spaces**2, axis=1)  # (heads, n)
        shows = xp.max(left, axis=1, keepdims=True) > SPANNED  # else this head is spanned
        logs = xp.sum(xp.where(shows, xp.log(xp.clip(left, 1e-300, None)), xp.zeros_like(left)), axis=0)
        pick = int(xp.argmax(logs - taken))
        chosen.append(pick)
        taken[pick] = xp.inf
        column = spaces[:, :, pick : pick + 1]
        squares = xp.sum(column**2, axis=1, keepdims=True)
        change = column @ (xp.matrix_transpose(column) @ spaces) / xp.clip(squares, 1e-300, None)
        spaces = spaces - xp.where(squares > SPANNED**2, change, xp.zeros_like(change))
    return np.array(chosen, dtype=np.int64)


def outside(rows: Floats, more: Floats, ranks: Integers) -> Floats:  # (heads, m, c), (heads, k, c) -> (heads,)
    """How much of further rows lies outside the span of the first `rank` directions of the known, rms per entry."""
    _, _, right = svd(rows)
    shares = []
    for head, rank in enumerate(ranks):
        span = right[head, :rank]
        rest = more[head] - (more[head] @ span.T) @ span
        shares.append(float(np.sqrt(np.mean(rest**2))))
    return np.array(shares)


def steepness(rows: Floats, more: Floats, ranks: Integers) -> Floats:  # (heads, m, c), (heads, k, c) -> (heads,)
    """How much errors of rows grow in further rows that are computed from them."""
    return np.array([spectral_norm(more[head] @ _inverse(rows[head], int(rank))) for head, rank in enumerate(ranks)])


def _inverse(matrix: Floats, rank: int) -> Floats:  # (m, n) -> (n, m)
    left, sizes, right = svd(matrix)
    kept = max(rank, 1)
    return np.asarray((right[:kept].T / np.maximum(sizes[:kept], 1e-300)) @ left[:, :kept].T)
