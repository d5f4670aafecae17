"""The method `one-layer`: right or admitted, at the cost of attention alone, for any net that can be learned."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import Array, numpy_space, to_numpy
from keyhole.cli import main
from keyhole.errors import UsageError
from keyhole.families.activations import ACTIVATIONS
from keyhole.families.files import load_arrays
from keyhole.families.one_layer import OneLayer
from keyhole.families.relu_net import ReluNet
from keyhole.gauge.compare import distance
from keyhole.methods import METHODS
from keyhole.methods.base import Estimate, Steps
from keyhole.methods.one_layer.cells import choose_blocks, solve_value
from keyhole.methods.one_layer.method import ONE_LAYER, FfnLearner
from keyhole.methods.one_layer.paths import monotone_roots
from keyhole.methods.relu_net.exact.method import relu_net
from keyhole.oracles import Noisy, Rounded
from keyhole.queries import Signature
from keyhole.recovery import Outcome
from support import targets as t


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, ONE_LAYER.name, ONE_LAYER)


def layer(
    seed: int,
    width: int,
    neurons: int,
    outputs: int | None = None,
    *,
    residual: bool = False,
    rank: int | None = None,
    skip: bool = False,
    activation: str = "relu",
    score: float = 1.0,
    value: float = 1.0,
) -> OneLayer:
    """A random layer, its net as in the benchmarks."""
    rng = np.random.default_rng([seed, width, neurons])
    shape = () if outputs is None else (outputs,)
    net = ReluNet(
        rng.standard_normal((neurons, width)) / width**0.5,
        0.5 * rng.standard_normal(neurons),
        rng.standard_normal((*shape, neurons)) / max(neurons, 1) ** 0.5,
        np.asarray(rng.standard_normal(shape)),
        rng.standard_normal((*shape, width)) / width**0.5 if skip else None,
        activation,
    )
    matrix = t.gaussian(rng, width, score) if rank is None else t.of_rank(rng, width, rank, score)
    head = kh.SingleHead(matrix, value * rng.standard_normal((width, width)) / width**0.5)
    return OneLayer(head, net, residual)


def with_biases(truth: OneLayer, size: float, share: float = 1.0, constant: float = 0.0) -> OneLayer:
    """The same with this share of the biases of its net, times a size, and none else."""
    net = truth.ffn
    kept = np.random.default_rng(net.neurons).random(net.neurons) < share
    return replace(
        truth, ffn=replace(net, bias_in=size * kept * net.bias_in, bias_out=np.asarray(constant * net.bias_out))
    )


def on_single_tokens(truth: OneLayer, turn: np.random.Generator | None = None) -> ReluNet:
    """What single tokens show of a layer; with `turn` some neurons the other way round, which a skip makes up for."""
    net, eye = truth.ffn, np.eye(truth.width)
    seen = truth.attention.value.T + (eye if truth.residual else 0 * eye)
    inner, skip = net.weights_in @ seen, None if net.skip is None else net.skip @ seen
    bias_in, bias_out = net.bias_in, net.bias_out
    if turn is not None:
        back = turn.random(net.neurons) < 0.5
        lost = (net.weights_out * back) @ inner
        skip, bias_out = lost if skip is None else skip + lost, bias_out + (net.weights_out * back) @ bias_in
        sign = np.where(back, -1.0, 1.0)
        inner, bias_in = inner * sign[:, None], bias_in * sign
    return ReluNet(inner, bias_in, net.weights_out, np.asarray(bias_out), skip, net.activation)


def knowing(net: ReluNet) -> FfnLearner:
    """A learner that was told: attention is tested apart from learning nets."""

    def learner(signature: Signature, rng: np.random.Generator) -> Steps[Estimate]:
        example = signature.space.zeros(1, 1)
        known = net.like(example)
        radius = ReluNet(**{name: 4e-15 * abs(array) for name, array in known.arrays().items()})
        return Estimate(known, replace(radius, activation=net.activation), counting_bound=0)
        yield  # a generator that asks nothing

    return learner


def recovered(truth: Callable[[Array], Array], width: int, *, like: Array = None, **options: Any) -> kh.Recovery:
    limits = {name: options.pop(name) for name in ("max_norm", "max_length", "positions") if name in options}
    oracle = kh.FunctionOracle(truth, width=width, like=like, **limits)
    return kh.recover(oracle, "one-layer", throw=False, **options)


def known(truth: OneLayer, **options: Any) -> kh.Recovery:
    return recovered(truth, truth.width, ffn_learner=knowing(on_single_tokens(truth)), **options)


def score_error(result: kh.Recovery, truth: OneLayer) -> float:
    difference = to_numpy(result.params.attention.score) - truth.attention.score
    return float(np.linalg.norm(difference) / np.linalg.norm(truth.attention.score))


def function_error(result: kh.Recovery, truth: OneLayer, seed: int = 0) -> float:
    """Largest error on long random sequences over how much their answers vary."""
    rng, errors, answers = np.random.default_rng(seed), [], []
    for length in (1, 2, 3, 7, 20, 50):
        tokens = rng.standard_normal((40, length, truth.width))
        answers.append(truth(tokens))
        errors.append(np.max(np.abs(to_numpy(result.params(tokens)) - answers[-1])))
    return float(max(errors) / np.std(np.concatenate(answers), axis=0).min())


def covers(result: kh.Recovery, truth: OneLayer) -> bool:
    """Whether the score matrix is within its radius, entry by entry, and so are answers within their bars."""
    radius = result.certificate.radius
    miss = np.abs(to_numpy(result.params.attention.score) - truth.attention.score)
    tokens = np.random.default_rng(1).standard_normal((50, 4, truth.width))
    bar = result.params.error_bar(radius, tokens, 1e-15)
    return bool(
        np.all(miss <= to_numpy(radius.attention.score))
        and np.all(np.abs(to_numpy(result.params(tokens)) - truth(tokens)) <= to_numpy(bar))
    )


# --- the family -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("outputs", [None, 3])
def test_a_layer_is_what_it_says(residual: bool, outputs: int | None, like: Array) -> None:
    truth = layer(0, 5, 7, outputs, residual=residual, skip=True)
    tokens = np.random.default_rng(0).standard_normal((4, 6, 5))
    logits = np.einsum("bid,de,be->bi", tokens, truth.attention.score, tokens[:, -1])
    weights = np.exp(logits) / np.sum(np.exp(logits), axis=1, keepdims=True)
    inner = np.einsum("bi,bid->bd", weights, tokens) @ truth.attention.value + (tokens[:, -1] if residual else 0)
    expected = truth.ffn(inner[:, None, :])
    found = truth(kh.arrays.Space.of(like).asarray(tokens))
    assert type(found) is type(like)
    assert to_numpy(found) == pytest.approx(expected, rel=1e-12)
    mixture = np.einsum("bi,bid->bd", weights, tokens)
    beside = truth.beside_attention()
    assert beside.on_vectors(np.hstack([tokens[:, -1], mixture])) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("residual", [False, True])
def test_a_layer_survives_a_file(tmp_path: Path, residual: bool) -> None:
    truth = layer(0, 4, 6, 2, residual=residual, activation="gelu")
    truth.save(tmp_path / "layer.safetensors")
    family, arrays = load_arrays(tmp_path / "layer.safetensors")
    again = OneLayer.of_arrays(**arrays)
    assert family == OneLayer.family
    assert again.residual is residual
    assert again.ffn.activation == "gelu"
    assert {name: array.tolist() for name, array in again.arrays().items()} == {
        name: array.tolist() for name, array in truth.arrays().items()
    }
    with pytest.raises(TypeError, match="nonsense"):
        OneLayer.of_arrays(**arrays, **{"ffn.nonsense": np.zeros(1)})


def test_parts_that_do_not_fit_are_refused() -> None:
    head, net = kh.SingleHead(np.eye(3), np.ones((3, 2))), layer(0, 3, 4).ffn
    with pytest.raises(UsageError, match="width"):
        OneLayer(head, net)
    with pytest.raises(UsageError, match="must agree"):
        OneLayer(head, net, residual=True)
    with pytest.raises(UsageError, match="matrix"):
        OneLayer(kh.SingleHead(np.eye(3), np.ones(3)), net)
    with pytest.raises(UsageError, match="cannot be saved"):
        OneLayer(kh.SingleHead(np.eye(3), np.eye(3)), np.sum).save("nowhere")


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("opaque", [False, True])
def test_error_bars_hold_what_parameters_within_their_radius_do(residual: bool, opaque: bool, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    truth = layer(1, 6, 9, 2, residual=residual, skip=True)
    size = 1e-7

    def moved(array: Array) -> Array:
        return array + size * rng.uniform(-1, 1, array.shape)

    found = OneLayer.of_arrays(
        residual=str(residual).lower(), **{name: moved(array) for name, array in truth.arrays().items()}
    )
    radius = OneLayer.of_arrays(**{name: 0 * array + size for name, array in truth.arrays().items()})
    if opaque:  # a net that is known as a function only, and exactly

        class Opaque:
            def __call__(self, tokens: Array) -> Array:
                return truth.ffn(tokens)

            def error_bar(self, radius: object, tokens: Array, rounding: float) -> Array:
                return 0 * truth.ffn(tokens)

        found, radius = replace(found, ffn=Opaque()), replace(radius, ffn=None)
    tokens = rng.standard_normal((200, 5, 6))
    miss, bar = np.abs(found(tokens) - truth(tokens)), found.error_bar(radius, tokens, 1e-16)
    assert np.all(miss <= bar)
    assert np.median(bar) < 1e3 * size


# --- numerics -------------------------------------------------------------------------------------------------


def test_roots_of_many_monotone_functions() -> None:
    rng = np.random.default_rng(0)
    kinks, aims = rng.uniform(0.1, 0.9, 500), rng.uniform(0, 1, 500)

    def function(x: Array) -> Array:
        return np.where(x < kinks, 0.01 * x, 0.01 * kinks + 3 * (x - kinks) + (x - kinks) ** 3)

    space, nothing = numpy_space(), np.zeros(500)
    found = monotone_roots(space, function, function(nothing), function(nothing + 1), function(aims))
    assert found == pytest.approx(aims, abs=1e-13)
    beyond = monotone_roots(space, function, function(nothing), function(nothing + 1), nothing - 1)
    assert np.all(beyond == 0)


@pytest.mark.parametrize("rows", [1, 3])
def test_chosen_blocks_determine_what_all_do(rows: int) -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 2, (60, rows, 9)).astype(float)
    chosen = choose_blocks(blocks, 12)
    assert len(set(chosen.tolist())) == len(chosen) == 12
    assert np.linalg.cond(blocks[chosen].reshape(-1, 9)) < 100
    poor = choose_blocks(np.repeat(blocks[:1], 5, axis=0), 20)  # fewer than were asked for, and all the same
    assert 1 <= len(poor) <= 5


def test_a_value_that_the_net_does_not_see_is_of_least_norm() -> None:
    rng = np.random.default_rng(0)
    inner, value = rng.standard_normal((3, 5)), rng.standard_normal((5, 5))
    bar = np.full((3, 5), 1e-14)
    found, _, missed, _, unique = solve_value(inner, bar, inner @ value.T, bar)
    assert not unique
    assert np.max(missed) < 1e-13
    assert pytest.approx(np.linalg.pinv(inner) @ inner @ value.T) == found.T


def test_products_of_no_common_value_are_not_explained_by_errors(rng: np.random.Generator) -> None:
    inner, value = rng.standard_normal((9, 5)), rng.standard_normal((5, 5))
    bar, product = np.full((9, 5), 1e-14), inner @ value.T
    _, _, missed, explained, _ = solve_value(inner, bar, product, bar)
    assert np.all(missed <= explained)
    _, _, missed, explained, _ = solve_value(inner, bar, product + 1e-9 * rng.standard_normal((9, 5)), bar)
    assert np.any(missed > 1e3 * explained)


# --- attention, behind nets that are known --------------------------------------------------------------------

SHAPES = [(8, 16, None), (8, 5, 3), (6, 0, 6), (1, 3, None), (2, 12, 2)]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("width", "neurons", "outputs"), SHAPES)
def test_right_to_the_last_digits(width: int, neurons: int, outputs: int | None, residual: bool, like: Array) -> None:
    truth = layer(2, width, neurons, outputs, residual=residual, skip=neurons == 0)
    result = known(truth, like=like)
    assert result.certified, result.message
    assert result.stats.details["residual"] is residual
    assert score_error(result, truth) < 1e-12
    assert function_error(result, truth) < 1e-10
    assert covers(result, truth)
    assert distance(result.params.beside_attention(), truth.beside_attention()) < 1e-9


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_smooth_nets(activation: str, residual: bool) -> None:
    truth = layer(3, 6, 9, None, residual=residual, activation=activation)
    result = known(truth)
    assert result.certified, result.message
    assert score_error(result, truth) < 1e-12
    assert function_error(result, truth) < 1e-10


# --- nets without biases, or with few, or small ones -----------------------------------------------------------


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    ("width", "neurons", "outputs", "options"),
    [
        (8, 12, None, {}),
        (9, 61, None, {"rank": 1}),
        (26, 50, 2, {}),
        (6, 3, 4, {"rank": 2}),
        (7, 9, 3, {"skip": True}),
        (16, 30, 12, {"value": 3.0}),
    ],
)
def test_nets_without_biases(width: int, neurons: int, outputs: int | None, options: Any, residual: bool) -> None:
    truth = with_biases(layer(0, width, neurons, outputs, residual=residual, **options), 0.0)
    result = recovered(truth, width)
    assert result.certified, result.message
    assert result.stats.details["residual"] is residual
    assert not np.any(result.params.ffn.bias_in)
    assert score_error(result, truth) < 1e-13
    assert function_error(result, truth) < 1e-11
    assert covers(result, truth)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    ("size", "share", "constant"),
    [(1.0, 0.5, 0.0), (0.0, 1.0, 1.0), (1e-9, 1.0, 0.0), (1e-12, 1.0, 1.0), (2e-14, 1.0, 0.0)],
    ids=["half of them", "output only", "small", "smaller", "rounding"],
)
def test_few_or_small_biases(size: float, share: float, constant: float, residual: bool) -> None:
    truth = with_biases(layer(1, 8, 20, 3, residual=residual), size, share, constant)
    result = recovered(truth, 8)
    assert result.certified, result.message
    assert score_error(result, truth) < 1e-13
    assert function_error(result, truth) < 1e-10
    assert covers(result, truth)
    if size >= 1e-9:  # what is more than its radius is found
        assert np.count_nonzero(result.params.ffn.bias_in) == np.count_nonzero(truth.ffn.bias_in)


@pytest.mark.parametrize("residual", [False, True])
def test_a_score_bias_before_a_net_without_biases(residual: bool) -> None:
    truth = with_biases(layer(2, 6, 10, 2, residual=residual), 0.0)
    truth = replace(truth, attention=replace(truth.attention, score_bias=np.linspace(-1.0, 1.0, 6)))
    result = recovered(truth, 6)
    assert result.certified, result.message
    assert result.stats.details["score_bias"]
    assert score_error(result, truth) < 1e-11
    assert covers(result, truth)


@pytest.mark.parametrize("max_norm", [3.0, 100.0])
def test_nets_without_biases_within_a_norm_bound(max_norm: float) -> None:
    truth = with_biases(layer(3, 6, 8, 3), 0.0)
    result = recovered(truth, 6, max_norm=max_norm)
    assert result.certified, result.message
    assert score_error(result, truth) < 1e-11
    assert covers(result, truth)


@pytest.mark.parametrize("residual", [False, True])
def test_smooth_nets_without_biases(residual: bool) -> None:
    truth = with_biases(layer(4, 6, 8, None, residual=residual, activation="gelu"), 0.0)
    result = recovered(truth, 6, ffn_learner=partial(relu_net, activation="gelu"))
    assert result.certified, result.message
    assert score_error(result, truth) < 1e-13
    assert function_error(result, truth) < 1e-11


def test_errors_of_a_learner_decide_nothing() -> None:
    """Biases of no more than their radius, from whatever learner, are none."""
    truth = with_biases(layer(5, 7, 12, None, residual=True), 0.0)
    exact = on_single_tokens(truth)
    rng = np.random.default_rng(0)
    errors = {"bias_in": 1e-14 * rng.uniform(-1, 1, 12), "bias_out": np.asarray(-1e-14)}

    def learner(signature: Signature, rng: np.random.Generator) -> Steps[Estimate]:
        radius = ReluNet(**{name: 4e-15 * abs(array) for name, array in exact.arrays().items()})
        wide = {name: np.full_like(array, 1e-14) for name, array in errors.items()}
        return Estimate(replace(exact, **errors), replace(radius, **wide), counting_bound=0)
        yield  # a generator that asks nothing

    result = recovered(truth, 7, ffn_learner=learner)
    assert result.certified, result.message
    assert score_error(result, truth) < 1e-13
    assert covers(result, truth)


def test_fresh_layers_are_right_or_admitted(fresh_seed: int) -> None:
    certified = 0
    for number in range(40):
        fixed = number < 20
        rng = np.random.default_rng([number, 0 if fixed else fresh_seed])
        width = int(rng.integers(1, 10))
        truth = layer(
            int(rng.integers(2**31)),
            width,
            int(rng.integers(1, 20)),
            [None, 2, width][number % 3],
            residual=bool(number % 2),
            rank=int(rng.integers(1, width + 1)),
            skip=bool(rng.integers(2)),
            score=10 ** rng.uniform(-6, 6),
            value=10 ** rng.uniform(-2, 2),
        )
        turn = rng if rng.integers(2) else None
        result = recovered(truth, width, ffn_learner=knowing(on_single_tokens(truth, turn)), seed=number)
        certified += result.certified and fixed
        assert not result.certified or covers(result, truth)
        assert result.certified or result.outcome is not Outcome.NOT_IDENTIFIABLE
    assert certified >= 20  # all of the fixed ones


@pytest.mark.parametrize("residual", [False, True])
def test_attention_costs_what_it_costs_without_a_net(residual: bool) -> None:
    width, neurons = 12, 20
    stages = known(layer(4, width, neurons, residual=residual)).stats.stages
    assert sum(stages[stage] for stage in ("scale", "directions", "columns")) <= width**2 + 2
    assert stages["rays"] == (3 if residual else 1) * width
    assert stages.get("attention cells", 0) <= 1.2 * (neurons + 1) * (width + 2)


def test_low_rank_is_found_and_saves_queries() -> None:
    width, rank = 24, 2
    truth = layer(5, width, 10, rank=rank)
    result = known(truth)
    assert result.certified
    assert result.stats.details["rank"] == rank
    assert result.stats.queries <= rank * (2 * width - rank) + width + rank + 84
    assert score_error(result, truth) < 1e-11


def test_what_is_not_identifiable_is_said() -> None:
    wide, narrow = layer(6, 6, 12, residual=True), layer(6, 6, 3, residual=True)
    assert known(wide).stats.details["value"] == "identified"
    result = known(narrow)
    assert result.certified
    assert result.stats.details["value"] == "of least norm"
    assert known(layer(6, 6, 12)).stats.details["value"] == "part of the net"
    for residual in (False, True):
        assert known(layer(6, 6, 12, residual=residual, value=0.0)).outcome is Outcome.NOT_IDENTIFIABLE
    assert known(wide, max_length=1).outcome is Outcome.NOT_IDENTIFIABLE


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("outputs", [None, 4])
def test_a_score_bias_is_found_and_read(outputs: int | None, residual: bool, like: Array) -> None:
    truth = layer(13, 6, 8, outputs, residual=residual)
    truth = replace(truth, attention=replace(truth.attention, score_bias=np.arange(1.0, 7.0) / 6))
    result = known(truth, like=like)
    assert result.certified, result.message
    assert result.stats.details["score_bias"]
    assert result.stats.details["residual"] is residual
    assert score_error(result, truth) < 1e-10
    assert to_numpy(result.params.attention.score_bias) == pytest.approx(truth.attention.score_bias, abs=1e-10)
    assert function_error(result, truth) < 1e-8
    assert covers(result, truth)
    assert result.stats.stages["score bias"] <= 2.6 * 7 * 8


@pytest.mark.parametrize("size", [1e-12, 1e-9, 1e-6, 1e-2, 10.0, 1e3])
def test_score_biases_of_any_size_are_right_or_admitted(size: float, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    for residual in (False, True):
        truth = layer(int(rng.integers(2**31)), 5, 7, residual=residual)
        truth = replace(truth, attention=replace(truth.attention, score_bias=size * rng.standard_normal(5)))
        result = known(truth)
        assert not result.certified or covers(result, truth)
        assert result.outcome is not Outcome.NOT_IDENTIFIABLE


def test_bounded_norms_are_read_through_the_net() -> None:
    truth = layer(7, 6, 12)
    result = known(truth, max_norm=3.0)
    assert result.certified, result.message
    assert score_error(result, truth) < 1e-9
    assert covers(result, truth)


@pytest.mark.parametrize(("seed", "score_bias"), [(0, False), (1, True), (2, False), (3, True)])
def test_residuals_and_score_biases_within_a_norm_bound(seed: int, score_bias: bool) -> None:
    truth = layer(seed, 5, 8, 2 if seed % 2 else None, residual=seed < 3)
    if seed >= 2:
        truth = with_biases(truth, 0.0)
    if score_bias:
        bias = np.random.default_rng(seed).standard_normal(5)
        truth = replace(truth, attention=replace(truth.attention, score_bias=bias))
    result = recovered(truth, 5, max_norm=3.0)
    assert result.certified, result.message
    assert result.params.residual == truth.residual
    assert (result.params.attention.score_bias is not None) == score_bias
    assert score_error(result, truth) < 1e-9
    assert covers(result, truth)


def test_a_neuron_that_no_single_token_within_the_bound_bends_is_found_out() -> None:
    rng = np.random.default_rng(2)
    turn = np.linalg.qr(rng.standard_normal((4, 4)))[0]
    weights = np.concatenate([rng.standard_normal((6, 4)), 2 * np.eye(4)[:1]])
    net = ReluNet(weights, np.append(0.3 * rng.standard_normal(6), -5.0), rng.standard_normal(7), np.asarray(0.0))
    # To a single token of norm 3 the last neuron sees x₀ + (Vᵀx)₀ cancel; to two tokens it need not.
    value = turn @ np.diag([0.5, 1.0, 1.0, 1.0])
    value[:, 0] = [-1.0, 0.0, 0.0, 0.0]
    truth = OneLayer(kh.SingleHead(rng.standard_normal((4, 4)), value), net, residual=True)
    result = recovered(truth, 4, max_norm=3.0)
    assert not result.certified
    assert "bends for these and for no single token" in result.message


def test_a_net_that_stops_growing_is_read_through() -> None:
    """Steps up and down again: far out it is flat, so that only its middle tells anything."""
    rng = np.random.default_rng(8)
    inner = rng.standard_normal((6, 4))
    inner, bias = np.vstack([inner, inner]), np.concatenate([np.ones(6), -np.ones(6)])
    net = ReluNet(inner, bias, np.repeat([1.0, -1.0], 6), np.zeros(()))
    truth = OneLayer(kh.SingleHead(t.gaussian(rng, 4, 1.0), np.eye(4)), net)
    result = known(truth)
    assert not result.certified or covers(result, truth)


def test_all_positions_are_read_at_the_last(rng: np.random.Generator) -> None:
    truth = layer(9, 4, 6)

    def everywhere(tokens: Array) -> Array:
        return np.stack([truth(np.roll(tokens, -1 - n, axis=1)) for n in range(tokens.shape[1])], axis=1)

    learner = knowing(on_single_tokens(truth))
    result = recovered(everywhere, 4, positions="all", ffn_learner=learner)
    assert result.certified, result.message


def test_a_spent_budget_leaves_what_was_found() -> None:
    truth = layer(10, 8, 6)
    result = known(truth, budget=130)
    assert result.outcome is Outcome.BUDGET_EXHAUSTED
    assert isinstance(result.params, OneLayer)
    assert np.any(result.params.attention.score)


@pytest.mark.parametrize(("name", "wrong"), [("residual", 1), ("ffn_learner", "relu")])
def test_wrong_options_are_refused(name: str, wrong: object) -> None:
    with pytest.raises(UsageError, match=name):
        recovered(layer(0, 3, 3), 3, **{name: wrong})


# --- a learner of one's own -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quadratic:
    """x·Q·x + v·x, bent once more if it is told so."""

    matrix: t.Floats
    vector: t.Floats
    bent: bool = False

    def __call__(self, tokens: Array) -> Array:
        x = tokens[:, -1, :]
        value = np.einsum("bi,ij,bj->b", x, self.matrix, x) + x @ self.vector
        return np.tanh(value) if self.bent else value

    def error_bar(self, radius: object, tokens: Array, rounding: float) -> Array:
        size = np.linalg.norm(tokens[:, -1, :], axis=1)
        return 8 * rounding * (size**2 * np.linalg.norm(self.matrix) + size * np.linalg.norm(self.vector) + 1)


@pytest.mark.parametrize("bent", [False, True])
@pytest.mark.parametrize("max_norm", [None, 2.0])
def test_any_net_that_can_be_learned_will_do(bent: bool, max_norm: float | None) -> None:
    rng = np.random.default_rng(0)
    net = Quadratic(rng.standard_normal((5, 5)), rng.standard_normal(5), bent)
    truth = OneLayer(kh.SingleHead(t.gaussian(rng, 5, 1.0), np.eye(5)), net)

    def learner(signature: Signature, rng: np.random.Generator) -> Steps[Estimate]:
        return Estimate(net, None, counting_bound=0)
        yield

    result = recovered(truth, 5, ffn_learner=learner, max_norm=max_norm)
    assert result.certified, result.message
    assert score_error(result, truth) < 1e-7
    behind = recovered(replace(truth, residual=True), 5, ffn_learner=learner, residual=False)
    assert not behind.certified
    with pytest.raises(UsageError, match="ReluNet"):
        recovered(truth, 5, ffn_learner=learner, residual=True)


# --- other families -------------------------------------------------------------------------------------------


def mixed(truth: OneLayer, weigh: Callable[[Array, Array], Array]) -> Callable[[Array], Array]:
    """The layer with other weights of attention: a function of logits (batch, length) and tokens."""

    def answer(tokens: Array) -> Array:
        logits = np.einsum("bid,de,be->bi", tokens, truth.attention.score, tokens[:, -1])
        weights = weigh(logits, tokens)
        inner = np.einsum("bi,bid->bd", weights / np.sum(weights, axis=1, keepdims=True), tokens)
        inner = inner @ truth.attention.value + (tokens[:, -1] if truth.residual else 0)
        return truth.ffn(inner[:, None, :])

    return answer


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - np.max(logits, axis=1, keepdims=True))
    return weights / np.sum(weights, axis=1, keepdims=True)


def with_something_beside(truth: OneLayer) -> Callable[[Array], Array]:
    return lambda tokens: truth(tokens) + 0.01 * np.tanh(tokens[:, 0, 0] - tokens[:, -1, 0])


OTHERS: dict[str, Callable[[OneLayer], Callable[[Array], Array]]] = {
    "hard attention": lambda truth: mixed(truth, lambda z, _: (z == np.max(z, axis=1, keepdims=True)) * 1.0),
    "positions count": lambda truth: mixed(truth, lambda z, _: softmax(z + 0.3 * np.arange(z.shape[1]))),
    "linear attention": lambda truth: mixed(truth, lambda z, _: 1 + np.abs(z)),
    "something beside it": with_something_beside,
}


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_other_families_are_never_certified(name: str, residual: bool) -> None:
    truth = layer(11, 6, 8, residual=residual)
    result = recovered(OTHERS[name](truth), 6, ffn_learner=knowing(on_single_tokens(truth)))
    # What looks like a residual and is none may end with bars too wide to say anything.
    assert result.outcome in (Outcome.WRONG_FAMILY, Outcome.UNCERTIFIED), result.message


@pytest.mark.parametrize("residual", [False, True])
def test_the_wrong_kind_of_residual_is_never_certified(residual: bool) -> None:
    assert not known(layer(12, 6, 8, residual=residual), residual=not residual).certified


# --- with the net learned too ---------------------------------------------------------------------------------

# (width, neurons, outputs): queries without and with residual
BARS = {(8, 16, None): (613, 900), (16, 8, None): (700, 1000), (6, 10, 4): (400, 450)}


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", BARS)
def test_bars(shape: tuple[int, int, int | None], residual: bool) -> None:
    for seed in range(3):
        truth = layer(seed, *shape, residual=residual)
        result = recovered(truth, truth.width, seed=seed)
        assert result.certified, result.message
        assert score_error(result, truth) <= 1e-10
        assert function_error(result, truth) <= 1e-8
        assert result.stats.queries <= 1.1 * BARS[shape][residual]
        assert result.stats.details["neurons"] == truth.ffn.neurons
        assert covers(result, truth)


def test_fresh_boxes_are_right_or_admitted(fresh_seed: int) -> None:
    certified = 0
    for number in range(16):
        fixed = number < 8
        rng = np.random.default_rng([number, 0 if fixed else fresh_seed])
        width, outputs = int(rng.integers(2, 9)), [None, 3][number % 2]
        truth = layer(
            int(rng.integers(2**31)),
            width,
            int(rng.integers(1, 14)),
            outputs,
            residual=bool(rng.integers(2)),
            skip=bool(rng.integers(2)),
            rank=int(rng.integers(1, width + 1)),
        )
        result = recovered(truth, width, seed=number)
        certified += result.certified and fixed
        assert not result.certified or covers(result, truth)
    assert certified >= 7  # of eight fixed ones


def test_both_libraries_learn_all_of_it(like: Array) -> None:
    truth = layer(20, 5, 8, residual=True)
    result = recovered(truth, 5, like=like)
    assert result.certified, result.message
    assert type(result.params.attention.score) is type(like)
    assert function_error(result, truth) < 1e-8


def test_a_score_of_zero_before_a_net_that_is_flat_at_places() -> None:
    """Where the net does not bend, answers to pairs of tokens differ from predictions by rounding alone."""
    certified = 0
    for seed in (0, 1, 3, 13):
        rng = np.random.default_rng([seed, 12])
        width, neurons, inner = (int(rng.integers(low, high)) for low, high in ((2, 6), (1, 5), (1, 5)))
        head = kh.SingleHead(np.zeros((width, width)), rng.standard_normal((width, inner)))
        weights = rng.standard_normal((neurons, inner)), rng.standard_normal(neurons), rng.standard_normal(neurons)
        truth = kh.OneLayer(head, kh.ReluNet(*weights, np.asarray(0.3)))
        result = recovered(truth, width)
        certified += result.certified
        assert not result.certified or kh.distance(result.params, truth) < 1e-12
    assert certified >= 3  # of four: roundings, which machines differ in, decide over a score that is zero


def test_a_head_without_a_net_is_a_layer_too() -> None:
    head = t.gaussian(np.random.default_rng(0), 6), np.random.default_rng(1).standard_normal(6)
    result = recovered(kh.SingleHead(*head), 6)
    assert result.certified, result.message
    assert result.stats.details["neurons"] == 0
    assert result.params.attention.score == pytest.approx(head[0], abs=1e-12)


def deep(tokens: Array) -> Array:
    rng = np.random.default_rng(0)
    first, second = rng.standard_normal((2, 5, 5)), rng.standard_normal(5)
    mixture = kh.SingleHead(first[0] / 5, np.eye(5))(tokens)
    hidden = np.maximum(mixture @ first[1] + 0.3, 0)
    return np.maximum(hidden @ rng.standard_normal((5, 6)) - 0.2, 0) @ np.append(second, 1.0)


def normalised(tokens: Array) -> Array:
    truth = layer(21, 5, 6)
    return truth(tokens / np.linalg.norm(tokens + 1e-3, axis=-1, keepdims=True))


@pytest.mark.parametrize("box", [deep, normalised])
def test_boxes_whose_net_is_another_are_never_certified(box: Callable[[Array], Array]) -> None:
    result = recovered(box, 5)
    assert not result.certified
    assert result.outcome in (Outcome.WRONG_FAMILY, Outcome.UNCERTIFIED), result.message


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("residual", [False, True])
def test_one_more_kink_behind_the_net_is_seen(seed: int, residual: bool) -> None:
    truth = layer(seed, 6, 8, residual=residual)
    assert not recovered(lambda tokens: np.maximum(truth(tokens), 0), 6, seed=seed).certified


ENCODER = """
import torch
import keyhole as kh

def make(biased=False):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(6, nhead=1, dim_feedforward=10, dropout=0.0, batch_first=True).double()
    layer.norm1 = layer.norm2 = torch.nn.Identity()
    torch.nn.init.normal_(layer.linear1.bias)
    if biased:
        torch.nn.init.normal_(layer.self_attn.in_proj_bias)
        torch.nn.init.normal_(layer.self_attn.out_proj.bias)

    @torch.no_grad()
    def last(tokens):
        return layer(tokens)[:, -1, :]

    make.layer = layer
    return kh.FunctionOracle(last, width=6, like=torch.zeros(1, dtype=torch.float64))

def make_biased():
    return make(biased=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("factory", ["make", "make_biased"])
def test_an_encoder_layer_of_torch(factory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """h = x + attention(x), then h + W2·relu(W1·h + b1) + b2: a residual, and a skip past the neurons."""
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    Path("box.py").write_text(ENCODER, encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["recover", f"python:box.py:{factory}", "--method", "one-layer", "--json", "--out", "run"])
    said = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0, said
    assert said["certified"]
    assert said["details"]["residual"]
    assert said["details"]["value"] == "identified"
    family, arrays = load_arrays("run/params.safetensors")
    found = OneLayer.of_arrays(**arrays)
    names: dict[str, Any] = {}
    exec(compile(ENCODER, "box.py", "exec"), names)
    oracle = names[factory]()
    attention = names["make"].layer.self_attn
    query, key, value = attention.in_proj_weight.detach().numpy().reshape(3, 6, 6)
    output = attention.out_proj.weight.detach().numpy()
    assert family == OneLayer.family
    assert found.attention.score == pytest.approx(key.T @ query / 6**0.5, abs=1e-10)
    assert found.attention.value == pytest.approx((output @ value).T, abs=1e-9)
    assert (found.attention.score_bias is not None) is (factory == "make_biased")
    if found.attention.score_bias is not None:
        query_bias = attention.in_proj_bias.detach().numpy()[:6]
        assert found.attention.score_bias == pytest.approx(key.T @ query_bias / 6**0.5, abs=1e-10)
    tokens = np.random.default_rng(0).standard_normal((20, 30, 6))
    assert found(tokens) == pytest.approx(to_numpy(oracle(torch.asarray(tokens))), abs=1e-9)


@pytest.mark.parametrize("error", ["noise", "rounding", "float32"])
def test_folds_hidden_by_errors_are_said_to_be(error: str) -> None:
    truth = layer(0, 6, 8)
    oracle = kh.FunctionOracle(truth, width=6, like=np.zeros(1, np.float32 if error == "float32" else np.float64))
    wrapped = {"noise": lambda: Noisy(oracle, 1e-6), "rounding": lambda: Rounded(oracle, decimals=6)}
    result = kh.recover(wrapped.get(error, lambda: oracle)(), method="one-layer", throw=False)
    assert result.outcome is kh.Outcome.TOO_NOISY
    assert "exact float64" in result.message


def test_a_net_behind_attention_beside_a_residual_is_another_family(fresh_seed: int) -> None:
    """x_N + a + small net(a): the neurons see no common value behind x_N, however small they are."""
    for seed in range(fresh_seed, fresh_seed + 4):
        rng = np.random.default_rng(seed)
        head = kh.SingleHead(rng.standard_normal((6, 6)), rng.standard_normal((6, 6)))
        inner = rng.standard_normal((6, 6)) / 3

        def box(tokens: np.ndarray, head: kh.SingleHead = head, inner: np.ndarray = inner) -> np.ndarray:
            seen = head(tokens)
            return tokens[:, -1] + seen + 1e-3 * np.maximum(seen @ inner, 0)

        result = kh.recover(kh.FunctionOracle(box, width=6), method="one-layer", residual=True, throw=False)
        if result.certified:
            tokens = rng.standard_normal((500, 6, 6))
            bars = result.params.error_bar(result.certificate.radius, tokens, 1e-14)
            assert np.all(np.abs(result.params(tokens) - box(tokens)) <= bars)


@pytest.mark.parametrize("away", [0.6, 0.7])
def test_one_neuron_that_is_on_near_the_bound_on_norms_only(away: float) -> None:
    """No axis leads into its cell, and few random tokens do: tokens beside its kink are chosen."""
    rng = np.random.default_rng(4)
    row = np.full(4, 0.5)
    net = kh.ReluNet(row[None], np.array([-away]), np.array([1.0]), np.asarray(0.1))
    truth = kh.OneLayer(kh.SingleHead(rng.standard_normal((4, 4)), np.eye(4)), net)
    result = kh.recover(kh.FunctionOracle(truth, width=4, max_norm=1.0), "one-layer", throw=False)
    assert result.certified, result.message
    tokens = row + 0.1 * rng.standard_normal((1000, 3, 4))
    tokens /= np.linalg.norm(tokens, axis=2, keepdims=True)
    assert np.max(np.abs(result.params(tokens) - truth(tokens))) < 1e-9


def test_neurons_that_are_on_near_the_bound_on_norms_only() -> None:
    """Mixtures of two random tokens are too short for them: two tokens of the same cell are not.

    Of 30 such layers all are certified.
    """
    for seed in (1, 2, 3):
        rng = np.random.default_rng([seed, 92])
        rows = rng.standard_normal((3, 4))
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        net = kh.ReluNet(rows, -np.array([0.6, 0.7, 0.75]), rng.standard_normal(3), np.asarray(0.1))
        truth = kh.OneLayer(kh.SingleHead(rng.standard_normal((4, 4)), np.eye(4)), net)
        result = kh.recover(kh.FunctionOracle(truth, width=4, max_norm=1.0), seed=seed, throw=False)
        tokens = rng.standard_normal((1000, 3, 4))
        tokens /= np.linalg.norm(tokens, axis=2, keepdims=True)
        assert result.certified, result.message
        assert np.max(np.abs(result.params(tokens) - truth(tokens))) < 1e-9
