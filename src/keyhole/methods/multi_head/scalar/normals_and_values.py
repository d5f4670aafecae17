"""What is read around jumps: the hyperplanes of all heads, then their values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.multi_head.scalar.gates import HeadGate, choose_points, spread_points, weights_of
from keyhole.methods.multi_head.scalar.jumps import Jumps
from keyhole.methods.multi_head.scalar.queries import Scope, columns
from keyhole.numerics.orthogonal import random_orthogonal
from keyhole.queries import Measurements
from keyhole.recovery import Outcome

# Steps away from a jump change its logit by about STEP; where it becomes larger than LARGEST they are made smaller.
STEP, LARGEST, SHRINK = 1.5, 5.0, 0.125
MOST_ROUNDS = 20
# A logit larger by this than that of one rounding has a weight of 0 or 1, whatever rows add.
SATURATED = 8.0
# Rows move logits by typically this part of the margin of the worst head.
LEAN = 2.0**-6
# Held-out points whose levels the heads must explain.
FRESH_POINTS = 6


@dataclass(frozen=True)
class ScalarValues:
    """Values of all heads; with a head of equal weights the last one is its."""

    vectors: Floats  # (heads, width, outputs)
    radius: Floats  # of the same shape
    row_radius: Floats  # (heads, outputs) of their products with the common row
    leans: Floats  # (n,) scales of other rows over that of the common one
    points: Floats  # (n, size) last tokens of the queries
    rows: Floats  # (width − 1, width)

    def is_disturbed(self, scores: Floats, normals: Floats) -> bool:  # (heads, width, size)
        """Whether a row may have moved a head out of saturation."""
        forms = np.abs(self.rows @ (scores @ self.points.T))  # (heads, rows, points)
        return bool(np.any(2 * self.leans * forms > np.abs(normals @ self.points.T)[:, None, :]))


@dataclass(frozen=True)
class SaturatedHeads:
    """Answers of saturated heads at the points of a gate, in the combination of outputs that shows one head best."""

    mix: Floats  # (outputs,)
    own: Floats  # (width,) value of the head
    others: Floats  # (size, width) sum of the values of the heads that attend to the first token, at each point
    row_radius: float  # radius of that sum times the common row
    radius: float  # and times any other row of unit length
    value_norm: float  # norm of all values together


def ask_normals(scope: Scope, jumps: Jumps, rng: np.random.Generator) -> Steps[tuple[Floats, Floats]]:
    """(heads, size) normals u₀ᵀ·[W c] and their relative errors: a step along each of a basis from every jump."""
    width, count = scope.signature.width, len(jumps)
    basis = floats(random_orthogonal(scope.signature.space, rng, width))
    lengths = np.repeat((STEP / np.abs(jumps.slopes))[:, None], width, axis=1)
    logits, radii = np.full((count, width), np.inf), np.zeros((count, width))
    for _ in range(MOST_ROUNDS):
        head, step = np.nonzero(~(np.abs(logits - jumps.logits[:, None]) <= LARGEST))
        if not head.size:
            break
        points = jumps.points[head].copy()
        points[:, :width] += lengths[head, step][:, None] * basis[step]
        levels = (yield from scope.ask("hyperplanes", jumps.scales[head], points)) @ scope.mix
        logits[head, step], radii[head, step] = jumps.solve_logits(levels, head)
        large = ~(np.abs(logits[head, step] - jumps.logits[head]) <= LARGEST)
        lengths[head[large], step[large]] *= SHRINK
    else:
        raise Unrecoverable(Outcome.SATURATED, "a jump stayed sharp however near it was looked at")
    slopes = (logits - jumps.logits[:, None]) / (jumps.scales[:, None] * lengths)
    normals = slopes @ basis
    errors = (radii + 2 * jumps.errors[:, None]) / (jumps.scales[:, None] * lengths)
    normal_errors = np.linalg.norm(errors, axis=1) / np.linalg.norm(normals, axis=1)
    if scope.radius is None:
        return normals, normal_errors
    offsets = jumps.logits / jumps.scales - np.sum(normals * jumps.points[:, :width], axis=1)
    return np.column_stack([normals, offsets]), normal_errors


def ask_unexplained(scope: Scope, normals: Floats, own: Floats, scale: float, rng: np.random.Generator) -> Steps[float]:
    """Largest misfit of the heads at held-out points, over its radius.

    Heads beyond those with a hyperplane weigh all tokens the same.
    """
    points = spread_points(rng, normals, scope.signature.width, 1.0)
    margins = np.min(np.abs(points @ normals.T) / np.linalg.norm(normals, axis=1), axis=1, initial=np.inf)
    points = points[margins >= np.quantile(margins, 0.5)][: 2 * FRESH_POINTS]  # clear of all hyperplanes
    scales, half = np.full(FRESH_POINTS, scale), FRESH_POINTS
    parts = points[:half], points[half:]
    plans = [scope.plan("fresh points", scales, part, copies=(count, 1)) for count, part in enumerate(parts, 1)]
    answers: list[Measurements] = yield plans
    levels = np.concatenate([scope.levels(a, scales, p) @ scope.mix for a, p in zip(answers, parts, strict=True)])
    uniform = own.size - normals.shape[0]
    weights = weights_of(points, normals, uniform)
    weights[half:, normals.shape[0] :] = 2 / 3
    return float(np.max(np.abs(levels - weights @ own)) / (8 * own.size**0.5 * scope.level_radius))


def ask_values(
    scope: Scope, normals: Floats, uniform: int, scale: float, lean: float, rng: np.random.Generator
) -> Steps[ScalarValues]:
    """The values of all heads from saturated queries at as many points as there are heads but one.

    At each point the answer is the sum of the first token's values over the heads that attend to it.
    """
    width = scope.signature.width
    heads = normals.shape[0] + uniform
    # Reflected so that the basis begins with the common row.
    basis = floats(random_orthogonal(scope.signature.space, rng, width))
    mirror = basis[0] - scope.row
    size = mirror @ mirror
    basis = basis if size == 0 else basis - np.outer(basis @ mirror, mirror) * (2 / size)
    basis = np.vstack([scope.row, basis[1:]])
    points, margins = choose_points(rng, normals, width, 1.0, heads - 1, uniform)
    leans = lean * LEAN * np.minimum(margins, 1.0)  # (points,)
    count = heads - 1
    # All queries of a point: the common row alone, then with a part of each other row.
    logits = np.min(np.abs(points @ normals.T), axis=1, initial=np.inf)  # over the scale, of the head nearest to zero
    scales = np.maximum(scale, (SATURATED - np.log(scope.signature.space.eps)) / logits)  # (points,)
    row_scale = np.outer(leans * scales, np.append(0.0, np.ones(width - 1))).ravel()
    levels = yield from scope.ask(
        "values", np.repeat(scales, width), np.repeat(points, width, axis=0), row_scale, np.tile(basis, (count, 1))
    )
    levels = levels.reshape(count, width, -1)
    # In the basis: the common row's share as it is, the others' from what they add to it.
    parts = np.concatenate([levels[:, :1, :], (levels[:, 1:, :] - levels[:, :1, :]) / leans[:, None, None]], axis=1)
    total = basis @ scope.vector  # (width, outputs)
    parts = np.concatenate([parts, total[None, :, :]])
    design = np.vstack([weights_of(points, normals, uniform), np.ones(heads)])
    solve = np.linalg.inv(design)
    inside = np.tensordot(solve, parts, axes=1)  # (heads, width, outputs)
    value_norms = np.sqrt(np.sum(np.linalg.norm(inside, axis=1) ** 2, axis=0))  # (outputs,)
    rounding = scope.signature.space.rounding * value_norms
    total_radii = np.sqrt((basis**2) @ columns(floats(scope.total.radius)) ** 2) + rounding
    radii = np.concatenate([np.ones((count, width)) * 2 / leans[:, None], np.zeros((1, width))])
    radii[:-1, 0] = 1.0  # of the common row alone
    outputs = np.eye(rounding.size)
    known = np.array([scope.known_error(np.full(1, scale), each)[0] for each in outputs])
    radii = radii[:, :, None] * (rounding + known)
    radii[-1] = total_radii
    variance = np.tensordot(solve**2, radii**2, axes=1)
    vectors = basis.T @ inside
    radius = np.sqrt((basis.T) ** 2 @ variance)
    return ScalarValues(vectors, radius + rounding, np.sqrt(variance[:, 0, :]) + rounding, leans, points, basis[1:])


def saturated_heads(gate: HeadGate, head: int, values: ScalarValues, row: Floats, row_radius: Floats) -> SaturatedHeads:
    """Answers of all heads but one at the points of its gate; heads of equal weights give each token half."""
    share = row @ values.vectors[head]  # (outputs,)
    mix = share / np.linalg.norm(share)
    seen = values.vectors @ mix  # (heads, width)
    halves = seen.shape[0] - gate.first.shape[1]
    first = np.column_stack([gate.first, np.full((gate.first.shape[0], halves), 0.5)])
    first[:, head] = 0.0
    radius = float(np.linalg.norm(np.max(values.radius @ np.abs(mix), axis=1)))
    own = float(np.linalg.norm(row_radius @ np.abs(mix)))
    return SaturatedHeads(mix, seen[head], first @ seen, own, radius, float(np.linalg.norm(seen)))
