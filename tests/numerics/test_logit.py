"""Logits from answers, and radii that cover them when each answer is disturbed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.arrays import Space, to_numpy
from keyhole.numerics.logit import logit_with_radius
from support.spaces import EXAMPLES, SEEDS, everywhere, space_of


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
