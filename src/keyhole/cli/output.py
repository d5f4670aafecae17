"""What commands print, and the records they keep with a report beside them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keyhole.recovery import typeset
from keyhole.runs.store import plain, write_record

# Columns a table may take, whatever the terminal has: rich cuts figures to fit, and half a figure is a wrong one.
WIDEST = 1000
LEAST_WIDTH = 60
COLUMN = 11  # characters of the words at the left
# Lines of these words stay in one piece, however long, so that they can be copied.
WHOLE = {"files", "", "resume", "next"}


def print_json(data: Any) -> None:
    """Print one JSON object."""
    typer.echo(json.dumps(plain(data), allow_nan=False))


def print_table(table: Table) -> None:
    """Print a table in one piece, wider than the terminal where it must be."""
    Console(highlight=False, width=WIDEST).print(table)


def print_lines(
    lines: Iterable[tuple[str, str]], *, good: bool = True, column: int = COLUMN, wrap: bool = True
) -> None:
    """Print words in a column of their own, and what is said of each beside it; an outcome in green or red."""
    console = Console(highlight=False)
    room = max(console.width, LEAST_WIDTH) - column - 2
    for word, text in lines:
        if word in WHOLE:
            rows = [text]
        else:
            rows = textwrap.wrap(typeset(text), room, break_long_words=False) if wrap else [typeset(text)]
        style = ("bold green" if good else "bold red") if word in {"outcome", "verdict"} else ""
        for number, row in enumerate(rows):
            line = Text.assemble((f"{'' if number else word:>{column}}  ", "cyan"), (row, style))
            console.print(line, soft_wrap=True)


def file_lines(files: Mapping[str, Path], notes: Sequence[str]) -> list[tuple[str, str]]:
    """The lines that name files, and those on what is missing."""
    lines = [("" if number else "files", str(path)) for number, path in enumerate(files.values())]
    return lines + [("note", note) for note in notes]


def keep_record(
    out: Path | None, name: str, data: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[dict[str, Path], list[str]]:
    """Write a record and its report, if there is a folder for them; the paths, and notes on what is missing."""
    if out is None:
        return {}, []
    files: dict[str, Path] = {"run": write_record(out, name, {**data, "settings": settings})}
    return add_report(out, files)


def add_report(out: Path, files: dict[str, Path]) -> tuple[dict[str, Path], list[str]]:
    """Write the report of a run folder; its path beside those of other files, or a note that says why there is none."""
    from keyhole.report.build import try_report  # noqa: PLC0415 - a page and its pictures take long to import

    path, note = try_report(out)
    return files | ({} if path is None else {"report": path}), [] if note is None else [note]
