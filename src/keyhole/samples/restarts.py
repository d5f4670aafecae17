"""Several starts of one fit, random or from a moment of the examples; the same result however many share them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from keyhole.arrays import Floats
from keyhole.executors.base import Shared, Workers
from keyhole.families import Family
from keyhole.families.attention_layer import AttentionLayer
from keyhole.methods.arithmetic import ComputeLimit, partial_result
from keyhole.samples.levenberg_marquardt import ScoreChart, descend
from keyhole.samples.variable_projection import LayerPoint, LayerProblem

# How much logits differ in a random start, whatever the size of tokens: by about a third.
RANDOM_SIZE = 0.3
# Entries of the moment that are kept at most; wider tokens are not worth the memory.
MOST_ENTRIES = 2**25
ALONE = Workers()


def random_start(problem: LayerProblem, heads: int, rng: np.random.Generator) -> Floats:  # (heads, d, d)
    """Small random scores."""
    return rng.standard_normal((heads, problem.width, problem.width)) * (RANDOM_SIZE / problem.logit_size)


@dataclass(frozen=True)
class Moment:
    """The singular vectors of E[F ⊗ x_a ⊗ Cov(X)], unfolded such that scores stand on the left."""

    left: Floats  # (d·d, some): combinations of the scores, nearly
    values: Floats  # (some,)

    def gap(self, heads: int) -> float:
        """How far the values fall after those of the heads; 1 for not at all."""
        if len(self.values) <= heads or self.values[heads] <= 0:
            return float("inf")
        return float(self.values[heads - 1] / self.values[heads])


def moment(problem: LayerProblem, most: int) -> Moment | None:
    """First order in Θ, F_a = X̄·S + Σ_i x_aᵀΘ_i·Cov(X)·W_i: its coefficients, for tokens that are nearly independent.

    Only Θ_i[j, l]·W_i[l', o] + Θ_i[j, l']·W_i[l, o] shows; unfolded to (j, l) × (l', o), the first term has rank m and
    the second none that stands out. None where the moment would not fit into memory.
    """
    n, k, d = problem.inputs.shape
    outputs = problem.labels.shape[1]
    if d**3 * outputs > MOST_ENTRIES:
        return None
    centred = problem.inputs - np.mean(problem.inputs, axis=1, keepdims=True)
    covariance = (np.swapaxes(centred, 1, 2) @ centred / k).reshape(n, d * d)
    covariance = covariance - np.mean(covariance, axis=0)
    mean = np.repeat(np.mean(problem.inputs, axis=1), k, axis=0)  # (rows, d)
    both = np.hstack([mean, problem.tokens])
    rest = problem.labels - both @ np.linalg.lstsq(both, problem.labels, rcond=None)[0]
    # Σ over tokens of x_a ⊗ F_a first: (n, d, d_out).
    paired = problem.turned @ rest.reshape(n, k, outputs)
    unfolded = covariance.T @ paired.reshape(n, d * outputs) / problem.rows  # (l·l', j·o)
    tensor = unfolded.reshape(d, d, d, outputs).transpose(2, 0, 1, 3)  # (j, l, l', o)
    left, values, _ = np.linalg.svd(tensor.reshape(d * d, d * outputs), full_matrices=False)
    return Moment(left[:, :most], values[:most])


def spectral_start(found: Moment, problem: LayerProblem, heads: int, rng: np.random.Generator) -> Floats:
    """Random combinations of the scores that the moment shows, as large as a random start."""
    d = problem.width
    known = found.left[:, :heads]
    turn = np.linalg.qr(rng.standard_normal((known.shape[1], known.shape[1])))[0]
    scores = (known @ turn).T.reshape(-1, d, d) * (RANDOM_SIZE * d / problem.logit_size)
    missing = heads - scores.shape[0]
    return np.concatenate([scores, random_start(problem, missing, rng)]) + 0.1 * random_start(problem, heads, rng)


# Starts agree whose root mean square residuals differ by less than this part, or are all rounding.
AGREE = 1e-3


@dataclass(frozen=True)
class RestartFit:
    """What is to be fitted, and what counts as done."""

    problem: LayerProblem
    heads: int
    rounding: float  # relative residual that only rounding is left of
    noise: float | None = 0.0  # standard deviation of labels: 0 for exact ones, None for unknown
    rank: int | None = None
    moment: Moment | None = None  # starts come from here, where it is given
    first: Floats | None = None  # (heads, d, d): the first start, where it is given
    steps: int = 100
    seconds: float = float("inf")  # that one start may take, in a process of its own

    def start(self, number: int, seed: int) -> Trace:
        """The start of a number."""
        rng = np.random.default_rng([seed, self.heads, number])
        if number == 0 and self.first is not None:
            scores = self.first
        elif self.moment is not None:
            scores = spectral_start(self.moment, self.problem, self.heads, rng)
        else:
            scores = random_start(self.problem, self.heads, rng)
        # A start ends at rounding where there is no noise, else where it is flat.
        good = (self.rounding / 16) ** 2 * self.problem.energy if self.noise == 0.0 else 0.0
        chart = ScoreChart(self.rank if self.rank is not None and self.rank < self.problem.width else None)
        with np.errstate(all="ignore"):  # a start that runs away is one that failed
            end = descend(self.problem, scores, good, rng, chart, self.steps)
        scores = end.point.scores - end.point.scores @ self.problem.shared @ self.problem.shared.T
        return Trace(number, scores, end.point.rss, end.point.relative, end.steps, end.products, end.cut)


@dataclass(frozen=True)
class Trace:
    """How one start ended: small, so that it can travel between processes."""

    number: int
    scores: Floats  # (heads, d, d)
    rss: float
    relative: float
    steps: int
    products: int
    cut: bool  # at a limit of these, in no minimum


@dataclass(frozen=True)
class RestartSearch:
    """All starts of a fit that were made."""

    fit: RestartFit
    traces: tuple[Trace, ...]

    @property
    def best(self) -> Trace:
        """The start with the least residual."""
        return min(self.traces, key=lambda trace: (trace.rss, trace.number))

    @cached_property
    def point(self) -> LayerPoint:
        """The best fit, with everything about it."""
        return self.fit.problem.at(self.best.scores)

    @property
    def layer(self) -> AttentionLayer:
        """The best fit, as parameters."""
        return AttentionLayer(self.point.scores, self.point.projections)

    @property
    def agreement(self) -> int:
        """Starts that ended with the least residual."""
        least = max(self.fit.rounding, (1 + AGREE) * self.best.relative)
        return sum(trace.relative <= least for trace in self.traces)


def search(
    fit: RestartFit,
    seed: int,
    most: int,
    done: Callable[[RestartSearch], bool],
    workers: Workers = ALONE,
    report: Callable[[int, float], None] | None = None,  # starts done, least relative residual so far
) -> RestartSearch:
    """Make up to `most` starts, one after the other as far as the result is concerned, until they are `done`."""
    traces: list[Trace] = []

    def best(known: Family | None) -> Family | None:
        return RestartSearch(fit, tuple(traces)).layer if traces else known

    with partial_result(best):
        for trace in _traces(fit, seed, most, workers):
            traces.append(trace)
            if report is not None:
                report(len(traces), min(each.relative for each in traces))
            if done(RestartSearch(fit, tuple(traces))):
                break
    return RestartSearch(fit, tuple(traces))


def _traces(fit: RestartFit, seed: int, most: int, workers: Workers) -> Iterator[Trace]:
    if most == 1 or not workers.several:
        yield from (fit.start(number, seed) for number in range(most))
        return
    shared = Shared((fit, seed), "let processes of this machine share the starts, jobs=")
    with workers.open() as crew:
        yield from crew.map(_carry_out, range(most), shared)


def _carry_out(shared: tuple[RestartFit, int], number: int) -> Trace:
    """In a worker: one start, within the time that all may take."""
    fit, seed = shared
    limit = ComputeLimit(lambda: fit.seconds)
    try:
        with limit:
            return fit.start(number, seed)
    finally:
        limit.close()
