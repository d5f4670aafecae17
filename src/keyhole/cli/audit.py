"""`keyhole audit`: what defences cost an attacker."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from keyhole.audit import MULTIPLES, Audit, parse_rule, protections, read_policy, violations
from keyhole.audit import audit as run_audit
from keyhole.audit.protection import table_of
from keyhole.cli.options import (
    DONE,
    FAILED,
    INTERRUPTED,
    TARGET,
    Dask,
    Force,
    Json,
    MaxNorm,
    MaxSeconds,
    Quiet,
    Seed,
    complain,
)
from keyhole.cli.output import LEAST_WIDTH, file_lines, keep_record, print_json, print_lines, print_table
from keyhole.errors import OracleError, RecoveryFailed, UsageError
from keyhole.recovery import typeset
from keyhole.report.html.audit_curves import draw_curves
from keyhole.report.html.canvas import INSTALL
from keyhole.runs.folders import write_file
from keyhole.runs.store import AUDIT, reserve_folder

EACH_BUDGET = ",".join(f"{multiple:g}" for multiple in MULTIPLES)
COLUMN = 8  # characters of the words at the left

Defences = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="`clip:1`, `noise:1e-3`, `user-noise:1e-3`, `round:3`, `float32`, `float16`, `bfloat16`, "
        "`reverse-sigmoid:1`, `project:4`, `labels`, `top:3`, `detect:0.01`, `budget:5000`, or several joined by `+`; "
        "repeatable. A list of common ones if left out.",
    ),
]
BareNoise = Annotated[str | None, typer.Option(help="How answers err without a defence, as for `keyhole recover`.")]
AuditFolder = Annotated[
    Path | None, typer.Option(help="Folder for audit.json, report.html, audit.png and all answers, to resume from.")
]
Rules = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RULE",
        help="Exit with 1 where a defence is like this: `queries < 1e6`, `cost > 0.05`, `round:3: error < 0.1` "
        "(also copy-queries, times); repeatable.",
    ),
]
Policy = Annotated[Path | None, typer.Option(help='A file of such rules, TOML or JSON: `fail-if = ["queries < 1e6"]`.')]


def audit(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=TARGET)],
    defence: Defences = None,
    multiples: Annotated[str, typer.Option(help="Budgets, as multiples of the counting bound.")] = EACH_BUDGET,
    budget: Annotated[int | None, typer.Option(min=1, help="Leave out budgets of more queries than this.")] = None,
    max_norm: MaxNorm = None,
    noise: BareNoise = None,
    max_seconds: MaxSeconds = None,
    workers: Annotated[
        int, typer.Option("--workers", "--jobs", min=1, help="Processes of this machine that share the defences.")
    ] = 1,
    dask: Dask = None,
    seed: Seed = 0,
    out: AuditFolder = None,
    force: Force = False,
    fail_if: Rules = None,
    policy: Policy = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """See what defences cost an attacker: recover the box behind each, with ever more queries.

    Example: `keyhole audit file:params.safetensors --defence round:3 --defence noise:1e-3+clip:1 --out audit`
    """
    rules = [*map(parse_rule, fail_if or []), *([] if policy is None else read_policy(policy))]
    given: dict[str, Sequence[Any]] = {"defence": defence or [], "multiples": [multiples], "budget": [budget]}
    given |= {
        "fail-if": fail_if or [],
        "policy": [policy],
        "noise": [noise],
        "max-norm": [max_norm],
        "max-seconds": [max_seconds],
    }
    again = [
        "keyhole",
        "audit",
        target,
        *_words({**given, "workers": [workers], "dask": [dask], "seed": [seed], "out": [out]}),
    ]
    declared = {name: value for name, value in (("noise", noise), ("max_norm", max_norm)) if value is not None}
    settings = {"target": target, "seed": seed, **declared}
    limits: dict[str, Any] = {"progress": False if quiet else None, "most": budget}
    limits |= {"noise": noise, "max_norm": max_norm, "max_seconds": max_seconds, "dask": dask}
    try:
        with redirect_stdout(sys.stderr), reserve_folder(out, AUDIT, settings, force=force):
            found = run_audit(target, defence, _numbers(multiples), seed, workers, out, **limits)
            files, notes = ({}, []) if out is None else _keep_audit(found, out, settings)
    except KeyboardInterrupt:
        kept = "nothing was kept: with --out FOLDER an audit can be resumed"
        if out is not None:
            kept = f"finished cells and all answers are kept in {out}. To go on: {shlex.join(again)}"
        return complain(f"interrupted; {kept}", INTERRUPTED)
    except RecoveryFailed as error:
        cause = f"the box cannot be recovered even without a defence, so nothing can be compared with it: {error}"
        return complain(cause, FAILED)
    except OracleError as error:
        return complain(str(error), FAILED)
    failed = violations(found, rules)
    if as_json:
        passed = {"policy": {"rules": [rule.text for rule in rules], "passed": not failed, "violations": failed}}
        print_json({**found.as_data(), **(passed if rules else {}), "files": files, "notes": notes})
    elif not quiet:
        _print_audit(found, files, notes)
        if rules:
            words = [("" if number else "policy", each) for number, each in enumerate(failed or ["passed"])]
            print_lines(words, column=COLUMN)
    else:
        for each in failed:
            complain(each)
    return FAILED if failed else DONE


def _words(options: Mapping[str, Sequence[Any]]) -> list[str]:
    """Options as they were given, to be given again."""
    return [
        word
        for name, values in options.items()
        for value in values
        if value is not None
        for word in (f"--{name}", str(value))
    ]


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--multiples {text!r} is no list of numbers, for example --multiples 1,2,4") from error


def _keep_audit(found: Audit, folder: Path, settings: Mapping[str, Any]) -> tuple[dict[str, Path], list[str]]:
    """Write figures and picture; the paths, and notes on what is missing."""
    kept, notes = keep_record(folder, AUDIT, found.as_data(), settings)
    files = {"json": kept.pop("run")}
    try:
        files["png"] = write_file(folder, "audit.png", draw_curves(found))
    except ImportError as error:
        notes.append(f"no picture: {error}; get it with {INSTALL}")
    return {**files, **kept}, notes


def _print_audit(found: Audit, files: Mapping[str, Path], notes: Sequence[str]) -> None:
    console = Console(highlight=False)
    print_lines(
        [("verdict", found.verdict)], good=all(not each.falls for each in protections(found)[1:]), column=COLUMN
    )
    lines = {
        "box": found.label,
        "errors": f"relative, against {found.reference}; 1 is what a guess of nothing has",
        "budgets": f"in multiples of the counting bound, {found.bound:,} queries",
    }
    print_lines(lines.items(), column=COLUMN)
    console.print()
    print_table(table_of(found))
    console.print()
    print_table(found.table())
    console.print()
    for sentence in found.sentences:
        for number, row in enumerate(
            textwrap.wrap(typeset(sentence), max(console.width, LEAST_WIDTH) - 2, break_long_words=False)
        ):
            console.print(Text.assemble(("  " if number else "· ", "cyan"), row), soft_wrap=True)
    if files:
        console.print()
    print_lines(file_lines(files, notes), column=COLUMN)
