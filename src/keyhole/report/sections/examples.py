"""The section about learning from examples: what happened, phase by phase."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from keyhole.recovery import Recovery
from keyhole.report.charts import LEAST, MOST, Bars, Chart, Plot, Series, short
from keyhole.report.content import Section

PHASES = {
    "1 crude sum": "the sum of all projections, from examples whose tokens are nearly alike",
    "2 sculpt": "rows of examples on which attention is nearly of one token",
    "3 proxy": "one point in the affine hull of the score matrices",
    "4 span": "the directions of that hull",
    "5 net": "the score matrices themselves, searched for in the hull",
    "6 projections": "what follows each head, by least squares",
}


def examples_section(result: Recovery) -> Section:
    """From the count of examples to the fit."""
    details = result.stats.details
    charts: list[Chart] = [*_restarts(details), *_six_phases(details)]
    return Section("Learning, phase by phase", steps=tuple(_steps(result)), charts=tuple(charts))


def _steps(result: Recovery) -> Iterator[tuple[str, str]]:
    details, stats = result.stats.details, result.stats
    count = f"{stats.queries:,} to learn from, {stats.heldout_queries:,} held out"
    samples = details.get("samples")
    if isinstance(samples, Mapping):
        count += f": {samples.get('sentence')}"
    yield "Examples", count
    phases = details.get("six_phase")
    if isinstance(phases, Mapping):
        for name, figures in phases.items():
            said = PHASES.get(name, "")
            yield f"Phase {name}", f"{said}{': ' if said else ''}{_figures(figures)}"
    starts = details.get("restarts")
    if isinstance(starts, Mapping):
        made, agreeing, total = starts.get("made"), starts.get("agreeing"), starts.get("in_all")
        yield "Starts", f"{total} in all; of the {made} for this number of heads {agreeing} agree"
    if "heads" in details:
        yield "Heads", f"{details['heads']} (asked: {details.get('heads_asked')})"
    if isinstance(details.get("relative_residual"), float):
        fit = f"relative residual {short(details['relative_residual'])}"
        if isinstance(details.get("first_order_r2"), float):
            fit += f"; a model of first order explains {100 * details['first_order_r2']:.0f} % of the outputs"
        yield "Fit", fit
    if result.certificate.answers.size:
        yield "Held-out examples", f"largest error {short(result.certificate.worst_error)}"
    yield "Outcome", f"{result.outcome.name}: {result.message}"


def _figures(figures: Any) -> str:
    if not isinstance(figures, Mapping):
        return str(figures)
    return ", ".join(f"{name.replace('_', ' ')} {_plain(value)}" for name, value in figures.items())


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return short(value) if isinstance(value, float) else str(value)


def _restarts(details: Mapping[str, Any]) -> Iterator[Plot]:
    starts = details.get("restarts")
    residuals = starts.get("residuals") if isinstance(starts, Mapping) else None
    if not isinstance(residuals, list) or not all(isinstance(each, int | float) for each in residuals):
        return
    found = np.array([each for each in residuals if LEAST <= each <= MOST], dtype=float)
    if len(found) < 2:
        return
    words = (
        f"Plot of the relative residuals of {len(found)} starts, the best first: from {short(float(found[0]))} to "
        f"{short(float(found[-1]))}."
    )
    series = (Series("starts", np.arange(1.0, len(found) + 1), found),)
    yield Plot(
        "starts", "How far each start came", words, series, "start, the best first", "relative residual",
        y_scale="log", whole=True,
    )  # fmt: skip


def _six_phases(details: Mapping[str, Any]) -> Iterator[Bars]:
    """Errors by the phase after which they were measured."""
    phases = details.get("six_phase")
    if not isinstance(phases, Mapping):
        return
    errors = {
        f"phase {name}": float(figures[key])
        for name, figures in phases.items()
        if isinstance(figures, Mapping)
        for key in figures
        if "error" in key and isinstance(figures[key], int | float) and LEAST <= figures[key] <= MOST
    }
    last = details.get("relative_residual")
    if isinstance(last, float) and LEAST <= last <= MOST:
        errors["after the descent"] = last
    if len(errors) < 2:
        return
    listed = ", ".join(f"{name} {short(error)}" for name, error in errors.items())
    lengths = (("relative error", tuple(errors.values())),)
    words = f"Bars of relative errors on a logarithmic scale: {listed}."
    yield Bars("phases", "Relative error, phase by phase", words, tuple(errors), lengths, "relative error", "log")
