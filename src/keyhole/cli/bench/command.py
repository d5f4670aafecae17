"""The command `keyhole bench`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from keyhole.cli.bench.costs import Costs, Measured, measure
from keyhole.cli.bench.gpu import cases, measure_gpu, open_gpu
from keyhole.cli.bench.growth import SERIES, Growth
from keyhole.cli.bench.machine import in_words, machine
from keyhole.cli.bench.tables import is_table, print_table_of
from keyhole.cli.options import (
    DONE,
    FAILED,
    INTERRUPTED,
    Budget,
    Dask,
    Json,
    MaxNorm,
    MaxSeconds,
    MethodOption,
    Noise,
    Quiet,
    complain,
    method_option,
)
from keyhole.cli.options import Workers as WorkersOption
from keyhole.cli.output import print_json, print_table
from keyhole.errors import UsageError
from keyhole.executors.base import Workers
from keyhole.progress import steps_bar
from keyhole.recovery import typeset
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


@dataclass
class Benchmark:
    """What was measured, as far as it went."""

    machine: dict[str, Any]
    costs: list[Costs] = field(default_factory=list)
    growth: list[Growth] = field(default_factory=list)
    wanted: int = 0  # boxes

    @property
    def code(self) -> int:
        """The exit code."""
        if len(self.costs) < self.wanted:
            return INTERRUPTED
        return DONE if all(costs.certified == len(costs.results) for costs in self.costs) else FAILED

    def data(self) -> dict[str, Any]:
        """As plain data."""
        rows, growth = [each.summary() for each in self.costs], [each.summary() for each in self.growth]
        data: dict[str, Any] = plain({"machine": self.machine, "benchmarks": rows, "growth": growth})
        return data


def bench(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGET]...",
            help="Boxes, named as for `keyhole recover`, or a table of this clone of the repository.",
        ),
    ] = None,
    method: Annotated[str, method_option()] = "auto",
    budget: Budget = None,
    max_norm: MaxNorm = None,
    noise: Noise = None,
    runs: Annotated[
        int | None,
        typer.Option(min=1, help="Recoveries of each box, with seeds that follow one another; 3 if left out."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The first seed of the method.")] = 0,
    option: MethodOption = None,
    max_seconds: MaxSeconds = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Heads on a GPU besides.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Small boxes, once each: less than a minute.")] = False,
    workers: WorkersOption = 1,
    dask: Dask = None,
    out: Annotated[Path | None, typer.Option(help="File to keep the figures in, as JSON.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write to --out even if there is such a file.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Recover boxes several times and print what it costs: queries over the counting bound, time over the box's own.

    Without a box named, the whole table: a box of each family, then boxes of growing size, with the exponents of
    growth in width d, rank r and heads H. Workers that share cores measure longer times.

    Example: `keyhole bench 'demo:single-head?width=128' 'demo:relu-net?width=16&neurons=32' --runs 5`
    """
    if targets and is_table(*targets):
        return print_table_of(targets[0])
    given = dict(parse_option(text) for text in option or [])
    common = Settings("", method, budget, max_norm=max_norm, noise=noise, options=given, max_seconds=max_seconds)
    if out is not None and out.exists() and not force:
        raise UsageError(f"there is a file {out}: name another one, or write over it with --force")
    found = Benchmark(machine())
    seeds = range(seed, seed + (runs or (1 if quick else 3)))
    whole = not targets
    try:
        with _measuring(Workers(workers, dask), False if quiet or as_json else None) as measure_all:
            _measure(found, measure_all, common, list(targets or USUAL), seeds, whole=whole, quick=quick)
        if gpu:
            _measure_gpu(found, seeds, quick=quick)
    except KeyboardInterrupt:
        complain(f"interrupted after {len(found.costs)} of {found.wanted} boxes")
        if not found.costs:
            return INTERRUPTED
    if out is not None:
        _keep(found.data(), out)
    if as_json:
        print_json(found.data())
    elif not quiet:
        _show(found)
    return found.code


def _measure_gpu(found: Benchmark, seeds: range, *, quick: bool) -> None:
    torch, found.machine["gpu"] = open_gpu()
    for width, rank in cases(quick=quick):
        found.wanted += 1
        found.costs.append(measure_gpu(torch, width, rank, seeds))


MeasureAll = Callable[[list[Settings]], Iterator[Measured]]


@contextmanager
def _measuring(workers: Workers, progress: bool | None) -> Iterator[MeasureAll]:
    """Recoveries by this process, or by several, one after the other as far as the table is concerned."""
    with ExitStack() as stack:
        crew, show = stack.enter_context(workers.open()), stack.enter_context(steps_bar(progress, "recovering"))

        def measure_all(settings: list[Settings]) -> Iterator[Measured]:
            show(total=len(settings), completed=0)
            for each in crew.map(measure, settings):
                show(advance=1)
                yield each

        yield measure_all


def _measure(
    found: Benchmark,
    measure_all: MeasureAll,
    common: Settings,
    names: list[str],
    seeds: range,
    *,
    whole: bool,
    quick: bool,
) -> None:
    """The boxes of the table, and those that grow; what was measured before an interrupt is kept."""
    series = SERIES if whole else ()
    grown = [(each, size, target) for each in series for size, target in each.boxes(quick=quick)]
    found.wanted = len(names) + len(grown)
    settings = [replace(common, target=name, seed=seed) for name in names for seed in seeds]
    settings += [replace(common, target=target, method=each.method) for each, _, target in grown]
    measured = measure_all(settings)
    for name in names:
        found.costs.append(Costs.of(name, [next(measured) for _ in seeds]))
    for each in series:
        some = [(size, Costs.of(target, [next(measured)])) for one, size, target in grown if one is each]
        found.costs += [costs for _, costs in some]
        found.growth.append(Growth(each, tuple(size for size, _ in some), tuple(costs for _, costs in some)))


def _keep(data: Any, path: Path) -> None:
    try:
        path.write_text(json.dumps(data, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror or error}; name a file in a folder that exists"
        ) from error


def _show(found: Benchmark) -> None:
    typer.echo(in_words(found.machine) + "\n")
    table = Table("box", "method", "certified", box=None, pad_edge=False, header_style="cyan")
    for title in ("queries", "bound", "ratio", "error", "seconds", "over the box's own"):
        table.add_column(title, justify="right")
    for costs in found.costs:
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
    if found.growth:
        grown = Table("growth", "sizes", "queries", "counting bound", "the learner's own time", box=None)
        grown.pad_edge, grown.header_style = False, "cyan"
        for each in found.growth:
            letter, sizes = each.series.letter, " ".join(map(str, each.sizes))
            powers = (each.queries, each.bound, each.own_seconds)
            grown.add_row(each.series.name, f"{letter} = {sizes}", *(f"{letter}^{power:.2f}" for power in powers))
        typer.echo()
        print_table(grown)


def _figure(number: float | None, form: str) -> str:
    return "" if number is None else typeset(format(number, form))
