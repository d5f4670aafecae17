"""What all commands share: exit codes, options of the same name and meaning, and how wrong use is reported."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

DONE, FAILED, WRONG_USE, INTERRUPTED = 0, 1, 2, 130

TARGET = "The box, named as for `keyhole recover`."
TARGET_KINDS = ("demo", "onnx", "transformers", "http", "https", "http+json", "https+json")  # those that have keys
FLAGS = {"--no-proxy": ("proxy", "none")}  # options without a value, and the key of a target that each stands for

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Seed = Annotated[int, typer.Option(min=0, help="Determines every random number.")]
Force = Annotated[bool, typer.Option("--force", help="Write to --out even if it belongs to something else.")]
Sentence = Annotated[
    str | None,
    typer.Option(help="What heads of a transformers model are shown on in the report; one is taken if left out."),
]
Noise = Annotated[str | None, typer.Option(help="How answers err, as for `keyhole recover`: it adds nothing to them.")]
Journal = Annotated[Path | None, typer.Option(help="File that keeps every answer, to resume from.")]
Budget = Annotated[int | None, typer.Option(min=0, help="Most queries in all.")]
MaxNorm = Annotated[float | None, typer.Option(help="Send no token longer than this.")]
MaxSeconds = Annotated[
    float | None,
    typer.Option(
        help="End a recovery whose own arithmetic takes longer; a minute, and more with queries, if left out."
    ),
]
Workers = Annotated[int, typer.Option("--workers", min=1, help="Processes of this machine that share the work.")]
Dask = Annotated[str | None, typer.Option(metavar="ADDRESS", help="The Dask scheduler whose workers share the work.")]
Concurrency = Annotated[
    int | None, typer.Option(min=1, help="Requests under way at the same time, to boxes that may be asked so.")
]


def method_option(names: Sequence[str] = ()) -> Any:
    """The option --method, which lists its values in its help and completes them in a shell: all, or these names.

    The registry is known once `recover` is imported.
    """
    known = tuple(names) or ("auto", *import_module("keyhole.methods.registry").METHODS)
    listed = ", ".join(f"`{name}`" for name in known)
    return typer.Option(
        help=f"The learner: {listed}.",
        autocompletion=lambda incomplete: [name for name in known if name.startswith(incomplete)],
    )


MethodOption = Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the method; repeatable.")]


def fold_target_options(words: Sequence[str], own: Collection[str]) -> list[str]:
    """A command line whose target has taken up its keys that were written as options: no shell needs quotes for these.

    `demo:single-head --width 32 --rank 6` becomes `demo:single-head?width=32&rank=6`. Options that the command has of
    its `own` stay its own.
    """
    places = [word for word in words if word.partition(":")[0] in TARGET_KINDS]
    if not places or not any(word.startswith("--") for word in words):
        return list(words)
    spelling = import_module("keyhole.targets.spelling")  # with all families: not needed to say what commands there are
    keys = {place: spelling.keys_of(place) for place in places}
    rest, taken = [], []
    remaining = iter(words)
    for word in remaining:
        option, equals, value = word.partition("=")
        key = option.removeprefix("--").replace("-", "_")
        if word == "--":  # what follows is no option
            rest += [word, *remaining]
        elif word in FLAGS and any(FLAGS[word][0] in each for each in keys.values()):
            taken.append(FLAGS[word])
        elif option in own or not option.startswith("--") or not any(key in each for each in keys.values()):
            rest.append(word)
        else:
            taken.append((key, value if equals else next(remaining, "")))
    return [
        spelling.with_keys(word, [pair for pair in taken if pair[0] in keys[word]]) if word in keys else word
        for word in rest
    ]


def complain(text: str, code: int = WRONG_USE) -> int:
    """Say in one line on standard error what went wrong; the exit code."""
    typer.echo(f"keyhole: {' '.join(text.split())}", err=True)
    return code
