"""What the served OpenAPI document says of requests and replies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keyhole.inference_protocol import DATATYPES, HEADER_LENGTH, TensorInfo
from keyhole.serve.served_oracle import ANSWERS, TOKENS

_TEXT, _PARAMETERS = {"type": "string"}, {"type": "object"}
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_NUMBERS = {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "array", "items": {"type": "array"}}]}


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _tensors(name: str) -> dict[str, Any]:
    """A list of one tensor of this name."""
    shape = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    own: dict[str, Any] = {"name": {"const": name}, "datatype": {"enum": list(DATATYPES)}, "shape": shape}
    tensor = _object("name", "datatype", "shape", **own, data=_NUMBERS, parameters=_PARAMETERS)
    return {"type": "array", "items": tensor, "minItems": 1, "maxItems": 1}


_ERROR = {"application/json": {"schema": _object("error", error=_TEXT)}}
_OUTPUTS = {"type": "array", "items": _object("name", name={"const": ANSWERS}, parameters=_PARAMETERS)}
_REQUEST = _object("inputs", id=_TEXT, inputs=_tensors(TOKENS), outputs=_OUTPUTS, parameters=_PARAMETERS)
_REPLY = _object("model_name", "outputs", model_name=_TEXT, model_version=_TEXT, id=_TEXT, outputs=_tensors(ANSWERS))
_WHY = {
    400: "the request is not one of the protocol, or not one that this model takes",
    401: "a token is missing or wrong",
    403: "as many sequences as this server answers in all were asked",
    404: "no such model or version",
    408: "the request did not arrive in time",
    413: "too long a request, or too many sequences",
    415: "a compressed request",
    422: "the box answers nan or inf to these tokens",
    429: "too many queries per second: Retry-After says when to ask again",
    504: "the box did not answer in time",
}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Replies that say why there is no answer."""
    return {status: {"description": _WHY[status], "content": _ERROR} for status in statuses}


def path_parameters(names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Parts of a path. Any text is read, to be refused in our own words; these are the only ones that are not."""
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "enum": [value]}}
        for name, value in names.items()
    ]


LENGTH = {"name": HEADER_LENGTH, "in": "header", "required": False, "schema": {"type": "integer", "minimum": 0}}


def question(tokens: TensorInfo) -> dict[str, Any]:
    """The body of an inference request, with one that is answered as an example."""
    width = tokens.shape[-1]
    entry = {"name": tokens.name, "datatype": tokens.datatype, "shape": [1, 1, width], "data": [0.0] * width}
    return {
        "required": True,
        "description": f"JSON; with the header {HEADER_LENGTH}, so many bytes of JSON and binary tensors behind them.",
        "content": {
            "application/json": {"schema": _REQUEST, "example": {"id": "1", "inputs": [entry]}},
            "application/octet-stream": _BINARY,
        },
    }


ANSWERED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the answers",
        "content": {"application/json": {"schema": _REPLY}, "application/octet-stream": _BINARY},
    }
}
