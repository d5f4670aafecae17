"""Where pictures are drawn: one style, and figures as PNG on white or as SVG in the colours of the page around them.

Needs the `report` extra: matplotlib is imported when something is drawn, and `INSTALL` says how to get it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any
from xml.etree import ElementTree

import numpy as np

from keyhole.optional import install
from keyhole.recovery import RAISED

INSTALL = install("report")
DPI = 150
INK, FOUND, TRUE, FAINT = "#22303c", "#1f5fa8", "#e07b39", "#9aa5b1"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.labelsize": 10,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.fontsize": 9,
    "legend.framealpha": 0.9,
    "legend.edgecolor": "none",
}
# What a page calls the colours of a picture: it may be light or dark, and decides what they are.
NAMED = {INK: "var(--ink)", FOUND: "var(--found)", TRUE: "var(--true)", FAINT: "var(--faint)", "#ffffff": "var(--card)"}
# Positive and negative entries: readable on white and on black, and fading out towards zero on both.
WARM, COOL = (0.80, 0.24, 0.24), (0.16, 0.45, 0.79)
FADE = 0.75  # below 1 small entries show more
SHADES = 255
# Decades between two labels of a logarithmic axis through zero are chosen so that there are this many on each side.
LABELS_PER_SIDE = 3
# A logarithmic ruler over less than this ratio might not meet two powers of ten.
SHORT_RULER = 1000.0
_FONT = re.compile(r"font:\s*(?P<words>[^;]*?)(?P<size>[\d.]+px)[^;]*")
_LINK = re.compile(r"url\(#")


@contextmanager
def canvas(width: float, height: float, *, own_text: bool = False) -> Iterator[Any]:
    """An empty figure of so many inches. Nobody else's figures change, and no file of a user's changes this one.

    With `own_text` an SVG keeps its words as text, in the font of the page around it.
    """
    # Here and not above: most uses of Keyhole draw nothing.
    import matplotlib as mpl  # noqa: PLC0415
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name in letters that the font of pictures lacks
        warnings.filterwarnings("ignore", message="Attempting to set identical")  # a ruler for one number is widened
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        mpl.rcParams.update({"svg.fonttype": "none" if own_text else "path", "svg.hashsalt": "keyhole"})
        figure = Figure(figsize=(width, height), dpi=DPI)
        FigureCanvasAgg(figure)
        yield figure


def lasting(figure: Any) -> Any:
    """The figure, drawn once so that it keeps its style, and shown as a PNG by notebooks whatever their settings."""
    drawn = to_png(figure)
    figure._repr_png_ = lambda: drawn
    return figure


def to_png(figure: Any) -> bytes:
    """The figure on white."""
    file = BytesIO()
    figure.savefig(file, format="png", facecolor="white")
    return file.getvalue()


def to_svg(figure: Any, name: str, alternative: str) -> str:
    """The figure as an element of a page: without a background, in the page's colours, with a text alternative.

    `name` sets its identifiers apart from those of other pictures.
    """
    file = BytesIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(file.getvalue())
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for key in list(element.attrib):
            value = element.attrib.pop(key)
            element.attrib[key.rpartition("}")[2]] = _own(key.rpartition("}")[2], value, name)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in {"metadata", "style"}:  # a style would be one for the whole page, which has its own
                parent.remove(child)
    for dropped in ("width", "height", "version"):
        root.attrib.pop(dropped, None)
    root.attrib |= {"role": "img", "aria-label": alternative}
    return ElementTree.tostring(root, encoding="unicode")


def _own(key: str, value: str, name: str) -> str:
    """An attribute as a page with other pictures can hold it."""
    if key == "id":
        return f"{name}-{value}"
    if key == "href" and value.startswith("#"):
        return f"#{name}-{value[1:]}"
    if key == "style":
        for colour, variable in NAMED.items():
            value = value.replace(colour, variable)
        value = _FONT.sub(lambda found: f"font-size: {found['size']}{_weight(found['words'])}", value)
    return _LINK.sub(f"url(#{name}-", value)


def _weight(words: str) -> str:
    return "; font-weight: 600" if "bold" in words or "700" in words else ""


def diverging() -> Any:
    """Colours from negative to positive that let the background through at zero."""
    from matplotlib.colors import ListedColormap  # noqa: PLC0415

    place = np.linspace(-1, 1, SHADES)[:, None]
    colours = np.where(place > 0, np.array(WARM), np.array(COOL))
    return ListedColormap(np.column_stack([colours, np.abs(place) ** FADE]), name="keyhole")


def pixels(matrix: Any, limit: float) -> bytes:  # (rows, columns)
    """A matrix as a bare PNG of one pixel per entry, with the colours of `diverging`."""
    from matplotlib.colors import Normalize  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415 - which comes with matplotlib

    shades = np.round(np.clip(Normalize(-limit, limit)(matrix), 0, 1) * (SHADES - 1)).astype(np.uint8)
    table = np.round(255 * np.asarray(diverging().colors)).astype(np.uint8)
    image = Image.frombytes("P", shades.shape[::-1], np.ascontiguousarray(shades).tobytes())
    image.putpalette(table[:, :3].ravel().tolist())
    file = BytesIO()
    image.save(file, format="png", transparency=table[:, 3].tobytes(), optimize=True)
    return file.getvalue()


def through_zero(axis: Any, linear_within: float, largest: float) -> None:
    """Make both rulers of an axis logarithmic on both sides of zero, with labels that do not touch each other."""
    first, last = np.log10(linear_within), int(np.floor(np.log10(largest)))
    step = max(1, int(np.ceil((last - first) / LABELS_PER_SIDE)))
    # As far from the zero in the middle as from each other.
    exponents = [e for e in range(last, int(np.floor(first)), -step) if e - first >= min(step, 1.5) - 1]
    ticks = [sign * 10.0**e for sign in (-1, 1) for e in exponents]
    for ruler, scale in ((axis.xaxis, axis.set_xscale), (axis.yaxis, axis.set_yscale)):
        scale("symlog", linthresh=linear_within)
        ruler.set_ticks([0.0, *ticks])
        ruler.set_ticks([], minor=True)
        powers_of_ten(ruler)


def logarithmic(axis: Any, ruler: str) -> None:
    """Make a ruler logarithmic, from one power of ten to another where it is short: only those have labels."""
    axis.set(**{f"{ruler}scale": "log"})
    low, high = axis.get_xlim() if ruler == "x" else axis.get_ylim()
    if low > 0 and high < SHORT_RULER * low:
        ends = 10.0 ** np.floor(np.log10(low)), 10.0 ** np.ceil(np.log10(high))
        axis.set(**{f"{ruler}lim": ends})
    powers_of_ten(axis.xaxis if ruler == "x" else axis.yaxis)


def powers_of_ten(ruler: Any) -> None:
    """Labels such as 10⁻³, and none between them: plain text, which is much quicker to set than mathematics."""
    from matplotlib.ticker import FuncFormatter, NullFormatter  # noqa: PLC0415

    ruler.set_major_formatter(FuncFormatter(lambda place, _: _power_of_ten(place)))
    ruler.set_minor_formatter(NullFormatter())


def _power_of_ten(place: float) -> str:
    if place == 0:
        return "0"
    return f"{'−' if place < 0 else ''}10{str(round(np.log10(abs(place)))).translate(RAISED)}"


def tidy(axis: Any) -> None:
    """Two spines and a faint grid."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(visible=True, color=FAINT, alpha=0.25, linewidth=0.7)
    axis.set_axisbelow(True)


def harmless(text: str, most: int = 24) -> str:
    """A name of whatever somebody chose, as a word in a picture: short, printable, no mathematics."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return (printable if len(printable) <= most else f"{printable[: most - 1]}…").replace("$", r"\$")
