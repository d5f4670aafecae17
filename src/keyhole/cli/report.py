"""`keyhole report`: the page of a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli.options import DONE, Json, Quiet, Sentence, complain
from keyhole.cli.output import file_lines, print_json, print_lines
from keyhole.errors import UsageError
from keyhole.report.build import write_pictures, write_report
from keyhole.report.html.canvas import INSTALL
from keyhole.runs.attention import keep_attention
from keyhole.runs.reader import read_folder


def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A folder that a command wrote with --out.")],
    png: Annotated[bool, typer.Option("--png", help="Write every picture as a file too, into RUN/pictures.")] = False,
    sentence: Sentence = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Make report.html of a run folder again: one page with everything, that opens from disk without a network.

    Example: `keyhole report demo-run --png`
    """
    seen, notes = dict[str, Path](), list[str]()
    if sentence is not None:
        seen, notes = keep_attention(folder, str(read_folder(folder).record["settings"].get("target", "")), sentence)
        if notes:
            raise UsageError(notes[0])
    try:
        path, found = write_report(folder)
        pictures = write_pictures(folder, found) if png else {}
    except ImportError as error:
        return complain(f"no report can be made: {error}; get it with {INSTALL}")
    if as_json:
        print_json({**found.as_data(), "report": path, "pictures": pictures, **seen})
    elif not quiet:
        head = found.headline
        lines = [("verdict", f"{head.word}: {head.title}"), ("", head.said)]
        print_lines([*lines, *file_lines({"report": path, **seen, **pictures}, [])], good=head.tone != "bad")
    return DONE
