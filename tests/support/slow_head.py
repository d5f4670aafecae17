"""A head that takes its time, in a module of its own so that workers can import it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import keyhole as kh

WIDTH = 8


def head(width: int = WIDTH) -> kh.SingleHead:
    rng = np.random.default_rng(width)
    return kh.SingleHead(rng.standard_normal((width, width)) / width**0.5, rng.standard_normal(width))


class Slow:
    """So many seconds for every sequence; the process that is asked first after `marks` exists dies or hangs."""

    width = WIDTH

    def __init__(self, seconds: float = 0.0, marks: Path | None = None, fault: str = "") -> None:
        self.seconds, self.marks, self.fault = seconds, marks, fault
        self.head = head()

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        if self.marks is not None:
            try:
                (self.marks / "met").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                if self.fault == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(3600)
        time.sleep(self.seconds * len(tokens))
        return self.head(tokens)


class AtOnce:
    """Counts how many calls are under way at the same time."""

    width = WIDTH

    def __init__(self, seconds: float = 0.002) -> None:
        self.seconds, self.most, self.now, self.queries = seconds, 0, 0, 0
        self.head, self._lock = head(), threading.Lock()

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        with self._lock:
            self.now, self.queries = self.now + 1, self.queries + len(tokens)
            self.most = max(self.most, self.now)
        time.sleep(self.seconds)
        with self._lock:
            self.now -= 1
        return self.head(tokens)


def needs_what_is_not_there(*_: object) -> None:
    """Stands for a worker that lacks an extra."""
    sys.modules.pop("no_such_extra", None)
    __import__("no_such_extra")
