"""Seeds: fixed ones for what must not move, fresh ones for what must hold for all of them."""

from __future__ import annotations

import os
import secrets

import numpy as np
import pytest
from hypothesis import settings

from targets import example

# The same examples in every run, so that a failure is never a matter of luck; `fresh_seed` looks for new ones.
settings.register_profile("keyhole", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("keyhole")


@pytest.fixture
def fresh_seed() -> int:
    """A seed nobody has tried; shown when the test fails, and taken from KEYHOLE_TEST_SEED to try it again."""
    given = os.environ.get("KEYHOLE_TEST_SEED")
    seed = int(given) if given else secrets.randbits(48)
    print(f"to repeat: KEYHOLE_TEST_SEED={seed}")
    return seed


@pytest.fixture
def rng() -> np.random.Generator:
    """Numbers that are the same in every run."""
    return np.random.default_rng(20240607)


@pytest.fixture(params=["numpy-float64", "torch-float64"])
def like(request: pytest.FixtureRequest) -> object:
    """An example array of each library: the same test runs on all."""
    return example(request.param)
