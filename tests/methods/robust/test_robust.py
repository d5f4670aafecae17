"""The method `robust` behind normal errors: near the limit, with intervals that mean what they say, or admitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import Array, to_numpy
from keyhole.errors import UsageError
from keyhole.methods.robust.gaussian.likelihood import Frame, HeadPoint, PairQueries, fit, predict
from keyhole.methods.robust.gaussian.pair_design import (
    best_pairs,
    pair_answers,
    pair_rows,
    tilted_rows,
)
from keyhole.numerics.cramer_rao import universal_floor
from keyhole.oracles import Counted, Noisy, Oracle
from support import targets as t


def head(seed: int, width: int, scale: float = 1.0, **biases: Any) -> kh.SingleHead:
    rng = np.random.default_rng(seed)
    value = rng.standard_normal(width)
    score = scale * rng.standard_normal((width, width)) / width**0.5
    return kh.SingleHead(score, value / np.linalg.norm(value), **biases)


def noisy(truth: kh.SingleHead, noise: float = 1e-3, seed: int = 0, **limits: Any) -> Oracle:
    limits = {"max_norm": 1.0, **limits}
    return Noisy(kh.FunctionOracle(truth, width=truth.width, **limits), noise, seed=seed)


def recovered(truth: kh.SingleHead, noise: float = 1e-3, seed: int = 0, like: Array = None, **options: Any) -> Any:
    oracle = noisy(truth, noise, seed, like=like)
    return kh.recover(oracle, "robust", seed=seed, throw=False, **options)


def error(result: kh.Recovery, truth: kh.SingleHead) -> float:
    return float(np.sqrt(np.mean((to_numpy(result.params.score) - truth.score) ** 2)))


# --- numerics -------------------------------------------------------------------------------------------------


def test_pairs_answer_as_a_head_does(rng: np.random.Generator) -> None:
    truth = head(1, 5)
    x, g = rng.standard_normal(5), rng.standard_normal(5)
    tokens = np.array([x, x, x, -x, g])[None]
    found = pair_answers(
        np.array([x @ truth.score @ g]), np.array([g @ truth.score @ g]), 3.0, 1.0, x @ truth.value, g @ truth.value
    )
    assert found.answer == pytest.approx(truth(tokens), rel=1e-12)


@pytest.mark.parametrize("by", ["by_pair", "by_last"])
def test_slopes_of_pairs_are_derivatives(by: str) -> None:
    def at(step: float) -> Any:
        pair, last = (0.3 + step, -0.2) if by == "by_pair" else (0.3, -0.2 + step)
        return pair_answers(np.array([pair]), np.array([last]), 3.0, 2.0, 0.7, -0.4)

    slope = (at(1e-5).answer - at(-1e-5).answer) / 2e-5
    assert getattr(at(0.0), by) == pytest.approx(slope, rel=1e-8)


@pytest.mark.parametrize("outputs", [1, 3, 8, 20])
def test_pair_rows_are_better_than_unit_vectors(outputs: int, rng: np.random.Generator) -> None:
    value = rng.standard_normal((8, outputs))

    def variance(rows: t.Floats) -> float:
        information = (rows * np.sum((rows @ value) ** 2, axis=1)[:, None]).T @ rows
        return float(np.trace(np.linalg.inv(information)))

    rows = pair_rows(value, rng)
    assert np.linalg.norm(rows, axis=1) == pytest.approx(1.0)
    assert variance(rows) <= 1.001 * variance(t.orthogonal(rng, 8))
    if outputs == 1:  # the known optimum: half of every pair along the value
        assert np.abs(rows @ value[:, 0]) / np.linalg.norm(value) == pytest.approx(0.5**0.5, abs=0.02)
        # Eight passes of eight rows: the mean variance of an entry is the trace over 8; the floor is for 64 queries.
        best = universal_floor(8, float(np.linalg.norm(value)), 1.0, 1.0, 64)
        assert np.sqrt(variance(rows) / 8) <= 1.02 * best


def test_tilted_rows_have_value_even_where_the_range_has_none(rng: np.random.Generator) -> None:
    value = np.eye(6)[:, :1]
    basis = np.eye(6)[:, 3:5]  # orthogonal to it
    rows = tilted_rows(basis, value)
    assert np.all(np.abs(rows @ value) > 0.5)
    assert np.linalg.matrix_rank(rows @ basis) == 2


def test_copies_balance_large_logits() -> None:
    logits = np.array([0.0, 3.0, -3.0])
    zero = np.zeros(3)
    norm, plus, minus = best_pairs(logits, zero, zero, zero, zero + 1, zero, 1.0, 64)
    assert plus[0] == minus[0]
    assert norm[0] == 1.0
    assert plus[1] < minus[1]
    assert plus[2] > minus[2]


@pytest.mark.parametrize("rank", [None, 2])
def test_a_fit_to_exact_answers_is_exact(rank: int | None, rng: np.random.Generator) -> None:
    width = 6
    score = rng.standard_normal((width, width)) if rank is None else t.of_rank(rng, width, rank)
    value = rng.standard_normal(width)
    rows, columns = pair_rows(value[:, None], rng), t.orthogonal(rng, width)
    nothing = np.zeros((width, 0))
    frame = Frame(
        rows, columns, 1.0, 1e-3, rows, columns, np.zeros((width, width)), nothing, value, np.eye(width), False
    )
    row, column = np.divmod(np.arange(width**2), width)
    copies = np.full(row.size, 8.0)
    pairs = PairQueries(row, column, np.ones(row.size), copies, copies)
    truth = HeadPoint(score, value, np.zeros(width))
    pairs = PairQueries(row, column, pairs.norm, copies, copies, predict(frame, truth, pairs).answer, np.ones(row.size))
    found = fit(frame, HeadPoint(score + 0.1 * rng.standard_normal(score.shape), value, np.zeros(width)), pairs, rank)
    assert found.point.score == pytest.approx(score, abs=1e-6)
    assert np.all(found.score_variance > 0)


# --- near the limit -------------------------------------------------------------------------------------------


def test_one_pass_is_near_the_universal_floor(like: Array) -> None:
    ratios = []
    for seed in range(4):
        truth = head(seed, 16)
        result = recovered(truth, seed=seed, like=like)
        assert result.certified
        assert result.stats.ratio <= (17 * 17 + 16) / (16 * 17)
        ratios.append(error(result, truth) / universal_floor(16, 1.0, 1.0, 1e-3, result.stats.queries))
    assert np.sqrt(np.mean(np.square(ratios))) <= 1.25


def test_large_logits_cost_a_pilot() -> None:
    truth = head(0, 16, scale=10.0)
    result = recovered(truth)
    assert result.certified
    assert 1.5 < result.stats.ratio <= 2.4  # of few queries the probes are many
    assert error(result, truth) <= 2.5 * universal_floor(16, 1.0, 1.0, 1e-3, result.stats.queries)


def test_intervals_hold_what_they_promise() -> None:
    inside = []
    for seed in range(20):
        truth = head(seed, 12)
        result = recovered(truth, seed=seed)
        off = np.abs(result.params.score - truth.score)
        inside.append(np.mean(off <= 1.96 * result.certificate.standard_error.score))
    assert 0.93 <= np.mean(inside) <= 0.97  # 20 × 144 entries


def test_a_budget_is_spent_and_never_exceeded() -> None:
    truth = head(3, 12)
    errors = []
    for budget in (200, 400, 1600, 6400):
        counted = Counted(noisy(truth))
        result = kh.recover(counted, "robust", budget=budget, throw=False)
        assert counted.queries <= budget
        assert result.stats.queries >= 0.9 * (budget - result.certificate.heldout_queries)
        errors.append(error(result, truth))
    assert errors[3] < errors[1] / 2.5


def test_a_budget_too_small_is_admitted() -> None:
    result = kh.recover(noisy(head(3, 12)), "robust", budget=100, throw=False)
    assert result.outcome is kh.Outcome.BUDGET_EXHAUSTED


def test_a_target_error_decides_how_often_to_ask() -> None:
    truth = head(4, 12)
    result = recovered(truth, target_error=4e-4)
    assert result.stats.details["target_reached"]
    assert result.stats.details["standard_error"] <= 4e-4
    assert error(result, truth) <= 1.3 * 4e-4
    assert result.stats.details["standard_error"] >= 0.8 * 4e-4  # no more than needed


def test_a_target_out_of_reach_says_so() -> None:
    result = recovered(head(4, 12), target_error=1e-6, budget=1000)
    assert result.stats.details["target_reached"] is False


def test_a_rank_that_is_known_saves_queries_and_error() -> None:
    rng = np.random.default_rng(5)
    truth = kh.SingleHead(t.of_rank(rng, 24, 2, 2.0), head(5, 24).value)
    plain, informed = recovered(truth, budget=1000), recovered(truth, rank=2, budget=1000)
    assert informed.certified
    assert error(informed, truth) < 0.5 * error(plain, truth)
    assert np.linalg.matrix_rank(informed.params.score, tol=1e-8) == 2
    assert "rank 2" in " ".join(informed.certificate.assumptions)


def test_a_rank_that_is_wrong_is_not_certified() -> None:
    result = recovered(head(6, 16, scale=3.0), noise=1e-5, rank=2)
    assert not result.certified


@pytest.mark.parametrize("outputs", [1, 3, 12, 20])
def test_several_outputs(outputs: int) -> None:
    rng = np.random.default_rng(7)
    truth = kh.SingleHead(head(7, 12).score, rng.standard_normal((12, outputs)))
    result = recovered(truth)
    assert result.certified
    assert not t.misses(result.params, truth, result.certificate.radius)


def test_biases_are_found() -> None:
    rng = np.random.default_rng(8)
    truth = head(8, 12, score_bias=0.4 * rng.standard_normal(12), output_bias=np.array(0.3))
    result = recovered(truth, budget=3000)
    assert result.certified
    assert result.params.score_bias is not None
    assert result.params.output_bias is not None
    assert not t.misses(result.params, truth, result.certificate.radius)


@pytest.mark.parametrize("length", [2, 3, 6])
def test_short_sequences(length: int) -> None:
    truth = head(9, 8)
    result = kh.recover(noisy(truth, 1e-4, max_length=length), "robust", throw=False)
    assert result.certified
    assert not t.misses(result.params, truth, result.certificate.radius)


def test_single_precision_arithmetic_is_averaged() -> None:
    torch = pytest.importorskip("torch")
    truth = head(10, 24)
    box = kh.SingleHead(torch.tensor(truth.score).float(), torch.tensor(truth.value).float())
    exact = kh.SingleHead(*(part.numpy().astype(np.float64) for part in (box.score, box.value)))
    oracle = kh.FunctionOracle(box, width=24, max_norm=1.0, like=torch.zeros(1))
    once = kh.recover(oracle, "robust", throw=False)
    often = kh.recover(oracle, "robust", budget=10_000, throw=False)
    assert once.certified
    assert often.certified
    assert error(once, exact) <= 1e-6
    assert error(often, exact) < 0.6 * error(once, exact)


# --- right or admitted ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noise:
    """A situation drawn from a plain seed."""

    seed: int

    def recovered(self) -> tuple[kh.SingleHead, kh.Recovery]:
        rng = np.random.default_rng([self.seed, 91])
        width = int(rng.integers(1, 13))
        rank = int(rng.integers(1, width + 1)) if rng.random() < 0.3 else None
        outputs = int(rng.integers(1, 15)) if rng.random() < 0.3 else None
        longest = 10 ** rng.uniform(-2, 2)
        score = t.of_rank(rng, width, rank or width, 10 ** rng.uniform(-2, 2) / longest**2)
        value = rng.standard_normal(width if outputs is None else (width, outputs)) * 10 ** rng.uniform(-3, 3)
        size = float(np.linalg.norm(value, 2 if outputs else None)) * longest
        truth = kh.SingleHead(
            score,
            value,
            t.bias(rng, width, 10 ** rng.uniform(-3, 0.5) / longest) if rng.random() < 0.3 else None,
            size * 10 ** rng.uniform(-4, 1) * rng.standard_normal(value.shape[1:]) if rng.random() < 0.3 else None,
        )
        length = int(rng.integers(2, 20)) if rng.random() < 0.3 else None
        oracle = noisy(truth, size * 10 ** rng.uniform(-8, -1), self.seed, max_norm=longest, max_length=length)
        options: dict[str, Any] = {"rank": rank} if rank and rng.random() < 0.7 else {}
        options |= {"budget": int(rng.integers(100, 3000))} if rng.random() < 0.3 else {}
        return truth, kh.recover(oracle, "robust", seed=self.seed, throw=False, **options)


def is_honest(situation: Noise) -> bool:
    truth, result = situation.recovered()
    return t.right_or_admitted(result, truth, situation)


@pytest.mark.slow
def test_fixed_seeds_are_honest_and_not_silent() -> None:
    assert sum(is_honest(Noise(seed)) for seed in range(40)) >= 20


def test_fresh_seeds_are_honest(fresh_seed: int) -> None:
    for seed in range(fresh_seed, fresh_seed + 30):
        is_honest(Noise(seed))


@pytest.mark.parametrize("box", ["relu", "hidden"])
def test_what_is_no_head_or_noisier_than_it_says_is_not_certified(box: str) -> None:
    truth = head(11, 8)
    if box == "relu":
        oracle: Oracle = kh.FunctionOracle(
            lambda tokens: np.maximum(truth(tokens), 0.0), width=8, max_norm=1.0, noise=kh.Noise.gaussian(1e-5)
        )
    else:
        inner = kh.FunctionOracle(truth, width=8, max_norm=1.0, noise=kh.Noise.gaussian(1e-6))
        oracle = Noisy(inner, 1e-3, declared=False)
    assert not kh.recover(oracle, "robust", throw=False).certified


# --- use --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"target_error": 0}, {"target_error": "small"}, {"rank": 0}, {"rank": 9}, {"rank": True}, {"copies": 0}],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        kh.recover(noisy(head(0, 8)), "robust", **options)


def test_auto_is_robust_where_noise_is_declared() -> None:
    assert kh.recover(noisy(head(0, 8)), throw=False).method == "robust"
    assert kh.recover(kh.FunctionOracle(head(0, 8), width=8)).method == "single-head"


def test_a_journal_makes_a_second_run_free(tmp_path: Any) -> None:
    truth = head(12, 8)
    path = tmp_path / "answers.db"
    first = kh.recover(noisy(truth), "robust", journal=path, budget=600, throw=False)
    counted = Counted(noisy(truth))
    second = kh.recover(counted, "robust", journal=path, budget=600, throw=False)
    assert counted.queries == 0
    assert np.array_equal(first.params.score, second.params.score)
