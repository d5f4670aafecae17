"""Activations of neurons, their slopes, and how steep they get."""

from __future__ import annotations

import array_api_compat
import numpy as np
from scipy.special import erf as scipy_erf

from keyhole.arrays import Array, namespace

# Largest slope of each activation, rounded up. All of them are z/2 plus an even function of z.
STEEPEST = {"relu": 1.0, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1}
ACTIVATIONS = tuple(STEEPEST)


def activate(name: str, z: Array) -> Array:
    """The activation of this name, entry by entry."""
    xp = namespace(z)
    if name == "relu":
        return xp.where(z > 0, z, xp.zeros_like(z))
    if name == "gelu":
        return 0.5 * z * (1 + _erf(z * 0.5**0.5))
    if name == "gelu_tanh":
        return 0.5 * z * (1 + xp.tanh((2 / np.pi) ** 0.5 * z * (1 + 0.044715 * z * z)))
    return 0.5 * z * (1 + xp.tanh(0.5 * z))  # silu: z·σ(z), in the form that does not overflow


def activate_slope(name: str, z: Array) -> Array:
    """The derivative of the activation, entry by entry; at a kink that of the right side is not promised."""
    xp = namespace(z)
    if name == "relu":
        return xp.where(z > 0, xp.ones_like(z), xp.zeros_like(z))
    if name == "gelu":
        return 0.5 * (1 + _erf(z * 0.5**0.5)) + z * xp.exp(-0.5 * z * z) / (2 * np.pi) ** 0.5
    if name == "gelu_tanh":
        tanh = xp.tanh((2 / np.pi) ** 0.5 * z * (1 + 0.044715 * z * z))
        return 0.5 * (1 + tanh) + 0.5 * z * (1 - tanh * tanh) * (2 / np.pi) ** 0.5 * (1 + 3 * 0.044715 * z * z)
    gate = 0.5 * (1 + xp.tanh(0.5 * z))
    return gate * (1 + z * (1 - gate))


def _erf(z: Array) -> Array:
    """The error function, which the array API has no word for."""
    xp = namespace(z)
    return scipy_erf(z) if array_api_compat.is_numpy_namespace(xp) else xp.erf(z)
