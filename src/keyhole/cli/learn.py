"""The command `keyhole learn`: a layer from labelled examples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from keyhole.cli.options import DONE, FAILED, INTERRUPTED, Force, Json, MaxSeconds, Quiet, Seed, complain, method_option
from keyhole.cli.output import add_report, file_lines, print_json, print_lines
from keyhole.errors import UsageError
from keyhole.gauge import distance
from keyhole.noise import Noise
from keyhole.progress import steps_bar
from keyhole.report.text.recovery import describe_layer
from keyhole.runs.store import RUN, reserve_folder, write_run
from keyhole.samples import learn as learn_layer
from keyhole.samples.six_phase.method import CRUDE, NET, SOLVERS, PhaseSettings
from keyhole.shards.shard import NAMES
from keyhole.targets.datasets import open_data


def learn(
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA...",
            help="A file with arrays `inputs` (n, k, d) and `outputs` (n, k, d_out), a folder or a pattern of such "
            "shards, or several of them (.npz, .npy, .safetensors, .pt, .parquet, .arrow, .zarr), "
            "`demo:layer?d=8&k=4&m=2&n=4000` (also out, size, noise, gaussian, seed) or `demo:layer-hard?d=10&m=3`",
        ),
    ],
    heads: Annotated[str, typer.Option(help="How many, or `auto` to find out.")] = "auto",
    method: Annotated[str, method_option(("auto", "varpro", "six-phase"))] = "auto",
    noise: Annotated[
        str | None,
        typer.Option(
            help="How outputs err: `gaussian:1e-3`, `bounded:1e-3`, `rounded:3`, `float32`, `exact`, or `measure` if "
            "unknown. Rounding is found out if left out."
        ),
    ] = None,
    rank: Annotated[int | None, typer.Option(min=1, help="Most that score matrices may have.")] = None,
    restarts: Annotated[int, typer.Option(min=1, help="Most starts of a fit.")] = 10,
    init: Annotated[str, typer.Option(help="Where starts come from: `random`, `spectral` or `six-phase`.")] = "random",
    search: Annotated[str, typer.Option(help="How heads are found: `grow` or `prune`.")] = "grow",
    heldout: Annotated[int | None, typer.Option(min=1, help="Examples held back; a tenth if left out.")] = None,
    max_seconds: MaxSeconds = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the starts.")] = 1,
    polish: Annotated[bool, typer.Option(help="Whether a descent follows the six phases.")] = True,
    solver: Annotated[
        str, typer.Option(help=f"How the six phases solve for the proxy: {', '.join(f'`{each}`' for each in SOLVERS)}.")
    ] = SOLVERS[0],
    crude: Annotated[
        str,
        typer.Option(help=f"How they begin with the sum of projections: {' or '.join(f'`{each}`' for each in CRUDE)}."),
    ] = CRUDE[0],
    by_head: Annotated[
        bool, typer.Option(help="Whether rows certify head by head after the phases; not a step of the paper.")
    ] = True,
    names: Annotated[str, typer.Option(help="Names of the two arrays, with a comma.")] = ",".join(NAMES),
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad shards out, and name them.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes that share shards, or starts.")] = 1,
    dask: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="The Dask scheduler whose workers share them.")
    ] = None,
    seed: Seed = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for params.safetensors, radius.safetensors, run.json, report.html.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Learn a multi-head attention layer from labelled examples, and certify it on examples held back.

    Example: `keyhole learn 'demo:layer?d=8&k=4&m=2&n=4000&seed=0' --jobs 2`
    """
    given = open_data(data, names.split(","))
    text = " ".join(data)
    level: Noise | float | None = Noise.parse(noise) if noise is not None else given.noise
    settings: dict[str, Any] = {"method": method, "seed": seed, "rank": rank, "restarts": restarts, "init": init}
    settings |= {"search": search, "jobs": jobs, "heldout": heldout, "max_seconds": max_seconds}
    shards: dict[str, Any] = {"names": names.split(","), "skip_bad": skip_bad}
    settings |= {"polish": polish, "workers": workers, "dask": dask, **(shards if given.outputs is None else {})}
    record = {"data": text, "heads": heads, "noise": noise, "solver": solver, "crude": crude, "by_head": by_head}
    record |= settings
    settings["phases"] = PhaseSettings(crude=crude, solver=solver, by_head=by_head)
    files: dict[str, Path] = {}
    notes: list[str] = []
    try:
        with (
            reserve_folder(out, RUN, record, force=force),
            steps_bar(False if quiet or as_json else None, "starts") as show,
        ):

            def progress(stage: str, done: int, most: int, relative: float) -> None:
                if stage.startswith(NET):  # what it costs is said before it is made
                    if not quiet:
                        typer.echo(f"keyhole: {stage}", err=True)
                    return
                show(description=stage, completed=done, total=most, note=f"starts, best residual {relative:.1e}")

            result = learn_layer(
                given.inputs, given.outputs, _heads(heads), noise=level, throw=False, progress=progress, **settings
            )
            apart = None
            if given.truth is not None and result.params is not None:
                apart = distance(result.params, given.truth)
            if out is not None:
                files = write_run(out, result, record, text, apart, label=given.label, truth=given.truth)
                files, notes = add_report(out, files)
    except KeyboardInterrupt:
        return complain("interrupted; nothing was kept", INTERRUPTED)
    if as_json:
        extras = {"target": given.text, "box": given.label, "distance": apart, "files": files, "notes": notes}
        print_json({**result.summary(), **extras})
    elif not quiet:
        lines = list(describe_layer(result, given.label, apart))
        if result.params is not None and not files:
            lines.append(("files", "none: --out FOLDER keeps the parameters"))
        print_lines([*lines, *file_lines(files, notes)], good=result.certified)
    elif not result.certified:
        complain(f"{result.outcome.name}: {result.message}. {result.outcome.value}")
    return DONE if result.certified else FAILED


def _heads(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--heads {text!r} is neither a whole number nor auto") from None
