"""Models named by one line of text: in a file, `onnx:` and `transformers:`, or behind a server, `http:`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from keyhole.errors import UsageError
from keyhole.oracles import HttpOracle, OnnxOracle, RestOracle, TransformersOracle
from keyhole.targets.target import Keys, Target, read_options

ONNX_EXAMPLE = "onnx:model.onnx"
TRANSFORMERS_EXAMPLE = "transformers:PATH#layer=2"
REST_EXAMPLE = "http+json://host:port/path#width=64&answer=outputs"


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


def open_rest(text: str) -> Target:
    """The model at an address such as `http+json://host:port/path#width=16&request={"x": $TOKENS}&answer=y`."""
    address, given = split(text, REST_EXAMPLE, REST_KEYS)
    if "width" not in given:
        raise UsageError(f"the target {text} does not say how wide a token is; write {REST_EXAMPLE}")
    oracle = RestOracle(address.replace("+json", "", 1), **given)
    return Target(text, oracle, f"the model at {oracle.url}, of width {oracle.signature.width}")


def split(rest: str, example: str, keys: Keys) -> tuple[str, dict[str, Any]]:
    """The path of a text, and what it says behind a # as key=value&key=value."""
    path, _, query = rest.partition("#")
    if not path:
        raise UsageError(f"the target names no file; write {example}")
    return path, read_options(query, keys, f"{example.partition(':')[0]}:")


def read_http(text: str) -> dict[str, Any]:
    """Arguments of HttpOracle. Options stand behind a #, which is never sent to a server."""
    url, _, options = text.partition("#")
    return {"url": url, **read_options(options, HTTP_KEYS, "a model behind a server")}


def _where(given: Mapping[str, Any]) -> str:
    positions = given.get("positions", "last")
    if positions == "all":
        return ", observed at all positions"
    return "" if positions == "last" else f", observed at position {positions}"


def _whole_or(*words: str) -> Callable[[str], str | int]:
    return lambda text: text if text in words else int(text)


def _yes(text: str) -> bool:
    return {"1": True, "true": True, "0": False, "false": False}[text.lower()]


WHOLE = (int, "a whole number")
COMMON_KEYS: Keys = {
    "positions": (_whole_or("last", "all"), "last, all or a whole number"),
    "max_norm": (float, "a number"),
    "max_length": WHOLE,
    "batch_limit": WHOLE,
    "answers": (str, "numbers or labels"),
}
ONNX_KEYS: Keys = {
    "width": WHOLE,
    "input": (str, "the name of an input"),
    "output": (str, "the name of an output"),
    "repeat": (_yes, "true or false"),
    **COMMON_KEYS,
}
TRANSFORMERS_KEYS: Keys = {
    "layer": (_whole_or("all"), "a whole number or all"),
    "part": (str, "attention, attention-block or layer"),
    "dtype": (str, "the name of a dtype"),
    "precision": (str, "float64"),
    "device": (str, "the name of a device"),
    **COMMON_KEYS,
}


def _headers(text: str) -> dict[str, str]:
    pairs = [pair.partition(":") for pair in text.split(";")]
    if not all(name.strip() and colon for name, colon, _ in pairs):
        raise ValueError(text)
    return {name.strip(): value.strip() for name, _, value in pairs}


# Options of HttpOracle that have a word on the command line: those of the oracle have options of their own there.
SERVER_KEYS: Keys = {
    "width": WHOLE,
    "positions": (str, "last or all"),
    "answers": (str, "numbers or labels"),
    "max_length": WHOLE,
    "batch": WHOLE,
    "connections": WHOLE,
    "timeout": (float, "a number of seconds"),
    "retries": WHOLE,
    "patience": (float, "a number of seconds"),
    "token_env": (str, "the name of an environment variable"),
    "header": (str, "the name of a header"),
    "ca": (str, "a file"),
    "proxy": (str, "an address, or none"),
}
HTTP_KEYS: Keys = {
    **SERVER_KEYS,
    "input_name": (str, "text"),
    "output_name": (str, "text"),
    "datatype": (str, "FP64 or FP32"),
    "binary": (_yes, "true or false"),
    "require_id": (_yes, "true or false"),
}
REST_KEYS: Keys = {
    **SERVER_KEYS,
    "request": (str, "JSON with $TOKENS or $SEQUENCE in it, or @ and a file of it"),
    "answer": (str, "a path such as data.*.embedding"),
    "headers": (_headers, "Name: text; Name: text"),
}
