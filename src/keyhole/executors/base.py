"""Independent pieces of work: done here, by processes of this machine, by any executor of futures, or by Dask.

Results come back once each, whoever did the pieces; in their order where that is wanted, so that what is added up from
them does not depend on how many workers there are. A piece whose worker died or hangs is done again.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from concurrent.futures import CancelledError, Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from keyhole.errors import UsageError, WorkerError
from keyhole.executors.crew import Crew, OneProcess
from keyhole.executors.futures import FutureCrew, workers_of
from keyhole.executors.processes import THREADS, OwnProcesses, one_thread_each, stop_requested
from keyhole.executors.shared import Shared
from keyhole.optional import KEYHOLE_VERSION, extra

__all__ = [
    "THREADS",
    "Crew",
    "FutureCrew",
    "OneProcess",
    "Shared",
    "Workers",
    "one_thread_each",
    "open_threads",
    "stop_requested",
]

# Seconds in which a scheduler must answer.
PATIENCE = 10.0


@dataclass(frozen=True)
class Workers:
    """Who shares the work: so many processes of this machine, the Dask cluster at an address, or a given executor."""

    workers: int = 1
    dask: str | None = None
    executor: Executor | None = None

    def __post_init__(self) -> None:
        if isinstance(self.workers, bool) or not isinstance(self.workers, int) or self.workers < 1:
            raise UsageError(f"workers must be a whole number of at least 1, not {self.workers!r}")
        if self.executor is not None:
            if not isinstance(self.executor, Executor):
                raise UsageError(
                    f"executor must be a concurrent.futures.Executor, not {type(self.executor).__name__}: "
                    "that of a Dask client is client.get_executor()"
                )
            if self.workers > 1 or self.dask is not None:
                raise UsageError("executor= is told who does the work: leave workers and dask out")
        if self.dask is not None and self.workers > 1:
            raise UsageError("workers are processes of this machine, and dask an address: give one of them")

    @property
    def several(self) -> bool:
        """Whether it is anybody but this process."""
        return self.workers > 1 or self.dask is not None or self.executor is not None

    @contextmanager
    def open(self) -> Iterator[Crew]:
        """The crew, until the work is done."""
        if self.executor is not None:
            yield _given(self.executor)
        elif self.dask is not None:
            with _dask_crew(self.dask) as crew:
                yield crew
        elif self.workers > 1:
            with one_thread_each():
                own = OwnProcesses(self.workers)
                crew = FutureCrew(own.open(), self.workers, own.open)
                try:
                    yield crew
                finally:
                    own.end(crew.executor, hung=crew.hangs > 0)
        else:
            yield OneProcess()


@contextmanager
def open_threads(count: int) -> Iterator[Crew]:
    """Threads of this process."""
    pool = ThreadPoolExecutor(count, thread_name_prefix="keyhole")
    try:
        yield FutureCrew(pool, count)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _given(executor: Executor) -> FutureCrew:
    """Whoever an executor is; processes that die are replaced by as many, started in the same way."""
    workers = workers_of(executor)
    if not isinstance(executor, ProcessPoolExecutor):
        return FutureCrew(executor, workers)
    context, start = getattr(executor, "_mp_context", None), getattr(executor, "_initializer", None)
    arguments = getattr(executor, "_initargs", ())
    return FutureCrew(executor, workers, lambda: ProcessPoolExecutor(workers, context, start, arguments))


@contextmanager
def _dask_crew(address: str) -> Iterator[Crew]:
    """The workers of a Dask scheduler. It gives the pieces of workers that die to others."""
    distributed = extra("distributed", "dask", "a Dask cluster")
    try:
        distributed.comm.resolve_address(address)  # a client of a text that is none would wait to be closed
        client = distributed.Client(address, timeout=PATIENCE, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise UsageError(f"no Dask scheduler answers at {address!r} within {PATIENCE:g} s: {error}") from error
    with client:
        cores = sum(client.ncores().values())
        if not cores:
            raise UsageError(
                f"the Dask scheduler at {address!r} has no workers: start some with `dask worker {address}`"
            )
        check_versions(client.get_versions(packages=["keyhole", "cloudpickle"]), address)
        try:
            yield FutureCrew(client.get_executor(pure=False), cores)
        except distributed.KilledWorker as error:
            raise WorkerError(f"Dask gave a piece of work up, whose workers died: {error}") from error
        except CancelledError as error:
            raise WorkerError(f"the Dask scheduler at {address!r} was lost: {error}") from error


def check_versions(found: dict[str, Any], address: str) -> None:
    """UsageError where a scheduler or a worker runs other versions than this process, which it might misread."""
    here = found["client"]["packages"] | {"keyhole": KEYHOLE_VERSION, "python": platform.python_version()}
    others = {f"the worker {name}": each for name, each in found["workers"].items() if each is not None}
    if found.get("scheduler") is not None:
        others[f"the scheduler at {address!r}"] = found["scheduler"]
    for who, each in others.items():
        packages = each["packages"]
        wanted = ("distributed",) if "scheduler" in who else ("keyhole", "distributed", "python", "cloudpickle")
        for name in wanted:
            if _release(name, packages.get(name)) != _release(name, here.get(name)):
                has = packages.get(name) or f"no {name}"
                raise UsageError(
                    f"{who} has {has if has.startswith('no ') else f'{name} {has}'}, this process {here.get(name)}: "
                    f"install the same there, pip install 'keyhole[dask]=={KEYHOLE_VERSION}'"
                )


def _release(name: str, version: str | None) -> str | None:
    """What must be the same of a version: of Python its first two numbers."""
    return ".".join(version.split(".")[:2]) if name == "python" and version else version
