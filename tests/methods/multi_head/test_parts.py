"""Several heads of other attention than a softmax: right within their radii, or admitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.cli import main
from keyhole.errors import UsageError
from keyhole.families.forms import QKNorm, QKNormRotary, Rotary, geometric
from keyhole.families.parts import Alibi, Attention, DistanceTable, Sink, Softcap, Window
from keyhole.gauge.compare import align
from keyhole.gauge.redundancy import redundancy
from keyhole.methods.multi_head.vector.parts.caps import rest_and_height, solve_cap
from keyhole.methods.multi_head.vector.parts.long_tokens import Odds

HEADS, WIDTH, OUTPUTS = 3, 8, 9
CAPS, SINKS, SLOPES = (6.0, 30.0, 2.0), (0.5, 1.5, -1.0), (0.5, 0.25, 0.1)
CASES: dict[str, tuple[Callable[[int], Attention], dict[str, str]]] = {
    "caps": (lambda h: Attention(link=Softcap(CAPS[h])), {"link": "softcap"}),
    "sinks": (lambda h: Attention(normaliser=Sink(SINKS[h])), {"normaliser": "sink"}),
    "slopes": (lambda h: Attention(position_bias=Alibi(SLOPES[h])), {"position_bias": "alibi"}),
    "tables": (
        lambda h: Attention(position_bias=DistanceTable(np.sin(np.arange(3.0) + h))),
        {"position_bias": "table"},
    ),
    "window": (lambda _: Attention(position_bias=Window(5)), {"position_bias": "window"}),
    "caps and sinks": (
        lambda h: Attention(link=Softcap(CAPS[h]), normaliser=Sink(SINKS[h])),
        {"link": "softcap", "normaliser": "sink"},
    ),
    "slopes and sinks": (
        lambda h: Attention(normaliser=Sink(SINKS[h]), position_bias=Alibi(SLOPES[h])),
        {"normaliser": "sink", "position_bias": "alibi"},
    ),
}


def heads_of(attention: Callable[[int], Attention], rng: np.random.Generator, scale: float = 1.0) -> kh.MultiHead:
    made = []
    for head in range(HEADS):
        score = scale * rng.standard_normal((WIDTH, 3)) @ rng.standard_normal((3, WIDTH)) / WIDTH
        made.append(kh.SingleHead(score, rng.standard_normal((WIDTH, OUTPUTS)), attention=attention(head)))
    return kh.MultiHead(made, rng.standard_normal(OUTPUTS))


def rotary_heads(rng: np.random.Generator, angles: np.ndarray | None = None) -> kh.MultiHead:
    """Three heads, the first two of which share a key."""
    keys = [rng.standard_normal((4, WIDTH)) / 2 for _ in range(2)]
    made: list[Any] = []
    for head in range(HEADS):
        form = Rotary(rng.standard_normal((4, WIDTH)) / 2, keys[head // 2], geometric(2) if angles is None else angles)
        made.append(kh.FormHead(form, rng.standard_normal((WIDTH, OUTPUTS))))
    return kh.MultiHead(made)


def recovered(box: Any, seed: int = 0, **options: Any) -> kh.Recovery:
    return kh.recover(kh.FunctionOracle(box, width=WIDTH), "parts", heads="several", seed=seed, throw=False, **options)


def assert_within_radii(result: kh.Recovery, truth: kh.MultiHead) -> None:
    assert result.certified, result.message
    assert result.params is not None
    assert result.certificate.radius is not None
    found, radius = result.params.arrays(), result.certificate.radius.arrays()
    known = align(result.params, truth)
    assert set(known) == set(found)
    for name, array in known.items():
        assert np.all(np.abs(found[name] - array) <= radius[name] + 1e-15 * np.abs(array)), name


@pytest.mark.parametrize("name", CASES)
def test_parts_of_several_heads_are_found_where_none_is_named(name: str, fixed_seed: int) -> None:
    rng = np.random.default_rng(fixed_seed)
    truth = heads_of(CASES[name][0], rng)
    result = recovered(truth, fixed_seed)
    assert_within_radii(result, truth)
    found = result.stats.details["parts_tried"][-1]
    assert all(option in found for option in CASES[name][1].values()), found


@pytest.mark.parametrize(("method", "options"), [("parts", {"heads": "several"}), ("auto", {})])
def test_sequences_too_short_to_find_parts_are_said_to_be(method: str, options: dict[str, str]) -> None:
    box = kh.FunctionOracle(heads_of(lambda _: Attention(), np.random.default_rng(5)), width=WIDTH, max_length=2)
    result = kh.recover(box, method, throw=False, **options)
    assert not result.certified
    if method == "parts":
        assert result.outcome is kh.Outcome.NOT_IDENTIFIABLE
        assert "max_length" in result.message


def test_auto_goes_on_with_several_heads_of_parts() -> None:
    truth = heads_of(CASES["slopes and sinks"][0], np.random.default_rng(3))
    assert_within_radii(kh.recover(kh.FunctionOracle(truth, width=WIDTH), throw=False), truth)
    foreign = heads_of(lambda _: Attention(), np.random.default_rng(4))
    result = kh.recover(kh.FunctionOracle(lambda tokens: np.tanh(foreign(tokens)), width=WIDTH), throw=False)
    assert not result.certified


def test_heads_that_tell_places_apart_are_refused_by_few_queries() -> None:
    truth = heads_of(CASES["slopes"][0], np.random.default_rng(7))
    result = kh.recover(kh.FunctionOracle(truth, width=WIDTH), "multi-head", throw=False)
    assert result.outcome is kh.Outcome.WRONG_FAMILY
    assert "at one place" in result.message
    assert result.stats.queries < 200  # one by one they would take some 500


@pytest.mark.parametrize("name", CASES)
def test_heads_are_found_with_their_constants(name: str, fixed_seed: int) -> None:
    rng = np.random.default_rng(fixed_seed)
    attention, options = CASES[name]
    truth = heads_of(attention, rng, scale=10 ** rng.uniform(-2, 2))
    result = recovered(truth, fixed_seed, **options)
    assert_within_radii(result, truth)
    assert kh.distance(result.params, truth) < 1e-8
    assert result.stats.queries < 4 * result.stats.counting_bound


def test_rotary_heads_are_found_with_those_that_share_a_key(fixed_seed: int, tmp_path: Path) -> None:
    truth = rotary_heads(np.random.default_rng(fixed_seed))
    result = recovered(truth, fixed_seed, form="rotary")
    assert_within_radii(result, truth)
    assert sorted(len(group) for group in result.stats.details["groups"]) == [1, 2]
    result.params.save(tmp_path / "heads.safetensors")
    again = kh.load(tmp_path / "heads.safetensors")
    tokens = np.random.default_rng(0).standard_normal((2, 5, WIDTH))
    assert np.array_equal(again(tokens), result.params(tokens))
    assert kh.distance(again, truth) < 1e-8


def test_pairs_that_do_not_turn_are_found(fixed_seed: int, tmp_path: Path) -> None:
    """As partial rotary positions leave them: of these the product of keys and queries is known."""
    truth = rotary_heads(np.random.default_rng(fixed_seed), np.array([0.9, 0.0]))
    result = recovered(truth, fixed_seed, form="rotary", frequencies=np.array([0.9]))
    assert_within_radii(result, truth)
    assert kh.distance(result.params, truth) < 1e-8
    assert sorted(len(group) for group in result.stats.details["groups"]) == [1, 2]
    result.params.save(tmp_path / "heads.safetensors")
    assert kh.distance(kh.load(tmp_path / "heads.safetensors"), truth) < 1e-8


@pytest.mark.parametrize("kind", ["rotary", "partly", "window", "slopes", "table"])
def test_biases_of_keys_and_queries_are_found(kind: str, fixed_seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(fixed_seed)
    options: dict[str, Any] = {"form": "rotary"}
    if kind in ("slopes", "table"):
        attention, options = CASES["slopes" if kind == "slopes" else "tables"]
        biased = [replace(head, score_bias=rng.standard_normal(WIDTH)) for head in heads_of(attention, rng).heads]
        truth = kh.MultiHead(biased, rng.standard_normal(OUTPUTS))
    else:
        plain = rotary_heads(rng, np.array([0.9, 0.0 if kind == "partly" else 0.2]))
        heads: list[Any] = []
        attention = Attention(position_bias=Window(5)) if kind == "window" else Attention()
        for head in plain.heads:
            query_bias, key_bias = rng.standard_normal((2, 4))
            form = replace(head.form, query_bias=query_bias, key_bias=key_bias)  # type: ignore[type-var]
            heads.append(replace(head, form=form, attention=attention))
        truth = kh.MultiHead(heads, rng.standard_normal(OUTPUTS))
        options |= {"frequencies": np.array([0.9] if kind == "partly" else [0.9, 0.2])}
        options |= {"position_bias": "window"} if kind == "window" else {}
    result = recovered(truth, fixed_seed, **options)
    assert_within_radii(result, truth)
    assert kh.distance(result.params, truth) < 1e-6
    result.params.save(tmp_path / "heads.safetensors")
    assert kh.distance(kh.load(tmp_path / "heads.safetensors"), truth) < 1e-6


@pytest.mark.parametrize("width", [4, 5])
def test_normed_rotary_heads_behind_a_window_are_found(fixed_seed: int, width: int) -> None:
    """Of a window of four tokens three numbers of zero tokens show, and one distance more."""
    rng = np.random.default_rng(fixed_seed)
    gains, angles, made = np.array([1.2, 0.9, 1.0, 1.1]), np.array([1.0, 0.2]), list[Any]()
    for _ in range(2):
        query, key = rng.standard_normal((2, 4, WIDTH))
        form = QKNormRotary(query, key, gains, gains, angles)
        window = Attention(position_bias=Window(width))
        made.append(kh.FormHead(form, rng.standard_normal((WIDTH, OUTPUTS)), attention=window))
    truth = kh.MultiHead(made)
    options = {"form": "qk-norm-rotary", "frequencies": angles, "position_bias": "window"}
    result = recovered(truth, fixed_seed, **options)
    assert result.certified, result.message
    assert kh.distance(result.params, truth) < 1e-6


@pytest.mark.parametrize("epsilon", [None, np.array([0.3, 1e-6])], ids=["plain", "epsilon"])
def test_normed_heads_are_found(fixed_seed: int, epsilon: np.ndarray | None) -> None:
    rng = np.random.default_rng(fixed_seed)
    gain = np.array([2.0, 1.5, 1.0])
    made: list[Any] = []
    for _ in range(2):
        query, key = rng.standard_normal((2, 3, WIDTH))
        made.append(kh.FormHead(QKNorm(query, key, gain, epsilon), rng.standard_normal((WIDTH, OUTPUTS))))
    truth = kh.MultiHead(made)
    result = recovered(truth, fixed_seed, form="qk-norm")
    assert result.certified, result.message
    assert kh.distance(result.params, truth) < 1e-7


def test_other_parts_than_those_named_are_never_certified(fixed_seed: int) -> None:
    rng = np.random.default_rng(fixed_seed)
    for name, (attention, _) in CASES.items():
        for other in ({"link": "softcap"}, {"normaliser": "sink"}):
            if other != CASES[name][1]:
                assert not recovered(heads_of(attention, rng), fixed_seed, **other).certified, (name, other)
    turned = rotary_heads(rng, np.array([0.9, 0.3]))
    assert not recovered(turned, fixed_seed, form="rotary").certified
    assert recovered(turned, fixed_seed, form="rotary", frequencies=np.array([0.9, 0.3])).certified


def test_what_cannot_be_told_apart_is_admitted(fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    one, two, _ = heads_of(CASES["caps"][0], rng).heads
    same_value = kh.MultiHead([one, kh.SingleHead(two.score, one.value, attention=two.attention)])
    multiple = kh.MultiHead([one, kh.SingleHead(2 * one.score, two.value, attention=one.attention)])
    biased = kh.MultiHead([kh.SingleHead(one.score, one.value, np.ones(WIDTH), attention=one.attention)])
    for truth in (same_value, multiple, biased):
        result = recovered(truth, fresh_seed, link="softcap")
        assert result.outcome in (kh.Outcome.WRONG_FAMILY, kh.Outcome.SATURATED)
    bounded = kh.FunctionOracle(same_value, width=WIDTH, max_norm=10.0)
    assert "max_norm" in kh.recover(bounded, "parts", heads="several", link="softcap", throw=False).message
    with pytest.raises(UsageError, match="one of exp, softcap"):
        recovered(same_value, link="sigmoid")


def test_several_heads_of_parts_are_compared_whatever_their_order(fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    for truth in (heads_of(CASES["caps"][0], rng), rotary_heads(rng)):
        turned = kh.MultiHead(truth.heads[::-1], truth.output_bias)
        assert kh.equivalent(truth, turned)
        assert kh.distance(truth, turned) < 1e-12
        assert kh.distance(kh.canonical(truth), kh.canonical(turned)) < 1e-12
        fewer = kh.MultiHead(truth.heads[:2], truth.output_bias)
        assert kh.distance(truth, fewer) == 1.0
    other = heads_of(lambda h: Attention(link=Softcap(2 * CAPS[h])), np.random.default_rng(fresh_seed))
    assert kh.distance(heads_of(CASES["caps"][0], np.random.default_rng(fresh_seed)), other) > 0.1


@pytest.mark.parametrize("rest_known", [True, False])
def test_a_cap_is_found_to_its_deviation(rest_known: bool, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    cap, rest = 10 ** rng.uniform(0, 1.7), 1.0 if rest_known else 1 + np.exp(rng.standard_normal())
    logits = np.clip(rng.standard_normal(6), -0.5 * cap, 0.5 * cap) * 0.7
    mixes = np.vstack([rng.standard_normal((1, 6)), *[rng.standard_normal(6) * (logits @ logits) ** -0.5] * 2])
    mixes[1:] *= (min(2.5, 1.2 * cap) / (mixes[1] @ logits)) * np.array([[1.0], [-1.0]])
    odds = Odds(np.full(1, rest), np.full(1, cap))
    weights = odds.weights(np.concatenate([logits, mixes @ logits])[:, None])[:, 0]
    low = odds.weights(np.array([-np.inf]))[0]
    height = odds.weights(np.array([np.inf]))[0] - low
    middle = odds.weights(np.zeros(1))[0] / height
    assert rest_and_height(cap, middle, rest_known=rest_known) == pytest.approx((rest, height), rel=1e-9)
    found, deviation, _, _ = solve_cap(weights / height, mixes, middle, 1e-16 / height, rest_known=rest_known)
    assert abs(found - cap) <= 8 * deviation + 1e-12 * cap
    assert deviation < 1e-6 * cap


def test_witnesses_of_several_heads_of_parts_are_the_same_map(fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    truth, tokens = heads_of(CASES["caps and sinks"][0], rng), rng.standard_normal((4, 5, WIDTH))
    for kind in kh.kinds(truth):
        assert np.allclose(kh.witness(truth, kind).params(tokens), truth(tokens), atol=1e-9), kind
    with pytest.raises(UsageError, match="no witnesses"):
        kh.witness(rotary_heads(rng))
    for each in (truth, rotary_heads(rng)):
        with pytest.raises(UsageError, match="structure of several heads"):
            redundancy(each)


def test_command_line_and_report_take_several_heads_of_parts(tmp_path: Path) -> None:
    target, run = "demo:multi-head?heads=2&width=4&outputs=4&link=softcap&cap=9", str(tmp_path / "run")
    options = ["--method", "parts", "--option", "heads=several", "--option", "link=softcap", "--out", run]
    for arguments in (["recover", target, *options, "--quiet"], ["report", run]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
