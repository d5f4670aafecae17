"""Every command line that a command prints, run as it was printed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.live import Runs
from keyhole.report import build
from keyhole.targets import random_net
from support.commands import Run, one_line

BOX = """
import numpy as np
import keyhole as kh

rng = np.random.default_rng(3)
HEAD = kh.SingleHead(rng.standard_normal((6, 6)) / 2, rng.standard_normal(6))
asked = 0

def rounded():
    return kh.FunctionOracle(lambda x: np.round(HEAD(x), 4), width=6)

def noisy():
    errors = np.random.default_rng(1)
    return kh.FunctionOracle(lambda x: HEAD(x) + 1e-3 * errors.standard_normal(len(x)), width=6)

def single():
    return kh.FunctionOracle(lambda x: HEAD(x).astype(np.float32).astype(np.float64), width=6)

def half():
    return kh.FunctionOracle(lambda x: HEAD(x).astype(np.float16).astype(np.float64), width=6)

def short():
    return kh.FunctionOracle(HEAD, width=6, max_norm=3.0)

def stopped():
    def answer(tokens):
        global asked
        asked += len(tokens)
        if asked > 30:
            asked = 0
            raise KeyboardInterrupt
        return HEAD(tokens)
    return kh.FunctionOracle(answer, width=6, batch_limit=4, name="stopped")
"""
ROOM = "a 'quoted' folder; with $HOME & more"  # what a shell would take apart
MOST_STEPS = 12


def printed(text: str, mark: str) -> list[str]:
    """The words of the command that stands behind a mark, as a shell reads them."""
    lines = [line.partition(mark)[2] for line in text.splitlines() if mark in line]
    assert lines, f"nothing is said of {mark!r} in {text!r}"
    words = shlex.split(lines[-1])
    assert words[0] == "keyhole"
    return words[1:]


def follow(run: Run, out: str, mark: str) -> tuple[int, str]:
    """Run what was printed, and what that prints, until no more is said; the last exit code and output."""
    code = 1
    for _ in range(MOST_STEPS):
        code, out, err = run(*printed(out, mark))
        said = out + err
        assert code != 2, said
        if mark not in said:
            return code, said
        out = said
    raise AssertionError(f"no end after {MOST_STEPS} steps: {out}")


# --- resume ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["demo:single-head?width=6", "--budget", "40"],
        ["demo:single-head?width=6&rank=2", "--budget", "40", "--method", "low-rank", "--option", "tolerance=1e-7"],
        ["demo:single-head?width=6", "--budget", "40", "--option", "entrywise=true", "--heldout", "5"],
        ["demo:single-head?width=4&noise=1e-3", "--budget", "12"],
        ["demo:single-head?width=6", "--budget", "40", "--noise", "bounded:1e-6", "--max-norm", "12.5"],
        ["demo:multi-head?heads=2&width=4&outputs=4", "--budget", "40", "--method", "multi-head"],
        ["python:box.py:short", "--budget", "40"],
        [f"file:{ROOM}/its params.safetensors", "--budget", "30"],
        [f"python:{ROOM}/box.py:rounded", "--budget", "50", "--noise", "measure"],
    ],
    ids=lambda words: words[0].partition("?")[0],
)
def test_a_spent_budget_is_resumed(run: Run, words: list[str]) -> None:
    Path(ROOM).mkdir()
    Path(ROOM, "box.py").write_text(BOX)
    rng = np.random.default_rng(0)
    kh.SingleHead(rng.standard_normal((5, 5)), rng.standard_normal(5)).save(f"{ROOM}/its params.safetensors")
    code, out, err = run("recover", *words, "--journal", f"{ROOM}/answers.db", "--out", f"{ROOM}/run")
    assert code == 1, err
    code, said = follow(run, out, "resume  ")
    assert code == 0, said
    assert "CERTIFIED" in said


def test_what_is_said_quietly_can_be_resumed_too(run: Run) -> None:
    target = "demo:single-head?width=6"
    code, out, err = run("recover", target, "--journal", "a.db", "--budget", "10", "-q")
    assert (code, out) == (1, "")
    assert one_line(err)
    code, out, _ = run(*printed(err, "To resume: "))
    assert code in (0, 1)


def test_an_interrupted_run_is_resumed(run: Run) -> None:
    for words, mark in ([["--journal", "a b.db", "--out", "a b"], "To resume: "], [["--seed", "2"], "for example "]):
        code, _, err = run("recover", "python:box.py:stopped", *words)
        assert code == 130
        code, _ = follow(run, err, mark) if mark in err else (0, "")
        if mark == "for example ":  # which now has a journal, and says how to go on from there
            code, _, err = run("recover", "python:box.py:stopped", "--seed", "2", "--journal", "answers.db")
            code, _ = follow(run, err, "To resume: ") if code == 130 else (code, "")
        assert code == 0


def test_an_interrupted_audit_goes_on(run: Run) -> None:
    words = ["--defence", "round:3", "--defence", "noise:1e-3+clip:1", "--multiples", "2", "--out", "its folder"]
    code, _, err = run("audit", "python:box.py:stopped", *words)
    assert code == 130
    for _ in range(60):
        code, _, err = run(*printed(err, "To go on: "))
        if code != 130:
            break
    assert code == 0, err


def test_one_layer_of_a_model_is_resumed(run: Run) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 8, "vocab_size": 11}
    config = transformers.BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=16)
    transformers.BertModel(config).double().eval().save_pretrained("its model")
    target = "transformers:its model#layer=-1&positions=last"
    code, out, _ = run("recover", target, "--journal", "a.db", "--budget", "20", "--method", "multi-head")
    assert code == 1
    code, said = follow(run, out, "resume  ")
    assert code == 0, said


# --- next -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        "demo:single-head?width=6",
        "demo:single-head?width=6&score_bias=1&output_bias=1",
        "demo:single-head?width=6&noise=1e-4",
        "demo:single-head?width=6&decimals=5",
        "demo:multi-head?heads=2&width=6&outputs=6",
        "demo:multi-head?heads=2&width=6&outputs=6&residual=1",
        "demo:multi-head?heads=2&width=4",
        "demo:relu-net?width=4&neurons=3",
        "demo:one-layer?width=4&neurons=3",
        "demo:one-layer?width=4&neurons=3&outputs=4&residual=1",
        "python:box.py:rounded",
        "python:box.py:noisy",
        "python:box.py:single",
        "python:box.py:half",
        "python:box.py:short",
        "file:a net.safetensors",
    ],
)
def test_what_a_diagnosis_recommends_recovers_the_box(run: Run, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if target.startswith("file:"):  # which diagnose takes for parameters
        random_net(4, 3, None, np.random.default_rng(0)).save("a net.safetensors")
        Path("net.py").write_text("import keyhole as kh\n\ndef net():\n    return kh.load('a net.safetensors')\n")
        Path("net.py").rename("a net.py")
        target = "python:a net.py:net"
    monkeypatch.setenv("COLUMNS", "40")  # a command stays in one line all the same
    code, out, err = run("diagnose", target)
    assert code == 0, err
    words = printed(out, "next  ")
    code, out, err = run(*words)
    assert code == 0, out + err
    assert "CERTIFIED" in out


def test_a_diagnosis_names_its_next_command_in_json_too(run: Run) -> None:
    _, out, _ = run("diagnose", "python:box.py:rounded", "--json")
    words = shlex.split(json.loads(out)["next"])
    assert words[:3] == ["keyhole", "recover", "python:box.py:rounded"]
    assert "rounded:4" in words
    assert run(*words[1:])[0] == 0


# --- elsewhere ------------------------------------------------------------------------------------------------------


def test_the_command_of_the_page(run: Run) -> None:
    runs = Runs(Path("runs of a page"), reports=False)
    started = runs.start({"family": "single-head", "width": "5", "rate": "100000"})
    assert started.wait(60)
    code, out, err = run(*shlex.split(started.snapshot()["command"])[1:])
    assert code == 0, out + err


def test_the_command_that_makes_a_report(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("it's a run")
    assert run("recover", "demo:single-head?width=4", "--out", str(folder), "-q")[0] == 0

    def missing(_: Path) -> Any:
        raise ImportError("No module named 'jinja2'")

    with monkeypatch.context() as patch:
        patch.setattr(build, "write_report", missing)
        _, note = build.try_report(folder)
    assert run(*printed(str(note), "then "))[0] == 0


@contextmanager
def started(*words: str, **environment: str) -> Iterator[Any]:
    """A command in a process of its own, interrupted at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "keyhole", *words],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        yield process
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
        assert process.returncode in (0, 130), out  # 130: before it began to listen
    finally:
        process.kill()
        process.wait()


def line_of(process: Any, word: str) -> str:
    for line in process.stdout:
        if line.split()[:1] == [word]:
            return str(line).strip().removeprefix(word).strip()
    raise AssertionError(f"it said nothing of {word}")


@pytest.mark.parametrize("token", [None, "its secret"])
def test_how_a_served_box_is_asked(run: Run, token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    more = [] if token is None else ["--token-env", "BOX_TOKEN"]
    if token is not None:
        monkeypatch.setenv("BOX_TOKEN", token)
    with started("serve", "demo:single-head?width=5", "--port", "0", *more) as server:
        words = shlex.split(line_of(server, "ask"))
        code, out, err = run(*words[1:])
        assert code == 0, out + err


def test_how_the_page_is_opened_again(run: Run, tmp_path: Path) -> None:
    assert run("--version")[0] == 0  # in a folder of its own
    folder = tmp_path / "all runs"
    again = shlex.join(["keyhole", "serve", "--ui", "--runs", str(folder)])
    with started(*shlex.split(again)[1:]) as server:
        assert line_of(server, "runs") == str(folder)
