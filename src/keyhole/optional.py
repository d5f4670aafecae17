"""What is installed: libraries that are no dependency of the core, imported when they are used, and the version."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from keyhole.errors import UsageError

KEYHOLE_VERSION = "0.1.0"  # of Keyhole; pyproject.toml reads it here


def extra(library: str, name: str, user: str) -> Any:
    """The library, which the extra `name` installs; UsageError says what `user` needs and how to get it."""
    try:
        return import_module(library)
    except ImportError as error:
        raise UsageError(f"{user} needs {library} ({error}): {install(name)}") from error


def on_demand(module: str) -> Any:
    """A module of Keyhole that lies above whoever uses it, such as the pictures of a result, imported when used."""
    return import_module(f"keyhole.{module}")


def install(name: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'keyhole[{name}]'"
