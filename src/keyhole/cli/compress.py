"""`keyhole compress`: smaller parameters that answer almost alike."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from safetensors.numpy import save_file

from keyhole.cli.options import DONE, FAILED, Force, Json, Quiet, Seed, complain
from keyhole.cli.output import file_lines, print_json, print_lines, print_table
from keyhole.compress import Compressed
from keyhole.compress import compress as run_compress
from keyhole.errors import UsageError
from keyhole.families import Family, MultiHead
from keyhole.families.torch_layouts import weights_of
from keyhole.oracles import TransformersOracle
from keyhole.report.charts import short
from keyhole.runs.folders import prepare_folder, replace_files
from keyhole.runs.store import PARAMS, RUN, plain
from keyhole.targets.claims import TRANSFORMERS, open_claim
from keyhole.targets.datasets import open_inputs
from keyhole.targets.models import TRANSFORMERS_EXAMPLE, TRANSFORMERS_KEYS, split

FACTORS, WEIGHTS, RECORD = "factors.safetensors", "weights.safetensors", "compress.json"
MOST_ROWS = 12  # of the curve in a terminal


def compress(
    params: Annotated[
        str, typer.Argument(metavar="PARAMS", help="A run folder, a file of parameters, or others as for `verify`.")
    ],
    tolerance: Annotated[
        float | None, typer.Option(help="Relative change of answers, root mean square, that may remain.")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Most that score and value matrices may have.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="So many are kept: others are merged or left out.")] = None,
    domain: Annotated[
        Path | None, typer.Option(help="Inputs that matter: .npy, .npz or .safetensors, as for `keyhole recover`.")
    ] = None,
    seed: Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for params, factors, weights by a model's own names (.safetensors) and compress.json."
        ),
    ] = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Find smaller parameters that answer almost alike: lower ranks, fewer heads. Exit code 1: not within tolerance.

    Example: `keyhole compress run --tolerance 1e-3 --out small`
    """
    if out is not None and not force and out.is_dir() and any(out.iterdir()) and not (out / RECORD).is_file():
        raise UsageError(f"the folder {out} has other files in it: name another one, or write into it with --force")
    with redirect_stdout(sys.stderr):
        claim = open_claim(params)
        inputs = None if domain is None else open_inputs(domain)
        found = run_compress(claim.params, tolerance, rank=rank, heads=heads, domain=inputs, seed=seed)
        data = {"params": params, "seed": seed, "family": claim.params.family, **found.summary()}
        files, notes = ({}, []) if out is None else _keep(found, out, data, params)
    if as_json:
        print_json({**data, "files": files, "notes": notes})
    elif not quiet:
        _show(found, claim.label)
        if not files:
            notes = [*notes, "nothing was kept: --out FOLDER keeps the parameters"]
        print_lines(file_lines(files, notes))
    elif not found.met:
        complain(f"an error of {found.error:.2g} remains, more than the tolerance of {found.tolerance:g}")
    return DONE if found.met else FAILED


def _show(found: Compressed[Family], label: str) -> None:
    ranks = sorted(set(found.ranks.values()))
    listed = f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"{ranks[0]}"
    within = "" if found.met else f", more than the tolerance of {short(found.tolerance or 0.0)}"
    lines = [
        ("parameters", label),
        ("size", f"{found.size:,} of {found.original:,} numbers, {100 * found.size / found.original:.3g} %"),
        ("error", f"{short(found.error)} of the answers{within}, on {found.inputs}"),
        ("ranks", f"{listed} of {len(found.ranks)} matrices"),
        *(("" if number else "heads", each) for number, each in enumerate(found.changes)),
    ]
    print_lines(lines, good=found.met)
    table = Table("size", "error", box=None, pad_edge=False, header_style="cyan")
    step = -(-len(found.curve) // MOST_ROWS)
    for point in found.curve[::step]:
        table.add_row(f"{point.size:,}", short(point.error))
    typer.echo()
    print_table(table)
    typer.echo()


def _keep(
    found: Compressed[Family], folder: Path, data: Mapping[str, Any], text: str
) -> tuple[dict[str, Path], list[str]]:
    """Write parameters, factors, weights where there is a model that has names for them, and the record last."""
    prepare_folder(folder)
    tensors, notes = _weights(found, text)
    makers: dict[str, Any] = {PARAMS: found.params.save, FACTORS: found.save_factors}
    if tensors is not None:
        makers[WEIGHTS] = partial(save_file, tensors)
    record = json.dumps(plain(data), indent=2, allow_nan=False) + "\n"
    makers[RECORD] = lambda path: path.write_text(record, encoding="utf-8")
    replace_files(folder, makers, stale=(WEIGHTS,) if tensors is None else ())
    return {name.partition(".")[0]: folder / name for name in makers}, notes


def _weights(found: Compressed[Family], text: str) -> tuple[dict[str, Any] | None, list[str]]:
    """Tensors by the names of the model that the parameters came from; None, and why, where there are none."""
    record = Path(text) / RUN
    if record.is_file():
        text = str(json.loads(record.read_text(encoding="utf-8"))["settings"].get("target", ""))
    if not text.startswith(TRANSFORMERS):
        return None, []
    path, given = split(text.removeprefix(TRANSFORMERS), TRANSFORMERS_EXAMPLE, TRANSFORMERS_KEYS)
    oracle = TransformersOracle(path, **given)
    try:
        named = weights_of(MultiHead.of(found.params), oracle.place.module)
        return {f"{oracle.place.name}.{part}": array for part, array in named.items()}, []
    except UsageError as error:
        return None, [f"no weights of the model's own names: {error}"]
    finally:
        oracle.close()
