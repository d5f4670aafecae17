"""Seeds, fixed ones for what must not move and fresh ones for what must hold for all of them; and the command."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from pathlib import Path

# The tests share the machine's cores among themselves: threads of linear algebra that wait for each other cost twice
# the processor time. Read when NumPy, PyTorch and ONNX Runtime are imported, here and in every command started.
for library in ("OPENBLAS", "OMP", "MKL"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

import numpy as np
import pytest
from hypothesis import settings

from keyhole.cli import main
from support.commands import Run
from support.targets import example

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would the commands that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, so that a failure is never a matter of luck; `fresh_seed` looks for new ones.
settings.register_profile("keyhole", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("keyhole")


@pytest.fixture
def fresh_seed() -> int:
    """A seed nobody has tried; shown when the test fails, and taken from KEYHOLE_TEST_SEED to try it again."""
    given = os.environ.get("KEYHOLE_TEST_SEED")
    seed = int(given) if given else secrets.randbits(48)
    print(f"to repeat: KEYHOLE_TEST_SEED={seed}")
    return seed


@pytest.fixture
def rng() -> np.random.Generator:
    """Numbers that are the same in every run."""
    return np.random.default_rng(20240607)


@pytest.fixture(params=["numpy-float64", "torch-float64"])
def like(request: pytest.FixtureRequest) -> object:
    """An example array of each library: the same test runs on all."""
    return example(request.param)


@pytest.fixture
def run(
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """The command in an empty folder: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("box.py").write_text(request.module.BOX)

    def command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        said = capsys.readouterr()
        code = caught.value.code
        assert isinstance(code, int)
        return code, said.out, said.err

    return command
