"""The six phases: each on its own, and all of them up to the polish."""

from __future__ import annotations

import numpy as np
import pytest

import keyhole as kh
from keyhole.datasets import random_layer, signs
from keyhole.errors import UsageError
from keyhole.samples import six_phase as phases
from keyhole.samples.six_phase import six_phase


def layer_of(rng: np.random.Generator, d: int, m: int, sigma: float) -> kh.AttentionLayer:
    layer = random_layer(d, m, d, 1.0, rng)
    return kh.AttentionLayer(
        layer.scores * (sigma / np.linalg.norm(layer.scores, axis=(1, 2))[:, None, None]), layer.projections
    )


def relative(found: np.ndarray, truth: np.ndarray) -> float:
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


@pytest.fixture
def two_heads(rng: np.random.Generator) -> tuple[kh.AttentionLayer, np.ndarray, np.ndarray]:
    layer = layer_of(rng, 5, 2, 0.7)
    inputs = rng.standard_normal((6000, 2, 5))
    return layer, inputs, layer(inputs)


def test_phase_1_is_better_where_tokens_are_alike(two_heads: tuple[kh.AttentionLayer, np.ndarray, np.ndarray]) -> None:
    layer, inputs, outputs = two_heads
    total = np.sum(layer.projections, axis=0)
    chosen, all_of_them = phases.crude_sum(inputs, outputs), phases.crude_sum(inputs, outputs, len(inputs))
    assert relative(chosen, total) < 0.1
    assert relative(chosen, total) < relative(all_of_them, total)


def test_phase_2_certifies_rows_on_which_heads_attend_alike(
    two_heads: tuple[kh.AttentionLayer, np.ndarray, np.ndarray],
) -> None:
    layer, inputs, outputs = two_heads
    rows = phases.sculpt(inputs, outputs, np.sum(layer.projections, axis=0), 200)
    logits = np.einsum("rd,mde,rke->mrk", rows.own, layer.scores, rows.inputs)
    weights = np.exp(logits) / np.sum(np.exp(logits), axis=2, keepdims=True)
    assert np.max(np.abs(weights[0] - weights[1])) < 0.02
    assert np.max(np.abs(weights[0] - rows.weights)) < 0.02
    everywhere = layer.scores[0] - layer.scores[1]
    typical = np.std(np.einsum("nd,de,nke->nk", inputs[:, 0], everywhere, inputs))
    assert np.std(logits[0] - logits[1] - np.mean(logits[0] - logits[1], axis=1, keepdims=True)) < 0.05 * typical


def test_phase_2_constrains_every_head(two_heads: tuple[kh.AttentionLayer, np.ndarray, np.ndarray]) -> None:
    layer, inputs, outputs = two_heads
    rows = phases.sculpt(inputs, outputs, np.sum(layer.projections, axis=0), 200)
    matrix, right = phases.constraints(rows)
    for score in layer.scores:
        assert np.linalg.norm(matrix @ score.reshape(-1) - right) < 0.05 * np.linalg.norm(right)


@pytest.mark.parametrize("solver", ["least-squares", "l1"])
def test_phases_3_and_4_find_the_hull(solver: str, two_heads: tuple[kh.AttentionLayer, np.ndarray, np.ndarray]) -> None:
    layer, inputs, outputs = two_heads
    total = np.sum(layer.projections, axis=0)
    rows = phases.sculpt(inputs, outputs, total, 200)
    hull, _ = phases.proxy(rows, total, 2, solver)
    assert hull.distance(layer.scores) < 0.05
    line = (layer.scores[0] - layer.scores[1]).reshape(-1)
    assert abs(hull.directions.reshape(-1) @ line) > 0.99 * np.linalg.norm(line)
    # The point of least norm on the line through both.
    along = line / np.linalg.norm(line)
    nearest = layer.scores[0].reshape(-1) - (layer.scores[0].reshape(-1) @ along) * along
    assert relative(hull.proxy.reshape(-1), nearest) < 0.1
    assert phases.span_figures(hull, 2)["heads_by_gap"] == 2


@pytest.mark.parametrize("m", [2, 3])
def test_phase_5_finds_the_heads_in_the_true_hull(m: int, rng: np.random.Generator) -> None:
    layer = layer_of(rng, 4, m, 0.7)
    inputs = signs(rng, 1000, 3, 4)
    flat = layer.scores.reshape(m, -1)
    basis = np.linalg.qr((flat[1:] - flat[0]).T)[0].T
    point = flat[0] - (flat[0] @ basis.T) @ basis
    hull = phases.Hull(point.reshape(4, 4), basis.reshape(m - 1, 4, 4), np.zeros(16))
    assert hull.distance(layer.scores) < 1e-12
    scores, figures = phases.net(inputs, layer(inputs), hull, m, rng)
    assert figures["points"] > 10
    projections, error = phases.projections(inputs, layer(inputs), scores)
    assert error < 0.05
    assert kh.distance(kh.AttentionLayer(scores, projections), layer) < 0.3


def test_phase_6_is_least_squares(rng: np.random.Generator) -> None:
    layer = layer_of(rng, 4, 2, 0.7)
    inputs = signs(rng, 300, 3, 4)
    projections, error = phases.projections(inputs, layer(inputs), layer.scores)
    assert relative(projections, layer.projections) < 1e-12
    assert error < 1e-13


def test_one_head_is_exact_before_any_polish(fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    layer = layer_of(rng, 4, 1, 1.0)
    inputs = signs(rng, 143, 2, 4)
    found = six_phase(inputs, layer(inputs), 1)
    assert kh.distance(kh.AttentionLayer(found.scores, found.projections), layer) < 1e-9


def test_all_phases_report_and_lead_to_the_truth(
    two_heads: tuple[kh.AttentionLayer, np.ndarray, np.ndarray],
) -> None:
    layer, inputs, outputs = two_heads
    result = kh.learn(inputs, outputs, heads=2, method="six-phase")
    assert result.method == "six-phase"
    assert kh.distance(result.params, layer) < 1e-9
    figures = result.stats.details["six_phase"]
    assert [name[0] for name in figures] == list("123456")
    assert figures["6 projections"]["relative_error"] < 0.05
    rough = kh.learn(inputs, outputs, heads=2, method="six-phase", polish=False, throw=False)
    assert not rough.certified
    assert kh.distance(rough.params, layer) < 0.2
    started = kh.learn(inputs[:400], outputs[:400], heads=2, init="six-phase")
    assert kh.distance(started.params, layer) < 1e-9


def test_more_examples_sharpen_the_hull(rng: np.random.Generator) -> None:
    layer = layer_of(rng, 5, 3, 0.7)
    inputs = rng.standard_normal((20_000, 2, 5))
    outputs = layer(inputs)
    few, many = (six_phase(inputs[:n], outputs[:n], 3).hull.distance(layer.scores) for n in (500, 20_000))
    assert many < 0.5 * few


def test_what_the_phases_cannot_do_is_refused(two_heads: tuple[kh.AttentionLayer, np.ndarray, np.ndarray]) -> None:
    _, inputs, outputs = two_heads
    with pytest.raises(UsageError, match="1 to 4 heads"):
        six_phase(inputs, outputs, 5)
    with pytest.raises(UsageError, match="how many heads"):
        kh.learn(inputs, outputs, heads="auto", method="six-phase")
