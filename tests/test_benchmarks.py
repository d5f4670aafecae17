"""Rows of long benchmarks: kept as they are measured, taken up again, chosen by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import keyhole as kh
from benchmarks.support.published import Counted, Double, from_copies, from_labels, from_pairs
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


def test_published_learners_are_what_they_are_called() -> None:
    rng = np.random.default_rng(0)
    heads = [kh.SingleHead(rng.standard_normal((4, 4)) / 2, rng.standard_normal(4)) for _ in range(2)]
    one, both = heads[0], kh.MultiHead(heads)
    values, labels, copies = Counted(one), Counted(lambda tokens: np.sign(one(tokens))), Counted(both)
    assert np.max(np.abs(from_pairs(values, 4).score - one.score)) < 1e-12
    assert values.queries == 4**2 + 4
    by_labels = from_labels(labels, 4, 4.0, 1e-6)
    assert np.max(np.abs(by_labels.score - one.score)) < 1e-6
    assert np.max(np.abs(by_labels.value - one.value / np.linalg.norm(one.value))) < 1e-5
    assert kh.distance(from_copies(copies, 4, 2, 2.0, Double()), both) < 1e-4  # two heads: most digits are lost
    assert copies.queries == 2 * 2 * (4**2 + 4 - 1) + 4
