"""Heads with a residual: recovered as without it, right or admitted, and kept, compared and verified as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import floats
from keyhole.gauge.redundancy import redundancy
from keyhole.recover import diagnose
from keyhole.targets import open_target
from support.heads import covered, layer
from support.targets import example


def box(heads: int, width: int, seed: int, size: float = 1.0, **options: Any) -> kh.Residual:
    made = layer(heads, width, width, np.random.default_rng([seed, heads, width]), **options)
    values = [kh.SingleHead(head.score, size * head.value, head.score_bias) for head in made.heads]
    return kh.Residual(kh.MultiHead(values, made.output_bias))


def within_bars(result: kh.Recovery, truth: kh.Residual) -> bool:
    """Whether every entry of every head lies within its radius."""

    tiny = float(np.finfo(np.float64).tiny)  # what is read exactly has no radius

    def plain(found: kh.Residual, more: float) -> kh.MultiHead:
        def numbers(array: Any) -> Any:
            return np.zeros(truth.width) + more if array is None else floats(array) + more

        return kh.MultiHead([kh.SingleHead(*map(numbers, (h.score, h.value, h.score_bias))) for h in found.heads])

    class Plain:
        params = plain(result.params, 0.0)

        class certificate:  # noqa: N801 - stands in for an attribute
            radius = plain(result.certificate.radius, tiny)

    return covered(Plain, truth.attention)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("positions", ["last", "all"])
def test_as_many_queries_as_without_it_and_four_more(heads: int, positions: str) -> None:
    truth = box(heads, 8, 1)
    methods = {"positions": positions, "width": 8}
    seen = truth if positions == "last" else truth.at_all_positions
    bare = truth.attention if positions == "last" else truth.attention.at_all_positions
    result = kh.recover(kh.FunctionOracle(seen, **methods), "residual")
    plain = kh.recover(kh.FunctionOracle(bare, **methods), "multi-head")
    assert kh.distance(result.params, truth) < 1e-9
    assert within_bars(result, truth)
    assert result.stats.queries <= plain.stats.queries + 4 + 8  # a coarser look may take a token or two more
    assert isinstance(result.certificate.radius, kh.Residual)
    assert any("last token" in assumption for assumption in result.certificate.assumptions)


def test_one_head_is_read_as_one() -> None:
    truth = box(1, 12, 2)
    result = kh.recover(kh.FunctionOracle(truth, width=12), "residual", heads=1)
    assert isinstance(result.params.attention, kh.SingleHead)
    assert kh.distance(result.params, truth) < 1e-9
    assert result.stats.queries <= 12 + 12 + 1 + 12 + 10


@pytest.mark.parametrize("size", [1.0, 1e-3, 10.0])
@pytest.mark.parametrize("dtype", ["numpy-float64", "numpy-float32", "torch-float64"])
def test_a_fresh_box_is_right_or_admitted(dtype: str, size: float, fresh_seed: int) -> None:
    like = example(dtype)
    for heads in (1, 2, 4):
        truth = box(heads, 6, fresh_seed, size=size, bias=heads > 1)
        oracle = kh.FunctionOracle(truth, width=6, like=like)
        result = kh.recover(oracle, "residual", throw=False, **({"heads": 1} if heads == 1 else {}))
        assert not result.certified or within_bars(result, truth), (heads, result.message)


def test_auto_finds_out() -> None:
    truth = box(2, 8, 3)
    result = kh.recover(kh.FunctionOracle(truth, width=8))
    assert result.method == "residual"
    assert result.stats.details["diagnosis"] == "residual"
    assert kh.distance(result.params, truth) < 1e-9


def test_one_head_is_told_from_several() -> None:
    for heads, options in ((1, {"heads": 1}), (3, {})):
        found = diagnose(kh.FunctionOracle(box(heads, 8, 4), width=8))
        assert (found.method, found.options) == ("residual", options)


def test_what_is_no_residual_is_not_certified() -> None:
    rng, heads = np.random.default_rng(0), box(2, 6, 5).attention
    project, scale, shift = rng.standard_normal((6, 6)), *rng.standard_normal((2, 6))
    wrong: dict[str, Any] = {
        "none": heads,
        "scaled": lambda x: heads(x) + 1.001 * x[:, -1],
        "projected": lambda x: heads(x) + x[:, -1] @ project,
        "of the first token": lambda x: heads(x) + x[:, 0],
        "normalised": lambda x: _normalised(heads(x) + x[:, -1]) * scale + shift,
    }
    for name, function in wrong.items():
        result = kh.recover(kh.FunctionOracle(function, width=6), "residual", throw=False)
        assert not result.certified, name
    narrow = kh.recover(kh.FunctionOracle(lambda x: heads(x)[:, :3], width=6), "residual", throw=False)
    assert narrow.outcome is kh.Outcome.WRONG_FAMILY
    assert "no residual" in narrow.message


def _normalised(x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def test_a_run_that_ends_early_keeps_what_it_had() -> None:
    oracle = kh.FunctionOracle(box(1, 8, 6), width=8)
    whole = kh.recover(oracle, "residual", heads=1)
    early = kh.recover(oracle, "residual", heads=1, budget=whole.stats.queries - 3, throw=False)
    assert early.outcome is kh.Outcome.BUDGET_EXHAUSTED
    for wrong in (0, 1.5, True):
        with pytest.raises(kh.KeyholeError, match="heads must be"):
            kh.recover(oracle, "residual", heads=wrong)


def test_it_is_kept_compared_and_verified(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    single = kh.Residual(kh.SingleHead(rng.standard_normal((4, 4)), rng.standard_normal((4, 4))))
    for params in (single, box(2, 4, 7)):
        params.save(tmp_path / "p.safetensors")
        again = kh.load(tmp_path / "p.safetensors")
        tokens = rng.standard_normal((3, 5, 4))
        np.testing.assert_array_equal(again(tokens), params(tokens))
        np.testing.assert_allclose(params.at_all_positions(tokens)[:, -1], params(tokens), rtol=1e-12)
        assert kh.distance(again, params) == 0.0
        assert kh.equivalent(kh.canonical(params), params)
        assert redundancy(params).family == "residual"
        for kind in kh.kinds(params):
            other = kh.witness(params, kind)
            short = tokens[:, : other.max_length]
            np.testing.assert_allclose(other.params(short), params(short), atol=1e-9)
        oracle = kh.FunctionOracle(params, width=4)
        assert kh.verify(oracle, params).conclusion == "same"
        assert kh.verify(kh.FunctionOracle(params.attention, width=4), params).conclusion == "different"
    with pytest.raises(kh.KeyholeError, match="cannot compare"):
        kh.distance(single, single.attention)
    with pytest.raises(kh.KeyholeError, match="as many outputs"):
        kh.Residual(kh.SingleHead(np.eye(4), np.ones((4, 3))))


def test_a_demo_has_one() -> None:
    target = open_target("demo:multi-head?heads=2&width=6&outputs=6&residual=1")
    assert isinstance(target.truth, kh.Residual)
    assert "residual" in target.label
    with pytest.raises(kh.KeyholeError, match="outputs=16"):
        open_target("demo:multi-head?residual=1")


@pytest.mark.parametrize("seed", range(3))
def test_strong_scores_of_low_rank_beside_small_values(seed: int) -> None:
    """A wide radius of the output bias says nothing of scores, by which long tokens choose."""
    rng = np.random.default_rng([seed, 91])
    score = 1e3 * rng.standard_normal((8, 5)) @ rng.standard_normal((5, 8))
    heads = [kh.SingleHead(each, 1e-3 * rng.standard_normal((8, 8))) for each in (score, 300 * np.eye(8))]
    truth = kh.Residual(kh.MultiHead(heads))
    result = kh.recover(kh.FunctionOracle(truth, width=8), "residual", seed=seed, throw=False)
    assert result.certified, result.message
    assert within_bars(result, truth)


@pytest.mark.parametrize("heads", [1, 2])
def test_values_that_undo_it_leave_single_tokens_without_an_answer(heads: int) -> None:
    rng = np.random.default_rng(heads)
    values = [rng.standard_normal((5, 5)) for _ in range(heads - 1)]
    values.append(-np.eye(5) - sum(values))
    truth = kh.Residual(kh.MultiHead([kh.SingleHead(rng.standard_normal((5, 5)), value) for value in values]))
    result = kh.recover(kh.FunctionOracle(truth, width=5), throw=False)
    assert result.certified, result.message
    assert kh.distance(result.params, truth) < 1e-9
