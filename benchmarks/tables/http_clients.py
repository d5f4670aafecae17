"""What one request costs the processor of the client: libcurl, which Keyhole uses, beside other HTTP libraries.

The same requests to the same `keyhole serve`, one connection, one at a time; processor time of the client alone, the
least of several rounds, so that other work on the machine says little. Bare sockets that look at no answer are the
least there can be. A server answers a small query in about half a millisecond, which is what this stands beside. Then
whole recoveries in which the library carries the requests in place of our connections, with the processor time of the
server beside: how a client sends its packets decides how often a server wakes up.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

import numpy as np

import keyhole as kh
from benchmarks.support.rows import markdown
from benchmarks.tables.http import METHOD, WIDTH, Served, exchange, serve
from keyhole.inference_protocol import HEADER_LENGTH, Tensor, encode
from keyhole.oracles.http.connections import Connections, Reply

ROUNDS, REQUESTS, RUNS = 5, 100, 15
SIZES = ((1, True), (1, False), (64, True), (1024, True))  # sequences, and whether tensors are binary

BARE, OWN = "bare sockets", f"keyhole, over pycurl {version('pycurl')}"

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
    second = markdown(["client", "requests", "client, ms", "server, ms"], recovered)
    return f"{markdown(columns, rows)}\n\n{whole}\n\n{second}"


def recoveries(served: Served, clients: dict[str, Send]) -> list[list[object]]:
    """Processor time of whole recoveries, the learner's included, and of the server's part in them."""
    oracle = kh.HttpOracle(served.url, connections=1, batch=1024)
    kh.recover(oracle, METHOD)
    requests, own = oracle.requests, oracle._exchange._connections
    carriers = {name: own if name == OWN else Borrowed(send) for name, send in clients.items() if name != BARE}
    least = dict.fromkeys(carriers, (np.inf, np.inf))
    for _ in range(RUNS):
        for name, carrier in carriers.items():
            oracle._exchange._connections = carrier
            before = time.process_time(), served.work()
            kh.recover(oracle, METHOD)
            spent = time.process_time() - before[0], served.work() - before[1]
            least[name] = min(least[name], spent, key=sum)
    oracle._exchange._connections = own
    oracle.close()
    return [[name, requests, *(f"{1e3 * work:.0f}" for work in spent)] for name, spent in least.items()]


class Borrowed:
    """A library in place of connections, and of one of them."""

    def __init__(self, send: Send) -> None:
        self.send = send

    def take(self, _url: str) -> Borrowed:
        return self

    def give(self, _connection: Borrowed) -> None:
        pass

    def close(self) -> None:
        pass

    def ask(self, _url: str, body: Any, headers: dict[str, str]) -> Reply:
        """Its answer; whatever it is, to a request of this benchmark it is 200."""
        found = self.send(b"".join(body), headers)
        size = found[: found.index(b"}]}") + 3] if found[:1] == b"{" else b""
        return Reply(200, {HEADER_LENGTH.lower(): str(len(size))}, found)


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
    connections = Connections(30.0)

    def send(body: bytes, headers: dict[str, str]) -> bytes:
        connection = connections.take(url)
        reply = connection.ask(url, (body,), headers)
        connections.give(connection)
        return reply.body

    return send


def bare(url: str) -> Send:
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(body: bytes, headers: dict[str, str]) -> None:
        lines = [f"POST {parts.path} HTTP/1.1", f"Host: {parts.netloc}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {text}" for name, text in headers.items()]
        exchange(connection, ["\r\n".join([*lines, "", ""]).encode() + body])

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
    BARE: bare,
    OWN: own,
    f"urllib3 {version('urllib3')}": urllib3_pool,
    f"httpx {version('httpx')}": httpx_client,
    f"aiohttp {version('aiohttp')}": aiohttp_session,
}
