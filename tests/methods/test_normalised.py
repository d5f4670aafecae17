"""Norms before and after attention: recovered through the norm, right or admitted, kept, compared and verified."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.families.norms.normalise import mean_free, normalise, undone
from keyhole.methods import METHODS
from keyhole.methods.base import Estimate
from keyhole.methods.normalised.before.standard_errors import with_standard_errors
from keyhole.targets import open_target

BEFORE = "demo:multi-head?width=8&heads=2&outputs=8&norm_before="
NORMED = "normalised"
AFTER = "demo:multi-head?width=16&heads=4&outputs=16&value_rank=4&norm_after=layer&residual=1"


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_every_vector_of_the_ball_is_reached(norm: str) -> None:
    vectors = np.random.default_rng(0).standard_normal((20, 7))
    vectors = vectors @ mean_free(7, norm) @ mean_free(7, norm).T
    vectors *= 0.9 * 7**0.5 / np.linalg.norm(vectors, axis=1, keepdims=True)
    assert np.max(np.abs(normalise(undone(vectors, 1e-5), np.asarray(1e-5), norm) - vectors)) < 1e-14


@pytest.mark.parametrize("extra", ["layer", "layer&residual=1", "rms&residual=1&score_bias=0.3&output_bias=0.3"])
def test_heads_behind_a_norm_are_recovered(extra: str, tmp_path: Path) -> None:
    target = open_target(BEFORE + extra)
    result = kh.recover(target.oracle)
    assert (result.certified, result.method) == (True, "normalised")
    assert target.distance(result.params) < 1e-9
    result.params.save(tmp_path / "layer.safetensors")
    assert kh.distance(kh.load(tmp_path / "layer.safetensors"), target.truth) < 1e-9
    assert kh.verify(target.oracle, target.truth).same


def test_a_norm_before_and_a_residual_are_told_at_once() -> None:
    """Few queries more than of the method itself: no net is looked for first, and no noise."""
    queries = [kh.recover(open_target(BEFORE + "layer&residual=1").oracle, m).stats.queries for m in ("auto", NORMED)]
    assert queries[0] <= queries[1] + 16


def test_heads_before_a_norm_are_recovered(tmp_path: Path) -> None:
    target = open_target(AFTER)
    result = kh.recover(target.oracle, "normalised", place="after")
    assert result.certified
    assert target.distance(result.params) < 1e-8
    result.params.save(tmp_path / "layer.safetensors")
    assert kh.distance(kh.load(tmp_path / "layer.safetensors"), target.truth) < 1e-8


def test_gain_and_bias_before_heads_are_part_of_them() -> None:
    rng = np.random.default_rng(1)
    heads = [kh.SingleHead(*rng.standard_normal((2, 5, 5)), rng.standard_normal(5)) for _ in range(2)]
    attention, (gain, bias) = kh.MultiHead(heads, rng.standard_normal(5)), rng.standard_normal((2, 5))
    tokens = rng.standard_normal((6, 4, 5))
    for norm in ("layer", "rms"):
        made = kh.NormBefore.folded(attention, gain, 1e-3, bias, norm)
        expected = attention(normalise(tokens, np.asarray(1e-3), norm) * gain + bias)
        assert np.max(np.abs(made(tokens) - expected)) < 1e-12


@pytest.mark.parametrize("after", [False, True])
def test_error_bars_hold(after: bool) -> None:
    truth = open_target(AFTER if after else BEFORE + "layer").truth
    assert truth is not None
    rng, size = np.random.default_rng(2), 1e-7
    near = {name: array + size * rng.uniform(-1, 1, array.shape) for name, array in truth.arrays().items()}
    radius = truth.with_arrays({name: size + 0 * array for name, array in near.items()})
    near["epsilon"] = truth.arrays()["epsilon"] + 0.5 * size
    moved, tokens = truth.with_arrays(near), rng.standard_normal((50, 4, truth.width))
    assert np.all(np.abs(moved(tokens) - truth(tokens)) <= 1.01 * truth.error_bar(radius, tokens, 1e-15))


@pytest.mark.parametrize("parts", [{"link": "softcap"}, {"normaliser": "sink"}, {"form": "qk-norm"}])
def test_parts_that_are_not_read_behind_a_norm_are_admitted(parts: dict[str, str]) -> None:
    result = kh.recover(open_target(BEFORE + "layer").oracle, NORMED, place="before", **parts, throw=False)
    assert result.outcome is kh.Outcome.WRONG_FAMILY


@pytest.mark.parametrize("offset", [False, True])
def test_heads_between_two_norms_are_recovered(offset: bool, tmp_path: Path) -> None:
    """As Gemma 2 and GLM 4 have them: values and the epsilon behind them have a factor that no answer shows."""
    rng = np.random.default_rng(1)
    heads = [kh.SingleHead(rng.standard_normal((8, 8)) / 8, rng.standard_normal((8, 8)) / 80) for _ in range(2)]
    attention = kh.MultiHead(heads, rng.standard_normal(8) / 80 if offset else None)
    gain = np.where(np.arange(8) % 3, 1.0, -1.0) * rng.uniform(0.5, 2.0, 8)
    inner = kh.NormBefore.folded(attention, gain, 1e-4, norm="rms")
    truth = kh.Residual(kh.NormAfter(inner, gain, np.zeros(8), np.asarray(1e-4), "rms"))
    result = kh.recover(kh.FunctionOracle(truth, width=8), "normalised")
    assert result.certified
    assert result.stats.details["norm_behind"] == "rms"
    assert kh.distance(result.params, truth) < 1e-8
    result.params.save(tmp_path / "layer.safetensors")
    assert kh.distance(kh.load(tmp_path / "layer.safetensors"), truth) < 1e-8
    other = truth.with_arrays({name: array * (1.0 + (name == "gain")) for name, array in truth.arrays().items()})
    assert kh.distance(other, truth) > 0.1


def test_norms_on_both_sides_of_another_kind_are_admitted() -> None:
    target = open_target(BEFORE + "layer&norm_after=layer&residual=1")
    result = kh.recover(target.oracle, "normalised", throw=False)
    assert not result.certified
    assert result.outcome is kh.Outcome.WRONG_FAMILY


def test_bounded_tokens_before_a_norm_are_admitted() -> None:
    target = open_target(AFTER).with_declared(max_norm=4.0)
    result = kh.recover(target.oracle, "normalised", place="after", throw=False)
    assert result.outcome is kh.Outcome.TOO_NOISY
    with pytest.raises(kh.KeyholeError, match="place must be"):
        kh.recover(target.oracle, "normalised", place="beside")


@pytest.mark.parametrize(("off", "told"), [(1e-4, True), (3.0, False)])
def test_heads_that_are_nearly_known_behind_a_norm_are_not_looked_for_elsewhere(
    off: float, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end too noisy, at once; heads that predict next to nothing are those of another family, perhaps."""
    target = open_target(BEFORE + "layer&residual=1")
    truth = target.truth
    assert truth is not None
    near = {name: array * (1 + off * (name.endswith("score"))) for name, array in truth.arrays().items()}
    params, radius = truth.with_arrays(near), truth.with_arrays({name: 0 * x + 1.0 for name, x in near.items()})

    def run(signature: Any, rng: Any, **_: Any) -> Any:
        return (yield from with_standard_errors(Estimate(params, radius, 1), signature, rng))

    monkeypatch.setitem(METHODS, NORMED, replace(METHODS[NORMED], run=run))
    result = kh.recover(target.oracle, throw=False, budget=120)
    assert not result.certified
    assert (result.outcome is kh.Outcome.TOO_NOISY and "tried_first" not in result.stats.details) == told
