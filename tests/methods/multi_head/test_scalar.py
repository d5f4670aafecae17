"""Several heads behind one number, or fewer numbers than heads: right within their radii, or admitted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

import keyhole as kh
from keyhole.arrays import Array, Floats, floats, to_numpy
from keyhole.gauge.heads import canonical_heads, into_logits
from keyhole.gauge.tolerance import relative
from keyhole.methods.multi_head.scalar.gates import choose_gate, choose_points, solve_crossing, weights_of
from keyhole.methods.multi_head.scalar.jumps import HalfCircle, next_guess
from support.targets import example


def layer(
    heads: int,
    d: int,
    seed: int,
    *,
    rank: int | None = None,
    spread: float = 1.0,
    outputs: int | None = None,
    score_bias: float = 0.0,
    output_bias: float = 0.0,
) -> kh.MultiHead:
    """Gaussian heads; sizes of scores and values spread log-uniformly over a factor `spread`."""
    rng = np.random.default_rng([seed, heads, d])
    shape = (d,) if outputs is None else (d, outputs)
    made = []
    for _ in range(heads):
        score = rng.standard_normal((d, rank or d)) @ rng.standard_normal((rank or d, d)) / (rank or d) ** 0.5
        score, value = score / d**0.5, rng.standard_normal(shape)
        sizes = spread ** rng.uniform(-0.5, 0.5, 2)
        bias = score_bias * rng.standard_normal(d) if score_bias else None
        made.append(kh.SingleHead(sizes[0] * score, sizes[1] * value, bias))
    return kh.MultiHead(made, output_bias * np.asarray(rng.standard_normal(shape[1:])) if output_bias else None)


def recover(truth: Callable[[Array], Array], d: int, seed: int = 0, **options: Any) -> kh.Recovery:
    return kh.recover(kh.FunctionOracle(truth, width=d, **options), "multi-head", seed=seed, throw=False)


def order(found: kh.MultiHead, truth: kh.MultiHead) -> list[tuple[int, int]]:
    costs = [
        [relative(into_logits(a), into_logits(b)) + relative(floats(a.value), floats(b.value)) for b in truth.heads]
        for a in found.heads
    ]
    rows, columns = linear_sum_assignment(np.array(costs))
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


def errors(result: kh.Recovery, truth: kh.MultiHead) -> tuple[float, float]:
    """The largest relative errors of scores, with their biases, and values; both certified to be in their radii."""
    assert result.certified, result.message
    expected = canonical_heads(truth)
    found, radius = result.params, result.certificate.radius
    assert len(found.heads) == len(expected.heads) == result.stats.details["heads"]
    scores, values = [], []
    for a, b in order(found, expected):
        head, bar, true = found.heads[a], radius.heads[a], expected.heads[b]
        assert np.all(np.abs(into_logits(head) - into_logits(true)) <= into_logits(bar)), "a score is out of its radius"
        apart = np.abs(floats(head.value) - floats(true.value))
        assert np.all(apart <= floats(bar.value)), "a value is out of its radius"
        scores.append(relative(into_logits(head), into_logits(true)))
        values.append(relative(floats(head.value), floats(true.value)))
    if expected.output_bias is not None:
        assert np.all(np.abs(floats(found.output_bias) - floats(expected.output_bias)) <= floats(radius.output_bias))
    return max(scores), max(values)


# --- what must work ---------------------------------------------------------------------------------------------------

# Heads, width, rank: the most queries per parameter, and how far the worst score may be off.
SIZES = {
    (1, 8, None): (1.85, 1e-12),
    (4, 16, None): (1.20, 1e-10),
    (16, 16, None): (1.17, 1e-9),
    (16, 32, None): (1.07, 1e-9),
    (24, 8, None): (1.5, 1e-8),
    (8, 64, 8): (1.12, 1e-8),
}


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "d", "rank"), SIZES)
def test_queries_per_parameter_and_errors(heads: int, d: int, rank: int | None) -> None:
    most, worst = SIZES[heads, d, rank]
    truth = layer(heads, d, 1, rank=rank)
    result = recover(truth, d, seed=1)
    score, value = errors(result, truth)
    assert score <= worst
    assert value <= worst
    inner = rank or d
    assert result.stats.counting_bound == heads * (inner * (2 * d - inner) + d)
    assert result.stats.details["ranks"] == [inner] * heads
    assert result.stats.ratio <= most


def test_the_count_is_that_of_the_stages() -> None:
    heads, d = 5, 10
    result = recover(layer(heads, d, 3), d)
    stages = result.stats.stages
    assert stages["value"] == d + 1
    assert stages["values"] == (heads - 1) * d
    assert stages["one head"] == 4 * heads
    assert stages["bases"] == heads * (d + 1)
    # On its hyperplane a head is read at d − 1 points by the d − 1 rows that are not the common one; then come a form
    # off it and a column, and the first form is read twice.
    assert stages["directions"] + stages["columns"] == heads * ((d - 1) ** 2 + d + 1)
    assert result.stats.queries == sum(stages.values())


def test_fresh_heads_are_right_or_admitted(fresh_seed: int) -> None:
    right = 0
    for seed in [*range(4), *range(fresh_seed, fresh_seed + 4)]:
        rng = np.random.default_rng(seed)
        heads, d = int(rng.integers(2, 9)), int(rng.integers(2, 13))
        truth = layer(heads, d, int(rng.integers(2**40)), spread=10.0 ** rng.uniform(0, 2))
        result = recover(truth, d, seed=int(rng.integers(2**40)))
        if result.certified:
            errors(result, truth)
            right += seed < 4
    assert right >= 4  # all of the fixed seeds


def test_scales_may_spread(fixed_seed: int) -> None:
    admitted = 0
    for seed in range(4):
        truth = layer(6, 12, fixed_seed + seed, spread=100.0)
        result = recover(truth, 12, seed=fixed_seed + seed)
        admitted += not result.certified
        if result.certified:
            assert max(errors(result, truth)) <= 1e-7
    assert admitted <= 1


@pytest.mark.parametrize("outputs", [None, 2])
def test_biases(outputs: int | None) -> None:
    truth = layer(4, 10, 5, outputs=outputs, score_bias=1.0, output_bias=1.0)
    result = recover(truth, 10)
    assert max(errors(result, truth)) <= 1e-8
    assert result.stats.details["score_bias"]
    assert result.stats.details["output_bias"]


@pytest.mark.parametrize("size", [1e-4, 1e3])
def test_score_biases_of_other_sizes_than_scores(size: float) -> None:
    truth = layer(3, 8, 6, score_bias=size)
    result = recover(truth, 8)
    assert errors(result, truth)[0] <= 1e-7


def test_several_outputs_show_the_values_of_all() -> None:
    truth = layer(6, 10, 7, outputs=3)
    result = recover(truth, 10)
    assert max(errors(result, truth)) <= 1e-10
    assert result.params.outputs == 3
    # Numbers of all heads over three numbers per answer.
    assert result.stats.counting_bound == (6 * 10 * 10 + 3 * 6 * 10) // 3


@pytest.mark.parametrize("rank", [1, 2])
def test_low_ranks_are_found(rank: int) -> None:
    truth = layer(4, 12, 8, rank=rank)
    result = recover(truth, 12)
    assert errors(result, truth)[0] <= 1e-8
    assert result.stats.details["ranks"] == [rank] * 4


def test_torch_is_answered_in_torch() -> None:
    like = example("torch-float64")
    truth = layer(3, 6, 3)
    result = recover(truth, 6, seed=1, like=like)
    assert max(errors(result, truth)) <= 1e-9
    assert type(result.params.heads[0].score) is type(like)


@pytest.mark.parametrize("native", [True, False])
def test_float32_is_enough_for_a_few_heads(native: bool) -> None:
    certified = 0
    for seed in range(4):
        truth = layer(2, 6, seed)

        def rounded(tokens: Array, truth: kh.MultiHead = truth) -> Array:
            return np.asarray(np.float32(truth(tokens)), dtype=tokens.dtype)

        like = {"like": example("numpy-float32")} if native else {"noise": kh.Noise.dtype("float32")}
        result = recover(rounded, 6, seed=seed, **like)
        certified += result.certified
        if result.certified:
            assert max(errors(result, truth)) <= 1e-2
    assert certified >= 1


def test_all_positions_are_read_at_the_last() -> None:
    truth = layer(3, 8, 9)
    result = recover(truth.at_all_positions, 8, positions="all")
    assert max(errors(result, truth)) <= 1e-10


# --- heads that are related -------------------------------------------------------------------------------------------


def related(name: str, seed: int, delta: float = 0.0) -> kh.MultiHead:
    heads = list(layer(4, 10, seed).heads)
    (score, value), other = (heads[0].score, heads[0].value), heads[1]
    away = np.random.default_rng(seed).standard_normal(score.shape)
    heads[1] = {
        "equal scores": kh.SingleHead(score, other.value),
        "a head and its opposite": kh.SingleHead(score, -value),
        "no value": kh.SingleHead(other.score, 0 * value),
        "no score": kh.SingleHead(0 * score, other.value),
        "opposite scores": kh.SingleHead(-score, other.value),
        "opposite scores, equal values": kh.SingleHead(-score, value),
        "twice the score": kh.SingleHead(2 * score, other.value),
        "equal values": kh.SingleHead(other.score, value),
        "opposite values": kh.SingleHead(other.score, -value),
        "near": kh.SingleHead(score + delta * np.linalg.norm(score) / np.linalg.norm(away) * away, other.value),
    }[name]
    return kh.MultiHead(heads)


@pytest.mark.parametrize(
    "name", ["equal scores", "a head and its opposite", "no value", "no score", "equal values", "opposite values"]
)
def test_related_heads_are_merged_dropped_or_told_apart(name: str) -> None:
    truth = related(name, 2)
    result = recover(truth, 10)
    assert max(errors(result, truth)) <= 1e-9
    assert result.stats.details["uniform_heads"] == (name == "no score")


@pytest.mark.parametrize("name", ["opposite scores", "opposite scores, equal values", "twice the score"])
def test_proportional_heads_are_right_or_admitted(name: str, fresh_seed: int) -> None:
    truth = related(name, fresh_seed)
    result = recover(truth, 10)
    if result.certified:
        errors(result, truth)
    else:
        assert result.outcome in {kh.Outcome.WRONG_FAMILY, kh.Outcome.SATURATED}


@pytest.mark.parametrize("digits", range(1, 13))
def test_near_heads_are_right_merged_or_admitted(digits: int, fixed_seed: int) -> None:
    delta = 10.0**-digits
    truth = related("near", fixed_seed, delta)
    result = recover(truth, 10)
    if digits <= 3:
        assert max(errors(result, truth)) <= 1e-6
    if result.certified and len(result.params.heads) == 3:
        assert delta < result.stats.details["told_apart"]
    elif result.certified:
        errors(result, truth)


@pytest.mark.parametrize("seed", range(4))
def test_a_head_with_a_score_bias_but_no_score_is_read_by_itself(seed: int) -> None:
    rng = np.random.default_rng([seed, 31])
    heads = [
        kh.SingleHead(size * rng.standard_normal((4, 4)), rng.standard_normal(4), rng.standard_normal(4))
        for size in (1.0, 0.5, 0.0)
    ]
    for truth in (kh.MultiHead(heads), kh.MultiHead([replace(heads[0], score_bias=None), heads[2]])):
        result = recover(truth, 4, seed)
        assert result.certified, result.message
        assert kh.distance(result.params, truth) < 1e-8


def test_several_heads_without_a_score_are_read_all_at_once() -> None:
    rng = np.random.default_rng(32)
    truth = kh.MultiHead([kh.SingleHead(np.zeros((3, 3)), *rng.standard_normal((2, 3))) for _ in range(2)])
    assert max(errors(recover(truth, 3), truth)) <= 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_a_head_whose_value_vanishes_where_its_logit_does(seed: int) -> None:
    """W = a·bᵀ with the value a: rows of logit zero have no value, so the last column is read beside the hyperplane."""
    rng = np.random.default_rng([seed, 33])
    left, right, value = rng.standard_normal((3, 3))
    truth = kh.MultiHead(
        [kh.SingleHead(rng.standard_normal((3, 3)), value), kh.SingleHead(np.outer(left, right), left)]
    )
    assert max(errors(recover(truth, 3, seed), truth)) <= 1e-7


@pytest.mark.parametrize("seed", range(8))
def test_four_heads_in_two_dimensions_are_saturated_where_values_are_read(seed: int) -> None:
    rng = np.random.default_rng([seed, 34])
    biases = [rng.standard_normal(2), None, None, None]
    truth = kh.MultiHead([kh.SingleHead(rng.standard_normal((2, 2)), rng.standard_normal(2), bias) for bias in biases])
    result = recover(truth, 2, seed)
    if result.certified:
        assert kh.distance(result.params, truth) < 1e-4
    else:
        assert result.outcome is not kh.Outcome.WRONG_FAMILY, result.message


def test_tokens_of_one_number() -> None:
    one = kh.MultiHead([kh.SingleHead(np.array([[0.7]]), np.array([1.3]))])
    assert recover(one, 1).certified
    two = kh.MultiHead([*one.heads, kh.SingleHead(np.array([[-0.4]]), np.array([0.5]))])
    assert max(errors(recover(two, 1), two)) <= 1e-9


# --- what cannot be known ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "outcome", "words"),
    [
        ({"max_length": 1}, kh.Outcome.NOT_IDENTIFIABLE, "max_length"),
        ({"max_length": 2}, kh.Outcome.NOT_IDENTIFIABLE, "sequences of three"),
    ],
)
def test_what_is_refused(options: dict[str, Any], outcome: kh.Outcome, words: str) -> None:
    result = recover(layer(2, 4, 0), 4, **options)
    assert result.outcome is outcome
    assert words in result.message
    assert result.stats.queries <= 5  # single tokens, which say how many numbers an answer has


def test_three_tokens_are_enough() -> None:
    truth = layer(3, 6, 4)
    assert max(errors(recover(truth, 6, max_length=3), truth)) <= 1e-9


def test_values_that_cancel_everywhere_are_not_identifiable() -> None:
    truth = kh.MultiHead([kh.SingleHead(head.score, 0 * head.value) for head in layer(2, 6, 0).heads])
    assert recover(truth, 6).outcome is kh.Outcome.NOT_IDENTIFIABLE


def test_a_mean_is_a_head_without_a_score() -> None:
    value = np.arange(1.0, 7.0)
    result = recover(lambda tokens: np.mean(tokens, axis=1) @ value, 6)
    assert result.certified
    assert not np.any(to_numpy(result.params.heads[0].score))


def strangers(seed: int, d: int) -> dict[str, Callable[[Floats], Floats]]:
    rng = np.random.default_rng(seed)
    heads = layer(3, d, seed)
    inner, offsets, outer = rng.standard_normal((d, 12)), rng.standard_normal(12), rng.standard_normal(12)
    value = rng.standard_normal(d)
    vector = kh.SingleHead(heads.heads[0].score, rng.standard_normal((d, d)) / d**0.5)
    return {
        "relu of the mean": lambda tokens: np.maximum(tokens.mean(axis=1) @ inner + offsets, 0) @ outer,
        "relu of the last": lambda tokens: np.maximum(tokens[:, -1] @ inner + offsets, 0) @ outer,
        "relu of each": lambda tokens: np.sum(np.maximum(tokens @ inner, 0) @ outer, axis=1),
        "one-layer": lambda tokens: np.maximum(vector(tokens) @ inner + offsets, 0) @ outer,
        "two layers": lambda tokens: heads.heads[1](tokens + vector.at_all_positions(tokens)),
        "residual": lambda tokens: heads(tokens) + tokens[:, -1] @ value,
        "tanh of heads": lambda tokens: np.tanh(heads(tokens)),
        "largest value": lambda tokens: np.max(tokens @ value, axis=1),
        "product of heads": lambda tokens: heads.heads[0](tokens) * heads.heads[1](tokens),
    }


@pytest.mark.parametrize("name", strangers(0, 2))
def test_other_boxes_are_not_certified(name: str, fresh_seed: int) -> None:
    for seed in range(3):
        result = recover(strangers(fresh_seed + seed, 6)[name], 6, seed=seed)
        assert not result.certified
        assert result.stats.queries < 12_000  # a search that finds no end is given up, and parts are looked for last


def test_one_head_too_many_is_seen(fresh_seed: int) -> None:
    # A head that is quiet, but not lost in the rounding of the others, must be found.
    truth = layer(3, 8, fresh_seed)
    quiet = kh.SingleHead(truth.heads[2].score, 1e-5 * truth.heads[2].value)
    truth = kh.MultiHead([*truth.heads[:2], quiet])
    result = recover(truth, 8)
    if result.certified:
        errors(result, truth)


# --- numerics ---------------------------------------------------------------------------------------------------------


def test_a_half_circle_isolates_its_jumps() -> None:
    jumps = np.array([0.3, 0.36, 2.0])

    def level(angles: Floats) -> Floats:
        return np.sum(angles[:, None] > jumps, axis=1).astype(float)

    angles = np.linspace(0, np.pi, 9)
    circle = HalfCircle(angles, level(angles), 1e-9, 2.0**-20)
    for _ in range(40):
        more = circle.open_ranges(0.05)
        if not more.size:
            break
        circle.add(more, level(more))
    before, after = circle.jumps()
    assert np.all((circle.angles[before] < jumps) & (jumps <= circle.angles[after]))
    assert np.all(circle.gaps() >= 8 * (circle.angles[after] - circle.angles[before]))
    assert circle.gaps()[2] == pytest.approx(0.3 + np.pi - 2.0, abs=0.1)


def test_a_guess_interpolates_only_between_known_logits() -> None:
    ends = (np.zeros(2), np.ones(2))
    guess = next_guess(*ends, np.array([-1.0, -math.inf]), np.array([3.0, 2.0]))
    assert guess == pytest.approx([0.25, 0.5])


@pytest.mark.parametrize("size", [6, 7])
def test_a_gate_leaves_one_head_undecided(size: int, rng: np.random.Generator) -> None:
    normals = rng.standard_normal((9, size))
    decided = np.full(9, 50.0)
    found = choose_gate(rng, normals, 4, decided, 6, 1.0)
    forms = found.scales[:, None] * (found.points @ normals.T)
    assert np.allclose(forms[:-1, 4], 0, atol=1e-9)
    assert forms[-1, 4] == pytest.approx(2.0)
    others = np.delete(np.arange(9), 4)
    assert np.all(np.abs(forms[:-1, others]) >= 50 * (1 - 1e-9))
    assert np.array_equal(forms > 0, found.first) or size == 7
    assert np.linalg.cond(found.points) < 1e5


def test_a_crossing_leaves_one_head_undecided_off_its_hyperplane(rng: np.random.Generator) -> None:
    normals = rng.standard_normal((2, 5, 6))
    found, mix = solve_crossing(rng, normals, 2, np.full(5, 50.0), rng.standard_normal((2, 1)), 6, 1.0)
    forms = found.scales[0] * (mix @ (normals @ found.points[0]))
    assert forms[2] == pytest.approx(0, abs=1e-9)
    assert np.all(np.abs(np.delete(forms, 2)) >= 50 * (1 - 1e-9))
    away = normals[0, 2] / np.linalg.norm(normals[0, 2])
    assert abs(found.points[0] @ away) > 0.5


@pytest.mark.parametrize(("heads", "width"), [(3, 2), (8, 3), (20, 8)])
def test_shares_determine_what_each_head_says(heads: int, width: int, rng: np.random.Generator) -> None:
    normals = rng.standard_normal((heads, width))
    points, margins = choose_points(rng, normals, width, 1.0, heads - 1, 0)
    design = np.vstack([weights_of(points, normals, 0), np.ones(heads)])
    assert np.linalg.matrix_rank(design) == heads
    assert np.all(margins > 0)
