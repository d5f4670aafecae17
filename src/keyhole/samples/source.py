"""Where examples come from: arrays in memory, or shards. What is asked of them is a sum, or a selection of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

from keyhole.arrays import Floats

Part = TypeVar("Part")

# Examples of a block in memory.
CHUNK = 20_000


class Source(ABC):
    """Examples that are gone through block by block, each once, by whoever there is to do it."""

    count: int
    length: int
    width: int

    @abstractmethod
    def reduce(self, work: Callable[[Floats, Floats], Part], merge: Callable[[Part, Part], Part]) -> Part:
        """What `work` makes of each block of (inputs, outputs), merged in their order."""

    @abstractmethod
    def some(self, count: int) -> tuple[Floats, Floats]:  # (≤ count, k, d), (≤ count, k, d_out)
        """A random part: always the same one, and of it the first where fewer are asked for."""


@dataclass(frozen=True)
class ArraySource(Source):
    """Examples in memory, which are taken to be in random order."""

    inputs: Floats  # (n, k, d)
    outputs: Floats  # (n, k, d_out)

    def __post_init__(self) -> None:
        for name, size in zip(("count", "length", "width"), self.inputs.shape, strict=True):
            object.__setattr__(self, name, size)

    def reduce(self, work: Callable[[Floats, Floats], Part], merge: Callable[[Part, Part], Part]) -> Part:
        """One block after the other."""
        parts = (slice(start, start + CHUNK) for start in range(0, self.count, CHUNK))
        return reduce(merge, (work(self.inputs[part], self.outputs[part]) for part in parts))

    def some(self, count: int) -> tuple[Floats, Floats]:
        """The first ones."""
        return self.inputs[:count], self.outputs[:count]
