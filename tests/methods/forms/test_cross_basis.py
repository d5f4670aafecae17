"""Bases by cross approximation, and systems changed by rank one, against dense linear algebra."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from keyhole.arrays import to_numpy
from keyhole.methods.forms.cross_basis import CrossBasis, solve_shifted
from support import targets as t
from support.spaces import EXAMPLES, SEEDS, close, everywhere, space_of


@everywhere
@EXAMPLES
@given(seed=SEEDS, size=st.integers(1, 24), rank=st.integers(1, 24), more=st.integers(0, 4))
def test_cross_basis_against_dense_algebra(library: str, seed: int, size: int, rank: int, more: int) -> None:
    """Values at the pivots give every vector of the span; what lies in the span is not added twice."""
    space, rng = space_of(library), np.random.default_rng(seed)
    rank = min(rank, size)
    matrix = t.orthogonal(rng, size)[:, :rank] @ rng.standard_normal((rank, rank + more))
    sizes = np.linalg.svd(matrix[:, :rank], compute_uv=False)
    radius = 1e3 * space.eps * sizes[0] / sizes[-1]
    # What a column adds to the span is at least the least singular value long, and one entry has its share of that.
    # Other columns are told from their span by a radius that knows how badly they are conditioned.
    assume(sizes[-1] >= 1e-2 * sizes[0] and radius < sizes[-1] / size**0.5)
    cross = CrossBasis(space, size)
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


@everywhere
@EXAMPLES
@given(seed=SEEDS, rank=st.integers(1, 12), count=st.integers(1, 5))
def test_shifted_solve_against_dense_solve(library: str, seed: int, rank: int, count: int) -> None:
    space, rng = space_of(library), np.random.default_rng(seed)
    matrix = t.orthogonal(rng, rank) * rng.uniform(0.5, 2.0, rank)
    own, values = rng.standard_normal((rank, count)), rng.standard_normal((rank, count))
    ratio = rng.uniform(0, 0.3, (rank, count)) / rank**0.5
    systems = [matrix - np.outer(ratio[:, n], own[:, n]) for n in range(count)]
    assume(max(np.linalg.cond(system) for system in systems) <= 50)
    arrays = (space.asarray(array) for array in (np.linalg.inv(matrix), own, values, ratio))
    solution = solve_shifted(*arrays)
    wanted = np.stack([np.linalg.solve(system, values[:, n]) for n, system in enumerate(systems)], axis=1)
    close(solution.coefficients, wanted, space, 1e4)
    close(solution.form, np.sum(own * wanted, axis=0), space, 1e4)
    damping = to_numpy(solution.damping)
    assert np.all((damping > 0) & (damping <= 1))
    determinants = [np.linalg.det(system) / np.linalg.det(matrix) for system in systems]
    close(solution.damping, np.minimum(np.abs(determinants), 1.0), space, 1e4)  # the matrix determinant lemma


@pytest.mark.parametrize("library", ["numpy-float64", "torch-float64"])
@EXAMPLES
@given(seed=SEEDS, size=st.integers(5, 24), dependent=st.booleans())
def test_columns_added_at_once_are_those_added_one_by_one(library: str, seed: int, size: int, dependent: bool) -> None:
    """Where a device would be waited for at every column, one decomposition finds the same pivots and factors."""
    pytest.importorskip("torch")
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((size, size))
    if dependent:
        matrix[:, -1] = matrix[:, 2]
    space = space_of(library)
    bases, part = [], size // 3
    for cuts in ([slice(n, n + 1) for n in range(size)], [slice(0, part), slice(part, size)]):
        bases.append(CrossBasis(space, size))
        radii = space.full((size,), 1e-9)
        added = [bases[-1].add(space.asarray(matrix[:, cut]), radii[cut]) for cut in cuts]
        assert sum(added) == size - dependent
    one, other = bases
    assert one.pivots == other.pivots
    for name in ("factors", "inverse", "heights"):
        assert np.allclose(to_numpy(getattr(one, name)), to_numpy(getattr(other, name)), rtol=1e-6, atol=1e-6)
