"""Any errors of at most τ: the truth is within the radius, or the condition that failed is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import Array, Space, to_numpy
from keyhole.errors import UsageError
from keyhole.methods import Estimate, Unrecoverable
from keyhole.methods.robust.bounded.design import leaning_rows
from keyhole.methods.robust.bounded.interval import Interval, PairLayout
from keyhole.methods.robust.bounded.method import ASSUMPTIONS, ASSUMPTIONS_COVERED, bounded
from keyhole.methods.robust.bounded.reader import LEAST_MARGIN
from keyhole.noise import Noise
from keyhole.recovery import Outcome
from keyhole.session import Session
from support import targets as t

NUMPY = Space.of(np.zeros(1))

# --- adversaries: from tokens (batch, length, width) and true answers to errors within [−1, 1] ---------------------

Adversary = Callable[[t.Floats, t.Floats], t.Floats]


def uniform(seed: int) -> Adversary:
    rng = np.random.default_rng([seed, 1])
    return lambda tokens, answers: rng.uniform(-1, 1, answers.shape)


def sign(seed: int) -> Adversary:
    """The same sign for the same question, and no other rule."""
    mix = np.random.default_rng([seed, 2]).standard_normal(99)
    return lambda tokens, answers: np.where(np.sin(1e5 * (tokens @ mix[: tokens.shape[2]]).sum(axis=1)) > 0, 1.0, -1.0)


def constant(seed: int) -> Adversary:
    return lambda tokens, answers: np.full(answers.shape, 1.0 if seed % 2 else -1.0)


def towards_zero(seed: int) -> Adversary:
    return lambda tokens, answers: -np.sign(answers)


def pushing(head: kh.SingleHead, entry: int) -> Adversary:
    """Pushes W[entry, :] as far as it will go: up by what leans on e_entry, down by what lies along the value."""
    value = to_numpy(head.value)
    unit, own = value / np.linalg.norm(value), 1.0 if value[entry] >= 0 else -1.0

    def errors(tokens: t.Floats, answers: t.Floats) -> t.Floats:
        first = tokens[:, 0, :]
        along = first @ unit > 0.95 * np.linalg.norm(first, axis=1)
        return np.where(along, -own, own) * (tokens.shape[1] > 1)

    return errors


ADVERSARIES = {"uniform": uniform, "sign": sign, "constant": constant, "towards-zero": towards_zero}


def attacked(
    head: kh.SingleHead, tolerance: float, adversary: Adversary, like: Any = None, **facts: Any
) -> kh.FunctionOracle:
    space = NUMPY if like is None else Space.of(like)

    def box(tokens: Array) -> Array:
        answers = head(tokens)
        plain = to_numpy(answers).astype(np.float64)
        errors = adversary(to_numpy(tokens).astype(np.float64), plain if plain.ndim == 1 else plain[:, 0])
        errors = errors if plain.ndim == 1 else errors[:, None]
        return answers + space.asarray(tolerance * errors)

    return kh.FunctionOracle(box, head.width, noise=Noise.bounded(tolerance), like=like, **facts)


def recovered(oracle: kh.FunctionOracle, seed: int = 0, **options: Any) -> tuple[Estimate, Session]:
    session = Session(oracle)
    return session.run(bounded(oracle.signature, np.random.default_rng(seed), **options)), session


def a_head(seed: int, width: int = 8, norm: float = 1.0, **facts: Any) -> kh.SingleHead:
    rng = np.random.default_rng([seed, 7])
    return t.head_in(NUMPY, t.gaussian(rng, width, norm), t.normal_value(rng, width), **facts)


def refusal(oracle: kh.FunctionOracle, **options: Any) -> Unrecoverable:
    with pytest.raises(Unrecoverable) as caught:
        recovered(oracle, **options)
    return caught.value


# --- soundness -----------------------------------------------------------------------------------------------------


def drawn_score(rng: t.Random, width: int) -> t.Floats:
    kinds = (
        t.gaussian,
        t.cauchy,
        t.single_entry,
        lambda r, d: t.of_rank(r, d, 1),
        lambda r, d: np.diag(r.normal(size=d)),
    )
    return t.of_norm(kinds[rng.integers(len(kinds))](rng, width), 10 ** rng.uniform(-2, 2))


def drawn_value(rng: t.Random, width: int) -> t.Floats:
    kinds = (t.normal_value, t.one_hot, lambda r, d: t.decades(r, d, 4), lambda r, d: r.standard_normal((d, 3)))
    return kinds[rng.integers(len(kinds))](rng, width)


@pytest.mark.slow
@pytest.mark.parametrize("name", ADVERSARIES)
def test_the_truth_is_within_the_radius(name: str, like: Any, fresh_seed: int) -> None:
    fixed, finished = range(6), 0
    for seed in [*fixed, *range(fresh_seed, fresh_seed + 6)]:
        rng = np.random.default_rng(seed)
        width = int(rng.choice([1, 2, 3, 6, 12]))
        truth = t.head_in(Space.of(like), drawn_score(rng, width), drawn_value(rng, width))
        facts = {
            "max_norm": [None, 0.5, 1.0, 2.0, 4.0][rng.integers(5)],
            "max_length": [None, None, 2, 3, 6][rng.integers(5)],
        }
        oracle = attacked(truth, 10 ** rng.uniform(-8, -2), ADVERSARIES[name](seed), like, **facts)
        try:
            estimate, _ = recovered(oracle, seed)
        except Unrecoverable as error:
            assert error.outcome is Outcome.TOO_NOISY, (seed, error)  # noqa: PT017
            continue
        assert t.misses(estimate.params, truth, estimate.radius) == {}, (seed, facts)
        assert Space.of(estimate.params.score) == Space.of(like)
        finished += seed in fixed
    assert finished >= 6  # all of the fixed seeds


@pytest.mark.parametrize("library", ["numpy-float32", "torch-float32"])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_rounding_is_within_the_radius(library: str, max_norm: float | None) -> None:
    like = t.example(library)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        truth = t.head_in(Space.of(like), t.gaussian(rng, 10), t.normal_value(rng, 10))
        estimate, _ = recovered(attacked(truth, 1e-6, sign(seed), like, max_norm=max_norm))
        assert t.misses(estimate.params, truth, estimate.radius) == {}


@pytest.mark.parametrize("norm", [0.3, 3.0, 30.0])
def test_the_radius_is_hardly_more_than_an_adversary_reaches(norm: float, fixed_seed: int) -> None:
    for seed in (0, fixed_seed):
        truth = a_head(seed, 12, norm)
        entry = seed % 12
        oracle = attacked(truth, 1e-4, pushing(truth, entry), max_norm=1.0)
        estimate, _ = recovered(oracle)
        assert t.misses(estimate.params, truth, estimate.radius) == {}
        reached = np.abs(estimate.params.score - truth.score)[entry] / estimate.radius.score[entry]
        assert np.max(reached) >= 0.6


def test_radii_are_near_what_hides_from_any_questions() -> None:
    truth = a_head(0, 24, 0.1)
    estimate, session = recovered(attacked(truth, 1e-4, uniform(0), max_norm=0.5))
    floor = 2e-4 / (0.5**3 * np.linalg.norm(truth.value))
    assert estimate.details["floor"] == pytest.approx(floor, rel=1e-2)
    assert np.mean(estimate.radius.score) <= 1.5 * floor
    np.testing.assert_allclose(estimate.radius.value, 1e-4 / 0.5, rtol=1e-6)
    assert session.queries == 24**2 + 3 * 24 + 8
    stages = {stage: count for (_, stage), count in session.stages.items()}
    assert stages == {"value": 26, "score bias": 3, "scale": 3, "score": 24**2 + 2 * 24}
    assert estimate.counting_bound == 24**2 + 24


def test_free_norms_leave_rounding_only() -> None:
    truth = a_head(1, 12)
    estimate, _ = recovered(attacked(truth, 1e-3, sign(1)))
    assert t.misses(estimate.params, truth, estimate.radius) == {}
    assert np.max(estimate.radius.score) <= 1e-12
    assert np.max(estimate.radius.value) <= 1e-12


@pytest.mark.parametrize("norm", [1e3, 1e6])
def test_large_logits_take_shorter_tokens(norm: float) -> None:
    truth = a_head(2, 16, norm)
    estimate, session = recovered(attacked(truth, 1e-5, constant(0), max_norm=2.0))
    assert t.misses(estimate.params, truth, estimate.radius) == {}
    assert np.max(estimate.radius.score) <= 1e-3 * np.max(np.abs(truth.score))
    assert session.queries <= 1.35 * estimate.counting_bound
    assert estimate.details["largest_logit"] <= 1.5


@pytest.mark.parametrize("max_length", [2, 3, 4, 5, 9, None])
def test_short_sequences_cost_radius_only(max_length: int | None) -> None:
    truth = a_head(3, 8)
    estimate, session = recovered(attacked(truth, 1e-5, sign(2), max_norm=1.0, max_length=max_length))
    assert t.misses(estimate.params, truth, estimate.radius) == {}
    assert estimate.details["copies"] == (16 if max_length is None else max(1, (max_length - 1) // 2))
    floors = {2: 80, 3: 8, 4: 8, 5: 4, 9: 2.5, None: 2}
    assert np.mean(estimate.radius.score) <= floors[max_length] * estimate.details["floor"]
    assert session.queries <= 8**2 + 3 * 8 + 12


def test_several_outputs() -> None:
    rng = np.random.default_rng(4)
    truth = t.head_in(NUMPY, t.gaussian(rng, 10), rng.standard_normal((10, 3)) * [0.1, 5.0, 1.0])
    estimate, _ = recovered(attacked(truth, 1e-4, sign(3), max_norm=1.0))
    assert t.misses(estimate.params, truth, estimate.radius) == {}
    assert estimate.params.value.shape == (10, 3)
    assert estimate.details["output"] == 1
    alone = kh.SingleHead(truth.score, truth.value[:, 1])
    single, _ = recovered(attacked(alone, 1e-4, sign(3), max_norm=1.0))
    np.testing.assert_allclose(estimate.radius.score, single.radius.score, rtol=0.05)


def test_all_positions() -> None:
    truth = a_head(5)
    oracle = kh.FunctionOracle(
        lambda tokens: truth.at_all_positions(tokens) + 1e-4, 8, 1.0, positions="all", noise=Noise.bounded(1e-4)
    )
    result = kh.recover(oracle, "robust")
    assert t.misses(result.params, truth, result.certificate.radius) == {}


# --- conditions ----------------------------------------------------------------------------------------------------


def test_conditions_are_plain_numbers() -> None:
    estimate, _ = recovered(attacked(a_head(6), 1e-4, uniform(0), max_norm=1.0))
    details = json.loads(json.dumps(dict(estimate.details), allow_nan=False))
    assert details["conditions"]["margin"]["value"] == details["margin"] > LEAST_MARGIN
    assert details["conditions"]["norm"]["value"] == details["norm"] < 1.0
    assert all(condition["holds"] for condition in details["conditions"].values())
    assert estimate.assumptions == ASSUMPTIONS


@pytest.mark.parametrize("tolerance", [0.3, 10.0])
def test_too_small_a_margin_is_named_and_the_remedy_works(tolerance: float) -> None:
    truth = a_head(7)
    error = refusal(attacked(truth, tolerance, uniform(1), max_norm=1.0))
    assert error.outcome is Outcome.TOO_NOISY
    assert "margin condition" in str(error)
    words = str(error).replace(",", "").split()
    least, longest = (float(words[words.index(word) + 4]) for word in ("tolerance", "max_norm"))
    if tolerance < 1:  # beyond, the value itself does not show, and what it takes is a guess
        recovered(attacked(truth, 0.9 * least, uniform(1), max_norm=1.0))
        recovered(attacked(truth, tolerance, uniform(1), max_norm=1.2 * longest))
    nothing = kh.SingleHead(truth.score, 0 * truth.value)
    assert refusal(attacked(nothing, 1e-3, uniform(1), max_norm=1.0)).outcome is Outcome.TOO_NOISY


def test_what_never_leaves_saturation_is_named() -> None:
    head = a_head(8)
    hard = t.hard_attention(np.random.default_rng(0), 8, NUMPY)
    error = refusal(kh.FunctionOracle(hard, 8, 1.0, noise=Noise.bounded(1e-4)))
    assert error.outcome in (Outcome.SATURATED, Outcome.WRONG_FAMILY)
    assert refusal(attacked(head, 1e-4, uniform(0), max_norm=1.0, max_length=1)).outcome is Outcome.NOT_IDENTIFIABLE


@pytest.mark.parametrize("copies", [0, 2.5, True])
def test_copies_are_a_whole_number(copies: Any) -> None:
    with pytest.raises(UsageError, match="copies"):
        kh.recover(attacked(a_head(0), 1e-4, uniform(0)), "robust", copies=copies)


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("box", [t.two_heads, t.residual, t.positional, t.normed_tokens, t.relu_net, t.mean_and_square])
def test_other_families_are_refused(box: Any, max_norm: float | None) -> None:
    made = box(np.random.default_rng(0), 8, NUMPY)
    oracle = kh.FunctionOracle(made, 8, max_norm, noise=Noise.bounded(1e-4))
    assert refusal(oracle).outcome is Outcome.WRONG_FAMILY


def test_free_norms_show_a_second_head_that_the_tolerance_hides() -> None:
    made = t.faint_second_head(np.random.default_rng(0), 8, NUMPY)
    error = refusal(kh.FunctionOracle(made, 8, noise=Noise.bounded(1e-4)))
    assert error.outcome is Outcome.WRONG_FAMILY
    assert "random tokens" in str(error)


# --- biases --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("max_length", [None, 2])
@pytest.mark.parametrize("kind", ["output", "score", "large score"])
def test_biases_that_show_are_refused(kind: str, max_length: int | None, max_norm: float | None) -> None:
    bias = t.bias(np.random.default_rng(0), 8, 0.3 if kind == "score" else 300.0)
    facts: dict[str, Any] = {"output_bias": 3e-4} if kind == "output" else {"score_bias": bias}
    oracle = attacked(a_head(9, **facts), 1e-4, uniform(0), max_norm=max_norm, max_length=max_length)
    for cover in (False, True):
        error = refusal(oracle, cover_biases=cover)
        assert error.outcome is Outcome.WRONG_FAMILY
        assert "bias" in str(error)


def test_biases_that_hide_can_be_covered(fixed_seed: int) -> None:
    for seed in range(fixed_seed, fixed_seed + 8):
        rng = np.random.default_rng(seed)
        tolerance, hidden = 1e-4, t.bias(rng, 8, 1e-4 * rng.uniform(0, 0.5))
        truth = a_head(seed, score_bias=hidden, output_bias=np.asarray(rng.uniform(-1, 1) * tolerance))
        # Errors that make the bias of the output hide.
        errors = lambda tokens, answers, at=truth: np.full(answers.shape, -0.9 * np.sign(at.output_bias))  # noqa: E731
        estimate, session = recovered(attacked(truth, tolerance, errors, max_norm=1.0), cover_biases=True)
        assert t.misses(estimate.params, truth, estimate.radius) == {}, seed
        assert estimate.assumptions == ASSUMPTIONS_COVERED
        assert session.stages[0, "score bias"] == 9
        assert np.mean(estimate.radius.score) <= 9 * estimate.details["floor"]


# --- the parts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [PairLayout(1, 0), PairLayout(1, 1), PairLayout(16, 16), PairLayout(3, 2)])
def test_logits_are_within_their_interval(layout: PairLayout, fresh_seed: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    n = 4000
    logit, own, first = rng.normal(size=n), rng.normal(size=n), rng.uniform(0.5, 2.0, n)
    last = rng.uniform(-1, 1, n) * first
    errors = [10 ** rng.uniform(-12, -2, n) for _ in range(4)]
    up, down, rest = layout.plus * np.exp(logit), layout.minus * np.exp(-logit), np.exp(own)
    exact = ((first * (up - down) + last * rest) / (up + down + rest), own, first, last)
    given = [Interval.around(a + rng.uniform(-1, 1, n) * e, e) for a, e in zip(exact, errors, strict=True)]
    found = layout.logit(*given)
    assert np.all((found.low <= logit) & (logit <= found.high))
    sharp = layout.logit(*(Interval.around(a, 0.0) for a in exact))
    assert np.median(sharp.radius) <= 1e-13
    beyond = layout.logit(*(Interval.around(a, 0.0) for a in (first, own, first, last)))
    assert np.all(np.isinf(beyond.size))


def test_rows_lean_on_the_value_at_the_best_angle() -> None:
    rng = np.random.default_rng(0)
    for width in (1, 2, 5, 30):
        direction = rng.standard_normal(width)
        direction /= np.linalg.norm(direction)
        part, height, shorter = leaning_rows(direction)
        vectors = part[:, None] * direction + np.tile(np.eye(width), (2, 1)) * height[:, None]
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-9)
        overlap = (vectors @ direction)[:width]
        assert np.all(overlap >= 1 / np.sqrt(3) - 1e-9)
        cost = 1 / np.abs(height[:width]) / overlap + np.abs(part / height)[:width]
        assert np.all(cost <= 2 * np.sqrt(2) + 1e-9)
        steep = slice(width, 2 * width)
        factor = shorter / np.abs(height[steep]) + np.abs(part / height)[steep]
        assert np.all(factor <= 0.9)
