"""Work whose worker dies: in a module of its own, so that processes that do it import nothing else."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def killed_once(marks: Path, number: int) -> int:
    """The square of a number; the worker that has the second one dies the first time."""
    if number == 1 and not (marks / "dead").exists():
        (marks / "dead").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number**2
