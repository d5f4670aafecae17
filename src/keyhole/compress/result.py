"""What comes of a compression: smaller parameters, their error, and the curve that they were chosen from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, Generic

import numpy as np
from safetensors.numpy import save_file

from keyhole.arrays import Floats, floats
from keyhole.errors import FileError
from keyhole.families.base import F

MATRIX = 2  # dimensions


@dataclass(frozen=True)
class Point:
    """One choice of ranks."""

    size: int  # numbers to keep
    error: float  # of held-out answers: root mean square of their change over that of the answers
    ranks: Mapping[str, int]  # by the name of a matrix


@dataclass(frozen=True)
class Compressed(Generic[F]):
    """Parameters of the same family that take fewer numbers, as products of two factors where that is less."""

    params: F
    size: int  # numbers to keep
    original: int  # numbers of the parameters that were given
    error: float  # relative, on sequences beside those that ordered the choices
    ranks: Mapping[str, int]  # of the matrices that were looked at, by name
    changes: tuple[str, ...]  # heads that were merged or left out, in words
    curve: tuple[Point, ...]  # size against error, from the largest to the smallest
    inputs: str  # what the error was measured on, in words
    tolerance: float | None = None  # that was asked for

    @property
    def met(self) -> bool:
        """Whether the error is within the tolerance, where there is one."""
        return self.tolerance is None or self.error <= self.tolerance

    def factors(self) -> dict[str, Floats]:
        """The arrays to keep: of a matrix of low rank `name.left` (m, r) and `name.right` (r, n), others whole."""
        kept: dict[str, Floats] = {}
        for name, array in self.params.arrays().items():
            matrix, rank = floats(array), self.ranks.get(name)
            if rank is None or not is_smaller(rank, matrix):
                kept[name] = matrix
                continue
            left, sizes, right = np.linalg.svd(matrix, full_matrices=False)
            root = np.sqrt(sizes[:rank])
            kept |= {f"{name}.left": left[:, :rank] * root, f"{name}.right": root[:, None] * right[:rank]}
        return kept

    def save_factors(self, path: str | PathLike[str]) -> None:
        """Write them to a safetensors file."""
        try:
            save_file({name: np.ascontiguousarray(array) for name, array in self.factors().items()}, path)
        except OSError as error:
            raise FileError(f"cannot write {path}: {error}") from error

    def summary(self) -> dict[str, Any]:
        """The figures as plain data for JSON."""
        return {
            "size": self.size,
            "original": self.original,
            "ratio": self.size / self.original,
            "error": self.error,
            "tolerance": self.tolerance,
            "met": self.met,
            "ranks": dict(self.ranks),
            "changes": list(self.changes),
            "inputs": self.inputs,
            "curve": [{"size": each.size, "error": each.error, "ranks": dict(each.ranks)} for each in self.curve],
        }

    def __repr__(self) -> str:
        kept = f"{self.size:,} of {self.original:,} numbers, error {self.error:.1e}"
        return f"Compressed({type(self.params).__name__}, {kept})"


def is_smaller(rank: int, matrix: Floats) -> bool:
    """Whether two factors of this rank are fewer numbers than the matrix."""
    return rank * sum(matrix.shape) < matrix.size


def size_of(matrix: Floats, rank: int | None) -> int:
    """Numbers to keep of an array, as two factors where it is a matrix of low rank."""
    return rank * sum(matrix.shape) if rank is not None and is_smaller(rank, matrix) else int(matrix.size)
