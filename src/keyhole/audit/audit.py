"""Runs an audit: opens the oracle, fills the columns, here or by several workers, and puts them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

from keyhole.audit.cells import Column, FilledColumn, digest, fill, keep
from keyhole.audit.defences import NONE, Defence, default_defences, parse_defence, together
from keyhole.audit.result import Audit
from keyhole.errors import FileError, UsageError
from keyhole.executors.base import Shared, Workers
from keyhole.families import Family
from keyhole.families.base import is_family
from keyhole.journal import Journal
from keyhole.methods import stream
from keyhole.methods.noise_estimation.measure import measure_noise
from keyhole.noise import Noise
from keyhole.oracles import Oracle
from keyhole.oracles.anything import as_oracle
from keyhole.progress import InterruptCheck, Silent, steps_bar
from keyhole.queries import Signature
from keyhole.recover import recover
from keyhole.session import Session, box_of
from keyhole.targets import Target, open_target

MULTIPLES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
# How often several workers are looked at, in seconds.
LOOK = 0.2


def audit(
    target: Any,
    defences: Sequence[str | Defence] | None = None,
    budgets: Sequence[float] = MULTIPLES,
    seed: int = 0,
    workers: int = 1,
    folder: str | PathLike[str] | None = None,
    progress: bool | None = None,
    *,
    most: int | None = None,
    width: int | None = None,
    truth: Family | None = None,
    noise: Noise | str | None = None,
    max_norm: float | None = None,
    max_seconds: float | None = None,
    dask: str | None = None,
    executor: Executor | None = None,
) -> Audit:
    """Recover an oracle behind each defence within each budget, and see how far from the truth that is.

    `target` is a text as on the command line, an oracle, or anything else that `keyhole.recover` takes, with
    `width=` for a function. `budgets` are multiples of the counting bound; those above `most` queries are left out.
    The undefended oracle is always among the defences. Without a known `truth` (an oracle, a `python:` target)
    errors are measured against what its owner recovers of it without a defence, which must be certified. With a
    `folder`, finished cells and all answers are kept there, and running again does only what is missing. The
    defences are shared by `workers` processes, the Dask cluster at the address `dask`, or any `executor` of
    futures, which open the target again from its text or get a copy of the oracle; the folder must be one that they
    see too, to resume from. `noise` is what the oracle's own answers are known to have, before any defence,
    `max_norm` the longest token that it takes, and `max_seconds` caps the arithmetic of each recovery.
    """
    with ExitStack() as stack:
        declared = None if noise is None else Noise.of(noise)
        others = Workers(workers, dask, executor)
        subject = _open(target, width, truth)
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
            wanted = _defences(defences, reference, subject.oracle.signature)
            columns = [Column(each, multiples, bound, seed, where, *limits) for each in wanted]
            show(total=sum(len(list(column.budgets())) for column in columns))
            filled = _fill_all(columns, subject, reference, others, show)
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


def _open(box: Any, width: int | None, truth: Family | None) -> Target:
    if isinstance(box, str) and width is None:
        subject = open_target(box)
        return subject if truth is None else Target(subject.text, subject.oracle, subject.label, truth)
    oracle = as_oracle(box, width)
    truth = box if truth is None and is_family(box) else truth
    return Target(oracle.name, oracle, f"{oracle.name}, of width {oracle.signature.width}", truth)


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


def _defences(given: Sequence[str | Defence] | None, reference: Family, signature: Signature) -> list[Defence]:
    """Each once, the bare oracle first; of a list that nobody gave, those that such an oracle can have."""
    if isinstance(given, str):
        raise UsageError(f"defences is a list of texts, not one text: write [{given!r}]")
    texts = default_defences(reference.counting_bound, reference.width) if given is None else given
    wanted = [each if isinstance(each, Defence) else parse_defence(each) for each in texts]
    if given is None:
        wanted = [each for each in wanted if _refusal(each, reference, signature) is None]
    for each in wanted:
        if (why := _refusal(each, reference, signature)) is not None:
            raise UsageError(why)
    return list(dict.fromkeys([parse_defence(NONE), *wanted]))


def _refusal(each: Defence, reference: Family, signature: Signature) -> str | None:
    """Why an oracle cannot have a defence."""
    if reference.tells_labels and each.changes_answers:
        return f"this box tells labels already: {each.text} changes numbers, leave it out"
    outputs, width = reference.outputs or 1, reference.width
    if each.top is not None and each.top > outputs:
        return f"{each.text} needs as many outputs; this box has {outputs}"
    if each.directions is not None and each.directions >= width:
        return f"project:{each.directions} leaves tokens of width {width} as they are: ask for fewer directions"
    return None if signature.alphabet is None else _refusal_of_alphabet(each, signature)


def _refusal_of_alphabet(each: Defence, signature: Signature) -> str | None:
    """The same where only the tokens of an alphabet may be sent."""
    if each.changes_tokens or each.tells_labels:
        return f"this box takes the tokens of an alphabet only, {each.text} or its attack has others: leave it out"
    if together(signature.noise, each.errors or Noise.exact()).kind == "measure":
        return f"{each.text} and the box's own errors together are measured, which takes any tokens: leave it out"
    return None


# Several workers.


def _carry_out(shared: tuple[Oracle, Family], column: Column) -> FilledColumn:
    """Fill a column in a worker, which has the oracle opened anew."""
    for each in ("cells", "journals"):
        _make_folder(column.folder / each)
    return fill(column, *shared, InterruptCheck())


def _fill_all(
    columns: Sequence[Column], subject: Target, reference: Family, workers: Workers, show: Callable[..., None]
) -> list[FilledColumn]:
    """Each column by one worker, which alone writes to its journal."""
    if not workers.several:
        return [fill(column, subject.oracle, reference, done=partial(show, advance=1)) for column in columns]
    name = subject.oracle.name
    files = [column.file(name, budget) for column in columns for _, budget in column.budgets()]
    found: dict[int, FilledColumn] = {}
    instead = "name it by a text that they can open: python:path.py:make"
    with workers.open() as crew, _watched(lambda: show(completed=sum(file.exists() for file in files))):
        shared = Shared((subject.oracle, reference), instead)
        for number, filled in crew.results(_carry_out, columns, shared, ordered=False):
            found[number] = filled
            for (_, budget), cell in zip(columns[number].budgets(), filled[0], strict=True):
                keep(columns[number].file(name, budget), cell)  # of a worker that has other disks
    return [found[number] for number in range(len(columns))]


@contextmanager
def _watched(look: Callable[[], None]) -> Iterator[None]:
    """What is shown of workers, now and then."""
    ended = Event()

    def watch() -> None:
        while not ended.wait(LOOK):
            look()

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        look()
