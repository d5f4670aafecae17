"""`keyhole report`: the page of a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli.options import DONE, Json, Quiet, complain
from keyhole.cli.output import file_lines, print_json, print_lines
from keyhole.report.build import write_pictures, write_report
from keyhole.report.html.canvas import INSTALL


def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A folder that a command wrote with --out.")],
    png: Annotated[bool, typer.Option("--png", help="Write every picture as a file too, into RUN/pictures.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Make report.html of a run folder again: one page with everything, that opens from disk without a network.

    Example: `keyhole report demo-run --png`
    """
    try:
        path, found = write_report(folder)
        pictures = write_pictures(folder, found) if png else {}
    except ImportError as error:
        return complain(f"no report can be made: {error}; get it with {INSTALL}")
    if as_json:
        print_json({**found.as_data(), "report": path, "pictures": pictures})
    elif not quiet:
        head = found.headline
        lines = [("verdict", f"{head.word}: {head.title}"), ("", head.said)]
        print_lines([*lines, *file_lines({"report": path, **pictures}, [])], good=head.tone != "bad")
    return DONE
