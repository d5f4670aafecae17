"""Runs an audit: opens the oracle, fills the columns, in this process or in several, and puts them together."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from keyhole.audit.cells import Column, FilledColumn, digest, fill
from keyhole.audit.defences import NONE, Defence, default_defences, parse_defence
from keyhole.audit.result import Audit
from keyhole.errors import FileError, KeyholeError, UsageError
from keyhole.families import Family
from keyhole.journal import Journal
from keyhole.methods import stream
from keyhole.methods.noise_estimation.measure import measure_noise
from keyhole.noise import Noise
from keyhole.oracles import Oracle
from keyhole.progress import Silent, steps_bar
from keyhole.recover import recover
from keyhole.session import Session, box_of
from keyhole.targets import Target, open_target

MULTIPLES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
# How often several processes are looked at, in seconds.
LOOK = 0.2
CAN_PUT_OFF = hasattr(signal, "pthread_sigmask")  # a system without signal masks cannot


def audit(
    target: str | Oracle,
    defences: Sequence[str | Defence] | None = None,
    budgets: Sequence[float] = MULTIPLES,
    seed: int = 0,
    jobs: int = 1,
    folder: str | PathLike[str] | None = None,
    progress: bool | None = None,
    *,
    most: int | None = None,
    truth: Family | None = None,
    noise: Noise | str | None = None,
    max_norm: float | None = None,
    max_seconds: float | None = None,
) -> Audit:
    """Recover an oracle behind each defence within each budget, and see how far from the truth that is.

    `target` is a text as on the command line, or an oracle. `budgets` are multiples of the counting bound;
    those above `most` queries are left out. The undefended oracle is always among the defences. Without a known
    `truth` (an oracle, a `python:` target) errors are measured against what its owner recovers of it without
    a defence, which must be certified. With a `folder`, finished cells and all answers are kept there, and
    running again does only what is missing. `jobs` processes share the defences; they open the target again
    from its text, so an oracle allows one only. `noise` is what the oracle's own answers are known to have, before any
    defence, `max_norm` the longest token that it takes, and `max_seconds` caps the arithmetic of each recovery.
    """
    with ExitStack() as stack:
        declared = None if noise is None else Noise.of(noise)
        subject = _open(target, truth, jobs)
        own = subject.oracle.signature.noise
        subject = subject.with_declared(max_norm, declared)
        if not isinstance(target, Oracle):
            stack.callback(subject.oracle.close)
        where = Path(stack.enter_context(TemporaryDirectory(prefix="keyhole-audit-")) if folder is None else folder)
        for each in ("cells", "journals"):
            _make_folder(where / each)
        with steps_bar(progress, "cells") as show:
            reference, subject, asked = _reference(subject, where, seed, max_seconds)
            declared = subject.oracle.signature.noise
            bound = reference.counting_bound
            multiples = _multiples(budgets, bound, most)
            limits = (None if declared == own else declared), max_norm, max_seconds
            wanted = _defences(defences, bound, reference)
            columns = [Column(each, multiples, bound, seed, where, *limits) for each in wanted]
            show(total=sum(len(list(column.budgets())) for column in columns))
            if jobs == 1:
                filled = [fill(column, subject.oracle, reference, done=partial(show, advance=1)) for column in columns]
            else:
                filled = _in_processes(columns, subject, reference, jobs, show)
    known = "the true parameters" if subject.truth is not None else "what its owner recovers of it without a defence"
    if subject.truth is None and declared.kind != "exact":
        known += f" (answers {declared})"
    rows = tuple(row for cells, _ in filled for row in cells)
    new_queries = asked + sum(new for _, new in filled)
    return Audit(subject.text, subject.label, bound, known, seed, rows, new_queries)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot make the folder {folder}: {error.strerror or error}; name another one") from error


def _open(target: str | Oracle, truth: Family | None, jobs: int) -> Target:
    if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1:
        raise UsageError(f"jobs must be a whole number of at least 1, not {jobs!r}")
    if not isinstance(target, Oracle):
        subject = open_target(target)
        return subject if truth is None else Target(subject.text, subject.oracle, subject.label, truth)
    if jobs > 1:
        raise UsageError(
            "jobs above 1 need a target named by text, which other processes can open: python:path.py:make"
        )
    return Target(target.name, target, f"{target.name}, of width {target.signature.width}", truth)


def _reference(subject: Target, folder: Path, seed: int, max_seconds: float | None) -> tuple[Family, Target, int]:
    """The truth, or what its owner recovers of the oracle; the target, how it errs included; and the queries so far."""
    if subject.truth is not None:
        return subject.truth, subject, 0
    # With another seed: from the same queries the bare oracle would differ from itself by nothing at all.
    seed, journal = seed + 1, folder / "journals" / f"reference-{digest(subject.oracle.name, str(seed))[:8]}.db"
    limits: dict[str, Any] = {"observer": Silent(), "max_seconds": max_seconds}
    result = recover(subject.oracle, "auto", journal=journal, seed=seed, **limits)
    if result.params is None:  # never of a certified result
        raise UsageError("nothing was recovered of this box, so nothing can be compared with it")
    asked, params = result.stats.new_queries, result.params
    if "noise" in result.stats.details and subject.oracle.signature.noise.kind == "exact":  # nobody declared it
        with Journal(journal, box_of(subject.oracle)) as book:
            session = Session(subject.oracle, journal=book, max_seconds=max_seconds)
            found = session.run(measure_noise(subject.oracle.signature, stream(seed, "noise of the box")))
        subject, asked = subject.with_declared(noise=found.noise.as_found()), asked + session.new_queries
    return params, subject, asked


def _multiples(budgets: Sequence[float], bound: int, most: int | None) -> tuple[float, ...]:
    if not budgets or not all(0 < multiple < float("inf") for multiple in budgets):
        raise UsageError(f"budgets are positive multiples of the counting bound, for example 1, 2, 4; not {budgets!r}")
    allowed = sorted({float(multiple) for multiple in budgets if most is None or multiple * bound <= most})
    if not allowed:
        raise UsageError(f"{most} queries are fewer than the least budget, {min(budgets):g} × {bound}: allow more")
    return tuple(allowed)


def _defences(given: Sequence[str | Defence] | None, bound: int, reference: Family) -> list[Defence]:
    """Each once, the bare oracle first; of a list that nobody gave, those that an answer of this kind can have."""
    if isinstance(given, str):
        raise UsageError(f"defences is a list of texts, not one text: write [{given!r}]")
    texts = default_defences(bound) if given is None else given
    wanted = [each if isinstance(each, Defence) else parse_defence(each) for each in texts]
    if given is None and reference.tells_labels:
        wanted = [each for each in wanted if not each.changes_answers]
    for each in wanted:
        if reference.tells_labels and each.changes_answers:
            raise UsageError(f"this box tells labels already: {each.text} changes numbers, leave it out")
        if each.top is not None and each.top > (reference.outputs or 1):
            raise UsageError(f"{each.text} needs as many outputs; this box has {reference.outputs or 1}")
    return list(dict.fromkeys([parse_defence(NONE), *wanted]))


# Several processes.


_stop: Any = None  # in a worker: an event that says the audit was interrupted


class InterruptCheck(Silent):
    """Ends a worker's recovery after the batch at hand, which the journal has kept by then."""

    def answered(self, queries: int, *, new: bool) -> None:  # noqa: ARG002 - the counts do not matter
        """Look whether the audit was interrupted."""
        if _stop.is_set():
            raise KeyboardInterrupt


def _begin(stop: Any) -> None:
    """Prepare a worker: Ctrl-C reaches every process of a terminal, but only the first one acts on it."""
    global _stop  # noqa: PLW0603 - one per process, set once
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if CAN_PUT_OFF:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # what an oracle starts finds things as usual


@contextmanager
def _put_off_interrupts() -> Iterator[None]:
    """Ctrl-C reaches this process only afterwards, and those that it starts meanwhile not before they are prepared.

    A new process imports for a second or so, and would otherwise say where it was interrupted.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if CAN_PUT_OFF else ()
    try:
        yield
    finally:
        if CAN_PUT_OFF:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _carry_out(column: Column, text: str, reference: Family) -> FilledColumn:
    """Fill a column in a worker, which opens the target anew: an oracle cannot travel."""
    target = open_target(text).with_declared(column.max_norm, column.noise)
    try:
        return fill(column, target.oracle, reference, InterruptCheck())
    finally:
        target.oracle.close()


def _in_processes(
    columns: Sequence[Column], subject: Target, reference: Family, jobs: int, show: Callable[..., None]
) -> list[FilledColumn]:
    context = multiprocessing.get_context("spawn")  # threads of BLAS and CUDA do not survive a fork
    stop = context.Event()
    files = [column.file(subject.oracle.name, budget) for column in columns for _, budget in column.budgets()]
    with ProcessPoolExecutor(min(jobs, len(columns)), context, _begin, (stop,)) as pool:
        try:
            with _put_off_interrupts():
                futures = [pool.submit(_carry_out, column, subject.text, reference) for column in columns]
            pending = set(futures)
            while pending:
                finished, pending = wait(pending, timeout=LOOK)
                show(completed=sum(file.exists() for file in files))
                for each in finished:
                    each.result()  # raises what went wrong there
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise KeyholeError(
                "a process of the audit died, maybe for want of memory: run again with fewer jobs; "
                "with a folder, finished cells are kept"
            ) from error
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
