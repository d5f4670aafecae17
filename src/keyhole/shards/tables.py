"""Columns of Parquet and Arrow files, as data sets keep them, and of Zarr groups: with the extra `data`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import FileError
from keyhole.optional import extra
from keyhole.shards.column import Column, sliced


def parquet(path: Path) -> Iterator[Mapping[str, Column]]:
    """Columns of lists of lists of numbers."""
    library = extra("pyarrow.parquet", "data", "a Parquet file")
    arrow_errors = extra("pyarrow", "data", "a Parquet file").ArrowException
    try:
        with library.ParquetFile(path) as file:
            count, names = file.metadata.num_rows, file.schema_arrow.names

            def blocks(name: str, rows: int) -> Iterator[Any]:
                return (batch.column(0) for batch in file.iter_batches(rows, columns=[name]))

            yield {name: _nested(path, name, count, blocks) for name in names}
    except (OSError, arrow_errors) as error:
        raise FileError(f"{path} is not a readable Parquet file: {error}") from error


def arrow(path: Path) -> Iterator[Mapping[str, Column]]:
    """Columns of a stream or file of Arrow, such as `datasets` saves to disk."""
    library = extra("pyarrow", "data", "an Arrow file")
    try:
        with library.memory_map(str(path)) as source:
            try:
                table = library.ipc.open_stream(source).read_all()
            except library.ArrowInvalid:
                table = library.ipc.open_file(source).read_all()

            def blocks(name: str, rows: int) -> Iterator[Any]:
                return (batch.column(0) for batch in table.select([name]).to_batches(max_chunksize=rows))

            yield {name: _nested(path, name, table.num_rows, blocks) for name in table.column_names}
    except (OSError, library.ArrowException) as error:
        raise FileError(f"{path} is not a readable Arrow file: {error}") from error


def _nested(path: Path, name: str, count: int, blocks: Callable[[str, int], Iterator[Any]]) -> Column:
    """A column of nested lists; its shape is that of the first row, and every other row must have it."""
    first = next(blocks(name, 1), None)
    shape = () if first is None else _array(path, name, first).shape[1:]

    def plain(rows: int) -> Iterator[Array]:
        for each in blocks(name, rows):
            array = _array(path, name, each)
            if array.shape[1:] != shape:
                raise FileError(f"{path}: rows of {name!r} have the shapes {shape} and {array.shape[1:]}")
            yield array

    return Column((count, *shape), lambda rows: _regrouped(plain(rows), rows))


def _regrouped(arrays: Iterator[Array], rows: int) -> Iterator[Array]:
    """The same rows, so many at a time: groups of a file may end anywhere, in one column other than in another."""
    held: list[Array] = []
    for array in arrays:
        held.append(array)
        while (count := sum(map(len, held))) >= rows:
            whole = np.concatenate(held)
            yield whole[:rows]
            held = [whole[rows:]] if count > rows else []
    if held:
        yield np.concatenate(held)


def _array(path: Path, name: str, column: Any) -> Array:  # an Arrow array of lists of lists -> (rows, …)
    shape = [len(column)]
    while column.type.num_fields == 1 and "list" in str(column.type):
        if column.null_count:
            raise FileError(f"{path}: {column.null_count:,} rows of {name!r} are missing")
        inner = column.flatten()
        size = len(inner) // len(column) if len(column) else 0
        lengths = np.unique(column.value_lengths().to_numpy(zero_copy_only=False))
        if len(lengths) > 1 or size * len(column) != len(inner):
            raise FileError(f"{path}: rows of {name!r} have different lengths, {lengths[0]} to {lengths[-1]}")
        shape, column = [*shape, size], inner
    if column.null_count:
        raise FileError(f"{path}: {column.null_count:,} numbers of {name!r} are missing")
    return np.asarray(column.to_numpy(zero_copy_only=False)).reshape(shape)


def zarr(path: Path) -> Iterator[Mapping[str, Column]]:
    """Arrays of a Zarr group."""
    library = extra("zarr", "data", "a Zarr group")
    try:
        group = library.open_group(str(path), mode="r")
        found = dict(group.arrays())
    except Exception as error:  # it has exceptions of its own for every kind of store
        raise FileError(f"{path} is not a readable Zarr group: {error}") from error
    yield {name: sliced(each, tuple(each.shape)) for name, each in found.items()}
