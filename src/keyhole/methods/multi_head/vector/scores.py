"""What reading scores at the last position and at all of them have in common: forms, their radii, their ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from keyhole.arrays import Floats, Integers
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

    matrices: Floats  # (heads, width, width)
    values: Floats  # (heads, width, outputs) mended
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


def spectral(errors: Floats) -> Floats:  # (heads, m, n) -> (heads,)
    """What independent errors of these deviations make of the largest singular value, a few of them large or not."""
    squares = errors**2
    return np.asarray(
        np.sqrt(np.max(np.sum(squares, axis=2), axis=1)) + np.sqrt(np.max(np.sum(squares, axis=1), axis=1))
    )


def ranks_above(rows: Floats, errors: Floats) -> Integers:  # (heads, m, n)
    """Singular values that errors do not make, one at least."""
    floors = CLEAR * spectral(errors)[:, None]
    return np.asarray(np.maximum(np.sum(singular_values(rows) > floors, axis=1), 1))


def rms(errors: Floats) -> Floats:  # (heads, m, n) -> (heads,)
    """Over all forms of a head."""
    return np.asarray(np.sqrt(np.mean(errors**2, axis=(1, 2))))


def errors_outside(rows: Floats, more: Floats, errors: Floats, ranks: Integers) -> Floats:  # (heads,)
    """What lies outside a span by errors alone: those of the new rows, and those of the span that they use."""
    factors = []
    for head, rank in enumerate(ranks):
        singular = singular_values(rows[head])
        used = float(np.sqrt(np.mean(more[head] ** 2))) * rows.shape[2] ** 0.5 / max(singular[rank - 1], 1e-300)
        factors.append(1 + used)
    return np.asarray(2 * CLEAR * rms(errors) * np.array(factors))


def inverse_of(values: Floats) -> Floats:  # (heads, k, outputs) -> (outputs, heads·k)
    """What takes answers to weights."""
    basis, triangle = np.linalg.qr(values.reshape(-1, values.shape[2]).T)
    if not np.all(np.diag(triangle)):
        raise HeadsHidden(Outcome.WRONG_FAMILY, "the values of some token are the same in two heads, or zero in one")
    return np.asarray(basis @ np.linalg.inv(triangle).T)


def worst_of(inverse: Floats) -> float:
    """Errors of a weight over those of an answer."""
    return float(np.max(np.linalg.norm(inverse, axis=0)))


def most_tokens(queries: VectorQueries, values: VectorValues, filled: float) -> int:
    """Tokens per query that this part of the outputs separates, and that a sequence has room for beside another."""
    each = filled * queries.outputs // values.matrices.shape[0]
    return max(1, int(min(each, np.min(values.ranks), queries.longest - 1, queries.width)))


def are_independent(tokens: Floats, values: VectorValues) -> bool:  # (k, width)
    """Whether the values of tokens in all heads are: not where heads write to fewer outputs than there are."""
    flat = (tokens @ values.matrices).reshape(-1, values.matrices.shape[2])
    error = values.error * float(np.linalg.norm(tokens[0]))
    if flat.shape[0] > flat.shape[1]:
        return False
    return bool(singular_values(flat)[-1] > CLEAR * error * (flat.shape[0] ** 0.5 + flat.shape[1] ** 0.5))


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
    least = next(count for count in range(least, 0, -1) if count == 1 or are_independent(tokens[:count], values))
    most = least if queries.coarse else most_tokens(queries, values, filled)
    for count in range(most, least, -1):
        if not are_independent(tokens[:count], values):
            continue
        wanted = queries.signature.space.eps**0.5 / (FINE if queries.outputs - heads * count >= heads else unspared)
        noise = float(np.hypot(values.noise, values.error * size * (heads / count) ** 0.5))
        if noise * worst_of(inverse_of(tokens[:count] @ values.matrices)) * (count + 1) <= wanted:
            return count
    return least


def answer_noise(
    queries: VectorQueries,
    values: VectorValues,
    answers: Floats,  # (n, outputs)
    own: Floats,  # (heads, k, outputs) values of the tokens
    inverse: Floats,  # (outputs, heads·k)
    share: float,  # errors of answers over those of the value of a unit token
    otherwise: float,
) -> float:
    """Errors of answers by what weights leave of them, or `otherwise` where there are no outputs to spare."""
    heads, count, outputs = own.shape
    spare = outputs - heads * count
    noise = otherwise
    if spare >= heads:
        rest = answers - (answers @ inverse) @ own.reshape(-1, outputs)
        noise = INSIDE * max(queries.noise, float(np.sqrt(np.mean(rest**2) * outputs / spare)))
    return float(np.hypot(noise, values.traded * share))


def weight_errors(
    values: VectorValues,
    tokens: Floats,  # (k, width)
    weights: Floats,  # (n, heads, k)
    inverse: Floats,  # (outputs, heads·k)
    noise: float,  # of answers
) -> Floats:  # (n, heads, k)
    """Errors of weights by those of answers, and by errors that values have together, as drawn."""
    errors: Floats = noise * np.linalg.norm(inverse, axis=0).reshape(1, *weights.shape[1:])
    draws = tokens @ values.draws  # (draws, heads, k, outputs)
    if draws.shape[0] == 0:
        return errors
    moved = np.einsum("nhk,rhko->rno", weights, draws, optimize=True) @ inverse
    return np.asarray(np.hypot(errors, np.sqrt(np.mean(moved**2, axis=0)).reshape(weights.shape)))


def cross_scores(
    rows: Floats,  # (heads, m, width + 1)
    row_errors: Floats,
    kept: Integers,  # (k,) columns
    columns: Floats,  # (heads, width, k)
    wide: Floats,
    ranks: Integers,
    dropped: Floats,  # (heads,)
) -> tuple[Floats, Floats, Floats]:
    """All forms of low rank, their radii, and what may have been left out of them."""
    inverses = [_inverse(head[:, kept], int(rank)) for head, rank in zip(rows, ranks, strict=True)]
    whole = np.stack([c @ inverse @ r for c, inverse, r in zip(columns, inverses, rows, strict=True)])
    # How much that enlarges errors of rows, and errors of columns.
    of_rows = np.array([spectral_norm(c @ inverse) for c, inverse in zip(columns, inverses, strict=True)])
    of_columns = np.array([spectral_norm(inverse @ r) for inverse, r in zip(inverses, rows, strict=True)])
    # C·U⁻¹·R with errors in each of the three.
    core = rms(row_errors[:, :, kept])
    errors = rms(row_errors) * of_rows + rms(wide) * of_columns + core * of_rows * of_columns
    return whole, errors, dropped * (1 + of_rows)


def scores_of(
    forms: Floats,  # (heads, width, width + 1) of tokens with last tokens and, at the end, the zero token
    tokens: Floats,  # (width, width)
    last: Floats,  # (width, width)
    values: Floats,
    ranks: Integers,
    errors: Floats,  # (heads,)
    read_errors: Floats,  # (heads,) of what was read
    shown: tuple[int, float],  # tokens per query, condition
    dropped: Floats | float = 0.0,
) -> Scores:
    """Scores and biases from forms."""
    biases = np.asarray(np.linalg.solve(tokens, forms[:, :, -1].T).T)
    linear = forms[:, :, :-1] - forms[:, :, -1:]
    half = np.linalg.solve(tokens, linear)  # (heads, width, last tokens)
    matrices = np.asarray(np.linalg.solve(last, half.transpose(0, 2, 1)).transpose(0, 2, 1))
    size, far = float(np.linalg.norm(tokens[0])), float(np.linalg.norm(last[0]))
    scale = 2**0.5 / far
    return Scores(
        matrices,
        values,
        biases,
        scale * errors / size,
        scale * dropped / size + 0.0 * errors,
        errors / size,
        [bool(np.any(np.abs(m) > UNSEEN * b)) for m, b in zip(matrices, scale * read_errors / size, strict=True)],
        ranks,
        *shown,
    )


def choose_columns(rows: Floats, ranks: Integers, count: int) -> Integers:  # (heads, m, n) -> (count,)
    """Columns that span those of every head well: each time the one that adds most, as a product over heads."""
    _, _, right = svd(rows)
    spaces = [right[head, : max(int(rank), 1)].copy() for head, rank in enumerate(ranks)]
    chosen: list[int] = []
    for _ in range(count):
        logs = np.zeros(rows.shape[2])
        for space in spaces:
            left = np.sum(space**2, axis=0)
            if np.max(left) > 1e-6:  # else this head is spanned
                logs += np.log(np.maximum(left, 1e-300))
        logs[chosen] = -np.inf
        pick = int(np.argmax(logs))
        chosen.append(pick)
        for number, space in enumerate(spaces):
            column = space[:, pick]
            size = np.linalg.norm(column)
            if size > 1e-6:
                spaces[number] = space - np.outer(column, column @ space) / size**2
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
