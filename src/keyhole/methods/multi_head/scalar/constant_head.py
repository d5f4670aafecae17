"""A head with a score bias but no score, which no last token switches: read by itself, beside heads that do switch.

The queries [u + g; g] and [u − g; −g] with a long g make every head with a score choose u in one of them and not in
the other, so that together they tell half of Σ v_h, whatever these heads are. A head with a score bias c only has the
weight σ(u·c) in both. With S the sum of the two answers less what g and the output bias add, and v̄ the sum of all
values,

S − u·v̄ = u·v·tanh(u·c / 2),

and the two with u or ±g twice differ by 6·y·u·v / ((1 + 2y)·(2 + y)) for y = exp(u·c), but for what heads of equal
weights add, which a longer u tells. The ratio of both is a cubic equation for y.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats, floats, numpy_space
from keyhole.methods.base import Steps
from keyhole.methods.forms.scale import floor_power
from keyhole.methods.forms.value import Value
from keyhole.methods.multi_head.scalar.queries import columns
from keyhole.numerics.orthogonal import equal_overlap
from keyhole.numerics.svd import svd
from keyhole.queries import Measurements, Signature, sequences

# Norms of u and products of the norms of u and g that are tried, as powers of two; the product is then larger by this.
NORMS, PRODUCTS, BEYOND = range(-20, 21, 4), range(4, 29, 3), 4.0
# Answers are the same if they differ by no more than so many of their errors.
SAFELY = 8.0
# Weights between these tell the scale of the bias.
LEAST, MOST = 0.02, 0.98
# Heads of equal weights are told by a u longer by this.
LONGER = 2.0**24
# Bits of tokens that are left for their sums, and roundings that an answer may be off by.
SPARE_BITS, ROUNDINGS = 2, 2.0
# Rounds: the first tells which rows and norms tell most. Where a ratio of what they tell is larger than this, u is
# shorter by so much in the next, so often.
ROUNDS, MOST_RATIO, SHORTER, MOST_ROUNDS = 2, 1e4, 8.0, 6


@dataclass(frozen=True)
class ConstantHead:
    """The bias and the value of a head without a score, and their radii."""

    bias: Floats  # (width,)
    value: Floats  # (width, outputs)
    bias_radius: Floats  # (width,)
    value_radius: Floats  # (width, outputs)
    score_radius: float


class _Sums:
    """Sums of the answers for g and −g, over the norm of u, with the tokens that were asked and errors."""

    def __init__(self, signature: Signature, total: Value, direction: Floats) -> None:
        self.signature, self.direction = signature, direction
        self.vector, self.bias = columns(floats(total.vector)), np.ravel(floats(total.bias))
        self.bias_radius = np.ravel(floats(total.bias_radius))
        self.loudness = np.linalg.norm(self.vector, axis=0)  # (outputs,)

    def ask(
        self, rows: Floats, norms: Floats, products: Floats, copies: tuple[int, int] = (1, 1)
    ) -> Steps[tuple[Floats, Floats, Floats]]:  # (n, width), (n,), (n,) -> twice (n, outputs), (n, width)
        """Sums, their errors, and u over its norm as it was asked."""
        space = self.signature.space
        far = products / norms
        units = np.array([floor_power(2 * max(*pair)) for pair in zip(far, norms, strict=True)])
        units = (units * space.spacing * 2.0**SPARE_BITS)[:, None]
        tokens, last = (
            np.round(each / units) * units for each in (rows * norms[:, None], far[:, None] * self.direction)
        )
        sums: Floats = np.zeros((rows.shape[0], self.bias.size))
        for sign in (1.0, -1.0):
            sequence = [tokens + sign * last] * copies[0] + [sign * last] * copies[1]
            answers: Measurements = yield sequences("biases", space.asarray(np.stack(sequence, axis=1)))
            sums += columns(floats(answers.values)) - self.bias
        sums /= norms[:, None]
        self.loudness = np.maximum(self.loudness, 2 * np.max(np.abs(sums[norms == np.max(norms)]), axis=0))
        sizes = (far + norms)[:, None] * self.loudness + np.abs(self.bias)
        errors = (ROUNDINGS * space.eps * sizes + 2 * self.bias_radius) / norms[:, None]
        return sums, errors, tokens / norms[:, None]


def ask_constant_head(signature: Signature, total: Value, rng: np.random.Generator) -> Steps[ConstantHead | None]:
    """The only head that has a bias but no score; None where answers are not those of one."""
    width = signature.width
    direction = rng.standard_normal(width)
    sums = _Sums(signature, total, direction / np.linalg.norm(direction))
    basis = np.asarray(np.linalg.qr(rng.standard_normal((width, width)))[0])
    scale = yield from _ask_scale(sums, basis[:1])
    if scale is None:
        return None
    norm, head, rounds = scale, None, 0
    for _ in range(MOST_ROUNDS):
        if rounds == ROUNDS:
            return head
        head = yield from _ask_basis(sums, basis, norm)
        if head is None:
            norm /= SHORTER
            continue
        rounds += 1
        # Rows that all say as much of the loudest combination of values, with logits of about one.
        loudest = head.value @ svd(head.value)[2][0]
        basis = floats(equal_overlap(numpy_space(), basis, loudest))
        norm = floor_power(2 / max(float(np.max(np.abs(basis @ head.bias))), 1e-300))
    return None


def _ask_basis(sums: _Sums, basis: Floats, norm: float) -> Steps[ConstantHead | None]:
    """Bias and value along the rows of a basis; None where answers are not those of such a head."""
    width = basis.shape[0]
    norms = np.full(width, norm)
    _, _, settled = yield from _ask_settled(sums, basis, norms)
    products = BEYOND * settled
    whole, errors, rows = yield from sums.ask(basis, norms, products)
    first, first_errors, _ = yield from sums.ask(basis, norms, products, (2, 1))
    last, last_errors, _ = yield from sums.ask(basis, norms, products, (1, 2))
    errors = np.maximum(np.maximum(errors, first_errors), last_errors)
    long_first, _, _ = yield from sums.ask(basis, LONGER * norms, LONGER * products, (2, 1))
    long_last, _, _ = yield from sums.ask(basis, LONGER * norms, LONGER * products, (1, 2))
    odd = whole - rows @ sums.vector  # u·v·tanh(u·c/2)
    even = (first - last) - (long_first - long_last)
    sizes = np.maximum(np.linalg.norm(even, axis=1), 1e-300)
    ratios = np.sum(odd * even, axis=1) / sizes**2
    if not np.all(np.abs(ratios) < MOST_RATIO):
        return None
    odds = np.array([_odds(ratio) for ratio in ratios])  # y
    gains = (1 + 2 * odds) * (2 + odds) / (6 * odds)
    slopes = 6 * odds**2 + 2 * (3 - 6 * ratios) * odds - (3 + 6 * ratios)
    unknown = np.linalg.norm(errors, axis=1) / sizes
    logit_errors = np.abs(6 * (odds + 1) / slopes) * 4 * (1 + np.abs(ratios)) * unknown
    value_errors = gains[:, None] * (4 * errors + np.abs(even) * logit_errors[:, None])
    back = np.linalg.inv(rows)
    return ConstantHead(
        bias=back @ np.log(odds) / norm,
        value=back @ (gains[:, None] * even),
        bias_radius=np.sqrt(back**2 @ logit_errors**2) / norm,
        value_radius=np.sqrt(back**2 @ value_errors**2),
        score_radius=float(np.max(logit_errors / products)) * width,
    )


def _ask_settled(sums: _Sums, basis: Floats, norms: Floats) -> Steps[tuple[Floats, Floats, Floats]]:
    """What u·v·tanh(u·c/2) is for each row, its errors, and the product of norms from which on it stays the same."""
    products = np.exp2(np.array(PRODUCTS, dtype=np.float64))
    many = products.size
    every = np.repeat(basis, many, axis=0), np.repeat(norms, many), np.tile(products, norms.size)
    whole, errors, rows = yield from sums.ask(*every)
    twice, more, _ = yield from sums.ask(*every, (2, 1))  # of heads without a bias one of each tells nothing
    odd, both = (each.reshape(norms.size, many, -1) for each in (whole - rows @ sums.vector, twice))
    errors = np.maximum(errors, more).reshape(odd.shape)
    allowed = SAFELY * (errors[:, :, None] + errors[:, None])
    apart = [np.any(np.abs(each[:, :, None] - each[:, None]) > allowed, axis=3) for each in (odd, both)]
    larger = products[None, :] > products[:, None]
    unsettled = np.any((apart[0] | apart[1]) & larger, axis=2)  # (n, products): a larger one differs
    first = np.argmin(unsettled, axis=1)
    index = np.arange(norms.size)
    return odd[index, first], errors[index, first], products[first]


def _ask_scale(sums: _Sums, row: Floats) -> Steps[float | None]:  # (1, width)
    """The norm of u at which logits are about one."""
    norms = np.exp2(np.array(NORMS, dtype=np.float64))
    levels, errors, _ = yield from _ask_settled(sums, np.repeat(row, norms.size, axis=0), norms)
    top = levels[-1]
    size = float(top @ top)
    if size <= float(errors[-1] @ errors[-1]):
        return None
    weights = levels @ top / size
    clear = (weights > LEAST) & (weights < MOST) & (np.linalg.norm(errors, axis=1) < LEAST * size**0.5)
    if not np.any(clear):
        return None
    best = int(np.argmin(np.where(clear, np.abs(weights - 0.5), np.inf)))
    return floor_power(float(norms[best]) / (2 * float(np.arctanh(weights[best]))))


def _odds(ratio: float) -> float:
    """The positive root of 2y³ + (3 − 6r)·y² − (3 + 6r)·y − 2."""
    roots = np.roots([2.0, 3 - 6 * ratio, -(3 + 6 * ratio), -2.0])
    return float(np.max(roots.real))
