"""Demos of heads with other parts than a softmax's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import keyhole as kh
from keyhole.errors import FileError, UsageError
from keyhole.families import FormHead, SingleHead
from keyhole.families.parts import KINDS, Attention, NoNormaliser, Sigmoid, Sink, Softcap, TopK
from keyhole.targets import open_target


@pytest.mark.parametrize(
    ("text", "attention"),
    [
        ("link=softcap&cap=20", Attention(link=Softcap(20.0))),
        ("link=sigmoid&bias=-1", Attention(link=Sigmoid(-1.0), normaliser=NoNormaliser())),
        ("normaliser=top-k&k=3", Attention(normaliser=TopK(3))),
    ],
)
def test_parts_are_named_in_the_text_of_a_demo(text: str, attention: Attention) -> None:
    target = open_target(f"demo:single-head?width=4&{text}")
    assert isinstance(target.truth, SingleHead)
    assert target.truth.attention == attention
    assert f"{text.partition('=')[0]} {text.partition('=')[2].partition('&')[0]}" in target.label
    again = open_target(target.text)
    assert again.text == target.text
    assert kh.distance(again.truth, target.truth) == 0


def test_a_table_is_drawn_from_the_seed_and_recovered() -> None:
    text = "demo:single-head?width=4&position_bias=table&distances=3"
    target, other = open_target(text), open_target(f"{text}&seed=1")
    assert isinstance(target.truth, SingleHead)
    names = {kind: getattr(target.truth.attention, kind).name for kind in KINDS}
    result = kh.recover(target.oracle, "parts", **names)
    assert kh.distance(result.params, target.truth) < 1e-12
    assert kh.distance(other.truth, target.truth) > 0.1
    plain = open_target("demo:single-head?width=4")
    np.testing.assert_array_equal(plain.truth.score, target.truth.score)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("link=softcup", "one of exp, softcap"),
        ("cap=3", "link=softcap"),
        ("link=linear&normaliser=sparsemax", "take the link 'exp'"),
        ("link=sigmoid&normaliser=sink", "sigmoid weights take the normaliser none or count"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(text: str, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        open_target(f"demo:single-head?width=4&{text}")


def test_an_epsilon_is_one_of_normed_keys_and_queries() -> None:
    target = open_target("demo:single-head?form=qk-norm&width=4&key_width=2&epsilon=0.1")
    assert isinstance(target.truth, FormHead)
    assert np.allclose(target.truth.arrays()["form.epsilon"], 0.2)
    for text in ("form=rotary&width=4&epsilon=0.1", "width=4&epsilon=0.1", "form=qk-norm&width=4&epsilon=-1"):
        with pytest.raises(UsageError, match="epsilon"):
            open_target(f"demo:single-head?{text}")


def test_constants_out_of_range_in_a_file_are_refused(tmp_path: Path) -> None:
    for part in (Attention(link=Softcap(0.0)), Attention(normaliser=Sink(np.nan))):
        kh.SingleHead(np.eye(3), np.ones(3), attention=part).save(tmp_path / "head.safetensors")
        with pytest.raises(FileError, match="out of its range"):
            open_target(f"file:{tmp_path / 'head.safetensors'}")


def test_biases_are_those_of_rotary_keys_and_queries() -> None:
    target = open_target("demo:single-head?form=rotary&width=8&key_width=4&outputs=8&biases=0.5")
    assert target.truth is not None
    assert {"form.query_bias", "form.key_bias"} <= set(target.truth.arrays())
    result = kh.recover(target.oracle, "multi-head", form="rotary")
    assert kh.distance(result.params.simplest(), target.truth) < 1e-8
    for text in ("form=qk-norm&width=4&biases=0.1", "width=4&biases=0.1"):
        with pytest.raises(UsageError, match="biases"):
            open_target(f"demo:single-head?{text}")
