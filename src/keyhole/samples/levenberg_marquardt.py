"""Levenberg–Marquardt on the scores of a layer, each step by preconditioned conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.linalg

from keyhole.arrays import Floats
from keyhole.numerics.svd import svd
from keyhole.samples.preconditioners import HeadBlocks, Kronecker
from keyhole.samples.variable_projection import LayerPoint, LayerProblem

# Damping at the start, in units of the mean curvature.
FIRST_DAMPING = 1e-2
# Damping beyond which, in the same units, no step improves: a minimum up to rounding.
LAST_DAMPING = 1e10
# The linear systems of steps are solved to this part of the gradient, and better as the residual shrinks.
LOOSE = 0.1
# So exactly at most while products are made in single precision, whose rounding allows no more. It is given up for
# double precision where a step brings less than PART of what it promises although the residual is as small as NEAR:
# there steps are nearly right.
SINGLE, PART, NEAR = 1e-3, 0.5, 1e-3
# Products with the Jacobian that one step may take, and a start in all.
MOST_PRODUCTS, MOST_IN_ALL = 300, 5_000
# Below this many output numbers times entries of the scores, writing JᵀJ down is faster than products with it.
WRITTEN_DOWN = 1200
# Rejected steps in a row after which a start ends.
REJECTIONS = 12
# Steps are taken if they bring this part of what they promise.
WORTH_TAKING = 1e-4
# A start that gains less than this part over so many steps is in a minimum, or in a valley that takes too long.
STALLED, STALL_STEPS = 0.05, 10
# So is one whose steps promise less than this part of the variance of one residual: far below any radius.
IRRELEVANT = 1e-4
# A start that is good enough goes on as long as steps promise more than this many variances of one residual: with the
# residual small and spread over many numbers, what is left of it may all lie along one direction of the scores.
SETTLED = 25.0


@dataclass(frozen=True)
class ScoreChart:
    """Scores as free numbers: themselves, or of a rank A·Bᵀ; then the numbers are A beside B, (heads, d, 2·rank)."""

    rank: int | None = None

    def begin(self, scores: Floats) -> Floats:
        """The numbers of scores, or of the nearest of the rank, in balanced factors."""
        if self.rank is None:
            return scores
        left, values, right = svd(scores, full_matrices=True)
        root = np.sqrt(values[:, None, : self.rank])
        return np.concatenate([left[..., : self.rank] * root, np.swapaxes(right, 1, 2)[..., : self.rank] * root], -1)

    def scores(self, numbers: Floats) -> Floats:
        """The scores."""
        if self.rank is None:
            return numbers
        return numbers[..., : self.rank] @ np.swapaxes(numbers[..., self.rank :], 1, 2)

    def push(self, numbers: Floats, move: Floats) -> Floats:
        """How the scores move with the numbers, to first order: dA·Bᵀ + A·dBᵀ."""
        if self.rank is None:
            return move
        first = move[..., : self.rank] @ np.swapaxes(numbers[..., self.rank :], 1, 2)
        return first + numbers[..., : self.rank] @ np.swapaxes(move[..., self.rank :], 1, 2)

    def pull(self, numbers: Floats, gradient: Floats) -> Floats:
        """The transpose of `push`: G·B beside Gᵀ·A."""
        if self.rank is None:
            return gradient
        one, two = gradient @ numbers[..., self.rank :], np.swapaxes(gradient, 1, 2) @ numbers[..., : self.rank]
        return np.concatenate([one, two], axis=-1)


@dataclass(frozen=True)
class Descent:
    """How a start ended."""

    point: LayerPoint
    steps: int
    products: int  # with the Jacobian and its transpose
    cut: bool  # at a limit of these, with the residual still falling


def descend(
    problem: LayerProblem,
    scores: Floats,
    enough: float,  # residual sum of squares that is rounding, or 0 where there is noise; below it a start only settles
    rng: np.random.Generator,
    chart: ScoreChart = ScoreChart(),  # noqa: B008
    most: int = 100,  # steps
) -> Descent:
    """Fit the scores from a start; ends at the residual asked for, in a minimum, or at a limit."""
    numbers = chart.begin(scores)
    point = problem.at(chart.scores(numbers))
    growth, rejected, products, steps, single = 2.0, 0, 0, 0, True
    paid = 0.0  # what products took since blocks were made, in products without them
    history = [point.rss]
    kronecker = Kronecker.of(point, rng)
    blocks: HeadBlocks | None = None
    damping = FIRST_DAMPING * kronecker.level
    while steps < most and products < MOST_IN_ALL and point.rss > 0.0:
        steps += 1
        good = point.rss <= enough
        gradient = chart.pull(numbers, -point.products.backward(point.residual))
        accuracy = LOOSE if good else min(LOOSE, point.relative)
        accuracy = max(accuracy, SINGLE) if single else accuracy
        inverse = blocks if blocks is not None and damping <= blocks.damping else kronecker
        move, promised, used = _step(point, chart, numbers, gradient, damping, inverse, accuracy, single=single)
        products, paid = products + used, paid + used * inverse.dearer(problem)
        if promised < (SETTLED if good else IRRELEVANT) * point.rss / problem.labels.size:
            break
        trial = problem.at(chart.scores(numbers + move))
        gain = (point.rss - trial.rss) / promised
        single &= gain > PART or point.relative > NEAR
        if gain > WORTH_TAKING:
            numbers, point, rejected, growth = numbers + move, trial, 0, 2.0
            damping *= max(1 / 10, 1 - (2 * min(gain, 1.0) - 1) ** 3)
            history.append(point.rss)
            if len(history) > STALL_STEPS and history[-1] > (1 - STALLED) * history[-1 - STALL_STEPS]:
                break
            kronecker = Kronecker.of(point, rng)
            if paid > HeadBlocks.price(problem) and chart.rank is None:  # as much again saves more than it costs
                blocks, paid = HeadBlocks.of(point, damping), 0
        else:
            rejected += 1
            damping, growth = damping * growth, growth * 2
            if rejected > REJECTIONS or damping > LAST_DAMPING * kronecker.level:
                break
        if good and gain < PART:
            break  # the rest is rounding
    else:
        return Descent(point, steps, products, point.rss > enough)
    return Descent(point, steps, products, cut=False)


def _step(
    point: LayerPoint,
    chart: ScoreChart,
    numbers: Floats,
    gradient: Floats,
    damping: float,
    inverse: Kronecker | HeadBlocks,
    accuracy: float,
    *,
    single: bool,
) -> tuple[Floats, float, int]:
    """The move, the decrease of the sum of squares that it promises, and the products it took."""
    if chart.rank is None and point.scores.size * point.residual.shape[1] <= WRITTEN_DOWN:
        return _direct(point, gradient, damping)

    def curve(move: Floats) -> Floats:
        direction = chart.push(numbers, move)
        curved = point.quick.curvature(direction.astype(np.float32)) if single else point.products.curvature(direction)
        return chart.pull(numbers, curved.astype(np.float64)) + damping * move

    def soften(each: Floats) -> Floats:  # nothing cheap is known for factors
        return inverse.solve(each, damping) if chart.rank is None else each

    move, left, used = conjugate_gradients(curve, -gradient, soften, accuracy, MOST_PRODUCTS)
    # ‖r‖² − ‖r + J·s‖², where (JᵀJ + damping)·s = −g − left.
    promised = -float(np.vdot(gradient, move)) + float(np.vdot(move, damping * move + left))
    return move, promised, used


def _direct(point: LayerPoint, gradient: Floats, damping: float) -> tuple[Floats, float, int]:
    m, d = gradient.shape[:2]
    curvature = point.gram_matrices[0]
    flat = gradient.transpose(1, 0, 2).reshape(-1)
    least = 16 * np.finfo(np.float64).eps * np.trace(curvature)  # the matrix is only known up to rounding
    while True:
        try:
            damping = max(damping, least)
            factor = scipy.linalg.cho_factor(curvature + damping * np.eye(len(curvature)), check_finite=False)
            break
        except np.linalg.LinAlgError:
            least *= 16
    move = -scipy.linalg.cho_solve(factor, flat, check_finite=False)
    promised = -float(flat @ move) + damping * float(move @ move)
    return move.reshape(d, m, d).transpose(1, 0, 2), promised, 1


def conjugate_gradients(
    curve: Callable[[Floats], Floats], wanted: Floats, soften: Callable[[Floats], Floats], accuracy: float, most: int
) -> tuple[Floats, Floats, int]:
    """The x with curve(x) = wanted up to `accuracy`, what is left of `wanted`, and the products it took."""
    found, left = np.zeros_like(wanted), wanted
    turned = soften(left)
    search, size = turned, float(np.vdot(left, turned))
    enough, used = accuracy**2 * size, 0
    while used < most and size > enough:
        curved = curve(search)
        length = size / float(np.vdot(search, curved))
        found, left = found + length * search, left - length * curved
        turned = soften(left)
        before, size = size, float(np.vdot(left, turned))
        search = turned + (size / before) * search
        used += 1
    return found, left, used
