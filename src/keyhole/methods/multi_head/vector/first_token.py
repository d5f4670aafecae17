"""How many heads there are, and the values and odds of one token in each of them, from the odds of that token.

A token of odds p, in m copies against one other, has the weight w_m = m·p/(1 + m·p), so that two multiplicities obey
k·w_m − m·w_k + (m − k)·w_k·w_m = 0. Answers are sums of heads, each with its own p: a functional c with c·answer = w of
one head obeys that too, which is linear in (c, c·cᵀ). The null space of as many equations as needed has one dimension
per head, and one eigenproblem in it yields every c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.multi_head.vector.device_fits import TokensData, fit_tokens
from keyhole.methods.multi_head.vector.probe import HeadsHidden, VectorQueries
from keyhole.methods.multi_head.vector.token_fit import TokenData, fit_token
from keyhole.numerics.svd import condition, least_squares, singular_values, svd
from keyhole.recovery import Outcome

# Copies of the token and of the last one, by the length they need; ratios far apart say most.
COPIES = {9: ((1, 8), (1, 2), (2, 1), (8, 1)), 5: ((1, 4), (1, 1), (4, 1)), 3: ((1, 2), (1, 1), (2, 1))}
# Equations of the pencil over those that are needed, and how often it is tried with twice as many.
SPARE_EQUATIONS = 1.2
ATTEMPTS = 3
# Every other last token is shorter, so that a score bias shows.
SHORTER = 0.4
# More heads than this are not looked for where answers fill all outputs: the pencil would cost more than it saves.
MOST_FILLED = 64
# Singular values count from this many times what errors make, and fits fail beyond this many errors.
CLEAR, MISFIT = 4.0, 16.0
# Logits beyond this say too little.
LARGEST = 7.0
# Fits are not mended further where residuals are this many errors.
ENOUGH = 4.0
# Errors are followed through all stages by so many random draws of them, and values known no better than this are not.
DRAWS, BLURRED = 8, 0.02


@dataclass(frozen=True)
class FirstToken:
    """One token in all heads."""

    token: Floats  # (width,)
    last: (
        Floats  # (n, width) last tokens it was read beside: each g, followed by token + g where all positions are seen
    )
    logits: Floats  # (n, heads) of the token against each of them
    values: Floats  # (heads, outputs)
    singular: Floats  # values of the answers, the heads first
    pencil: Pencil
    residual: float
    floor: float  # singular values below this are errors
    logit_draws: Floats  # (draws, n, heads) errors that the logits may have
    value_draws: Floats  # (draws, heads, outputs) and the values with them

    @property
    def least_distance(self) -> float:
        """How far apart logits of two heads must be, relatively, to show as two."""
        shift = 0.2 * float(np.sqrt(np.mean(np.minimum(self.logits**2, 1.0))))  # of weights, for logits off by a factor
        size = float(np.sqrt(np.mean(np.sum(self.values**2, axis=1)) * self.singular.size))
        return self.floor / max(shift * size, 1e-300)

    @property
    def logit_sizes(self) -> Floats:  # (heads,)
        """Root mean squares of the logits; a few large ones, which are hardly known, do not count for more."""
        sizes = np.abs(self.logits)
        typical = np.median(sizes, axis=0)
        return np.asarray(
            np.where(typical > LARGEST, typical, np.sqrt(np.mean(np.minimum(sizes, LARGEST) ** 2, axis=0)))
        )

    @property
    def heads(self) -> int:
        """Heads that show."""
        return int(self.values.shape[0])


def ask_first_token(queries: VectorQueries) -> Steps[FirstToken]:
    """One token beside random last ones, in several multiplicities: the rank of its answers is the number of heads."""
    copies = next(ratios for length, ratios in COPIES.items() if queries.longest >= length)
    token = queries.on_grid(queries.scale * queries.directions(1)[0])
    answers = np.zeros((0, len(copies), queries.outputs))
    last = np.zeros((0, queries.width))
    wanted, spare = queries.first_round, SPARE_EQUATIONS * queries.patience
    for _ in range(ATTEMPTS):
        while wanted > last.shape[0]:
            new = queries.scale * queries.directions(-(-(wanted - last.shape[0]) // len(queries.views)))
            new[1::2] *= SHORTER
            new = queries.on_grid(new)
            stacked = yield from queries.ask_pairs("heads", new, token, copies)
            ends = np.stack([new, new + token][: len(queries.views)], axis=1)
            answers = np.concatenate([answers, stacked.reshape(-1, *stacked.shape[2:])])
            last = np.concatenate([last, ends.reshape(-1, queries.width)])
            heads = _count(queries, answers)[0]
            wanted = _enough(heads, len(copies), spare, queries)
        start = _solve(queries, token, last, answers, copies)
        if start is not None:
            return start
        spare *= 2.0
        wanted = _enough(heads, len(copies), spare, queries)
    raise HeadsHidden(
        Outcome.WRONG_FAMILY,
        f"the answers for one token span {heads} dimensions of {queries.outputs}, which are not the weights of {heads} "
        f"heads: values of some heads are dependent (OV_2 = ±OV_1, or more heads than outputs), or the box is no layer "
        f"of heads",
    )


def _count(queries: VectorQueries, answers: Floats) -> tuple[int, Floats, float]:
    """The heads that show, the singular values, and what errors alone make of those."""
    flat = answers.reshape(-1, queries.outputs)
    singular = np.asarray(singular_values(flat))
    floor = float(CLEAR * queries.noise * (flat.shape[0] ** 0.5 + queries.outputs**0.5))
    if singular[0] <= floor:
        raise Unrecoverable(
            Outcome.NOT_IDENTIFIABLE, "the values of all heads are zero, so that no answer depends on a score matrix"
        )
    return int(np.sum(singular > floor)), singular, floor


def _enough(heads: int, multiplicities: int, spare: float, queries: VectorQueries) -> int:
    """Last tokens that determine so many heads, with some to spare."""
    if heads == queries.outputs and heads > MOST_FILLED:
        raise HeadsHidden(
            Outcome.WRONG_FAMILY,
            f"the answers for one token fill all {heads} outputs: there are as many heads or more, or no heads",
        )
    each = multiplicities * (multiplicities - 1) // 2
    return max(int(np.ceil(spare * equations(heads) / each)) + 2, (heads + 4) // multiplicities + 2)


def _solve(
    queries: VectorQueries, token: Floats, last: Floats, answers: Floats, copies: tuple[tuple[int, int], ...]
) -> FirstToken | None:
    """The heads; None where the answers are not those of softmax weights within their errors."""
    heads, singular, floor = _count(queries, answers)
    flat = answers.reshape(-1, queries.outputs)
    frame = svd(flat)[2][:heads]
    ratios = np.array([many / few for many, few in copies])
    turned = answers @ frame.T
    whiten = flat.shape[0] ** 0.5 / singular[:heads]
    pencil = solve_pencil(turned * whiten, ratios, np.random.default_rng(queries.rng.integers(2**63)))
    weights = (turned * whiten) @ pencil.functionals.T  # (n, multiplicities, heads)
    least = queries.signature.space.spacing
    weights = np.clip(weights, least, 1 - least)
    trust = weights * (1 - weights)  # logits of weights near 0 and 1 are the least known
    odds = np.log(weights / (1 - weights)) - np.log(ratios)[:, None]
    guess = np.sum(trust * odds, axis=1) / np.sum(trust, axis=1)
    group = np.repeat(np.arange(last.shape[0], dtype=np.int64), len(copies))
    asked = TokenData(
        answers=flat,
        group=group,
        odds=np.zeros((flat.shape[0], heads)),
        copies=np.tile(ratios, last.shape[0]),
        known=np.zeros((heads, queries.outputs)),
        total=token @ queries.linear,
    )
    fit = _fit(queries, asked, guess)
    if not fit.residual <= MISFIT * queries.errors(fit.logits, fit.values):
        return None
    size = queries.residual_error(fit.residual, fit.freedom, fit.logits, fit.values)
    draws = fit.draw(size)
    _check_apart(fit.values, draws[1])
    return FirstToken(token, last, fit.logits, fit.values, singular, pencil, fit.residual, floor, *draws)


@dataclass(frozen=True)
class _Fit:
    """The fit of the token: where it was made does not show."""

    logits: Floats  # (n, heads)
    values: Floats  # (heads, outputs)
    residual: float
    freedom: int
    # How logits (draws, n, heads) and values (draws, heads, outputs) follow errors of answers of this size, as drawn.
    draw: Callable[[float], tuple[Floats, Floats]]


def _fit(queries: VectorQueries, asked: TokenData, guess: Floats) -> _Fit:
    space, enough, rng = queries.work, ENOUGH * queries.noise, queries.rng
    if space.on_cpu:
        fit = fit_token(asked, guess, enough)
        shape = DRAWS, asked.answers.shape[0] + 1, queries.outputs
        return _Fit(
            fit.logits,
            fit.values,
            fit.residual,
            fit.freedom,
            lambda size: fit.respond(size * rng.standard_normal(shape)),
        )
    groups, heads = guess.shape
    answers = asked.answers.reshape(1, groups, -1, queries.outputs)
    both = TokensData(
        answers=space.asarray(answers),
        odds=space.asarray(asked.odds.reshape(*answers.shape[1:3], heads)),
        copies=space.asarray(asked.copies.reshape(answers.shape[1:3])),
        known=space.asarray(asked.known),
        total=space.asarray(asked.total[None]),
    )
    fits = fit_tokens(space, both, space.asarray(guess[None]), enough)

    def draw(size: float) -> tuple[Floats, Floats]:
        shape = 1, DRAWS, asked.answers.shape[0] + 1, fits.frame.shape[2]
        logits, values = (floats(each)[0] for each in fits.respond(size * space.normal(rng, *shape)))
        return logits, values

    return _Fit(floats(fits.logits)[0], floats(fits.values)[0], float(fits.residual[0]), fits.freedom, draw)


def _check_apart(values: Floats, draws: Floats) -> None:
    """End where errors of answers, small as they are, trade the values of two heads for each other."""
    errors = np.sqrt(np.mean(draws**2, axis=(0, 2))) / np.sqrt(np.mean(values**2, axis=1))
    if not np.all(errors <= BLURRED):
        raise Unrecoverable(
            Outcome.TOO_NOISY,
            f"the logits of {int(np.sum(errors > BLURRED))} of {values.shape[0]} heads are so near to each other that "
            f"their values cannot be told apart: {np.max(errors):.1g} of their size is unknown; an oracle of higher "
            f"precision tells more",
        )


@dataclass(frozen=True)
class Pencil:
    """The functionals that separate heads, and their condition."""

    functionals: Floats  # (heads, heads): row h applied to an answer is the weight in head h
    null: float  # the largest singular value of the null space, over the largest of all
    gap: float  # the smallest one outside it
    condition: float  # of the eigenproblem


def equations(heads: int) -> int:
    """Equations that determine the functionals: unknowns less the dimension of the null space."""
    return heads * (heads + 3) // 2 - heads


def solve_pencil(answers: Floats, copies: Floats, rng: np.random.Generator) -> Pencil:  # (n, multiplicities, heads)
    """All heads from whitened answers, one coordinate per head."""
    heads = answers.shape[2]
    i, j = np.triu_indices(heads)
    double = np.where(i == j, 1.0, 2.0)
    rows = []
    for a in range(copies.size):
        for b in range(a + 1, copies.size):
            one, two, k, m = answers[:, a], answers[:, b], copies[a], copies[b]
            products = (one[:, i] * two[:, j] + one[:, j] * two[:, i]) / 2 * double
            rows.append(np.hstack([k * two - m * one, (m - k) * products]) / np.hypot(k, m))
    system = np.concatenate(rows)
    sizes = np.linalg.norm(system, axis=0)
    sizes = np.where(sizes > 0, sizes, 1.0)
    full = system.shape[0] < system.shape[1]
    _, singular, right = svd(system / sizes, full_matrices=full)
    singular = np.concatenate([singular, np.zeros(right.shape[0] - singular.size)])
    space = right[-heads:] / sizes
    linear, quadratic = space[:, :heads], np.zeros((heads, heads, heads))
    quadratic[:, i, j] = quadratic[:, j, i] = space[:, heads:]
    turn = rng.standard_normal(heads)
    matrix = least_squares(linear, quadratic @ turn).T
    eigenvalues, vectors = np.linalg.eig(matrix)
    worst = float(condition(vectors)) * float(condition(linear))
    vectors = vectors * (eigenvalues / (turn @ vectors))
    gap = float(singular[-heads - 1] / singular[0]) if singular.size > heads else 1.0
    return Pencil(vectors.real.T, float(singular[-heads] / singular[0]), gap, worst)
