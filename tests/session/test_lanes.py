"""Several batches at a time: the same result, nothing asked or counted twice, whoever asks."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import Array
from keyhole.cli import main
from keyhole.errors import RecoveryFailed, UsageError
from keyhole.executors import futures
from keyhole.executors.base import Workers
from keyhole.journal import Journal
from keyhole.oracles import Counted, Noisy, Rounded
from keyhole.queries import Plan, sequences
from keyhole.recovery import Outcome
from keyhole.session import Session, box_of, open_lanes
from support.slow_head import WIDTH, AtOnce, Slow, head


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    with ProcessPoolExecutor(2) as executor:
        yield executor


@pytest.fixture(scope="module")
def expected() -> kh.Recovery:
    return kh.recover(kh.FunctionOracle(Slow(), WIDTH, name="slow"))


def answers_of(journal: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(journal)) as book:
        return book.execute("SELECT plan, repeat, start, stop FROM answers ORDER BY 1, 2, 3").fetchall()


def same(found: kh.Recovery, expected: kh.Recovery) -> None:
    assert found.certified, found.message
    assert kh.distance(found.params, expected.params) < 1e-12
    assert found.stats.queries == expected.stats.queries
    assert found.stats.heldout_queries == expected.stats.heldout_queries


@pytest.mark.parametrize("fault", ["", "dies"])
def test_copies_of_an_oracle_share_the_queries(
    fault: str, pool: Executor, expected: kh.Recovery, tmp_path: Path
) -> None:
    marks = tmp_path if fault else None
    oracle = kh.FunctionOracle(Slow(marks=marks, fault=fault), WIDTH, name="slow")
    executor = ProcessPoolExecutor(2) if fault else pool
    found = kh.recover(oracle, journal=tmp_path / "book.db", executor=executor)
    same(found, expected)
    assert found.stats.new_queries == expected.stats.queries + expected.stats.heldout_queries
    rows = answers_of(tmp_path / "book.db")
    assert sum(stop - start for *_, start, stop in rows) == found.stats.new_queries
    again = kh.recover(oracle, journal=tmp_path / "book.db")
    same(again, expected)
    assert again.stats.new_queries == 0


def test_a_copy_that_hangs_is_asked_elsewhere(
    expected: kh.Recovery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "HANG_SECONDS", 1.0)
    slow = kh.FunctionOracle(Slow(marks=tmp_path, fault="hangs"), WIDTH, name="slow")
    same(kh.recover(slow, workers=2), expected)


def test_errors_of_copies_depend_on_what_is_asked(pool: Executor) -> None:
    target = "demo:single-head?width=4&noise=1e-3"
    one, two = (kh.recover(target, executor=pool, throw=False) for _ in range(2))
    assert np.array_equal(one.params.score, two.params.score)
    oracle = Noisy(kh.FunctionOracle(head(), WIDTH), 1.0)
    tokens = np.zeros((50, 2, WIDTH))
    plan = sequences("again", tokens)
    with open_lanes(oracle, Workers(executor=pool)) as lanes:
        session = Session(oracle, lanes=lanes)
        found = session.measure(Plan(plan.stage, 50, plan.positions, repeats=4)).values
    assert abs(np.std(found) - 0.5) < 0.1  # errors of four repeats are averaged: no copy repeats another's


def test_what_cannot_be_copied_is_refused(pool: Executor) -> None:
    with pytest.raises(UsageError, match="Counted adds up what passes it"):
        kh.recover(Counted(kh.FunctionOracle(head(), WIDTH)), executor=pool)
    with pytest.raises(UsageError, match="concurrency is of requests"):
        kh.recover(head(), executor=pool, concurrency=2)
    with pytest.raises(UsageError, match="concurrency must be"):
        kh.recover(head(), concurrency=0)


def test_an_executor_that_is_shut_down_ends_as_a_failed_oracle(tmp_path: Path, expected: kh.Recovery) -> None:
    executor = ThreadPoolExecutor(2)
    oracle = kh.FunctionOracle(Slow(0.005), WIDTH, name="slow")
    Timer(0.1, executor.shutdown, (), {"wait": False, "cancel_futures": True}).start()
    found = kh.recover(oracle, journal=tmp_path / "book.db", executor=executor, throw=False)
    assert found.outcome is Outcome.ORACLE_FAILED
    assert "shut down" in found.message
    same(kh.recover(oracle, journal=tmp_path / "book.db"), expected)


def test_batches_are_under_way_together(expected: kh.Recovery, tmp_path: Path) -> None:
    box = AtOnce()
    found = kh.recover(box, width=WIDTH, concurrency=8, journal=tmp_path / "book.db")
    same(found, expected)
    assert 4 <= box.most <= 8
    assert box.queries == found.stats.new_queries == expected.stats.new_queries


def test_a_budget_is_spent_to_the_last_query(tmp_path: Path) -> None:
    for journal in (None, tmp_path / "book.db"):
        box = AtOnce(0.0)
        found = kh.recover(box, width=WIDTH, concurrency=4, budget=50, journal=journal, throw=False)
        assert found.outcome is Outcome.BUDGET_EXHAUSTED
        assert box.queries == 50
    more = kh.recover(box, width=WIDTH, concurrency=4, journal=journal)
    assert more.certified
    assert more.stats.new_queries == more.stats.queries + more.stats.heldout_queries - 50


def test_batches_that_do_not_fit_into_memory_are_halved_in_lanes_too(expected: kh.Recovery) -> None:
    asked: list[int] = []

    def box(tokens: Array) -> Array:
        if len(tokens) > 5:
            raise MemoryError("Unable to allocate")
        asked.append(len(tokens))
        return head()(tokens)

    found = kh.recover(box, width=WIDTH, concurrency=3)
    same(found, expected)
    assert sum(asked) == found.stats.new_queries == expected.stats.new_queries
    with pytest.raises(RecoveryFailed, match="Unable to allocate"):
        kh.recover(lambda _: np.zeros(2**59), width=WIDTH, concurrency=3)


def test_what_was_answered_before_a_failure_is_kept(tmp_path: Path) -> None:
    calls: list[int] = []

    def failing(tokens: np.ndarray) -> np.ndarray:
        calls.append(len(tokens))
        if len(calls) == 12:
            raise RuntimeError("once")
        return head()(tokens)

    oracle = kh.FunctionOracle(failing, WIDTH, name="failing")
    found = kh.recover(oracle, concurrency=4, journal=tmp_path / "book.db", throw=False)
    assert found.outcome is Outcome.ORACLE_FAILED
    kept = sum(stop - start for *_, start, stop in answers_of(tmp_path / "book.db"))
    assert kept == sum(calls) - calls[11] == found.stats.new_queries


def test_what_is_asked_twice_together_is_paid_once_with_a_journal(tmp_path: Path) -> None:
    box = AtOnce(0.0)
    oracle = kh.FunctionOracle(box, WIDTH, name="twice")
    plan = sequences("twice", np.ones((3, 2, WIDTH)))

    with Journal(tmp_path / "book.db", box_of(oracle)) as book, open_lanes(oracle, Workers(), 4) as lanes:
        session = Session(oracle, journal=book, lanes=lanes)
        one, two = session.measure_all([plan, plan])
    assert np.array_equal(one.values, two.values)
    assert (box.queries, session.queries, session.new_queries) == (3, 6, 3)


def test_wrappers_say_whether_they_may_be_asked_so() -> None:
    many = kh.FunctionOracle(head(), WIDTH)
    many.lanes = 4
    assert (Rounded(many, 3).lanes, Noisy(many, 1.0).lanes, Counted(many).lanes) == (4, 1, 1)


def test_the_command_shares_the_queries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--workers", "2"], ["--concurrency", "4"]):
        with pytest.raises(SystemExit) as ended:
            main(["recover", "demo:single-head?width=6", "--json", *options])
        assert ended.value.code == 0
        assert json.loads(capsys.readouterr().out)["outcome"] == "CERTIFIED"
