"""What passes is asked again, what will not is said, and what arrived is kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import Array
from keyhole.errors import (
    QuestionRefused,
    ServerBusy,
    ServerError,
    ServerFailed,
    ServerTimeout,
)
from keyhole.inference_protocol import HEADER_LENGTH, decode
from keyhole.oracles import Counted, HttpOracle, Noisy, Oracle, Rounded, Wrapper
from keyhole.oracles.http import retries as x
from support.served_head import WIDTH, head, some
from support.serving import Said, as_json, faking, honest, serving

pytest.importorskip("orjson")
pytest.importorskip("fastapi")


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
