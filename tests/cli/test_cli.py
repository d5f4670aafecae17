"""The commands as people and scripts meet them: words, JSON, files and exit codes."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import keyhole as kh
from keyhole.cli.bench.growth import SERIES
from keyhole.cli.options import fold_target_options
from keyhole.methods import METHODS
from keyhole.optional import KEYHOLE_VERSION
from keyhole.recovery import Outcome
from keyhole.runs import folders
from keyhole.runs.settings import Settings, parse_option
from keyhole.runs.store import plain
from keyhole.targets import random_multi_head
from support.commands import Run, one_line

SMALL = "demo:single-head?width=8"
BOX = """
import numpy as np
import keyhole as kh

print("a box that talks")
rng = np.random.default_rng(3)
HEAD = kh.SingleHead(rng.standard_normal((8, 8)), rng.standard_normal(8))
asked = 0

def head():
    return HEAD

def placed():
    return kh.FunctionOracle(lambda x: HEAD(x * (1.0 + np.arange(x.shape[1])[:, None])), width=8)

def mute():
    return kh.SingleHead(np.eye(8), np.zeros(8))

def still():
    return kh.FunctionOracle(lambda x: np.full(len(x), 2.5), width=8)

def rounded():
    return kh.FunctionOracle(lambda x: np.round(HEAD(x), 4), width=8)

def failing():
    return kh.FunctionOracle(lambda x: x[:, 0, 0] * np.nan, width=8)

def stopped():
    def answer(tokens):
        global asked
        asked += len(tokens)
        if asked > 40:
            raise KeyboardInterrupt
        return HEAD(tokens)
    return kh.FunctionOracle(answer, width=8, batch_limit=8, name="stopped")
"""


def test_demo_says_what_it_found_and_where_it_lies(run: Run) -> None:
    code, out, err = run("demo", "--width", "8")
    assert (code, err) == (0, "")
    for said in (
        "width 8",
        "CERTIFIED",
        "80 where 72 is the fewest possible (1.111 ×)",
        "120 fresh answers",
        "distance",
    ):
        assert said in out
    for name in ("params.safetensors", "radius.safetensors", "run.json", "recovery.png"):
        assert str(Path("demo-run", name)) in out
        assert Path("demo-run", name).stat().st_size > 0
    assert Path("demo-run/recovery.png").read_bytes().startswith(b"\x89PNG")
    assert "\x1b" not in out


def test_demo_without_matplotlib_says_how_to_get_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("demo", "--width", "4")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, _ = run("demo", "--width", "4")
    assert code == 0
    assert "pip install 'keyhole[report]'" in out
    assert Path("demo-run/params.safetensors").exists()
    assert not Path("demo-run/recovery.png").exists()  # the earlier run's is not left beside other parameters


@pytest.mark.parametrize("options", [["--rank", "2"], ["--norm", "0"], ["--width", "1"], ["--norm", "1e-9"]])
def test_demo_draws_special_heads(run: Run, options: list[str]) -> None:
    code, out, _ = run("demo", "--width", "6", "--seed", "3", "--out", "else/where", "--json", *options)
    assert code == 0
    said = json.loads(out)
    assert said["distance"] < 1e-12
    assert Path(said["files"]["picture"]).stat().st_size > 10_000


def test_recover_writes_what_can_be_loaded_and_recovered_again(run: Run) -> None:
    assert run("recover", SMALL, "--out", "first", "-q") == (0, "", "")
    code, out, err = run("recover", "file:first/params.safetensors", "--out", "second", "--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert said["certified"]
    assert said["target"] == "file:first/params.safetensors"
    assert said["distance"] < 1e-13
    assert set(said["files"]) == {"params", "radius", "truth", "run", "report"}
    assert kh.distance(kh.load("first/params.safetensors"), kh.load("second/params.safetensors")) < 1e-13
    record = json.loads(Path("second/run.json").read_text())
    assert (record["format"], record["version"]) == ("keyhole-run", 1)
    assert record["result"]["queries"] == said["queries"] == 80
    assert record["box"].startswith("file:sha256:")
    answers, predictions = (np.asarray(record["heldout"][name]) for name in ("answers", "predictions"))
    usual = np.abs(answers) < 100  # of long tokens logits are lost in rounding
    assert np.mean(usual) > 0.75
    np.testing.assert_allclose(answers[usual], predictions[usual], rtol=1e-7, atol=1e-12)
    assert not list(Path("second").glob(".*"))


def test_recover_without_a_folder_says_so(run: Run) -> None:
    code, out, _ = run("recover", SMALL)
    assert code == 0
    assert "--out FOLDER keeps the parameters" in out
    assert [path.name for path in Path().iterdir()] == ["box.py"]


def test_what_a_box_prints_stays_off_standard_output(run: Run) -> None:
    code, out, err = run("recover", "python:box.py:head", "--json")
    assert code == 0
    assert json.loads(out)["box"].startswith("the box of width 8")
    assert err == "a box that talks\n"


def test_options_reach_the_method_and_the_oracle(run: Run) -> None:
    code, out, _ = run(
        "recover", SMALL, "--max-norm", "1", "--heldout", "5", "--method", "single-head",
        "--option", "entrywise=false", "--seed", "9", "--json",
    )  # fmt: skip
    assert code == 0
    assert json.loads(out)["heldout_queries"] == 5


def test_a_spent_budget_resumes_with_the_command_it_names(run: Run) -> None:
    code, out, err = run("recover", SMALL, "--budget", "40", "--journal", "run.db", "--out", "run", "--json")
    assert (code, err) == (1, "")
    first = json.loads(out)
    assert (first["outcome"], first["queries"], first["new_queries"]) == ("BUDGET_EXHAUSTED", 40, 40)
    assert first["remedy"] == Outcome.BUDGET_EXHAUSTED.value
    resume = shlex.split(first["resume"])
    assert resume[-2:] == ["--budget", "80"]
    code, out, _ = run(*resume[1:-2], "--budget", "200", "--json")
    assert code == 0
    second = json.loads(out)
    assert second["queries"] + second["heldout_queries"] - second["new_queries"] == 40
    assert second["resume"] is None
    assert run("recover", SMALL, "--out", "plain", "-q")[0] == 0
    # Not bit for bit: a cut batch reaches the box in two pieces, and BLAS rounds rows by where they stand.
    assert kh.distance(kh.load("run/params.safetensors"), kh.load("plain/params.safetensors")) < 1e-13


def test_a_failure_is_told_to_people_too(run: Run) -> None:
    code, out, err = run("recover", SMALL, "--budget", "40", "--journal", "run.db")
    assert (code, err) == (1, "")
    assert "BUDGET_EXHAUSTED: the budget of 40 queries" in out
    assert "Raise it and run again" in out
    assert f"keyhole recover '{SMALL}' --journal run.db --budget 80\n" in out
    code, out, err = run("recover", SMALL, "--budget", "40", "-q")
    assert (code, out) == (1, "")
    assert one_line(err)


@pytest.mark.parametrize(
    ("factory", "outcome"), [("placed", "WRONG_FAMILY"), ("mute", "NOT_IDENTIFIABLE"), ("failing", "ORACLE_FAILED")]
)
def test_a_box_that_cannot_be_recovered_exits_with_1(run: Run, factory: str, outcome: str) -> None:
    code, out, _ = run("recover", f"python:box.py:{factory}", "--json", "--out", "run")
    assert code == 1
    said = json.loads(out)
    assert said["outcome"] == outcome
    assert said["remedy"] == Outcome[outcome].value
    assert json.loads(Path("run/run.json").read_text())["result"]["outcome"] == outcome
    code, out, _ = run("recover", f"python:box.py:{factory}")
    assert code == 1
    assert outcome in out
    assert "remedy" in out


def test_constant_answers_are_called_that(run: Run) -> None:
    code, out, _ = run("recover", "python:box.py:still", "--json")
    assert code == 1
    said = json.loads(out)
    assert said["outcome"] == "NOT_IDENTIFIABLE"
    assert "its answers are constant" in said["message"]
    assert said["message"].endswith("so that there is nothing to recover")
    code, out, _ = run("diagnose", "python:box.py:still")
    assert code == 1
    assert "the same, 2.5" in out


def test_every_command_ends_with_1_where_the_box_fails(run: Run) -> None:
    run("demo", "--width", "8", "--out", "demo", "-q")
    for command in (["recover"], ["diagnose"], ["audit", "--multiples", "1"], ["verify"]):
        params = ["demo/params.safetensors"] if command == ["verify"] else []
        code, _, err = run(command[0], "python:box.py:failing", *params, *command[1:], "-q")
        assert code == 1, command
        assert one_line(err.removeprefix("a box that talks\n")), command
        assert "nan or inf" in err, command


def test_diagnose_knows_residuals_and_asks_whether_a_file_was_meant(run: Run) -> None:
    code, out, _ = run("diagnose", "residual", "--json")
    assert (code, json.loads(out)["family"]) == (0, "residual")
    assert any("every head" in claim["quantity"] for claim in json.loads(out)["claims"])
    code, _, err = run("diagnose", "box.py")
    assert (code, one_line(err)) == (2, True)
    assert "did you mean file:box.py?" in err


def test_verify_finds_rounding_out_and_measures_noise(run: Run) -> None:
    run("recover", "python:box.py:head", "--out", "run", "-q")
    code, out, _ = run("verify", "python:box.py:rounded", "run/params.safetensors")
    assert code == 0
    assert "SAME: up to rounding to 4 decimals" in " ".join(out.split())
    code, out, _ = run("verify", "python:box.py:rounded", "run/params.safetensors", "--noise", "measure", "--json")
    said = json.loads(out)
    assert (code, said["noise"]) == (0, "rounded to 4 decimals, in some direction")
    assert said["queries"] > 64
    code, out, _ = run("verify", "python:box.py:rounded", "run/params.safetensors", "--noise", "rounded:4", "--json")
    assert (code, json.loads(out)["noise"]) == (0, None)


def test_an_audit_is_told_how_the_box_errs(run: Run) -> None:
    few = ["--multiples", "1,4", "--defence", "none", "--json"]
    code, out, _ = run("audit", "python:box.py:rounded", *few, "--noise", "rounded:4", "--max-seconds", "30")
    assert code == 0
    assert min(row["error"] for row in json.loads(out)["rows"]) < 1e-3


@pytest.mark.parametrize("command", ["recover", "learn", "audit", "verify", "diagnose", "bench", "demo"])
def test_every_command_that_computes_has_a_limit(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "--max-seconds" in out


def test_a_limit_ends_a_recovery_and_the_next_command_raises_it(run: Run) -> None:
    arguments = ["recover", "demo:single-head?width=256", "--journal", "run.db", "--max-seconds", "0.001"]
    code, out, _ = run(*arguments, "--json")
    said = json.loads(out)
    assert (code, said["outcome"]) == (1, "TIME_EXHAUSTED")
    assert "--max-seconds 2" in said["resume"]
    assert run(*shlex.split(said["resume"])[1:], "--max-seconds", "60", "-q")[0] == 0


def test_folders_of_other_settings_are_told_in_words(run: Run) -> None:
    run("recover", SMALL, "--out", "run", "-q")
    code, _, err = run("recover", SMALL, "--out", "run", "--noise", "float32")
    assert code == 2
    assert "with another noise, left out and not 'float32'" in err


def test_a_failed_run_leaves_nothing_of_an_earlier_one(run: Run) -> None:
    run("recover", SMALL, "--out", "run", "-q")
    run("recover", "python:box.py:mute", "--out", "run", "--force", "-q")
    assert sorted(path.name for path in Path("run").iterdir()) == ["report.html", "run.json"]
    assert "Not identifiable" in Path("run/report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["recover", "demo:single-head?witdh=3"], "possible: width"),
        (["recover", "demo:single-head", "--widht", "3"], "--width"),
        (["recover", "nonsense"], "a target looks like"),
        (["recover", "file:none.safetensors"], "No such file"),
        (["recover", "file:box.py"], "not a readable safetensors file"),
        (["recover", SMALL, "--method", "guess"], "known: auto"),
        (["recover", SMALL, "--option", "sped=3"], "entrywise"),
        (["recover", SMALL, "--option", "entrywise"], "NAME=VALUE"),
        (["recover", SMALL, "--option", "seed=3"], "no option of a method"),
        (["recover", SMALL, "--budget", "-1"], "--budget"),
        (["recover", SMALL, "--budget", "many"], "--budget"),
        (["recover", SMALL, "--heldout", "0"], "--heldout"),
        (["recover", SMALL, "--max-norm", "-1"], "max_norm"),
        (["recover", SMALL, "--journal", "none/run.db"], "journal"),
        (["recover", SMALL, "--journal", "box.py"], "name another file"),
        (["recover", SMALL, "--out", "box.py"], "name another one with --out"),
        (["recover", SMALL, "--out", "/proc/run"], "name another one with --out"),
        (["recover", SMALL, "--nonsense"], "--help"),
        (["recover"], "TARGET"),
        (["frobnicate"], "frobnicate"),
        (["demo", "--width", "0"], "from 1 to 8192"),
        (["demo", "--norm", "nan"], "norm is a number"),
        (["demo", "--rank", "99"], "rank=99"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(run: Run, arguments: list[str], said: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert one_line(err)
    assert said in err
    assert Path("box.py").read_text() == BOX


def test_a_journal_of_another_box_is_refused_and_kept(run: Run) -> None:
    run("recover", SMALL, "--journal", "run.db", "-q")
    before = Path("run.db").read_bytes()
    code, _, err = run("recover", f"{SMALL}&seed=1", "--journal", "run.db")
    assert code == 2
    assert one_line(err)
    assert "another box" in err
    assert Path("run.db").read_bytes() == before


def test_a_disk_that_fills_up_is_told_in_words(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    run("recover", SMALL, "--out", "run", "-q")
    before = {path.name: path.read_bytes() for path in Path("run").iterdir()}
    monkeypatch.setattr(folders.os, "replace", full)
    code, _, err = run("recover", SMALL, "--out", "other")
    assert code == 2
    assert one_line(err)
    assert "No space left" in err
    assert list(Path("other").iterdir()) == []
    monkeypatch.setattr(Path, "write_text", full)
    run("recover", f"{SMALL}&seed=1", "--out", "run", "--force")
    assert {path.name: path.read_bytes() for path in Path("run").iterdir()} == before


def test_an_interrupt_says_what_is_kept_and_how_to_go_on(run: Run) -> None:
    target = "python:box.py:stopped"
    code, out, err = run("recover", target, "--journal", "run.db", "--seed", "4")
    assert (code, out) == (130, "")
    assert err.endswith(f"kept in run.db. To resume: keyhole recover {target} --journal run.db --seed 4\n")
    for _ in range(5):
        code, out, _ = run("recover", target, "--journal", "run.db", "--seed", "4", "--json")
        if code != 130:
            break
    assert code == 0
    said = json.loads(out)
    assert said["queries"] + said["heldout_queries"] > said["new_queries"]
    code, _, err = run("recover", target)
    assert code == 130
    assert "--journal FILE" in err


def test_version_and_help(run: Run) -> None:
    assert run("--version") == (0, f"keyhole {KEYHOLE_VERSION}\n", "")
    for arguments, said in [(["--help"], "keyhole demo"), (["demo", "--help"], "keyhole demo --width 64 --rank 4")]:
        code, out, _ = run(*arguments)
        assert code == 0
        assert said in out
    code, out, _ = run("recover", "--help")
    assert "keyhole recover python:box.py:make" in out
    code, out, _ = run()
    assert code == 2
    assert "recover" in out


def test_the_module_runs_as_a_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "keyhole", "recover", SMALL, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert json.loads(done.stdout)["certified"]
    assert done.stderr == ""


def test_a_terminal_that_has_no_such_letters_gets_those_that_people_type(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "keyhole", "recover", SMALL]
    plain = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(command, capture_output=True, check=True, cwd=tmp_path, env=plain)
    assert done.stderr == b""
    assert b" x)" in done.stdout  # queries over the fewest possible, ×
    assert b" x 10^-" in done.stdout


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=true", True),
        ("a=False", False),
        ("a=3", 3),
        ("a=1e-3", 1e-3),
        ("a=fast", "fast"),
        ("a=b=c", "b=c"),
        ("a=", ""),
    ],
)
def test_options_are_read_as_what_they_look_like(text: str, value: object) -> None:
    name, read = parse_option(text)
    assert name == "a"
    assert read == value
    assert type(read) is type(value)


def test_a_resume_command_names_everything_that_matters() -> None:
    settings = Settings("file:a b", "single-head", 9, Path("j"), 2, 3, 0.5, "rounded:3", {"entrywise": True}, Path("o"))
    words = shlex.split(settings.command(18))
    assert words[:3] == ["keyhole", "recover", "file:a b"]
    assert " ".join(words[3:]) == (
        "--method single-head --journal j --seed 2 --heldout 3 --max-norm 0.5 --noise rounded:3 --out o "
        "--option entrywise=true --budget 18"
    )


def test_anything_becomes_plain_data() -> None:
    value = {"a": np.float64("nan"), 1: (np.arange(2), np.bool_(True)), "p": Path("x"), "n": None}
    assert plain(value) == {"a": None, "1": [[0, 1], True], "p": "x", "n": None}


# --- verify and diagnose ----------------------------------------------------------------------------------------


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    random_multi_head(4, 8, seed=0).save(tmp_path / "layer.safetensors")
    return tmp_path / "layer.safetensors"


def test_verify_same_and_different(run: Run, layer: Path, tmp_path: Path) -> None:
    code, out, _ = run("verify", "demo:multi-head?heads=4&width=8", f"file:{layer}")
    assert code == 0
    assert "SAME" in out
    code, out, err = run("verify", "demo:multi-head?heads=4&width=8&seed=1", str(layer))
    assert code == 1
    assert "DIFFERENT" in out
    code, out, err = run("verify", "demo:multi-head?heads=4&width=8&seed=1", str(layer), "-q")
    assert (code, out) == (1, "")
    assert "DIFFERENT" in err
    journal = str(tmp_path / "answers.db")
    for new in (True, False):
        code, out, _ = run("verify", f"file:{layer}", str(layer), "--journal", journal, "--json", "--queries", "20")
        said = json.loads(out)
        assert code == 0
        assert said["conclusion"] == "same"
        assert said["queries"] <= 20
        assert (said["new_queries"] > 0) is new
    code, out, _ = run("verify", f"file:{layer}", str(layer), "--tolerance", "1e-3", "--noise", "rounded:6")
    assert "0.001 of its norm" in out


def test_verify_wrong_use(run: Run, layer: Path) -> None:
    for words in (
        ["verify", SMALL, "nothing.safetensors"],
        ["verify", "demo:multi-head?width=9", str(layer)],
        ["verify", SMALL, str(layer), "--tolerance", "3"],
        ["diagnose", "magic"],
        ["diagnose", "single-head", "--inputs", "magic"],
        ["diagnose", f"file:{layer}", "--max-length", "2"],
    ):
        code, out, err = run(*words)
        assert code == 2
        assert out == ""
        assert err.startswith("keyhole: ")


def test_diagnose(run: Run, layer: Path, tmp_path: Path) -> None:
    code, out, _ = run("diagnose", "single-head", "--inputs", "one-hot", "--max-length", "1")
    assert code == 0
    assert "hidden" in out
    code, out, _ = run("diagnose", "one-layer", "--json")
    assert all(set(claim) == {"quantity", "known", "reason"} for claim in json.loads(out)["claims"])
    code, out, _ = run("diagnose", f"file:{layer}")
    assert "all 4 heads can be known" in out
    rng = np.random.default_rng(0)
    inner = rng.standard_normal((4, 8))
    inner[1], inner[2] = -2 * inner[0], 0
    bias, score, value = rng.standard_normal(4), np.eye(8), np.zeros((8, 8))
    bias[1] = -2 * bias[0]
    net = kh.ReluNet(inner, bias, np.ones(4), np.asarray(0.0))
    kh.OneLayer(kh.SingleHead(score, value), net, residual=True).save(tmp_path / "whole.safetensors")
    code, out, _ = run("diagnose", f"file:{tmp_path / 'whole.safetensors'}")
    for said in ("2 of 4 neurons", "neurons 0 and 1 have the same kink", "neuron 2 has no kink", "do not show"):
        assert said in out
    code, out, _ = run("diagnose", f"file:{tmp_path / 'whole.safetensors'}", "--json")
    found = json.loads(out)
    assert found["same"] == [[0, 1]]
    assert found["logits_show"] is False
    assert found["witness"]["kind"] == "silent logits"


def test_bench_prints_what_recoveries_cost(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = ["demo:single-head?width=4", "demo:relu-net?width=3&neurons=2"]
    code, said, _ = run("bench", *boxes, "--runs", "2", "--json", "--out", "bench.json")
    assert code == 0
    rows = json.loads(said)["benchmarks"]
    assert json.loads(Path("bench.json").read_text())["benchmarks"] == rows
    kept = Path("bench.json").read_bytes()
    code, _, err = run("bench", *boxes, "--runs", "1", "--out", "bench.json")
    assert (code, Path("bench.json").read_bytes()) == (2, kept)
    assert "--force" in err
    assert run("bench", *boxes, "--runs", "1", "--out", "bench.json", "--force", "-q")[0] == 0
    assert Path("bench.json").read_bytes() != kept
    assert [row["target"] for row in rows] == boxes
    for row in rows:
        assert row["certified"] == row["runs"] == 2
        assert row["worst_distance"] < 1e-9
        assert row["ratio"] == row["queries"] / row["counting_bound"] >= 1
    monkeypatch.setenv("COLUMNS", "40")
    code, said, _ = run("bench", *boxes, "--runs", "1")
    assert code == 0
    assert "relu-net" in said
    assert "…" not in said  # nothing is cut, however narrow the terminal


def test_bench_prints_the_whole_table(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    small = [
        replace(each, target=each.target.replace("width=256", "width=16"), quick=(4, 6, 8)) for each in SERIES[:3:2]
    ]
    monkeypatch.setattr("keyhole.cli.bench.command.SERIES", small)
    monkeypatch.setattr("keyhole.cli.bench.command.USUAL", ("demo:single-head?width=4",))
    code, said, _ = run("bench", "--quick", "--json")
    found = json.loads(said)
    assert code == 0
    assert found["machine"]["cores"] >= 1
    assert [row["target"] for row in found["benchmarks"]][:2] == ["demo:single-head?width=4"] * 2
    assert [growth["sizes"] for growth in found["growth"]] == [[4, 6, 8], [4, 6, 8]]
    for growth, row in zip(found["growth"], (found["benchmarks"][1:4], found["benchmarks"][4:7]), strict=True):
        sizes, queries = np.log(growth["sizes"]), np.log([each["queries"] for each in row])
        assert growth["queries"] == pytest.approx(np.polyfit(sizes, queries, 1)[0])
    code, said, _ = run("bench", "--quick")
    assert code == 0
    assert "the learner's own time" in said
    assert run("bench", "demo:single-head?width=3", "--gpu", "--runs", "1")[0] in (0, 2)  # wrong use without a GPU


def test_bench_prints_a_table_of_the_repository_in_a_clone_of_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("bench", "mine")[0] == 2  # no such table: nor is it a target
    tables = tmp_path / "benchmarks" / "tables"
    tables.mkdir(parents=True)
    (tables / "mine.py").touch()
    (tables.parent / "__main__.py").write_text("import sys\nsys.exit(7 if sys.argv[1:] == ['mine'] else 1)\n")
    assert run("bench", "mine")[0] == 7


def test_bench_says_where_a_box_was_not_recovered(run: Run) -> None:
    code, said, _ = run("bench", "demo:single-head?width=4&max_norm=1&noise=10", "--runs", "1", "--json")
    (row,) = json.loads(said)["benchmarks"]
    assert (code, row["certified"]) == (1, 0)
    assert row["outcomes"] != ["CERTIFIED"]
    assert run("bench", "nothing", "--json")[0] == 2
    assert run("bench", "demo:single-head?width=2", "--runs", "1", "--out", "no/folder/x.json")[0] == 2


# --- how commands are called ------------------------------------------------------------------------------------------

EVERY = ["demo", "recover", "learn", "audit", "verify", "compress", "diagnose", "report", "serve", "bench"]


@pytest.mark.parametrize("command", EVERY)
def test_every_command_has_a_short_help_and_its_errors_point_there(run: Run, command: str) -> None:
    assert run(command, "-h")[0] == 0
    code, _, err = run(command, "demo:single-head", "--no-such-option")
    assert (code, one_line(err)) == (2, True)
    assert err.endswith(f"See keyhole {command} --help.\n")


OPTIONS = {
    "--noise": ["demo", "recover", "learn", "audit", "verify", "diagnose", "bench"],
    "--max-norm": ["demo", "recover", "audit", "verify", "diagnose", "bench"],
    "--budget": ["demo", "recover", "audit", "verify", "diagnose", "bench", "serve"],
    "--json": EVERY,
    "--quiet": EVERY,
    "--out": ["demo", "recover", "learn", "audit", "verify", "compress", "diagnose", "bench"],
    "--force": ["demo", "recover", "learn", "audit", "verify", "compress", "diagnose", "bench"],
}


def test_the_same_options_are_on_every_command(run: Run) -> None:
    for command in EVERY:
        listed = run(command, "--help")[1]
        for option, commands in OPTIONS.items():
            assert (f"{option} " in listed) is (command in commands), (command, option)


def test_method_lists_its_values(run: Run) -> None:
    for command in ("recover", "bench"):
        listed = run(command, "--help")[1]
        for name in ("auto", *METHODS):
            assert name in listed
    assert "six-phase" in run("learn", "--help")[1].partition("--method")[2].partition("--noise")[0]


def test_keys_of_a_target_may_be_options(run: Run) -> None:
    written = json.loads(run("recover", "demo:single-head?width=8&rank=2&score_bias=0.5", "--seed", "3", "--json")[1])
    words = ["--width", "8", "--rank=2", "--seed", "3", "--score-bias", "0.5", "--json"]
    for place in (0, 3, len(words)):  # wherever the target stands
        said = json.loads(run("recover", *words[:place], "demo:single-head", *words[place:])[1])
        assert (said["target"], said["queries"]) == (written["target"], written["queries"])
    noisy = json.loads(run("diagnose", "demo:single-head", "--width", "4", "--add-noise", "1e-3", "--json")[1])
    assert "noise=0.001" in noisy["target"]
    code, _, err = run("recover", "demo:single-head", "--width", "none")
    assert (code, "width is a whole number" in err) == (2, True)
    code, _, err = run("recover", "demo:single-head", "--neurons", "3")
    assert (code, "--neurons" in err) == (2, True)


def test_options_of_a_target_are_folded_into_its_text() -> None:
    def fold(line: str, own: set[str] = frozenset({"--seed", "--noise"})) -> str:  # type: ignore[assignment]
        return " ".join(fold_target_options(line.split(), own))

    assert fold("transformers:P#layer=1 --part layer --seed 2") == "transformers:P#layer=1&part=layer --seed 2"
    assert fold("onnx:m.onnx --output hidden") == "onnx:m.onnx#output=hidden"
    assert fold("http://h/v2/models/m p.safetensors --timeout 3") == "http://h/v2/models/m#timeout=3 p.safetensors"
    assert fold("http+json://h/e --no-proxy --width 3") == "http+json://h/e#proxy=none&width=3"
    assert fold("demo:layer --no-proxy") == "demo:layer --no-proxy"
    assert fold("demo:layer --d 4 --k=2 --noise exact") == "demo:layer?d=4&k=2 --noise exact"
    assert fold("file:p.safetensors --width 3") == "file:p.safetensors --width 3"
    assert fold("demo:single-head -- --width 3") == "demo:single-head -- --width 3"
    assert (
        fold("demo:relu-net demo:single-head --neurons 3 --rank 2") == "demo:relu-net?neurons=3 demo:single-head?rank=2"
    )


def test_a_shell_completes_words() -> None:
    def complete(*words: str) -> list[str]:
        told = {
            "_KEYHOLE_COMPLETE": "complete_bash",
            "COMP_WORDS": shlex.join(words),
            "COMP_CWORD": str(len(words) - 1),
        }
        done = subprocess.run(
            [sys.executable, "-m", "keyhole"], env={**os.environ, **told}, capture_output=True, text=True, check=False
        )
        return done.stdout.split()

    assert complete("keyhole", "recover", "--method", "mul") == ["multi-head"]
