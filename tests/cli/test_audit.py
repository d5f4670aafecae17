"""The command `keyhole audit`: words, JSON, files, interrupts and exit codes."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from support.commands import Run, one_line

SMALL = "demo:single-head?width=4"
BOX = """
import numpy as np
import keyhole as kh

rng = np.random.default_rng(3)
HEAD = kh.SingleHead(rng.standard_normal((4, 4)), rng.standard_normal(4))
asked = 0

def head():
    return kh.FunctionOracle(HEAD, width=4, name="head")

def placed():
    return kh.FunctionOracle(lambda x: HEAD(x * (1.0 + np.arange(x.shape[1])[:, None])), width=4)

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
    assert set(said["files"]) == {"json", "png", "report"}
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
    code, out, err = run("audit", "python:box.py:placed")
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
        ([SMALL, "--workers", "0"], "--workers"),
        ([SMALL, "--out", "box.py"], "name another one with --out"),
        (["nonsense"], "a target looks like"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(run: Run, arguments: list[str], said: str) -> None:
    code, out, err = run("audit", *arguments)
    assert (code, out) == (2, "")
    assert one_line(err)
    assert said in err


def test_help_has_an_example(run: Run) -> None:
    code, out, _ = run("audit", "--help")
    assert code == 0
    assert "keyhole audit file:params.safetensors" in out
