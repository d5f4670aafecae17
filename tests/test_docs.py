"""What the documentation says: its examples run, its links lead somewhere, and it speaks of nothing but the project."""

from __future__ import annotations

import doctest
import io
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from keyhole.cli import main
from keyhole.recovery import Outcome

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

# A fenced block with the comment before it, if there is one: <!-- not run -->, or <!-- exit 1 --> for a command's code.
BLOCK = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*?) -->\n+)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"\]\((?P<to>[^()\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
OUTPUT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

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
    """(language, text, note, line) of the blocks of a page that are to be run, in order."""
    text = text_of(page)
    for found in BLOCK.finditer(text):
        note = found["note"] or ""
        if note != "not run":
            yield found["language"], found["text"], note, text.count("\n", 0, found.start("text"))


def commands(text: str, language: str, code: int) -> Iterator[Command]:
    """The keyhole commands of a block: after a prompt in a console, on lines of their own in a script."""
    prompt = "$ " if language == "console" else ""
    command: Command | None = None
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith(prompt + "keyhole "):
            if command:
                yield command
            command = Command(line.removeprefix(prompt), code)
        elif command and prompt and not line.startswith(prompt):
            command.shown.append(line)
    if command:
        yield command


def check(command: Command) -> None:
    """Run a command in this process; its exit code and, where any is shown, its output must be as said."""
    out, errors = io.StringIO(), io.StringIO()
    words = shlex.split(command.line, comments=True)[1:]
    with redirect_stdout(out), redirect_stderr(errors), pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == command.code, f"{command.line}\n{out.getvalue()}{errors.getvalue()}"
    if command.shown:
        shown = "\n".join(command.shown) + "\n"
        same = doctest.OutputChecker().check_output(shown, out.getvalue(), OUTPUT)
        assert same, f"$ {command.line}\n{out.getvalue()}\nbut the page shows\n\n{shown}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = [re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(prose_of(page))]
    return {title.strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_example_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one page share names and a folder, as they do for a reader who follows it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    names: dict[str, object] = {"__name__": f"docs of {name_of(page)}"}
    for language, text, note, line in blocks(page):
        if language == "python":
            if "import torch" in text:
                pytest.importorskip("torch").set_num_threads(1)  # tests share the machine's cores among themselves
            # Empty lines before it make tracebacks name the line of the page.
            exec(compile("\n" * line + text, name_of(page), "exec"), names)
        elif language in {"console", "sh"}:
            code = int(note.removeprefix("exit ")) if note.startswith("exit ") else 0
            for command in commands(text, language, code):
                check(command)


def test_there_are_examples_to_run() -> None:
    """Should the pattern of a block break, no example would run and nothing else would tell."""
    languages = [language for page in PAGES for language, *_ in blocks(page)]
    assert languages.count("python") >= 10
    assert sum(len(list(commands(text, kind, 0))) for page in PAGES for kind, text, *_ in blocks(page)) >= 5
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
