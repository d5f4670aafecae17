"""Runs of the live page: stopped, resumed, compared; and folders that make no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import keyhole as kh
from keyhole.live import LiveServer, Runs
from keyhole.runs.settings import Settings
from support.live import PATIENCE, QUICK, SLOW, act, client, hurry, serving, snapshot, start, until


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
    """Stopped on the page, then by the end of the server, then found again by the next one."""
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


def test_runs_are_compared_modulo_symmetry(server: LiveServer) -> None:
    heads = {"family": "multi-head", "width": "5", "heads": "2", "rate": "1000000"}
    names = [start(server, form) for form in (heads, heads, QUICK, {**QUICK, "budget": "3"})]
    for name in names:
        until(lambda name=name: server.runs.get(name).state == "done", "runs to end")
    with client(server) as browser:

        def compare(*chosen: str) -> Any:
            return browser.get("/api/compare", params={"names": ",".join(chosen)})

        found = compare(*names).json()
        assert compare(names[0], "no-such").status_code == 404
        for wrong in ([], [names[0]], [names[0], names[0]], [f"run-{number}" for number in range(7)]):
            assert compare(*wrong).status_code == 422, wrong
        assert compare(*names[:2]).json()["notes"] == []
    apart = found["distances"]
    assert apart[0][1] == apart[1][0] < 1e-8
    assert [len(drawn) for drawn in found["pictures"]] == [2, 2, 1, 0]
    assert [run["outcome"] for run in found["runs"]] == [*3 * ["CERTIFIED"], "BUDGET_EXHAUSTED"]
    assert [apart[0][2], apart[2][3], apart[0][0]] == [None, None, None]
    notes = "; ".join(found["notes"])
    assert f"{names[0]} and {names[2]}: cannot compare" in notes
    assert f"{names[3]} recovered nothing" in notes


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


def test_tags_and_notes_stay_with_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    with serving(folder) as server:
        identity = start(server, QUICK)
        until(lambda: server.runs.get(identity).state == "done", "the end")
        note = "the first <b>one</b>\nof two"
        assert act(server, identity, "remarks", {"tags": " paper,  width 6,paper, ", "note": note}).status_code == 200
        for wrong in (
            {"tags": "a,b,c,d,e,f,g,h,i"},
            {"tags": "x" * 33},
            {"note": "x" * 2001},
            {"tags": 3},
            {"no": ""},
            [],
        ):
            assert act(server, identity, "remarks", wrong).status_code == 422, wrong
        assert act(server, "no-such", "remarks").status_code == 404
    with serving(folder) as server:
        (found,) = server.runs.brief()["runs"]
        assert (found["tags"], found["note"]) == (("paper", "width 6"), note)
        assert act(server, identity, "remarks").status_code == 200  # nothing more to say
        assert snapshot(server, identity)["tags"] == []
    (folder / identity / "remarks.json").write_text('{"tags": 3}')
    with serving(folder) as server:
        assert "remarks.json is damaged" in snapshot(server, identity)["message"]
        assert act(server, identity, "remarks", {"note": "mend"}).status_code == 409
    assert (folder / identity / "remarks.json").read_text() == '{"tags": 3}'
