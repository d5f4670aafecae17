"""`keyhole diagnose`: what can be known of a family or of parameters, or what family a box is of."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from keyhole.cli.options import (
    DONE,
    FAILED,
    Budget,
    Force,
    Journal,
    Json,
    MaxNorm,
    MaxSeconds,
    Noise,
    Quiet,
    Seed,
    complain,
)
from keyhole.cli.output import file_lines, keep_record, print_json, print_lines
from keyhole.errors import OracleError, UsageError
from keyhole.families import load
from keyhole.recover import diagnose as diagnose_box
from keyhole.report.text import diagnosis
from keyhole.runs.store import DIAGNOSIS, reserve_folder
from keyhole.targets import open_declared


def diagnose(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="SUBJECT",
            help="A family: `single-head`, `multi-head`, `residual`, `relu-net` or `one-layer`; parameters: "
            "`file:params.safetensors`; or a box, named as for `keyhole recover`",
        ),
    ],
    inputs: Annotated[str, typer.Option(help="`unrestricted`, `one-hot` or `mean-zero` tokens.")] = "unrestricted",
    max_length: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence at most.")] = None,
    budget: Budget = None,
    journal: Journal = None,
    max_norm: MaxNorm = None,
    noise: Noise = None,
    seed: Seed = 0,
    max_seconds: MaxSeconds = None,
    out: Annotated[Path | None, typer.Option(help="Of a box: folder for diagnosis.json and report.html.")] = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Say what of a family or of given parameters can be known from answers, or what family a box is of.

    Example: `keyhole diagnose multi-head --max-length 2`, `keyhole diagnose 'demo:one-layer?residual=1'`
    """
    if ":" in subject and not subject.startswith("file:"):
        settings: dict[str, Any] = {"target": subject, "seed": seed, "max_seconds": max_seconds}
        settings |= {"budget": budget, "journal": journal, "max_norm": max_norm, "noise": noise}
        return _diagnose_target(settings, out, force=force, as_json=as_json, quiet=quiet)
    of_boxes = {"out": out, "budget": budget, "journal": journal, "max-norm": max_norm, "noise": noise}
    if given := [name for name, value in of_boxes.items() if value is not None]:
        raise UsageError(f"--{given[0]} is for boxes: of a family or a file nothing is asked, and no run kept")
    if subject.startswith("file:"):
        if inputs != "unrestricted" or max_length is not None:
            raise UsageError("--inputs and --max-length are for families: a file is diagnosed for inputs of all kinds")
        params = load(subject.removeprefix("file:"))
        if as_json:
            print_json(diagnosis.of_params(params))
        elif not quiet:
            print_lines(diagnosis.describe_params(params))
        return DONE
    if Path(subject).is_file():
        raise UsageError(f"{subject!r} is no family but a file: did you mean file:{subject}?")
    found = diagnosis.of_family(subject, inputs, max_length)
    if as_json:
        print_json(found)
    elif not quiet:
        Console(highlight=False).print(diagnosis.table_of_claims(found))
    return DONE


def _diagnose_target(settings: Mapping[str, Any], out: Path | None, *, force: bool, as_json: bool, quiet: bool) -> int:
    text, seed = settings["target"], settings["seed"]
    record = {name: value for name, value in settings.items() if name != "max_seconds" and value is not None}
    with (
        redirect_stdout(sys.stderr),
        reserve_folder(out, DIAGNOSIS, record, force=force),
        open_declared(text, settings["max_norm"], settings["noise"]) as target,
    ):
        try:
            limits = {"journal": settings["journal"], "seed": seed, "max_seconds": settings["max_seconds"]}
            found = diagnose_box(target.oracle, settings["budget"], **limits)
        except OracleError as error:
            return complain(f"the box failed, so nothing can be said of it: {error}", FAILED)
        data = {**found.summary(), "target": target.text, "box": target.label}
        files, notes = keep_record(out, DIAGNOSIS, {**data, "seed": seed}, record)
    if as_json:
        print_json({**data, "next": diagnosis.next_command(found, text), "files": files, "notes": notes})
    elif not quiet:
        print_lines([*diagnosis.describe_diagnosis(found, text), *file_lines(files, notes)])
    return DONE if found.method else FAILED
