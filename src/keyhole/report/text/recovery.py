"""A recovery as people read it: in words here, as a picture in `keyhole.report.build`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import starmap
from typing import Any

import numpy as np

from keyhole.arrays import to_numpy
from keyhole.families import Family
from keyhole.recovery import Outcome, Recovery

__all__ = ["describe"]

# Details that have lines of their own, or are too long for one.
UNTOLD = ("noise", "server", "diagnosis_")
# Outcomes whose radii no answer has contradicted.
PROVEN = (Outcome.CERTIFIED, Outcome.UNCERTIFIED)


def describe(result: Recovery, label: str, distance: float | None = None) -> Iterator[tuple[str, str]]:
    """What a person wants to know of a recovery, as (word, sentence) pairs."""
    yield "box", label
    yield "outcome", f"{result.outcome.name}: {result.message}"
    if not result.certified:
        yield "remedy", result.outcome.value
    if "noise" in result.stats.details:
        yield "noise", _noise(result)
    yield "method", _method(result)
    yield "queries", _queries(result)
    if result.certificate.answers.size:
        yield "held-out", _heldout(result)
    if result.outcome in PROVEN and result.certificate.radius is not None:
        yield "error bars", _radius(result.certificate.radius)
    elif result.params is not None:
        yield "parameters", "a partial estimate, not proven"
    if distance is not None:
        yield "truth", f"relative distance {distance:.2g} from the parameters in the box"
    if result.certified:
        yield "assuming", "; ".join(result.certificate.assumptions)
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
        held = (f"{each.replace('_', ' ')} {'holds' if part['holds'] else 'fails'}" for each, part in value.items())
        return f"{word}: {' and '.join(held)}"
    if isinstance(value, bool):
        return word if value else ""
    return f"{word} {value:.2g}" if isinstance(value, float) else f"{word} {value}"


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
    said = f"{certificate.answers.size} fresh answers, largest error {certificate.worst_error:.2g}"
    size = float(np.max(np.abs(certificate.answers)))
    said += f" where answers reach {size:.3g}" if size else ""
    if not np.isfinite(certificate.worst_ratio):
        return said
    if certificate.worst_ratio > 1:
        return f"{said}: {certificate.worst_ratio:.2g} × what the error bar allows"
    return f"{said}: at most {100 * certificate.worst_ratio:.2g} % of the error bar"


def _radius(radius: Family) -> str:
    largest = {name: float(np.max(to_numpy(array), initial=0.0)) for name, array in radius.arrays().items()}
    return "entries of " + ", ".join(f"{name} ± {size:.2g}" for name, size in largest.items()) + " at most"
