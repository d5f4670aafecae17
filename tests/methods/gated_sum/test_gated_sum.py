"""Sums of gated rows: heads are found without being counted, values known or not, and radii hold them."""

from __future__ import annotations

import numpy as np
import pytest

from keyhole.methods.gated_sum.equal_values import equal_groups, orders
from keyhole.methods.gated_sum.joint import JointHeads, JointQueries, fit_joint
from keyhole.methods.gated_sum.known_values import fit_known_values
from keyhole.methods.gated_sum.model import GatedQueries, GatedSum
from keyhole.methods.gated_sum.radii import AnswerErrors, joint_radii
from keyhole.methods.gated_sum.search import fit_unknown, reductions

WIDTH = 6
COPIES = np.log([1, 2, 3, 4, 8, 1 / 2, 1 / 3, 1 / 4, 1 / 8])
ROUNDING = 2e-14


def draw_heads(rng: np.random.Generator, kind: str, heads: int, outputs: int = 1) -> GatedSum:
    gates, values = rng.standard_normal((heads, WIDTH)), rng.standard_normal((heads, WIDTH, outputs))
    gates[1] = {"generic": gates[1], "double": 2 * gates[0], "opposite": -gates[0]}[kind]
    return GatedSum(gates, values)


def ask(rng: np.random.Generator, heads: GatedSum, count: int, error: float = 0.0) -> GatedQueries:
    rows, offsets = 1.2 * rng.standard_normal((count, WIDTH)), rng.choice(COPIES, count)
    queries = GatedQueries(rows, offsets, np.zeros((count, heads.values.shape[2])))
    answers = heads.predict(queries)
    return GatedQueries(rows, offsets, answers + rng.uniform(-error, error, answers.shape))


def order_of(found: GatedSum, truth: GatedSum) -> list[int]:
    apart = np.linalg.norm(found.gates[:, None] - truth.gates[None], axis=2)
    return [int(each) for each in np.argmin(apart, axis=0)]


@pytest.mark.parametrize("kind", ["generic", "double", "opposite"])
@pytest.mark.parametrize("heads", [2, 4])
def test_heads_of_any_gates_are_counted_and_found(kind: str, heads: int) -> None:
    rng = np.random.default_rng(heads)
    truth = draw_heads(rng, kind, heads)
    found = fit_unknown(ask(rng, truth, 20 + 5 * heads * WIDTH), ROUNDING, rng)
    assert found.explains
    assert found.heads.heads == heads
    order = order_of(found.heads, truth)
    assert np.max(np.abs(found.heads.gates[order] - truth.gates)) < 1e-12
    assert np.max(np.abs(found.heads.values[order] - truth.values)) < 1e-12


def test_several_outputs_take_fewer_queries() -> None:
    rng = np.random.default_rng(3)
    truth = draw_heads(rng, "double", 3, outputs=2)
    found = fit_unknown(ask(rng, truth, 60), ROUNDING, rng)
    assert found.explains
    assert found.heads.heads == 3
    assert np.max(np.abs(found.heads.gates[order_of(found.heads, truth)] - truth.gates)) < 1e-12


def test_an_answer_that_drowns_all_others_is_no_sum_of_no_heads() -> None:
    """Values of heads may then be zero, or not numbers; a search for fewer heads leaves one."""
    rng = np.random.default_rng(5)
    for values in (np.zeros((3, WIDTH, 1)), np.full((3, WIDTH, 1), np.nan)):
        fewer = list(reductions(GatedSum(rng.standard_normal((3, WIDTH)), values)))
        assert [gates.shape[1] for gates in fewer] == [2]


def test_answers_that_no_heads_give_are_not_explained() -> None:
    rng = np.random.default_rng(4)
    queries = ask(rng, draw_heads(rng, "generic", 2), 80)
    other = GatedQueries(queries.rows, queries.offsets, np.sin(queries.rows[:, :1] * 3))
    assert not fit_unknown(other, ROUNDING, rng).explains


def test_gates_follow_where_values_are_known() -> None:
    rng = np.random.default_rng(5)
    truth = draw_heads(rng, "opposite", 4)
    start = truth.gates + 0.3 * rng.standard_normal(truth.gates.shape)
    gates, rms = fit_known_values(ask(rng, truth, 40), truth.values, start)
    assert rms < 1e-14
    assert np.max(np.abs(gates - truth.gates)) < 1e-12


@pytest.mark.parametrize("error", [1e-8, 1e-4])
def test_radii_of_a_joint_fit_hold_the_truth(error: float, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    truth = draw_heads(rng, "generic", 2)
    moved = GatedSum(truth.gates + 0.3 * rng.standard_normal(truth.gates.shape), truth.values)
    groups = [ask(rng, each, 60, error) for each in (truth, moved)]
    heads = JointHeads(np.stack([truth.gates, moved.gates]), truth.values, np.zeros(1))
    queries = JointQueries(groups)
    fit, _ = fit_joint(queries, heads)
    size = sum(group.answers.size for group in groups)
    errors = AnswerErrors(np.full(size, error), np.zeros(size), 1.0)
    mixing = np.array([[1.0, -1.0], [0.0, 1.0]])
    radii = joint_radii(queries, fit, errors, mixing)
    inside = [
        np.all(np.abs(np.tensordot(mixing.T, fit.gates - heads.gates, 1)) <= radii.gates),
        np.all(np.abs(fit.values - heads.values) <= radii.values),
    ]
    assert not radii.settled or all(inside)


def test_heads_of_equal_values_change_places_and_no_others() -> None:
    values = np.random.default_rng(0).standard_normal((5, 3, 2))
    values[3], values[4] = values[1], 1.001 * values[0]
    groups = equal_groups(values)
    assert groups[1] == groups[3]
    assert groups[0] == groups[4]
    assert len(set(groups)) == 3
    found = {tuple(order.tolist()) for order in orders(groups)}
    assert found == {(0, 1, 2, 3, 4), (4, 1, 2, 3, 0), (0, 3, 2, 1, 4), (4, 3, 2, 1, 0)}
    assert [order.tolist() for order in orders(np.zeros(9, dtype=np.int64))] == [list(range(9))]
