"""Phases 3 and 4 of six: the point of least norm in the hull of the score matrices, and the directions of the hull."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import linprog

from keyhole.arrays import Floats
from keyhole.samples.six_phase.rows import Rows, constraints

MOST_HEADS = 4
# Phase 3: Gauss–Newton steps on the certified rows.
PROXY_STEPS = 3


def proxy(
    rows: Rows, total: Floats, heads: int, solver: str = "least-squares", *, refine: bool = True
) -> tuple[Floats, Floats]:  # -> (d, d), (d, d_out)
    """Phase 3: the point Θ* of least norm in the hull, and S from the same rows.

    The constraints are solved without their m − 1 flattest directions, by least squares or by a linear program
    (`solver="l1"`), which leaves S as it is. After least squares, Gauss–Newton steps fit one head with projection S to
    the certified rows; S is fitted with it, unless `refine=False`.
    """
    matrix, right = constraints(rows)
    d = rows.own.shape[1]
    point, flat = _least_norm(matrix.T @ matrix, matrix.T @ right, heads, np.zeros((d, d)))
    if solver == "l1":
        return _linear_program(matrix, right, point, flat), total
    for _ in range(PROXY_STEPS):
        jacobian, residual, total = _one_head(rows, point, total, refine=refine)
        point, _ = _least_norm(jacobian.T @ jacobian, jacobian.T @ residual, heads, point)
    return point, total


def _least_norm(
    curvature: Floats, gradient: Floats, heads: int, centre: Floats
) -> tuple[Floats, Floats]:  # (d, d), (m − 1, d²): the point, and the directions that were left out
    values, vectors = np.linalg.eigh(curvature)
    kept = vectors[:, heads - 1 :]
    sizes = values[heads - 1 :]
    inverse = np.where(sizes > 1e-12 * values[-1], 1.0 / np.maximum(sizes, np.finfo(float).tiny), 0.0)
    moved = centre.reshape(-1) + kept @ (inverse * (kept.T @ gradient))
    moved = kept @ (kept.T @ moved)  # no part along the flat directions: least norm
    return moved.reshape(centre.shape), vectors[:, : heads - 1].T


def _one_head(
    rows: Rows, point: Floats, total: Floats, *, refine: bool
) -> tuple[Floats, Floats, Floats]:  # (rows·d_out, d²), (rows·d_out,), (d, d_out)
    """Jacobian and residual of one head with scores Θ* and projection S on the certified rows.

    With `refine`, S is what fits the rows best, and is eliminated from the Jacobian.
    """
    logits = (rows.inputs @ (rows.own @ point)[:, :, None])[..., 0]
    weights = np.exp(logits - np.max(logits, axis=1, keepdims=True))
    weights /= np.sum(weights, axis=1, keepdims=True)
    # Scores are over √λ and min p; what the rows' residuals are weighed by must not hold those.
    trust = (rows.trust / np.mean(rows.trust))[:, None]
    mixed = (weights[:, None, :] @ rows.inputs)[:, 0] * trust  # (rows, d)
    labels = rows.outputs * trust
    basis, triangle = np.linalg.qr(mixed)
    if refine:
        total = np.linalg.lstsq(triangle, basis.T @ labels, rcond=None)[0]
    spread = weights[:, :, None] * (np.eye(weights.shape[1]) - weights[:, None, :])
    covariance = np.swapaxes(rows.inputs, 1, 2) @ spread @ rows.inputs  # (rows, d, d)
    sensed = (covariance @ total) * trust[:, :, None]  # (rows, l, d_out)
    jacobian = rows.own[:, :, None, None] * sensed[:, None]  # (rows, j, l, d_out)
    jacobian = jacobian.transpose(0, 3, 1, 2).reshape(len(rows.scores), -1, point.size)
    if refine:
        jacobian = jacobian - np.tensordot(basis, np.tensordot(basis, jacobian, axes=(0, 0)), axes=(1, 0))
    return jacobian.reshape(-1, point.size), (labels - mixed @ total).reshape(-1), total


def _linear_program(matrix: Floats, right: Floats, point: Floats, flat: Floats) -> Floats:
    """The point with the least sum of absolute violations that has no part along the flat directions."""
    count, size = matrix.shape
    goal = np.concatenate([np.zeros(size), np.ones(count)])
    above = np.hstack([matrix, -np.eye(count)])
    below = np.hstack([-matrix, -np.eye(count)])
    fixed = np.hstack([flat, np.zeros((len(flat), count))]) if len(flat) else None
    bounds = [(None, None)] * size + [(0, None)] * count
    solved = linprog(
        goal,
        A_ub=np.vstack([above, below]),
        b_ub=np.concatenate([right, -right]),
        A_eq=fixed,
        b_eq=None if fixed is None else np.zeros(len(flat)),
        bounds=bounds,
        method="highs",
    )
    return point if solved.x is None else np.asarray(solved.x[:size]).reshape(point.shape)


@dataclass(frozen=True)
class Span:
    """What phase 4 finds."""

    directions: Floats  # (m − 1, d, d), orthonormal: nearly those of Θ_i − Θ_j
    values: Floats  # (d²,): how much the certified rows determine each direction, singular values, ascending

    @property
    def figures(self) -> dict[str, Any]:
        """How far the values rise after the directions, and how many heads the largest rise would say."""
        gaps = self.values[1 : MOST_HEADS + 1] / np.maximum(self.values[:MOST_HEADS], np.finfo(float).tiny)
        heads = len(self.directions) + 1
        gap = float(gaps[heads - 2]) if heads > 1 else float("inf")
        return {"directions": heads - 1, "gap": gap, "heads_by_gap": int(np.argmax(gaps)) + 2}


def span(rows: Rows, total: Floats, point: Floats, heads: int) -> Span:
    """Phase 4: span{Θ_i − Θ_j}, the m − 1 directions in which the certified rows are flattest.

    On rows that all heads attend to alike, moving from one head's scores to another's changes nothing: Θ_i − Θ_j is
    flat there, for the linear constraints as for one head of scores Θ* and projection S, whose Jacobian is taken here.
    """
    jacobian, _, _ = _one_head(rows, point, total, refine=False)
    values, vectors = np.linalg.eigh(jacobian.T @ jacobian)
    directions = vectors[:, : heads - 1].T.reshape(heads - 1, *point.shape)
    return Span(directions, np.sqrt(np.maximum(values, 0.0)))
