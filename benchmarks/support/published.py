"""Published learners of attention, as plainly as they can be written: what Keyhole is measured beside."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import mpmath
import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

import keyhole as kh

Floats = npt.NDArray[np.float64]
# Numbers of float64, or of mpmath in arrays of objects.
Numbers = npt.NDArray[Any]
Answer = Callable[[Numbers], Numbers]  # (batch, length, width) -> (batch,)


class Counted:
    """Answers of an oracle, counted."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.queries = answer, 0

    def __call__(self, tokens: Numbers) -> Numbers:
        self.queries += len(tokens)
        return self.answer(tokens)


def from_pairs(answer: Answer, width: int) -> kh.SingleHead:
    """One head by Theorem 4.1 of arXiv 2601.16873 with u = e_i: queries [e_i + e_j; e_j] of unit size."""
    units = np.eye(width)
    value = answer(units[:, None, :])
    tokens = np.stack([units[:, None, :] + units[None, :, :], np.broadcast_to(units, (width, width, width))], axis=2)
    answers = answer(tokens.reshape(-1, 2, width)).reshape(width, width)
    with np.errstate(all="ignore"):
        weight = (answers - value[None, :]) / value[:, None]
        score = np.log(weight / (1 - weight))
    return kh.SingleHead(score, value)


class Arithmetic(Protocol):
    """How numbers are computed with."""

    def numbers(self, whole: Iterable[int]) -> Numbers: ...
    def exp(self, numbers: Numbers) -> Numbers: ...
    def log(self, numbers: Numbers) -> Numbers: ...
    def solve(self, matrix: Numbers, right: Numbers) -> Numbers: ...
    def roots(self, coefficients: Numbers) -> Numbers: ...


class Double:
    """float64."""

    def numbers(self, whole: Iterable[int]) -> Numbers:
        return np.array(list(whole), dtype=np.float64)

    def exp(self, numbers: Numbers) -> Numbers:
        return np.asarray(np.exp(numbers))

    def log(self, numbers: Numbers) -> Numbers:
        return np.asarray(np.log(numbers))

    def solve(self, matrix: Numbers, right: Numbers) -> Numbers:
        return np.asarray(np.linalg.lstsq(matrix, right, rcond=None)[0])

    def roots(self, coefficients: Numbers) -> Numbers:
        found = np.roots(coefficients)
        return np.real(np.concatenate([found, np.full(len(coefficients) - 1 - len(found), -1e300)]))


class Digits:
    """So many decimal digits, by mpmath."""

    def __init__(self, digits: int) -> None:
        mpmath.mp.dps = digits

    def numbers(self, whole: Iterable[int]) -> Numbers:
        return np.array([mpmath.mpf(each) for each in whole], dtype=object)

    def exp(self, numbers: Numbers) -> Numbers:
        return np.asarray(np.vectorize(mpmath.exp, otypes=[object])(numbers))

    def log(self, numbers: Numbers) -> Numbers:
        return np.asarray(np.vectorize(mpmath.log, otypes=[object])(numbers))

    def solve(self, matrix: Numbers, right: Numbers) -> Numbers:
        return np.array(list(mpmath.lu_solve(mpmath.matrix(matrix.tolist()), mpmath.matrix(list(right)))), dtype=object)

    def roots(self, coefficients: Numbers) -> Numbers:
        found = mpmath.polyroots(list(coefficients), maxsteps=500, extraprec=400)
        return np.array([mpmath.re(each) for each in found], dtype=object)


def heads_in(arithmetic: Arithmetic, truth: kh.MultiHead) -> Answer:
    """The answers of heads of one output, in any arithmetic, to copies of one token and then another."""
    scores, values = (np.stack([np.asarray(getattr(h, name)) for h in truth.heads]) for name in ("score", "value"))

    def answer(tokens: Numbers) -> Numbers:
        answers = []
        for sequence in tokens:
            total: Any = 0
            for score, value in zip(scores, values, strict=True):
                first, last = sequence[0], sequence[-1]
                weight = (len(sequence) - 1) * arithmetic.exp(np.array([(first - last) @ (score @ last)]))[0]
                total = total + (weight * (first @ value) + last @ value) / (weight + 1)
            answers.append(total)
        return np.array(answers)

    return answer


def from_copies(answer: Answer, width: int, heads: int, scale: float, arithmetic: Arithmetic) -> kh.MultiHead:
    """Several heads behind one number by rational interpolation in copies, in the manner of arXiv 2608.03294.

    [m × (u + g); g] answers g·v̄ + Σ_h c_h·m·t_h/(1 + m·t_h) with t_h = exp(uᵀ·W_h·g) and c_h = u·v_h, a rational
    function of m: 2H values of it determine its poles −1/t_h. Heads are told by c_h, which does not depend on g; those
    of e_i are matched with those of e_1 by e_1 + e_i, whose forms and values are sums. 2H(d² + d − 1) + d queries;
    the paper counts 4Hd² − 2H + 1.
    """
    units = np.eye(width) * scale
    total = answer(units[:, None, :])  # values of single tokens: of all heads together
    logits = np.zeros((width, width, heads), dtype=np.float64)
    values = np.zeros((width, heads), dtype=np.float64)
    for row in range(width):
        found = [_poles(answer, units[row], units[j], total[j], heads, arithmetic) for j in range(width)]
        for column, (own, shares) in enumerate(found):
            _, order = linear_sum_assignment(np.abs(found[0][1][:, None] - shares[None, :]))
            logits[row, column], values[row] = own[order], values[row] + shares[order] / width
        if row > 0:
            both = _poles(answer, units[0] + units[row], units[0], total[0], heads, arithmetic)
            order = _matching(logits[0, 0], values[0], logits[row, 0], values[row], both)
            logits[row], values[row] = logits[row][:, order], values[row, order]
    return kh.MultiHead([kh.SingleHead(logits[:, :, h] / scale**2, values[:, h] / scale) for h in range(heads)])


def _poles(
    answer: Answer, first: Floats, last: Floats, bare: Any, heads: int, arithmetic: Arithmetic
) -> tuple[Floats, Floats]:
    """Logits (heads,) and values (heads,) of a pair of tokens, from 2H queries."""
    copies = arithmetic.numbers(range(1, 2 * heads + 1))
    asked = [np.stack([*[first + last] * count, last])[None] for count in range(1, 2 * heads + 1)]
    seen = np.array([answer(tokens)[0] - bare for tokens in asked])
    powers = np.stack([copies**k for k in range(1, heads + 1)], axis=1)
    solution = arithmetic.solve(np.concatenate([powers, -seen[:, None] * powers], axis=1), seen)
    denominator = np.concatenate([solution[heads:][::-1], arithmetic.numbers([1])])
    with np.errstate(all="ignore"):
        odds = -1 / arithmetic.roots(denominator)  # t_h
        odds = np.where(odds > 0, odds, abs(odds) + 1e-300)
        shapes = (copies[:, None] * odds / (1 + copies[:, None] * odds))[:heads]
        shares = arithmetic.solve(shapes, seen[:heads])
        return np.asarray(arithmetic.log(odds), dtype=np.float64), np.asarray(shares, dtype=np.float64)


def _matching(one: Floats, one_share: Floats, two: Floats, two_share: Floats, both: tuple[Floats, Floats]) -> Any:
    """Which head of the second token belongs to each of the first: sums must occur among those of both together."""
    logits = one[:, None, None] + two[None, :, None] - both[0]
    shares = one_share[:, None, None] + two_share[None, :, None] - both[1]
    cost = np.nan_to_num(np.min(np.abs(logits) + np.abs(shares), axis=2), nan=1e9, posinf=1e9)
    return linear_sum_assignment(cost)[1]


def from_labels(answer: Answer, width: int, largest: float, accuracy: float) -> kh.SingleHead:
    """One head from signs of its answers, each entry bisected by itself, as in Appendix B of arXiv 2601.16873.

    The sign of [x; −2x; g] with x along e_i and g along e_j, long and short, tells whether W_ij is above a threshold;
    every entry begins at ±`largest` and takes log₂(2·largest/accuracy) labels. Ratios of values are bisected as angles.
    """
    units, steps = np.eye(width), math.ceil(math.log2(2 * largest / accuracy))
    signs = answer(units[:, None, :])
    low, high = np.full(width, -math.pi / 2), np.full(width, math.pi / 2)
    for _ in range(steps):  # tan(angle) is v_i over v_0
        middle = (low + high) / 2
        tokens = np.cos(middle)[:, None] * units - np.sin(middle)[:, None] * units[0]
        up = (answer(tokens[:, None, :]) > 0) == (signs[0] > 0)
        low, high = np.where(up, middle, low), np.where(up, high, middle)
    value = signs[0] * np.tan((low + high) / 2)
    value[0] = signs[0]
    below, above = np.full((width, width), -largest), np.full((width, width), largest)
    rows, columns = (each.ravel() for each in np.indices((width, width)))
    for _ in range(steps):
        middle = (below + above) / 2
        yes = _compare(answer, units, rows, columns, middle.ravel(), signs).reshape(width, width)
        below, above = np.where(yes, middle, below), np.where(yes, above, middle)
    return kh.SingleHead((below + above) / 2, value / np.linalg.norm(value))


def _compare(
    answer: Answer, units: Floats, rows: Any, columns: Any, threshold: Floats, signs: Floats
) -> npt.NDArray[np.bool_]:
    """Whether W_ij is above its threshold, one label each."""
    ratio = np.where(threshold == 0, 1.0, 2.0)
    product = np.where(threshold == 0, 1.0, np.log(2) / 3 / np.where(threshold == 0, 1.0, np.abs(threshold)))
    turn = np.where(threshold < 0, -1.0, 1.0)
    first = (np.sqrt(product) * 2.0**100)[:, None] * units[rows]
    last = (turn * np.sqrt(product) * 2.0**-100)[:, None] * units[columns]
    labels = answer(np.stack([first, -ratio[:, None] * first, last], axis=1)) * signs[rows]
    return np.asarray(np.where(threshold < 0, labels < 0, labels > 0))
