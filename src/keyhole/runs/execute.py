"""Carries out the settings of a run: for the command line, the live page and benchmarks alike."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from keyhole.oracles import Oracle
from keyhole.progress import Observer
from keyhole.recover import recover
from keyhole.recovery import Recovery
from keyhole.runs.settings import Settings
from keyhole.runs.store import RUN, reserve_folder, write_run
from keyhole.targets import Target, open_declared
from keyhole.targets.datasets import open_inputs


@dataclass(frozen=True)
class Ending:
    """A finished run and everything there is to say about it."""

    result: Recovery
    target: Target
    settings: Settings
    distance: float | None  # from the truth, where that is known
    files: dict[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    resume: str | None = None  # the command that goes on from here


def execute(
    settings: Settings,
    observer: Observer,
    *,
    around: Callable[[Oracle], Oracle] | None = None,  # a wrapper for the oracle
    picture: Callable[[Ending], bytes | None] | None = None,  # draws what is kept beside the parameters
    force: bool = False,  # whether a folder that belongs to something else may be written to
) -> Ending:
    """Open the target, recover it with the norm and noise that the settings declare, and keep it in their folder."""
    with ExitStack() as stack:
        target = stack.enter_context(open_declared(settings.target, settings.max_norm, settings.noise))
        if settings.out is not None:
            stack.enter_context(reserve_folder(settings.out, RUN, asdict(settings), force=force))
        result = recover(
            target.oracle if around is None else around(target.oracle),
            settings.method,
            settings.budget,
            settings.journal,
            settings.seed,
            throw=False,
            heldout=settings.heldout,
            domain=None if settings.domain is None else open_inputs(settings.domain),
            max_seconds=settings.max_seconds,
            concurrency=settings.concurrency,
            workers=settings.workers,
            dask=settings.dask,
            observer=observer,
            **settings.options,
        )
        resume = settings.resume(result, target.oracle.signature.width)
        ending = Ending(result, target, settings, target.distance(result.params), resume=resume)
        if settings.out is not None:
            image = None if picture is None else picture(ending)
            about, name = asdict(settings), target.oracle.name
            files = write_run(
                settings.out, result, about, name, ending.distance, image, label=target.label, truth=target.truth
            )
            ending.files.update(files)
    return ending
