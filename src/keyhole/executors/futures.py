"""Pieces of work handed to an executor of futures; those of a worker that dies or hangs are handed out again."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, wait
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from statistics import median
from time import monotonic
from typing import Any, TypeVar

from keyhole.errors import WorkerError
from keyhole.executors.crew import Crew
from keyhole.executors.shared import Missing, Shared, carry_out

Piece = TypeVar("Piece")
Result = TypeVar("Result")

# Seconds between two looks at results that are awaited, so that a limit on the time or Ctrl-C can end it.
LOOK = 0.05
# Workers that may die or hang, one after the other, without one piece done in between.
MOST_DEATHS = 3
# Pieces handed out for each worker: enough to keep it busy, few enough to hold their results.
AHEAD = 2
# Where sizes of pieces are known, one hangs that takes so many times longer than half of those before, for its size,
# and so many seconds at least.
HANG_TIMES, HANG_SECONDS = 20.0, 60.0
REMEMBERED = 200  # pieces


@dataclass
class FutureCrew(Crew):
    """An executor of futures. One that breaks with its workers is opened again where `reopen` can do so."""

    executor: Executor
    workers: int
    reopen: Callable[[], Executor] | None = None
    deaths: int = field(default=0, init=False)  # in all
    hangs: int = field(default=0, init=False)
    # Seconds of the work alone, and size.
    durations: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED), init=False)

    def results(
        self,
        work: Callable[..., Result],
        pieces: Iterable[Piece],
        shared: Shared | None = None,
        *,
        ordered: bool,
        size: Callable[[Piece], float] | None = None,
    ) -> Iterator[tuple[int, Result]]:
        """See `Crew`. A piece counts once, however often it had to be done."""
        return _Rounds(self, work, enumerate(pieces), shared, ordered=ordered, size=size).results()

    def patience(self, size: float) -> float:
        """Seconds after which a piece of this size hangs; none where too little is known."""
        if not self.durations:
            return inf
        whole = median(seconds for seconds, _ in self.durations)
        each = median(seconds / one for seconds, one in self.durations)
        return max(HANG_SECONDS, HANG_TIMES * max(whole, each * size))

    def open_again(self, error: BrokenExecutor, *, give_up: bool) -> None:
        """Replace an executor whose workers died."""
        self.deaths += 1
        if self.reopen is None or give_up:
            often = f" {MOST_DEATHS + 1} times" if self.reopen is not None else ""
            raise WorkerError(
                f"a worker died{often}, maybe for want of memory: use fewer workers, or smaller pieces; scripts must "
                f'start what they do under `if __name__ == "__main__":` ({error})'
            ) from error
        self.executor.shutdown(wait=True, cancel_futures=True)
        self.executor = self.reopen()


@dataclass(eq=False)
class _Handed:
    """A piece of work that was handed out, to two workers where the first one may hang."""

    number: int
    piece: Any
    futures: list[Future[Any]] = field(default_factory=list)
    began: float = 0.0
    whole: bool = False  # whether what is shared has to be sent with it

    @property
    def done(self) -> Future[Any] | None:
        """The future that ended first."""
        return next((each for each in self.futures if each.done()), None)

    def cancel(self) -> None:
        """Whoever has not begun need not."""
        for each in self.futures:
            each.cancel()

    def forget(self) -> None:
        """Hand it out again, unless it was done in time."""
        future = self.done
        if future is None or future.cancelled() or future.exception() is not None:
            self.futures = []


class _Rounds:
    """One list of pieces on its way through an executor."""

    def __init__(
        self,
        crew: FutureCrew,
        work: Callable[..., Any],
        rest: Iterator[tuple[int, Any]],
        shared: Shared | None,
        *,
        ordered: bool,
        size: Callable[[Any], float] | None,
    ) -> None:
        self._crew, self._work, self._rest, self._shared = crew, work, rest, shared
        self._ordered, self._size = ordered, size
        self._waiting: list[_Handed] = []
        self._lives = MOST_DEATHS
        self._failed: BaseException | None = None

    def results(self) -> Iterator[tuple[int, Any]]:
        try:
            while True:
                if self._failed is None:
                    room = AHEAD * self._crew.workers - len(self._waiting)
                    self._waiting += (_Handed(number, piece) for number, piece in islice(self._rest, room))
                if not self._waiting:
                    if self._failed is not None:
                        raise self._failed
                    return
                try:
                    self._hand_out()
                    ended = self._next()
                    result = self._result_of(ended)
                except BrokenExecutor as error:  # also of a worker that died between two pieces
                    self._lives -= 1
                    self._crew.open_again(error, give_up=self._lives < 0)
                    for each in self._waiting:
                        each.forget()
                    continue
                if result is not None:
                    yield ended.number, result[0]
        finally:
            for each in self._waiting:
                each.cancel()

    def _result_of(self, ended: _Handed) -> tuple[Any] | None:
        """The result of a piece that has ended; None where it failed, or is to be handed out again."""
        future = ended.done
        assert future is not None
        try:
            seconds, result = future.result()
        except BrokenExecutor:
            raise
        except CancelledError as error:
            raise WorkerError(
                "the workers were lost, or their executor was shut down, before the work was done: run again"
            ) from error
        except Exception as error:
            self._waiting.remove(ended)
            ended.cancel()
            if self._ordered:
                raise
            # What is under way was paid for, perhaps: it is waited for, and nothing else is begun.
            self._failed = self._failed or error
            return None
        if isinstance(result, Missing):
            ended.futures, ended.whole = [], True
            return None
        if self._size is not None:
            self._crew.durations.append((seconds, self._size(ended.piece)))
        self._lives = MOST_DEATHS
        self._waiting.remove(ended)
        ended.cancel()
        return (result,)

    def _hand_out(self) -> None:
        for each in self._waiting:
            if not each.futures:
                self._submit(each)

    def _submit(self, each: _Handed) -> None:
        ticket = None if self._shared is None else self._shared.ticket(whole=each.whole)
        each.began = monotonic()
        try:
            each.futures.append(self._crew.executor.submit(carry_out, self._work, ticket, each.piece))
        except BrokenExecutor:
            raise
        except RuntimeError as error:
            raise WorkerError(f"the executor was shut down before the work was done ({error}): run again") from error

    def _next(self) -> _Handed:
        """The first piece that has ended, or the first of all where they are wanted in order."""
        awaited = self._waiting[:1] if self._ordered else self._waiting
        while True:
            for each in awaited:
                if each.done is not None:
                    return each
            wait([future for each in awaited for future in each.futures], LOOK, return_when=FIRST_COMPLETED)
            if self._size is not None:
                self._look_for_hangs(self._size)

    def _look_for_hangs(self, size: Callable[[Any], float]) -> None:
        for each in self._waiting:
            if each.done is None and monotonic() - each.began > self._crew.patience(size(each.piece)):
                self._crew.hangs += 1
                if len(each.futures) > MOST_DEATHS:
                    raise WorkerError(
                        f"workers hang: a piece of work was handed out {len(each.futures)} times and not done once"
                    )
                self._submit(each)


def workers_of(executor: Executor) -> int:
    """How many workers an executor has, as far as it says so."""
    own = getattr(executor, "_max_workers", None)
    if isinstance(own, int) and own > 0:
        return own
    cores = getattr(getattr(executor, "_client", None), "ncores", None)  # of Dask
    return max(1, sum(cores().values()) if cores is not None else os.cpu_count() or 1)
