"""Which outputs are read: windows of them, and coordinates of answers in the basis of values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.methods.forms.outputs import choose_outputs, window_rows
from support import targets as t
from support.spaces import EXAMPLES, SEEDS, close, everywhere, space_of


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


def test_outputs_that_are_not_known_are_left_out(rng: np.random.Generator) -> None:
    """A small output beside a large one is known as badly as that is rounded; a dead one says nothing."""
    space, sizes = space_of("numpy-float64"), np.array([1.0, 1e-2, 1e-12, 0.0])
    value = rng.standard_normal((8, 4)) * sizes
    kept = choose_outputs(space, value, even=True, radius=np.full((8, 4), 4 * space.eps))
    assert kept.used == kept.rank == 2
    assert not np.any(kept.turn[2:])


@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize("shape", [(8, 8), (8, 30), (30, 8)])
def test_the_rank_of_outputs(rank: int, shape: tuple[int, int], rng: np.random.Generator) -> None:
    kept = choose_outputs(space_of("numpy-float64"), t.matrix_of_rank(rng, *shape, rank))
    assert kept.rank == kept.used == rank
