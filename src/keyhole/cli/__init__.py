"""The commands. Exit codes: 0 done, 1 the outcome admits failure, 2 wrong use, 130 interrupted."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
from rich.console import Console
from rich.text import Text

from keyhole.audit import MULTIPLES, Audit
from keyhole.audit import audit as run_audit
from keyhole.cli.bench import bench
from keyhole.cli.learn import learn
from keyhole.cli.recover_model import names_all_layers, recover_all_layers
from keyhole.cli.serve import serve
from keyhole.cli.tables import print_whole
from keyhole.errors import KeyholeError, RecoveryFailed, UsageError
from keyhole.families import Family, load
from keyhole.live.watch_page import WatchPage
from keyhole.noise import Noise
from keyhole.progress import Observer, on_terminal
from keyhole.recover import HELDOUT_QUERIES, diagnose_box
from keyhole.recovery import Recovery
from keyhole.report.html.audit_curves import draw_curves
from keyhole.report.html.build import try_report, write_pictures, write_report
from keyhole.report.html.canvas import INSTALL
from keyhole.report.html.demo_picture import can_draw, draw
from keyhole.report.text.diagnosis import describe_diagnosis, describe_params, of_family, of_params, table_of_claims
from keyhole.report.text.recovery import describe
from keyhole.report.text.verdict import describe_verdict
from keyhole.runs.reader import AUDIT, DIAGNOSIS, FORMATS, VERIFICATION
from keyhole.runs.store import (
    PARAMS,
    RADIUS,
    VERSION,
    Settings,
    keyhole_version,
    parse_option,
    plain,
    prepare_folder,
    write_file,
    write_record,
    write_run,
)
from keyhole.targets import Target, demo_text, open_target
from keyhole.verify import QUERIES, Verdict
from keyhole.verify import verify as run_verify

DONE, FAILED, WRONG_USE, INTERRUPTED = 0, 1, 2, 130
JOURNAL = "answers.db"  # a name for a journal, where one is suggested
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
    except (KeyboardInterrupt, typer.Abort):  # outside of what can be resumed
        code = _complain("interrupted", INTERRUPTED)
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
        Path, typer.Option(help="Folder for params, radius (.safetensors), run.json, report.html and recovery.png.")
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
            help="`demo:single-head?width=64&rank=4` (also norm, seed, max_norm, noise, decimals), "
            "`file:params.safetensors`, `python:path.py:factory`, `onnx:model.onnx`, `transformers:PATH#layer=2` "
            "(also part, positions, dtype), `http://host:port/v2/models/name`, "
            "or all attention layers of a model: `transformers:PATH#layer=all`",
        ),
    ],
    method: Annotated[str, typer.Option(help="The learner.")] = "auto",
    budget: Annotated[int | None, typer.Option(min=0, help="Most queries in all.")] = None,
    journal: Annotated[Path | None, typer.Option(help="File that keeps every answer, to resume from.")] = None,
    seed: Seed = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for params.safetensors, radius.safetensors, run.json and report.html.")
    ] = None,
    heldout: Annotated[int, typer.Option(min=1, help="Fresh queries for the certificate.")] = HELDOUT_QUERIES,
    max_norm: Annotated[float | None, typer.Option(help="Send no token longer than this.")] = None,
    noise: Annotated[
        str | None,
        typer.Option(
            help="How answers err: `measure` to find out, `gaussian:1e-3`, `bounded:1e-3`, `rounded:3`, `float32`, "
            "`float16`, `bfloat16` or `exact`."
        ),
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the method; repeatable.")] = None,
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
    if port and not watch:
        raise UsageError("--port is for the page of --watch: leave it out, or ask for that")
    options = dict(parse_option(text) for text in option or [])
    settings = Settings(target, method, budget, journal, seed, heldout, max_norm, noise, options, out)
    if names_all_layers(target):
        if watch:
            raise UsageError("--watch is for one box, not for all layers of a model: name one, #layer=0")
        try:
            return DONE if recover_all_layers(settings, as_json=as_json, quiet=quiet) else FAILED
        except KeyboardInterrupt:
            return _complain(_interrupted(settings), INTERRUPTED)
    if not watch:
        return _carry_out(settings, as_json=as_json, quiet=quiet)
    with WatchPage(port) as page:
        code = _carry_out(settings, as_json=as_json, quiet=quiet, page=page)
        if code != INTERRUPTED:
            page.linger()
        return code


app.command()(learn)


@app.command()
def audit(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The box, named as for `keyhole recover`.")],
    defence: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="`clip:1`, `noise:1e-3`, `round:3`, `float32`, `float16`, `bfloat16`, `budget:5000`, or several "
            "joined by `+`; repeatable. A list of common ones if left out.",
        ),
    ] = None,
    multiples: Annotated[str, typer.Option(help="Budgets, as multiples of the counting bound.")] = ",".join(
        f"{multiple:g}" for multiple in MULTIPLES
    ),
    budget: Annotated[int | None, typer.Option(min=1, help="Leave out budgets of more queries than this.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the defences.")] = 1,
    seed: Seed = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for audit.json, report.html, audit.png and all answers, to resume from.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """See what defences cost an attacker: recover the box behind each, with ever more queries.

    Example: `keyhole audit file:params.safetensors --defence round:3 --defence noise:1e-3+clip:1 --out audit`
    """
    given: dict[str, Sequence[Any]] = {"defence": defence or [], "multiples": [multiples], "budget": [budget]}
    again = ["keyhole", "audit", target, *_words({**given, "jobs": [jobs], "seed": [seed], "out": [out]})]
    try:
        with redirect_stdout(sys.stderr):
            found = run_audit(
                target, defence, _numbers(multiples), seed, jobs, out, progress=False if quiet else None, most=budget
            )
            files, notes = ({}, []) if out is None else _keep_audit(found, out)
    except KeyboardInterrupt:
        kept = "nothing was kept: with --out FOLDER an audit can be resumed"
        if out is not None:
            kept = f"finished cells and all answers are kept in {out}. To go on: {shlex.join(again)}"
        return _complain(f"interrupted; {kept}", INTERRUPTED)
    except RecoveryFailed as error:
        cause = f"the box cannot be recovered even without a defence, so nothing can be compared with it: {error}"
        return _complain(cause, FAILED)
    if as_json:
        typer.echo(json.dumps(plain({**found.as_data(), "files": files, "notes": notes}), allow_nan=False))
    elif not quiet:
        _show_audit(found, files, notes)
    return DONE


@app.command()
def verify(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The box, named as for `keyhole recover`.")],
    params: Annotated[str, typer.Argument(metavar="PARAMS", help="The file that says what it should be.")],
    queries: Annotated[int, typer.Option(min=1, help="Most queries in all.")] = QUERIES,
    tolerance: Annotated[
        float | None, typer.Option(help="Relative change of any part that does not count; rounding if left out.")
    ] = None,
    journal: Annotated[Path | None, typer.Option(help="File that keeps every answer, to resume from.")] = None,
    seed: Seed = 0,
    max_norm: Annotated[float | None, typer.Option(help="Send no token longer than this.")] = None,
    noise: Annotated[str | None, typer.Option(help="How answers err, as for `keyhole recover`.")] = None,
    radius: Annotated[
        bool,
        typer.Option(
            "--radius/--no-radius", help="Allow for the error bars in radius.safetensors, where it lies beside PARAMS."
        ),
    ] = True,
    out: Annotated[Path | None, typer.Option(help="Folder for verify.json and report.html.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Find out from a few queries whether a box is the one in a file. Exit code 0: same, 1: different or inconclusive.

    Example: `keyhole verify python:box.py:make file:params.safetensors --tolerance 1e-4`
    """
    path = Path(params.removeprefix("file:"))
    claimed = load(path)
    bars = _beside(path) if radius else None
    said = f"the {claimed.family} of width {claimed.width} in {path}"
    said += "" if bars is None else f", with the error bars in {path.with_name(RADIUS)}"
    with redirect_stdout(sys.stderr):
        if out is not None:
            prepare_folder(out)
        box = open_target(target)
        try:
            box = box.told(max_norm, None if noise is None else Noise.parse(noise))
            found = run_verify(box.oracle, claimed, queries, seed, tolerance, radius=bars, journal=journal)
        except KeyboardInterrupt:
            return _complain("interrupted; with --journal FILE what was answered is not asked again", INTERRUPTED)
        finally:
            box.oracle.close()
    data = {**found.summary(), "target": box.text, "box": box.label}
    files, notes = _kept(out, VERIFICATION, {**data, "claimed": said, "seed": seed})
    if as_json:
        typer.echo(json.dumps(plain({**data, "files": files, "notes": notes}), allow_nan=False))
    elif not quiet:
        _show_lines([*describe_verdict(found, box.label, said), *_file_lines(files, notes)], good=found.same)
    elif not found.same:
        _complain(_verdict_in_short(found))
    return DONE if found.same else FAILED


def _beside(path: Path) -> Family | None:
    """The error bars that a run wrote beside the parameters; None where it is no such file."""
    bars = path.with_name(RADIUS)
    return load(bars) if path.name == PARAMS and bars.is_file() else None


def _verdict_in_short(found: Verdict) -> str:
    return f"{found.conclusion.upper()}: {found.message}"


@app.command()
def diagnose(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="SUBJECT",
            help="A family: `single-head`, `multi-head`, `relu-net` or `one-layer`; parameters: "
            "`file:params.safetensors`; or a box, named as for `keyhole recover`",
        ),
    ],
    inputs: Annotated[str, typer.Option(help="`unrestricted`, `one-hot` or `mean-zero` tokens.")] = "unrestricted",
    max_length: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence at most.")] = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Of a box: folder for diagnosis.json and report.html.")] = None,
    as_json: Json = False,
) -> int:
    """Say what of a family or of given parameters can be known from answers, or what family a box is of.

    Example: `keyhole diagnose multi-head --max-length 2`, `keyhole diagnose 'demo:one-layer?residual=1'`
    """
    if ":" in subject and not subject.startswith("file:"):
        return _diagnose_box(subject, seed, out, as_json)
    if out is not None:
        raise UsageError("--out is for boxes: there is no run to keep of a family or a file")
    if subject.startswith("file:"):
        if inputs != "unrestricted" or max_length is not None:
            raise UsageError("--inputs and --max-length are for families: a file is diagnosed for inputs of all kinds")
        params = load(subject.removeprefix("file:"))
        if as_json:
            typer.echo(json.dumps(plain(of_params(params)), allow_nan=False))
        else:
            _show_lines(describe_params(params))
        return DONE
    found = of_family(subject, inputs, max_length)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        Console(highlight=False).print(table_of_claims(found))
    return DONE


def _diagnose_box(text: str, seed: int, out: Path | None, as_json: bool) -> int:
    with redirect_stdout(sys.stderr):
        if out is not None:
            prepare_folder(out)
        box = open_target(text)
        try:
            found = diagnose_box(box.oracle, seed=seed)
        finally:
            box.oracle.close()
    data = {**found.summary(), "target": box.text, "box": box.label}
    files, notes = _kept(out, DIAGNOSIS, {**data, "seed": seed})
    if as_json:
        typer.echo(json.dumps(plain({**data, "files": files, "notes": notes}), allow_nan=False))
    else:
        _show_lines([*describe_diagnosis(found, text), *_file_lines(files, notes)])
    return DONE if found.method else FAILED


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A folder that a command wrote with --out.")],
    png: Annotated[bool, typer.Option("--png", help="Write every picture as a file too, into RUN/pictures.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Make report.html of a run folder again: one page with everything, that opens from disk without a network.

    Example: `keyhole report demo-run --png`
    """
    try:
        path, found = write_report(folder)
        pictures = write_pictures(folder, found) if png else {}
    except ImportError as error:
        return _complain(f"no report can be made: {error}; get it with {INSTALL}")
    if as_json:
        typer.echo(json.dumps(plain({**found.as_data(), "report": path, "pictures": pictures}), allow_nan=False))
    elif not quiet:
        head = found.headline
        files = {"report": path, **pictures}
        _show_lines([("verdict", f"{head.word}: {head.title}"), ("", head.said), *_file_lines(files, [])],
                    good=head.tone != "bad")  # fmt: skip
    return DONE


def _kept(out: Path | None, name: str, data: Mapping[str, Any]) -> tuple[dict[str, Path], list[str]]:
    """Write a record and its report, if there is a folder for them; the paths, and notes on what is missing."""
    if out is None:
        return {}, []
    about = {"format": FORMATS[name], "version": VERSION, "keyhole": keyhole_version()}
    files, notes = {"run": write_record(out, name, {**about, **data})}, []
    path, note = try_report(out)
    if path is not None:
        files["report"] = path
    if note is not None:
        notes.append(note)
    return files, notes


def _file_lines(files: Mapping[str, Path], notes: Sequence[str]) -> list[tuple[str, str]]:
    lines = [("" if number else "files", str(path)) for number, path in enumerate(files.values())]
    return lines + [("note", note) for note in notes]


app.command()(serve)
app.command()(bench)


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


def _keep_audit(found: Audit, folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Write figures and picture; the paths, and notes on what is missing."""
    kept, notes = _kept(folder, AUDIT, found.as_data())
    files = {"json": kept.pop("run")}
    try:
        files["png"] = write_file(folder, "audit.png", draw_curves(found))
    except ImportError as error:
        notes.append(f"no picture: {error}; get it with {INSTALL}")
    return {**files, **kept}, notes


def _show_audit(found: Audit, files: dict[str, Path], notes: list[str]) -> None:
    console = Console(highlight=False)
    room = max(console.width, 60)
    _say(console, "box", found.label, room)
    _say(console, "errors", f"relative, against {found.reference}; 1 is what a guess of nothing has", room)
    _say(console, "budgets", f"in multiples of the counting bound, {found.bound:,} queries", room)
    console.print()
    print_whole(found.table())
    console.print()
    for sentence in found.sentences:
        for number, row in enumerate(textwrap.wrap(sentence, room - 2, break_long_words=False)):
            console.print(Text.assemble(("  " if number else "· ", "cyan"), row), soft_wrap=True)
    if files:
        console.print()
    for number, path in enumerate(files.values()):
        console.print(Text.assemble((f"{'' if number else 'files':>8}  ", "cyan"), str(path)), soft_wrap=True)
    for note in notes:
        _say(console, "note", note, room)


def _say(console: Console, word: str, said: str, room: int) -> None:
    for number, row in enumerate(textwrap.wrap(said, room - 10, break_long_words=False)):
        console.print(Text.assemble((f"{'' if number else word:>8}  ", "cyan"), row), soft_wrap=True)


def _carry_out(
    settings: Settings, *, as_json: bool, quiet: bool, picture: bool = False, page: WatchPage | None = None
) -> int:
    try:
        # Standard output is for the report: what the code of a box prints goes elsewhere.
        with redirect_stdout(sys.stderr):
            if page is not None:
                ending = page.watch(settings.target, settings, partial(_run, picture=picture), quiet=quiet)
            else:
                with on_terminal(settings.budget, quiet=quiet) as observer:
                    ending = _run(settings, observer, picture=picture)
    except KeyboardInterrupt:
        return _complain(_interrupted(settings), INTERRUPTED)
    if as_json:
        typer.echo(json.dumps(_as_data(ending), allow_nan=False))
    elif not quiet:
        _show(ending)
    elif not ending.result.certified:
        _complain(_failure(ending))
    return DONE if ending.result.certified else FAILED


def _run(settings: Settings, observer: Observer, *, picture: bool) -> Ending:
    target, result = settings.recover(observer)
    ending = Ending(result, target, settings, target.distance(result.params))
    if settings.out is not None:
        image = _picture(ending) if picture else None
        box = target.oracle.name
        written = write_run(
            settings.out, result, settings, box, ending.distance, image, label=target.label, truth=target.truth
        )
        ending.files.update(written)
        path, note = try_report(settings.out)
        ending.files.update({} if path is None else {"report": path})
        ending.notes.extend([] if note is None else [note])
    return ending


def _picture(ending: Ending) -> bytes | None:
    """The picture, or None and a note: a result without a picture is still a result."""
    if not can_draw(ending.result.params):
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
    return lines + _file_lines(ending.files, ending.notes)


def _show(ending: Ending) -> None:
    _show_lines(_lines(ending), good=ending.result.certified)


def _show_lines(lines: Iterable[tuple[str, str]], good: bool = True) -> None:
    """Words in a column of their own; paths and commands stay in one piece, so that they can be copied."""
    console = Console(highlight=False)
    room = max(console.width, 60) - 13
    for word, said in lines:
        rows = [said] if word in {"files", "", "resume"} else textwrap.wrap(said, room, break_long_words=False)
        style = ("bold green" if good else "bold red") if word in {"outcome", "verdict"} else ""
        for number, row in enumerate(rows):
            line = Text.assemble((f"{'' if number else word:>11}  ", "cyan"), (row, style))
            console.print(line, soft_wrap=True)


def _failure(ending: Ending) -> str:
    result = ending.result
    resume = f" To resume: {ending.resume}" if ending.resume else ""
    return f"{result.outcome.name}: {result.message}. {result.outcome.value}{resume}"


def _interrupted(settings: Settings) -> str:
    if settings.journal is None:
        again = replace(settings, journal=Path(JOURNAL)).command(settings.budget)
        return f"interrupted; nothing was kept: with --journal FILE a run can be resumed, for example {again}"
    kept = f"interrupted; the answers so far are kept in {settings.journal}"
    return f"{kept}. To resume: {settings.command(settings.budget)}"


def _complain(text: str, code: int = WRONG_USE) -> int:
    typer.echo(f"keyhole: {' '.join(text.split())}", err=True)
    return code
