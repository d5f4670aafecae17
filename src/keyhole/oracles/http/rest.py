"""Any REST endpoint that takes vectors as JSON: a template of the request, and the path to the answer in the reply."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from weakref import finalize

import numpy as np

from keyhole.arrays import Array, Space
from keyhole.errors import BadAnswer, FileError, UsageError, WrongShape
from keyhole.noise import Noise
from keyhole.optional import extra
from keyhole.oracles.base import Oracle
from keyhole.oracles.http.access import Access, check_address, check_whole
from keyhole.oracles.http.batches import Batches
from keyhole.oracles.http.connections import Body, Reply, Trouble
from keyhole.oracles.http.retries import Exchange
from keyhole.oracles.http.tensors import check_answers
from keyhole.queries import Signature

EXAMPLE = "http://127.0.0.1:8000/embed"
BATCH, SEQUENCE = (
    "$TOKENS",
    "$SEQUENCE",
)  # what stands in a template for all sequences of a request, or for its only one
REQUEST = '{"inputs": $TOKENS}'


class Template:
    """The JSON of a request, `$TOKENS` for lists (batch, length, width) or `$SEQUENCE` for one (length, width)."""

    def __init__(self, text: str) -> None:
        places = {mark: text.count(mark) for mark in (BATCH, SEQUENCE)}
        if sorted(places.values()) != [0, 1]:
            raise UsageError(f"request={text!r} must hold {BATCH} or {SEQUENCE} once: write for instance {REQUEST}")
        mark = max(places, key=lambda each: places[each])
        self.single = mark == SEQUENCE
        head, tail = text.replace(f'"{mark}"', mark).split(mark)
        try:
            json.loads(f"{head}[]{tail}")
        except json.JSONDecodeError as error:
            raise UsageError(f"request={text!r} is no JSON ({error}): write for instance {REQUEST}") from error
        self._head, self._tail = head.encode(), tail.encode()

    def body(self, tokens: Array) -> Body:
        """A request in pieces."""
        import orjson  # noqa: PLC0415 - in the extra http

        values = np.ascontiguousarray(tokens[0] if self.single else tokens)
        return [self._head, orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY), self._tail]


class AnswerPath:
    """Where in a reply the answers stand: keys and places in lists between dots, * for every item of a list."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._steps = [step for step in text.split(".") if step]

    def read(self, message: Any, url: str) -> Any:
        """What stands there; WrongShape says how far a reply goes along the path."""
        return self._follow(message, 0, url)

    def _follow(self, found: Any, at: int, url: str) -> Any:
        if at == len(self._steps):
            return found
        step = self._steps[at]
        if step == "*" and isinstance(found, list):
            return [self._follow(item, at + 1, url) for item in _in_order(found)]
        if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            return self._follow(found[int(step)], at + 1, url)
        if isinstance(found, dict) and step in found:
            return self._follow(found[step], at + 1, url)
        has = f"the keys {sorted(found)}" if isinstance(found, dict) else f"a {type(found).__name__}"
        before = ".".join(self._steps[:at]) or "the reply"
        raise WrongShape(f"{url}: nothing at answer={self._text!r}: {before} is {has}, without {step!r}")


def _in_order(items: list[Any]) -> list[Any]:
    """Items by the place in the request that each has as its `index`, as endpoints of embeddings say it."""
    places: list[Any] = [item.get("index") if isinstance(item, dict) else None for item in items]
    if any(type(place) is not int for place in places) or sorted(places) != list(range(len(items))):
        return items
    return sorted(items, key=lambda item: int(item["index"]))


class RestOracle(Oracle):
    """A model at any address that takes vectors as JSON and answers with numbers.

    `request` is the JSON to send, with `$TOKENS` where the sequences go (lists of batch × length × width), or
    `$SEQUENCE` where the endpoint takes one sequence per request; a text that begins with @ names a file that holds
    it. `answer` is the path to the numbers in the reply, such as `outputs` or `data.*.embedding`. The other options
    are those of `HttpOracle`; `headers` are sent with every request.
    """

    def __init__(
        self,
        url: str,
        width: int,
        request: str = REQUEST,
        answer: str = "outputs",
        max_norm: float | None = None,
        max_length: int | None = None,
        positions: Literal["last", "all"] = "last",
        noise: Noise | str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        batch: int = 64,
        connections: int = 4,
        timeout: float = 30.0,
        retries: int = 5,
        patience: float = 300.0,
        token_env: str | None = None,
        header: str = "Authorization",
        ca: str | None = None,
        proxy: str | None = None,
        answers: Literal["numbers", "labels"] = "numbers",
        name: str | None = None,
    ) -> None:
        check_address(url, EXAMPLE)
        check_whole("batch", batch, 1)
        extra("orjson", "http", "asking a server")
        self.url = url
        self._template, self._path = Template(_text(request)), AnswerPath(answer)
        most = 1 if self._template.single else batch
        own = Noise.exact() if noise is None else Noise.of(noise)
        space = Space.of(np.zeros(1))
        self.signature = Signature(width, space, max_norm, max_length, positions, own, most * connections, answers)
        access = Access(
            connections=connections,
            timeout=timeout,
            retries=retries,
            patience=patience,
            token_env=token_env,
            header=header,
            headers=headers or {},
            ca=ca,
            proxy=proxy,
        )
        self.lanes = connections
        self._exchange: Exchange = access.exchange(url)
        finalize(self, self._exchange.close)
        self._batches = Batches(self._ask, most, connections)
        self.name = name or f"{url} {_text(request)} to {answer}"

    def facts(self) -> dict[str, Any]:
        """Requests and repetitions, for the report."""
        return self._exchange.facts()

    def close(self) -> None:
        """Close the connections."""
        self._exchange.close()
        self._batches.close()

    def answer(self, tokens: Array) -> Array:
        """Ask, in as many requests as it takes; what arrived before one of them failed goes with the error."""
        return self._batches.answer(tokens, self)

    def _ask(self, tokens: Array) -> Array:
        def make() -> tuple[Body, dict[str, str]]:
            return self._template.body(tokens), {"Content-Type": "application/json"}

        def read(reply: Reply) -> Array:
            if not 200 <= reply.status < 300:
                raise self._exchange.refuse(reply, self.url)
            return self._read(reply, tokens.shape)

        return self._exchange.send(self.url, read, make)

    def _read(self, reply: Reply, shape: tuple[int, ...]) -> Array:
        try:
            message = json.loads(reply.body)
        except ValueError as error:  # no JSON, or no text
            raise Trouble(BadAnswer(f"{self.url}: an answer that is no JSON ({error})"), again=True) from error
        found = self._path.read(message, self.url)
        try:
            values = np.asarray([found] if self._template.single else found, dtype=np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            raise WrongShape(f"{self.url}: no numbers at the path of the answer ({error})") from error
        leading = shape[:1] if self.signature.positions == "last" else shape[:2]
        if values.shape == (math.prod(leading),) != leading:  # all positions in one list
            values = values.reshape(leading)
        elif shape[0] == 1 and values.shape[: len(leading)] != leading:  # a list of one that became what it held
            values = values[None]
        return check_answers(values, leading, self.url)


def _text(request: str) -> str:
    if not request.startswith("@"):
        return request
    try:
        return Path(request[1:]).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"cannot read the request in {request[1:]}: {error}") from error
