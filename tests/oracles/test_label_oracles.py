"""Oracles that answer with labels: what they may return, over HTTP too, and wrappers that make and flip labels."""

from __future__ import annotations

import numpy as np
import pytest

import keyhole as kh
from keyhole.audit.defences import parse_defence
from keyhole.errors import UsageError, WrongShape
from keyhole.oracles import Flipped, HttpOracle, Labelled
from keyhole.session import box_of
from keyhole.targets import open_target


def truth(classes: int | None = None) -> kh.Labels:
    rng = np.random.default_rng(3)
    value = rng.standard_normal(4 if classes is None else (4, classes))
    head = kh.SingleHead(rng.standard_normal((4, 4)), value)
    return kh.Labels(head) if classes is None else kh.Labels(head, tuple(range(classes)))


def some(count: int = 50) -> np.ndarray:
    return np.random.default_rng(4).standard_normal((count, 3, 4))


def test_labels_are_whole_numbers_of_the_family() -> None:
    tokens = some()
    for classes in (None, 3):
        labels = truth(classes)
        answers = labels.attention(tokens)
        expected = np.where(answers > 0, 1, -1) if classes is None else np.argmax(answers, axis=1)
        assert np.array_equal(labels(tokens), expected)
        oracle = Labelled(kh.FunctionOracle(labels.attention, width=4))
        assert np.array_equal(oracle(tokens), expected)
        assert oracle.signature.answers == "labels"
        assert "labels" in box_of(oracle)


def test_flipped_labels_are_wrong_at_their_rate() -> None:
    labels = truth(5)
    oracle = Flipped(kh.FunctionOracle(labels, width=4, answers="labels"), 0.2, labels.labels, seed=1)
    answers, right = oracle(some(4000)), labels(some(4000))
    assert abs(np.mean(answers != right) - 0.2) < 0.03
    assert set(answers) == {0, 1, 2, 3, 4}
    assert oracle.signature.noise == kh.Noise.flipped(0.2)
    assert kh.Noise.parse("flipped:0.2") == kh.Noise.flipped(0.2)
    with pytest.raises(UsageError):
        kh.Noise.flipped(0.5)


def test_what_is_no_label_is_said() -> None:
    numbers = kh.FunctionOracle(truth().attention, width=4, answers="labels")
    with pytest.raises(WrongShape, match="no label"):
        numbers(some())
    with pytest.raises(UsageError, match="answers must be"):
        kh.FunctionOracle(truth(), width=4, answers="classes")  # type: ignore[arg-type]


def test_a_file_keeps_labels(tmp_path: object) -> None:
    for labels in (truth(), truth(3), kh.Labels(truth().attention, (0, 1))):
        path = f"{tmp_path}/labels.safetensors"
        labels.save(path)
        found = kh.load(path)
        assert isinstance(found, kh.Labels)
        assert found.labels == labels.labels
        assert kh.distance(found, labels) == 0


def test_servers_tell_that_answers_are_labels() -> None:
    pytest.importorskip("orjson")
    pytest.importorskip("fastapi")
    from support.serving import serving  # noqa: PLC0415 - needs what is looked for above

    target = open_target("demo:single-head?width=4&labels=1&seed=2")
    with serving(target.oracle) as server:
        oracle = HttpOracle(server.url)
        assert oracle.signature.answers == "labels"
        result = kh.recover(oracle, target_error=1e-3)
        assert result.method == "labels"
        assert kh.distance(result.params, target.truth) < 2e-3
        oracle.close()


def test_demos_tell_labels() -> None:
    for text in ("demo:single-head?width=4&labels=1", "demo:single-head?width=4&classes=3&flips=0.1"):
        target = open_target(text)
        assert target.oracle.signature.answers == "labels"
        assert isinstance(target.truth, kh.Labels)
    with pytest.raises(UsageError, match="flips"):
        open_target("demo:single-head?width=4&labels=1&noise=0.1")


def test_a_defence_can_tell_labels_only() -> None:
    defence = parse_defence("labels+clip:1")
    assert defence.text == "labels+clip:1"
    assert defence.around(kh.FunctionOracle(truth().attention, width=4)).signature.answers == "labels"
    with pytest.raises(UsageError, match="two ways"):
        parse_defence("labels+round:3")


def test_labels_show_neither_a_factor_nor_a_common_row() -> None:
    labels = truth(3)
    head = labels.attention
    same = kh.SingleHead(head.score, 2.5 * head.value + np.arange(4.0)[:, None])
    assert kh.equivalent(labels, kh.Labels(same, (0, 1, 2)))
    assert not kh.equivalent(labels, kh.Labels(kh.SingleHead(head.score, -head.value), (0, 1, 2)))
    sign = truth()
    moved = kh.SingleHead(1.001 * sign.attention.score, sign.attention.value)
    assert not kh.equivalent(sign, kh.Labels(moved))
    assert np.array_equal(kh.canonical(labels)(some()), labels(some()))
