"""The six phases: each on its own, and all of them up to the polish."""

from __future__ import annotations

import numpy as np
import pytest

import keyhole as kh
from keyhole.errors import UsageError
from keyhole.samples.six_phase import method as phases
from keyhole.samples.six_phase.body import Body, certify
from keyhole.samples.six_phase.heads import sculpt_heads
from keyhole.samples.six_phase.hull import LARGEST_TABLE, NetCost
from keyhole.samples.six_phase.margins import large_margin_sum
from keyhole.samples.six_phase.method import PhaseSettings, six_phase
from keyhole.samples.six_phase.rows import Rows, constraints
from keyhole.samples.source import ArraySource
from keyhole.targets.datasets import random_layer, signs


def from_hull(hull: phases.Hull, scores: np.ndarray) -> float:
    """How far score matrices (m, d, d) are from the hull, over their size, root mean squares."""
    return float(np.linalg.norm(scores - hull.at(hull.coefficients(scores))) / np.linalg.norm(scores))


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
    source = ArraySource(inputs, outputs)
    (chosen, exact), (all_of_them, _) = phases.crude_sum(source), phases.crude_sum(source, len(inputs))
    assert not exact
    assert relative(chosen, total) < 0.1
    assert relative(chosen, total) < relative(all_of_them, total)


def test_phase_1_is_exact_where_all_tokens_are_alike(rng: np.random.Generator) -> None:
    layer = layer_of(rng, 4, 2, 1.0)
    inputs = signs(rng, 1000, 2, 4)
    total = np.sum(layer.projections, axis=0)
    crude, exact = phases.crude_sum(ArraySource(inputs, layer(inputs)))
    assert exact
    assert relative(crude, total) < 1e-12
    assert not phases.crude_sum(ArraySource(inputs[:3], layer(inputs[:3])))[1]
    found = six_phase(ArraySource(inputs, layer(inputs)), 2)
    assert relative(found.total, total) < 1e-12
    assert found.figures["1 crude sum"]["exact"]


def test_phase_2_certifies_rows_on_which_heads_attend_alike(
    two_heads: tuple[kh.AttentionLayer, np.ndarray, np.ndarray],
) -> None:
    layer, inputs, outputs = two_heads
    rows = phases.sculpt(ArraySource(inputs, outputs), np.sum(layer.projections, axis=0), 200)
    logits = np.einsum("rd,mde,rke->mrk", rows.own, layer.scores, rows.inputs)
    weights = np.exp(logits) / np.sum(np.exp(logits), axis=2, keepdims=True)
    assert np.max(np.abs(weights[0] - weights[1])) < 0.02
    assert np.max(np.abs(weights[0] - rows.weights)) < 0.02
    everywhere = layer.scores[0] - layer.scores[1]
    typical = np.std(np.einsum("nd,de,nke->nk", inputs[:, 0], everywhere, inputs))
    assert np.std(logits[0] - logits[1] - np.mean(logits[0] - logits[1], axis=1, keepdims=True)) < 0.05 * typical


def test_phase_2_constrains_every_head(two_heads: tuple[kh.AttentionLayer, np.ndarray, np.ndarray]) -> None:
    layer, inputs, outputs = two_heads
    rows = phases.sculpt(ArraySource(inputs, outputs), np.sum(layer.projections, axis=0), 200)
    matrix, right = constraints(rows)
    for score in layer.scores:
        assert np.linalg.norm(matrix @ score.reshape(-1) - right) < 0.05 * np.linalg.norm(right)


def nearest_to_zero(scores: np.ndarray) -> np.ndarray:  # (2, d, d) -> (d·d,): the point of least norm on their line
    along = (scores[0] - scores[1]).reshape(-1) / np.linalg.norm(scores[0] - scores[1])
    point: np.ndarray = scores[0].reshape(-1) - (scores[0].reshape(-1) @ along) * along
    return point


@pytest.mark.parametrize("solver", ["least-squares", "l1"])
def test_phase_3_finds_the_point_of_least_norm(
    solver: str, two_heads: tuple[kh.AttentionLayer, np.ndarray, np.ndarray]
) -> None:
    layer, inputs, outputs = two_heads
    total = np.sum(layer.projections, axis=0)
    rows = phases.sculpt(ArraySource(inputs, outputs), total, 200)
    point, refined = phases.proxy(rows, total, 2, solver)
    assert relative(point.reshape(-1), nearest_to_zero(layer.scores)) < 0.1
    assert relative(refined, total) < 0.05
    assert phases.proxy(rows, total, 2, refine=False)[1] is total


def test_phase_3_mends_a_sum_that_is_off(two_heads: tuple[kh.AttentionLayer, np.ndarray, np.ndarray]) -> None:
    layer, inputs, outputs = two_heads
    total = np.sum(layer.projections, axis=0)
    rows = phases.sculpt(ArraySource(inputs, outputs), total, 200)
    assert relative(phases.proxy(rows, 1.1 * total, 2)[1], total) < 0.05


def test_phase_4_finds_the_span_of_differences(
    two_heads: tuple[kh.AttentionLayer, np.ndarray, np.ndarray],
) -> None:
    layer, inputs, outputs = two_heads
    total = np.sum(layer.projections, axis=0)
    rows = phases.sculpt(ArraySource(inputs, outputs), total, 200)
    point = nearest_to_zero(layer.scores).reshape(5, 5)
    found = phases.span(rows, total, point, 2)
    line = (layer.scores[0] - layer.scores[1]).reshape(-1)
    assert abs(found.directions.reshape(-1) @ line) > 0.99 * np.linalg.norm(line)
    assert found.figures["directions"] == 1
    assert found.figures["heads_by_gap"] == 2
    assert found.figures["gap"] == pytest.approx(found.values[1] / found.values[0])
    assert found.figures["gap"] > 3
    hull = phases.Hull.through(point, found.directions)
    assert from_hull(hull, layer.scores) < 0.05
    assert abs(np.vdot(hull.proxy, found.directions[0])) < 1e-12
    assert phases.span(rows, total, point, 1).directions.shape == (0, 5, 5)


def test_phase_4_of_three_heads_is_a_plane(rng: np.random.Generator) -> None:
    layer = layer_of(rng, 5, 3, 0.7)
    inputs = rng.standard_normal((40_000, 2, 5))
    total = np.sum(layer.projections, axis=0)
    rows = phases.sculpt(ArraySource(inputs, layer(inputs)), total, 200)
    point, _ = phases.proxy(rows, total, 3)
    found = phases.span(rows, total, point, 3)
    flat = found.directions.reshape(2, -1)
    assert np.allclose(flat @ flat.T, np.eye(2))
    apart = (layer.scores[1:] - layer.scores[0]).reshape(2, -1)
    assert relative((apart @ flat.T) @ flat, apart) < 0.3


def test_later_rounds_choose_rows_that_heads_agree_on(
    two_heads: tuple[kh.AttentionLayer, np.ndarray, np.ndarray],
) -> None:
    layer, inputs, outputs = two_heads
    pool = phases.sculpt(ArraySource(inputs, outputs), np.sum(layer.projections, axis=0), 1000)

    def apart(rows: Rows) -> float:
        logits = np.einsum("rd,mde,rke->mrk", rows.own, layer.scores, rows.inputs)
        difference = (logits - np.mean(logits, axis=2, keepdims=True))[0]
        return float(np.std(difference - (logits - np.mean(logits, axis=2, keepdims=True))[1]))

    assert apart(phases.alike(pool, layer.scores).best(200)) < 0.9 * apart(pool.best(200))


@pytest.mark.parametrize("m", [2, 3])
def test_phase_5_finds_the_heads_in_the_true_hull(m: int, rng: np.random.Generator) -> None:
    layer = layer_of(rng, 4, m, 0.7)
    inputs = signs(rng, 1000, 3, 4)
    flat = layer.scores.reshape(m, -1)
    basis = np.linalg.qr((flat[1:] - flat[0]).T)[0].T
    point = flat[0] - (flat[0] @ basis.T) @ basis
    hull = phases.Hull.through(flat[-1].reshape(4, 4), basis.reshape(m - 1, 4, 4))
    assert np.allclose(hull.proxy.reshape(-1), point)
    assert from_hull(hull, layer.scores) < 1e-12
    scores, figures = phases.net(ArraySource(inputs, layer(inputs)), hull, m, rng)
    assert figures["points"] > 10
    projections, error = phases.projections(ArraySource(inputs, layer(inputs)), scores)
    assert error < 1e-2  # it was chosen from others by examples apart, and refined
    assert kh.distance(kh.AttentionLayer(scores, projections), layer) < 0.3
    nearby, fewer = phases.net(ArraySource(inputs, layer(inputs)), hull, m, rng, near=layer.scores)
    assert fewer["points"] < figures["points"]
    assert phases.projections(ArraySource(inputs, layer(inputs)), nearby)[1] < 0.05


def test_phase_6_is_least_squares(rng: np.random.Generator) -> None:
    layer = layer_of(rng, 4, 2, 0.7)
    inputs = signs(rng, 300, 3, 4)
    projections, error = phases.projections(ArraySource(inputs, layer(inputs)), layer.scores)
    assert relative(projections, layer.projections) < 1e-12
    assert error < 1e-13


def test_one_head_is_exact_before_any_polish(fixed_seed: int) -> None:
    rng = np.random.default_rng(fixed_seed)
    layer = layer_of(rng, 4, 1, 1.0)
    inputs = signs(rng, 143, 2, 4)
    found = six_phase(ArraySource(inputs, layer(inputs)), 1)
    assert kh.distance(kh.AttentionLayer(found.scores, found.projections), layer) < 1e-9


def test_all_phases_report_and_lead_to_the_truth(
    two_heads: tuple[kh.AttentionLayer, np.ndarray, np.ndarray],
) -> None:
    layer, inputs, outputs = two_heads
    result = kh.learn(inputs, outputs, heads=2, method="six-phase")
    assert result.method == "six-phase"
    assert kh.distance(result.params, layer) < 1e-9
    figures = result.stats.details["six_phase"]
    assert [name[0] for name in figures] == list("1234567")
    assert figures["6 projections"]["relative_error"] < 0.05
    rough = kh.learn(inputs, outputs, heads=2, method="six-phase", polish=False, throw=False)
    assert rough.certified, rough.message
    assert "a layer of accuracy ε" in rough.message
    assert rough.certificate.radius is None  # nothing is claimed of parameters
    fresh = np.random.default_rng(8).standard_normal((500, 2, 5))
    error = relative(rough.params(fresh), layer(fresh))
    assert error < 1.5 * rough.stats.details["epsilon_at_most"]
    assert kh.distance(rough.params, layer) < 0.2
    started = kh.learn(inputs[:400], outputs[:400], heads=2, init="six-phase")
    assert kh.distance(started.params, layer) < 1e-9


def test_later_rounds_are_kept_where_they_explain_more(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of(rng, 5, 3, 0.7)
    inputs = rng.standard_normal((10_000, 2, 5))
    found = six_phase(ArraySource(inputs, layer(inputs)), 3)
    monkeypatch.setattr(phases, "RETURNS", ())
    once = six_phase(ArraySource(inputs, layer(inputs)), 3)
    assert once.figures["1 crude sum"]["rounds"] == 1
    assert found.error <= once.error
    assert (found.figures["1 crude sum"]["rounds"] > 1) == (found.error < once.error)


def test_more_examples_sharpen_the_hull(rng: np.random.Generator) -> None:
    layer = layer_of(rng, 5, 3, 0.7)
    inputs = rng.standard_normal((20_000, 2, 5))
    outputs = layer(inputs)
    few, many = (
        from_hull(six_phase(ArraySource(inputs[:n], outputs[:n]), 3).hull, layer.scores) for n in (500, 20_000)
    )
    assert many < 0.5 * few


def test_what_the_phases_cannot_do_is_refused(two_heads: tuple[kh.AttentionLayer, np.ndarray, np.ndarray]) -> None:
    _, inputs, outputs = two_heads
    with pytest.raises(UsageError, match="a net over the 11 directions of 12 heads is not affordable"):
        six_phase(ArraySource(inputs, outputs), 12)
    with pytest.raises(UsageError, match="unknown solver"):
        PhaseSettings(solver="prayer")
    with pytest.raises(UsageError, match="how many heads"):
        kh.learn(inputs, outputs, heads="auto", method="six-phase")


# --- what the phases may be made of ----------------------------------------------------------------------------------


def test_phase_1_by_correlation(rng: np.random.Generator) -> None:
    layer = layer_of(rng, 4, 2, 0.2)
    inputs = signs(rng, 40_000, 3, 4)
    found = phases.correlated_sum(ArraySource(inputs, layer(inputs)))
    assert relative(found, np.sum(layer.projections, axis=0)) < 0.1


@pytest.mark.parametrize("sigma", [5.0, 10.0])
def test_s_is_refined_on_large_margins(sigma: float) -> None:
    rng = np.random.default_rng(6)
    layer = layer_of(rng, 5, 2, sigma)
    inputs = signs(rng, 20_000, 4, 5)
    total = np.sum(layer.projections, axis=0)
    source = ArraySource(inputs, layer(inputs))
    point = nearest_to_zero(layer.scores).reshape(5, 5)
    crude, _ = phases.crude_sum(source)
    refined, better = large_margin_sum(source, point, crude, crude, 5000)
    assert better
    assert relative(refined, total) < 0.02
    off = point + 0.5 * np.linalg.norm(point) * rng.standard_normal((5, 5)) / 5
    refined, _ = large_margin_sum(source, off, crude, crude, 5000)
    assert relative(refined, total) < {5.0: 0.12, 10.0: 0.07}[sigma]


@pytest.mark.parametrize("sigma", [5.0, 10.0])
def test_s_of_three_heads_is_refined_without_a_proxy(sigma: float) -> None:
    rng = np.random.default_rng([0, 6, 4, 3])
    layer = layer_of(rng, 6, 3, sigma)
    inputs = signs(rng, 50_000, 4, 6)
    total = np.sum(layer.projections, axis=0)
    source = ArraySource(inputs, layer(inputs))
    crude, _ = phases.crude_sum(source)
    assert relative(crude, total) > 0.2
    point = rng.standard_normal((6, 6))  # as good as none
    refined, better = large_margin_sum(source, point, crude, crude)
    assert better
    assert relative(refined, total) < {5.0: 0.12, 10.0: 0.07}[sigma]
    normal = ArraySource(rng.standard_normal((5000, 4, 6)), layer(inputs[:5000]))  # no token is met twice
    assert large_margin_sum(normal, point, crude, crude)[0] is crude


@pytest.mark.parametrize("sigma", [0.5, 5.0])
def test_all_phases_have_s_from_large_margins_where_there_are_some(sigma: float) -> None:
    rng = np.random.default_rng(1)
    layer = layer_of(rng, 5, 2, sigma)
    inputs = signs(rng, 20_000, 4, 5)
    found = six_phase(ArraySource(inputs, layer(inputs)), 2, 0, PhaseSettings(by_head=False))
    assert found.figures["1 crude sum"]["large_margins"] == (sigma == 5.0)
    assert relative(found.total, np.sum(layer.projections, axis=0)) < {0.5: 0.1, 5.0: 0.02}[sigma]


def test_the_body_shows_the_hull_and_its_oracles_agree(fixed_seed: int) -> None:
    rng = np.random.default_rng(fixed_seed)
    layer = layer_of(rng, 3, 2, 0.7)
    inputs = rng.standard_normal((5_000, 2, 3))
    total = np.sum(layer.projections, axis=0)
    rows = phases.sculpt(ArraySource(inputs, layer(inputs)), total, 60)
    body = Body.of(rows)
    assert not any(body.contains(each + np.eye(3)) for each in layer.scores)
    point = body.least_norm()
    direction = rng.standard_normal(9)
    ends = [body.furthest(sign * direction) for sign in (1.0, -1.0)]
    for each in (point, *ends, np.mean(ends, axis=0)):
        assert body.contains(each.reshape(3, 3))
    assert not body.contains((2 * ends[0] - ends[1] + 0.1 * direction).reshape(3, 3))
    assert all(np.linalg.norm(point) <= np.linalg.norm(each) * (1 + 1e-6) for each in ends)
    line = (layer.scores[0] - layer.scores[1]).reshape(-1)
    assert abs(body.span(1, rng)[0] @ line) > 0.9 * np.linalg.norm(line)
    weights, left = certify(rows.inputs[0], rows.outputs[0], total)
    assert np.allclose(weights, rows.weights[0], atol=0.05)
    assert certify(rows.inputs[0], rows.outputs[0] + 1.0, total)[1] > left


@pytest.mark.parametrize("solver", ["l1", "body"])
def test_programs_are_reached_from_learn(solver: str, rng: np.random.Generator) -> None:
    layer = layer_of(rng, 3, 2, 0.7)
    inputs = rng.standard_normal((1500, 2, 3))
    settings = PhaseSettings(solver=solver, crude="correlation", by_head=False)
    said: list[str] = []
    options = {"method": "six-phase", "phases": settings, "polish": False, "throw": False}
    result = kh.learn(inputs, layer(inputs), heads=2, progress=lambda stage, *_: said.append(stage), **options)
    assert said == ["the six phases will make a net of 41 points, of which 820 sets could be made"]
    figures = result.stats.details["six_phase"]
    assert figures["2 sculpt"]["solver"] == solver
    assert "7 head by head" not in figures
    assert result.certified or "of what attention does" in result.message or "single errors" in result.message


def test_nets_cost_what_they_say_before_they_are_made() -> None:
    costs = [NetCost.of(heads, 6) for heads in (2, 3, 4, 5, 6)]
    assert [cost.points for cost in costs][:3] == [41, 149, 257]
    assert all(cost.numbers == (6 * cost.points) ** 2 <= LARGEST_TABLE for cost in costs)
    assert costs[0].sets == 41 * 40 // 2
    assert "a net of 41 points, of which 820 sets" in str(costs[0])


def test_head_by_head_is_nearer_and_no_worse(rng: np.random.Generator) -> None:
    layer = layer_of(rng, 4, 3, 0.5)
    inputs = signs(rng, 3000, 3, 4)
    source = ArraySource(inputs, layer(inputs))
    start = layer.scores + 0.05 * rng.standard_normal(layer.scores.shape)
    before = phases.projections(source, start)[1]
    scores, projections, error, sweeps = sculpt_heads(source, start)
    assert 0 < sweeps <= 40
    assert error < 0.2 * before
    fresh = signs(rng, 500, 3, 4)
    assert relative(kh.AttentionLayer(scores, projections)(fresh), layer(fresh)) < 2 * error


def test_examples_without_certified_rows_end_with_the_cause() -> None:
    rng = np.random.default_rng([0, 5, 5, 2])
    layer = layer_of(rng, 5, 2, 40.0)
    inputs = signs(rng, 1_000, 5, 5)
    result = kh.learn(inputs, layer(inputs), heads=2, method="six-phase", throw=False)
    assert result.outcome is kh.Outcome.TOO_FEW_EXAMPLES
    assert "no row of the examples is certified" in result.message
