"""Tables of the repository: printed by its own package, of which a wheel has nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TABLES = Path("benchmarks", "tables")


def is_table(name: str) -> bool:
    """Whether the folder that a command is called in, a clone of the repository, has a table of this name."""
    return name.isidentifier() and (TABLES / f"{name}.py").is_file()


def print_table_of(name: str) -> int:
    """Print it, as `python -m benchmarks NAME` does: the exit code."""
    return subprocess.run(command_of(name), check=False).returncode


def command_of(name: str) -> Sequence[str]:
    """What is run."""
    return [sys.executable, "-m", "benchmarks", name]
