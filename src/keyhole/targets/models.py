"""Oracles named by one line of text: what stands behind `onnx:` and `transformers:`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from keyhole.errors import UsageError
from keyhole.oracles.base import Oracle
from keyhole.oracles.onnx import OnnxOracle
from keyhole.oracles.transformers import TransformersOracle

ONNX_EXAMPLE = "onnx:model.onnx"
TRANSFORMERS_EXAMPLE = "transformers:PATH#layer=2"


def onnx_box(rest: str) -> tuple[Oracle, str]:  # the oracle, and what it is in words
    """The box of a text such as `model.onnx` or `model.onnx#positions=all&output=hidden`."""
    path, given = split(rest, ONNX_EXAMPLE, ONNX_KEYS)
    oracle = OnnxOracle(path, **given)
    return oracle, f"the ONNX model of width {oracle.signature.width} in {path}{_where(given)}"


def transformers_box(rest: str) -> tuple[TransformersOracle, str]:
    """The box of a text such as `PATH#layer=2` or `PATH#layer=-1&part=layer&dtype=float64`."""
    path, given = split(rest, TRANSFORMERS_EXAMPLE, TRANSFORMERS_KEYS)
    if "layer" not in given:
        raise UsageError(f"the target transformers:{rest} does not say which layer; write {TRANSFORMERS_EXAMPLE}")
    oracle = TransformersOracle(path, **given)
    label = f"the {oracle.part} of width {oracle.signature.width} at {oracle.place.name} in {path}"
    return oracle, label + _where(given)


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
