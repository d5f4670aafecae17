"""What a person sees in a terminal while queries run, plain lines elsewhere, and what Ctrl-C leaves behind."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pexpect
import pytest

from keyhole.cli import main
from keyhole.progress import ObserverPair, ProgressBar, ProgressLines, Silent, SketchThrottle, on_terminal
from keyhole.queries import Sketch

BOX = """
import time
import numpy as np
import keyhole as kh

rng = np.random.default_rng(3)
HEAD = kh.SingleHead(rng.standard_normal((16, 16)), rng.standard_normal(16))

def make():
    def answer(tokens):
        time.sleep(0.05)
        return HEAD(tokens)
    return kh.FunctionOracle(answer, width=16, batch_limit=4, name="slow")
"""
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|38|4[0-7]|48|9[0-7])(?:;\d+)*m")
COMMAND = ["recover", "python:box.py:make", "--journal", "my answers.db", "--budget", "5000"]


@contextmanager
def terminal(folder: Path, *options: str, **environment: str) -> Iterator[pexpect.spawn]:
    """The command in a terminal of its own."""
    (folder / "box.py").write_text(BOX)
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    child = pexpect.spawn(
        sys.executable,
        ["-m", "keyhole", *COMMAND, *options],
        env={**inherited, "TERM": "xterm-256color", **environment},
        cwd=str(folder),
        dimensions=(30, 150),
        encoding="utf-8",
        timeout=40,
    )
    try:
        yield child
    finally:
        child.close(force=True)


@pytest.mark.parametrize("colour", [True, False])
def test_a_bar_and_ctrl_c(tmp_path: Path, colour: bool) -> None:
    with terminal(tmp_path, **({} if colour else {"NO_COLOR": "1"})) as child:
        stage, asked, left, error = (
            r"(directions|columns)",
            r"\d+ queries · \d+/s",
            r"4,\d+ of 5,000 left",
            r"± \d\u00a0×\u00a010⁻¹.",
        )
        child.expect(rf"{stage}[^\r]*?{asked} · {left} · error so far {error}")
        shown = child.before + child.after
        child.sendintr()
        child.expect(pexpect.EOF)
        shown += child.before
        child.close()
    assert child.exitstatus == 130
    assert "Traceback" not in shown
    assert bool(COLOUR.search(shown)) is colour
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is given back
    said = " ".join(shown.partition("To resume: ")[2].split())
    assert shlex.split(said) == ["keyhole", *COMMAND]
    if colour:
        return
    again = [sys.executable, "-m", "keyhole", *shlex.split(said)[1:]]
    done = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "CERTIFIED" in done.stdout


def test_ctrl_c_ends_a_run_that_is_watched(tmp_path: Path) -> None:
    with terminal(tmp_path, "--watch") as child:
        child.expect(r"watch at (http://127\.0\.0\.1:\d+/#run=watched-\w+)")
        child.expect("error so far")
        child.sendintr()
        child.expect(pexpect.EOF)
        child.close()
    assert child.exitstatus == 130
    said = child.before.rpartition("\x1b[2K")[2]  # nothing was erased after it was said
    assert shlex.split(" ".join(said.partition("To resume: ")[2].split())) == ["keyhole", *COMMAND]


def test_plain_lines_where_there_is_no_terminal() -> None:
    file = io.StringIO()
    lines = ProgressLines(file, budget=50, every=0.0)
    lines.planned("columns", 40)
    lines.sketched(lambda: Sketch({}, 0.5, 1e-9))
    lines.answered(10, new=False)
    lines.answered(12, new=True)
    first, second = file.getvalue().splitlines()
    said = "keyhole: columns: 10 queries, 0/s + 10 from the journal, 40 of 50 left, error so far ± 1\u00a0×\u00a010⁻⁹"
    assert first == said
    assert second.startswith("keyhole: columns: 22 queries, ")
    assert "\x1b" not in file.getvalue()
    lines.discarded()  # that was the error of something else
    lines.budget = None
    lines.answered(3, new=True)
    assert file.getvalue().splitlines()[-1].endswith("15 to go")


def test_a_quick_run_says_nothing_on_its_way(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["recover", "demo:single-head?width=4"])
    assert ended.value.code == 0
    assert capsys.readouterr().err == ""


def test_what_is_shown_depends_on_where(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_terminal() as observer:
        assert isinstance(observer, ProgressLines)
    with on_terminal(quiet=True) as observer:
        assert type(observer) is Silent
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    with on_terminal() as observer:
        assert isinstance(observer, ProgressLines)
    monkeypatch.setenv("TERM", "xterm")
    with on_terminal() as observer:
        assert isinstance(observer, ProgressBar)


def test_looks_are_rare_and_both_are_told() -> None:
    throttle, made = SketchThrottle(), []
    for _ in range(3):
        throttle.look(lambda: made.append(1))  # type: ignore[func-returns-value]
    assert len(made) == 1
    first, second = ProgressLines(io.StringIO()), ProgressLines(io.StringIO())
    both = ObserverPair(ObserverPair(first, Silent()), second)
    both.planned("value", 4)
    both.answered(4, new=True)
    both.sketched(lambda: Sketch({}, 1.0, 0.5))
    assert (first.stage, first.new, first.error) == (second.stage, second.new, second.error) == ("value", 4, 0.5)
    both.discarded()
    assert first.error != first.error


def test_ctrl_c_outside_of_a_run_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("keyhole.cli.diagnose.diagnose_box", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["diagnose", "demo:single-head?width=4"])
    assert ended.value.code == 130
    assert capsys.readouterr().err in ("", "keyhole: interrupted\n")  # versions of typer differ


def test_ctrl_c_while_the_processes_of_an_audit_begin(tmp_path: Path) -> None:
    """They import for a second, and must not each say where in that they were interrupted."""
    words = shlex.split("audit demo:single-head?width=6 --jobs 2 --defence round:3 --multiples 1 --out found")
    process = subprocess.Popen(
        [sys.executable, "-m", "keyhole", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a group of its own, as a terminal makes: Ctrl-C reaches all of it
    )
    try:
        until(lambda: workers(process.pid) == 2 or process.poll() is not None, "two processes")
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (130, ""), err
    assert err.count("\n") == 1, err
    assert "To go on: keyhole audit" in err


def workers(parent: int) -> int:
    """How many processes of a pool this one has begun, however far they have come."""
    found = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            own = (path / "stat").read_text().rpartition(")")[2].split()[1] == str(parent)
            found += own and b"spawn_main" in (path / "cmdline").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
    return found


def until(happened: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.005)
