"""A map of weights on words: as an element of a page whose cells tell their numbers, and as matplotlib draws it."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

from keyhole.report.charts import TokenMap
from keyhole.report.html.canvas import FADE, INK, WARM, harmless

# Pixels of a cell, of a letter and of the words beside the cells.
CELL, LETTER, GAP = 16, 6.0, 6
LONGEST = 14  # letters of a word
# Smaller weights have no cell of their own.
NOTHING = 0.005
COLOUR = "#" + "".join(f"{round(255 * part):02x}" for part in WARM)


def as_svg(chart: TokenMap) -> str:
    """Words at the left look at words above; a cell is the more opaque the larger its weight, which its title tells."""
    words = [_cut(word) for word in chart.words]
    room = round(LETTER * max(len(word) for word in words)) + GAP
    side = CELL * len(words)
    width, height = room + side + room // 2, room + side
    parts = [
        f'<svg class="tokens" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(chart.alternative)}" '
        'font-size="10">',
        f'<rect x="{room}" y="{room}" width="{side}" height="{side}" fill="none" stroke="var(--line)"/>',
    ]
    for number, word in enumerate(words):
        middle = room + CELL * (number + 0.5)
        places = (
            f'x="{room - 4}" y="{middle + 3.5:.1f}" text-anchor="end"',
            f'transform="translate({middle + 3:.1f} {room - 4}) rotate(-60)"',
        )
        parts += [f'<text {place} fill="var(--ink)">{escape(word)}</text>' for place in places]
    parts.append(f'<g fill="{COLOUR}">')
    for row, column in np.argwhere(chart.weights >= NOTHING):
        weight = float(chart.weights[row, column])
        said = f"{chart.words[row]} → {chart.words[column]}: {weight:.3f}"
        parts.append(
            f'<rect x="{room + CELL * column}" y="{room + CELL * row}" width="{CELL}" height="{CELL}" '
            f'opacity="{min(weight, 1.0) ** FADE:.2f}"><title>{escape(said)}</title></rect>'
        )
    return "".join([*parts, "</g></svg>"])


def draw_tokens(_: Any, axis: Any, chart: TokenMap) -> None:
    """The same for a file."""
    opaque = np.clip(chart.weights, 0, 1)[..., None] ** FADE
    axis.imshow(1 - opaque * (1 - np.array(WARM)), interpolation="none")
    places, words = np.arange(len(chart.words)), [harmless(_cut(word)) for word in chart.words]
    axis.set_xticks(places, words, rotation=60, ha="left", fontsize=8)
    axis.set_yticks(places, words, fontsize=8)
    axis.xaxis.tick_top()
    axis.tick_params(length=0, colors=INK)
    for spine in axis.spines.values():
        spine.set_linewidth(0.6)


def _cut(word: str) -> str:
    return word if len(word) <= LONGEST else f"{word[: LONGEST - 1]}…"
