"""What a report says, as plain data: a verdict, figures, sections with words, tables and charts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from keyhole.optional import on_demand
from keyhole.report.charts import Chart, plain_chart

# good: proven; bad: admitted failure; plain: neither is asked.
Tone = Literal["good", "bad", "plain"]


@dataclass(frozen=True)
class Headline:
    """The first thing to read."""

    tone: Tone
    word: str  # one or two: "Certified"
    title: str  # what was found, or not
    said: str  # a sentence with the particulars
    remedy: str | None = None


@dataclass(frozen=True)
class Tile:
    """One figure in large letters."""

    figure: str
    label: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of words under their columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Panel:
    """Something of which there are many: a head, with its pictures and a few words."""

    title: str
    said: tuple[str, ...]
    charts: tuple[Chart, ...]


@dataclass(frozen=True)
class Scale:
    """The colours of all panels: from a least number over zero, or from zero, to a largest; and which way is which."""

    least: str
    most: str
    ways: str


@dataclass(frozen=True)
class Section:
    """A part of a report."""

    title: str
    said: tuple[str, ...] = ()  # paragraphs
    facts: tuple[tuple[str, str], ...] = ()  # (word, sentence)
    steps: tuple[tuple[str, str], ...] = ()  # the same where order matters
    table: Table | None = None
    charts: tuple[Chart, ...] = ()
    panels: tuple[Panel, ...] = ()
    scale: Scale | None = None  # that all panels have
    columns: int = 0  # of panels that stand close together, in so many columns; 0: as many as there is room for
    folded: tuple[Panel, ...] = ()  # shown on demand


@dataclass(frozen=True, repr=False)
class Report:
    """A whole report."""

    kind: str  # recovery, layer from examples, audit, ...
    label: str  # what it is about
    headline: Headline
    tiles: tuple[Tile, ...]
    sections: tuple[Section, ...]
    record: Mapping[str, Any]  # everything, as the run folder has it

    @property
    def version(self) -> str:
        """That of the Keyhole that made the run."""
        return str(self.record.get("keyhole", ""))

    @property
    def charts(self) -> tuple[Chart, ...]:
        """All pictures, in order."""
        return tuple(
            chart
            for section in self.sections
            for charts in (section.charts, *(panel.charts for panel in (*section.panels, *section.folded)))
            for chart in charts
        )

    def __repr__(self) -> str:
        """Its headline and sections; `save` writes the page."""
        sections = ", ".join(section.title for section in self.sections)
        return f"Report({self.headline.word}: {self.headline.title}; {sections})"

    def _repr_html_(self) -> str:
        """The page in a frame of its own, for notebooks."""
        page = escape(on_demand("report.build").as_html(self), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:48em;border:0" title="report"></iframe>'

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the page, which opens from disk."""
        target = Path(path)
        target.write_text(on_demand("report.build").as_html(self), encoding="utf-8")
        return target

    def as_data(self) -> dict[str, Any]:
        """What it says as plain data for JSON, without the numbers that pictures are made of."""
        return {
            "kind": self.kind,
            "label": self.label,
            "headline": vars(self.headline),
            "tiles": [vars(tile) for tile in self.tiles],
            "sections": [_plain(section) for section in self.sections],
        }


def _plain(section: Section) -> dict[str, Any]:
    return {
        "title": section.title,
        "said": section.said,
        "facts": dict(section.facts),
        "steps": dict(section.steps),
        "table": None if section.table is None else vars(section.table),
        "charts": [plain_chart(chart) for chart in section.charts],
        "panels": [
            {"title": panel.title, "said": panel.said, "charts": [plain_chart(chart) for chart in panel.charts]}
            for panel in (*section.panels, *section.folded)
        ],
    }


def sentence(message: str) -> str:
    """A message with a capital letter and a full stop."""
    said = message[:1].upper() + message[1:]
    return said if said.endswith((".", "!", "?")) else f"{said}."
