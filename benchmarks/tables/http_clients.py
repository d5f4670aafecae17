"""What one request costs the processor of the client: Keyhole's own connections beside well-kept HTTP libraries.

The same requests to the same `keyhole serve`, one connection, one at a time; processor time of the client alone, the
least of several rounds, so that other work on the machine says little. A server answers a small query in about half
a millisecond, which is what this stands beside. Then whole recoveries in which the library carries the requests in
place of our connections.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

import numpy as np

import keyhole as kh
from benchmarks.support.rows import markdown
from benchmarks.tables.http import METHOD, WIDTH, Served, serve
from keyhole.inference_protocol import HEADER_LENGTH, Tensor, encode
from keyhole.oracles.http.connections import ConnectionPool
from keyhole.oracles.http.replies import Reply

ROUNDS, REQUESTS, RUNS = 5, 100, 15
SIZES = ((1, True), (1, False), (64, True), (1024, True))  # sequences, and whether tensors are binary

Send = Callable[[bytes, dict[str, str]], Any]


def table() -> str:
    with serve() as served:
        clients = {name: make(f"{served.url}/infer") for name, make in CLIENTS.items()}
        rows: list[list[object]] = [[name] for name in clients]
        for size, binary in SIZES:
            body, headers = message(size, binary=binary)
            for row, cost in zip(rows, costs(list(clients.values()), body, headers), strict=True):
                row.append(f"{cost * 1e6:,.0f}")
        recovered = recoveries(served, clients)
    columns = ["client"] + [f"{size} sequences, {'binary' if binary else 'JSON'}: µs" for size, binary in SIZES]
    whole = f"A recovery at d = {WIDTH} in {recovered[0][1]} binary requests."
    return f"{markdown(columns, rows)}\n\n{whole}\n\n{markdown(['client', 'requests', 'ms'], recovered)}"


def recoveries(served: Served, clients: dict[str, Send]) -> list[list[object]]:
    """Processor time of whole recoveries, the learner's included."""
    oracle = kh.HttpOracle(served.url, connections=1, batch=1024)
    kh.recover(oracle, METHOD)
    requests, own = oracle.requests, oracle._exchange._pool
    pools = {name: own if name == "keyhole" else Borrowed(send) for name, send in clients.items()}
    least = dict.fromkeys(pools, np.inf)
    for _ in range(RUNS):
        for name, pool in pools.items():
            oracle._exchange._pool = pool
            began = time.process_time()
            kh.recover(oracle, METHOD)
            least[name] = min(least[name], time.process_time() - began)
    oracle._exchange._pool = own
    oracle.close()
    return [[name, requests, f"{1e3 * work:.0f}"] for name, work in least.items()]


class Borrowed:
    """A library in place of a pool of connections."""

    def __init__(self, send: Send) -> None:
        self.send = send

    def take(self, _url: str) -> None:
        pass

    def give(self, _connection: None) -> None:
        pass

    def drop(self, _connection: None) -> None:
        pass

    def ask(self, _connection: None, _method: str, _url: str, body: Any, headers: dict[str, str]) -> Reply:
        """Its answer; whatever it is, to a request of this benchmark it is 200."""
        found = self.send(b"".join(body), headers)
        size = found[: found.index(b"}]}") + 3] if found[:1] == b"{" else b""
        return Reply(200, {HEADER_LENGTH: str(len(size))}, found)


def costs(clients: list[Send], body: bytes, headers: dict[str, str]) -> list[float]:
    """Processor seconds of each client per request, in turns."""
    least = [np.inf] * len(clients)
    for _ in range(ROUNDS):
        for place, send in enumerate(clients):
            send(body, headers)
            began = time.process_time()
            for _ in range(REQUESTS):
                send(body, headers)
            least[place] = min(least[place], (time.process_time() - began) / REQUESTS)
    return least


def message(size: int, *, binary: bool) -> tuple[bytes, dict[str, str]]:
    tokens = np.random.default_rng(0).standard_normal((size, 2, WIDTH))
    wanted = {"name": "answers", "parameters": {"binary_data": True}} if binary else {"name": "answers"}
    body, head = encode({"id": "0", "outputs": [wanted]}, "inputs", Tensor("tokens", "FP64", tokens), binary=binary)
    return body, {"Content-Type": "application/json"} if head is None else {HEADER_LENGTH: str(head)}


def own(url: str) -> Send:
    parts = urlsplit(url)
    pool = ConnectionPool(f"{parts.scheme}://{parts.netloc}", 30.0)

    def send(body: bytes, headers: dict[str, str]) -> bytes:
        connection = pool.take(url)
        reply = pool.ask(connection, "POST", url, (body,), headers)
        pool.give(connection)
        return reply.body

    return send


def urllib3_pool(url: str) -> Send:
    import urllib3

    pool, path = urllib3.connection_from_url(url), urlsplit(url).path
    return lambda body, headers: pool.urlopen("POST", path, body, headers, retries=False, redirect=False).data


def httpx_client(url: str) -> Send:
    import httpx

    client = httpx.Client()
    return lambda body, headers: client.post(url, content=body, headers=headers).content


def aiohttp_session(url: str) -> Send:
    import aiohttp

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # nobody closes the session: it lives as long as the table is made

    async def begin() -> aiohttp.ClientSession:
        return aiohttp.ClientSession()

    session = loop.run_until_complete(begin())

    async def post(body: bytes, headers: dict[str, str]) -> bytes:
        async with session.post(url, data=body, headers=headers) as reply:
            return await reply.read()

    return lambda body, headers: loop.run_until_complete(post(body, headers))


CLIENTS: dict[str, Callable[[str], Send]] = {
    "keyhole": own,
    f"urllib3 {version('urllib3')}": urllib3_pool,
    f"httpx {version('httpx')}": httpx_client,
    f"aiohttp {version('aiohttp')}": aiohttp_session,
}
