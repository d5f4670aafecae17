"""One head whose tokens are the rows of a finite alphabet, as those of a model behind token ids."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Array, Floats
from keyhole.families import SingleHead
from keyhole.gauge.identifiability import AlphabetSpan
from keyhole.methods.alphabet.columns import Columns, ask_columns, farthest
from keyhole.methods.alphabet.logits import COARSE, LogitTable
from keyhole.methods.alphabet.values import TokenValues, ask_values, combined, pivots
from keyhole.methods.base import Estimate, Method, Steps, Unrecoverable
from keyhole.queries import Signature
from keyhole.recovery import Outcome

ASSUMPTIONS = (
    "the box computes one softmax head over the tokens of its alphabet, read at the last position",
    "answers are right up to the rounding of their dtype and the declared noise",
    "nothing is said of tokens outside the alphabet's span: the head is the smallest that answers its sequences",
)
# Logits that say whether there is a score bias.
CHECKS = 3
# One answer enters several logits, whose errors then add up: entries are known to so many times their quadrature.
SHARED = 2.0


@dataclass(frozen=True)
class Score:
    """The part of score and score bias that the tokens show, and radii."""

    matrix: Floats  # (width, width)
    radius: Floats
    bias: Floats | None  # (width,)
    bias_radius: Floats | None


def alphabet(
    signature: Signature,
    rng: np.random.Generator,
    *,
    budget: float = np.inf,  # noqa: ARG001 - it cannot do with fewer
) -> Steps[Estimate[SingleHead]]:
    """Score and value of f(X) = Σ_i softmax_i(x_iᵀ·W·x_N + x_iᵀ·c)·x_iᵀ·V + b as far as tokens e_1, …, e_m show them.

    Determined are V on the span of the tokens and W on D × span, D the span of their differences, if the values of the
    tokens are not all equal: r·r₀ + r numbers, r = dim span and r₀ = dim D, from as many queries of one output where
    no logit drowns another. Beside r last tokens r₀ others are read each (`LogitTable`); a ladder of tokens reads
    those that drown the last one, for as many queries more as it has steps.

    Assumes what `ASSUMPTIONS` says; an alphabet whose values are all equal is reported as not identifiable.
    """
    assert signature.alphabet is not None  # a session gives none of another
    span, signature = AlphabetSpan.of(signature.alphabet.rows), signature.as_coarse()
    values = yield from ask_values(signature, span, rng)
    count, apart = span.numbers
    if apart == 0:
        raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, "the alphabet has one token: all sequences of it answer alike")
    if (signature.max_length or 2) < 2:
        raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, "sequences of one token show no logit: allow two (max_length)")
    order = values.chosen[pivots(span.rows[values.chosen], values.chosen.size)]
    columns = yield from ask_columns(signature, span, values, order[:count])
    score = yield from _ask_score(signature, span, values, columns)
    if score.bias is None and np.all(np.abs(score.matrix) <= score.radius):  # as much as it may be is its radius
        score = replace(score, matrix=0 * score.matrix, radius=score.radius + np.abs(score.matrix))
    return _estimate(signature, span, values, score)


def _ask_score(signature: Signature, span: AlphabetSpan, values: TokenValues, columns: Columns) -> Steps[Score]:
    """The score, with a bias where tokens tell it and one further last token shows it."""
    plain = _solve(signature, span, columns, biased=False)
    if span.unit is not None:
        return plain
    rows = np.column_stack([span.rows, np.ones(len(span.rows))])
    others = np.setdiff1d(np.arange(len(rows)), columns.lasts)
    if np.linalg.matrix_rank(rows[columns.lasts]) == span.numbers[0]:
        further = others[farthest(rows, columns.lasts, others, 1)]
        if not (yield from _ask_whether_biased(signature, span, values, int(further[0]), plain)):
            return plain
        columns = columns.with_more((yield from ask_columns(signature, span, values, further, columns.lasts)))
    if np.linalg.matrix_rank(rows[columns.lasts]) == span.numbers[0]:
        raise Unrecoverable(Outcome.SATURATED, "too few last tokens keep others readable to tell a score bias apart")
    biased = _solve(signature, span, columns, biased=True)
    if biased.bias is None or biased.bias_radius is None or np.all(np.abs(biased.bias) <= biased.bias_radius):
        return plain
    return biased


def _solve(signature: Signature, span: AlphabetSpan, columns: Columns, *, biased: bool) -> Score:
    """Score, or score and bias, from the keys of last tokens that span all."""
    inside = span.rows[columns.lasts] @ span.span
    if biased:
        inside = np.column_stack([inside, np.ones(len(inside))])
    known = 1 / np.linalg.norm(columns.errors, axis=1)  # the better, the more they count
    inverse = np.linalg.pinv(inside * known[:, None]) * known  # (r or one more, n)
    inner, errors = inverse @ columns.keys, combined(inverse, columns.errors, signature)  # (r or one more, r₀)
    onto, along, count = span.span, span.differences, span.numbers[0]
    solving = signature.space.rounding * float(np.linalg.cond(inside)) * float(np.max(np.abs(inner)))
    matrix = along @ inner[:count].T @ onto.T
    radius = combined(onto, combined(along, errors[:count].T, signature).T, signature).T
    score = Score(matrix, SHARED * radius + solving, None, None)
    if not biased:
        return score
    bias_radius = SHARED * combined(along, errors[count], signature) + solving
    return replace(score, bias=along @ inner[count], bias_radius=bias_radius)


def _ask_whether_biased(
    signature: Signature, span: AlphabetSpan, values: TokenValues, last: int, score: Score
) -> Steps[bool]:
    """Whether some logits beside a further last token are not what the score alone makes of them."""
    table, first = LogitTable(signature, values), np.setdiff1d(values.chosen, [last])[:CHECKS]
    table.add(np.array([last]))
    yield from table.ask(np.zeros(first.size, dtype=np.int64), first)
    rows, end = span.rows[first] - span.rows[last], span.rows[last]
    expected, allowed = rows @ score.matrix @ end, np.sqrt(rows**2 @ score.radius**2 @ end**2)
    read = table.errors[0, first] < COARSE
    off = np.abs(table.logits[0, first] - expected) > allowed + table.errors[0, first]
    return bool(np.sum(read) < min(2, first.size)) or bool(np.any(off & read))  # of too few nothing follows


def _estimate(signature: Signature, span: AlphabetSpan, values: TokenValues, score: Score) -> Estimate[SingleHead]:
    """The head, its radii, and the fewest queries that could tell as much."""
    space, (count, apart) = signature.space, span.numbers

    def plain(numbers: Floats) -> Array:
        return space.asarray(numbers[..., 0] if values.plain else numbers)

    bias = None if score.bias is None or score.bias_radius is None else space.asarray(score.bias)
    params = SingleHead(
        space.asarray(score.matrix), plain(values.value), bias, None if values.bias is None else plain(values.bias)
    )
    radius = SingleHead(
        space.asarray(score.radius + space.rounding * np.max(np.abs(score.matrix))),
        plain(values.value_radius + space.rounding * np.max(np.abs(values.value))),
        None if bias is None else space.asarray(score.bias_radius),
        None if values.bias is None else plain(values.bias_radius + 0 * values.bias),
    )
    numbers = apart * (count + (bias is not None))
    details = {"tokens": len(span.rows), "span": count, "differences": apart, "score_bias": bias is not None}
    bound = -(-numbers // max(1, values.rank)) + count + (values.bias is not None)
    return Estimate(params, radius, bound, assumptions=ASSUMPTIONS, details=details)


ALPHABET = Method(
    name="alphabet",
    summary="one softmax head whose tokens are the rows of a finite alphabet",
    run=alphabet,
    families=("single-head",),
    takes_noise=("exact", "bounded", "rounded"),
    last_only=True,
    of_alphabet=True,
)
