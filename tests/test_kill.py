"""A run that is killed again and again: nothing is lost but the batch in flight, and the result is the same."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from support import kill_oracle
from support.kill_oracle import BATCH_LIMIT, WIDTH, target

KILLS = 10
PROCESSES = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    """Every box and every run is a process of its own, forked from one that has imported Keyhole already."""
    PROCESSES.set_forkserver_preload(["__main__", "support.kill_oracle"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # it knows no other
        forkserver.ensure_running()


def start(task: Callable[..., None], *arguments: object) -> BaseProcess:
    process = PROCESSES.Process(target=task, args=tuple(map(str, arguments)), daemon=True)
    process.start()
    return process


def wait_until(happened: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.001)


@contextmanager
def box(folder: Path) -> Iterator[tuple[str, Path]]:
    """A box in a process of its own: its address and its log of every question."""
    folder.mkdir()
    log = folder / "questions.jsonl"
    # A socket's path must be short, which a test's folder may not be.
    with tempfile.TemporaryDirectory(prefix="kh") as short:
        address = f"{short}/box"
        server = start(kill_oracle.serve, address, log)
        try:
            wait_until(lambda: Path(address).exists() and log.exists(), "the box to listen")
            yield address, log
        finally:
            server.kill()
            server.join()


def finish(address: str, journal: Path, out: Path) -> dict[str, np.ndarray]:
    run = start(kill_oracle.run, address, journal, out)
    run.join(timeout=60)
    assert run.exitcode == 0  # what went wrong stands on standard error
    with np.load(out) as found:
        return dict(found)


def batches(log: Path) -> list[tuple[int, list[str]]]:
    """(number of the run, questions) of every batch the box saw."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [(line["run"], line["questions"]) for line in lines]


def size(log: Path) -> int:
    return log.read_bytes().count(b"\n")


def test_ten_kills(tmp_path: Path, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    with box(tmp_path / "calm") as (address, log):
        expected = finish(address, tmp_path / "calm.journal", tmp_path / "calm.npz")
        calm = batches(log)

    with box(tmp_path / "rough") as (address, log):
        journal, out = tmp_path / "rough.journal", tmp_path / "rough.npz"
        for _ in range(KILLS):
            before = size(log)
            run = start(kill_oracle.run, address, journal, out)
            wanted = before + int(rng.integers(1, 8))
            wait_until(lambda run=run, wanted=wanted: size(log) >= wanted or not run.is_alive(), "batches")
            time.sleep(rng.uniform(0, 0.01))  # anywhere between a question and the commit of its answer
            assert run.is_alive(), "the run ended before it could be killed: ask slower, or kill earlier"
            run.kill()
            run.join()
            assert run.exitcode == -signal.SIGKILL
            assert not out.exists()
        found = finish(address, journal, out)
        rough = batches(log)

    # The same result, bit for bit.
    assert found.keys() == expected.keys()
    for name in ("score", "value", "score_radius", "worst_error", "queries"):
        assert found[name].tobytes() == expected[name].tobytes(), name
    assert np.linalg.norm(found["score"] - target().score) <= 1e-13 * np.linalg.norm(target().score)

    # The same questions, each of them once but for the batch in flight at each kill.
    once = [question for _, questions in calm for question in questions]
    assert len(once) == len(set(once)) == int(expected["new_queries"]) > WIDTH**2 + WIDTH
    seen = Counter(question for _, questions in rough for question in questions)
    assert set(seen) == set(once)
    in_flight: Counter[str] = Counter()
    for killed in range(1, KILLS + 1):
        asked = [questions for run, questions in rough if run == killed]
        assert asked, f"run {killed} was killed before it asked anything"
        in_flight.update(asked[-1])
    for question, times in seen.items():
        assert times <= 1 + in_flight[question]
    assert sum(seen.values()) - len(once) <= KILLS * BATCH_LIMIT
    # Killed runs paid for most of it: the last one did not begin anew.
    assert int(found["new_queries"]) < 0.95 * int(expected["new_queries"])


def test_a_finished_journal_answers_everything(tmp_path: Path) -> None:
    with box(tmp_path / "box") as (address, log):
        first = finish(address, tmp_path / "journal", tmp_path / "first.npz")
        asked = size(log)
        again = finish(address, tmp_path / "journal", tmp_path / "again.npz")
        assert size(log) == asked
    assert int(again["new_queries"]) == 0
    assert again["score"].tobytes() == first["score"].tobytes()


@pytest.mark.parametrize("later", [0.0, 0.003, 0.01])
def test_a_kill_while_the_journal_is_made(tmp_path: Path, later: float) -> None:
    """Killed at start-up, before or while the file appears: the next run opens it all the same."""
    with box(tmp_path / "box") as (address, _):
        run = start(kill_oracle.run, address, tmp_path / "journal", tmp_path / "out.npz")
        wait_until((tmp_path / "journal").exists, "the journal to appear")
        time.sleep(later)
        run.kill()
        run.join()
        finish(address, tmp_path / "journal", tmp_path / "out.npz")
