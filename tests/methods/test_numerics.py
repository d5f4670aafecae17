"""The pure functions behind the methods, against dense linear algebra and against answers that are disturbed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.arrays import Array, Space, to_numpy
from keyhole.methods.forms.cross_basis import CrossBasis, solve_shifted
from keyhole.methods.forms.outputs import choose_outputs, window_rows
from keyhole.numerics.logit import logit_with_radius
from keyhole.numerics.orthogonal import equal_overlap, random_orthogonal, split_along
from support import targets as t

EXAMPLES = settings(max_examples=40)
SEEDS = st.integers(0, 2**32 - 1)
WIDTHS = st.integers(1, 40)
everywhere = pytest.mark.parametrize("library", t.LIBRARIES)


def space_of(library: str) -> Space:
    return Space.of(t.example(library))


def close(found: Array, wanted: Array, space: Space, times_eps: float = 64.0) -> None:
    """Equal up to some eps of the largest number, in the type that was asked for."""
    assert Space.of(found) == space
    found, wanted = (to_numpy(array).astype(np.float64) for array in (found, wanted))
    assert found.shape == wanted.shape
    assert np.max(np.abs(found - wanted), initial=0.0) <= times_eps * space.eps * np.max(np.abs(wanted), initial=1.0)


# --- rotation -------------------------------------------------------------------------------------------------


@everywhere
@EXAMPLES
@given(seed=SEEDS, width=WIDTHS)
def test_random_orthogonal_is_orthogonal(library: str, seed: int, width: int) -> None:
    space = space_of(library)
    rows = random_orthogonal(space, np.random.default_rng(seed), width)
    close(rows @ rows.T, np.eye(width), space)


@pytest.mark.parametrize("width", [64, 256])
def test_random_orthogonal_spreads_any_vector(width: int, rng: np.random.Generator) -> None:
    """Neither a one-hot vector nor a wave of its own kind keeps more than a few times its share in one row."""
    space = space_of("numpy-float64")
    wave = np.cos(3 * (2 * np.arange(width) + 1) * np.pi / (2 * width))
    for vector in (np.eye(width)[0], np.ones(width), wave, rng.standard_normal(width)):
        rows = random_orthogonal(space, rng, width)
        assert np.max(np.abs(rows @ vector)) <= 5 * np.linalg.norm(vector) / width**0.5


def test_random_orthogonal_differs_from_seed_to_seed() -> None:
    space = space_of("numpy-float64")
    first, second = (random_orthogonal(space, np.random.default_rng(seed), 12) for seed in (1, 2))
    assert not np.allclose(first, second)


@everywhere
@EXAMPLES
@given(
    seed=SEEDS,
    width=WIDTHS,
    part=st.floats(0, 1),
    kind=st.sampled_from(("normal", "one-hot", "decades", "ones", "even")),
    power=st.integers(-30, 30),
)
def test_equal_overlap(library: str, seed: int, width: int, part: float, kind: str, power: int) -> None:
    """Rows stay orthonormal, span what they spanned, and meet the vector evenly."""
    space, rng = space_of(library), np.random.default_rng(seed)
    count = max(1, round(part * width))
    rows = random_orthogonal(space, rng, width)[:count, :]
    plain: Any = {
        "normal": lambda: rng.standard_normal(width),
        "one-hot": lambda: t.one_hot(rng, width),
        "decades": lambda: t.decades(rng, width),
        "ones": lambda: np.ones(width),
        "even": lambda: to_numpy(rows).astype(np.float64).sum(axis=0),  # there is nothing to do
    }[kind]()
    turned = equal_overlap(space, rows, space.asarray(plain / np.max(np.abs(plain)) * 10.0**power))
    close(turned @ turned.T, np.eye(count), space)
    close(turned.T @ turned, rows.T @ rows, space)
    close(turned @ space.asarray(plain / np.linalg.norm(plain)), np.full(count, _overlap(turned, plain)), space)


def _overlap(rows: Array, vector: t.Floats) -> float:
    inside = to_numpy(rows).astype(np.float64) @ vector
    return float(np.linalg.norm(inside) / np.linalg.norm(vector) / inside.size**0.5)


@everywhere
@EXAMPLES
@given(seed=SEEDS, width=st.integers(2, 40), along=st.booleans(), power=st.integers(-10, 10))
def test_split_along(library: str, seed: int, width: int, along: bool, power: int) -> None:
    space, rng = space_of(library), np.random.default_rng(seed)
    rows = random_orthogonal(space, rng, width)
    vector = (rows[-1, :] if along else space.normal(rng, width)) * 10.0**power
    across, direction = split_along(space, rows, vector)
    whole = space.xp.concat([across, direction[None, :]])
    close(whole @ whole.T, np.eye(width), space, 512.0)
    close(direction, vector / space.xp.linalg.vector_norm(vector), space)


# --- cross ----------------------------------------------------------------------------------------------------


@everywhere
@EXAMPLES
@given(seed=SEEDS, size=st.integers(1, 24), rank=st.integers(1, 24), more=st.integers(0, 4))
def test_cross_basis_against_dense_algebra(library: str, seed: int, size: int, rank: int, more: int) -> None:
    """Values at the pivots give every vector of the span; what lies in the span is not added twice."""
    space, rng = space_of(library), np.random.default_rng(seed)
    rank = min(rank, size)
    matrix = t.orthogonal(rng, size)[:, :rank] @ rng.standard_normal((rank, rank + more))
    sizes = np.linalg.svd(matrix[:, :rank], compute_uv=False)
    if sizes[-1] < 1e-2 * sizes[0]:
        return  # such columns are told from their span by a radius that knows how badly they are conditioned
    cross = CrossBasis(space, size)
    radius = 1e3 * space.eps * sizes[0] / sizes[-1]
    first = int(rng.integers(rank + 1))  # one part as a block, the others one by one
    assert cross.add(space.asarray(matrix[:, :first]), [radius] * first) == first
    added = [cross.add(space.asarray(matrix[:, n : n + 1]), [radius]) for n in range(first, rank + more)]
    assert added == [1] * (rank - first) + [0] * more
    assert len(cross.pivots) == rank == len(set(cross.pivots))
    assert cross.factors.shape == (size, rank)
    assert np.max(np.abs(to_numpy(cross.factors))) <= 1.0  # row pivoting
    at_pivots = space.xp.take(cross.factors, space.indices(cross.pivots), axis=0)
    close(cross.inverse @ at_pivots, np.eye(rank), space, 1e4)
    assert np.all(np.triu(to_numpy(at_pivots), 1) == 0)
    vector = matrix[:, :rank] @ rng.standard_normal(rank)
    values = space.xp.take(space.asarray(vector), space.indices(cross.pivots), axis=0)
    close(cross.factors @ (cross.inverse @ values), vector, space, 1e5)


@EXAMPLES
@given(seed=SEEDS, size=st.integers(1, 16))
def test_cross_basis_pivots_on_the_largest_rest(seed: int, size: int) -> None:
    """Heights are the pivots of elimination: their product is the determinant."""
    space = space_of("numpy-float64")
    matrix = np.random.default_rng(seed).standard_normal((size, size))
    cross = CrossBasis(space, size)
    assert cross.add(matrix, [0.0] * size) == size
    assert len(cross.pivots) == size
    assert np.prod(np.abs(cross.heights)) == pytest.approx(abs(np.linalg.det(matrix)), rel=1e-6)


def test_cross_basis_takes_nothing_from_zero() -> None:
    cross = CrossBasis(space_of("numpy-float64"), 3)
    assert cross.add(np.zeros((3, 1)), [0.0]) == 0
    assert len(cross.pivots) == 0


# --- shifted --------------------------------------------------------------------------------------------------


@everywhere
@EXAMPLES
@given(seed=SEEDS, rank=st.integers(1, 12), count=st.integers(1, 5))
def test_shifted_solve_against_dense_solve(library: str, seed: int, rank: int, count: int) -> None:
    space, rng = space_of(library), np.random.default_rng(seed)
    matrix = t.orthogonal(rng, rank) * rng.uniform(0.5, 2.0, rank)
    own, values = rng.standard_normal((rank, count)), rng.standard_normal((rank, count))
    ratio = rng.uniform(0, 0.3, (rank, count)) / rank**0.5
    systems = [matrix - np.outer(ratio[:, n], own[:, n]) for n in range(count)]
    if max(np.linalg.cond(system) for system in systems) > 50:
        return
    arrays = (space.asarray(array) for array in (np.linalg.inv(matrix), own, values, ratio))
    solution = solve_shifted(*arrays)
    wanted = np.stack([np.linalg.solve(system, values[:, n]) for n, system in enumerate(systems)], axis=1)
    close(solution.coefficients, wanted, space, 1e4)
    close(solution.form, np.sum(own * wanted, axis=0), space, 1e4)
    damping = to_numpy(solution.damping)
    assert np.all((damping > 0) & (damping <= 1))
    determinants = [np.linalg.det(system) / np.linalg.det(matrix) for system in systems]
    close(solution.damping, np.minimum(np.abs(determinants), 1.0), space, 1e4)  # the matrix determinant lemma


# --- outputs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "used"), [(d, u) for d in (2, 3, 7, 8, 16, 31, 64) for u in range(1, d + 1)])
def test_windows_are_well_conditioned(width: int, used: int) -> None:
    """Any neighbouring rows, around the end too, tell the mixtures of the basis apart."""
    space, rng = space_of("numpy-float64"), np.random.default_rng([width, used])
    basis = t.orthogonal(rng, width)[:, :used]
    rows = window_rows(space, rng, basis)
    close(rows @ rows.T, np.eye(width), space)
    windows = [rows[(np.arange(used) + first) % width] @ basis for first in range(width)]
    # Evenly spread waves: a window of a frame of d/ρ times too many vectors, give or take what does not divide.
    assert max(np.linalg.cond(window) for window in windows) <= 40


@everywhere
@EXAMPLES
@given(seed=SEEDS, width=st.integers(1, 20), part=st.floats(0, 1))
def test_windows_in_every_library(library: str, seed: int, width: int, part: float) -> None:
    space, rng = space_of(library), np.random.default_rng(seed)
    used = max(1, round(part * width))
    rows = window_rows(space, rng, space.asarray(t.orthogonal(rng, width)[:, :used]))
    close(rows @ rows.T, np.eye(width), space)


@everywhere
@EXAMPLES
@given(seed=SEEDS, width=st.integers(1, 16), outputs=st.integers(1, 16), decades=st.floats(0, 12))
def test_mixtures_come_back_from_answers(library: str, seed: int, width: int, outputs: int, decades: float) -> None:
    """Within the singular values that are kept, an answer x·V gives the coordinates of x in the basis."""
    space, rng = space_of(library), np.random.default_rng(seed)
    value = space.asarray(t.graded_matrix(rng, width, outputs, 10.0**decades))
    kept = choose_outputs(space, value)
    assert 1 <= kept.used <= kept.rank <= min(width, outputs)
    tokens = space.normal(rng, 5, width)
    smallest = float(kept.sizes[-1] / kept.sizes[0])
    assert smallest >= space.eps**0.27
    close(kept.mixture(tokens @ value), tokens @ kept.basis, space, 64 / smallest)


@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize("shape", [(8, 8), (8, 30), (30, 8)])
def test_the_rank_of_outputs(rank: int, shape: tuple[int, int], rng: np.random.Generator) -> None:
    kept = choose_outputs(space_of("numpy-float64"), t.matrix_of_rank(rng, *shape, rank))
    assert kept.rank == kept.used == rank


# --- logit ----------------------------------------------------------------------------------------------------


@everywhere
@EXAMPLES
@given(
    seed=SEEDS,
    logit=st.floats(-12, 12),
    low=st.floats(-1, 1),
    span=st.floats(0.1, 10),
    sign=st.sampled_from((-1.0, 1.0)),
    noise=st.floats(-12, -4),
)
def test_logit_covers_disturbed_answers(
    library: str, seed: int, logit: float, low: float, span: float, sign: float, noise: float
) -> None:
    """Whatever each number is off by within its radius, the true logit is within the radius of the one found."""
    space, rng, count = space_of(library), np.random.default_rng(seed), 50
    size = max(10.0**noise, 8 * space.eps * (abs(low) + span))
    high = low + sign * span
    answer = low + (high - low) / (1 + np.exp(-logit))
    # Rounding to the dtype disturbs each number a little too, so the disturbance stays within half the radius.
    off = size / 2 * rng.choice((-1.0, 1.0, 0.3), (3, count))
    arrays = [space.asarray(true + off[n]) for n, true in enumerate((answer, low, high))]
    bar = space.full((count,), size)
    found, radius = (to_numpy(each).astype(np.float64) for each in logit_with_radius(space, *arrays, bar, bar, size))
    assert np.all(radius > 0)
    # The radius is of first order: it holds where it is small, and elsewhere what is wrong is plain to see.
    small = radius < 0.1
    assert np.all(np.abs(found - logit)[small] <= radius[small])


@everywhere
def test_saturated_logits_have_no_radius(library: str) -> None:
    space = space_of(library)
    answers = space.asarray([0.0, 1.0, -0.1, 1.1, 0.5])
    zero, one, none = space.zeros(5), space.full((5,), 1.0), space.zeros(5)
    found, radius = logit_with_radius(space, answers, zero, one, none, none, 0.0)
    assert np.all(np.isinf(to_numpy(radius)[:4]))
    assert np.all(np.isfinite(to_numpy(found)))
    assert float(found[4]) == 0.0
    assert float(radius[4]) == 0.0


def test_no_difference_between_two_tokens_says_nothing() -> None:
    space = space_of("numpy-float64")
    same = np.ones(3)
    with np.errstate(all="raise"):
        _, radius = logit_with_radius(space, same, same, same, 0 * same, 0 * same, 1e-9)
    assert np.all(np.isinf(radius))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [1, 16, 1024])
def test_rounding_covers_inner_products(dtype: Any, width: int, rng: np.random.Generator) -> None:
    """Also for every one of many."""
    first, second = (rng.standard_normal((2000, width)).astype(dtype) for _ in range(2))
    exact = np.sum(first.astype(np.longdouble) * second.astype(np.longdouble), axis=1)
    found = np.asarray([np.dot(a, b) for a, b in zip(first, second, strict=True)])
    norms = np.linalg.norm(first.astype(np.float64), axis=1) * np.linalg.norm(second.astype(np.float64), axis=1)
    assert np.all(np.abs(found - exact) <= Space.of(first).rounding * norms)
