"""A diagnosis goes on with the parts of one head where it is no softmax attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.special import softmax

import keyhole as kh
from benchmarks.support.attention_zoo import KINDS, OTHERS, Kind
from keyhole.recover import diagnose
from keyhole.targets import open_target

NAMED = {
    "softcap": {"link": "softcap"},
    "sigmoid": {"link": "sigmoid", "normaliser": "none"},
    "sigmoid/n": {"link": "sigmoid", "normaliser": "count"},
    "table": {"position_bias": "table"},
    "window": {"position_bias": "window"},
    "top-k": {"normaliser": "top-k"},
    "softcap, log n": {"link": "softcap", "length_law": "log"},
    "rotary": {"form": "rotary"},
}


def oracle_of(kind: Kind, seed: int = 0) -> kh.FunctionOracle:
    box = kind.draw(np.random.default_rng(seed), 8)

    def answer(tokens: Any) -> Any:
        with np.errstate(all="ignore"):
            return box(tokens)

    return kh.FunctionOracle(answer, width=8)


@pytest.mark.parametrize("name", NAMED)
def test_the_parts_are_options_of_the_method_that_recovers_such_a_head(name: str) -> None:
    found = diagnose(oracle_of(KINDS[name]))
    assert found.options == NAMED[name]
    assert found.family == ("form-head" if "form" in NAMED[name] else "single-head")
    assert found.method in ("parts", None if "form" in NAMED[name] else "parts")


@pytest.mark.parametrize("name", ["atan cap", "Laplace", "temperature 1/n"])
def test_what_has_no_name_stays_unknown_and_is_said_why(name: str) -> None:
    found = diagnose(oracle_of(OTHERS[name]))
    assert (found.family, found.method) == ("unknown", None)
    assert found.findings[-1].found == "other"


def test_softmax_attention_is_a_single_head_without_options() -> None:
    found = diagnose(oracle_of(KINDS["softmax"]))
    assert (found.family, found.method, found.options) == ("single-head", "single-head", {})


def test_auto_names_parts_once_softmax_attention_was_refuted() -> None:
    result = kh.recover(oracle_of(KINDS["softcap"]))
    assert (result.method, result.params.words.keys()) == ("parts", {"link"})
    assert result.stats.details["tried_first"] in ("single-head", "multi-head")
    assert result.stats.stages["naming of parts"] <= 66


@pytest.mark.parametrize("name", ["softcap, ALiBi", "sink", "sigmoid/n", "linear, sum", "linear"])
def test_auto_names_parts_before_it_tries_what_two_tokens_have_excluded(name: str) -> None:
    result = kh.recover(oracle_of(KINDS[name]))
    assert (result.method, "tried_first" in result.stats.details) == ("parts", False)
    assert result.stats.queries <= 1.05 * result.stats.counting_bound + 110


def test_several_heads_of_one_output_are_not_named_first() -> None:
    rng = np.random.default_rng(3)
    heads = kh.MultiHead([kh.SingleHead(rng.standard_normal((8, 8)), rng.standard_normal(8)) for _ in range(2)])
    result = kh.recover(kh.FunctionOracle(heads, width=8))
    assert (result.method, "naming of parts" in result.stats.stages) == ("multi-head", False)


@pytest.mark.parametrize("name", ["softmax", "softmax, score bias", "softmax, output bias"])
def test_auto_asks_nothing_more_of_softmax_attention(name: str) -> None:
    result = kh.recover(oracle_of(KINDS[name]))
    assert result.method == "single-head"
    assert not {"naming of parts", "diagnosis"} & set(result.stats.stages)


def test_the_method_parts_names_them_itself() -> None:
    result = kh.recover(oracle_of(KINDS["sink, ALiBi"]), "parts")
    assert result.stats.details["parts"]["normaliser"] == "sink"
    with pytest.raises(kh.RecoveryFailed, match="length law"):
        kh.recover(oracle_of(OTHERS["temperature 1/n"]), "parts")


def test_a_length_law_that_is_not_named_ends_with_how_to_name_it() -> None:
    target = open_target("demo:single-head?width=6&length_law=table")
    ended = kh.recover(target.oracle, throw=False)
    assert not ended.certified
    assert "--method parts --option length_law=table" in (ended.message or "")
    assert kh.recover(target.oracle, "parts", length_law="table").certified


def test_a_window_of_two_tokens_is_named_and_recovered() -> None:
    rng = np.random.default_rng(0)
    score, value = rng.standard_normal((4, 4)) / 2, rng.standard_normal(4)

    def box(tokens: Any) -> Any:
        logits = np.vecdot(tokens, (tokens[:, -1] @ score.T)[:, None])
        return np.vecdot(softmax(logits[:, -2:], axis=1), tokens[:, -2:] @ value)

    result = kh.recover(kh.FunctionOracle(box, width=4))
    np.testing.assert_allclose(result.params.score, score, atol=1e-10)
