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

from keyhole.errors import KeyholeError, UsageError
from keyhole.families import Family, load
from keyhole.recover_model import load_layers
from keyhole.runs.store import ATTENTION, HEADS, PARAMS, plain, write_record
from keyhole.sentence.attention_on import SENTENCE, attention_on, has_tokenizer
from keyhole.sentence.token_weights import save_weights
from keyhole.targets.models import TRANSFORMERS_EXAMPLE, TRANSFORMERS_KEYS, split

# Columns a table may take, whatever the terminal has: rich cuts figures to fit, and half a figure is a wrong one.
WIDEST = 1000
LEAST_WIDTH = 60
COLUMN = 11  # characters of the words at the left
# Lines of these words stay in one piece, however long, so that they can be copied.
WHOLE = {"files", "", "resume", "next"}
TRANSFORMERS = "transformers:"


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
        rows = [text] if word in WHOLE or not wrap else textwrap.wrap(text, room, break_long_words=False)
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


def keep_attention(out: Path, target: str, sentence: str | None) -> tuple[dict[str, Path], list[str]]:
    """Write what the heads in a folder attend to; the path, or a note that says why there is none.

    Where no sentence is given one is taken, if the model has a tokenizer, and nothing is said if not.
    """
    (out / ATTENTION).unlink(missing_ok=True)
    try:
        path, found = _heads_in(out, target)
        if sentence is None and not (found and has_tokenizer(path)):
            return {}, []
        if not found:
            raise UsageError("no heads were recovered")
        said = SENTENCE if sentence is None else sentence
        save_weights(out / ATTENTION, said, attention_on(said, path, found))
    except (KeyholeError, ImportError) as error:
        return {}, [] if sentence is None and not target.startswith(TRANSFORMERS) else [
            f"no attention on a sentence: {error}"
        ]
    return {"attention": out / ATTENTION}, []


def _heads_in(out: Path, target: str) -> tuple[str, dict[str | int, Family]]:
    """The folder of the model, and what was recovered of it by layer."""
    if not target.startswith(TRANSFORMERS):
        raise UsageError("a sentence is for the layers of a model: transformers:PATH#layer=0")
    path, given = split(target.removeprefix(TRANSFORMERS), TRANSFORMERS_EXAMPLE, TRANSFORMERS_KEYS)
    if given.get("part", "attention") != "attention":
        raise UsageError("heads are shown on a sentence where the attention alone was recovered: part=attention")
    found: dict[str | int, Family] = {}
    if given.get("layer") == "all" and (out / HEADS).is_file():
        found.update(load_layers(out / HEADS)[0])
    elif (out / PARAMS).is_file():
        found[int(given["layer"])] = load(out / PARAMS)
    return path, found
