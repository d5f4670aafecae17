"""A real browser for the tests of pages: Debian's Chromium, installed where it is missing."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

ARGUMENTS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
# Pictures of pages, to be looked at; git ignores them.
ARTEFACTS = Path(__file__).parents[2] / "test-artifacts"
APT = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120")


def chromium() -> str:
    """The path of the browser. Of several processes that want to install it one does, and the others wait."""
    with open(Path(tempfile.gettempdir()) / "keyhole-chromium.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return shutil.which("chromium") or _installed()


def _installed() -> str:
    said = ""
    if shutil.which("apt-get") and os.geteuid() == 0:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (("update",), ("install", "-y", "--no-install-recommends", "chromium")):
            done = subprocess.run(
                [*APT, *command], env=environment, capture_output=True, text=True, check=False, timeout=600
            )
            said = f"; apt-get {command[0]} ended with {done.returncode}: {done.stderr.strip()[-500:]}"
    found = shutil.which("chromium")
    if found is None:
        pytest.fail(f"the tests of pages need chromium, and could not install it: apt-get install chromium{said}")
    return found


def violations(page: Any) -> list[str]:
    """What axe-core finds of a page as it is shown: contrast, names, roles, regions that keys do not reach."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [f"{each['id']}: {each['help']}: {node['html'][:200]}" for each in found for node in each["nodes"]]


def picture(page: Any, name: str, vision: str = "none") -> None:
    """Keep what is shown, as eyes of another colour vision see it where one is named."""
    ARTEFACTS.mkdir(exist_ok=True)
    session = page.context.new_cdp_session(page)
    session.send("Emulation.setEmulatedVisionDeficiency", {"type": vision})
    page.screenshot(path=ARTEFACTS / f"{name}.png", full_page=True)
    session.send("Emulation.setEmulatedVisionDeficiency", {"type": "none"})
    session.detach()
