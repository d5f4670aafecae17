"""Rows of long benchmarks: kept as they are measured, taken up again, chosen by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.support.rows import Kept, Row


class Measured:
    """Three rows that count how often they are measured; one of them can fail."""

    def __init__(self, failing: str = "") -> None:
        self.names: list[str] = []
        self.failing = failing

    def row(self, name: str) -> Row:
        if name == self.failing:
            raise KeyboardInterrupt
        self.names.append(name)
        return [name, len(self.names)]

    def rows(self) -> dict[str, object]:
        return {name: lambda name=name: self.row(name) for name in ("one", "two", "three")}


def test_a_table_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "rows" / "table.json"
    first, second = Measured("three"), Measured()
    with pytest.raises(KeyboardInterrupt):
        Kept(path).rows_of("part", first.rows())
    rows = Kept(path, resume=True).rows_of("part", second.rows())
    assert first.names == ["one", "two"]
    assert second.names == ["three"]
    assert rows == [["one", "1"], ["two", "2"], ["three", "1"]]


def test_only_rows_asked_for_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    some, again, fresh = Measured(), Measured(), Measured()
    assert Kept(path, "part tw").rows_of("part", some.rows()) == [["two", "1"]]
    assert Kept(path, "part one").rows_of("part", some.rows()) == [["one", "2"], ["two", "1"]]
    assert Kept(path, "two").rows_of("part", again.rows()) == [["one", "2"], ["two", "1"]]
    assert again.names == ["two"]
    Kept(path).rows_of("part", fresh.rows())
    assert fresh.names == ["one", "two", "three"]
