"""Singular values where LAPACK's fast algorithm gives up."""

from __future__ import annotations

import numpy as np
import pytest

from keyhole.numerics.svd import condition, least_squares, pseudo_inverse, singular_values, spectral_norm, svd


@pytest.fixture(params=[False, True], ids=["converges", "does not converge"])
def gives_up(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise np.linalg.LinAlgError("SVD did not converge")

    if request.param:
        for name in ("svd", "lstsq"):
            monkeypatch.setattr(np.linalg, name, fails)


@pytest.mark.usefixtures("gives_up")
@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (2, 5, 3)])
def test_factors_are_those_of_the_matrix(shape: tuple[int, ...]) -> None:
    matrix = np.random.default_rng(1).standard_normal(shape)
    for full in (False, True):
        left, sizes, right = svd(matrix, full_matrices=full)
        rank = sizes.shape[-1]
        product = (left[..., :rank] * sizes[..., None, :]) @ right[..., :rank, :]
        np.testing.assert_allclose(product, matrix, atol=1e-13)
        np.testing.assert_allclose(singular_values(matrix), sizes, atol=1e-13)
    if matrix.ndim == 2:
        assert spectral_norm(matrix) == pytest.approx(sizes[0])


@pytest.mark.usefixtures("gives_up")
def test_solutions_are_the_shortest() -> None:
    rng = np.random.default_rng(2)
    matrix = rng.standard_normal((6, 2)) @ rng.standard_normal((2, 4))
    right = rng.standard_normal((6, 3))
    inverse = pseudo_inverse(matrix)
    np.testing.assert_allclose(matrix @ inverse @ matrix, matrix, atol=1e-12)
    np.testing.assert_allclose(inverse @ matrix @ inverse, inverse, atol=1e-12)
    np.testing.assert_allclose(least_squares(matrix, right), inverse @ right, atol=1e-12)
    assert condition(np.diag([4.0, 2.0])) == pytest.approx(2.0)
    assert condition(np.zeros((2, 2))) == np.inf
