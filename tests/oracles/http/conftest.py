"""What the tests of HTTP share: a server of one head, and pauses that a test can wait for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import keyhole as kh
from keyhole.oracles.http import retries as x
from keyhole.serve import Server
from support.served_head import WIDTH, head
from support.serving import serving


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that a test can wait for."""
    monkeypatch.setattr(x, "FIRST_PAUSE", 0.005)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(kh.FunctionOracle(head(), width=WIDTH, name="a head")) as running:
        yield running
