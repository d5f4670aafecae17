"""What a box is, from a few questions; and what auto makes of it."""

from __future__ import annotations

import numpy as np
import pytest

import keyhole as kh
from benchmarks.support.strange_boxes import KINDS, right
from keyhole.oracles import Cast, Noisy, Rounded
from keyhole.recover import diagnose
from keyhole.targets import open_target


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_named(kind: str) -> None:
    box = KINDS[kind][1](np.random.default_rng(3), 16)
    found = diagnose(kh.FunctionOracle(box, width=16))
    assert right(found, kind, box)
    assert 0 < found.queries <= (700 if "GELU" in kind or "SiLU" in kind else 160)
    assert all(finding.evidence for finding in found.findings)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_box_is_named_right_or_not_certified(kind: str, fresh_seed: int) -> None:
    box = KINDS[kind][1](np.random.default_rng(fresh_seed), 8)
    oracle = kh.FunctionOracle(box, width=8)
    found = diagnose(oracle, seed=fresh_seed % 1000)
    if not right(found, kind, box) and found.method is not None:
        assert not kh.recover(oracle, found.method, throw=False, **found.options).certified


def test_what_is_found_besides_the_family() -> None:
    rng = np.random.default_rng(5)

    def found(kind: str, what: str) -> str | None:
        return diagnose(kh.FunctionOracle(KINDS[kind][1](rng, 16), width=16)).found(what)

    assert found("one head", "heads") == "1"
    assert found("one head", "score bias") == found("one head", "output bias") == "no"
    assert found("one head, biases", "score bias") == found("one head, biases", "output bias") == "yes"
    assert found("one head of rank 1 to 3", "score rank") in ("1", "2", "3")
    assert found("one head", "score rank") == "at least 5"
    assert found("ReLU net", "activation") == "relu"
    assert found("GELU net", "activation") == "gelu"
    assert found("GELU net, tanh form", "activation") == "gelu_tanh"
    assert found("SiLU net", "activation") == "silu"
    assert found("head, then a net", "residual") == "no"
    assert found("head with a residual, then a net", "residual") == "yes"


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("size", [0.01, 1.0, 10.0])
def test_activations_are_told_apart(activation: str, size: float, fresh_seed: int) -> None:
    """Also of neurons that bend slowly or quickly; where it is not told, it is not guessed."""
    rng = np.random.default_rng(fresh_seed)
    inner, offset, outer = size * rng.standard_normal((20, 8)), rng.standard_normal(20), rng.standard_normal(20)
    net = kh.ReluNet(inner, offset, outer, np.zeros(()), activation=activation)
    assert diagnose(kh.FunctionOracle(net, width=8)).found("activation") in (activation, "smooth")


def test_another_activation_is_not_taken_for_one_of_them() -> None:
    rng = np.random.default_rng(0)
    inner, outer = rng.standard_normal((20, 8)), rng.standard_normal(20)
    mish = kh.FunctionOracle(lambda x: (z := x[:, -1] @ inner.T) * np.tanh(np.logaddexp(0, z)) @ outer, width=8)
    found = diagnose(mish)
    assert found.found("activation") == "smooth"
    assert not kh.recover(mish, found.method, throw=False, **found.options).certified
    layer = KINDS["head, then a GELU or SiLU net"][1](rng, 8)
    assert diagnose(kh.FunctionOracle(layer, width=8)).method == "one-layer"
    bounded = kh.FunctionOracle(KINDS["GELU net"][1](rng, 8), width=8, max_norm=50.0)
    assert diagnose(bounded).found("activation") == "smooth"


@pytest.mark.parametrize("heads", [2, 5, 8])
def test_heads_are_counted(heads: int) -> None:
    target = f"demo:multi-head?heads={heads}&width=16&outputs=16&value_rank=2"
    assert diagnose(open_oracle(target)).found("heads") == str(heads)


def open_oracle(text: str) -> kh.FunctionOracle:
    oracle = open_target(text).oracle
    assert isinstance(oracle, kh.FunctionOracle)
    return oracle


@pytest.mark.parametrize("noise", ["gaussian", "rounded", "dtype"])
def test_noise_is_found_first(noise: str) -> None:
    oracle = open_oracle("demo:single-head?width=16")
    wrap = {
        "gaussian": lambda box: Noisy(box, 1e-4, seed=1, declared=False),
        "rounded": lambda box: Rounded(box, 5, declared=False),
        "dtype": lambda box: Cast(box, "float32", declared=False),
    }
    found = diagnose(wrap[noise](oracle))
    assert found.noise.kind == noise
    assert (found.family, found.method) == ("single-head", "robust")


def test_bounds_are_kept() -> None:
    head = KINDS["one head"][1](np.random.default_rng(0), 8)
    bounded = kh.FunctionOracle(head, width=8, max_norm=2.0, max_length=3)
    assert diagnose(bounded).family == "single-head"
    alone = kh.FunctionOracle(head, width=8, max_length=1)
    assert diagnose(alone).family == "linear"


@pytest.mark.parametrize("kind", ["2 to 8 heads, d outputs", "ReLU net", "head, then a net"])
def test_auto_goes_on_with_the_family_that_was_found(kind: str) -> None:
    family, make = KINDS[kind]
    truth = make(np.random.default_rng(2), 8)
    result = kh.recover(kh.FunctionOracle(truth, width=8))
    assert result.certified
    assert result.method == result.stats.details["diagnosis"] == family
    assert kh.distance(result.params, truth) < 1e-6
    assert sum(result.stats.stages.values()) == result.stats.queries
    assert result.stats.stages["triage"] <= 16


def test_auto_says_what_it_cannot_recover() -> None:
    box = KINDS["positions count"][1](np.random.default_rng(2), 8)
    result = kh.recover(kh.FunctionOracle(box, width=8), throw=False)
    assert result.outcome is kh.Outcome.WRONG_FAMILY
    assert "positional" in result.message


def test_auto_asks_nothing_twice_when_it_is_resumed(tmp_path) -> None:
    box = kh.FunctionOracle(KINDS["ReLU net"][1](np.random.default_rng(2), 8), width=8, name="net")
    whole = kh.recover(box)
    stopped = kh.recover(box, budget=whole.stats.queries - 20, journal=tmp_path / "j", throw=False)
    assert stopped.outcome is kh.Outcome.BUDGET_EXHAUSTED
    resumed = kh.recover(box, journal=tmp_path / "j")
    assert resumed.stats.queries == whole.stats.queries
    assert stopped.stats.new_queries + resumed.stats.new_queries == whole.stats.queries + whole.stats.heldout_queries
