"""What a person sees while queries run."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import IO, Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from keyhole.executors.base import stop_requested
from keyhole.queries import Sketch
from keyhole.recovery import typeset

# Between two plain lines, in seconds; what ends sooner says nothing on its way.
LINE_SECONDS = 5.0
# Between two looks at a sketch, which cost some arithmetic: so many seconds, and no more than this part of the time.
LOOK_SECONDS, LOOK_SHARE = 0.2, 0.05


class Observer(Protocol):
    """Hears from a session what it is about to ask and what came back."""

    def planned(self, stage: str, queries: int) -> None:
        """A plan of so many queries begins."""

    def answered(self, queries: int, *, new: bool) -> None:
        """So many queries were answered, now or from the journal."""


@runtime_checkable
class Watcher(Observer, Protocol):
    """An observer that is also offered what is known so far, where a method can tell."""

    def sketched(self, so_far: Callable[[], Sketch | None]) -> None:
        """`so_far()` works it out; it may be left alone."""

    def discarded(self) -> None:
        """The oracle is of another family: the sketch so far is void, and another method begins."""


class Silent:
    """Shows nothing."""

    def planned(self, stage: str, queries: int) -> None:
        """Ignore."""

    def answered(self, queries: int, *, new: bool) -> None:
        """Ignore."""


class InterruptCheck(Silent):
    """Ends a worker's recovery after the batch at hand, which the journal has kept by then."""

    def answered(self, queries: int, *, new: bool) -> None:  # noqa: ARG002 - the counts do not matter
        """Look whether the run that the worker shares was interrupted."""
        if stop_requested():
            raise KeyboardInterrupt


class SketchThrottle:
    """Looks at sketches now and then, so that watching costs little beside the recovery itself."""

    def __init__(self) -> None:
        self._next = 0.0

    def look(self, so_far: Callable[[], Sketch | None]) -> Sketch | None:
        """The sketch, or None where it is too early for another one."""
        began = perf_counter()
        if began < self._next:
            return None
        found = so_far()
        ended = perf_counter()
        self._next = ended + max(LOOK_SECONDS, (ended - began) / LOOK_SHARE)
        return found


class QueryCounter:
    """Adds up what a session says, for those who show it."""

    def __init__(self, budget: int | None = None) -> None:
        self.budget = budget
        self.stage = ""
        self.planned_queries = self.new = self.old = 0
        self.error = math.nan  # radius of the estimate so far, relative
        self.heldout = math.nan  # largest error of a held-out answer so far
        self._throttle = SketchThrottle()
        self._began: float | None = None

    def planned(self, stage: str, queries: int) -> None:
        """Another stage, and more to ask."""
        self.stage = stage
        self.planned_queries += queries
        if self._began is None:
            self._began = perf_counter()

    def answered(self, queries: int, *, new: bool) -> None:
        """Count new answers and those of the journal apart."""
        if new:
            self.new += queries
        else:
            self.old += queries

    def sketched(self, so_far: Callable[[], Sketch | None]) -> None:
        """Keep the error."""
        found = self._throttle.look(so_far)
        if found is not None:
            self.error = self.error if math.isnan(found.error) else found.error
            self.heldout = max(found.heldout, default=math.nan)

    def discarded(self) -> None:
        """That was the error of something else."""
        self.error = self.heldout = math.nan

    @property
    def asked(self) -> int:
        """Queries answered, now or from the journal."""
        return self.new + self.old

    @property
    def rate(self) -> float:
        """Queries per second that reached the oracle, since the first."""
        return self.new / max(perf_counter() - self._began, 1e-9) if self._began is not None else 0.0

    @property
    def remaining(self) -> str:
        """What the budget still allows, or what is planned so far: methods do not know all of it before."""
        if self.budget is not None:
            return f"{max(0, self.budget - self.asked):,} of {self.budget:,} left"
        return f"{max(0, self.planned_queries - self.asked):,} to go"

    @property
    def words(self) -> list[str]:
        """Queries, their rate, how many are left, and the error so far: of held-out answers, where some have come."""
        rate = f"{self.rate:,.0f}/s" + (f" + {self.old:,} from the journal" if self.old else "")
        error = "" if math.isnan(self.error) else f"error so far ± {self.error:.0e}"
        error = error if math.isnan(self.heldout) else f"held-out error {self.heldout:.0e}"
        return [each for each in (f"{self.asked:,} queries", rate, self.remaining, typeset(error)) if each]


class ProgressBar(QueryCounter):
    """A progress line on the terminal: stage, queries asked of those planned so far, rate, what is left, error."""

    def __init__(self, console: Console | None = None, budget: int | None = None) -> None:
        super().__init__(budget)
        self._progress = Progress(
            TextColumn("{task.description:>12}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[said]}"),
            TimeElapsedColumn(),
            console=console or Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("", total=0, said="")

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def planned(self, stage: str, queries: int) -> None:
        """Show the stage and extend the bar."""
        super().planned(stage, queries)
        self._progress.update(self._task, description=stage, total=self.planned_queries)

    def answered(self, queries: int, *, new: bool) -> None:
        """Advance the bar."""
        super().answered(queries, new=new)
        self._progress.update(self._task, completed=self.asked, said=" · ".join(self.words))


class ProgressLines(QueryCounter):
    """Plain lines now and then, with the figures of a `ProgressBar`, where there is no terminal to draw on."""

    def __init__(self, file: IO[str] | None = None, budget: int | None = None, every: float = LINE_SECONDS) -> None:
        super().__init__(budget)
        self._file, self._every = file, every
        self._next = perf_counter() + every

    def answered(self, queries: int, *, new: bool) -> None:
        """Say where things stand, if it is time."""
        super().answered(queries, new=new)
        if perf_counter() >= self._next:
            print(f"keyhole: {self.stage}: {', '.join(self.words)}", file=self._file or sys.stderr, flush=True)
            self._next = perf_counter() + self._every


class ObserverPair:
    """Passes on to two observers what a session says."""

    def __init__(self, first: Observer, second: Observer) -> None:
        self._all = (first, second)

    def planned(self, stage: str, queries: int) -> None:
        """Pass it on."""
        for each in self._all:
            each.planned(stage, queries)

    def answered(self, queries: int, *, new: bool) -> None:
        """Pass it on."""
        for each in self._all:
            each.answered(queries, new=new)

    def sketched(self, so_far: Callable[[], Sketch | None]) -> None:
        """Pass it on to those who look."""
        for each in self._all:
            if isinstance(each, Watcher):
                each.sketched(so_far)

    def discarded(self) -> None:
        """Pass it on to those who look."""
        for each in self._all:
            if isinstance(each, Watcher):
                each.discarded()


@contextmanager
def on_terminal(budget: int | None = None, *, quiet: bool = False) -> Iterator[Observer]:
    """What a command shows on standard error: a bar where that is a terminal, else plain lines, or nothing."""
    if quiet:
        yield Silent()
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with ProgressBar(budget=budget) as bar:
            yield bar
    else:
        yield ProgressLines(budget=budget)


@contextmanager
def steps_bar(progress: bool | None, description: str) -> Iterator[Callable[..., None]]:
    """A bar of steps done, if it is wanted: `show(total=, completed=, advance=, description=, note=)` updates it."""
    if not wants_bar(progress):
        yield lambda **_: None
        return
    columns = (TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn())
    last = (TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    with Progress(*columns, *last, console=Console(stderr=True), transient=True) as bar:
        yield partial(bar.update, bar.add_task(description, total=None, note=""))


def wants_bar(progress: bool | None) -> bool:
    """Whether to show a bar: as given, or when standard error is a terminal."""
    return sys.stderr.isatty() if progress is None else progress
