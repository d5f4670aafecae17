"""Sequences [m₊ × x; m₋ × (−x); g]: answers, derivatives by the head, and the best ones under noise.

With p the softmax weights, an answer moves by hᵀ·dW·g where h = Cov_p(X)·v. A balanced pair ±x gives h = x·(x·v), the
longest there is in its direction for tokens of bounded norm; copies keep the last token from taking part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from keyhole.arrays import Floats
from keyhole.numerics.svd import svd

# How much of the value's own direction a pair may be mixed with.
TILTS = np.concatenate([-(2.0 ** np.arange(-4, 3, 0.5))[::-1], [0.0], 2.0 ** np.arange(-4, 3, 0.5)])
# Fractions of the largest norm that a last token may be shortened to, and shares of copies that x may have.
SHORTER = 2.0 ** (-np.arange(0, 33) / 4)
SHARES = 1 / (1 + np.exp(-np.linspace(-5, 5, 21)))
# Own logits of a last token that are tried, and the largest share of its value that a pair's answer is taken for.
OWN_LOGITS = np.arange(-40.0, 40.0, 0.125)
LARGEST_SHARE = 0.98
# Queries looked at together: bounds the memory of the search.
SEARCH_SLICE = 2**14


def pair_rows(value: Floats, rng: np.random.Generator) -> Floats:  # (width, outputs) -> (width, width)
    """Unit vectors x_k whose pairs are the design of least mean squared error of W·g per query.

    In the basis of the value's singular vectors, cosines with scaled coordinates: x_k = Σ_i √a_i · cos_ki · u_i. The
    information Σ_k x_k·x_kᵀ·|Vᵀx_k|² is then about diag(a)·Σσ²a, and the shares `a` are those that minimise the trace
    of its inverse. For one output they are 1/2 along v and evenly the rest: v̂ plus the corners of a simplex, over √2.
    """
    width = value.shape[0]
    left, sizes, _ = svd(value, full_matrices=True)
    squares = np.zeros(width)
    squares[: sizes.size] = sizes**2
    shares = _best_shares(squares / squares[0])
    # The rest of the basis is free where singular values repeat, as the null space's do: turned at random.
    null = int(np.sum(squares > 0))
    turn, _ = np.linalg.qr(rng.standard_normal((width - null, width - null)))
    left[:, null:] = left[:, null:] @ turn
    order = np.arange(width)
    waves = np.cos(np.pi * (2 * order[:, None] + 1) * order[None, :] / (2 * width))
    waves[:, 1:] *= math.sqrt(2)  # all of mean square one, and the first flat
    rows = (waves * np.sqrt(shares)) @ left.T
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def _best_shares(squares: Floats) -> Floats:  # (width,), the largest one -> (width,)
    """The shares a of sum one that minimise (Σ 1/a_i) / (Σ σ_i²·a_i): a_i ∝ 1/√(2G − σ_i²) where G = Σ σ_i²·a_i."""

    def shares(excess: float) -> Floats:
        raw = 1 / np.sqrt(1 + excess - squares)
        return np.asarray(raw / np.sum(raw))

    def mismatch(excess: float) -> float:
        return excess + 1 - 2 * float(shares(excess) @ squares)

    # As 2G tends to the largest σ² its share tends to one, and G is never more than that.
    return shares(float(brentq(mismatch, 1e-15, 1.0)))


def tilted_rows(basis: Floats, value: Floats) -> Floats:  # (width, rank), (width, outputs) -> (rank, width)
    """Unit vectors whose pairs inform best about the forms of a subspace: its own, tilted towards the value.

    A pair moves the answer by (x·u)·|Vᵀx| for each unit u of the subspace, and x needs value as well as a share of u.
    """
    strong = svd(value)[0][:, 0]
    inside = basis.T @ strong
    # One reflection makes all of the basis share the value's direction evenly.
    mirror = inside - np.linalg.norm(inside) / math.sqrt(inside.size)
    size = float(mirror @ mirror)
    turned = basis - np.outer(basis @ mirror, mirror) * (2 / size) if size > np.finfo(np.float64).eps else basis
    tried = turned.T[:, None, :] + TILTS[None, :, None] * strong
    tried = tried / np.linalg.norm(tried, axis=2, keepdims=True)
    said = np.abs(np.einsum("ktd,dk->kt", tried, turned)) * np.linalg.norm(tried @ value, axis=2)
    return np.asarray(tried[np.arange(turned.shape[1]), np.argmax(said, axis=1)])


@dataclass(frozen=True)
class PairAnswers:
    """What pairs answer, and by how much that moves with what it depends on. All (n,)."""

    answer: Floats
    by_pair: Floats  # derivative by the logit of x
    by_last: Floats  # derivative by the logit of the last token
    pair_weight: Floats  # softmax weight of +x less that of −x
    last_weight: Floats  # softmax weight of the last token


def pair_answers(
    pair_logit: Floats,  # (n,) of x; −x has the opposite
    last_logit: Floats,  # (n,)
    plus: Floats,  # (n,) copies of x
    minus: Floats,  # (n,) copies of −x
    pair_value: Floats,  # (n,) of x
    last_value: Floats,  # (n,)
) -> PairAnswers:
    """The answers to [plus × x; minus × (−x); g], without output bias."""
    top = np.maximum(np.maximum(pair_logit, -pair_logit), last_logit)
    first, second, last = plus * np.exp(pair_logit - top), minus * np.exp(-pair_logit - top), np.exp(last_logit - top)
    total = first + second + last
    first, second, last = first / total, second / total, last / total
    answer = (first - second) * pair_value + last * last_value
    return PairAnswers(
        answer,
        (first + second) * pair_value - (first - second) * answer,
        last * (last_value - answer),
        first - second,
        last,
    )


def solve_logits(
    answer: Floats,  # (rows, columns), without output bias
    plus: Floats,  # (rows, columns)
    minus: Floats,
    pair_value: Floats,  # (rows, columns)
    last_value: Floats,  # (rows, columns)
    own_of: Floats,  # (columns, rows) the last token's own logit by the logits of its column, but for ...
    own_offset: Floats,  # (rows, columns) ... what those of the pairs have besides, and ...
    last_offset: Floats,  # (columns,) ... it has besides
    row: int,  # of the pair of which only x was asked ...
    copies: int,  # ... so many times ...
    share: Floats,  # (columns,) ... with this softmax weight ...
    doubt: float,  # ... give or take
) -> tuple[Floats, Floats]:  # (rows, columns), (columns,)
    """Logits of pairs, and of the last token of each column, that agree with each other and with the answers.

    For a last logit o every answer y is a quadratic equation in e^z with one positive root,
    m₊(y − a)·e^2z + e^o(y − b)·e^z + m₋(y + a) = 0, and the last token's own logit is a sum of logits of its column.
    That may hold for a small o and a large one, so of each column one more query was asked, with x alone.
    """
    largest = LARGEST_SHARE * np.abs(pair_value)
    smallest = np.where(minus > 0, -largest, last_value + (1 - LARGEST_SHARE) * (pair_value - last_value))
    within = np.clip(answer, smallest, largest)
    first, last = plus * (within - pair_value), minus * (within + pair_value)
    best, logits, own = np.full(own_of.shape[0], np.inf), np.zeros_like(answer), np.zeros(own_of.shape[0])
    for tried in OWN_LOGITS:
        middle = np.exp(tried) * (within - last_value)
        # Both forms of the root, of which one does not cancel.
        root = np.sqrt(np.maximum(middle**2 - 4 * first * last, 0.0))
        weight = np.where(
            middle > 0, -(middle + root) / (2 * first), 2 * last / np.where(root > middle, root - middle, 1)
        )
        solved = np.log(np.maximum(weight, np.finfo(np.float64).tiny))
        apart = np.abs(np.sum(own_of.T * (solved - own_offset), axis=0) + last_offset - tried)
        apart += np.abs(1 / (1 + np.exp(tried - solved[row]) / copies) - share) / doubt
        better = apart < best
        best, own = np.where(better, apart, best), np.where(better, tried, own)
        logits = np.where(better, solved, logits)
    return logits, own


def best_pairs(
    pair_slope: Floats,  # (n,) logit of x over the norm of the last token
    pair_offset: Floats,  # (n,) logit of x beside a zero token
    last_slope: Floats,  # (n,) logit of the last token over its norm squared
    last_offset: Floats,  # (n,) and over its norm
    pair_value: Floats,  # (n,)
    last_value: Floats,  # (n,) over its norm
    largest: float,  # norm of the last token
    copies: int,  # of x and −x together
) -> tuple[Floats, Floats, Floats]:
    """Norm of the last token and copies of x and −x for which each answer has most information on its form: all (n,).

    Unequal copies balance a pair whose logits are large; a shorter last token makes them smaller.
    """
    norms = largest * SHORTER
    plus = np.unique(np.clip(np.round(SHARES * copies), 1, max(1, copies - 1)))
    minus = np.maximum(copies - plus, 0.0)
    chosen = []
    for start in range(0, pair_slope.size, SEARCH_SLICE):
        some = slice(start, start + SEARCH_SLICE)

        def spread(numbers: Floats, some: slice = some) -> Floats:
            return numbers[some, None, None]

        norm = norms[None, :, None]
        answers = pair_answers(
            spread(pair_slope) * norm + spread(pair_offset),
            norm * (norm * spread(last_slope) + spread(last_offset)),
            plus[None, None, :],
            minus[None, None, :],
            spread(pair_value),
            norm * spread(last_value),
        )
        said = np.abs(norm * answers.by_pair)
        best = np.argmax(said.reshape(said.shape[0], -1), axis=1)
        which_norm, which_copies = np.divmod(best, plus.size)
        chosen.append((norms[which_norm], plus[which_copies], minus[which_copies]))
    first, second, third = (np.concatenate(parts) for parts in zip(*chosen, strict=True))
    return first, second, third
