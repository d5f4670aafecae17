"""The journal: answers keyed by their questions, refused where they could mislead."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import Space
from keyhole.errors import JournalError
from keyhole.journal import Journal
from keyhole.oracles import Counted, Noisy, Rounded
from keyhole.recovery import Outcome
from support import targets as t

WIDTH = 6


@pytest.fixture
def head(rng: np.random.Generator) -> kh.SingleHead:
    return kh.SingleHead(t.gaussian(rng, WIDTH), t.normal_value(rng, WIDTH))


def change(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement, values)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("shape", [(5,), (5, 3), (0,)])
def test_answers_come_back_bit_for_bit(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    answers = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    with Journal(tmp_path / "j", "box") as journal:
        journal.add("plan", 0, 7, answers)
    with Journal(tmp_path / "j", "box") as journal:
        [(start, found)] = journal.slices("plan", 0)
    assert start == 7
    assert found.dtype == answers.dtype
    assert found.shape == answers.shape
    assert found.tobytes() == answers.tobytes()


def test_slices_come_in_order_and_only_those_of_the_question(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", "box") as journal:
        for plan, repeat, start in (("a", 0, 4), ("a", 0, 0), ("a", 1, 2), ("b", 0, 9)):
            journal.add(plan, repeat, start, np.full(2, float(start)))
        assert [start for start, _ in journal.slices("a", 0)] == [0, 4]
        assert [start for start, _ in journal.slices("a", 1)] == [2]
        assert journal.slices("c", 0) == []


def test_an_answer_is_never_overwritten(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", "box") as journal:
        journal.add("plan", 0, 0, np.ones(2))
        with pytest.raises(JournalError, match="j"):
            journal.add("plan", 0, 0, np.zeros(2))
        assert journal.slices("plan", 0)[0][1].tolist() == [1.0, 1.0]


def test_another_box_is_refused(tmp_path: Path, head: kh.SingleHead) -> None:
    kh.recover(kh.FunctionOracle(head, width=WIDTH, name="one"), journal=tmp_path / "j")
    before = (tmp_path / "j").read_bytes()
    with pytest.raises(JournalError, match=r"another box.*'one.*'two.*[Nn]ame another file"):
        kh.recover(kh.FunctionOracle(head, width=WIDTH, name="two"), journal=tmp_path / "j")
    assert (tmp_path / "j").read_bytes() == before


@pytest.mark.parametrize("changed", ["width", "dtype", "positions"])
def test_the_same_box_asked_otherwise_is_refused(tmp_path: Path, head: kh.SingleHead, changed: str) -> None:
    def box(**signature: object) -> kh.FunctionOracle:
        return kh.FunctionOracle(lambda tokens: tokens[:, 0, 0], name="box", **({"width": 2} | signature))

    kh.recover(box(), journal=tmp_path / "j", budget=1, throw=False)
    other = {"width": {"width": 3}, "dtype": {"like": np.zeros(1, np.float32)}, "positions": {"positions": "all"}}
    with pytest.raises(JournalError, match="another box"):
        kh.recover(box(**other[changed]), journal=tmp_path / "j", throw=False)


@pytest.mark.parametrize("wrap", [lambda o: Rounded(o, 3, declared=False), lambda o: Noisy(o, 1e-3, declared=False)])
def test_a_wrapper_that_changes_answers_is_another_box(tmp_path: Path, head: kh.SingleHead, wrap: object) -> None:
    """Answers of the plain box must not pass for those of the rounded one."""
    plain = kh.FunctionOracle(head, width=WIDTH)
    kh.recover(plain, journal=tmp_path / "j")
    with pytest.raises(JournalError, match="another box"):
        kh.recover(wrap(plain), journal=tmp_path / "j", throw=False)


def test_another_head_is_another_box(tmp_path: Path, head: kh.SingleHead) -> None:
    """The answers of one head must never certify the parameters of another."""
    kh.recover(kh.FunctionOracle(head, width=WIDTH), journal=tmp_path / "j")
    other = kh.SingleHead(head.score * 2, head.value)
    try:
        result = kh.recover(kh.FunctionOracle(other, width=WIDTH), journal=tmp_path / "j", throw=False)
    except JournalError:
        return
    assert not result.certified or kh.distance(result.params, other) < 1e-12


def test_a_wrapper_that_only_watches_is_the_same_box(tmp_path: Path, head: kh.SingleHead) -> None:
    kh.recover(kh.FunctionOracle(head, width=WIDTH), journal=tmp_path / "j")
    again = kh.recover(Counted(kh.FunctionOracle(head, width=WIDTH)), journal=tmp_path / "j")
    assert again.stats.new_queries == 0


@pytest.mark.parametrize(
    "content",
    [b"this is no database, it is a shopping list\n" * 40, b"\0" * 8192, b"SQLite format 3\0" + b"\xff" * 5000],
    ids=["text", "zeros", "torn"],
)
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, head: kh.SingleHead, content: bytes) -> None:
    path = tmp_path / "precious"
    path.write_bytes(content)
    with pytest.raises(JournalError, match="name another file"):
        kh.recover(kh.FunctionOracle(head, width=WIDTH), journal=path)
    assert path.read_bytes() == content


def test_a_foreign_database_is_refused_and_left_alone(tmp_path: Path, head: kh.SingleHead) -> None:
    path = tmp_path / "precious.db"
    change(path, "CREATE TABLE answers (everything TEXT)")
    with pytest.raises(JournalError):
        kh.recover(kh.FunctionOracle(head, width=WIDTH), journal=path)
    with closing(sqlite3.connect(path)) as connection:
        tables = connection.execute("SELECT name, sql FROM sqlite_master").fetchall()
    assert tables == [("answers", "CREATE TABLE answers (everything TEXT)")]


def test_another_schema_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "j", "box").close()
    change(tmp_path / "j", "UPDATE meta SET value = '999' WHERE key = 'schema'")
    with pytest.raises(JournalError, match=r"version.*999"):
        Journal(tmp_path / "j", "box")


def test_damage_is_noticed(tmp_path: Path, head: kh.SingleHead) -> None:
    oracle = Counted(kh.FunctionOracle(head, width=WIDTH))
    kh.recover(oracle, journal=tmp_path / "j")
    asked = oracle.queries
    change(tmp_path / "j", "UPDATE answers SET data = zeroblob(length(data)) WHERE rowid = 3")
    with pytest.raises(JournalError, match=r"damaged.*checksum.*Name another file"):
        kh.recover(oracle, journal=tmp_path / "j")
    assert oracle.queries == asked


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE answers SET shape = '4000' WHERE rowid = 2",
        "UPDATE answers SET shape = 'many' WHERE rowid = 2",
        "UPDATE answers SET dtype = 'gibberish' WHERE rowid = 2",
        "UPDATE answers SET data = NULL WHERE 0",
        "UPDATE answers SET start = start + 1, stop = stop + 1 WHERE rowid = 1",
        "DROP TABLE answers",
    ],
    ids=["shape", "shape-text", "dtype", "nothing", "overlap", "no-table"],
)
def test_other_damage_never_certifies_a_wrong_result(tmp_path: Path, head: kh.SingleHead, damage: str) -> None:
    oracle = kh.FunctionOracle(head, width=WIDTH, batch_limit=4)
    kh.recover(oracle, journal=tmp_path / "j")
    change(tmp_path / "j", damage)
    try:
        result = kh.recover(oracle, journal=tmp_path / "j", throw=False)
    except JournalError:
        return
    assert not result.certified or kh.distance(result.params, head) <= 1e-13


def test_a_torn_file_is_refused(tmp_path: Path, head: kh.SingleHead) -> None:
    kh.recover(kh.FunctionOracle(head, width=WIDTH), journal=tmp_path / "j")
    whole = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(JournalError):
        kh.recover(kh.FunctionOracle(head, width=WIDTH), journal=tmp_path / "j")


HOLD = """
import sys
from keyhole.journal import Journal
with Journal(sys.argv[1], sys.argv[2]):
    print("open", flush=True)
    sys.stdin.readline()
"""


def test_a_second_run_waits_its_turn(tmp_path: Path, head: kh.SingleHead) -> None:
    oracle = kh.FunctionOracle(head, width=WIDTH, name="box")
    kh.recover(oracle, journal=tmp_path / "j")
    with closing(sqlite3.connect(tmp_path / "j")) as connection:
        (box,) = connection.execute("SELECT value FROM meta WHERE key = 'box'").fetchone()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "j"), box],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(JournalError, match="in use by another run"):
            kh.recover(oracle, journal=tmp_path / "j")
        other.communicate("\n")
    assert kh.recover(oracle, journal=tmp_path / "j").stats.new_queries == 0


def test_two_runs_of_one_process_do_not_share_either(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", "box"), pytest.raises(JournalError, match="in use"):
        Journal(tmp_path / "j", "box")


@pytest.mark.parametrize("first", [1, 5, None])
@pytest.mark.parametrize("then", [2, 64])
def test_resuming_with_another_batch_limit(tmp_path: Path, head: kh.SingleHead, first: int | None, then: int) -> None:
    def box(limit: int | None) -> Counted:
        return Counted(kh.FunctionOracle(head, width=WIDTH, batch_limit=limit, name="box"))

    whole = kh.recover(box(None))
    total = whole.stats.queries + whole.stats.heldout_queries
    oracles = [box(first), box(then)]
    stopped = kh.recover(oracles[0], journal=tmp_path / "j", budget=23, throw=False)
    assert stopped.outcome is Outcome.BUDGET_EXHAUSTED
    assert oracles[0].queries == 23
    result = kh.recover(oracles[1], journal=tmp_path / "j")
    assert oracles[0].queries + oracles[1].queries == total
    assert result.stats.new_queries == oracles[1].queries == total - 23
    assert kh.distance(result.params, whole.params) <= 1e-14  # batches of other sizes are rounded otherwise


@pytest.mark.parametrize("bad", ["missing/folder/j", "."])
def test_a_place_that_cannot_be_written(tmp_path: Path, head: kh.SingleHead, bad: str) -> None:
    oracle = Counted(kh.FunctionOracle(head, width=WIDTH))
    with pytest.raises(JournalError, match="journal"):
        kh.recover(oracle, journal=tmp_path / bad)
    assert oracle.queries == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(tmp_path: Path, head: kh.SingleHead) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(JournalError, match="journal"):
        kh.recover(kh.FunctionOracle(head, width=WIDTH), journal=tmp_path / "j")


def test_a_full_disk_keeps_what_there_was(tmp_path: Path, head: kh.SingleHead) -> None:
    """SQLite's page limit stands in for a full disk."""
    with Journal(tmp_path / "j", "box") as journal:
        journal.add("plan", 0, 0, np.ones(3))
        journal._connection.execute("PRAGMA max_page_count = 8")
        with pytest.raises(JournalError, match="free some space"):
            journal.add("plan", 0, 3, np.ones(10**6))
        journal._connection.execute("PRAGMA max_page_count = 1000000")
    with Journal(tmp_path / "j", "box") as journal:
        assert [start for start, _ in journal.slices("plan", 0)] == [0]


def test_a_torch_box_resumes_from_its_journal(tmp_path: Path, like: object, rng: np.random.Generator) -> None:
    truth = t.head_in(Space.of(like), t.gaussian(rng, WIDTH), t.normal_value(rng, WIDTH))
    first = kh.recover(kh.FunctionOracle(truth, width=WIDTH, like=like), journal=tmp_path / "j")
    again = kh.recover(kh.FunctionOracle(truth, width=WIDTH, like=like), journal=tmp_path / "j")
    assert again.stats.new_queries == 0
    assert t.plain(again.params).score.tobytes() == t.plain(first.params).score.tobytes()
    assert Space.of(again.params.score) == Space.of(like)


def test_another_seed_asks_its_own_questions(tmp_path: Path, head: kh.SingleHead) -> None:
    oracle = kh.FunctionOracle(head, width=WIDTH)
    first = kh.recover(oracle, journal=tmp_path / "j", seed=0)
    second = kh.recover(oracle, journal=tmp_path / "j", seed=1)
    # The value is asked with the same tokens whatever the seed; everything else is new.
    everything = second.stats.queries + second.stats.heldout_queries
    assert second.stats.new_queries == everything - first.stats.stages["value"]
