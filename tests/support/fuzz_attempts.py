"""Attempts for tests of the fuzzer's runner, which processes of its own import."""

from __future__ import annotations

import os
import time
from typing import Any


def attempt(kind: str, seed: int) -> dict[str, Any]:
    """A record at once; one kind never ends, and one takes its process with it."""
    if kind == "endless":
        while True:
            pass
    if kind == "deadly":
        os._exit(3)
    if kind == "slow":
        time.sleep(0.05)
    return {"kind": kind, "seed": seed, "verdict": "right", "long": "x" * 10_000, "process": os.getpid()}
