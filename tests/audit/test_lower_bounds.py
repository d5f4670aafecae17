"""Floors under the error of any attacker."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import keyhole as kh
from keyhole.audit import audit
from keyhole.audit.lower_bounds import (
    Geometry,
    bounded_floor,
    counting_floor,
    floor,
    gaussian_floor,
    rounding_floor,
)
from keyhole.noise import Noise
from keyhole.queries import Signature
from keyhole.targets import open_target


def geometry(d: int = 4, norm: float = 1.0) -> Geometry:
    head = kh.SingleHead(np.eye(d), np.full(d, 2.0 / d**0.5))
    return Geometry.of(head, Signature(width=d, max_norm=norm if math.isfinite(norm) else None))


def test_counting_bounds_are_those_of_a_recovery() -> None:
    for text in ("", "&rank=2", "&outputs=3", "&score_bias=1&output_bias=1", "&rank=1&outputs=2"):
        target = open_target(f"demo:single-head?width=6{text}")
        assert target.truth.counting_bound == kh.recover(target.oracle).stats.counting_bound


def test_the_gaussian_floor_is_the_universal_bound() -> None:
    """s/(B·c·√n)·√(1/(1+x)² + (d−1)²/(1−x²)) per entry, x the best of a grid; relative to ‖W‖ = 2 here."""
    x = np.linspace(-0.999, 0.999, 20001)
    least = np.sqrt(np.min(1 / (1 + x) ** 2 + 9 / (1 - x**2)))
    expected = 0.01 / (0.5**3 * 2 / 2 * 10) * least * 4 / 2
    assert gaussian_floor(0.01, 100, geometry(norm=0.5)) == pytest.approx(expected, rel=1e-6)
    assert gaussian_floor(0.01, 400, geometry(norm=0.5)) == pytest.approx(expected / 2)
    assert gaussian_floor(0.01, 100, geometry(norm=math.inf)) == 0.0
    assert gaussian_floor(0.01, 1, geometry(d=1)) == pytest.approx(0.01 * 0.5)


def test_other_floors() -> None:
    there = geometry()
    assert there.bound == 20
    assert bounded_floor(0.1, there) == pytest.approx(2 * 0.1 / (2 * 2))
    assert rounding_floor(0.1, 20, there) == bounded_floor(0.1, there)
    assert rounding_floor(0.1, 60, there) == bounded_floor(0.1, there) / 4
    assert counting_floor(5, 20) == pytest.approx(0.75**0.5)
    assert counting_floor(20, 20) == counting_floor(21, 20) == 0.0
    assert floor(Noise.exact(), 100, there) == floor(Noise.dtype("bfloat16"), 100, there) == 2.0**-52
    assert floor(Noise.gaussian(1e9), 100, there) == floor(Noise.exact(), 0, there) == 1.0
    assert floor(Noise.bounded(0.1), 100, geometry(norm=math.inf)) == 2.0**-52
    everywhere = replace(there, positions=math.inf)
    assert floor(Noise.gaussian(1.0), 1, everywhere) == 2.0**-52


def test_no_attack_is_below_its_floor(fresh_seed: int) -> None:
    found = audit(f"demo:single-head?width=6&seed={fresh_seed}", ["noise:1e-2+clip:1", "budget:21"], [2, 8])
    for row in found.rows:
        # The bound holds on average over the noise; at 36 entries a run is within a third of its expectation.
        assert row.error >= 0.5 * row.floor or row.floor <= 2.0**-52
