"""Starting costs little: what `--help`, `--version` and `import keyhole` do not need, they do not import."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from keyhole.cli import COMMANDS

COMMAND = """
import json, sys
from keyhole.cli import main
try:
    main([{option!r}])
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""
IMPORT = "import json, sys, keyhole; print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
# Seconds of processor time on a quiet machine; others are allowed three times as much.
BARS = {"--help": 0.25, "--version": 0.25, "import": 0.35}
PATIENCE = 3.0
NUMERICAL = {"numpy", "scipy", "array_api_compat", "safetensors", "torch", "matplotlib", "jinja2", "fastapi", "sqlite3"}


def start(case: str) -> tuple[set[str], float]:
    """The modules imported by it, and the processor time it took."""
    code = IMPORT if case == "import" else COMMAND.format(option=case)
    before = os.times()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return set(json.loads(done.stderr.splitlines()[-1])), spent


@pytest.mark.parametrize("case", BARS)
def test_nothing_is_imported_that_is_not_needed(case: str) -> None:
    found, spent = start(case)
    assert not found & NUMERICAL
    assert not {each for each in found if each.startswith(("keyhole.methods", "keyhole.report", "keyhole.families"))}
    for _ in range(4):
        if spent <= BARS[case]:
            break
        spent = min(spent, start(case)[1])
    assert spent <= PATIENCE * BARS[case]


def test_the_public_names_import_nothing_that_few_of_them_need() -> None:
    code = IMPORT.replace("; print", "; [getattr(keyhole, name) for name in keyhole.__all__]; print")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(json.loads(done.stderr.splitlines()[-1]))
    assert "keyhole.session" in modules
    assert not modules & {
        "scipy.stats",
        "matplotlib",
        "torch",
        "transformers",
        "onnxruntime",
        "jinja2",
        "fastapi",
        "typer",
    }


def test_the_version_and_the_help_of_one_command_need_no_other() -> None:
    code = COMMAND.format(option="report").replace("['report']", "['report', '--help']")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(json.loads(done.stderr.splitlines()[-1]))
    assert "keyhole.cli.report" in modules
    assert not modules & {"keyhole.cli.recover", "keyhole.cli.serve", "torch", "matplotlib", "fastapi"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_their_own_help_says(name: str) -> None:
    command = getattr(import_module(f"keyhole.cli.{name}"), name)
    assert COMMANDS[name] == " ".join((inspect.getdoc(command) or "").partition("\n\n")[0].split())


def test_every_command_prints_json_and_writes_over_nothing_unless_forced() -> None:
    for name in COMMANDS:
        parameters = inspect.signature(getattr(import_module(f"keyhole.cli.{name}"), name)).parameters
        assert {"as_json", "quiet"} <= set(parameters), name
        assert ("force" in parameters) == ("out" in parameters), name


def test_public_names_stay_what_they_are_whatever_is_imported() -> None:
    """Some are names of submodules too, which importing them must not put in their place."""
    import keyhole.audit.cells  # noqa: PLC0415
    import keyhole.verify.verify  # noqa: PLC0415

    for name in keyhole.__all__:
        found = getattr(keyhole, name)
        assert not inspect.ismodule(found)
        assert pickle.loads(pickle.dumps(found)) is found
        assert name in dir(keyhole)
    assert keyhole.__version__ == keyhole.optional.KEYHOLE_VERSION
    assert keyhole.errors.KeyholeError is keyhole.KeyholeError  # submodules are there without being imported
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = keyhole.nothing
    with pytest.raises(ImportError):
        from keyhole import nothing  # noqa: F401, PLC0415


def test_names_can_be_imported_in_every_way(tmp_path: Path) -> None:
    code = (
        "from keyhole import *; import keyhole as kh, pydoc; assert audit is kh.audit and callable(verify); "
        "import keyhole.recover_model; assert callable(kh.recover_model); assert 'recover' in pydoc.render_doc(kh)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=tmp_path)
