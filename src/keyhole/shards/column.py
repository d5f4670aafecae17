"""Named arrays of a file, of which a few rows are in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from keyhole.arrays import Array


@dataclass(frozen=True)
class Column:
    """An array of a file: its shape, and a way through its rows."""

    shape: tuple[int, ...]  # (n, k, d)
    blocks: Callable[[int], Iterator[Array]]  # rows at a time -> arrays (rows, k, d), in order


def sliced(array: Any, shape: tuple[int, ...]) -> Column:
    """The column of anything that can be sliced along its rows."""

    def blocks(rows: int) -> Iterator[Array]:
        for start in range(0, shape[0], rows):
            yield array[start : min(start + rows, shape[0])]  # some libraries refuse to go beyond the end

    return Column(shape, blocks)
