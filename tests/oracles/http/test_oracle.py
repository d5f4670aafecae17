"""Boxes over HTTP: answers, settings, tokens, and answers that are none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.errors import (
    AccessDenied,
    BadAnswer,
    ConnectionLost,
    NonFiniteAnswer,
    OracleError,
    QuestionRefused,
    ServerBusy,
    ServerFailed,
    ServerTimeout,
    ServerUnreachable,
    UnknownModel,
    UsageError,
    WrongShape,
)
from keyhole.inference_protocol import HEADER_LENGTH, Malformed, Tensor, decode, encode
from keyhole.noise import Noise
from keyhole.oracles import HttpOracle
from keyhole.serve import Server
from keyhole.targets import open_target
from keyhole.targets.models import HTTP_KEYS as OPTIONS
from keyhole.targets.models import read_http
from support.served_head import WIDTH, head, some
from support.serving import Said, as_json, faking, honest, serving

pytest.importorskip("orjson")
pytest.importorskip("fastapi")


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


@pytest.mark.parametrize("library", ["orjson", "pycurl"])
def test_a_missing_library_is_named(library: str) -> None:
    code = f"import sys; sys.modules['{library}'] = None; import keyhole as kh; kh.HttpOracle('http://h/v2/models/m')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'keyhole[http]'" in ended.stderr.splitlines()[-1]


def test_proxies_of_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert HttpOracle(server.url)(some()).shape == (5,)  # this machine is never behind one
    with pytest.raises(ServerUnreachable, match=r"no connection"):
        HttpOracle("http://elsewhere.invalid/v2/models/m")
    with pytest.raises(ServerUnreachable, match="no such host"):
        HttpOracle("http://elsewhere.invalid/v2/models/m", proxy="none")
    monkeypatch.setenv("no_proxy", ".invalid")
    with pytest.raises(ServerUnreachable, match="no such host"):
        HttpOracle("http://elsewhere.invalid/v2/models/m")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", "nonsense://x/y")
    with pytest.raises(UsageError, match="http_proxy"):
        HttpOracle("http://elsewhere.invalid/v2/models/m")
    with pytest.raises(ServerUnreachable):
        HttpOracle(server.url, proxy="http://127.0.0.1:1")


def test_a_proxy_is_told_who_asks() -> None:
    with faking() as proxy:
        proxy.pages = {f"http://elsewhere.invalid{path}": page for path, page in proxy.pages.items()}
        address = f"http://me:pass%20word@127.0.0.1:{proxy.port}"
        assert HttpOracle("http://elsewhere.invalid/v2/models/m", proxy=address)(some(width=4)).shape == (5,)
        assert {headers["Proxy-Authorization"] for headers in proxy.seen} == {"Basic bWU6cGFzcyB3b3Jk"}
        proxy.pages = dict.fromkeys(proxy.pages, (407, {}, b""))
        with pytest.raises(AccessDenied, match="the proxy asks who you are"):
            HttpOracle("http://elsewhere.invalid/v2/models/m", proxy=address)


def test_certificates_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "nowhere.pem")
    with pytest.raises(UsageError, match=r"nowhere\.pem"):
        HttpOracle("https://127.0.0.1:1/v2/models/m")


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


def lying(**changes: Any) -> Callable[[bytes, Mapping[str, str]], Said]:
    return lambda body, headers: honest(body, headers, **changes)


@pytest.mark.parametrize(
    ("infer", "error", "said"),
    [
        (lying(shape=(4,)), WrongShape, "answers of shape"),
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
