"""Examples that need not fit into memory: files, folders, patterns and streams, opened for `learn`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import array_api_compat
import numpy as np

from keyhole.errors import FileError, UsageError
from keyhole.executors.base import Crew
from keyhole.samples.examples import Examples
from keyhole.samples.sharded.source import ShardSource, keys_of
from keyhole.samples.sharded.stream import write_stream
from keyhole.samples.sharded.survey import Survey, draw, survey
from keyhole.samples.source import Source
from keyhole.shards.shard import Shard, find_shards

# Numbers that are taken into memory at once; more are worked through shard by shard.
IN_MEMORY = 2**23


@dataclass(frozen=True)
class OpenExamples:
    """Examples in memory, all or some, and where the others are."""

    examples: Examples
    count: int  # in all
    source: Callable[[Examples, Examples], Source] | None = None  # from those to learn from and those held out
    details: dict[str, Any] = field(default_factory=dict)


@contextmanager
def open_examples(
    data: Any,
    names: Sequence[str],
    open_crew: Callable[[], Any],
    wanted: Callable[[int, int, int], int],  # tokens, width, outputs -> examples to draw
    seed: int,
    *,
    skip_bad: bool,
    shared: bool,  # whether others than this process are to read them
) -> Iterator[OpenExamples]:
    """Whatever names examples: see `shards_of`."""
    if isinstance(data, Mapping):
        missing = [name for name in names if name not in data]
        if missing:
            raise UsageError(f"there is no column {missing[0]!r}, but {', '.join(map(str, data)) or 'none'}")
        examples = Examples.of(*(_array(data[name]) for name in names))
        yield OpenExamples(examples, examples.count)
        return
    with ExitStack() as stack:
        shards = shards_of(data, names, stack)
        crew: Crew = stack.enter_context(open_crew())
        found = survey(crew, shards, skip_bad=skip_bad)
        details = {"shards": {"used": len(found.shards), "examples": found.count, "skipped": found.skipped}}
        k, d, p = found.sizes
        if found.count * k * (d + p) <= IN_MEMORY and not shared:
            yield OpenExamples(_all_of(found), found.count, None, details if len(shards) > 1 else {})
            return
        rng = np.random.default_rng([seed, 0x5A3D])
        examples = draw(crew, found, min(wanted(k, d, p), max(1, IN_MEMORY // (k * (d + p)))), rng)

        def source(train: Examples, heldout: Examples) -> Source:
            return ShardSource(crew, found.shards, np.unique(keys_of(heldout.inputs)), train, found.count)

        yield OpenExamples(examples, found.count, source, details)


def shards_of(data: Any, names: Sequence[str], stack: ExitStack) -> list[Shard]:
    """The shards of a path, a folder, a pattern or a list of them; those of a stream are written to disk first."""
    if isinstance(data, str | os.PathLike):
        return find_shards(data, names)
    if isinstance(data, Sequence) and data and all(isinstance(each, str | os.PathLike) for each in data):
        return find_shards(list(data), names)
    if array_api_compat.is_array_api_obj(data) or not isinstance(data, Iterable):
        raise UsageError(
            "learn needs inputs and outputs, or one of: a file, a folder, a pattern, a list of files, a stream of "
            "pairs or "
            f"rows, a dictionary of columns; not {type(data).__name__} alone"
        )
    folder = stack.enter_context(TemporaryDirectory(prefix="keyhole-stream-"))
    try:
        return write_stream(data, Path(folder), names)
    except OSError as error:
        raise FileError(f"the stream cannot be kept on disk: {error}") from error


def _array(column: Any) -> Any:
    try:
        return column if array_api_compat.is_array_api_obj(column) else np.asarray(column)
    except (ValueError, TypeError) as error:
        raise UsageError(f"a column is no array of numbers: {error}") from error


def _all_of(found: Survey) -> Examples:
    """All examples, in the order of shards."""
    pairs = [pair for shard in found.shards for pair in shard.blocks()]
    one, two = (np.concatenate(arrays).astype(np.float64) for arrays in zip(*pairs, strict=True))
    return Examples(one, two, found.eps)
