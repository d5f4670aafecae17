"""A finite alphabet of token vectors: the only tokens that an oracle may be sent."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from keyhole.arrays import Array, Floats, Space, floats, to_numpy
from keyhole.errors import UsageError

# Structures of sequences in which few different tokens occur, each of them often.
FEW = ("repeated", "clusters", "near", "zeros")
MATRIX = 2  # dimensions


@dataclass(frozen=True, eq=False)
class Alphabet:
    """Token vectors as rows; alphabets of the same numbers are equal."""

    rows: Array  # (m, width), in the library and dtype of the oracle

    @classmethod
    def of(cls, rows: Array, space: Space, width: int) -> Alphabet:
        """The alphabet of given rows; UsageError for what is none."""
        made = space.asarray(rows)
        if made.ndim != MATRIX or made.shape[0] < 1 or made.shape[1] != width:
            raise UsageError(f"alphabet must have tokens of {width} numbers as rows, not the shape {tuple(made.shape)}")
        if not np.all(np.isfinite(floats(made))):
            raise UsageError("alphabet holds numbers that are not finite")
        return cls(made)

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return int(self.rows.shape[0])

    @cached_property
    def digest(self) -> str:
        """SHA-256 over shape and numbers."""
        plain = np.ascontiguousarray(to_numpy(self.rows))
        return hashlib.sha256(f"{plain.dtype.str} {plain.shape}".encode() + plain.tobytes()).hexdigest()

    def __eq__(self, other: object) -> bool:
        """Whether the other has the same rows."""
        return isinstance(other, Alphabet) and self.digest == other.digest

    def __hash__(self) -> int:
        """By the digest."""
        return hash(self.digest)

    @cached_property
    def _keys(self) -> np.ndarray:
        return np.unique(_bytes(to_numpy(self.rows)))

    def has(self, tokens: Array) -> bool:  # (..., width)
        """Whether all these tokens are rows, to the last digit."""
        asked = np.unique(_bytes(to_numpy(tokens).reshape(-1, self.rows.shape[1])))
        return bool(np.all(np.isin(asked, self._keys)))

    def draw(self, structure: str, rng: np.random.Generator, length: int) -> Floats:  # -> (length, width)
        """A random sequence of rows, some of them often where the structure says so."""
        letters = rng.integers(self.size, size=length)
        if structure in FEW:
            letters = letters[rng.integers(1 + length // 4, size=length)]
        return floats(self.rows)[letters]


def _bytes(rows: np.ndarray) -> np.ndarray:  # (n, width) -> (n,)
    """Each row as one opaque value; zero has one sign."""
    plain = np.ascontiguousarray(rows + rows.dtype.type(0))
    return plain.view(np.dtype((np.void, plain.dtype.itemsize * plain.shape[1]))).ravel()
