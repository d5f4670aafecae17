"""Every answer kept, keyed by its query, so that a killed run resumes without paying twice.

A journal is one SQLite file in WAL mode. A row holds the answers to one slice of a plan, not to one
query, so that millions of answers stay cheap. One run at a time may use it.
"""

from __future__ import annotations

import sqlite3
import zlib
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from keyhole.errors import JournalError

SCHEMA_VERSION = 1
APPLICATION_ID = 0x6B657968  # marks the file as a journal: "keyh"

_TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS answers (
    plan TEXT NOT NULL, repeat INTEGER NOT NULL, start INTEGER NOT NULL, stop INTEGER NOT NULL,
    dtype TEXT NOT NULL, shape TEXT NOT NULL, checksum INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (plan, repeat, start)
);
"""


class Journal:
    """The answers an oracle has given, on disk. Use as a context manager, or close it."""

    def __init__(self, path: str | PathLike[str], oracle: str) -> None:
        """Open or create the journal at `path` for the oracle described by `oracle`."""
        self.path = Path(path)
        try:
            self._connection = sqlite3.connect(self.path, isolation_level=None, timeout=0.0)
        except sqlite3.Error as error:
            raise JournalError(f"cannot open the journal {self.path}: {error}; does its folder exist?") from error
        try:
            self._prepare(oracle)
        except sqlite3.Error as error:
            self._connection.close()
            if "locked" in str(error):
                raise JournalError(f"the journal {self.path} is in use by another run: wait for it") from error
            raise JournalError(f"{self.path} is not a usable journal ({error}): name another file") from error
        except JournalError:
            self._connection.close()
            raise

    def _prepare(self, oracle: str) -> None:
        # The exclusive lock keeps a second run from asking the same queries; the system drops it on a kill.
        self._connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        (tables,) = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (owner,) = self._connection.execute("PRAGMA application_id").fetchone()
        if tables and owner != APPLICATION_ID:
            raise JournalError(f"{self.path} is a database of another program: name another file")
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")
        if not tables:
            self._connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        self._connection.execute("BEGIN EXCLUSIVE")
        for statement in _TABLES.strip().split(";\n"):
            self._connection.execute(statement)
        self._agree("schema", str(SCHEMA_VERSION), "it was written by another version of Keyhole")
        self._agree("box", oracle, "it belongs to another box, whose answers must not be mixed with this one's")
        self._connection.execute("COMMIT")

    def _agree(self, key: str, value: str, why: str) -> None:
        self._connection.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (key, value))
        (found,) = self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        if found != value:
            raise JournalError(
                f"the journal {self.path} cannot be used: {why} ({key}: {found!r}, not {value!r}). Name another file."
            )

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Flush and release the file."""
        self._connection.close()

    def slices(self, plan: str, repeat: int) -> list[tuple[int, npt.NDArray[Any]]]:
        """The answered slices of a plan as (start, answers), in order and without overlap."""
        try:
            rows = self._connection.execute(
                "SELECT start, stop, dtype, shape, checksum, data FROM answers WHERE plan = ? AND repeat = ? "
                "ORDER BY start",
                (plan, repeat),
            ).fetchall()
        except sqlite3.Error as error:
            raise JournalError(f"the journal {self.path} is damaged ({error}): name another file") from error
        return [(row[0], self._answers(*row)) for row in rows]

    def _answers(self, start: int, stop: int, dtype: str, shape: str, checksum: int, data: bytes) -> npt.NDArray[Any]:
        if checksum != _checksum(start, stop, dtype, shape, data):
            raise JournalError(
                f"the journal {self.path} is damaged: answers {start} to {stop} of a plan do not match their checksum. "
                "Name another file."
            )
        # Copied, since what comes from a buffer cannot be written to.
        return np.frombuffer(data, dtype=np.dtype(dtype)).reshape([int(side) for side in shape.split(",")]).copy()

    def add(self, plan: str, repeat: int, start: int, answers: npt.NDArray[Any]) -> None:
        """Keep the answers to the slice of a plan that begins at `start`."""
        plain = np.ascontiguousarray(answers)
        data = plain.tobytes()
        shape, dtype, stop = ",".join(map(str, plain.shape)), plain.dtype.str, start + len(plain)
        try:
            self._connection.execute(
                "INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (plan, repeat, start, stop, dtype, shape, _checksum(start, stop, dtype, shape, data), data),
            )
        except sqlite3.Error as error:
            raise JournalError(f"cannot write to the journal {self.path}: {error}; free some space") from error


def _checksum(start: int, stop: int, dtype: str, shape: str, data: bytes) -> int:
    """Over a whole row: a damaged shape is as bad as damaged answers."""
    return zlib.crc32(data, zlib.crc32(f"{start} {stop} {dtype} {shape}".encode()))
