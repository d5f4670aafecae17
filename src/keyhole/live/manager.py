"""All runs of a page: started, stopped, resumed and compared; found again in their folders by a later server."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import combinations
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any

from keyhole.errors import FileError, KeyholeError, UsageError
from keyhole.gauge import distance
from keyhole.live.form import DemoRequest, ServedTarget, read_form
from keyhole.live.heatmap import pictures
from keyhole.live.remarks import Remarks
from keyhole.live.run import Run, add_report, carry_out
from keyhole.progress import Observer
from keyhole.runs.execute import Ending
from keyhole.runs.folders import prepare_folder
from keyhole.runs.reader import read_run
from keyhole.runs.settings import Settings
from keyhole.runs.store import RUN, plain

LIVE, JOURNAL = "live.json", "journal.db"  # beside what `keyhole recover --out` writes
LIVE_FORMAT, LIVE_VERSION = "keyhole-live", 1
MOST_ACTIVE, MOST_COMPARED = 4, 6
IDENTITY = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
STOP_SECONDS = 8.0  # for batches at hand, when the server ends


class NoSuchRun(KeyholeError):
    """A name that no run has."""


class Busy(KeyholeError):
    """Too much at once."""


class Runs:
    """The runs of a page. Those it starts live in folders of their own below `folder`."""

    def __init__(self, folder: Path, served: Sequence[ServedTarget] = (), *, reports: bool = True) -> None:
        self.folder, self.served = folder, served
        self._after = add_report if reports else None
        self.version = 0  # changes whenever the list does
        self._runs: dict[str, Run] = {}
        self._lock = Lock()
        self._find()

    def _notify(self) -> None:
        with self._lock:
            self.version += 1

    # --- starting and stopping --------------------------------------------------------------------------------

    def start(self, form: Any) -> Run:
        """A new run of what a form asks for; InvalidForm says what is wrong with it."""
        request = read_form(form, self.served)
        self._make_room()
        name = re.sub(r"[^a-z0-9]+", "-", request.target.partition(":")[2].partition("?")[0].lower()).strip("-")[-24:]
        identity = f"{name.strip('-') or 'run'}-{secrets.token_hex(3)}"
        folder = self.folder / identity
        prepare_folder(folder)
        about = {"format": LIVE_FORMAT, "version": LIVE_VERSION, **asdict(request)}
        (folder / LIVE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        run = self._make_run(identity, request)
        self._add(run)
        run.begin()
        return run

    def _make_run(self, identity: str, request: DemoRequest) -> Run:
        folder = self.folder / identity
        journal, budget = folder / JOURNAL, request.budget
        settings = Settings(request.target, request.method, budget, journal, request.seed, out=folder)
        return Run(identity, request.label, settings, partial(carry_out, rate=request.rate), self._notify, self._after)

    def watch(self, label: str, settings: Settings, work: Callable[[Settings, Observer], Ending]) -> Run:
        """A run of the command line, to be begun by it."""
        run = Run(f"watched-{secrets.token_hex(3)}", label, settings, work, self._notify)
        self._add(run)
        return run

    def _add(self, run: Run) -> None:
        with self._lock:
            self._runs[run.id] = run
            self.version += 1

    def resume(self, identity: str, budget: int | None = None) -> Run:
        """Go on with a run, with another budget where the last one is spent."""
        run = self.get(identity)
        self._make_room()
        run.begin(budget)
        return run

    def stop(self, identity: str) -> Run:
        """Stop a run after the batch at hand."""
        run = self.get(identity)
        run.stop()
        return run

    def remark(self, identity: str, given: Any) -> Run:
        """Write down tags and a note: in the folder of a run of the page, of others as long as the page is open."""
        run, remarks = self.get(identity), Remarks.of(given)
        if run.state == "unreadable":
            raise KeyholeError("this run cannot be read: nothing in its folder is changed")
        if (self.folder / identity / LIVE).is_file():
            remarks.save(self.folder / identity)
        run.remark(remarks)
        return run

    def _make_room(self) -> None:
        active = sum(run.active for run in self.all())
        if active >= MOST_ACTIVE:
            raise Busy(f"{active} runs are under way, which is as many as may be: stop one, or wait for it")

    def close(self) -> None:
        """Stop all runs, and wait for the batches at hand: journals keep what was answered."""
        running = [run for run in self.all() if run.active]
        for run in running:
            if run.state == "running":
                run.stop()
        deadline = monotonic() + STOP_SECONDS
        for run in running:
            run.wait(max(0.0, deadline - monotonic()))

    # --- looking ----------------------------------------------------------------------------------------------

    def get(self, identity: str) -> Run:
        """The run of this name, which is looked up among those known: no path is made of it."""
        run = self._runs.get(identity)
        if run is None:
            raise NoSuchRun("there is no such run")
        return run

    def all(self) -> list[Run]:
        """All of them, the latest first."""
        with self._lock:
            return sorted(self._runs.values(), key=lambda run: run.started, reverse=True)

    def brief(self) -> dict[str, Any]:
        """The list of runs."""
        version = self.version
        return {"version": version, "runs": [run.brief() for run in self.all()]}

    def compare(self, names: Sequence[str]) -> dict[str, Any]:
        """Runs side by side, and how far apart what any two found is, modulo what no query can tell apart."""
        if not 2 <= len(set(names)) == len(names) <= MOST_COMPARED:
            raise UsageError(f"two to {MOST_COMPARED} different runs are compared, not {', '.join(names) or 'none'}")
        chosen = [self.get(name) for name in names]
        found = [run.params() for run in chosen]
        apart: list[list[float | None]] = [[None] * len(chosen) for _ in chosen]
        pairs = zip(chosen, found, strict=True)
        notes = [f"{run.id} recovered nothing so far" for run, params in pairs if params is None]
        for one, other in combinations(range(len(chosen)), 2):
            first, second = found[one], found[other]
            if first is None or second is None:
                continue
            try:
                apart[one][other] = apart[other][one] = distance(first, second)
            except UsageError as error:
                notes.append(f"{chosen[one].id} and {chosen[other].id}: {error}")
        data: dict[str, Any] = plain({"distances": apart, "notes": notes, "runs": [run.snapshot() for run in chosen]})
        drawn = [pictures(params.matrices()) if params is not None else [] for params in found]
        return {**data, "pictures": drawn}

    # --- finding again ----------------------------------------------------------------------------------------

    def _find(self) -> None:
        """Runs that an earlier server left in the folder; what cannot be read is listed with the reason."""
        if not self.folder.is_dir():
            return
        for path in sorted(self.folder.glob(f"*/{LIVE}")):
            identity = path.parent.name
            if IDENTITY.fullmatch(identity) and not path.parent.is_symlink():
                self._runs[identity] = self._read_run(identity, path)

    def _read_run(self, identity: str, path: Path) -> Run:
        try:
            request = _read_request(path)
            named = request.target in {each.target for each in self.served}
            if not (named or request.target.startswith("demo:")):
                # A folder may come from anywhere, and a target may name code to run.
                raise FileError(f"it is a run of {request.target}, which this page does not open")
            run = self._make_run(identity, request)
            run.state = "stopped"
            run.started = path.stat().st_mtime
            run.remarks = Remarks.load(path.parent)
            if (path.parent / RUN).exists():
                saved = read_run(path.parent)
                run.ending = {name: saved.record[name] for name in ("result", "distance", "heldout")}
                run.state, params = "done", saved.result.params
                run.record.draw([] if params is None else pictures(params.matrices()))
        except (KeyholeError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            reason = str(error) if isinstance(error, KeyholeError) else f"its files are damaged ({error})"
            run = Run(identity, "a run that cannot be read", Settings("unknown"), _unreadable)
            run.state, run.message = "unreadable", f"{path.parent} cannot be read: {reason}. Nothing in it was changed."
        return run


def _unreadable(settings: Settings, observer: Observer) -> Ending:  # noqa: ARG001 - what any run is given
    raise FileError("a run that cannot be read cannot be resumed")


def _read_request(path: Path) -> DemoRequest:
    """What a run of the page was asked for."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or found.get("format") != LIVE_FORMAT:
        raise FileError(f"{path.name} is no {LIVE_FORMAT} file")
    if not isinstance(found.get("version"), int) or found["version"] > LIVE_VERSION:
        raise FileError(f"{path.name} was written by a newer version of Keyhole: update this one")
    return DemoRequest.of(found)
