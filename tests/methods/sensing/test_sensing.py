"""One head of low rank from one batch of random measurements: exact, or admitted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import Space
from keyhole.errors import UsageError
from keyhole.methods import METHODS
from keyhole.methods.sensing.method import ASSUMPTIONS, PILOT, SENSING
from keyhole.methods.sensing.solvers import factored, parameter_count, recommended_measurements, standard_error
from keyhole.recovery import Outcome
from support import targets as t
from test_honesty import Kind, Situation, drawn


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "sensing", SENSING)


def head(seed: int, width: int, rank: int, **facts: Any) -> kh.SingleHead:
    rng = np.random.default_rng(seed)
    return t.head_in(Space.of(np.zeros(1)), t.of_rank(rng, width, rank), t.normal_value(rng, width), **facts)


def sense(truth: kh.SingleHead, seed: int = 0, max_norm: float | None = None, **options: Any) -> kh.Recovery:
    oracle = kh.FunctionOracle(truth, width=truth.width, max_norm=max_norm)
    return kh.recover(oracle, "sensing", seed=seed, throw=False, **options)


def assert_exact(result: kh.Recovery, truth: kh.SingleHead, rank: int, worst: float = 1e-12) -> None:
    assert result.certified, result.message
    assert kh.distance(result.params, truth) <= worst
    assert t.misses(result.params, truth, result.certificate.radius) == {}
    assert result.stats.details["rank"] == rank
    assert result.certificate.assumptions[:-1] == ASSUMPTIONS
    assert "trapdoor" in result.certificate.assumptions[-1]


@pytest.mark.parametrize("rank", [2, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_twice_the_parameters_are_enough(rank: int, seed: int) -> None:
    truth, count = head(seed, 64, rank), 2 * parameter_count(64, rank)
    result = sense(truth, seed, measurements=count)
    assert_exact(result, truth, rank)
    assert result.stats.counting_bound == parameter_count(64, rank) + 64
    assert dict(result.stats.stages) == {"value": 65, "scale": 1, "measurements": count}
    details = result.stats.details
    assert details["measurements"] == count
    assert details["recommended"] == recommended_measurements(64, rank)
    assert (details["solver"], details["batches"]) == ("factored", 1)
    assert details["residual"] <= 1e-13


@pytest.mark.parametrize("solver", ["factored", "nuclear-norm"])
@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_rank_given_and_found(solver: str, rank: int | None, max_norm: float | None) -> None:
    truth = head(3, 32, 3)
    result = sense(truth, 1, max_norm, solver=solver, rank=rank)
    assert_exact(result, truth, 3, 1e-12 if max_norm is None else 1e-10)
    assert result.stats.details["solver"] == solver
    if rank is not None:
        assert result.stats.details["measurements"] == result.stats.details["recommended"]


def test_an_unknown_rank_doubles_the_batch() -> None:
    truth = head(0, 32, 4)
    details = sense(truth).stats.details
    assert details["batches"] == 2
    assert details["measurements"] == 2 * recommended_measurements(32, 2)


def test_all_but_a_few_measurements_come_in_one_plan() -> None:
    truth, batches = head(0, 16, 2), []

    def spy(tokens: Any) -> Any:
        batches.append(len(tokens))
        return truth(tokens)

    result = kh.recover(kh.FunctionOracle(spy, width=16), "sensing", rank=2)
    count = recommended_measurements(16, 2)
    value, probe, *pilot, batch = batches[:7]  # four pilots; what follows is held out
    assert (value, probe, sum(pilot), batch) == (17, 1, PILOT, count - PILOT)
    assert sum(batches[7:]) == result.stats.heldout_queries


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_tiny_widths(width: int) -> None:
    for rank in (1, width):
        truth = head(7, width, rank)
        assert_exact(sense(truth), truth, rank)


@pytest.mark.parametrize("solver", ["factored", "nuclear-norm"])
@pytest.mark.parametrize(("count", "rank"), [(1, None), (20, 2), (112, 2), (112, None)])
def test_too_few_measurements_are_admitted(solver: str, count: int, rank: int | None) -> None:
    result = sense(head(1, 32, 2), measurements=count, rank=rank, solver=solver)
    assert result.outcome is Outcome.TOO_FEW_MEASUREMENTS
    assert f"{count} measurements" in result.message
    assert "recommended" in result.message
    if rank is not None and solver == "factored":
        assert str(recommended_measurements(32, 2)) in result.message
    assert result.params.score.shape == (32, 32)  # the best guess is kept


def test_a_full_rank_is_admitted() -> None:
    result = sense(head(1, 12, 12))
    assert result.outcome is Outcome.TOO_FEW_MEASUREMENTS
    assert result.stats.stages["measurements"] == 12**2
    assert "single-head" in result.message
    result = sense(head(1, 16, 5), rank=2)
    assert result.outcome is Outcome.TOO_FEW_MEASUREMENTS
    assert "rank is higher" in result.message


def test_a_lower_rank_than_given_is_found() -> None:
    truth = head(5, 24, 2)
    assert_exact(sense(truth, rank=3), truth, 2)


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_no_value_and_no_score(max_norm: float | None) -> None:
    rng = np.random.default_rng(0)
    nothing = kh.SingleHead(t.of_rank(rng, 8, 2), np.zeros(8))
    assert sense(nothing, max_norm=max_norm).outcome is Outcome.NOT_IDENTIFIABLE
    truth = kh.SingleHead(np.zeros((8, 8)), t.normal_value(rng, 8))
    result = sense(truth, max_norm=max_norm)
    # Within a norm bound a zero score matrix cannot be told from a small one.
    assert result.outcome is (Outcome.CERTIFIED if max_norm is None else Outcome.UNCERTIFIED), result.message
    assert not result.params.score.any()
    assert result.stats.counting_bound == 8


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize(("score_bias", "output_bias"), [(0.5, None), (None, 2.0), (1.0, -1.0)])
def test_biases(max_norm: float | None, score_bias: float | None, output_bias: float | None) -> None:
    made = None if score_bias is None else t.bias(np.random.default_rng(1), 24, score_bias)
    truth = head(2, 24, 2, score_bias=made, output_bias=output_bias)
    result = sense(truth, max_norm=max_norm)
    assert_exact(result, truth, 2, 1e-9)
    assert result.stats.details["score_bias"] is (score_bias is not None)
    extra = 24 * (score_bias is not None) + (output_bias is not None)
    assert result.stats.counting_bound == parameter_count(24, 2) + 24 + extra


@pytest.mark.parametrize("library", ["torch-float64", "numpy-float32", "torch-float32"])
def test_other_libraries(library: str) -> None:
    like = t.example(library)
    rng = np.random.default_rng(4)
    truth = t.head_in(Space.of(like), t.of_rank(rng, 16, 2), t.normal_value(rng, 16))
    result = kh.recover(kh.FunctionOracle(truth, width=16, like=like), "sensing", throw=False)
    assert result.certified, result.message
    assert Space.of(result.params.score) == Space.of(like)
    assert t.misses(result.params, truth, result.certificate.radius) == {}
    assert kh.distance(t.plain(result.params), t.plain(truth)) <= (1e-12 if "64" in library else 1e-3)


@pytest.mark.parametrize(
    "box",
    [
        t.two_heads,
        t.faint_second_head,
        t.relu_net,
        t.hashed,
        t.positional,
        t.residual,
        t.last_token_only,
        t.hard_attention,
        t.short_memory,
        t.never_twice_the_same,
        t.all_noise,
    ],
)
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_other_families_are_never_certified(box: Any, max_norm: float | None, fresh_seed: int) -> None:
    for seed, width in ((0, 4), (1, 8), (fresh_seed, 6)):
        made = box(np.random.default_rng(seed), width, Space.of(np.zeros(1)))
        oracle = kh.FunctionOracle(made, width=width, max_norm=max_norm)
        result = kh.recover(oracle, "sensing", seed=seed, throw=False)
        assert not result.certified
        assert result.message


SHAPES = ("low-rank", "low-rank", "nearly-low-rank", "single-entry", "graded")
MOST_RANK = 4


def is_honest(
    seed: int,
    noise: Kind,
    declared: bool,
    library: str = "numpy-float64",
    shapes: tuple[str, ...] = SHAPES,
    odds: float = 0.2,
) -> bool:
    """A situation of mostly low rank, sensed with random options; True when certified, fails when wrong."""
    rng = np.random.default_rng([seed, 5])
    situation: Situation = drawn(seed, noise, declared, library)
    most = min(MOST_RANK, situation.width)
    situation = replace(situation, score=str(rng.choice(shapes)), rank=int(rng.integers(1, most + 1)))
    choices = {"rank": situation.rank, "measurements": int(rng.integers(1, 200)), "solver": "nuclear-norm"}
    options = {name: choice for name, choice in choices.items() if rng.random() < odds}
    truth = situation.truth()
    with np.errstate(all="ignore"):
        result = kh.recover(situation.oracle(truth), "sensing", seed=seed, throw=False, **options)
    return t.right_or_admitted(result, truth, (situation, options))


@pytest.mark.parametrize(
    ("noise", "declared", "library"),
    [
        ("exact", True, "numpy-float64"),
        ("exact", True, "numpy-float32"),
        ("rounded", True, "numpy-float64"),
        ("gaussian", True, "numpy-float64"),
        ("rounded", False, "numpy-float64"),
        ("gaussian", False, "numpy-float64"),
    ],
)
def test_right_within_the_radius_or_admitted(noise: Kind, declared: bool, library: str, fresh_seed: int) -> None:
    for seed in range(fresh_seed, fresh_seed + 15):
        is_honest(seed, noise, declared, library)


def test_honesty_is_not_silence() -> None:
    seeds = range(40)
    certified = sum(is_honest(seed, "exact", True, shapes=("low-rank", "single-entry"), odds=0.0) for seed in seeds)
    assert certified >= 0.9 * len(seeds)


def test_error_spread_is_that_of_a_fit_to_noisy_values() -> None:
    rng = np.random.default_rng(0)
    width, rank, count, noise = 10, 2, 90, 1e-6
    truth = t.of_rank(rng, width, rank)
    U, G = rng.standard_normal((2, count, width))
    values = ((U @ truth) * G).sum(axis=1)
    relative = noise * count**0.5 / float(np.linalg.norm(values))
    errors = [
        factored(U, G, values + noise * rng.standard_normal(count), rank, noise=relative, rng=rng).matrix - truth
        for _ in range(200)
    ]
    measured = np.sqrt(np.mean(np.square(errors), axis=0)) / noise
    np.testing.assert_allclose(measured, standard_error(U, G, truth, rank), rtol=0.25)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"solver": "magic"}, "factored"),
        ({"rank": 0}, "rank"),
        ({"measurements": 2.5}, "measurements"),
        ({"rank": 9}, "8"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        sense(head(0, 8, 1), **options)


@pytest.mark.parametrize("ensemble", ["even", "gaussian"])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_several_outputs_and_ensembles(ensemble: str, max_norm: float | None) -> None:
    rng = np.random.default_rng(5)
    truth = kh.SingleHead(t.of_rank(rng, 24, 2), rng.standard_normal((24, 3)))
    result = sense(truth, 1, max_norm, ensemble=ensemble)
    assert_exact(result, truth, 2, 1e-9)
    assert result.stats.details["ensemble"] == ensemble
    assert result.stats.counting_bound == -(-parameter_count(24, 2) // 3) + 24
    few = sense(truth, 1, max_norm, ensemble=ensemble, measurements=40)
    assert few.outcome is Outcome.TOO_FEW_MEASUREMENTS
    assert few.params.value.shape == (24, 3)


def test_an_ensemble_that_is_not_known_is_refused() -> None:
    with pytest.raises(UsageError, match="ensemble must be one of even, gaussian"):
        sense(head(1, 8, 1), ensemble="uniform")
