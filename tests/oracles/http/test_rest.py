"""Endpoints that speak JSON of their own: a template of the request, a path to the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.errors import (
    AccessDenied,
    BadAnswer,
    FileError,
    KeyholeError,
    NonFiniteAnswer,
    QuestionRefused,
    ServerUnreachable,
    UsageError,
    WrongShape,
)
from keyhole.oracles import RestOracle
from keyhole.oracles.http.rest import AnswerPath, Template
from keyhole.targets import open_target
from support.served_head import WIDTH, free_port, head, some
from support.serving import Said, as_json, faking

pytest.importorskip("orjson")

OPENAI = '{"model": "m", "input": "$TOKENS", "encoding_format": "float"}'


def embeddings(body: bytes, _: Mapping[str, str]) -> Said:
    """An endpoint in the manner of embedding services, which sends what is ready first."""
    tokens = np.asarray(json.loads(body)["input"])
    items = [{"index": i, "embedding": [a]} for i, a in enumerate(head()(tokens).tolist())]
    return as_json({"data": items[::-1]})


def one_by_one(body: bytes, _: Mapping[str, str]) -> Said:
    tokens = np.asarray(json.loads(body)["instance"]["tokens"])
    return as_json({"prediction": float(head()(tokens[None])[0])})


def test_a_head_behind_an_endpoint_of_embeddings() -> None:
    with faking() as fake:
        fake.pages["/embed"] = embeddings
        oracle = RestOracle(f"http://127.0.0.1:{fake.port}/embed", WIDTH, OPENAI, "data.*.embedding", batch=50)
        np.testing.assert_array_equal(oracle(some()), head()(some())[:, None])
        result = kh.recover(oracle)
        assert result.certified
        truth = kh.SingleHead(head().score, head().value[:, None])
        assert kh.distance(result.params, truth) < 1e-12
        assert result.stats.details["server"]["retries"] == 0
        oracle.close()


def test_one_sequence_per_request_and_a_target(tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    request.write_text('{"instance": {"tokens": $SEQUENCE}}\n')
    with faking() as fake:
        fake.pages["/predict"] = one_by_one
        text = f"http+json://127.0.0.1:{fake.port}/predict#width={WIDTH}&request=@{request}&answer=prediction"
        target = open_target(f"{text}&headers=X-Team: red; X-Way: 2&connections=2")
        np.testing.assert_array_equal(target.oracle(some(3)), head()(some(3)))
        assert fake.asked["/predict"] == 3
        assert {(headers["X-Team"], headers["X-Way"]) for headers in fake.seen} == {("red", "2")}
        assert str(fake.port) in target.label
        target.oracle.close()


@pytest.mark.parametrize("outputs", [None, 2])
def test_an_endpoint_that_squeezes_its_answers(outputs: int | None) -> None:
    """A list of one is what it holds there, as after NumPy's squeeze."""
    values = np.random.default_rng(1).standard_normal((WIDTH,) if outputs is None else (WIDTH, outputs))
    truth = kh.SingleHead(head().score, values)

    def squeezed(body: bytes, _: Mapping[str, str]) -> Said:
        return as_json({"outputs": np.squeeze(truth(np.asarray(json.loads(body)["inputs"]))).tolist()})

    with faking() as fake:
        fake.pages["/f"] = squeezed
        oracle = RestOracle(f"http://127.0.0.1:{fake.port}/f", WIDTH)
        for count in (1, 2, 5):
            np.testing.assert_array_equal(oracle(some(count)), truth(some(count)))
        oracle.close()


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ("{}", r"\$TOKENS"),
        ('{"a": $TOKENS, "b": $TOKENS}', "once"),
        ('{"a": $TOKENS, "b": $SEQUENCE}', "once"),
        ('{"a": $TOKENS', "no JSON"),
        ("inputs=$TOKENS", "no JSON"),
    ],
)
def test_templates_that_are_none(request_: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Template(request_)


@pytest.mark.parametrize(
    ("said", "answer", "error", "words"),
    [
        (as_json({"scores": [1.0] * 5}), "outputs", WrongShape, r"the keys \['scores'\], without 'outputs'"),
        (as_json({"outputs": {"a": 1}}), "outputs.0", WrongShape, "outputs is the keys"),
        (as_json({"outputs": [1.0] * 4}), "outputs", WrongShape, "answers of shape"),
        (as_json({"outputs": ["a"] * 5}), "outputs", WrongShape, "no numbers"),
        (as_json({"outputs": [[1.0], [1.0, 2.0]]}), "outputs", WrongShape, "no numbers"),
        (as_json({"outputs": [None] * 5}), "outputs", NonFiniteAnswer, "nan"),
        ((200, {}, b"<html>"), "outputs", BadAnswer, "no JSON"),
        (as_json({"error": "who?"}, 401), "outputs", AccessDenied, "who"),
        (
            as_json({"detail": [{"loc": ["body"], "msg": "inputs: field required"}]}, 422),
            "",
            QuestionRefused,
            "field req",
        ),
        (as_json({"outputs": [1.0, 2.0]}), "outputs", WrongShape, r"answers of shape \(2,\)"),
    ],
)
def test_replies_without_answers(said: Said, answer: str, error: type[KeyholeError], words: str) -> None:
    with faking() as fake:
        fake.pages["/f"] = said
        oracle = RestOracle(f"http://127.0.0.1:{fake.port}/f", 4, answer=answer, retries=0)
        with pytest.raises(error, match=words):
            oracle(some(width=4))


def test_paths_lead_through_keys_places_and_every_item() -> None:
    message: Any = {"data": [{"e": [1, 2]}, {"e": [3, 4]}]}
    for path, found in (("data.*.e", [[1, 2], [3, 4]]), ("data.1.e.0", 3), ("", message), ("data.*.e.1", [2, 4])):
        assert AnswerPath(path).read(message, "u") == found
    for places in ([1, 1], [0, 2], [True, False], ["1", "0"], [1]):  # these say no order
        items = [{"index": place, "e": n} for n, place in enumerate(places)]
        if len(places) == 1:
            items.append({"e": 1})
        assert AnswerPath("*.e").read(items, "u") == [0, 1]


def test_wrong_use(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="how wide"):
        open_target("http+json://127.0.0.1:1/f")
    with pytest.raises(FileError, match="cannot read the request"):
        RestOracle("http://127.0.0.1:1/f", 4, f"@{tmp_path / 'none.json'}")
    with pytest.raises(UsageError, match="batch"):
        RestOracle("http://127.0.0.1:1/f", 4, batch=0)
    with pytest.raises(UsageError, match="Name: text"):
        open_target("http+json://127.0.0.1:1/f#width=4&headers=nonsense")
    with pytest.raises(ServerUnreachable):
        RestOracle(f"http://127.0.0.1:{free_port()}/f", 4, retries=0)(some(width=4))
