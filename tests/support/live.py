"""The live page, served from a folder and asked as its own page asks; and commands that serve one."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from keyhole.live import LiveServer, Runs
from keyhole.live.run import carry_out

QUICK = {"family": "single-head", "width": "6", "rate": "1000000"}
# 274 questions and 32 for the certificate, seven seconds: time enough to stop it on a busy machine. `hurry` ends that.
SLOW = {"family": "single-head", "width": "16", "rate": "40"}
PATIENCE = 20.0


@contextmanager
def serving(folder: Path) -> Iterator[LiveServer]:
    with LiveServer(Runs(folder, reports=False)) as server:  # which take longer than these runs
        yield server


def client(server: LiveServer) -> httpx.Client:
    """What the page itself sends."""
    return httpx.Client(base_url=server.address, headers={"Origin": server.address}, trust_env=False, timeout=PATIENCE)


def start(server: LiveServer, form: dict[str, Any]) -> str:
    with client(server) as browser:
        reply = browser.post("/api/runs", json=form)
    assert reply.status_code == 201, reply.text
    identity = reply.json()["id"]
    assert isinstance(identity, str)
    return identity


def hurry(server: LiveServer, identity: str) -> None:
    """From its next resumption on the box of a run answers at once."""
    server.runs.get(identity)._work = carry_out


def until(happened: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (found := happened()):
        assert time.monotonic() < deadline, f"waited {PATIENCE} s for {what}"
        time.sleep(0.01)
    return found


def snapshot(server: LiveServer, identity: str) -> dict[str, Any]:
    with client(server) as browser:
        reply = browser.get(f"/api/runs/{identity}")
    assert reply.status_code == 200
    found = reply.json()
    assert isinstance(found, dict)
    return found


def act(server: LiveServer, identity: str, what: str, body: Any = None) -> httpx.Response:
    with client(server) as browser:
        return browser.post(f"/api/runs/{identity}/{what}", json={} if body is None else body)


BOX = """
import time
import numpy as np
import keyhole as kh

rng = np.random.default_rng(3)
HEAD = kh.SingleHead(rng.standard_normal((12, 12)), rng.standard_normal(12))

def make():
    def answer(tokens):
        time.sleep(0.02 * len(tokens))
        return HEAD(tokens)
    return kh.FunctionOracle(answer, width=12, batch_limit=4, name="slow")
"""


@contextmanager
def command(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    line = [sys.executable, "-m", "keyhole", *words]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
