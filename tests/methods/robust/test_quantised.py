"""Quantised answers: rounded to decimals, rounded to a dtype, and weights that are stored in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import Space
from keyhole.errors import UsageError
from keyhole.methods import Estimate, Method, Steps, Unrecoverable
from keyhole.methods.certificate import certify
from keyhole.methods.robust.dtypes import GRIDS, grid_of
from keyhole.methods.robust.method import ROBUST
from keyhole.methods.robust.quantised.method import by_null_queries, by_thresholds
from keyhole.methods.robust.stored_bits import bit_exact
from keyhole.noise import Noise
from keyhole.oracles import Cast, Oracle, Rounded
from keyhole.queries import Signature
from keyhole.recovery import Outcome
from keyhole.session import Session
from support import targets as t

THRESHOLDS = Method("thresholds", "rounded to decimals", by_thresholds, takes_noise=("rounded", "dtype"))
NULL = Method("null", "rounded to a dtype", by_null_queries, takes_noise=("rounded", "dtype"))
Floats = t.Floats


def judged(
    method: Method, oracle: Oracle, seed: int = 0, budget: float = np.inf, **options: Any
) -> tuple[Outcome, Estimate | None, int, str]:
    """What `recover` does: the method, then the certificate."""
    session = Session(oracle)
    with np.errstate(all="ignore"):
        try:
            estimate = session.run(
                method.steps(session.signature, np.random.default_rng(seed), budget=budget, **options)
            )
        except Unrecoverable as error:
            return error.outcome, None, session.queries, str(error)
        queries = session.queries
        judgement = session.run(certify(estimate, session.signature, np.random.default_rng(seed + 1), 32))
    return judgement.outcome, estimate, queries, judgement.message


def covered(estimate: Estimate, truth: kh.SingleHead) -> bool:
    """Right within its radii: these methods claim that, certified or not."""
    misses = t.misses(estimate.params, truth, estimate.radius)
    assert not misses, f"outside the radius by so many radii: {misses}"
    return True


def rms(estimate: Estimate, truth: kh.SingleHead) -> float:
    return float(np.sqrt(np.mean((t.plain(estimate.params).score - t.plain(truth).score) ** 2)))


def unit(rng: np.random.Generator, d: int) -> Floats:
    value = rng.standard_normal(d)
    return value / np.linalg.norm(value)


def box(
    like: Any, score: Floats, value: Floats, max_norm: float | None = None, **options: Any
) -> tuple[kh.SingleHead, Oracle]:
    space = Space.of(like)
    biases = {name: options.pop(name, None) for name in ("score_bias", "output_bias")}
    truth = t.head_in(space, score, value, **biases)
    return truth, kh.FunctionOracle(truth, width=len(score), max_norm=max_norm, like=like, **options)


SCORES: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "gaussian": t.gaussian,
    "entries": lambda rng, d: rng.standard_normal((d, d)) / d**0.5,
    "large": lambda rng, d: t.gaussian(rng, d, 100.0),
    "small": lambda rng, d: t.gaussian(rng, d, 1e-3),
    "cauchy": t.cauchy,
    "zero": lambda rng, d: np.zeros((d, d)),
    "single": t.single_entry,
}


def drawn(seed: int) -> tuple[np.random.Generator, int, Floats, Floats]:
    rng = np.random.default_rng([seed, 5])
    d = int(rng.integers(1, 9))
    score = SCORES[str(rng.choice(list(SCORES)))](rng, d)
    value = t.one_hot(rng, d) if rng.random() < 0.2 else rng.standard_normal(d)
    if rng.random() < 0.2:
        value[rng.random(d) < 0.5] = 0.0
        value[rng.integers(d)] = 1.0
    return rng, d, score, value


# --- rounded to decimals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["entries", "gaussian"])
def test_thresholds_beat_rounding(norm: str) -> None:
    d, rng = 32, np.random.default_rng(1)
    truth, oracle = box(np.zeros(1), SCORES[norm](rng, d), unit(rng, d), 1.0)
    outcome, estimate, queries, _ = judged(THRESHOLDS, Rounded(oracle, 3), target_error=1e-6)
    assert estimate is not None
    assert covered(estimate, truth)
    assert rms(estimate, truth) <= 1e-6
    assert queries <= 12 * estimate.counting_bound
    assert outcome is Outcome.CERTIFIED


def test_thresholds_keep_to_a_budget(rng: np.random.Generator) -> None:
    d = 12
    truth, oracle = box(np.zeros(1), SCORES["entries"](rng, d), unit(rng, d), 1.0)
    errors = []
    for times in (3, 6, 12):
        _, estimate, queries, _ = judged(THRESHOLDS, Rounded(oracle, 3), budget=times * (d * d + d))
        assert estimate is not None
        assert covered(estimate, truth)
        assert 0.9 * times * (d * d + d) <= queries <= times * (d * d + d)
        errors.append(rms(estimate, truth))
    assert errors[2] < errors[1] / 8 < errors[0] / 16


def test_thresholds_for_fresh_seeds(like: Any, fresh_seed: int) -> None:
    fixed, certified = range(8), set[int]()
    for seed in [*fixed, *range(fresh_seed, fresh_seed + 7)]:
        rng, _, score, value = drawn(seed)
        length = [None, 3, 4, 9][int(rng.integers(4))]
        truth, oracle = box(like, score, value, 10 ** rng.uniform(-1, 1), max_length=length)
        target = [None, 1e-3, 1e-6][int(rng.integers(3))]
        decimals = int(rng.integers(1, 6))
        outcome, estimate, _, _ = judged(THRESHOLDS, Rounded(oracle, decimals), seed, target_error=target)
        certified |= {seed} if outcome is Outcome.CERTIFIED else set()
        assert outcome in {Outcome.CERTIFIED, Outcome.UNCERTIFIED, Outcome.TOO_NOISY}
        assert estimate is None or covered(estimate, truth)
    # Of 1 most answers are zero at its one decimal, and 2 has no score: attention need not show in either.
    assert certified >= set(fixed) - {1, 2}


@pytest.mark.parametrize(
    ("method", "wrap"), [(THRESHOLDS, lambda o: Rounded(o, 3)), (NULL, lambda o: Cast(o, "float16"))]
)
def test_a_target_below_all_arithmetic_is_said_to_be_missed(
    method: Method, wrap: Any, rng: np.random.Generator
) -> None:
    _, oracle = box(np.zeros(1), SCORES["entries"](rng, 6), unit(rng, 6), 1.0)
    _, estimate, _, _ = judged(method, wrap(oracle), target_error=1e-20)
    assert estimate is not None
    assert estimate.details["target_reached"] is False
    assert estimate.details["expected_error"] > 1e-20


# --- rounded to a dtype ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [1.0, None])
def test_null_queries_multiply_digits(max_norm: float | None) -> None:
    d, rng = 32, np.random.default_rng(2)
    truth, oracle = box(np.zeros(1), SCORES["entries"](rng, d), unit(rng, d), max_norm)
    bound, errors = d * d + d, []
    for rounds in (1, 2, 3, 5):
        outcome, estimate, queries, _ = judged(NULL, Cast(oracle, "bfloat16"), budget=(rounds + 0.3) * bound)
        assert estimate is not None
        assert covered(estimate, truth)
        assert estimate.details["rounds"] == rounds
        assert queries <= (rounds + 0.3) * bound
        errors.append(rms(estimate, truth))
    assert errors[0] < 3e-3
    assert errors[1] < 1e-5
    assert errors[2] < 1e-8
    assert errors[3] < 1e-13
    assert outcome is Outcome.CERTIFIED


def test_null_queries_stop_at_the_target(rng: np.random.Generator) -> None:
    truth, oracle = box(np.zeros(1), SCORES["entries"](rng, 8), unit(rng, 8), 1.0)
    few, many = (judged(NULL, Cast(oracle, "bfloat16"), target_error=target) for target in (1e-4, 1e-10))
    assert few[2] < many[2]
    for _, estimate, _, _ in (few, many):
        assert estimate is not None
        assert covered(estimate, truth)
        assert estimate.details["target_reached"]
    assert rms(many[1], truth) < 1e-10  # type: ignore[arg-type]


def test_null_queries_for_fresh_seeds(like: Any, fresh_seed: int) -> None:
    fixed, certified = range(10), 0
    for seed in [*fixed, *range(fresh_seed, fresh_seed + 10)]:
        rng, _, score, value = drawn(seed)
        limit = None if rng.random() < 0.4 else 10 ** rng.uniform(-1, 2)
        truth, oracle = box(like, score, value, limit, max_length=[None, 3][int(rng.integers(2))])
        dtype = str(rng.choice(list(GRIDS)))
        outcome, estimate, _, _ = judged(NULL, Cast(oracle, dtype), seed)
        certified += outcome is Outcome.CERTIFIED and seed in fixed
        assert outcome in {Outcome.CERTIFIED, Outcome.UNCERTIFIED}
        assert estimate is not None
        assert covered(estimate, truth)
    assert certified >= 9  # of ten fixed seeds


class Half(Rounded):
    """A box that answers in real half precision, which has no numbers below 2⁻²⁴ or above 65504."""

    def __init__(self, inner: Oracle) -> None:
        super().__init__(inner, 3)
        self.signature = inner.signature.with_changes(noise=Noise.dtype("float16"))

    def answer(self, tokens: Any) -> Any:
        return np.asarray(self.inner(tokens)).astype(np.float16).astype(np.float64)


@pytest.mark.parametrize("max_norm", [1.0, None])
def test_half_precision_that_underflows(max_norm: float | None, rng: np.random.Generator) -> None:
    truth, oracle = box(np.zeros(1), SCORES["entries"](rng, 8), rng.standard_normal(8), max_norm)
    outcome, estimate, _, _ = judged(NULL, Half(oracle))
    assert outcome is Outcome.CERTIFIED
    assert estimate is not None
    assert covered(estimate, truth)
    assert rms(estimate, truth) < 1e-6


# --- weights stored in a dtype -----------------------------------------------------------------------------------


def stored(array: Floats, dtype: str) -> Floats:
    """The nearest numbers of the dtype."""
    spacing = grid_of(dtype).spacing(array)
    return np.clip(np.round(array / spacing) * spacing, -grid_of(dtype).largest, grid_of(dtype).largest)


def every_bit(signature: Signature, rng: np.random.Generator, budget: float, dtype: str) -> Steps[Estimate]:
    return bit_exact(signature, rng, dtype=dtype)


BITS = Method("bits", "every bit", every_bit, takes_noise=("rounded", "dtype"))


def same_bits(estimate: Estimate, truth: kh.SingleHead) -> bool:
    found, right = t.plain(estimate.params), t.plain(truth)
    return bool(np.array_equal(found.score, right.score) and np.array_equal(found.value, right.value))


@pytest.mark.parametrize("dtype", GRIDS)
def test_every_bit(dtype: str, like: Any) -> None:
    for seed in range(5):
        d, rng = 32, np.random.default_rng(seed)
        score, value = stored(SCORES["entries"](rng, d), dtype), stored(rng.standard_normal(d), dtype)
        truth, oracle = box(like, score, value)
        outcome, estimate, queries, _ = judged(BITS, oracle, seed, dtype=dtype)
        assert outcome is Outcome.CERTIFIED
        assert estimate is not None
        assert same_bits(estimate, truth)
        assert queries <= 1.01 * estimate.counting_bound


@pytest.mark.parametrize("dtype", GRIDS)
def test_every_bit_of_sparse_and_graded_heads(dtype: str, fresh_seed: int) -> None:
    """Over the whole range of the dtype: read with the seeds at hand, read or admitted with any."""
    for seed in [*range(20), *range(fresh_seed, fresh_seed + 20)]:
        rng, _, score, value = drawn(seed)
        low, high = np.log10(grid_of(dtype).smallest), np.log10(grid_of(dtype).largest)
        if rng.random() < 0.5:
            score = score * 10 ** rng.uniform(low, high - 1, score.shape)
            value = value * 10 ** rng.uniform(low, high - 1, value.shape)
        score, value = (stored(array * (rng.random(array.shape) < 0.7), dtype) for array in (score, value))
        truth, oracle = box(np.zeros(1), score, value, max_length=[None, 2][int(rng.integers(2))])
        outcome, estimate, _, _ = judged(BITS, oracle, seed, dtype=dtype)
        if not value.any():
            assert outcome is Outcome.NOT_IDENTIFIABLE
            continue
        if seed >= 20 and outcome is not Outcome.CERTIFIED:
            continue
        assert estimate is not None
        assert same_bits(estimate, truth)
        assert not t.plain(estimate.radius).score.any()


def test_weights_of_another_dtype_are_no_bits(rng: np.random.Generator) -> None:
    _, oracle = box(np.zeros(1), stored(rng.standard_normal((6, 6)), "float32"), stored(unit(rng, 6), "bfloat16"))
    outcome, _, _, message = judged(BITS, oracle, dtype="bfloat16")
    assert outcome is Outcome.WRONG_FAMILY
    assert "not stored in bfloat16" in message
    assert judged(BITS, oracle, dtype="float32")[0] is Outcome.CERTIFIED


@pytest.mark.parametrize("dtype", GRIDS)
def test_the_numbers_of_a_dtype(dtype: str) -> None:
    grid, names = grid_of(dtype), {"float32": np.float32, "float16": np.float16}
    one = np.array([1.0, grid.smallest, 0.0, grid.largest])
    first, last = grid.within(one, 0 * one)
    assert np.array_equal(first, one)
    assert np.array_equal(last, one)
    first, last = grid.within(np.array([0.0]), np.array([0.9 * grid.smallest]))  # a zero is proven
    assert first == last == 0
    first, last = grid.within(np.array([0.0]), np.array([1.1 * grid.smallest]))  # a subnormal number is possible
    assert first < last
    first, last = grid.within(np.array([2.0 * grid.largest]), np.array([1.0]))
    assert first > last
    if dtype in names:
        info = np.finfo(names[dtype])
        assert (grid.smallest, grid.largest) == (float(info.smallest_subnormal), float(info.max))


# --- all three -----------------------------------------------------------------------------------------------------

Wrap = Callable[[Oracle], Oracle]
PATHS: dict[str, tuple[Method, Wrap, float | None, dict[str, Any]]] = {
    "thresholds": (THRESHOLDS, lambda oracle: Rounded(oracle, 3), 1.0, {}),
    "null": (NULL, lambda oracle: Cast(oracle, "bfloat16"), 1.0, {}),
    "null-free": (NULL, lambda oracle: Cast(oracle, "bfloat16"), None, {}),
    "bits": (BITS, lambda oracle: oracle, None, {"dtype": "bfloat16"}),
}


@pytest.mark.parametrize("path", PATHS)
def test_a_value_matrix(path: str, like: Any, rng: np.random.Generator) -> None:
    method, wrap, max_norm, options = PATHS[path]
    score, value = (stored(rng.standard_normal(shape) / 2, "bfloat16") for shape in ((5, 5), (5, 3)))
    truth, oracle = box(like, score, value, max_norm)
    outcome, estimate, _, _ = judged(method, wrap(oracle), **options)
    assert outcome is Outcome.CERTIFIED
    assert estimate is not None
    assert covered(estimate, truth)
    assert rms(estimate, truth) < 1e-5


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "bias", [{"score_bias": 1e-2}, {"output_bias": 1e-2}, {"score_bias": 1e-5}, {"output_bias": 2e-4}]
)
def test_biases_are_never_certified(path: str, bias: dict[str, float], rng: np.random.Generator) -> None:
    method, wrap, max_norm, options = PATHS[path]
    score, value = stored(t.gaussian(rng, 6), "bfloat16"), stored(unit(rng, 6), "bfloat16")
    size = {name: number * rng.standard_normal(6) if name == "score_bias" else number for name, number in bias.items()}
    _, oracle = box(np.zeros(1), score, value, max_norm, **size)
    outcome, _, _, message = judged(method, wrap(oracle), **options)
    assert outcome is Outcome.WRONG_FAMILY, message
    assert "single-head" in message


@pytest.mark.parametrize("path", PATHS)
def test_other_families_are_never_certified(path: str) -> None:
    method, wrap, max_norm, options = PATHS[path]
    space = Space.of(np.zeros(1))
    for make in (t.two_heads, t.relu_net, t.residual, t.hard_attention, t.mean_and_square, t.hashed, t.positional):
        oracle = kh.FunctionOracle(make(np.random.default_rng(3), 4, space), width=4, max_norm=max_norm)
        assert judged(method, wrap(oracle), **options)[0] is not Outcome.CERTIFIED, make


@pytest.mark.parametrize("path", PATHS)
def test_a_zero_value_is_admitted(path: str, rng: np.random.Generator) -> None:
    method, wrap, max_norm, options = PATHS[path]
    _, oracle = box(np.zeros(1), stored(t.gaussian(rng, 4), "bfloat16"), np.zeros(4), max_norm)
    assert judged(method, wrap(oracle), **options)[0] in {Outcome.NOT_IDENTIFIABLE, Outcome.TOO_NOISY}


@pytest.mark.parametrize("path", PATHS)
def test_robust_at_all_positions_is_the_method_at_the_last(path: str, rng: np.random.Generator) -> None:
    method, wrap, max_norm, options = PATHS[path]
    score, value = stored(rng.standard_normal((3, 3)), "bfloat16"), stored(unit(rng, 3), "bfloat16")
    truth = kh.SingleHead(score, value)
    everywhere = kh.FunctionOracle(truth.at_all_positions, width=3, max_norm=max_norm, positions="all")
    last = kh.FunctionOracle(truth, width=3, max_norm=max_norm)
    outcome, estimate, queries, _ = judged(
        ROBUST, wrap(everywhere), **({"bits": options["dtype"]} if path == "bits" else {})
    )
    assert outcome is Outcome.CERTIFIED
    assert estimate is not None
    assert covered(estimate, truth)
    _, other, same_queries, _ = judged(method, wrap(last), **options)
    assert other is not None
    assert queries == same_queries
    assert estimate.details.keys() == other.details.keys()
    assert t.misses(estimate.params, t.plain(other.params), other.radius) == {}


def refused(method: Method, signature: Signature, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        next(method.steps(signature, np.random.default_rng(0), budget=np.inf, **options))
    return str(caught.value)


def test_what_cannot_be_meant_is_refused() -> None:
    decimals, half = Noise.rounded(3), Noise.dtype("float16")
    plain = Signature(width=2)
    assert "decimals" in refused(THRESHOLDS, plain)
    assert "max_norm" in refused(THRESHOLDS, plain.with_changes(noise=decimals))
    assert "max_length" in refused(THRESHOLDS, plain.with_changes(noise=decimals, max_norm=1.0, max_length=2))
    assert "target_error" in refused(ROBUST, plain.with_changes(noise=decimals, max_norm=1.0), target_error=0.0)
    assert "dtype" in refused(NULL, plain)
    assert "max_length" in refused(NULL, plain.with_changes(noise=half, max_length=2))
    assert "target_error" in refused(ROBUST, plain.with_changes(noise=half), target_error=-1.0)
    assert "unknown dtype" in refused(BITS, plain, dtype="float8")
    assert "float64" in refused(BITS, plain.with_changes(noise=half), dtype="float32")
    assert "max_norm" in refused(BITS, plain.with_changes(max_norm=1.0), dtype="float32")


# --- computed in float32 first, and digits that are cut --------------------------------------------------------


def single(seed: int, d: int) -> kh.SingleHead:
    """A head whose weights are float32 numbers."""
    rng = np.random.default_rng([seed, 7])
    return kh.SingleHead((rng.standard_normal((d, d)) / d**0.5).astype(np.float32), rng.standard_normal(d).astype("f4"))


def within_radii(result: kh.Recovery, truth: kh.SingleHead) -> None:
    wide = result.certificate.radius
    for name in ("score", "value", "output_bias"):
        true, own, radius = (getattr(each, name) for each in (truth, result.params, wide))
        true, own, radius = (0.0 if each is None else np.asarray(each, dtype=float) for each in (true, own, radius))
        assert np.all(np.abs(own - true) <= radius), f"{name} is off by {np.max(np.abs(own - true) / radius):.2g} radii"


@pytest.mark.parametrize("max_norm", [None, 6.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_was_computed_in_float32_first_is_within_the_radii(
    dtype: str, max_norm: float | None, fresh_seed: int
) -> None:
    for seed in (0, fresh_seed):
        truth = single(seed, 4)
        inner = kh.FunctionOracle(lambda x, own=truth: own(x.astype("f4")).astype(float), width=4, max_norm=max_norm)
        result = kh.recover(Cast(inner, dtype), throw=False)
        if result.certified and result.params.family == truth.family:
            within_radii(result, truth)
        elif result.certified:  # as a net without neurons behind attention: the same map
            tokens = np.random.default_rng(seed).standard_normal((50, 6, 4))
            off = np.abs(result.params(tokens) - t.plain(truth)(tokens))
            assert np.all(off <= result.params.error_bar(result.certificate.radius, tokens, 2.0**-20))
        assert result.certified or seed != 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_was_computed_in_float64_keeps_all_its_digits(dtype: str) -> None:
    truth = t.plain(single(1, 4))
    result = kh.recover(Cast(kh.FunctionOracle(truth, width=4, max_norm=6.0), dtype))
    assert np.max(result.certificate.radius.score) < 1e-12
    assert np.max(result.certificate.radius.value) < 1e-12


@pytest.mark.parametrize("cut", [np.floor, np.trunc, np.ceil])
@pytest.mark.parametrize("bias", [None, 0.7])
@pytest.mark.parametrize("max_norm", [None, 10.0])
def test_digits_that_are_cut_are_within_the_radii(
    cut: Callable[[Floats], Floats], bias: float | None, max_norm: float | None, fresh_seed: int
) -> None:
    for seed in (0, fresh_seed):
        own = t.plain(single(seed, 4))
        truth = kh.SingleHead(own.score, own.value, None, None if bias is None else np.asarray(bias))
        oracle = kh.FunctionOracle(lambda x, f=truth: cut(f(x) * 1e3) / 1e3, width=4, max_norm=max_norm)
        result = kh.recover(oracle, throw=False)
        if result.certified:
            within_radii(result, truth)
        assert result.outcome is not Outcome.WRONG_FAMILY
        assert result.certified or seed != 0


def test_thresholds_notice_that_answers_are_not_rounded_to_the_nearest() -> None:
    truth = t.plain(single(2, 4))
    signature = {"width": 4, "max_norm": 10.0, "noise": "rounded:3"}
    oracle = kh.FunctionOracle(lambda x: np.trunc(truth(x) * 1e3) / 1e3, **signature)
    outcome, _, _, message = judged(THRESHOLDS, oracle)
    assert outcome is Outcome.WRONG_FAMILY
    assert "cut:DECIMALS" in message


def test_answers_that_float32_arithmetic_explains_from_the_first() -> None:
    """A head with a millionth of something else behind float32 answers ended in an exception."""
    rng = np.random.default_rng(0)
    score, value, other = rng.standard_normal((4, 4)) / 2, rng.standard_normal(4), rng.standard_normal(4)
    head = kh.SingleHead(score, value)

    def box(tokens: Floats) -> Floats:
        answers = np.asarray(head(tokens)) + 1e-6 * np.tanh(tokens[:, -1] @ other)
        return answers.astype(np.float32).astype(float)

    result = kh.recover(kh.FunctionOracle(box, width=4, noise="float32"), throw=False)
    tokens = rng.standard_normal((50, 4, 4))
    assert not result.certified or np.max(np.abs(result.params(tokens) - box(tokens))) < 1e-3
