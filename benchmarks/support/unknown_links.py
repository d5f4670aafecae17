"""Heads whose links are smooth monotone functions without a name, written by the logarithms of masses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr, softmax

import keyhole as kh
from keyhole.arrays import Floats
from keyhole.families.parts import Attention, Tabulated

# Below this log(1 + exp(s)) is exp(s) to all digits, and its logarithm s.
LOW = -40.0


def _log_softplus(logits: Floats) -> Floats:
    safe = np.maximum(logits, LOW)
    return np.where(logits < LOW, logits, np.log(np.logaddexp(0, safe)))


def _root(logits: Floats) -> Floats:  # s + √(1 + s²), which cancels where s is negative
    size = np.sqrt(1 + logits**2)
    return np.where(logits > 0, logits + size, 1 / (size - np.minimum(logits, 0)))


# Energies by logits, and their slopes at zero.
LINKS: dict[str, tuple[Callable[[Floats], Floats], float]] = {
    "exp": (lambda s: s, 1.0),
    "softplus": (_log_softplus, 0.5 / np.log(2)),
    "softplus squared": (lambda s: 2 * _log_softplus(s), 1 / np.log(2)),
    "sigmoid": (lambda s: -np.logaddexp(0, -s), 0.5),
    "one + exp": (lambda s: np.logaddexp(0, s), 0.5),
    "softcap": (lambda s: 2 * np.tanh(s / 2), 1.0),
    "log 2 + tanh": (lambda s: np.log(2 + np.tanh(s)), 0.5),
    "normal": (log_ndtr, (2 / np.pi) ** 0.5),
    "arctan": (lambda s: np.log(2 + np.arctan(s)), 0.5),
    "asinh": (np.arcsinh, 1.0),
    "one + root": (lambda s: np.log(1 + _root(s) / 2), 1 / 3),
    "falling": (lambda s: np.log(2 - s / np.sqrt(1 + s**2)), -0.5),
}


@dataclass(frozen=True)
class Box:
    """A head with weights in proportion to exp(energy(logit))."""

    score: Floats
    value: Floats
    energy: Callable[[Floats], Floats]
    slope: float
    output_bias: Floats | None = None

    def __call__(self, tokens: Floats) -> Floats:
        """Answers to a batch."""
        logits = np.vecdot(tokens, (tokens[:, -1, :] @ self.score.T)[:, None, :])
        weights = softmax(self.energy(logits), axis=1)
        answers = (weights[:, None, :] @ tokens)[:, 0, :] @ self.value
        return answers if self.output_bias is None else answers + self.output_bias

    def seen_as(self, params: kh.SingleHead) -> kh.SingleHead:
        """The head in the unit, and with the link on the interval, of recovered parameters."""
        found = params.attention.link
        count = found.coefficients.shape[0]
        places = np.cos(np.pi * np.arange(count) / (count - 1))
        energies = self.energy(places * found.reach / self.slope) - self.energy(np.zeros(1))
        coefficients = np.polynomial.chebyshev.chebfit(places, energies, count - 1)
        link = Tabulated(coefficients, found.reach)
        return kh.SingleHead(self.slope * self.score, self.value, None, self.output_bias, Attention(link))


def random_box(name: str, width: int, seed: int, scale: float | None = None) -> Box:
    """A Gaussian head with this link, its scores of any size from 1e-2 to 1e2 unless one is given."""
    rng = np.random.default_rng([seed, width, *name.encode()])
    size = 10 ** rng.uniform(-2, 2) if scale is None else scale
    value = rng.standard_normal(width) * 10 ** rng.uniform(-1, 1)
    return Box(size * rng.standard_normal((width, width)) / width, value, *LINKS[name])
