"""Several heads before a net: right or admitted, whatever the logits, with and without a residual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import expit

import keyhole as kh
from benchmarks.tables.heads_before_net import HARD, hard_layer, score_errors, with_net
from keyhole.arrays import Array
from keyhole.families.one_layer import OneLayer
from keyhole.methods.one_layer.several_heads.far_cells import FarNet
from keyhole.methods.one_layer.several_heads.odds_pencil import solve_odds
from keyhole.recovery import Outcome
from keyhole.targets import open_target
from keyhole.targets.demos import random_layer, random_net

STAGES = ("heads", "scores", "cells behind heads")


def layer(seed: int, width: int, neurons: int, outputs: int | None, heads: int, residual: bool = False) -> OneLayer:
    return random_layer(width, neurons, outputs, np.random.default_rng([seed, 15]), residual=residual, heads=heads)


def recovered(box: Callable[[Array], Array], width: int, **options: object) -> kh.Recovery:
    return kh.recover(kh.FunctionOracle(box, width=width), "one-layer", throw=False, **options)


def function_error(result: kh.Recovery, truth: OneLayer) -> float:
    tokens = np.random.default_rng(9).standard_normal((300, 4, truth.width))
    return float(np.max(np.abs(result.params(tokens) - truth(tokens))) / np.std(truth(tokens)))


def attention_queries(result: kh.Recovery) -> int:
    return sum(count for stage, count in result.stats.stages.items() if stage in STAGES)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("net", ["ReLU", "no biases", "GELU"])
@pytest.mark.parametrize(
    ("shape", "most"), [((8, 16, None, 2), (600, 782)), ((7, 12, 6, 3), (420, 440))], ids=["scalar", "vector"]
)
def test_bars(shape: tuple[int, int, int | None, int], most: tuple[int, int], net: str, residual: bool) -> None:
    truth = with_net(layer(1, *shape, residual=residual), net)
    result = recovered(truth, truth.width, activation=truth.net.activation)
    assert result.certified, result.message
    assert result.stats.details["residual"] == residual
    error, within_radii = score_errors(result, truth)
    assert error <= 1e-8
    assert within_radii
    assert function_error(result, truth) <= 1e-6
    assert kh.distance(result.params, truth) <= 1e-8
    assert attention_queries(result) <= most[residual]


def test_values_are_identified_behind_a_residual() -> None:
    truth = layer(2, 6, 12, None, 2, residual=True)
    result = recovered(truth, 6)
    assert result.stats.details["value"] == "identified"
    for found, radius in zip(result.params.heads, result.certificate.radius.heads, strict=True):
        (own,) = [head for head in truth.heads if np.allclose(head.score, found.score, atol=1e-6)]
        assert np.all(np.abs(found.value - own.value) <= radius.value)
        assert np.max(radius.value) < 1e-6


@pytest.mark.parametrize(("net", "outputs"), [("ReLU", 4), ("no biases", None)])
def test_score_biases_are_read(net: str, outputs: int | None) -> None:
    rng = np.random.default_rng(2)
    truth = with_net(layer(7, 5, 8, outputs, 2), net)
    heads = [replace(head, score_bias=0.5 * rng.standard_normal(5)) for head in truth.heads]
    truth = replace(truth, attention=kh.MultiHead(heads, rng.standard_normal(5) if net == "ReLU" else None))
    result = recovered(truth, 5)
    assert result.certified, result.message
    assert result.stats.details["score_bias"]
    assert kh.distance(result.params, truth) <= 1e-8
    assert score_errors(result, truth)[1]


@pytest.mark.parametrize("name", HARD)
def test_hard_heads_are_right_or_admitted(name: str, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    truth = hard_layer(HARD[name], rng)
    result = recovered(truth, truth.width, activation=truth.net.activation)
    if result.certified:
        tokens = rng.standard_normal((300, 3, truth.width))
        bars = result.params.error_bar(result.certificate.radius, tokens, 1e-15)
        off = np.abs(result.params(tokens) - truth(tokens))
        assert np.all(off <= 3 * bars + 1e-6 * np.max(np.abs(truth(tokens))))


def test_auto_goes_on_with_several_heads() -> None:
    target = open_target("demo:one-layer?width=6&neurons=9&heads=2&residual=1")
    result = kh.recover(target.oracle)
    assert result.method == "one-layer"
    assert len(result.params.heads) == 2
    assert target.distance(result.params) < 1e-8
    assert kh.verify(target.oracle, target.truth).same
    assert kh.verify(target.oracle, result.params, radius=result.certificate.radius).same
    other = replace(target.truth.heads[1], score=target.truth.heads[1].score + 1e-6)
    changed = replace(target.truth, attention=kh.MultiHead([target.truth.heads[0], other]))
    assert kh.verify(target.oracle, changed).conclusion == "different"


def test_auto_reads_a_smooth_net_behind_heads() -> None:
    truth = with_net(layer(3, 5, 8, 5, 2), "GELU")
    result = kh.recover(kh.FunctionOracle(truth, width=5))
    assert result.params.ffn.activation == "gelu"
    assert kh.distance(result.params, truth) < 1e-8


# --- other families -------------------------------------------------------------------------------------------


def weighed(truth: OneLayer, weigh: Callable[[Array, int], Array]) -> Callable[[Array], Array]:
    """The layer with other weights: a function of logits (batch, length) and the number of the head."""

    def answer(tokens: Array) -> Array:
        inner = tokens[:, -1] if truth.residual else 0.0
        for number, head in enumerate(truth.heads):
            weights = weigh(head.form.logits(tokens, tokens[:, -1]), number)
            inner = inner + np.einsum("bi,bid->bd", weights, tokens) @ head.value
        return truth.ffn(inner[:, None, :])

    return answer


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - np.max(logits, axis=1, keepdims=True))
    return weights / np.sum(weights, axis=1, keepdims=True)


def hardmax(logits: Array) -> Array:
    return (logits == np.max(logits, axis=1, keepdims=True)) * 1.0


def linear(logits: Array) -> Array:
    return (1 + np.abs(logits)) / np.sum(1 + np.abs(logits), axis=1, keepdims=True)


OTHERS: dict[str, Callable[[OneLayer], Callable[[Array], Array]]] = {
    "one head is hard": lambda truth: weighed(truth, lambda z, number: hardmax(z) if number else softmax(z)),
    "one head is linear": lambda truth: weighed(truth, lambda z, number: linear(z) if number else softmax(z)),
    "positions count": lambda truth: weighed(truth, lambda z, _: softmax(z + 0.3 * np.arange(z.shape[1]))),
    "something small beside it": lambda truth: (
        lambda tokens: truth(tokens) + 0.01 * np.tanh(tokens[:, 0, 0] - tokens[:, -1, 0])
    ),
}


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_other_families_are_never_certified(name: str, residual: bool) -> None:
    truth = layer(4, 5, 8, None, 2, residual=residual)
    assert not recovered(OTHERS[name](truth), 5).certified


def test_a_head_beside_the_net_is_a_skip() -> None:
    truth = layer(4, 5, 8, None, 2)
    result = recovered(lambda tokens: truth(tokens) + truth.heads[0](tokens)[:, 0], 5)
    assert result.certified, result.message
    skip = replace(truth.net, skip=np.eye(5)[0])
    (_, second) = truth.heads
    tokens = np.random.default_rng(0).standard_normal((100, 3, 5))
    assert result.params.ffn.skip is not None
    np.testing.assert_allclose(
        result.params(tokens), replace(truth, ffn=skip)(tokens) - second(tokens)[:, 0], atol=1e-8
    )


def test_weights_of_few_bits_end_a_search_for_heads_early() -> None:
    box = weighed(layer(4, 5, 8, None, 2), lambda logits, _: np.round(softmax(logits) * 2**10) / 2**10)
    result = recovered(box, 5)
    assert result.outcome is Outcome.WRONG_FAMILY
    assert "every token twice" in result.message
    assert result.stats.stages["heads"] < 120


def test_a_first_cell_that_tells_all_neurons_may_be_the_only_one() -> None:
    """Kinks so far away that no other cell is wide enough."""
    truth = layer(48, 5, 2, 4, 2)
    truth = replace(truth, ffn=replace(truth.ffn, bias_in=1e4 * truth.ffn.bias_in))
    assert recovered(truth, 5).params is not None  # which the certificate judges


def test_two_tokens_do_not_tell_several_heads() -> None:
    truth = layer(5, 5, 8, None, 2)
    result = kh.recover(kh.FunctionOracle(truth, width=5, max_length=2), "one-layer", throw=False)
    assert not result.certified


def test_parallel_kinks_are_admitted() -> None:
    """Neurons that are on and off together in all cones."""
    truth = layer(6, 4, 6, None, 2)
    inner = np.vstack([truth.net.weights_in, truth.net.weights_in[0]])
    net = replace(random_net(4, 7, None, np.random.default_rng(6)), weights_in=inner)
    assert recovered(replace(truth, ffn=net), 4).outcome in (Outcome.CERTIFIED, Outcome.NOT_IDENTIFIABLE)


# --- parts ----------------------------------------------------------------------------------------------------


def test_odds_of_a_token() -> None:
    rng = np.random.default_rng(0)
    logits, values, offsets = 2 * rng.standard_normal(5), rng.standard_normal((5, 8)), np.linspace(-2, 2, 9)
    found = solve_odds(expit(offsets[:, None] + logits) @ values, offsets, np.sum(values, axis=0), 5)
    assert found is not None
    order = np.argsort(logits)
    np.testing.assert_allclose(np.sort(found[0]), logits[order], atol=1e-6)
    np.testing.assert_allclose(found[1][np.argsort(found[0])], values[order], atol=1e-5)
    assert solve_odds(rng.standard_normal((9, 8)), offsets, np.sum(values, axis=0), 6) is None


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_cells_are_not_left(activation: str, rng: np.random.Generator) -> None:
    net = replace(random_net(6, 11, None, rng), activation=activation)
    far = FarNet.of(net)
    directions, widths = far.middles(np.concatenate([rng.standard_normal((20, 6)), far.across(rng)]))
    cells = far.cells(directions, np.full(len(directions), 3.0))
    steps = 3.0 / np.linalg.norm(cells.points, axis=1)
    assert np.all(cells.width >= 6 * steps)
    assert np.all(widths > 0)
    aside = far.steps_inside(cells.take(slice(0, 1)), directions)
    for points in (cells.points + steps[:, None] * directions[::-1], cells.points[:1] + aside[:, None] * directions):
        heights = points @ net.weights_in.T + net.bias_in
        assert np.all(np.abs(heights) >= far.net.bend)
    assert len(np.unique(cells.active, axis=0)) > 11  # each kink with both of its sides


@pytest.mark.parametrize("seed", range(4))
def test_tokens_of_one_number_are_right_or_admitted(seed: int) -> None:
    target = open_target(f"demo:one-layer?width=1&neurons=4&heads=2&seed={seed}")
    result = kh.recover(target.oracle, throw=False)
    tokens = 2 * np.random.default_rng(seed).standard_normal((200, 4, 1))
    assert not result.certified or np.max(np.abs(result.params(tokens) - target.truth(tokens))) < 1e-9


def test_several_heads_within_a_norm_end_with_the_remedy() -> None:
    truth = random_layer(4, 6, 1, np.random.default_rng(1), heads=2)
    result = kh.recover(kh.FunctionOracle(truth, width=4, max_norm=10.0), "one-layer", seed=0, throw=False)
    assert not result.certified
    assert "lift max_norm" in result.message


@pytest.mark.parametrize(("kind", "seed"), [("W₁ = 0", 1), ("W₂ = 2W₁", 100)])
def test_heads_whose_values_are_known_to_few_digits_are_not_lost(kind: str, seed: int) -> None:
    truth = hard_layer(HARD[kind], np.random.default_rng([seed, 15, *kind.encode()]))
    result = recovered(truth, truth.width, seed=seed)
    assert result.certified, result.message
    assert score_errors(result, truth)[1]


def test_a_quiet_head_beside_a_loud_one_is_found() -> None:
    loud = layer(3, 4, 6, None, 2)
    quiet = [loud.heads[0], replace(loud.heads[1], value=1e-4 * loud.heads[1].value)]
    truth = replace(loud, attention=kh.MultiHead(quiet))
    result = recovered(truth, 4)
    assert result.certified, result.message
    assert len(result.params.heads) == 2
