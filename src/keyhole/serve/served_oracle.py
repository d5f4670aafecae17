"""An oracle as a model of the protocol: queries are read and checked, answers written. No HTTP here."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from time import monotonic
from typing import Any

import numpy as np

from keyhole.arrays import to_numpy
from keyhole.errors import BudgetExhausted, NonFiniteAnswer, OracleError, UsageError
from keyhole.inference_protocol import HEADER_LENGTH, Malformed, Tensor, TensorInfo, decode, encode
from keyhole.oracles import Oracle

TOKENS, ANSWERS = "tokens", "answers"  # names of input and output
LARGEST_QUESTION = 2**26  # bytes of a request
DATATYPES = {"float64": "FP64", "float32": "FP32"}
UNKNOWN = ("classification", "shared_memory_region")  # of an output; to leave them out would answer something else


class Refusal(Exception):
    """A query that is not answered: the status, and the reason in words."""

    def __init__(self, status: int, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.after = after  # seconds to wait


@dataclass(frozen=True)
class Limits:
    """How much a client may ask."""

    batch: int = 1024  # sequences per request
    length: int = 1024  # tokens per sequence
    rate: float | None = None  # sequences per second
    body: int = LARGEST_QUESTION  # bytes per request
    total: int | None = None  # sequences in all, until the server ends
    seconds: float = 60.0  # until a request has arrived, and until it is answered

    def __post_init__(self) -> None:
        for name in ("batch", "length", "body"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise UsageError(f"the limit of {name} must be a whole number of at least 1, not {number!r}")
        if self.total is not None and (isinstance(self.total, bool) or self.total < 1):
            raise UsageError(f"the limit of sequences in all must be a whole number of at least 1, not {self.total!r}")
        if not 0 < self.seconds < math.inf:
            raise UsageError(f"the limit of seconds must be a positive number, not {self.seconds!r}")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise UsageError(f"the rate limit must be a positive number of queries per second, not {self.rate!r}")


@dataclass
class Rate:
    """So many sequences per second on average; a second's worth may be saved up."""

    limit: float
    clock: Callable[[], float] = monotonic
    _left: float = field(init=False)
    _seen: float = field(init=False)

    def __post_init__(self) -> None:
        self._left, self._seen = self.limit, self.clock()

    def wait(self, count: int) -> float:
        """0 where so many may be asked now, else the seconds until they may.

        A batch is let through while anything is left, and what it takes beyond that is owed: so a batch larger than a
        second's worth is not refused for ever.
        """
        now = self.clock()
        self._left = min(self.limit, self._left + (now - self._seen) * self.limit)
        self._seen = now
        if self._left <= 0:
            return (1e-3 - self._left) / self.limit
        self._left -= count
        return 0.0


class ServedOracle:
    """An oracle with a name, limits and counters. Queries are answered one after the other."""

    def __init__(self, oracle: Oracle, name: str, limits: Limits | None = None) -> None:
        if not name or not all(mark.isalnum() or mark in "-_." for mark in name) or not name.isascii():
            raise UsageError(f"a model cannot be named {name!r}: letters, digits, dots, hyphens and underscores can be")
        self.oracle, self.name, self.limits = oracle, name, limits or Limits()
        signature = oracle.signature
        dtype = str(signature.space.dtype).rsplit(".", 1)[-1]
        if dtype not in DATATYPES:
            raise UsageError(
                f"the box {oracle.name!r} computes in {dtype}: only {' and '.join(DATATYPES)} can be served"
            )
        self._numbers = np.dtype(dtype)
        # One query shows what answers look like, and that the oracle answers at all.
        first = oracle(signature.space.zeros(1, 1, signature.width))
        places = (-1,) if signature.positions == "last" else (-1, -1)
        self.tokens = TensorInfo(TOKENS, DATATYPES[dtype], (-1, -1, signature.width))
        shape = (*places, *(int(side) for side in first.shape[len(places) :]))
        self.answers = TensorInfo(ANSWERS, DATATYPES[dtype], shape, signature.positions, signature.answers == "labels")
        self.version = hashlib.sha256(oracle.name.encode()).hexdigest()[:12]  # another oracle is another version
        self.queries = self.requests = self.refused = 0
        self._rate = None if self.limits.rate is None else Rate(self.limits.rate)
        self._lock = Lock()

    def metadata(self) -> dict[str, Any]:
        """What the protocol tells of a model."""
        return {
            "name": self.name,
            "versions": [self.version],
            "platform": "keyhole",
            "inputs": [self.tokens.as_data()],
            "outputs": [self.answers.as_data()],
        }

    def config(self) -> dict[str, Any]:
        """What Triton's extension tells of a model."""

        def entry(info: TensorInfo) -> dict[str, Any]:
            return {"name": info.name, "data_type": f"TYPE_{info.datatype}", "dims": list(info.shape[1:])}

        return {
            "name": self.name,
            "platform": "keyhole",
            "max_batch_size": self.limits.batch,
            "input": [entry(self.tokens)],
            "output": [entry(self.answers)],
        }

    def infer(self, body: bytes, header_length: str | None) -> tuple[bytes, dict[str, str]]:
        """The answer to a request, as body and headers; Refusal where there is none."""
        try:
            message, tensors = decode(body, header_length, "inputs")
        except Malformed as error:
            raise Refusal(400, f"the request is not one of the protocol: {error}") from error
        identity, binary = self._request(message)
        tokens = self._question(tensors)
        with self._lock:  # an oracle need not be safe to call from two threads
            if self.limits.total is not None and self.queries + len(tokens) > self.limits.total:
                left = self.limits.total - self.queries
                raise Refusal(403, f"this server answers {self.limits.total:,} sequences in all; {left:,} are left")
            pause = 0.0 if self._rate is None else self._rate.wait(len(tokens))
            if pause:
                raise Refusal(429, f"more than {self.limits.rate:g} queries per second", after=pause)
            values = to_numpy(self._ask(tokens))
            self.queries += len(tokens)
            self.requests += 1
        reply = {"model_name": self.name, "model_version": self.version}
        if identity is not None:
            reply["id"] = identity
        answer, size = encode(reply, "outputs", Tensor(ANSWERS, self.answers.datatype, values), binary=binary)
        if size is None:
            return answer, {"Content-Type": "application/json"}
        return answer, {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(size)}

    def _ask(self, tokens: Any) -> Any:
        try:
            with np.errstate(all="ignore"):  # tokens of any size may be asked; what overflows is refused below
                return self.oracle(self.oracle.signature.space.asarray(tokens))
        except UsageError as error:
            raise Refusal(400, str(error)) from error
        except BudgetExhausted as error:
            raise Refusal(429, str(error)) from error
        except NonFiniteAnswer as error:
            raise Refusal(422, "the box answers nan or inf to these tokens: ask with shorter ones") from error
        except OracleError as error:
            raise Refusal(500, f"the box failed: {error}") from error

    def _request(self, message: Mapping[str, Any]) -> tuple[str | None, bool]:
        """Its id, and whether the answer is wanted as binary data."""
        identity = message.get("id")
        if identity is not None and not isinstance(identity, str):
            raise Refusal(400, "the id of a request is text")
        binary = _parameters(message).get("binary_data_output", False)
        wanted = message.get("outputs")
        if wanted is not None and not (isinstance(wanted, list) and all(isinstance(each, dict) for each in wanted)):
            raise Refusal(400, "outputs is a list of objects")
        for each in wanted or ():
            if each.get("name") != ANSWERS:
                raise Refusal(400, f"there is no output {str(each.get('name'))[:80]!r}: the only one is {ANSWERS!r}")
            parameters = _parameters(each)
            if unknown := [name for name in UNKNOWN if name in parameters]:
                raise Refusal(400, f"the parameter {unknown[0]!r} of an output is not supported")
            binary = parameters.get("binary_data", binary)
        if not isinstance(binary, bool):
            raise Refusal(400, "binary_data and binary_data_output are true or false")
        return identity, binary

    def _question(self, tensors: Mapping[str, Tensor]) -> Any:
        """The tokens, (batch, length, width), in memory of their own."""
        if set(tensors) != {TOKENS}:
            raise Refusal(400, f"the only input is {TOKENS!r}, not {', '.join(sorted(tensors))[:80] or 'none'}")
        tensor, width = tensors[TOKENS], self.oracle.signature.width
        if tensor.datatype != self.tokens.datatype:
            raise Refusal(400, f"tokens are {self.tokens.datatype}, not {tensor.datatype}")
        shape = tensor.values.shape
        if len(shape) != 3 or shape[2] != width or 0 in shape:
            raise Refusal(400, f"tokens have the shape (batch, length, {width}), not {list(shape)}")
        if shape[0] > self.limits.batch:
            raise Refusal(413, f"at most {self.limits.batch} sequences per request, not {shape[0]}")
        if shape[1] > self.limits.length:
            raise Refusal(400, f"at most {self.limits.length} tokens per sequence, not {shape[1]}")
        if not np.all(np.isfinite(tensor.values)):
            raise Refusal(400, "tokens are finite numbers")
        return np.array(tensor.values, dtype=self._numbers)


def _parameters(holder: Mapping[str, Any]) -> Mapping[str, Any]:
    found = holder.get("parameters")
    if found is not None and not isinstance(found, dict):
        raise Refusal(400, "parameters is an object")
    return found or {}
