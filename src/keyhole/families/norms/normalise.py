"""LayerNorm and RMSNorm without gain and bias, and the coordinates in which nothing of a token is lost to them."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from keyhole.arrays import Array, Floats, floats, like, namespace
from keyhole.errors import UsageError

Norm = Literal["layer", "rms"]
NORMS: tuple[Norm, ...] = get_args(Norm)
# Relative step of the difference that tells what epsilon does.
STEP = 1e-4


def check_norm(norm: str, epsilon: Array) -> None:
    """UsageError for another norm, or an epsilon that is no number from 0."""
    if norm not in NORMS:
        raise UsageError(f"norm must be one of {', '.join(NORMS)}, not {norm!r}")
    if tuple(epsilon.shape) != () or not float(epsilon) >= 0:
        raise UsageError(f"epsilon must be one number of at least 0, not {epsilon!r}")


def centred(vectors: Array, norm: str) -> Array:  # (…, width)
    """The part of the vectors that a norm sees: without their mean for LayerNorm, all of them for RMSNorm."""
    return vectors - namespace(vectors).mean(vectors, axis=-1, keepdims=True) if norm == "layer" else vectors


def normalise(vectors: Array, epsilon: Array, norm: str) -> Array:  # (…, width)
    """c/√(mean c² + ε) of the part c that the norm sees."""
    seen = centred(vectors, norm)
    return seen / size_of(seen, epsilon)


def size_of(seen: Array, epsilon: Array) -> Array:  # (…, width) -> (…, 1)
    """√(mean c² + ε)."""
    xp = namespace(seen)
    return xp.sqrt(xp.mean(seen**2, axis=-1, keepdims=True) + like(epsilon, seen))


def cancellation(vectors: Array, norm: str) -> float:
    """The most by which taking the mean off enlarges the rounding of a vector, relatively."""
    xp = namespace(vectors)
    whole, seen = (xp.sqrt(xp.sum(each**2, axis=-1)) for each in (vectors, centred(vectors, norm)))
    ratios = floats(whole)[floats(whole) > 0] / floats(seen)[floats(whole) > 0]
    return float(np.max(ratios, initial=1.0))


def step_of(epsilon: Array) -> float:
    """A step of epsilon that shows its first-order effect."""
    return STEP * float(epsilon) or np.finfo(np.float64).tiny ** 0.5


def mean_free(width: int, norm: str) -> Floats:  # (width, width − 1), or (width, width) for RMSNorm
    """An orthonormal basis of what the norm sees, as near to the unit vectors as can be."""
    if norm == "rms" or width == 1:
        return np.eye(width)
    mirror = np.full(width, width**-0.5)
    mirror[0] += 1.0
    turned: Floats = np.eye(width) - np.outer(mirror, mirror) / mirror[0]
    return turned[:, 1:]


def undone(vectors: Array, epsilon: float) -> Array:  # (…, width), of norms less than √width
    """The tokens that are normalised to these vectors: w·√(ε/(1 − mean w²))."""
    xp = namespace(vectors)
    return vectors * xp.sqrt(epsilon / (1.0 - xp.mean(vectors**2, axis=-1, keepdims=True)))


def undone_norm(norm: float, width: int, epsilon: float) -> float:
    """The norm of tokens that are normalised to this one; infinite where none are."""
    left = 1.0 - norm**2 / width
    return norm * (epsilon / left) ** 0.5 if left > 0 else float("inf")
