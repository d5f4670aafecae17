"""A recovery as people read it: in words here, as a picture in `keyhole.report.build`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import starmap
from typing import Any

import numpy as np

from keyhole.arrays import to_numpy
from keyhole.recovery import Outcome, Recovery, of_error_bar

# Details that have lines of their own, or are too long for one.
UNTOLD = ("noise", "server", "diagnosis_")
# Outcomes whose radii no answer has contradicted.
PROVEN = (Outcome.CERTIFIED, Outcome.UNCERTIFIED)

# Bad shards that are named one by one.
NAMED = 4

OF_A_HEAD = re.compile(r"heads\.\d+\.")  # in the names of arrays


def describe(result: Recovery, label: str, distance: float | None = None) -> Iterator[tuple[str, str]]:
    """What a person wants to know of a recovery, as (word, sentence) pairs."""
    yield from _outcome(result, "box", label)
    if "noise" in result.stats.details:
        yield "noise", _noise(result)
    yield "method", _method(result)
    yield "queries", _queries(result)
    if result.certificate.answers.size:
        yield "held-out", _heldout(result)
        yield from _tested(result)
    yield from _proof(result, distance, "parameters in the box")
    if "server" in result.stats.details:
        yield "server", _server(result.stats.details["server"])
    yield "time", f"{result.stats.seconds:.2f} s, {result.stats.oracle_seconds:.2f} s of it in the box"


def _noise(result: Recovery) -> str:
    details = result.stats.details
    return f"{details['noise']}, as {details['noise_queries']} queries show: {details['noise_evidence']}"


def _method(result: Recovery) -> str:
    found = {name: value for name, value in result.stats.details.items() if not name.startswith(UNTOLD)}
    return ", ".join([result.method, *filter(None, starmap(_detail, found.items()))])


def _detail(name: str, value: Any) -> str:
    """One thing a method found: what is not there is not mentioned."""
    word = name.replace("_", " ")
    if isinstance(value, Mapping):
        return f"{word}: {', '.join(starmap(_entry, value.items()))}"
    if isinstance(value, bool):
        return word if value else ""
    return f"{word} {value:.2g}" if isinstance(value, float) else f"{word} {value}"


def _entry(name: str, value: Any) -> str:
    """One entry of a thing with a name each: a condition that holds or fails, or what was found."""
    if isinstance(value, Mapping) and "holds" in value:
        value = "holds" if value["holds"] else "fails"
    return f"{name.replace('_', ' ')} {value}"


def _queries(result: Recovery) -> str:
    stats = result.stats
    used = f"{stats.queries:,}"
    if stats.counting_bound:
        used += f" where {stats.counting_bound:,} is the fewest possible ({stats.ratio:.3f} ×)"
    kept = stats.queries + stats.heldout_queries - stats.new_queries
    extras = [f"{stats.heldout_queries:,} more for the certificate"] if stats.heldout_queries else []
    extras += [f"{kept:,} of all came from the journal"] if kept else []
    return "; ".join([used, *extras])


def _server(facts: Mapping[str, Any]) -> str:
    again = ", ".join(f"{times:,} × {reason}" for reason, times in facts["reasons"].items())
    return f"{facts['requests']:,} requests" + (f"; asked again: {again}" if again else ", none asked again")


def _heldout(result: Recovery) -> str:
    certificate = result.certificate
    if certificate.of_labels:
        wrong = int(np.sum(certificate.answers != certificate.predictions))
        return f"{certificate.answers.size} fresh labels, {wrong or 'none'} of them not as predicted"
    said = f"{certificate.answers.size} fresh answers, half of them predicted "
    said += f"to {certificate.typical_error:.1g} of their size" if certificate.typical_error else "exactly"
    worst = of_error_bar(certificate.worst_ratio)
    return f"{said}, the worst error {worst}" if worst else said


def _tested(result: Recovery) -> Iterator[tuple[str, str]]:
    """What the held-out queries say of others, and by length."""
    certificate = result.certificate
    if certificate.statement and certificate.worst_ratio <= 1:
        yield "tested", certificate.statement
        yield (
            "by length",
            "; ".join(f"{each.label}: {each}" for each in certificate.tested[1:] if each.label != "domain"),
        )


def _outcome(result: Recovery, word: str, label: str) -> Iterator[tuple[str, str]]:
    """What it is about, and how it ended."""
    yield word, label
    yield "outcome", f"{result.outcome.name}: {result.message}"
    if not result.certified:
        yield "remedy", result.outcome.value


def _proof(result: Recovery, distance: float | None, truth: str) -> Iterator[tuple[str, str]]:
    """Radii, the distance from the truth where that is known, and what a certificate rests on."""
    radius = result.certificate.radius
    if result.outcome in PROVEN and radius is not None:
        largest: dict[str, float] = {}
        for name, array in radius.arrays().items():
            part = OF_A_HEAD.sub("", name)  # of several heads the largest
            largest[part] = max(largest.get(part, 0.0), float(np.max(to_numpy(array), initial=0.0)))
        listed = ", ".join(f"{name} ± {size:.2g}" for name, size in largest.items())
        yield "error bars", f"entries of {listed} at most"
    elif result.params is not None:
        yield "parameters", "a partial estimate, not proven"
    if distance is not None:
        yield "truth", f"relative distance {distance:.2g} from the {truth}"
    if result.certified:
        yield "assuming", "; ".join(result.certificate.assumptions)


# --- from examples ------------------------------------------------------------------------------------------------


def describe_layer(result: Recovery, label: str, distance: float | None = None) -> Iterator[tuple[str, str]]:
    """What a person wants to know of a layer learned from examples, as (word, sentence) pairs."""
    details, stats = result.stats.details, result.stats
    yield from _outcome(result, "data", label)
    yield "method", ", ".join([result.method, *_starts(details)])
    yield "examples", f"{stats.queries:,} to learn from, {stats.heldout_queries:,} held out"
    if skipped := details.get("shards", {}).get("skipped"):
        faults = [*list(skipped.values())[:NAMED], *(["…"] if len(skipped) > NAMED else [])]
        yield "left out", f"{len(skipped)} bad shard{'s' * (len(skipped) != 1)}: {'; '.join(faults)}"
    if "noise_evidence" in details:
        yield "noise", f"{details['noise_found']}: {details['noise_evidence']}"
    if "samples" in details:
        yield "samples", str(details["samples"]["sentence"])
    if "heads" in details:
        yield "heads", _heads(details)
    if "six_phase" in details:
        yield "six phases", "; ".join(f"{name} {_figures(figures)}" for name, figures in details["six_phase"].items())
    if "relative_residual" in details:
        yield "fit", _fit(details)
    certificate = result.certificate
    if certificate.answers.size:
        worst = of_error_bar(certificate.worst_ratio)
        yield (
            "held-out",
            f"half of the outputs predicted to {certificate.typical_error:.1g} of their size, the worst error {worst}",
        )
    yield from _proof(result, distance, "true parameters")
    yield "time", f"{stats.seconds:.2f} s"


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
