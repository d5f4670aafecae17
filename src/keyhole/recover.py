"""Recover and diagnose an oracle: what users call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from time import perf_counter
from typing import Any, Literal, overload

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import ComputeError, RecoveryFailed, UsageError
from keyhole.executors.base import Workers
from keyhole.families import Family, FormHead, Labels, MultiHead, OneLayer, ReluNet, Residual, SingleHead
from keyhole.journal import Journal
from keyhole.methods import Attempt, Task, Unrecoverable, ending, recovery_steps, stream
from keyhole.methods.diagnosis.diagnose import Diagnosis
from keyhole.methods.diagnosis.parts import diagnose_with_parts
from keyhole.methods.examination import Finding
from keyhole.noise import Noise
from keyhole.numerics.domain import Sampler, draw_from, sampler_of
from keyhole.oracles.anything import as_oracle
from keyhole.progress import Observer, ProgressBar, Silent, wants_bar
from keyhole.recovery import Outcome, Recovery, Stats
from keyhole.session import Session, box_of, open_lanes

# So many inputs of a domain are looked at before anything is asked.
DOMAIN_LOOK = 64


# What a method that is named returns; what all take is told by the last of these.


@overload
def recover(
    oracle: Any,
    method: Literal["single-head", "low-rank", "sensing", "robust", "alphabet"],
    *given: Any,
    **options: Any,
) -> Recovery[SingleHead]: ...


@overload
def recover(oracle: Any, method: Literal["multi-head"], *given: Any, **options: Any) -> Recovery[MultiHead]: ...


@overload
def recover(oracle: Any, method: Literal["relu-net"], *given: Any, **options: Any) -> Recovery[ReluNet]: ...


@overload
def recover(oracle: Any, method: Literal["one-layer"], *given: Any, **options: Any) -> Recovery[OneLayer]: ...


@overload
def recover(oracle: Any, method: Literal["residual"], *given: Any, **options: Any) -> Recovery[Residual]: ...


@overload
def recover(oracle: Any, method: Literal["labels"], *given: Any, **options: Any) -> Recovery[Labels]: ...


@overload
def recover(
    oracle: Any,
    method: Literal["parts"],
    *given: Any,
    **options: Any,
) -> Recovery[SingleHead | FormHead | MultiHead]: ...


@overload
def recover(
    oracle: Any,
    method: str = "auto",
    budget: int | None = None,
    journal: str | PathLike[str] | None = None,
    seed: int = 0,
    throw: bool = True,
    *,
    width: int | None = None,
    noise: Noise | str | None = None,
    max_norm: float | None = None,
    heldout: int | None = None,
    domain: Sampler | Sequence[Array] | None = None,
    max_seconds: float | None = None,
    concurrency: int | None = None,
    workers: int = 1,
    dask: str | None = None,
    executor: Executor | None = None,
    progress: bool | None = None,
    observer: Observer | None = None,
    **options: Any,
) -> Recovery[Family]: ...


def recover(
    oracle: Any,
    method: str = "auto",
    budget: int | None = None,
    journal: str | PathLike[str] | None = None,
    seed: int = 0,
    throw: bool = True,
    *,
    width: int | None = None,
    noise: Noise | str | None = None,
    max_norm: float | None = None,
    heldout: int | None = None,
    domain: Sampler | Sequence[Array] | None = None,
    max_seconds: float | None = None,
    concurrency: int | None = None,
    workers: int = 1,
    dask: str | None = None,
    executor: Executor | None = None,
    progress: bool | None = None,
    observer: Observer | None = None,
    **options: Any,
) -> Recovery[Any]:
    """Recover what is inside an oracle and certify it with held-out queries.

    `oracle` is an oracle, or anything that one can be made of: a PyTorch module, a function of batches of tokens with
    `width=`, parameters, an ONNX file, the address of a model, or a target as on the command line. `noise` and
    `max_norm` declare how its answers err, and how long its tokens may be.

    `method="auto"` finds out from a few queries which family the oracle is likely of, and how its answers err where
    that was not declared, and takes the method for that; where it turns out to be another, it goes on.

    `budget` caps all queries of this recovery, answers from the journal and the certificate included.
    With a `journal` file nothing is asked twice: run again with the same arguments to resume.
    `max_seconds` caps the time that the method's own arithmetic takes, not that of the oracle; left out, it is a minute
    and grows with queries and sizes.
    `throw=False` returns every outcome; otherwise one without a certificate raises `RecoveryFailed`, which
    has the result attached. `options` go to the method.

    The certificate asks `heldout` fresh queries, by default 2.5 % of those of the recovery, 120 to 256. `domain`, a
    function (rng, count) -> sequences or the sequences (length, width) themselves, names inputs that matter to the
    user: as many of them are asked besides, and the certificate speaks of them too.

    An oracle that may be called several times at once, such as a function that asks a server, is asked `concurrency`
    batches at a time. One that takes long to compute is copied to `workers` processes of this machine, to those of the
    Dask cluster at the address `dask`, or of any `executor` of futures, which share the queries; it is opened there by
    its text where it was given as one. What a worker had when it died or hung is asked of another.
    """
    oracle = as_oracle(oracle, width, noise, max_norm)
    _check_whole("seed", seed, 0)
    if budget is not None:
        _check_whole("budget", budget, 0)
    if heldout is not None:
        _check_whole("heldout", heldout, 1)
    most = math.inf if budget is None else budget
    signature = oracle.signature
    inputs = None if domain is None else sampler_of(domain)
    if inputs is not None:  # what an oracle does not take is said before anything is asked
        looked_at = draw_from(
            inputs, stream(seed, "domain"), DOMAIN_LOOK, signature.width, signature.max_norm, signature.max_length
        )
        letters = signature.alphabet
        if letters is not None and not all(letters.has(signature.space.asarray(each)) for each in looked_at):
            raise UsageError("domain drew a token that is not of the oracle's alphabet")
    steps = recovery_steps(method, Task(signature, seed, heldout, inputs, most, options, hints=oracle.hints))
    began = perf_counter()
    with ExitStack() as stack:
        if observer is None:
            observer = stack.enter_context(ProgressBar(budget=budget)) if wants_bar(progress) else Silent()
        book = None
        if journal is not None:
            book = stack.enter_context(Journal(journal, box_of(oracle)))
        lanes = stack.enter_context(open_lanes(oracle, Workers(workers, dask, executor), concurrency))
        session = Session(oracle, budget=budget, journal=book, observer=observer, max_seconds=max_seconds, lanes=lanes)
        try:
            ended = session.run(steps)
        except ComputeError as error:
            ended = Attempt(method, ending(error), str(error), error.partial, cause=error)
    if ended.outcome is Outcome.TIME_EXHAUSTED:
        ended = replace(ended, message=f"{ended.message}: {session.compute}")
    stats = _stats(session, ended, perf_counter() - began)
    result = Recovery(ended.outcome, ended.message, ended.params, ended.certificate, stats, ended.method, oracle.name)
    if throw and not result.certified:
        raise RecoveryFailed(result) from ended.cause
    return result


def _check_whole(name: str, number: Any, least: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, not {number!r}")


def _stats(session: Session, ended: Attempt, seconds: float) -> Stats:
    """What a recovery cost: held-out queries of the last attempt apart from all others."""
    stages: dict[str, int] = {}
    heldout = 0
    for (number, stage), count in session.stages.items():
        if stage == "held-out" and number == ended.number:
            heldout += count
            continue
        name = f"held-out, attempt {number + 1}" if stage == "held-out" else stage
        stages[name] = stages.get(name, 0) + count
    return Stats(
        queries=sum(session.stages.values()) - heldout,
        new_queries=session.new_queries,
        heldout_queries=heldout,
        counting_bound=ended.counting_bound,
        seconds=seconds,
        oracle_seconds=session.oracle_seconds,
        stages=stages,
        details={**ended.details, **session.oracle.facts()},
    )


def diagnose(
    oracle: Any,
    budget: int | None = None,
    journal: str | PathLike[str] | None = None,
    seed: int = 0,
    *,
    width: int | None = None,
    noise: Noise | str | None = None,
    max_norm: float | None = None,
    observer: Observer | None = None,
    max_seconds: float | None = None,
) -> Diagnosis:
    """Name the family of an oracle and the method that recovers it, with the evidence, from about a hundred queries.

    `oracle`, `width`, `noise` and `max_norm` are as for `keyhole.recover`.
    """
    oracle = as_oracle(oracle, width, noise, max_norm)
    with ExitStack() as stack:
        book = stack.enter_context(Journal(journal, box_of(oracle))) if journal is not None else None
        session = Session(oracle, budget=budget, journal=book, observer=observer, max_seconds=max_seconds)
        try:
            found = session.run(
                diagnose_with_parts(session.signature, stream(seed, "diagnosis"), stream(seed, "naming of parts"))
            )
        except ComputeError as error:
            found = Diagnosis("unknown", None, (Finding("arithmetic", "failed", str(error)),))
        except Unrecoverable as error:  # errors of answers that nothing can be made of
            found = Diagnosis("unknown", None, (Finding("noise", "too large", str(error)),))
    return replace(found, queries=session.queries)
