"""Oracles that Python code makes: `python:path.py:factory`."""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from keyhole.errors import KeyholeError, UsageError
from keyhole.oracles import FunctionOracle, Oracle, TorchOracle, Wrapper
from keyhole.oracles.torch import is_module
from keyhole.targets.models import WHOLE, split
from keyhole.targets.target import Target, path_of, read_bytes

EXAMPLE = "python:path.py:factory"


def open_python(rest: str) -> Target:
    """What the function of a text such as `path.py:factory` returns, or `path.py:factory#module=NAME` a part of it.

    `width=` says how many numbers a token of a module has that does not say so itself.
    """
    named, given = split(rest, EXAMPLE, {"module": (str, "the dotted name of a module"), "width": WHOLE})
    name, _, factory = named.rpartition(":")
    if not factory.isidentifier():
        raise UsageError(f"cannot read python:{rest}; write {EXAMPLE}, a function without arguments")
    path, part = path_of(name, EXAMPLE), given.get("module", "")
    source = read_bytes(path)
    digest = hashlib.sha256(source).hexdigest()
    module = _call(path, lambda: _import_source(path, source, digest))
    make = getattr(module, factory, None)
    if not callable(make):
        raise UsageError(f"{path} has no function {factory!r}: name one that returns the box")
    inner = _as_oracle(_named_part(_call(path, make), part), f"{factory}() in {path}", given.get("width"))
    oracle = Wrapper(inner)
    oracle.name = f"python:sha256:{digest}:{factory}:{inner.name}"
    made = f"{factory}() in {path} makes" if not part else f"is {part} of what {factory}() in {path} makes"
    label = f"the box of width {inner.signature.width} that {made}"
    return Target(f"python:{rest}", oracle, label)


def _named_part(box: Any, name: str) -> Any:
    """The part of a PyTorch model by its dotted name; the whole where there is none."""
    if not name:
        return box
    if not is_module(box):
        raise UsageError(
            f"#module={name} names a part of a PyTorch model, but the factory makes a {type(box).__name__}"
        )
    parts = dict(box.named_modules())
    if name not in parts:
        near = get_close_matches(name, parts, 3) or [each for each in parts if each][:3]
        raise UsageError(f"{type(box).__name__} has no module {name!r}; it has {', '.join(near)} and others")
    return parts[name]


def _as_oracle(box: Any, maker: str, width: int | None = None) -> Oracle:
    if width is not None and not is_module(box):
        raise UsageError(f"#width={width} is for a PyTorch module, but {maker} makes a {type(box).__name__}")
    if isinstance(box, Oracle):
        missing = [name for name in ("signature", "name") if not hasattr(box, name)]
        if missing:
            raise UsageError(f"the oracle of {maker} does not set {missing[0]!r}: every oracle must")
        return box
    if is_module(box):
        return TorchOracle(box, width)
    if callable(box) and hasattr(box, "width"):
        return FunctionOracle(box, width=box.width, name=type(box).__qualname__)
    raise UsageError(
        f"{maker} returned something of type {type(box).__name__}: return a keyhole Oracle, "
        "e.g. FunctionOracle(function, width=64), a PyTorch module, or a callable with a width"
    )


def _import_source(path: Path, source: bytes, digest: str) -> ModuleType:
    """Run the very bytes that were digested, under a name no other module has; neighbours can be imported."""
    module = ModuleType(f"_keyhole_target_{digest}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and pickle look their module up
    if str(path.parent.resolve()) not in sys.path:
        sys.path.append(str(path.parent.resolve()))
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


def _call(path: Path, action: Callable[[], Any]) -> Any:
    """The action's result; what goes wrong in a stranger's code becomes one line that says where."""
    try:
        return action()
    except KeyholeError:
        raise
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        raise UsageError(f"{where}: {type(error).__name__}: {error}") from error
