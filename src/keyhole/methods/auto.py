"""The method `auto`: a few queries rank the families, whose methods are tried in that order.

Methods declare the families and the noise that they take; no method is named here. A head behind several outputs is
also tried as several heads, which are read from all outputs at once. Answers that one attempt has paid for serve the
next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from keyhole.arrays import FLOAT32
from keyhole.errors import NonFiniteAnswer, UsageError
from keyhole.methods.arithmetic import check_arithmetic
from keyhole.methods.attempt import (
    ENDS,
    FINAL,
    Attempt,
    Ledger,
    Task,
    ask_noise,
    attempt,
    attempt_twice,
    behind_noise,
    ending,
    half_precision,
    noise_assumption,
    noise_details,
    with_answers_of,
    with_places,
)
from keyhole.methods.base import Found, Method, Steps, Unrecoverable
from keyhole.methods.diagnosis.diagnose import CONSTANT, FAMILIES, UNKNOWN, Diagnosis, diagnose
from keyhole.methods.diagnosis.parts import of_naming, with_parts
from keyhole.methods.diagnosis.triage import BENT, ONE_TOKEN, Evidence, ask_slight_bend, triage
from keyhole.methods.examination import LEAST_NUMBERS
from keyhole.methods.noise_estimation.measure import coarseness
from keyhole.methods.parts.naming.ask_parts import Naming, ask_parts
from keyhole.methods.registry import METHODS, methods_for
from keyhole.noise import Noise
from keyhole.queries import Measurements, Plan
from keyhole.recovery import Outcome

NAME = "auto"
NOTHING_FITS = "no family that a method recovers fits a few first answers"
# How a method ends on an oracle that may be of another family than it takes it for.
MAY_BE_ANOTHER_FAMILY = (
    Outcome.WRONG_FAMILY,
    Outcome.TOO_NOISY,
    Outcome.SATURATED,
    Outcome.NOT_IDENTIFIABLE,
    Outcome.ARITHMETIC_FAILED,
)
# How a method for one head ends on several, whose answers err.
NOT_ONE_HEAD = (Outcome.WRONG_FAMILY, Outcome.SATURATED)
# Families whose methods take what an oracle hints at.
HINTED = ("multi-head", "residual", "normalised")
# Answers are kept for the next attempt of plans that are no larger than this, over the width, and of so many of them.
KEPT_QUERIES, KEPT_PLANS = 4, 32


def auto(task: Task) -> Steps[Attempt]:
    """Recover an oracle of unknown family: the method of each likely family in turn, until one is certified."""
    if task.signature.alphabet is None:
        return (yield from _Auto(task).steps())
    of_letters = [method for method in METHODS.values() if method.of_alphabet]
    fitting = [method for method in of_letters if set(task.options) <= set(method.options)]
    if not fitting:
        raise UsageError(f"method {of_letters[0].name!r}, for oracles of an alphabet, has no such options")
    return (yield from attempt_twice(fitting[0], task))


def check_options(options: Mapping[str, Any]) -> None:
    """UsageError where no method has all these options."""
    if any(set(options) <= set(method.options) for method in METHODS.values()):
        return
    known = sorted({option for method in METHODS.values() for option in method.options})
    unknown = sorted(set(options) - set(known)) or sorted(options)
    raise UsageError(f"method {NAME!r} has no option {unknown[0]!r}; its options: {', '.join(known)}")


class _Memory:
    """Answers to plans, so that a later attempt that asks the same does not pay for it."""

    def __init__(self) -> None:
        self._kept: list[tuple[Plan, Measurements]] = []
        self._known: dict[tuple[str, int, int], Measurements] = {}

    def recall(self) -> None:
        """Make what was answered so far known to the steps that follow."""
        self._known |= {_key(plan): answers for plan, answers in self._kept}
        self._kept = []

    def serve(self, steps: Steps[Found], task: Task, number: int, ledger: Ledger) -> Steps[Found]:
        """Run an attempt, its plans numbered, answered from memory where they can be, and counted where they cannot."""
        try:
            request = next(steps)
            while True:
                plans = [request] if isinstance(request, Plan) else list(request)
                answers = [self._known.get(_key(plan)) if self._known else None for plan in plans]
                unknown = [plan for plan, answer in zip(plans, answers, strict=True) if answer is None]
                unknown = [replace(plan, attempt=number) for plan in unknown]
                try:
                    asked: list[Measurements] = (yield unknown) if unknown else []
                except ENDS as error:
                    request = steps.throw(error)
                    continue
                for plan, answer in zip(unknown, asked, strict=True):
                    ledger.add(plan, answer)
                    small = plan.count <= KEPT_QUERIES * task.signature.width
                    if plan.stage != "held-out" and small and len(self._kept) < KEPT_PLANS:
                        self._kept.append((plan, answer))
                fresh = iter(asked)
                replies = [next(fresh) if answer is None else answer for answer in answers]
                request = steps.send(replies[0] if isinstance(request, Plan) else replies)
        except StopIteration as stop:
            result: Found = stop.value
            return result


def _key(plan: Plan) -> tuple[str, int, int]:
    return plan.digest, plan.first_repeat, plan.repeats


class _Auto:
    """The attempts at one task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.ledger = Ledger(task.budget)
        self.memory = _Memory()
        self.attempts: list[Attempt] = []
        self.tried: list[tuple[Method, Mapping[str, Any]]] = []
        self.known: dict[str, Any] = {}  # what details say, whichever attempt is the last
        self.naming: Naming | None = None  # of the parts of one head, where they were looked for
        self.bends = False  # whether single tokens were answered by a bent map
        self.too_coarse: Attempt | None = None  # with the parts that hints name, behind answers of too few digits
        self.unmeasured: Task | None = None  # before errors were measured that an oracle may not have

    def steps(self) -> Steps[Attempt]:
        """Triage, an attempt, and where that fails a diagnosis and further ones."""
        fitting = [method for method in METHODS.values() if set(self.task.options) <= set(method.options)]
        if len(fitting) == 1:
            return (yield from self._attempt(fitting[0], {}))
        declared = self.task.signature.answers != "numbers"
        try:
            evidence = yield from self._ask(triage(self.task.signature, self.task.stream("triage")))
        except (*ENDS, Unrecoverable) as error:
            return (yield from self._without_triage(error))
        self._allow_for(evidence)
        last = (yield from self._with_hints()) or (yield from self._parts_first(evidence))
        if last is not None:
            return self._result(last)
        last = yield from self._first(evidence)
        if last is not None and (declared or not self._may_be_another(last)):
            return self._result(last)
        if last is not None and last.outcome not in MAY_BE_ANOTHER_FAMILY:
            return (yield from self._go_on(last, None))
        last = yield from self._with_unseen_errors(evidence, (yield from self._after_diagnosis(last)))
        return (yield from self._without_errors(last))

    def _without_triage(self, error: Exception) -> Steps[Attempt]:
        """How triage ended, unless a head explains it whose weights are logits over their sum: not of zero tokens."""
        last: Attempt | None = None
        if isinstance(error, NonFiniteAnswer):
            last = yield from self._parts_first(Evidence(None, self.noise, other_parts=True))
        return self._result(last or Attempt(NAME, ending(error), str(error), cause=error))

    def _with_hints(self) -> Steps[Attempt | None]:
        """An attempt with options that the oracle's owner thinks worth trying, unless they are refuted."""
        if self.task.options or not self.several_outputs or self.noise.kind != "exact":
            return None
        for hint in self.task.hints:
            for family in HINTED:
                for method in methods_for(family, self.noise, hint)[:1]:
                    try:
                        last = yield from self._attempt(method, hint)
                    except UsageError:  # parts that no learner reads together
                        continue
                    if last.certified or last.outcome in FINAL or _told(last):
                        return last
                    if last.outcome is Outcome.TOO_NOISY and self.too_coarse is None:
                        names = ", ".join(f"{name} {part}" for name, part in hint.items() if isinstance(part, str))
                        self.too_coarse = replace(last, message=f"its owner hints at {names}: {last.message}")
        return None

    def _parts_first(self, evidence: Evidence) -> Steps[Attempt | None]:
        """One head by its parts, where a few answers exclude a softmax's and other families take many to refute."""
        if not evidence.other_parts or self.noise.kind != "exact" or self.task.options:
            return None
        try:
            self.naming = yield from self._ask(ask_parts(self.task.signature, self.task.stream("naming of parts")))
        except ENDS:
            return None
        if not self.naming.known:
            return None
        named = of_naming(Diagnosis(UNKNOWN, None, evidence.findings, noise=self.noise), self.naming)
        self.known |= {"diagnosis": named.family, "diagnosis_findings": named.summary()["findings"]}
        for method, options in self._of_names(named):
            last = yield from self._attempt(method, options)
            if last.certified or last.outcome in (*FINAL, Outcome.NOT_IDENTIFIABLE):
                return last
        return None

    def _first(self, evidence: Evidence) -> Steps[Attempt | None]:
        """The method of the likeliest family, again where that shows noise that was not known."""
        last: Attempt | None = None
        for method in self._methods(evidence.family)[:1]:
            last = yield from self._attempt(method, evidence.options)
        if last is None:
            return None
        if self.noise.kind not in ("exact", "dtype"):
            last = yield from self._with_finer_radii(evidence.family, last)
        if last.outcome is Outcome.INCONSISTENT and self.noise.kind == "exact":
            last = yield from self._with_measured_noise(evidence.family, last)
        if METHODS[last.method].answers != "numbers":
            return (yield from self._with_further_options(last))
        if last.outcome is Outcome.WRONG_FAMILY and self.noise.kind in ("exact", "dtype"):
            last = yield from self._with_seen_decimals(evidence.family, last)
        if last.outcome is Outcome.WRONG_FAMILY and self.noise.kind == "exact":
            last = yield from self._with_slight_errors(evidence.family, last)
        return last

    def _after_diagnosis(self, last: Attempt | None) -> Steps[Attempt]:
        """A diagnosis, and attempts with the methods that it leaves."""
        try:
            diagnosis = yield from self._ask(diagnose(self.task.signature, self.task.stream("diagnosis")))
        except (*ENDS, Unrecoverable) as error:
            ended = last or Attempt(NAME, Outcome.WRONG_FAMILY, NOTHING_FITS)
            return self._result(replace(ended, outcome=ending(error), message=str(error), cause=error))
        self.known |= {"diagnosis": diagnosis.family, "diagnosis_findings": diagnosis.summary()["findings"]}
        self.bends |= diagnosis.found(ONE_TOKEN) == BENT
        if self.noise.kind == "exact" and diagnosis.noise.kind != "exact":  # too small for the queries of triage
            evidence_of = {finding.what: finding.evidence for finding in diagnosis.findings}
            self._allow_for_noise(diagnosis.noise.as_found(), evidence_of["noise"], 0)
            if last is not None:
                last = yield from self._again_behind_noise(None, last)
                if last.certified or last.outcome in FINAL:
                    return self._result(last)
        return (yield from self._go_on(last, diagnosis))

    def _with_finer_radii(self, family: str | None, last: Attempt) -> Steps[Attempt]:
        """Where radii were too wide for a certificate, the next method of the family that allows for such errors."""
        for method in self._methods(family)[1:]:
            coarse = last.outcome is Outcome.UNCERTIFIED and last.certificate.heldout_queries > 0
            if coarse and self.noise.kind in method.takes_noise:
                last = yield from self._attempt(method, {})
        return last

    def _with_measured_noise(self, family: str | None, last: Attempt) -> Steps[Attempt]:
        """Measure the errors of an oracle that contradicts itself, and try the method that allows for them."""
        before = self.task
        try:
            self.task, details = yield from ask_noise(self.task, self.ledger)
        except (*ENDS, Unrecoverable):
            return last
        self.known |= details
        self.unmeasured = before if self.noise.kind == "bounded" else None
        return last if self.noise.kind == "exact" else (yield from self._again_behind_noise(family, last))

    def _with_further_options(self, last: Attempt) -> Steps[Attempt]:
        """Once more with the options that a method has for what it refuted without them."""
        method = METHODS[last.method]
        options, own = method.when_refuted, self.task.options
        if not options or set(options) & set(own) or last.outcome not in (*MAY_BE_ANOTHER_FAMILY, Outcome.INCONSISTENT):
            return last
        again = yield from self._attempt(method, options)
        if again.certified or again.outcome in FINAL:
            return again
        if again.message == last.message:
            return replace(last, number=again.number)
        words = ", ".join(f"{name}={value}" for name, value in options.items())
        return replace(last, message=f"{last.message}; with {words}: {again.message}", number=again.number)

    def _again_behind_noise(self, family: str | None, last: Attempt) -> Steps[Attempt]:
        """An attempt that allows for noise that was found after the first."""
        self.tried = []  # without knowing of it
        for method in self._methods(family)[:1]:
            last = yield from self._attempt(method, {})
        if self.tried and (last.certified or last.outcome in FINAL):
            return last
        try:  # noise may have made one head look like several
            evidence = yield from self._ask(triage(self.task.signature, self.task.stream("triage behind noise")))
        except (*ENDS, Unrecoverable):
            return last
        for method in self._methods(evidence.family)[:1]:
            if (method, {}) not in self.tried:
                return (yield from self._attempt(method, {}))
        return last

    def _with_slight_errors(self, family: str | None, last: Attempt) -> Steps[Attempt]:
        """Measure errors that repeat, where single tokens are answered by an affine map but for a little."""
        try:
            slight = yield from self._ask(ask_slight_bend(self.task.signature, self.task.stream("slight errors")))
        except (*ENDS, Unrecoverable):
            return last
        return (yield from self._with_measured_noise(family, last)) if slight else last

    def _with_unseen_errors(self, evidence: Evidence, ended: Attempt) -> Steps[Attempt]:
        """Measure errors that repeat, where single tokens are answered by a bent map that no method explains.

        Not before: neurons that bend over very short lengths look like such errors.
        """
        if ended.outcome is not Outcome.WRONG_FAMILY or self.noise.kind != "exact" or not evidence.bends:
            return ended
        last = yield from self._with_measured_noise(evidence.family, ended)
        return ended if last is ended and self.noise.kind == "exact" else self._result(last)

    def _without_errors(self, last: Attempt) -> Steps[Attempt]:
        """Several heads of other parts, where answers that jump were taken for errors that no method explains."""
        if last.certified or last.outcome in FINAL or self.unmeasured is None:
            return last
        measured, self.task = self.task, self.unmeasured
        for method, options in self._by_parts_of_heads():
            found = yield from self._attempt(method, options)
            if found.certified:
                self.known = {name: value for name, value in self.known.items() if not name.startswith("noise")}
                return self._result(found)
        self.task = measured
        return last

    def _with_seen_decimals(self, family: str | None, last: Attempt) -> Steps[Attempt]:
        """Small held-out answers may show decimals that long ones have not: try a method that allows for them."""
        answers = np.abs(last.certificate.answers)
        if not answers.size:
            return last
        small = answers[answers <= np.median(answers)]
        seen = coarseness(small, self.task.signature.space.eps)
        # A net that is flat there answers its constant, which somebody may have typed in.
        if seen.noise.kind != "rounded" or np.unique(small).size < LEAST_NUMBERS:
            return last
        self._allow_for_noise(seen.noise.as_found(), seen.evidence, 0)
        return (yield from self._again_behind_noise(family, last))

    def _go_on(self, first: Attempt | None, diagnosis: Diagnosis | None) -> Steps[Attempt]:
        """Attempts with the methods that a diagnosis leaves, until one is certified."""
        last = first
        for method, options in self._further(first, diagnosis):
            if (method, options) in self.tried:
                continue
            last = yield from self._attempt(method, options)
            if last.certified or last.outcome in FINAL:
                return self._result(last)
        if diagnosis is not None:
            diagnosis = yield from self._with_names(diagnosis)
            for method, options in self._by_parts(diagnosis):
                ended = yield from self._attempt(method, options)
                last = ended if options == diagnosis.options else last  # whose message says more
                if ended.certified or ended.outcome in FINAL:
                    return self._result(ended)
        for method in self._for_rare_kinks(diagnosis):
            ended = yield from self._attempt(method, {})
            # A net without neurons explains no bend. Behind a residual it is an affine way past a head, unless it is
            # but a head that held-out answers refuted.
            refuted = bool(self.attempts) and self.attempts[0].certificate.heldout_queries > 0
            past = ended.details.get("residual", False) and not refuted
            if ended.certified and (ended.details.get("neurons") != 0 or past):
                return self._result(ended)
        # Of answers with fewer digits than float32 a diagnosis takes rounding for what a family does.
        told = diagnosis if half_precision(self.task.signature) is None else None
        words = f"; {told.in_words()}" if told is not None else ""
        if last is None or last is first:
            ended = first or Attempt(NAME, Outcome.WRONG_FAMILY, NOTHING_FITS)
            words += f", {told.consequence}" if told is not None else ""
            return self._result(replace(ended, message=ended.message + words))
        if diagnosis is None and first is not None:
            return self._result(replace(first, number=last.number))
        return self._result(replace(last, message=last.message + words))

    def _with_names(self, diagnosis: Diagnosis) -> Steps[Diagnosis]:
        """Name the parts of one head where no softmax attention was certified."""
        if self.noise.kind != "exact" or self.task.options:
            return diagnosis
        try:
            known, stream = self.task.signature, self.task.stream("naming of parts")
            named = yield from self._ask(with_parts(diagnosis, known, stream, self.naming))
        except ENDS:
            return diagnosis
        self.known |= {"diagnosis": named.family, "diagnosis_findings": named.summary()["findings"]}
        return named

    def _by_parts(self, diagnosis: Diagnosis) -> list[tuple[Method, Mapping[str, Any]]]:
        """The method for the parts that were named, and those that find the parts of several heads themselves."""
        fitting = self._of_names(diagnosis) + self._by_parts_of_heads()
        return [each for each in fitting if each not in self.tried]

    def _by_parts_of_heads(self) -> list[tuple[Method, Mapping[str, Any]]]:
        """Methods that find the parts of several heads themselves."""
        if not self.several_outputs or self.noise.kind != "exact" or self.task.options:
            return []
        of_numbers = [method for method in METHODS.values() if method.answers == "numbers"]
        return [(method, method.when_refuted) for method in of_numbers if method.when_refuted]

    def _of_names(self, diagnosis: Diagnosis) -> list[tuple[Method, Mapping[str, Any]]]:
        """The method for the parts that were named."""
        if diagnosis.recovers is None:
            return []
        return [
            (method, diagnosis.options) for method in methods_for(diagnosis.recovers, self.noise, diagnosis.options)[:1]
        ]

    def _further(
        self, first: Attempt | None, diagnosis: Diagnosis | None
    ) -> Iterator[tuple[Method, Mapping[str, Any]]]:
        """Methods and options that are worth trying after a first attempt, the likeliest first."""
        if first is not None and self.noise.kind == "dtype":
            # All arithmetic may have been in that dtype, and answers off by more than their last rounding.
            of_family = [method for family in METHODS[first.method].families for method in self._methods(family)]
            yield from [(method, {}) for method in of_family if "dtype" not in method.takes_noise][:1]
        if diagnosis is not None and diagnosis.recovers is not None:
            for method in self._methods(diagnosis.recovers)[:1]:
                # Options that few answers tell may be wrong.
                yield from ((method, options) for options in (diagnosis.options, *diagnosis.alternatives))
        # Values of several heads may cancel in the answers to single tokens.
        varies = diagnosis is not None and diagnosis.family != CONSTANT
        cancels = varies and first is not None and first.outcome is Outcome.NOT_IDENTIFIABLE
        heads = self.several_outputs or cancels or self.noise.kind not in ("exact", "dtype")
        if first is not None and heads and "single-head" in METHODS[first.method].families:
            yield from ((method, {}) for method in self._methods("multi-head")[:1])
        if diagnosis is not None and diagnosis.recovers is None:
            for method in METHODS.values():
                if method.families and not set(method.families) & set(FAMILIES) and method.takes(self.noise):
                    yield method, {}

    def _for_rare_kinks(self, diagnosis: Diagnosis | None) -> list[Method]:
        """Nets whose kinks are so few, or so far, that single tokens were answered as by an affine map.

        Within a norm bound they cut off little of the ball. Without one a net alone shows far out, and a layer mostly.
        """
        if diagnosis is None or self.noise.kind != "exact":
            return []
        bounded = self.task.signature.max_norm is not None
        if not bounded and any((each.what, each.found) == (ONE_TOKEN, BENT) for each in diagnosis.findings):
            return []
        families = ("relu-net", "one-layer") if bounded else ("one-layer",)
        tried = [method for method, _ in self.tried]
        methods = [method for family in families for method in self._methods(family)[:1]]
        return [method for method in methods if method not in tried]

    def _methods(self, family: str | None) -> list[Method]:
        return methods_for(family, self.noise, self.task.options) if family is not None else []

    @property
    def noise(self) -> Noise:
        """How answers err, as declared or as measured."""
        return self.task.signature.noise

    @property
    def several_outputs(self) -> bool:
        """Whether an answer is more than one number."""
        return self.ledger.first is not None and self.ledger.first[1].ndim > (
            1 if self.task.signature.positions == "last" else 2
        )

    def _ask(self, steps: Steps[Found]) -> Steps[Found]:
        """Run a generator as part of the attempt that comes next."""
        return self.ledger.count(check_arithmetic(steps), len(self.attempts))

    def _allow_for(self, evidence: Evidence) -> None:
        """Go on with the evidence, its noise included."""
        self.bends = evidence.bends
        self.known |= {"diagnosis": evidence.family, "diagnosis_findings": [vars(each) for each in evidence.findings]}
        if evidence.noise_evidence:
            self._allow_for_noise(evidence.noise.as_found(), evidence.noise_evidence, evidence.noise_queries)
        else:  # measured, and none found
            self.task = replace(self.task, signature=self.task.signature.with_changes(noise=evidence.noise))
        for method in self._methods(evidence.family)[:1]:
            self.task = with_answers_of(method, self.task)

    def _allow_for_noise(self, noise: Noise, evidence: str, queries: int) -> None:
        """Go on with noise that was found."""
        self.known |= noise_details(noise, evidence, queries)
        self.task = replace(self.task, signature=self.task.signature.with_changes(noise=noise))

    def _attempt(self, method: Method, options: Mapping[str, Any]) -> Steps[Attempt]:
        """Run a method within what is left of the budget."""
        self.memory.recall()
        self.tried.append((method, options))
        task = replace(self.task, budget=self.ledger.left, options={**self.task.options, **options})
        while True:
            number = len(self.attempts)
            ended = yield from self.memory.serve(attempt(method, task, Ledger(task.budget)), task, number, self.ledger)
            self.attempts.append(replace(ended, number=number))
            better = with_places(method, task, ended)
            if better is None:
                return self.attempts[-1]
            task = replace(better, budget=self.ledger.left)

    def _may_be_another(self, ended: Attempt) -> bool:
        """Whether another method may do better than an attempt that was not certified."""
        several = self.several_outputs or ended.outcome in NOT_ONE_HEAD
        heads = several and bool(self._methods("multi-head"))  # one may have been several
        if not (heads or self.noise.kind in ("exact", "dtype")) or self.task.options or _told(ended):
            return False
        coarse = ended.outcome is Outcome.UNCERTIFIED and ended.certificate.heldout_queries > 0
        return ended.outcome in MAY_BE_ANOTHER_FAMILY or (coarse and self.several_outputs)

    def _result(self, last: Attempt) -> Attempt:
        """The last attempt with details of the others, in the simplest family that holds its parameters."""
        first = self.attempts[0].method if self.attempts else last.method
        # Of float32 answers, which most models have, only what looks like a family that methods recover, or like a net
        # or a norm, whose bends rounding hides, or what has parts by its owner's hints.
        coarse = self.noise.kind == "exact" and self.task.signature.space.eps >= FLOAT32
        noise = Noise.dtype("float32") if coarse else self.noise
        likely = self.known.get("diagnosis") in FAMILIES or self.bends or len(self.task.hints) > 0
        named = noise.kind == "dtype" and likely
        if last.outcome in MAY_BE_ANOTHER_FAMILY and self.too_coarse is not None:
            last = replace(last, outcome=Outcome.TOO_NOISY, message=self.too_coarse.message)
        if last.outcome is Outcome.WRONG_FAMILY and (named or noise.hides_families):
            last = replace(last, outcome=Outcome.TOO_NOISY, message=behind_noise(last.message, noise))
        details = {**self.known, **({"tried_first": first} if len(self.attempts) > 1 else {})}
        if "noise" in self.known and self.noise.kind != "exact":
            assumptions = (*last.certificate.assumptions, noise_assumption(self.noise))
            certificate = replace(last.certificate, assumptions=assumptions)
            last = replace(last, certificate=certificate)
        radius, params = last.certificate.radius, last.params
        if last.certified and radius is not None and params is not None:
            certificate = replace(last.certificate, radius=radius.simplest())
            last = replace(last, params=params.simplest(), certificate=certificate)
        return last.with_details(**details)


def _told(ended: Attempt) -> bool:
    """Whether an attempt ended after it had told the family: no other method does better."""
    return isinstance(ended.cause, Unrecoverable) and ended.cause.told
