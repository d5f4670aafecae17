"""Oracles named by one line of text, as the command line does: `demo:…`, `file:…`, `python:…` and so on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from keyhole.errors import FileError, UsageError
from keyhole.families import load
from keyhole.noise import Noise
from keyhole.oracles import FunctionOracle
from keyhole.targets.demos import open_demo, random_multi_head, random_net, random_single_head
from keyhole.targets.models import (
    ONNX_EXAMPLE,
    REST_EXAMPLE,
    TRANSFORMERS_EXAMPLE,
    open_http,
    open_onnx,
    open_rest,
    open_transformers,
)
from keyhole.targets.python_file import open_python
from keyhole.targets.target import Target, path_of, read_bytes

__all__ = ["KINDS", "Target", "open_declared", "open_target", "random_multi_head", "random_net", "random_single_head"]

EXAMPLES = "demo:single-head?width=64&rank=4&seed=0, file:params.safetensors, python:path.py:factory, " + ", ".join(
    [ONNX_EXAMPLE, TRANSFORMERS_EXAMPLE, "http://host:port/v2/models/name", REST_EXAMPLE]
)


def open_target(text: str) -> Target:
    """The oracle that `text` names; UsageError or FileError says what is wrong with it and what is possible."""
    kind, colon, rest = text.partition(":")
    if not colon or kind not in KINDS:
        hint = f" (did you mean file:{text}?)" if Path(text).is_file() else ""
        raise UsageError(f"unknown target {text!r}{hint}; a target looks like: {EXAMPLES}")
    target = KINDS[kind](rest)
    target.oracle.text = text  # workers open it again
    return target


@contextmanager
def open_declared(text: str, max_norm: float | None = None, noise: str | None = None) -> Iterator[Target]:
    """The target that `text` names, asked with tokens of at most this norm and known to err like this; then closed."""
    target = open_target(text)
    try:
        if max_norm is not None or noise is not None:
            target = target.with_declared(max_norm, None if noise is None else Noise.parse(noise))
        yield target
    finally:
        target.oracle.close()


def _file(rest: str) -> Target:
    path = path_of(rest, "file:params.safetensors")
    digest = hashlib.sha256(read_bytes(path)).hexdigest()
    params = load(path)
    try:
        params.check()
    except UsageError as error:
        raise FileError(f"{path} holds a number out of its range: {error}") from error
    oracle = FunctionOracle(params, width=params.width, name=f"file:sha256:{digest}")
    return Target(f"file:{rest}", oracle, f"the {params.family} of width {params.width} in {path}", params)


KINDS: dict[str, Callable[[str], Target]] = {
    "demo": open_demo,
    "file": _file,
    "python": open_python,
    "http": lambda rest: open_http(f"http:{rest}"),
    "https": lambda rest: open_http(f"https:{rest}"),
    "http+json": lambda rest: open_rest(f"http+json:{rest}"),
    "https+json": lambda rest: open_rest(f"https+json:{rest}"),
    "onnx": open_onnx,
    "transformers": open_transformers,
}
