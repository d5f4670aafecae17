"""The audit: defences as text and as wrappers, floors, sentences, cells on disk, processes and the command."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import keyhole as kh
from keyhole.audit import Audit, Defence, Row, audit, default_defences, parse_defence
from keyhole.audit.cells import Column
from keyhole.audit.floors import (
    Geometry,
    bounded_floor,
    counting_bound,
    counting_floor,
    floor,
    gaussian_floor,
    rounding_floor,
)
from keyhole.cli import main
from keyhole.errors import UsageError
from keyhole.measure import Noise, Signature
from keyhole.oracles import Counted, FunctionOracle
from keyhole.report.curves import draw_curves
from keyhole.targets import open_target
from targets import Random

SMALL = "demo:single-head?width=4"
FEW = ["round:3", "noise:1e-3+clip:1", "budget:10"]
BOX = """
import numpy as np
import keyhole as kh

rng = np.random.default_rng(3)
HEAD = kh.SingleHead(rng.standard_normal((4, 4)), rng.standard_normal(4))
asked = 0

def head():
    return kh.FunctionOracle(HEAD, width=4, name="head")

def two():
    other = kh.SingleHead(np.eye(4), np.ones(4))
    return kh.FunctionOracle(lambda x: HEAD(x) + other(x), width=4)

def stopped():
    def answer(tokens):
        global asked
        asked += len(tokens)
        if asked > 60:
            asked = 0
            raise KeyboardInterrupt
        return HEAD(tokens)
    return kh.FunctionOracle(answer, width=4, batch_limit=4, name="stopped")
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command in an empty folder: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("box.py").write_text(BOX)

    def command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        said = capsys.readouterr()
        code = caught.value.code
        assert isinstance(code, int)
        return code, said.out, said.err

    return command


def small_oracle(seed: int = 0) -> tuple[Counted, kh.SingleHead]:
    rng = np.random.default_rng(seed)
    head = kh.SingleHead(rng.standard_normal((4, 4)), rng.standard_normal(4))
    return Counted(FunctionOracle(head, width=4, name=f"head {seed}")), head


# --- defences -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "defence", "same"),
    [
        ("none", Defence(), "none"),
        ("round:3", Defence(decimals=3), "round:3"),
        ("round:-2", Defence(decimals=-2), "round:-2"),
        ("noise:1e-3", Defence(noise=1e-3), "noise:0.001"),
        ("bfloat16", Defence(dtype="bfloat16"), "bfloat16"),
        ("clip:2 + float32", Defence(clip=2.0, dtype="float32"), "float32+clip:2"),
        ("clip:1e300", Defence(clip=1e300), "clip:1e300"),
        ("budget:5000+clip:1+round:2+noise:3", Defence(1.0, 3.0, None, 2, 5000), "noise:3+round:2+clip:1+budget:5000"),
    ],
)
def test_defences_are_read_and_written(text: str, defence: Defence, same: str) -> None:
    assert parse_defence(text) == defence
    assert defence.text == same
    assert parse_defence(same) == defence
    assert defence.words


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "possible: none"),
        ("rounded", "possible: none"),
        ("round", "possible: none"),
        ("round:", "for example round:3"),
        ("round:2.5", "for example round:3"),
        ("noise:-1", "for example noise:1e-3"),
        ("noise:nan", "for example noise:1e-3"),
        ("clip:0", "for example clip:1"),
        ("budget:0", "for example budget:5000"),
        ("float64", "possible: none"),
        ("float32:3", "possible: none"),
        ("none+clip:1", "possible: none"),
        ("clip:1+", "possible: none"),
        ("clip:1+clip:2", "keep one"),
        ("float32+bfloat16", "keep one"),
        ("float32+round:3", "keep float32 or the rest"),
    ],
)
def test_malformed_defences_are_told(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        parse_defence(text)
    assert "\n" not in str(caught.value)


def test_defences_change_answers_and_say_so(rng: Random) -> None:
    oracle = open_target(SMALL).oracle
    tokens = 0.1 * rng.standard_normal((50, 2, 4))
    true = oracle(tokens)

    def behind(text: str) -> tuple[Signature, np.ndarray]:
        defended = parse_defence(text).around(oracle, seed=5)
        assert defended.name == f"{oracle.name} | {parse_defence(text).text}"
        return defended.signature, defended(tokens) - true

    signature, error = behind("none")
    assert signature == oracle.signature
    assert not np.any(error)
    signature, error = behind("round:2")
    assert signature.noise == Noise.rounded(2)
    assert 0 < np.max(np.abs(error)) <= 0.005
    signature, error = behind("bfloat16")
    assert signature.noise == Noise.dtype("bfloat16")
    assert np.all(np.abs(error) <= 2.0**-8 * np.abs(true))
    signature, error = behind("noise:0.1+clip:3")
    assert signature.noise == Noise.gaussian(0.1)
    assert signature.max_norm == 3.0
    assert 0.05 < np.std(error) < 0.2
    signature, _ = behind("noise:1+round:2")
    assert signature.noise.kind == "gaussian"
    assert signature.noise.scale == pytest.approx(1, rel=1e-4)
    signature, error = behind("noise:1e-4+round:2")
    assert signature.noise == Noise.bounded(0.005 + 5e-4)
    assert np.max(np.abs(error)) <= 0.0055


def test_clipping_is_real_and_known() -> None:
    seen = []
    inner = FunctionOracle(lambda tokens: seen.append(tokens) or tokens[:, 0, 0], width=3)
    defended = parse_defence("clip:2").around(inner)
    with pytest.raises(UsageError, match="max_norm"):
        defended(np.full((1, 1, 3), 9.0))
    server = defended.inner  # type: ignore[attr-defined]
    server.inner(np.stack([np.full((1, 3), 9.0), np.full((1, 3), 0.1)]))
    np.testing.assert_allclose(np.linalg.norm(seen[0], axis=-1)[:, 0], [2.0, 0.1 * 3**0.5])
    tight = FunctionOracle(lambda tokens: tokens[:, 0, 0], width=3, max_norm=1.0)
    assert parse_defence("clip:2").around(tight).signature.max_norm == 1.0


def test_a_limit_is_real() -> None:
    oracle, truth = small_oracle()
    rows = audit(oracle, ["budget:10"], [1, 4], truth=truth).of("budget:10")
    assert [(row.budget, row.queries <= 10) for row in rows] == [(10, True)]
    assert rows[0].outcome == "BUDGET_EXHAUSTED"
    with pytest.raises(kh.KeyholeError, match="10 left"):
        parse_defence("budget:10").around(oracle)(np.zeros((11, 1, 4)))


def test_the_common_defences_are_all_different() -> None:
    defences = default_defences(20)
    assert len(set(defences)) == len(defences) >= 8
    assert Defence(limit=10) in defences


# --- floors ---------------------------------------------------------------------------------------------------


def geometry(d: int = 4, norm: float = 1.0) -> Geometry:
    head = kh.SingleHead(np.eye(d), np.full(d, 2.0 / d**0.5))
    return Geometry.of(head, Signature(width=d, max_norm=norm if math.isfinite(norm) else None))


def test_counting_bounds_are_those_of_a_recovery() -> None:
    for text in ("", "&rank=2", "&outputs=3", "&score_bias=1&output_bias=1", "&rank=1&outputs=2"):
        target = open_target(f"demo:single-head?width=6{text}")
        assert counting_bound(target.truth) == kh.recover(target.oracle).stats.counting_bound


def test_the_gaussian_floor_is_the_universal_bound() -> None:
    """s/(B·c·√n)·√(1/(1+x)² + (d−1)²/(1−x²)) per entry, x the best of a grid; relative to ‖W‖ = 2 here."""
    x = np.linspace(-0.999, 0.999, 20001)
    least = np.sqrt(np.min(1 / (1 + x) ** 2 + 9 / (1 - x**2)))
    expected = 0.01 / (0.5**3 * 2 / 2 * 10) * least * 4 / 2
    assert gaussian_floor(0.01, 100, geometry(norm=0.5)) == pytest.approx(expected, rel=1e-6)
    assert gaussian_floor(0.01, 400, geometry(norm=0.5)) == pytest.approx(expected / 2)
    assert gaussian_floor(0.01, 100, geometry(norm=math.inf)) == 0.0
    assert gaussian_floor(0.01, 1, geometry(d=1)) == pytest.approx(0.01 * 0.5)


def test_other_floors() -> None:
    there = geometry()
    assert there.bound == 20
    assert bounded_floor(0.1, there) == pytest.approx(2 * 0.1 / (2 * 2))
    assert rounding_floor(0.1, 20, there) == bounded_floor(0.1, there)
    assert rounding_floor(0.1, 60, there) == bounded_floor(0.1, there) / 4
    assert counting_floor(5, 20) == pytest.approx(0.75**0.5)
    assert counting_floor(20, 20) == counting_floor(21, 20) == 0.0
    assert floor(Noise.exact(), 100, there) == floor(Noise.dtype("bfloat16"), 100, there) == 2.0**-52
    assert floor(Noise.gaussian(1e9), 100, there) == floor(Noise.exact(), 0, there) == 1.0
    assert floor(Noise.bounded(0.1), 100, geometry(norm=math.inf)) == 2.0**-52
    everywhere = replace(there, positions=math.inf)
    assert floor(Noise.gaussian(1.0), 1, everywhere) == 2.0**-52


def test_no_attack_is_below_its_floor(fresh_seed: int) -> None:
    found = audit(f"demo:single-head?width=6&seed={fresh_seed}", ["noise:1e-2+clip:1", "budget:21"], [2, 8])
    for row in found.rows:
        # The bound holds on average over the noise; at 36 entries a run is within a third of its expectation.
        assert row.error >= 0.5 * row.floor or row.floor <= 2.0**-52


# --- sentences ------------------------------------------------------------------------------------------------


def made(**errors: list[tuple[int, float, float]]) -> Audit:
    """An audit of bound 100 with (queries, error, floor) by defence."""
    rows = [
        Row(
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
        ([(200, 0.5, 0), (4000, 1e-9, 0)], "costs an attacker at most 20 × the queries and stops nothing"),
        ([(400, 0.005, 0), (800, 1e-4, 5e-5)], "come within 1 % for at most 2 × the queries; an error of 1.0e-04"),
        ([(200, 1e-3, 0), (800, 1e-4, 5e-5)], "come within 1 % at no cost; an error of 1.0e-04 remains after 8 ×"),
        ([(800, 1e-4, 5e-5)], "near the floor of 5.0e-05 under every attack."),
        ([(800, 1e-4, 1e-9)], "The floor is at 1.0e-09, so a better attack may do more."),
        ([(200, 1.0, 0), (6400, 0.03, 0.02)], "leaves an error of 3 % after 64 × the counting bound, which is near"),
        ([(200, 1.0, 0), (6400, 1.0, 0.02)], "leaves an error of 100 % after 64 ×"),
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


def test_processes_find_the_same(tmp_path: Path) -> None:
    alone = audit(SMALL, ["round:3", "clip:1"], [1, 2])
    together = audit(SMALL, ["round:3", "clip:1"], [1, 2], jobs=2, folder=tmp_path)
    strip = [replace(row, seconds=0.0) for row in alone.rows]
    assert [replace(row, seconds=0.0) for row in together.rows] == strip
    assert together.new_queries == alone.new_queries


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"budgets": []}, "positive multiples"),
        ({"budgets": [0]}, "positive multiples"),
        ({"budgets": [math.inf]}, "positive multiples"),
        ({"most": 5}, "fewer than the least budget"),
        ({"jobs": 0}, "jobs"),
        ({"defences": "round:3"}, "list of texts"),
        ({"defences": ["rund:3"]}, "possible: none"),
    ],
)
def test_wrong_arguments_are_told(change: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        audit(SMALL, **change)  # type: ignore[arg-type]


def test_an_oracle_cannot_travel() -> None:
    with pytest.raises(UsageError, match="named by text"):
        audit(small_oracle()[0], jobs=2)


# --- the command ----------------------------------------------------------------------------------------------


def test_the_command_says_writes_and_resumes(run: Run) -> None:
    options = ["audit", "python:box.py:head", "--defence", "round:3", "--multiples", "1,2", "--out", "found"]
    code, out, err = run(*options)
    assert (code, err) == (0, "")
    for said in (
        "what its owner recovers of it",
        "round:3",
        "1 ×",
        "· No defence: ",
        "found/audit.json",
        "found/audit.png",
    ):
        assert said in out
    assert Path("found/audit.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(Path("found/audit.json").read_text())["rows"]) == 4
    code, out, _ = run(*options, "--json")
    said = json.loads(out)
    assert code == 0
    assert said["new_queries"] == 0
    assert said["counting_bound"] == 20
    assert said["rows"][1]["error"] < 1e-12
    assert set(said["files"]) == {"json", "png"}
    assert run("audit", SMALL, "--defence", "clip:1", "--multiples", "2", "-q") == (0, "", "")


def test_the_command_without_matplotlib_says_how_to_get_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, _ = run("audit", SMALL, "--defence", "clip:1", "--multiples", "2", "--out", "found")
    assert code == 0
    assert "pip install 'keyhole[report]'" in out


def test_an_interrupt_keeps_what_is_done_and_says_how_to_go_on(run: Run) -> None:
    options = ["audit", "python:box.py:stopped", "--defence", "round:3", "--multiples", "1,2"]
    code, out, err = run(*options, "--out", "found")
    assert (code, out) == (130, "")
    assert "kept in found. To go on: keyhole audit python:box.py:stopped --defence round:3 --multiples 1,2" in err
    again = shlex.split(err.partition("To go on: keyhole ")[2])
    for _ in range(5):
        code, out, err = run(*again, "--json")
        if code != 130:
            break
    assert code == 0
    assert len(json.loads(out)["rows"]) == 4
    code, _, err = run(*options)
    assert code == 130
    assert "--out FOLDER" in err


def test_a_box_that_cannot_be_recovered_exits_with_1(run: Run) -> None:
    code, out, err = run("audit", "python:box.py:two")
    assert (code, out) == (1, "")
    assert "even without a defence" in err
    assert "WRONG_FAMILY" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([SMALL, "--defence", "rund:3"], "possible: none"),
        ([SMALL, "--multiples", "1,two"], "--multiples 1,2,4"),
        ([SMALL, "--multiples", "0"], "positive multiples"),
        ([SMALL, "--budget", "3"], "fewer than the least budget"),
        ([SMALL, "--jobs", "0"], "--jobs"),
        ([SMALL, "--out", "box.py"], "name another one with --out"),
        (["nonsense"], "a target looks like"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(run: Run, arguments: list[str], said: str) -> None:
    code, out, err = run("audit", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("keyhole: ")
    assert err.count("\n") == 1
    assert said in err


def test_help_has_an_example(run: Run) -> None:
    code, out, _ = run("audit", "--help")
    assert code == 0
    assert "keyhole audit file:params.safetensors" in out
