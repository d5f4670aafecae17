"""Seeds, fixed ones for what must not move and fresh ones for what must hold for all of them; and the command."""

from __future__ import annotations

import functools
import hashlib
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

import keyhole
from keyhole.cli import main
from support.commands import Run
from support.targets import example

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would the commands that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, so that a failure is never a matter of luck; `fresh_seed` looks for new ones.
settings.register_profile("keyhole", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("keyhole")

# What `--quick` leaves out besides tests on fresh seeds, those of PyTorch, and those marked slow.
QUICK_LEAVES_OUT = {
    "cli/test_cli.py": "runs that draw",
    "cli/test_next_commands.py": "runs every command that is printed",
    "cli/test_serve.py": "starts programs",
    "cli/test_terminal.py": "starts programs",
    "live/test_manager.py": "starts servers",
    "live/test_page.py": "a browser",
    "oracles/http/test_havoc.py": "waits for servers that hang",
    "oracles/http/test_metadata.py": "starts servers",
    "oracles/http/test_oracle.py": "starts servers",
    "oracles/http/test_retries.py": "waits for servers that fail",
    "oracles/test_conformance_models.py": "imports PyTorch",
    "oracles/test_onnx.py": "imports ONNX Runtime",
    "oracles/test_torch.py": "imports PyTorch",
    "oracles/test_transformers.py": "imports PyTorch",
    "report/test_report.py": "draws",
    "runs/test_folders.py": "runs that draw",
    "samples/test_learn.py": "fits many layers",
    "serve/test_serve.py": "starts programs",
    "test_docs.py": "runs every example",
    "test_examples.py": "runs every example",
    "test_honesty.py": "sweeps over random boxes",
    "test_kill.py": "starts programs",
    "test_site.py": "builds the site",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="what a change should pass first, in a minute")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes a second or more, or several; left out by --quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    inside = collection_path.relative_to(Path(__file__).parent).as_posix()
    return True if config.getoption("quick") and inside in QUICK_LEAVES_OUT else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("quick"):
        config.hook.pytest_deselected(items=[item for item in items if not _is_quick(item)])
        items[:] = [item for item in items if _is_quick(item)]


def _is_quick(item: pytest.Item) -> bool:
    parameters = item.name.partition("[")[2]
    slow = item.get_closest_marker("slow") or "fresh_seed" in getattr(item, "fixturenames", ())
    return not slow and "torch" not in parameters


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("quick"):
        files = "; ".join(f"{name} ({why})" for name, why in QUICK_LEAVES_OUT.items())
        terminalreporter.write_line(f"left out by --quick: fresh seeds, PyTorch, tests marked slow; {files}")


@functools.cache
def source_digest() -> bytes:
    """A digest of the package's source."""
    source = Path(keyhole.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(source.rglob("*.py")):
        digest.update(path.relative_to(source).as_posix().encode() + path.read_bytes())
    return digest.digest()


def seed_of(*parts: bytes) -> int:
    return int.from_bytes(hashlib.sha256(b"".join(parts)).digest()[:6])


@pytest.fixture
def fresh_seed(request: pytest.FixtureRequest) -> int:
    """A seed for what holds for all of them: another one whenever the package changes, and for every test.

    The same source is tested by the same seeds on every machine, so that a failure is met again wherever it is looked
    for. KEYHOLE_TEST_SEED takes another seed, or "random" for one that nobody has tried.
    """
    given = os.environ.get("KEYHOLE_TEST_SEED")
    drawn = secrets.randbits(48) if given == "random" else int(given) if given else None
    seed = seed_of(source_digest(), request.node.nodeid.encode()) if drawn is None else drawn
    print(f"to repeat: KEYHOLE_TEST_SEED={seed}")
    return seed


@pytest.fixture
def fixed_seed(request: pytest.FixtureRequest) -> int:
    """A seed of the test's own for what holds for most of them, such as that a recovery is certified."""
    return seed_of(request.node.nodeid.encode())


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
