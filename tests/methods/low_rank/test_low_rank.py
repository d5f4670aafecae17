"""A score of low rank behind errors: few queries, and the truth within the radii whatever the tolerance hides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.noise import Noise
from support import targets as t


def random_head(rng: np.random.Generator, width: int, rank: int, outputs: int | None = None) -> kh.SingleHead:
    score = rng.standard_normal((width, rank)) @ rng.standard_normal((rank, width))
    shape = (width,) if outputs is None else (width, outputs)
    return kh.SingleHead(score / np.linalg.norm(score), rng.standard_normal(shape))


def erring(head: kh.SingleHead, tau: float, seed: int, kind: str = "uniform", **facts: Any) -> kh.FunctionOracle:
    """The head with errors of at most tau, random or as an adversary makes them."""
    rng = np.random.default_rng([seed, 1])

    def box(tokens: t.Floats) -> t.Floats:
        answers = head(tokens)
        errors = {"uniform": rng.uniform(-1, 1, answers.shape), "inwards": -np.sign(answers)}
        errors["sign"] = np.sign(np.sin(1e5 * answers) + 1e-9)
        return np.asarray(answers + tau * errors[kind])

    return kh.FunctionOracle(box, head.width, noise=Noise.bounded(tau), **{"max_norm": 3.0, **facts})


def covers(result: kh.Recovery, head: kh.SingleHead) -> bool:
    radius = result.certificate.radius
    assert radius is not None
    return bool(np.all(np.abs(result.params.score - head.score) <= radius.score))


@pytest.mark.parametrize("method", ["low-rank", "auto"])
def test_rank_one_behind_a_tolerance_costs_half_of_all_entries(method: str) -> None:
    head = random_head(np.random.default_rng(0), 20, 1)
    result = kh.recover(erring(head, 1e-5, 0), method=method)
    assert result.certified
    assert covers(result, head)
    assert result.method == "low-rank"
    assert result.stats.details["rank"] == 1
    assert result.stats.queries <= 360  # 235 here; `robust` takes 468
    assert result.stats.counting_bound == 59


def test_queries_grow_with_the_rank_and_the_width() -> None:
    for width, rank in ((32, 2), (64, 2)):
        head = random_head(np.random.default_rng(1), width, rank)
        result = kh.recover(erring(head, 1e-6, 0), method="low-rank")
        assert result.certified
        assert covers(result, head)
        assert result.stats.details["rank"] == rank
        assert result.stats.queries <= (2 * rank + 19) * width


def test_full_rank_costs_little_more() -> None:
    head = random_head(np.random.default_rng(2), 20, 20)
    low, full = (kh.recover(erring(head, 1e-5, 0), method=method) for method in ("low-rank", "robust"))
    assert low.certified
    assert low.stats.queries <= full.stats.queries + 35
    assert np.max(low.certificate.radius.score) < 2 * np.max(full.certificate.radius.score)


def test_several_outputs_decimals_and_normal_errors() -> None:
    rng = np.random.default_rng(3)
    head, wide = random_head(rng, 20, 1), random_head(rng, 20, 1, outputs=3)
    rounded = kh.FunctionOracle(lambda x: np.round(head(x), 5), 20, noise=Noise.rounded(5), max_norm=3.0)
    noisy = kh.FunctionOracle(
        lambda x: head(x) + 1e-6 * rng.standard_normal(len(x)), 20, noise=Noise.gaussian(1e-6), max_norm=3.0
    )
    for oracle, truth in ((rounded, head), (noisy, head), (erring(wide, 1e-6, 0), wide)):
        result = kh.recover(oracle, method="low-rank")
        assert result.certified
        assert covers(result, truth)
        assert result.stats.queries <= 400  # all entries take 468 to 882


@pytest.mark.parametrize("kind", ["uniform", "sign", "inwards"])
def test_what_the_tolerance_hides_of_further_rank_is_within_the_radii(kind: str, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    width, tau = int(rng.integers(14, 22)), 10.0 ** rng.uniform(-7, -4)
    head = random_head(rng, width, int(rng.integers(1, 3)))
    score = head.score + 10.0 ** rng.uniform(-8, -3) * rng.standard_normal((width, width))
    score[rng.integers(width), rng.integers(width)] += 10.0 ** rng.uniform(-7, -1)
    head = kh.SingleHead(score * 10.0 ** rng.uniform(-1, 0.5), head.value * (rng.random(width) < 0.7) + 1e-3)
    facts = {"max_norm": None} if rng.random() < 0.2 else {"max_norm": float(10.0 ** rng.uniform(-0.3, 0.7))}
    result = kh.recover(erring(head, tau, fresh_seed, kind, **facts), method="low-rank", throw=False)
    if result.params is not None and result.certificate.radius is not None:
        assert covers(result, head)


def test_biases_behind_a_tolerance_need_long_tokens() -> None:
    head = random_head(np.random.default_rng(4), 16, 1)
    biased = kh.SingleHead(head.score, head.value, output_bias=np.asarray(0.3))
    result = kh.recover(erring(biased, 1e-6, 0), method="low-rank", throw=False)
    assert result.outcome is kh.Outcome.TOO_NOISY
    result = kh.recover(erring(biased, 1e-6, 0, max_norm=None), method="low-rank")
    assert result.certified
    assert covers(result, biased)
