"""A verdict in words."""

from __future__ import annotations

from collections.abc import Iterator

from keyhole.recovery import of_error_bar
from keyhole.verify import Verdict

FEW = 4  # parts that are listed


def describe_verdict(verdict: Verdict, label: str, claimed: str) -> Iterator[tuple[str, str]]:
    """What a person wants to know of a verification, as (word, sentence) pairs."""
    yield "box", label
    yield "parameters", claimed
    yield "verdict", f"{verdict.conclusion.upper()}: {verdict.message}"
    kept = verdict.queries - verdict.new_queries
    yield "queries", f"{verdict.queries}" + (f"; {kept} of them came from the journal" if kept else "")
    if verdict.noise_evidence is not None:
        yield "noise", f"{verdict.noise}: {verdict.noise_evidence}"
    if verdict.tolerance is not None:
        yield "tolerance", f"every part may differ by {verdict.tolerance:g} of its norm"
    if verdict.worst_error == verdict.worst_error:
        yield "answers", f"largest error {verdict.worst_error:.2g}, {of_error_bar(verdict.worst_ratio)}"
    if changed := {name: size for name, size in verdict.by_head().items() if size}:
        most = sorted(changed.items(), key=lambda item: -item[1])
        listed = ", ".join(f"{name} {size:.1e}" for name, size in most[:FEW])
        more = f" and {len(most) - FEW} more" if len(most) > FEW else ""
        yield "changed", f"what explains the answers best, about so much of each: {listed}{more}"
    if verdict.parts:
        coarsest = sorted(verdict.parts.items(), key=lambda item: -item[1])[:FEW]
        listed = ", ".join(f"{name} {size:.1e}" for name, size in coarsest)
        yield "noticed", f"random changes from these parts of their size on, but for {verdict.miss:g}: {listed}"
    yield "sure", _sure(verdict)


def _sure(verdict: Verdict) -> str:
    alarm = (
        f"a box that is the same is called different with a probability of {verdict.false_alarm:g}"
        if verdict.false_alarm
        else "error bars hold for any arithmetic in the dtype of the box and the declared errors"
    )
    if verdict.same:
        return f"{alarm}; questions never asked might be answered differently by a box made for it"
    return alarm
