"""The two charts of the live page beside small charting libraries: what they weigh, and on what they draw.

Libraries are the newest that npm has, as they publish themselves for a page that loads one file. Lines and bytes of
ours are those of the functions that draw, so more than a library would replace: it, too, is told what to draw.
"""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path

import keyhole
from benchmarks.support.rows import markdown

OURS = ("draw", "showCurve", "showHeldout")
THEIRS = (
    ("uplot", "dist/uPlot.iife.min.js", "canvas"),
    ("chart.js", "dist/chart.umd.min.js", "canvas"),
    ("chartist", "dist/index.umd.js", "SVG"),
    ("frappe-charts", "dist/frappe-charts.min.umd.js", "SVG"),
)


def table() -> str:
    page = (Path(keyhole.__file__).parent / "live" / "static" / "page.js").read_text()
    names = "|".join(OURS)
    own = "".join(re.findall(rf"^function (?:{names})\(.*?^}}\n", page, re.MULTILINE | re.DOTALL))
    rows = [row("ours", own.encode(), len(own.splitlines()), "SVG")]
    rows += [row("all of the page's script", page.encode(), len(page.splitlines()), "")]
    rows += [row(*published(name, file), "", surface) for name, file, surface in THEIRS]
    return markdown(["charts", "bytes", "bytes, gzip", "lines", "draws on"], rows)


def row(name: str, data: bytes, lines: int | str, surface: str) -> list[object]:
    return [name, f"{len(data):,}", f"{len(gzip.compress(data)):,}", lines, surface]


def published(name: str, file: str) -> tuple[str, bytes]:
    """Name with version, and the file, of a package from npm."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--json", "--pack-destination", folder, name]
        (told,) = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout)
        with tarfile.open(Path(folder) / told["filename"]) as archive:
            found = archive.extractfile(f"package/{file}")
            assert found is not None
            return f"{name} {told['version']}", found.read()
