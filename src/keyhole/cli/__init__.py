"""The commands. Exit codes: 0 done, 1 the outcome admits failure, 2 wrong use, 130 interrupted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any, NoReturn, cast

import typer
from typer.core import TyperCommand, TyperGroup

from keyhole.cli.letters import AS_TYPED
from keyhole.cli.options import (
    DONE,
    INTERRUPTED,
    WRONG_USE,
    complain,
    fold_target_options,
    similar_options,
    target_options,
)
from keyhole.errors import KeyholeError
from keyhole.optional import KEYHOLE_VERSION

# What the parser of the command line raises; its home differs between versions of typer.
Misuse = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])

# Each command is a function of the module of its name, which is imported when it is called for.
COMMANDS = {
    "demo": "Make a random attention head, recover it from its answers, compare and draw a picture.",
    "recover": "Recover what is inside a black box, and certify it with fresh queries.",
    "learn": "Learn a multi-head attention layer from labelled examples, and certify it on examples held back.",
    "audit": "See what defences cost an attacker: recover the box behind each, with ever more queries.",
    "verify": "Find out from a few queries whether a box is the one in a file. Exit code 0: same, 1: different or "
    "inconclusive.",
    "compress": "Find smaller parameters that answer almost alike: lower ranks, fewer heads. Exit code 1: not within "
    "tolerance.",
    "diagnose": "Say what of a family or of given parameters can be known from answers, or what family a box is of.",
    "report": "Make report.html of a run folder again: one page with everything, that opens from disk without a "
    "network.",
    "serve": "Serve a box over the Open Inference Protocol v2, to rehearse an audit on your own machine; or a page to "
    "watch.",
    "bench": "Recover boxes several times and print what it costs: queries over the counting bound, time over the "
    "box's own.",
}


HELP_NAMES = ["-h", "--help"]
HELP = {"help_option_names": HELP_NAMES}


class LazyCommand(TyperCommand):
    """A command known by its name and first sentence; the rest of it is imported to carry it out."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context of the command itself, made of its arguments."""
        module = import_module(f"keyhole.cli.{self.name}")
        inner = _make_app()
        inner.command(context_settings=HELP)(getattr(module, str(self.name)))
        command = typer.main.get_command(inner)
        own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        folded = fold_target_options(args, own | set(HELP_NAMES))
        try:
            return command.make_context(info_name, folded, parent, **extra)
        except Misuse as error:
            told = vars(error)
            if "possibilities" in told:  # an option that there is not: keys of the target are options too
                told["possibilities"] = similar_options(told["option_name"], [*own, *target_options(args)])
            raise


class LazyGroup(TyperGroup):
    """All commands, none of them imported."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: LazyCommand(name, help=summary) for name, summary in COMMANDS.items()}

    def invoke(self, ctx: Any) -> Any:
        """Run a command; interrupted outside of what it can resume, imports included, it ends in one line."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort from None


def _make_app(**settings: Any) -> typer.Typer:
    settings = {"add_completion": False, **settings}
    return typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="markdown", **settings)


app = _make_app(name="keyhole", cls=LazyGroup, context_settings=HELP, add_completion=True)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit; what was used wrongly is said in one line on standard error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal without × and ⁻ shows x and ^-
            stream.reconfigure(errors=AS_TYPED)
    try:
        code = app(args=arguments, prog_name="keyhole", standalone_mode=False)
    except Misuse as error:
        command = "keyhole" if error.ctx is None else error.ctx.command_path
        code = complain(f"{error.format_message().rstrip('.')}. See {command} --help.")
    except KeyholeError as error:
        code = complain(str(error))
    except (KeyboardInterrupt, typer.Abort):  # outside of what can be resumed
        code = complain("interrupted", INTERRUPTED)
    sys.exit(code)


@app.callback(invoke_without_command=True)
def overview(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Recover the attention inside a model from its answers, exactly and with a certificate.

    Begin with: `keyhole demo`
    """
    if version:
        typer.echo(f"keyhole {KEYHOLE_VERSION}")
        raise typer.Exit(DONE)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(WRONG_USE)
