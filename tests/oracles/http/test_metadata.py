"""Servers that are none, and models that cannot be asked."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from keyhole.errors import (
    BadAnswer,
    ServerBusy,
    ServerUnreachable,
    UnknownModel,
    UsageError,
    WrongShape,
)
from keyhole.inference_protocol import HEADER_LENGTH
from keyhole.oracles import HttpOracle
from keyhole.serve import Server
from support.served_head import free_port, some
from support.serving import Said, as_json, faking, honest

pytest.importorskip("orjson")
pytest.importorskip("fastapi")


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
        ({"inputs": []}, "say input_name="),
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


def test_a_custom_model_whose_metadata_describe_no_tensor() -> None:
    """As the default custom models of MLServer and KServe answer."""
    with faking(inputs=[], outputs=[]) as fake:
        oracle = HttpOracle(fake.url, width=4, input_name="x")
        np.testing.assert_array_equal(oracle(some(width=4)), some(width=4).sum((1, 2)))
        assert oracle.signature.positions == "last"
        named = HttpOracle(fake.url, width=4, input_name="x", output_name="y", datatype="FP32")
        assert named(some(width=4).astype("float32")).shape == (5,)
        with pytest.raises(UsageError, match="give width="):
            HttpOracle(fake.url, input_name="x")
        with pytest.raises(WrongShape, match="without the output 'z'"):
            HttpOracle(fake.url, width=4, input_name="x", output_name="z")(some(width=4))
        fake.pages["/v2/models/m/infer"] = lambda body, headers: honest(body, headers, (4,))
        with pytest.raises(WrongShape, match="answers of shape"):
            oracle(some(width=4))


def test_binary_tensors_are_tried_where_nobody_says_and_dropped_where_they_fail() -> None:
    def json_only(body: bytes, headers: Mapping[str, str]) -> Said:
        return as_json({"error": "what?"}, 500) if HEADER_LENGTH in headers else honest(body, headers)

    for infer, kinds in ((honest, [True, True]), (json_only, [True, False, False])):
        with faking(infer) as fake:
            fake.pages["/v2"] = as_json({"name": "fake", "extensions": []})
            oracle = HttpOracle(fake.url, retries=0)
            for _ in range(2):
                np.testing.assert_array_equal(oracle(some(width=4)), some(width=4).sum((1, 2)))
            asked = [headers for headers in fake.seen if "Content-Length" in headers]
            assert [HEADER_LENGTH in headers for headers in asked] == kinds


def test_shapes_written_as_text_are_read() -> None:
    with faking(inputs=[{"name": "x", "datatype": "FP64", "shape": ["-1", "-1", "4"]}]) as fake:
        assert HttpOracle(fake.url).signature.width == 4


def test_a_model_of_one_sequence_per_request() -> None:
    with faking(tokens=(1, -1, 4)) as fake:
        oracle = HttpOracle(fake.url)
        np.testing.assert_allclose(oracle(some(3, width=4)), some(3, width=4).sum((1, 2)))
        assert oracle.requests == 3
