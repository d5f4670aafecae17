"""Shards: the files that hold examples, found by name and read block by block, with every fault named."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from keyhole.arrays import Array, Floats, is_real, to_numpy
from keyhole.errors import FileError, UsageError
from keyhole.shards.column import Column
from keyhole.shards.formats import READERS

NAMES = ("inputs", "outputs")
SUFFIXES = tuple(READERS)
# Numbers of a block: what is in memory of a shard at a time, several times over.
BLOCK = 2**19


@dataclass(frozen=True)
class Shard:
    """A file of two arrays, or two files of one each: what one worker reads. It travels by its name."""

    inputs: Path
    outputs: Path  # the same file, unless arrays are in files of their own
    names: tuple[str, str] = NAMES

    def __str__(self) -> str:
        return str(self.inputs) if self.inputs == self.outputs else f"{self.inputs} with {self.outputs}"

    def blocks(self, numbers: int = BLOCK) -> Iterator[tuple[Array, Array]]:  # (rows, k, d), (rows, k, d_out)
        """Inputs and outputs, as they are kept, a few rows at a time; FileError where they do not fit together."""
        with ExitStack() as files:
            one, two = self._columns(files)
            self._check_shapes(one.shape, two.shape)
            rows = max(1, numbers // int(np.prod(one.shape[1:]) + np.prod(two.shape[1:])))
            for pair in zip(one.blocks(rows), two.blocks(rows), strict=True):
                yield self._plain(pair[0], "inputs"), self._plain(pair[1], "outputs")

    def _columns(self, files: ExitStack) -> tuple[Column, Column]:
        for path in {self.inputs, self.outputs}:
            if not path.exists():
                raise FileError(f"{path}: no such file")
        found = []
        opened = {path: files.enter_context(READERS[path.suffix](path)) for path in {self.inputs, self.outputs}}
        for path, name in zip((self.inputs, self.outputs), self.names, strict=True):
            held = opened[path]
            key = path.stem if path.suffix == ".npy" else name  # a .npy file is one array
            if key not in held:
                has = ", ".join(sorted(held)) or "nothing"
                raise FileError(
                    f"{path} has no array {name!r}: it must hold {self.names[0]} (n, k, d) and {self.names[1]} "
                    f"(n, k, d_out), not {has}"
                )
            found.append(held[key])
        return found[0], found[1]

    def _check_shapes(self, one: tuple[int, ...], two: tuple[int, ...]) -> None:
        for name, shape, form in zip(self.names, (one, two), ("(n, k, d)", "(n, k, d_out)"), strict=True):
            if len(shape) > 0 and shape[0] == 0:
                raise FileError(f"{self} holds no examples: {name} has shape {shape}")
            if len(shape) != 3 or 0 in shape:
                raise FileError(f"{self}: {name} must have shape {form} with no size zero, not {shape}")
        if one[:2] != two[:2]:
            raise FileError(
                f"{self}: {self.names[0]} {one} and {self.names[1]} {two} must agree in the number of examples and "
                f"of tokens"
            )

    def _plain(self, block: Array, role: str) -> Array:
        try:
            if is_real(block):
                return to_numpy(block)
        except TypeError as error:
            raise FileError(f"{self}: {role} of the dtype {block.dtype} cannot be read: {error}") from error
        raise FileError(f"{self}: {role} must hold real numbers, not {block.dtype}")


def double(pair: tuple[Array, Array]) -> tuple[Floats, Floats]:
    """Inputs and outputs as float64."""
    one, two = (np.ascontiguousarray(array, dtype=np.float64) for array in pair)
    return one, two


def find_shards(
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], names: Sequence[str] = NAMES
) -> list[Shard]:
    """The shards that a path, a folder, a pattern or a list of them names, in order."""
    if isinstance(names, str) or len(names) != 2 or not all(isinstance(each, str) and each for each in names):
        raise UsageError(f"names must be two names of arrays, of inputs and of outputs, not {names!r}")
    if names[0] == names[1]:
        raise UsageError(f"names must be of two arrays, not {names[0]!r} twice")
    given = [data] if isinstance(data, str | os.PathLike) else list(data)
    if not given:
        raise UsageError("no shards: the list of files is empty")
    paths = [path for each in given for path in _paths(os.fspath(each))]
    return _shards(paths, (names[0], names[1]))


def _paths(text: str) -> list[Path]:
    path = Path(text).expanduser()
    if path.is_dir() and path.suffix != ".zarr":
        found = sorted(each for each in path.iterdir() if each.suffix in SUFFIXES)
        if not found:
            raise FileError(f"{path} holds no file of examples: {', '.join(SUFFIXES)}")
        return found
    if not path.exists() and glob.has_magic(text):
        matches = sorted(Path(each) for each in glob.glob(str(path), recursive=True))
        if not matches:
            raise FileError(f"no file matches {text!r}")
        return [each for match in matches for each in ([match] if match.suffix in SUFFIXES else _paths(str(match)))]
    if path.suffix not in SUFFIXES:
        raise UsageError(
            f"cannot tell what {text!r} is: examples are in files {', '.join(SUFFIXES)}, or folders of them"
        )
    if not path.exists():
        raise FileError(f"{path}: no such file")
    return [path]


def _renamed(path: Path, one: str, two: str) -> Path | None:
    """The path with the name of another array in it, as a word of its own: the y in x.npy is none."""
    words = list(re.finditer(rf"(?<![A-Za-z]){re.escape(one)}(?![A-Za-z])", path.stem))
    last = words[-1] if words else None
    return None if last is None else path.with_name(f"{path.stem[: last.start()]}{two}{path.stem[last.end() :]}.npy")


def _shards(paths: Sequence[Path], names: tuple[str, str]) -> list[Shard]:
    """Files as shards; of .npy files two make one, whose names differ in the name of the array."""
    found = []
    for path in dict.fromkeys(paths):
        if path.suffix != ".npy":
            found.append(Shard(path, path, names))
        elif (partner := _renamed(path, *names)) is not None:
            found.append(Shard(path, partner, names))
        elif (partner := _renamed(path, *reversed(names))) is None:
            raise FileError(
                f"{path}: .npy files come in pairs, {names[0]}.npy beside {names[1]}.npy, or a-{names[0]}.npy beside "
                f"a-{names[1]}.npy"
            )
        elif not partner.exists():
            raise FileError(f"{partner}: no such file, whose outputs are in {path}")
    return found
