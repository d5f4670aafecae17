"""Certificates, and a name for everything that connections raise."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from keyhole.errors import (
    BadAnswer,
    ConnectionLost,
    KeyholeError,
    ServerError,
    ServerUntrusted,
    UsageError,
)
from keyhole.oracles import HttpOracle, RestOracle
from keyhole.oracles.http import connections as lines
from keyhole.serve import Server
from support.served_head import some
from support.serving import faking

pytest.importorskip("orjson")
pycurl = pytest.importorskip("pycurl")
pytest.importorskip("fastapi")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_certificates_are_verified(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    extra = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *extra], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with faking() as fake, socket.create_server(("127.0.0.1", 0)) as listener:

        def relay() -> None:
            while True:
                try:
                    plain, _ = listener.accept()
                    with context.wrap_socket(plain, server_side=True) as secure:
                        pump(secure, fake.port)
                except ssl.SSLError:
                    continue
                except OSError:
                    return

        threading.Thread(target=relay, daemon=True).start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/v2/models/m"
        with pytest.raises(ServerUntrusted, match=r"ca=.*self.signed certificate"):
            HttpOracle(url)
        oracle = HttpOracle(url, ca=str(certificate), connections=1)
        assert oracle(some(width=4)).shape == (5,)
        oracle.close()
        listener.shutdown(socket.SHUT_RDWR)


def pump(secure: ssl.SSLSocket, port: int) -> None:
    """Requests and replies of one connection, to a plain server and back."""
    with socket.create_connection(("127.0.0.1", port)) as plain:
        while data := secure.recv(2**16):
            plain.sendall(data)
            plain.settimeout(0.1)
            try:
                while piece := plain.recv(2**16):
                    secure.sendall(piece)
            except TimeoutError:
                continue


def test_a_plain_server_behind_https(server: Server) -> None:
    with pytest.raises(ServerUntrusted, match="http://"):
        HttpOracle(server.url.replace("http:", "https:"))


def test_everything_that_goes_wrong_has_a_name_here() -> None:
    """A failure that nobody thought of, or one that a new libcurl has, would fail here."""
    codes = {code: name for name, code in vars(pycurl).items() if name.startswith("E_") and 0 < code < 99_999}
    assert len(codes) > 80
    for code in codes:
        for connecting in (True, False):
            trouble = lines.trouble_of(pycurl, code, "x", "http://h", connecting=connecting)
            assert isinstance(trouble.error, ServerError | UsageError)
            assert type(trouble.error) is not ServerError
            assert str(trouble.error).startswith("http://h: ")


# --- replies of all shapes, plain and peculiar, whole and in pieces --------------------------------------------

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Kind: plain\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@contextmanager
def saying(*replies: tuple[bytes, ...], pause: float = 0.0) -> Iterator[str]:
    """The address of a server that answers each request with such pieces, or hangs up where there are none."""

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):  # whoever reads may have had enough
            while left and connection.recv(2**16):
                pieces = left.pop(0)
                for piece in pieces:
                    connection.sendall(piece)
                    time.sleep(pause)
                if not pieces:
                    break

    def listen() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    left = list(replies)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=listen, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v2"
        listener.shutdown(socket.SHUT_RDWR)


def read(*pieces: bytes, seconds: float = 5.0, pause: float = 0.0) -> lines.Reply:
    with saying(pieces, pause=pause) as url:
        return lines.Connections(seconds).take(url).ask(url, (b"tokens",), {})


@pytest.mark.parametrize(
    ("data", "status", "body"),
    [
        (PLAIN, 200, b"hello"),
        (PLAIN.replace(b"200 OK", b"503 "), 503, b"hello"),
        (PLAIN.replace(b"200 OK", b"429"), 429, b"hello"),
        (b"HTTP/1.1 200 OK\r\ncontent-length:0\r\n\r\n", 200, b""),
        (PLAIN + PLAIN, 200, b"hello"),
        (PLAIN.replace(b"X-Kind: plain", b"Connection: Close"), 200, b"hello"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN, 200, b"hello"),
        (CHUNKED + b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", 200, b"hello"),
        (b"HTTP/1.1 200 OK\r\n\r\nhello", 200, b"hello"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", 200, b"hello"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (PLAIN.replace(b"plain", b"folded\r\n twice"), 200, b"hello"),
        (PLAIN.replace(b"plain", b"1\r\nX-Kind: 2"), 200, b"hello"),
        (b"HTTP/1.1 200 OK\nContent-Length: 5\n\nhello", 200, b"hello"),
    ],
)
def test_replies_are_read_whole_or_in_pieces(data: bytes, status: int, body: bytes) -> None:
    for pieces in ((data,), tuple(data[place : place + 1] for place in range(len(data)))):
        reply = read(*pieces)
        assert (reply.status, reply.body) == (status, body)
        assert reply.headers.get("other") is None
    if data == PLAIN:
        assert reply.headers["x-kind"] == "plain"


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (b"", ConnectionLost, "before an answer came"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", BadAnswer, "does not speak HTTP"),
        (b"HTTP/1.1 2xx OK\r\nContent-Length: 5\r\n\r\nhello", BadAnswer, "does not speak HTTP"),
        (PLAIN[:-1], ConnectionLost, "before the answer did"),
        (PLAIN.replace(b": 5", b": 500000"), ConnectionLost, "before the answer did"),
        (PLAIN.replace(b": 5", b": " + b"9" * 12), BadAnswer, "longer than any"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 80_000, KeyholeError, ""),
        (CHUNKED + b"ff\r\nhello", ConnectionLost, "before the answer did"),
        (CHUNKED + b"nonsense", ConnectionLost, "lost"),
    ],
)
def test_what_is_no_reply_has_a_name(data: bytes, error: type[KeyholeError], said: str) -> None:
    with pytest.raises(lines.Trouble) as caught:
        read(data)
    assert isinstance(caught.value.error, error)
    assert said in str(caught.value)


@pytest.mark.parametrize("data", [PLAIN, b"HTTP/1.1 200 OK\r\n\r\nhello"])
def test_a_reply_that_takes_too_long_in_all(data: bytes) -> None:
    """Every single read is in time, be it of the head or of the body; the whole is not."""
    with pytest.raises(lines.Trouble, match="timed out"):
        read(*(data[place : place + 1] for place in range(len(data))), seconds=0.1, pause=0.01)


def test_a_body_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LARGEST_ANSWER", 1000)
    with pytest.raises(lines.Trouble, match="longer than any"):
        read(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 2000)


def test_what_follows_an_answer_is_not_taken_for_the_next() -> None:
    other = PLAIN.replace(b"hello", b"other")
    with saying((PLAIN + other,), (PLAIN,)) as url:
        connection = lines.Connections(5.0).take(url)
        for _ in range(2):
            assert connection.ask(url, (b"tokens",), {}).body == b"hello"


def test_a_request_is_sent_once() -> None:
    """libcurl sends a request again where a connection that was open ends; who asks again here is who counts it."""
    with saying((PLAIN,), (), (PLAIN,)) as url:
        connection = lines.Connections(5.0).take(url)
        assert connection.ask(url, (b"tokens",), {}).body == b"hello"
        with pytest.raises(lines.Trouble, match="lost"):
            connection.ask(url, (b"tokens",), {})


def test_closing_ends_a_request_under_way() -> None:
    with saying((b"HTTP/1.1 200 OK\r\n", b""), pause=9.0) as url:
        connections = lines.Connections(9.0)
        threading.Timer(0.1, connections.close).start()
        began = time.perf_counter()
        with pytest.raises(lines.Trouble, match="lost"):
            connections.take(url).ask(url, (b"tokens",), {})
        assert time.perf_counter() - began < 4
        with pytest.raises(lines.Trouble, match="closed"):
            connections.take(url)


@pytest.mark.parametrize("headers", [{"X": "a\r\nY: b"}, {"X\r\nY": "b"}, {"X: y": "b"}, {"": "b"}, {"X": "ä"}])
def test_nothing_is_smuggled_into_a_request(headers: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="header"):
        RestOracle("http://127.0.0.1:1/embed", 3, headers=headers)


@pytest.mark.parametrize("path", ["v2 HTTP/1.1\r\nX: y", "v2/a b", "v2/ä"])
def test_nothing_is_smuggled_into_an_address(path: str) -> None:
    with pytest.raises(UsageError, match="no address"):
        RestOracle(f"http://127.0.0.1:1/{path}", 3)
