"""What `noise="measure"` finds: kind and scale of the errors of a box, for every seed, library and size."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import Array, namespace, to_numpy
from keyhole.methods.noise_estimation.digits import binary_digits, decimals, distance_from_polynomials
from keyhole.methods.noise_estimation.measure import QUERIES, REPEATS, NoiseEstimate, measure_noise
from keyhole.noise import Noise
from keyhole.oracles import Cast, Counted, Noisy, Oracle, Rounded
from keyhole.queries import Signature
from keyhole.recover import diagnose
from keyhole.session import Session
from support.targets import Random, of_norm

Box = Callable[[Array], Array]

# Estimates are within a fifth of the truth for all seeds but one in a million.
WITHIN = 0.2


def head(rng: Random, d: int, norm: float = 1.0, size: float = 1.0, outputs: int | None = None) -> kh.SingleHead:
    value = size * rng.standard_normal(d if outputs is None else (d, outputs))
    bias = np.asarray(0.3 * size * rng.standard_normal(value.shape[1:]))
    return kh.SingleHead(of_norm(rng.standard_normal((d, d)), norm), value, None, bias)


def random_head(rng: Random) -> kh.SingleHead:
    d = int(rng.choice([1, 2, 5, 16, 64]))
    outputs = None if rng.random() < 0.5 else int(rng.integers(1, 6))
    return head(rng, d, 10 ** rng.uniform(-3, 2), 10 ** rng.uniform(-4, 4), outputs)


def unknown(box: kh.SingleHead | Box, width: int, **facts: object) -> kh.FunctionOracle:
    return kh.FunctionOracle(box, width=width, noise="measure", **facts)  # type: ignore[arg-type]


def with_errors(box: Box, error: Callable[[Random, tuple[int, ...]], Array]) -> Box:
    """The box with errors that are the same whenever the same question is asked."""

    def answer(tokens: Array) -> Array:
        answers = box(tokens)
        plain = to_numpy(tokens)
        seeds = [hashlib.sha256(np.ascontiguousarray(sequence).tobytes()).digest()[:8] for sequence in plain]
        errors = [error(np.random.default_rng(list(seed)), tuple(answers.shape[1:])) for seed in seeds]
        return answers + namespace(answers).asarray(np.array(errors), dtype=answers.dtype)

    return answer


def uniform(tau: float) -> Callable[[Random, tuple[int, ...]], Array]:
    return lambda rng, shape: rng.uniform(-tau, tau, shape)


def plus_or_minus(tau: float) -> Callable[[Random, tuple[int, ...]], Array]:
    return lambda rng, shape: tau * rng.choice([-1.0, 1.0], shape)


def measured(oracle: Oracle, seed: int) -> tuple[NoiseEstimate, int]:
    counted = Counted(oracle)
    found = Session(counted).run(measure_noise(counted.signature, np.random.default_rng(seed)))
    assert found.evidence
    assert "\n" not in found.evidence
    return found, counted.queries


def close(found: Noise, expected: Noise) -> bool:
    same = (found.kind, found.name) == (expected.kind, expected.name)
    return same and abs(found.scale - expected.scale) <= WITHIN * expected.scale


@pytest.mark.parametrize("try_", range(12))
def test_right_answers_are_called_so(fixed_seed: int, try_: int) -> None:
    rng = np.random.default_rng([fixed_seed, try_])
    box = random_head(rng)
    found, queries = measured(unknown(box, box.width, max_length=rng.choice([None, 1, 2])), fixed_seed)
    assert found.noise == Noise.exact(), found
    assert queries <= 100


@pytest.mark.parametrize("try_", range(10))
def test_decimals_are_counted(fixed_seed: int, try_: int) -> None:
    rng = np.random.default_rng([fixed_seed, try_, 1])
    box = random_head(rng)
    size = float(np.max(np.abs(to_numpy(box.value))))
    places = int(rng.integers(-3, 10)) - round(np.log10(size))
    found, queries = measured(Rounded(unknown(box, box.width), places, declared=False), fixed_seed)
    assert found.noise == Noise.rounded(places), found
    assert queries <= 96 + 24  # coarser than the first answers: longer tokens are asked, at most twice here


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("try_", range(4))
def test_dtypes_are_named(fixed_seed: int, name: str, try_: int) -> None:
    rng = np.random.default_rng([fixed_seed, try_, 2])
    box = random_head(rng)
    found, queries = measured(Cast(unknown(box, box.width), name, declared=False), fixed_seed)
    assert found.noise == Noise.dtype(name), found
    assert queries <= 120


@pytest.mark.parametrize("kind", [uniform, plus_or_minus])
@pytest.mark.parametrize("try_", range(5))
def test_deterministic_errors_are_seen_beside_their_neighbours(
    fixed_seed: int, kind: Callable[[float], Callable[[Random, tuple[int, ...]], Array]], try_: int
) -> None:
    rng = np.random.default_rng([fixed_seed, try_, 3])
    box = random_head(rng)
    tau = float(np.max(np.abs(to_numpy(box.value)))) * 10 ** rng.uniform(-10, 0)
    found, queries = measured(unknown(with_errors(box, kind(tau)), box.width), fixed_seed)
    assert close(found.noise, Noise.bounded(tau)), (found, tau)
    assert queries <= 100


@pytest.mark.parametrize("try_", range(6))
def test_random_errors_are_measured_within_a_fifth(fixed_seed: int, try_: int) -> None:
    rng = np.random.default_rng([fixed_seed, try_, 4])
    box = random_head(rng)
    scale = float(np.max(np.abs(to_numpy(box.value)))) * 10 ** rng.uniform(-11, 1)
    found, queries = measured(Noisy(unknown(box, box.width), scale, seed=fixed_seed, declared=False), fixed_seed)
    assert close(found.noise, Noise.gaussian(scale)), (found, scale)
    assert queries == QUERIES * REPEATS <= 350


@pytest.mark.parametrize("kind", ["exact", "rounded", "dtype", "gaussian"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_every_library_and_dtype(rng: Random, library: str, dtype: str, kind: str) -> None:
    like = np.zeros(1, dtype)
    if library == "torch":
        torch = pytest.importorskip("torch")
        torch.set_num_threads(1)
        like = torch.asarray(like)
    plain = unknown(head(rng, 8), 8, like=like)
    wrapped: dict[str, tuple[Oracle, Noise]] = {
        "exact": (plain, Noise.exact()),
        "rounded": (Rounded(plain, 2, declared=False), Noise.rounded(2)),
        "dtype": (Cast(plain, "bfloat16", declared=False), Noise.dtype("bfloat16")),
        "gaussian": (Noisy(plain, 1e-3, declared=False), Noise.gaussian(1e-3)),
    }
    oracle, expected = wrapped[kind]
    found, _ = measured(oracle, 3)
    assert close(found.noise, expected), found


def test_a_dtype_of_its_own_is_no_noise(rng: Random) -> None:
    """Answers of a float32 box have 24 binary digits, which is what they should have."""
    found, _ = measured(unknown(head(rng, 8), 8, like=np.zeros(1, np.float32)), 0)
    assert found.noise == Noise.exact()
    found, _ = measured(unknown(lambda tokens: head_32(tokens.astype(np.float32)), 8), 0)  # inside a float64 one
    assert found.noise == Noise.dtype("float32")


head_32 = head(np.random.default_rng(5), 8)


@pytest.mark.parametrize("kind", ["exact", "rounded", "bounded", "gaussian"])
def test_limits_of_the_box_are_respected(rng: Random, kind: str) -> None:
    """The oracle refuses longer tokens and sequences itself."""
    box = head(rng, 6, outputs=3)
    facts = {"max_norm": 0.7, "max_length": 1, "positions": "all", "batch_limit": 5}
    everywhere = box.at_all_positions
    plain = unknown(everywhere, 6, **facts)
    wrapped: dict[str, tuple[Oracle, Noise]] = {
        "exact": (plain, Noise.exact()),
        "rounded": (Rounded(plain, 4, declared=False), Noise.rounded(4)),
        "bounded": (unknown(with_errors(everywhere, uniform(1e-4)), 6, **facts), Noise.bounded(1e-4)),
        "gaussian": (Noisy(plain, 1e-4, declared=False), Noise.gaussian(1e-4)),
    }
    oracle, expected = wrapped[kind]
    found, _ = measured(oracle, 3)
    assert close(found.noise, expected), found


def test_longer_tokens_are_asked_where_answers_say_too_little(rng: Random) -> None:
    box = head(rng, 8, size=1e-7)
    found, queries = measured(Rounded(unknown(box, 8), 2, declared=False), 0)
    assert found.noise == Noise.rounded(2)
    assert queries > 96


@pytest.mark.parametrize(
    "box",
    [
        lambda tokens: np.zeros(len(tokens)),
        lambda tokens: np.full(len(tokens), 3.7),
        lambda tokens: np.zeros((len(tokens), 4)),
    ],
)
def test_a_box_that_always_says_the_same_tells_nothing(box: Box) -> None:
    found, queries = measured(unknown(box, 4), 0)
    assert found.noise == Noise.exact()
    assert "nothing can be said" in found.evidence
    assert queries <= 100


def test_errors_larger_than_numbers_hold_are_said_to_be() -> None:
    """By every function that measures them, whoever asked for it."""
    rng = np.random.default_rng(0)
    oracle = unknown(lambda tokens: 1e200 * rng.standard_normal(len(tokens)), 4)
    result = kh.recover(oracle, throw=False)
    assert result.outcome is kh.Outcome.TOO_NOISY
    assert "more than numbers can hold" in result.message
    assert diagnose(oracle).found("noise") == "too large"
    verdict = kh.verify(oracle, head(rng, 4))
    assert verdict.conclusion == "inconclusive"
    assert "more than numbers can hold" in verdict.message


def test_of_two_kinds_the_larger_is_reported_and_the_other_told(rng: Random) -> None:
    box = head(rng, 8)

    def both(scale: float, places: int) -> NoiseEstimate:
        noisy = Noisy(unknown(box, 8), scale, declared=False)
        return measured(Rounded(noisy, places, declared=False), 0)[0]

    found = both(1e-2, 4)
    assert close(found.noise, Noise.gaussian(1e-2))
    assert "at most 4 decimals" in found.evidence
    found = both(1e-4, 2)
    assert found.noise == Noise.rounded(2)
    found = both(2e-3, 2)
    assert found.noise == Noise.rounded(2)
    assert "standard deviation" in found.evidence
    coarse = Rounded(unknown(with_errors(box, uniform(0.1)), 8), 3, declared=False)
    found, _ = measured(coarse, 0)
    assert close(found.noise, Noise.bounded(0.1))
    assert "at most 3 decimals" in found.evidence


def test_errors_of_different_sizes_are_told_and_the_largest_taken(rng: Random) -> None:
    inner, noise = head(rng, 8, outputs=2), np.random.default_rng(3)
    sizes = np.array([1e-6, 1e-3])
    found, _ = measured(unknown(lambda tokens: inner(tokens) + sizes * noise.standard_normal((len(tokens), 2)), 8), 0)
    assert close(found.noise, Noise.gaussian(1e-3)), found
    assert "differs between outputs" in found.evidence


def test_rounding_that_changes_from_call_to_call_is_no_noise(rng: Random) -> None:
    """Parallel sums come in any order: the last digit of a repeated answer may differ."""
    inner, flips = head(rng, 8), np.random.default_rng(3)
    found, _ = measured(unknown(lambda x: inner(x) * (1 + 2.0**-52 * flips.integers(-1, 2, len(x))), 8), 0)
    assert found.noise == Noise.exact()
    assert "which is rounding" in found.evidence


def test_rounding_inside_the_box_shows_as_an_error(rng: Random) -> None:
    """Tokens cast to few digits: answers are full numbers, yet neighbours jump."""
    inner = head(rng, 8)
    found, _ = measured(unknown(lambda x: inner(x.astype(np.float16).astype(np.float64)), 8), 0)
    assert found.noise.kind == "bounded"
    assert 1e-5 < found.noise.scale < 1e-2


def test_a_smooth_box_of_another_family_has_no_noise_but_a_remark(rng: Random) -> None:
    inner = head(rng, 8)
    found, _ = measured(unknown(lambda tokens: np.tanh(inner(tokens)), 8), 0)
    assert found.noise == Noise.exact()
    assert "those of one head are not" in found.evidence


def test_a_constant_error_is_a_bias_and_cannot_be_seen(rng: Random) -> None:
    inner = head(rng, 8)
    found, _ = measured(unknown(lambda tokens: inner(tokens) + 0.25, 8), 0)
    assert found.noise == Noise.exact()


def test_the_same_seed_asks_the_same_questions() -> None:
    signature = Signature(width=5, noise=Noise.of("measure"))
    first, second = (next(measure_noise(signature, np.random.default_rng(4))) for _ in range(2))
    assert [plan.digest for plan in first] == [plan.digest for plan in second]  # type: ignore[union-attr]


def test_recover_measures_first_and_says_what_it_found(rng: Random) -> None:
    box = head(rng, 8)
    result = kh.recover(unknown(box, 8))
    assert result.certified
    assert result.stats.details["noise"] == "exact"
    assert result.stats.details["noise_queries"] == result.stats.stages["noise"] == 96


@pytest.mark.parametrize(
    ("values", "digits"), [([1.0, 2.0, -4.0], 1), ([1.5, 0.375], 2), ([0.1], 52), ([0.0], 0), ([1 + 2.0**-52], 53)]
)
def test_binary_digits(values: list[float], digits: int) -> None:
    assert binary_digits(np.array(values)) == digits


@pytest.mark.parametrize(
    ("values", "places"),
    [
        ([0.125, 3.0], 3),
        ([1200.0, -300.0], -2),
        ([0.0], None),
        ([np.pi], None),
        ([0.1 + 0.2, 0.7], 1),
        ([1e-9, 0], 9),
        ([np.pi * 1e-310, 5e-324], None),  # numbers so small that a unit of their decimals is none
        ([np.pi * 1e307, 1.7e308], None),
    ],
)
def test_decimals(values: list[float], places: int | None) -> None:
    assert decimals(np.array(values), 2.0**-52) == places


@pytest.mark.parametrize("degree", [1, 3])
def test_distance_from_polynomials_is_the_least_possible(fresh_seed: int, degree: int) -> None:
    rng = np.random.default_rng(fresh_seed)
    points = np.sort(rng.uniform(-1, 1, 14))
    errors = rng.uniform(-1, 1, (14, 3))
    curve = np.polynomial.polynomial.polyval(points, rng.standard_normal(degree + 1))
    found = distance_from_polynomials(points, curve[:, None] + errors, degree)
    assert np.all(found <= np.max(np.abs(errors), axis=0) + 1e-12)
    basis = np.vander(points, degree + 1)
    fitted = errors - basis @ np.linalg.lstsq(basis, errors)[0]
    assert np.all(found <= np.max(np.abs(fitted), axis=0) + 1e-12)  # least squares is one of the candidates
    assert np.all(found >= 0.3 * np.max(np.abs(fitted), axis=0))
    signs = np.tile([1.0, -1.0], 7)
    np.testing.assert_allclose(distance_from_polynomials(points, signs[:, None], degree), 1.0)


@pytest.mark.parametrize("seed", [4, 7, 17, 22])
def test_errors_of_a_net_that_is_flat_in_most_places(seed: int) -> None:
    """They show beside queries that answer something else; a kink is none of them."""
    rng = np.random.default_rng(seed)
    arrays = rng.standard_normal((2, 3)), -0.3 * np.abs(rng.standard_normal(2)), rng.standard_normal(2)
    net = kh.ReluNet(*arrays, np.asarray(0.3))
    assert measured(unknown(net, 3), seed)[0].noise == Noise.exact()
    found, _ = measured(unknown(lambda x: net(x) + 1e-4 * np.sin(1e7 * net(x)), 3), seed)
    assert close(found.noise, Noise.bounded(1e-4))
