"""What can be known, in words: of a family, and of given parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from keyhole.families import Family
from keyhole.gauge import canonical, kinds, witness
from keyhole.gauge.identifiability import INPUTS, claims
from keyhole.gauge.redundancy import Pair, Redundancy, redundancy
from keyhole.methods.diagnosis.diagnose import Diagnosis
from keyhole.runs.settings import Settings

FEW = 6  # pairs that are named one by one


def of_family(family: str, inputs: str, max_length: int | None) -> dict[str, Any]:
    """What can and cannot be known of a family, as plain data."""
    made = claims(family, inputs, max_length)
    return {
        "family": family,
        "inputs": inputs,
        "max_length": max_length,
        "claims": [{"quantity": each.quantity, "known": each.known, "reason": each.reason} for each in made],
    }


def table_of_claims(found: dict[str, Any]) -> Table:
    """The same as a table."""
    length = "of any length" if found["max_length"] is None else f"of at most {found['max_length']} tokens"
    title = f"{found['family']}: {INPUTS[found['inputs']]}; sequences {length}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("", "quantity", "because"):
        table.add_column(column, overflow="fold")
    for claim in found["claims"]:
        table.add_row("known" if claim["known"] else "hidden", claim["quantity"], claim["reason"])
    return table


def of_params(params: Family) -> dict[str, Any]:
    """What cannot be told apart in given parameters, as plain data."""
    found = redundancy(params)
    other = witness(params)
    return {
        "family": found.family,
        "units": found.units,
        "given": found.given,
        "shown": found.shown,
        "minimal": found.minimal,
        "same": [list(group) for group in found.same],
        "silent": list(found.silent),
        "near": [vars(pair) for pair in found.near],
        "logits_show": found.logits_show,
        "canonical": {name: list(array.shape) for name, array in canonical(params).arrays().items()},
        "witness": {"kind": other.kind, "explanation": other.explanation},
        "kinds": list(kinds(params)),
    }


def describe_params(params: Family) -> Iterator[tuple[str, str]]:
    """The same as (word, sentence) pairs."""
    found, other = redundancy(params), witness(params)
    yield "parameters", f"a {found.family} of width {params.width} with {found.given} {found.units}"
    yield "canonical", _canonical(found)
    unit = found.units[:-1]
    for group in found.same:
        what = "the same logits" if unit == "head" else "the same kink"
        yield "merged", f"{found.units} {_in_words(group)} have {what} and are one {unit}"
    if found.silent:
        why = "no value that shows" if unit == "head" else "no kink that anybody hears"
        verb = "have" if len(found.silent) > 1 else "has"
        yield "silent", f"{_units(unit, found.silent)} {verb} {why}"
    for pair in sorted(found.near, key=lambda each: each.distance)[:FEW]:
        yield "near", _near(unit, pair)
    if len(found.near) > FEW:
        yield "near", f"and {len(found.near) - FEW} pairs more"
    if not found.logits_show:
        yield "logits", "they do not show in any answer, so the score matrix can be anything"
    yield "witness", f"{other.kind}: {other.explanation}"
    yield "kinds", f"other parameters of the same map are of kind {', '.join(kinds(params))}"


def _canonical(found: Redundancy) -> str:
    if found.minimal:
        many = f"all {found.given} {found.units}" if found.given > 1 else f"the one {found.units[:-1]}"
        return f"{many} can be known" if found.given else f"there are no {found.units}"
    return f"{found.shown} of {found.given} {found.units} can be known"


def _near(unit: str, pair: Pair) -> str:
    said = f"{unit}s {pair.first} and {pair.second} are {pair.distance:.2g} apart, relatively"
    if pair.shows is None:
        return said
    return f"{said}: answers less exact than {pair.shows:.1g} cannot tell them from one head"


def _in_words(numbers: Sequence[int]) -> str:
    *most, last = (str(number) for number in numbers)
    return f"{', '.join(most)} and {last}" if most else last


def _units(unit: str, numbers: Sequence[int]) -> str:
    return f"{unit}{'s' if len(numbers) > 1 else ''} {_in_words(numbers)}"


def describe_diagnosis(found: Diagnosis, target: str) -> Iterator[tuple[str, str]]:
    """What an oracle is, as (word, sentence) pairs."""
    yield "family", f"{found.family}, from {found.queries} queries"
    for finding in found.findings:
        yield finding.what, f"{finding.found}: {finding.evidence}"
    yield "next", next_command(found, target) or "no method here recovers such a box"


def next_command(found: Diagnosis, target: str) -> str | None:
    """The command that recovers an oracle of this diagnosis; None where no method does."""
    if found.method is None:
        return None
    noise = None if found.noise.kind == "exact" else found.noise.text
    return Settings(target, found.method, noise=noise, options=found.options).command()
