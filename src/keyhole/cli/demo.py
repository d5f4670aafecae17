"""`keyhole demo`: a first recovery, with a picture of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from keyhole.cli.options import Budget, Force, Json, MaxNorm, MaxSeconds, Noise, Quiet, Seed
from keyhole.cli.recover import carry_out
from keyhole.report.build import draw_head
from keyhole.report.html.canvas import INSTALL
from keyhole.runs.execute import Ending
from keyhole.runs.settings import Settings
from keyhole.targets.demos import demo_text


def demo(
    width: Annotated[int, typer.Option(help="Numbers per token.")] = 32,
    rank: Annotated[int | None, typer.Option(help="Rank of the score matrix; full if left out.")] = None,
    norm: Annotated[float, typer.Option(help="Spectral norm of the score matrix.")] = 1.0,
    seed: Seed = 0,
    out: Annotated[
        Path, typer.Option(help="Folder for params, radius (.safetensors), run.json, report.html and recovery.png.")
    ] = Path("demo-run"),
    budget: Budget = None,
    max_norm: MaxNorm = None,
    noise: Noise = None,
    max_seconds: MaxSeconds = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Make a random attention head, recover it from its answers, compare and draw a picture.

    Example: `keyhole demo --width 64 --rank 4`
    """
    numbers = {"width": width, "rank": rank, "norm": norm, "seed": seed}
    limits: dict[str, Any] = {"budget": budget, "max_norm": max_norm, "noise": noise, "max_seconds": max_seconds}
    settings = Settings(demo_text("single-head", numbers), seed=seed, out=out, **limits)
    return carry_out(settings, as_json=as_json, quiet=quiet, force=force, picture=_picture)


def _picture(ending: Ending) -> bytes | None:
    """The picture, or None and a note: a result without a picture is still a result."""
    if ending.distance is None:  # nothing, or something of another family
        ending.notes.append("no picture: nothing was recovered that could be drawn")
        return None
    try:
        return draw_head(ending.result, ending.target.truth, ending.distance)
    except ImportError as error:
        ending.notes.append(f"no picture: {error}; get it with {INSTALL}")
        return None
