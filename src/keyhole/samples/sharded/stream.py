"""Streams of examples, kept on disk as shards: they are gone through several times, and never in memory at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import array_api_compat
import numpy as np

from keyhole.arrays import Array, to_numpy
from keyhole.errors import UsageError
from keyhole.shards.shard import Shard

# Numbers of a shard that is written.
SHARD = 2**22


def write_stream(stream: Iterable[Any], folder: Path, names: Sequence[str]) -> list[Shard]:
    """Shards of a stream of examples: pairs of arrays, or rows as data sets have them, one or a batch at a time."""
    shards, parts, size = list[Shard](), list[tuple[Array, Array]](), 0
    for pair in _pairs(stream, names):
        parts.append(pair)
        size += pair[0].size + pair[1].size
        if size >= SHARD:
            shards.append(_write(parts, folder, len(shards)))
            parts, size = [], 0
    if parts:
        shards.append(_write(parts, folder, len(shards)))
    if not shards:
        raise UsageError("the stream holds no examples")
    return shards


def _pairs(stream: Iterable[Any], names: Sequence[str]) -> Iterator[tuple[Array, Array]]:
    """Batches (rows, k, d) with their outputs."""
    for number, given in enumerate(stream):
        item = given
        if isinstance(given, Mapping):
            missing = [name for name in names if name not in given]
            if missing:
                raise UsageError(
                    f"item {number} of the stream has no column {missing[0]!r}, but {', '.join(map(str, given))}"
                )
            item = (given[names[0]], given[names[1]])
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise UsageError(
                f"item {number} of the stream must be a pair (inputs, outputs) or have columns {names[0]} and "
                f"{names[1]}, "
                f"not {type(item).__name__}"
            )
        one, two = (_array(each, number) for each in item)
        if one.ndim == two.ndim == 2:
            one, two = one[None], two[None]
        if one.ndim != 3 or two.ndim != 3 or one.shape[:2] != two.shape[:2]:
            raise UsageError(
                f"item {number} of the stream must be an example (k, d) with outputs (k, d_out), or a batch of "
                f"them, not "
                f"{one.shape} with {two.shape}"
            )
        yield one, two


def _array(given: Any, number: int) -> Array:
    try:
        array = to_numpy(given) if array_api_compat.is_array_api_obj(given) else np.asarray(given)
    except (ValueError, TypeError) as error:
        raise UsageError(f"item {number} of the stream is no array of numbers: {error}") from error
    if array.dtype.kind not in "fiub":
        raise UsageError(f"item {number} of the stream must hold real numbers, not {array.dtype}")
    return array


def _write(parts: list[tuple[Array, Array]], folder: Path, number: int) -> Shard:
    paths = []
    for name, arrays in zip(("inputs", "outputs"), zip(*parts, strict=True), strict=True):
        shapes = {array.shape[1:] for array in arrays}
        if len(shapes) > 1:
            raise UsageError(f"{name} of the stream have different shapes: {', '.join(map(str, sorted(shapes)))}")
        paths.append(folder / f"{number:06d}-{name}.npy")
        np.save(paths[-1], np.concatenate(arrays))
    return Shard(paths[0], paths[1])
