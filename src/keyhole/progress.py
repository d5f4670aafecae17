"""What a person sees while queries run."""

from __future__ import annotations

import sys
from time import perf_counter
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Observer(Protocol):
    """Told by a session what it is about to ask and what came back."""

    def planned(self, stage: str, queries: int) -> None:
        """A plan of so many queries begins."""

    def answered(self, queries: int, *, new: bool) -> None:
        """So many queries were answered, now or from the journal."""


class Silent:
    """Shows nothing."""

    def planned(self, stage: str, queries: int) -> None:
        """Ignore."""

    def answered(self, queries: int, *, new: bool) -> None:
        """Ignore."""


class Bar:
    """A progress line on the terminal: stage, queries asked of those planned so far, rate and time."""

    def __init__(self, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("{task.description:>12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("queries  {task.fields[rate]}"),
            TimeElapsedColumn(),
            console=console or Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("", total=0, rate="")
        self._began = perf_counter()
        self._new = 0

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def planned(self, stage: str, queries: int) -> None:
        """Show the stage and extend the bar."""
        task = self._progress.tasks[0]
        self._progress.update(self._task, description=stage, total=(task.total or 0) + queries)

    def answered(self, queries: int, *, new: bool) -> None:
        """Advance the bar."""
        rate = "from journal"
        if new:
            self._new += queries
            rate = f"{self._new / max(perf_counter() - self._began, 1e-9):,.0f}/s"
        self._progress.update(self._task, advance=queries, rate=rate)


def wants_bar(progress: bool | None) -> bool:
    """Whether to show a bar: as told, or when standard error is a terminal."""
    return sys.stderr.isatty() if progress is None else progress
