"""Nets of one hidden layer behind noise: at the noise or admitted, with error bars that hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.errors import UsageError
from keyhole.families.relu_net import ReluNet
from keyhole.methods import Estimate, Unrecoverable
from keyhole.methods.certificate import certify
from keyhole.methods.relu_net.noisy.covariance import Covariance
from keyhole.methods.relu_net.noisy.least_squares import NetProblem, descend, fit_planes, unit
from keyhole.methods.relu_net.noisy.method import IN_THE_END, relu_boost
from keyhole.methods.relu_net.noisy.search import as_relu, orient
from keyhole.noise import Noise
from keyhole.oracles import Cast, Counted, Noisy, Oracle, Rounded
from keyhole.recovery import Outcome
from keyhole.session import Session


def net(width: int, neurons: int, seed: int, outputs: int | None = None, *, skip: bool = False) -> ReluNet:
    rng = np.random.default_rng([seed, 4])
    shape = () if outputs is None else (outputs,)
    return ReluNet(
        rng.standard_normal((neurons, width)) / width**0.5,
        0.5 * rng.standard_normal(neurons),
        rng.standard_normal((*shape, neurons)) / neurons**0.5,
        rng.standard_normal(shape),
        rng.standard_normal((*shape, width)) / width**0.5 if skip else None,
    )


def judged(oracle: Oracle, seed: int, **options: Any) -> tuple[Estimate | None, Outcome]:
    """The estimate and what the certificate makes of it; no estimate where the method gives up."""
    session = Session(oracle)
    try:
        estimate = session.run(relu_boost(oracle.signature, np.random.default_rng([seed, 1]), **options))
    except Unrecoverable as error:
        return None, error.outcome
    return estimate, session.run(certify(estimate, oracle.signature, np.random.default_rng([seed, 2]), 32)).outcome


def error(estimate: Estimate, truth: ReluNet, norm: float | None = None) -> float:
    """Root mean square over standard normal tokens, or over ones of a norm."""
    tokens = np.random.default_rng(5).standard_normal((2000, truth.width))
    if norm is not None:
        tokens *= norm / np.linalg.norm(tokens, axis=1, keepdims=True)
    return float(np.sqrt(np.mean((np.asarray(estimate.params.on_vectors(tokens)) - truth.on_vectors(tokens)) ** 2)))


@pytest.mark.parametrize("scale", [1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize(("width", "neurons"), [(10, 5), (8, 16)])
def test_at_the_noise(width: int, neurons: int, scale: float) -> None:
    truth = net(width, neurons, 20)
    estimate, outcome = judged(Noisy(kh.FunctionOracle(truth, width), scale), 20)
    assert outcome is Outcome.CERTIFIED
    assert estimate is not None
    assert error(estimate, truth) <= scale


@pytest.mark.parametrize("wrap", [lambda box: Rounded(box, 6), lambda box: Cast(box, "float32")])
def test_quantised_answers(wrap: Any) -> None:
    truth = net(8, 16, 21)
    estimate, outcome = judged(wrap(kh.FunctionOracle(truth, 8)), 21)
    assert outcome is Outcome.CERTIFIED
    assert estimate is not None
    assert error(estimate, truth) <= 1e-4


def test_single_precision_box() -> None:
    truth = net(8, 16, 22)
    estimate, outcome = judged(kh.FunctionOracle(truth, 8, like=np.zeros(1, dtype=np.float32)), 22)
    assert outcome is Outcome.CERTIFIED
    assert estimate is not None
    assert error(estimate, truth) <= 1e-4


def check_random_boxes(seed: int) -> None:
    """Whatever the box: certified means that the function is right within what its error bars say."""
    rng = np.random.default_rng(seed)
    for number in range(4):
        width, neurons, outputs = int(rng.integers(2, 9)), int(rng.integers(1, 10)), [None, None, 3][rng.integers(3)]
        norm = [None, 2 * width**0.5][rng.integers(2)]
        scale = 10 ** rng.uniform(-6, -2)
        truth = net(width, neurons, seed + number, outputs, skip=bool(rng.integers(2)))
        oracle = Noisy(kh.FunctionOracle(truth, width, max_norm=norm), scale, seed=number)
        estimate, outcome = judged(oracle, seed % 2**32)
        if outcome is not Outcome.CERTIFIED:
            continue
        assert estimate is not None
        tokens = rng.standard_normal((500, 1, width)) * (0.3 if norm else 1.0)
        bars = estimate.params.error_bar(estimate.standard_error, tokens, 0.0)
        off = np.abs(estimate.params(tokens) - truth(tokens))
        # A neuron lost in noise may add about as much as the noise.
        assert np.sqrt(np.mean(off**2)) <= 3 * np.sqrt(np.mean(bars**2)) + scale


def test_fresh_boxes_are_right_or_admitted(fresh_seed: int) -> None:
    check_random_boxes(fresh_seed)


def test_a_step_that_single_precision_cannot_hold_is_not_taken() -> None:
    check_random_boxes(111474268943087)


def test_bounded_errors_are_covered() -> None:
    truth, tolerance = net(6, 4, 23), 1e-3

    def box(tokens: Any) -> Any:
        return truth(tokens) + tolerance * np.sign(np.sin(1e4 * np.sum(tokens[:, -1, :], axis=-1)))

    estimate, outcome = judged(kh.FunctionOracle(box, 6, noise=Noise.bounded(tolerance)), 23)
    assert outcome is Outcome.CERTIFIED
    assert estimate is not None
    tokens = np.random.default_rng(6).standard_normal((500, 1, 6))
    off = np.abs(estimate.params(tokens) - truth(tokens))
    assert np.all(off <= estimate.params.error_bar(estimate.radius, tokens, 0.0) + tolerance)


def test_standard_errors_are_those_of_repetition() -> None:
    """Over repeated noise, predictions scatter by what the Fisher information says."""
    truth, scale, rng = net(5, 3, 24), 1e-3, np.random.default_rng(7)
    tokens = rng.standard_normal((400, 5))
    rows = np.concatenate([tokens, np.ones((400, 1))], axis=1) / scale
    planes = np.concatenate([truth.weights_in, truth.bias_in[:, None]], axis=1)
    fresh = np.concatenate([rng.standard_normal((50, 5)), np.ones((50, 1))], axis=1)
    exact, ratios = truth.on_vectors(fresh[:, :5]), []
    for _ in range(40):
        problem = NetProblem(rows, (truth.on_vectors(tokens) / scale + rng.standard_normal(400))[:, None], False, False)
        fit = descend(fit_planes(problem, problem.to_white(planes)), 30)
        raw = fit.raw_planes()
        said = np.concatenate([np.maximum(fresh @ raw.T, 0), fresh[:, -1:]], axis=1) @ fit.output
        ratios.append((said[:, 0] - exact) / Covariance(fit).predictions(fresh)[:, 0])
    assert 0.8 < np.sqrt(np.mean(np.square(ratios))) < 1.25


@pytest.mark.parametrize(("width", "neurons"), [(6, 4), (4, 9)])
def test_orientation_needs_no_skip(width: int, neurons: int) -> None:
    truth, rng = net(width, neurons, 25), np.random.default_rng(8)
    tokens = 2 * rng.standard_normal((600, width))
    rows = np.concatenate([tokens, np.ones((600, 1))], axis=1) * 1e6
    problem = NetProblem(rows, 1e6 * truth.on_vectors(tokens)[:, None])
    planes = np.concatenate([truth.weights_in, truth.bias_in[:, None]], axis=1) * rng.choice([-1, 1], (neurons, 1))
    fit = fit_planes(problem, problem.to_white(planes))
    turned = orient(fit)
    assert turned is not None
    assert not turned.problem.affine
    assert turned.squares < 1e-3 * tokens.shape[0]
    assert abs(as_relu(fit).squares - fit.squares) < 1e-3 * tokens.shape[0]


def test_descent_never_climbs(rng: np.random.Generator) -> None:
    rows = np.concatenate([rng.standard_normal((200, 4)), np.ones((200, 1))], axis=1)
    start = fit_planes(NetProblem(rows, rng.standard_normal((200, 2))), unit(rng.standard_normal((6, 5))))
    assert descend(start, 10).squares <= start.squares


def test_norm_bound_and_count_are_kept() -> None:
    truth = net(6, 4, 26)
    oracle = Counted(Noisy(kh.FunctionOracle(truth, 6, max_norm=3.0), 1e-3))  # refuses longer tokens
    estimate = Session(oracle).run(relu_boost(oracle.signature, np.random.default_rng(0)))
    assert estimate.details["valid_to_norm"] <= 3.0
    assert IN_THE_END * estimate.counting_bound <= oracle.queries <= 2 * IN_THE_END * estimate.counting_bound


def test_a_deeper_net_is_not_certified() -> None:
    first, second = net(4, 8, 27, 8), net(8, 8, 28)
    box = kh.FunctionOracle(lambda tokens: second.on_vectors(np.maximum(first(tokens), 0)), 4)
    _, outcome = judged(Noisy(box, 1e-5), 27, neurons=24)
    assert outcome is not Outcome.CERTIFIED


def test_silence_and_small_budgets_are_admitted() -> None:
    truth = net(6, 4, 29)
    _, outcome = judged(Noisy(kh.FunctionOracle(truth, 6, max_norm=0.01), 10.0), 29)
    assert outcome is Outcome.TOO_NOISY
    _, outcome = judged(Noisy(kh.FunctionOracle(truth, 6), 1e-3), 29, budget=90)
    assert outcome is Outcome.BUDGET_EXHAUSTED


def test_target_error() -> None:
    truth = net(5, 3, 30)
    box = Noisy(kh.FunctionOracle(truth, 5, max_norm=4.0), 1e-3)
    plain, _ = judged(box, 30)
    assert plain is not None
    assert plain.details["standard_error"] > 2e-4
    estimate, _ = judged(box, 30, target_error=2e-4)
    assert estimate is not None
    assert estimate.details["target_reached"]
    assert estimate.details["standard_error"] <= 2e-4
    with pytest.raises(UsageError, match="target_error"):
        judged(box, 30, target_error=-1.0)


@pytest.mark.parametrize("noise", [0.0, 1e-4])
def test_all_positions_are_read_at_the_last(noise: float) -> None:
    truth = net(4, 3, 31)
    everywhere = lambda tokens: truth(tokens.reshape(-1, 1, 4)).reshape(tokens.shape[:2])  # noqa: E731
    boxes = [kh.FunctionOracle(everywhere, 4, positions="all"), kh.FunctionOracle(truth, 4)]
    found, last = (kh.recover(Noisy(box, noise) if noise else box, "relu-net") for box in boxes)
    assert found.stats.stages == last.stats.stages
    assert found.params.outputs == last.params.outputs is None  # and not one output, as a sequence of one token has
    assert kh.distance(found.params, last.params) <= 1e-9


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("seed", range(4))
def test_nets_without_biases_are_read_behind_a_dtype(dtype: str, seed: int) -> None:
    """The zero token is answered exactly 0, and weighs no more than tokens near it."""
    own = net(3, 4, seed)
    plain = ReluNet(own.weights_in, 0 * own.bias_in, own.weights_out, 0 * own.bias_out)
    result = kh.recover(Cast(kh.FunctionOracle(plain, width=3, max_norm=100.0), dtype), throw=False)
    assert result.certified


def test_nets_computed_in_float32_are_read_although_nothing_says_so() -> None:
    own = net(3, 4, 0)
    small = ReluNet(*(np.asarray(array).astype(np.float32) for array in own.arrays().values()))
    oracle = kh.FunctionOracle(lambda x: small(x.astype(np.float32)).astype(float), width=3)
    assert kh.recover(oracle).certified


def test_failed_arithmetic_is_not_another_family(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("operands could not be broadcast")
        yield

    monkeypatch.setattr("keyhole.methods.relu_net.method.relu_boost", fail)
    oracle = kh.FunctionOracle(net(3, 4, 0), width=3, noise="gaussian:0.001")
    result = kh.recover(oracle, "relu-net", throw=False)
    assert result.outcome is Outcome.ARITHMETIC_FAILED
    assert "operands" in result.message
