"""Sections about what was recovered: heads and nets, beside the truth where it is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.families import Anatomy, Family, SingleHead
from keyhole.gauge.table import matched
from keyhole.gauge.tolerance import relative
from keyhole.report.charts import (
    PANEL_PIXELS,
    Bars,
    Chart,
    Mark,
    Plot,
    Series,
    clean,
    heat_map,
    largest,
    limit_of,
    short,
)
from keyhole.report.content import Panel, Scale, Section
from keyhole.report.sections.nets import net_section

# Singular values up to this part of the largest are rounding.
ROUNDING = 1e-12


def sections_of(
    params: Family | None, radius: Family | None, truth: Family | None, ranks: Sequence[int] = ()
) -> Iterator[Section]:
    """What there is to see of parameters: their heads, and the net behind or instead of them.

    `ranks` are those that were detected of the heads' score matrices.
    """
    if params is None:
        return
    anatomy = params.anatomy
    known = truth.anatomy if truth is not None and truth.family == params.family else Anatomy("")
    if anatomy.numbered:
        if anatomy.heads:
            yield many_heads(anatomy.heads, heads_of(radius), known.heads, ranks=ranks)
    elif anatomy.heads:
        rank, true = ranks[0] if ranks else None, known.heads[0] if known.heads else None
        yield _one_head(anatomy.heads[0], true, rank, only_score=anatomy.behind)
    if anatomy.net is not None:
        yield net_section(anatomy.net, None if anatomy.behind else known.net, behind=anatomy.behind)


def heads_of(params: Family | None) -> tuple[SingleHead, ...]:
    """The heads of any parameters that have some."""
    return () if params is None else params.anatomy.heads


# --- one head ---------------------------------------------------------------------------------------------------


def _one_head(head: SingleHead, truth: SingleHead | None, rank: int | None, only_score: bool = False) -> Section:
    found = clean(head.score)
    true = None if truth is None or truth.width != head.width else clean(truth.score)
    limit = limit_of(found, *([] if true is None else [true]))
    ways = {"across": "coordinate of the last token", "down": "coordinate of the attended token"}
    charts: list[Chart] = [heat_map("score", "Recovered score matrix", found, limit, **ways)]
    said = [
        "The score matrix W decides which token is attended to: the logit of token x for the last token y is xᵀ·W·y."
    ]
    if true is not None:
        apart = found - true
        charts.append(heat_map("score-true", "True score matrix", true, limit, **ways))
        off = largest(apart)
        same = "They agree to the last bit." if not off else ""
        charts.append(heat_map("score-error", "Recovered less true", apart, limit_of(apart), same, **ways))
        said.append(
            f"The box is a demo or a file, so the truth is known: no entry is off by more than {short(off)}, where "
            f"entries reach {short(limit)}."
        )
    charts.append(_spectrum([("recovered", found)] + ([] if true is None else [("true", true)]), rank))
    facts = [("score matrix", f"{head.width} × {head.width}, norm {short(float(np.linalg.norm(found)))}")]
    if not only_score:
        facts += list(_value_facts(head))
    return Section("The attention head", tuple(said), tuple(facts), charts=tuple(charts))


def _value_facts(head: SingleHead) -> Iterator[tuple[str, str]]:
    value = clean(head.value)
    shape = f"{head.width} numbers" if head.outputs is None else f"{head.width} × {head.outputs}"
    yield "value", f"{shape}, norm {short(float(np.linalg.norm(value)))}"
    for name in ("score_bias", "output_bias"):
        if (bias := getattr(head, name)) is not None:
            yield name.replace("_", " "), f"norm {short(float(np.linalg.norm(clean(bias))))}"


def _spectrum(matrices: Sequence[tuple[str, Floats]], rank: int | None) -> Plot:
    series = []
    for label, matrix in matrices:
        values = floats(np.linalg.svd(matrix, compute_uv=False))
        order = np.arange(1.0, len(values) + 1)
        seen = values > 0
        series.append(Series(label, order[seen], values[seen], "true" if label == "true" else "found"))
    shown = series[0].y
    side = len(matrices[0][1])
    words = f"Plot of the {side} singular values of the score matrix on a logarithmic scale: "
    words += f"from {short(float(shown[0]))} down to {short(float(shown[-1]))}" if shown.size else "all are zero"
    marks: tuple[Mark, ...] = ()
    if rank is not None:
        words += f"; the detected rank is {rank}"
        if 0 < rank < shown.size:
            words += f", after value {rank} of {short(float(shown[rank - 1]))} the next is {short(float(shown[rank]))}"
        marks = (Mark(rank + 0.5, f"detected rank {rank}", beyond=rank < side),)
    title = "Singular values" if rank is None else f"Singular values: rank {rank} of {side}"
    series = series[::-1]  # dots over rings
    across, up = "number", "singular value"
    scale: Any = "log" if shown.size else "linear"
    return Plot("spectrum", title, words + ".", tuple(series), across, up, "linear", scale, marks, whole=True)


# --- several heads ----------------------------------------------------------------------------------------------


def many_heads(
    heads: Sequence[SingleHead],
    radii: Sequence[SingleHead],
    truth: Sequence[SingleHead],
    prefix: str = "",
    ranks: Sequence[int] = (),
) -> Section:
    """A panel for each of several heads; `prefix` sets names of pictures apart from those of other layers."""
    true = matched(heads, truth)
    limit = limit_of(*(clean(head.score) for head in heads))
    panels = tuple(
        _panel(
            number,
            head,
            radii[number] if number < len(radii) else None,
            true[number] if true else None,
            limit,
            prefix,
            ranks[number] if len(ranks) == len(heads) else _rank(clean(head.score)),
        )
        for number, head in enumerate(heads)
    )
    said = [
        f"{len(heads)} head{'s' * (len(heads) != 1)} of width {heads[0].width}, each with a score matrix that decides "
        "which token is attended to and a value that is added up. No query can tell their order. "
        "All panels have one colour scale."
    ]
    if heads[0].width > PANEL_PIXELS:
        said.append("Matrices are thinned out: each pixel is the largest in size of the entries it stands for.")
    charts = (_norms(heads, prefix), _spectra(heads, prefix))
    ways = "rows are coordinates of the attended token, columns of the last one"
    return Section(
        "The heads", tuple(said), charts=charts, panels=panels, scale=Scale(short(-limit), short(limit), ways)
    )


def _panel(
    number: int,
    head: SingleHead,
    radius: SingleHead | None,
    truth: SingleHead | None,
    limit: float,
    prefix: str,
    rank: int,
) -> Panel:
    found, value = clean(head.score), clean(head.value)
    said = [f"value of norm {short(float(np.linalg.norm(value)))}"]
    said.append(f"score of norm {short(float(np.linalg.norm(found)))}, rank {rank}")
    if radius is not None:
        said.append(f"error bars ± {short(largest(radius.score))} and ± {short(largest(radius.value))} at most")
    title = f"Head {number}"
    charts = [heat_map(f"{prefix}head-{number}", f"{title}, recovered", found, limit, bare=True)]
    if truth is not None:
        true = clean(truth.score)
        charts.append(heat_map(f"{prefix}head-{number}-true", f"{title}, true", true, limit, bare=True))
        said.append(f"{short(relative(found, true))} from the true score matrix, relatively")
    return Panel(title, tuple(said), tuple(charts))


def _rank(matrix: Floats) -> int:
    values = np.linalg.svd(matrix, compute_uv=False)
    return int(np.sum(values > max(values[0], np.finfo(float).tiny) * ROUNDING * len(values)))


def _norms(heads: Sequence[SingleHead], prefix: str) -> Bars:
    norms = tuple(float(np.linalg.norm(clean(head.value))) for head in heads)
    labels = tuple(f"head {number}" for number in range(len(heads)))
    listed = ", ".join(f"{label} {short(norm)}" for label, norm in zip(labels, norms, strict=True))
    words = f"Bars of the norms of the heads' values: {listed}."
    return Bars(
        f"{prefix}value-norms", "How loud each head is", words, labels, (("value", norms),), "norm of the value"
    )


def _spectra(heads: Sequence[SingleHead], prefix: str) -> Plot:
    series: list[Series] = []
    firsts, lasts = [], []
    for head in heads:
        values = floats(np.linalg.svd(clean(head.score), compute_uv=False))
        seen = values > 0
        if not np.any(seen):
            continue
        series.append(
            Series(
                "" if series else "a line for each head", np.arange(1.0, len(values) + 1)[seen], values[seen], "line"
            )
        )
        firsts.append(float(values[seen][0]))
        lasts.append(float(values[seen][-1]))
    words = f"Plot of the singular values of the score matrices of {len(heads)} heads on a logarithmic scale"
    if series:
        words += (
            f": the largest are between {short(min(firsts))} and {short(max(firsts))}, the smallest between "
            f"{short(min(lasts))} and {short(max(lasts))}"
        )
    scale: Any = "log" if series else "linear"
    name, title = f"{prefix}spectra", "Singular values of the score matrices"
    return Plot(name, title, words + ".", tuple(series), "number", "singular value", "linear", scale, whole=True)
