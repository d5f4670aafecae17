"""Variable projection with restarts: the practical learner.

The projections are eliminated by least squares, and the scores are fitted by Levenberg–Marquardt from small random
starts. Nothing is proven about it; on layers that are not built to be hard, most starts end at the truth.

Examples: at least one number per parameter, with n ≥ d²/(k(k − 1)); both conditions of `Count.good` for a good chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from keyhole.arrays import Floats
from keyhole.executors.base import Workers
from keyhole.families import AttentionLayer
from keyhole.samples.examples import ExampleCount, Examples
from keyhole.samples.restarts import ALONE, RestartFit, RestartSearch, moment, search
from keyhole.samples.variable_projection import LayerPoint

ASSUMPTIONS = (
    "the outputs are those of one multi-head softmax layer over whole sequences, without biases, with the number of "
    "heads reported",
    "outputs are right up to the rounding of their dtype and the declared noise",
    "no other such layer gives the same outputs on these inputs",
)
INITS = ("random", "spectral", "six-phase")
SEARCHES = ("grow", "prune")
# A fit is exact when rounding explains it: this many units of the spacing of the outputs' dtype.
ROUNDING = 576.0
# A fit is as good as declared noise allows up to so many standard deviations of the sum of squares.
NOISE_DEVIATIONS = 5.0
# With noise, minima are only compared with each other: so many starts must agree on the best.
AGREEING = 3
# When the number of heads is looked for: heads tried at most, and starts for each of them.
MOST_HEADS, STARTS_PER_COUNT = 6, 3
# Data sets drawn from a fit to see what a further head explains of noise.
REPLICAS = 2
# Numbers per parameter that a count of heads needs to be tried.
TRIED_RATIO = 1.5
# Heads that contribute less than this part of the strongest, or whose scores are this near, may be one too many.
SUSPICIOUS = 1e-3

Progress = Callable[[str, int, int, float], None]  # stage, starts done, starts at most, least relative residual


@dataclass(frozen=True)
class VarproSettings:
    """What a user can choose."""

    restarts: int = 10
    init: str = "random"
    rank: int | None = None
    jobs: int = 1
    search: str = "grow"
    max_heads: int = MOST_HEADS
    steps: int = 100
    seconds: float = float("inf")  # that one start may take
    tolerance: float = 0.0  # errors are at most this, where it is positive, and nothing else is known of them
    others: Workers = ALONE  # who shares the starts in place of `jobs` processes

    @property
    def sharing(self) -> Workers:
        """Who shares the starts."""
        return self.others if self.others.several else Workers(self.jobs)


@dataclass(frozen=True)
class VarproFit:
    """The best fit found, and how it was found."""

    search: RestartSearch
    solved: bool  # the residual is rounding, or what the declared noise explains; False where noise is unknown
    noise: float | None  # as declared
    asked: int | None  # heads asked for; None for auto
    starts: int  # in all

    @property
    def point(self) -> LayerPoint:
        """The best fit."""
        return self.search.point

    @property
    def heads(self) -> int:
        """Heads of the best fit."""
        return self.search.fit.heads


def fit_layer(
    examples: Examples,
    heads: int | None,  # None: find out
    noise: float | None,  # standard deviation of labels; None: unknown
    settings: VarproSettings,
    seed: int,
    *,
    first: Floats | None = None,  # (heads, d, d): where the first start begins
    progress: Progress | None = None,
) -> VarproFit:
    """The layer that explains the examples best."""
    fits = _Fits(examples, noise, settings, seed, progress)
    if heads is not None:
        found = fits.search(heads, settings.restarts, first)
        solved = fits.is_solved(found)
        if solved and is_suspicious(found.point):
            found = fits.prune(found)
        return VarproFit(found, solved, noise, heads, fits.starts)
    counts = {number: count_of(examples, number, settings.rank).once for number in range(1, settings.max_heads + 1)}
    most = max((number for number, count in counts.items() if count.ratio >= TRIED_RATIO), default=1)
    found = fits.grow(most) if settings.search == "grow" else fits.search(most, settings.restarts)
    solved = fits.is_solved(found)
    if solved:
        found = fits.prune(found)
    return VarproFit(found, solved, noise, None, fits.starts)


def count_of(examples: Examples, heads: int, rank: int | None = None) -> ExampleCount:
    """Examples against parameters."""
    shape = examples.length, examples.width, examples.outputs_per_token
    return ExampleCount(examples.count, *shape, heads, rank, examples.different)


def is_suspicious(point: LayerPoint) -> bool:
    """Whether a head hardly contributes, or two heads nearly have the same scores."""
    loads, scores = contributions(point), point.scores
    size = float(np.max(np.linalg.norm(scores, axis=(1, 2)), initial=0.0))
    apart = [np.linalg.norm(one - two) for i, one in enumerate(scores) for two in scores[:i]]
    return bool(np.min(loads) < SUSPICIOUS * np.max(loads)) or bool(min(apart, default=np.inf) <= SUSPICIOUS * size)


def contributions(point: LayerPoint) -> Floats:  # (m,)
    """Root mean square of what each head adds to the outputs."""
    m, d = point.scores.shape[:2]
    mixed = point.mixed.reshape(-1, m, d)
    return np.array([np.sqrt(np.mean((mixed[:, i] @ point.projections[i]) ** 2)) for i in range(m)])


@dataclass
class _Fits:
    """Fits of different numbers of heads to the same examples."""

    examples: Examples
    noise: float | None
    settings: VarproSettings
    seed: int
    progress: Progress | None
    starts: int = 0
    of_noise: dict[tuple[int, int], float] = field(default_factory=dict)  # by heads, and how many there truly are

    def __post_init__(self) -> None:
        self.problem = self.examples.problem()
        spectral = self.settings.init == "spectral"
        self.moment = moment(self.problem, self.settings.max_heads) if spectral else None

    def fit(self, heads: int, first: Floats | None = None) -> RestartFit:
        rounding, settings = ROUNDING * self.examples.eps, self.settings
        limits = settings.steps, settings.seconds
        return RestartFit(self.problem, heads, rounding, self.noise, settings.rank, self.moment, first, *limits)

    def search(self, heads: int, most: int, first: Floats | None = None) -> RestartSearch:
        def report(done: int, relative: float) -> None:
            if self.progress is not None:
                self.progress(f"{heads} head{'s' if heads > 1 else ''}", done, most, relative)

        found = search(self.fit(heads, first), self.seed, most, self.done, self.settings.sharing, report)
        self.starts += len(found.traces)
        return found

    def done(self, found: RestartSearch) -> bool:
        if self.noise == 0.0:
            return self.is_solved(found)
        return (self.noise is None or self.is_solved(found)) and found.agreement >= AGREEING

    def is_solved(self, found: RestartSearch) -> bool:
        if self.noise is None:
            return False
        if self.noise == 0.0:
            return found.best.relative <= found.fit.rounding
        freedom = freedom_of(self.examples, found.fit.heads, self.settings.rank)
        numbers = self.examples.outputs.size
        return bool(found.best.rss <= most_left(self.noise, freedom, numbers, self.settings.tolerance))

    def grow(self, most: int) -> RestartSearch:
        """One head after the other until the examples are explained, or no further head pays."""
        searches: list[RestartSearch] = []
        starts = min(STARTS_PER_COUNT, self.settings.restarts)
        for heads in range(1, most + 1):
            found = self.search(heads, starts)
            if self.noise == 0.0 and self.is_solved(found):
                return found
            # Within noise a weak head hides: one more must have been of no use.
            if searches and self.is_solved(searches[-1]) and not self.better(found, searches[-1]):
                return searches[-1]
            searches.append(found)
            costs = [self._cost(each) for each in searches]
            recent = costs[-1:] if self.noise is None else costs[-2:]  # where noise is known, two heads in a row
            if len(costs) > 1 and not self.is_solved(found) and min(recent) > min(costs):
                break
        explained = [each for each in searches if self.is_solved(each)]
        return explained[-1] if explained else min(searches, key=self._cost)

    def better(self, more: RestartSearch, fewer: RestartSearch) -> bool:
        """Whether more heads explain more than they would of pure noise."""
        if not self.noise:
            return not self.is_solved(fewer)
        counts = [count_of(self.examples, each.fit.heads, self.settings.rank).parameters for each in (more, fewer)]
        explained = (fewer.best.rss - more.best.rss) / self.noise**2
        if explained <= _at_most(counts[0] - counts[1]):
            return False
        # A head may choose what it attends to, and so explains more of noise than as many fixed functions would.
        pair = more.fit.heads, fewer.fit.heads
        if pair not in self.of_noise:
            self.of_noise[pair] = max(self._of_noise(more.fit.heads, fewer, number) for number in range(REPLICAS))
        return bool(explained > _at_most(self.of_noise[pair]))

    def _of_noise(self, heads: int, truth: RestartSearch, number: int) -> float:
        """What so many heads explain, in squared deviations of the noise, where the truth is known to have fewer."""
        assert self.noise is not None
        inputs, layer = self.examples.inputs, AttentionLayer(truth.point.scores, truth.point.projections)
        rng = np.random.default_rng([self.seed, 0x2E91, heads, truth.fit.heads, number])
        drawn = np.asarray(layer(inputs)) + self.noise * rng.standard_normal(self.examples.outputs.shape)
        replica = replace(self, examples=Examples.of(inputs, drawn), progress=None, of_noise={})
        fewer = replica.search(truth.fit.heads, 1, truth.point.scores)
        more = replica.search(heads, min(STARTS_PER_COUNT, self.settings.restarts))
        self.starts = replica.starts
        return float(fewer.best.rss - more.best.rss) / self.noise**2

    def _cost(self, found: RestartSearch) -> float:
        """What a fit costs to write down, residual and parameters (the Bayesian information criterion)."""
        size = self.problem.labels.size
        parameters = count_of(self.examples, found.fit.heads, self.settings.rank).parameters
        floor = (found.fit.rounding**2) * self.problem.energy
        return float(size * np.log(max(found.best.rss, floor, np.finfo(float).tiny)) + parameters * np.log(size))

    def prune(self, found: RestartSearch) -> RestartSearch:
        """A search with as few heads as explain the examples as well."""
        while found.fit.heads > 1:
            for head in _candidates(found.point):
                fit = self.fit(found.fit.heads - 1, np.delete(found.point.scores, head, axis=0))
                fewer = search(replace(fit, moment=None), self.seed, 1, lambda _: True)
                self.starts += 1
                if self.is_solved(fewer) and not self.better(found, fewer):
                    found = fewer
                    break
            else:
                break
        return found


def most_left(noise: float | None, freedom: float, numbers: int, tolerance: float) -> float:
    """The residual sum of squares that errors of labels explain: as good as surely, or, within a tolerance, at all."""
    if noise is None:
        return float("inf")
    usual = noise**2 * (freedom + NOISE_DEVIATIONS * float(np.sqrt(2 * freedom)))
    return max(usual, tolerance**2 * numbers)


def _at_most(usual: float) -> float:
    """What a sum of squares of deviations is not expected to exceed, given what it usually is."""
    return float(usual + NOISE_DEVIATIONS * np.sqrt(2 * max(usual, 0.0)))


def _candidates(point: LayerPoint) -> Sequence[int]:
    """Heads that may be one too many: the weakest, and one of the two whose scores are nearest."""
    weakest = int(np.argmin(contributions(point)))
    scores = point.scores
    apart = {(i, j): float(np.linalg.norm(scores[i] - scores[j])) for i in range(len(scores)) for j in range(i)}
    nearest = min(apart, key=lambda pair: apart[pair])[0]
    return [weakest] if nearest == weakest else [weakest, nearest]


def freedom_of(examples: Examples, heads: int, rank: int | None) -> float:
    """Numbers in the outputs less those of the layer."""
    return float(max(1, examples.outputs.size - count_of(examples, heads, rank).parameters))
