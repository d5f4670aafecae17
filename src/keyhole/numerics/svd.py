"""Singular values, those of NumPy matrices also where LAPACK's fast algorithm does not converge."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.linalg

from keyhole.arrays import Array, Floats, Space, floats, like, lu_factor, namespace, to_numpy


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


# Below this many rows or columns the host is done before a device has begun.
SMALL = 512


def _is_small_elsewhere(matrix: Array) -> bool:
    return not isinstance(matrix, np.ndarray) and not Space.of(matrix).on_cpu and max(matrix.shape) <= SMALL


def pseudo_inverse_of(matrix: Array) -> Array:  # (m, n) -> (n, m)
    """The pseudo-inverse of a matrix of any library; that of a small one is worked out on the host."""
    if _is_small_elsewhere(matrix):
        return like(np.linalg.pinv(to_numpy(matrix)), matrix)
    return namespace(matrix).linalg.pinv(matrix)


def left_vectors(matrix: Array) -> tuple[Array, Array]:  # (m, n) -> (m, k), (k,)
    """Left singular vectors and singular values of a matrix of any library, k the lesser of both sides."""
    xp = namespace(matrix)
    if isinstance(matrix, np.ndarray) or Space.of(matrix).on_cpu or matrix.shape[0] < 2 * matrix.shape[1]:
        left, sizes, _ = xp.linalg.svd(matrix, full_matrices=False)
        return left, sizes
    basis, triangle = xp.linalg.qr(matrix)  # of a tall one, by that of its triangle
    if _is_small_elsewhere(triangle):
        turn, sizes = (like(each, matrix) for each in np.linalg.svd(to_numpy(triangle))[:2])
    else:
        turn, sizes, _ = xp.linalg.svd(triangle)
    return basis @ turn, sizes


# Singular values below this part of the largest are not told by a matrix times its transpose.
TOLD_BY_SQUARES = 1e-5


def decomposed(space: Space, matrix: Floats) -> tuple[Array, Floats, Array]:  # (m, n), m ≤ n
    """Left singular vectors (m, m), singular values (m,) and pseudo-inverse (n, m), worked out in a space.

    On a device by the matrix times its transpose, in a tenth of the time, where that tells all singular values; a step
    of Newton's method mends what squares lose in the inverse.
    """
    xp = space.xp
    if not space.on_cpu:
        wide = space.asarray(matrix)
        squares, vectors = xp.linalg.eigh(wide @ wide.T)
        sizes = np.sqrt(np.maximum(floats(squares)[::-1], 0.0))
        if sizes[-1] > TOLD_BY_SQUARES * sizes[0]:
            vectors = xp.flip(vectors, axis=1)
            inverse = wide.T @ ((vectors / space.asarray(sizes**2)) @ vectors.T)
            return vectors, sizes, 2 * inverse - inverse @ (wide @ inverse)
    left, sizes, right = svd(matrix)
    kept = sizes > max(matrix.shape) * float(np.finfo(np.float64).eps) * np.max(sizes, initial=0.0)
    inverse = (right[kept].T / sizes[kept]) @ left[:, kept].T
    return space.asarray(left), sizes, space.asarray(inverse)


def product_singular_values(left: Array, right: Array) -> Floats:  # (m, k), (k, n) -> (k,)
    """Singular values of a product of a tall and a wide matrix of any library."""
    xp = namespace(left)
    return singular_values(to_numpy(xp.linalg.qr(left)[1] @ xp.linalg.qr(right.T)[1].T))


def least_singular_value_exceeds(matrix: Array, bound: float) -> bool:  # (m, n), m ≥ n
    """Whether all n singular values of a matrix of any library are above a bound.

    One over the norm of the inverse of a square one is below them all, and mostly says so in a tenth of the time.
    """
    xp = namespace(matrix)
    factors = lu_factor(matrix) if matrix.shape[0] == matrix.shape[1] else None
    if factors is not None and bool(xp.all(xp.linalg.diagonal(factors[0]) != 0)):
        inverse = xp.linalg.inv(matrix)
        if 2.0 * bound * float(xp.linalg.vector_norm(inverse)) < 1.0:  # false for nan
            return True
    return bool(xp.min(xp.linalg.svdvals(matrix)) > bound)
