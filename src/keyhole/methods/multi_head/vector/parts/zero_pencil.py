"""One token in all heads whose weights never come near their ends, as those of normed keys and queries.

m zero tokens before a token, which have logits of zero, make its weight α with 1/α = 1 + (E + m)·exp(−s), affine in m,
where E is what the last token weighs of itself. So the weights at three m obey an equation that is homogeneous in
products of two: for a functional c with c·answer = κ·α of one head it is linear in c·cᵀ. The null space of all of them
is spanned by these matrices of all heads, which one eigenproblem takes apart. The token turned round has exp(+s), which
tells κ.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.multi_head.vector.first_token import CLEAR
from keyhole.methods.multi_head.vector.parts.long_tokens import LongQueries
from keyhole.methods.multi_head.vector.probe import HeadsHidden
from keyhole.numerics.svd import least_squares, pseudo_inverse, svd
from keyhole.recovery import Outcome

# Zero tokens before the token, or as many as there is room for, but three numbers of them.
ZEROS, FEWEST = (0, 1, 4, 12), 3
# Steps of Gauss and Newton from where the null space is.
STEPS = 4
# Last tokens for each head, of which values are read beside some, those beyond the heads, and equations over those
# that are needed.
CHOICE, SPARE, SPARE_EQUATIONS = 4, 4, 1.5
# Last tokens beside which the token is turned round.
TURNED = 4
# Weights are those of one head if 1/weight is affine up to so many errors.
MISFIT = 1e4


@dataclass(frozen=True)
class NormedToken:
    """One token in all heads, beside several last ones."""

    token: Floats  # (width,)
    last: Floats  # (n, width)
    values: Floats  # (heads, outputs)
    inverse: Floats  # (outputs, heads) takes answers of the token to weights
    logits: Floats  # (n, heads)
    own: Floats  # (n, heads) what each last token weighs of itself, against a zero token
    error: float  # deviation of a weight

    @property
    def heads(self) -> int:
        """Heads that show."""
        return int(self.values.shape[0])


def ask_normed_token(queries: LongQueries, token: Floats) -> Steps[NormedToken]:
    """The heads, and the token's values and logits in each of them."""
    zeros = tuple(sorted({int(min(most, queries.longest - 2)) for most in ZEROS}))
    if zeros[0] < 0 or len(zeros) < FEWEST:
        raise Unrecoverable(
            Outcome.NOT_IDENTIFIABLE,
            f"telling normed heads apart takes sequences of {FEWEST + 1} tokens, all of them in sight (max_length)",
        )
    last, answers, wanted = np.zeros((0, queries.width)), np.zeros((0, len(zeros), queries.outputs)), SPARE
    while last.shape[0] < wanted:
        new = _directions(queries, wanted - last.shape[0])
        columns = []
        for count in zeros:
            queries.before = count
            columns += [(yield from queries.ask_token("heads", token, new))]
        queries.before = 0
        last, answers = np.vstack([last, new]), np.concatenate([answers, np.stack(columns, axis=1)])
        heads, frame, sizes = _span(queries, answers)
        equations = int(np.ceil(SPARE_EQUATIONS * heads * (heads - 1) / 2 / (len(zeros) - 1)))
        wanted = max(CHOICE * heads, heads + SPARE, equations)
    turned = []
    for count in (zeros[0], zeros[-1]):
        queries.before = count
        turned += [-(yield from queries.ask_token("heads", -token, last[:TURNED]))]
    queries.before = 0
    whiten = frame.T * (answers[:, 0].shape[0] * len(zeros)) ** 0.5 / sizes
    functionals = _solve(answers @ whiten, zeros, np.random.default_rng(queries.rng.integers(2**63)))
    inverse = whiten @ functionals.T
    shares = answers @ inverse
    signs = np.sign(np.sum(shares, axis=(0, 1)))
    shares, inverse = shares * signs, inverse * signs
    slopes, starts, misfits = _lines(shares, zeros)
    back = np.stack(turned, axis=1) @ inverse
    back_slopes = (1 / back[:, 1] - 1 / back[:, 0]) / (zeros[-1] - zeros[0])
    products = slopes[:TURNED] * back_slopes
    if not (np.all(shares > 0) and np.all(products > 0) and np.all(slopes > 0)):
        raise _hidden(heads)
    # Where the slopes are large they are known best.
    factors = np.exp(np.mean(np.log(products), axis=0) / 2)  # 1/κ
    inverse = inverse * factors
    error = queries.noise * float(np.max(np.linalg.norm(inverse, axis=0)))
    if not np.all(misfits * np.min(shares**2, axis=1) <= MISFIT * error / np.min(factors)):
        raise _hidden(heads)
    slopes, starts = slopes / factors, starts / factors
    values = pseudo_inverse(inverse) if heads == queries.outputs else _values(shares * factors, answers)
    return NormedToken(token, last, values, inverse, -np.log(slopes), (starts - 1) / slopes, error)


def _hidden(heads: int) -> HeadsHidden:
    return HeadsHidden(
        Outcome.WRONG_FAMILY,
        f"answers to one token span {heads} dimensions and are not the weights of {heads} heads of normed keys: values "
        f"of some heads are dependent, or the form is another",
    )


def _directions(queries: LongQueries, count: int) -> Floats:
    drawn = queries.rng.standard_normal((count, queries.width))
    return np.asarray(drawn / np.linalg.norm(drawn, axis=1, keepdims=True))


def _span(queries: LongQueries, answers: Floats) -> tuple[int, Floats, Floats]:
    """The heads that show, what their answers span, and how much of each direction there is."""
    flat = answers.reshape(-1, queries.outputs)
    _, sizes, right = svd(flat)
    floor = CLEAR * queries.noise * (flat.shape[0] ** 0.5 + queries.outputs**0.5)
    heads = max(1, int(np.sum(sizes > floor)))
    return heads, right[:heads], sizes[:heads]


def _solve(
    answers: Floats, zeros: tuple[int, ...], rng: np.random.Generator
) -> Floats:  # (n, zeros, heads) -> (heads, heads)
    """The functionals of all heads, each up to a factor."""
    heads = answers.shape[2]
    if heads == 1:
        return np.ones((1, 1))
    i, j = np.triu_indices(heads)
    double = np.where(i == j, 1.0, 2.0)

    def products(one: Floats, two: Floats) -> Floats:
        return (one[:, i] * two[:, j] + one[:, j] * two[:, i]) / 2 * double

    rows = []
    for a, b, c in combinations(range(len(zeros)), 3):
        k, m, n = zeros[a], zeros[b], zeros[c]
        one, two, three = answers[:, a], answers[:, b], answers[:, c]
        equation = (n - m) * products(two, three) + (k - n) * products(one, three) + (m - k) * products(one, two)
        rows.append(equation / np.linalg.norm([n - m, k - n, m - k]))
    system = np.concatenate(rows)
    right = svd(system, full_matrices=system.shape[0] < system.shape[1])[2][-heads:]
    space = np.zeros((heads, heads, heads))
    space[:, i, j] = space[:, j, i] = right
    one, two = (np.tensordot(rng.standard_normal(heads), space, 1) for _ in range(2))
    vectors = np.linalg.eig(np.linalg.solve(two.T, one.T).T)[1]
    return np.stack([_polished(each, answers, zeros) for each in np.real(vectors).T])


def _polished(functional: Floats, answers: Floats, zeros: tuple[int, ...]) -> Floats:  # (heads,), (n, zeros, heads)
    """Least squares of the equations of one head, each over its error: the null space does not know of its rank."""
    for _ in range(STEPS):
        functional = functional / np.linalg.norm(functional)
        weights = answers @ functional
        rows, rest = [functional[None]], [np.zeros(1)]
        for a, b, c in combinations(range(len(zeros)), 3):
            k, m, n = zeros[a], zeros[b], zeros[c]
            one, two, three = weights[:, a], weights[:, b], weights[:, c]
            slopes = np.stack(
                [(k - n) * three + (m - k) * two, (n - m) * three + (m - k) * one, (n - m) * two + (k - n) * one],
                axis=1,
            )
            left = (n - m) * two * three + (k - n) * one * three + (m - k) * one * two
            error = np.linalg.norm(slopes, axis=1)
            rows.append(np.einsum("nz,nzh->nh", slopes, answers[:, [a, b, c]]) / error[:, None])
            rest.append(-left / error)
        functional = functional + least_squares(np.concatenate(rows), np.concatenate(rest))
    return functional


def _lines(shares: Floats, numbers: tuple[int, ...]) -> tuple[Floats, Floats, Floats]:  # (n, zeros, heads)
    """Slopes and starts of 1/share by the number of zeros, and by how much it is no line: (n, heads) each."""
    zeros = np.array(numbers, dtype=float)
    inverse, weights = 1 / shares, shares**2  # errors of 1/share are in proportion to its square
    weights = weights**2
    total = np.sum(weights, axis=1)
    middle = np.sum(weights * zeros[:, None], axis=1) / total
    mean = np.sum(weights * inverse, axis=1) / total
    across = zeros[:, None] - middle[:, None, :]
    slopes = np.sum(weights * across * inverse, axis=1) / np.sum(weights * across**2, axis=1)
    starts = mean - slopes * middle
    misfits = np.max(np.abs(inverse - starts[:, None, :] - slopes[:, None, :] * zeros[:, None]), axis=1)
    return slopes, starts, misfits


def _values(weights: Floats, answers: Floats) -> Floats:  # (n, zeros, heads), (n, zeros, outputs) -> (heads, outputs)
    flat = weights.reshape(-1, weights.shape[2])
    return np.asarray(least_squares(flat, answers.reshape(flat.shape[0], -1)))
