"""A model behind a server, named by one line of text: `http://host:port/v2/models/name#timeout=10&connections=8`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from keyhole.errors import UsageError


def _yes(text: str) -> bool:
    return {"1": True, "true": True, "0": False, "false": False}[text.lower()]


# Options of HttpOracle that have a word on the command line: those of the box have options of their own there.
OPTIONS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "width": (int, "a whole number"),
    "positions": (str, "last or all"),
    "max_length": (int, "a whole number"),
    "input_name": (str, "text"),
    "output_name": (str, "text"),
    "binary": (_yes, "true or false"),
    "batch": (int, "a whole number"),
    "connections": (int, "a whole number"),
    "timeout": (float, "a number of seconds"),
    "retries": (int, "a whole number"),
    "patience": (float, "a number of seconds"),
    "token_env": (str, "the name of an environment variable"),
    "header": (str, "the name of a header"),
    "ca": (str, "a file"),
    "proxy": (str, "an address"),
    "require_id": (_yes, "true or false"),
}


def read_http(text: str) -> dict[str, Any]:
    """Arguments of HttpOracle. Options stand behind a #, which is never sent to a server."""
    url, _, options = text.partition("#")
    try:
        pairs = parse_qsl(options.replace("+", "%2B"), keep_blank_values=True, strict_parsing=bool(options))
    except ValueError as error:
        raise UsageError(f"cannot read {options!r} ({error}): write #key=value&key=value") from error
    given: dict[str, Any] = {"url": url}
    for name, value in pairs:
        if name not in OPTIONS:
            raise UsageError(f"a model behind a server has no option {name!r}; possible: {', '.join(OPTIONS)}")
        if name in given:
            raise UsageError(f"the option {name!r} is given twice: keep one")
        read, wanted = OPTIONS[name]
        try:
            given[name] = read(value)
        except (ValueError, KeyError):
            raise UsageError(f"{name}={value} makes no sense: {name} is {wanted}") from None
    return given
