"""One attempt of a method on an oracle: queries, an estimate, and held-out queries that judge it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from keyhole.arrays import Array, Floats, floats, namespace
from keyhole.errors import BudgetExhausted, ComputeError, KeyholeError, NumericalError, OracleError, UsageError
from keyhole.families import Family
from keyhole.methods.arithmetic import check_arithmetic
from keyhole.methods.base import Estimate, Found, Method, Steps, Unrecoverable, adapt
from keyhole.methods.certificate import LEAST, Judgement, certify, heldout_count
from keyhole.methods.heldout import CLASSES_FROM
from keyhole.methods.noise_estimation.measure import NoiseEstimate, coarseness, measure_noise
from keyhole.methods.noise_estimation.precision import ask_precision
from keyhole.noise import DIGITS, Noise
from keyhole.numerics.domain import Sampler
from keyhole.queries import Measurements, Plan, Signature
from keyhole.recovery import Certificate, Outcome

# Queries asked again to find out whether an oracle contradicts itself, once something else is wrong.
CONTRADICTION_QUERIES = 8
# Answers whose digits are looked at where something is wrong: of so many plans, so many each.
SAMPLE_PLANS, SAMPLE_ANSWERS = 4, 16
# Single tokens where estimates were refuted, of which a further attempt knows.
MOST_PLACES = 8
# What ends a generator from outside of it, or its arithmetic.
ENDS = (BudgetExhausted, OracleError, ComputeError)
# Outcomes after which nothing more can be asked, and those that undeclared noise has nothing to do with.
FINAL = (Outcome.BUDGET_EXHAUSTED, Outcome.ORACLE_FAILED, Outcome.TIME_EXHAUSTED)
NOT_FOR_NOISE = (*FINAL, Outcome.TOO_FEW_MEASUREMENTS)


@dataclass(frozen=True)
class Task:
    """What is to be recovered, and within which limits."""

    signature: Signature
    seed: int = 0
    heldout: int | None = None  # queries of the certificate; None: a share of the recovery's
    domain: Sampler | None = None  # inputs that the certificate is to speak of besides
    budget: float = math.inf  # queries in all
    options: Mapping[str, Any] = field(default_factory=dict)  # of the method
    places: Floats | None = None  # (n, width) single tokens where an earlier estimate was refuted
    hints: Sequence[Mapping[str, Any]] = ()  # options that the oracle's owner thinks worth trying

    def stream(self, purpose: str) -> np.random.Generator:
        """Random numbers for one purpose, unrelated to those of any other use of the same seed."""
        return stream(self.seed, purpose if self.places is None else f"{purpose} after {len(self.places)} refutations")


@dataclass(frozen=True)
class Attempt:
    """How an attempt ended."""

    method: str
    outcome: Outcome
    message: str
    params: Family | None = None  # an estimate, or a part of one where the attempt ended early
    certificate: Certificate = field(default_factory=Certificate)
    counting_bound: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)
    cause: Exception | None = None
    number: int = 0  # of this attempt, where several were made
    refuted: Floats | None = None  # (n, width) single tokens that were not answered as predicted

    @property
    def certified(self) -> bool:
        """True only if the held-out answers were predicted within their radius."""
        return self.outcome is Outcome.CERTIFIED

    def with_details(self, **details: Any) -> Attempt:
        """A copy with further details."""
        return replace(self, details={**self.details, **details})


class Ledger:
    """What plans have cost, and some of what was answered."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.spent = 0
        self.first: tuple[Plan, Array] | None = None  # the first plan and its answers
        self.sample: list[Floats] = []  # answers to the first plans

    @property
    def left(self) -> float:
        """Queries that the budget still allows."""
        return self.budget - self.spent

    def count(self, steps: Steps[Found], number: int = 0) -> Steps[Found]:
        """Run a generator whose plans belong to the attempt of this number, and add up what they cost."""
        with_number = partial(replace, attempt=number)
        return adapt(steps, with_number, lambda plan, answers: self.add(with_number(plan), answers))

    def add(self, plan: Plan, answers: Measurements) -> Measurements:
        """Add what a plan has cost."""
        self.spent += plan.count * plan.repeats
        self.first = self.first or (plan, answers.values)
        if len(self.sample) < SAMPLE_PLANS and plan.repeats == 1:
            self.sample.append(np.array(floats(answers.values[:SAMPLE_ANSWERS, ...])).ravel())
        return answers

    def digits(self, signature: Signature) -> NoiseEstimate:
        """The rounding that the digits of the first answers show, if any."""
        return (
            coarseness(np.concatenate(self.sample), signature.space.eps)
            if self.sample
            else NoiseEstimate(Noise.exact())
        )


def stream(seed: int, purpose: str) -> np.random.Generator:
    """Random numbers for one purpose, unrelated to those of any other use of the same seed."""
    return np.random.default_rng([seed, *f"keyhole {purpose}".encode()])


def with_noise(steps: Steps[Found], noise: Noise) -> Steps[Found]:
    """Run a generator on an oracle of measured, not declared, noise: every answer has its radius."""
    return adapt(steps, incoming=lambda plan, answers: replace(answers, radius=noise.radius_of_mean(plan.repeats)))


def attempt_twice(method: Method, task: Task) -> Steps[Attempt]:
    """Run a method and judge its estimate; where answers turn out to err, run it again knowing how.

    Rounding shows in the digits of the answers; errors of an oracle that contradicts itself are measured.
    """
    ledger = Ledger(task.budget)
    task = with_answers_of(method, task)
    first = yield from attempt(method, task, ledger)
    while (better := with_places(method, task, first)) is not None:
        task = replace(better, budget=ledger.left)
        first = yield from with_number(attempt(method, task, Ledger(task.budget)), first.number + 1)
    task = replace(task, places=None)
    unseen = task.signature.alphabet is not None  # of others, auto looks at digits before it chooses a method
    if (first.certified and not unseen) or task.signature.noise.kind != "exact" or first.outcome in NOT_FOR_NOISE:
        return first
    of_labels = task.signature.answers == "labels"
    digits = NoiseEstimate(Noise.exact()) if of_labels else ledger.digits(task.signature)
    seen = digits.noise.as_found()
    if first.certified and seen.kind == "exact":
        return first
    known, details = task, noise_details(seen, digits.evidence, 0)
    if seen.kind != "exact":
        known = replace(task, signature=task.signature.with_changes(noise=seen))
    elif first.outcome is Outcome.INCONSISTENT and {"gaussian", "flipped"} & set(method.takes_noise):
        try:
            known, details = yield from ask_noise(task, ledger)
        except Unrecoverable as error:
            first = replace(first, outcome=error.outcome, message=str(error))
        except ENDS:
            pass  # nothing is known of the noise
    noise = known.signature.noise
    if noise.kind == "exact":
        return first
    if not method.takes(noise):
        remedy = f"declare it (--noise {noise.text}) for a method that allows for it, or leave that to auto"
        return replace(first, message=f"{first.message}; {details['noise_evidence']}: {remedy}")
    known = replace(known, budget=ledger.left)
    try:
        second = yield from with_number(attempt(method, known, Ledger(known.budget)), first.number + 1)
    except UsageError as error:  # options that do not go with such noise
        return replace(first, message=f"{first.message}; {details['noise_evidence']}, but {error}")
    assumptions = (*second.certificate.assumptions, noise_assumption(noise))
    return replace(second, certificate=replace(second.certificate, assumptions=assumptions)).with_details(**details)


def with_places(method: Method, task: Task, ended: Attempt) -> Task | None:
    """The task of a further attempt that knows where this one was refuted; None where that is of no use."""
    refuted, known = ended.refuted, np.zeros((0, task.signature.width)) if task.places is None else task.places
    if not method.goes_on or ended.outcome is not Outcome.WRONG_FAMILY or refuted is None or not len(refuted):
        return None
    if task.signature.noise.kind != "exact" or len(known) >= MOST_PLACES:
        return None
    return replace(task, places=np.concatenate([known, refuted[:MOST_PLACES]]))


def with_answers_of(method: Method, task: Task) -> Task:
    """The task, its oracle known to answer with labels where the method is for such."""
    if method.answers == "numbers":
        return task
    return replace(task, signature=task.signature.with_changes(answers=method.answers))


def noise_assumption(noise: Noise) -> str:
    """The assumption of a certificate for noise that was measured, not declared."""
    return f"answers err as was found, not declared: {noise}"


def behind_noise(message: str, noise: Noise) -> str:
    """What a contradiction is worth where errors are known that not every family is read behind."""
    return (
        f"{message}; answers are {noise}, behind which not every family is read: the box may be of one that is not. "
        "Use an oracle of higher precision or less noise"
    )


def half_precision(signature: Signature) -> Noise | None:
    """The rounding of answers with fewer digits than float32, declared, found or of the oracle's dtype; or None."""
    noise, digits = signature.noise, 1 - round(math.log2(signature.space.eps))
    if noise.kind == "dtype" and noise.hides_families:
        return noise
    fitting = [name for name in sorted(DIGITS, key=lambda name: DIGITS[name]) if digits <= DIGITS[name]]
    return Noise.dtype(fitting[0]) if fitting and fitting[0] != "float32" else None


def with_number(steps: Steps[Attempt], number: int) -> Steps[Attempt]:
    """Run an attempt whose plans carry its number."""
    ended = yield from adapt(steps, outgoing=lambda plan: replace(plan, attempt=number))
    return replace(ended, number=number)


def attempt(method: Method, task: Task, ledger: Ledger) -> Steps[Attempt]:
    """Run a method, then judge its estimate; every way it can end is an outcome."""
    estimate: Estimate | None = None
    certificate = Certificate()
    details: dict[str, Any] = {}
    refuted: Floats | None = None
    try:
        _check_labels(method, task.signature)
        check_alphabet(method, task.signature)
        if task.signature.noise.kind == "measure":
            task, details = yield from ask_noise(task, ledger)
        known = yield from ledger.count(ask_precision(task.signature, task.stream("precision")))
        task = replace(task, signature=known)
        options = dict(task.options) if task.places is None else {**task.options, "places": task.places}
        steps = method.steps(task.signature, task.stream("method"), _without_heldout(task, ledger.left), **options)
        estimate = yield from ledger.count(with_noise(check_arithmetic(steps), task.signature.noise))
        certificate = _radii_only(estimate)
        _check_finite(estimate)
        judgement = yield from check_arithmetic(_ask_heldout(estimate, task, ledger))
        outcome, message, certificate = judgement.outcome, judgement.message, judgement.certificate
        refuted = judgement.refuted
        cause: KeyholeError | None = None
    except Unrecoverable as error:
        outcome, message, cause = error.outcome, str(error), error
        if outcome is Outcome.WRONG_FAMILY:
            difference = yield from _ask_again(ledger, task.signature)
            if difference > 0:
                outcome, message = Outcome.INCONSISTENT, f"a query asked twice was answered {difference:.2g} apart"
    except ENDS as error:
        outcome, message, cause = ending(error), str(error), error
    noise = task.signature.noise
    half = half_precision(task.signature)  # all arithmetic may have had as few digits as the answers
    hides = half is not None or not method.takes(noise) or (method.of_alphabet and noise.kind != "exact")
    if outcome is Outcome.WRONG_FAMILY and hides:
        outcome, message = Outcome.TOO_NOISY, behind_noise(message, half or noise)
    elif outcome is Outcome.NOT_IDENTIFIABLE and half is not None and _may_hide(task.signature):
        outcome = Outcome.TOO_NOISY
        message += f"; or the rounding of answers to {half.name} hides it: use an oracle of higher precision"
    elif outcome in (Outcome.TOO_NOISY, Outcome.SATURATED) and half is not None:
        message += (
            f"; answers have the precision of {half.name}: ask the layer in float32, which is read, or in float64"
        )
    if estimate is None:
        return Attempt(method.name, outcome, message, getattr(cause, "partial", None), details=details, cause=cause)
    details |= estimate.details
    bound = estimate.counting_bound
    ended = Attempt(method.name, outcome, message, estimate.params, certificate, bound, details, cause)
    return replace(ended, refuted=refuted)


def _may_hide(signature: Signature) -> bool:
    """Whether more may be in an oracle than short digits show: sequences that are too short show no more in any."""
    one = signature.alphabet is not None and signature.alphabet.size == 1
    return not one and (signature.max_length is None or signature.max_length > 2)


def _check_labels(method: Method, signature: Signature) -> None:
    """Unrecoverable where a method takes labels for numbers."""
    if signature.answers == "labels" and method.answers != "labels":
        remedy = "use method labels, which is for such, or auto"
        if signature.alphabet is not None:
            remedy = "no method reads labels of an alphabet, so ask for numbers"
        raise Unrecoverable(Outcome.WRONG_FAMILY, f"the box answers with labels: {remedy}")


def check_alphabet(method: Method, signature: Signature) -> None:
    """UsageError where a method would send other tokens than an oracle takes, or needs an alphabet and has none."""
    if signature.alphabet is None and method.of_alphabet:
        raise UsageError(
            f"method {method.name} reads oracles of a finite alphabet: declare it, "
            "as FunctionOracle(function, width, alphabet=rows)"
        )
    if signature.alphabet is None:
        return
    if not method.of_alphabet:
        raise UsageError(
            f"method {method.name} sends any tokens, and this oracle takes an alphabet: use method alphabet"
        )
    if signature.noise.kind == "measure":
        raise UsageError("errors are not measured with an alphabet alone: declare the noise, or none")


def ending(error: Exception) -> Outcome:
    """The outcome that an error of the oracle or of arithmetic, or the end of the budget, amounts to."""
    if isinstance(error, Unrecoverable):
        return error.outcome
    if isinstance(error, ComputeError):
        return Outcome.ARITHMETIC_FAILED if isinstance(error, NumericalError) else Outcome.TIME_EXHAUSTED
    return Outcome.BUDGET_EXHAUSTED if isinstance(error, BudgetExhausted) else Outcome.ORACLE_FAILED


def _check_finite(estimate: Estimate) -> None:
    """NumericalError where parameters are not finite; radii may be."""
    named = estimate.params.arrays().items()
    odd = [name for name, array in named if not bool(namespace(array).all(namespace(array).isfinite(array)))]
    if odd:
        raise NumericalError(f"the arithmetic failed ({', '.join(odd)} came out as nan or inf)")


def ask_noise(task: Task, ledger: Ledger) -> Steps[tuple[Task, dict[str, Any]]]:
    """Measure how answers err: the task with that noise, and details of it."""
    before = ledger.spent
    estimate = yield from ledger.count(measure_noise(task.signature, task.stream("noise")))
    noise = estimate.noise.as_found()
    known = replace(task, signature=task.signature.with_changes(noise=noise))
    return known, noise_details(noise, estimate.evidence, ledger.spent - before)


def noise_details(noise: Noise, evidence: str, queries: int) -> dict[str, Any]:
    """Details of noise that was measured, not declared."""
    figures = {"noise_queries": queries, "noise_radius": noise.radius}
    return {"noise": str(noise), "noise_evidence": evidence, **figures}


def _radii_only(estimate: Estimate) -> Certificate:
    return Certificate(estimate.radius, estimate.standard_error, assumptions=estimate.assumptions)


def _without_heldout(task: Task, left: float) -> float:
    """What is left to a method when the held-out queries are set aside."""
    kinds = 1 if task.domain is None else 2
    return left - kinds * heldout_count(task.heldout, 0 if math.isinf(left) else left)


def _ask_heldout(estimate: Estimate, task: Task, ledger: Ledger) -> Steps[Judgement]:
    """Held-out queries, from random numbers of their own, as many as the task sets and the budget allows."""
    kinds = 1 if task.domain is None else 2
    wanted = heldout_count(task.heldout, ledger.spent, labels=estimate.params.tells_labels)
    count = int(min(wanted, ledger.left // kinds))
    if count < 1:
        message = "the budget left no queries for the certificate"
        return Judgement(Outcome.UNCERTIFIED, message, _radii_only(estimate))
    steps = certify(estimate, task.signature, task.stream("held-out"), count, task.domain)
    judgement = yield from with_noise(steps, task.signature.noise)
    if task.heldout is None and count < CLASSES_FROM and judgement.outcome is Outcome.CERTIFIED:
        message = f"{judgement.message}, but the budget left no more queries, and {LEAST} are usual: raise it"
        return replace(judgement, outcome=Outcome.UNCERTIFIED, message=message)
    return judgement


def _ask_again(ledger: Ledger, signature: Signature) -> Steps[float]:
    """How far a few answers are, beyond noise, from what they were when first asked; 0 when none is left to ask."""
    if ledger.first is None or ledger.left < 1:
        return 0.0
    plan, answers = ledger.first
    count = int(min(CONTRADICTION_QUERIES, plan.count, ledger.left))
    try:
        again: Measurements = yield plan.again(count, stage="held-out")
    except ENDS:
        return 0.0
    xp, noise = signature.space.xp, signature.noise
    difference = float(xp.max(xp.abs(again.values - answers[:count, ...])))
    relative = 64 * signature.space.eps + 4 * noise.relative
    allowed = 4 * noise.radius + relative * float(xp.max(xp.abs(answers)))
    return difference if difference > allowed else 0.0
