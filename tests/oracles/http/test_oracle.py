"""HttpOracle: right answers or errors with a name, whatever the server and the network do."""

from __future__ import annotations

import builtins
import http.client
import json
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import Array
from keyhole.errors import (
    AccessDenied,
    BadAnswer,
    ConnectionLost,
    NonFiniteAnswer,
    OracleError,
    QuestionRefused,
    ServerBusy,
    ServerError,
    ServerFailed,
    ServerTimeout,
    ServerUnreachable,
    ServerUntrusted,
    UnknownModel,
    UsageError,
    WrongShape,
)
from keyhole.inference_protocol import HEADER_LENGTH, Malformed, Tensor, decode, encode
from keyhole.noise import Noise
from keyhole.oracles import Counted, HttpOracle, Noisy, Oracle, Rounded, Wrapper
from keyhole.oracles.http import connections as lines
from keyhole.oracles.http import retries as x
from keyhole.serve import Server
from keyhole.targets import open_target
from keyhole.targets.models import HTTP_KEYS as OPTIONS
from keyhole.targets.models import read_http
from support import targets as t
from support.serving import Said, as_json, description, digest, faking, havoc, honest, serving

pytest.importorskip("orjson")
pytest.importorskip("fastapi")

WIDTH = 8


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that a test can wait for."""
    monkeypatch.setattr(x, "FIRST_PAUSE", 0.005)


def head(width: int = WIDTH) -> kh.SingleHead:
    rng = np.random.default_rng(11)
    return kh.SingleHead(t.gaussian(rng, width), t.normal_value(rng, width))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(kh.FunctionOracle(head(), width=WIDTH, name="a head")) as running:
        yield running


def some(batch: int = 5, length: int = 2, width: int = WIDTH) -> Array:
    return np.random.default_rng(batch).standard_normal((batch, length, width))


# --- answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("binary", [True, False, None])
def test_answers_are_those_of_the_box_bit_by_bit(server: Server, binary: bool | None) -> None:
    oracle = HttpOracle(server.url, binary=binary)
    for batch, length in ((1, 1), (5, 2), (40, 7)):
        np.testing.assert_array_equal(oracle(some(batch, length)), head()(some(batch, length)))
    assert oracle.model.binary is (binary is not False)
    oracle.close()


@pytest.mark.parametrize("binary", [True, False])
def test_numbers_that_are_hard_to_write_survive(binary: bool) -> None:
    hard = np.array([-0.0, 5e-324, 1 / 3, 1.7976931348623157e308, 0.1, 1e22, -1e-300])
    with serving(kh.FunctionOracle(lambda tokens: tokens[:, 0, 0], width=1)) as running:
        answers = HttpOracle(running.url, binary=binary)(hard[:, None, None])
    assert answers.tobytes() == hard.tobytes()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("positions", ["last", "all"])
@pytest.mark.parametrize("outputs", [None, 3])
def test_shapes_and_dtypes_come_from_the_metadata(dtype: str, positions: str, outputs: int | None) -> None:
    rng = np.random.default_rng(0)
    value = rng.standard_normal(WIDTH if outputs is None else (WIDTH, outputs))
    box = kh.SingleHead(rng.standard_normal((WIDTH, WIDTH)).astype(dtype), value.astype(dtype))
    function = box if positions == "last" else box.at_all_positions
    inner = kh.FunctionOracle(function, WIDTH, positions=positions, like=np.zeros(1, dtype))  # type: ignore[arg-type]
    with serving(inner) as running:
        for binary in (True, False):
            oracle = HttpOracle(running.url, binary=binary)
            tokens = some().astype(dtype)
            np.testing.assert_array_equal(oracle(tokens), inner(tokens))
            assert oracle.signature.positions == positions
            assert oracle(tokens).dtype == np.dtype(dtype)


def test_a_recovery_over_http_is_the_one_in_process(server: Server) -> None:
    here = kh.recover(kh.FunctionOracle(head(), width=WIDTH))
    for binary in (True, False):
        oracle = HttpOracle(server.url, binary=binary)
        there = kh.recover(oracle)
        np.testing.assert_array_equal(there.params.score, here.params.score)
        np.testing.assert_array_equal(there.params.value, here.params.value)
        assert there.stats.details["server"] == {"requests": oracle.requests, "retries": 0, "reasons": {}}
        assert there.stats.new_queries == here.stats.new_queries


def test_a_batch_is_split_over_connections(server: Server) -> None:
    oracle = HttpOracle(server.url, batch=3, connections=2)
    assert oracle.signature.batch_limit == 6
    tokens = some(20)
    np.testing.assert_allclose(oracle(tokens), head()(tokens), rtol=1e-13)
    assert oracle.requests == 7


def test_small_batches_are_not_torn_apart(server: Server) -> None:
    oracle = HttpOracle(server.url, connections=4)
    oracle(some(40))
    assert oracle.requests == 1


def test_the_limit_of_the_server_is_kept() -> None:
    with serving(kh.FunctionOracle(head(), width=WIDTH), batch=6) as running:
        oracle = HttpOracle(running.url, batch=100)
        assert oracle.batch == 6
        assert oracle(some(25)).shape == (25,)
        assert HttpOracle(running.url, batch=4).batch == 4


def test_the_name_is_that_of_the_box_behind_the_address(server: Server) -> None:
    assert HttpOracle(server.url).name == HttpOracle(f"{server.url}/", batch=2).name
    assert server.url in HttpOracle(server.url).name
    assert HttpOracle(server.url, name="mine").name == "mine"
    with serving(kh.FunctionOracle(head(), width=WIDTH, name="another head")) as other:
        first, second = (HttpOracle(each.url).name.partition("version")[2] for each in (server, other))
        assert first != second  # a journal of the one is refused for the other, even at the same address


def test_a_version_can_be_named(server: Server) -> None:
    version = server.served.version
    oracle = HttpOracle(f"{server.url}/versions/{version}")
    assert oracle(some()).shape == (5,)
    assert oracle.ready()
    with pytest.raises(UnknownModel, match="version"):
        HttpOracle(f"{server.url}/versions/77")


def test_answers_of_fewer_digits_are_declared_as_rounded() -> None:
    def infer(body: bytes, headers: Mapping[str, str]) -> Said:
        message, tensors = decode(body, headers.get(HEADER_LENGTH), "inputs")
        sums = tensors["x"].values.sum(axis=(1, 2))
        datatype = "FP32"
        answer, _ = encode({"id": message["id"]}, "outputs", Tensor("y", datatype, sums), binary=False)
        return 200, {}, answer

    with faking(infer, datatypes=("FP64", "FP32")) as fake:
        oracle = HttpOracle(fake.url)
        assert oracle.signature.noise == Noise.dtype("float32")
        assert HttpOracle(fake.url, noise=Noise.bounded(1.0)).signature.noise == Noise.bounded(1.0)
        np.testing.assert_allclose(oracle(some(width=4)), some(width=4).sum((1, 2)), rtol=1e-6)


def test_half_precision_comes_as_binary_data() -> None:
    bits = np.array([0x3F80, 0xC040, 0x0000], dtype="<u2")  # 1, -3, 0 in bfloat16
    values = np.array([1.0, -3.0, 0.0])
    for datatype, data in (("BF16", bits.tobytes()), ("FP16", values.astype("<f2").tobytes())):

        def infer(body: bytes, headers: Mapping[str, str], datatype: str = datatype, data: bytes = data) -> Said:
            entry = {"name": "y", "datatype": datatype, "shape": [3], "parameters": {"binary_data_size": len(data)}}
            message = decode(body, headers.get(HEADER_LENGTH), "inputs")[0]
            text = json.dumps({"id": message["id"], "outputs": [entry]}).encode()
            return 200, {HEADER_LENGTH: str(len(text))}, text + data

        with faking(infer, datatypes=("FP32", datatype)) as fake:
            oracle = HttpOracle(fake.url)
            np.testing.assert_array_equal(oracle(some(3, width=4).astype("float32")), values.astype("float32"))
            assert oracle.signature.noise.kind == "dtype"


def test_the_last_position_of_a_layer_that_answers_for_all() -> None:
    box = kh.FunctionOracle(head().at_all_positions, width=WIDTH, positions="all")
    with serving(box) as running:
        oracle = HttpOracle(running.url, positions="last")
        np.testing.assert_array_equal(oracle(some()), head().at_all_positions(some())[:, -1])


# --- settings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:8000", "no address of a model"),
        ("http://127.0.0.1:8000/v1/models/m", "no address of a model"),
        ("http://127.0.0.1:8000/v2/models/", "no address of a model"),
        ("ftp://127.0.0.1/v2/models/m", "no address of a model"),
        ("http:///v2/models/m", "no address"),
        ("http://127.0.0.1:port/v2/models/m", "no address"),
        ("http://127.0.0.1:99999/v2/models/m", "no address"),
        ("http://me:secret@127.0.0.1/v2/models/m", "token_env"),
        ("http://127.0.0.1/v2/models/m?key=1", "behind the name"),
        ("http://[::1/v2/models/m", "no address"),
    ],
)
def test_addresses_that_are_none(url: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        HttpOracle(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timeout": 0}, "timeout"),
        ({"timeout": float("inf")}, "timeout"),
        ({"patience": -1}, "patience"),
        ({"connections": 0}, "connections"),
        ({"retries": -1}, "retries"),
        ({"retries": True}, "retries"),
        ({"batch": -5}, "batch"),
        ({"ca": "nowhere.pem"}, "nowhere.pem"),
        ({"proxy": "nonsense"}, "proxy"),
        ({"token_env": "KEYHOLE_NO_SUCH_VARIABLE"}, "KEYHOLE_NO_SUCH_VARIABLE"),
        ({"width": 9}, "width 8"),
        ({"positions": "all"}, "one per token"),
        ({"output_name": "nothing"}, "'answers'"),
        ({"input_name": "nothing"}, "'tokens'"),
        ({"noise": "loud"}, "noise"),
    ],
)
def test_options_that_make_no_sense(server: Server, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        HttpOracle(server.url, **options)


def test_options_of_a_target_stand_behind_a_hash() -> None:
    text = "https://h/v2/models/m#timeout=2.5&connections=8&binary=false&token_env=T&batch=7"
    assert read_http(text) == {
        "url": "https://h/v2/models/m",
        "timeout": 2.5,
        "connections": 8,
        "binary": False,
        "token_env": "T",
        "batch": 7,
    }
    for bad, said in (
        ("http://h/v2/models/m#speed=3", "possible: width"),
        ("http://h/v2/models/m#batch=x", "whole number"),
        ("http://h/v2/models/m#binary=maybe", "true or false"),
        ("http://h/v2/models/m#batch=1&batch=2", "twice"),
        ("http://h/v2/models/m#batch", "key=value"),
    ):
        with pytest.raises(UsageError, match=said):
            open_target(bad)
    assert set(OPTIONS) < set(HttpOracle.__init__.__kwdefaults__) | {"width", "positions", "max_length"}


def test_a_target_on_the_command_line(server: Server) -> None:
    target = open_target(f"{server.url}#connections=2")
    assert target.text == f"{server.url}#connections=2"
    assert kh.recover(target.with_declared(max_norm=4.0).oracle).certified
    target.oracle.close()


def test_a_missing_library_is_named() -> None:
    code = "import sys; sys.modules['orjson'] = None; import keyhole as kh; kh.HttpOracle('http://h/v2/models/m')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'keyhole[http]'" in ended.stderr.splitlines()[-1]


def test_the_environment_has_no_say(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert HttpOracle(server.url)(some()).shape == (5,)
    with pytest.raises(ServerUnreachable):
        HttpOracle(server.url, proxy="http://127.0.0.1:1")


# --- tokens ----------------------------------------------------------------------------------------------------


def test_a_token_comes_from_the_environment_and_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "sesame-4711"
    monkeypatch.setenv("KEYHOLE_TEST_TOKEN", secret)
    with serving(kh.FunctionOracle(head(), width=WIDTH), token=secret) as running:
        assert HttpOracle(running.url, token_env="KEYHOLE_TEST_TOKEN")(some()).shape == (5,)
        with pytest.raises(AccessDenied, match="token_env"):
            HttpOracle(running.url)
        monkeypatch.setenv("KEYHOLE_TEST_TOKEN", "wrong")
        with pytest.raises(AccessDenied):
            HttpOracle(running.url, token_env="KEYHOLE_TEST_TOKEN")
    monkeypatch.setenv("KEYHOLE_TEST_TOKEN", secret)
    with faking(lambda body, headers: as_json({"error": f"what is {headers['X-Key']}?"}, 400)) as fake:
        oracle = HttpOracle(fake.url, token_env="KEYHOLE_TEST_TOKEN", header="X-Key")
        with pytest.raises(QuestionRefused, match=r"what is \*\*\*") as caught:
            oracle(some(width=4))
        assert secret not in str(caught.value) + oracle.name + repr(vars(oracle).get("signature"))


def test_a_token_does_not_travel_in_the_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYHOLE_TEST_TOKEN", "sesame")
    with pytest.raises(UsageError, match="https"):
        HttpOracle("http://example.invalid/v2/models/m", token_env="KEYHOLE_TEST_TOKEN")
    monkeypatch.setenv("KEYHOLE_TEST_TOKEN", "two\nlines")
    with pytest.raises(UsageError, match="line breaks"):
        HttpOracle("http://127.0.0.1:1/v2/models/m", token_env="KEYHOLE_TEST_TOKEN")


def test_redirects_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYHOLE_TEST_TOKEN", "sesame")
    with faking() as thief, faking() as fake:
        fake.pages["/v2/models/m"] = (307, {"Location": thief.url}, b"")
        with pytest.raises(ServerUnreachable, match="if you trust it"):
            HttpOracle(fake.url, token_env="KEYHOLE_TEST_TOKEN")
        assert not thief.seen


# --- servers that are none, or not like this -------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def test_nobody_listens() -> None:
    began = time.perf_counter()
    with pytest.raises(ServerUnreachable, match="host and port"):
        HttpOracle(f"http://127.0.0.1:{free_port()}/v2/models/m")
    assert time.perf_counter() - began < 2  # a wrong address is not asked again and again


def test_an_unknown_host() -> None:
    with pytest.raises(ServerUnreachable, match=r"nowhere\.invalid"):
        HttpOracle("http://nowhere.invalid/v2/models/m")


def test_an_unknown_model(server: Server) -> None:
    with pytest.raises(UnknownModel, match="this server has 'box'"):
        HttpOracle(server.url.replace("/box", "/fox"))


@pytest.mark.parametrize("page", [b"<html>welcome</html>", b"[]", b"", b'{"hello": 1}'])
@pytest.mark.parametrize("status", [200, 404, 500])
def test_a_server_of_another_kind(page: bytes, status: int) -> None:
    with faking() as fake:
        fake.pages = dict.fromkeys(["/v2", "/v2/health/ready", "/v2/models/m"], (status, {}, page))
        with pytest.raises(BadAnswer, match=r"Open Inference Protocol v2"):
            HttpOracle(fake.url)


def test_a_server_that_speaks_no_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"220 mail.example ESMTP\r\n")

        threading.Thread(target=talk, daemon=True).start()
        with pytest.raises(BadAnswer, match="not speak HTTP"):
            HttpOracle(f"http://127.0.0.1:{listener.getsockname()[1]}/v2/models/m")


def test_a_model_that_is_not_ready() -> None:
    with faking() as fake:
        fake.pages["/v2/models/m/ready"] = as_json({}, 400)
        with pytest.raises(ServerBusy, match="not ready"):
            HttpOracle(fake.url)
        fake.pages["/v2/models/m/ready"] = as_json({}, 404)  # some gateways do not pass it on
        assert HttpOracle(fake.url)(some(width=4)).shape == (5,)
        fake.pages["/v2/health/ready"] = as_json({}, 503)
        with pytest.raises(ServerBusy, match="not ready"):
            HttpOracle(fake.url)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"tokens": (-1, 4)}, r"\(batch, length, width\)"),
        ({"tokens": (-1, 3, 224, 224)}, r"\(batch, length, width\)"),
        ({"tokens": (-1, 128, 4)}, "exactly 128 tokens"),
        ({"tokens": (8, -1, 4)}, "exactly 8 sequences"),
        ({"tokens": (-1, -1, -1)}, "give width="),
        ({"datatypes": ("INT64", "FP32")}, "INT64"),
        ({"datatypes": ("FP16", "FP32")}, "FP16"),
        ({"datatypes": ("BYTES", "FP32")}, "BYTES"),
        ({"datatypes": ("FP32", "BYTES")}, "no numbers"),
        ({"answers": ()}, "answers tensors of shape"),
        ({"answers": (-1, -1, 3, 3)}, "answers tensors of shape"),
        ({"answers": (-1, -1)}, "positions='last' or 'all'"),
        ({"inputs": []}, "0 tensors"),
        ({"outputs": []}, "0 tensors"),
        ({"outputs": [{"name": name, "datatype": "FP64", "shape": [-1]} for name in "ab"]}, "'a', 'b'"),
        ({"inputs": [{"name": name, "datatype": "FP64", "shape": [-1, -1, 4]} for name in "ab"]}, "'a', 'b'"),
    ],
)
def test_models_that_cannot_be_asked(metadata: dict[str, Any], said: str) -> None:
    with faking(**metadata) as fake, pytest.raises(UsageError, match=said):
        HttpOracle(fake.url)


@pytest.mark.parametrize(
    "metadata",
    [
        {"inputs": None},
        {"inputs": "tokens"},
        {"inputs": [3]},
        {"inputs": [{"name": "x"}]},
        {"outputs": [{"name": "y", "datatype": "FP64", "shape": "all"}]},
        {"outputs": [{"name": "y", "datatype": "FP64", "shape": [-7]}]},
    ],
)
def test_metadata_that_is_none(metadata: dict[str, Any]) -> None:
    with faking(**metadata) as fake, pytest.raises(BadAnswer, match="metadata"):
        HttpOracle(fake.url)


def test_what_metadata_leaves_open_can_be_told() -> None:
    with faking(tokens=(-1, -1, -1), answers=(-1, -1)) as fake:
        fake.pages["/v2/models/m/infer"] = lambda body, headers: honest(body, headers, (5, 2))
        oracle = HttpOracle(fake.url, width=4, positions="all")
        assert oracle(some(width=4)).shape == (5, 2)


def test_shapes_written_as_text_are_read() -> None:
    with faking(inputs=[{"name": "x", "datatype": "FP64", "shape": ["-1", "-1", "4"]}]) as fake:
        assert HttpOracle(fake.url).signature.width == 4


def test_a_model_of_one_sequence_per_request() -> None:
    with faking(tokens=(1, -1, 4)) as fake:
        oracle = HttpOracle(fake.url)
        np.testing.assert_allclose(oracle(some(3, width=4)), some(3, width=4).sum((1, 2)))
        assert oracle.requests == 3


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


# --- answers that are none -------------------------------------------------------------------------------------


def lying(**changes: Any) -> Callable[[bytes, Mapping[str, str]], Said]:
    return lambda body, headers: honest(body, headers, **changes)


@pytest.mark.parametrize(
    ("infer", "error", "said"),
    [
        (lying(shape=(4,)), WrongShape, "does not keep to its own description"),
        (lying(shape=(6,)), WrongShape, "answers of shape"),
        (lying(shape=(5, 1)), WrongShape, "answers of shape"),
        (lying(shape=()), WrongShape, "answers of shape"),
        (lying(id="another"), BadAnswer, "another question"),
        (lying(id=None), BadAnswer, "require_id=False"),
        (lying(id=7), BadAnswer, "another question"),
        (lambda *_: (200, {}, b"no json"), BadAnswer, "no JSON"),
        (lambda *_: (200, {}, b""), BadAnswer, "no JSON"),
        (lambda *_: as_json([]), BadAnswer, "no object"),
        (lambda *_: as_json({"outputs": 3}), BadAnswer, "no list"),
        (lambda *_: (204, {}, b""), BadAnswer, "expected 200"),
        (lambda *_: as_json({"error": "bad tokens"}, 400), QuestionRefused, "bad tokens"),
        (lambda *_: as_json({"error": "who?"}, 401), AccessDenied, "token_env"),
        (lambda *_: as_json({}, 403), AccessDenied, "403"),
        (lambda *_: as_json({}, 404), UnknownModel, "404"),
        (lambda *_: as_json({}, 413), QuestionRefused, "lower batch"),
        (lambda *_: as_json({}, 408), ServerTimeout, "408"),
        (lambda *_: as_json({}, 429), ServerBusy, "429"),
        (lambda *_: as_json({}, 503), ServerBusy, "503"),
        (lambda *_: (500, {}, b"<h1>oh\nno</h1>"), ServerFailed, "<h1>oh no</h1>"),
        (lambda *_: as_json({}, 501), ServerFailed, "501"),
        (lambda *_: as_json({}, 302), ServerUnreachable, "302"),
        (lambda *_: (0, {}, b""), ConnectionLost, "connection"),
        (lambda *_: (200, {"Content-Length": "1000"}, b"short"), (ConnectionLost, ServerTimeout), "answer"),
    ],
)
def test_what_comes_back_has_a_name(infer: Any, error: type[Exception], said: str) -> None:
    with faking(infer) as fake:
        oracle = HttpOracle(fake.url, retries=1, timeout=0.5)
        with pytest.raises(error, match=said) as caught:
            oracle(some(width=4))
        assert isinstance(caught.value, OracleError)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "error", "said"),
    [
        ({"name": "z"}, WrongShape, "without the output 'y'"),
        ({"datatype": "FP32"}, WrongShape, "answers in FP32"),
        ({"datatype": "FP128"}, BadAnswer, "FP128"),
        ({"data": [1.0] * 4}, BadAnswer, "4 numbers"),
        ({"data": [[1.0] * 5]}, BadAnswer, "5 numbers of data in the shape"),
        ({"data": [[1.0], [1.0, 2.0]]}, BadAnswer, "unequal"),
        ({"data": ["1"] * 5}, BadAnswer, "no FP64 number"),
        ({"data": [True] * 5}, BadAnswer, "no FP64 number"),
        ({"data": [{}] * 5}, BadAnswer, "no FP64 number"),
        ({"data": [10**400] * 5}, BadAnswer, "JSON|number"),
        ({"data": None}, BadAnswer, "neither"),
        ({"data": [1.0, 2.0, None, 4.0, 5.0]}, NonFiniteAnswer, "nan or inf"),
        ({"shape": [-1]}, BadAnswer, "below 0"),
        ({"shape": [5.0]}, BadAnswer, "whole numbers"),
        ({"parameters": {"binary_data_size": 40}}, BadAnswer, "both"),
    ],
)
def test_tensors_that_contradict_themselves(entry: dict[str, Any], error: type[Exception], said: str) -> None:
    def infer(body: bytes, headers: Mapping[str, str]) -> Said:
        status, kept, answer = honest(body, headers)
        message = json.loads(answer)
        message["outputs"][0].update(entry)
        return status, kept, json.dumps(message).encode()

    with faking(infer) as fake:
        oracle = HttpOracle(fake.url, retries=0)
        with pytest.raises(error, match=said):
            oracle(some(width=4))


@pytest.mark.parametrize(
    ("length", "size", "data", "said"),
    [
        (None, 40, b"x" * 40, "no JSON"),
        ("0", 40, b"x" * 40, "no JSON"),
        ("-5", 40, b"x" * 40, HEADER_LENGTH),
        ("99999", 40, b"x" * 40, HEADER_LENGTH),
        ("all", 40, b"x" * 40, HEADER_LENGTH),
        ("right", 40, b"x" * 39, "39 bytes"),
        ("right", 40, b"x" * 48, "belong to no tensor"),
        ("right", 48, b"x" * 48, "needs 40"),
        ("right", "40", b"x" * 40, "needs 40"),
        ("right", -40, b"x" * 40, "needs 40"),
    ],
)
def test_binary_data_of_another_length(length: str | None, size: Any, data: bytes, said: str) -> None:
    entry = {"name": "y", "datatype": "FP64", "shape": [5], "parameters": {"binary_data_size": size}}
    text = json.dumps({"outputs": [entry]}).encode()
    with pytest.raises(Malformed, match=said):
        decode(text + data, str(len(text)) if length == "right" else length, "outputs")


def test_two_tensors_of_one_name() -> None:
    entry = {"name": "y", "datatype": "FP64", "shape": [0], "data": []}
    with pytest.raises(Malformed, match="two tensors"):
        decode(json.dumps({"outputs": [entry, entry]}).encode(), None, "outputs")


def test_a_server_without_ids_can_be_believed() -> None:
    with faking(lying(id=None)) as fake:
        assert HttpOracle(fake.url, require_id=False)(some(width=4)).shape == (5,)
    with faking(lying(id="another")) as fake, pytest.raises(BadAnswer, match="another question"):
        HttpOracle(fake.url, require_id=False, retries=0)(some(width=4))


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


# --- asking again ----------------------------------------------------------------------------------------------


def failing(times: int, first: Said, then: Callable[[bytes, Mapping[str, str]], Said] = honest) -> Any:
    """So many failures, then answers."""
    left = [times]

    def infer(body: bytes, headers: Mapping[str, str]) -> Said:
        left[0] -= 1
        return first if left[0] >= 0 else then(body, headers)

    return infer


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (as_json({}, 500), "failure of the server"),
        (as_json({}, 502), "failure of the server"),
        (as_json({}, 503), "request to wait"),
        (as_json({}, 503, Retry_After="0"), "request to wait"),
        (as_json({}, 429, Retry_After="0"), "request to wait"),
        (as_json({}, 429, Retry_After_Ms="10"), "request to wait"),
        (as_json({}, 429, Retry_After="soon"), "request to wait"),
        ((0, {}, b""), "lost connection"),
        ((200, {}, b"garbage"), "garbled answer"),
    ],
)
def test_what_passes_is_asked_again_and_counted(first: Said, reason: str) -> None:
    with faking(failing(2, first)) as fake:
        oracle = HttpOracle(fake.url)
        np.testing.assert_allclose(oracle(some(width=4)), some(width=4).sum((1, 2)))
        assert oracle.retried == {reason: 2}
        assert oracle.requests == 3 == fake.asked["/v2/models/m/infer"]
        assert oracle.facts()["server"]["retries"] == 2
        assert Rounded(Counted(oracle), 3).facts() == oracle.facts()


@pytest.mark.parametrize(
    "said",
    [
        as_json({}, 400),
        as_json({}, 401),
        as_json({}, 404),
        as_json({}, 413),
        as_json({}, 422),
        as_json({}, 501),
        as_json({}, 301),
    ],
)
def test_what_will_not_pass_is_asked_once(said: Said) -> None:
    with faking(lambda *_: said) as fake:
        with pytest.raises(ServerError):
            HttpOracle(fake.url)(some(width=4))
        assert fake.asked["/v2/models/m/infer"] == 1


def test_nothing_is_asked_for_ever() -> None:
    with faking(lambda *_: as_json({}, 500)) as fake:
        with pytest.raises(ServerFailed, match="asked 4 times"):
            HttpOracle(fake.url, retries=3)(some(width=4))
        assert fake.asked["/v2/models/m/infer"] == 4
    with faking(lambda *_: as_json({}, 429, Retry_After_Ms="50")) as fake:
        with pytest.raises(ServerBusy, match="asked"):
            HttpOracle(fake.url, patience=0.3)(some(width=4))
        assert 2 <= fake.asked["/v2/models/m/infer"] <= 8
    with faking(lambda *_: as_json({}, 503, Retry_After="3600")) as fake:
        with pytest.raises(ServerBusy):
            HttpOracle(fake.url)(some(width=4))
        assert fake.asked["/v2/models/m/infer"] == 1


def test_retry_after_is_read_in_all_its_forms() -> None:
    assert x.retry_after({"retry-after": "7"}) == 7.0
    assert x.retry_after({"retry-after": "7", "retry-after-ms": "250"}) == 0.25
    assert x.retry_after({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0.0
    later = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 100))
    assert 95 < (x.retry_after({"retry-after": later}) or 0) <= 100
    for none in ({}, {"retry-after": ""}, {"retry-after": "soon"}, {"retry-after": "-3"}, {"retry-after": "nan"}):
        assert x.retry_after(none) is None


def test_a_slow_answer_is_a_time_out() -> None:
    def slow(*_: Any) -> Said:
        time.sleep(0.6)
        return as_json({})

    with faking(slow) as fake:
        oracle = HttpOracle(fake.url, timeout=0.15, retries=1)
        with pytest.raises(ServerTimeout, match="raise timeout"):
            oracle(some(width=4))
        assert oracle.retried == {"time-out": 1}


def test_an_answer_that_drips_is_a_time_out() -> None:
    """Every single read is in time, the whole is not."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.recv(2**16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
                for _ in range(40):
                    time.sleep(0.05)
                    connection.sendall(b" ")

        threading.Thread(target=drip, daemon=True).start()
        server = f"http://127.0.0.1:{listener.getsockname()[1]}"
        exchange = x.Exchange(lines.ConnectionPool(server, timeout=0.3), retries=0, patience=9.0, headers={})
        with pytest.raises(ServerTimeout, match="did not end"):
            exchange.send("GET", f"{server}/v2", lambda reply: reply.body)
        exchange.close()


def test_closing_ends_a_pause() -> None:
    with faking(lambda *_: as_json({}, 503, Retry_After="20")) as fake:
        oracle = HttpOracle(fake.url)
        timer = threading.Timer(0.2, oracle.close)
        timer.start()
        began = time.perf_counter()
        with pytest.raises(ServerError):
            oracle(some(width=4))
        assert time.perf_counter() - began < 5
        with pytest.raises(ServerError):
            oracle(some(width=4))


def test_a_rate_limit_is_waited_for() -> None:
    with serving(kh.FunctionOracle(head(), width=WIDTH), rate=200.0) as running:
        oracle = HttpOracle(running.url, batch=30, connections=3)
        began = time.perf_counter()
        result = kh.recover(Wrapper(oracle))
        assert result.certified
        assert oracle(some(180)).shape == (180,)
        assert time.perf_counter() - began > 0.15
        assert set(oracle.retried) <= {"request to wait"}
        assert running.served.queries == 180 + result.stats.new_queries


# --- what arrived is kept --------------------------------------------------------------------------------------


def one_bad(body: bytes, headers: Mapping[str, str]) -> Said:
    """Refuses a request that holds a certain sequence."""
    _, tensors = decode(body, headers.get(HEADER_LENGTH), "inputs")
    return as_json({"error": "not this"}, 400) if np.any(tensors["x"].values == 77.0) else honest(body, headers)


def marked(place: int, batch: int = 12) -> Array:
    tokens = some(batch, width=4)
    tokens[place] = 77.0
    return tokens


@pytest.mark.parametrize("place", [0, 5, 11])
def test_what_arrived_goes_with_the_error(place: int) -> None:
    with faking(one_bad) as fake:
        oracle = HttpOracle(fake.url, batch=1, connections=12)
        tokens = marked(place)
        with pytest.raises(QuestionRefused, match="not this") as caught:
            oracle(tokens)
        assert caught.value.box is oracle
        for start, answers in caught.value.arrived:
            assert start != place
            np.testing.assert_array_equal(answers, tokens[start : start + 1].sum((1, 2)))


def test_wrappers_hand_on_what_arrived_as_they_change_answers() -> None:
    class Doubled(Wrapper):
        def answer(self, tokens: Array) -> Array:
            return 2 * self.inner(tokens)

    with faking(one_bad) as fake:
        oracle = HttpOracle(fake.url, batch=1, connections=12)
        tokens = marked(11)
        rounded: Oracle = Rounded(Counted(Wrapper(oracle)), 2)
        with pytest.raises(QuestionRefused) as caught:
            rounded(tokens)
        assert caught.value.box is rounded
        assert caught.value.arrived
        for start, answers in caught.value.arrived:
            np.testing.assert_allclose(answers, np.round(tokens[start : start + 1].sum((1, 2)), 2), atol=1e-12)
        with pytest.raises(QuestionRefused) as caught:  # one that says nothing of it: its answers are not known
            Doubled(oracle)(tokens)
        assert caught.value.box is oracle
        assert Noisy(oracle, 0.1).signature.noise.kind == "gaussian"


# --- havoc -----------------------------------------------------------------------------------------------------


class Witness(Wrapper):
    """Compares every answer that is believed with the truth, and keeps the questions."""

    def __init__(self, inner: Oracle) -> None:
        super().__init__(inner)
        self.wrong = 0
        self.believed = 0

    def change(self, answers: Array) -> Array:
        self.believed += len(answers)
        return answers

    def answer(self, tokens: Array) -> Array:
        answers = super().answer(tokens)
        self.wrong += int(np.sum(~np.isclose(answers, head()(tokens), rtol=1e-9, atol=1e-12)))
        return answers


def asked_in_process() -> Counter[bytes]:
    asked: Counter[bytes] = Counter()

    def spy(tokens: Array) -> Array:
        asked.update(digest(sequence) for sequence in tokens)
        return head()(tokens)

    kh.recover(kh.FunctionOracle(spy, width=WIDTH))
    return asked


FAULTS: dict[str, dict[str, float]] = {
    "the lot": {
        "500": 0.05,
        "hang": 0.05,
        "truncate": 0.04,
        "duplicate": 0.06,
        "stale": 0.04,
        "late": 0.06,
        "wrong shape": 0.02,
        "cut": 0.02,
        "garbage": 0.02,
        "drop": 0.02,
        "nan": 0.01,
    },
    **{
        fault: {fault: 0.2}
        for fault in ("500", "drop", "truncate", "cut", "garbage", "stale", "duplicate", "wrong shape", "nan")
    },
    "hang": {"hang": 0.05},
}


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("name", FAULTS)
def test_havoc_ends_in_the_right_result_or_a_clear_error(
    server: Server, name: str, binary: bool, tmp_path: Path, fresh_seed: int
) -> None:
    """No garbled answer is believed, and no answer that arrived is asked for again, over any number of runs."""
    expected = asked_in_process()
    timeout = 0.5 if "hang" in FAULTS[name] else 10.0
    with havoc(server.url, FAULTS[name], fresh_seed, timeout) as (state, url):
        for _ in range(60):
            oracle = HttpOracle(
                url, binary=binary, batch=3, connections=2, timeout=timeout, retries=3, name="a head behind a proxy"
            )
            witness = Witness(oracle)
            result = kh.recover(witness, journal=tmp_path / "journal.db", throw=False)
            oracle.close()
            assert witness.wrong == 0
            if result.certified:
                break
            assert result.outcome is kh.Outcome.ORACLE_FAILED, result.message
            assert "/infer" in result.message
        else:
            pytest.fail("60 runs were not enough")
        assert kh.distance(result.params, head()) < 1e-12
        assert sum(state.done[fault] for fault in FAULTS[name]) > 0
        assert state.delivered
        assert not state.delivered - expected  # what arrived was never asked again


def test_a_server_that_is_restarted_mid_run(tmp_path: Path) -> None:
    """The run goes on where the server comes back in time, and nothing that was answered is asked again."""
    seen: Counter[bytes] = Counter()

    def slow(tokens: Array) -> Array:
        time.sleep(0.003)
        seen.update(digest(sequence) for sequence in tokens)
        return head()(tokens)

    box = kh.FunctionOracle(slow, width=WIDTH, name="a head")
    port = free_port()
    running = serving(box, port)
    running.__enter__()
    oracle = HttpOracle(f"http://127.0.0.1:{port}/v2/models/box", batch=1, connections=2, retries=12)
    done: list[kh.Recovery] = []
    thread = threading.Thread(target=lambda: done.append(kh.recover(oracle, throw=False)))
    thread.start()
    while sum(seen.values()) < 40:
        time.sleep(0.005)
    running.__exit__(None, None, None)
    time.sleep(0.1)
    with serving(box, port):
        thread.join()
    oracle.close()
    (result,) = done
    assert result.certified, result.message
    assert kh.distance(result.params, head()) < 1e-12
    assert oracle.retried
    repeated = seen - asked_in_process() - Counter({digest(np.zeros((1, WIDTH))): 2})  # the first question of a server
    # Only what was under way when the server went, each time counted as asked again.
    assert sum(repeated.values()) <= sum(oracle.retried.values())


def test_a_run_is_resumed_when_the_server_comes_back(tmp_path: Path) -> None:
    journal, port = tmp_path / "journal.db", free_port()
    box = kh.FunctionOracle(head(), width=WIDTH, name="a head")
    with serving(box, port, rate=1e9) as running:
        oracle = HttpOracle(running.url, batch=1, connections=2, retries=0)
        half = kh.recover(oracle, journal=journal, budget=50, throw=False)
        assert half.outcome is kh.Outcome.BUDGET_EXHAUSTED
    result = kh.recover(oracle, journal=journal, throw=False)
    assert result.outcome is kh.Outcome.ORACLE_FAILED
    assert "server running" in result.message
    with serving(box, port) as running:
        result = kh.recover(HttpOracle(running.url), journal=journal)
        assert running.served.queries == result.stats.new_queries == sum(asked_in_process().values()) - 50


def test_description_is_that_of_a_model() -> None:
    assert set(description()) >= {"name", "inputs", "outputs"}
