"""The layer with its projections eliminated: what is left to fit are the scores, and nothing larger is ever stored.

For given scores Θ the best projections are a linear least-squares problem in the mixed tokens Z = [P_1·X … P_m·X], so
the residual is a function of Θ alone, r(Θ) = (1 − QQᵀ)·F with Q an orthonormal basis of the columns of Z. Its
Jacobian, in Kaufman's form, is −(1 − QQᵀ)·dZ·W with

    ∂F_a/∂Θ_i[j, l] = x_aj · (Cov_p(X)·W_i)[l, :],

where Cov_p is the covariance of the tokens under the weights p of token a in head i. It is applied, never written down:
five products of matrices per direction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy.linalg

from keyhole.arrays import Floats
from keyhole.families.attention_layer import AttentionLayer

# Columns of Z that are a combination of the others up to this part of their size are left out of the fit.
DEPENDENT = 1e-11
# Singular values below this part of the largest are rounding of the tokens themselves.
AGREES = 64 * np.finfo(float).eps
# Entries of the Jacobian that are written down at a time.
BLOCK = 2**22


@dataclass(frozen=True)
class LayerProblem:
    """Examples in the shape that the products want."""

    inputs: Floats  # (n, k, d)
    outputs: Floats  # (n, k, d_out)
    beside: Floats | None = None  # (n, k, some): a linear map of these is fitted beside the heads

    @property
    def rows(self) -> int:
        """Tokens in all examples."""
        return int(self.inputs.shape[0] * self.inputs.shape[1])

    @property
    def width(self) -> int:
        """Numbers per token."""
        return int(self.inputs.shape[2])

    @cached_property
    def tokens(self) -> Floats:  # (rows, d)
        """All tokens, one below the other."""
        return self.inputs.reshape(self.rows, self.width)

    @cached_property
    def turned(self) -> Floats:  # (n, d, k)
        """The transpose of each example."""
        return np.ascontiguousarray(np.swapaxes(self.inputs, 1, 2))

    @cached_property
    def single(self) -> list[Any]:  # (n, k, d), (n, d, k)
        """The examples and their transposes in single precision."""
        return [array.astype(np.float32) for array in (self.inputs, self.turned)]

    @cached_property
    def labels(self) -> Floats:  # (rows, d_out)
        """All outputs, one below the other."""
        return self.outputs.reshape(self.rows, -1)

    @cached_property
    def energy(self) -> float:
        """Sum of squares of the outputs."""
        return float(np.sum(self.labels**2))

    @cached_property
    def token_moments(self) -> tuple[Floats, Floats]:  # (d,), (d, d)
        """Eigenvalues and eigenvectors of the second moments of tokens."""
        values, vectors = np.linalg.eigh(self.tokens.T @ self.tokens)
        return values, vectors

    @cached_property
    def shared(self) -> Floats:  # (d, some), orthonormal
        """Directions in which the tokens of each example agree, as in a column of ones: no key shows a score there."""
        size = np.sqrt(np.mean(self.tokens**2, axis=0))
        size[size == 0.0] = 1.0
        apart = (self.inputs - np.mean(self.inputs, axis=1, keepdims=True)).reshape(self.rows, self.width) / size
        _, values, right = np.linalg.svd(np.linalg.qr(apart, mode="r"))
        values = np.append(values, np.zeros(self.width - len(values)))
        hidden = right[values <= AGREES * np.sqrt(self.tokens.size)].T / size[:, None]
        return np.asarray(np.linalg.qr(hidden)[0])

    @cached_property
    def logit_size(self) -> float:
        """How much the logits of an example usually differ where entries of scores are of standard deviation one."""
        apart = self.inputs - np.mean(self.inputs, axis=1, keepdims=True)
        k = self.inputs.shape[1]
        own, other = (float(np.mean(np.linalg.norm(each, axis=2))) for each in (self.inputs, apart))
        return max(own * other * float(np.sqrt(k / max(1, k - 1))), float(np.finfo(float).tiny))

    def _independent(self, heads: int) -> Floats | None:  # (m·d, m·d − (m − 1)·some), orthonormal
        """What shows of projections: of their parts along `shared` directions the mean; None where that is all."""
        count = self.shared.shape[1]
        if heads == 1 or count == 0:
            return None
        others = np.linalg.qr(self.shared, mode="complete")[0][:, count:]
        return np.hstack([np.kron(np.eye(heads), others), np.kron(np.ones((heads, 1)) / heads**0.5, self.shared)])

    def weights(self, scores: Floats) -> Floats:  # (m, d, d) -> (n, k, m, k)
        """Softmax weights of every token in every head."""
        weights = logits(self.inputs, self.turned, scores)
        weights = weights - np.max(weights, axis=-1, keepdims=True)
        np.exp(weights, out=weights)
        return np.asarray(weights / np.sum(weights, axis=-1, keepdims=True))

    def moved(self, layer: AttentionLayer, scores: Floats, projections: Floats) -> Floats:  # -> (rows, d_out)
        """How the outputs of a layer move with its parameters, to first order."""
        weights, m = self.weights(layer.scores), len(layer.scores)
        values = (self.inputs[:, None] @ layer.projections).reshape(len(self.inputs), -1, layer.projections.shape[2])
        products = Products(self.inputs, self.turned, weights, values, np.zeros((self.rows, 0)))
        return products.forward(scores) + mixture(self.inputs, weights) @ projections.reshape(m * self.width, -1)

    def at(self, scores: Floats) -> LayerPoint:
        """Everything about the fit with the given scores."""
        weights = self.weights(scores)
        mixed = mixture(self.inputs, weights)
        some = self._independent(len(scores))
        columns = mixed if some is None else mixed @ some
        count = columns.shape[1]
        if self.beside is not None:
            columns = np.hstack([columns, self.beside.reshape(self.rows, -1)])
        basis, triangle = orthonormal(columns)
        inside = basis.T @ self.labels
        residual = self.labels - basis @ inside
        stacked = _solve_triangle(triangle, inside)[:count]
        return LayerPoint(self, scores, weights, mixed, basis, stacked if some is None else some @ stacked, residual)


@dataclass(frozen=True, eq=False)
class LayerPoint:
    """The fit at given scores: projections, residual, and products with the Jacobian."""

    problem: LayerProblem
    scores: Floats  # (m, d, d)
    weights: Floats  # (n, k, m, k)
    mixed: Floats  # (rows, m·d)
    basis: Floats  # (rows, m·d, or fewer where mixed tokens depend on each other) orthonormal
    stacked: Floats  # (m·d, d_out): projections one below the other
    residual: Floats  # (rows, d_out)

    @cached_property
    def rss(self) -> float:
        """Residual sum of squares."""
        return float(np.sum(self.residual**2))

    @property
    def relative(self) -> float:
        """Root of the residual sum of squares over that of the outputs."""
        return float(np.sqrt(self.rss / self.problem.energy)) if self.problem.energy else 0.0

    @property
    def projections(self) -> Floats:  # (m, d, d_out)
        """The projections of the heads."""
        return self.stacked.reshape(self.scores.shape[0], self.problem.width, -1)

    @cached_property
    def products(self) -> Products:
        """Products with the Jacobian."""
        n, k, m, _ = self.weights.shape
        # Tokens through the projections: fewer numbers per example than tokens mixed by every token.
        values = self.problem.tokens @ self.projections  # (m, rows, d_out)
        values = values.reshape(m, n, k, -1).transpose(1, 0, 2, 3).reshape(n, m * k, -1)
        return Products(self.problem.inputs, self.problem.turned, self.weights, values, self.basis)

    @cached_property
    def quick(self) -> Products:
        """Products with the Jacobian in single precision, in half the time."""
        exact = self.products
        arrays = (array.astype(np.float32) for array in (exact.weights, exact.values, exact.basis))
        return Products(*self.problem.single, *arrays)

    @cached_property
    def gram_matrices(self) -> tuple[Floats, Floats]:  # (c, c), (m·d·d_out, c), c entries (j, i, l) of the scores
        """JᵀJ and QᵀJ as matrices: for few heads of narrow tokens faster than products, else too large."""
        outputs, count = self.residual.shape[1], self.scores.size
        curvature: Any = 0.0
        inside: Any = 0.0
        for own, maps, basis in self.sensed_blocks(np.float64):
            sensed = maps.reshape(len(own), -1, outputs)
            curvature += paired(own, sensed)
            crossed = (basis[:, :, None] * own[:, None, :]).reshape(len(own), -1)
            inside += crossed.T @ sensed.reshape(len(own), -1)
        shape = self.basis.shape[1], self.problem.width, -1, outputs
        inside = inside.reshape(shape).transpose(0, 3, 1, 2).reshape(-1, count)
        return curvature.reshape(count, count) - inside.T @ inside, inside

    def sensed_blocks(self, dtype: Any, heads: slice = slice(None)) -> Iterator[tuple[Floats, Floats, Floats]]:
        """Tokens (rows, d), what heads sense for them (rows, m, d, d_out), and rows of Q; some at a time."""
        n, k, _, _ = self.weights.shape
        projections = self.projections[heads].astype(dtype)
        wide = len(projections) * self.problem.width
        step = max(1, BLOCK // (k * wide * max(wide, k, self.problem.width, self.residual.shape[1])))
        for start in range(0, n, step):
            part, rows = slice(start, start + step), slice(start * k, (start + step) * k)
            inputs, weights = (array[part].astype(dtype) for array in (self.problem.inputs, self.weights[:, :, heads]))
            tokens = self.problem.tokens[rows].astype(dtype)
            yield tokens, sensed_maps(inputs, weights, projections), self.basis[rows].astype(dtype)


def relative_error(problem: LayerProblem, point: LayerPoint) -> float:
    """What the layer of a fit leaves over of other examples, over the size of their outputs."""
    mixed = LayerProblem(problem.inputs, problem.outputs).at(point.scores).mixed
    left = np.linalg.norm(problem.labels - mixed @ point.stacked)
    return float(left / max(np.sqrt(problem.energy), np.finfo(float).tiny))


@dataclass(frozen=True, eq=False)
class Products:
    """Products with the Jacobian of the residual in the scores, in the precision of its arrays."""

    inputs: Floats  # (n, k, d)
    turned: Floats  # (n, d, k)
    weights: Floats  # (n, k, m, k)
    values: Floats  # (n, m·k, d_out): tokens times projections
    basis: Floats  # (rows, m·d) orthonormal

    def outside(self, labels: Floats) -> Floats:  # (rows, d_out) -> (rows, d_out)
        """What no projections can explain."""
        return np.asarray(labels - self.basis @ (self.basis.T @ labels))

    def forward(self, direction: Floats) -> Floats:  # (m, d, d) -> (rows, d_out)
        """How the answers move with the scores, projections fixed."""
        n, k, m, _ = self.weights.shape
        moved = self._through(logits(self.inputs, self.turned, direction)).reshape(n, k, m * k)
        return np.asarray((moved @ self.values).reshape(n * k, -1))

    def backward(self, labels: Floats) -> Floats:  # (rows, d_out) -> (m, d, d)
        """The transpose of `forward`."""
        (n, k, m, _), d = self.weights.shape, self.inputs.shape[2]
        return np.asarray((self.inputs.reshape(n * k, d).T @ self.sensed(labels)).reshape(d, m, d).transpose(1, 0, 2))

    def sensed(self, labels: Floats) -> Floats:  # (rows, d_out) -> (rows, m·d): Cov_p(X)·W_i·label
        """How a change of logits' gradients along each token shows in labels."""
        n, k, m, _ = self.weights.shape
        pulled = labels.reshape(n, k, -1) @ np.swapaxes(self.values, 1, 2)
        return mixture(self.inputs, self._through(pulled.reshape(n, k, m, k)))

    def curvature(self, direction: Floats) -> Floats:  # (m, d, d) -> (m, d, d)
        """Product with JᵀJ."""
        return self.backward(self.outside(self.forward(direction)))

    def _through(self, moved: Floats) -> Floats:  # derivative of the softmax, its own transpose
        carried = self.weights * moved
        carried -= self.weights * np.sum(carried, axis=-1, keepdims=True)
        return np.asarray(carried)


def logits(inputs: Floats, turned: Floats, scores: Floats) -> Floats:  # (n, k, d), (n, d, k), (m, d, d) -> (n, k, m, k)
    """What every token gives to every other, in every head."""
    (n, k, d), m = inputs.shape, scores.shape[0]
    flat = np.ascontiguousarray(scores.transpose(1, 0, 2)).reshape(d, m * d)
    return ((inputs.reshape(n * k, d) @ flat).reshape(n, k * m, d) @ turned).reshape(n, k, m, k)


def mixture(inputs: Floats, weights: Floats) -> Floats:  # (n, k, d), (n, k, m, k) -> (rows, m·d)
    """Tokens mixed with the given weights, the heads of one token side by side."""
    n, k, m, _ = weights.shape
    return (weights.reshape(n, k * m, k) @ inputs).reshape(n * k, m * inputs.shape[2])


def sensed_maps(inputs: Floats, weights: Floats, projections: Floats) -> Floats:
    """Cov_p(X)·W_i for every token and head: (n, k, d), (n, k, m, k), (m, d, d_out) -> (rows, m, d, d_out)."""
    (n, k, m, _), d = weights.shape, inputs.shape[2]
    mixed = mixture(inputs, weights).reshape(n, k, m, 1, d)
    centred = (inputs[:, None, None] - mixed) * weights[..., None]  # (n, k, m, k, d)
    values = (inputs[:, None] @ projections)[:, None]  # (n, 1, m, k, d_out)
    return np.asarray(np.swapaxes(centred, 3, 4) @ values).reshape(n * k, m, d, -1)


def paired(own: Floats, sensed: Floats) -> Floats:  # (rows, d), (rows, c, d_out) -> (d, c, d, c)
    """JᵀJ of rows whose Jacobians are x ⊗ S: the sum of x·xᵀ ⊗ S·Sᵀ."""
    d, c = own.shape[1], sensed.shape[1]
    one, two = np.triu_indices(d)
    both = (sensed @ np.swapaxes(sensed, 1, 2)).reshape(len(own), c * c)
    upper = ((own[:, one] * own[:, two]).T @ both).reshape(-1, c, c)
    full = np.empty((d, c, d, c), dtype=upper.dtype)
    full[one, :, two] = upper
    full[two, :, one] = upper
    return full


def orthonormal(columns: Floats) -> tuple[Floats, Floats]:  # (rows, c) -> (rows, c), (c, c)
    """Q and R of the columns, by Cholesky factors of their products: several times as fast as reflections.

    Twice, since once leaves errors of the squared condition; with a shift first where the columns nearly depend on
    each other.
    """
    basis, total = columns, np.eye(columns.shape[1])
    for _ in range(2):
        basis, triangle = _once(basis)
        total = triangle @ total
    if not np.allclose(np.sum(basis**2, axis=0), 1.0, rtol=0, atol=1e-8):  # the first pass needed a shift
        basis, triangle = _once(basis)
        total = triangle @ total
    return basis, total


def _once(columns: Floats) -> tuple[Floats, Floats]:
    products = columns.T @ columns
    size = np.trace(products) or 1.0
    shift = 0.0
    while True:
        try:
            triangle = scipy.linalg.cholesky(products + shift * np.eye(len(products)), check_finite=False)
            break
        except np.linalg.LinAlgError:
            shift = max(100 * shift, 16 * np.finfo(np.float64).eps * size)
    turned = scipy.linalg.solve_triangular(triangle, columns.T, trans=1, check_finite=False)
    return np.ascontiguousarray(turned.T), triangle


def _solve_triangle(triangle: Floats, inside: Floats) -> Floats:  # (c, c), (c, d_out) -> (c, d_out)
    """Least squares with a triangle; where columns depend on each other, the solution of least norm."""
    diagonal = np.abs(np.diag(triangle))
    if np.min(diagonal) > DEPENDENT * np.max(diagonal):
        solution: Floats = scipy.linalg.solve_triangular(triangle, inside, check_finite=False)
    else:
        solution = scipy.linalg.lstsq(triangle, inside, cond=DEPENDENT, check_finite=False)[0]
    return solution
