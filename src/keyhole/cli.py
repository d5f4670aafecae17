"""The commands. Exit codes: 0 done, 1 the outcome admits failure, 2 wrong use, 130 interrupted."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
from rich.console import Console
from rich.text import Text

from keyhole import session
from keyhole.errors import KeyholeError
from keyhole.model import SingleHead, distance
from keyhole.recovery import Recovery
from keyhole.report import describe
from keyhole.report.picture import INSTALL, draw
from keyhole.runs import Settings, keyhole_version, parse_option, plain, prepare_folder, write_run
from keyhole.session import HELDOUT_QUERIES
from keyhole.targets import Target, demo_text, open_target

DONE, FAILED, WRONG_USE, INTERRUPTED = 0, 1, 2, 130
# What the parser of the command line raises; its home differs between versions of typer.
Misuse = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])

app = typer.Typer(name="keyhole", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Seed = Annotated[int, typer.Option(min=0, help="Determines every random number.")]


@dataclass(frozen=True)
class Ending:
    """A finished run and everything there is to say about it."""

    result: Recovery
    target: Target
    settings: Settings
    distance: float | None
    files: dict[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def resume(self) -> str | None:
        """The command that goes on from here."""
        return self.settings.resume(self.result, self.target.oracle.signature.width)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit; what was used wrongly is said in one line on standard error."""
    try:
        code = app(args=arguments, prog_name="keyhole", standalone_mode=False)
    except Misuse as error:
        code = _complain(f"{error.format_message().rstrip('.')}. See keyhole --help.")
    except KeyholeError as error:
        code = _complain(str(error))
    sys.exit(code)


@app.callback(invoke_without_command=True)
def overview(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Recover the attention inside a model from its answers, exactly and with a certificate.

    Begin with: `keyhole demo`
    """
    if version:
        typer.echo(f"keyhole {keyhole_version()}")
        raise typer.Exit(DONE)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(WRONG_USE)


@app.command()
def demo(
    width: Annotated[int, typer.Option(help="Numbers per token.")] = 32,
    rank: Annotated[int | None, typer.Option(help="Rank of the score matrix; full if left out.")] = None,
    norm: Annotated[float, typer.Option(help="Spectral norm of the score matrix.")] = 1.0,
    seed: Seed = 0,
    out: Annotated[
        Path, typer.Option(help="Folder for params, radius (.safetensors), run.json and recovery.png.")
    ] = Path("demo-run"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Make a random attention head, recover it from its answers, compare and draw a picture.

    Example: `keyhole demo --width 64 --rank 4`
    """
    numbers = {"width": width, "rank": rank, "norm": norm, "seed": seed}
    settings = Settings(demo_text("single-head", numbers), seed=seed, out=out)
    return _carry_out(settings, as_json=as_json, quiet=quiet, picture=True)


@app.command()
def recover(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="`demo:single-head?width=64&rank=4` (also norm, seed, max_norm), `file:params.safetensors` or "
            "`python:path.py:factory`",
        ),
    ],
    method: Annotated[str, typer.Option(help="The learner.")] = "auto",
    budget: Annotated[int | None, typer.Option(min=0, help="Most queries in all.")] = None,
    journal: Annotated[Path | None, typer.Option(help="File that keeps every answer, to resume from.")] = None,
    seed: Seed = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for params.safetensors, radius.safetensors and run.json.")
    ] = None,
    heldout: Annotated[int, typer.Option(min=1, help="Fresh queries for the certificate.")] = HELDOUT_QUERIES,
    max_norm: Annotated[float | None, typer.Option(help="Send no token longer than this.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the method; repeatable.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Recover what is inside a black box, and certify it with fresh queries.

    Example: `keyhole recover python:box.py:make --journal run.db --budget 5000 --out run`
    """
    options = dict(parse_option(text) for text in option or [])
    settings = Settings(target, method, budget, journal, seed, heldout, max_norm, options, out)
    return _carry_out(settings, as_json=as_json, quiet=quiet)


def _carry_out(settings: Settings, *, as_json: bool, quiet: bool, picture: bool = False) -> int:
    try:
        # Standard output is for the report: what the code of a box prints goes elsewhere.
        with redirect_stdout(sys.stderr):
            ending = _run(settings, picture=picture, progress=False if quiet else None)
    except KeyboardInterrupt:
        return _complain(_interrupted(settings), INTERRUPTED)
    if as_json:
        typer.echo(json.dumps(_as_data(ending), allow_nan=False))
    elif not quiet:
        _show(ending)
    elif not ending.result.certified:
        _complain(_failure(ending))
    return DONE if ending.result.certified else FAILED


def _run(settings: Settings, *, picture: bool, progress: bool | None) -> Ending:
    target = open_target(settings.target)
    try:
        target = target.within(settings.max_norm)
        if settings.out is not None:
            prepare_folder(settings.out)
        result = session.recover(
            target.oracle,
            settings.method,
            settings.budget,
            settings.journal,
            settings.seed,
            throw=False,
            heldout=settings.heldout,
            progress=progress,
            **settings.options,
        )
    finally:
        target.oracle.close()
    known = target.truth is not None and result.params is not None
    ending = Ending(result, target, settings, distance(result.params, target.truth) if known else None)
    if settings.out is not None:
        image = _picture(ending) if picture else None
        box = target.oracle.name
        ending.files.update(write_run(settings.out, result, settings, box, ending.distance, image))
    return ending


def _picture(ending: Ending) -> bytes | None:
    """The picture, or None and a note: a result without a picture is still a result."""
    if not isinstance(ending.result.params, SingleHead):
        ending.notes.append("no picture: nothing was recovered that could be drawn")
        return None
    try:
        return draw(ending.result, ending.target.truth, ending.distance)
    except ImportError as error:
        ending.notes.append(f"no picture: {error}; get it with {INSTALL}")
        return None


def _as_data(ending: Ending) -> dict[str, Any]:
    extras = {
        "target": ending.target.text,
        "box": ending.target.label,
        "distance": ending.distance,
        "files": ending.files,
        "notes": ending.notes,
        "resume": ending.resume,
    }
    return cast(dict[str, Any], plain({**ending.result.summary(), **extras}))


def _lines(ending: Ending) -> list[tuple[str, str]]:
    lines = list(describe(ending.result, ending.target.label, ending.distance))
    if ending.resume:
        lines.append(("resume", ending.resume))
    if ending.result.params is not None and not ending.files:
        lines.append(("files", "none: --out FOLDER keeps the parameters"))
    lines += [("" if number else "files", str(path)) for number, path in enumerate(ending.files.values())]
    return lines + [("note", note) for note in ending.notes]


def _show(ending: Ending) -> None:
    """Words in a column of their own; paths and commands stay in one piece, so that they can be copied."""
    console = Console(highlight=False)
    room = max(console.width, 60) - 13
    for word, said in _lines(ending):
        rows = [said] if word in {"files", "", "resume"} else textwrap.wrap(said, room, break_long_words=False)
        style = ("bold green" if ending.result.certified else "bold red") if word == "outcome" else ""
        for number, row in enumerate(rows):
            line = Text.assemble((f"{'' if number else word:>11}  ", "cyan"), (row, style))
            console.print(line, soft_wrap=True)


def _failure(ending: Ending) -> str:
    result = ending.result
    resume = f" To resume: {ending.resume}" if ending.resume else ""
    return f"{result.outcome.name}: {result.message}. {result.outcome.value}{resume}"


def _interrupted(settings: Settings) -> str:
    if settings.journal is None:
        return "interrupted; nothing was kept: with --journal FILE a run can be resumed"
    kept = f"interrupted; the answers so far are kept in {settings.journal}"
    return f"{kept}. To resume: {settings.command(settings.budget)}"


def _complain(text: str, code: int = WRONG_USE) -> int:
    typer.echo(f"keyhole: {' '.join(text.split())}", err=True)
    return code
