"""A hook of MkDocs: pages of the site that live outside docs/, and links between files of the project.

Files of the project link to each other as they lie on disk, so that they can be read in any checkout. The site holds
the same files at other places; here links are turned round to these.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results"

LINK = re.compile(r"(?P<before>\]\()(?P<to>[^()\s#]+)(?P<anchor>#[^()\s]*)?(?=\))")
CONTENTS = re.compile(r"^## On this page\n\n(?:- .*\n)+\n", re.MULTILINE)  # the site has its own beside the page
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def places() -> dict[str, str]:
    """Where in the site the files of the project are that lie outside docs/."""
    found = {
        "README.md": "readme.md",
        "CONTRIBUTING.md": "contributing.md",
        "CHANGELOG.md": "changelog.md",
        "SECURITY.md": "security.md",
        "CITATION.cff": "CITATION.cff.txt",
        "LICENSE": "LICENSE.txt",
        "examples/README.md": "examples.md",
    }
    found |= {f"examples/{path.name}": f"examples/{path.name}" for path in ROOT.glob("examples/*.[pi]*y*")}
    return found | {f"{RESULTS}/{name}.md": f"results/{name}.md" for name in results()}


def results() -> list[str]:
    """Names of the tables that benchmarks have kept."""
    return sorted(path.stem for path in (ROOT / RESULTS).glob("*.md"))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the tables of results, of which every benchmark adds one."""
    config.nav.append({"Measured": [{name.replace("_", " "): f"results/{name}.md"} for name in results()]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside docs/."""
    for source, place in places().items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Turn links round to where their goals are in the site."""
    if page.parent is None:  # nothing stands beside it that a sidebar could list
        page.meta["hide"] = ["navigation"]
    outside = places()
    back = {place: source for source, place in outside.items()}
    source = back.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    here = posixpath.dirname(page.file.src_uri)

    def moved(found: re.Match[str]) -> str:
        if ":" in found["to"]:
            return found[0]
        goal = posixpath.normpath(posixpath.join(posixpath.dirname(source), found["to"]))
        place = outside.get(goal) or goal.removeprefix("docs/")
        return found["before"] + posixpath.relpath(place, here or ".") + (found["anchor"] or "")

    parts, end = [], 0
    for block in FENCE.finditer(markdown):  # what stands in a block is no link
        parts += [LINK.sub(moved, markdown[end : block.start()]), block[0]]
        end = block.end()
    text = "".join([*parts, LINK.sub(moved, markdown[end:])])
    if source.startswith(RESULTS):
        page.meta["hide"] = ["toc"]  # tables are wide
        title = page.file.name.replace("_", " ").capitalize()
        text = f'# {title}\n\n<div class="results" markdown>\n\n{text}\n\n</div>\n'
    return CONTENTS.sub("", text)
