"""A head behind `keyhole serve` on the same machine: recovered over HTTP, and against a bare load generator."""
# ruff: noqa: A005 - nothing imports the library of this name from here

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import urlsplit

import numpy as np

import keyhole as kh
from benchmarks.tables import markdown
from keyhole.oracles import Wrapper
from keyhole.oracles.inference import HEADER_LENGTH, Tensor, encode
from keyhole.targets import open_target

TARGET = "demo:single-head?width=64"
WIDTH = 64
RUNS = 15  # of which the median counts
REQUESTS = 60  # of one size


class Spy(Wrapper):
    """Keeps every question."""

    def __init__(self, inner: kh.HttpOracle) -> None:
        super().__init__(inner)
        self.asked: list[np.ndarray] = []

    def answer(self, tokens: np.ndarray) -> np.ndarray:
        self.asked.append(tokens.copy())
        return super().answer(tokens)


def table() -> str:
    with served() as url:
        rows = [recovery(url, binary=binary, connections=each) for binary in (True, False) for each in (1, 4)]
        rows += [batches(url, size, connections) for connections in (1, 4) for size in (64, 256, 1024)]
    columns = ["what", "connections", "queries", "requests", "queries/s", "bare load generator", "share"]
    return markdown([*columns, "parameters in process"], rows)


def recovery(url: str, *, binary: bool, connections: int) -> list[object]:
    """Whole recoveries, everything between the first question and the certificate counted."""
    oracle = kh.HttpOracle(url, binary=binary, connections=connections, batch=1024)
    spy = Spy(oracle)
    found = kh.recover(spy)
    requests = oracle.requests
    bodies = [
        [
            message(url, part, binary=binary)
            for part in np.split(tokens, [end for _, end in oracle._slices(tokens)][:-1])
        ]
        for tokens in spy.asked
    ]
    mine, bare = compare(lambda: kh.recover(oracle), lambda: replay(url, bodies, connections))
    queries = found.stats.queries + found.stats.heldout_queries
    here = kh.recover(open_target(TARGET).oracle)
    same = np.array_equal(found.params.score, here.params.score) and np.array_equal(
        found.params.value, here.params.value
    )
    equal = "bit-equal" if same else f"relative distance {kh.distance(found.params, here.params):.1e}"
    oracle.close()
    what = f"recovery, d = {WIDTH}, {'binary' if binary else 'JSON'}"
    return [what, connections, queries, requests, *rates(queries, mine, bare), equal]


def batches(url: str, size: int, connections: int) -> list[object]:
    """The oracle alone, on requests of one size."""
    oracle = kh.HttpOracle(url, connections=connections, batch=size)
    tokens = np.random.default_rng(0).standard_normal((size * connections, 2, WIDTH))
    rounds = REQUESTS // connections
    bodies = [[message(url, part, binary=True) for part in np.split(tokens, connections)]] * rounds

    def ask() -> None:
        for _ in range(rounds):
            oracle(tokens)

    mine, bare = compare(ask, lambda: replay(url, bodies, connections))
    oracle.close()
    queries = size * connections * rounds
    return [
        f"batches of {size}, binary",
        connections,
        queries,
        oracle.requests // (RUNS + 1),
        *rates(queries, mine, bare),
        "",
    ]


def compare(mine: Callable[[], object], bare: Callable[[], object]) -> tuple[float, float]:
    """Median seconds of each, in turns, so that both see the same machine."""
    mine(), bare()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(RUNS):
        for act, kept in zip((mine, bare), times, strict=True):
            began = time.perf_counter()
            act()
            kept.append(time.perf_counter() - began)
    return statistics.median(times[0]), statistics.median(times[1])


def rates(queries: int, mine: float, bare: float) -> list[str]:
    return [f"{queries / mine:,.0f}", f"{queries / bare:,.0f}", f"{100 * bare / mine:.0f} %"]


# The bare load generator: sockets, and requests made beforehand.


def message(url: str, tokens: np.ndarray, *, binary: bool) -> bytes:
    wanted = {"name": "answers", "parameters": {"binary_data": True}} if binary else {"name": "answers"}
    body, size = encode({"id": "0", "outputs": [wanted]}, "inputs", Tensor("tokens", "FP64", tokens), binary=binary)
    parts = urlsplit(url)
    lines = [f"POST {parts.path}/infer HTTP/1.1", f"Host: {parts.netloc}", f"Content-Length: {len(body)}"]
    lines += [] if size is None else [f"{HEADER_LENGTH}: {size}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def replay(url: str, rounds: list[list[bytes]], connections: int) -> None:
    """Send the requests of each round at once, as many as there are connections; read answers, look at none."""
    parts = urlsplit(url)
    sockets = [socket.create_connection((parts.hostname, parts.port)) for _ in range(connections)]
    for each in sockets:
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        if connections == 1:
            for bodies in rounds:
                share(sockets[0], bodies)
            return
        with ThreadPoolExecutor(connections) as pool:
            for bodies in rounds:
                list(pool.map(share, sockets, [bodies[start::connections] for start in range(connections)]))
    finally:
        for each in sockets:
            each.close()


def share(connection: socket.socket, bodies: list[bytes]) -> None:
    for body in bodies:
        connection.sendall(body)
        data = b""
        while b"\r\n\r\n" not in data:
            data += connection.recv(2**16)
        head, _, rest = data.partition(b"\r\n\r\n")
        if b" 200 " not in head[:20]:
            raise RuntimeError(head.decode())
        length = int(head.lower().partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0])
        left = length - len(rest)
        while left:
            left -= len(connection.recv(left))


@contextmanager
def served() -> Iterator[str]:
    """`keyhole serve` in a process of its own."""
    command = [sys.executable, "-m", "keyhole", "serve", TARGET, "--port", "0", "--json"]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
