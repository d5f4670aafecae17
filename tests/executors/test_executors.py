"""Work shared by others: each result once, whoever dies, hangs, is shut down or lacks something."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from keyhole.errors import UsageError, WorkerError
from keyhole.executors import base, futures
from keyhole.executors.base import FutureCrew, OneProcess, Shared, Workers, check_versions
from keyhole.executors.processes import OwnProcesses
from keyhole.optional import KEYHOLE_VERSION
from support.mortal import killed_once

SQUARES = [0, 1, 4, 9, 16, 25]


def test_a_worker_that_is_killed_counts_once(tmp_path: Path) -> None:
    own = OwnProcesses(1)
    crew = FutureCrew(own.open(), 1, own.open)
    assert list(crew.map(partial(killed_once, tmp_path), range(6))) == SQUARES
    assert crew.deaths == 1
    own.end(crew.executor, hung=False)


def test_a_given_pool_of_processes_is_replaced_where_one_dies(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1) as pool, Workers(executor=pool).open() as crew:
        assert sorted(crew.results(partial(killed_once, tmp_path), range(6), ordered=False)) == list(enumerate(SQUARES))
        crew.executor.shutdown()  # type: ignore[attr-defined]


class Mortal(ThreadPoolExecutor):
    """An executor of which every worker dies."""

    def submit(self, *_: Any) -> Any:
        future: Future[int] = Future()
        future.set_exception(BrokenExecutor("killed"))
        return future


@pytest.fixture
def mortal() -> Iterator[Executor]:
    with Mortal(1) as executor:
        yield executor


def test_workers_that_always_die_end_it(mortal: Executor) -> None:
    with pytest.raises(WorkerError, match="a worker died 4 times, maybe for want of memory"):
        list(FutureCrew(mortal, 2, lambda: mortal).map(abs, [1]))
    with pytest.raises(WorkerError, match="a worker died, maybe"):
        list(FutureCrew(mortal, 2).map(abs, [1]))


class Sleeper:
    """Sleeps for long the first time that it is asked for a number."""

    def __init__(self, number: int, seconds: float = 1.0) -> None:
        self.number, self.seconds, self.asked = number, seconds, 0

    def __call__(self, number: int) -> int:
        if number == self.number:
            self.asked += 1
            if self.asked == 1:
                time.sleep(self.seconds)
        return number**2


def test_what_hangs_is_handed_to_another_and_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "HANG_SECONDS", 0.2)
    for ordered in (True, False):
        work = Sleeper(3)
        with ThreadPoolExecutor(2) as pool:
            crew = FutureCrew(pool, 2)
            found = sorted(crew.results(work, range(6), ordered=ordered, size=lambda _: 1.0))
            assert found == list(enumerate(SQUARES))
            assert (crew.hangs, work.asked) == (1, 2)
    slow = Sleeper(3, 0.4)
    with ThreadPoolExecutor(2) as pool:  # pieces that take as long as they take
        assert list(FutureCrew(pool, 2).map(slow, range(6))) == SQUARES
    assert slow.asked == 1


def test_a_failure_loses_nothing_that_is_under_way() -> None:
    def work(number: int) -> int:
        if number == 1:
            raise ValueError("one")
        time.sleep(0.05)
        return number**2

    with ThreadPoolExecutor(4) as pool:
        came = []
        with pytest.raises(ValueError, match="one"):
            came.extend(iter_into(FutureCrew(pool, 4).results(work, range(100), ordered=False), came))
        assert 3 <= len(came) <= 8
        with pytest.raises(ValueError, match="one"):
            list(FutureCrew(pool, 4).map(work, range(100)))


def iter_into(results: Iterator[Any], came: list[Any]) -> Iterator[Any]:
    for each in results:
        came.append(each)
        yield from ()


def test_an_executor_that_is_shut_down_is_named() -> None:
    pool = ThreadPoolExecutor(2)
    crew = FutureCrew(pool, 2)
    results = crew.map(abs, range(100))
    assert next(results) == 0
    pool.shutdown(cancel_futures=True)
    with pytest.raises(WorkerError, match="shut down"):
        list(results)


def test_what_is_shared_is_made_once_in_each_thread() -> None:
    shared = Shared(bytearray(2 * 2**14), "never")  # too large to go with every piece

    def work(value: bytearray, number: int) -> tuple[int, int]:
        value[0] += 1
        return number, id(value)

    with ThreadPoolExecutor(2) as pool:
        found = list(FutureCrew(pool, 2).map(work, range(20), shared))
    assert [number for number, _ in found] == list(range(20))
    assert len({each for _, each in found}) <= 2
    assert shared.value[0] == 0
    assert next(iter(OneProcess().map(work, [1], shared)))[0] == 1
    with pytest.raises(UsageError, match=r"a generator cannot be sent to workers .*: name it"):
        Shared((n for n in ()), "name it")


class Picky:
    """Opens here, and nowhere else."""

    def __reduce__(self) -> Any:
        return __import__, ("no_such_extra",)


def test_a_worker_that_lacks_something_says_so() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(WorkerError, match=r"no_such_extra.*install there"):
        list(FutureCrew(pool, 1).map(divmod, [1], Shared(Picky(), "never")))


def test_what_cannot_be_meant_is_refused() -> None:
    for wrong in (0, True, 1.5, "2"):
        with pytest.raises(UsageError, match="workers must be"):
            Workers(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"concurrent.futures.Executor.*get_executor"):
        Workers(executor="me")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="give one of them"):
        Workers(2, "tcp://127.0.0.1:1")


def test_other_versions_are_named() -> None:
    own = {
        "distributed": "2026.8.0",
        "cloudpickle": "3.1",
        "keyhole": KEYHOLE_VERSION,
        "python": base.platform.python_version(),
    }

    def found(scheduler: dict[str, Any], worker: dict[str, Any]) -> dict[str, Any]:
        ours = {"packages": own}
        return {
            "client": ours,
            "scheduler": {"packages": own | scheduler},
            "workers": {"tcp://w:1": {"packages": own | worker}},
        }

    check_versions(found({}, {}), "tcp://s")
    check_versions(found({"keyhole": None, "python": "3.9.0"}, {}), "tcp://s")  # a scheduler runs no code of ours
    with pytest.raises(UsageError, match=r"the scheduler at 'tcp://s' has distributed 2020.1.0, this process 2026.8.0"):
        check_versions(found({"distributed": "2020.1.0"}, {}), "tcp://s")
    with pytest.raises(UsageError, match=r"the worker tcp://w:1 has no keyhole, .*pip install 'keyhole\[dask\]"):
        check_versions(found({}, {"keyhole": None}), "tcp://s")
    with pytest.raises(UsageError, match=r"has python 3.8.1"):
        check_versions(found({}, {"python": "3.8.1"}), "tcp://s")


def test_a_scheduler_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr(base, "PATIENCE", 0.2)
    with (
        pytest.raises(UsageError, match=r"no Dask scheduler answers at .tcp://127\.0\.0\.1:9"),
        Workers(dask="tcp://127.0.0.1:9").open(),
    ):
        pass


def test_a_script_that_workers_would_run_again_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(UsageError, match="__main__"):
        OwnProcesses(2).open()
