"""The command `keyhole learn`: a layer from labelled examples."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from keyhole.errors import UsageError
from keyhole.gauge import distance
from keyhole.noise import Noise
from keyhole.progress import wants_bar
from keyhole.recovery import Recovery
from keyhole.report.html.build import try_report
from keyhole.report.text.learned import describe_learned
from keyhole.runs.store import plain, prepare_folder, write_learned
from keyhole.samples import learn as learn_layer
from keyhole.targets.datasets import Data, open_data

DONE, FAILED, INTERRUPTED = 0, 1, 130


def learn(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="`examples.safetensors` or `examples.npz` with arrays `inputs` (n, k, d) and `outputs` (n, k, d_out), "
            "`demo:layer?d=8&k=4&m=2&n=4000` (also out, size, noise, gaussian, seed) or `demo:layer-hard?d=10&m=3`",
        ),
    ],
    heads: Annotated[str, typer.Option(help="How many, or `auto` to find out.")] = "auto",
    method: Annotated[str, typer.Option(help="`varpro`, `six-phase` or `auto`.")] = "auto",
    noise: Annotated[
        str | None,
        typer.Option(
            help="How outputs err: `gaussian:1e-3`, `rounded:3`, `float32`, `exact`, or `measure` if unknown."
        ),
    ] = None,
    rank: Annotated[int | None, typer.Option(min=1, help="Most that score matrices may have.")] = None,
    restarts: Annotated[int, typer.Option(min=1, help="Most starts of a fit.")] = 10,
    init: Annotated[str, typer.Option(help="Where starts come from: `random`, `spectral` or `six-phase`.")] = "random",
    search: Annotated[str, typer.Option(help="How heads are found: `grow` or `prune`.")] = "grow",
    heldout: Annotated[int | None, typer.Option(min=1, help="Examples held back; a tenth if left out.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the starts.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Determines every random number.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for params.safetensors, radius.safetensors, run.json, report.html.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> int:
    """Learn a multi-head attention layer from labelled examples, and certify it on examples held back.

    Example: `keyhole learn 'demo:layer?d=8&k=4&m=2&n=4000&seed=0' --jobs 2`
    """
    given = open_data(data)
    level: Noise | float | None = Noise.parse(noise) if noise is not None else given.noise
    if out is not None:
        prepare_folder(out)
    settings: dict[str, Any] = {
        "method": method,
        "seed": seed,
        "rank": rank,
        "restarts": restarts,
        "init": init,
        "search": search,
    }
    settings |= {"jobs": jobs, "heldout": heldout}
    try:
        with _bar(shown=wants_bar(False if quiet or as_json else None)) as progress:
            result = learn_layer(
                given.inputs, given.outputs, _heads(heads), noise=level, throw=False, progress=progress, **settings
            )
    except KeyboardInterrupt:
        typer.echo("keyhole: interrupted; nothing was kept", err=True)
        return INTERRUPTED
    apart = None
    if given.truth is not None and result.params is not None:
        apart = distance(result.params, given.truth)
    files: dict[str, Path] = {}
    note: str | None = None
    if out is not None:
        asked = {"data": data, "heads": heads, "noise": noise, **settings}
        files = write_learned(out, result, asked, apart, label=given.label, truth=given.truth)
        path, note = try_report(out)
        files |= {} if path is None else {"report": path}
    _report(result, given, apart, files, note, as_json=as_json, quiet=quiet)
    return DONE if result.certified else FAILED


def _heads(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--heads {text!r} is neither a whole number nor auto") from None


def _report(
    result: Recovery,
    given: Data,
    apart: float | None,
    files: dict[str, Path],
    note: str | None,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    if as_json:
        extras: dict[str, Any] = {"target": given.text, "box": given.label, "distance": apart, "files": files}
        extras["notes"] = [] if note is None else [note]
        typer.echo(json.dumps(plain({**result.summary(), **extras}), allow_nan=False))
        return
    if quiet:
        if not result.certified:
            typer.echo(f"keyhole: {result.outcome.name}: {result.message}. {result.outcome.value}", err=True)
        return
    console = Console(highlight=False)
    room = max(console.width, 60) - 13
    lines = list(describe_learned(result, given.label, apart))
    if result.params is not None and not files:
        lines.append(("files", "none: --out FOLDER keeps the parameters"))
    lines += [("" if number else "files", str(path)) for number, path in enumerate(files.values())]
    lines += [] if note is None else [("note", note)]
    for word, said in lines:
        rows = [said] if word in {"files", ""} else textwrap.wrap(said, room, break_long_words=False)
        style = ("bold green" if result.certified else "bold red") if word == "outcome" else ""
        for number, row in enumerate(rows):
            console.print(Text.assemble((f"{'' if number else word:>11}  ", "cyan"), (row, style)), soft_wrap=True)


@contextmanager
def _bar(*, shown: bool) -> Iterator[Any]:
    """What a person sees while starts run."""
    if not shown:
        yield None
        return
    columns = (
        TextColumn("{task.description:>12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("starts  {task.fields[residual]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("starts", total=None, residual="")

        def told(stage: str, done: int, most: int, relative: float) -> None:
            bar.update(task, description=stage, completed=done, total=most, residual=f"best residual {relative:.1e}")

        yield told
