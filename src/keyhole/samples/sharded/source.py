"""Shards as a source of examples: every block is read by one worker, and what is held out is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeVar

import numpy as np

from keyhole.arrays import Floats
from keyhole.executors.base import Crew
from keyhole.samples.examples import Examples
from keyhole.samples.source import Source
from keyhole.shards.shard import Shard, double

Part = TypeVar("Part")
Keys = np.ndarray[Any, np.dtype[np.uint64]]

# Odd constants of a hash that mixes 64 bits (the finaliser of splitmix64).
MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15))


@dataclass(frozen=True)
class ShardSource(Source):
    """Shards, the examples held out, and a part of the others in memory."""

    crew: Crew
    shards: Sequence[Shard]
    heldout: Keys  # of the inputs that are held out, sorted
    sample: Examples
    count: int  # examples in all, nearly: those held out among them

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", self.sample.length)
        object.__setattr__(self, "width", self.sample.width)

    def reduce(self, work: Callable[[Floats, Floats], Part], merge: Callable[[Part, Part], Part]) -> Part:
        """Each shard is worked through by one worker; the parts are merged in the order of shards."""
        parts = self.crew.map(partial(_through, work, merge, self.heldout), self.shards)
        return reduce(merge, (part for part in parts if part is not None))

    def some(self, count: int) -> tuple[Floats, Floats]:
        """The first of the part in memory."""
        return self.sample.inputs[:count], self.sample.outputs[:count]


def _through(
    work: Callable[[Floats, Floats], Part], merge: Callable[[Part, Part], Part], heldout: Keys, shard: Shard
) -> Part | None:
    """What a worker makes of a shard; None where all of it is held out."""
    found: Part | None = None
    for pair in shard.blocks():
        inputs, outputs = double(pair)
        kept = ~np.isin(keys_of(inputs), heldout)
        if not np.all(kept):
            inputs, outputs = inputs[kept], outputs[kept]
        if len(inputs):
            part = work(inputs, outputs)
            found = part if found is None else merge(found, part)
    return found


def keys_of(inputs: Floats) -> Keys:  # (n, k, d) -> (n,)
    """A number for each example, the same for the same tokens in whatever order; others share it by rare chance."""
    bits = np.ascontiguousarray(inputs + 0.0).view(np.uint64)  # no minus zeros
    odd = _mixed(np.arange(1, inputs.shape[2] + 1, dtype=np.uint64)) | np.uint64(1)
    tokens = np.zeros(inputs.shape[:2], dtype=np.uint64)
    for column, factor in enumerate(odd):  # each number on its own: a sum would miss numbers that changed places
        tokens += _mixed(bits[..., column] * factor + np.uint64(column))
    return np.asarray(np.sum(_mixed(tokens), axis=1, dtype=np.uint64))


def _mixed(bits: Keys) -> Keys:
    bits = (bits ^ (bits >> np.uint64(30))) * MIX[0]
    bits = (bits ^ (bits >> np.uint64(27))) * MIX[1]
    return np.asarray((bits ^ (bits >> np.uint64(31))) + MIX[2])
