"""Several heads behind signs: all of them within their radii, or what cannot be read is said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.gauge import align


def heads(
    count: int, width: int, seed: int, *, threshold: float = 0.0, scale: float = 1.0, multiple: float = 0.0
) -> kh.Labels:
    rng = np.random.default_rng([seed, count, width])
    scores = scale * rng.standard_normal((count, width, width))
    if multiple:
        scores[1] = multiple * scores[0]
    made = [kh.SingleHead(score, rng.standard_normal(width)) for score in scores]
    return kh.Labels(kh.MultiHead(made, np.asarray(-threshold) if threshold else None))


def oracle_of(truth: kh.Labels, **how: Any) -> kh.FunctionOracle:
    return kh.FunctionOracle(truth, width=truth.width, answers="labels", **how)


def check_inside(result: kh.Recovery, truth: kh.Labels) -> None:
    found, radius, true = result.params.arrays(), result.certificate.radius.arrays(), align(result.params, truth)
    assert set(true) == set(found)
    for name, array in true.items():
        assert np.all(np.abs(found[name] - array) <= radius[name] + 1e-15), name


@pytest.mark.parametrize(
    ("count", "width", "how"),
    [
        (2, 4, {}),
        (3, 5, {"scale": 30.0}),
        (2, 3, {"threshold": 2.5}),
        (2, 3, {"threshold": -0.1}),
        (2, 4, {"multiple": -1.0}),
        (2, 2, {}),
    ],
)
def test_heads_are_within_their_radii(count: int, width: int, how: dict[str, float]) -> None:
    truth = heads(count, width, 1, **how)
    result = kh.recover(oracle_of(truth), "labels", heads="auto", target_error=1e-6)
    check_inside(result, truth)
    assert result.stats.details["heads"] == count
    assert result.stats.details["target_reached"]


def test_a_target_is_reached_by_bisecting_on() -> None:
    truth = heads(2, 4, 2)
    coarse, fine = (
        kh.recover(oracle_of(truth), "labels", heads=2, target_error=error, seed=1) for error in (1e-6, 1e-11)
    )
    assert kh.distance(fine.params, truth) < 1e-11
    assert fine.stats.queries < 2 * coarse.stats.queries
    assert fine.stats.ratio < 5


def test_auto_goes_on_with_several_heads_where_one_is_refuted() -> None:
    truth = heads(2, 4, 3, threshold=0.3)
    result = kh.recover(oracle_of(truth), target_error=1e-5)
    assert result.method == "labels"
    check_inside(result, truth)
    assert kh.recover(oracle_of(truth), "labels", target_error=1e-5, throw=False).outcome is not kh.Outcome.CERTIFIED


def test_one_head_is_one_head() -> None:
    truth = kh.Labels(heads(1, 3, 4).attention.simplest())
    result = kh.recover(oracle_of(truth), "labels", heads="auto", target_error=1e-5)
    assert isinstance(result.params.attention, kh.SingleHead)
    check_inside(result, truth)


@pytest.mark.parametrize(
    ("options", "how", "outcome", "said"),
    [
        ({"heads": 3}, {}, kh.Outcome.WRONG_FAMILY, "2 heads explain the labels, and not 3"),
        ({"heads": "auto"}, {"max_norm": 3.0}, kh.Outcome.NOT_IDENTIFIABLE, "max_norm"),
        ({"heads": "auto"}, {"max_length": 2}, kh.Outcome.NOT_IDENTIFIABLE, "max_length"),
        ({"heads": "auto"}, {"noise": kh.Noise.flipped(0.1)}, kh.Outcome.TOO_NOISY, "wrong at times"),
    ],
)
def test_what_is_not_read_is_said(options: dict[str, Any], how: dict[str, Any], outcome: kh.Outcome, said: str) -> None:
    result = kh.recover(oracle_of(heads(2, 3, 5), **how), "labels", throw=False, target_error=1e-4, **options)
    assert result.outcome is outcome
    assert said in result.message


def test_values_that_cancel_show_in_no_label_of_a_single_token() -> None:
    one, two = heads(2, 3, 6).attention.heads
    truth = kh.Labels(kh.MultiHead([one, kh.SingleHead(two.score, -one.value)]))
    result = kh.recover(oracle_of(truth), throw=False)
    assert result.outcome is kh.Outcome.NOT_IDENTIFIABLE
    assert "several heads cancel" in result.message


@pytest.mark.parametrize("count", [1, 2])
def test_labels_that_change_with_the_sign_of_no_unit_token_are_of_no_heads(count: int) -> None:
    oracle = kh.FunctionOracle(lambda tokens: 1.0 * (tokens.mean(axis=1).prod(axis=1) > 0), width=3, answers="labels")
    result = kh.recover(oracle, "labels", heads=count, throw=False)
    assert result.outcome is kh.Outcome.INCONSISTENT
    assert "with that of no unit token" in result.message


@pytest.mark.parametrize("given", [0, True, "two", 1.5])
def test_a_number_of_heads_that_is_none_is_refused(given: Any) -> None:
    with pytest.raises(kh.KeyholeError, match="heads must be"):
        kh.recover(oracle_of(heads(2, 3, 7)), "labels", heads=given)


def test_heads_of_opposite_logits_and_one_value() -> None:
    rng = np.random.default_rng(5)
    score, value = rng.standard_normal((3, 3)), rng.standard_normal(3)
    truth = kh.Labels(kh.MultiHead([kh.SingleHead(score, value), kh.SingleHead(-score, value)]))
    result = kh.recover(oracle_of(truth), "labels", heads="auto", target_error=1e-4, throw=False)
    assert result.certified, result.message
    check_inside(result, truth)
