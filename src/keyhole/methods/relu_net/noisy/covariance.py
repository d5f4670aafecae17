"""How sure a fitted net is: the Fisher information of its planes and output layer, and what follows for predictions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import final

import numpy as np
from scipy.linalg import cho_factor, cho_solve, solve_triangular

from keyhole.arrays import Array, Floats, Integers, floats, namespace
from keyhole.families.relu_net import ReluNet
from keyhole.methods.relu_net.noisy.least_squares import NetFit, fit_planes, unit

# Arrays of a net.
NAMES = ("weights_in", "bias_in", "weights_out", "bias_out", "skip")
# Rows taken at a time: their Jacobian is the largest array there is.
CHUNK = 2048
# Curvature added where there is none, relative to the mean: a neuron hardly sampled gets a wide radius, not an error.
RIDGE = 1e-12
# The scale of a plane is free: this holds it, and the length of the weights with it, fixed.
HELD = 1.0
# A neuron this many standard deviations from its kink may be on either side of it.
KINK_DEVIATIONS = 5.0


@final
class Covariance:
    """Covariance of a fit with ReLU neurons whose weights (the planes without their offset) have fixed lengths.

    The output layer is eliminated, so that what is inverted is as large as the planes, whatever the outputs.
    """

    def __init__(self, fit: NetFit) -> None:
        self.fit, self.raw = fit, fit.raw_planes()
        neurons, size = fit.planes.shape
        weights, slopes, rows = fit.weights, fit.slopes(), fit.problem.white
        products = np.zeros((neurons * size, neurons * size))
        self.mixed = np.zeros((fit.scale.size, neurons * size))  # features with what moves the planes
        for start in range(0, rows.shape[0], CHUNK):
            part = slice(start, start + CHUNK)
            moving = (slopes[part, :, None] * rows[part, None, :]).reshape(rows[part].shape[0], neurons * size)
            products += moving.T @ moving
            self.mixed += fit.features[part].T @ moving
        seen = solve_triangular(fit.factor, self.mixed / fit.scale[:, None], lower=True)
        each = np.repeat(weights, size, axis=0)  # (neurons · (width + 1), outputs)
        information = (products - seen.T @ seen) * (each @ each.T)
        self.matrix = self._inverse(information) if neurons else information

    def _inverse(self, information: Floats) -> Floats:
        neurons, size = self.fit.planes.shape
        scaled = np.sqrt(np.maximum(np.diag(information), np.mean(np.diag(information)) * RIDGE))
        scaled = np.where(scaled > 0, scaled, 1.0)
        information = information / scaled / scaled[:, None]
        # In whitened coordinates the length of a plane's weights changes along these directions.
        lengthwise = self.raw.copy()
        lengthwise[:, -1] = 0.0
        lengthwise = solve_triangular(self.fit.problem.mixing, lengthwise.T, trans="T").T
        for neuron in range(neurons):
            own = slice(neuron * size, (neuron + 1) * size)
            held = unit((lengthwise[neuron] / scaled[own])[None, :])
            information[own, own] += HELD * held.T @ held
        information[np.diag_indices_from(information)] += RIDGE
        ridge = RIDGE
        while True:
            try:
                factor = cho_factor(information, lower=True)
                break
            except np.linalg.LinAlgError:
                information[np.diag_indices_from(information)] += ridge
                ridge *= 10
        inverse = cho_solve(factor, np.eye(information.shape[0]))
        return np.asarray(inverse / scaled / scaled[:, None])

    def without_doubtful(self, deviations: float) -> Covariance:
        """The same from answers whose neurons are on or off for sure, planes being right to so many standard errors.

        One that may be on either side of a kink is no equation for it.
        """
        fit = self.fit
        sure = np.all(np.abs(fit.before) > deviations * self._heights(fit.problem.white), axis=1)
        if np.all(sure) or np.sum(sure) < fit.planes.shape[1]:
            return self
        problem = replace(fit.problem, rows=fit.problem.rows[sure], answers=fit.problem.answers[sure])
        return Covariance(fit_planes(problem, problem.to_white(self.raw)))

    def _heights(self, white: Floats) -> Floats:  # (m, width + 1) -> (m, neurons)
        """Standard errors of what goes into the neurons."""
        neurons, size = self.fit.planes.shape
        blocks = self.matrix.reshape(neurons, size, neurons, size)
        squares = [np.sum((white @ blocks[i, :, i, :]) * white, axis=1) for i in range(neurons)]
        return np.sqrt(np.maximum(np.stack(squares, axis=1) if squares else white[:, :0], 0.0))

    def planes(self) -> Floats:
        """Standard errors of planes whose weights have length one, (neurons, width + 1)."""
        neurons, size = self.fit.planes.shape
        blocks = self.matrix.reshape(neurons, size, neurons, size)
        own = np.stack([blocks[i, :, i, :] for i in range(neurons)]) if neurons else np.zeros((0, size, size))
        back = solve_triangular(self.fit.problem.mixing, np.eye(size))
        variances = np.einsum("ij,njk,ik->ni", back, own, back)
        lengths = np.linalg.norm(self.raw[:, :-1], axis=1, keepdims=True)
        return np.asarray(np.sqrt(np.maximum(variances, 0.0)) / np.where(lengths > 0, lengths, 1.0))

    def output(self) -> Floats:
        """Standard errors of the output layer, weights for planes of length one, (neurons + beside, outputs)."""
        neurons = self.fit.neurons
        plain = (
            cho_solve((self.fit.factor, True), np.eye(self.fit.scale.size)) / self.fit.scale / self.fit.scale[:, None]
        )
        errors = []
        for column in range(self.fit.output.shape[1]):
            follow = plain @ (self.mixed * self._each(column))
            errors.append(np.diag(plain) + np.einsum("ij,jk,ik->i", follow, self.matrix, follow, optimize=True))
        lengths = np.concatenate([np.linalg.norm(self.raw[:, :-1], axis=1), np.ones(self.fit.scale.size - neurons)])
        return np.asarray(np.sqrt(np.maximum(np.stack(errors, axis=1), 0.0)) * lengths[:, None])

    def responses(self, rows: Integers, column: int) -> Floats:  # (n,) -> (n, parameters)
        """By how much planes of length one, then the output layer, change where these answers of one output do."""
        fit, (neurons, size) = self.fit, self.fit.planes.shape
        white, outputs = fit.problem.white[rows], fit.output.shape[1]
        moving = (fit.slopes()[rows][:, :, None] * white[:, None, :]).reshape(rows.size, neurons * size)
        known = cho_solve((fit.factor, True), (fit.features[rows] / fit.scale).T).T / fit.scale
        planes = ((moving - known @ self.mixed) * self._each(column)) @ self.matrix
        follow = cho_solve((fit.factor, True), self.mixed / fit.scale[:, None]) / fit.scale[:, None]
        output = -np.stack([(planes * self._each(other)) @ follow.T for other in range(outputs)], axis=2)
        output[:, :, column] += known
        lengths = np.linalg.norm(self.raw[:, :-1], axis=1)
        output[:, :neurons] *= lengths[:, None]
        back = solve_triangular(fit.problem.mixing, np.eye(size))
        raw = planes.reshape(len(planes), neurons, size) @ back.T / np.where(lengths > 0, lengths, 1.0)[:, None]
        return np.concatenate([raw.reshape(rows.size, -1), output.reshape(rows.size, -1)], axis=1)

    def _each(self, column: int) -> Floats:  # -> (neurons · (width + 1),)
        return np.repeat(self.fit.weights[:, column], self.fit.planes.shape[1])

    def predictions(self, rows: Floats, doubt: float = KINK_DEVIATIONS) -> Floats:  # (m, width + 1) -> (m, outputs)
        """Standard errors of what the net says at rows (x, 1), neurons in doubt being on."""
        fit = self.fit
        neurons, size = fit.planes.shape
        white = solve_triangular(fit.problem.mixing, rows.T, trans="T").T
        before = white @ fit.planes.T
        near = before > -doubt * self._heights(white)
        beside = rows if fit.problem.affine else rows[:, -1:]
        features = np.concatenate([np.maximum(before, 0.0), beside], axis=1)
        known = cho_solve((fit.factor, True), (features / fit.scale).T).T / fit.scale
        plain = np.sum(known * features, axis=1)
        moving = (near[:, :, None] * white[:, None, :]).reshape(white.shape[0], neurons * size) - known @ self.mixed
        squares = []
        for column in range(fit.output.shape[1]):
            own = moving * self._each(column)
            squares.append(plain + np.sum((own @ self.matrix) * own, axis=1))
        return np.asarray(np.sqrt(np.maximum(np.stack(squares, axis=1), 0.0)))


@final
@dataclass(frozen=True, eq=False)
class CorrelatedErrors(ReluNet):
    """Entrywise errors of a net with their correlations, and so the errors of its predictions."""

    covariance: Covariance | None = field(default=None, repr=False)
    factor: float = 1.0  # error of a prediction over its standard error
    shift: float = 0.0  # by which all answers may be off alike

    def arrays(self) -> dict[str, Array]:
        """The entrywise errors that are present, by name."""
        return {name: array for name, array in super().arrays().items() if name in NAMES}

    def of_predictions(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch, outputs)
        """Errors of the net's answers."""
        assert self.covariance is not None  # left out only where a dataclass has no other way to order its fields
        last = floats(tokens[:, -1, :])
        rows = np.concatenate([last, np.ones((last.shape[0], 1))], axis=1)
        return self.factor * self.covariance.predictions(rows) + self.shift


@final
class FittedNet(ReluNet):
    """A net found by least squares: parameters that compensate for each other make no wide error radii."""

    def error_bar(self, radius: ReluNet, tokens: Array, rounding: float) -> Array:  # -> (batch,) or (batch, outputs)
        """Errors of predictions from the joint covariance of all parameters where it is known, else entry by entry."""
        errors = radius.of_predictions(tokens)
        if errors is None:
            return super().error_bar(radius, tokens, rounding)
        none = ReluNet(**{name: 0 * array for name, array in self.arrays().items()}, activation=self.activation)
        errors = errors if self.outputs is not None else errors[:, 0]
        xp = namespace(tokens)
        plain = super().error_bar(none, tokens, rounding)
        return plain + xp.asarray(errors, dtype=plain.dtype, device=plain.device)
