"""What the documentation says: its examples run, its links lead somewhere, and it speaks of nothing but the project."""

from __future__ import annotations

import doctest
import io
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from keyhole.cli import main
from keyhole.families.files import FAMILIES
from keyhole.families.parts import PARTS
from keyhole.gauge.compare import GAUGES
from keyhole.methods import METHODS
from keyhole.recovery import Outcome
from keyhole.targets.demos import DEMOS

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])

# A fenced block with the comment before it, if there is one:
#   <!-- exit 1 -->           the code its commands end with
#   <!-- background -->       a server, which goes on while the rest of the page is run; on a free port instead of 8000
#   <!-- needs MODULE -->     run where the module is installed
#   <!-- not run: REASON -->  not run
BLOCK = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*?) -->\n+)?```(?P<language>[\w{}-]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"\]\((?P<to>[^()\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
OUTPUT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

PORT = "127.0.0.1:8000"
RUNNABLE = {"python", "console", "sh", "bash"}
DATA = {"", "text", "json", "yaml", "toml", "{eval-rst}"}  # what a block may hold that is no code
MOST_NOT_RUN = 2  # torch.onnx.export and MiniLM's weights, for packages that only benchmarks have

# Folders beside the project, and the places where machines of developers keep it.
PRIVATE = re.compile(r"\.\./shared|(?<![\w.])/(?:work|root|home|Users)\b")


@dataclass
class Command:
    """One command of the documentation and the output shown below it."""

    line: str
    code: int
    shown: list[str] = field(default_factory=list)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose_of(page: Path) -> str:
    return BLOCK.sub("", text_of(page))


def blocks(page: Path) -> Iterator[tuple[str, str, str, int]]:
    """(language, text, note, line) of the blocks of a page, in order."""
    text = text_of(page)
    for found in BLOCK.finditer(text):
        yield found["language"], found["text"], found["note"] or "", text.count("\n", 0, found.start("text"))


def commands(text: str, language: str, code: int) -> Iterator[Command]:
    """The commands of a block: after a prompt in a console, on lines of their own in a script."""
    prompt = "$ " if language == "console" else ""
    command: Command | None = None
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith(prompt) and not line.startswith("#") and line.strip():
            if command:
                yield command
            command = Command(line.removeprefix(prompt), code)
        elif command and prompt:
            command.shown.append(line)
    if command:
        yield command


def keyhole(words: list[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of a command, run in this process."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors), pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0), out.getvalue(), errors.getvalue()


def script(words: list[str]) -> tuple[int, str, str]:
    """A script of the project, run in this process, where the reader is."""
    out, errors = io.StringIO(), io.StringIO()
    code: object = 0
    with redirect_stdout(out), redirect_stderr(errors), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        try:
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        except SystemExit as ended:
            code = ended.code
    return int(code or 0) if isinstance(code, int | None) else 1, out.getvalue(), errors.getvalue()


def process(words: list[str]) -> tuple[int, str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        words,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def make(goals: list[str]) -> tuple[int, str, str]:
    """What make would run must be known to it; of that, commands of Keyhole are run."""
    code, out, errors = process(["make", "--dry-run", *goals])
    found = [line for line in out.splitlines() if "/keyhole " in line]
    for line in found:
        code, out, errors = keyhole(shlex.split(line.partition("/keyhole ")[2]))
    return code, out, errors


def run(command: Command) -> tuple[int, str, str]:
    name, *words = shlex.split(command.line, comments=True)
    if name == "keyhole":
        return keyhole(words)
    if name == "make":
        return make(words)
    if name == "python" and words[0] == "-m":
        return process([sys.executable, *words])
    if name == "python":
        return script(words)
    pytest.fail(f"nobody knows how to run {command.line!r} here: say <!-- not run: REASON -->")


def check(command: Command) -> None:
    """Run a command; its exit code and, where any is shown, its output must be as said."""
    code, out, errors = run(command)
    assert code == command.code, f"{command.line}\n{out}{errors}"
    if command.shown:
        shown = "\n".join(command.shown) + "\n"
        same = doctest.OutputChecker().check_output(shown, out, OUTPUT)
        assert same, f"$ {command.line}\n{out}\nbut the page shows\n\n{shown}"


@contextmanager
def served(command: Command) -> Iterator[str]:
    """A server as a page starts it, but on a free port; yields the address it has instead of the one on the page."""
    words = shlex.split(command.line, comments=True)[1:]
    server = subprocess.Popen(
        [sys.executable, "-m", "keyhole", *words, "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"},
    )
    assert server.stdout is not None
    try:
        lines = []
        for line in server.stdout:
            lines.append(line)
            if "Ctrl-C" in line:
                break
        out = "".join(lines)
        port = re.search(r"127\.0\.0\.1:(\d+)", out)
        assert port, out
        shown = "\n".join(command.shown).replace(PORT, port[0]) + "\n"
        assert doctest.OutputChecker().check_output(shown, out, OUTPUT), f"{out}\nbut the page shows\n\n{shown}"
        yield port[0]
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=30)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = [re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(prose_of(page))]
    return {title.strip().replace(" ", "-") for title in titles}


@pytest.fixture
def _forgotten() -> Iterator[None]:
    """What a page registers is not there for the next one."""
    tables: list[dict[Any, Any]] = [FAMILIES, PARTS, GAUGES, METHODS, DEMOS]
    before = [dict(table) for table in tables]
    yield
    for table, known in zip(tables, before, strict=True):
        table.clear()
        table.update(known)


@pytest.mark.usefixtures("_forgotten")
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_example_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one page share names and a folder, as they do for a reader who follows it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    names: dict[str, object] = {"__name__": f"docs of {name_of(page)}"}
    address = PORT
    with ExitStack() as stack:
        for language, text, note, line in blocks(page):
            kind, _, rest = note.partition(" ")
            if language not in RUNNABLE or kind == "not":
                continue
            if kind == "needs" and find_spec(rest) is None:
                continue
            if language == "python":
                if "import torch" in text:
                    pytest.importorskip("torch").set_num_threads(1)  # tests share the machine's cores among themselves
                # Empty lines before it make tracebacks name the line of the page.
                with warnings.catch_warnings():
                    if kind == "needs":  # what others warn of is theirs
                        warnings.simplefilter("ignore")
                    exec(compile("\n" * line + text, name_of(page), "exec", dont_inherit=True), names)
                continue
            if kind == "background":
                (server,) = commands(text, language, 0)
                address = stack.enter_context(served(server))
                continue
            for command in commands(text.replace(PORT, address), language, int(rest) if kind == "exit" else 0):
                check(command)


def test_what_is_not_run_says_why() -> None:
    """Notes are of a known kind, blocks in a known language, and few are not run."""
    known = re.compile(r"exit \d+|background|needs \w+|not run: \S.*")
    not_run = []
    for page in PAGES:
        for language, _, note, line in blocks(page):
            where = f"{name_of(page)}:{line}"
            assert language in RUNNABLE | DATA, f"{where}: nobody runs blocks in {language}"
            assert not note or known.fullmatch(note), f"{where}: <!-- {note} --> means nothing"
            not_run += [f"{where}: {note}"] * note.startswith(("not run", "needs"))
    assert len(not_run) <= MOST_NOT_RUN, "\n".join(not_run)


def test_there_are_examples_to_run() -> None:
    """Should the pattern of a block break, no example would run and nothing else would tell."""
    languages = [language for page in PAGES for language, *_ in blocks(page)]
    assert languages.count("python") >= 50
    assert sum(len(list(commands(text, kind, 0))) for page in PAGES for kind, text, *_ in blocks(page)) >= 30
    fences = sum(len(re.findall(r"^```", text_of(page), re.MULTILINE)) for page in PAGES)
    assert fences == 2 * sum(len(BLOCK.findall(text_of(page))) for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for found in LINK.finditer(prose_of(page)):
        to, _, anchor = found["to"].partition("#")
        if "://" in to:
            continue
        goal = (page.parent / to).resolve() if to else page
        assert goal.exists(), f"{found['to']} is not there"
        assert goal.is_relative_to(ROOT.resolve()), f"{found['to']} leaves the project"
        assert not anchor or anchor in anchors(goal), f"{to or name_of(page)} has no heading #{anchor}"


def test_every_page_is_listed() -> None:
    index = ROOT / "docs" / "index.md"
    listed = {(index.parent / found["to"]).resolve() for found in LINK.finditer(text_of(index))}
    missing = [name_of(page) for page in PAGES if page != index and page.resolve() not in listed]
    assert not missing


def test_every_outcome_is_explained_in_its_own_words() -> None:
    text = text_of(ROOT / "docs" / "outcomes.md")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", text, re.MULTILINE))
    assert rows == {outcome.name: outcome.value for outcome in Outcome}
    explained = re.findall(r"^\*\*`(\w+)`\.\*\*", text, re.MULTILINE)
    assert explained == [outcome.name for outcome in Outcome]


def test_nothing_speaks_of_the_machine_it_was_written_on() -> None:
    listing = ["git", "ls-files", "-z"]
    try:
        files = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no checkout")
    found = []
    for name in filter(None, files):
        path = ROOT / name
        content = path.read_bytes() if path.is_file() else b""
        if b"\0" in content:  # a picture
            continue
        lines = content.decode("utf-8", errors="replace").splitlines()
        found += [f"{name}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if PRIVATE.search(line)]
    assert not found, "\n".join(found)
