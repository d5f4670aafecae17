"""An audit as one picture: error against queries, a curve per defence over its floor. Needs the `report` extra."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

from keyhole.audit.defences import NONE, parse_defence
from keyhole.audit.result import COPY, USEFUL, Audit, Cell
from keyhole.report.html.canvas import FAINT, INK, canvas, harmless, powers_of_ten, tidy, to_png

# Distinct in hue and lightness, also for readers who see few colours; the bare oracle is drawn in ink.
COLOURS = ("#1f5fa8", "#e07b39", "#2a9d6f", "#b0429b", "#c9a227", "#5aa9d6", "#8c564b", "#7a5195", "#ef5675", "#6b8e23")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")  # one fewer than colours: no two defences share both
# Floors at or below this are the rounding of the oracle itself: one line says it for all of them.
ROUNDING = 1e-15
# Where an error of exactly nothing is drawn, which a logarithmic ruler has no place for.
NO_ERROR = 1e-17
# Budgets over less than this ratio are labelled between powers of ten too.
FEW_DECADES = 300.0
DASHED: dict[str, Any] = {"linestyle": (0, (4, 3)), "linewidth": 1.3, "alpha": 0.8}


def draw_curves(audit: Audit) -> bytes:
    """The picture as PNG. ImportError when matplotlib is missing."""
    with canvas(11.4, 6.6) as figure:
        figure.set_layout_engine("constrained", w_pad=0.13, h_pad=0.13)
        figure.suptitle("What defences cost an attacker", fontsize=14.5, fontweight="bold", x=0.012, ha="left")
        axis = figure.subplots()
        words = harmless(audit.label[:1].upper() + audit.label[1:], most=120)
        axis.set_title(words, fontweight="normal", fontsize=10)
        draw_into(axis, audit)
        axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), handlelength=2.4, labelspacing=0.85, frameon=False)
        return to_png(figure)


def draw_into(axis: Any, audit: Audit) -> None:
    """The curves and their frame, without a title and a legend."""
    end = max(row.budget for row in audit.rows)
    looks = iter(zip(cycle(COLOURS), cycle(MARKERS), strict=False))
    floors = False
    for defence in audit.defences:
        rows = audit.of(defence)
        colour, marker = (INK, "o") if defence == NONE else next(looks)
        look: dict[str, Any] = {"color": colour, "linewidth": 2.4 if defence == NONE else 1.7, "alpha": 0.9}
        queries, errors = _points(rows)
        edge = {"markersize": 7, "markeredgecolor": "white", "markeredgewidth": 0.8}
        axis.plot(
            queries,
            errors,
            label=parse_defence(defence).words.replace(" and ", "\nand "),
            marker=marker,
            zorder=3,
            **edge,
            **look,
        )
        # What is left of the budget changes nothing more.
        axis.plot([queries[-1], end], [errors[-1]] * 2, zorder=2, **{**look, "linewidth": 0.9, "alpha": 0.6})
        seen = [row for row in rows if row.floor > ROUNDING]
        if seen and defence != NONE:
            ends = [*seen, replace(seen[-1], budget=end)] if parse_defence(defence).limit else seen
            axis.plot([row.budget for row in ends], [row.floor for row in ends], color=colour, zorder=1, **DASHED)
            floors = True
    if floors:
        axis.plot([], [], color=INK, label="floor, as far as is known", **DASHED)
    _frame(axis, audit)


def _points(rows: Sequence[Cell]) -> tuple[list[int], list[float]]:
    """(queries, error): those sent where they brought something, else those allowed."""
    points = dict.fromkeys(
        (row.queries if row.error <= USEFUL else row.budget, max(row.error, NO_ERROR)) for row in rows
    )
    return [queries for queries, _ in points], [error for _, error in points]


def _frame(axis: Any, audit: Audit) -> None:
    axis.set(xscale="log", yscale="log", xlabel="queries sent", ylabel="relative error of what the attacker gets")
    powers_of_ten(axis.yaxis)
    low, high = axis.get_ylim()
    low = min(low, USEFUL / 3)
    axis.set_ylim(low, max(high, 2.0))
    left = min(axis.get_xlim()[0], audit.bound / 2)  # of one budget only there would be next to no width
    axis.set_xlim(left, 1.15 * max(row.budget for row in audit.rows))
    for goal, words in ((USEFUL, "1 %: useful"), (COPY, "10⁻⁶: a copy")):
        if goal < low:  # words outside of the frame would leave it no room
            continue
        axis.axhline(goal, color=FAINT, linewidth=1.0, linestyle=":", zorder=0)
        axis.annotate(words, (1.0, goal), xycoords=("axes fraction", "data"), xytext=(-4, 3),
                      textcoords="offset points", ha="right", fontsize=8.5, color=FAINT)  # fmt: skip
    _count_queries(axis)
    axis.axvline(audit.bound, color=FAINT, linewidth=1.0, zorder=0)
    axis.annotate(f"counting bound, {audit.bound:,}", (audit.bound, 0.0), xycoords=("data", "axes fraction"),
                  xytext=(-4, 6), textcoords="offset points", fontsize=8.5, color=FAINT, rotation=90, ha="right",
                  va="bottom")  # fmt: skip
    tidy(axis)


def _count_queries(axis: Any) -> None:
    """Labels in plain figures, few enough not to touch each other."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415

    low, high = axis.get_xlim()
    steps = (1.0, 2.0, 5.0) if high / low < FEW_DECADES else (1.0,)
    axis.xaxis.set_major_locator(LogLocator(subs=steps))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda place, _: f"{place:,.0f}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
