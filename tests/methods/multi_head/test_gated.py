"""Heads behind one number, all at once: any logits, tokens of bounded norm, answers that err."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from benchmarks.support.related_heads import related_heads
from keyhole.arrays import Floats
from keyhole.gauge.compare import align

WIDTH = 6
NORM = 3.0
KINDS = ("generic", "double", "opposite", "factor", "cancel", "equal", "mirror", "biases")


def draw(kind: str, heads: int, seed: int, width: int = WIDTH, outputs: int | None = None) -> kh.MultiHead:
    return related_heads(kind, heads, width, [seed, heads], outputs)


def recover(
    answer: Callable[[Floats], Floats], seed: int = 0, method: str = "multi-head", **options: Any
) -> kh.Recovery:
    width = options.pop("width", WIDTH)
    return kh.recover(kh.FunctionOracle(answer, width=width, **options), method, seed=seed, throw=False)


def check_inside(result: kh.Recovery, truth: kh.MultiHead) -> None:
    """Every entry is within its radius."""
    found, radii = result.params.arrays(), result.certificate.radius.arrays()
    assert len(result.params.heads) == len(truth.heads)
    for name, expected in align(result.params, truth).items():
        assert np.all(np.abs(np.asarray(found[name]) - expected) <= np.asarray(radii[name])), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [2, 4])
def test_bounded_norms(kind: str, heads: int) -> None:
    truth = draw(kind, heads, 1)
    result = recover(truth, max_norm=NORM)
    assert result.certified, result.message
    check_inside(result, truth)
    assert kh.distance(result.params, truth) < 1e-11
    numbers = heads * (WIDTH**2 + WIDTH)
    more = {"equal": 4 * (WIDTH - 1), "mirror": 4 * (WIDTH - 1) + 12}  # halfway between last tokens, and for a scale
    assert result.stats.queries <= (3.1 if kind == "biases" else 2.4) * numbers + 2 * (WIDTH - 1) + more.get(kind, 0)


@pytest.mark.parametrize("seed", [11, 15, 16])  # gates at some last tokens are found in another order than at the first
def test_gates_of_heads_with_equal_values_keep_their_order(seed: int) -> None:
    truth = draw("equal", 2, seed, width=4)
    result = recover(truth, max_norm=NORM, width=4)
    assert result.certified, result.message
    check_inside(result, truth)


def test_heads_that_are_alike_beside_one_last_token_are_read_beside_another() -> None:
    rng = np.random.default_rng([29, 77])
    scores = [10 ** rng.uniform(-1.2, 0.5) * np.outer(*rng.standard_normal((2, 4))) / 2 for _ in range(4)]
    values = rng.standard_normal((4, 4))
    values[1] = -values[0]
    truth = kh.MultiHead([kh.SingleHead(*each) for each in zip(scores, values, strict=True)])
    result = recover(truth, seed=29, max_norm=NORM, width=4)
    assert result.certified, result.message
    check_inside(result, truth)


@pytest.mark.parametrize("kind", ["double", "opposite", "factor"])
def test_free_norms(kind: str) -> None:
    truth = draw(kind, 3, 2)
    result = recover(truth)
    assert result.certified, result.message
    check_inside(result, truth)
    assert kh.distance(result.params, truth) < 1e-11


def test_heads_that_hide_behind_another_are_found() -> None:
    """(W, v) and (−W, v) never jump; (W, v) and (W', −v) do so twice between two of the first angles, for this seed."""
    pair = draw("mirror", 2, 0, width=4)
    result = recover(pair, width=4)
    assert result.certified, result.message
    check_inside(result, pair)
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((3, 4, 4))
    scores[1] = scores[0] + 0.03 * scores[1]
    value, other = rng.standard_normal((2, 4))
    truth = kh.MultiHead([kh.SingleHead(*each) for each in zip(scores, (value, -value, other), strict=True)])
    found = recover(truth, width=4)
    assert found.certified, found.message
    check_inside(found, truth)


@pytest.mark.parametrize("method", ["multi-head", "auto"])
def test_generic_heads_of_free_norms_are_read_one_by_one(method: str) -> None:
    result = recover(draw("generic", 3, 3), method=method)
    assert result.certified
    assert "at_once" not in result.stats.details


@pytest.mark.parametrize("noise", [kh.Noise.bounded(1e-6), kh.Noise.gaussian(1e-5), kh.Noise.rounded(6)])
@pytest.mark.parametrize("kind", ["generic", "opposite"])
def test_answers_that_err(noise: kh.Noise, kind: str) -> None:
    truth, rng = draw(kind, 2, 4), np.random.default_rng(5)

    def answer(tokens: Floats) -> Floats:
        exact = truth(tokens)
        if noise.kind == "rounded":
            return np.round(exact, noise.decimals)
        errors = rng.standard_normal(exact.shape) if noise.kind == "gaussian" else rng.choice([-1.0, 1.0], exact.shape)
        return np.asarray(exact + noise.scale * errors)

    result = recover(answer, noise=noise, max_norm=NORM)
    assert result.certified, result.message
    check_inside(result, truth)
    assert kh.distance(result.params, truth) <= 10 * noise.scale


def test_right_or_admitted(fresh_seed: int) -> None:
    """Whatever the heads, the norm and the noise."""
    rng = np.random.default_rng(fresh_seed)
    kind, heads = str(rng.choice(KINDS)), int(rng.integers(1 + 1, 4))
    truth = draw(kind, heads, fresh_seed, width=4)
    tolerance = 10.0 ** rng.uniform(-9, -2)
    noise = kh.Noise.bounded(tolerance) if rng.uniform() < 0.5 else kh.Noise.exact()

    def answer(tokens: Floats) -> Floats:
        exact = truth(tokens)
        return np.asarray(exact + noise.scale * rng.uniform(-1, 1, exact.shape))

    result = recover(answer, fresh_seed % 1000, noise=noise, max_norm=10.0 ** rng.uniform(-0.5, 1.5), width=4)
    if result.certified:
        check_inside(result, truth)


@pytest.mark.parametrize("method", ["multi-head", "auto"])
def test_auto_reaches_heads_behind_errors(method: str) -> None:
    truth, rng = draw("generic", 2, 6), np.random.default_rng(7)
    noise = kh.Noise.bounded(1e-6)
    result = recover(
        lambda tokens: truth(tokens) + rng.uniform(-1e-6, 1e-6, tokens.shape[0]),
        method=method,
        noise=noise,
        max_norm=NORM,
    )
    assert result.certified, result.message
    assert result.method == "multi-head"


@pytest.mark.parametrize("norm", [0.5, 1.0])
def test_values_that_cancel_round_as_they_are_not_as_their_sum(norm: float) -> None:
    truth = draw("cancel", 2, 0, width=4)
    result = recover(truth, max_norm=norm, width=4)
    assert result.certified, result.message
    check_inside(result, truth)


@pytest.mark.parametrize("seed", [3, 5, 7])
def test_small_logits_behind_as_many_outputs_as_heads(seed: int) -> None:
    """Token by token they are refused, or known to two digits; all at once they are read."""
    truth = draw("generic", 3, seed, width=3, outputs=3)
    result = recover(truth, max_norm=0.4, width=3)
    assert result.certified, result.message
    check_inside(result, truth)
    assert kh.distance(result.params, truth) < 1e-7


@pytest.mark.parametrize("seed", [1, 2])
def test_score_biases_far_larger_than_scores_and_dependent_values(seed: int) -> None:
    rng = np.random.default_rng(seed)
    value = rng.standard_normal((WIDTH, 2))
    sizes = 0.1 / WIDTH**0.5, 3.0
    scores_and_biases = [(rng.standard_normal((WIDTH, WIDTH)), rng.standard_normal(WIDTH)) for _ in range(2)]
    truth = kh.MultiHead([kh.SingleHead(sizes[0] * w, value, sizes[1] * c) for w, c in scores_and_biases])
    result = recover(truth, max_norm=20.0)
    assert result.certified, result.message
    check_inside(result, truth)


def test_fewer_outputs_than_heads_within_a_norm() -> None:
    truth = draw("double", 3, 8, outputs=2)
    result = recover(truth, max_norm=NORM)
    assert result.certified, result.message
    assert kh.distance(result.params, truth) < 1e-11


def test_valleys_of_near_heads_are_followed_to_their_end() -> None:
    heads = related_heads("near 1e-2", 4, 8, [1, 4, 8, *b"near 1e-2"])
    result = recover(heads, seed=1, max_norm=NORM, width=8)
    assert result.certified, result.message
    check_inside(result, heads)
    assert result.stats.queries < 534  # of no second search with more heads


@pytest.mark.parametrize("change", [1e-7, 1e-12])
def test_heads_that_hardly_differ_are_right_or_admitted(change: float) -> None:
    heads = draw("generic", 2, 9, width=4).heads
    truth = kh.MultiHead([heads[0], kh.SingleHead(heads[0].score + change * heads[1].score, heads[1].value)])
    result = recover(truth, max_norm=NORM, width=4)
    if result.certified and len(result.params.heads) == 2:
        check_inside(result, truth)
    elif result.certified:
        assert change < result.stats.details["told_apart"]


@pytest.mark.parametrize("name", ["tanh", "product", "residual"])
def test_what_is_no_sum_of_heads_is_refused_early(name: str) -> None:
    heads = draw("generic", 2, 10)
    one, two = heads.heads
    boxes: dict[str, Callable[[Floats], Floats]] = {
        "tanh": lambda tokens: np.tanh(heads(tokens)),
        "product": lambda tokens: one(tokens) * two(tokens),
        "residual": lambda tokens: heads(tokens) + tokens[:, -1, 0],
    }
    result = recover(boxes[name], max_norm=NORM)
    assert not result.certified
    assert result.stats.queries < 500


def test_weights_of_few_bits_end_a_search_for_heads_early() -> None:
    def answer(tokens: Floats) -> Floats:
        total = np.zeros(len(tokens))
        for head in draw("generic", 2, 10).heads:
            logits = head.form.logits(tokens, tokens[:, -1])
            total += np.sum(np.round(2**10 * head.attention.weights(logits)) / 2**10 * (tokens @ head.value), axis=1)
        return total

    result = recover(answer, max_norm=NORM)
    assert result.outcome is kh.Outcome.WRONG_FAMILY
    assert "every token twice" in result.message
    assert result.stats.queries < 150


def test_too_much_noise_is_admitted() -> None:
    truth, rng = draw("generic", 2, 11), np.random.default_rng(12)
    noise = kh.Noise.bounded(0.3)
    result = recover(lambda tokens: truth(tokens) + rng.uniform(-0.3, 0.3, tokens.shape[0]), noise=noise, max_norm=NORM)
    assert not result.certified


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("width", [1, 4])
def test_auto_reads_heads_that_cancel(width: int, max_norm: float | None) -> None:
    rng = np.random.default_rng([7, width])
    scores, values = rng.standard_normal((3, width, width)), rng.standard_normal((2, width))
    opposite = [kh.SingleHead(scores[0], values[0]), kh.SingleHead(-scores[0], values[0])]
    two = [kh.SingleHead(scores[0], values[0]), kh.SingleHead(scores[1], -values[0])]
    last = kh.SingleHead(scores[2], -(values[0] + values[1]))  # the sum is no more than rounding, and not always zero
    three = [kh.SingleHead(scores[0], values[0]), kh.SingleHead(scores[1], values[1]), last]
    for heads in [opposite, two] + [three] * (width > 1):
        truth = kh.MultiHead(heads)
        result = kh.recover(kh.FunctionOracle(truth, width=width, max_norm=max_norm), throw=False)
        assert result.certified, result.message
        assert kh.distance(result.params, truth) < 1e-8


def test_last_tokens_are_chosen_where_heads_of_one_factor_respond() -> None:
    truth = related_heads("factor", 6, 8, [3, 6, 8, *b"factor"])
    result = kh.recover(kh.FunctionOracle(truth, width=8, max_norm=3.0), "multi-head", seed=3)
    assert kh.distance(result.params, truth) < 1e-13
