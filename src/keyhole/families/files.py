"""Parameters on disk: safetensors with a format version, and the families they can hold. Reading executes no code."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from keyhole.arrays import Array, to_numpy
from keyhole.errors import FileError, UsageError

if TYPE_CHECKING:
    from keyhole.families.base import Family

FORMAT_VERSION = 1
FAMILIES: dict[str, type[Family]] = {}
Kind = TypeVar("Kind", bound="type[Family]")


def register(kind: Kind) -> Kind:
    """Make a family one that `load` reads; a decorator. UsageError where another has its name."""
    if FAMILIES.get(kind.family, kind).__qualname__ != kind.__qualname__:
        raise UsageError(f"there is a family {kind.family!r} already: {FAMILIES[kind.family].__qualname__}")
    FAMILIES[kind.family] = kind
    return kind


def load(path: str | PathLike[str]) -> Family:
    """Read parameters saved with `.save(path)`: an object of the family that was saved."""
    family, arrays = load_arrays(path)
    if family not in FAMILIES:
        raise FileError(
            f"{path} holds the unknown family {family!r}; known: {', '.join(FAMILIES)}: upgrade Keyhole, or register "
            "the family first where it is yours"
        )
    try:
        return FAMILIES[family].of_arrays(**arrays)
    except FileError as error:
        raise FileError(f"{path} {error}") from error
    except (TypeError, ValueError) as error:
        raise FileError(f"{path} does not hold a valid {family}: {error}") from error


def save_arrays(
    path: str | PathLike[str], family: str, arrays: dict[str, Array], words: dict[str, str] | None = None
) -> None:
    """Write the arrays of one parameter set and its words, with its family and the format version."""
    contiguous = {name: np.array(to_numpy(array), order="C") for name, array in arrays.items()}
    # One key only: safetensors writes several in random order, and equal parameters should make equal files.
    metadata = {"keyhole": json.dumps({"version": FORMAT_VERSION, "family": family, **(words or {})})}
    try:
        # Written as bytes, so that the file has the usual permissions.
        Path(path).write_bytes(save(contiguous, metadata=metadata))
    except (OSError, SafetensorError) as error:
        raise FileError(f"cannot write {path}: {error}") from error


def load_arrays(path: str | PathLike[str]) -> tuple[str, dict[str, Array]]:
    """The family of a parameter file, its arrays and its words."""
    if not Path(path).is_file():
        raise FileError(f"{path}: no such file")
    try:
        with safe_open(Path(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays: dict[str, Array] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise FileError(f"{path} is not a readable safetensors file: {error}") from error
    try:
        about = json.loads(metadata["keyhole"])
        version, family = int(about.pop("version")), str(about.pop("family"))
        words = {name: str(word) for name, word in about.items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise FileError(f"{path} was not written by Keyhole: its metadata does not say so") from error
    if not 1 <= version <= FORMAT_VERSION:
        raise FileError(f"{path} has format version {version}; this Keyhole reads up to {FORMAT_VERSION}: upgrade it")
    return family, {**arrays, **words}
