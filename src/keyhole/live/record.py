"""What is known of a run while it goes on: written by its thread, read by any number of pages."""

from __future__ import annotations

import math
from collections.abc import Callable
from threading import Lock
from time import monotonic
from typing import Any

from keyhole.live.heatmap import pictures
from keyhole.progress import SketchThrottle
from keyhole.queries import Sketch

# Between two points of the curve of queries over time, at first; when there are too many, every other one goes.
POINT_SECONDS, MOST_POINTS = 0.1, 200
# The rate shown is that of the last so many seconds.
RATE_SECONDS = 2.0


class RunStopped(Exception):
    """Raised inside a run that was told to stop, between two batches: the journal has kept the last one."""


class Record:
    """An observer that writes down what a session says, and ends it when told to."""

    def __init__(self, budget: int | None = None) -> None:
        self._lock = Lock()
        self._budget = budget
        self._began = monotonic()
        self._ended: float | None = None
        self._stages: dict[tuple[int, str], dict[str, int]] = {}  # by attempt and name
        self._attempt = 1
        self._stage = ""
        self._new = self._old = 0
        self._points: list[tuple[float, int, int]] = [(0.0, 0, 0)]  # seconds, new and old queries until then
        self._pause = POINT_SECONDS
        self._recent: list[tuple[float, int]] = [(0.0, 0)]
        self._known = self._error = math.nan
        self._heldout: list[float] = []
        self._throttle = SketchThrottle()
        self._pictures: list[dict[str, Any]] = []
        self._stop_requested = False
        self.version = self.picture_version = 0

    def stop(self) -> None:
        """End the run after the batch at hand."""
        self._stop_requested = True

    def end(self) -> None:
        """The clock stops; said again, pages look again."""
        with self._lock:
            if self._ended is None:
                self._ended = monotonic()
                self._point(self._seconds())
            self.version += 1

    def draw(self, drawn: list[dict[str, Any]]) -> None:
        """Show these pictures from now on."""
        with self._lock:
            self._pictures = drawn
            self.picture_version += 1
            self.version += 1

    # --- what a session says ----------------------------------------------------------------------------------

    def planned(self, stage: str, queries: int) -> None:
        """Another plan begins."""
        self._go_on()
        with self._lock:
            self._stage = stage
            self._counts()["planned"] += queries
            self.version += 1

    def answered(self, queries: int, *, new: bool) -> None:
        """Some of it was answered."""
        with self._lock:
            found = self._counts()
            found["new" if new else "journal"] += queries
            found["planned"] = max(found["planned"], found["new"] + found["journal"])
            self._new += queries if new else 0
            self._old += 0 if new else queries
            now = self._seconds()
            if now - self._points[-1][0] >= self._pause:
                self._point(now)
            self._recent.append((now, self._new))
            while now - self._recent[0][0] > RATE_SECONDS and len(self._recent) > 2:
                self._recent.pop(0)
            self.version += 1
        self._go_on()

    def sketched(self, so_far: Callable[[], Sketch | None]) -> None:
        """Something is known already."""
        found = self._throttle.look(so_far)
        if found is None:
            return
        drawn = pictures(found.matrices)
        with self._lock:
            self._known, self._heldout = found.known, list(found.heldout)
            self._error = self._error if math.isnan(found.error) else found.error
        self.draw(drawn)

    def discarded(self) -> None:
        """It was about something else: another method begins."""
        with self._lock:
            self._attempt += 1
            self._known = self._error = math.nan
            self._heldout = []
            self._throttle = SketchThrottle()
        self.draw([])

    def _counts(self) -> dict[str, int]:
        return self._stages.setdefault((self._attempt, self._stage), {"planned": 0, "new": 0, "journal": 0})

    def _go_on(self) -> None:
        if self._stop_requested:
            raise RunStopped

    def _seconds(self) -> float:
        return (monotonic() if self._ended is None else self._ended) - self._began

    def _point(self, now: float) -> None:
        self._points.append((now, self._new, self._old))
        if len(self._points) > MOST_POINTS:
            self._points = self._points[::2]
            self._pause *= 2

    # --- what pages read --------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """All of it as plain data, but for the pictures."""
        with self._lock:
            asked = self._new + self._old
            return {
                "version": self.version,
                "seconds": self._seconds(),
                "stage": self._stage,
                "attempt": self._attempt,  # at a method: the first may take an oracle for what it is not
                "stages": [{"attempt": at, "name": name, **counts} for (at, name), counts in self._stages.items()],
                "queries": asked,
                "new": self._new,
                "journal": self._old,
                "planned": sum(stage["planned"] for stage in self._stages.values()),
                "budget": self._budget,
                "left": None if self._budget is None else max(0, self._budget - asked),
                "rate": self._rate(),
                "points": [[round(at, 3), new, old] for at, new, old in self._points],
                "known": self._known,
                "error": self._error,
                "heldout": self._heldout,
            }

    def _rate(self) -> float:
        """Queries per second that reached the oracle lately; of a run that ended, on the whole."""
        if self._ended is not None:
            return self._new / max(self._seconds(), 1e-9)
        first, last = self._recent[0], (self._seconds(), self._new)
        return (last[1] - first[1]) / max(last[0] - first[0], 1e-9)

    def pictures(self) -> dict[str, Any]:
        """What is known of the matrices."""
        with self._lock:
            return {"version": self.picture_version, "pictures": self._pictures}
