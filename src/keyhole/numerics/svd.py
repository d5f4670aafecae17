"""Singular values of NumPy matrices, also where LAPACK's fast algorithm does not converge."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.linalg

from keyhole.arrays import Floats


def svd(matrix: npt.NDArray[Any], *, full_matrices: bool = False) -> tuple[Floats, Floats, Floats]:  # (..., m, n)
    """U, the singular values and Vᵀ: by divide and conquer or, for the rare finite matrix it fails on, by QR steps."""
    try:
        left, sizes, right = np.linalg.svd(matrix, full_matrices=full_matrices)
    except np.linalg.LinAlgError:
        flat = matrix.reshape(-1, *matrix.shape[-2:])
        parts = [scipy.linalg.svd(each, full_matrices=full_matrices, lapack_driver="gesvd") for each in flat]
        left, sizes, right = (
            np.stack(each).reshape(*matrix.shape[:-2], *each[0].shape) for each in zip(*parts, strict=True)
        )
    return np.asarray(left), np.asarray(sizes), np.asarray(right)


def singular_values(matrix: npt.NDArray[Any]) -> Floats:  # (..., m, n) -> (..., min(m, n))
    """The singular values, the largest first."""
    try:
        return np.asarray(np.linalg.svd(matrix, compute_uv=False))
    except np.linalg.LinAlgError:
        return svd(matrix)[1]


def spectral_norm(matrix: Floats) -> float:  # (m, n)
    """The largest singular value."""
    return float(singular_values(matrix)[0])


def condition(matrix: npt.NDArray[Any]) -> Floats:  # (..., m, n) -> (...)
    """The largest singular value over the smallest; inf where that is zero."""
    sizes = singular_values(matrix)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(sizes[..., -1] > 0, sizes[..., 0] / sizes[..., -1], np.inf))


def pseudo_inverse(matrix: Floats) -> Floats:  # (m, n) -> (n, m)
    """The pseudo-inverse; singular values below rounding count as zero."""
    left, sizes, right = svd(matrix)
    kept = sizes > max(matrix.shape) * float(np.finfo(np.float64).eps) * np.max(sizes, initial=0.0)
    return np.asarray((right[kept].T / sizes[kept]) @ left[:, kept].T)


def least_squares(matrix: Floats, right: Floats) -> Floats:  # (m, n), (m,) or (m, k) -> (n,) or (n, k)
    """The shortest solution of least squares; singular values below rounding count as zero."""
    try:
        return np.asarray(np.linalg.lstsq(matrix, right, rcond=None)[0])
    except np.linalg.LinAlgError:
        return pseudo_inverse(matrix) @ right
