"""The six phases of Chen and Li, *Provably Learning a Multi-Head Attention Layer*, each a step of its own.

1. `crude_sum`: the sum S of the projections, from examples whose tokens are nearly the same.
2. `sculpt`: rows on which all heads attend alike, certified by F_a = SᵀXᵀp; each is a linear constraint on every score
   matrix, and together they leave an affine hull.
3. `proxy`: the point of least norm in the hull.
4. `span`: the directions Θ_i − Θ_j, in which the constraints are flat.
5. `net`: points of the hull, chosen by how well the layers they make explain the examples.
6. `projections`: the projections by least squares.

The order, the certified rows, the hull, the point of least norm, the net with its certification and the least squares
are the paper's; the scores by which rows are chosen, the annealing, the Gauss–Newton steps of phase 3 and the
exchange in phase 5 are ours. Theorem 1.2 of the paper: (dk)^O(m³) time and (kd)^Θ(m) examples
for non-degenerate layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from scipy.optimize import linprog

from keyhole.arrays import Floats
from keyhole.errors import UsageError
from keyhole.samples.projection import Problem

ASSUMPTIONS = (
    "inputs are uniform signs or normal numbers",
    "the sum of projections is not small, logits are of order one or less, and there are m(k − 1) outputs or more",
)
MOST_HEADS = 4
# Phase 1: examples with the least variance of tokens.
CRUDE_EXAMPLES = 300
# Phase 2: rows are rejected whose smallest weight is below this, or whose tokens nearly coincide.
LEAST_WEIGHT, NEARLY_EQUAL = 0.02, 1e-2
# Rows that are kept, first and last in each cycle; the last a part of all, from 4·d² to 25·d² for each pair of tokens.
FIRST_ROWS, LEAST_ROWS, MOST_ROWS, LAST_PART = 100, 4, 25, 1 / 16
CYCLES, ROUNDS = 3, 4
# Rows that stay in sight within a cycle, in units of those kept at its end.
POOL = 8
# Examples that are scored at a time.
CHUNK = 20_000
# Phase 3: Gauss–Newton steps on the certified rows.
PROXY_STEPS = 3
# Phase 5: points of the net along each direction, its radius over that of the proxy, and how often it is refined.
POINTS = {1: 41, 2: 15, 3: 9}
RADIUS, REFINEMENTS = 2.2, 5
# Examples by which points of the net are compared, and the random sets that exchanges begin with.
NET_EXAMPLES, EXCHANGES = 1000, 12
# Phase 6: examples that projections are fitted to, or 20 numbers per parameter if that is more.
LAST_EXAMPLES = 4000
# Relative ridge of the least squares inside the net: points of it may coincide.
NET_RIDGE = 1e-9


@dataclass(frozen=True)
class Rows:
    """Certified rows: tokens of examples on which all heads seem to attend alike."""

    inputs: Floats  # (rows, k, d)
    own: Floats  # (rows, d): the token that attends
    outputs: Floats  # (rows, d_out)
    weights: Floats  # (rows, k): how all heads attend
    scores: Floats  # (rows,): the smaller, the more certain

    def best(self, count: int) -> Rows:
        """The most certain ones."""
        chosen = np.argsort(self.scores, kind="stable")[:count]
        return Rows(*(array[chosen] for array in self.arrays()))

    def arrays(self) -> tuple[Floats, ...]:
        """Everything, row by row."""
        return self.inputs, self.own, self.outputs, self.weights, self.scores

    @property
    def trust(self) -> Floats:  # (rows,)
        """Weights of the rows in least squares."""
        return 1.0 / (self.scores + np.median(self.scores) + np.finfo(float).tiny)


@dataclass(frozen=True)
class Hull:
    """The affine hull of the score matrices: a point and directions."""

    proxy: Floats  # (d, d): the point of least norm
    directions: Floats  # (m − 1, d, d), orthonormal
    values: Floats  # (d²,): curvatures of the constraints, ascending

    def at(self, coefficients: Floats) -> Floats:  # (points, m − 1) -> (points, d, d)
        """Points of the hull."""
        return self.proxy + np.tensordot(coefficients, self.directions, axes=(1, 0))

    def distance(self, scores: Floats) -> float:  # (m, d, d)
        """How far score matrices are from the hull, over their size, root mean squares."""
        apart = (scores - self.proxy).reshape(len(scores), -1)
        flat = self.directions.reshape(len(self.directions), self.proxy.size)
        apart = apart - (apart @ flat.T) @ flat
        return float(np.linalg.norm(apart) / np.linalg.norm(scores))


@dataclass(frozen=True)
class SixPhase:
    """What the six phases found."""

    scores: Floats  # (m, d, d)
    projections: Floats  # (m, d, d_out)
    total: Floats  # (d, d_out): S
    hull: Hull
    figures: dict[str, dict[str, Any]]  # per phase


def six_phase(inputs: Floats, outputs: Floats, heads: int, seed: int = 0, solver: str = "least-squares") -> SixPhase:
    """All phases, one after the other; S, rows and hull are gone through several times."""
    if not 1 <= heads <= MOST_HEADS:
        raise UsageError(f"the six phases are made for 1 to {MOST_HEADS} heads, not {heads}")
    rng = np.random.default_rng([seed, 0x516])
    figures: dict[str, dict[str, Any]] = {}
    total = crude_sum(inputs, outputs)
    figures["1 crude sum"] = {"examples": min(CRUDE_EXAMPLES, len(inputs)), "norm": float(np.linalg.norm(total))}
    distinct = _distinct(inputs)
    k, d = inputs.shape[1:]
    last = int(np.clip(LAST_PART * len(distinct) * k, LEAST_ROWS * d**2, MOST_ROWS * d**2 * (k - 1)))
    for cycle in range(CYCLES):
        pool = sculpt(inputs[distinct], outputs[distinct], total, POOL * last)
        for count in _annealed(min(last, max(2, len(pool.scores) // 2)), ROUNDS):
            rows = _rescored(pool, total).best(count)
            use = solver if cycle == CYCLES - 1 and count == last else "least-squares"
            hull, total = proxy(rows, total, heads, use)
    figures["2 sculpt"] = {
        "rows": len(rows.scores),
        "of": int(len(distinct) * inputs.shape[1]),
        "worst_score": float(rows.scores[-1]),
        "solver": solver,
    }
    figures["3 proxy"] = {"norm": float(np.linalg.norm(hull.proxy)), "sum_norm": float(np.linalg.norm(total))}
    figures["4 span"] = span_figures(hull, heads)
    scores, figures["5 net"] = net(inputs, outputs, hull, heads, rng)
    weights, error = projections(inputs, outputs, scores)
    norms = [float(np.linalg.norm(each)) for each in weights]
    figures["6 projections"] = {"relative_error": error, "norms": norms}
    return SixPhase(scores, weights, total, hull, figures)


def crude_sum(inputs: Floats, outputs: Floats, count: int = CRUDE_EXAMPLES) -> Floats:  # -> (d, d_out)
    """Phase 1: least squares of the mean output on the mean token, where tokens differ least.

    If all tokens were the same x, each row of the output would be xᵀS whatever the scores are.
    """
    centre = np.mean(inputs, axis=1)
    variance = np.mean((inputs - centre[:, None]) ** 2, axis=(1, 2))
    # By chance all tokens may be nothing but small: what counts is the spread over the size.
    chosen = np.argsort(variance / np.maximum(np.mean(centre**2, axis=1), 1e-12), kind="stable")[:count]
    found: Floats = np.linalg.lstsq(centre[chosen], np.mean(outputs[chosen], axis=1), rcond=None)[0]
    return found


def sculpt(inputs: Floats, outputs: Floats, total: Floats, keep: int) -> Rows:
    """Phase 2: the rows that are most certainly alike in all heads.

    F_a = SᵀXᵀp with Σp = 1 is solved for p; a small residual says that one p does for all heads (if there are m(k − 1)
    outputs or more). It is weighed against how well p is determined, and against how small its entries are.
    """
    best: list[Rows] = []
    for start in range(0, len(inputs), CHUNK):
        part = slice(start, start + CHUNK)
        best.append(_scored(inputs[part], outputs[part], total).best(keep))
    joined = Rows(*(np.concatenate(arrays) for arrays in zip(*(rows.arrays() for rows in best), strict=True)))
    return joined.best(keep)


def _scored(inputs: Floats, outputs: Floats, total: Floats) -> Rows:
    """All rows of examples with their scores; those rejected are left out."""
    differences = (inputs[:, :-1] - inputs[:, -1:]) @ total  # (n, k − 1, d_out)
    products = differences @ np.swapaxes(differences, 1, 2)
    values = np.linalg.eigvalsh(products)[:, 0]  # smallest eigenvalue
    fine = values > NEARLY_EQUAL * np.mean(np.sum(total**2, axis=1))
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
        inputs[example],
        inputs[example, row],
        outputs[example, row],
        weights[example, :, row],
        scores[example, row],
    )


def _rescored(rows: Rows, total: Floats) -> Rows:
    """The same rows with weights and scores for another S."""
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


def proxy(rows: Rows, total: Floats, heads: int, solver: str = "least-squares") -> tuple[Hull, Floats]:
    """Phases 3 and 4: the point of least norm in the hull, its flat directions, and S from the same rows.

    The constraints are solved without their m − 1 flattest directions, by least squares or by a linear program
    (`solver="l1"`), which leaves S as it is. After least squares, Gauss–Newton steps fit one head with projection S to
    the certified rows.
    """
    matrix, right = constraints(rows)
    hull = _least_norm(matrix.T @ matrix, matrix.T @ right, heads, rows.own.shape[1])
    if solver == "l1":
        return Hull(_linear_program(matrix, right, hull), hull.directions, hull.values), total
    for _ in range(PROXY_STEPS):
        hull, total = _single_head_step(rows, hull, heads)
    return hull, total


def _least_norm(curvature: Floats, gradient: Floats, heads: int, d: int, centre: Floats | None = None) -> Hull:
    values, vectors = np.linalg.eigh(curvature)
    kept = vectors[:, heads - 1 :]
    sizes = values[heads - 1 :]
    inverse = np.where(sizes > 1e-12 * values[-1], 1.0 / np.maximum(sizes, np.finfo(float).tiny), 0.0)
    point = np.zeros(d * d) if centre is None else centre.reshape(-1)
    moved = point + kept @ (inverse * (kept.T @ gradient))
    moved = kept @ (kept.T @ moved)  # no part along the flat directions: least norm
    return Hull(moved.reshape(d, d), vectors[:, : heads - 1].T.reshape(heads - 1, d, d), values)


def _single_head_step(rows: Rows, hull: Hull, heads: int) -> tuple[Hull, Floats]:
    """One Gauss–Newton step of a single head on the certified rows, S eliminated."""
    d = hull.proxy.shape[0]
    logits = (rows.inputs @ (rows.own @ hull.proxy)[:, :, None])[..., 0]
    weights = np.exp(logits - np.max(logits, axis=1, keepdims=True))
    weights /= np.sum(weights, axis=1, keepdims=True)
    # Scores are over √λ and min p; what the rows' residuals are weighed by must not hold those.
    trust = (rows.trust / np.mean(rows.trust))[:, None]
    mixed = (weights[:, None, :] @ rows.inputs)[:, 0] * trust  # (rows, d)
    labels = rows.outputs * trust
    basis, triangle = np.linalg.qr(mixed)
    total: Floats = np.linalg.lstsq(triangle, basis.T @ labels, rcond=None)[0]
    residual = labels - basis @ (basis.T @ labels)
    spread = weights[:, :, None] * (np.eye(weights.shape[1]) - weights[:, None, :])
    covariance = np.swapaxes(rows.inputs, 1, 2) @ spread @ rows.inputs  # (rows, d, d)
    sensed = (covariance @ total) * trust[:, :, None]  # (rows, l, d_out)
    jacobian = rows.own[:, :, None, None] * sensed[:, None]  # (rows, j, l, d_out)
    jacobian = jacobian.transpose(0, 3, 1, 2).reshape(len(rows.scores), -1, d * d)
    inside = np.tensordot(basis, jacobian, axes=(0, 0))  # (d, d_out, d²)
    outer = jacobian - np.tensordot(basis, inside, axes=(1, 0))
    flat = outer.reshape(-1, d * d)
    return _least_norm(flat.T @ flat, flat.T @ residual.reshape(-1), heads, d, hull.proxy), total


def _linear_program(matrix: Floats, right: Floats, hull: Hull) -> Floats:
    """The point of the hull with the least sum of absolute violations."""
    count, size = matrix.shape
    flat = hull.directions.reshape(-1, size)
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
    return hull.proxy if solved.x is None else np.asarray(solved.x[:size]).reshape(hull.proxy.shape)


def span_figures(hull: Hull, heads: int) -> dict[str, Any]:
    """Phase 4: how flat the directions are, and how many heads the largest gap of curvatures would say."""
    values = np.sqrt(np.maximum(hull.values, np.finfo(float).tiny))
    gaps = values[1 : MOST_HEADS + 1] / values[:MOST_HEADS]
    gap = float(gaps[heads - 2]) if heads > 1 else float("inf")
    return {"directions": heads - 1, "gap": gap, "heads_by_gap": int(np.argmax(gaps)) + 2}


def net(
    inputs: Floats, outputs: Floats, hull: Hull, heads: int, rng: np.random.Generator
) -> tuple[Floats, dict[str, Any]]:
    """Phase 5: the points of the hull whose heads together explain the examples best.

    A net of points is laid over the hull; all pairs are compared, or heads are exchanged one by one for better points.
    Around the best set finer nets follow.
    """
    free = heads - 1
    if free == 0:
        return hull.proxy[None], {"points": 1}
    some = slice(0, NET_EXAMPLES)
    problem = Problem(inputs[some], outputs[some])
    radius = RADIUS * float(np.linalg.norm(hull.proxy)) * free**0.5
    points = _ball(POINTS[free], free) * radius
    table = _Table(problem, hull.at(points))
    if heads == 2:
        sets = np.array(list(combinations(range(len(points)), 2)))
        chosen = sets[int(np.argmin(table.errors(sets)))]
    else:
        chosen = _exchanged(table, heads, rng)
    found, width = points[chosen], 2 * radius / (POINTS[free] - 1)
    tried = len(points)
    for _ in range(REFINEMENTS):
        around = _ball(5, free) * width
        near = np.concatenate([each + around for each in found])
        finer = _Table(problem, hull.at(near))
        start = np.array([head * len(around) + int(np.argmin(np.sum(around**2, axis=1))) for head in range(heads)])
        found, width, tried = near[finer.improve(start)], width / 2, tried + len(near)
    return hull.at(found), {"points": tried, "radius": radius}


def _ball(points: int, free: int) -> Floats:  # (some, free)
    axis = np.linspace(-1.0, 1.0, points)
    grid = np.stack(np.meshgrid(*[axis] * free, indexing="ij"), axis=-1).reshape(-1, free)
    return np.asarray(grid[np.linalg.norm(grid, axis=1) <= 1.0 + 1e-9])


class _Table:
    """Inner products of the mixed tokens of all points of a net, so that any set of them is judged by a small solve."""

    def __init__(self, problem: Problem, scores: Floats) -> None:
        self.width = problem.width
        mixed = np.concatenate(
            [problem.mix(problem.weights(scores[start : start + 32])) for start in range(0, len(scores), 32)], axis=1
        )
        self.products = (mixed.T @ mixed).reshape(len(scores), self.width, len(scores), self.width)
        self.right = (mixed.T @ problem.labels).reshape(len(scores), self.width, -1)
        self.energy = problem.energy

    def errors(self, sets: Floats) -> Floats:  # (sets, m) -> (sets,)
        """Residual sums of squares of sets of points."""
        found: list[Floats] = [self._errors(sets[start : start + 2000]) for start in range(0, len(sets), 2000)]
        return np.concatenate(found)

    def _errors(self, sets: Any) -> Floats:
        count, m = sets.shape
        blocks = self.products[sets[:, :, None], :, sets[:, None, :], :]  # (sets, m, m, d, d)
        matrix = blocks.transpose(0, 1, 3, 2, 4).reshape(count, m * self.width, m * self.width)
        right = self.right[sets].reshape(count, m * self.width, -1)
        ridge = NET_RIDGE * np.trace(matrix, axis1=1, axis2=2)[:, None, None] / matrix.shape[1]
        solution = np.linalg.solve(matrix + ridge * np.eye(matrix.shape[1]), right)
        return np.asarray(self.energy - np.sum(right * solution, axis=(1, 2)))

    def improve(self, chosen: Any) -> Any:  # (m,) -> (m,)
        """Exchange one point at a time for the best, until none is better."""
        chosen, best = np.array(chosen), float(self.errors(np.array(chosen)[None])[0])
        better = True
        while better:
            better = False
            for head in range(len(chosen)):
                sets = np.repeat(chosen[None], len(self.right), axis=0)
                sets[:, head] = np.arange(len(self.right))
                errors = self.errors(sets)
                found = int(np.argmin(errors))
                if errors[found] < best * (1 - 1e-9):
                    chosen, best, better = sets[found], float(errors[found]), True
        return chosen


def _exchanged(table: _Table, heads: int, rng: np.random.Generator) -> Any:
    sets = [table.improve(rng.choice(len(table.right), heads, replace=False)) for _ in range(EXCHANGES)]
    return min(sets, key=lambda each: float(table.errors(each[None])[0]))


def projections(inputs: Floats, outputs: Floats, scores: Floats) -> tuple[Floats, float]:
    """Phase 6: the projections by least squares, and the relative error that is left."""
    some = slice(0, max(LAST_EXAMPLES, 20 * scores.size // inputs.shape[1]))
    point = Problem(inputs[some], outputs[some]).at(scores)
    return point.projections, point.relative


def _distinct(inputs: Floats) -> Any:
    """The first example of each input: repeated ones would count twice."""
    flat = np.ascontiguousarray(inputs.reshape(len(inputs), -1))
    keys = flat.view(np.dtype((np.void, flat.dtype.itemsize * flat.shape[1]))).reshape(-1)
    return np.sort(np.unique(keys, return_index=True)[1])


def _annealed(last: int, rounds: int) -> list[int]:
    first = min(FIRST_ROWS, last)
    return [round(float(count)) for count in np.geomspace(first, last, rounds)]
