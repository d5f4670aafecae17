"""The installed version of Keyhole."""

from functools import cache
from importlib import metadata


@cache
def keyhole_version() -> str:
    """The version of the installed distribution; `unknown` in a source tree that was not installed."""
    try:
        return metadata.version("keyhole")
    except metadata.PackageNotFoundError:
        return "unknown"
