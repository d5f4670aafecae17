"""The documentation as a site: built with every warning an error, complete, from this machine alone, and not stale."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from benchmarks import summaries
from keyhole.methods import METHODS
from support.browsers import ARGUMENTS, chromium, picture, violations

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
    """The site as `make docs` builds it, in a folder of its own."""
    pytest.importorskip("sphinx")
    folder = tmp_path_factory.mktemp("site")
    recipe = re.search(r"^\t\$\(BIN\)/sphinx-build (.+) -d \S+ \. site$", text_of(ROOT / "Makefile"), re.MULTILINE)
    assert recipe
    places = ["-d", str(folder / "doctrees"), ".", str(folder / "site")]
    command = [sys.executable, "-m", "sphinx", *shlex.split(recipe[1]), *places]
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stdout + done.stderr
    return folder / "site"


def test_the_site_has_every_page(site: Path) -> None:
    pages = [
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
        *ROOT.glob("examples/*.md"),
        *ROOT.glob("benchmarks/results/*.md"),
    ]
    missing = [page.name for page in pages if not (site / page.relative_to(ROOT)).with_suffix(".html").is_file()]
    assert not missing


def test_the_first_page_leads_to_the_home_page(site: Path) -> None:
    to = re.search(r'url=([^"]+)"', text_of(site / "index.html"))
    assert to
    assert "<h1>Keyhole<" in text_of(site / to[1])


def test_a_page_that_is_broken_fails_the_build(tmp_path: Path) -> None:
    """Each kind of mistake is one warning, and a warning is an error: else nobody would hear of them."""
    pytest.importorskip("sphinx")
    (tmp_path / "docs" / "assets").mkdir(parents=True)
    for name in ("conf.py", "navigation.txt", "assets/site.css", "assets/site.js", "assets/index.html"):
        shutil.copy(DOCS / name, tmp_path / "docs" / name)
    shutil.copytree(ROOT / "src" / "keyhole" / "report" / "templates", tmp_path / "src/keyhole/report/templates")
    shutil.copytree(ROOT / "src" / "keyhole" / "live" / "static", tmp_path / "src/keyhole/live/static")
    (tmp_path / "docs" / "navigation.txt").write_text("")
    wrong = {
        "cross-reference target not found: 'missing.md'": "[a page](missing.md)",
        "local id not found": "[an anchor](alone.md#missing)",
        "cross-reference target not found: '../missing.py'": "[a file](../missing.py)",
        "image file not readable": "![a picture](missing.svg)",
        "failed to import 'Missing'": "```{eval-rst}\n.. autoclass:: keyhole.Missing\n```",
        "document isn't included in any toctree": "",
    }
    (tmp_path / "docs" / "index.md").write_text("\n\n".join(["# Home", *wrong.values()]))
    (tmp_path / "docs" / "alone.md").write_text("# Alone")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", "site"]
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=tmp_path, env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert not [each for each in wrong if each not in done.stderr], done.stderr


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    """Fonts, scripts and pictures are in the site; it can be read on a machine without a network."""
    elsewhere = set()
    for page in site.rglob("*.html"):
        loads = Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        elsewhere |= {each for each in loads.found if re.match(r"(https?:)?//", each)}
        here = [each.partition("?")[0].partition("#")[0] for each in loads.found if ":" not in each]
        assert all((page.parent / each).exists() for each in here), page
    for style in site.rglob("*.css"):
        elsewhere |= set(re.findall(r"url\([\"']?((?:https?:)?//[^)\"']+)", style.read_text(encoding="utf-8")))
    assert not elsewhere


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        try:
            yield found
        finally:
            found.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A page that asks nobody and complains of nothing."""
    page = browser.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if request.url.startswith("http") else None)
    yield page
    page.close()
    assert not said


def test_search_works_from_disk(site: Path, tab: Any) -> None:
    tab.goto((site / "docs" / "methods" / "learn.html").as_uri())
    tab.fill("input[name=q]", "counting bound")
    tab.keyboard.press("Enter")
    tab.get_by_text("Search finished").wait_for(timeout=15_000)
    assert tab.locator("#search-results a[href$='methods/single-head.html#the-counting-bound']").count()


def test_formulas_are_typeset_from_disk(site: Path, tab: Any) -> None:
    tab.goto((site / "docs" / "methods" / "single-head.html").as_uri())
    tab.locator("mjx-container svg").first.wait_for(timeout=15_000)
    assert tab.locator("mjx-container").count() == tab.locator(".math").count() >= 5
    assert not tab.locator("mjx-merror, [data-mml-node=merror]").count()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1360), ("dark", 390)])
def test_pages_can_be_read_by_all(site: Path, browser: Any, scheme: str, width: int) -> None:
    """Contrast, keys and labels by axe-core; nothing is wider than the window."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    for name in (
        "docs/index",
        "docs/methods/single-head",
        "docs/reference/recover",
        "README",
        "benchmarks/results/labels",
    ):
        page.goto((site / f"{name}.html").as_uri())
        page.wait_for_function("window.MathJax === undefined || document.querySelector('mjx-container')")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        if scheme == "light" or name in {"docs/index", "docs/methods/single-head"}:
            assert violations(page) == [], name
        picture(page, f"site-{Path(name).name}-{scheme}-{width}")
    page.close()


def test_the_gallery_lists_the_pictures_that_are_kept() -> None:
    listed = set(re.findall(r"`((?:report|live|site)-[\w-]+)", text_of(DOCS / "gallery.md")))
    tests = Path(__file__).parent
    kept = {f"live-{name}" for name in re.findall(r'\.picture\("([\w-]+)"\)', text_of(tests / "live/test_page.py"))}
    assert {name for name in listed if name.startswith("live-")} == kept
    assert {"report-single-head-", "report-multi-head-", "report-spent-", "report-audit-", "site-index-"} <= listed


def test_the_reference_has_what_is_public(site: Path) -> None:
    import keyhole  # noqa: PLC0415

    shown = "".join(page.read_text(encoding="utf-8") for page in (site / "docs" / "reference").glob("*.html"))
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
    return [re.sub(r"[\d.]+\s×\s10⁻[⁰¹²³⁴⁵⁶⁷⁸⁹]+", "…", each) for each in found if not each.startswith("$")]


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
