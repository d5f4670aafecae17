"""Queries and answers as the Open Inference Protocol has them."""

from __future__ import annotations

from itertools import count
from secrets import token_hex
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import BadAnswer, NonFiniteAnswer, QuestionRefused, ServerFailed, WrongShape
from keyhole.inference_protocol import HEADER_LENGTH, Malformed, Tensor, decode, encode_pieces
from keyhole.oracles.http.connections import Body, Reply, Trouble
from keyhole.oracles.http.metadata import Model
from keyhole.oracles.http.retries import Exchange

# What servers answer to binary tensors that they cannot read; after it JSON is tried, once for all queries.
NO_BINARY = (400, 415, 422, 500, 501)


class TensorQueries:
    """Asks one model, in binary tensors where its server takes them."""

    def __init__(self, exchange: Exchange, model: Model, places: str, *, require_id: bool) -> None:
        self._exchange, self._model, self._places = exchange, model, places
        self._require_id = require_id
        self._url = f"{model.url}/infer"
        self._ids, self._run = count(1), token_hex(6)
        self.binary = model.binary  # None until a reply has shown it

    def ask(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch, …)
        """The answers to tokens, as the metadata promised them."""
        if self.binary is not None:
            return self._send(tokens, binary=self.binary)
        try:
            answers = self._send(tokens, binary=True, again=False)
        except (QuestionRefused, ServerFailed, BadAnswer):
            answers = self._send(tokens, binary=False)
            self.binary = False
        else:
            self.binary = True
        return answers

    def _send(self, tokens: Array, *, binary: bool, again: bool = True) -> Array:
        asked, info = "", self._model.tokens

        def make() -> tuple[Body, dict[str, str]]:
            nonlocal asked
            asked = f"{self._run}-{next(self._ids)}"  # a late answer to an earlier attempt is another request's
            message = {"id": asked, "outputs": self._wanted(binary=binary)}
            message = {name: value for name, value in message.items() if value}
            body, size = encode_pieces(message, "inputs", Tensor(info.name, info.datatype, tokens), binary=binary)
            if size is None:
                return body, {"Content-Type": "application/json"}
            return body, {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(size)}

        def read(reply: Reply) -> Array:
            if reply.status != 200:
                trouble = self._exchange.refuse(reply, self._url)
                trouble.again &= again or reply.status not in NO_BINARY
                raise trouble
            return self._read(reply, asked, tokens.shape)

        return self._exchange.send(self._url, read, make)

    def _wanted(self, *, binary: bool) -> list[dict[str, Any]]:
        """Which output is wanted, and how; none named where the metadata name none."""
        name = self._model.answers.name
        if not name:
            return []
        return [{"name": name, "parameters": {"binary_data": True}} if binary else {"name": name}]

    def _read(self, reply: Reply, asked: str, shape: tuple[int, ...]) -> Array:
        """The answers in a reply; Trouble where it is none to this query, and might be if asked again."""
        try:
            message, tensors = decode(reply.body, reply.headers.get(HEADER_LENGTH.lower()), "outputs")
        except Malformed as error:
            raise Trouble(BadAnswer(f"{self._url}: no answer of the protocol: {error}"), again=True) from error
        found = message.get("id")
        if found != asked and (found is not None or self._require_id):
            said = "without an id: with require_id=False it is believed" if found is None else "to another question"
            raise Trouble(BadAnswer(f"{self._url}: an answer {said}"), again=True)
        return check_answers(self._values(tensors, shape), self._leading(shape), self._url)

    def _leading(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[:1] if self._places == "last" else shape[:2]

    def _values(self, tensors: dict[str, Tensor], shape: tuple[int, ...]) -> Array:
        """The tensor among the tensors, as the metadata promised it. What is wrong here will not mend itself."""
        promised, url = self._model.answers, self._url
        if not promised.name and len(tensors) != 1:
            raise WrongShape(f"{url}: {len(tensors)} tensors ({sorted(tensors)}): name one with output_name=")
        tensor = tensors.get(promised.name or next(iter(tensors)))
        if tensor is None:
            raise WrongShape(f"{url}: an answer without the output {promised.name!r}, with {sorted(tensors) or 'none'}")
        if not self._model.described:
            return tensor.values
        if tensor.datatype != promised.datatype:
            raise WrongShape(f"{url}: answers in {tensor.datatype}, where the metadata says {promised.datatype}")
        sides = tensor.values.shape
        if len(sides) != len(promised.shape) or any(
            side not in (-1, actual) for side, actual in zip(promised.shape, sides, strict=True)
        ):
            raise WrongShape(
                f"{url}: answers of shape {sides} to tokens {shape}, where the metadata says "
                f"{list(promised.shape)}: the server does not keep to its own description"
            )
        return tensor.values


def check_answers(
    values: Array,
    leading: tuple[int, ...],  # (batch,), or (batch, length) where every position is answered
    url: str,
) -> Array:
    """Numbers that may be the answers to a batch: one row for every sequence or position, and finite."""
    if values.shape[: len(leading)] != leading or values.ndim > len(leading) + 1:
        raise WrongShape(f"{url}: answers of shape {values.shape}, where {leading} and at most one side more is wanted")
    if not np.all(np.isfinite(values)):
        raise NonFiniteAnswer(
            f"{url}: nan or inf in the answer to finite tokens: set max_norm if the model overflows at long tokens"
        )
    return values
