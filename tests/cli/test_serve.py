"""The commands that serve a page, alone, beside a box and of a run."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import keyhole as kh
from keyhole.cli import main
from keyhole.live import LiveServer, Runs
from support.live import BOX, PATIENCE, SLOW, command, serving, until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with serving(tmp_path / "runs") as made:
        yield made


def test_a_port_in_use_is_named_with_the_remedy(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["serve", "--ui"], ["recover", "demo:single-head?width=3", "--watch"]):
        with pytest.raises(SystemExit) as ended:
            main([*words, "--port", str(server.port)])
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert f"port {server.port}" in said
        assert "--port" in said.partition(";")[2]


def test_a_page_alone_or_a_box_must_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve"])
    assert ended.value.code == 2
    assert "keyhole serve --ui" in capsys.readouterr().err


def test_serve_ui_beside_a_box(tmp_path: Path) -> None:
    (tmp_path / "box.py").write_text(BOX)
    with command(tmp_path, "serve", "python:box.py:make", "--ui", "--json", "--allow-host", "proxy.example") as process:
        assert process.stdout is not None
        about = json.loads(process.stdout.readline())
        headers = {"Origin": about["page"]}
        with httpx.Client(base_url=about["page"], trust_env=False, timeout=PATIENCE, headers=headers) as browser:
            other = {
                "Host": "proxy.example",
                "Origin": "http://proxy.example",
            }  # allowed for clients of the box only
            assert browser.get("/v2/models/box-make", headers=other).status_code == 200
            assert browser.get("/v2/models/box-make", headers={"Host": "evil.example"}).status_code == 421
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


def test_a_page_recovers_the_boxes_that_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "box.py").write_text(BOX)
    kh.recover("demo:single-head?width=4").params.save(tmp_path / "head.safetensors")  # type: ignore[union-attr]
    boxes = "--box", "file:head.safetensors", "--box", "python:box.py:make"
    with command(tmp_path, "serve", "--ui", "--json", *boxes) as process:
        assert process.stdout is not None
        page = json.loads(process.stdout.readline())["page"]
        with httpx.Client(base_url=page, trust_env=False, timeout=PATIENCE, headers={"Origin": page}) as browser:
            families = {each["name"]: each["label"] for each in browser.get("/api/form").json()["families"]}
            assert "head.safetensors" in families["served"]
            assert "make() in box.py" in families["served-2"]
            assert browser.post("/api/runs", json={"family": "served-3"}).status_code == 422
            made = browser.post("/api/runs", json={"family": "served", "rate": "1000000"})
            path = f"/api/runs/{made.json()['id']}"
            until(lambda: browser.get(path).json()["outcome"] == "CERTIFIED", "the end")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err


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
    for words in (["serve", "--ui"], ["recover", "demo:single-head?width=3", "--watch"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert "pip install 'keyhole[serve]'" in capsys.readouterr().err
