"""Run folders: those of earlier versions are read and resumed, and none is overwritten by something else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from keyhole.errors import FileError, UsageError
from keyhole.journal import SCHEMA_VERSION
from keyhole.live import Runs
from keyhole.report.build import write_report
from keyhole.runs.reader import SavedAudit, SavedDiagnosis, SavedModel, SavedRun, SavedVerdict, read_folder
from keyhole.runs.store import AUDIT, FORMATS, RESERVATION, RUN, VERSION, reserve_folder
from support.commands import Run, one_line

OLD = Path(__file__).parents[1] / "data" / "runs_of_0_1"  # written by the first version, pictures and reports left out
SMALL = "demo:single-head?width=4"
BOX = """
import keyhole as kh

def stopped():
    def answer(tokens):
        raise KeyboardInterrupt
    return kh.FunctionOracle(answer, width=4, name="stopped")
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Folders that may be written to."""
    return Path(shutil.copytree(OLD, tmp_path / "old"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("run", SavedRun),
        ("exhausted", SavedRun),
        ("learned", SavedRun),
        ("audit", SavedAudit),
        ("model", SavedModel),
        ("verification", SavedVerdict),
        ("diagnosis", SavedDiagnosis),
        ("live/single-head-done", SavedRun),
        ("live/single-head-exhausted", SavedRun),
    ],
)
def test_old_folders_are_read_and_reported(old: Path, name: str, kind: type) -> None:
    saved = read_folder(old / name)
    assert isinstance(saved, kind)
    path, report = write_report(old / name)
    assert path.stat().st_size > 10_000
    assert report.headline.word
    if isinstance(saved, SavedRun) and saved.result.certified:
        assert saved.distance is not None
        assert saved.distance < 1e-9
        assert saved.result.params is not None
        assert saved.result.certificate.radius is not None


def test_an_old_journal_answers_what_it_was_asked(run: Run, old: Path) -> None:
    """Value queries have not changed. Directions and held-out queries have: they are asked once, and kept beside."""
    words = ["recover", SMALL, "--journal", str(old / "run/answers.db"), "--json"]
    code, out, _ = run(*words, "--out", str(old / "run"))
    said = json.loads(out)
    asked = said["queries"] + said["heldout_queries"]
    assert (code, said["new_queries"], said["stages"]["value"]) == (0, asked - 5, 5)
    code, out, _ = run(*words)
    assert (code, json.loads(out)["new_queries"]) == (0, 0)


def test_an_old_audit_goes_on(run: Run, old: Path) -> None:
    words = ["audit", SMALL, "--defence", "round:3", "--multiples", "2,4", "--out", str(old / "audit"), "--json"]
    code, out, _ = run(*words)
    assert (code, json.loads(out)["new_queries"]) == (0, 0)
    assert run(*[word.replace("2,4", "2,4,8") for word in words])[0] == 0  # more of the same audit


def test_old_runs_of_the_page_are_found_and_resumed(old: Path) -> None:
    runs = Runs(old / "live", reports=False)
    assert {run.id: run.state for run in runs.all()} == {"single-head-done": "done", "single-head-exhausted": "done"}
    run = runs.resume("single-head-exhausted", 200)
    assert run.wait(60)
    assert run.snapshot()["ending"]["result"]["certified"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_newer_version_is_refused_with_its_number_and_the_remedy(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(json.dumps({"format": FORMATS[name], "version": VERSION + 1, "keyhole": "9.9"}))
    with pytest.raises(FileError, match=rf"version {VERSION + 1}, by Keyhole 9.9.*upgrade"):
        read_folder(tmp_path)


def test_a_journal_of_another_version_is_refused(run: Run, old: Path) -> None:
    import sqlite3  # noqa: PLC0415

    with sqlite3.connect(old / "run/answers.db") as database:
        database.execute("UPDATE meta SET value = '7' WHERE key = 'schema'")
    database.close()
    code, _, err = run("recover", SMALL, "--journal", str(old / "run/answers.db"))
    assert code == 2
    assert f"'7', not '{SCHEMA_VERSION}'" in err
    assert "Name another file" in err


# --- to whom a folder belongs -------------------------------------------------------------------------------------

OTHERS = [
    (["recover", f"{SMALL}&seed=1"], "target"),
    (["recover", SMALL, "--seed", "1"], "seed"),
    (["recover", SMALL, "--method", "single-head"], "method"),
    (["recover", SMALL, "--noise", "rounded:6"], "noise"),
    (["learn", "demo:layer?d=3&k=3&m=1&n=200"], "target"),
    (["audit", f"{SMALL}&seed=1"], "target"),
    (["diagnose", f"{SMALL}&seed=1"], "target"),
]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("words", "differs"), OTHERS, ids=lambda each: " ".join(each) if isinstance(each, list) else ""
)
def test_the_folder_of_another_run_is_refused(run: Run, old: Path, words: list[str], differs: str) -> None:
    before = content(old / "run")
    code, out, err = run(*words, "--out", str(old / "run"))
    assert (code, out) == (2, "")
    assert one_line(err)
    assert f"another {differs}" in err
    assert "--force" in err
    assert "--out" in err
    assert content(old / "run") == before


def test_the_same_run_goes_on_in_its_folder(run: Run, old: Path) -> None:
    folder = str(old / "exhausted")
    assert run("recover", SMALL, "--out", folder, "--budget", "4000", "-q")[0] == 0  # a larger budget is the same run
    assert run("diagnose", SMALL, "--out", folder, "-q")[0] == 0  # another question about the same box
    assert run("recover", SMALL, "--out", folder, "-q")[0] == 0
    for _ in range(2):
        assert run("demo", "--width", "4", "-q")[0] == 0
    code, _, err = run("demo", "--width", "5", "-q")
    assert code == 2
    assert "width=4" in err


def test_force_overwrites(run: Run, old: Path) -> None:
    code, _, _ = run("recover", f"{SMALL}&seed=1", "--out", str(old / "run"), "--force", "--json")
    assert code == 0
    assert json.loads((old / "run/run.json").read_text())["settings"]["target"] == f"{SMALL}&seed=1"
    assert not (old / "run" / RESERVATION).exists()
    Path("notes").mkdir()
    Path("notes/mine.txt").write_text("mine")
    for words in (["recover", SMALL], ["learn", "demo:layer?d=3&k=3&m=1&n=200", "--heads", "1"], ["diagnose", SMALL]):
        code, _, err = run(*words, "--out", "notes", "-q")
        assert code == 2
        assert "mine.txt" in err
        assert "--force" in err
    assert run("recover", SMALL, "--out", "notes", "--force", "-q")[0] == 0
    assert Path("notes/mine.txt").read_text() == "mine"


def test_a_journal_may_lie_in_the_folder(run: Run) -> None:
    Path("both").mkdir()
    assert run("recover", SMALL, "--journal", "both/answers.db", "--budget", "6", "-q")[0] == 1
    assert run("recover", SMALL, "--journal", "both/answers.db", "--out", "both", "-q")[0] == 0


def test_an_interrupted_run_keeps_its_folder(run: Run) -> None:
    words = ["recover", "python:box.py:stopped", "--journal", "kept/answers.db", "--out", "kept"]
    assert run(*words)[0] == 130
    assert (Path("kept") / RESERVATION).exists()
    code, _, err = run("recover", SMALL, "--out", "kept")
    assert code == 2
    assert "an unfinished run" in err
    assert run(*words)[0] == 130
    assert run("recover", SMALL, "--out", "kept", "--force", "-q")[0] == 0
    assert not (Path("kept") / RESERVATION).exists()


def test_a_damaged_record_can_be_made_again(run: Run, old: Path) -> None:
    (old / "run" / RUN).write_text("{")
    assert run("recover", SMALL, "--out", str(old / "run"), "-q")[0] == 0


def test_a_damaged_record_of_another_command_is_not_written_over(run: Run, old: Path) -> None:
    (old / "run" / RUN).write_text("{")
    (old / "run" / AUDIT).write_text("{}")
    before = content(old / "run")
    code, _, err = run("audit", SMALL, "--out", str(old / "run"))
    assert code == 2
    assert f"damaged {RUN}" in err
    assert "--force" in err
    assert content(old / "run") == before


def test_a_folder_that_was_not_used_is_left_empty(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with pytest.raises(ZeroDivisionError), reserve_folder(folder, RUN, {"target": "a"}):
        raise ZeroDivisionError
    assert list(folder.iterdir()) == []
    with reserve_folder(None, RUN, {}):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises((FileError, UsageError), match="file"), reserve_folder(tmp_path / "file", RUN, {"target": "a"}):
        pass
