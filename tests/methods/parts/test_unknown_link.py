"""One head whose link is an unknown smooth monotone function: right as far as the link was seen, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from benchmarks.support.unknown_links import Box, random_box
from keyhole.arrays import floats
from keyhole.errors import UsageError
from keyhole.families.parts import Attention, Sigmoid, Sink, Tabulated
from keyhole.recovery import Outcome

MOST_EXTRA = 45  # queries beyond d² + d


def recover(box: Callable[..., Any], width: int, seed: int = 0, **facts: Any) -> kh.Recovery:
    return kh.recover(kh.FunctionOracle(box, width=width, **facts), "parts", link="unknown", seed=seed, throw=False)


def assert_right(result: kh.Recovery, box: Box, worst: float = 1e-12) -> None:
    assert result.certified, result.message
    truth = box.seen_as(result.params)
    assert kh.distance(result.params, truth) <= worst
    true, radius = truth.arrays(), result.certificate.radius.arrays()
    for name, array in result.params.arrays().items():
        assert np.all(np.abs(floats(array) - floats(true[name])) <= floats(radius[name])), name


@pytest.mark.parametrize("name", ["exp", "log 2 + tanh", "normal", "asinh", "falling"])
def test_score_value_and_link_are_recovered(name: str, fixed_seed: int) -> None:
    box = random_box(name, 6, fixed_seed)
    result = recover(box, 6, fixed_seed)
    assert_right(result, box)
    assert result.stats.queries <= 6 * 6 + 6 + MOST_EXTRA
    assert result.stats.counting_bound == 6 * 6 + 6


def test_several_outputs_an_output_bias_and_low_rank(fixed_seed: int) -> None:
    plain = random_box("softplus", 6, fixed_seed)
    rng = np.random.default_rng(fixed_seed)
    score = rng.standard_normal((6, 2)) @ rng.standard_normal((2, 6))
    box = replace(plain, score=score, value=rng.standard_normal((6, 2)), output_bias=rng.standard_normal(2))
    result = recover(box, 6, fixed_seed)
    assert_right(result, box, np.inf)  # a cross of few rows adds errors up, as its radii say
    assert result.stats.details["rank"] == 2


def test_rounded_answers_are_right_within_their_radii_or_admitted(fresh_seed: int) -> None:
    box = random_box("sigmoid", 6, fresh_seed, scale=1.0)
    rounded = recover(
        lambda tokens: box(tokens).astype(np.float32).astype(np.float64), 6, noise=kh.Noise.dtype("float32")
    )
    if rounded.certified:
        assert_right(rounded, box, 1e-2)


@pytest.mark.parametrize("energy", [lambda s: np.log(1 + s + s**2 / 2), lambda s: np.log(1 + np.maximum(s, 0))])
def test_links_that_fold_or_have_a_corner_are_refused(energy: Callable[..., Any]) -> None:
    box = replace(random_box("exp", 6, 3), energy=energy)
    result = recover(box, 6)
    assert result.outcome is Outcome.WRONG_FAMILY
    assert "not monotone" in result.message


def test_a_link_that_was_seen_to_its_reach_claims_nothing_beyond(fixed_seed: int) -> None:
    """Beyond, a box may do anything: error bars hold, and are as wide as values."""
    box = random_box("softplus", 6, fixed_seed, scale=1.0)
    box = replace(box, value=box.value / np.linalg.norm(box.value))
    result = recover(box, 6, fixed_seed)
    assert_right(result, box)
    reach = result.params.attention.link.reach
    tokens = np.random.default_rng(fixed_seed).standard_normal((200, 4, 6))
    logits = result.params.form.logits(tokens, tokens[:, -1, :])
    bars = floats(result.params.error_bar(result.certificate.radius, tokens, 1e-15))
    beyond = np.max(np.abs(logits), axis=1) > 1.01 * reach
    assert np.any(beyond)
    within = np.max(np.abs(logits), axis=1) < 0.99 * reach
    assert np.any(within)
    ends = reach / box.slope
    other = replace(box, energy=lambda s: np.where(np.abs(s) > ends, -3 * s, box.energy(np.clip(s, -ends, ends))))
    for each in (box, other):
        assert np.all(np.abs(result.params(tokens) - each(tokens)) <= bars)
    assert np.all(bars[beyond] > 1e-3)
    assert np.all(bars[within] < 1e-9)


def test_the_gauge_knows_links_by_their_energies(tmp_path: Any) -> None:
    rng = np.random.default_rng(0)
    score, value = rng.standard_normal((4, 4)), rng.standard_normal(4)
    head = kh.SingleHead(score, value, attention=Attention(Sigmoid(0.5)))
    slope = float(Sigmoid(0.5).slopes(np.zeros(1))[0])
    table = Tabulated.of(Sigmoid(0.5), 33, 0.5, slope)
    same = kh.SingleHead(slope * score, value, attention=Attention(table))
    assert kh.distance(head, same) < 1e-13
    assert kh.distance(kh.SingleHead(score, value), same) > 1e-3
    other = kh.SingleHead(slope * score, value, attention=Attention(table, Sink(0.0)))
    assert kh.distance(head, other) == 1.0
    grown = Attention(Tabulated(3 * floats(table.coefficients), 0.5))
    assert kh.distance(same, kh.SingleHead(slope * score, value, attention=grown)) > 0.1
    places = np.linspace(-0.5, 0.5, 7)
    step = 1e-6
    apart = (floats(table(places + step)) - floats(table(places - step))) / (2 * step)
    assert np.allclose(table.slopes(places), apart, atol=1e-8)
    same.save(tmp_path / "head")
    assert kh.load(tmp_path / "head").attention == same.attention


def test_an_unknown_link_is_read_alone() -> None:
    box = random_box("exp", 4, 0)
    for options in ({"normaliser": "sink"}, {"form": "qk-norm"}, {"heads": "several"}, {"length_law": "log"}):
        with pytest.raises(UsageError, match="unknown link"):
            kh.recover(kh.FunctionOracle(box, width=4), "parts", link="unknown", **options)
    bounded = kh.recover(kh.FunctionOracle(box, width=4, max_norm=1.0), "parts", link="unknown", throw=False)
    assert bounded.outcome is Outcome.NOT_IDENTIFIABLE
