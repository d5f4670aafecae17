"""The Open Inference Protocol, version 2, as bytes: tensors as JSON numbers, or as binary data behind the JSON.

Client and server share it; nothing here reads or writes a connection. The protocol is that of KServe and Triton,
https://github.com/kserve/open-inference-protocol, with Triton's extension for binary tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

HEADER_LENGTH = "Inference-Header-Content-Length"  # bytes of JSON before binary data
BINARY_EXTENSION = "binary_tensor_data"
# Numbers as they lie on the wire, little-endian. BF16 is no dtype of NumPy: its two bytes are the upper half of FP32's.
DATATYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
BINARY_ONLY = ("FP16", "BF16")  # the protocol has no JSON for them
# Kind of dtype on the wire -> kinds of dtype that NumPy may have made of its JSON.
FROM_JSON = {"f": "iuf", "i": "iu", "u": "iu", "b": "b"}


class Malformed(ValueError):
    """Bytes that are no message of the protocol; says what is wrong with them."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as the metadata of a model describes it; -1 is a side that may have any length."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    positions: str | None = None  # no part of the protocol: where answers are observed, if the server says so
    labels: bool = False  # no part of the protocol: whether the server says that answers are labels

    @classmethod
    def read(cls, entry: Any) -> TensorInfo:
        """From the metadata of a model."""
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise Malformed("a tensor without a name")
        name, datatype, shape = entry["name"], entry.get("datatype"), entry.get("shape")
        if not isinstance(datatype, str):
            raise Malformed(f"the tensor {name!r} has no datatype")
        # Some servers write int64 as text, as the JSON of protobuf does.
        sides = [int(side) if isinstance(side, str) and side.lstrip("-").isdecimal() else side for side in shape or []]
        if not isinstance(shape, list) or not all(type(side) is int and side >= -1 for side in sides):
            raise Malformed(f"the tensor {name!r} has the shape {shape!r}, which is no list of whole numbers")
        parameters = entry.get("parameters")
        parameters = parameters if isinstance(parameters, dict) else {}
        positions = parameters.get("positions")
        positions = positions if positions in ("last", "all") else None
        return cls(name, datatype, tuple(sides), positions, parameters.get("answers") == "labels")

    def as_data(self) -> dict[str, Any]:
        """As JSON holds it."""
        data: dict[str, Any] = {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}
        extra = {} if self.positions is None else {"positions": self.positions}
        extra |= {"answers": "labels"} if self.labels else {}
        return {**data, "parameters": extra} if extra else data


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of a message."""

    name: str
    datatype: str
    values: npt.NDArray[Any]


def encode(
    message: Mapping[str, Any], key: str, tensor: Tensor, *, binary: bool
) -> tuple[bytes, int | None]:  # the body, and the bytes of JSON in it where binary data follows
    """The message with the tensor under `key` ("inputs" or "outputs")."""
    pieces, size = encode_pieces(message, key, tensor, binary=binary)
    return b"".join(pieces), size


def encode_pieces(
    message: Mapping[str, Any], key: str, tensor: Tensor, *, binary: bool
) -> tuple[list[bytes | memoryview], int | None]:
    """A message in pieces to be sent one after the other, so that no number is copied."""
    import orjson  # noqa: PLC0415 - in the extras http and serve

    values = np.ascontiguousarray(tensor.values, dtype=DATATYPES[tensor.datatype])
    entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(values.shape)}
    if not binary:
        entry["data"] = values.reshape(-1)
        return [orjson.dumps({**message, key: [entry]}, option=orjson.OPT_SERIALIZE_NUMPY)], None
    entry["parameters"] = {"binary_data_size": values.nbytes}
    head = orjson.dumps({**message, key: [entry]})
    return [head, values.reshape(-1).data.cast("B")], len(head)


def decode(body: bytes, header_length: str | None, key: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The message in `body` and its tensors under `key`, by name; Malformed where it contradicts itself."""
    size = len(body) if header_length is None else _length(header_length, len(body))
    message = parse(body[:size])
    entries = message.get(key)
    if not isinstance(entries, list):
        raise Malformed(f"{key!r} is no list of tensors")
    tail = memoryview(body)[size:]
    found: dict[str, Tensor] = {}
    for entry in entries:
        tensor, tail = _tensor(entry, tail)
        if tensor.name in found:
            raise Malformed(f"there are two tensors {tensor.name!r}")
        found[tensor.name] = tensor
    if tail.nbytes:
        raise Malformed(f"{tail.nbytes} bytes of binary data belong to no tensor")
    return message, found


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`."""
    import orjson  # noqa: PLC0415 - in the extras http and serve

    try:
        message = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Malformed(f"no JSON ({error})") from error
    if not isinstance(message, dict):
        raise Malformed("JSON, but no object")
    return message


def _length(text: str, most: int) -> int:
    size = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1
    if not 0 <= size <= most:
        raise Malformed(f"{HEADER_LENGTH} is {text[:40]!r}, where the body has {most} bytes")
    return size


def _tensor(entry: Any, tail: memoryview) -> tuple[Tensor, memoryview]:
    """One tensor, and the binary data behind it."""
    info = TensorInfo.read(entry)
    name, datatype, shape = info.name, info.datatype, info.shape
    if datatype not in DATATYPES:
        raise Malformed(f"the tensor {name!r} has the datatype {datatype!r}; known: {', '.join(DATATYPES)}")
    if min(shape, default=0) < 0:
        raise Malformed(f"the tensor {name!r} has the shape {list(shape)}, with a side below 0")
    count = math.prod(shape)
    parameters = entry.get("parameters") or {}
    size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
    if size is None:
        return Tensor(name, datatype, _from_json(info, entry.get("data"), count)), tail
    if "data" in entry:
        raise Malformed(f"the tensor {name!r} has both data and binary_data_size")
    kind = DATATYPES[datatype]
    if type(size) is not int or size != count * kind.itemsize:
        raise Malformed(
            f"the tensor {name!r} has binary_data_size {size!r}, where its shape needs {count * kind.itemsize}"
        )
    if size > tail.nbytes:
        raise Malformed(f"the tensor {name!r} has {tail.nbytes} bytes of binary data where {size} were announced")
    values = np.frombuffer(tail[:size], dtype=kind)
    if datatype == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return Tensor(name, datatype, values.reshape(shape)), tail[size:]


def _from_json(info: TensorInfo, data: Any, count: int) -> npt.NDArray[Any]:
    name, datatype = info.name, info.datatype
    if datatype in BINARY_ONLY:
        raise Malformed(f"the tensor {name!r} is {datatype}, which the protocol sends as binary data only")
    if not isinstance(data, list):
        raise Malformed(f"the tensor {name!r} has neither a list of data nor binary data")
    try:
        values = np.asarray(data)
    except ValueError as error:  # lists of unequal lengths
        raise Malformed(f"the data of the tensor {name!r} is no tensor: lists of unequal lengths") from error
    if values.dtype.kind == "O" and DATATYPES[datatype].kind == "f" and all(map(_number_or_null, values.flat)):
        values = values.astype(np.float64)
    if values.size and values.dtype.kind not in FROM_JSON[DATATYPES[datatype].kind]:
        raise Malformed(f"the data of the tensor {name!r} holds something that is no {datatype} number")
    if values.size != count or (values.ndim > 1 and values.shape != info.shape):
        raise Malformed(
            f"the tensor {name!r} has the shape {list(info.shape)}, but {values.size} numbers of data in the shape "
            f"{list(values.shape)}"
        )
    with np.errstate(all="ignore"):  # what is too large for a dtype becomes inf, which whoever reads it refuses
        return values.astype(DATATYPES[datatype]).reshape(info.shape)


def _number_or_null(item: Any) -> bool:
    """JSON has no nan: writers put null in its place, and NumPy reads that as nan."""
    return item is None or type(item) in (int, float)
