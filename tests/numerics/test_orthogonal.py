"""Random orthogonal rows, rows that meet a vector evenly, and rows split along one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.arrays import Array, to_numpy
from keyhole.numerics.orthogonal import equal_overlap, random_orthogonal, split_along
from support import targets as t
from support.spaces import EXAMPLES, SEEDS, close, everywhere, space_of

WIDTHS = st.integers(1, 40)


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


@pytest.mark.parametrize("width", [2, 3, 4, 8, 32, 256])
def test_no_row_is_orthogonal_to_what_people_type(width: int) -> None:
    """Exact zeros have probability zero: of rows, and of their forms with matrices, for every seed."""
    space = space_of("numpy-float64")
    place = np.arange(width)
    waves = np.cos(place[:, None] * (2 * place + 1) * np.pi / (2 * width))
    plain = np.concatenate([np.eye(width), np.tri(width), waves, [(-1.0) ** place]])
    plain /= np.linalg.norm(plain, axis=1, keepdims=True)
    for seed in range(20):
        rng = np.random.default_rng([seed, width])
        left, right = (random_orthogonal(space, rng, width) for _ in range(2))
        for overlaps in (left @ plain.T, left @ right.T, left @ np.eye(width)[::-1] @ right.T):
            assert np.min(np.abs(overlaps)) > 1e-13


def test_overlaps_that_are_not_quite_even(rng: np.random.Generator) -> None:
    """In a plane only two bases share a vector evenly; with random numbers they are as many as there are seeds."""
    space = space_of("numpy-float64")
    for _ in range(20):
        rows = equal_overlap(space, random_orthogonal(space, rng, 2), np.array([3.0, 0.0]), rng)
        close(rows @ rows.T, np.eye(2), space)
        assert abs(abs(rows[0, 0]) - abs(rows[1, 0])) > 1e-6
        assert 0.75 < rows[0, 0] / rows[1, 0] < 1.34


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
    # Reflecting overlaps that are almost even amplifies their rounding; those even to half the digits are left alone.
    unit = plain / np.linalg.norm(plain)
    overlaps = to_numpy(rows).astype(np.float64) @ unit
    even = np.linalg.norm(overlaps) / count**0.5
    unevenness = np.linalg.norm(overlaps - even) / np.linalg.norm(overlaps)
    close(
        turned @ space.asarray(unit),
        np.full(count, _overlap(turned, plain)),
        space,
        64 / max(unevenness, space.eps**0.5),
    )


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
