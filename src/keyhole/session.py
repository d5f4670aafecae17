"""Runs methods against oracles: batches, budget, journal, progress, certificate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from sys import getrefcount
from time import perf_counter
from typing import Any

import array_api_compat
import numpy as np

from keyhole.arrays import Array, to_numpy
from keyhole.errors import BudgetExhausted, OracleError, RecoveryFailed, UsageError, WrongShape
from keyhole.families import MultiHead, SingleHead
from keyhole.journal import Journal
from keyhole.methods import AUTO, METHODS, Estimate, Method, Steps, Unrecoverable, noisy
from keyhole.methods.base import Found
from keyhole.methods.certificate import Judgement, certify
from keyhole.methods.diagnosis.diagnose import Diagnosis, diagnose
from keyhole.methods.noise_estimation.measure import measure_noise
from keyhole.oracles import Oracle
from keyhole.progress import Observer, ProgressBar, Silent, Watcher, wants_bar
from keyhole.queries import Measurements, Plan, Signature, Sketch
from keyhole.recovery import Certificate, Outcome, Recovery, Stats

HELDOUT_QUERIES = 32
# Tokens per batch where the oracle sets no limit: small enough for a CPU's cache, large enough for a GPU.
CPU_BATCH_BYTES = 2**21
GPU_BATCH_BYTES = 2**29
# How a method ends on a box that may be of another family than it takes it for.
MAY_BE_ANOTHER_FAMILY = (Outcome.WRONG_FAMILY, Outcome.TOO_NOISY, Outcome.SATURATED, Outcome.NOT_IDENTIFIABLE)
# Questions asked again to find out whether an oracle contradicts itself, once something else is wrong.
CONTRADICTION_QUERIES = 8
# What getrefcount says of memory that only the session holds: the attribute and the argument of the call.
UNSHARED = 2


class Session:
    """Asks an oracle what methods want to know, within a budget, and keeps the answers."""

    def __init__(
        self,
        oracle: Oracle,
        *,
        budget: int | None = None,
        journal: Journal | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.oracle = oracle
        self.signature = oracle.signature  # what is known of it: measured noise is added
        self.budget = budget
        self.journal = journal
        self.observer = observer or Silent()
        self.watcher = observer if isinstance(observer, Watcher) else None
        self.stages: dict[str, int] = {}
        self.new_queries = 0
        self.oracle_seconds = 0.0
        self._memory: Array | None = None
        self._first: tuple[Plan, Array] | None = None  # the first plan and its answers
        self._outputs: tuple[int, ...] | None = None  # shape of one answer, once one has come

    @property
    def queries(self) -> int:
        """All queries used, from the journal too."""
        return sum(self.stages.values())

    @property
    def left(self) -> float:
        """Queries the budget still allows."""
        return np.inf if self.budget is None else self.budget - self.queries

    def run(self, steps: Steps[Found]) -> Found:
        """Drive a method to its end. What goes wrong is raised inside it, so that it can say what it had found."""
        try:
            request = self._step(steps, None)
            while True:
                try:
                    reply = self._reply(request)
                except (BudgetExhausted, OracleError) as error:
                    request = steps.throw(error)
                else:
                    request = self._step(steps, reply)
        except StopIteration as stop:
            found: Found = stop.value
            return found

    @staticmethod
    def _step(steps: Steps[Found], reply: Any) -> Plan | Sequence[Plan]:
        # Saturated answers overflow and divide by zero; methods look for the inf and nan that come of it.
        with np.errstate(all="ignore"):
            return steps.send(reply)

    def contradiction(self) -> float:
        """How far a few answers are, beyond noise, from what they were when first asked; 0 when none is left to ask."""
        if self._first is None or self.left < 1:
            return 0.0
        plan, answers = self._first
        count = int(min(CONTRADICTION_QUERIES, plan.count, self.left))
        some = replace(plan, stage="held-out", first_repeat=plan.first_repeat + plan.repeats)
        space, noise = self.signature.space, self.signature.noise
        try:
            again = self._answers(some, some.first_repeat, count)
        except (BudgetExhausted, OracleError):
            return 0.0
        difference = float(space.xp.max(space.xp.abs(again - answers[:count, ...])))
        relative = 64 * space.eps + 4 * noise.relative
        allowed = 4 * noise.radius + relative * float(space.xp.max(space.xp.abs(answers)))
        return difference if difference > allowed else 0.0

    def _reply(self, request: Plan | Sequence[Plan]) -> Measurements | list[Measurements]:
        if isinstance(request, Plan):
            return self.measure(request)
        return [self.measure(plan) for plan in request]

    def measure(self, plan: Plan) -> Measurements:
        """The answers to a plan, from the journal where it has them, else from the oracle."""
        if plan.so_far is not None:
            self.show(plan.so_far)
        self.observer.planned(plan.stage, plan.count * plan.repeats)
        repeats = range(plan.first_repeat, plan.first_repeat + plan.repeats)
        values = self._answers(plan, repeats[0])
        if plan.repeats > 1:
            values = (values + sum(self._answers(plan, repeat) for repeat in repeats[1:])) / plan.repeats
        self._first = self._first or (plan, values)
        noise = self.signature.noise
        shrink = plan.repeats**0.5 if noise.kind == "gaussian" else 1.0
        return Measurements(values, noise.radius / shrink)

    def show(self, so_far: Callable[[], Sketch | None]) -> None:
        """Offer what is known so far to whoever watches."""
        if self.watcher is not None:
            self.watcher.sketched(so_far)

    def _answers(self, plan: Plan, repeat: int, count: int | None = None) -> Array:
        """All answers to one repeat of a plan, or the first `count` of them."""
        count = plan.count if count is None else count
        known = self.journal.slices(plan.digest, repeat) if self.journal else []
        pieces: list[Array] = []
        done = 0
        for start, answers in [*known, (count, None)]:
            while done < start:
                piece = self._ask(plan, repeat, done, start)
                pieces.append(piece)
                done += piece.shape[0]
            if answers is not None:
                pieces.append(self._replayed(plan, answers))
                done += answers.shape[0]
        if not pieces:  # a plan that asks nothing
            places = () if self.signature.positions == "last" else (plan.length,)
            return self.signature.space.zeros(0, *places, *(self._outputs or ()))
        return pieces[0] if len(pieces) == 1 else self.signature.space.xp.concat(pieces)

    def _replayed(self, plan: Plan, answers: Any) -> Array:
        self._afford(plan, len(answers))
        self._count(plan, len(answers), new=False)
        return self._same_shape(self.signature.space.asarray(answers), plan)

    def _ask(self, plan: Plan, repeat: int, start: int, stop: int) -> Array:
        """Ask the next batch of a slice; what was answered is kept before anything else happens."""
        signature = self.signature
        stop = min(stop, start + self._batch(plan), start + self._afford(plan, 1))
        tokens = plan.tokens(start, stop, signature.space, signature.width, self._room(plan, stop - start))
        began = perf_counter()
        try:
            answers = self._same_shape(self.oracle(tokens), plan)
        except OracleError as error:
            self._keep_arrived(error, plan, repeat, start)
            raise
        if self.journal:
            self.journal.add(plan.digest, repeat, start, to_numpy(answers))
        self.oracle_seconds += perf_counter() - began
        self._count(plan, stop - start, new=True)
        return answers

    def _keep_arrived(self, error: OracleError, plan: Plan, repeat: int, start: int) -> None:
        """Keep what was answered of a batch before the rest of it failed, if it is this oracle that says so."""
        for first, some in error.arrived if error.box is self.oracle else ():
            answers = self._same_shape(some, plan)
            if self.journal:
                self.journal.add(plan.digest, repeat, start + first, to_numpy(answers))
            self._count(plan, answers.shape[0], new=True)

    def _room(self, plan: Plan, count: int) -> Array | None:
        """Memory for a batch of tokens: the last batch's, unless it is too small or somebody still holds it.

        Fresh memory costs a page fault for every 4 KiB, which is more than writing the tokens. Only NumPy
        tells who holds an array: a view of a torch tensor does not count as a reference to it.
        """
        if not array_api_compat.is_numpy_namespace(self.signature.space.xp):
            return None
        size = count * plan.length * self.signature.width
        if self._memory is None or self._memory.shape[0] < size or getrefcount(self._memory) > UNSHARED:
            self._memory = self.signature.space.zeros(size)
        return self._memory[:size]

    def _batch(self, plan: Plan) -> int:
        space = self.signature.space
        room = CPU_BATCH_BYTES if space.on_cpu else GPU_BATCH_BYTES
        fitting = max(1, room // (space.itemsize * plan.length * self.signature.width))
        return min(fitting, self.signature.batch_limit or fitting)

    def _afford(self, plan: Plan, wanted: int) -> int:
        """Queries left; BudgetExhausted when they are fewer than wanted."""
        if self.left < wanted:
            raise BudgetExhausted(
                f"the budget of {self.budget} queries ended in stage {plan.stage!r}, "
                f"after {self.queries} queries: raise it"
            )
        return int(min(self.left, plan.count))

    def _count(self, plan: Plan, queries: int, *, new: bool) -> None:
        self.stages[plan.stage] = self.stages.get(plan.stage, 0) + queries
        self.new_queries += queries if new else 0
        self.observer.answered(queries, new=new)

    @property
    def several_outputs(self) -> bool:
        """Whether an answer, as far as any has come, is more than one number."""
        return bool(self._outputs)

    def _same_shape(self, answers: Array, plan: Plan) -> Array:
        leading = 1 if self.signature.positions == "last" else 2
        outputs = tuple(answers.shape[leading:])
        if self._outputs is None:
            self._outputs = outputs
        if outputs != self._outputs:
            raise WrongShape(
                f"the oracle {self.oracle.name!r} answered {outputs or 'one number'} per sequence in stage "
                f"{plan.stage!r}, before it was {self._outputs or 'one number'}: it must not change"
            )
        return answers


def recover(
    oracle: Oracle,
    method: str = "auto",
    budget: int | None = None,
    journal: str | PathLike[str] | None = None,
    seed: int = 0,
    throw: bool = True,
    *,
    heldout: int = HELDOUT_QUERIES,
    progress: bool | None = None,
    observer: Observer | None = None,
    **options: Any,
) -> Recovery:
    """Recover what is inside an oracle and certify it with fresh held-out queries.

    `method="auto"` takes the box for one head, or for a noisy one where noise is declared; where that turns out to be
    wrong, it finds out what the box is and goes on with the method for that.

    `budget` caps all queries of this recovery, answers from the journal and the certificate included.
    With a `journal` file nothing is asked twice: run again with the same arguments to resume.
    `throw=False` returns every outcome; otherwise one without a certificate raises `RecoveryFailed`, which
    has the result attached. `options` go to the method.
    """
    if not isinstance(oracle, Oracle):
        kind = type(oracle).__name__
        raise UsageError(
            f"oracle must be an Oracle, not {kind}: FunctionOracle(function, width=d) makes one of a function"
        )
    choose = _chooser(method, options)
    _whole("seed", seed, 0)
    if budget is not None:
        _whole("budget", budget, 0)
    _whole("heldout", heldout, 1)
    with ExitStack() as stack:
        if observer is None:
            observer = stack.enter_context(ProgressBar(budget=budget)) if wants_bar(progress) else Silent()
        book = None
        if journal is not None:
            book = stack.enter_context(Journal(journal, box_of(oracle)))
        session = Session(oracle, budget=budget, journal=book, observer=observer)
        result, cause = _recover(session, choose, seed, heldout, options)
        exact = session.signature.noise.kind == "exact"
        if method == "auto" and not options and exact:
            if result.outcome in MAY_BE_ANOTHER_FAMILY:
                result, cause = _recover_diagnosed(session, result, cause, seed, heldout)
            elif _is_coarse(result) and _tells_more(session, result):
                _set_aside(session, result)
                result, cause = _recover_from_outputs(session, result, cause, seed, heldout)
    if throw and not result.certified:
        raise RecoveryFailed(result) from cause
    return result


def _whole(name: str, number: Any, least: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, not {number!r}")


def _chooser(name: str, options: dict[str, Any]) -> Callable[[Signature], Method]:
    """How the method is chosen once the noise is known; UsageError where name or options are unknown."""
    if name != "auto" and name not in METHODS:
        raise UsageError(f"unknown method {name!r}; known: auto, {', '.join(METHODS)}")
    possible = [METHODS[name]] if name != "auto" else [method for method in AUTO if set(options) <= set(method.options)]
    if not possible or set(options) - set(possible[0].options):
        known = {option: None for method in possible or AUTO for option in method.options}
        unknown = sorted(set(options) - set(known)) or sorted(options)
        raise UsageError(f"method {name!r} has no option {unknown[0]!r}; its options: {', '.join(known) or 'none'}")
    return lambda signature: next((method for method in possible if method.robust == noisy(signature)), possible[0])


def box_of(oracle: Oracle) -> str:
    """What a journal belongs to: the box and how it is asked."""
    signature = oracle.signature
    return f"{oracle.name} | width {signature.width} | {signature.space.label} | positions {signature.positions}"


def _recover(
    session: Session, choose: Callable[[Signature], Method], seed: int, heldout: int, options: dict[str, Any]
) -> tuple[Recovery, Exception | None]:
    began = perf_counter()
    params: Any = None
    estimate: Estimate | None = None
    certificate = Certificate()
    cause: Exception | None = None
    used = 0
    method = choose(session.signature)
    details: dict[str, Any] = {}
    try:
        if session.signature.noise.kind == "measure":
            details = _measure_noise(session, seed)
        method = choose(session.signature)
        budget = session.left - heldout
        estimate = session.run(method.steps(session.signature, stream(seed, "method"), budget, **options))
        params, certificate = (
            estimate.params,
            _unchecked(estimate),
        )
        used = session.queries
        judgement = _certified(session, estimate, seed, heldout)
        outcome, message, certificate = judgement.outcome, judgement.message, judgement.certificate
    except Unrecoverable as error:
        outcome, message, cause, params = error.outcome, str(error), error, error.partial
        used = session.queries
        if outcome is Outcome.WRONG_FAMILY and (difference := session.contradiction()) > 0:
            outcome, message = Outcome.INCONSISTENT, f"a question asked twice was answered {difference:.2g} apart"
    except BudgetExhausted as error:
        outcome, message, cause = Outcome.BUDGET_EXHAUSTED, str(error), error
        params = error.partial if params is None else params
    except OracleError as error:
        outcome, message, cause = Outcome.ORACLE_FAILED, str(error), error
        params = error.partial if params is None else params
    used = used or session.queries
    stats = Stats(
        queries=used,
        new_queries=session.new_queries,
        heldout_queries=session.queries - used,
        counting_bound=estimate.counting_bound if estimate else 0,
        seconds=perf_counter() - began,
        oracle_seconds=session.oracle_seconds,
        stages={stage: count for stage, count in session.stages.items() if stage != "held-out"},
        details={**details, **(estimate.details if estimate else {}), **session.oracle.facts()},
    )
    return Recovery(outcome, message, params, certificate, stats, method.name), cause


def _is_coarse(result: Recovery) -> bool:
    """Whether something was recovered and compared with fresh answers, but with bars as wide as these."""
    return result.outcome is Outcome.UNCERTIFIED and result.certificate.heldout_queries > 0


def _tells_more(session: Session, result: Recovery) -> bool:
    """Whether one head was read logit by logit though its answers have several outputs each."""
    return result.method == "single-head" and session.several_outputs


def _recover_from_outputs(
    session: Session, first: Recovery, cause: Exception | None, seed: int, heldout: int
) -> tuple[Recovery, Exception | None]:
    """Read one head as if there were several: from all outputs of an answer at once, which errors blur less."""
    second, second_cause = _recover(session, lambda _: METHODS["multi-head"], seed, heldout, {})
    if not second.certified:
        stats = replace(
            first.stats,
            queries=second.stats.queries,
            heldout_queries=second.stats.heldout_queries,
            new_queries=second.stats.new_queries,
            seconds=first.stats.seconds + second.stats.seconds,
            oracle_seconds=second.stats.oracle_seconds,
            stages=second.stats.stages,
        )
        return replace(first, stats=stats), cause
    seconds = first.stats.seconds + second.stats.seconds
    details = {**second.stats.details, "tried_first": first.method}
    second = replace(second, stats=replace(second.stats, seconds=seconds, details=details))
    if len(second.params.heads) == 1:
        certificate = replace(second.certificate, radius=_only_head(second.certificate.radius))
        second = replace(second, params=_only_head(second.params), certificate=certificate)
    return second, second_cause


def _only_head(layer: MultiHead) -> SingleHead:
    return replace(layer.heads[0], output_bias=layer.output_bias)


def _set_aside(session: Session, first: Recovery) -> None:
    """Count the fresh questions of a first attempt as its own: the certificate will ask others."""
    session.stages[f"check of {first.method}"] = session.stages.pop("held-out", 0)
    if session.watcher is not None:
        session.watcher.discarded()


def _recover_diagnosed(
    session: Session, first: Recovery, cause: Exception | None, seed: int, heldout: int
) -> tuple[Recovery, Exception | None]:
    """Find out what the box is, once it is not what it was taken for, and recover that if there is a method."""
    _set_aside(session, first)
    try:
        found = session.run(diagnose(session.signature, stream(seed, "diagnosis")))
    except (BudgetExhausted, OracleError):
        return first, cause
    known = {
        "diagnosis": found.family,
        "diagnosis_findings": found.summary()["findings"],
        "tried_first": first.method,
    }
    if found.method == first.method and _tells_more(session, first):
        second, second_cause = _recover_from_outputs(session, first, cause, seed, heldout)
        details = {**second.stats.details, **known}
        return replace(second, stats=replace(second.stats, details=details)), second_cause
    if found.method is None or found.method == first.method:
        stats = replace(first.stats, queries=session.queries, heldout_queries=0, stages=dict(session.stages))
        stats = replace(stats, new_queries=session.new_queries, details={**stats.details, **known})
        said = f"{first.message}; {found.in_words()}, which no method here recovers"
        return replace(first, message=said, stats=stats), cause
    method, seconds = METHODS[found.method], first.stats.seconds
    second, cause = _recover(session, lambda _: method, seed, heldout, found.options)
    if found.options.get("heads") == 1 and not second.certified:  # told from few answers: there may be more of them
        _set_aside(session, second)
        seconds += second.stats.seconds
        second, cause = _recover(session, lambda _: method, seed, heldout, {**found.options, "heads": None})
    stats = replace(
        second.stats,
        seconds=seconds + second.stats.seconds,
        details={**second.stats.details, **known},
    )
    message = second.message if second.certified else f"{second.message}; {found.in_words()}"
    return replace(second, message=message, stats=stats), cause


def diagnose_box(
    oracle: Oracle,
    budget: int | None = None,
    journal: str | PathLike[str] | None = None,
    seed: int = 0,
    *,
    observer: Observer | None = None,
) -> Diagnosis:
    """Name the family of a box and the method that recovers it, with the evidence, from about a hundred queries."""
    with ExitStack() as stack:
        book = stack.enter_context(Journal(journal, box_of(oracle))) if journal is not None else None
        session = Session(oracle, budget=budget, journal=book, observer=observer)
        found = session.run(diagnose(session.signature, stream(seed, "diagnosis")))
    return replace(found, queries=session.queries)


def _unchecked(estimate: Estimate) -> Certificate:
    return Certificate(estimate.radius, estimate.standard_error, assumptions=estimate.assumptions)


def _measure_noise(session: Session, seed: int) -> dict[str, Any]:
    """Find out how answers err, and from then on count on it."""
    found = session.run(measure_noise(session.signature, stream(seed, "noise")))
    session.signature = session.signature.with_changes(noise=found.noise)
    return {"noise": str(found.noise), "noise_evidence": found.evidence, "noise_queries": session.queries}


def stream(seed: int, purpose: str) -> np.random.Generator:
    """Random numbers for one purpose, unrelated to those of any other use of the same seed."""
    return np.random.default_rng([seed, *f"keyhole {purpose}".encode()])


def _certified(session: Session, estimate: Estimate, seed: int, heldout: int) -> Judgement:
    """Fresh questions, from numbers the method has not seen, as many as wanted and affordable."""
    count = int(min(heldout, session.left))
    if count < 1:
        nothing = _unchecked(estimate)
        message = f"the budget of {session.budget} queries left none for the certificate"
        return Judgement(Outcome.UNCERTIFIED, message, nothing)
    return session.run(certify(estimate, session.signature, stream(seed, "held-out"), count))
