"""A head behind `keyhole serve` on the same machine: recovered over HTTP, and against a bare load generator.

The generator sends requests that were made beforehand over plain sockets, as many at a time as the oracle has
connections, and looks at no answer. Queries per second are those of the fastest of several runs, taken in turns. Where
other work keeps the machine busy they say little; the processor time of client and server together says more: one
request at a time, it is the time on an idle machine, but for the system's own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

import keyhole as kh
from benchmarks.support.rows import markdown
from keyhole.inference_protocol import HEADER_LENGTH, Tensor, encode
from keyhole.oracles import Wrapper
from keyhole.targets import open_target

METHOD = "single-head"
WIDTH = 64
WIDER = 256  # requests of a megabyte and more
RUNS = 15  # of which the fastest counts
REQUESTS = 20  # of one size, in a run


def target(width: int) -> str:
    return f"demo:single-head?width={width}"


class Spy(Wrapper):
    """Keeps every question."""

    def __init__(self, inner: kh.HttpOracle) -> None:
        super().__init__(inner)
        self.asked: list[np.ndarray] = []

    def answer(self, tokens: np.ndarray) -> np.ndarray:
        self.asked.append(tokens.copy())
        return super().answer(tokens)


@dataclass
class Cost:
    """Seconds of the fastest run, and processor seconds of client and server in all of them."""

    seconds: float = float("inf")
    work: float = 0.0

    def of(self, run: Callable[[], float], served: Served) -> None:
        before = served.work() + time.process_time()
        self.seconds = min(self.seconds, run())
        self.work += served.work() + time.process_time() - before


def table() -> str:
    with serve() as served:
        rows = [batches(served, size, connections) for connections in (1, 4) for size in (64, 256, 512, 1024)]
        ways = [(binary, connections) for binary in (True, False) for connections in (1, 4)]
        rows += [recovery(served, WIDTH, binary=binary, connections=each) for binary, each in ways]
    with serve(WIDER) as served:
        rows.append(recovery(served, WIDER, binary=True, connections=1))
    columns = ["what", "connections", "queries", "requests", "queries/s", "bare load generator", "share"]
    load = f"Load average at the end: {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores; idle, it would be below 2."
    columns += ["share by processor time", "in the oracle: share", "in the oracle: by processor time"]
    columns += ["parameters found in process"]
    return markdown(columns, rows) + f"\n\n{load}"


def recovery(served: Served, width: int, *, binary: bool, connections: int) -> list[object]:
    """Recoveries, the learner's mathematics included, and the same questions put to the oracle without a learner."""
    oracle = kh.HttpOracle(served.url, binary=binary, connections=connections, batch=1024)
    spy = Spy(oracle)
    found = kh.recover(spy, METHOD)
    requests = oracle.requests
    bodies = [
        [message(served.url, tokens[start:end], binary=binary) for start, end in oracle._batches.slices(tokens)]
        for tokens in spy.asked
    ]
    mine, asking, bare = compare(
        served,
        lambda: kh.recover(oracle, METHOD).stats.seconds,
        lambda: ask_all(oracle, spy.asked),
        lambda: replay(served.url, bodies, connections),
    )
    oracle.close()
    queries = found.stats.queries + found.stats.heldout_queries
    here = kh.recover(open_target(target(width)).oracle, METHOD)
    same = [np.array_equal(getattr(found.params, name), getattr(here.params, name)) for name in ("score", "value")]
    equal = "bit-equal" if all(same) else f"relative distance {kh.distance(found.params, here.params):.1e}"
    what = f"recovery, d = {width}, {'binary' if binary else 'JSON'}"
    inside = [f"{bare.seconds / asking.seconds:.0%}", f"{bare.work / asking.work:.0%}"]
    return [what, connections, queries, requests, *rates(queries, mine, bare), *inside, equal]


def ask_all(oracle: kh.HttpOracle, asked: list[np.ndarray]) -> float:
    began = time.perf_counter()
    for tokens in asked:
        oracle(tokens)
    return time.perf_counter() - began


def batches(served: Served, size: int, connections: int) -> list[object]:
    """The oracle alone, on requests of one size."""
    oracle = kh.HttpOracle(served.url, connections=connections, batch=size)
    tokens = np.random.default_rng(0).standard_normal((size * connections, 2, WIDTH))
    rounds = REQUESTS // connections
    bodies = [[message(served.url, part, binary=True) for part in np.split(tokens, connections)]] * rounds

    def run() -> float:
        began = time.perf_counter()
        for _ in range(rounds):
            oracle(tokens)
        return time.perf_counter() - began

    mine, bare = compare(served, run, lambda: replay(served.url, bodies, connections))
    oracle.close()
    asked, queries = oracle.requests // (RUNS + 1), size * connections * rounds
    return [f"batches of {size}, binary", connections, queries, asked, *rates(queries, mine, bare), "", "", ""]


def compare(served: Served, *runs: Callable[[], float]) -> list[Cost]:
    """What each costs, in turns, so that all see the same machine."""
    for run in runs:
        run()
    costs = [Cost() for _ in runs]
    for _ in range(RUNS):
        for cost, run in zip(costs, runs, strict=True):
            cost.of(run, served)
    return costs


def rates(queries: int, mine: Cost, bare: Cost) -> list[str]:
    share, work = bare.seconds / mine.seconds, bare.work / mine.work
    return [f"{queries / mine.seconds:,.0f}", f"{queries / bare.seconds:,.0f}", f"{share:.0%}", f"{work:.0%}"]


# The bare load generator: sockets, and requests made beforehand.


def message(url: str, tokens: np.ndarray, *, binary: bool) -> bytes:
    wanted = {"name": "answers", "parameters": {"binary_data": True}} if binary else {"name": "answers"}
    body, size = encode({"id": "0", "outputs": [wanted]}, "inputs", Tensor("tokens", "FP64", tokens), binary=binary)
    parts = urlsplit(url)
    lines = [f"POST {parts.path}/infer HTTP/1.1", f"Host: {parts.netloc}", f"Content-Length: {len(body)}"]
    lines += [] if size is None else [f"{HEADER_LENGTH}: {size}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def replay(url: str, rounds: list[list[bytes]], connections: int) -> float:
    """Seconds to send the requests of each round over the connections, and to read the answers, looking at none."""
    parts = urlsplit(url)
    sockets = [socket.create_connection((parts.hostname, parts.port)) for _ in range(connections)]
    for each in sockets:
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        with ThreadPoolExecutor(connections) as pool:
            began = time.perf_counter()
            for bodies in rounds:
                if len(bodies) == 1:
                    exchange(sockets[0], bodies)
                else:
                    list(pool.map(exchange, sockets, [bodies[start::connections] for start in range(connections)]))
            return time.perf_counter() - began
    finally:
        for each in sockets:
            each.close()


def exchange(connection: socket.socket, bodies: list[bytes]) -> None:
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


@dataclass(frozen=True)
class Served:
    """A running `keyhole serve`."""

    url: str
    process: int

    def work(self) -> float:
        """Processor seconds so far; Linux tells them of each thread."""
        files = Path(f"/proc/{self.process}/task").glob("*/schedstat")
        return sum(int(file.read_text().split()[0]) for file in files) / 1e9


@contextmanager
def serve(width: int = WIDTH) -> Iterator[Served]:
    """`keyhole serve` in a process of its own."""
    command = [sys.executable, "-m", "keyhole", "serve", target(width), "--port", "0", "--json"]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield Served(json.loads(process.stdout.readline())["url"], process.pid)
        finally:
            process.terminate()
