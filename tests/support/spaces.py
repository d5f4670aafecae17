"""Properties of pure functions in every array library and dtype: the spaces, equality up to rounding, the examples."""

from __future__ import annotations

import array_api_compat
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from keyhole.arrays import Array, Space, to_numpy
from support import targets as t

EXAMPLES = settings(max_examples=40)
SEEDS = st.integers(0, 2**32 - 1)
everywhere = pytest.mark.parametrize("library", t.LIBRARIES)


def space_of(library: str) -> Space:
    return Space.of(t.example(library))


def close(found: Array, wanted: Array, space: Space, times_eps: float = 64.0) -> None:
    """Equal up to some eps of the largest number, in the type that was asked for."""
    assert Space.of(found) == space
    found, wanted = (to_numpy(array).astype(np.float64) for array in (found, wanted))
    assert found.shape == wanted.shape
    assert np.max(np.abs(found - wanted), initial=0.0) <= times_eps * space.eps * np.max(np.abs(wanted), initial=1.0)


def pretend_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have PyTorch's arrays in main memory taken for those of a device that works on while the host goes on."""

    def elsewhere(space: Space) -> bool:
        return array_api_compat.is_torch_namespace(space.xp)

    monkeypatch.setattr(Space, "runs_ahead", property(elsewhere))
    monkeypatch.setattr(Space, "on_cpu", property(lambda space: not elsewhere(space)))
