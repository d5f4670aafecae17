"""`keyhole verify`: whether a box is the one in a file."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from keyhole.cli.options import (
    DONE,
    FAILED,
    INTERRUPTED,
    TARGET,
    Force,
    Journal,
    Json,
    MaxNorm,
    MaxSeconds,
    Quiet,
    Seed,
    complain,
)
from keyhole.cli.output import file_lines, keep_record, print_json, print_lines
from keyhole.report.text.verdict import describe_verdict
from keyhole.runs.store import VERIFICATION, reserve_folder
from keyhole.targets import open_declared
from keyhole.targets.claims import open_claim
from keyhole.verify import QUERIES
from keyhole.verify import verify as run_verify

Params = Annotated[
    str,
    typer.Argument(
        metavar="PARAMS",
        help="What it should be: `params.safetensors`, a run folder, `layers.safetensors#layer=0`, "
        "`transformers:PATH#layer=1`, weights of an nn.MultiheadAttention, `weights.pt#heads=4` (also prefix), or "
        "another box, which is recovered first: `model.onnx`, `demo:…`",
    ),
]
Tolerance = Annotated[
    float | None, typer.Option(help="Relative change of any part that does not count; rounding if left out.")
]
BoxNoise = Annotated[
    str | None,
    typer.Option(
        help="How answers err, as for `keyhole recover`; `measure` finds out with 100 to 336 queries more. "
        "Rounding is found out if left out."
    ),
]
AllowRadius = Annotated[
    bool,
    typer.Option(
        "--radius/--no-radius", help="Allow for the error bars in radius.safetensors, where it lies beside PARAMS."
    ),
]


def verify(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=TARGET)],
    params: Params,
    queries: Annotated[int, typer.Option("--queries", "--budget", min=1, help="Most queries in all.")] = QUERIES,
    tolerance: Tolerance = None,
    journal: Journal = None,
    seed: Seed = 0,
    max_norm: MaxNorm = None,
    noise: BoxNoise = None,
    max_seconds: MaxSeconds = None,
    radius: AllowRadius = True,
    out: Annotated[Path | None, typer.Option(help="Folder for verify.json and report.html.")] = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Find out from a few queries whether a box is the one in a file. Exit code 0: same, 1: different or inconclusive.

    Example: `keyhole verify python:box.py:make file:params.safetensors --tolerance 1e-4`
    """
    with redirect_stdout(sys.stderr):
        claimed = open_claim(params)
    radii = claimed.radius if radius else None
    claim = claimed.label + ("" if radii is None else f", {claimed.bars}")
    settings: dict[str, Any] = {"target": target, "params": params, "queries": queries, "tolerance": tolerance}
    settings |= {"journal": journal, "seed": seed, "max_norm": max_norm, "noise": noise, "radius": radius}
    settings |= {"max_seconds": max_seconds}
    with (
        redirect_stdout(sys.stderr),
        reserve_folder(out, VERIFICATION, settings, force=force),
        open_declared(target, max_norm, noise) as subject,
    ):
        try:
            found = run_verify(
                subject.oracle,
                claimed.params,
                queries,
                seed,
                tolerance,
                radius=radii,
                journal=journal,
                max_seconds=max_seconds,
            )
        except KeyboardInterrupt:
            return complain("interrupted; with --journal FILE what was answered is not asked again", INTERRUPTED)
        data = {**found.summary(), "target": subject.text, "box": subject.label}
        files, notes = keep_record(out, VERIFICATION, {**data, "claimed": claim, "seed": seed}, settings)
    if as_json:
        print_json({**data, "files": files, "notes": notes})
    elif not quiet:
        print_lines([*describe_verdict(found, subject.label, claim), *file_lines(files, notes)], good=found.same)
    elif not found.same:
        complain(f"{found.conclusion.upper()}: {found.message}")
    return DONE if found.same else FAILED
