"""The front door: a layer from labelled examples, certified on examples held back, or an outcome that says why not."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np

from keyhole.errors import ComputeError, RecoveryFailed, TimeExhausted, UsageError
from keyhole.families import Family
from keyhole.methods.arithmetic import ComputeLimit, as_ending, check_seconds, default_limit
from keyhole.methods.noise_estimation.measure import coarseness
from keyhole.noise import Noise
from keyhole.recovery import Certificate, Outcome, Recovery, Stats
from keyhole.samples import varpro
from keyhole.samples.certificate import ENOUGH_REPEATS, judge
from keyhole.samples.diagnostics import PARITY_LIKE, diagnose, enough_for_low_orders, low_orders
from keyhole.samples.examples import GOOD_PAIRS, GOOD_RATIO, REFUSED_PAIRS, REFUSED_RATIO, ExampleCount, Examples
from keyhole.samples.six_phase.method import six_phase
from keyhole.samples.six_phase.rows import MOST_HEADS as SIX_PHASE_HEADS
from keyhole.samples.varpro import INITS, MOST_HEADS, SEARCHES, Progress, VarproFit, VarproSettings

METHODS = ("varpro", "six-phase")
# Exact outputs are fitted to a part of the examples, if there are more: this many numbers per parameter, and this many
# times d²/(k(k − 1)) examples. With noise all of them help.
FITTED_RATIO, FITTED_PAIRS = 20.0, 6.0
# Normal errors that are as wide as errors of another kind, over their half-width.
UNIFORM = 3**-0.5


def learn(
    inputs: Any,  # (n, k, d)
    outputs: Any,  # (n, k, d_out)
    heads: int | str = "auto",
    method: str = "auto",
    seed: int = 0,
    throw: bool = True,
    *,
    noise: Noise | str | float | None = None,
    rank: int | None = None,
    restarts: int = 10,
    init: str = "random",
    jobs: int = 1,
    search: str = "grow",
    max_heads: int = MOST_HEADS,
    heldout: int | None = None,
    polish: bool = True,
    progress: Progress | None = None,
    max_seconds: float | None = None,
) -> Recovery:
    """Learn a multi-head layer F(X) = Σ softmax(X·Θ·Xᵀ)·X·W from random examples (X, F(X)), and certify it.

    `heads` is their number, or "auto" to find it. `noise` is the standard deviation of the outputs' errors, a `Noise`,
    or "measure" where it is unknown; left out, outputs are taken for exact unless their digits show that they are
    rounded. `rank` bounds the rank of every score
    matrix. The method "varpro" makes up to `restarts` starts from `init` ("random", "spectral" or "six-phase"), which
    `jobs` processes share; `search` says whether heads are found by growing or by pruning, up to `max_heads`.
    "six-phase" is the algorithm of Chen and Li, followed by a descent unless `polish=False`.

    `throw=False` returns every outcome; otherwise one without a certificate raises `RecoveryFailed`, which has the
    result attached. `max_seconds` caps the time it takes; left out, it is a minute and grows with examples and sizes.
    `progress` is called with (stage, starts done, starts at most, least relative residual).
    """
    examples = Examples.of(inputs, outputs)
    kind, details = noise, dict[str, Any]()
    if noise is None:
        digits = coarseness(examples.outputs, examples.eps)
        kind = digits.noise
        if digits.evidence:
            details = {"noise_found": str(kind), "noise_evidence": digits.evidence}
    limit = check_seconds(max_seconds) or default_limit(examples.count, examples.width, examples.outputs_per_token)
    request = _Request(
        examples=examples,
        heads=_heads(heads),
        method=_one_of("method", method, ("auto", *METHODS)),
        seed=_whole("seed", seed, 0),
        noise=_noise(kind, examples),
        settings=VarproSettings(
            _whole("restarts", restarts, 1),
            _one_of("init", init, INITS),
            None if rank is None else _whole("rank", rank, 1),
            _whole("jobs", jobs, 1),
            _one_of("search", search, SEARCHES),
            _whole("max_heads", max_heads, 1),
            seconds=limit,
        ),
        heldout=None if heldout is None else _whole("heldout", heldout, 1),
        polish=bool(polish),
        progress=progress,
        limit=limit,
        details=details,
    )
    if heldout is not None and heldout >= examples.count:
        raise UsageError(f"heldout={heldout} leaves nothing to learn from: there are {examples.count} examples")
    result = request.carry_out()
    if details:
        result = _with_assumption(result, f"outputs err as was found, not declared: {kind}")
    if details and not result.certified:  # few digits may be a coincidence
        exact = replace(request, noise=0.0, details={}).carry_out()
        result = exact if exact.certified else result
    if throw and not result.certified:
        raise RecoveryFailed(result)
    return result


def _with_assumption(result: Recovery, assumption: str) -> Recovery:
    assumptions = (*result.certificate.assumptions, assumption)
    return replace(result, certificate=replace(result.certificate, assumptions=assumptions))


def _heads(heads: int | str) -> int | None:
    if heads == "auto":
        return None
    if isinstance(heads, str):
        raise UsageError(f"heads must be a whole number of at least 1 or 'auto', not {heads!r}")
    return _whole("heads", heads, 1)


def _whole(name: str, number: Any, least: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, not {number!r}")
    return int(number)


def _one_of(name: str, word: str, known: tuple[str, ...]) -> str:
    if word not in known:
        raise UsageError(f"unknown {name} {word!r}; known: {', '.join(known)}")
    return word


def _noise(noise: Noise | str | float | None, examples: Examples) -> float | None:
    """A standard deviation; 0 for exact outputs and None for unknown."""
    if isinstance(noise, int | float) and not isinstance(noise, bool):
        return Noise.gaussian(float(noise)).scale if noise != 0 else 0.0
    kind = Noise.of(noise)  # type: ignore[arg-type]  # which says what it is not
    if kind.kind == "bounded":
        raise UsageError(
            "noise=Noise.bounded(...) is nothing to fit by: give a standard deviation, Noise.gaussian(scale)"
        )
    if kind.kind == "measure":
        return None
    if kind.kind == "dtype":
        return UNIFORM * kind.scale * float(np.sqrt(np.mean(examples.outputs**2)))
    return UNIFORM * kind.scale if kind.kind == "rounded" else kind.scale


class _Ended(Exception):
    """Ends a request early."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass
class _Request:
    """One call of `learn`, checked."""

    examples: Examples
    heads: int | None
    method: str
    seed: int
    noise: float | None
    settings: VarproSettings
    heldout: int | None
    polish: bool
    progress: Progress | None
    limit: float  # seconds
    details: dict[str, Any] = field(default_factory=dict)

    def carry_out(self) -> Recovery:
        """The result, whatever it is."""
        began = perf_counter()
        params: Family | None = None
        certificate = Certificate()
        train, heldout = self.examples, self.examples.some(slice(0, 0))
        bound = 0
        limit = ComputeLimit(lambda: self.limit)
        try:
            self._check_visible()
            train, heldout = self.examples.split(self.heldout, np.random.default_rng([self.seed, 0x5E1D]))
            self._check_enough(train)
            with limit:
                fitted, train = self._fit(train)
            params = fitted.search.layer
            count = varpro.count_of(train, fitted.heads, self.settings.rank)
            bound = count.needed(1.0, 0.0)
            noise, trusted = self._noise_level(train, fitted)
            self.details |= diagnose(train, fitted, count, noise)
            self._check_explained(train, fitted, count, noise)
            rng = np.random.default_rng([self.seed, 0xCE27])
            with limit:
                outcome, message, certificate, more = judge(fitted, count, heldout, noise, trusted, rng)
            self.details |= more
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
            queries=train.count,
            heldout_queries=heldout.count,
            counting_bound=bound,
            seconds=perf_counter() - began,
            details=self.details,
        )
        name = "varpro" if self.method == "auto" else self.method
        return Recovery(outcome, message, params, certificate, stats, name)

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

    def _fit(self, train: Examples) -> tuple[VarproFit, Examples]:
        """The fit, and the examples that it was made to."""
        first = None
        if self.method == "six-phase" or self.settings.init == "six-phase":
            if self.heads is None or self.heads > SIX_PHASE_HEADS:
                raise UsageError(f"the six phases need to be told how many heads there are, 1 to {SIX_PHASE_HEADS}")
            found = six_phase(train.inputs, train.outputs, self.heads, seed=self.seed)
            self.details["six_phase"] = found.figures
            first = found.scores
        settings = self.settings
        if self.method == "six-phase":
            steps = settings.steps if self.polish else 0
            settings = replace(settings, restarts=1, init="random", jobs=1, steps=steps)
        if self.noise == 0.0:
            most = varpro.count_of(train, self.heads or settings.max_heads, settings.rank).needed(
                FITTED_RATIO, FITTED_PAIRS
            )
            if most < train.count:
                train = train.some(np.random.default_rng([self.seed, 0xF17]).permutation(train.count)[:most])
        fitted = varpro.fit_layer(
            train, self.heads, self.noise, settings, self.seed, first=first, progress=self.progress
        )
        return fitted, train

    def _noise_level(self, train: Examples, fitted: VarproFit) -> tuple[float, bool]:
        """The noise, and whether it is known apart from the fit."""
        if self.noise is not None:
            return self.noise, True
        freedom = varpro.freedom_of(train, fitted.heads, self.settings.rank)
        left = float(np.sqrt(fitted.search.best.rss / freedom))
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
            f"{self._failure(train, fitted)}",
        )

    def _check_explained(self, train: Examples, fitted: VarproFit, count: ExampleCount, noise: float) -> None:
        """Whether the fit explains the examples; ends the request where it does not."""
        if fitted.solved or self.noise is None:
            return
        freedom = varpro.freedom_of(train, fitted.heads, self.settings.rank)
        left = float(np.sqrt(fitted.search.best.rss / freedom))
        expected = f"{noise:.2g}" if noise else "rounding"
        more = "" if self.heads is None else f" by {self.heads} head{'s' * (self.heads > 1)}"
        said = f"no start explains the examples{more}: {left:.2g} is left over where {expected} was expected; "
        said += self._failure(train, fitted)
        orders = self.details["first_order_r2"], self.details["low_order_r2"]
        parity = enough_for_low_orders(train) and max(orders) < PARITY_LIKE
        disagree = fitted.search.agreement <= max(1, len(fitted.search.traces) // 2)
        if parity and disagree:
            cause = f"parity-like: {self._failure(train, fitted)}; no efficient method is expected"
            raise _Ended(Outcome.PARITY_LIKE, cause)
        if not count.good:
            raise _Ended(Outcome.TOO_FEW_EXAMPLES, f"{said}; {count.sentence()}")
        raise _Ended(Outcome.WRONG_FAMILY, said)

    def _failure(self, train: Examples, fitted: VarproFit) -> str:
        if "first_order_r2" not in self.details:
            orders = low_orders(train, np.random.default_rng([self.seed, 0x10]))
            self.details["first_order_r2"], self.details["low_order_r2"] = orders
        made, agreeing = len(fitted.search.traces), fitted.search.agreement
        words = "restarts disagree" if agreeing <= max(1, made // 2) else "restarts agree"
        order = f"first-order R² {self.details['first_order_r2']:.2f}"
        if not enough_for_low_orders(train):
            order += ", of too few examples to mean much"
        return f"{words} ({agreeing} of {made}), {order}"
