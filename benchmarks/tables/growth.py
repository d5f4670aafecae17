"""What `keyhole bench` prints: the whole table, and how queries and the learner's time grow."""

from __future__ import annotations

import subprocess
import sys


def table() -> str:
    command = [sys.executable, "-m", "keyhole", "bench"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return f"```text\n{said.strip()}\n```"
