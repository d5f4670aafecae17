"""Servers for tests: a real one around a box, one that says whatever it is told to, and a proxy that wreaks havoc."""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from keyhole.inference_protocol import BINARY_EXTENSION, HEADER_LENGTH, Tensor, decode, encode
from keyhole.oracles import Oracle
from keyhole.serve import Limits, ServedOracle, Server


@contextmanager
def serving(oracle: Oracle, port: int = 0, token: str | None = None, **limits: Any) -> Iterator[Server]:
    """`keyhole serve` in a thread."""
    with Server(ServedOracle(oracle, "box", Limits(**limits)), port=port, token=token) as server:
        yield server


# --- a server that says what it is told to ---------------------------------------------------------------------

Said = tuple[int, Mapping[str, str], bytes]


def as_json(data: Any, status: int = 200, **headers: str) -> Said:
    return status, {name.replace("_", "-"): text for name, text in headers.items()}, json.dumps(data).encode()


def description(
    tokens: tuple[int, ...] = (-1, -1, 4),
    answers: tuple[int, ...] = (-1,),
    datatypes: tuple[str, str] = ("FP64", "FP64"),
    **more: Any,
) -> dict[str, Any]:
    return {
        "name": "m",
        "versions": ["1"],
        "platform": "test",
        "inputs": [{"name": "x", "datatype": datatypes[0], "shape": list(tokens)}],
        "outputs": [{"name": "y", "datatype": datatypes[1], "shape": list(answers)}],
        **more,
    }


def honest(body: bytes, headers: Mapping[str, str], shape: tuple[int, ...] | None = None, **changes: Any) -> Said:
    """Sums of the tokens, of any shape, with some keys of the reply changed."""
    message, tensors = decode(body, headers.get(HEADER_LENGTH), "inputs")
    values = tensors["x"].values
    sums = values.sum(axis=(1, 2)) if shape is None else np.zeros(shape)
    reply = {"model_name": "m", "id": message.get("id"), **changes}
    answer, _ = encode(reply, "outputs", Tensor("y", "FP64", sums), binary=False)
    return 200, {"Content-Type": "application/json"}, answer


@dataclass
class Fake:
    """Answers by path: what to say, or a function of body and headers that says it."""

    pages: dict[str, Said | Callable[[bytes, Mapping[str, str]], Said]] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    seen: list[Mapping[str, str]] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v2/models/m"


@contextmanager
def faking(infer: Callable[[bytes, Mapping[str, str]], Said] = honest, **metadata: Any) -> Iterator[Fake]:
    fake = Fake()
    fake.pages = {
        "/v2": as_json({"name": "fake", "extensions": [BINARY_EXTENSION]}),
        "/v2/health/ready": as_json({}),
        "/v2/models/m": as_json(description(**metadata)),
        "/v2/models/m/ready": as_json({}),
        "/v2/models/m/infer": infer,
    }

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fake.asked[self.path] += 1
            fake.seen.append(dict(self.headers))
            said = fake.pages.get(self.path, as_json({"error": "no such page"}, 404))
            status, headers, content = said if isinstance(said, tuple) else said(body, self.headers)
            if status == 0:  # hangs up
                self.close_connection = True
                return
            self.send_response(status)
            for name, text in headers.items():
                self.send_header(name, text)
            if "Content-Length" not in headers:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(content)

        do_GET = do_POST = reply  # noqa: N815 - names that http.server knows

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        fake.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()


# --- a proxy that wreaks havoc ---------------------------------------------------------------------------------

PASS, LATE, TWICE = "pass", "late", "duplicate"
SURE = 4  # this request meets the first fault for sure, so that no seed leaves a run in peace


@dataclass
class Havoc:
    """What is to go wrong, with which probability, and a record of what was done to whom."""

    faults: dict[str, float]
    seed: int
    timeout: float  # of the client, in seconds: a hanging answer takes a bit longer
    done: Counter[str] = field(default_factory=Counter)
    delivered: Counter[bytes] = field(default_factory=Counter)  # sequences whose answers arrived, beyond doubt
    port: int = 0
    upstream: int = 0

    def __post_init__(self) -> None:
        self._random, self._lock = random.Random(self.seed), threading.Lock()
        self._last: Said | None = None
        self._drawn = 0

    def draw(self) -> str:
        with self._lock:
            self._drawn += 1
            if self._drawn == SURE:
                return next(iter(self.faults))
            point = self._random.random()
            for fault, share in self.faults.items():
                point -= share
                if point < 0:
                    return fault
            return PASS

    def handle(self, connection: socket.socket) -> None:
        with connection, suppress(OSError), connection.makefile("rb") as file:
            soiled = False  # something is on the way on this connection that nobody asked for
            while (request := _read_request(file)) is not None:
                method, path, headers, body = request
                began = time.monotonic()
                fault = self.draw() if path.endswith("/infer") else PASS
                fault = PASS if fault == "stale" and self._last is None else fault
                self.done[fault] += path.endswith("/infer")
                if fault == "500":
                    connection.sendall(_as_bytes((500, {}, b'{"error": "bad luck"}')))
                    continue
                if fault == "drop":
                    return
                try:
                    said = self._ask(method, path, headers, body)
                except (OSError, http.client.HTTPException):
                    return  # the server is away
                if not self._deliver(connection, fault, said):
                    return
                if path.endswith("/infer"):
                    in_time = time.monotonic() - began < self.timeout / 2
                    if fault in (PASS, LATE, TWICE) and said[0] == 200 and in_time and not soiled:
                        with self._lock:
                            self.delivered.update(questions(body, headers.get(HEADER_LENGTH.lower())))
                    self._last = said
                soiled = soiled or fault == TWICE

    def _ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Said:
        connection = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=10)
        try:
            upstream = {"host": f"127.0.0.1:{self.upstream}", "connection": "close"}  # as proxies before servers do
            connection.request(method, path, body, {**headers, **upstream})
            response = connection.getresponse()
            kept = {name: text for name, text in response.getheaders() if name.lower() != "connection"}
            return response.status, kept, response.read()
        finally:
            connection.close()

    def _deliver(self, connection: socket.socket, fault: str, said: Said) -> bool:
        """Pass an answer on, in a way; whether the connection may be used again."""
        status, headers, body = said
        if fault == "hang":
            time.sleep(1.5 * self.timeout)
            return False
        if fault == LATE:
            time.sleep(0.05)
        if fault == "truncate":
            connection.sendall(_as_bytes(said)[: -max(1, len(body) // 2)])
            return False
        if fault == "cut":
            said = (status, headers, body[: len(body) // 2])
        if fault == "garbage":
            said = (status, headers, bytes(mark ^ 0x55 for mark in body))
        if fault == "stale" and self._last is not None:
            said = self._last
        if fault == "wrong shape":
            said = _reshaped(said)
        if fault == "nan":
            said = _poisoned(said)
        connection.sendall(_as_bytes(said) * (2 if fault == TWICE else 1))
        return True


@contextmanager
def havoc(upstream: str, faults: dict[str, float], seed: int, timeout: float) -> Iterator[tuple[Havoc, str]]:
    """The proxy in front of the model at `upstream`, and the address to ask."""
    parts = urlsplit(upstream)
    state = Havoc(faults, seed, timeout, upstream=parts.port or 0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        state.port = listener.getsockname()[1]

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=state.handle, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield state, f"http://127.0.0.1:{state.port}{parts.path}"
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


def questions(body: bytes, header_length: str | None) -> list[bytes]:
    """A digest of each sequence of a request."""
    _, tensors = decode(body, header_length, "inputs")
    return [digest(sequence) for sequence in tensors["tokens"].values]


def digest(sequence: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(sequence).tobytes()).digest()


def _read_request(file: Any) -> tuple[str, str, dict[str, str], bytes] | None:
    first = file.readline().split()
    if len(first) != 3:
        return None
    headers = {}
    while line := file.readline().strip():
        name, _, text = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = text.strip()
    return first[0].decode(), first[1].decode(), headers, file.read(int(headers.get("content-length", 0)))


def _as_bytes(said: Said) -> bytes:
    status, headers, body = said
    kept = {name: text for name, text in headers.items() if name.lower() != "content-length"}
    lines = [f"HTTP/1.1 {status} Whatever", *(f"{name}: {text}" for name, text in kept.items())]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def _changed(said: Said, change: Callable[[np.ndarray], np.ndarray]) -> Said:
    status, headers, body = said
    length = {name.lower(): text for name, text in headers.items()}.get(HEADER_LENGTH.lower())
    message, tensors = decode(body, length, "outputs")
    (tensor,) = tensors.values()
    reply = {name: value for name, value in message.items() if name != "outputs"}
    values = change(tensor.values.copy())
    body, size = encode(reply, "outputs", Tensor(tensor.name, tensor.datatype, values), binary=length is not None)
    return status, {} if size is None else {HEADER_LENGTH: str(size)}, body


def _reshaped(said: Said) -> Said:
    return _changed(said, lambda values: np.concatenate([values, values[:1]]))


def _poisoned(said: Said) -> Said:
    def poison(values: np.ndarray) -> np.ndarray:
        values[0] = np.nan
        return values

    return _changed(said, poison)
