"""All parameters of a net of one hidden layer fitted together to answers: Gauss–Newton from a start that is near."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.sparse.linalg import LinearOperator, lsqr

from keyhole.arrays import Floats
from keyhole.families.activations import activate, activate_slope

# Steps are repeated until they no longer help, and at most this often.
MOST_STEPS = 12
# A step is worth taking when it makes the residual smaller than this part.
WORTH = 0.9
# Residuals of this part of their radii, root mean square, are rounding: radii are many standard deviations.
ROUNDING = 0.03
# Up to so many unknowns a dense solution is the fastest.
DENSE = 900
# Iterations of the solver of large systems, and when they stop: the next step does what is left to do.
MOST_ITERATIONS = 3000
TOLERANCE = 1e-7
# Combinations of parameters that change answers by less than this part of others are left as they are. What changes
# answers by less than their spacing is not known at all: its standard error is that of the spacing, and none is zero.
SINGULAR = 1e-12
SPACING = 2.0**-52
# Combinations of the parameters of one neuron are made to change the answers alike, by at most this factor.
MOST_STRETCHED = 1e6
# Random errors whose effect on the parameters is worked out, for radii of large nets; to this relative accuracy.
DRAWS, DRAW_TOLERANCE = 3, 1e-3


@dataclass(frozen=True)
class NetArrays:
    """Parameters, or changes of them."""

    inner: Floats  # (k, width)
    bias: Floats  # (k,)
    outer: Floats  # (k, outputs)
    affine: Floats  # (outputs, width + 1)

    def plus(self, part: float, change: NetArrays) -> NetArrays:
        """The parameters with a part of a change."""
        return NetArrays(*(a + part * b for a, b in zip(vars(self).values(), vars(change).values(), strict=True)))

    def flat(self) -> Floats:
        """All numbers."""
        return np.concatenate([np.ravel(array) for array in vars(self).values()])


@dataclass(frozen=True)
class Known:
    """What was known of the parameters before, with radii on their entries."""

    net: NetArrays
    radius: NetArrays


@dataclass(frozen=True)
class Refit:
    """Parameters with radii on their entries, by neuron, and how well they fit."""

    net: NetArrays
    inner_radius: Floats  # (k,)
    bias_radius: Floats  # (k,)
    outer_radius: Floats  # (k,)
    affine_slope_radius: float
    affine_level_radius: float
    worst: float  # largest residual over its radius


class _Linearised:
    """The derivative of the answers with respect to the parameters, as a map; rows divided by their errors.

    Unknowns are combinations of the parameters of one neuron that are independent and change the answers alike, so
    that the solver has only the dependence between neurons to sort out. The scale of a ReLU neuron, which no answer
    depends on, is none of them; what these answers happen to leave open is.
    """

    def __init__(self, net: NetArrays, x: Floats, errors: Floats, activation: str, known: Known | None = None) -> None:
        self.known = known
        z = x @ net.inner.T + net.bias
        self.weights = 1 / errors[:, None]
        self.hidden = self.weights * activate(activation, z)
        self.slope = self.weights * activate_slope(activation, z)
        self.x, self.net = np.column_stack([x, np.ones(x.shape[0])]), net
        self.outputs, self.has_scale = net.outer.shape[1], activation != "relu"
        self.neuron = self._blocks()  # (k, width + 1 + outputs, the same)
        self.flat = _whiten((self.x * self.weights).T @ (self.x * self.weights))  # (width + 1, the same)
        self.shape = (x.shape[0] * self.outputs, sum(array.size for array in vars(net).values()))

    def _blocks(self) -> Floats:
        width, outer = self.x.shape[1], self.net.outer
        blocks = np.zeros((outer.shape[0], width + self.outputs, width + self.outputs))
        for number, weight in enumerate(outer):
            sloped = self.slope[:, number : number + 1] * self.x
            hidden = self.hidden[:, number]
            blocks[number, :width, :width] = (weight @ weight) * (sloped.T @ sloped)
            blocks[number, :width, width:] = np.outer(sloped.T @ hidden, weight)
            blocks[number, width:, :width] = blocks[number, :width, width:].T
            blocks[number, width:, width:] = (hidden @ hidden) * np.eye(self.outputs)
        scale = np.column_stack([self.net.inner, self.net.bias, -outer])
        return _whiten(blocks, None if self.has_scale else scale)

    def change(self, vector: Floats) -> tuple[Floats, Floats, Floats]:
        """Changes of inner weights with biases (k, width + 1), outer weights (k, outputs) and the affine map."""
        width, count = self.x.shape[1], self.neuron.shape[0]
        own = vector[: count * (width + self.outputs)].reshape(count, width + self.outputs, 1)
        mixed = (self.neuron @ own)[:, :, 0]
        return mixed[:, :width], mixed[:, width:], vector[own.size :].reshape(self.outputs, -1) @ self.flat.T

    def forward(self, vector: Floats) -> Floats:
        """What a change of the unknowns does to the answers."""
        inner, outer, affine = self.change(np.ravel(vector))
        rise = (self.slope * (self.x @ inner.T)) @ self.net.outer + self.hidden @ outer
        return np.asarray((rise + self.weights * (self.x @ affine.T)).ravel())

    def backward(self, vector: Floats) -> Floats:
        """The transposed map."""
        pull = np.reshape(vector, (self.x.shape[0], self.outputs))
        inner = (self.slope * (pull @ self.net.outer.T)).T @ self.x
        own = np.concatenate([inner, self.hidden.T @ pull], axis=1)
        affine = (self.weights * pull).T @ self.x @ self.flat
        return np.concatenate([(np.swapaxes(self.neuron, 1, 2) @ own[:, :, None]).ravel(), affine.ravel()])

    def solve(self, right: Floats, tolerance: float) -> list[NetArrays]:  # (rows, n) -> n
        """Least squares of least norm, as changes of the parameters."""
        if self.shape[1] <= DENSE:
            matrix, before = self._matrix(), self._before()
            right = np.concatenate([right, np.tile(before[:, None], right.shape[1])])
            solutions = np.linalg.lstsq(matrix, right, rcond=SINGULAR)[0].T
        else:
            operator = LinearOperator(self.shape, matvec=self.forward, rmatvec=self.backward, dtype=np.float64)
            fit = partial(lsqr, operator, atol=tolerance, btol=tolerance, conlim=0.0, iter_lim=MOST_ITERATIONS)
            solutions = np.stack([fit(column)[0] for column in right.T])
        return [self._named(solution) for solution in solutions]

    def _matrix(self) -> Floats:  # (rows, unknowns)
        """What every unknown does to the answers, and to the parameters that were known before."""
        unknowns = np.eye(self.shape[1])
        rows = np.stack([self.forward(row) for row in unknowns], axis=1)
        if self.known is None:
            return rows
        moved = np.stack([self._named(row).flat() for row in unknowns], axis=1)
        return np.concatenate([rows, moved / self.known.radius.flat()[:, None]])

    def _before(self) -> Floats:  # (parameters,)
        """How far parameters are from those known before, over their radii."""
        if self.known is None:
            return np.zeros(0)
        return np.asarray((self.known.net.flat() - self.net.flat()) / self.known.radius.flat())

    def _named(self, vector: Floats) -> NetArrays:
        """A change of the parameters; of ReLU neurons one that leaves the lengths of inner weights as they are.

        What is known of the parameters, and what is said of their errors, is so at these lengths.
        """
        inner, outer, affine = self.change(vector)
        if not self.has_scale:
            net = self.net
            squares = np.sum(net.inner**2, axis=1)
            longer = np.sum(net.inner * inner[:, :-1], axis=1) / np.where(squares > 0, squares, 1.0)
            inner = inner - longer[:, None] * np.column_stack([net.inner, net.bias])
            outer = outer + longer[:, None] * net.outer
        return NetArrays(inner[:, :-1], inner[:, -1], outer, affine)

    def standard_errors(self, rng: np.random.Generator) -> NetArrays:
        """What independent errors of the answers, of size one each, do to the parameters."""
        if self.shape[1] <= DENSE:
            _, values, vectors = np.linalg.svd(self._matrix(), full_matrices=False)
            known = np.maximum(values, SPACING * values[0]) if values.size and values[0] > 0 else np.ones_like(values)
            changes = [self._named(vector) for vector in vectors / known[:, None]]
            return NetArrays(*(np.sqrt(sum(np.square(part) for part in parts)) for parts in _columns(changes)))
        changes = self.solve(rng.standard_normal((self.shape[0], DRAWS)), DRAW_TOLERANCE)
        drawn = NetArrays(*(np.sqrt(sum(np.square(part) for part in parts) / DRAWS) for parts in _columns(changes)))
        # Each neuron alone errs as much at least, however few iterations see it.
        alone, width = np.linalg.norm(self.neuron, axis=2), self.x.shape[1]
        return NetArrays(
            np.maximum(drawn.inner, alone[:, : width - 1]),
            np.maximum(drawn.bias, alone[:, width - 1]),
            np.maximum(drawn.outer, alone[:, width:]),
            drawn.affine,
        )


def _columns(changes: list[NetArrays]) -> list[tuple[Floats, ...]]:
    """The arrays of several nets by what they are."""
    return list(zip(*(vars(change).values() for change in changes), strict=True))


def _whiten(gram: Floats, held: Floats | None = None) -> Floats:  # (..., n, n), (..., n)
    """A root T of the inverse, T·Tᵀ = inverse, as far as it may stretch; nothing along `held`."""
    # Parameters of very different size first get the same.
    size = np.sqrt(np.einsum("...ii->...i", gram))
    size = np.where(size > 0, size, 1.0)
    scaled = gram / (size[..., :, None] * size[..., None, :])
    if held is not None:
        along = held * size
        along = along / np.linalg.norm(along, axis=-1, keepdims=True)
        # Larger than every other eigenvalue, whose sum is the trace.
        scaled = scaled + 2.0 * gram.shape[-1] * along[..., :, None] * along[..., None, :]
    values, vectors = np.linalg.eigh(scaled)
    roots = 1 / np.sqrt(np.maximum(values, np.max(values, axis=-1, keepdims=True) / MOST_STRETCHED**2))
    if held is not None:
        roots[..., -1] = 0.0
    return np.asarray((vectors * roots[..., None, :]) @ np.swapaxes(vectors, -1, -2) / size[..., :, None])


def answers_of(net: NetArrays, x: Floats, activation: str) -> Floats:  # (m, width) -> (m, outputs)
    """What the net answers."""
    hidden = activate(activation, x @ net.inner.T + net.bias)
    return np.asarray(hidden @ net.outer + x @ net.affine[:, :-1].T + net.affine[:, -1])


def refit(
    start: NetArrays,
    x: Floats,  # (m, width)
    answers: Floats,  # (m, outputs)
    errors: Floats,  # (m,)
    activation: str,
    rng: np.random.Generator,
    radius: NetArrays | None = None,
) -> Refit:
    """The net nearest to the answers, and what their errors, within radii, do to its parameters.

    Where a start is known within a radius it says what the answers leave open.
    """
    known = None if radius is None else Known(start, radius)
    net, residual = start, _residual(start, x, answers, errors, activation)
    for _ in range(MOST_STEPS):
        change = _Linearised(net, x, errors, activation, known).solve(residual.reshape(-1, 1), TOLERANCE)[0]
        better, part = None, 1.0
        while better is None and part > 1e-3:
            tried = net.plus(part, change)
            left = _residual(tried, x, answers, errors, activation)
            if np.linalg.norm(left) < np.linalg.norm(residual):
                better = tried
            part *= 0.3
        if better is None:
            break
        enough = np.linalg.norm(left) > WORTH * np.linalg.norm(residual)
        enough |= np.sqrt(np.mean(left**2)) < ROUNDING
        net, residual = better, left
        if enough:
            break
    wide = _Linearised(net, x, errors, activation, known).standard_errors(rng)
    return Refit(
        net,
        np.max(wide.inner, axis=1),
        wide.bias,
        np.max(wide.outer, axis=1),
        float(np.max(wide.affine[:, :-1])),
        float(np.max(wide.affine[:, -1])),
        float(np.max(np.abs(residual), initial=0.0)),
    )


def _residual(net: NetArrays, x: Floats, answers: Floats, errors: Floats, activation: str) -> Floats:
    return np.asarray((answers - answers_of(net, x, activation)) / errors[:, None])
