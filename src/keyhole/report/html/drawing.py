"""Charts as matplotlib draws them. Needs the `report` extra."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from typing import Any

import numpy as np

from keyhole.report.charts import Bars, Chart, Curves, HeatMap, Histogram, Plot, Series, TokenMap
from keyhole.report.html.audit_curves import draw_into
from keyhole.report.html.canvas import (
    FAINT,
    FOUND,
    INK,
    TRUE,
    canvas,
    diverging,
    harmless,
    logarithmic,
    pixels,
    through_zero,
    tidy,
    to_png,
    to_svg,
)
from keyhole.report.html.token_map import as_svg, draw_tokens

WIDTH, HEIGHT = 4.8, 3.5  # inches
ROW = 0.34  # of bars
FEW_POINTS = 400  # more than these are drawn as pixels, which are smaller
DASHES = (0, (4, 3))
# Segments of bars that are added up: one hue, light and dark, so that they read as parts of one thing.
PARTS = (FOUND, "#5b8fce", "#93b7e2", "#2f7f8f", "#6fb0ba", "#a9d0d6", "#7a6bb5", "#aa9fd3", "#58708c", "#8fa5bd")
BINS = 24


def as_element(chart: Chart) -> str:
    """The picture as an element of a page, which has its text alternative."""
    from markupsafe import Markup  # noqa: PLC0415 - comes with jinja2

    if isinstance(chart, HeatMap) and chart.bare:
        data = b64encode(pixels(chart.matrix, chart.limit)).decode()
        element = '<img class="pixels" alt="{}" width="{}" height="{}" src="data:image/png;base64,{}">'
        rows, columns = chart.matrix.shape
        return Markup(element).format(chart.alternative, columns, rows, data)
    if isinstance(chart, TokenMap):
        return as_svg(chart)
    with canvas(*_size(chart), own_text=True) as figure:
        _draw(figure, chart)
        return to_svg(figure, chart.name, chart.alternative)


def as_png(chart: Chart) -> bytes:
    """The picture on white, with its title."""
    width, height = _size(chart)
    with canvas(width, height + 0.4) as figure:
        _draw(figure, chart)
        figure.axes[0].set_title(harmless(chart.title, most=80), wrap=True)
        return to_png(figure)


def _size(chart: Chart) -> tuple[float, float]:
    if isinstance(chart, Bars):
        legend = 0.22 * -(-len(chart.segments) // 3) if len(chart.segments) > 1 else 0.0
        return WIDTH, 0.85 + ROW * len(chart.labels) + legend
    if isinstance(chart, Curves):
        return 1.3 * WIDTH, 3.9 + 0.2 * len(chart.audit.defences)
    if isinstance(chart, TokenMap):
        return WIDTH, WIDTH
    if isinstance(chart, HeatMap):
        rows, columns = chart.matrix.shape
        return WIDTH, float(np.clip(3.4 * rows / columns + 0.6, 1.6, 4.2))
    return WIDTH, 4.2 if isinstance(chart, Plot) and chart.square else HEIGHT


def _draw(figure: Any, chart: Chart) -> None:
    figure.set_layout_engine("constrained", w_pad=0.05, h_pad=0.05)
    paint(figure, figure.subplots(), chart)


def paint(figure: Any, axis: Any, chart: Chart) -> None:
    """Draw a chart into one axis of a figure."""
    PAINTERS[type(chart)](figure, axis, chart)


def _heat_map(_: Any, axis: Any, chart: HeatMap) -> None:
    rows, columns = chart.matrix.shape
    whole = (columns * chart.thinned[1], rows * chart.thinned[0])
    look = {"cmap": diverging(), "vmin": -chart.limit, "vmax": chart.limit, "interpolation": "none"}
    axis.imshow(
        chart.matrix, extent=(0, whole[0], whole[1], 0), aspect="auto" if rows * 2 < columns else "equal", **look
    )
    axis.set(xlabel=chart.across, ylabel=chart.down)
    axis.tick_params(length=0)
    axis.locator_params(integer=True, min_n_ticks=1, nbins=6)
    # A strip of the colours and not a colour bar, whose many seams show where colours let the background through.
    strip = axis.inset_axes((1.04, 0.0, 0.045, 1.0))
    ends = (0, 1, -chart.limit, chart.limit)
    strip.imshow(np.linspace(chart.limit, -chart.limit, 64)[:, None], extent=ends, aspect="auto", **look)
    strip.set_xticks([])
    strip.yaxis.tick_right()
    strip.tick_params(length=0, labelsize=8.5)
    strip.locator_params(axis="y", nbins=5)
    for spine in (*axis.spines.values(), *strip.spines.values()):
        spine.set_linewidth(0.6)


def _plot(_: Any, axis: Any, chart: Plot) -> None:
    for series in chart.series:
        _series(axis, series)
    if chart.x_scale == "through zero":
        sizes = np.abs(np.concatenate([series.x for series in chart.series]))
        through_zero(axis, float(np.median(sizes)), float(np.max(sizes)))
        ends = 2.0 * np.array(axis.get_xlim())  # room for the outermost
        axis.set(xlim=ends, ylim=ends)
    else:
        for ruler, scale in (("x", chart.x_scale), ("y", chart.y_scale)):
            if scale == "log":
                logarithmic(axis, ruler)
    if chart.whole:
        axis.locator_params(axis="x", integer=True, min_n_ticks=1)
    for mark in chart.marks:
        axis.axvline(mark.place, color=INK, linewidth=1.0, linestyle=DASHES, label=mark.label)
        if mark.beyond:
            end = max(axis.get_xlim()[1], mark.place)
            axis.axvspan(mark.place, end, color=FAINT, alpha=0.18, linewidth=0)
            axis.set_xlim(right=end)
    if chart.square:
        axis.set_aspect("equal")
    axis.set(xlabel=chart.across, ylabel=chart.up)
    labels = [series.label for series in chart.series] + [mark.label for mark in chart.marks]
    if len(labels) > 1 and any(labels[1:] if len(chart.series) == 1 else labels):
        axis.legend(loc="best", handlelength=1.6, frameon=False)
    tidy(axis)


def _series(axis: Any, series: Series) -> None:
    size = float(np.clip(160 / max(len(series.x), 1), 2.8, 6.0))
    dots: dict[str, Any] = {"linestyle": "none", "marker": "o", "color": FOUND}
    look: dict[str, Any] = {
        "found": {**dots, "markersize": size, "markeredgewidth": 0},
        "true": {**dots, "color": TRUE, "markersize": 1.8 * size, "markerfacecolor": "none", "markeredgewidth": 1.2},
        "line": {"color": FOUND, "linewidth": 1.6},
        "faint": {"color": FAINT, "linewidth": 1.1},
    }[series.look]
    many = len(series.x) > FEW_POINTS and series.look in {"found", "true"}
    axis.plot(
        series.x, series.y, label=series.label, zorder=1 if series.look == "faint" else 2, rasterized=many, **look
    )


def _bars(figure: Any, axis: Any, chart: Bars) -> None:
    places = np.arange(len(chart.labels))
    start = np.zeros(len(chart.labels))
    for number, (name, lengths) in enumerate(chart.segments):
        look = chart.looks.get(name)
        colour = PARTS[number % len(PARTS)] if look is None else {"true": TRUE, "faint": FAINT}[look]
        left = None if chart.scale == "log" else start
        axis.barh(places, lengths, left=left, height=0.62, color=colour, label=harmless(name))
        start = start + np.array(lengths)
    if chart.scale == "log":
        logarithmic(axis, "x")
    axis.set_yticks(places, [harmless(label) for label in chart.labels])
    axis.invert_yaxis()
    axis.set_xlabel(chart.across)
    if len(chart.segments) > 1:
        figure.legend(
            loc="outside lower center", ncols=3, handlelength=1.0, columnspacing=1.2, frameon=False, fontsize=8.5
        )
    tidy(axis)
    axis.grid(visible=False, axis="y")
    axis.tick_params(axis="y", length=0)


def _histogram(_: Any, axis: Any, chart: Histogram) -> None:
    everything = np.concatenate([numbers for _, numbers in chart.groups])
    low, high = float(np.min(everything)), float(np.max(everything))
    edges = np.geomspace(low / 1.2, high * 1.2, BINS + 1)
    for (name, numbers), colour in zip(chart.groups, (FOUND, TRUE), strict=False):
        axis.hist(numbers, bins=edges, color=colour, alpha=0.72, label=name, linewidth=0)
    logarithmic(axis, "x")
    axis.set(xlabel=chart.across, ylabel="how many")
    axis.locator_params(axis="y", integer=True, min_n_ticks=1)
    if chart.mark is not None:
        axis.axvline(chart.mark.place, color=INK, linewidth=1.1, linestyle=DASHES, label=chart.mark.label)
    if len(chart.groups) > 1 or chart.mark is not None:
        axis.legend(loc="best", handlelength=1.2, frameon=False)
    tidy(axis)


def _curves(figure: Any, axis: Any, chart: Curves) -> None:
    draw_into(axis, chart.audit)
    figure.legend(loc="outside lower left", ncols=2, handlelength=2.2, frameon=False, fontsize=8.5)


PAINTERS: dict[type[Chart], Callable[[Any, Any, Any], None]] = {
    HeatMap: _heat_map,
    TokenMap: draw_tokens,
    Plot: _plot,
    Bars: _bars,
    Histogram: _histogram,
    Curves: _curves,
}
