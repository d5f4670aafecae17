"""Layers of small random models of the common architectures: opened, as in their models, recovered, or admitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.support.architectures import ARCHITECTURES, WIDTH
from benchmarks.support.coverage import PARTS, Cell, measure
from benchmarks.support.rows import Kept, Row, markdown

STDS = (0.2, 0.02)
DONE = "✓"


def table(kept: Kept) -> str:
    quiet()
    measured = {
        f"{name}, {part}": lambda name=name, part=part: _cells(name, part) for name in ARCHITECTURES for part in PARTS
    }
    cells = {(row[0], row[1]): row[2:] for row in kept.rows_of("architectures", measured)}
    rows = [_row(name, cells) for name in ARCHITECTURES if all((name, part) in cells for part in PARTS)]
    columns = ("architecture", "opened, equal", *PARTS, "queries of attention", "certified wrongly")
    return "\n\n".join(
        [
            f'Layer 0 of random models in float64, asked with `precision="float64"`, width {WIDTH}, four heads of '
            f"eight numbers: weights and biases of standard deviation {STDS[0]} and, after the comma, {STDS[1]}. "
            f"{DONE}: certified, and fresh answers of the model's own module predicted to 1e-6 of their size; "
            "otherwise how `auto` ended.",
            markdown(columns, rows),
            _summary(rows),
        ]
    )


def quiet() -> None:
    """Nothing printed by transformers of the sizes of these models."""
    import transformers

    transformers.utils.logging.set_verbosity_error()


def _cells(name: str, part: str) -> Row:
    """One part of an architecture at both sizes."""
    cells = [measure(name, part, std) for std in STDS]
    opened = sum(cell.opened and cell.equal for cell in cells)
    asked = ", ".join(f"{count:,}" for count in sorted(cell.queries for cell in cells))
    return [name, part, opened, _said(cells), asked, sum(cell.wrongly for cell in cells)]


def _row(name: str, cells: Mapping[tuple[str, str], Sequence[str]]) -> Row:
    opened, said, asked, wrongly = zip(*(cells[name, part] for part in PARTS), strict=True)
    every = len(PARTS) * len(STDS)
    return [name, f"{sum(map(int, opened))} of {every}", *said, asked[0], sum(map(int, wrongly))]


def _said(cells: Sequence[Cell]) -> str:
    words = [_word(cell) for cell in cells]
    return words[0] if len(set(words)) == 1 else ", ".join(words)


def _word(cell: Cell) -> str:
    if cell.recovered:
        return DONE
    return "refused" if not cell.opened else cell.outcome.lower().replace("_", " ")


def _summary(rows: Sequence[Any]) -> str:
    whole = sum(row[1].split(" of ")[0] == row[1].split(" of ")[1] for row in rows)
    by_part = ", ".join(f"{part} {sum(row[2 + place] == DONE for row in rows)}" for place, part in enumerate(PARTS))
    return (
        f"Of {len(rows)} architectures {whole} opened and were equal to the model in all parts. Recovered at both "
        f"sizes: {by_part}. Certified wrongly: {sum(int(row[-1]) for row in rows)}."
    )
