"""Layers of small random models of the common architectures: opened, as in their models, recovered, or admitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.support.architectures import ARCHITECTURES, WIDTH
from benchmarks.support.coverage import PARTS, Cell, measure
from benchmarks.support.rows import Kept, Row, markdown

STDS = (0.2, 0.02)
DONE = "✓"


def table(kept: Kept) -> str:
    quiet()
    rows = kept.rows_of("architectures", {name: lambda name=name: _row(name) for name in ARCHITECTURES})
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


def _row(name: str) -> Row:
    cells = {part: [measure(name, part, std) for std in STDS] for part in PARTS}
    every = [cell for each in cells.values() for cell in each]
    opened = sum(cell.opened and cell.equal for cell in every)
    asked = sorted(cell.queries for cell in cells["attention"])
    return [
        name,
        f"{opened} of {len(every)}",
        *(_said(each) for each in cells.values()),
        ", ".join(f"{count:,}" for count in asked),
        sum(cell.wrongly for cell in every),
    ]


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
