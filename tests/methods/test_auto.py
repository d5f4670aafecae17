"""The method `auto`: what it asks beyond the right method, what it does about noise, which methods it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from benchmarks.tables.auto import CASES, QUERIES, SHARE, measure
from keyhole.methods import METHODS, Estimate, Method, Steps
from keyhole.methods.attempt import Ledger, Task, attempt
from keyhole.oracles import Cast, Counted, Noisy, Oracle, Rounded, Wrapper
from keyhole.queries import Plan, Signature, Term, TokenRows, sequences
from keyhole.targets import open_target


def undeclared(oracle: Oracle) -> Oracle:
    return Wrapper(oracle, oracle.signature.with_changes(noise=kh.Noise.exact()))


def head(seed: int, width: int = 8, **options: Any) -> kh.SingleHead:
    rng = np.random.default_rng(seed)
    return kh.SingleHead(rng.standard_normal((width, width)) / width**0.5, rng.standard_normal(width), **options)


@pytest.mark.parametrize("name", CASES)
def test_auto_asks_little_more_than_the_right_method(name: str) -> None:
    right, auto, certified, found, good = measure(name, 0)
    assert certified
    assert found
    assert good
    assert auto <= (1 + SHARE) * right + QUERIES


@pytest.mark.parametrize("kind", ["single-head", "multi-head", "relu-net", "one-layer"])
def test_a_resumed_run_of_auto_asks_nothing_twice(kind: str, tmp_path: Any) -> None:
    def oracle() -> Counted:
        return Counted(open_target(f"demo:{kind}?width=6&seed=3").oracle)

    whole = oracle()
    result = kh.recover(whole)
    first, second = oracle(), oracle()
    stopped = kh.recover(first, journal=tmp_path / "j", budget=result.stats.queries // 2, throw=False)
    assert stopped.outcome is kh.Outcome.BUDGET_EXHAUSTED
    resumed = kh.recover(second, journal=tmp_path / "j")
    assert first.queries + second.queries == whole.queries
    assert resumed.stats.stages == result.stats.stages


# --- noise that nobody declared


@pytest.mark.parametrize("limits", [{}, {"max_norm": 1.0}])
@pytest.mark.parametrize(
    ("wrap", "kind"),
    [
        (lambda oracle: Rounded(oracle, 4), "rounded to 4 decimals"),
        (lambda oracle: Cast(oracle, "float32"), "rounded to float32"),
        (lambda oracle: Noisy(oracle, 1e-3), "normal errors"),
    ],
)
def test_noise_is_found_allowed_for_and_named(wrap: Any, kind: str, limits: dict[str, Any]) -> None:
    truth = head(1)
    oracle = undeclared(wrap(kh.FunctionOracle(truth, width=8, **limits)))
    result = kh.recover(oracle)
    assert result.method == "robust"
    assert kind in result.stats.details["noise"]
    assert any(kind in assumption for assumption in result.certificate.assumptions)
    for name, array in truth.arrays().items():
        error = np.abs(np.asarray(getattr(result.params, name)) - array)
        assert np.all(error <= np.asarray(getattr(result.certificate.radius, name)))


@pytest.mark.parametrize("limits", [{}, {"max_norm": 100.0}])
def test_noise_too_small_for_the_first_queries_is_measured_too(limits: dict[str, Any]) -> None:
    truth = head(2)
    result = kh.recover(undeclared(Noisy(kh.FunctionOracle(truth, width=8, **limits), 1e-9)))
    assert "normal errors" in result.stats.details["noise"]
    assert kh.distance(result.params, truth) < 1e-6


def test_a_named_method_allows_for_rounding_that_shows_in_the_digits() -> None:
    oracle = undeclared(Cast(kh.FunctionOracle(head(3), width=8), "float32"))
    result = kh.recover(oracle, "single-head", throw=False)
    assert result.stats.details["noise"] == "rounded to float32"
    rounded = kh.recover(undeclared(Rounded(kh.FunctionOracle(head(3), width=8), 3)), "single-head", throw=False)
    assert rounded.certified or "--noise cut:3" in rounded.message


@pytest.mark.parametrize(
    "text", ["exact", "measure", "gaussian:0.001", "bounded:0.25", "rounded:-2", "cut:3", "float16"]
)
def test_the_text_of_noise_is_what_is_read(text: str) -> None:
    assert kh.Noise.parse(text).text == text


# --- methods are taken by what they declare


def last_value(signature: Signature, rng: np.random.Generator) -> Steps[Estimate]:
    """The value of f(X) = x_N·v from as many queries as it has numbers."""
    del rng
    space, width = signature.space, signature.width
    answers = yield Plan("value", width, [[Term(TokenRows(space.eye(width)))]])
    radius = 1e-12 * np.ones(width)
    return Estimate(last_token(answers.values), last_token(radius), counting_bound=width)


def last_token(value: Any) -> kh.ReluNet:
    """f(X) = x_N·v, as a net without neurons."""
    return kh.ReluNet(np.zeros((0, len(value))), np.zeros(0), np.zeros((1, 0)), np.zeros(1), np.asarray(value)[None])


@pytest.fixture
def added() -> Iterator[Method]:
    method = Method("last-value", "a linear map of the last token", last_value, families=("relu-net",))
    others = dict(METHODS)
    METHODS.clear()
    METHODS.update({method.name: method, **others})  # of two methods for a family the first is tried first
    yield method
    del METHODS[method.name]


def test_an_added_method_is_considered_from_its_declaration(added: Method) -> None:
    value = np.arange(1.0, 9.0)
    oracle = kh.FunctionOracle(lambda tokens: tokens[:, -1, :] @ value, width=8)
    result = kh.recover(oracle, throw=False)
    assert result.method == added.name
    assert result.stats.stages["value"] > 0


def test_an_option_chooses_among_the_methods_that_have_it() -> None:
    oracle = kh.FunctionOracle(head(4), width=8)
    assert kh.recover(oracle, tolerance=1e-6).method == "low-rank"
    assert kh.recover(oracle, entrywise=True).method == "single-head"
    with pytest.raises(kh.KeyholeError, match="no option 'nonsense'"):
        kh.recover(oracle, nonsense=1)


def test_answers_of_a_first_attempt_serve_the_next() -> None:
    """Sequences of three tokens are too short to tell two heads from one before the certificate does."""
    rng = np.random.default_rng(0)
    heads = [kh.SingleHead(rng.standard_normal((4, 4)), rng.standard_normal((4, 4))) for _ in range(2)]
    counted = Counted(kh.FunctionOracle(kh.MultiHead(heads), width=4, max_length=3))
    result = kh.recover(counted, throw=False)
    stats = result.stats
    assert counted.queries == stats.queries + stats.heldout_queries == stats.new_queries
    assert stats.stages.get("value", 0) <= 5


def test_an_attempt_counts_what_it_may_spend() -> None:
    """The budget of a method is what the certificate leaves it."""
    seen = []

    def run(signature: Signature, rng: np.random.Generator, *, budget: float) -> Steps[Estimate]:
        seen.append(budget)
        yield sequences("asks", signature.space.asarray(rng.standard_normal((2, 1, signature.width))))
        raise AssertionError

    method = Method("greedy", "asks", run, takes_noise=("exact", "gaussian"))
    next(attempt(method, Task(Signature(width=2), heldout=7, budget=50), Ledger(50)))
    assert seen == [43]


# --- what a reviewer broke


@pytest.mark.parametrize("seed", range(40))
def test_decimals_are_not_read_from_few_answers_that_end_in_zero(seed: int) -> None:
    """Of two answers rounded to three decimals, one in a hundred pairs ends in 0 twice."""
    truth = head(seed, width=4)
    result = kh.recover(kh.FunctionOracle(lambda tokens: np.round(truth(tokens), 3), width=4), throw=False)
    assert result.stats.details["noise"].startswith("rounded to 3 decimals")


def test_heads_that_look_alike_behind_rounding_are_not_certified_as_one_by_a_unit_too_coarse() -> None:
    rng = np.random.default_rng(2)
    score, value = rng.standard_normal((16, 16)), rng.standard_normal(16)
    first = kh.SingleHead(score + 0.06 * rng.standard_normal((16, 16)), value)
    heads = kh.MultiHead([first, kh.SingleHead(score, 1.1 * value)])
    result = kh.recover(kh.FunctionOracle(lambda tokens: np.round(heads(tokens), 3), width=16), throw=False)
    assert not result.certified


@pytest.mark.parametrize("seed", range(3))
def test_small_relative_noise_of_a_net_is_no_wrong_use(seed: int) -> None:
    rng, noise = np.random.default_rng(seed), np.random.default_rng(0)
    net = kh.ReluNet(rng.standard_normal((1, 5)), rng.standard_normal(1), rng.standard_normal(1), np.asarray(0.3))
    oracle = kh.FunctionOracle(lambda x: net(x) * (1 + 1e-10 * noise.standard_normal(len(x))), width=5)
    result = kh.recover(oracle, throw=False, budget=4000)
    assert "normal errors" in result.stats.details["noise"]
    assert not result.certified or kh.distance(result.params, net) < 1e-6


def test_a_constant_is_not_taken_for_rounding() -> None:
    result = kh.recover(kh.FunctionOracle(lambda tokens: np.full(len(tokens), 2.5), width=4), throw=False)
    assert result.outcome is kh.Outcome.NOT_IDENTIFIABLE


def test_a_function_may_answer_in_the_same_memory_every_time() -> None:
    truth, memory = head(5), np.empty(10**5)

    def answer(tokens: Any) -> Any:
        memory[: len(tokens)] = truth(tokens)
        return memory[: len(tokens)]

    assert kh.distance(kh.recover(kh.FunctionOracle(answer, width=8)).params, truth) < 1e-12


def test_a_wrong_activation_is_wrong_use() -> None:
    net = open_target("demo:relu-net?width=3&neurons=2").oracle
    with pytest.raises(kh.KeyholeError, match="activation must be"):
        kh.recover(net, "relu-net", activation="nonsense")


@pytest.mark.parametrize("declared", [None, "float32"])
def test_a_forward_pass_in_float32_is_read_by_its_digits(declared: str | None) -> None:
    rng = np.random.default_rng(3)
    score, value = rng.standard_normal((5, 5)).astype(np.float32), rng.standard_normal(5).astype(np.float32)

    def box(tokens: Any) -> Any:
        x = np.asarray(tokens, np.float32)
        logits = np.einsum("bnd,de,be->bn", x, score, x[:, -1])
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.einsum("bn,bn->b", weights / weights.sum(axis=1, keepdims=True), x @ value).astype(float)

    noise = None if declared is None else kh.Noise.parse(declared)
    result = kh.recover(kh.FunctionOracle(box, width=5, noise=noise), throw=False)
    assert result.certified, result.message
    assert np.max(np.abs(result.params.score - score)) <= 1e-3


@pytest.mark.parametrize("seed", [15, 16])
def test_a_layer_that_computes_in_float32_is_of_no_other_family(seed: int) -> None:
    rng, width, neurons = np.random.default_rng(seed), 4, 4
    matrices = rng.standard_normal((2, width, width)).astype(np.float32)
    weights = rng.standard_normal((neurons, width)).astype(np.float32), *rng.standard_normal((2, neurons)).astype("f4")
    layer = kh.OneLayer(kh.SingleHead(*matrices), kh.ReluNet(*weights, np.asarray(0.3, np.float32)))
    oracle = kh.FunctionOracle(lambda tokens: np.asarray(layer(np.asarray(tokens, np.float32)), float), width=width)
    assert kh.recover(oracle, seed=seed, throw=False).outcome is kh.Outcome.TOO_NOISY


@pytest.mark.parametrize(("noise", "error"), [("exact", 1e-8), ("bounded:1e-6", 1e-4), ("gaussian:1e-6", 1e-4)])
@pytest.mark.parametrize("max_norm", [None, 3.0])
def test_values_that_cancel_in_single_tokens_are_those_of_several_heads(
    noise: str, error: float, max_norm: float | None
) -> None:
    rng = np.random.default_rng(0)
    value, declared = rng.standard_normal(4), kh.Noise.parse(noise)
    heads = [kh.SingleHead(rng.standard_normal((4, 4)), sign * value) for sign in (1.0, -1.0)]
    truth = kh.MultiHead(heads)

    def answer(tokens: Any) -> Any:
        return truth(tokens) + declared.scale * rng.uniform(-1.0, 1.0, len(tokens))

    result = kh.recover(kh.FunctionOracle(answer, width=4, noise=declared, max_norm=max_norm), throw=False)
    assert result.certified, result.message
    assert kh.distance(result.params, truth) <= error


@pytest.mark.parametrize(("left", "certified"), [(1, False), (31, False), (64, True)])
def test_a_few_held_out_queries_that_a_budget_leaves_certify_nothing(left: int, certified: bool) -> None:
    oracle = kh.FunctionOracle(head(4), width=8)
    needed = kh.recover(oracle).stats.queries
    result = kh.recover(oracle, budget=needed + left, throw=False)
    assert (result.certified, result.stats.heldout_queries) == (certified, left)
    assert certified or "budget left" in result.message


def test_nets_whose_kinks_cut_off_little_of_a_ball_are_tried_after_heads() -> None:
    """Single tokens look affine to the first queries, so that a head or a linear map is taken for it at first."""
    rng = np.random.default_rng(6)
    weights = rng.standard_normal((2, 4))
    weights /= np.linalg.norm(weights, axis=1, keepdims=True)
    net = kh.ReluNet(weights, np.full(2, -0.55), np.array([1.0, -2.0]), np.asarray(0.3), skip=rng.standard_normal(4))
    layer = kh.OneLayer(kh.SingleHead(rng.standard_normal((4, 4)), np.eye(4)), net)
    for seed, truth in enumerate((net, layer)):
        result = kh.recover(kh.FunctionOracle(truth, width=4, max_norm=1.0), seed=seed, throw=False)
        tokens = rng.standard_normal((500, 3, 4))
        tokens *= 0.9 / np.linalg.norm(tokens, axis=2, keepdims=True)
        assert result.certified, result.message
        assert np.max(np.abs(result.params(tokens) - truth(tokens))) < 1e-6


@pytest.mark.parametrize("noise", ["gaussian:0.001", "bounded:0.001", "rounded:3", "bfloat16"])
def test_no_member_is_called_another_family_because_of_known_noise(noise: str) -> None:
    rng = np.random.default_rng(0)
    heads = kh.MultiHead([kh.SingleHead(rng.standard_normal((4, 4)), rng.standard_normal((4, 4))) for _ in range(2)])
    inner = kh.FunctionOracle(heads, width=4)
    wrapped = {
        "gaussian": lambda: Noisy(inner, 1e-3),
        "bounded": lambda: Rounded(inner, 3, declared=False),
        "rounded": lambda: Rounded(inner, 3),
        "bfloat16": lambda: Cast(inner, "bfloat16"),
    }[noise.partition(":")[0]]()
    wrapped.signature = wrapped.signature.with_changes(noise=kh.Noise.parse(noise))
    result = kh.recover(wrapped, throw=False)
    assert result.certified or result.outcome is not kh.Outcome.WRONG_FAMILY


@pytest.mark.parametrize("seed", range(3))
def test_slight_errors_that_repeat_are_measured_once_a_method_was_contradicted(seed: int) -> None:
    truth = head(seed, width=4)
    oracle = kh.FunctionOracle(lambda x: truth(x) + 1e-9 * np.sin(1e12 * truth(x)), width=4)
    result = kh.recover(oracle, throw=False)
    assert result.certified
    assert "errors of at most" in result.stats.details["noise"]


@pytest.mark.parametrize("decimals", [10, 11, 12])
def test_decimals_that_only_small_answers_show_are_allowed_for(decimals: int) -> None:
    truth = head(5, width=4)
    result = kh.recover(kh.FunctionOracle(lambda x: np.round(truth(x), decimals), width=4), throw=False)
    assert result.certified
    for name, array in truth.arrays().items():
        error = np.abs(np.asarray(getattr(result.params, name)) - array)
        assert np.all(error <= np.asarray(getattr(result.certificate.radius, name)))


def test_bends_over_very_short_lengths_are_no_errors_and_errors_beside_a_net_are_measured() -> None:
    """Errors are measured last: neurons that bend quickly look like them; those of a net are read behind them."""
    rng = np.random.default_rng(60007)
    inner, outer = rng.standard_normal((3, 4)), rng.standard_normal(3)
    quick = kh.ReluNet(1e3 * inner, rng.standard_normal(3), outer, np.zeros(()), activation="silu")
    assert kh.recover(kh.FunctionOracle(quick, width=4), throw=False).certified
    net = kh.ReluNet(inner, rng.standard_normal(3), outer, np.zeros(()))
    erring = kh.FunctionOracle(lambda x: net(x) + 1e-7 * np.sin(1e12 * net(x)), width=4)
    result = kh.recover(erring, throw=False)
    assert result.certified
    assert "errors of at most" in result.stats.details["noise"]


def test_answers_that_differ_by_more_than_numbers_hold_are_an_outcome() -> None:
    rng = np.random.default_rng(0)
    oracle = kh.FunctionOracle(lambda tokens: 1e200 * rng.standard_normal(len(tokens)), width=3)
    assert kh.recover(oracle, throw=False).outcome is kh.Outcome.TOO_NOISY


@pytest.mark.parametrize("decimals", [None, 4])
def test_an_affine_map_of_the_last_token_is_a_net_without_neurons(decimals: int | None) -> None:
    rng = np.random.default_rng(3)
    slope, constant = rng.standard_normal((5, 2)), rng.standard_normal(2)

    def answer(tokens: np.ndarray) -> np.ndarray:
        answers = tokens[:, -1] @ slope + constant
        return answers if decimals is None else np.round(answers, decimals)

    result = kh.recover(kh.FunctionOracle(answer, width=5), throw=False)
    assert result.certified, result.message
    tokens = rng.standard_normal((10, 3, 5))
    error = np.max(np.abs(result.params(tokens) - tokens[:, -1] @ slope - constant))
    assert error < (1e-12 if decimals is None else 1e-3)


@pytest.mark.parametrize("residual", [False, True])
def test_a_layer_whose_only_kink_is_far_out_is_read(residual: bool) -> None:
    """Single tokens of usual norms are answered by an affine map, or all alike."""
    rng = np.random.default_rng(3)
    net = kh.ReluNet(rng.standard_normal((1, 3)), np.array([-1e4]), np.array([1.0]), np.asarray(0.5))
    truth = kh.OneLayer(kh.SingleHead(rng.standard_normal((3, 3)), rng.standard_normal((3, 3))), net, residual)
    result = kh.recover(kh.FunctionOracle(truth, width=3), throw=False)
    assert result.certified, result.message
    assert result.params.ffn.neurons == 1
    tokens = 1e5 * rng.standard_normal((50, 1, 3))
    np.testing.assert_allclose(result.params(tokens), truth(tokens), rtol=1e-9)


def test_an_affine_way_past_a_head_is_read() -> None:
    """The last token passes by another map than the identity: a layer whose net has a skip and no neurons."""
    rng = np.random.default_rng(4)
    value, past, score = rng.standard_normal((3, 4, 4))
    head = kh.SingleHead(score, value)

    def box(tokens: np.ndarray) -> np.ndarray:
        return np.asarray(head(tokens) + tokens[:, -1] @ past)

    result = kh.recover(kh.FunctionOracle(box, width=4), throw=False)
    assert result.certified, result.message
    tokens = rng.standard_normal((50, 5, 4))
    np.testing.assert_allclose(result.params(tokens), box(tokens), atol=1e-9)
