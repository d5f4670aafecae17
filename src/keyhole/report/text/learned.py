"""A layer learned from examples, as people read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from keyhole.arrays import to_numpy
from keyhole.recovery import Outcome, Recovery


def describe_learned(result: Recovery, label: str, distance: float | None = None) -> Iterator[tuple[str, str]]:
    """What a person wants to know of it, as (word, sentence) pairs."""
    details, stats = result.stats.details, result.stats
    yield "data", label
    yield "outcome", f"{result.outcome.name}: {result.message}"
    if not result.certified:
        yield "remedy", result.outcome.value
    yield "method", ", ".join([result.method, *_starts(details)])
    yield "examples", f"{stats.queries:,} to learn from, {stats.heldout_queries:,} held out"
    if "samples" in details:
        yield "samples", str(details["samples"]["sentence"])
    if "heads" in details:
        yield "heads", _heads(details)
    if "six_phase" in details:
        yield "six phases", "; ".join(f"{name} {_figures(figures)}" for name, figures in details["six_phase"].items())
    if "relative_residual" in details:
        yield "fit", _fit(details)
    yield from _checked(result)
    if distance is not None:
        yield "truth", f"relative distance {distance:.2g} from the true parameters"
    if result.certified:
        yield "assuming", "; ".join(result.certificate.assumptions)
    yield "time", f"{stats.seconds:.2f} s"


def _checked(result: Recovery) -> Iterator[tuple[str, str]]:
    certificate = result.certificate
    if certificate.answers.size:
        size = float(np.max(np.abs(certificate.answers)))
        bar = f"{certificate.worst_ratio:.2g} × the error bar"
        yield "held-out", f"largest error {certificate.worst_error:.2g} where outputs reach {size:.3g}: {bar} at most"
    if result.outcome in (Outcome.CERTIFIED, Outcome.UNCERTIFIED) and certificate.radius is not None:
        largest = {name: float(np.max(to_numpy(array))) for name, array in certificate.radius.arrays().items()}
        yield (
            "error bars",
            "entries of " + ", ".join(f"{name} ± {size:.2g}" for name, size in largest.items()) + " at most",
        )
    elif result.params is not None:
        yield "parameters", "a partial estimate, not proven"


def _starts(details: Mapping[str, Any]) -> list[str]:
    if "restarts" not in details:
        return []
    made = details["restarts"]
    return [f"{made['in_all']} start{'s' * (made['in_all'] != 1)}", f"{made['agreeing']} of {made['made']} agree"]


def _heads(details: Mapping[str, Any]) -> str:
    said = f"{details['heads']} (asked: {details['heads_asked']})"
    said += f", projections of norm {_list(details['projection_norms'])}"
    if details["score_distances"]:
        said += f", scores {_list(details['score_distances'])} apart"
    said += f", σ_min/‖·‖ of ΣW {details['sum_of_projections']:.2g}"
    outputs = details["outputs_for_six_phase"]
    relation = "≥" if outputs["holds"] else "<"
    said += f", {outputs['outputs']} outputs {relation} m(k − 1) = {outputs['wanted']}"
    gap = details["spectral_gap"]
    return said if gap is None else f"{said}, spectral gap {gap:.2g}"


def _fit(details: Mapping[str, Any]) -> str:
    said = f"relative residual {details['relative_residual']:.2g}"
    if details["noise"]:
        said += f", noise {details['noise']:.2g}, predicted error {details['predicted_error']:.2g}"
    if "first_order_r2" in details:
        said += f", first-order R² {details['first_order_r2']:.2f}"
    return said


def _figures(figures: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_plain(value)}" for name, value in figures.items())


def _plain(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def _list(numbers: list[float]) -> str:
    return ", ".join(f"{number:.3g}" for number in numbers)
