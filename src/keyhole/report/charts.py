"""What a picture shows, as plain data: numbers, words and scales. `drawing` makes pictures of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.audit.result import Audit
from keyhole.recovery import power
from keyhole.runs.reader import LARGEST

# What a series is: dots of what was found, rings of the truth, a line, a faint line to compare with.
Look = Literal["found", "true", "line", "faint"]
Scale = Literal["linear", "log", "through zero"]
# Larger matrices are thinned out to this many rows and columns.
MOST_PIXELS = 128
PANEL_PIXELS = 96  # the same where there are many
# Numbers beyond these are the work of a broken oracle or file, and no ruler reaches so far.
LEAST, MOST = 1e-300, LARGEST
# Answers whose largest is so many times the usual one are drawn on a logarithmic scale.
FAR_APART = 100.0


def short(number: float) -> str:
    """A number as people read it: 0.034, 12.5, 2.9 × 10⁻¹⁴."""
    if not np.isfinite(number):
        return "unknown"
    said = f"{number:.3g}" if number == 0 or 1e-3 <= abs(number) < 1e5 else power(number)
    return said.replace("-", "−")


@dataclass(frozen=True)
class Chart:
    """What all pictures have: a name for files, a title, and the figures they show in words."""

    wide: ClassVar[bool] = False  # needs more room than others

    name: str
    title: str
    alternative: str


@dataclass(frozen=True)
class HeatMap(Chart):
    """A matrix in colours from −limit to limit."""

    matrix: Floats  # (rows, columns), thinned out
    limit: float
    thinned: tuple[int, int] = (1, 1)  # rows and columns of the whole matrix that one pixel stands for
    across: str = ""
    down: str = ""
    bare: bool = False  # only the pixels: one of many


@dataclass(frozen=True)
class TokenMap(Chart):
    """What every token of a sentence looks at: weights from nothing to one, with the words at both sides."""

    words: tuple[str, ...]
    weights: Floats  # (length, length), a row for every token that looks


@dataclass(frozen=True)
class Series:
    """Points or a line."""

    label: str
    x: Floats
    y: Floats
    look: Look = "found"


@dataclass(frozen=True)
class Mark:
    """A place on the horizontal ruler."""

    place: float
    label: str
    beyond: bool = False  # what lies beyond it is greyed


@dataclass(frozen=True)
class Plot(Chart):
    """Series over one another."""

    series: tuple[Series, ...]
    across: str
    up: str
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"
    marks: tuple[Mark, ...] = ()
    square: bool = False  # both rulers the same
    whole: bool = False  # the horizontal ruler counts things


@dataclass(frozen=True)
class Bars(Chart):
    """A bar for each label, in segments that are added up."""

    labels: tuple[str, ...]
    segments: tuple[tuple[str, tuple[float, ...]], ...]  # (name, length in each bar)
    across: str
    scale: Scale = "linear"
    looks: Mapping[str, Look] = field(default_factory=dict)  # of segments that are not like the others


@dataclass(frozen=True)
class Histogram(Chart):
    """How many numbers there are of each size, by their logarithms; those that are zero are counted in the title."""

    groups: tuple[tuple[str, Floats], ...]  # (name, positive numbers)
    across: str
    mark: Mark | None = None


@dataclass(frozen=True)
class Curves(Chart):
    """Error against queries, a curve for each defence."""

    wide = True

    audit: Audit


def thin(matrix: Floats, most: int = MOST_PIXELS) -> tuple[Floats, tuple[int, int]]:
    """The matrix with at most so many rows and columns, each entry the largest in size of those it stands for."""
    steps = tuple(-(-side // most) for side in matrix.shape)
    if steps == (1, 1):
        return matrix, (1, 1)
    room = np.zeros([-(-side // step) * step for side, step in zip(matrix.shape, steps, strict=True)])
    room[: matrix.shape[0], : matrix.shape[1]] = matrix
    blocks = room.reshape(room.shape[0] // steps[0], steps[0], -1, steps[1]).swapaxes(1, 2)
    flat = blocks.reshape(*blocks.shape[:2], -1)
    largest = np.take_along_axis(flat, np.argmax(np.abs(flat), axis=2)[:, :, None], axis=2)[:, :, 0]
    return largest, (steps[0], steps[1])


def largest(array: Any) -> float:
    """The largest entry in size, 0 where there is none."""
    return float(np.max(np.abs(floats(array)), initial=0.0))


def within(numbers: Floats) -> Any:  # (n,) -> (n,)
    """Which numbers can be drawn."""
    return np.isfinite(numbers) & (np.abs(numbers) <= MOST)


def clean(array: Any) -> Floats:
    """Numbers that can be drawn: what is none is zero."""
    numbers = floats(array)
    return numbers if np.all(within(numbers)) else np.where(within(numbers), numbers, 0.0)


def limit_of(*matrices: Floats) -> float:
    """The largest entry in size, 1 where all are zero."""
    return max((float(np.max(np.abs(matrix), initial=0.0)) for matrix in matrices), default=0.0) or 1.0


def heat_map(name: str, title: str, matrix: Floats, limit: float, said: str = "", **look: Any) -> HeatMap:
    """A matrix of any size as a picture, and its figures in words."""
    pixels, steps = thin(matrix, PANEL_PIXELS if look.get("bare") else MOST_PIXELS)
    rows, columns = matrix.shape
    row, column = np.unravel_index(int(np.argmax(np.abs(matrix))), matrix.shape)
    words = (
        f"Heat map, {title}: {rows} by {columns} entries from {short(float(np.min(matrix)))} to "
        f"{short(float(np.max(matrix)))}, the largest in size {short(float(matrix[row, column]))} in row {row}, column "
        f"{column}; Frobenius norm {short(float(np.linalg.norm(matrix)))}.{' ' * bool(said)}{said}"
    )
    if steps != (1, 1):
        words += f" Each pixel shows the largest of {steps[0]} × {steps[1]} entries."
    return HeatMap(name, title, words, pixels, limit, steps, **look)


def plain_chart(chart: Chart) -> dict[str, Any]:
    """What a picture says, without the numbers it is made of."""
    return {"name": chart.name, "title": chart.title, "alternative": chart.alternative}
