"""One call of `learn`, from examples to a judged layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np

from keyhole.errors import ComputeError, TimeExhausted, UsageError
from keyhole.families import Family
from keyhole.methods.arithmetic import ComputeLimit, as_ending
from keyhole.recovery import Certificate, Outcome, Recovery, Stats
from keyhole.samples import varpro
from keyhole.samples.certificate import ENOUGH_REPEATS, Trust, Verdict, judge, judge_accuracy
from keyhole.samples.diagnostics import PARITY_LIKE, diagnose, enough_for_low_orders, low_orders, two_values
from keyhole.samples.evidence import Evidence, PointEvidence
from keyhole.samples.examples import (
    GOOD_PAIRS,
    GOOD_RATIO,
    REFUSED_PAIRS,
    REFUSED_RATIO,
    ExampleCount,
    Examples,
    LabelErrors,
)
from keyhole.samples.restarts import Trace
from keyhole.samples.sharded.refine import refine
from keyhole.samples.six_phase.method import PhaseSettings, six_phase
from keyhole.samples.six_phase.rows import NoRows
from keyhole.samples.source import ArraySource, Source
from keyhole.samples.sums import SummedFit
from keyhole.samples.variants import PLAIN, Trial, faint_heads, name_mask, name_variant, near_heads, nearly_even
from keyhole.samples.varpro import Progress, VarproFit, VarproSettings

# Rounding errs alike where inputs are alike. In memory those count once; shards are not compared with each other.
ONCE = "no input stands twice in the shards, whose outputs are rounded"

# Moments of tokens below this part of the largest leave scores free along them: tokens that depend on each other.
FLAT_TOKENS = 1e-13
# Exact outputs are fitted to a part of the examples, if there are more: this many numbers per parameter, and this many
# times d²/(k(k − 1)) examples. With noise all of them help; of shards so many per parameter to begin with.
FITTED_RATIO, FITTED_PAIRS, NOISY_RATIO = 20.0, 6.0, 80.0
# What is known of parities, in words.
HARD = "no statistical-query method learns parities, and descent from random starts is one"


class _Ended(Exception):
    """Ends a request early."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True)
class _Found:
    """What came out of the fit."""

    fitted: VarproFit | None  # None: the six phases alone
    evidence: Evidence
    count: ExampleCount
    train: Examples  # in memory

    @property
    def freedom(self) -> float:
        """Numbers in the outputs less those of the layer."""
        return float(max(1, self.evidence.numbers - self.count.parameters))


def _shared(hidden: int) -> str:
    """What is assumed where the tokens of each example agree in something."""
    what = "one number (or combination of numbers)" if hidden == 1 else f"{hidden} combinations of numbers"
    return (
        f"the tokens of each example agree in {what}, as they do here: its part in keys is zero, since it shows "
        "nowhere, and heads have equal shares of what it adds to the outputs, of which only the sum shows"
    )


def _cut_short(best: Trace, count: ExampleCount) -> str:
    """Why a start that ended at a limit says nothing of the family, and what makes descents shorter."""
    pairs = count.once.pairs
    way = "another seed= or more restarts= may have starts nearer to it"
    if pairs < FITTED_PAIRS:
        more = count.needed(0.0, FITTED_PAIRS)
        way = f"few examples make descents long: {more:,} are {FITTED_PAIRS:g} × d²/(k(k − 1)), here are {pairs:.2g}"
    return (
        f"the best start was cut short after {best.steps} steps and {best.products:,} products with its residual still "
        f"falling, so that this is no minimum and tells nothing of the family. {way[0].upper()}{way[1:]}"
    )


@dataclass(frozen=True)
class Shares:
    """How examples that were drawn for a fit go on to all of them."""

    source: Callable[[Examples, Examples], Source]  # from those to learn from and those held out
    count: int  # examples in all


@dataclass
class Request:
    """One call of `learn`, checked."""

    examples: Examples  # all of them, or those drawn from shards
    heads: int | None
    method: str
    seed: int
    errors: LabelErrors
    settings: VarproSettings
    heldout: int | None
    polish: bool
    phases: PhaseSettings
    progress: Progress | None
    limit: float  # seconds
    shares: Shares | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def carry_out(self) -> Recovery:
        """The result, whatever it is."""
        began = perf_counter()
        params: Family | None = None
        certificate = Certificate()
        train, heldout = self.examples, self.examples.some(slice(0, 0))
        learned, bound = train.count if self.shares is None else self.shares.count, 0
        limit = ComputeLimit(lambda: self.limit)
        try:
            self._check_visible()
            train, heldout = self.examples.split(self.heldout, np.random.default_rng([self.seed, 0x5E1D]))
            learned -= heldout.count
            if self.errors.repeats and self.shares is None:
                train = train.once()  # rounding errs alike where inputs are alike: they tell nothing more
            self._check_enough(train)
            if self.polish or self.method != "six-phase":
                self._check_tokens(train)
            with limit:
                found = self._learn(train, heldout)
            params, bound = found.evidence.layer, found.count.needed(1.0, 0.0)
            with limit:
                verdict = self._judge(found, heldout)
            outcome, message, certificate = verdict.outcome, verdict.message, verdict.certificate
            if found.fitted is not None and (hidden := found.fitted.point.problem.shared.shape[1]):
                certificate = replace(certificate, assumptions=(*certificate.assumptions, _shared(hidden)))
            if self.errors.repeats and self.shares is not None:
                certificate = replace(certificate, assumptions=(*certificate.assumptions, ONCE))
            self.details |= verdict.details
            learned = found.evidence.examples if self.shares is None else learned
        except _Ended as ending:
            outcome, message = ending.outcome, str(ending)
        except Exception as error:
            ended = as_ending(error)
            if not isinstance(ended, ComputeError):
                raise
            late = isinstance(ended, TimeExhausted)
            params = params or ended.partial
            outcome = Outcome.TIME_EXHAUSTED if late else Outcome.ARITHMETIC_FAILED
            message = f"{ended}: {limit}" if late else str(ended)
        finally:
            limit.close()
        stats = Stats(
            queries=learned,
            heldout_queries=heldout.count,
            counting_bound=bound,
            seconds=perf_counter() - began,
            details=self.details,
        )
        name = "varpro" if self.method == "auto" else self.method
        return Recovery(outcome, message, params, certificate, stats, name)

    def _judge(self, found: _Found, heldout: Examples) -> Verdict:
        """What the examples held out say of what was found, and before that what those it was fitted to say."""
        if found.fitted is None:
            return judge_accuracy(found.evidence.layer, heldout)
        noise, trusted = self._noise_level(found)
        self.details |= diagnose(found.train, found.fitted, found.count, noise)
        self._check_explained(found, noise)
        rng = np.random.default_rng([self.seed, 0xCE27])
        hidden = self.errors.tolerance > 0 and self.heads != found.fitted.heads
        trust = Trust(trusted, self.errors.tolerance, hidden)
        verdict = judge(found.evidence, found.count, heldout, noise, rng, trust)
        if (
            verdict.outcome is Outcome.WRONG_FAMILY
            and self.heads != 1
            and (even := nearly_even(found.train)) is not None
        ):
            return replace(verdict, outcome=Outcome.UNCERTIFIED, message=f"{even}: {verdict.message}")
        return verdict

    def _check_visible(self) -> None:
        """Whether the outputs can tell anything."""
        examples = self.examples
        if not np.any(examples.outputs):
            raise _Ended(Outcome.NOT_IDENTIFIABLE, "every output is zero, whatever the scores are")
        if examples.length == 1:
            cause = "examples of one token attend to it alone, whatever the scores are: longer ones are needed"
            raise _Ended(Outcome.NOT_IDENTIFIABLE, cause)
        if examples.count > 1 and not np.any(examples.outputs - examples.outputs[:1, :1]):
            cause = "the outputs are the same for every token of every example, which no layer without biases gives"
            raise _Ended(Outcome.WRONG_FAMILY, cause)
        if examples.different < 2:
            cause = "all inputs are equal: different ones are needed, some to learn from and some to judge by"
            raise _Ended(Outcome.TOO_FEW_EXAMPLES, cause)

    def _check_enough(self, train: Examples) -> None:
        """Whether there are examples enough; ends the request where there are not. Repeated ones count once."""
        count = varpro.count_of(train, self.heads or 1, self.settings.rank)
        self.details["samples"] = {"sentence": count.sentence()}
        if count.too_few:
            held = self.examples.different - train.different
            needed = count.needed(1.25 * REFUSED_RATIO, REFUSED_PAIRS) + held
            many = count.needed(GOOD_RATIO, GOOD_PAIRS) + held
            different = "" if self.examples.different == self.examples.count else "different "
            raise _Ended(
                Outcome.TOO_FEW_EXAMPLES,
                f"{self.examples.different} {different}examples of {train.length} tokens, {train.different} of them to "
                f"learn from, "
                f"against {count.parameters:,} parameters of {count.heads} head{'s' * (count.heads > 1)}: "
                f"{count.sentence()}. At least {needed:,} are needed, {many:,} for a good chance",
            )

    def _check_tokens(self, train: Examples) -> None:
        """Whether tokens are independent and differ within examples; ends the request where scores would be free."""
        problem = train.problem()
        sizes = np.sqrt(np.mean(problem.tokens**2, axis=0))
        d = train.width
        if np.all(sizes > 0.0):
            values = np.linalg.eigvalsh((problem.tokens / sizes).T @ (problem.tokens / sizes))
            rank = int(np.sum(values > FLAT_TOKENS * values[-1]))
        else:
            rank = int(np.linalg.matrix_rank(problem.tokens))
        if rank < d:
            raise _Ended(
                Outcome.NOT_IDENTIFIABLE,
                f"all tokens lie in {rank} of {d} dimensions, beyond which they say nothing of scores and projections: "
                f"learn from inputs @ basis, with a basis ({d}, {rank}) of those, such as "
                f"numpy.linalg.svd(tokens)[2][:{rank}].T",
            )
        if problem.shared.shape[1] == d:
            cause = "the tokens of each example are all the same, and so are its outputs, whatever the scores are"
            raise _Ended(Outcome.NOT_IDENTIFIABLE, cause)

    def _learn(self, train: Examples, heldout: Examples) -> _Found:
        """The fit, what it says of the examples, and those that it was made to."""
        first = None
        source = ArraySource(train.inputs, train.outputs) if self.shares is None else self.shares.source(train, heldout)
        if self.method == "six-phase" or self.settings.init == "six-phase":
            if self.heads is None:
                raise UsageError("the six phases need to be told how many heads there are")
            try:
                found = six_phase(source, self.heads, self.seed, self.phases, self.progress)
            except NoRows as error:
                raise _Ended(Outcome.TOO_FEW_EXAMPLES, str(error)) from error
            self.details["six_phase"] = found.figures
            first = found.scores
            if not self.polish:
                summed = SummedFit.of(source, found.scores, found.projections, full=False)
                return _Found(None, summed, self._count(summed.examples, train, self.heads), train)
        settings = self.settings
        if self.method == "six-phase":
            settings = replace(settings, restarts=1, init="random", jobs=1)
        exact = self.errors.deviation == 0.0
        if exact or self.shares is not None:
            ratio = FITTED_RATIO if exact else NOISY_RATIO
            most = varpro.count_of(train, self.heads or settings.max_heads, settings.rank).needed(ratio, FITTED_PAIRS)
            if most < train.count:
                train = train.some(np.random.default_rng([self.seed, 0xF17]).permutation(train.count)[:most])
        fitted = varpro.fit_layer(
            train, self.heads, self.errors.deviation, settings, self.seed, first=first, progress=self.progress
        )
        evidence = PointEvidence(fitted.point) if self.shares is None else self._refined(source, fitted, train)
        return _Found(fitted, evidence, self._count(evidence.examples, train, fitted.heads), train)

    def _refined(self, source: Source, fitted: VarproFit, train: Examples) -> Evidence:
        """The fit to all shards, where that to a part of them explains this part."""
        if not fitted.solved and self.errors.deviation is not None:
            return PointEvidence(fitted.point)
        wanted = self.errors.deviation != 0.0 and self.settings.rank is None
        evidence, passes = refine(source, fitted.point, wanted=wanted)
        self.details["shards"] = self.details.get("shards", {}) | {
            "fitted_first": train.count,
            "passes": passes,
            "refined": evidence.refined,
        }
        return evidence

    def _count(self, examples: int, train: Examples, heads: int) -> ExampleCount:
        """Examples against parameters. Whether those of shards repeat each other is told by those that were drawn."""
        count = varpro.count_of(train, heads, self.settings.rank)
        different = examples if train.different == train.count else train.different
        return replace(count, examples=examples, different=different)

    def _noise_level(self, found: _Found) -> tuple[float, bool]:
        """The noise, and whether it is known apart from the fit."""
        if self.errors.deviation is not None:
            return self.errors.deviation, True
        freedom = found.freedom
        left = float(np.sqrt(found.evidence.rss / freedom))
        alone, repeats = self.examples.noise_of_repeats()
        self.details["repeated_inputs"] = {"noise": alone, "freedom": repeats}
        if repeats < ENOUGH_REPEATS:
            return left, False
        # As much is left over as repeated inputs differ by: five standard deviations of both.
        allowed = 1 + 5 * np.sqrt(0.5 / freedom + 0.5 / repeats)
        if left <= alone * allowed:
            return max(left, alone), True
        self.details["noise"] = alone
        raise _Ended(
            Outcome.WRONG_FAMILY,
            f"the fit leaves {left:.2g} over, but outputs of equal inputs differ by {alone:.2g} only: "
            f"{self._failure(found)}",
        )

    def _check_explained(self, found: _Found, noise: float) -> None:
        """Whether the fit explains the examples; ends the request where it does not."""
        evidence, fitted = found.evidence, found.fitted
        assert fitted is not None
        rounding = varpro.ROUNDING * found.train.eps
        allowed = varpro.most_left(self.errors.deviation, found.freedom, evidence.numbers, self.errors.tolerance)
        allowed = rounding**2 * evidence.energy if self.errors.deviation == 0.0 else allowed
        if self.errors.deviation is None or (fitted.solved and evidence.rss <= allowed):
            return
        if (untold := faint_heads(fitted.point, rounding) or near_heads(fitted.point)) is not None:
            raise _Ended(Outcome.UNCERTIFIED, untold)
        if self.heads != 1 and (even := nearly_even(found.train)) is not None:
            raise _Ended(Outcome.UNCERTIFIED, f"{even}: the fit leaves {fitted.point.relative:.1g} of them over")
        if (mask := name_mask(found.train, noise)) is not None:
            raise _Ended(Outcome.WRONG_FAMILY, mask)
        left = float(np.sqrt(evidence.rss / found.freedom))
        expected = f"{noise:.2g}" if noise else "rounding"
        more = "" if self.heads is None else f" by {self.heads} head{'s' * (self.heads > 1)}"
        said = f"no start explains the examples{more}: {left:.2g} is left over where {expected} was expected; "
        said += self._failure(found)
        trial = Trial(found.train, fitted.heads, noise, self.settings, self.seed)
        if (known := name_variant(trial)) is not None:
            outcome = Outcome.UNCERTIFIED if known == PLAIN else Outcome.WRONG_FAMILY
            raise _Ended(
                outcome, f"{known} ({'the fit' if known == PLAIN else 'a plain layer'} leaves {left:.2g} over)"
            )
        orders = self.details["first_order_r2"], self.details["low_order_r2"]
        if two_values(found.train) and enough_for_low_orders(found.train) and max(orders) < PARITY_LIKE:
            raise _Ended(Outcome.PARITY_LIKE, f"parity-like: {self._failure(found)}; {HARD}")
        if not found.count.good:
            raise _Ended(Outcome.TOO_FEW_EXAMPLES, f"{said}; {found.count.sentence()}")
        if fitted.search.best.cut:
            raise _Ended(Outcome.UNCERTIFIED, f"{said}; {_cut_short(fitted.search.best, found.count)}")
        raise _Ended(Outcome.WRONG_FAMILY, said)

    def _failure(self, found: _Found) -> str:
        assert found.fitted is not None
        search, train = found.fitted.search, found.train
        if "first_order_r2" not in self.details:
            orders = low_orders(train, np.random.default_rng([self.seed, 0x10]))
            self.details["first_order_r2"], self.details["low_order_r2"] = orders
        made, agreeing = len(search.traces), search.agreement
        words = "restarts disagree" if agreeing <= max(1, made // 2) else "restarts agree"
        order = f"first-order R² {self.details['first_order_r2']:.2f}"
        if not enough_for_low_orders(train):
            order += ", of too few examples to mean much"
        return f"{words} ({agreeing} of {made}), {order}"
