"""LayerNorm seen from behind: its outputs lie on an ellipsoid, which tells gain and bias, and directions inside it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats
from keyhole.families.norms.normalise import mean_free
from keyhole.numerics.svd import least_squares, svd


@dataclass(frozen=True)
class Sphere:
    """What stands behind the norm: gain·n + bias, up to the sign of n."""

    gain: Floats  # (width,)
    bias: Floats  # (width,)
    basis: Floats  # (width, width − 1) of the vectors that the norm sees
    misfit: float  # root mean square of what answers are off the sphere by, over its radius

    def flipped(self) -> Sphere:
        """The other sign."""
        return Sphere(-self.gain, self.bias, self.basis, self.misfit)

    def inside(self, answers: Floats) -> Floats:  # (n, width) -> (n, width − 1)
        """What was normalised over √(mean square + ε), in the coordinates of the basis: of norm √width at most."""
        return np.asarray(((answers - self.bias) / self.gain) @ self.basis)

    def directions(self, answers: Floats) -> Floats:  # (n, width) -> (n, width − 1)
        """The directions of what was normalised."""
        inner = self.inside(answers)
        return np.asarray(inner / np.linalg.norm(inner, axis=1, keepdims=True))


def fit_sphere(answers: Floats) -> Sphere:  # (n, width), n > width
    """The norm behind answers for which ε does not matter.

    Σ (y − β)_i/γ_i = 0 is a plane, whose normal is the last singular vector of centred answers; in it
    Σ ((y − β)_i/γ_i)² = width is a sphere, linear in its centre.
    """
    width = answers.shape[1]
    basis = mean_free(width, "layer")
    middle = np.mean(answers, axis=0)
    normal = svd(answers - middle)[2][-1]
    inner = (answers * normal) @ basis
    shift = np.mean(inner, axis=0)
    apart = inner - shift
    design = np.hstack([2 * apart, np.ones((len(apart), 1))])
    squares = np.sum(apart**2, axis=1)
    solved = least_squares(design, squares)
    centre = solved[:-1]
    radius = float(np.sqrt(solved[-1] + np.sum(centre**2)))
    misfit = float(np.sqrt(np.mean((squares - design @ solved) ** 2))) / radius**2
    bias = (basis @ (centre + shift) + float(normal @ middle) / width) / normal
    return Sphere(radius / (width**0.5 * normal), bias, basis, misfit)


def fit_homography(directions: Floats, tokens: Floats) -> tuple[Floats, Floats, float]:  # (n, m), (n, k), n > k
    """A linear map (m, k) with these directions of its values, up to a factor: (map, their norms, misfit).

    Σ_j c_j·x_j = 0 makes Σ_j c_j·s_j·w_j = 0, which is linear in the norms s.
    """
    count, width = tokens.shape
    null = svd(tokens.T, full_matrices=True)[2][width:]  # (n − k, n)
    system = (null[:, None, :] * directions.T[None, :, :]).reshape(-1, count)
    _, _, right = svd(np.linalg.qr(system)[1])
    norms = right[-1] * np.sign(np.sum(right[-1]))
    scaled = directions * norms[:, None]
    linear = least_squares(tokens, scaled).T
    off = scaled - tokens @ linear.T
    return np.asarray(linear), norms, float(np.sqrt(np.mean(off**2)) / np.sqrt(np.mean(scaled**2)))


def fit_offset(directions: Floats, images: Floats) -> Floats:  # (n, m), (n, m) -> (m,)
    """What is added to the images of tokens so that the sums have these directions."""
    count, width = directions.shape
    system = count * np.eye(width) - directions.T @ directions
    along = np.sum(directions * images, axis=1, keepdims=True)
    return np.asarray(np.linalg.solve(system, np.sum(directions * along - images, axis=0)))
