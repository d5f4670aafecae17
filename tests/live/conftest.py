"""What the tests of the live page share: a server, and the folder of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from keyhole.live import LiveServer, Runs
from support.live import PATIENCE, QUICK, serving


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with serving(tmp_path / "runs") as made:
        yield made


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended."""
    runs = Runs(tmp_path_factory.mktemp("finished"), reports=False)
    run = runs.start(QUICK)
    assert run.wait(PATIENCE)
    assert run.state == "done", run.message
    assert run.settings.out is not None
    return run.settings.out
