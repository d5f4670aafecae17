"""The machine that something was measured on, in words."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import scipy

from keyhole.executors.base import THREADS
from keyhole.optional import KEYHOLE_VERSION


def machine() -> dict[str, Any]:
    """What decides how long things take, as plain data."""
    threads = {name: os.environ[name] for name in THREADS if name in os.environ}
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_gib": _memory(),
        "load": round(os.getloadavg()[0], 1) if sys.platform != "win32" else None,
        "system": platform.platform(terse=True),
        "versions": {
            "keyhole": KEYHOLE_VERSION,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "scipy": scipy.__version__,
        },
        "linear_algebra": _linear_algebra(),
        "threads": threads or "as many as the library takes",
    }


def in_words(found: dict[str, Any]) -> str:
    """One line of it."""
    memory = "" if found["memory_gib"] is None else f", {found['memory_gib']:.0f} GiB"
    load = "" if found["load"] is None else f", load {found['load']}"
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    gpu = f"; {found['gpu']}" if "gpu" in found else ""
    return f"{found['processor']}, {found['cores']} cores{memory}{load}{gpu}; {versions}, {found['linear_algebra']}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _linear_algebra() -> str:
    settings: Any = np.show_config(mode="dicts")
    found = settings.get("Build Dependencies", {}).get("blas", {})
    return f"{found.get('name', 'an unknown BLAS')} {found.get('version', '')}".strip()
