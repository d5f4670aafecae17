"""Who may ask the live page, and for what."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from keyhole.live import LiveServer
from keyhole.live.access import refused
from support.live import PATIENCE, QUICK, client, start, until

HERE = {"host": "127.0.0.1:8000"}
FORM = {**HERE, "origin": "http://127.0.0.1:8000", "content-type": "application/json"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/", HERE, None),
        ("GET", "/", {"host": "localhost:8000"}, None),
        ("GET", "/", {"host": "[::1]:8000"}, None),
        ("GET", "/", {"host": "evil.example:8000"}, 421),  # DNS rebinding
        ("GET", "/", {"host": "127.0.0.1:8001"}, 421),
        ("GET", "/", {"host": "127.0.0.1.evil.example:8000"}, 421),
        ("GET", "/", {"host": "192.168.0.7:8000"}, 421),
        ("GET", "/", {}, 421),
        ("GET", "/", {**HERE, "sec-fetch-site": "cross-site"}, None),  # a link that leads here
        ("GET", "/api/runs", {**HERE, "sec-fetch-site": "cross-site"}, 403),
        ("GET", "/api/runs", {**HERE, "sec-fetch-site": "same-site"}, 403),
        ("GET", "/api/runs", {**HERE, "sec-fetch-site": "same-origin"}, None),
        ("GET", "/api/runs", {**HERE, "origin": "http://evil.example"}, 403),
        ("GET", "/api/runs", {**HERE, "origin": "null"}, 403),
        ("POST", "/api/runs", FORM, None),
        ("POST", "/api/runs", {**FORM, "content-type": "application/json; charset=utf-8"}, None),
        ("POST", "/api/runs", {**FORM, "origin": "http://127.0.0.1:9000"}, 403),
        ("POST", "/api/runs", {**FORM, "origin": "https://127.0.0.1:8000"}, 403),
        ("POST", "/api/runs", {**FORM, "content-type": "text/plain"}, 415),
        ("POST", "/api/runs", {**FORM, "content-type": "application/x-www-form-urlencoded"}, 415),
        ("POST", "/api/runs", {**HERE, "content-type": "application/json"}, 403),
        ("DELETE", "/api/runs", HERE, 403),
    ],
)
def test_only_the_page_itself_may_ask(method: str, path: str, headers: dict[str, str], status: int | None) -> None:
    reason = refused(method, path, headers, "127.0.0.1", 8000)
    assert (None if reason is None else reason[0]) == status


def test_other_hosts_are_asked_by_their_number_or_name() -> None:
    assert refused("GET", "/", {"host": "192.168.0.7:80"}, "0.0.0.0", 80) is None
    assert refused("GET", "/", {"host": "192.168.0.7"}, "0.0.0.0", 80) is None
    assert refused("GET", "/", {"host": "lab.example:80"}, "lab.example", 80) is None
    assert refused("GET", "/", {"host": "evil.example:80"}, "0.0.0.0", 80) is not None


def test_the_server_refuses_what_the_gate_refuses_and_says_so(server: LiveServer) -> None:
    with client(server) as browser:
        for path in ("/", "/page.js", "/page.css", "/icon.svg", "/api/form", "/api/runs", "/nothing"):
            reply = browser.get(path)
            assert reply.status_code == (404 if path == "/nothing" else 200)
            assert "default-src 'none'" in reply.headers["content-security-policy"]
            assert reply.headers["x-content-type-options"] == "nosniff"
            assert "access-control-allow-origin" not in reply.headers
        for path in ("/", "/api/runs", "/api/events"):
            evil = browser.get(path, headers={"Host": f"evil.example:{server.port}"})
            assert evil.status_code == 421
            assert "own address" in evil.json()["error"]
        for headers in ({"Origin": "http://evil.example"}, {"Content-Type": "text/plain"}):
            reply = browser.post("/api/runs", content=json.dumps(QUICK), headers=headers)
            assert reply.status_code in (403, 415)
        long = json.dumps({"family": "x" * 2**17}).encode()
        for content, status in ((b"{{{", 400), (b"[" * 50000, 400), (long, 413)):
            reply = browser.post("/api/runs", content=content, headers={"Content-Type": "application/json"})
            assert reply.status_code == status
            assert reply.json()["error"]
        assert browser.get("/api/runs").json()["runs"] == []


def test_no_path_leads_out_of_a_run_folder(server: LiveServer, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("SECRET")
    identity = start(server, QUICK)
    until(lambda: server.runs.get(identity).state == "done", "the run to end")
    folder = tmp_path / "runs" / identity
    (folder / "report.html").symlink_to(secret)
    files = f"/api/runs/{identity}/files"
    paths = [
        f"{files}/../../../secret.txt",
        f"{files}/..%2f..%2f..%2fsecret.txt",
        f"{files}/%2e%2e/%2e%2e/%2e%2e/secret.txt",
        f"{files}/%2e%2e%2fsecret.txt",
        f"{files}/{str(secret).replace('/', '%2f')}",
        f"{files}/{secret}",
        f"{files}/journal.db",
        f"{files}/live.json",
        f"{files}/run.json%00.txt",
        f"{files}/report.html",  # a link that leads out
        f"/api/runs/..%2f{identity}/files/run.json",
        "/api/runs/../../secret.txt",
        "/api/runs/%2e%2e%2f%2e%2e%2fsecret.txt",
        f"/api/runs/{str(tmp_path).replace('/', '%2f')}/files/secret.txt",
        "/api/compare?names=../../secret.txt,/etc/passwd",
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        "/static/../secret.txt",
    ]
    for path in paths:
        status, body = plain_get(server, path)
        assert status == 404, path
        assert b"SECRET" not in body
        assert b"root:" not in body
    status, body = plain_get(server, f"{files}/run.json")
    assert status == 200
    assert json.loads(body)["result"]["certified"]
    events = plain_get(server, "/api/runs/..%2f..%2fsecret.txt")
    assert events[0] == 404


def plain_get(server: LiveServer, path: str) -> tuple[int, bytes]:
    """Without a client that would tidy up the path."""
    with socket.create_connection((server.host, server.port), timeout=PATIENCE) as line:
        line.sendall(f"GET {path} HTTP/1.1\r\nHost: {server.host}:{server.port}\r\nConnection: close\r\n\r\n".encode())
        reply = b""
        while piece := line.recv(65536):
            reply += piece
    head, _, body = reply.partition(b"\r\n\r\n")
    return int(head.split()[1]), body
