"""Labels only: what is recovered lies within its radii, at how many queries, and what cannot be recovered is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import Floats
from keyhole.gauge import align
from keyhole.oracles import Counted, Flipped, Oracle


def head(width: int, seed: int, *, scale: float = 1.0, threshold: float = 0.0, classes: int | None = None) -> kh.Labels:
    rng = np.random.default_rng([seed, width])
    score = scale * rng.standard_normal((width, width))
    value = rng.standard_normal(width if classes is None else (width, classes))
    attention = kh.SingleHead(score, value, None, np.asarray(-threshold) if threshold else None)
    return kh.Labels(attention) if classes is None else kh.Labels(attention, tuple(range(classes)))


def oracle_of(truth: kh.Labels, **how: Any) -> kh.FunctionOracle:
    return kh.FunctionOracle(truth, width=truth.width, answers="labels", **how)


def is_inside(result: kh.Recovery, truth: kh.Labels) -> bool:
    """Whether all parameters are within their radii, up to what no label shows."""
    assert result.params is not None
    assert result.certificate.radius is not None
    found, radius = result.params.arrays(), result.certificate.radius.arrays()
    true = align(result.params, truth)
    assert "score" in true
    return all(bool(np.all(np.abs(found[name] - true[name]) <= radius[name] + 1e-15)) for name in true)


# --- queries over the entropy


def test_signs_cost_little_more_than_the_entropy() -> None:
    truth = head(32, 1)
    result = kh.recover(oracle_of(truth), "labels", target_error=1e-6)
    assert result.stats.ratio <= 1.03
    assert is_inside(result, truth)
    rms = float(np.sqrt(np.mean(truth.attention.score**2)))
    assert np.max(np.abs(result.params.attention.score - truth.attention.score)) <= 2e-6 * rms
    assert result.stats.details["target_reached"]


def test_short_tokens_cost_a_fifth_more_at_most() -> None:
    truth = head(16, 2, scale=0.1)
    result = kh.recover(oracle_of(truth, max_norm=1.0), "labels", target_error=1e-6)
    assert result.stats.ratio <= 1.2
    assert is_inside(result, truth)


def test_wrong_labels_are_paid_for_by_their_entropy() -> None:
    truth = head(16, 3)
    result = kh.recover(Flipped(oracle_of(truth), 0.1, seed=3), "labels", target_error=1e-6)
    assert result.stats.ratio <= 1.45
    assert is_inside(result, truth)


def test_bits_are_a_target_error() -> None:
    one, two = (
        kh.recover(oracle_of(head(4, 4)), "labels", **how) for how in ({"bits": 10}, {"target_error": 2.0**-10})
    )
    assert one.stats.queries == two.stats.queries


# --- right or admitted, whatever the oracle


def draw(rng: np.random.Generator) -> tuple[kh.Labels, dict[str, Any]]:
    """A head of any scale, threshold and norm bound, of one output or several."""
    width = int(rng.integers(1, 9))
    classes = None if rng.integers(3) else int(rng.integers(3, 6))
    score = 10.0 ** rng.uniform(-3, 3) * rng.standard_normal((width, width))
    kind = rng.integers(3)
    if kind == 0:
        score = score * (rng.uniform(size=score.shape) < 0.4)
    if kind == 1:
        score = np.outer(score[:, 0], rng.standard_normal(width))
    value = rng.standard_normal(width if classes is None else (width, classes))
    if rng.integers(4) == 0:
        value[rng.integers(width)] = 0.0
    norm = None if rng.integers(2) else 10.0 ** rng.uniform(-1, 2)
    bias = None
    if classes is None and rng.integers(2):
        bias = np.asarray(0.2 * rng.standard_normal() * np.linalg.norm(value) * (norm or 1.0) / width**0.5)
    attention = kh.SingleHead(score, value, None, bias)
    truth = kh.Labels(attention, (-1, 1) if rng.integers(2) else (0, 1)) if classes is None else None
    return truth or kh.Labels(attention, tuple(range(classes or 0))), {"max_norm": norm}


@pytest.mark.parametrize("number", range(8))
def test_what_is_certified_lies_within_its_radii(fresh_seed: int, number: int) -> None:
    rng = np.random.default_rng([fresh_seed, number])
    truth, how = draw(rng)
    result = kh.recover(oracle_of(truth, **how), seed=number, target_error=float(rng.choice([1e-3, 1e-6])), throw=False)
    if not result.certified:
        assert result.message
        assert result.outcome is not kh.Outcome.CERTIFIED
        return
    if result.params.labels == truth.labels:
        assert is_inside(result, truth)


@pytest.mark.parametrize("classes", [3, 6])
def test_values_of_classes_are_known_up_to_a_row_and_a_factor(classes: int) -> None:
    truth = head(8, classes, classes=classes)
    result = kh.recover(oracle_of(truth), "labels", classes=classes, target_error=1e-6)
    assert is_inside(result, truth)
    assert kh.distance(result.params, truth) < 2e-6


@pytest.mark.parametrize("biases", [[0.5, -2.0, 0.1], [1e-3, 0.0, 0.0], [40.0, -300.0, 7.0]])
def test_biases_of_classes_are_read_beside_the_values(biases: list[float]) -> None:
    plain = head(4, 20, classes=3).attention
    truth = kh.Labels(kh.SingleHead(plain.score, plain.value, None, np.array(biases)), (0, 1, 2))
    result = kh.recover(oracle_of(truth), "labels", target_error=1e-6)
    assert is_inside(result, truth)
    assert "output_bias" in align(result.params, truth)
    assert kh.distance(result.params, truth) < 1e-5
    assert kh.recover(oracle_of(kh.Labels(plain, (0, 1, 2))), "labels").params.attention.output_bias is None


@pytest.mark.parametrize(("width", "classes", "max_norm"), [(4, 3, 20.0), (3, 5, 0.3)])
def test_biases_of_classes_within_a_norm_bound_are_read_beside_the_values(
    width: int, classes: int, max_norm: float
) -> None:
    plain = head(width, 20, classes=classes, scale=max_norm**-2).attention
    biases = max_norm * 0.2 * np.random.default_rng(20).standard_normal(classes)
    truth = kh.Labels(kh.SingleHead(plain.score, plain.value, None, biases), tuple(range(classes)))
    result = kh.recover(oracle_of(truth, max_norm=max_norm), "labels", target_error=1e-5)
    assert is_inside(result, truth)
    assert "output_bias" in align(result.params, truth)
    assert kh.distance(result.params, truth) < 1e-4


def test_biases_of_classes_are_read_where_labels_are_wrong_at_times() -> None:
    rng = np.random.default_rng([1, 8])
    score, value, biases = rng.standard_normal((2, 2)), rng.standard_normal((2, 3)), 0.2 * rng.standard_normal(3)
    truth = kh.Labels(kh.SingleHead(score, value, None, biases), (0, 1, 2))
    flipped = Flipped(oracle_of(truth, max_norm=1.0), 0.05, (0, 1, 2), seed=1)
    result = kh.recover(flipped, "labels", target_error=1e-3)
    assert is_inside(result, truth)


def test_a_class_of_short_tokens_that_meets_the_others_in_too_few_places_is_named() -> None:
    values = np.array([[1.0, -1.0, 0.0], [0.5, -0.5, 0.1]])  # the third has one label for a token and its opposite
    truth = kh.Labels(kh.SingleHead(np.eye(2), values, None, np.array([0.0, 0.1, 0.5])), (0, 1, 2))
    outcome, message = ending(oracle_of(truth, max_norm=2.0))
    assert outcome is kh.Outcome.NOT_IDENTIFIABLE
    assert "too few boundaries" in message


def tied(rng: np.random.Generator) -> kh.Labels:
    value = rng.integers(-2, 3, (4, 4)) * 1.0
    return kh.Labels(kh.SingleHead(rng.integers(-2, 3, (4, 4)) * 1.0, value), (0, 1, 2, 3))


@pytest.mark.parametrize("seed", range(3))
def test_classes_that_tie_at_unit_tokens_are_read(seed: int) -> None:
    truth = tied(np.random.default_rng([seed, 21]))
    result = kh.recover(oracle_of(truth), "labels", target_error=1e-4)
    assert result.params.labels != truth.labels or is_inside(result, truth)


@pytest.mark.parametrize("score", [np.eye(4), np.diag([1.0, -2.0, 0.5, 3.0])])
def test_diagonal_scores_are_read_within_a_norm_bound(score: Floats) -> None:
    truth = kh.Labels(kh.SingleHead(score, np.random.default_rng(22).standard_normal(4)))
    assert is_inside(kh.recover(oracle_of(truth, max_norm=1.0), "labels", target_error=1e-4), truth)


def test_a_head_that_does_not_choose_is_one() -> None:
    truth = kh.Labels(kh.SingleHead(np.zeros((3, 3)), np.array([1.0, -2.0, 0.5])))
    result = kh.recover(oracle_of(truth), "labels", target_error=1e-4)
    assert is_inside(result, truth)
    outcome, message = ending(oracle_of(truth, max_norm=1.0))
    assert outcome is kh.Outcome.UNCERTIFIED
    assert "allow longer ones" in message


def test_single_tokens_are_among_the_held_out_labels() -> None:
    result = kh.recover(oracle_of(head(4, 23), max_norm=1.0), "labels", target_error=1e-3)
    singles = next(each for each in result.certificate.tested if each.label == "1 token")
    assert singles.queries >= result.certificate.heldout_queries / 5


def test_a_rate_that_is_to_be_measured_is(fixed_seed: int) -> None:
    truth = head(4, 24)
    flipped = Flipped(oracle_of(truth, noise="measure"), 0.1, seed=fixed_seed % 2**32, declared=False)
    result = kh.recover(flipped, target_error=1e-2)
    assert result.method == "labels"
    assert kh.recover(oracle_of(truth, noise="measure"), target_error=1e-2).certified


def test_a_threshold_is_read_beside_the_values() -> None:
    for threshold in (-3.0, 1e-4, 250.0):
        truth = head(5, 5, threshold=threshold)
        result = kh.recover(oracle_of(truth), "labels")
        assert is_inside(result, truth)
        assert result.stats.details["threshold"]


def test_rows_without_a_value_are_read_with_another_one() -> None:
    rng = np.random.default_rng(6)
    truth = kh.Labels(kh.SingleHead(rng.standard_normal((6, 6)), np.eye(6)[2]))
    assert is_inside(kh.recover(oracle_of(truth), "labels"), truth)


def test_equal_values_and_whole_numbers_are_read() -> None:
    rng = np.random.default_rng(7)
    truth = kh.Labels(kh.SingleHead(rng.integers(-2, 3, (6, 6)) * 1.0, np.ones(6)), (0, 1))
    for how in ({}, {"max_norm": 2.0}):
        assert is_inside(kh.recover(oracle_of(truth, **how), "labels"), truth)


@pytest.mark.parametrize("values", [[-4.0, 3.0, 2.0, -3.0, 3.0], [4.0, 3.0], [4.0, 1.0, 2.0, 3.0]])
def test_ratios_that_are_compared_with_themselves_are_no_contradiction(values: list[float]) -> None:
    """Where a token lies on the boundary rounding answers, for one copy of it otherwise than for sixteen."""
    score = np.random.default_rng(7).standard_normal((len(values), len(values)))
    truth = kh.Labels(kh.SingleHead(score, np.array(values)), (0, 1))
    assert is_inside(kh.recover(oracle_of(truth, max_norm=1.7), "labels", target_error=1e-4), truth)


# --- how labels are told


def conventions(score: Floats, value: Floats) -> dict[str, Callable[[Floats], Any]]:
    inner = kh.SingleHead(score, value)
    return {
        "sign": lambda tokens: np.sign(inner(tokens)),
        "whole numbers": lambda tokens: (inner(tokens) > 0).astype(np.int64),
        "booleans": lambda tokens: inner(tokens) > 0,
        "other names": lambda tokens: np.where(inner(tokens) > 0, 7, 3),
    }


@pytest.mark.parametrize("name", conventions(np.eye(1), np.ones(1)))
def test_any_two_labels_are_a_sign(name: str) -> None:
    rng = np.random.default_rng(8)
    score, value = rng.standard_normal((4, 4)), rng.standard_normal(4)
    oracle = kh.FunctionOracle(conventions(score, value)[name], width=4, answers="labels")
    result = kh.recover(oracle)
    assert result.method == "labels"
    assert kh.distance(result.params, kh.Labels(kh.SingleHead(score, value))) < 2e-6


def test_torch_classifiers_are_asked() -> None:
    torch = pytest.importorskip("torch")
    truth = head(4, 9, classes=3)
    layer = truth.attention
    oracle = kh.FunctionOracle(
        lambda tokens: torch.argmax(layer(tokens), dim=-1),
        width=4,
        like=torch.zeros(1, dtype=torch.float64),
        answers="labels",
    )
    result = kh.recover(oracle)
    assert result.certified
    assert kh.distance(result.params, truth) < 2e-6


def test_auto_and_diagnose_recognise_labels_that_nobody_declared() -> None:
    truth = head(6, 10)
    oracle = kh.FunctionOracle(lambda tokens: truth(tokens) * 1.0, width=6)
    result = kh.recover(oracle)
    assert result.certified
    assert result.method == "labels"
    assert kh.recover(oracle, "single-head", throw=False).outcome is kh.Outcome.WRONG_FAMILY


def test_other_methods_say_which_is_for_labels() -> None:
    result = kh.recover(oracle_of(head(3, 11)), "single-head", throw=False)
    assert result.outcome is kh.Outcome.WRONG_FAMILY
    assert "method labels" in result.message
    assert result.stats.queries == 0


def test_a_journal_pays_no_label_twice(tmp_path: Path) -> None:
    truth, journal = head(5, 12), tmp_path / "labels.db"
    first = kh.recover(
        oracle_of(truth, name="box"), "labels", budget=200, journal=journal, target_error=1e-6, throw=False
    )
    assert first.outcome is kh.Outcome.BUDGET_EXHAUSTED
    counted = Counted(oracle_of(truth, name="box"))
    again = kh.recover(counted, "labels", journal=journal, target_error=1e-6)
    assert again.certified
    assert counted.queries == again.stats.queries + again.stats.heldout_queries - 200


def test_a_budget_sets_the_accuracy_where_none_is_asked_for() -> None:
    truth = head(6, 13)
    errors = []
    for budget in (900, 1600):
        result = kh.recover(oracle_of(truth), "labels", budget=budget)
        errors.append(kh.distance(result.params, truth))
    assert errors[1] < 1e-2 * errors[0] < 1e-3


# --- what is wrong is said


def ending(oracle: Oracle, **options: Any) -> tuple[kh.Outcome, str]:
    result = kh.recover(oracle, "labels", throw=False, **options)
    assert not result.certified
    return result.outcome, result.message


def test_a_threshold_out_of_range_shows_in_no_label() -> None:
    truth = head(4, 14, threshold=50.0)
    outcome, message = ending(oracle_of(truth, max_norm=1.0))
    assert outcome is kh.Outcome.NOT_IDENTIFIABLE
    assert "max_norm" in message


def test_labels_that_never_change_are_not_identifiable() -> None:
    outcome, _ = ending(kh.FunctionOracle(lambda tokens: np.ones(len(tokens)), width=3, answers="labels"))
    assert outcome is kh.Outcome.NOT_IDENTIFIABLE


def test_labels_that_contradict_themselves_are_measured(fresh_seed: int) -> None:
    truth = head(5, 15)
    result = kh.recover(Flipped(oracle_of(truth), 0.08, seed=fresh_seed % 2**32, declared=False), throw=False)
    if result.certified:
        assert "flip_rate" in result.stats.details
    coin = np.random.default_rng(fresh_seed)
    ending(kh.FunctionOracle(lambda tokens: coin.integers(0, 2, len(tokens)), width=4, answers="labels"))


def test_a_class_that_never_occurs_is_named() -> None:
    truth = head(6, 16, classes=4)
    value = np.column_stack([truth.attention.value, np.mean(truth.attention.value, axis=1)])  # inside the others
    oracle = oracle_of(kh.Labels(kh.SingleHead(truth.attention.score, value), tuple(range(5))))
    outcome, message = ending(oracle, classes=5)
    assert outcome is kh.Outcome.NOT_IDENTIFIABLE
    assert "class 4 never" in message
    assert kh.recover(oracle, "labels").params.labels == (0, 1, 2, 3)


@pytest.mark.parametrize("how", [{}, {"max_norm": 2.0}])
@pytest.mark.parametrize("threshold", [0.0, 0.2])
def test_a_score_bias_is_named(how: dict[str, Any], threshold: float) -> None:
    rng = np.random.default_rng(19)
    score, value, bias = rng.standard_normal((5, 5)), rng.standard_normal(5), rng.standard_normal(5)
    truth = kh.Labels(kh.SingleHead(score, value, bias, np.asarray(-threshold) if threshold else None))
    outcome, message = ending(oracle_of(truth, **how))
    assert outcome is kh.Outcome.WRONG_FAMILY
    assert "score bias" in message


def test_answers_that_are_no_labels_are_refused() -> None:
    numbers = kh.FunctionOracle(head(3, 17).attention, width=3, answers="labels")
    outcome, message = ending(numbers)
    assert outcome is kh.Outcome.ORACLE_FAILED
    assert "no label" in message
    rows = kh.FunctionOracle(lambda tokens: np.ones((len(tokens), 2)), width=3, answers="labels")
    assert "one whole number per sequence" in ending(rows)[1]


@pytest.mark.parametrize(
    "options", [{"target_error": 0.0}, {"bits": 0}, {"bits": 3, "target_error": 0.1}, {"target_error": "x"}]
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(kh.KeyholeError):
        kh.recover(oracle_of(head(3, 18)), "labels", **options)


@pytest.mark.parametrize("seed", range(6))
def test_labels_that_no_sign_of_a_token_changes_are_of_no_head(seed: int) -> None:
    rng = np.random.default_rng(seed)
    head = kh.SingleHead(rng.standard_normal((4, 4)), rng.standard_normal(4))
    oracle = kh.FunctionOracle(
        lambda t: np.where(head(t) + np.abs(t[:, -1]).sum(axis=1) > 0, 1, -1), width=4, answers="labels"
    )
    assert not kh.recover(oracle, throw=False, seed=seed).certified


@pytest.mark.parametrize(("share", "max_norm"), [(0.1, 1.0), (0.1, None), (0.01, None)])
def test_classes_of_few_tokens_are_found(share: float, max_norm: float | None) -> None:
    """Random tokens may miss a class of few: a label that was not known shows it later, or a held-out query."""
    rng = np.random.default_rng(5)
    values = np.array([[np.tan(np.pi * share), 0.0, 0.0], [0.0, 1.0, -1.0]])  # the first wins in a narrow cone
    for seed in range(3):
        turn = np.linalg.qr(rng.standard_normal((2, 2)))[0]
        truth = kh.Labels(kh.SingleHead(rng.standard_normal((2, 2)), turn @ values), (0, 1, 2))
        result = kh.recover(oracle_of(truth, max_norm=max_norm), seed=seed)
        assert is_inside(result, truth)


@pytest.mark.parametrize("max_norm", [None, 2.0])
def test_a_class_between_two_others_never_occurs(max_norm: float | None) -> None:
    rng = np.random.default_rng(0)
    apart = rng.standard_normal((3, 2))
    head = kh.SingleHead(rng.standard_normal((3, 3)), np.column_stack([apart.mean(axis=1), apart]))

    def answer(tokens: np.ndarray) -> np.ndarray:
        return np.argmax(np.asarray(head(tokens)), axis=1) * 1.0

    result = kh.recover(kh.FunctionOracle(answer, width=3, answers="labels", max_norm=max_norm), throw=False)
    assert result.certified, result.message
