"""Levenberg–Marquardt of one start to the last digit, values eliminated by orthogonal factors."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.gated_sum.model import GatedQueries, GatedSum, gate_columns, gate_weights, value_columns
from keyhole.numerics.svd import least_squares, svd

# Steps at most. Damping at the start and at most, over the largest singular value; how it falls and rises.
MOST_STEPS = 60
FIRST_DAMPING, MOST_DAMPING, CALMER, BOLDER = 1e-4, 1.0, 10.0, 0.01
# Undamped steps that lower the residual by less than this part are the last; so are damped ones, so many in a row.
SETTLED, IN_A_ROW = 0.1, 6
# The same in a valley, whose bottom falls little at a time.
VALLEY_STEPS, VALLEY_CALMER, VALLEY_BOLDER, VALLEY_IN_A_ROW = 150, 3.0, 0.1, 60
# Curvature is told by this part of a step, and followed where it turns a step by no more than that part.
PROBE, LARGEST_TURN = 0.1, 0.75
EPS = float(np.finfo(np.float64).eps)


def polish(
    queries: GatedQueries,
    gates: Floats,  # (heads, width)
    *,
    valley: bool = False,
) -> tuple[GatedSum, float]:
    """The nearest best fit, and the root mean square of its residual.

    In a `valley`, as that in which two near heads trade their distance for the difference of their values, slow steps
    are bent as its bottom is (geodesic acceleration): it is followed ten times as fast.
    """
    calmer, bolder = (VALLEY_CALMER, VALLEY_BOLDER) if valley else (CALMER, BOLDER)
    fit, residual, basis = _fit_values(queries, gates)
    best, damping, slow = float(np.sum(residual**2)), FIRST_DAMPING, 0
    for _ in range(VALLEY_STEPS if valley else MOST_STEPS):
        line, before = _Line(queries, fit, residual, basis), best
        while damping <= MOST_DAMPING:
            move: Floats | None = line.solve(residual, damping)
            if valley and slow and move is not None:
                move = line.bend(move, damping)
            if move is not None:
                trial, after, other = _fit_values(queries, fit.gates + move)
                if float(np.sum(after**2)) < best:
                    fit, residual, basis, best = trial, after, other, float(np.sum(after**2))
                    damping *= bolder if slow else BOLDER
                    break
            damping *= calmer if slow else CALMER
        slow = slow + 1 if best > (1 - SETTLED) * before else 0
        most = VALLEY_IN_A_ROW if valley else IN_A_ROW
        if slow >= most or damping > MOST_DAMPING or (slow and damping < EPS):
            break
    return fit, float(np.sqrt(best / residual.size))


class _Line:
    """How residuals move with gates to first order, values following them."""

    def __init__(self, queries: GatedQueries, fit: GatedSum, residual: Floats, basis: Floats) -> None:
        columns = gate_columns(queries, gate_weights(queries, fit.gates), fit.values)  # (outputs, n, heads · width)
        across = columns - basis @ (basis.T @ columns)
        self.queries, self.fit, self.residual = queries, fit, residual
        self.slopes = across.reshape(-1, fit.gates.size)
        self.left, self.sizes, self.right = svd(self.slopes)

    def solve(self, residual: Floats, damping: float) -> Floats:  # (n, outputs) -> (heads, width)
        """The damped step that makes a residual vanish."""
        least = max(damping, EPS) * float(np.max(self.sizes, initial=0.0))
        onto = self.left.T @ residual.T.ravel()
        move = self.right.T @ (onto * self.sizes / np.maximum(self.sizes**2 + least**2, np.finfo(np.float64).tiny))
        return np.asarray(move.reshape(self.fit.gates.shape))

    def bend(self, move: Floats, damping: float) -> Floats | None:
        """The step with what makes up for the curvature along it; None where that is too much of it."""
        there = _fit_values(self.queries, self.fit.gates + PROBE * move)[1]
        along = (self.slopes @ move.ravel()).reshape(self.residual.T.shape).T
        curvature = ((there - self.residual) / PROBE + along) / PROBE
        turn = self.solve(curvature, damping)
        return None if np.linalg.norm(turn) > LARGEST_TURN * np.linalg.norm(move) else move + turn


def _fit_values(queries: GatedQueries, gates: Floats) -> tuple[GatedSum, Floats, Floats]:
    """Values of given gates, what is left of the answers, and an orthonormal basis of what values can explain."""
    columns = value_columns(queries, gate_weights(queries, gates))
    basis, factor = np.linalg.qr(columns)
    values = least_squares(factor, basis.T @ queries.answers)
    fit = GatedSum(gates, values.reshape(*gates.shape, queries.answers.shape[1]))
    return fit, queries.answers - columns @ values, basis
