"""Files of arrays as columns: .npz, .npy, .safetensors and .pt, without ever executing what they hold."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from keyhole.arrays import Array
from keyhole.errors import FileError
from keyhole.optional import extra
from keyhole.shards.column import Column, sliced
from keyhole.shards.tables import arrow, parquet, zarr

Columns = Mapping[str, Column]


@contextmanager
def _npy(path: Path) -> Iterator[Columns]:
    try:
        array = np.load(path, allow_pickle=False, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise FileError(f"{path} is not a readable .npy file of a plain array: {error}") from error
    yield {path.stem: sliced(array, array.shape)}


@contextmanager
def _npz(path: Path) -> Iterator[Columns]:
    """Members of the archive, read from beginning to end, so that even compressed ones are never in memory at once."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [each for each in archive.namelist() if each.endswith(".npy")]
            columns = {member.removesuffix(".npy"): _member(archive, member) for member in members}
            yield columns
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zipfile.LargeZipFile) as error:
        raise FileError(f"{path} is not a readable .npz file of plain arrays: {error}") from error


def _member(archive: zipfile.ZipFile, member: str) -> Column:
    with archive.open(member) as file:
        shape, by_columns, dtype = _header(file)
    if dtype.hasobject:
        raise ValueError(f"{member} holds objects, which only a pickle can")

    def blocks(rows: int) -> Iterator[Array]:
        with archive.open(member) as file:
            _header(file)
            if by_columns:  # rows are scattered over all of it
                whole = np.frombuffer(file.read(), dtype).reshape(shape[::-1]).T
                yield from sliced(whole, shape).blocks(rows)
                return
            size = int(np.prod(shape[1:], dtype=np.int64))
            for start in range(0, shape[0], rows):
                count = min(rows, shape[0] - start)
                data = file.read(count * size * dtype.itemsize)
                yield np.frombuffer(data, dtype).reshape(count, *shape[1:])

    return Column(shape, blocks)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether columns come first, and dtype; the file then stands at the numbers."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(file)


@contextmanager
def _safetensors(path: Path) -> Iterator[Columns]:
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            yield {name: sliced(each, tuple(each.get_shape())) for name, each in slices.items() if each.get_shape()}
    except (OSError, SafetensorError, TypeError) as error:
        raise FileError(f"{path} is not a readable safetensors file: {error}") from error


@contextmanager
def _torch(path: Path) -> Iterator[Columns]:
    """A dictionary of tensors, loaded as weights only: nothing in the file is executed."""
    torch = extra("torch", "torch", "a .pt file")
    held: Any
    try:
        with warnings.catch_warnings(action="ignore"):  # of pickles that it does not like
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # whatever unpickling can end with; its words advise to run what the file holds
        raise FileError(
            f"{path} is not a file of plain tensors, which are all that is read: nothing in it was executed "
            f"({type(error).__name__})"
        ) from error
    if not isinstance(held, dict):
        raise FileError(f"{path} must hold a dictionary of tensors, not {type(held).__name__}")
    tensors = {str(name): each for name, each in held.items() if isinstance(each, torch.Tensor) and each.ndim}
    yield {name: sliced(each, tuple(each.shape)) for name, each in tensors.items()}


READERS: dict[str, Callable[[Path], AbstractContextManager[Columns]]] = {
    ".npz": _npz,
    ".npy": _npy,
    ".safetensors": _safetensors,
    ".pt": _torch,
    ".pth": _torch,
    ".parquet": partial(contextmanager(parquet)),
    ".arrow": partial(contextmanager(arrow)),
    ".zarr": partial(contextmanager(zarr)),
}


def arrays_in(path: Path) -> dict[str, Array]:
    """All arrays of a file, in memory."""
    with READERS[path.suffix](path) as columns:
        return {
            name: np.concatenate([np.asarray(each) for each in column.blocks(max(1, column.shape[0]))])
            for name, column in columns.items()
            if column.shape and column.shape[0]
        }
