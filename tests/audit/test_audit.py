"""The audit: sentences, cells on disk and processes; defences, floors and the command have files of their own."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import keyhole as kh
from keyhole.audit import Audit, Cell, Defence, audit, parse_defence
from keyhole.audit.cells import Column
from keyhole.errors import OracleError, UsageError
from keyhole.oracles import FunctionOracle
from keyhole.report.html.audit_curves import draw_curves
from support.targets import small_oracle

SMALL = "demo:single-head?width=4"
FEW = ["round:3", "noise:1e-3+clip:1", "budget:10"]


# --- sentences ------------------------------------------------------------------------------------------------


def made(**errors: list[tuple[int, float, float]]) -> Audit:
    """An audit of bound 100 with (queries, error, floor) by defence."""
    rows = [
        Cell(
            defence.replace("_", ":").replace("x", "+"),
            queries / 100,
            queries,
            queries,
            error,
            least,
            "CERTIFIED",
            "m",
            0,
        )
        for defence, cells in errors.items()
        for queries, error, least in cells
    ]
    return Audit("t", "a box", 100, "the truth", 0, tuple(rows), 0)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ([(100, 0.5, 0), (200, 1e-9, 0)], "costs an attacker nothing and stops nothing: the error falls to 1.0e-09"),
        ([(200, 1e-7, 0), (890, 1e-9, 0)], "nothing and stops nothing: the error falls to 1.0e-07 with 200 queries."),
        ([(200, 0.5, 0), (4000, 1e-9, 0)], "costs an attacker at most 20 × the queries and stops nothing"),
        ([(400, 0.005, 0), (800, 1e-4, 5e-5)], "come within 1 % for at most 2 × the queries; an error of 1.0e-04"),
        ([(200, 1e-3, 0), (800, 1e-4, 5e-5)], "come within 1 % at no cost; an error of 1.0e-04 remains after 8 ×"),
        ([(800, 1e-4, 5e-5)], "near the floor of 5.0e-05 under every attack."),
        ([(800, 1e-4, 1e-9)], "The floor is at 1.0e-09, so a better attack may do more."),
        ([(200, 1.0, 0), (6400, 0.03, 0.02)], "leaves an error of 3 % after 64 × the counting bound, which is near"),
        ([(200, 1.0, 0), (6400, 1.0, 0.02)], "leaves an error of 100 % after 64 ×"),
    ],
    ids=[
        "no cost",
        "polish",
        "dearer",
        "a price",
        "no price",
        "at the floor",
        "above the floor",
        "some left",
        "all left",
    ],
)
def test_sentences_follow_from_rows(cells: list[tuple[int, float, float]], said: str) -> None:
    found = made(none=[(100, 0.9, 0), (200, 1e-15, 0)], round_3=cells)
    first, second = found.sentences
    assert first == "No defence: 200 queries, 2 × the counting bound, recover the box to a relative error of 1.0e-15."
    assert second.startswith("Rounding to 3 decimals ")
    assert said in second


def test_whoever_is_not_clipped_may_send_short_tokens() -> None:
    found = made(none=[(200, 1e-15, 0)], bfloat16=[(800, 1.0, 0)], bfloat16xclip_1=[(800, 1e-8, 0)])
    assert found.sentences[1].endswith("the error falls to 1.0e-08 with 800 queries of tokens of norm 1 at most.")


def test_an_attack_that_gave_up_is_no_merit_of_the_defence() -> None:
    rows = made(none=[(200, 1e-15, 0)], float32=[(800, 1.0, 0)]).rows
    early = replace(rows[1], queries=9, outcome="TOO_NOISY")
    found = Audit("t", "a box", 100, "the truth", 0, (rows[0], early), 0)
    assert "(the attack gave up: TOO_NOISY). The floor" in found.sentences[1]


# --- the audit itself -----------------------------------------------------------------------------------------


def test_an_audit_measures_what_attackers_get() -> None:
    found = audit(SMALL, FEW, [1, 4, 16])
    assert found.defences == ("none", "round:3", "noise:0.001+clip:1", "budget:10")
    assert found.bound == 20
    assert [row.budget for row in found.of("none")] == [20, 80, 320]
    assert all(row.queries <= row.budget for row in found.rows)
    assert found.of("none")[-1].error < 1e-12
    noisy = found.of("noise:0.001+clip:1")[-1]
    assert 1e-5 < noisy.error < 0.5
    assert noisy.floor > 1e-5
    assert found.of("budget:10")[-1].error > 0.1
    assert found.new_queries > 0
    assert len(found.sentences) == 4
    data = json.loads(json.dumps(found.as_data(), allow_nan=False))
    assert len(data["rows"]) == 10
    assert set(data["sentences"]) == set(found.defences)
    assert draw_curves(found).startswith(b"\x89PNG")


def test_a_bigger_budget_asks_only_what_the_smaller_one_did_not() -> None:
    oracle, truth = small_oracle()
    found = audit(oracle, [], [2, 4, 8], truth=truth)
    assert len(found.rows) == 3
    assert oracle.queries == found.new_queries == found.rows[0].queries + 1  # and one to check it


def test_an_audit_is_resumed_cell_by_cell(tmp_path: Path) -> None:
    oracle, truth = small_oracle()
    first = audit(oracle, ["round:3"], [1, 2], folder=tmp_path, truth=truth)
    asked = oracle.queries
    again = audit(oracle, ["round:3"], [1, 2], folder=tmp_path, truth=truth)
    assert oracle.queries == asked
    assert again.new_queries == 0
    assert again.rows == first.rows
    next((tmp_path / "cells").iterdir()).unlink()
    audit(oracle, ["round:3"], [1, 2], folder=tmp_path, truth=truth)
    assert oracle.queries == asked  # the cell is run again, its answers are in the journal
    more = audit(oracle, ["round:3", "clip:1"], [1, 2], folder=tmp_path, truth=truth)
    assert oracle.queries == asked + more.new_queries > asked
    assert [replace(row, seconds=0) for row in more.rows[:4]] == [replace(row, seconds=0) for row in first.rows]
    audit(oracle, ["round:3"], [1, 2], 1, folder=tmp_path, truth=truth)  # another seed asks other questions
    assert oracle.queries > asked + more.new_queries


def test_a_cell_that_was_interrupted_pays_nothing_twice(tmp_path: Path) -> None:
    head = small_oracle()[1]
    asked: list[bytes] = []

    def answer(tokens: np.ndarray) -> np.ndarray:
        if len(asked) == 16:
            asked.append(b"")
            raise KeyboardInterrupt
        asked.extend(sequence.tobytes() for sequence in tokens)
        return head(tokens)

    oracle = FunctionOracle(answer, width=4, batch_limit=2, name="interrupted")
    with pytest.raises(KeyboardInterrupt):
        audit(oracle, [], [2], folder=tmp_path, truth=head)
    found = audit(oracle, [], [2], folder=tmp_path, truth=head)
    assert found.rows[0].error < 1e-12
    assert len(set(asked)) == len(asked)


def test_a_box_that_fails_is_no_merit_of_the_defence(tmp_path: Path) -> None:
    head = small_oracle()[1]
    asked = [0]

    def answer(tokens: np.ndarray) -> np.ndarray:
        asked[0] += len(tokens)
        if asked[0] in range(40, 60):
            raise ConnectionError("the server went away")
        return head(tokens)

    oracle = FunctionOracle(answer, width=4, batch_limit=8, name="flaky")
    with pytest.raises(OracleError, match=r"behind clip:1: .*the server went away.* run again"):
        audit(oracle, ["clip:1"], [2], folder=tmp_path, truth=head)
    asked[0] = 60
    found = audit(oracle, ["clip:1"], [2], folder=tmp_path, truth=head)
    assert [row.outcome for row in found.rows] == ["CERTIFIED", "CERTIFIED"]
    assert found.of("clip:1")[0].error < 1e-9


def test_noise_does_not_repeat_itself_from_cell_to_cell(tmp_path: Path) -> None:
    """Each cell goes on where the journal ends: otherwise other questions would meet the same errors."""
    defence = parse_defence("noise:1")
    oracle = FunctionOracle(lambda tokens: np.zeros(len(tokens)), width=4, name="zero")
    errors = [defence.around(oracle, seed=seed)(np.zeros((4, 1, 4))) for seed in (1, 2)]
    assert not np.any(errors[0] == errors[1])
    names = {defence.around(oracle, seed=seed).name for seed in (1, 2)}
    assert len(names) == 1  # one journal


def test_cells_are_told_apart_by_all_that_determines_them(tmp_path: Path) -> None:
    column = Column(Defence(), (1.0,), 20, 0, tmp_path)
    others = [replace(column, seed=1), replace(column, bound=21), replace(column, defence=Defence(clip=1.0))]
    files = {column.file("a", 20), column.file("b", 20), column.file("a", 21), *(o.file("a", 20) for o in others)}
    assert len(files) == 6


def test_a_broken_cell_is_told(tmp_path: Path) -> None:
    audit(SMALL, [], [2], folder=tmp_path)
    (file,) = (tmp_path / "cells").iterdir()
    file.write_text("{")
    with pytest.raises(kh.KeyholeError, match="remove it"):
        audit(SMALL, [], [2], folder=tmp_path)


@pytest.mark.slow
def test_processes_find_the_same(tmp_path: Path) -> None:
    alone = audit(SMALL, ["round:3", "clip:1"], [1, 2])
    together = audit(SMALL, ["round:3", "clip:1"], [1, 2], workers=2, folder=tmp_path)
    strip = [replace(row, seconds=0.0) for row in alone.rows]
    assert [replace(row, seconds=0.0) for row in together.rows] == strip
    assert together.new_queries == alone.new_queries
    again = audit(SMALL, ["round:3", "clip:1"], [1, 2], folder=tmp_path)
    assert (again.rows, again.new_queries) == (together.rows, 0)


def test_an_executor_shares_the_defences(tmp_path: Path) -> None:
    oracle = FunctionOracle(small_oracle()[1], 4, name="a head")
    alone = audit(oracle, ["round:3"], [1, 2], truth=small_oracle()[1])
    with ThreadPoolExecutor(2) as executor:
        together = audit(oracle, ["round:3"], [1, 2], truth=small_oracle()[1], executor=executor, folder=tmp_path)
    assert [replace(row, seconds=0.0) for row in together.rows] == [replace(row, seconds=0.0) for row in alone.rows]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"budgets": []}, "positive multiples"),
        ({"budgets": [0]}, "positive multiples"),
        ({"budgets": [math.inf]}, "positive multiples"),
        ({"most": 5}, "fewer than the least budget"),
        ({"workers": 0}, "workers"),
        ({"defences": "round:3"}, "list of texts"),
        ({"defences": ["rund:3"]}, "possible: none"),
    ],
)
def test_wrong_arguments_are_told(change: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        audit(SMALL, **change)  # type: ignore[arg-type]


def test_an_oracle_that_counts_cannot_travel() -> None:
    with pytest.raises(UsageError, match="Counted adds up what passes it"):
        audit(small_oracle()[0], workers=2)
