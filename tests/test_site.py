"""The documentation as a site: built with every warning an error, complete, from this machine alone, and not stale."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest

from benchmarks import summaries
from keyhole.methods import METHODS

ROOT = Path(__file__).parents[1]
LONGEST_README = 150  # lines
DOCS = ROOT / "docs"
METHOD_PAGES = sorted(page for page in DOCS.glob("methods/*.md") if page.stem != "index")

# Where each page's assumptions stand in the code. `robust` and `residual` hand on to others.
ASSUMPTIONS = {
    "single-head": ["methods.single_head.method"],
    "low-rank": ["methods.single_head.method"],
    "sensing": ["methods.sensing.method"],
    "robust": [],
    "multi-head": ["methods.multi_head.vector.method"],
    "multi-head-scalar": ["methods.multi_head.scalar.method"],
    "residual": [],
    "relu-net": ["methods.relu_net.exact.estimate"],
    "one-layer": ["methods.one_layer.method"],
    "learn": ["samples.varpro"],
    "labels": ["methods.labels.method"],
    "alphabet": ["methods.alphabet.method"],
    "normalised": [],  # those of the heads, and what is said of either place
    "attention-by-parts": ["methods.parts.bilinear"],
}


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def glance(page: Path) -> dict[str, str]:
    """The table *At a glance* of a method's page."""
    section = text_of(page).partition("## At a glance\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| \*\*(\w+)\*\* \| (.+) \|$", section, re.MULTILINE))


class Loads(HTMLParser):
    """What a browser loads with a page: scripts, styles, pictures, frames."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        loaded = given.get("href") if tag == "link" and given.get("rel") != "canonical" else given.get("src")
        if loaded and tag in {"link", "script", "img", "iframe", "source", "video"}:
            self.found.append(loaded)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-W", "error", "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    # Not --quiet: warnings that are not shown are not counted. The variable silences a banner about MkDocs 2.
    surroundings = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    expected = r"INFO +-  (Cleaning site|Building documentation|Documentation built)"
    assert not [line for line in said.splitlines() if line.strip() and not re.match(expected, line)], said
    return folder


def test_the_site_has_every_page(site: Path) -> None:
    pages = {page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md")}
    pages |= {Path(f"{name}.html") for name in ("readme", "contributing", "changelog", "examples")}
    pages |= {Path("results", f"{path.stem}.html") for path in ROOT.glob("benchmarks/results/*.md")}
    missing = sorted(str(page) for page in pages if not (site / page).is_file())
    assert not missing


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    """Fonts, scripts and pictures are in the site; it can be read on a machine without a network."""
    elsewhere = set()
    for page in site.rglob("*.html"):
        loads = Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        assert loads.found
        elsewhere |= {each for each in loads.found if re.match(r"(https?:)?//", each)}
        if page.name != "404.html":  # which is for servers
            here = [each.partition("?")[0].partition("#")[0] for each in loads.found if ":" not in each]
            assert all((page.parent / each).exists() for each in here), page
    for style in site.rglob("*.css"):
        elsewhere |= set(re.findall(r"url\([\"']?((?:https?:)?//[^)\"']+)", style.read_text(encoding="utf-8")))
    assert not elsewhere


def test_search_works_from_disk(site: Path) -> None:
    """In a browser, without a server: the page asks nobody, complains of nothing, and finds what it is asked for."""
    browsers = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    said: list[str] = []
    with (
        browsers.sync_playwright() as play,
        play.chromium.launch(executable_path=chromium, args=["--no-sandbox"]) as browser,
    ):
        page = browser.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url) if request.url.startswith("http") else None)
        page.goto((site / "methods" / "learn.html").as_uri())
        page.click(".md-search__input")
        page.get_by_text("Type to start searching").wait_for(timeout=15_000)
        page.keyboard.type("counting bound")
        page.get_by_text("matching documents").wait_for(timeout=15_000)
    assert not said


def test_the_reference_has_what_is_public(site: Path) -> None:
    import keyhole  # noqa: PLC0415

    shown = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html"))
    ids = set(re.findall(r'id="keyhole\.([\w.]+)"', shown))
    names = {each.rpartition(".")[2] for each in ids}
    assert not set(keyhole.__all__) - names


@pytest.mark.parametrize("page", METHOD_PAGES, ids=lambda page: page.stem)
def test_a_page_of_a_method_is_complete(page: Path) -> None:
    """Theorem, assumptions as certificates carry them, queries, limits, what was measured, and a figure."""
    said = glance(page)
    assert list(said) == ["theorem", "assumptions", "queries", "limits", "measured", "code"]
    for module in ASSUMPTIONS[page.stem]:
        for assumption in importlib.import_module(f"keyhole.{module}").ASSUMPTIONS:
            assert assumption in said["assumptions"]
    assert f"](../images/{page.stem}.svg)" in text_of(page)
    anchor = re.search(r"\[below\]\(#([\w-]+)\)", said["measured"])
    assert anchor
    heading = next(each for each in re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE) if slug(each) == anchor[1])
    section = re.split(r"^## ", text_of(page).partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    assert "|---|" in section, "what was measured is a table"
    names = re.findall(r"benchmarks (\w+)`|(?<=, )`(\w+)`", said["measured"])
    assert all((ROOT / "benchmarks" / "tables" / f"{one or two}.py").is_file() for one, two in names)


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def test_every_method_has_a_page() -> None:
    listed = text_of(DOCS / "methods" / "index.md")
    assert all(f"`{name}`" in listed for name in METHODS)
    assert all(f"({page.name})" in listed for page in METHOD_PAGES)
    assert {page.stem for page in METHOD_PAGES} == set(ASSUMPTIONS)


@pytest.mark.parametrize("page", [DOCS / "theorems.md", *METHOD_PAGES], ids=lambda page: page.stem)
def test_code_that_is_named_is_there(page: Path) -> None:
    """A name such as keyhole.methods.sensing.method is a module, or something in one."""
    for name in set(re.findall(r"`(keyhole(?:\.\w+)+)`", text_of(page))):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            module, _, last = name.rpartition(".")
            assert hasattr(importlib.import_module(module), last), name
    for name in set(re.findall(r"`(tests/[\w/]+\.py)`", text_of(page))):
        assert (ROOT / name).is_file(), name


def test_tables_are_those_of_the_committed_results() -> None:
    stale = [page for page in summaries.pages() if summaries.refreshed(text_of(page)) != text_of(page)]
    assert not stale, "python -m benchmarks.summaries mends them"
    used = [name for page in summaries.pages() for name in re.findall(r"<!-- table: ([\w-]+) -->", text_of(page))]
    assert set(used) == set(summaries.TABLES)


def test_pictures_are_those_that_are_drawn(tmp_path: Path) -> None:
    """Drawn anew, each has the words of the committed one: titles, labels, legends and counts of queries."""
    figures = pytest.importorskip("benchmarks.figures", reason="needs matplotlib")
    committed = {path.stem for path in (DOCS / "images").glob("*.svg")}
    assert committed == set(figures.PICTURES)
    for name in figures.PICTURES:
        drawn = words(figures.save(name, tmp_path))
        assert drawn == words(DOCS / "images" / f"{name}.svg"), f"python -m benchmarks.figures {name}"


def words(picture: Path) -> list[str]:
    """Texts of an SVG of matplotlib, which stand in comments beside outlines; but for ticks and rounding errors."""
    found = [each for each in re.findall(r"<!-- (.*?) -->", text_of(picture)) if re.search("[a-z]{2}", each)]
    assert len(found) >= 3
    return [re.sub(r"\d+e-\d+", "…", each) for each in found if not each.startswith("$")]


def test_the_first_screen_of_the_readme() -> None:
    """One sentence, how to install, the two commands, a picture, the comparison, and whom it is for; a short tour."""
    first = text_of(ROOT / "README.md").partition("\n## ")[0]
    sentence = re.search(r"\*\*(.+?)\*\*", first, re.DOTALL)
    assert sentence
    assert sentence[1].count(".") == 1
    order = [
        first.index(each)
        for each in (
            sentence[0],
            "may test",
            "pip install keyhole && keyhole demo",
            "$ make demo",
            "$ make test",
            "![",
            "<!-- table: comparison",
        )
    ]
    assert order == sorted(order)
    assert len(text_of(ROOT / "README.md").splitlines()) <= LONGEST_README
