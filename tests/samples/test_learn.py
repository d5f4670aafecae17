"""Learning a layer from examples: right to rounding, or an outcome that admits it is not."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from scipy.optimize import linear_sum_assignment

import keyhole as kh
from benchmarks.tables.learn_barrier import find_parity
from keyhole.arrays import Space
from keyhole.cli import main
from keyhole.errors import FileError, UsageError
from keyhole.recovery import Outcome
from keyhole.samples.diagnostics import low_orders
from keyhole.samples.evidence import _sample, standard_errors
from keyhole.samples.examples import ExampleCount, Examples
from keyhole.samples.levenberg_marquardt import ScoreChart, descend
from keyhole.samples.preconditioners import HeadBlocks
from keyhole.samples.restarts import moment
from keyhole.samples.variable_projection import LayerPoint, LayerProblem, mixture, orthonormal
from keyhole.targets.datasets import open_data, parity_layer, random_layer, signs


def examples(
    rng: np.random.Generator,
    d: int,
    k: int,
    m: int,
    *,
    ratio: float = 10.0,
    size: float = 0.5,
    outputs: int | None = None,
    gaussian: bool = False,
) -> tuple[kh.AttentionLayer, np.ndarray, np.ndarray]:
    outputs = outputs or d
    layer = random_layer(d, m, outputs, size, rng)
    count = ExampleCount(1, k, d, outputs, m).needed(ratio, 1.5)
    inputs = rng.standard_normal((count, k, d)) if gaussian else signs(rng, count, k, d)
    return layer, inputs, layer(inputs)


def covered(result: kh.Recovery, truth: kh.AttentionLayer) -> bool:
    """Whether the error bars hold the truth, entry by entry."""
    found, radius = result.params, result.certificate.radius
    if found.heads != truth.heads:
        return False
    apart = [[np.linalg.norm(one - two) for two in truth.scores] for one in found.scores]
    rows, columns = linear_sum_assignment(np.asarray(apart))
    return bool(
        np.all(np.abs(found.scores[rows] - truth.scores[columns]) <= radius.scores[rows])
        and np.all(np.abs(found.projections[rows] - truth.projections[columns]) <= radius.projections[rows])
    )


# --- the layer --------------------------------------------------------------------------------------------------


def test_the_layer_is_the_definition(like: Any, rng: np.random.Generator) -> None:
    layer, tokens = random_layer(5, 3, 4, 0.7, rng), rng.standard_normal((6, 4, 5))
    expected = np.zeros((6, 4, 4))
    for n, sequence in enumerate(tokens):
        for head in range(3):
            logits = sequence @ layer.scores[head] @ sequence.T
            weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
            expected[n] += weights @ sequence @ layer.projections[head]
    given = Space.of(like).asarray(tokens)
    answers = layer(given)
    assert type(answers) is type(given)
    assert np.allclose(np.asarray(answers), expected, rtol=0, atol=1e-13)


def test_the_layer_is_saved_and_loaded(tmp_path: Path, rng: np.random.Generator) -> None:
    layer = random_layer(4, 2, 3, 0.5, rng)
    layer.save(tmp_path / "layer.safetensors")
    again = kh.load(tmp_path / "layer.safetensors")
    assert isinstance(again, kh.AttentionLayer)
    assert kh.distance(layer, again) == 0.0
    assert again.arrays().keys() == {"scores", "projections"}


def test_distance_ignores_the_order_of_heads_and_what_does_not_show(rng: np.random.Generator) -> None:
    layer = random_layer(4, 3, 2, 0.5, rng)
    order = [2, 0, 1]
    assert kh.distance(layer, kh.AttentionLayer(layer.scores[order], layer.projections[order])) == 0.0
    split = np.concatenate([layer.scores, layer.scores[:1]]), np.concatenate([layer.projections, layer.projections[:1]])
    split[1][0] *= 0.25
    split[1][3] *= 0.75
    assert kh.distance(layer, kh.AttentionLayer(*split)) < 1e-15
    idle = np.concatenate([layer.projections, np.zeros((1, 4, 2))])
    scores = np.concatenate([layer.scores, rng.standard_normal((1, 4, 4))])
    assert kh.distance(layer, kh.AttentionLayer(scores, idle)) == 0.0
    moved = kh.AttentionLayer(layer.scores * 1.01, layer.projections)
    assert 0.009 < kh.distance(layer, moved) < 0.011
    with pytest.raises(UsageError, match="cannot compare layers"):
        kh.distance(layer, random_layer(4, 3, 3, 0.5, rng))


@pytest.mark.parametrize(
    ("scores", "projections"),
    [((2, 3, 3), (3, 3, 3)), ((2, 3, 4), (2, 3, 3)), ((3, 3), (3, 3)), ((1, 0, 0), (1, 0, 2)), ((1, 3, 3), (1, 4, 3))],
)
def test_a_layer_of_wrong_shapes_is_refused(scores: tuple[int, ...], projections: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="AttentionLayer needs"):
        kh.AttentionLayer(np.zeros(scores), np.zeros(projections))


# --- the steps of the fit ---------------------------------------------------------------------------------------


@pytest.fixture
def point(rng: np.random.Generator) -> LayerPoint:
    _, inputs, outputs = examples(rng, 5, 3, 2)
    return LayerProblem(inputs, outputs).at(rng.standard_normal((2, 5, 5)) / 5)


def test_the_jacobian_is_the_derivative(point: LayerPoint, rng: np.random.Generator) -> None:
    direction, step = rng.standard_normal(point.scores.shape), 1e-6

    def answers(scores: np.ndarray) -> np.ndarray:
        return mixture(point.problem.inputs, point.problem.weights(scores)) @ point.stacked

    ahead, behind = answers(point.scores + step * direction), answers(point.scores - step * direction)
    assert np.allclose(point.products.forward(direction), (ahead - behind) / (2 * step), rtol=0, atol=1e-8)


def test_backward_is_the_transpose_of_forward(point: LayerPoint, rng: np.random.Generator) -> None:
    direction, labels = rng.standard_normal(point.scores.shape), rng.standard_normal(point.residual.shape)
    assert np.vdot(point.products.forward(direction), labels) == pytest.approx(
        np.vdot(direction, point.products.backward(labels))
    )


def test_the_matrix_is_the_products(point: LayerPoint, rng: np.random.Generator) -> None:
    direction = rng.standard_normal(point.scores.shape)
    flat = direction.transpose(1, 0, 2).reshape(-1)
    product = (point.gram_matrices[0] @ flat).reshape(5, 2, 5).transpose(1, 0, 2)
    assert np.allclose(product, point.products.curvature(direction), rtol=1e-10, atol=1e-10)


def test_blocks_of_heads_are_those_of_the_matrix(point: LayerPoint, rng: np.random.Generator) -> None:
    products = point.gram_matrices
    whole = (products[0] + products[1].T @ products[1]).reshape(5, 2, 5, 5, 2, 5)  # JᵀJ, projections not taken out
    blocks = HeadBlocks.of(point, damping=0.5)
    assert blocks is not None
    gradient = rng.standard_normal((2, 5, 5))
    for head, found in enumerate(blocks.solve(gradient, 0.5)):
        block = whole[:, head, :, :, head].reshape(25, 25) + 0.5 * np.eye(25)
        assert np.allclose(block @ found.reshape(25), gradient[head].reshape(25), atol=1e-2)
    assert HeadBlocks.of(point.problem.at(0 * point.scores), 0.0) is not None
    huge = LayerProblem(point.problem.inputs * 1e20, point.problem.outputs)
    assert HeadBlocks.of(huge.at(0 * point.scores), 0.0) is None  # beyond single precision


def test_sharp_heads_take_few_products(fixed_seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(fixed_seed)
    truth, inputs, outputs = examples(rng, 16, 8, 4, size=3.0)
    problem = LayerProblem(inputs, outputs)
    start = truth.scores + 0.1 * rng.standard_normal(truth.scores.shape)
    with_blocks = descend(problem, start, 1e-24 * problem.energy, rng)
    monkeypatch.setattr(HeadBlocks, "of", lambda *_: None)
    without = descend(problem, start, 1e-24 * problem.energy, rng)
    assert with_blocks.point.relative < 1e-12
    assert with_blocks.products < without.products / 2


def test_factors_push_and_pull(rng: np.random.Generator) -> None:
    chart = ScoreChart(2)
    numbers, move = rng.standard_normal((2, 3, 5, 4))
    gradient = rng.standard_normal((3, 5, 5))
    moved = (chart.scores(numbers + 1e-6 * move) - chart.scores(numbers - 1e-6 * move)) / 2e-6
    assert np.allclose(chart.push(numbers, move), moved, atol=1e-8)
    assert np.vdot(chart.push(numbers, move), gradient) == pytest.approx(np.vdot(move, chart.pull(numbers, gradient)))


def test_bases_are_orthonormal_even_of_dependent_columns(rng: np.random.Generator) -> None:
    columns = rng.standard_normal((50, 6))
    for near in (1.0, 1e-6, 1e-13, 0.0):
        columns[:, 5] = columns[:, 4] + near * columns[:, 0]
        basis, triangle = orthonormal(columns)
        assert np.allclose(basis.T @ basis, np.eye(6), atol=1e-9) or near < 1e-6
        assert np.allclose(basis @ triangle, columns, atol=1e-7)


def test_sampled_errors_are_like_those_of_the_matrix(
    point: LayerPoint, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    entrywise = standard_errors(point, rng)
    monkeypatch.setattr("keyhole.samples.evidence.DENSE", 0)
    pool = standard_errors(point, rng)
    assert entrywise.entrywise
    assert not pool.entrywise
    for one, two in ((entrywise.scores, pool.scores), (entrywise.projections, pool.projections)):
        sizes = np.sqrt(np.mean(one**2, axis=(1, 2))) / two[:, 0, 0]
        assert np.all((sizes > 0.5) & (sizes < 2.0))


def test_the_moment_falls_after_the_heads(rng: np.random.Generator) -> None:
    _, inputs, outputs = examples(rng, 12, 4, 2, ratio=200, size=0.2)
    found = moment(LayerProblem(inputs, outputs), 5)
    assert found is not None
    assert found.gap(2) > 1.2 * max(found.gap(1), found.gap(3))


# --- learning ---------------------------------------------------------------------------------------------------

CASES = [(4, 4, 2, 0.1), (4, 4, 2, 2.0), (8, 4, 2, 0.5), (8, 6, 3, 1.0), (5, 2, 1, 1.0)]


@pytest.mark.parametrize(("d", "k", "m", "size"), CASES)
def test_layers_are_learned_to_rounding(d: int, k: int, m: int, size: float, fixed_seed: int) -> None:
    truth, inputs, outputs = examples(np.random.default_rng(fixed_seed), d, k, m, size=size)
    result = kh.learn(inputs, outputs, heads=m)
    assert result.certified
    assert result.method == "varpro"
    assert kh.distance(result.params, truth) <= 1e-9
    assert covered(result, truth)
    assert result.stats.details["samples"]["holds"]


@pytest.mark.parametrize("outputs", [1, 3, 12])
@pytest.mark.parametrize("gaussian", [False, True])
def test_any_number_of_outputs_and_normal_inputs(outputs: int, gaussian: bool, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    truth, inputs, labels = examples(rng, 5, 3, 2, outputs=outputs, gaussian=gaussian, ratio=15)
    result = kh.learn(inputs, labels, heads=2, throw=False)
    assert not result.certified or covered(result, truth)
    assert result.outcome in {Outcome.CERTIFIED, Outcome.WRONG_FAMILY, Outcome.PARITY_LIKE}


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("search", ["grow", "prune"])
def test_the_number_of_heads_is_found(m: int, search: str, rng: np.random.Generator) -> None:
    truth, inputs, outputs = examples(rng, 5, 4, m, ratio=24 / m)
    result = kh.learn(inputs, outputs, heads="auto", search=search, max_heads=4)
    assert result.params.heads == m
    assert kh.distance(result.params, truth) <= 1e-9


def test_heads_too_many_are_left_out(rng: np.random.Generator) -> None:
    truth, inputs, outputs = examples(rng, 5, 4, 2, ratio=30)
    result = kh.learn(inputs, outputs, heads=3)
    assert result.params.heads == 2
    assert result.stats.details["heads_asked"] == 3
    assert kh.distance(result.params, truth) <= 1e-9


def test_hard_looking_layers_are_learned(rng: np.random.Generator) -> None:
    """Scores of rank one, correlated scores, projections that cancel, sharp attention."""
    d, k = 6, 4
    base = random_layer(d, 2, d, 0.5, rng)
    column, row = rng.standard_normal((2, 2, d, 1))
    near = base.scores.copy()
    near[1] = near[0] + 0.1 * near[1]
    layers = {
        "rank one": (column @ np.swapaxes(row, 1, 2) / d, base.projections),
        "alike": (near, base.projections),
        "cancelling": (base.scores, np.stack([base.projections[0], -base.projections[0]])),
        "sharp": (base.scores * 10, base.projections),
    }
    for name, arrays in layers.items():
        truth = kh.AttentionLayer(*arrays)
        inputs = signs(rng, 120, k, d)
        result = kh.learn(inputs, truth(inputs), heads=2, throw=False)
        assert result.certified, f"{name}: {result.message}"
        assert kh.distance(result.params, truth) <= 1e-7, name
        assert covered(result, truth), name


def test_low_rank_needs_fewer_examples(rng: np.random.Generator) -> None:
    d, k = 12, 4
    left, right = rng.standard_normal((2, 2, d, 1))
    truth = kh.AttentionLayer(left @ np.swapaxes(right, 1, 2) / d, rng.standard_normal((2, d, 2)) / d**0.5)
    inputs = signs(rng, 60, k, d)  # 480 numbers for 336 parameters, of which 94 are free
    result = kh.learn(inputs, truth(inputs), heads=2, rank=1, throw=False)
    assert result.certified, result.message
    assert kh.distance(result.params, truth) <= 1e-9


@pytest.mark.parametrize("init", ["random", "spectral"])
def test_starts_may_come_from_elsewhere(init: str, rng: np.random.Generator) -> None:
    truth, inputs, outputs = examples(rng, 5, 4, 2)
    assert kh.distance(kh.learn(inputs, outputs, heads=2, init=init).params, truth) <= 1e-9


@pytest.mark.slow
def test_processes_share_the_starts_and_change_nothing(rng: np.random.Generator) -> None:
    _, inputs, outputs = examples(rng, 4, 4, 2)
    with ThreadPoolExecutor(2) as executor:
        ways: list[dict[str, Any]] = [{"jobs": 1}, {"jobs": 2}, {"executor": executor}]
        one, *others = (kh.learn(inputs, outputs, heads=2, seed=3, **way) for way in ways)
    for each in others:
        assert kh.distance(one.params, each.params) < 1e-12
        assert one.stats.details["restarts"]["made"] == each.stats.details["restarts"]["made"]


def test_arrays_of_torch(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    truth, inputs, outputs = examples(rng, 4, 4, 2)
    result = kh.learn(torch.asarray(inputs), torch.asarray(outputs), heads=2)
    assert kh.distance(result.params, truth) <= 1e-9


def test_what_dtype_inputs_have_does_not_matter(rng: np.random.Generator) -> None:
    truth, inputs, outputs = examples(rng, 4, 4, 1)
    for dtype in (np.int8, np.float32, np.float16):
        assert kh.distance(kh.learn(inputs.astype(dtype), outputs, heads=1).params, truth) <= 1e-9
    coarse = kh.learn(inputs, outputs.astype(np.float16), heads=1, throw=False)
    assert not coarse.certified or covered(coarse, truth)


def test_float32_outputs_are_certified_within_their_rounding(rng: np.random.Generator) -> None:
    truth, inputs, outputs = examples(rng, 5, 4, 2, ratio=20)
    result = kh.learn(inputs.astype(np.float32), outputs.astype(np.float32), heads=2, throw=False)
    assert result.certified, result.message
    assert covered(result, truth)
    assert 1e-9 < kh.distance(result.params, truth) < 1e-5


# --- noise ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [1e-3, 1e-2])
def test_declared_noise(noise: float, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    truth, inputs, outputs = examples(rng, 6, 4, 2, ratio=15, size=1.0)
    noisy = outputs + noise * rng.standard_normal(outputs.shape)
    result = kh.learn(inputs, noisy, heads=2, noise=kh.Noise.gaussian(noise), throw=False)
    assert not result.certified or covered(result, truth)
    fresh = signs(rng, 500, 4, 6)
    error = np.sqrt(np.mean((result.params(fresh) - truth(fresh)) ** 2))
    if result.certified:
        assert error <= 2 * noise / np.sqrt(15)
        assert result.stats.details["predicted_error"] == pytest.approx(noise / np.sqrt(15), rel=0.2)


def test_loud_noise_is_certified_within_its_bars(rng: np.random.Generator) -> None:
    truth, inputs, outputs = examples(rng, 8, 4, 2)
    noisy = outputs + 0.1 * rng.standard_normal(outputs.shape)
    result = kh.learn(inputs, noisy, heads=2, noise=0.1, throw=False)
    assert result.certified, result.message
    assert covered(result, truth)


def test_heads_that_only_fit_the_noise_are_not_certified(fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    truth, inputs, outputs = examples(rng, 5, 4, 2, ratio=30, size=1.0)
    noisy = outputs + 1e-2 * rng.standard_normal(outputs.shape)
    asked = kh.learn(inputs, noisy, heads=3, noise=1e-2, restarts=4, throw=False)
    assert not asked.certified
    found = kh.learn(inputs, noisy, heads="auto", noise=1e-2, throw=False)
    assert not found.certified or covered(found, truth)


def test_undeclared_noise_is_admitted(rng: np.random.Generator) -> None:
    _, inputs, outputs = examples(rng, 5, 4, 2)
    noisy = outputs + 1e-3 * rng.standard_normal(outputs.shape)
    exact = kh.learn(inputs, noisy, heads=2, throw=False)
    assert exact.outcome is Outcome.WRONG_FAMILY
    assert "where rounding was expected" in exact.message
    too_little = kh.learn(inputs, noisy, heads=2, noise=5e-4, throw=False)
    assert not too_little.certified
    unknown = kh.learn(inputs, noisy, heads=2, noise="measure", throw=False)
    assert unknown.outcome is Outcome.UNCERTIFIED
    assert unknown.stats.details["noise"] == pytest.approx(1e-3, rel=0.1)


@pytest.mark.parametrize("words", ["rounded to 3 decimals", "rounded to float32", "rounded to bfloat16"])
def test_rounding_that_nobody_declared_is_found(words: str, fixed_seed: int) -> None:
    truth, inputs, outputs = examples(np.random.default_rng(fixed_seed), 4, 4, 2, ratio=20)
    if "3 decimals" in words:
        rounded = np.round(outputs, 3)
    elif "bfloat16" in words:
        mantissa, exponent = np.frexp(outputs)
        rounded = np.ldexp(np.round(mantissa * 256) / 256, exponent)
    else:
        rounded = outputs.astype(np.float32).astype(np.float64)
    result = kh.learn(inputs, rounded, heads=2, throw=False)
    assert result.stats.details["noise_found"] == words
    assert any(words in assumption for assumption in result.certificate.assumptions)
    assert result.outcome is Outcome.CERTIFIED, result.message
    assert covered(result, truth)
    declared = kh.learn(inputs, rounded, heads=2, throw=False, noise="exact")
    assert not declared.certified  # where it is said to be exact, it is not


def test_few_digits_may_be_a_coincidence() -> None:
    """Tokens of signs behind plain averages are answered in quarters, and exactly."""
    rng = np.random.default_rng(0)
    inputs = signs(rng, 400, 4, 3)
    layer = kh.AttentionLayer(np.zeros((1, 3, 3)), np.eye(3)[None])
    result = kh.learn(inputs, layer(inputs), heads=1, throw=False)
    assert result.certified
    assert covered(result, layer)


def test_repeated_inputs_tell_the_noise(rng: np.random.Generator) -> None:
    """With equal inputs the noise is known apart from any fit, and a wrong model cannot hide in it."""
    truth = random_layer(3, 1, 3, 1.0, rng)
    inputs = signs(rng, 400, 2, 3)  # 64 different ones
    noise = 1e-2 * rng.standard_normal((400, 2, 3))
    result = kh.learn(inputs, truth(inputs) + noise, heads=1, noise="measure", throw=False)
    assert result.certified, result.message
    assert covered(result, truth)
    other = np.maximum(inputs @ rng.standard_normal((3, 3)), 0.0)
    wrong = kh.learn(inputs, other + noise, heads=1, noise="measure", throw=False)
    assert wrong.outcome is Outcome.WRONG_FAMILY


# --- what is not there to be learned ------------------------------------------------------------------------------


def relu_net(rng: np.random.Generator, inputs: np.ndarray) -> np.ndarray:
    d = inputs.shape[2]
    return np.maximum(inputs @ rng.standard_normal((d, 16)), 0.0) @ rng.standard_normal((16, d))


def constant(rng: np.random.Generator, inputs: np.ndarray) -> np.ndarray:
    return np.full(inputs.shape, 1.5)


def zero(rng: np.random.Generator, inputs: np.ndarray) -> np.ndarray:
    return np.zeros(inputs.shape)


def pure_noise(rng: np.random.Generator, inputs: np.ndarray) -> np.ndarray:
    return rng.standard_normal(inputs.shape)


def with_bias(rng: np.random.Generator, inputs: np.ndarray) -> np.ndarray:
    return random_layer(inputs.shape[2], 1, inputs.shape[2], 0.5, rng)(inputs) + 0.1


def causal(rng: np.random.Generator, inputs: np.ndarray) -> np.ndarray:
    d = inputs.shape[2]
    logits = inputs @ rng.standard_normal((d, d)) @ np.swapaxes(inputs, 1, 2) / d
    logits = np.where(np.tril(np.ones(logits.shape[1:])) > 0, logits, -np.inf)
    weights = np.exp(logits)
    return weights / weights.sum(axis=-1, keepdims=True) @ inputs


@pytest.mark.parametrize("noise", [None, "measure", 1e-2])
@pytest.mark.parametrize("labels", [relu_net, constant, zero, pure_noise, with_bias, causal])
def test_other_families_are_never_certified(labels: Any, noise: Any, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    inputs = signs(rng, 60, 4, 5)
    result = kh.learn(inputs, labels(rng, inputs), heads=2, noise=noise, restarts=3, throw=False)
    assert not result.certified
    assert len(result.message) > 20
    with pytest.raises(kh.RecoveryFailed) as raised:
        kh.learn(inputs, labels(rng, inputs), heads=1, noise=noise, restarts=1)
    assert raised.value.result.message


@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.1, 1.5, 2.0, 4.0])
def test_few_examples_are_refused_or_judged_rightly(ratio: float, fresh_seed: int) -> None:
    truth, inputs, outputs = examples(np.random.default_rng(fresh_seed), 6, 4, 2)
    count = max(2, int(ratio * 144 / 24))
    result = kh.learn(inputs[:count], outputs[:count], heads=2, restarts=4, throw=False)
    if result.certified:
        assert covered(result, truth)
        assert kh.distance(result.params, truth) <= 1e-9
    if ratio < 1:
        assert result.outcome is Outcome.TOO_FEW_EXAMPLES
        assert "are needed" in result.message


@pytest.mark.parametrize("level", [1e-3, 1e-1])
def test_heads_are_counted_behind_noise(level: float) -> None:
    """A head that may choose what it attends to explains twice as much of noise as its parameters say."""
    truth, inputs, outputs = examples(np.random.default_rng(3), 6, 4, 2)
    noise = level * np.random.default_rng(4).standard_normal(outputs.shape)
    result = kh.learn(inputs, outputs + noise, heads="auto", noise=level)
    assert covered(result, truth)


@pytest.mark.parametrize("heads", [1, 2, "auto"])
@pytest.mark.parametrize("shuffled", [False, True], ids=["repeated", "tokens in other orders"])
def test_repeated_examples_count_once(heads: int | str, shuffled: bool, rng: np.random.Generator) -> None:
    truth, inputs, _ = examples(rng, 5, 4, 2)
    order = (lambda: rng.permutation(4)) if shuffled else (lambda: np.arange(4))
    many = np.concatenate([inputs[:3, order()] for _ in range(100)])
    result = kh.learn(many, truth(many), heads=heads, throw=False)
    assert result.outcome is Outcome.TOO_FEW_EXAMPLES
    assert "3 different examples" in result.message
    assert "are needed" in result.message
    enough = np.repeat(inputs[:20], 5, axis=0)
    found = kh.learn(enough, truth(enough), heads=2)
    assert covered(found, truth)
    assert found.stats.details["samples"]["different"] == 18  # two are held out


def test_small_scores_lie_within_their_radii(fresh_seed: int) -> None:
    """Nearly flat directions: what the descent leaves undone there is part of the radii."""
    rng = np.random.default_rng(fresh_seed)
    for d, k, m in ((5, 4, 2), (8, 4, 2), (6, 3, 1)):
        base, inputs, _ = examples(rng, d, k, m, ratio=20)
        truth = kh.AttentionLayer(1e-3 * base.scores, base.projections)
        result = kh.learn(inputs, truth(inputs), heads="auto", restarts=3, throw=False)
        assert not result.certified or covered(result, truth)


def test_members_are_not_refused_where_predictions_rest_on_flat_directions() -> None:
    """Twice d²/(k(k − 1)) examples of sharp heads: some held-out outputs err by a hundred times what most do."""
    rng = np.random.default_rng([2, 32, 4, 1, 100])
    truth, inputs, outputs = examples(rng, 32, 4, 1, ratio=11.1, size=1.0)
    result = kh.learn(inputs, outputs, heads=1, seed=2, restarts=1, throw=False)
    assert result.certified, result.message
    assert covered(result, truth)
    assert result.certificate.worst_ratio < 0.5


def test_a_start_cut_short_says_nothing_of_the_family(fixed_seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller analogue of (128, 8, 2), whose starts reach the limit of products with the residual still falling."""
    monkeypatch.setattr("keyhole.samples.levenberg_marquardt.MOST_IN_ALL", 150)
    _, inputs, outputs = examples(np.random.default_rng(fixed_seed), 24, 3, 1, size=1.5)
    result = kh.learn(inputs, outputs, heads=1, restarts=2, throw=False)
    assert result.outcome is Outcome.UNCERTIFIED
    assert "cut short after" in result.message
    assert "576 are 6 × d²/(k(k − 1)), here are" in result.message


def test_a_descent_cut_short_widens_the_radii(rng: np.random.Generator) -> None:
    truth, inputs, outputs = examples(rng, 5, 4, 2)
    problem = LayerProblem(inputs, outputs)
    direction = rng.standard_normal(truth.scores.shape)
    near = problem.at(truth.scores + 1e-9 * direction / np.linalg.norm(direction))
    found = standard_errors(near, rng)
    assert np.all(np.abs(near.scores - truth.scores) <= 1.01 * found.unsettled * found.scores)
    assert found.unsettled > 1e3 * standard_errors(problem.at(truth.scores), rng).unsettled


def linear(rng: np.random.Generator, inputs: np.ndarray) -> np.ndarray:
    return inputs @ rng.standard_normal((inputs.shape[2], inputs.shape[2]))


def linear_and_mean(rng: np.random.Generator, inputs: np.ndarray) -> np.ndarray:
    return linear(rng, inputs) + linear(rng, np.mean(inputs, axis=1, keepdims=True))


def first_token(rng: np.random.Generator, inputs: np.ndarray) -> np.ndarray:
    return np.repeat(linear(rng, inputs[:, :1]), inputs.shape[1], axis=1)


@pytest.mark.parametrize("labels", [linear, linear_and_mean, first_token])
@pytest.mark.parametrize("gaussian", [False, True])
def test_linear_maps_of_tokens_are_never_certified(labels: Any, gaussian: bool, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    inputs = rng.standard_normal((150, 3, 4)) if gaussian else signs(rng, 150, 3, 4)
    result = kh.learn(inputs, labels(rng, inputs), heads=1, restarts=2, throw=False)
    assert not result.certified


def test_a_plain_mean_is_a_head_without_scores(rng: np.random.Generator) -> None:
    inputs = signs(rng, 100, 4, 5)
    truth = kh.AttentionLayer(np.zeros((1, 5, 5)), rng.standard_normal((1, 5, 5)))
    result = kh.learn(inputs, truth(inputs), heads=2, throw=False)
    assert not result.certified or covered(result, truth)


def test_too_few_pairs_of_tokens_are_refused() -> None:
    rng = np.random.default_rng(1)
    truth = random_layer(20, 1, 400, 0.5, rng)
    inputs = signs(rng, 40, 2, 20)  # many numbers, few pairs
    result = kh.learn(inputs, truth(inputs), heads=1, throw=False)
    assert result.outcome is Outcome.TOO_FEW_EXAMPLES


def test_one_token_tells_nothing_of_scores(rng: np.random.Generator) -> None:
    inputs = signs(rng, 50, 1, 3)
    result = kh.learn(inputs, inputs, heads=1, throw=False)
    assert result.outcome is Outcome.NOT_IDENTIFIABLE


def test_inputs_that_leave_a_direction_free_are_not_certified(rng: np.random.Generator) -> None:
    truth, inputs, _ = examples(rng, 5, 4, 1, ratio=20)
    inputs[..., 4] = 0.0
    result = kh.learn(inputs, truth(inputs), heads=1, throw=False)
    assert result.outcome is Outcome.NOT_IDENTIFIABLE
    assert "all tokens lie in 4 of 5 dimensions" in result.message
    basis = np.linalg.svd(inputs.reshape(-1, 5))[2][:4].T  # as the message says
    assert kh.learn(inputs @ basis, truth(inputs), heads=1).certified
    inputs[:, 1:] = inputs[:, :1]
    assert "the same" in kh.learn(inputs @ basis, truth(inputs), heads=1, throw=False).message


def test_sampled_errors_show_tokens_that_nearly_depend_on_each_other(rng: np.random.Generator) -> None:
    layer, inputs, _ = examples(rng, 5, 4, 2, gaussian=True)
    for apart, determined in ((1.0, True), (1e-7, False)):
        inputs[..., 4] = inputs[..., 0] + apart * rng.standard_normal(inputs.shape[:2])
        point = LayerProblem(inputs, layer(inputs)).at(layer.scores)
        assert _sample(point, rng).determined is determined


@pytest.mark.parametrize("kind", ["one-hot", "one number for each example", "a 1 appended"])
@pytest.mark.parametrize("noise", [None, 1e-4])
def test_what_no_key_shows_is_zero(kind: str, noise: float | None, fixed_seed: int) -> None:
    rng = np.random.default_rng(fixed_seed)
    truth, inputs, _ = examples(rng, 5, 4, 2, ratio=40, size=1.0, gaussian=True)
    shared = np.ones(5) / 5**0.5 if kind == "one-hot" else np.eye(5)[4]
    if kind == "one-hot":
        inputs = np.eye(5)[rng.integers(0, 5, inputs.shape[:2])]
    else:
        inputs[..., 4] = 1.0 if kind == "a 1 appended" else inputs[:, :1, 4]
    outputs = truth(inputs) + (noise or 0.0) * rng.standard_normal(inputs.shape)
    result = kh.learn(inputs, outputs, heads=2, noise=noise)
    line = np.outer(shared, shared)
    mean = np.mean(truth.projections, axis=0)
    told = kh.AttentionLayer(
        truth.scores - truth.scores @ line, truth.projections - line @ truth.projections + line @ mean
    )
    assert covered(result, told)
    assert kh.distance(result.params, told) < (1e-9 if noise is None else 1e-2)
    assert any("agree in one number" in each for each in result.certificate.assumptions)


@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_the_size_of_tokens_does_not_matter(size: float, fixed_seed: int) -> None:
    truth, inputs, outputs = examples(np.random.default_rng(fixed_seed), 6, 4, 2)
    result = kh.learn(size * inputs, 1e5 * outputs, heads=2)
    told = kh.AttentionLayer(truth.scores / size**2, 1e5 * truth.projections / size)
    assert kh.distance(result.params, told) < 1e-9


BAD = [
    ({"inputs": np.zeros((4, 3))}, "inputs must have shape"),
    ({"outputs": np.zeros((40, 3))}, "outputs must have shape"),
    ({"outputs": np.zeros((39, 4, 5))}, "must agree"),
    ({"outputs": np.zeros((40, 3, 5))}, "must agree"),
    ({"inputs": np.full((40, 4, 5), np.nan)}, "inputs must be finite"),
    ({"outputs": np.full((40, 4, 5), np.inf)}, "outputs must be finite"),
    ({"outputs": np.zeros((40, 4, 5), dtype=complex)}, "must hold real numbers"),
    ({"inputs": [[1.0]]}, "must be an array"),
    ({"heads": 0}, "heads must be"),
    ({"heads": "two"}, "heads must be"),
    ({"heads": True}, "heads must be"),
    ({"method": "clairvoyance"}, "unknown method"),
    ({"init": "zeros"}, "unknown init"),
    ({"search": "up"}, "unknown search"),
    ({"restarts": 0}, "restarts must be"),
    ({"jobs": 0}, "jobs must be"),
    ({"rank": 0}, "rank must be"),
    ({"seed": -1}, "seed must be"),
    ({"heldout": 40}, "leaves nothing to learn from"),
    ({"noise": -1.0}, "positive"),
    ({"noise": "loud"}, "cannot read the noise"),
]


@pytest.mark.parametrize(("changed", "says"), BAD, ids=[says for _, says in BAD])
def test_what_cannot_be_meant_is_refused(changed: dict[str, Any], says: str, rng: np.random.Generator) -> None:
    arguments = {"inputs": signs(rng, 40, 4, 5), "outputs": signs(rng, 40, 4, 5), **changed}
    with pytest.raises(UsageError, match=says):
        kh.learn(**arguments)


# --- the barrier --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5])
def test_the_hard_family_is_a_parity(m: int, rng: np.random.Generator) -> None:
    layer, chosen = parity_layer(9, m, rng)
    inputs = signs(rng, 600, 2, 9)
    found, correlation = find_parity(inputs, layer(inputs), m)
    assert found == chosen
    assert correlation > (0.99 if m % 2 else 0.6)  # an even one has something linear beside it
    with pytest.raises(UsageError, match="needs tokens of width"):
        parity_layer(4, 3, rng)


def test_the_barrier_is_named(rng: np.random.Generator) -> None:
    layer, _ = parity_layer(8, 3, rng)
    inputs = signs(rng, 600, 2, 8)
    result = kh.learn(inputs, layer(inputs), heads=3, restarts=3, throw=False)
    assert result.outcome is Outcome.PARITY_LIKE
    assert "parity-like: restarts" in result.message
    assert "no statistical-query method" in result.message


def test_first_order_tells_parities_from_others(rng: np.random.Generator) -> None:
    hard, _ = parity_layer(8, 5, rng)
    inputs = signs(rng, 600, 2, 8)
    generic = random_layer(8, 3, 1, 0.5, rng)
    assert low_orders(Examples.of(inputs, hard(inputs)), rng)[0] < 0.2
    assert low_orders(Examples.of(inputs, generic(inputs)), rng)[0] > 0.5


# --- the command line ---------------------------------------------------------------------------------------------


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["learn", *words])
    code = ended.value.code
    assert isinstance(code, int)
    return code


def test_the_command_learns_a_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert run("demo:layer?d=5&k=4&m=2&n=60&seed=1", "--json", "--out", str(folder)) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["outcome"] == "CERTIFIED"
    assert shown["distance"] < 1e-9
    assert {"samples", "restarts", "projection_norms", "score_distances", "spectral_gap"} <= shown["details"].keys()
    assert json.loads((folder / "run.json").read_text())["settings"]["heads"] == "auto"
    assert isinstance(kh.load(folder / "params.safetensors"), kh.AttentionLayer)


def test_the_command_reads_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], rng: np.random.Generator) -> None:
    _, inputs, outputs = examples(rng, 4, 4, 1)
    np.savez(tmp_path / "data.npz", inputs=inputs, outputs=outputs)
    save_file({"inputs": inputs, "outputs": outputs}, tmp_path / "data.safetensors")
    for name in ("data.npz", "data.safetensors"):
        assert run(str(tmp_path / name), "--heads", "1") == 0
        assert "CERTIFIED" in capsys.readouterr().out


def test_the_command_admits_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo:layer?d=5&k=4&m=1&n=12&noise=1e-2", "--noise", "exact", "--heads", "1", "-q") == 1
    assert "keyhole: " in capsys.readouterr().err


def test_the_command_refuses_what_cannot_be_meant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.npz").write_bytes(b"no archive")
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors")
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    wrong = ["nothing", "demo:layer?q=1", "demo:layers", "demo:layer?d=0", str(tmp_path / "none.npz")]
    wrong += [str(tmp_path / name) for name in ("broken.npz", "broken.safetensors", "other.npz")]
    for data in wrong:
        assert run(data) == 2
        assert capsys.readouterr().err.startswith("keyhole: ")
    assert run("demo:layer?n=10", "--heads", "some") == 2
    assert run("demo:layer?n=10", "--method", "some") == 2


def test_data_of_a_pickle_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "objects.npz", inputs=np.array([{}], dtype=object), outputs=np.zeros(1))
    with pytest.raises(FileError, match="plain arrays"):
        kh.learn(open_data(str(tmp_path / "objects.npz")).inputs)


@pytest.mark.parametrize("size", [20.0, 40.0])
def test_saturated_attention_does_not_tell_how_large_scores_are(size: float, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    layer = kh.AttentionLayer(size * np.eye(5)[None], rng.standard_normal((1, 5, 5)))
    inputs = rng.choice([-1.0, 1.0], (300, 4, 5))
    result = kh.learn(inputs, layer(inputs), heads=1, throw=False)
    assert not result.certified
