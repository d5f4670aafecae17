"""Certificates, and a name for everything that connections raise."""

from __future__ import annotations

import builtins
import http.client
import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest

from keyhole.errors import (
    ServerError,
    ServerUntrusted,
    UsageError,
)
from keyhole.oracles import HttpOracle
from keyhole.oracles.http import connections as lines
from keyhole.serve import Server
from support.served_head import some
from support.serving import faking

pytest.importorskip("orjson")
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


def test_everything_that_connections_raise_has_a_name_here() -> None:
    """A new kind of exception in the standard library, or one that nobody thought of, would fail here."""
    modules = (http.client, ssl, socket, builtins)
    kinds = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    raised = [kind for kind in kinds if issubclass(kind, http.client.HTTPException | OSError)]
    assert len(raised) > 30
    for kind in raised:
        trouble = lines.trouble_of(kind("x"), "http://h")
        assert isinstance(trouble.error, ServerError | UsageError)
        assert type(trouble.error) is not ServerError
        assert str(trouble.error).startswith("http://h: ")
        assert trouble.error.__cause__.__class__ is kind
