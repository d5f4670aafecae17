"""Models named by one line of text: in a file, `onnx:` and `transformers:`, or behind a server, `http:`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from keyhole.errors import UsageError
from keyhole.oracles import HttpOracle, OnnxOracle, TransformersOracle
from keyhole.targets.target import Target

ONNX_EXAMPLE = "onnx:model.onnx"
TRANSFORMERS_EXAMPLE = "transformers:PATH#layer=2"


def open_onnx(rest: str) -> Target:
    """The model of a text such as `model.onnx` or `model.onnx#positions=all&output=hidden`."""
    path, given = split(rest, ONNX_EXAMPLE, ONNX_KEYS)
    oracle = OnnxOracle(path, **given)
    label = f"the ONNX model of width {oracle.signature.width} in {path}{_where(given)}"
    return Target(f"onnx:{rest}", oracle, label)


def open_transformers(rest: str) -> Target:
    """The layer of a text such as `PATH#layer=2` or `PATH#layer=-1&part=layer&dtype=float64`."""
    path, given = split(rest, TRANSFORMERS_EXAMPLE, TRANSFORMERS_KEYS)
    if "layer" not in given:
        raise UsageError(f"the target transformers:{rest} does not say which layer; write {TRANSFORMERS_EXAMPLE}")
    oracle = TransformersOracle(path, **given)
    label = f"the {oracle.part} of width {oracle.signature.width} at {oracle.place.name} in {path}"
    return Target(f"transformers:{rest}", oracle, label + _where(given))


def open_http(text: str) -> Target:
    """The model at an address such as `http://host:port/v2/models/name#timeout=10&connections=8`."""
    oracle = HttpOracle(**read_http(text))
    return Target(text, oracle, f"the model at {oracle.url}, of width {oracle.signature.width}")


def split(rest: str, example: str, keys: Mapping[str, Callable[[str], Any]]) -> tuple[str, dict[str, Any]]:
    """The path of a text, and what it says behind a # as key=value&key=value."""
    path, _, query = rest.partition("#")
    if not path:
        raise UsageError(f"the target names no file; write {example}")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise UsageError(f"cannot read {query!r} ({error}): write #key=value&key=value") from error
    given: dict[str, Any] = {}
    for name, text in pairs:
        if name not in keys:
            raise UsageError(f"{example.partition(':')[0]}: has no {name!r}; possible: {', '.join(keys)}")
        if name in given:
            raise UsageError(f"{name!r} was given twice in {rest}: keep one")
        try:
            given[name] = keys[name](text)
        except ValueError as error:
            raise UsageError(f"{name}={text} makes no sense in {example.partition(':')[0]}:{rest}") from error
    return path, given


def _where(given: Mapping[str, Any]) -> str:
    positions = given.get("positions", "last")
    if positions == "all":
        return ", observed at all positions"
    return "" if positions == "last" else f", observed at position {positions}"


def _positions(text: str) -> Any:
    return text if text in ("last", "all") else int(text)


def _layer(text: str) -> Any:
    return text if text == "all" else int(text)


COMMON_KEYS: dict[str, Callable[[str], Any]] = {
    "positions": _positions,
    "max_norm": float,
    "max_length": int,
    "batch_limit": int,
}
ONNX_KEYS: dict[str, Callable[[str], Any]] = {
    "width": int,
    "input": str,
    "output": str,
    "repeat": lambda text: bool(int(text)),
    **COMMON_KEYS,
}
TRANSFORMERS_KEYS: dict[str, Callable[[str], Any]] = {
    "layer": _layer,
    "part": str,
    "dtype": str,
    "device": str,
    **COMMON_KEYS,
}


def _yes(text: str) -> bool:
    return {"1": True, "true": True, "0": False, "false": False}[text.lower()]


# Options of HttpOracle that have a word on the command line: those of the box have options of their own there.
HTTP_KEYS: Mapping[str, tuple[Callable[[str], Any], str]] = {
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
        if name not in HTTP_KEYS:
            raise UsageError(f"a model behind a server has no option {name!r}; possible: {', '.join(HTTP_KEYS)}")
        if name in given:
            raise UsageError(f"the option {name!r} is given twice: keep one")
        read, wanted = HTTP_KEYS[name]
        try:
            given[name] = read(value)
        except (ValueError, KeyError):
            raise UsageError(f"{name}={value} makes no sense: {name} is {wanted}") from None
    return given
