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
# Combinations of parameters that change answers by less than this part of others change nothing.
SINGULAR = 1e-12
# Random errors whose effect on the parameters is worked out, for radii; to this relative accuracy.
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
    that the solver has only the dependence between neurons to sort out. A combination that changes nothing, such as
    the scale of a ReLU neuron, is none of them.
    """

    def __init__(self, net: NetArrays, x: Floats, errors: Floats, activation: str) -> None:
        z = x @ net.inner.T + net.bias
        self.weights = 1 / errors[:, None]
        self.hidden = self.weights * activate(activation, z)
        self.slope = self.weights * activate_slope(activation, z)
        self.x, self.net = np.column_stack([x, np.ones(x.shape[0])]), net
        self.outputs = net.outer.shape[1]
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
        return _whiten(blocks)

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
            matrix = np.stack([self.forward(row) for row in np.eye(self.shape[1])], axis=1)
            solutions = np.linalg.lstsq(matrix, right, rcond=SINGULAR)[0].T
        else:
            operator = LinearOperator(self.shape, matvec=self.forward, rmatvec=self.backward, dtype=np.float64)
            fit = partial(lsqr, operator, atol=tolerance, btol=tolerance, conlim=0.0, iter_lim=MOST_ITERATIONS)
            solutions = np.stack([fit(column)[0] for column in right.T])
        changes = [self.change(solution) for solution in solutions]
        return [NetArrays(inner[:, :-1], inner[:, -1], outer, affine) for inner, outer, affine in changes]


def _whiten(gram: Floats) -> Floats:  # (..., n, n)
    """A root T of the inverse, T·Tᵀ = inverse, on the part of the space where there is one."""
    # Parameters of very different size first get the same.
    size = np.sqrt(np.einsum("...ii->...i", gram))
    size = np.where(size > 0, size, 1.0)
    values, vectors = np.linalg.eigh(gram / (size[..., :, None] * size[..., None, :]))
    used = values > SINGULAR * values[..., -1:]
    roots = np.where(used, 1 / np.sqrt(np.where(used, values, 1.0)), 0.0)
    return np.asarray((vectors * roots[..., None, :]) @ np.swapaxes(vectors, -1, -2) / size[..., :, None])


def answers_of(net: NetArrays, x: Floats, activation: str) -> Floats:  # (m, width) -> (m, outputs)
    """What the net answers."""
    hidden = activate(activation, x @ net.inner.T + net.bias)
    return np.asarray(hidden @ net.outer + x @ net.affine[:, :-1].T + net.affine[:, -1])


def refit(
    start: NetArrays, x: Floats, answers: Floats, errors: Floats, activation: str, rng: np.random.Generator
) -> Refit:  # (m, width), (m, outputs), (m,)
    """The net nearest to the answers, and what their errors, within radii, do to its parameters."""
    net, residual = start, _residual(start, x, answers, errors, activation)
    for _ in range(MOST_STEPS):
        change = _Linearised(net, x, errors, activation).solve(residual.reshape(-1, 1), TOLERANCE)[0]
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
    linear = _Linearised(net, x, errors, activation)
    changes = linear.solve(rng.standard_normal((linear.shape[0], DRAWS)), DRAW_TOLERANCE)

    def spread(name: str) -> Floats:
        squares = np.stack([getattr(change, name) ** 2 for change in changes])
        return np.asarray(np.sqrt(np.mean(squares, axis=(0, *range(2, squares.ndim)))))

    affine = np.stack([change.affine for change in changes])
    return Refit(
        net,
        spread("inner"),
        spread("bias"),
        spread("outer"),
        float(np.sqrt(np.mean(affine[..., :-1] ** 2))),
        float(np.sqrt(np.mean(affine[..., -1] ** 2))),
        float(np.max(np.abs(residual), initial=0.0)),
    )


def _residual(net: NetArrays, x: Floats, answers: Floats, errors: Floats, activation: str) -> Floats:
    return np.asarray((answers - answers_of(net, x, activation)) / errors[:, None])
