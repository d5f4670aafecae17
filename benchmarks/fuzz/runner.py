"""Boxes in parallel processes, one record a line: a run that was killed goes on, and no box is run twice.

Only the parent writes, so that records never mix. A box that takes longer than its limit is a hang: its process is
killed and another one started.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

from keyhole.executors.base import Workers

Key = tuple[str, int]  # kind and seed
Record = dict[str, Any]
Attempt = Callable[[str, int], Record]

_SPAWN = multiprocessing.get_context("spawn")
PATIENCE = 4.0  # how much longer than its limit a box may take on a busy machine
MEMORY = 16 * 2**30  # bytes of addresses for one process: a box that wants more is a crash, and others go on
LOOK = 1.0  # seconds between two looks at who is late


def read_records(path: Path) -> list[Record]:
    """The records of a file; a line that was cut short is left out."""
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last line break was not finished
    return [json.loads(line) for line in lines if line.strip()]


@contextmanager
def record_file(path: Path) -> Iterator[IO[bytes]]:
    """The file, open to append, for one run at a time; an unfinished last line is cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SystemExit(f"another run writes to {path}: name another file with --out") from error
        file.seek(0)
        whole = file.read()
        file.truncate(whole.rfind(b"\n") + 1)
        yield file


@dataclass
class Worker:
    """A process that attempts one box at a time."""

    process: Any
    pipe: Connection
    key: Key | None = None
    limit: float = float("inf")
    began: float = 0.0
    used_before: float = 0.0

    @classmethod
    def start(cls, attempt: Attempt) -> Worker:
        own, other = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_work, args=(other, attempt), daemon=True)
        process.start()
        other.close()
        return cls(process, own)

    def give(self, key: Key, seconds: float) -> None:
        self.key, self.limit, self.began, self.used_before = key, seconds, time.monotonic(), self.used()
        with suppress(OSError):  # of a process that has died: its pipe ends, which is noted as a crash
            self.pipe.send(key)

    @property
    def is_late(self) -> bool:
        """Whether its box has had its time, by the processor; on a busy machine the clock may show more."""
        now = time.monotonic()
        if now < self.began + self.limit:
            return False
        return self.used() - self.used_before > self.limit or now > self.began + PATIENCE * self.limit

    def used(self) -> float:
        """Seconds of the processor; infinite where the system does not say."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return float("inf")
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _work(pipe: Connection, attempt: Attempt) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and ends this process
    with suppress(OSError, ValueError):  # a limit that is lower already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with suppress(EOFError, OSError):  # where the parent has ended
        while True:
            pipe.send(attempt(*pipe.recv()))


def _end_with(parent: int) -> None:
    """End this process when its parent does, whatever it is busy with."""
    while os.getppid() == parent:
        time.sleep(LOOK)
    os._exit(1)


def run(
    keys: Iterable[Key], path: Path, attempt: Attempt, *, jobs: int, limit: float, seconds: float = float("inf")
) -> int:
    """Attempt every box that the file does not have yet; the number of those attempted now.

    `limit` is the time for one box, `seconds` that for the whole run: what is under way then is left for the next.
    """
    for library in ("OPENBLAS", "OMP", "MKL"):  # processes share the cores, not threads of each
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    end = time.monotonic() + seconds
    with record_file(path) as file:
        known = {(record["kind"], record["seed"]) for record in read_records(path)}
        waiting = iter([key for key in dict.fromkeys(keys) if key not in known])
        workers: list[Worker] = []
        done = 0
        try:
            workers = [Worker.start(attempt) for _ in range(jobs)]
            for worker in workers:
                _next(worker, waiting, limit)
            while any(worker.key for worker in workers) and time.monotonic() < end:
                for number, record in _ended(workers, attempt, end):
                    file.write(json.dumps(record).encode() + b"\n")
                    file.flush()
                    done += 1
                    _next(workers[number], waiting, limit)
                    if done % 100 == 0:
                        print(f"{done} boxes", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            print("interrupted: run again to go on", file=sys.stderr)
        finally:
            for worker in workers:
                worker.stop()
    return done


def run_on_dask(keys: Iterable[Key], path: Path, attempt: Attempt, address: str, *, seconds: float) -> int:
    """The same on the workers of a Dask cluster, which have to have this repository.

    Nobody kills a process there: a box takes as long as it takes, and recoveries limit their own arithmetic.
    """
    end, done = time.monotonic() + seconds, 0
    with record_file(path) as file, Workers(dask=address).open() as crew:
        known = {(record["kind"], record["seed"]) for record in read_records(path)}
        waiting = [key for key in dict.fromkeys(keys) if key not in known]
        for _, record in crew.results(partial(_attempt, attempt), waiting, ordered=False):
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            done += 1
            if time.monotonic() > end:
                break
    return done


def _attempt(attempt: Attempt, key: Key) -> Record:
    return attempt(*key)


def _next(worker: Worker, waiting: Iterator[Key], limit: float) -> None:
    key = next(waiting, None)
    worker.key = None
    if key is not None:
        worker.give(key, limit)


def _ended(workers: list[Worker], attempt: Attempt, end: float) -> Iterator[tuple[int, Record]]:
    """Workers whose box has ended, with its record; those that hang or have died are replaced."""
    busy = {worker.pipe: number for number, worker in enumerate(workers) if worker.key}
    ready = wait(list(busy), timeout=max(0.0, min(end - time.monotonic(), LOOK)))
    for pipe in ready:
        number = busy[pipe]
        try:
            yield number, workers[number].pipe.recv()
        except (EOFError, ConnectionResetError):
            yield number, _replaced(workers, number, attempt, "crash", "the process died")
    for pipe, number in busy.items():
        if pipe not in ready and workers[number].is_late:
            yield number, _replaced(workers, number, attempt, "hang", "stopped at its time limit")


def _replaced(workers: list[Worker], number: int, attempt: Attempt, verdict: str, detail: str) -> Record:
    worker = workers[number]
    assert worker.key is not None
    kind, seed = worker.key
    worker.stop()
    workers[number] = Worker.start(attempt)
    empty = {"outcome": "", "family": "", "ratio": None, "shares": {}, "seconds": None, "warnings": []}
    return {"kind": kind, "seed": seed, "verdict": verdict, "detail": detail, **empty}


def schedule(every: Mapping[str, int], first_seed: int, boxes: int) -> list[Key]:
    """So many boxes, kinds in turn; a kind takes part in every so many rounds only, not all such kinds in the same."""
    kinds = [(name, number, period) for number, (name, period) in enumerate(every.items())]
    rounds = (
        [(name, first_seed + turn) for name, number, period in kinds if (turn + number) % period == 0]
        for turn in count()
    )
    return list(islice(chain.from_iterable(rounds), boxes if every else 0))
