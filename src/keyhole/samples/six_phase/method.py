"""The six phases of Chen and Li, *Provably Learning a Multi-Head Attention Layer*, each a step of its own.

1. `crude_sum`: the sum S of the projections, from examples whose tokens are nearly the same.
2. `sculpt`: rows on which all heads attend alike, certified by F_a = SᵀXᵀp; each is a linear constraint on every score
   matrix (`constraints`), and together they leave an affine hull.
3. `proxy`: the point of least norm in the hull.
4. `span`: the directions Θ_i − Θ_j, in which the constraints are flat.
5. `net`: points of the hull, chosen by how well the layers they make explain the examples.
6. `projections`: the projections by least squares.

The order, the certified rows, the hull, the point of least norm, the net with its certification and the least squares
are the paper's; the scores by which rows are chosen, the annealing, the Gauss–Newton steps of phase 3, the
exchange in phase 5 and the later rounds, in which rows must also be `alike` in the heads found before, are ours.
Theorem 1.2 of the paper: (dk)^O(m³) time and (kd)^Θ(m) examples for non-degenerate layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import linprog

from keyhole.arrays import Floats
from keyhole.errors import UsageError
from keyhole.samples.six_phase.hull import Hull, net
from keyhole.samples.variable_projection import Problem

ASSUMPTIONS = (
    "inputs are uniform signs or normal numbers",
    "the sum of projections is not small, logits are of order one or less, and there are m(k − 1) outputs or more",
)
MOST_HEADS = 4
# Phase 1: examples with the least variance of tokens.
CRUDE_EXAMPLES = 300
# Phase 2: rows are rejected whose smallest weight is below this, or whose tokens nearly coincide.
LEAST_WEIGHT, NEARLY_EQUAL = 0.02, 1e-2
# Rows that are kept, first and last in each cycle; the last a part of all, from 4·d² to 60·d² for each pair of tokens.
FIRST_ROWS, LEAST_ROWS, MOST_ROWS, LAST_PART = 100, 4, 60, 1 / 16
CYCLES, ROUNDS = 3, 4
# Rows that stay in sight within a cycle, in units of those kept at its end.
POOL = 8
# Examples that are scored at a time.
CHUNK = 20_000
# Later rounds through the phases: what part of the rows each keeps, and from how many times as many.
RETURNS, RETURN_POOL = (1 / 2, 1 / 4, 1 / 8), 8
# Phase 3: Gauss–Newton steps on the certified rows.
PROXY_STEPS = 3
# Phase 6: examples that projections are fitted to, or 20 numbers per parameter if that is more.
LAST_EXAMPLES = 4000


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
class SixPhase:
    """What the six phases found."""

    scores: Floats  # (m, d, d)
    projections: Floats  # (m, d, d_out)
    total: Floats  # (d, d_out): S
    hull: Hull
    error: float  # relative, of the outputs
    figures: dict[str, dict[str, Any]]  # per phase


def six_phase(inputs: Floats, outputs: Floats, heads: int, seed: int = 0, solver: str = "least-squares") -> SixPhase:
    """All phases, one after the other; then again from the second on, with the sum and the heads that came out.

    S, rows and proxy are gone through several times before the first net. Later rounds know more and need fewer rows,
    half as many each; they are kept where they explain the examples better.
    """
    if not 1 <= heads <= MOST_HEADS:
        raise UsageError(f"the six phases are made for 1 to {MOST_HEADS} heads, not {heads}")
    rng = np.random.default_rng([seed, 0x516])
    distinct = _distinct(inputs)
    exact_sum = all_alike(inputs) is not None
    run = _Run(inputs, outputs, inputs[distinct], outputs[distinct], heads, solver, rng, exact_sum)
    found = run.first(crude_sum(inputs, outputs))
    for part in RETURNS if heads > 1 else ():
        again = run.again(found, part)
        found = again if again.error < found.error else found
    return found


@dataclass(frozen=True)
class _Run:
    """One call of the six phases."""

    inputs: Floats  # (n, k, d)
    outputs: Floats  # (n, k, d_out)
    different_inputs: Floats  # (some, k, d): each input once
    different_outputs: Floats  # (some, k, d_out)
    heads: int
    solver: str
    rng: np.random.Generator
    exact_sum: bool  # phase 1 found S exactly

    @property
    def last(self) -> int:
        """Rows that are kept at the end of a cycle."""
        count, k, d = self.different_inputs.shape
        return int(np.clip(LAST_PART * count * k, LEAST_ROWS * d**2, MOST_ROWS * d**2 * (k - 1)))

    def first(self, total: Floats) -> SixPhase:
        """Phases 2 to 6 from a crude S: cycles of ever more rows."""
        started = float(np.linalg.norm(total))
        for cycle in range(CYCLES):
            pool = sculpt(self.different_inputs, self.different_outputs, total, POOL * self.last)
            for count in _annealed(min(self.last, max(2, len(pool.scores) // 2)), ROUNDS):
                rows = _rescored(pool, total).best(count)
                use = self.solver if cycle == CYCLES - 1 and count == self.last else "least-squares"
                point, total = proxy(rows, total, self.heads, use, refine=not self.exact_sum)
        crude = {"examples": min(CRUDE_EXAMPLES, len(self.inputs)), "norm": started, "exact": self.exact_sum}
        return self._ended(rows, total, point, None, crude | {"rounds": 1})

    def again(self, before: SixPhase, part: float) -> SixPhase:
        """Phases 2 to 6 from the sum of the projections that were found, on rows that the heads found agree on too."""
        total = before.total if self.exact_sum else np.sum(before.projections, axis=0)
        count = max(LEAST_ROWS * self.inputs.shape[2] ** 2, int(part * self.last))
        pool = sculpt(self.different_inputs, self.different_outputs, total, RETURN_POOL * count)
        rows = alike(pool, before.scores).best(count)
        point, total = proxy(rows, total, self.heads, self.solver, refine=False)
        crude = before.figures["1 crude sum"]
        return self._ended(rows, total, point, before.scores, crude | {"rounds": crude["rounds"] + 1})

    def _ended(self, rows: Rows, total: Floats, point: Floats, near: Floats | None, crude: dict[str, Any]) -> SixPhase:
        """Phases 4 to 6, and the figures of all."""
        flat = span(rows, total, point, self.heads)
        hull = Hull.through(point, flat.directions)
        scores, tried = net(self.inputs, self.outputs, hull, self.heads, self.rng, near)
        weights, error = projections(self.inputs, self.outputs, scores)
        figures = {
            "1 crude sum": crude,
            "2 sculpt": {
                "rows": len(rows.scores),
                "of": self.different_inputs.shape[0] * self.different_inputs.shape[1],
                "worst_score": float(rows.scores[-1]),
                "solver": self.solver,
            },
            "3 proxy": {"norm": float(np.linalg.norm(hull.proxy)), "sum_norm": float(np.linalg.norm(total))},
            "4 span": flat.figures,
            "5 net": tried,
            "6 projections": {"relative_error": error, "norms": [float(np.linalg.norm(each)) for each in weights]},
        }
        return SixPhase(scores, weights, total, hull, error, figures)


def crude_sum(inputs: Floats, outputs: Floats, count: int = CRUDE_EXAMPLES) -> Floats:  # -> (d, d_out)
    """Phase 1: least squares of the mean output on the mean token, where tokens differ least.

    If all tokens were the same x, each row of the output would be xᵀS whatever the scores are. Signs of few tokens are
    now and then: where such examples span everything, S is exact.
    """
    centre = np.mean(inputs, axis=1)
    chosen = all_alike(inputs)
    if chosen is None:
        variance = np.mean((inputs - centre[:, None]) ** 2, axis=(1, 2))
        # By chance all tokens may be nothing but small: what counts is the spread over the size.
        chosen = np.argsort(variance / np.maximum(np.mean(centre**2, axis=1), 1e-12), kind="stable")[:count]
    found: Floats = np.linalg.lstsq(centre[chosen], np.mean(outputs[chosen], axis=1), rcond=None)[0]
    return found


def all_alike(inputs: Floats) -> Any:  # (n, k, d) -> (some,) or None
    """Examples whose tokens are all the same, if they span everything."""
    chosen = np.flatnonzero(np.all(inputs == inputs[:, :1], axis=(1, 2)))
    spanned = len(chosen) and np.linalg.matrix_rank(inputs[chosen, 0]) == inputs.shape[2]
    return chosen if spanned else None


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
