"""What a server of the Open Inference Protocol v2 says of itself and of a model, and whether Keyhole can ask that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from keyhole.errors import BadAnswer, QuestionRefused, ServerBusy, ServerError, ServerFailed, UnknownModel, UsageError
from keyhole.inference_protocol import BINARY_EXTENSION, DATATYPES, Malformed, TensorInfo, parse
from keyhole.noise import Noise
from keyhole.oracles.http.connections import Reply, Trouble
from keyhole.oracles.http.retries import Exchange

EXAMPLE = "http://127.0.0.1:8000/v2/models/name"
# Datatypes that tokens can be sent in, and the dtype they have here.
TOKENS = {"FP64": "float64", "FP32": "float32"}
# Binary digits of the datatypes of answers: fewer than tokens have mean that answers are rounded.
DIGITS = {"FP64": 53, "FP32": 24, "FP16": 11, "BF16": 8}
ROUNDED = {"FP32": "float32", "FP16": "float16", "BF16": "bfloat16"}

Result = TypeVar("Result")


@dataclass(frozen=True)
class Model:
    """A model as its server describes it. Its methods raise UsageError where Keyhole cannot ask such a model."""

    url: str
    tokens: TensorInfo
    answers: TensorInfo
    versions: tuple[str, ...]
    batch_limit: int | None
    binary: bool | None  # None where nobody says whether the server takes binary tensors
    described: bool = True  # whether the metadata say which shape answers have

    @property
    def dtype(self) -> str:
        """That of tokens."""
        if self.tokens.datatype not in TOKENS:
            raise UsageError(f"{self.url} takes {self.tokens.datatype}: Keyhole needs a model that takes FP64 or FP32")
        return TOKENS[self.tokens.datatype]

    @property
    def noise(self) -> Noise:
        """The rounding of answers, where they have fewer digits than tokens."""
        datatype = self.answers.datatype
        if datatype not in DATATYPES:
            raise UsageError(f"{self.url} answers in {datatype}, which are no numbers: choose another output_name")
        coarse = DIGITS.get(datatype, 99) < DIGITS.get(self.tokens.datatype, 0)
        return Noise.dtype(ROUNDED[datatype]) if coarse else Noise.exact()

    def width(self, given: int | None) -> int:
        """Numbers per token."""
        shape = self.tokens.shape
        if len(shape) != 3:
            raise UsageError(
                f"{self.url} takes tensors of shape {list(shape)}: Keyhole needs (batch, length, width), "
                "sequences of vectors"
            )
        if shape[1] != -1:
            raise UsageError(
                f"{self.url} takes sequences of exactly {shape[1]} tokens: Keyhole asks sequences of several "
                "lengths, so serve the model with a variable length, -1"
            )
        if shape[0] not in (-1, 1):
            raise UsageError(
                f"{self.url} takes batches of exactly {shape[0]} sequences: serve the model with a variable batch, -1"
            )
        if given is None and shape[2] == -1:
            raise UsageError(f"{self.url} does not say how wide a token is: give width=")
        if given is not None and shape[2] not in (-1, given):
            raise UsageError(f"width={given}, but {self.url} takes tokens of width {shape[2]}")
        return int(given or shape[2])

    def places(self, wanted: str | None) -> Literal["last", "all"]:
        """Whether the model answers for the last position or for all, by the shape of its answers."""
        info = self.answers
        if not self.described:
            return "all" if wanted == "all" else "last"
        if len(info.shape) not in (1, 2, 3):
            raise UsageError(
                f"{self.url} answers tensors of shape {list(info.shape)}: Keyhole reads (batch,), (batch, p) and "
                "(batch, length, p)"
            )
        if len(info.shape) == 2 and info.shape[1] == -1:
            said = info.positions or wanted
            if said is None:
                raise UsageError(
                    f"{self.url} does not say whether answers are (batch, p) or (batch, length): "
                    "give positions='last' or 'all'"
                )
            return "all" if said == "all" else "last"
        if len(info.shape) == 3:
            return "all"
        if wanted == "all":
            raise UsageError(
                f"{self.url} answers {list(info.shape)}, one row per sequence: positions='all' needs one per token"
            )
        return "last"


@dataclass(frozen=True)
class Told:
    """What the user says of a model, where its metadata leaves it open."""

    input_name: str | None = None
    output_name: str | None = None
    datatype: str | None = None  # of tokens and answers
    binary: bool | None = None

    def tokens(self, described: list[TensorInfo], url: str) -> TensorInfo:
        """The tensor that tokens are sent in; a custom model's metadata often describe none."""
        if not described:
            if self.input_name is None:
                raise UsageError(
                    f"the metadata of {url} describe no input: say input_name= and width=, and where they are known "
                    "datatype= (FP64 if left out), output_name= and positions="
                )
            return TensorInfo(self.input_name, self.datatype or "FP64", (-1, -1, -1))
        info = _choose("input_name", self.input_name, described, url)
        if len(described) > 1:
            raise UsageError(f"{url} takes {len(described)} inputs, so that {info.name!r} alone is no question")
        if self.datatype not in (None, info.datatype):
            raise UsageError(f"datatype={self.datatype}, but {url} takes {info.datatype}")
        return info

    def answers(self, described: list[TensorInfo], url: str, datatype: str) -> TensorInfo:
        """The tensor that answers come in; where none is described and none was named, the only one there is."""
        if not described:
            return TensorInfo(self.output_name or "", datatype, ())
        return _choose("output_name", self.output_name, described, url)


def look(exchange: Exchange, server: str, url: str, told: Told) -> Model:
    """Ask a server for the description of the model at `url`."""
    ready = _status(exchange, f"{server}/v2/health/ready")
    about = _metadata(exchange, server, url)
    if ready == 503 or _status(exchange, f"{url}/ready") not in (200, 404, 405):
        raise ServerBusy(f"{url}: the model is not ready: wait until it is loaded, or look at the server's log")
    try:
        _ = about["name"]  # a model has one, whether or not its tensors are described
        inputs = [TensorInfo.read(entry) for entry in about.get("inputs", ())]
        outputs = [TensorInfo.read(entry) for entry in about.get("outputs", ())]
        versions = tuple(str(version) for version in about.get("versions") or ())
    except (Malformed, KeyError, TypeError) as error:
        raise BadAnswer(f"{url}: the metadata is not that of the Open Inference Protocol v2: {error}") from error
    tokens = told.tokens(inputs, url)
    answers = told.answers(outputs, url, tokens.datatype)
    binary = told.binary
    if binary is None:
        extensions = _json(exchange, f"{server}/v2").get("extensions")
        binary = True if isinstance(extensions, list) and BINARY_EXTENSION in extensions else None
    return Model(url, tokens, answers, versions, _batch_limit(exchange, url, tokens), binary, bool(outputs))


def is_ready(exchange: Exchange, server: str, url: str) -> bool:
    """Whether server and model are ready, as they say themselves."""
    return all(_status(exchange, each) == 200 for each in (f"{server}/v2/health/ready", f"{url}/ready"))


def _choose(option: str, name: str | None, found: list[TensorInfo], url: str) -> TensorInfo:
    names = ", ".join(repr(info.name) for info in found) or "none"
    if name is None and len(found) != 1:
        raise UsageError(f"{url} has {len(found)} tensors to choose from ({names}): name one with {option}=")
    for info in found:
        if name in (None, info.name):
            return info
    raise UsageError(f"{url} has no tensor {name!r}; {option} may be {names}")


def _batch_limit(exchange: Exchange, url: str, tokens: TensorInfo) -> int | None:
    """Most sequences per request: one where the shape says so, or what the model's configuration says.

    The configuration is an extension of Triton's, which not every server knows.
    """
    if tokens.shape[:1] == (1,):
        return 1
    try:
        found = _json(exchange, f"{url}/config").get("max_batch_size")
    except ServerError:
        return None
    return found if type(found) is int and found > 0 else None


def _metadata(exchange: Exchange, server: str, url: str) -> dict[str, Any]:
    """The description of a model; an error that tells a server without it from one that is no such server."""

    def read(reply: Reply) -> dict[str, Any]:
        if reply.status != 200:
            raise exchange.refuse(reply, url)
        try:
            return parse(reply.body)
        except Malformed as error:
            raise Trouble(BadAnswer(f"{url}: the metadata of a model expected, found {error}"), again=False) from error

    try:
        return _get(exchange, url, read)
    except (UnknownModel, QuestionRefused, BadAnswer, ServerFailed) as error:
        if {"name", "extensions"} <= _json(exchange, f"{server}/v2").keys():
            raise
        raise BadAnswer(
            f"{server} is no server of the Open Inference Protocol v2, or hides it behind another path: "
            f"a model's address looks like {EXAMPLE} ({error})"
        ) from error


def _json(exchange: Exchange, url: str) -> dict[str, Any]:
    """The JSON object at an address, empty where there is none."""

    def read(reply: Reply) -> dict[str, Any]:
        try:
            return parse(reply.body) if reply.status == 200 else {}
        except Malformed:
            return {}

    return _get(exchange, url, read)


def _status(exchange: Exchange, url: str) -> int:
    def read(reply: Reply) -> int:
        if reply.status in (401, 403):
            raise exchange.refuse(reply, url)
        return reply.status

    return _get(exchange, url, read)


def _get(exchange: Exchange, url: str, read: Callable[[Reply], Result]) -> Result:
    """Asked once: whoever starts wants to hear of a wrong address now."""
    return exchange.send(url, read, again=False)
