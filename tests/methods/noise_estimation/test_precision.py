"""The arithmetic behind answers that are rounded to decimals."""

from __future__ import annotations

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import FLOAT32
from keyhole.methods.noise_estimation.precision import ask_precision
from keyhole.session import Session


def spacing(dtype: type, decimals: int, noise: str, max_norm: float | None = None) -> float:
    """The relative spacing that answers of arithmetic in a dtype are taken to have."""
    rng = np.random.default_rng(0)
    head = kh.SingleHead(rng.standard_normal((6, 6)).astype(dtype), rng.standard_normal(6).astype(dtype))
    unit = 10.0**-decimals
    oracle = kh.FunctionOracle(
        lambda x: np.round(head(x.astype(dtype)).astype(float) / unit) * unit, width=6, noise=noise, max_norm=max_norm
    )
    session = Session(oracle)
    return session.run(ask_precision(oracle.signature, np.random.default_rng(1))).space.eps


@pytest.mark.parametrize(("decimals", "max_norm"), [(3, None), (6, None), (11, 10.0)])
def test_float32_shows_behind_decimals(decimals: int, max_norm: float | None) -> None:
    assert spacing(np.float32, decimals, f"rounded:{decimals}", max_norm) == FLOAT32
    assert spacing(np.float64, decimals, f"rounded:{decimals}", max_norm) < FLOAT32


def test_where_answers_are_short_float32_is_assumed_and_other_noise_is_left_alone() -> None:
    assert spacing(np.float64, 3, "rounded:3", 1.0) == FLOAT32
    assert spacing(np.float64, 3, "gaussian:0.001") < FLOAT32
