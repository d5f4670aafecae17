"""`keyhole recover transformers:PATH#layer=all`: every attention layer of a model, one after another."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from keyhole.cli.output import keep_record, print_json
from keyhole.errors import UsageError
from keyhole.families.torch_layouts import heads_of
from keyhole.gauge import distance
from keyhole.noise import Noise
from keyhole.oracles.transformers.folder import open_model
from keyhole.oracles.transformers.places import Place, attention_in
from keyhole.recover_model import ModelRecovery, recover_model
from keyhole.recovery import Recovery
from keyhole.runs.attention import keep_attention
from keyhole.runs.settings import Settings
from keyhole.runs.store import HEADS, LAYERS, reserve_folder
from keyhole.targets.models import TRANSFORMERS_EXAMPLE, TRANSFORMERS_KEYS, split

PREFIX = "transformers:"


def names_all_layers(target: str) -> bool:
    """Whether a target is a whole model, not one box."""
    return target.startswith(PREFIX) and "layer=all" in target.partition("#")[2].split("&")


def recover_all_layers(
    settings: Settings, *, as_json: bool, quiet: bool, force: bool, sentence: str | None = None
) -> bool:
    """Recover them, say how each ended as soon as it has, and keep one file; whether all were certified."""
    path, given = split(settings.target.removeprefix(PREFIX), TRANSFORMERS_EXAMPLE, TRANSFORMERS_KEYS)
    _check_all_layers(settings, given)
    if settings.max_norm is not None:
        given["max_norm"] = settings.max_norm
    distances: dict[str, float | None] = {}
    with redirect_stdout(sys.stderr):
        model = open_model(path, "recover_model")
    places = {place.name: place for place in attention_in(model)}

    def done(name: str, result: Recovery) -> None:
        distances[name] = _distance(result, places[name])
        if not (as_json or quiet):
            typer.echo(_line(name, result, distances[name]))

    with reserve_folder(settings.out, LAYERS, asdict(settings), force=force):
        found = recover_model(
            model if settings.workers == 1 and settings.dask is None else path,
            method=settings.method,
            budget=settings.budget,
            journal=settings.journal,
            seed=settings.seed,
            throw=False,
            noise=None if settings.noise is None else Noise.parse(settings.noise),
            heldout=settings.heldout,
            max_seconds=settings.max_seconds,
            workers=settings.workers,
            dask=settings.dask,
            progress=False if quiet or as_json else None,
            done=done,
            **given,
            **settings.options,
        )
        data = {
            "target": settings.target,
            "certified": found.certified,
            "layers": {
                name: {**result.summary(), "distance": distances[name], "left_out": found.left_out.get(name)}
                for name, result in found.layers.items()
            },
        }
        files, notes = _keep(found, data, settings, sentence)
    if as_json:
        print_json({**data, "files": files, "notes": notes})
    elif not quiet:
        for name, reason in found.left_out.items():
            typer.echo(f"{name}: no weights: {reason}")
        typer.echo("\n".join(map(str, files.values())) or "nothing was kept: --out FOLDER keeps the heads and weights")
        for note in notes:
            typer.echo(note)
    return found.certified


def _check_all_layers(settings: Settings, given: dict[str, Any]) -> None:
    """Refuse what is for one layer; the keys that say which layers are taken out of `given`."""
    if given.pop("layer") != "all" or given.pop("part", "attention") != "attention":
        raise UsageError("all layers are recovered as their attention alone: leave part out")
    if {"max_length", "batch_limit"} & given.keys():
        raise UsageError("max_length and batch_limit are for one layer: leave them out")
    if settings.domain is not None:
        raise UsageError("--domain is for one layer, whose inputs it holds: name one, #layer=0")
    if settings.concurrency is not None:
        raise UsageError("--concurrency is for boxes behind a server: --workers share the layers of a model")


def _distance(result: Recovery, place: Place) -> float | None:
    """How far the heads found are from those in the file, which only those who have it can know."""
    if result.params is None:
        return None
    try:
        return distance(result.params, heads_of(place.module))
    except UsageError:  # not heads, or of other shapes
        return None


def _line(name: str, result: Recovery, apart: float | None) -> str:
    stats = result.stats
    cost = f"{stats.queries:,} queries and {stats.heldout_queries} for the certificate, {stats.seconds:.1f} s"
    if not result.certified:
        return f"{name}: {result.outcome.name}: {result.message} ({cost}). {result.outcome.value}"
    heads = () if result.params is None else result.params.anatomy.heads
    truth = "" if apart is None else f", relative distance {apart:.1e} from the weights in the file"
    return f"{name}: CERTIFIED, {len(heads)} head{'s' * (len(heads) > 1)}{truth}; {cost}"


def _keep(
    found: ModelRecovery, data: Mapping[str, Any], settings: Settings, sentence: str | None = None
) -> tuple[dict[str, Path], list[str]]:
    """Write heads, figures and report, if there is a folder for them; the paths, and notes on what is missing."""
    if settings.out is None:
        return {}, []
    found.save(settings.out / HEADS)
    layers = {
        name: {**data["layers"][name], "heldout": result.certificate.heldout()} for name, result in found.layers.items()
    }
    seen, why = keep_attention(settings.out, settings.target, sentence)
    files, notes = keep_record(settings.out, LAYERS, {**data, "layers": layers}, asdict(settings))
    return {"layers": settings.out / HEADS, **files, **seen}, [*why, *notes]
