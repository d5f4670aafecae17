"""The live page: its server asked over plain HTTP, honestly and not, and the page itself in a real browser."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

import keyhole as kh
from keyhole.cli import main
from keyhole.live import LiveServer, Runs
from keyhole.live.access import refused
from keyhole.live.form import InvalidForm, read_form
from keyhole.live.heatmap import MOST_CELLS, pictures
from keyhole.live.run import carry_out
from keyhole.progress import Silent
from keyhole.queries import Sketch
from keyhole.runs.settings import Settings
from support.browsers import ARGUMENTS, ARTEFACTS, chromium

QUICK = {"family": "single-head", "width": "6", "rate": "1000000"}
# 274 questions and 32 for the certificate, seven seconds: time enough to stop it on a busy machine. `hurry` ends that.
SLOW = {"family": "single-head", "width": "16", "rate": "40"}
PATIENCE = 20.0


@contextmanager
def serving(folder: Path) -> Iterator[LiveServer]:
    with LiveServer(Runs(folder, reports=False)) as server:  # which take longer than these runs
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with serving(tmp_path / "runs") as made:
        yield made


def client(server: LiveServer) -> httpx.Client:
    """What the page itself sends."""
    return httpx.Client(base_url=server.address, headers={"Origin": server.address}, trust_env=False, timeout=PATIENCE)


def start(server: LiveServer, form: dict[str, Any]) -> str:
    with client(server) as browser:
        reply = browser.post("/api/runs", json=form)
    assert reply.status_code == 201, reply.text
    identity = reply.json()["id"]
    assert isinstance(identity, str)
    return identity


def hurry(server: LiveServer, identity: str) -> None:
    """From its next resumption on the box of a run answers at once."""
    server.runs.get(identity)._work = carry_out


def until(happened: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (found := happened()):
        assert time.monotonic() < deadline, f"waited {PATIENCE} s for {what}"
        time.sleep(0.01)
    return found


# --- who may ask ------------------------------------------------------------------------------------------------------

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
        "/api/compare?first=../../secret.txt&second=/etc/passwd",
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


# --- the form ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"family": "no-such"}, "family"),
        ({}, "family"),
        ([], "family"),
        ({"family": ["single-head"]}, "family"),
        ({"family": "served"}, "family"),  # only where a box is served
        ({**QUICK, "width": "0"}, "width"),
        ({**QUICK, "width": "-3"}, "width"),
        ({**QUICK, "width": "1e99"}, "width"),
        ({**QUICK, "width": "wide"}, "width"),
        ({**QUICK, "width": "9" * 5000}, "width"),
        ({**QUICK, "width": 7.5}, "width"),
        ({**QUICK, "width": True}, "width"),
        ({**QUICK, "width": {"a": 1}}, "width"),
        ({**QUICK, "width": "100000"}, "width"),
        ({**QUICK, "rank": "7"}, "rank"),
        ({**QUICK, "noise": "nan"}, "noise"),
        ({**QUICK, "noise": "-1"}, "noise"),
        ({**QUICK, "noise": "inf"}, "noise"),
        ({**QUICK, "rate": "0"}, "rate"),
        ({**QUICK, "budget": "1.5"}, "budget"),
        ({**QUICK, "seed": "<script>alert(1)</script>"}, "seed"),
        ({**QUICK, "heads": "3"}, "heads"),
        ({**QUICK, "target": "python:/tmp/evil.py:make"}, "target"),
        ({"family": "multi-head", "noise": "0.1"}, "noise"),
    ],
)
def test_nonsense_is_refused_field_by_field(form: Any, field: str) -> None:
    with pytest.raises(InvalidForm) as caught:
        read_form(form)
    assert list(caught.value.fields) == [field]


def test_a_form_names_a_demo_and_nothing_else() -> None:
    wish = read_form({"family": "multi-head", "width": 6, "heads": " 2 ", "seed": "5", "budget": "", "rank": None})
    assert wish.target == "demo:multi-head?heads=2&width=6&norm=1&seed=5"
    assert (wish.seed, wish.budget, wish.rate, wish.method) == (5, None, 400, "auto")
    assert read_form({"family": "relu-net", "noise": "0.01"}).method == "relu-net"
    assert read_form({"family": "single-head", "noise": "0.01"}).method == "auto"


# --- runs -------------------------------------------------------------------------------------------------------------


def snapshot(server: LiveServer, identity: str) -> dict[str, Any]:
    with client(server) as browser:
        reply = browser.get(f"/api/runs/{identity}")
    assert reply.status_code == 200
    found = reply.json()
    assert isinstance(found, dict)
    return found


def act(server: LiveServer, identity: str, what: str, body: Any = None) -> httpx.Response:
    with client(server) as browser:
        return browser.post(f"/api/runs/{identity}/{what}", json={} if body is None else body)


def test_events_begin_with_everything_and_a_lost_browser_stops_nothing(server: LiveServer) -> None:
    identity = start(server, {**SLOW, "rate": "200"})
    seen: dict[str, dict[str, Any]] = {}
    with client(server) as browser, browser.stream("GET", f"/api/events?run={identity}") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        event = ""
        for line in stream.iter_lines():
            name, _, rest = line.partition(": ")
            if name == "event":
                event = rest
            elif name == "id":
                assert rest
            elif name == "data":
                seen[event] = json.loads(rest)
            if "run" in seen and seen["run"]["progress"]["queries"] > 20 and seen["pictures"]["pictures"]:
                break  # and the browser is gone
    assert {"runs", "run", "pictures"} <= set(seen)
    assert [each["id"] for each in seen["runs"]["runs"]] == [identity]
    progress = seen["run"]["progress"]
    assert sum(stage["new"] for stage in progress["stages"]) == progress["queries"] == progress["new"]
    until(lambda: server.runs.get(identity).state == "done", "the run to end without a browser")
    assert snapshot(server, identity)["outcome"] == "CERTIFIED"


def test_a_stopped_run_pays_nothing_twice_across_servers(tmp_path: Path) -> None:
    """RunStopped on the page, then by the end of the server, then found again by the next one."""
    paid = []
    with serving(tmp_path / "runs") as server:
        identity = start(server, SLOW)
        until(lambda: snapshot(server, identity)["progress"]["new"] > 20, "some answers")
        assert act(server, identity, "stop").status_code == 200
        until(lambda: server.runs.get(identity).state == "stopped", "the stop")
        paid.append(snapshot(server, identity)["progress"]["new"])
        assert act(server, identity, "stop").status_code == 409
        assert act(server, identity, "resume").status_code == 200
        assert act(server, identity, "resume").status_code == 409
        until(lambda: snapshot(server, identity)["progress"]["new"] > 20, "more answers")
    assert server.runs.get(identity).state == "stopped"
    paid.append(server.runs.get(identity).record.snapshot()["new"])
    with serving(tmp_path / "runs") as server:
        found = snapshot(server, identity)
        assert (found["state"], found["why_not_resumable"]) == ("stopped", "")
        hurry(server, identity)
        assert act(server, identity, "resume").status_code == 200
        until(lambda: server.runs.get(identity).state == "done", "the end")
        found = snapshot(server, identity)
    result, progress = found["ending"]["result"], found["progress"]
    assert result["certified"]
    assert progress["journal"] == sum(paid)
    assert sum(paid) + progress["new"] == result["queries"] + result["heldout_queries"]
    with serving(tmp_path / "runs") as server:  # what is done is found again with its figures
        again = snapshot(server, identity)
        assert (again["state"], again["outcome"]) == ("done", "CERTIFIED")
        assert again["ending"]["distance"] < 1e-10
        assert act(server, identity, "resume").status_code == 409


def test_a_spent_budget_is_resumed_with_a_larger_one(server: LiveServer) -> None:
    identity = start(server, {**QUICK, "budget": "20"})
    until(lambda: server.runs.get(identity).state == "done", "the budget to end")
    found = snapshot(server, identity)
    assert (found["outcome"], found["least_budget"]) == ("BUDGET_EXHAUSTED", 21)
    assert act(server, identity, "resume", {"budget": "20"}).status_code == 422
    assert act(server, identity, "resume", {"budget": "plenty"}).status_code == 422
    assert act(server, identity, "resume", {"budget": "500"}).status_code == 200
    until(lambda: server.runs.get(identity).state == "done", "the end")
    found = snapshot(server, identity)
    assert (found["outcome"], found["progress"]["journal"]) == ("CERTIFIED", 20)
    assert "--budget 500" in found["command"]


def test_a_folder_that_takes_no_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with serving(tmp_path / "runs") as server, client(server) as browser:
        reply = browser.post("/api/runs", json=QUICK)
        assert reply.status_code == 507
        assert "--runs" in reply.json()["error"]
        assert browser.get("/api/runs").json()["runs"] == []


def test_a_box_that_raises_whatever_ends_its_run_in_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def work(*_: object) -> Any:
        raise ZeroDivisionError("of the box's own making")

    run = Runs(tmp_path).watch("a box", Settings("python:box.py:make"), work)
    run.begin()
    assert run.wait(PATIENCE)
    assert (run.state, run.message) == ("failed", "ZeroDivisionError: of the box's own making")
    assert isinstance(run.error, ZeroDivisionError)
    assert "Traceback" in caplog.text  # whoever runs the server can find out where


def test_too_many_runs_at_once_are_refused(server: LiveServer) -> None:
    for _ in range(4):
        start(server, {**SLOW, "rate": "10"})
    with client(server) as browser:
        reply = browser.post("/api/runs", json=QUICK)
    assert reply.status_code == 429
    assert "stop one" in reply.json()["error"]


def test_two_runs_are_compared_modulo_symmetry(server: LiveServer) -> None:
    heads = {"family": "multi-head", "width": "5", "heads": "2", "rate": "1000000"}
    names = [start(server, form) for form in (heads, heads, QUICK, {**QUICK, "budget": "3"})]
    for name in names:
        until(lambda name=name: server.runs.get(name).state == "done", "runs to end")
    with client(server) as browser:
        same = browser.get("/api/compare", params={"first": names[0], "second": names[1]}).json()
        other = browser.get("/api/compare", params={"first": names[0], "second": names[2]}).json()
        nothing = browser.get("/api/compare", params={"first": names[2], "second": names[3]}).json()
        assert browser.get("/api/compare", params={"first": names[0], "second": "no-such"}).status_code == 404
    assert same["distance"] < 1e-8
    assert [len(drawn) for drawn in same["pictures"]] == [2, 2]
    assert [run["outcome"] for run in same["runs"]] == ["CERTIFIED", "CERTIFIED"]
    assert other["distance"] is None
    assert "cannot compare" in other["note"]
    assert nothing["distance"] is None
    assert names[3] in nothing["note"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("run.json", b"{", "damaged"),
        ("run.json", b"[]", "no keyhole-run"),
        ("run.json", b'{"format": "keyhole-run", "version": 99}', "newer version"),
        ("run.json", b'{"format": "keyhole-run", "version": 1}', "damaged"),
        ("live.json", b"\xff\xfe", "damaged"),
        ("live.json", b'{"format": "keyhole-live", "version": 7}', "newer version"),
        ("live.json", b'{"format": "keyhole-live", "version": 1, "target": "demo:single-head"}', "damaged"),
        ("live.json", b'{"format": "keyhole-live", "version": 1, "target": "demo:single-head", "label": 3}', "damaged"),
        ("params.safetensors", b"\x00" * 20, "params.safetensors"),
    ],
)
def test_a_folder_that_makes_no_sense_is_named_and_left_alone(
    finished: Path, tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    folder = tmp_path / "runs" / finished.name
    folder.mkdir(parents=True)
    for path in finished.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / name).write_bytes(content)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (run,) = Runs(tmp_path / "runs").all()
    assert run.state == "unreadable"
    assert said in run.message, run.message
    assert "Nothing in it was changed" in run.message
    assert run.snapshot()["why_not_resumable"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended."""
    runs = Runs(tmp_path_factory.mktemp("finished"), reports=False)
    run = runs.start(QUICK)
    assert run.wait(PATIENCE)
    assert run.state == "done", run.message
    assert run.settings.out is not None
    return run.settings.out


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("live.json", {"rate": 0}),
        ("live.json", {"rate": None}),
        ("live.json", {"seed": "none"}),
        ("live.json", {"label": ["<b>"]}),
        ("live.json", {"budget": -1}),
        ("run.json", {"distance": "far"}),
        ("run.json", {"heldout": {"predictions": [1.0], "answers": []}}),
        ("run.json", {"heldout": {"predictions": ["<b>"], "answers": ["<b>"]}}),
        ("run.json", {"result": {"outcome": "SPLENDID"}}),
        ("run.json", {"result": None}),
    ],
)
def test_values_that_cannot_be_meant_are_damage(
    finished: Path, tmp_path: Path, file: str, change: dict[str, Any]
) -> None:
    folder = tmp_path / "runs" / finished.name
    folder.mkdir(parents=True)
    for path in finished.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    (run,) = Runs(tmp_path / "runs").all()
    assert run.state == "unreadable"
    assert "damaged" in run.message


def test_a_folder_may_not_name_code_to_run(finished: Path, tmp_path: Path) -> None:
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    folder = tmp_path / "runs" / "evil-run"
    folder.mkdir(parents=True)
    about = {**json.loads((finished / "live.json").read_text()), "target": f"python:{evil}:make"}
    (folder / "live.json").write_text(json.dumps(about))
    (run,) = Runs(tmp_path / "runs").all()
    assert "does not open" in run.message
    with pytest.raises(kh.KeyholeError):
        run.begin()
    assert not (tmp_path / "ran").exists()


# --- what is known so far ---------------------------------------------------------------------------------------------


class Looking(Silent):
    """Takes every sketch it is offered."""

    def __init__(self) -> None:
        self.seen: list[Sketch] = []
        self.discards = 0

    def sketched(self, so_far: Callable[[], Sketch | None]) -> None:
        found = so_far()
        if found is not None:
            self.seen.append(found)

    def discarded(self) -> None:
        self.seen.clear()
        self.discards += 1


@pytest.mark.parametrize("rank", [3, 8])
def test_sketches_are_the_score_on_what_was_read(rng: np.random.Generator, rank: int) -> None:
    """Directions are orthonormal, so that a sketch is a projection of the truth and leaves the rest of its norm."""
    head = kh.SingleHead(rng.standard_normal((8, rank)) @ rng.standard_normal((rank, 8)), rng.standard_normal(8))
    plain = kh.recover(kh.FunctionOracle(head, width=8))
    looking = Looking()
    watched = kh.recover(kh.FunctionOracle(head, width=8), observer=looking)
    assert np.array_equal(watched.params.score, plain.params.score)  # looking changes nothing, to the last bit
    assert watched.stats.stages == plain.stats.stages
    known = [sketch.known for sketch in looking.seen]
    assert known == sorted(known)
    assert known[-1] == 1.0
    assert len(set(known)) >= rank
    whole = np.linalg.norm(head.score) ** 2
    for sketch in looking.seen:
        found = sketch.matrices["score"]
        assert np.linalg.norm(found - head.score) ** 2 + np.linalg.norm(found) ** 2 == pytest.approx(whole, rel=1e-8)
    errors = [sketch.error for sketch in looking.seen if sketch.known < 1]
    assert 0 < max(errors) < 1e-6
    fresh = [list(sketch.heldout) for sketch in looking.seen if sketch.heldout]
    assert all(later[: len(sooner)] == sooner for sooner, later in pairwise(fresh))  # one plan after the other
    assert 0 < max(fresh[-1]) <= watched.certificate.worst_error


def test_sketches_of_a_mistaken_family_are_discarded() -> None:
    rng = np.random.default_rng(5)
    heads = [kh.SingleHead(rng.standard_normal((5, 5)) / 3, rng.standard_normal(5)) for _ in range(2)]
    looking = Looking()
    result = kh.recover(kh.FunctionOracle(kh.MultiHead(heads), width=5), observer=looking)
    assert result.method == "multi-head"
    assert looking.discards == 1
    assert list(looking.seen[-1].matrices) == ["score of head 1", "score of head 2"]
    early = [sketch.matrices for sketch in looking.seen if 0.5 < sketch.known < 1][-1]
    for found in (early["score of head 1"], early["score of head 2"]):  # on a hyperplane of its last tokens
        rests = [np.linalg.svdvals(found - head.score) for head in heads]
        assert min(rest[1] for rest in rests) < 1e-6


def test_pictures_are_small_and_keep_what_stands_out() -> None:
    matrix = np.zeros((700, 300))
    matrix[650, 200] = -4.0
    matrix[0, 0] = 2.0
    matrix[5, 5] = np.nan
    (drawn,) = pictures({"score": matrix})
    assert (drawn["shape"], drawn["cells"], drawn["largest"]) == ([700, 300], [MOST_CELLS, MOST_CELLS], 4.0)
    (empty,) = pictures({"nothing": np.zeros((0, 3))})
    assert (empty["cells"], empty["data"]) == ([0, 3], "")


# --- commands ---------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_named_with_the_remedy(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["serve", "--ui"], ["recover", "demo:single-head?width=3", "--watch"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--port", str(server.port)])
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert f"port {server.port}" in said
        assert "--port" in said.partition(";")[2]


def test_a_page_alone_or_a_box_must_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve"])
    assert ended.value.code == 2
    assert "keyhole serve --ui" in capsys.readouterr().err


BOX = """
import time
import numpy as np
import keyhole as kh

rng = np.random.default_rng(3)
HEAD = kh.SingleHead(rng.standard_normal((12, 12)), rng.standard_normal(12))

def make():
    def answer(tokens):
        time.sleep(0.02 * len(tokens))
        return HEAD(tokens)
    return kh.FunctionOracle(answer, width=12, batch_limit=4, name="slow")
"""


@contextmanager
def command(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    line = [sys.executable, "-m", "keyhole", *words]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_serve_ui_beside_a_box(tmp_path: Path) -> None:
    (tmp_path / "box.py").write_text(BOX)
    with command(tmp_path, "serve", "python:box.py:make", "--ui", "--json") as process:
        assert process.stdout is not None
        about = json.loads(process.stdout.readline())
        headers = {"Origin": about["page"]}
        with httpx.Client(base_url=about["page"], trust_env=False, timeout=PATIENCE, headers=headers) as browser:
            other = {"Host": "proxy.example"}  # clients of the box may come by any name, those of the page not
            assert browser.get("/v2/models/box-make", headers=other).status_code == 200
            assert browser.get("/", headers=other).status_code == 421
            assert browser.get("/api/form").json()["families"][0]["name"] == "served"
            made = browser.post("/api/runs", json={"family": "served", "rate": "1000"})
            assert made.status_code == 201
            path = f"/api/runs/{made.json()['id']}"
            until(lambda: browser.get(path).json()["progress"]["new"] > 8, "answers of the served box")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (0, ""), err
    assert (tmp_path / "runs" / made.json()["id"] / "journal.db").exists()


def test_serve_ui_alone_ends_cleanly_and_says_what_is_left(tmp_path: Path) -> None:
    with command(tmp_path, "serve", "--ui", "--runs", "kept") as process:
        assert process.stdout is not None
        page = process.stdout.readline().split()[1]
        with httpx.Client(base_url=page, trust_env=False, timeout=PATIENCE, headers={"Origin": page}) as browser:
            made = browser.post("/api/runs", json=SLOW).json()["id"]
            with browser.stream("GET", f"/api/events?run={made}") as stream:  # a page that is open does not keep it
                lines = stream.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                told = list(lines)
        out, err = process.communicate(timeout=PATIENCE)
    assert "event: end" in told
    assert (process.returncode, err) == (0, "")
    assert "1 runs in kept; 1 unfinished, to be resumed on the page" in out
    (found,) = Runs(tmp_path / "kept").all()
    assert (found.id, found.state) == (made, "stopped")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    for command in (["serve", "--ui"], ["recover", "demo:single-head?width=3", "--watch"]):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 2
        assert "pip install 'keyhole[serve]'" in capsys.readouterr().err


# --- the page in a browser --------------------------------------------------------------------------------------------


def test_a_browser_that_cannot_be_had_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.browsers.shutil.which", lambda _: None)
    with pytest.raises(
        pytest.fail.Exception, match="need chromium, and could not install it: apt-get install chromium"
    ):
        chromium()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=1000 * PATIENCE)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        try:
            yield found
        finally:
            found.close()


class Tab:
    """A page, what its console said, and its pictures."""

    def __init__(self, browser: Browser, address: str, **options: Any) -> None:
        self.context = browser.new_context(viewport=options.pop("viewport", {"width": 1360, "height": 1000}), **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * PATIENCE)
        self.said: list[str] = []
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", self._asked)
        self.address = address
        self.page.goto(address)
        expect(self.page.locator("#field-width")).to_be_visible()
        expect(self.page.locator("#connection")).to_have_text("live")

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.said.append(message.text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(self.address.partition("/#")[0]):
            self.said.append(f"asked for {request.url}")

    def picture(self, name: str) -> None:
        ARTEFACTS.mkdir(exist_ok=True)
        self.page.screenshot(path=ARTEFACTS / f"live-{name}.png", full_page=True)

    def text(self, name: str) -> str:
        return self.page.locator(f"#{name}").inner_text()

    def fill(self, **fields: str) -> None:
        self.page.select_option("#family", fields.pop("family"))
        for name, value in fields.items():
            self.page.fill(f"#field-{name}", value)

    def begin(self, form: dict[str, str]) -> None:
        self.fill(**form)
        self.page.click("#form button")


@pytest.fixture
def tabs(browser: Browser, server: LiveServer) -> Iterator[Callable[..., Tab]]:
    opened: list[Tab] = []

    def tab(address: str | None = None, **options: Any) -> Tab:
        opened.append(Tab(browser, address or server.address, **options))
        return opened[-1]

    yield tab
    for each in opened:
        each.context.close()
        assert each.said == [], "the console of the page must stay empty"


def wide(page: Page) -> int:
    found = page.evaluate("document.documentElement.scrollWidth")
    assert isinstance(found, int)
    return found


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_start_watch_stop_resume(tabs: Callable[..., Tab], server: LiveServer) -> None:
    tab = tabs()
    tab.picture("empty")
    tab.begin({"family": "single-head", "width": "20", "rate": "60"})
    page = tab.page
    expect(page.locator("#run-state")).to_have_text("running")
    expect(page.locator("#stages [aria-current] .name")).to_have_text(re.compile("directions|columns"))
    expect(page.locator("#pictures canvas[role=img]")).to_have_attribute("aria-label", re.compile("^score, 20 by 20"))
    expect(page.locator("#matrix-note")).to_contain_text("% has been read so far")
    expect(page.locator("#t-error")).to_contain_text("± ")
    before = number(tab.text("t-queries"))
    expect(page.locator("#t-queries")).not_to_have_text(str(before))
    tab.picture("running")
    page.click("#stop")
    expect(page.locator("#run-state")).to_have_text("stopped")
    expect(page.locator("#resume")).to_be_focused()
    kept = number(tab.text("t-queries"))
    assert kept > before
    assert f"{kept} answers are kept" in tab.text("action-note")
    tab.picture("stopped")
    hurry(server, tab.text("run-id"))
    page.click("#resume")
    expect(page.locator("#run-state")).to_have_text("certified")
    assert number(tab.text("t-journal")) == kept
    assert "relative distance" in tab.text("outcome-message")
    expect(page.locator("#heldout circle")).to_have_count(32)
    expect(page.locator("#files a")).to_have_count(3)
    (run,) = server.runs.all()
    result = run.snapshot()["ending"]["result"]
    assert number(tab.text("t-queries")) == result["queries"]
    tab.picture("certified")


def test_a_box_of_another_family_shows_its_questions_first(tabs: Callable[..., Tab], server: LiveServer) -> None:
    tab = tabs(color_scheme="dark")
    tab.begin({"family": "relu-net", "width": "6", "neurons": "8", "rate": "60"})
    expect(tab.page.locator("#questions-canvas")).to_be_visible()
    expect(tab.page.locator("#matrix-note")).to_contain_text("only at a later stage")
    expect(tab.page.locator("#stages .again .name")).to_have_text("diagnosis")
    expect(tab.page.locator("#stages .name").last).to_have_text("line")
    tab.picture("questions-dark")
    tab.page.click("#stop")
    expect(tab.page.locator("#run-state")).to_have_text("stopped")
    hurry(server, tab.text("run-id"))
    tab.page.click("#resume")
    expect(tab.page.locator("#run-state")).to_have_text("certified")
    expect(tab.page.locator("#pictures figcaption")).to_contain_text("weights into the neurons")


def test_nonsense_is_said_beside_the_field(browser: Browser, server: LiveServer) -> None:
    tab = Tab(browser, server.address)
    tab.begin({"family": "single-head", "width": "<b>wide</b>", "rank": "3", "noise": "loud"})
    page = tab.page
    expect(page.locator("#error-width")).to_have_text("Must be a whole number from 1 to 256.")
    expect(page.locator("#error-noise")).to_contain_text("Must be a number from 0")
    expect(page.locator("#error-rank")).to_be_empty()
    expect(page.locator("#field-width")).to_be_focused()
    expect(page.locator("#field-width")).to_have_attribute("aria-invalid", "true")
    tab.picture("nonsense")
    assert server.runs.all() == []
    tab.fill(family="single-head", width="4", rate="1000000")
    page.fill("#field-noise", "")
    page.press("#field-width", "Enter")
    expect(page.locator("#run-state")).to_have_text("certified")
    expect(page.locator("#error-width")).to_be_empty()
    # The browser itself notes the refusal; nothing else may be in its console.
    assert [said for said in tab.said if "422" not in said] == []
    assert len(tab.said) == 1
    tab.context.close()


def test_the_keyboard_alone_will_do(tabs: Callable[..., Tab]) -> None:
    tab = tabs()
    page, press = tab.page, tab.page.keyboard.press

    def tab_to(name: str) -> None:
        for _ in range(60):
            if page.evaluate("document.activeElement.id || document.activeElement.textContent") == name:
                style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                assert style != "none", f"the focus on {name} does not show"
                return
            press("Tab")
        pytest.fail(f"Tab does not lead to {name}")

    tab_to("family")
    press("ArrowDown")  # several heads
    expect(page.locator("#field-heads")).to_be_visible()
    press("ArrowUp")
    tab_to("field-width")
    press("Control+A")
    page.keyboard.type("14")
    tab_to("field-rate")
    press("Control+A")
    page.keyboard.type("30")
    press("Enter")
    expect(page.locator("#run-state")).to_have_text("running")
    tab_to("stop")
    press("Enter")
    expect(page.locator("#resume")).to_be_focused()
    press("Space")
    expect(page.locator("#stop")).to_be_focused()
    expect(page.locator("#announce")).to_contain_text("running")
    press("Enter")
    expect(page.locator("#run-state")).to_have_text("stopped")
    # Every control has a name for those who cannot see it.
    for control in page.locator("input:visible, select:visible, button:visible, a:visible").all():
        named = control.evaluate("node => (node.labels?.[0] ?? node).textContent.trim()")
        assert named, control.evaluate("node => node.outerHTML")


def test_two_tabs_and_a_reload_agree(tabs: Callable[..., Tab], server: LiveServer) -> None:
    first = tabs()
    first.begin(SLOW)
    expect(first.page.locator("#run-state")).to_have_text("running")
    second = tabs(first.page.url)
    expect(second.page.locator("#run-state")).to_have_text("running")
    second.page.click("#stop")
    for tab in (first, second):
        expect(tab.page.locator("#run-state")).to_have_text("stopped")
    shown = ("run-id", "run-state", "t-queries", "t-journal", "t-time", "stages", "matrix-note", "command")
    assert [first.text(name) for name in shown] == [second.text(name) for name in shown]
    before = [first.text(name) for name in shown]
    first.page.reload()
    expect(first.page.locator("#run-state")).to_have_text("stopped")
    assert [first.text(name) for name in shown] == before
    assert len(server.runs.all()) == 1


def test_compare_on_a_phone_too(tabs: Callable[..., Tab], server: LiveServer) -> None:
    for form in (QUICK, QUICK, {**QUICK, "width": "8", "rank": "2"}):
        identity = start(server, form)
        until(lambda name=identity: server.runs.get(name).state == "done", "runs to end")
    latest, twin, first = (run.id for run in server.runs.all())
    tab = tabs()
    tab.page.click("#to-compare")
    expect(tab.page.locator("#apart")).to_contain_text("No distance")
    tab.page.select_option("#first", first)
    tab.page.select_option("#second", twin)
    expect(tab.page.locator("#apart")).to_contain_text("What they found is")
    assert float(tab.page.locator("#apart strong").inner_text()) < 1e-10
    rows = dict(row.split("\t", 1) for row in tab.page.locator("#rows tr").all_inner_texts())
    assert rows["Outcome"] == "certified\tcertified"
    assert rows["Queries over that"] == "1.048 ×\t1.048 ×"
    expect(tab.page.locator("#compare canvas[role=img]")).to_have_count(2)
    tab.picture("compare")
    tab.page.reload()
    expect(tab.page.locator("#apart")).to_contain_text("What they found is")
    tab.page.click("#leave-compare")
    expect(tab.page.locator("#run-id")).to_have_text(latest)
    phone = tabs(viewport={"width": 360, "height": 740}, color_scheme="dark")
    expect(phone.page.locator("#run-state")).to_have_text("certified")
    assert wide(phone.page) <= 360
    phone.picture("phone-dark")
    phone.page.click("#to-compare")
    expect(phone.page.locator("#rows tr")).to_have_count(11)
    assert wide(phone.page) <= 360
    phone.picture("phone-compare-dark")


def test_what_is_shown_stays_text(browser: Browser, finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "evil-words"
    folder.mkdir(parents=True)
    for path in finished.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    evil = "<img src=x onerror=alert(1)><script>document.title='owned'</script>"
    about = json.loads((folder / "live.json").read_text())
    (folder / "live.json").write_text(json.dumps({**about, "label": evil}))
    result = json.loads((folder / "run.json").read_text())
    result["result"]["message"] = evil
    (folder / "run.json").write_text(json.dumps(result))
    with serving(tmp_path / "runs") as server:
        tab = Tab(browser, server.address)
        expect(tab.page.locator("#run-title")).to_have_text(evil)
        expect(tab.page.locator("#outcome-message")).to_contain_text(evil)
        assert tab.page.locator("main img, main script, nav img").count() == 0
        assert "owned" not in tab.page.title()
        assert tab.said == []
        server.stop()
        expect(tab.page.locator("#connection")).to_have_text("the server has ended")
        tab.context.close()


def test_a_report_follows_and_opens(browser: Browser, tmp_path: Path) -> None:
    with LiveServer(Runs(tmp_path)) as server:
        tab = Tab(browser, server.address)
        tab.begin(QUICK)
        expect(tab.page.locator("#run-state")).to_have_text("certified")
        tab.page.click("#files a:text('report.html')")
        expect(tab.page.locator("h1")).to_be_visible()
        assert tab.page.url.endswith("/files/report.html")
        assert tab.page.locator("img, svg").count() > 2
        tab.picture("report")
        assert tab.said == []
        tab.context.close()


def test_watch_a_run_of_the_command_line(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "box.py").write_text(BOX)
    words = ["recover", "python:box.py:make", "--journal", "answers.db", "--out", "found"]
    with command(tmp_path, *words, "--watch") as process:
        assert process.stderr is not None
        address = process.stderr.readline().split()[-1]
        tab = Tab(browser, address)
        expect(tab.page.locator("#run-title")).to_have_text("python:box.py:make")
        expect(tab.page.locator("#pictures canvas[role=img]")).to_be_visible()
        tab.page.click("#stop")
        expect(tab.page.locator("#run-state")).to_have_text("stopped")
        tab.picture("watched")
        out, err = process.communicate(timeout=PATIENCE)
        tab.context.close()
    assert (process.returncode, out) == (130, "")
    again = shlex.split(err.partition("To resume: keyhole ")[2])
    assert again == words
    done = subprocess.run(
        [sys.executable, "-m", "keyhole", *again, "--watch", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    said = json.loads(done.stdout)
    assert said["certified"]
    assert 0 < said["new_queries"] < said["queries"]
    assert (tmp_path / "found" / "run.json").exists()
