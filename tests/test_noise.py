"""How answers err, as a type."""

from __future__ import annotations

import pytest

from keyhole.noise import Noise


def test_digits_that_are_cut_err_by_up_to_a_unit() -> None:
    nearest, cut = Noise.rounded(3), Noise.cut(3)
    assert nearest.radius == 0.5e-3
    assert cut.radius == 1e-3
    assert nearest.deviation == cut.deviation
    assert Noise.parse("cut:3") == cut
    assert cut.as_wide().deviation == pytest.approx(cut.radius)


@pytest.mark.parametrize("text", ["exact", "gaussian:0.001", "bounded:0.25", "bfloat16"])
def test_only_decimals_hide_the_direction_of_their_rounding(text: str) -> None:
    noise = Noise.parse(text)
    assert noise.as_found() == noise
    assert Noise.rounded(4).as_found() == Noise.cut(4)


def test_noise_that_hides_families_is_more_than_float32() -> None:
    assert not Noise.exact().hides_families
    assert not Noise.dtype("float32").hides_families
    for noise in (Noise.dtype("float16"), Noise.rounded(9), Noise.gaussian(1e-9), Noise.bounded(1e-9)):
        assert noise.hides_families
