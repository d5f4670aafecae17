"""Phases 2 to 4 of six: rows on which all heads attend alike, and what they determine.

They put linear constraints on every score matrix: the point of least norm in their hull, and its directions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from scipy.optimize import linprog

from keyhole.arrays import ArrayTable, Floats
from keyhole.errors import KeyholeError
from keyhole.samples.source import Source

# Phase 2: rows are rejected whose smallest weight is below this, or whose tokens, over their size, nearly coincide.
LEAST_WEIGHT, NEARLY_EQUAL = 0.02, 1e-2


class NoRows(KeyholeError):
    """No row is certified."""

    def __init__(self) -> None:
        super().__init__(
            "no row of the examples is certified to be alike in all heads, as where logits are large: the method "
            "varpro asks for none"
        )


@dataclass(frozen=True)
class Rows(ArrayTable):
    """Certified rows: tokens of examples on which all heads seem to attend alike."""

    inputs: Floats  # (rows, k, d)
    own: Floats  # (rows, d): the token that attends
    outputs: Floats  # (rows, d_out)
    weights: Floats  # (rows, k): how all heads attend
    scores: Floats  # (rows,): the smaller, the more certain

    def best(self, count: int) -> Rows:
        """The most certain ones."""
        return self.take(np.argsort(self.scores, kind="stable")[:count])

    @property
    def trust(self) -> Floats:  # (rows,)
        """Weights of the rows in least squares."""
        return 1.0 / (self.scores + np.median(self.scores) + np.finfo(float).tiny)


def sculpt(source: Source, total: Floats, keep: int) -> Rows:
    """Phase 2: the rows that are most certainly alike in all heads.

    F_a = SᵀXᵀp with Σp = 1 is solved for p; a small residual says that one p does for all heads (if there are m(k − 1)
    outputs or more). It is weighed against how well p is determined, and against how small its entries are.
    """
    found: Rows = source.reduce(partial(_certain, total, keep), partial(_most_certain, keep))
    return found


def _certain(total: Floats, keep: int, inputs: Floats, outputs: Floats) -> Rows:
    return _most_certain(keep, certified(inputs, outputs, total))


def _most_certain(keep: int, *parts: Rows) -> Rows:
    """The most certain rows, each once: repeated ones would count twice."""
    rows = Rows.concat(*parts)
    order = np.lexsort([*rows.own.T, *rows.inputs.reshape(len(rows.own), -1).T]) if len(rows.own) else np.arange(0)
    rows = rows.take(order)
    same = np.all(rows.own[1:] == rows.own[:-1], axis=1) & np.all(rows.inputs[1:] == rows.inputs[:-1], axis=(1, 2))
    fresh = np.concatenate([np.ones(min(1, len(rows.own)), dtype=bool), ~same])
    return rows.take(np.flatnonzero(fresh)).best(keep)


def certified(inputs: Floats, outputs: Floats, total: Floats) -> Rows:
    """All rows of examples with their scores; those rejected are left out."""
    differences = (inputs[:, :-1] - inputs[:, -1:]) @ total  # (n, k − 1, d_out)
    products = differences @ np.swapaxes(differences, 1, 2)
    values = np.linalg.eigvalsh(products)[:, 0]  # smallest eigenvalue
    fine = values > NEARLY_EQUAL * np.mean(np.sum(total**2, axis=1)) * np.mean(inputs**2)
    inputs, outputs, differences, products, values = (
        array[fine] for array in (inputs, outputs, differences, products, values)
    )
    wanted = outputs - inputs[:, -1:] @ total  # (n, k rows, d_out)
    first = np.linalg.solve(products, differences @ np.swapaxes(wanted, 1, 2))  # (n, k − 1, rows)
    weights = np.concatenate([first, 1 - np.sum(first, axis=1, keepdims=True)], axis=1)  # (n, k, rows)
    left = np.linalg.norm(wanted - np.swapaxes(first, 1, 2) @ differences, axis=2)  # (n, rows)
    least = np.min(weights, axis=1)
    scores = left / (np.sqrt(values)[:, None] * np.maximum(least, LEAST_WEIGHT))
    example, row = np.nonzero(least > LEAST_WEIGHT)
    return Rows(
        inputs[example], inputs[example, row], outputs[example, row], weights[example, :, row], scores[example, row]
    )


def rescore(rows: Rows, total: Floats) -> Rows:
    """Rows with weights and scores for another S."""
    differences = (rows.inputs[:, :-1] - rows.inputs[:, -1:]) @ total
    products = differences @ np.swapaxes(differences, 1, 2)
    values = np.maximum(np.linalg.eigvalsh(products)[:, 0], np.finfo(float).tiny)
    wanted = rows.outputs - rows.inputs[:, -1] @ total
    ridge = np.finfo(float).eps * np.trace(products, axis1=1, axis2=2)[:, None, None] * np.eye(products.shape[1])
    first = np.linalg.solve(products + ridge, (differences @ wanted[:, :, None]))[..., 0]
    weights = np.concatenate([first, 1 - np.sum(first, axis=1, keepdims=True)], axis=1)
    left = np.linalg.norm(wanted - (first[:, None, :] @ differences)[:, 0], axis=1)
    least = np.min(weights, axis=1)
    scores = left / (np.sqrt(values) * np.maximum(least, LEAST_WEIGHT))
    fine = least > LEAST_WEIGHT
    return Rows(rows.inputs[fine], rows.own[fine], rows.outputs[fine], weights[fine], scores[fine])


def alike(rows: Rows, scores: Floats) -> Rows:  # (m, d, d)
    """Phase 2, later rounds: rows scored by how much the heads found so far differ on them as well."""
    logits = np.stack([(rows.inputs @ (rows.own @ each)[:, :, None])[..., 0] for each in scores])  # (m, rows, k)
    logits -= np.mean(logits, axis=2, keepdims=True)  # softmax does not show it
    apart = np.sqrt(np.mean((logits - np.mean(logits, axis=0)) ** 2, axis=(0, 2)))
    both = [each / max(float(np.median(each)), np.finfo(float).tiny) for each in (rows.scores, apart)]
    return replace(rows, scores=both[0] + both[1])


def constraints(rows: Rows) -> tuple[Floats, Floats]:  # (rows·k, d²), (rows·k,)
    """Phase 2: what certified rows say of every score matrix, (diag p − ppᵀ)·(X·Θᵀ·x_a − log p) = 0, weighed."""
    k, d = rows.inputs.shape[1:]
    p = rows.weights
    spread = p[:, :, None] * (np.eye(k) - p[:, None, :])  # diag p − ppᵀ
    keys = spread @ rows.inputs  # (rows, k, d)
    matrix = rows.own[:, None, :, None] * keys[:, :, None, :]  # (rows, k, j, l): x_aj·keys_l
    right = (spread @ np.log(p)[:, :, None])[..., 0]
    trust = rows.trust[:, None]
    return (matrix * trust[..., None, None]).reshape(-1, d * d), (right * trust).reshape(-1)


# Heads that the gap may say there are.
MOST_HEADS = 8
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
    if not len(rows.scores):
        raise NoRows
    matrix, right = constraints(rows)
    d = rows.own.shape[1]
    point, flat = least_norm(matrix.T @ matrix, matrix.T @ right, heads, np.zeros((d, d)))
    if solver == "l1":
        return _linear_program(matrix, right, point, flat), total
    for _ in range(PROXY_STEPS):
        jacobian, residual, total = _one_head(rows, point, total, refine=refine)
        point, _ = least_norm(jacobian.T @ jacobian, jacobian.T @ residual, heads, point)
    return point, total


def least_norm(
    curvature: Floats, gradient: Floats, heads: int, centre: Floats
) -> tuple[Floats, Floats]:  # (d, d), (m − 1, d²)
    """The point of least norm that solves the equations, nearest to a centre, and the flattest directions, left out."""
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
        floor = np.finfo(float).eps * max(float(self.values[-1]), np.finfo(float).tiny)
        gaps = self.values[1 : MOST_HEADS + 1] / np.maximum(self.values[:MOST_HEADS], floor)
        heads = len(self.directions) + 1
        gap = float(gaps[heads - 2]) if 1 < heads <= len(gaps) + 1 else float("inf")
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
