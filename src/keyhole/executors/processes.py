"""Processes of this machine that share work: each with one thread of linear algebra, and ended with whoever asks."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from keyhole.errors import UsageError

# Libraries of linear algebra read these when they are loaded: one thread per process that shares the work.
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
CAN_PUT_OFF = hasattr(signal, "pthread_sigmask")  # a system without signal masks cannot

_stop: Any = None  # in a worker: an event that says that the work was interrupted


def stop_requested() -> bool:
    """Whether whoever handed out this piece of work has been interrupted; in a worker of this machine."""
    return _stop is not None and _stop.is_set()


class OwnProcesses:
    """Pools of processes, each started when it is needed; one is opened where another has died."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._context = multiprocessing.get_context("spawn")  # threads of BLAS do not survive a fork
        self._stop = self._context.Event()

    def open(self) -> Executor:
        """A pool; UsageError in a worker that runs the script that has started it."""
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise UsageError(
                "every worker runs the script that started it from its beginning: put what it does under "
                '`if __name__ == "__main__":`'
            )
        return _Pool(self._workers, self._context, _begin, (self._stop,))

    def end(self, pool: Executor, *, hung: bool) -> None:
        """End its processes after the piece at hand, or sooner where that looks; at once if one hangs."""
        self._stop.set()
        processes = list((getattr(pool, "_processes", None) or {}).values()) if hung else []
        pool.shutdown(wait=not hung, cancel_futures=True)
        for each in processes:
            each.kill()


class _Pool(ProcessPoolExecutor):
    """A pool whose processes are not interrupted while they start."""

    def submit(self, *arguments: Any, **named: Any) -> Any:
        with _put_off_interrupts():
            return super().submit(*arguments, **named)


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


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Processes started inside have one thread of linear algebra each."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
