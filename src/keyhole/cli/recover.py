"""`keyhole recover`: what is inside a black box, with a certificate."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyhole.cli.options import (
    DONE,
    FAILED,
    INTERRUPTED,
    Budget,
    Concurrency,
    Dask,
    Force,
    Journal,
    Json,
    MaxNorm,
    MaxSeconds,
    MethodOption,
    Quiet,
    Seed,
    Sentence,
    Workers,
    complain,
    method_option,
)
from keyhole.cli.output import add_report, file_lines, print_json, print_lines
from keyhole.cli.recover_model import names_all_layers, recover_all_layers
from keyhole.errors import UsageError
from keyhole.progress import Observer, on_terminal
from keyhole.report.text.recovery import describe
from keyhole.runs.attention import keep_attention
from keyhole.runs.execute import Ending, execute
from keyhole.runs.settings import JOURNAL, Settings, parse_option

if TYPE_CHECKING:
    from keyhole.cli.watch_page import WatchPage


def recover(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="`demo:single-head?width=64&rank=4` (also norm, seed, max_norm, noise, decimals, labels, classes), "
            "`file:params.safetensors`, `python:path.py:factory`, `onnx:model.onnx`, `transformers:PATH#layer=2` "
            "(also part, positions, dtype), `http://host:port/v2/models/name`, "
            "or all attention layers of a model: `transformers:PATH#layer=all`. "
            "Keys may be options, which no shell wants quoted: `demo:single-head --width 64 --rank 4`",
        ),
    ],
    method: Annotated[str, method_option()] = "auto",
    budget: Budget = None,
    journal: Journal = None,
    seed: Seed = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for params.safetensors, radius.safetensors, run.json and report.html.")
    ] = None,
    force: Force = False,
    heldout: Annotated[
        int | None,
        typer.Option(min=1, help="Fresh queries for the certificate; 2.5 % of the recovery's if left out, 120 to 256."),
    ] = None,
    domain: Annotated[
        Path | None,
        typer.Option(
            help="Inputs that the certificate is to speak of besides: a .npy, .npz or .safetensors file of sequences "
            "(length, width) or (count, length, width)."
        ),
    ] = None,
    max_seconds: MaxSeconds = None,
    max_norm: MaxNorm = None,
    noise: Annotated[
        str | None,
        typer.Option(
            help="How answers err: `measure` to find out, `gaussian:1e-3`, `bounded:1e-3`, `rounded:3`, `cut:3`, "
            "`float32`, `float16`, `bfloat16`, of labels `flipped:0.1`, or `exact`."
        ),
    ] = None,
    target_error: Annotated[
        float | None, typer.Option(help="The same as --option target_error=…, for methods that stop at an accuracy.")
    ] = None,
    option: MethodOption = None,
    concurrency: Concurrency = None,
    workers: Workers = 1,
    dask: Dask = None,
    sentence: Sentence = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the run on a page of this machine while it goes on.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of that page; 0 takes any that is free.")] = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Recover what is inside a black box, and certify it with fresh queries.

    Ctrl-C ends it with exit code 130; with --journal the same command goes on from there.

    Example: `keyhole recover python:box.py:make --journal run.db --budget 5000 --out run`
    """
    how: dict[str, Any] = {"as_json": as_json, "quiet": quiet, "force": force}
    if port and not watch:
        raise UsageError("--port is for the page of --watch: leave it out, or ask for that")
    options = dict(parse_option(text) for text in option or [])
    if target_error is not None and options.setdefault("target_error", target_error) != target_error:
        raise UsageError("--target-error and --option target_error= differ: give one")
    settings = Settings(
        target,
        method,
        budget,
        journal,
        seed,
        heldout,
        max_norm,
        noise,
        options,
        out,
        max_seconds,
        domain,
        concurrency,
        workers,
        dask,
    )
    if sentence is not None and (out is None or not target.startswith("transformers:")):
        raise UsageError("--sentence is for layers of a model that are kept: transformers:PATH#layer=0 --out FOLDER")
    if names_all_layers(target):
        if watch:
            raise UsageError("--watch is for one box, not for all layers of a model: name one, #layer=0")
        try:
            return DONE if recover_all_layers(settings, sentence=sentence, **how) else FAILED
        except KeyboardInterrupt:
            return complain(_interruption(settings), INTERRUPTED)
    if not watch:
        return carry_out(settings, sentence=sentence, **how)
    from keyhole.cli.watch_page import WatchPage  # noqa: PLC0415 - a server takes long to import

    with WatchPage(port) as page:
        code = carry_out(settings, sentence=sentence, page=page, **how)
        if code != INTERRUPTED:
            page.linger()
        return code


def carry_out(
    settings: Settings,
    *,
    as_json: bool,
    quiet: bool,
    force: bool,
    picture: Callable[[Ending], bytes | None] | None = None,
    page: WatchPage | None = None,
    sentence: str | None = None,
) -> int:
    """Carry the settings of a run out, print how it ended, and make its report; the exit code."""
    work = partial(_execute, picture=picture, force=force, sentence=sentence)
    try:
        # Standard output is for the report: what the code of a box prints goes elsewhere.
        with redirect_stdout(sys.stderr):
            if page is not None:
                ending = page.watch(settings.target, settings, work, quiet=quiet)
            else:
                with on_terminal(settings.budget, quiet=quiet) as observer:
                    ending = work(settings, observer)
    except KeyboardInterrupt:
        return complain(_interruption(settings), INTERRUPTED)
    result = ending.result
    if as_json:
        about = {"target": ending.target.text, "box": ending.target.label, "distance": ending.distance}
        kept = {"files": ending.files, "notes": ending.notes, "resume": ending.resume}
        print_json({**result.summary(), **about, **kept})
    elif not quiet:
        print_lines(_lines(ending), good=result.certified)
    elif not result.certified:
        resume = f" To resume: {ending.resume}" if ending.resume else ""
        complain(f"{result.outcome.name}: {result.message}. {result.outcome.value}{resume}")
    return DONE if result.certified else FAILED


def _execute(settings: Settings, observer: Observer, sentence: str | None = None, **how: Any) -> Ending:
    ending = execute(settings, observer, **how)
    if settings.out is not None:
        seen, why = keep_attention(settings.out, settings.target, sentence)
        files, notes = add_report(settings.out, {**ending.files, **seen})
        ending = replace(ending, files=files, notes=[*ending.notes, *why, *notes])
    return ending


def _lines(ending: Ending) -> list[tuple[str, str]]:
    lines = list(describe(ending.result, ending.target.label, ending.distance))
    if ending.resume:
        lines.append(("resume", ending.resume))
    if ending.result.params is not None and not ending.files:
        lines.append(("files", "none: --out FOLDER keeps the parameters"))
    return lines + file_lines(ending.files, ending.notes)


def _interruption(settings: Settings) -> str:
    if settings.journal is None:
        again = replace(settings, journal=Path(JOURNAL)).command(settings.budget)
        return f"interrupted; nothing was kept: with --journal FILE a run can be resumed, for example {again}"
    kept = f"interrupted; the answers so far are kept in {settings.journal}"
    return f"{kept}. To resume: {settings.command(settings.budget)}"
