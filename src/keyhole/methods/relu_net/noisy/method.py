"""A net of one hidden layer behind noise: random samples, neurons grown on their residual, least squares over all."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.special import ndtri

from keyhole.arrays import Floats
from keyhole.families.relu_net import ReluNet
from keyhole.methods.base import Estimate, Steps, Unrecoverable, target_details
from keyhole.methods.options import check_positive, check_whole
from keyhole.methods.relu_net.noisy.covariance import CorrelatedErrors, Covariance, FittedNet
from keyhole.methods.relu_net.noisy.least_squares import (
    NetFit,
    NetProblem,
    descend,
    enlarge,
    fit_planes,
    parameters,
    unit,
)
from keyhole.methods.relu_net.noisy.rounding import radii_of_rounding
from keyhole.methods.relu_net.noisy.samples import Samples
from keyhole.methods.relu_net.noisy.search import (
    LAST_STEPS,
    as_relu,
    fit_finally,
    fit_residuals,
    is_at_noise,
    least_worth,
    noise_ceiling,
    orient,
)
from keyhole.methods.relu_net.noisy.support import (
    doubts,
    is_small,
    sure_covariance,
    tokens_beside_some,
    tokens_beside_unresolved,
    tokens_beside_untested,
    tokens_on_short_sides,
)
from keyhole.queries import Signature
from keyhole.recovery import Outcome

ASSUMPTIONS = (
    "the box is a net of one hidden layer of ReLU neurons on its last token",
    "errors of answers to different questions are independent, of the declared size",
    "neurons that bend only beyond the norms asked, or by less than the noise, are not seen",
    "kinks that cut off a twentieth of these tokens, or lie so close that they enclose less, may be unseen",
    "an affine way past the neurons that is lost in noise is none",
)

# Queries for each number to be found: before a fit is believed, and in the end.
FITTED_FROM = 3.0
IN_THE_END = 5.0
# With fewer than this a fit is not tried.
FEWEST = 1.5
# The first guess of the number of neurons, how guesses grow, and how many more than needed make descent easy.
FIRST_GUESS = 6
GROWTH = 1.5
SPARE = 1.4
# Where guesses end unless `neurons` is given.
MOST_NEURONS = 128
MOST_PARAMETERS = 20_000
# Rounds of enlarging at one guess, and at the last.
ROUNDS = 4
LAST_ROUNDS = 12
# Rounds of asking for more where too few answers are, as kinks move with every one.
SUPPORT_ROUNDS = 12
# Far samples that contradict the fit are first explained as if errors were these fractions of the answers.
SOFTENINGS = (1e-2, 1e-4)
# Rounds of further queries until the wanted error is reached, and the most of them for each number to be found.
MOST_ROUNDS = 3
MOST_PER_PARAMETER = 40.0
# A neuron that may be nothing has radii this much wider than those of the first order: nothing is known of its plane.
MOST_CURVED = 1e3
# How often, in how many recoveries, any entry at all may lie outside its radius.
MISSES = 1e-9
# What is left of answers shows another family where it is so many times their noise; else the descent may be stuck.
CLEARLY = 10.0


def relu_boost(
    signature: Signature,
    rng: np.random.Generator,
    *,
    budget: float = math.inf,
    target_error: float | None = None,
    neurons: int | None = None,
    skip: bool | None = None,
) -> Steps[Estimate[ReluNet]]:
    """A net of one hidden layer from answers that err, near the statistical limit.

    Random single tokens are asked at norms at which answers bend, about three for each parameter of a first guess of
    the width, and neurons beside an affine part are fitted to them by variable projection: more than needed, because
    that leaves hardly any false minima, then as few as noise allows; a larger guess follows where they do not do.
    Farther samples, five for each parameter in all, confirm or refute the fit and sharpen it; `budget` or
    `target_error` (root mean square of the function's standard error at the samples) may ask for more. `neurons` says
    how many there are at most. Unless there is a `skip`, neurons are turned so that none is needed, where that is
    possible. Standard errors are those of the Fisher information.
    """
    check_whole("neurons", neurons, 0)
    check_positive("target_error", target_error)
    return (yield from _Boosting(signature, rng, budget, neurons).run(target_error, skip))


class _Boosting:
    """Samples, and the fit that explains them."""

    def __init__(self, signature: Signature, rng: np.random.Generator, budget: float, neurons: int | None) -> None:
        self.signature, self.rng, self.budget, self.neurons = signature, rng, budget, neurons
        self.samples = Samples(signature, rng)
        self.bounded = signature.noise.kind == "bounded"

    def run(self, target_error: float | None, skip: bool | None) -> Steps[Estimate[ReluNet]]:
        """Ask, fit, confirm, sharpen."""
        yield from self.samples.ask_scale()
        fit = yield from self._ask_growth()
        fit = yield from self._ask_confirmation(fit)
        covariance = Covariance(self._orient(fit, skip))
        for _ in range(MOST_ROUNDS):
            more = self._samples_to_ask(covariance, target_error)
            if more < 1:
                break
            yield from self._ask(more, far=True)
            fit = self._refine(fit, self.samples.problem())
            covariance = Covariance(self._orient(fit, skip))
        return self._estimate(covariance, target_error)

    def _queries(self, neurons: int, per_parameter: float) -> int:
        """Queries that make so many answers for each parameter."""
        outputs = self.samples.outputs
        wanted = per_parameter * parameters(neurons, self.signature.width, outputs, True) / outputs
        # However many outputs, planes show only in different queries.
        return math.ceil(max(wanted, per_parameter * (self.signature.width + 1)))

    def _ask(self, count: int, *, far: bool) -> Steps[None]:
        """So many more, or what is left of the budget."""
        count = int(min(count, self.budget - self.samples.count))
        if count > 0:
            yield from self.samples.ask("samples", self.samples.draw(count, far=far))

    def _samples_to_ask(self, covariance: Covariance, target_error: float | None) -> int:
        """Further queries that target or budget ask for."""
        asked = self.samples.count
        most = self._queries(covariance.fit.neurons, MOST_PER_PARAMETER)
        left = min(self.budget, max(most, asked)) - asked
        if target_error is None:
            return int(left) if self.budget < math.inf else 0
        error = self._error(covariance)
        return 0 if error <= target_error else int(min(left, math.ceil(asked * ((error / target_error) ** 2 - 1))))

    def _most(self) -> int:
        """The largest guess that makes sense."""
        if self.neurons is not None:
            return max(1, math.ceil(SPARE * self.neurons))
        return max(1, min(MOST_NEURONS, MOST_PARAMETERS // (self.signature.width + 1)))

    def _ask_growth(self) -> Steps[NetFit]:
        """A fit that explains near samples, with as many of them as its size needs."""
        most = self._most()
        guess, planes = min(FIRST_GUESS if self.neurons is None else most, most), None
        while True:
            wanted = self._queries(guess, FITTED_FROM if self.neurons is None else IN_THE_END / SPARE)
            yield from self._ask(wanted - self.samples.near, far=False)
            self._check_enough(guess)
            problem = self.samples.problem()
            if planes is None:
                self._check_response(problem)
            flat = fit_planes(problem, np.zeros((0, problem.white.shape[1])))
            if is_at_noise(flat, self.bounded):
                return flat
            fit = self._fit_all(problem, flat, planes, guess, last=guess == most)
            if is_at_noise(fit, self.bounded):
                return fit
            if guess == most:
                raise self._failure(fit)
            guess, planes = min(most, math.ceil(GROWTH * guess)), fit.raw_planes()

    def _fit_all(self, problem: NetProblem, flat: NetFit, planes: Floats | None, guess: int, *, last: bool) -> NetFit:
        """The best fit of about a number of neurons, begun where the last one ended."""
        room = max(guess, self._room(problem))
        rounds = LAST_ROUNDS if last else ROUNDS
        limits: dict[str, Any] = {"rounds": rounds, "most_neurons": room, "bounded": self.bounded, "flat": flat.squares}
        if planes is None or not planes.size:
            start = unit(self.rng.standard_normal((guess, self.signature.width + 1)))
            return fit_residuals(problem, start, self.rng, **limits)
        before = fit_planes(problem, problem.to_white(planes))
        start = enlarge(before, max(1, guess - before.neurons), self.rng)
        return fit_residuals(problem, start, self.rng, **limits)

    def _room(self, problem: NetProblem) -> int:
        """Neurons that leave half of the answers free."""
        return int(problem.answers.size / 2 / (self.signature.width + self.samples.outputs))

    def _ask_confirmation(self, fit: NetFit) -> Steps[NetFit]:
        """The fit with farther samples, which it must explain too; where it does not, neurons are added."""
        fit = fit_finally(fit, self.rng, most_neurons=self._room(fit.problem), bounded=self.bounded)
        beside, enough = tokens_on_short_sides(fit, self.samples), False
        for number in range(SUPPORT_ROUNDS):
            wanted = max(self._queries(fit.neurons, IN_THE_END), math.ceil(self.samples.count * (1 + 1 / IN_THE_END)))
            wanted = 0 if enough else wanted
            # In few dimensions kinks lie close together more often.
            some = max(0, wanted - self.samples.count) // (1 + self.signature.width)
            yield from self._ask_tokens(np.concatenate([beside, tokens_beside_some(fit, self.samples, some)]))
            yield from self._ask(wanted - self.samples.count, far=True)
            self._check_enough(fit.neurons)
            before, fit = fit, self._refine(fit, self.samples.problem())
            if not is_at_noise(fit, self.bounded):
                fit = self._again(before)
            enough = False
            if is_at_noise(fit, self.bounded):
                fit = fit_finally(fit, self.rng, most_neurons=self._room(fit.problem), bounded=self.bounded)
                enough = self._queries(fit.neurons, IN_THE_END) <= self.samples.count
                beside = tokens_on_short_sides(fit, self.samples)
                if not beside.size and is_small(fit):
                    beside = self._beside_doubtful(Covariance(as_relu(fit)), number)
                if enough and not beside.size:
                    return fit
            elif number >= MOST_ROUNDS - 1:
                break
        raise self._failure(fit)

    def _beside_doubtful(self, covariance: Covariance, number: int) -> Floats:  # -> (n, width)
        """Tokens where the fit has to be taken at its word, and in the first rounds where it may be mistaken."""
        untested = tokens_beside_untested(covariance, self.samples)
        if number >= MOST_ROUNDS - 1:
            return untested
        deviations = self._deviations(covariance.fit)[2]
        return np.concatenate([untested, tokens_beside_unresolved(covariance, self.samples, deviations)])

    def _ask_tokens(self, tokens: Floats) -> Steps[None]:  # (n, width)
        """These, or as many as the budget allows."""
        tokens = tokens[: int(min(tokens.shape[0], max(0, self.budget - self.samples.count)))]
        if tokens.shape[0]:
            yield from self.samples.ask("samples", tokens)

    def _again(self, fit: NetFit) -> NetFit:
        """Fit all samples, first coarsely: those far out would dominate the others."""
        planes = fit.raw_planes()
        for softened in (*SOFTENINGS, 0.0):
            problem = self.samples.problem(softened)
            most = max(min(self._room(problem), self._most()), planes.shape[0])
            start = problem.to_white(planes)
            fit = fit_residuals(problem, start, self.rng, rounds=LAST_ROUNDS, most_neurons=most, bounded=self.bounded)
            planes = fit.raw_planes()
        return fit

    @staticmethod
    def _refine(fit: NetFit, problem: NetProblem) -> NetFit:
        return descend(fit_planes(problem, problem.to_white(fit.raw_planes())), LAST_STEPS)

    def _orient(self, fit: NetFit, skip: bool | None) -> NetFit:
        """A fit turned to ReLU neurons, without a skip where none is declared and none is needed."""
        if not skip:
            turned = orient(fit)
            if turned is not None and is_at_noise(turned, self.bounded):
                return turned
        return as_relu(fit)

    def _check_enough(self, neurons: int) -> None:
        needed = self._queries(neurons, FEWEST)
        if self.samples.count < needed:
            raise Unrecoverable(
                Outcome.BUDGET_EXHAUSTED,
                f"the budget of {self.budget:.0f} questions ended before a net explained the answers: "
                f"more than {neurons} neurons need {needed} at least",
            )

    def _check_response(self, problem: NetProblem) -> None:
        """Answers that noise explains without any net."""
        if self.signature.noise.kind == "exact":
            return
        constant = problem.rows[:, -1:]
        level = constant.T @ problem.answers / np.sum(constant**2)
        if float(np.sum((problem.answers - constant @ level) ** 2)) <= noise_ceiling(problem, 0, self.bounded):
            raise Unrecoverable(Outcome.TOO_NOISY, "the answers cannot be told from a constant in the declared noise")

    def _failure(self, fit: NetFit) -> Unrecoverable:
        if is_at_noise(fit, self.bounded):
            seen = "of a neuron of the fitted net too few answers are on one side of its kink to know its plane"
            return Unrecoverable(Outcome.UNCERTIFIED, f"{seen}: raise the budget, max_norm or the precision")
        ratio = math.sqrt(fit.squares / fit.problem.answers.size)
        why = "noise" if self.signature.noise.kind != "exact" else "rounding"
        return Unrecoverable(
            Outcome.WRONG_FAMILY if ratio > CLEARLY else Outcome.TOO_NOISY,
            f"{fit.neurons} neurons leave {ratio:.3g} times the {why} of {self.samples.count} answers unexplained: the "
            "box is no net of one hidden layer, or has more neurons (neurons=), or the descent is stuck (another seed)",
        )

    def _error(self, covariance: Covariance) -> float:
        """Root mean square of the function's standard error at near samples."""
        tokens = self.samples.draw(4 * self.signature.width, far=False)
        rows = np.concatenate([tokens, np.ones((tokens.shape[0], 1))], axis=1)
        return float(np.sqrt(np.mean(covariance.predictions(rows) ** 2)))

    def _estimate(self, covariance: Covariance, target_error: float | None) -> Estimate[ReluNet]:
        fit, raw, samples = covariance.fit, covariance.raw, self.samples
        lengths = np.linalg.norm(raw[:, :-1], axis=1)
        lengths = np.where(lengths > 0, lengths, 1.0)
        output = fit.output * np.concatenate([lengths, np.ones(fit.output.shape[0] - fit.neurons)])[:, None]
        params = FittedNet(**self._arrays(raw / lengths[:, None], output, fit.problem.affine))
        errors = self._arrays(covariance.planes(), covariance.output(), fit.problem.affine)
        noise, wide = self.signature.noise, self._radii(covariance)
        normal = noise.kind == "gaussian"
        count = parameters(fit.neurons, self.signature.width, samples.outputs, fit.problem.affine)
        error = self._error(covariance)
        details = {
            "neurons": fit.neurons,
            "orientation": "not settled: a skip makes up for it" if fit.problem.affine else "settled",
            "misfit": math.sqrt(fit.squares / max(fit.problem.freedom(fit.neurons), 1)),
            "standard_error": error,
            "kinks_from_norm": samples.kinks,
            "valid_to_norm": samples.largest_norm,
            "per_parameter": samples.count * samples.outputs / count,
        }
        return Estimate(
            params=params,
            radius=wide,
            counting_bound=math.ceil(count / samples.outputs),
            standard_error=CorrelatedErrors(**errors, covariance=covariance) if normal else None,
            assumptions=(*ASSUMPTIONS, f"what is said holds for tokens of norm up to {samples.largest_norm:.3g}"),
            details={**details, **target_details(target_error, error)},
        )

    def _radii(self, covariance: Covariance) -> CorrelatedErrors:
        """Radii of entries and of predictions."""
        noise, affine = self.signature.noise, covariance.fit.problem.affine
        unseen, deviations, widened = self._deviations(covariance.fit)
        sure = sure_covariance(covariance, widened)
        planes, output = widened * sure.planes(), widened * sure.output()
        if noise.kind not in ("gaussian", "bounded"):
            planes, output = radii_of_rounding(sure, deviations)
            planes, output = planes + unseen * sure.planes(), output + unseen * sure.output()
        # Where a neuron may be nothing, what follows for its plane to first order is too little.
        factor = 1 / np.maximum(1 - doubts(sure, output), 1 / MOST_CURVED)[:, None]
        planes, output[: factor.size] = planes * factor, output[: factor.size] * factor
        shift = noise.radius if noise.kind == "rounded" else 0.0
        radius = self._arrays(planes, output, affine)
        return CorrelatedErrors(**radius, covariance=covariance, factor=widened, shift=shift)

    def _deviations(self, fit: NetFit) -> tuple[float, float, float]:
        """Radii over standard errors: for a neuron that was not worth keeping, for noise, and for both."""
        unseen = math.sqrt(least_worth(fit.problem))
        deviations = -float(ndtri(MISSES / 2 / max(1, fit.planes.size + fit.output.size)))
        # Errors that are only bounded may all conspire; random ones add up in quadrature.
        return unseen, deviations, unseen + (math.sqrt(fit.problem.answers.size) if self.bounded else deviations)

    def _arrays(self, planes: Floats, output: Floats, affine: bool) -> dict[str, Any]:
        """Planes and output layer by the names a net has for them."""
        space, neurons = self.signature.space, planes.shape[0]
        across = output[:, 0] if self.samples.scalar else output.T  # neurons last, as a net has them
        named = {
            "weights_in": planes[:, :-1],
            "bias_in": planes[:, -1],
            "weights_out": across[..., :neurons],
            "bias_out": across[..., -1],
        }
        if affine:
            named["skip"] = across[..., neurons:-1]
        return {name: space.asarray(array) for name, array in named.items()}
