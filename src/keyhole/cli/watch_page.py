"""`keyhole recover … --watch`: the page of a run of the command line."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import typer

from keyhole.live.manager import Runs
from keyhole.live.run import Run
from keyhole.live.server import LiveServer
from keyhole.progress import Observer, ObserverPair, on_terminal
from keyhole.runs.execute import Ending
from keyhole.runs.settings import Settings

RUNS = Path("runs")  # for runs that are started from the page; made when the first one is
LINGER_SECONDS = 1.5  # for pages to see the end, where nobody sits at a terminal
LOOK_SECONDS = 0.1


class WatchPage:
    """A page for one run of the command line, which goes on in a thread that the page can stop and resume."""

    def __init__(self, port: int = 0, folder: Path = RUNS) -> None:
        self.runs = Runs(folder)
        self.server = LiveServer(self.runs, port=port)
        self.attended = sys.stdin.isatty() and sys.stderr.isatty()

    def __enter__(self) -> WatchPage:
        self.server.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.__exit__(*error)

    def watch(
        self, label: str, settings: Settings, work: Callable[[Settings, Observer], Ending], *, quiet: bool
    ) -> Ending:
        """Carry the run out and return its end; KeyboardInterrupt if it was stopped, here or on the page."""
        found: list[Ending] = []

        def show(settings: Settings, record: Observer) -> Ending:
            with on_terminal(settings.budget, quiet=quiet) as terminal:
                found[:] = [work(settings, ObserverPair(terminal, record))]
            return found[0]

        run = self.runs.watch(label, settings, show)
        run.begin()
        if not quiet:
            url = f"{self.server.address}/#run={run.id}"
            typer.echo(f"keyhole: watch at {url}", err=True)
            open_page(url)
        try:
            self._wait(run, quiet=quiet)
        except KeyboardInterrupt:
            self.runs.close()
            raise
        if run.error is not None:
            raise run.error
        if run.state == "stopped":
            raise KeyboardInterrupt
        return found[0]

    def _wait(self, run: Run, *, quiet: bool) -> None:
        """Wait for the end; a run that was stopped on the page may be resumed there while somebody sits here."""
        was_announced = False
        while run.active or (run.state == "stopped" and self.attended and not run.why_not_resumable):
            if run.state == "stopped" and not was_announced and not quiet:
                typer.echo("keyhole: stopped on the page: resume it there, or end it here with Ctrl-C", err=True)
            was_announced = run.state == "stopped"
            run.wait(LOOK_SECONDS)
            if not run.active:
                sleep(LOOK_SECONDS)

    def linger(self) -> None:
        """Keep the page: until Ctrl-C where somebody sits at the terminal, else until it could see the end."""
        if self.attended:
            typer.echo(f"keyhole: the page stays at {self.server.address} until Ctrl-C", err=True)
        deadline = monotonic() + LINGER_SECONDS
        try:
            while self.attended or monotonic() < deadline:
                sleep(LOOK_SECONDS)
        except KeyboardInterrupt:
            pass


def open_page(url: str) -> None:
    """Open a browser where somebody sits before a screen; elsewhere it might be one for terminals."""
    screen = sys.platform in ("darwin", "win32") or any(os.environ.get(n) for n in ("DISPLAY", "WAYLAND_DISPLAY"))
    if screen and sys.stderr.isatty():
        webbrowser.open(url)
