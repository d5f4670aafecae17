"""Markdown tables, and rows that are measured one by one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

Row = Sequence[object]


def markdown(columns: Sequence[str], rows: Iterable[Row]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


class Kept:
    """Rows on disk, so that a long table can be made in pieces and goes on where it was killed."""

    def __init__(self, path: Path, only: str | None = None, *, resume: bool = False) -> None:
        self.path, self.only = path, only
        self.going_on = resume or only is not None
        self.rows = self._known()

    def _known(self) -> dict[str, list[str]]:
        known: dict[str, list[str]] = json.loads(self.path.read_text()) if self.path.is_file() and self.going_on else {}
        return known

    def rows_of(self, name: str, measured: dict[str, Callable[[], Row]]) -> list[list[str]]:
        """The rows of one table, by their names; those that are neither known nor asked for are left out."""
        found = [self._row(f"{name} {key}", measure) for key, measure in measured.items()]
        return [row for row in found if row is not None]

    def _row(self, name: str, measure: Callable[[], Row]) -> list[str] | None:
        asked = self.only is not None and self.only in name
        if self.only is not None and not asked:
            return self.rows.get(name)
        if name not in self.rows or asked:
            row = [str(cell) for cell in measure()]
            self.path.parent.mkdir(exist_ok=True)
            # Another run may have measured other rows meanwhile.
            self.rows = {**self.rows, **self._known(), name: row}
            self.path.write_text(json.dumps(self.rows, indent=1))
            print(f"{name}: {' | '.join(self.rows[name])}", file=sys.stderr, flush=True)
        return self.rows[name]
