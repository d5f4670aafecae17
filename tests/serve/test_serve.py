"""`keyhole serve`: the protocol as others speak it, limits, and refusals in words."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import Array
from keyhole.cli import main
from keyhole.cli.serve import model_name
from keyhole.errors import OracleError, UsageError
from keyhole.inference_protocol import HEADER_LENGTH, Tensor, encode
from keyhole.oracles import Budgeted, Oracle
from keyhole.serve import Limits, ServedOracle, Server
from keyhole.serve.served_oracle import Rate
from support import targets as t
from support.serving import serving

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")

WIDTH = 4


def head() -> kh.SingleHead:
    rng = np.random.default_rng(5)
    return kh.SingleHead(t.gaussian(rng, WIDTH), t.normal_value(rng, WIDTH))


def box(**options: Any) -> kh.FunctionOracle:
    return kh.FunctionOracle(head(), width=WIDTH, name="a head", **options)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(box(), batch=16, length=10, body=20_000) as running:
        yield running


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with httpx.Client(trust_env=False) as made:
        yield made


def question(tokens: Array | None = None, **changes: Any) -> dict[str, Any]:
    tokens = np.ones((2, 1, WIDTH)) if tokens is None else tokens
    entry = {"name": "tokens", "datatype": "FP64", "shape": list(tokens.shape), "data": tokens.reshape(-1).tolist()}
    return {"id": "7", "inputs": [{**entry, **changes.pop("entry", {})}], **changes}


# --- the protocol ----------------------------------------------------------------------------------------------


def test_health_and_metadata(server: Server, client: Any) -> None:
    base = server.url.partition("/v2")[0]
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/box/ready"):
        assert client.get(base + path).status_code == 200
    about = client.get(f"{base}/v2").json()
    assert about["name"] == "keyhole"
    assert "binary_tensor_data" in about["extensions"]
    model = client.get(server.url).json()
    assert model["inputs"] == [{"name": "tokens", "datatype": "FP64", "shape": [-1, -1, WIDTH]}]
    assert model["outputs"][0]["shape"] == [-1]
    assert client.get(f"{server.url}/config").json()["max_batch_size"] == 16
    (version,) = model["versions"]
    assert client.get(f"{server.url}/versions/{version}").json() == model
    assert client.get(f"{server.url}/versions/{version}/ready").status_code == 200


@pytest.mark.parametrize("binary", [True, False])
def test_an_answer_as_json_or_binary(server: Server, client: Any, binary: bool) -> None:
    tokens = np.random.default_rng(0).standard_normal((3, 2, WIDTH))
    for asked in (True, False):
        wanted = {"name": "answers", "parameters": {"binary_data": binary}}
        body, size = encode({"outputs": [wanted]}, "inputs", Tensor("tokens", "FP64", tokens), binary=asked)
        headers = {} if size is None else {HEADER_LENGTH: str(size)}
        reply = client.post(f"{server.url}/infer", content=body, headers=headers)
        length = reply.headers.get(HEADER_LENGTH)
        assert (length is not None) is binary
        message = json.loads(reply.content if length is None else reply.content[: int(length)])
        assert "id" not in message
        (entry,) = message["outputs"]
        assert (entry["name"], entry["datatype"], entry["shape"]) == ("answers", "FP64", [3])
        values = np.array(entry["data"]) if length is None else np.frombuffer(reply.content[int(length) :])
        np.testing.assert_array_equal(values, head()(tokens))


def test_nested_data_and_whole_numbers_are_numbers_too(server: Server, client: Any) -> None:
    flat = client.post(f"{server.url}/infer", json=question(np.ones((2, 1, WIDTH), dtype=int)))
    nested = client.post(f"{server.url}/infer", json=question(entry={"data": [[[1] * WIDTH]] * 2}))
    assert flat.json()["outputs"] == nested.json()["outputs"]
    assert flat.json()["id"] == "7"


@pytest.mark.parametrize("binary", [True, False])
def test_the_client_of_nvidia(server: Server, binary: bool) -> None:
    triton = pytest.importorskip("tritonclient.http")
    client = triton.InferenceServerClient(f"127.0.0.1:{server.port}")
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("box")
    assert client.get_server_metadata()["name"] == "keyhole"
    assert client.get_model_metadata("box")["inputs"][0]["shape"] == [-1, -1, WIDTH]
    assert client.get_model_config("box")["max_batch_size"] == 16
    tokens = np.random.default_rng(1).standard_normal((5, 2, WIDTH))
    asked = triton.InferInput("tokens", tokens.shape, "FP64")
    asked.set_data_from_numpy(tokens, binary_data=binary)
    for wanted in ([triton.InferRequestedOutput("answers", binary_data=binary)], None):
        found = client.infer("box", [asked], outputs=wanted, request_id="nv", model_version=server.served.version)
        np.testing.assert_array_equal(found.as_numpy("answers"), head()(tokens))
        assert found.get_response()["id"] == "nv"
    with pytest.raises(Exception, match="this server has 'box'") as caught:
        client.infer("fox", [asked])
    assert caught.value.status() == "404"
    client.close()


def test_several_outputs_at_all_positions(client: Any) -> None:
    layer = kh.SingleHead(np.eye(WIDTH), np.ones((WIDTH, 3))).at_all_positions
    with serving(kh.FunctionOracle(layer, width=WIDTH, positions="all")) as running:
        assert running.served.answers.shape == (-1, -1, 3)
        reply = client.post(f"{running.url}/infer", json=question(np.ones((2, 5, WIDTH)))).json()
        assert reply["outputs"][0]["shape"] == [2, 5, 3]


# --- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ({}, 400, "'inputs' is no list"),
        ([], 400, "no object"),
        ({"inputs": []}, 400, "the only input is 'tokens', not none"),
        ({"inputs": [None]}, 400, "without a name"),
        (question(id=7), 400, "id of a request is text"),
        (question(outputs=3), 400, "outputs is a list"),
        (question(outputs=[{"name": "logits"}]), 400, "the only one is 'answers'"),
        (question(outputs=[{}]), 400, "no output 'None'"),
        (question(outputs=[{"name": "answers", "parameters": 3}]), 400, "parameters is an object"),
        (question(outputs=[{"name": "answers", "parameters": {"binary_data": 1}}]), 400, "true or false"),
        (question(outputs=[{"name": "answers", "parameters": {"classification": 3}}]), 400, "not supported"),
        (question(parameters=[]), 400, "parameters is an object"),
        (question(entry={"name": "x"}), 400, "'tokens', not x"),
        (question(entry={"datatype": "FP32"}), 400, "tokens are FP64, not FP32"),
        (question(entry={"datatype": "FP8"}), 400, "known: BOOL"),
        (question(entry={"shape": [2, WIDTH]}), 400, "8 numbers|shape"),
        (question(np.ones((2, WIDTH))), 400, r"\(batch, length, 4\)"),
        (question(np.ones((2, 1, WIDTH + 1))), 400, r"\(batch, length, 4\)"),
        (question(np.ones((0, 1, WIDTH))), 400, r"\(batch, length, 4\)"),
        (question(np.ones((2, 0, WIDTH))), 400, r"\(batch, length, 4\)"),
        (question(np.ones((17, 1, WIDTH))), 413, "at most 16 sequences"),
        (question(np.ones((1, 11, WIDTH))), 400, "at most 10 tokens"),
        (question(entry={"data": [1.0] * 7}), 400, "7 numbers"),
        (question(entry={"data": [1.0] * 7 + ["1"]}), 400, "no FP64 number"),
        (question(entry={"data": [1.0] * 7 + [None]}), 400, "finite"),
        (question(entry={"shape": [2**40, 2**40, 4]}), 400, "numbers of data"),
        (question(entry={"shape": [-2, 1, -4]}), 400, "whole numbers"),
        (question(np.full((1, 2, WIDTH), 1e200)), 422, "shorter"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_words(
    server: Server, client: Any, asked: Any, status: int, said: str
) -> None:
    reply = client.post(f"{server.url}/infer", json=asked)
    assert reply.status_code == status, reply.text
    assert set(reply.json()) == {"error"}
    assert re.search(said, reply.json()["error"]), reply.json()


@pytest.mark.parametrize(
    ("content", "headers", "status", "said"),
    [
        (b"", {}, 400, "no JSON"),
        (b"{", {}, 400, "no JSON"),
        (b"\xff\xfe", {}, 400, "no JSON"),
        (b"[" * 5000, {}, 400, "no JSON"),
        (b"{}", {HEADER_LENGTH: "7"}, 400, HEADER_LENGTH),
        (b"{}", {HEADER_LENGTH: "x"}, 400, HEADER_LENGTH),
        (b"{}", {HEADER_LENGTH: "9" * 50}, 400, HEADER_LENGTH),
        (b"{}", {"Content-Encoding": "gzip"}, 415, "not compressed"),
        (b" " * 20_001, {}, 413, "at most 20000 bytes"),
    ],
)
def test_bodies_that_are_none(
    server: Server, client: Any, content: bytes, headers: dict[str, str], status: int, said: str
) -> None:
    reply = client.post(f"{server.url}/infer", content=content, headers=headers)
    assert reply.status_code == status
    assert said in reply.json()["error"]


def test_a_body_of_unknown_length_is_limited_too(server: Server, client: Any) -> None:
    reply = client.post(f"{server.url}/infer", content=iter([b" " * 9000] * 3))
    assert reply.status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/models/box", 404),
        ("GET", "/v2/models/box/infer", 405),
        ("POST", "/v2", 405),
        ("GET", "/v2/models/fox", 404),
        ("GET", "/v2/models/box/versions/2", 404),
        ("POST", "/v2/models/fox/infer", 404),
        ("POST", "/v2/models/box/versions/0/infer", 404),
        ("GET", "/docs", 404),
    ],
)
def test_pages_that_are_not_there(server: Server, client: Any, method: str, path: str, status: int) -> None:
    reply = client.request(method, server.url.partition("/v2")[0] + path)
    assert reply.status_code == status
    assert set(reply.json()) == {"error"}


def test_a_token_is_wanted_everywhere_but_for_health(client: Any) -> None:
    with serving(box(), token="sesame") as running:
        base = running.url.partition("/v2")[0]
        assert client.get(f"{base}/v2/health/ready").status_code == 200
        for given in (
            {},
            {"Authorization": "sesame"},
            {"Authorization": "Bearer other"},
            {"Authorization": "Bearer ü"},
        ):
            headers = {name: text.encode("latin-1") for name, text in given.items()}
            for path in ("/v2", "/v2/models/box", "/v2/models/box/ready", "/v2/models/box/config", "/v2/models/fox"):
                reply = client.get(base + path, headers=headers)
                assert reply.status_code == 401
                assert reply.headers["www-authenticate"] == "Bearer"
            assert client.post(f"{running.url}/infer", json=question(), headers=headers).status_code == 401
        right = {"Authorization": "Bearer sesame"}
        assert client.post(f"{running.url}/infer", json=question(), headers=right).status_code == 200
        assert running.served.queries == 2


def test_too_many_queries_are_refused_for_a_while(client: Any) -> None:
    with serving(box(), rate=10.0) as running:
        asked = question(np.ones((15, 1, WIDTH)))
        assert client.post(f"{running.url}/infer", json=asked).status_code == 200
        reply = client.post(f"{running.url}/infer", json=asked)
        assert reply.status_code == 429
        assert "10 queries per second" in reply.json()["error"]
        assert reply.headers["retry-after"] == "1"
        pause = float(reply.headers["retry-after-ms"]) / 1000
        assert 0.0 < pause < 0.6
        time.sleep(pause)
        assert client.post(f"{running.url}/infer", json=asked).status_code == 200


def test_a_rate_holds_on_average() -> None:
    now = [0.0]
    rate, passed = Rate(100.0, clock=lambda: now[0]), 0
    while now[0] < 60:
        pause = rate.wait(37)
        passed += 37 if not pause else 0
        now[0] += pause
    assert 100 * 60 <= passed <= 100 * 61 + 37 + 100
    assert Rate(1.0).wait(10**6) == 0.0  # a batch beyond a second's worth is not refused for ever


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://{here}", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Host": "localhost:{port}"}, 200),
        ({"Host": "evil.example:{port}"}, 421),  # DNS rebinding
        ({"Host": "127.0.0.1:1"}, 421),
        ({"Host": "lab.example"}, 200),  # a name that was allowed, behind a proxy or not
        ({"Host": "lab.example:{port}"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
def test_pages_of_other_sites_and_foreign_names_are_refused(client: Any, headers: dict[str, str], status: int) -> None:
    with Server(ServedOracle(box(), "box"), port=0, names=["Lab.example"]) as running:
        here = f"{running.host}:{running.port}"
        filled = {name: text.format(here=here, port=running.port) for name, text in headers.items()}
        for reply in (
            client.get(running.url, headers=filled),
            client.post(f"{running.url}/infer", json=question(), headers=filled),
        ):
            assert reply.status_code == status, reply.text
            assert status == 200 or reply.json()["error"]
            assert "access-control-allow-origin" not in reply.headers


def test_so_many_sequences_in_all(client: Any) -> None:
    with serving(box(), total=5) as running:
        assert [client.post(f"{running.url}/infer", json=question()).status_code for _ in range(3)] == [200, 200, 403]
        single = question(np.ones((1, 1, WIDTH)))
        assert client.post(f"{running.url}/infer", json=single).status_code == 200  # the fifth
        refused = client.post(f"{running.url}/infer", json=single)
        assert (refused.status_code, "0 are left" in refused.json()["error"]) == (403, True)


def test_a_request_that_drips_in_and_a_box_that_thinks_long_are_cut_off(client: Any) -> None:
    def slow(tokens: Array) -> Array:
        time.sleep(0.6 if tokens.shape[0] > 1 else 0.0)
        return tokens[:, 0, 0]

    with serving(kh.FunctionOracle(slow, width=WIDTH), seconds=0.2) as running:

        def dripping() -> Iterator[bytes]:
            yield b"{"
            time.sleep(0.5)
            yield b"}"

        assert client.post(f"{running.url}/infer", content=dripping()).status_code == 408
        assert client.post(f"{running.url}/infer", json=question()).status_code == 504
        assert client.get(f"{running.url}/ready").status_code == 200


def test_whoever_listens_beyond_this_machine_is_told() -> None:
    options = ["--host", "0.0.0.0", "--port", "0", "--json", "--token-env", "SESAME"]
    with command("demo:single-head?width=4", *options) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert "listening at 0.0.0.0, beyond this machine: whoever knows the token in SESAME" in err


def test_a_box_that_fails_is_a_500_in_words(client: Any) -> None:
    def broken(tokens: Array) -> Array:
        if tokens.shape[0] > 1:
            raise ZeroDivisionError("in the box")
        return tokens[:, 0, 0]

    with serving(kh.FunctionOracle(broken, width=WIDTH)) as running:
        reply = client.post(f"{running.url}/infer", json=question())
        assert reply.status_code == 500
        assert "ZeroDivisionError: in the box" in reply.json()["error"]
        one = client.post(f"{running.url}/infer", json=question(np.ones((1, 1, WIDTH))))
        assert one.status_code == 200  # and goes on


def test_the_limits_of_the_box_are_refusals(client: Any) -> None:
    with serving(Budgeted(box(max_norm=3.0, max_length=2), 4)) as running:
        long = client.post(f"{running.url}/infer", json=question(np.full((1, 1, WIDTH), 2.0)))
        assert (long.status_code, "max_norm" in long.text) == (400, True)
        deep = client.post(f"{running.url}/infer", json=question(np.zeros((1, 3, WIDTH))))
        assert (deep.status_code, "max_length" in deep.text) == (400, True)
        assert client.post(f"{running.url}/infer", json=question()).status_code == 200
        over = client.post(f"{running.url}/infer", json=question())
        assert (over.status_code, "left" in over.text) == (429, True)


def test_questions_are_answered_one_after_the_other() -> None:
    inside, most = [0], [0]

    def careful(tokens: Array) -> Array:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.01)
        inside[0] -= 1
        return tokens[:, 0, 0]

    with serving(kh.FunctionOracle(careful, width=WIDTH)) as running:
        oracle = kh.HttpOracle(running.url, batch=1, connections=6)
        assert oracle(np.ones((12, 1, WIDTH))).shape == (12,)
    assert most == [1]


def test_health_is_answered_while_the_box_thinks(client: Any) -> None:
    def slow(tokens: Array) -> Array:
        time.sleep(0.4 if tokens.shape[0] > 1 else 0.0)
        return tokens[:, 0, 0]

    with serving(kh.FunctionOracle(slow, width=WIDTH)) as running:
        thread = threading.Thread(target=lambda: httpx.post(f"{running.url}/infer", json=question(), trust_env=False))
        thread.start()
        time.sleep(0.1)
        assert client.get(f"{running.url}/ready").status_code == 200
        assert running.served.requests == 0  # still thinking
        thread.join()
        assert running.served.requests == 1


# --- the document ----------------------------------------------------------------------------------------------


CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_no_request_makes_the_server_fail(server: Server, tmp_path: Path) -> None:
    """A short session of schemathesis: requests that the document allows or forbids. A benchmark has a long one."""
    pytest.importorskip("schemathesis")
    address = f"{server.url.partition('/v2')[0]}/openapi.json"
    command = [sys.executable, "-m", "schemathesis.cli", "run", address, "--checks", CHECKS, "--no-color"]
    options = ["--max-examples", "5", "--phases", "examples,fuzzing", "--seed", "1", "--exclude-path-regex", "versions"]
    answered = server.served.requests
    ended = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    assert server.served.requests > answered  # the example is answered


def test_the_document_describes_every_page(server: Server, client: Any) -> None:
    document = client.get(f"{server.url.partition('/v2')[0]}/openapi.json").json()
    assert document["openapi"].startswith("3.")
    paths = set(document["paths"])
    assert {"/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/{model}", "/v2/models/{model}/infer"} <= paths
    infer = document["paths"]["/v2/models/{model}/infer"]["post"]
    assert set(infer["requestBody"]["content"]) == {"application/json", "application/octet-stream"}
    assert {"200", "400", "401", "404", "413", "415", "422", "429"} <= set(infer["responses"])


# --- the command -----------------------------------------------------------------------------------------------


def command(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "keyhole", "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SESAME": "open", "PYTHONUNBUFFERED": "1"},
    )


def test_the_command_serves_until_it_is_told_to_stop(client: Any) -> None:
    target = "demo:single-head?width=4"
    with command(target, "--port", "0", "--json", "--decimals", "3", "--token-env", "SESAME") as process:
        assert process.stdout is not None
        about = json.loads(process.stdout.readline())
        assert about["url"].endswith("/v2/models/single-head")
        assert about["url"].startswith("http://127.0.0.1:")
        assert about["model"]["name"] == "single-head"
        reply = client.post(f"{about['url']}/infer", json=question(), headers={"Authorization": "Bearer open"})
        (entry,) = reply.json()["outputs"]
        np.testing.assert_array_equal(entry["data"], np.round(entry["data"], 3))
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "", "")


def test_what_is_under_way_is_answered_before_it_stops(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time, keyhole as kh\n"
        "def make():\n"
        "    def slow(tokens):\n"
        "        time.sleep(0.5 if len(tokens) > 1 else 0)\n"
        "        return tokens[:, 0, 0]\n"
        "    return kh.FunctionOracle(slow, width=4)\n"
    )
    with command(f"python:{tmp_path / 'slow.py'}:make", "--port", "0") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(7)]
        url = lines[1].split()[1]
        assert url.endswith("/slow-make")
        replies: list[Any] = []

        def ask() -> None:
            replies.append(httpx.post(f"{url}/infer", json=question(), trust_env=False))

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        thread.join()
        out, err = process.communicate(timeout=20)
    assert replies[0].status_code == 200
    assert process.returncode == 0, err
    assert "2 queries answered in 1 requests" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo:nothing"], "known: single-head"),
        (["demo:single-head", "--token-env", "KEYHOLE_NO_SUCH_VARIABLE"], "KEYHOLE_NO_SUCH_VARIABLE"),
        (["demo:single-head", "--name", "a/b"], "cannot be named"),
        (["demo:single-head", "--rate-limit", "0"], "rate limit"),
        (["demo:single-head", "--add-noise", "-1"], "positive"),
        (["demo:single-head", "--noise", "1e-3"], "--add-noise"),
        (["demo:single-head", "--max-seconds", "0"], "seconds"),
        (["demo:single-head", "--max-queries", "0"], "max-queries"),
        (["demo:single-head", "--host", "256.0.0.1"], "cannot listen"),
        (["demo:single-head", "--port", "70000"], "--port"),
        (["demo:single-head", "--max-batch", "0"], "max-batch"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    caught = capsys.readouterr()
    assert ended.value.code == 2
    assert said in caught.err
    assert caught.err.startswith("keyhole: ")
    assert caught.err.count("\n") == 1


def test_a_port_in_use_is_named(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "demo:single-head", "--port", str(server.port)])
    assert ended.value.code == 2
    assert f"port {server.port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("demo:single-head?width=8&seed=0", "single-head"),
        ("file:some/where/params.safetensors", "params"),
        ("python:box.py:make", "box-make"),
        ("http://h:1/v2/models/m#batch=3", "m"),
        ("file:ünusual näme.safetensors", "nusual-n-me"),
        ("file:...", "file"),
    ],
)
def test_models_are_named_after_their_target(text: str, name: str) -> None:
    assert model_name(text) == name


def test_a_box_that_does_not_answer_is_not_served() -> None:
    with pytest.raises(OracleError, match="nan or inf"):
        ServedOracle(kh.FunctionOracle(lambda tokens: tokens[:, 0, 0] + np.nan, width=WIDTH), "box")
    half: Oracle = kh.FunctionOracle(lambda tokens: tokens[:, 0, 0], width=WIDTH, like=np.zeros(1, np.float16))
    with pytest.raises(UsageError, match="float16"):
        ServedOracle(half, "box")


@pytest.mark.parametrize(
    "limits", [{"batch": 0}, {"length": 1.5}, {"total": 0}, {"seconds": 0.0}, {"rate": -1.0}, {"rate": float("nan")}]
)
def test_limits_that_make_no_sense(limits: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Limits(**limits)


def test_a_missing_library_is_named() -> None:
    code = (
        "import sys; sys.modules['fastapi'] = None; from keyhole.cli import main; main(['serve', 'demo:single-head'])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, "pip install 'keyhole[serve]'" in ended.stderr) == (2, True)
