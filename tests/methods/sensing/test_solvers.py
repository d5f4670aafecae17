"""Low-rank sensing: exact where it claims to be, silent about nothing."""

from __future__ import annotations

import secrets

import numpy as np
import pytest

from keyhole.arrays import Floats
from keyhole.methods.sensing.solvers import (
    SensingSolution,
    factored,
    nuclear_norm,
    parameter_count,
    recommended_measurements,
)

EPS = float(np.finfo(np.float64).eps)
EXACT = np.sqrt(EPS)  # 1.5e-8: what "recovered" means here; the solvers reach a few eps
SOLVERS = {"factored": factored, "nuclear_norm": nuclear_norm}


def low_rank(rng: np.random.Generator, d: int, r: int, tail: float) -> Floats:
    """Rank r, singular values from 1 down to ``tail``."""
    left, right = (np.linalg.qr(rng.standard_normal((d, r)))[0] for _ in range(2))
    return np.asarray(left * np.geomspace(1.0, tail, r) @ right.T)


def measure(rng: np.random.Generator, W: Floats, m: int, noise: float = 0.0) -> tuple[Floats, Floats, Floats]:
    d = len(W)
    U, G = rng.standard_normal((2, m, d))
    U /= np.linalg.norm(U, axis=1, keepdims=True)
    b = ((U @ W) * G).sum(axis=1)
    return U, G, b + noise * np.linalg.norm(b) / np.sqrt(max(m, 1)) * rng.standard_normal(m)


def distance(found: SensingSolution, W: Floats) -> float:
    return float(np.linalg.norm(found.matrix - W) / np.linalg.norm(W))


@pytest.mark.parametrize(
    ("d", "r", "multiple", "tail"),
    [
        (16, 1, 2.0, 1.0),
        (32, 3, 1.5, 1.0),
        (32, 3, 1.25, 1e-2),
        (32, 3, 1.25, 1e-4),
        (64, 2, 1.5, 1e-2),
        (64, 4, 1.5, 1.0),
    ],
)
def test_factored_finds_rank_and_matrix(d: int, r: int, multiple: float, tail: float) -> None:
    rng = np.random.default_rng(7)
    W = low_rank(rng, d, r, tail)
    found = factored(*measure(rng, W, int(multiple * parameter_count(d, r))), rng=rng)
    assert found.converged
    assert found.rank == r
    assert distance(found, W) <= EXACT
    assert found.residual <= EPS * d


@pytest.mark.parametrize(("d", "r"), [(16, 2), (32, 2), (64, 2)])
def test_nuclear_norm_polish_is_exact(d: int, r: int) -> None:
    rng = np.random.default_rng(11)
    W = low_rank(rng, d, r, 0.5)
    found = nuclear_norm(*measure(rng, W, 3 * parameter_count(d, r)), rng=rng)
    assert found.converged
    assert found.rank == r
    assert distance(found, W) <= 1e-10  # the figure asked of it


def test_recommended_measurements_suffice() -> None:
    hits = 0
    for seed in range(20):
        rng = np.random.default_rng(100 + seed)
        W = low_rank(rng, 24, 2, 0.5)
        found = factored(*measure(rng, W, recommended_measurements(24, 2)), rng=rng)
        hits += found.converged and distance(found, W) <= EXACT
    assert hits >= 19


@pytest.mark.parametrize("name", SOLVERS)
def test_right_or_not_converged(name: str) -> None:
    """Fresh draws on both sides of the counting bound: no claim may be wrong, and some must be made."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    claims = 0
    for _ in range(16):
        d, r, multiple = int(rng.integers(6, 20)), int(rng.integers(1, 4)), rng.uniform(0.5, 3.0)
        W = low_rank(rng, d, r, 10.0 ** -rng.uniform(0, 3))
        found = SOLVERS[name](*measure(rng, W, int(multiple * parameter_count(d, r))), rng=rng)
        assert not found.converged or distance(found, W) <= EXACT, (seed, d, r, multiple)
        claims += found.converged
    assert claims, seed


@pytest.mark.parametrize("name", SOLVERS)
def test_at_the_counting_bound_nothing_is_claimed(name: str) -> None:
    rng = np.random.default_rng(3)
    W = low_rank(rng, 16, 2, 1.0)
    found = SOLVERS[name](*measure(rng, W, parameter_count(16, 2)), rng=rng)
    assert not found.converged


@pytest.mark.parametrize("name", SOLVERS)
def test_full_rank_is_refused_below_and_found_above_all_entries(name: str) -> None:
    rng = np.random.default_rng(4)
    W = rng.standard_normal((8, 8))
    assert not SOLVERS[name](*measure(rng, W, 60), rng=rng).converged
    found = SOLVERS[name](*measure(rng, W, 90), rng=rng)
    assert found.converged
    assert found.rank == 8
    assert distance(found, W) <= EXACT


@pytest.mark.parametrize("name", SOLVERS)
def test_unseen_direction_is_not_claimed(name: str) -> None:
    """No measurement touches the first coordinate: every residual vanishes, on held-out ones too."""
    rng = np.random.default_rng(5)
    W = low_rank(rng, 16, 2, 1.0)
    U, G, _ = measure(rng, W, 300)
    U[:, 0] = 0.0
    found = SOLVERS[name](U, G, ((U @ W) * G).sum(axis=1), rng=rng)
    assert not found.converged


def test_declared_noise_is_tolerated_and_undeclared_noise_is_not_claimed() -> None:
    rng = np.random.default_rng(6)
    W, noise = low_rank(rng, 24, 2, 0.5), 1e-6
    measured = measure(rng, W, 3 * parameter_count(24, 2), noise)
    found = factored(*measured, rng=rng, noise=noise)
    assert found.converged
    assert found.rank == 2
    assert distance(found, W) <= 10 * noise
    assert not factored(*measured, rng=rng, starts=1).converged


@pytest.mark.parametrize(("rank", "right"), [(1, False), (2, True), (3, True)])
def test_given_rank(rank: int, right: bool) -> None:
    rng = np.random.default_rng(8)
    W = low_rank(rng, 24, 2, 0.5)
    found = factored(*measure(rng, W, 300), rank, rng=rng, starts=1)
    assert found.converged is right
    assert (found.rank == 2) is right


@pytest.mark.parametrize("name", SOLVERS)
def test_zero_and_scale(name: str) -> None:
    rng = np.random.default_rng(9)
    W = low_rank(rng, 12, 1, 1.0)
    U, G, b = measure(rng, W, 80)
    zero = SOLVERS[name](U, G, 0.0 * b)
    assert zero.converged
    assert zero.rank == 0
    assert not zero.matrix.any()
    assert not SOLVERS[name](U[:9], G[:9], 0.0 * b[:9]).converged
    for scale in (1e-200, 1e200):
        found = SOLVERS[name](U, G, scale * b, rng=np.random.default_rng(1))
        assert found.converged
        assert np.linalg.norm(found.matrix / scale - W) <= EXACT


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("m", [0, 1, 3, 6])
def test_almost_no_measurements(name: str, m: int) -> None:
    rng = np.random.default_rng(12)
    found = SOLVERS[name](*measure(rng, low_rank(rng, 5, 1, 1.0), m))
    assert not found.converged
    assert found.matrix.shape == (5, 5)


@pytest.mark.parametrize("name", SOLVERS)
def test_inconsistent_values_are_not_claimed(name: str) -> None:
    rng = np.random.default_rng(13)
    U, G, _ = measure(rng, low_rank(rng, 8, 1, 1.0), 90)
    assert not SOLVERS[name](U, G, rng.standard_normal(90)).converged
    assert not SOLVERS[name](0.0 * U, G, rng.standard_normal(90)).converged


def test_same_seed_same_answer_and_inputs_untouched() -> None:
    rng = np.random.default_rng(10)
    measured = measure(rng, low_rank(rng, 16, 2, 0.5), 120)
    copies = [a.copy() for a in measured]
    first, second = (factored(*measured, rng=np.random.default_rng(1)) for _ in range(2))
    np.testing.assert_array_equal(first.matrix, second.matrix)
    for before, after in zip(copies, measured, strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("name", SOLVERS)
def test_bad_input_is_named(name: str) -> None:
    U = np.ones((5, 3))
    with pytest.raises(ValueError, match=r"\(m, d\)"):
        SOLVERS[name](U, U[:, :2], np.ones(5))
    with pytest.raises(ValueError, match="finite"):
        SOLVERS[name](U, U, np.full(5, np.nan))
    with pytest.raises(ValueError, match="noise"):
        SOLVERS[name](U, U, np.ones(5), noise=-1.0)
    with pytest.raises(ValueError, match="rank"):
        recommended_measurements(4, 5)
