"""A model behind a server of the Open Inference Protocol v2 (KServe, Triton, `keyhole serve`) as an oracle."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from secrets import token_hex
from threading import Event
from typing import Any, Literal
from urllib.parse import urlsplit
from weakref import finalize

import numpy as np

from keyhole.arrays import Array, Space, to_numpy
from keyhole.errors import BadAnswer, NonFiniteAnswer, OracleError, UsageError, WrongShape
from keyhole.inference_protocol import HEADER_LENGTH, Malformed, Tensor, decode, encode_pieces
from keyhole.noise import Noise
from keyhole.optional import extra
from keyhole.oracles.base import Oracle
from keyhole.oracles.http.connections import Body, ConnectionPool, Trouble
from keyhole.oracles.http.metadata import EXAMPLE, is_ready, look
from keyhole.oracles.http.replies import Reply
from keyhole.oracles.http.retries import Exchange
from keyhole.queries import Signature

URL = re.compile(r"(?P<server>https?://.+?)/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?(?:/infer)?/?")
LOOPBACK = ("localhost", "127.0.0.1", "::1")

BATCH = 512  # sequences per request, unless the server takes fewer
# A batch is split over the connections as far as a request still holds so many bytes of tokens: below that, what a
# request costs outweighs what a second connection gains. Where a server computes for long, a small `batch` splits more.
WORTHWHILE = 2**20


class HttpOracle(Oracle):
    """A model at `http://host:port/v2/models/name`, asked over HTTP.

    Width, datatypes and the shape of answers come from the model's metadata; give `width`, `positions`, `input_name`
    or `output_name` where it leaves them open, and `answers="labels"` of a model that answers with labels. A batch is
    split into requests of at most `batch` sequences over so many `connections`. No answer in `timeout` seconds, a
    lost connection or a failure of the server is asked again at most `retries` times, and a server that asks to wait
    is waited for up to `patience` seconds per request; `requests` and `retried` count it. `token_env` names the
    environment variable that holds a token, sent as `header`. `ca` is a file of certificates to trust, `proxy` the
    address of a proxy: neither is taken from the environment.
    """

    def __init__(
        self,
        url: str,
        width: int | None = None,
        max_norm: float | None = None,
        max_length: int | None = None,
        positions: Literal["last", "all"] | None = None,
        noise: Noise | str | None = None,
        *,
        input_name: str | None = None,
        output_name: str | None = None,
        binary: bool | None = None,
        batch: int | None = None,
        connections: int = 4,
        timeout: float = 30.0,
        retries: int = 5,
        patience: float = 300.0,
        token_env: str | None = None,
        header: str = "Authorization",
        ca: str | None = None,
        proxy: str | None = None,
        require_id: bool = True,
        answers: Literal["numbers", "labels"] | None = None,
        name: str | None = None,
    ) -> None:
        self.url, self._server = _address(url)
        _positive("timeout", timeout)
        _positive("patience", patience)
        for word, number, least in (("connections", connections, 1), ("retries", retries, 0), ("batch", batch or 1, 1)):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise UsageError(f"{word} must be a whole number of at least {least}, not {number!r}")
        secret = _secret(token_env, self.url)
        bearer = f"Bearer {secret}" if header.lower() == "authorization" else secret
        extra("orjson", "http", "asking a server")
        self._exchange = Exchange(
            ConnectionPool(self._server, timeout, ca, proxy),
            retries=retries,
            patience=patience,
            headers={} if bearer is None else {header: bearer},
            secret=secret,
        )
        finalize(self, self._exchange.close)  # where nobody calls close
        self._pool: ThreadPoolExecutor | None = None
        self._ids, self._run = count(1), token_hex(6)
        self._connections, self._require_id = connections, require_id
        try:
            self.model = look(self._exchange, self._server, self.url, input_name, output_name, binary)
            self._places = self.model.places(positions)
            self.batch = min(batch or BATCH, self.model.batch_limit or batch or BATCH)
            space, places = Space.of(np.zeros(1, dtype=self.model.dtype)), positions or self._places
            own = self.model.noise if noise is None else Noise.of(noise)
            most = self.batch * connections
            told = answers or ("labels" if self.model.answers.labels else "numbers")
            self.signature = Signature(self.model.width(width), space, max_norm, max_length, places, own, most, told)
        except BaseException:
            self._exchange.close()
            raise
        versions = f" version {','.join(self.model.versions)}" if self.model.versions else ""
        self.name = name or f"{self.url}{versions} {self.model.tokens.name} to {self.model.answers.name}"

    @property
    def requests(self) -> int:
        """Inference requests sent, those sent again included."""
        return self._exchange.requests

    @property
    def retried(self) -> dict[str, int]:
        """How often something was asked again, by reason."""
        return dict(self._exchange.retried)

    def facts(self) -> dict[str, Any]:
        """Requests and repetitions, for the report."""
        return {"server": {"requests": self.requests, "retries": sum(self.retried.values()), "reasons": self.retried}}

    def ready(self) -> bool:
        """Whether server and model are ready, as they say themselves."""
        return is_ready(self._exchange, self._server, self.url)

    def close(self) -> None:
        """Close the connections."""
        self._exchange.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    # Asking.

    def answer(self, tokens: Array) -> Array:
        """Ask, in as many requests as it takes; what arrived before one of them failed goes with the error."""
        plain = np.asarray(to_numpy(tokens))
        slices = list(self._slices(plain))
        if len(slices) == 1:
            return self._ask(plain)
        self._pool = self._pool or ThreadPoolExecutor(self._connections, thread_name_prefix="keyhole-http")
        stop = Event()
        futures = [self._pool.submit(self._unless, stop, plain[start:end]) for start, end in slices]
        try:
            pieces = [(start, future.result()) for (start, _), future in zip(slices, futures, strict=True)]
        except BaseException:  # a person who stops: what is under way is not waited for
            stop.set()
            for future in futures:
                future.cancel()
            raise
        failed = [piece for _, piece in pieces if isinstance(piece, OracleError)]
        if failed:
            error = failed[0]
            arrived = [(start, piece) for start, piece in pieces if isinstance(piece, np.ndarray)]
            error.arrived, error.box = tuple(arrived), self
            raise error
        return np.concatenate([piece for _, piece in pieces])

    def _slices(self, tokens: Array) -> Sequence[tuple[int, int]]:
        total, most = tokens.shape[0], self.batch
        least = math.ceil(WORTHWHILE / max(1, tokens[:1].nbytes))
        step = min(most, max(least, math.ceil(total / self._connections)))
        return [(start, min(start + step, total)) for start in range(0, total, step)] or [(0, 0)]

    def _unless(self, stop: Event, tokens: Array) -> Array | OracleError | None:
        """The answers, the error there was instead, or nothing where another request has failed before this began."""
        if stop.is_set():
            return None
        try:
            return self._ask(tokens)
        except OracleError as error:
            stop.set()
            return error

    def _ask(self, tokens: Array) -> Array:
        url, asked = f"{self.url}/infer", ""
        info, binary = self.model.tokens, self.model.binary

        def make() -> tuple[Body, dict[str, str]]:
            nonlocal asked
            asked = f"{self._run}-{next(self._ids)}"  # a late answer to an earlier attempt is another request's
            wanted: dict[str, Any] = {"name": self.model.answers.name}
            message = {"id": asked, "outputs": [{**wanted, "parameters": {"binary_data": True}} if binary else wanted]}
            body, size = encode_pieces(message, "inputs", Tensor(info.name, info.datatype, tokens), binary=binary)
            if size is None:
                return body, {"Content-Type": "application/json"}
            return body, {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(size)}

        def read(reply: Reply) -> Array:
            return self._read(reply, asked, tokens.shape)

        return self._exchange.send("POST", url, read, make)

    def _read(self, reply: Reply, asked: str, shape: tuple[int, ...]) -> Array:
        """The answers in a reply; Trouble where it is none to this query, and might be if asked again."""
        url = f"{self.url}/infer"
        if reply.status != 200:
            raise self._exchange.refuse(reply, url)
        try:
            message, tensors = decode(reply.body, reply.headers.get(HEADER_LENGTH), "outputs")
        except Malformed as error:
            raise Trouble(BadAnswer(f"{url}: no answer of the protocol: {error}"), again=True) from error
        found = message.get("id")
        if found != asked and (found is not None or self._require_id):
            said = "without an id: with require_id=False it is believed" if found is None else "to another question"
            raise Trouble(BadAnswer(f"{url}: an answer {said}"), again=True)
        return self._answer_tensor(tensors, shape)

    def _answer_tensor(self, tensors: dict[str, Tensor], shape: tuple[int, ...]) -> Array:
        """The answers among the tensors, as the metadata promised them. What is wrong here will not mend itself."""
        promised, url = self.model.answers, f"{self.url}/infer"
        tensor = tensors.get(promised.name)
        if tensor is None:
            raise WrongShape(f"{url}: an answer without the output {promised.name!r}, with {sorted(tensors) or 'none'}")
        if tensor.datatype != promised.datatype:
            raise WrongShape(f"{url}: answers in {tensor.datatype}, where the metadata says {promised.datatype}")
        values = tensor.values
        leading = shape[:1] if self._places == "last" else shape[:2]
        fits = len(values.shape) == len(promised.shape) and all(
            side in (-1, actual) for side, actual in zip(promised.shape, values.shape, strict=False)
        )
        if values.shape[: len(leading)] != leading or values.ndim > len(leading) + 1 or not fits:
            raise WrongShape(
                f"{url}: answers of shape {values.shape} to tokens {shape}, where the metadata says "
                f"{list(promised.shape)}: the server does not keep to its own description"
            )
        if not np.all(np.isfinite(values)):
            raise NonFiniteAnswer(
                f"{url}: nan or inf in the answer to finite tokens: set max_norm if the model overflows at long tokens"
            )
        if self._places == "all" and self.signature.positions == "last":
            values = values[:, -1]
        return self.signature.space.asarray(values)


def _address(url: str) -> tuple[str, str]:
    """Address of the model, and of its server."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
        _ = parts.port  # raises where it is no number
    except ValueError as error:
        raise UsageError(f"{url!r} is no address ({error}): write {EXAMPLE}") from error
    if parts.username is not None or parts.password is not None:
        raise UsageError("an address must not hold a password: name the environment variable of a token, token_env=")
    if parts.query or parts.fragment:
        raise UsageError(f"{url!r} has something behind the name of the model: write {EXAMPLE}")
    found = URL.fullmatch(url)
    if found is None or not host:
        raise UsageError(f"{url!r} is no address of a model: write {EXAMPLE}, or https://")
    version = f"/versions/{found['version']}" if found["version"] else ""
    return f"{found['server']}/v2/models/{found['model']}{version}", found["server"]


def _secret(token_env: str | None, url: str) -> str | None:
    if token_env is None:
        return None
    secret = os.environ.get(token_env)
    if not secret:
        raise UsageError(
            f"the environment variable {token_env!r} is not set: put the token there, not on a command line"
        )
    parts = urlsplit(url)
    if parts.scheme != "https" and parts.hostname not in LOOPBACK:
        raise UsageError(f"a token over plain http could be read on the way to {parts.hostname}: use https://")
    if not secret.isascii() or not secret.isprintable():
        raise UsageError(f"the environment variable {token_env!r} holds no token: line breaks or unusual characters")
    return secret


def _positive(name: str, number: float) -> None:
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
        raise UsageError(f"{name} must be a positive number of seconds, not {number!r}")
