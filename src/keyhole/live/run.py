"""One run of a page: a recovery in a thread of its own, that can be stopped and resumed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import sleep, time
from typing import Any

import numpy as np

from keyhole.errors import FileError, KeyholeError, UsageError
from keyhole.families import Family, load
from keyhole.live.heatmap import pictures
from keyhole.live.record import Record, RunStopped
from keyhole.live.remarks import Remarks
from keyhole.oracles import Oracle, Wrapper
from keyhole.progress import Observer
from keyhole.report.build import try_report
from keyhole.runs.attention import keep_attention
from keyhole.runs.execute import Ending, execute
from keyhole.runs.settings import SPENT, Settings
from keyhole.runs.store import ATTENTION, PARAMS, plain
from keyhole.sentence.token_weights import load_weights_on

MOST_HELDOUT = 512  # numbers that a page draws
DIGITS = 3  # of the weights on words that it shows
BATCHES_PER_SECOND = 20.0  # of an oracle that is asked slowly, so that a page sees it go on and a stop need not wait
log = logging.getLogger("keyhole.live")


class SlowOracle(Wrapper):
    """Answers so many sequences per second at most, as an oracle at a distance does; its answers are the same."""

    def __init__(self, inner: Oracle, rate: float) -> None:
        own = inner.signature.batch_limit
        batch = max(1, int(rate / BATCHES_PER_SECOND))
        super().__init__(inner, inner.signature.with_changes(batch_limit=batch if own is None else min(batch, own)))
        self._rate = rate

    def answer(self, tokens: Any) -> Any:
        """Wait, then pass on."""
        sleep(tokens.shape[0] / self._rate)
        return super().answer(tokens)


def carry_out(settings: Settings, observer: Observer, *, rate: float | None = None) -> Ending:
    """Recover what the settings name, in a folder that the page has made for it."""
    return execute(settings, observer, around=None if rate is None else partial(SlowOracle, rate=rate), force=True)


def ending_of(finished: Ending) -> dict[str, Any]:
    """How a run ended, as `run.json` has it."""
    result = finished.result
    data = {"result": result.summary(), "distance": finished.distance, "heldout": result.certificate.heldout()}
    found: dict[str, Any] = plain(data)
    return found


def add_report(settings: Settings) -> None:
    """Add the report, and what heads attend to, to the folder of a run that has ended; without them nothing is lost."""
    if settings.out is not None:
        keep_attention(settings.out, settings.target, None)
        with _drawing:
            try_report(settings.out)


_drawing = threading.Lock()  # matplotlib is not made for several threads


class Run:
    """A recovery, where it stands, and what came of it.

    States: new, running, stopping (told to, and waiting for the batch at hand), stopped, done, failed (no outcome at
    all: the message says why), unreadable (found in a folder that makes no sense).
    """

    def __init__(
        self,
        identity: str,
        label: str,  # what the oracle is, in words
        settings: Settings,
        work: Callable[[Settings, Observer], Ending],
        changed: Callable[[], None] = lambda: None,  # called when its state changes
        after: Callable[[Settings], None] | None = None,  # done when it has ended, while pages show that it has
    ) -> None:
        self.id, self.label, self.settings = identity, label, settings
        self.started = time()
        self.state, self.message = "new", ""
        self.attempts = 0
        self.remarks, self.remarked = Remarks(), 0  # what people wrote down of it, and how often
        self.record = Record(settings.budget)
        self.ending: dict[str, Any] | None = None
        self.finished: Ending | None = None
        self.error: BaseException | None = None
        self._work, self._changed, self._after = work, changed, after
        # Not the thread is waited for: of one whose join was interrupted Python 3.11 says that it has ended.
        self._idle = threading.Event()
        self._idle.set()
        self._lock = threading.Lock()

    # --- what can be done with it -----------------------------------------------------------------------------

    def begin(self, budget: int | None = None) -> None:
        """Run, or run again, with another budget where the last one is spent; the journal answers what it can."""
        with self._lock:
            if self.state != "new" and self.why_not_resumable:
                raise KeyholeError(self.why_not_resumable)
            least = self.least_budget
            if least is not None:
                if budget is not None and budget < least:
                    raise UsageError(f"the budget is spent: a larger one is needed, at least {least:,}")
                self.settings = replace(self.settings, budget=budget)
            self.state, self.message = "running", ""
            self.attempts += 1
            self.started = time()
            self.record = Record(self.settings.budget)
            self.ending = self.finished = self.error = None
            self._idle.clear()
            threading.Thread(target=self._go, name=f"keyhole-run-{self.id}", daemon=True).start()
        self._changed()

    def stop(self) -> None:
        """Stop after the batch at hand."""
        with self._lock:
            if self.state != "running":
                raise KeyholeError(f"this run is {self.state}: there is nothing to stop")
            self.state = "stopping"
            self.record.stop()
        self._changed()

    def remark(self, remarks: Remarks) -> None:
        """Show what people wrote down of it."""
        self.remarks = remarks
        self.remarked += 1
        self._changed()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for its end; whether it has come."""
        return self._idle.wait(seconds)

    def _go(self) -> None:
        state, message = "failed", ""
        record = self.record
        try:
            finished = self._work(self.settings, record)
            self.ending = ending_of(finished)
            params = finished.result.params
            record.draw([] if params is None else pictures(params.matrices()))
        except RunStopped:
            state = "stopped"
        except KeyholeError as error:
            self.error, message = error, str(error)
        except BaseException as error:
            # A stranger's oracle may raise anything; whoever waits for the run gets it, and the page says so.
            self.error, message = error, f"{type(error).__name__}: {error}"
            log.exception("the run %s failed", self.id)
        else:
            state, self.finished = "done", finished
        record.end()
        with self._lock:
            self.state, self.message = state, message
            self._idle.set()
        self._changed()
        if state == "done" and self._after is not None:
            self._after(self.settings)
            record.end()  # there are more files now

    # --- what pages read --------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether its thread is at work."""
        return self.state in ("running", "stopping")

    @property
    def why_not_resumable(self) -> str:
        """Why going on from here leads no further, in words, or nothing where it may."""
        if self.active:
            return "this run is under way"
        if self.state == "unreadable":
            return "this run cannot be read"
        if self.state == "done" and self._outcome != "ORACLE_FAILED" and self.least_budget is None:
            return "this run has ended: to ask the same again would change nothing"
        if self.settings.journal is None:
            return "this run keeps no journal: with --journal FILE it could be resumed"
        return ""

    @property
    def least_budget(self) -> int | None:
        """The least budget to go on with, where the last one is spent."""
        spent = self._outcome in {outcome.name for outcome in SPENT}
        return self.settings.budget + 1 if spent and self.settings.budget is not None else None

    @property
    def _outcome(self) -> str | None:
        return None if self.ending is None else self.ending["result"]["outcome"]

    def params(self) -> Family | None:
        """What was recovered; FileError where nothing is left of it."""
        if self.finished is not None:
            return self.finished.result.params
        if self.ending is not None and self.settings.out is not None and (self.settings.out / PARAMS).exists():
            return load(self.settings.out / PARAMS)
        return None

    def brief(self) -> dict[str, Any]:
        """What a list of runs shows."""
        return {
            "id": self.id,
            "label": self.label,
            "target": self.settings.target,
            "state": self.state,
            "outcome": self._outcome,
            "started": self.started,
            "tags": self.remarks.tags,
            "note": self.remarks.note,
        }

    def snapshot(self) -> dict[str, Any]:
        """Everything but the pictures, as plain data."""
        ending = self.ending
        if ending is not None:
            heldout = {name: numbers[:MOST_HELDOUT] for name, numbers in ending["heldout"].items()}
            ending = {**ending, "heldout": heldout}
        data: dict[str, Any] = plain(
            {
                **self.brief(),
                "message": self.message,
                "attempts": self.attempts,
                "method": self.settings.method,
                "seed": self.settings.seed,
                "why_not_resumable": self.why_not_resumable,
                "least_budget": self.least_budget,
                "command": self.settings.command(self.settings.budget),
                "files": self.files(),
                "progress": self.record.snapshot(),
                "ending": ending,
            }
        )
        return data

    def files(self) -> list[str]:
        """Names of those files of its folder that a page may offer."""
        folder = self.settings.out
        return [] if folder is None or self.active else [name for name in FILES if (folder / name).is_file()]

    def read(self, name: str) -> bytes:
        """One of those files; FileError where there is none of this name."""
        return self._path(name).read_bytes()

    def attention(self) -> dict[str, Any]:
        """What the recovered heads attend to in a sentence; FileError where that was not kept."""
        sentence, layers = load_weights_on(self._path(ATTENTION))
        heads = [
            {
                "name": f"head {number}" if len(layers) == 1 else f"{name}, head {number}",
                "found": np.round(found, DIGITS).tolist(),
                "original": None if each.original is None else np.round(each.original[number], DIGITS).tolist(),
                "focus": float(each.focus[number]),
            }
            for name, each in layers.items()
            for number, found in enumerate(each.found)
        ]
        apart = [each.apart for each in layers.values() if each.apart is not None]
        words = next((each.words for each in layers.values()), ())
        return {"sentence": sentence, "words": words, "heads": heads, "apart": max(apart, default=None)}

    def _path(self, name: str) -> Path:
        if name not in self.files() or self.settings.out is None:
            raise FileError("there is no such file in the folder of this run")
        folder = self.settings.out.resolve()
        path = (folder / name).resolve()
        if path.parent != folder:  # a link that leads elsewhere
            raise FileError("this file lies outside the folder of the run")
        return path


FILES: dict[str, str] = {
    "report.html": "text/html; charset=utf-8",
    "run.json": "application/json",
    PARAMS: "application/octet-stream",
    "radius.safetensors": "application/octet-stream",
    ATTENTION: "application/octet-stream",
}
