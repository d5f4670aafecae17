"""The command `keyhole bench`: what recoveries of given boxes cost on this machine, in queries and in time."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from keyhole.cli.options import (
    DONE,
    FAILED,
    INTERRUPTED,
    Budget,
    Json,
    MaxNorm,
    MaxSeconds,
    MethodOption,
    Noise,
    Quiet,
    complain,
    method_option,
)
from keyhole.cli.output import print_json, print_table
from keyhole.errors import UsageError
from keyhole.progress import Silent, wants_bar
from keyhole.recovery import Recovery
from keyhole.runs.execute import execute
from keyhole.runs.settings import Settings, parse_option
from keyhole.runs.store import plain

# One box of each family, seconds in all.
USUAL = (
    "demo:single-head?width=64",
    "demo:single-head?width=256&rank=8",
    "demo:single-head?width=16&noise=1e-3",
    "demo:multi-head?heads=4&width=16",
    "demo:multi-head?heads=8&width=32&outputs=32",
    "demo:relu-net?width=16&neurons=32",
    "demo:one-layer?width=8&neurons=16",
)


@dataclass(frozen=True)
class Costs:
    """Several recoveries of one box, which differ in the seed of the method."""

    target: str
    results: tuple[Recovery, ...]
    distances: tuple[float | None, ...]  # from the truth, where it is known

    @property
    def certified(self) -> int:
        """How many recoveries were."""
        return sum(result.certified for result in self.results)

    def summary(self) -> dict[str, Any]:
        """Medians of what it cost, and the worst distance of a certified result from the truth, as plain data."""
        stats = [result.stats for result in self.results]
        own = [stat.seconds / stat.oracle_seconds for stat in stats if stat.oracle_seconds > 0]
        pairs = zip(self.distances, self.results, strict=True)
        known = [distance for distance, result in pairs if distance is not None and result.certified]
        return {
            "target": self.target,
            "method": self.results[0].method,
            "runs": len(self.results),
            "certified": self.certified,
            "outcomes": [result.outcome.name for result in self.results],
            "queries": median(stat.queries for stat in stats),
            "counting_bound": stats[0].counting_bound,
            "ratio": median(stat.ratio for stat in stats) if stats[0].counting_bound else None,
            "heldout_queries": median(stat.heldout_queries for stat in stats),
            "seconds": median(stat.seconds for stat in stats),
            "oracle_seconds": median(stat.oracle_seconds for stat in stats),
            "seconds_over_oracle": median(own) if own else None,
            "worst_distance": max(known) if known else None,
        }


def bench(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGET]...", help="Boxes, named as for `keyhole recover`; one of each family if none."
        ),
    ] = None,
    method: Annotated[str, method_option()] = "auto",
    budget: Budget = None,
    max_norm: MaxNorm = None,
    noise: Noise = None,
    runs: Annotated[int, typer.Option(min=1, help="Recoveries of each box, with seeds that follow one another.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="The first seed of the method.")] = 0,
    option: MethodOption = None,
    max_seconds: MaxSeconds = None,
    out: Annotated[Path | None, typer.Option(help="File to keep the figures in, as JSON.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write to --out even if there is such a file.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Recover boxes several times and print what it costs: queries over the counting bound, time over the box's own.

    Example: `keyhole bench 'demo:single-head?width=128' 'demo:relu-net?width=16&neurons=32' --runs 5`
    """
    options = dict(parse_option(text) for text in option or [])
    common = Settings("", method, budget, max_norm=max_norm, noise=noise, options=options, max_seconds=max_seconds)
    if out is not None and out.exists() and not force:
        raise UsageError(f"there is a file {out}: name another one, or write over it with --force")
    names = targets or list(USUAL)
    seeds = range(seed, seed + runs)
    found = []
    try:
        shown = wants_bar(False if quiet or as_json else None)
        for name in track(names, "recovering", console=Console(stderr=True), transient=True, disable=not shown):
            each = [replace(common, target=name, seed=one) for one in seeds]
            found.append(_costs(each))
    except KeyboardInterrupt:
        complain(f"interrupted after {len(found)} of {len(names)} boxes")
        if not found:
            return INTERRUPTED
    data = plain({"benchmarks": [costs.summary() for costs in found]})
    if out is not None:
        _keep(data, out)
    if as_json:
        print_json(data)
    elif not quiet:
        _show(found)
    if len(found) < len(names):
        return INTERRUPTED
    return DONE if all(costs.certified == runs for costs in found) else FAILED


def _costs(settings: Sequence[Settings]) -> Costs:
    # What the code of a box prints is not part of the table.
    with redirect_stdout(sys.stderr):
        endings = [execute(each, Silent()) for each in settings]
    return Costs(settings[0].target, tuple(each.result for each in endings), tuple(each.distance for each in endings))


def _keep(data: Any, path: Path) -> None:
    try:
        path.write_text(json.dumps(data, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror or error}; name a file in a folder that exists"
        ) from error


def _show(found: Sequence[Costs]) -> None:
    table = Table("box", "method", "certified", box=None, pad_edge=False, header_style="cyan")
    for title in ("queries", "bound", "ratio", "error", "seconds", "over the box's own"):
        table.add_column(title, justify="right")
    for costs in found:
        row = costs.summary()
        table.add_row(
            row["target"],
            row["method"],
            f"{row['certified']} of {row['runs']}",
            f"{row['queries']:,.0f}",
            f"{row['counting_bound']:,}",
            _figure(row["ratio"], ".3f"),
            _figure(row["worst_distance"], ".1e"),
            f"{row['seconds']:.2f}",
            _figure(row["seconds_over_oracle"], ".1f"),
        )
    print_table(table)


def _figure(number: float | None, form: str) -> str:
    return "" if number is None else format(number, form)
