"""Files that are written whole or not at all, in folders that were seen to take them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from keyhole.errors import FileError


def prepare_folder(folder: Path) -> None:
    """Make the folder and see that it takes files, before queries are spent on what could not be kept."""
    probe = _temporary(folder, "probe")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise unwritable(folder, error) from error


def write_file(folder: Path, name: str, content: bytes) -> Path:
    """Write one file into a folder; its path."""
    try:
        replace_files(folder, {name: lambda made: made.write_bytes(content)})
    except OSError as error:
        cause = error.strerror or error
        raise FileError(f"cannot write {folder / name}: {cause}; copy the folder to where it can be") from error
    return folder / name


def replace_files(
    folder: Path,
    makers: Mapping[str, Callable[[Path], Any]],  # by the name of a file: writes it at a path
    stale: tuple[str, ...] = (),  # files that are removed once all others are written, in this order
) -> None:
    """Write files under temporary names, remove stale ones, then rename: the last file is there only if all are."""
    try:
        for name, make in makers.items():
            make(_temporary(folder, name))
        for name in stale:
            (folder / name).unlink(missing_ok=True)
        for name in makers:
            os.replace(_temporary(folder, name), folder / name)
    finally:
        for name in makers:
            _temporary(folder, name).unlink(missing_ok=True)


def unwritable(folder: Path, error: OSError) -> FileError:
    """The error to raise for a folder that takes no files."""
    return FileError(f"cannot write to the folder {folder}: {error.strerror or error}; name another one with --out")


def _temporary(folder: Path, name: str) -> Path:
    return folder / f".{name}.{os.getpid()}.tmp"
