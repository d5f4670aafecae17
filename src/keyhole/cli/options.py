"""What all commands share: exit codes, options of the same name and meaning, and how wrong use is reported."""

from __future__ import annotations

from typing import Annotated

import typer

DONE, FAILED, WRONG_USE, INTERRUPTED = 0, 1, 2, 130

TARGET = "The box, named as for `keyhole recover`."

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Seed = Annotated[int, typer.Option(min=0, help="Determines every random number.")]
Force = Annotated[bool, typer.Option("--force", help="Write to --out even if it belongs to something else.")]
MaxNorm = Annotated[float | None, typer.Option(help="Send no token longer than this.")]
MaxSeconds = Annotated[
    float | None,
    typer.Option(
        help="End a recovery whose own arithmetic takes longer; a minute, and more with queries, if left out."
    ),
]
MethodOption = Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the method; repeatable.")]


def complain(text: str, code: int = WRONG_USE) -> int:
    """Say in one line on standard error what went wrong; the exit code."""
    typer.echo(f"keyhole: {' '.join(text.split())}", err=True)
    return code
