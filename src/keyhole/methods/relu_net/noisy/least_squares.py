"""Least squares for nets of one hidden layer: neurons are added where the residual asks for them, refined, dropped.

Rows are (x, 1) over the standard deviation of their answer, and so are answers: ReLU is homogeneous, so that weighting
a row is scaling it, and a perfect fit leaves squares of mean one. While an affine part is fitted beside the neurons,
|z| may stand for ReLU(z) = |z|/2 + z/2: neurons then have no orientation, and no wrong one can hold up the descent.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.linalg import LinAlgError, cho_solve, cholesky, solve_triangular

from keyhole.arrays import Floats

Singles = npt.NDArray[np.float32]

TINY = 1e-300  # instead of a zero to divide by
# Keeps the products of nearly equal neurons invertible, relative to their diagonal; one refinement step mends the rest.
JITTER = 1e-10
# Damping relative to the curvature of a lone neuron: where it starts, by what it moves, and its limits.
DAMPING = 1e-2
DAMPING_UP = 5.0
DAMPING_DOWN = 4.0
LEAST_DAMPING = 1e-7
MOST_REJECTED = 6
# Conjugate gradients stop early: far from the minimum an exact step is worth no more than a rough one.
INNER_STEPS = 60
INNER_TOLERANCE = 0.1
# A neuron whose output weight is below this fraction of the largest is moved as if it had that much.
LEAST_WEIGHT = 1e-3
# Descent ends when this many steps together gain less than this fraction of the squares.
LOOK_BACK = 3
LEAST_GAIN = 0.02
# Neurons whose planes are this close (cosine, in whitened coordinates) are tried as one.
NEARLY_EQUAL = 0.9
# Random planes screened for each addition, and how different those picked must be.
SCREENED = 2000
DIFFERENT = 0.7


@dataclass(frozen=True, eq=False)
class NetProblem:
    """Answers to be explained by neurons, and by an affine part or only a constant beside them."""

    rows: Floats  # (n, width + 1): (x, 1) over the standard deviation of the answer
    answers: Floats  # (n, outputs), over the same
    affine: bool = True
    absolute: bool = True  # neurons are |z|, not ReLU(z); only beside an affine part

    @cached_property
    def _qr(self) -> tuple[Floats, Floats]:
        white, mixing = np.linalg.qr(self.rows)
        size = self.rows.shape[0] ** 0.5
        return white * size, mixing / size

    @property
    def white(self) -> Floats:
        """Rows in coordinates in which their covariance is the identity, (n, width + 1)."""
        return self._qr[0]

    @property
    def mixing(self) -> Floats:
        """The triangular map from whitened coordinates back to rows, (width + 1, width + 1)."""
        return self._qr[1]

    @cached_property
    def white_single(self) -> Singles:
        """Whitened rows in single precision, which is enough to choose a step."""
        return self.white.astype(np.float32)

    def to_white(self, planes: Floats) -> Floats:  # (neurons, width + 1) -> the same
        """Planes (a, b) as unit vectors of the whitened coordinates."""
        return unit(planes @ self.mixing.T)

    @property
    def beside(self) -> Floats:
        """Columns fitted beside the neurons, (n, width + 1) or (n, 1)."""
        return self.rows if self.affine else self.rows[:, -1:]

    def freedom(self, neurons: int) -> int:
        """Answers less parameters."""
        return self.answers.size - parameters(neurons, self.rows.shape[1] - 1, self.answers.shape[1], self.affine)


def parameters(neurons: int, width: int, outputs: int, affine: bool) -> int:
    """Numbers that determine a net, the free scale of each neuron not counted."""
    return neurons * (width + outputs) + outputs * (1 + (width if affine else 0))


def unit(vectors: Floats) -> Floats:  # (n, m) -> (n, m)
    """Vectors of length one; zero stays."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(lengths > 0, lengths, 1.0))


@dataclass(frozen=True, eq=False)
class NetFit:
    """Planes with the best output layer for them."""

    problem: NetProblem
    planes: Floats  # (neurons, width + 1), unit vectors in whitened coordinates
    before: Floats  # (n, neurons): what goes into the activation
    features: Floats  # (n, neurons + beside)
    output: Floats  # (neurons + beside, outputs)
    residual: Floats  # (n, outputs)
    factor: Floats  # lower Cholesky factor of the features' products, scaled to diagonal one
    scale: Floats  # (neurons + beside,) by which they were scaled
    squares: float  # of the residual

    @property
    def neurons(self) -> int:
        """How many."""
        return int(self.planes.shape[0])

    @property
    def weights(self) -> Floats:
        """Of the neurons, (neurons, outputs)."""
        return self.output[: self.neurons]

    def slopes(self) -> Floats:
        """Derivative of each activation, (n, neurons)."""
        return np.sign(self.before) if self.problem.absolute else np.asarray((self.before > 0).astype(np.float64))

    def worth(self) -> Floats:
        """By how much squares would grow without each neuron, the others staying where they are, (neurons,)."""
        inverse = cho_solve((self.factor, True), np.eye(self.scale.size))
        variance = np.diag(inverse) / self.scale**2
        return np.asarray(np.sum(self.weights**2, axis=1) / variance[: self.neurons])

    def raw_planes(self) -> Floats:
        """Planes (a, b) with a·x + b of mean square one over the rows, (neurons, width + 1)."""
        return np.asarray(solve_triangular(self.problem.mixing, self.planes.T).T)


def fit_planes(problem: NetProblem, planes: Floats) -> NetFit:  # (neurons, width + 1), whitened
    """The best output layer for these planes."""
    planes = unit(planes)
    before = problem.white @ planes.T
    hidden = np.abs(before) if problem.absolute else np.maximum(before, 0.0)
    features = np.concatenate([hidden, problem.beside], axis=1)
    products = features.T @ features
    scale = np.sqrt(np.diag(products))
    scale = np.where(scale > 0, scale, 1.0)
    products = products / scale / scale[:, None]
    products[np.diag_indices_from(products)] += JITTER
    factor = cholesky(products, lower=True)

    def solve(answers: Floats) -> Floats:
        return np.asarray(cho_solve((factor, True), (features.T @ answers) / scale[:, None]) / scale[:, None])

    output = solve(problem.answers)
    output = output + solve(problem.answers - features @ output)
    residual = problem.answers - features @ output
    return NetFit(problem, planes, before, features, output, residual, factor, scale, float(np.sum(residual**2)))


def descend(fit: NetFit, steps: int, enough: float = 0.0) -> NetFit:
    """Levenberg–Marquardt on the planes, the output layer always at its best (variable projection).

    Steps are found by conjugate gradients in single precision; the squares that decide are in double precision.
    """
    damping, history = DAMPING, [fit.squares]
    for _ in range(steps if fit.neurons else 0):
        if fit.squares <= enough:
            break
        push = _Push(fit)
        for _ in range(MOST_REJECTED):
            moved = _try(fit.problem, fit.planes + push.step(damping))
            if moved is not None and moved.squares < fit.squares:
                break
            damping *= DAMPING_UP
        else:
            break
        fit, damping = moved, max(damping / DAMPING_DOWN, LEAST_DAMPING)
        history.append(fit.squares)
        if len(history) > LOOK_BACK and history[-1] > (1 - LEAST_GAIN) * history[-1 - LOOK_BACK]:
            break
    return fit


def _try(problem: NetProblem, planes: Floats) -> NetFit | None:
    if not np.all(np.isfinite(planes)):  # a step that single precision cannot hold
        return None
    try:
        return fit_planes(problem, planes)
    except LinAlgError:  # two neurons have become one
        return None


class _Push:
    """The linearised problem at a fit, with the output layer projected out; each neuron in units of its weight."""

    def __init__(self, fit: NetFit) -> None:
        sizes = np.linalg.norm(fit.weights, axis=1)
        self.sizes = np.maximum(sizes, max(LEAST_WEIGHT * float(np.max(sizes)), TINY))
        self.directions = (fit.weights / self.sizes[:, None]).astype(np.float32)  # (neurons, outputs)
        self.slopes = fit.slopes().astype(np.float32)
        self.rows = fit.problem.white_single
        self.count = np.float32(self.rows.shape[0])
        # Orthonormal columns that span what the output layer can do.
        self.spanned = solve_triangular(fit.factor, (fit.features / fit.scale).T, lower=True).T.astype(np.float32)
        self.unit = float(np.sqrt(np.mean(fit.residual**2))) or 1.0
        self.gradient = self._adjoint((fit.residual / self.unit).astype(np.float32))

    def _forward(self, move: Singles) -> Singles:  # (neurons, width + 1) -> (n, outputs)
        change = ((self.rows @ move.T) * self.slopes) @ self.directions
        return np.asarray(change - self.spanned @ (self.spanned.T @ change))

    def _adjoint(self, change: Singles) -> Singles:  # (n, outputs) -> (neurons, width + 1)
        return np.asarray((self.slopes * (change @ self.directions.T)).T @ self.rows / self.count)

    def step(self, damping: float) -> Floats:  # -> (neurons, width + 1)
        """The damped step by conjugate gradients."""
        solution, left = np.zeros_like(self.gradient), self.gradient.copy()
        along, size = left.copy(), float(np.sum(left**2))
        enough = INNER_TOLERANCE**2 * size
        for _ in range(INNER_STEPS):
            if size <= enough:
                break
            pushed = self._adjoint(self._forward(along)) + np.float32(damping) * along
            length = np.float32(size / max(float(np.sum(along * pushed)), TINY))
            solution += length * along
            left -= length * pushed
            size, before = float(np.sum(left**2)), size
            along = left + np.float32(size / before) * along
        return np.asarray(self.unit * solution.astype(np.float64) / self.sizes[:, None])


def enlarge(fit: NetFit, count: int, rng: np.random.Generator) -> Floats:  # -> (neurons + count, width + 1), whitened
    """The planes of a fit and, of many random ones, those whose neurons explain most of the residual, no two alike."""
    planes = unit(rng.standard_normal((max(SCREENED, 4 * count), fit.planes.shape[1])))
    hidden = np.abs(fit.problem.white_single @ planes.T.astype(np.float32))
    hidden -= np.mean(hidden, axis=0)
    explained = np.sum((hidden.T @ fit.residual.astype(np.float32)) ** 2, axis=1) / np.sum(hidden**2, axis=0)
    picked: list[int] = []
    order = np.argsort(-explained)
    for place in order:
        if len(picked) == count:
            break
        if not picked or np.max(np.abs(planes[picked] @ planes[place])) < DIFFERENT:
            picked.append(int(place))
    some = [int(place) for place in order if int(place) not in set(picked)][: count - len(picked)]  # in few dimensions
    return np.concatenate([fit.planes, planes[picked + some]])


def slim(fit: NetFit, allowed: float) -> NetFit:
    """Nearly equal neurons made one, and the least useful dropped while squares grow by no more than `allowed`."""
    fit = _merge(fit)
    while fit.neurons:
        worth = fit.worth()
        order = np.argsort(worth)
        count = int(np.searchsorted(np.cumsum(worth[order]), allowed / 2))
        if count == 0:
            return fit
        dropped = order[: max(1, count // 2)]  # worth is that of one alone: not all of them at once
        smaller = _try(fit.problem, np.delete(fit.planes, dropped, axis=0))
        if smaller is None:
            return fit
        allowed -= max(0.0, smaller.squares - fit.squares)
        fit = smaller
    return fit


def _merge(fit: NetFit) -> NetFit:
    """Each pair of nearly equal neurons made one that does about what both did."""
    planes, weights = fit.planes.copy(), fit.weights
    cosines = planes @ planes.T
    kept = np.ones(fit.neurons, dtype=bool)
    first, second = np.nonzero(np.triu(np.abs(cosines) > NEARLY_EQUAL, 1))
    for i, j in sorted(zip(first, second, strict=True), key=lambda pair: -abs(cosines[pair])):
        if not (kept[i] and kept[j]) or (not fit.problem.absolute and cosines[i, j] < 0):
            continue
        sizes = np.linalg.norm(weights[[i, j]], axis=1)
        if weights[i] @ weights[j] >= 0:
            planes[i] = sizes[0] * planes[i] + np.sign(cosines[i, j]) * sizes[1] * planes[j]
        elif sizes[1] > sizes[0]:  # they nearly cancel
            planes[i] = planes[j]
        kept[j] = False
    return fit if np.all(kept) else (_try(fit.problem, planes[kept]) or fit)
