"""The weights of attention of named parts, on scores that are known: what a naming is checked by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats

NONE = "none"


def no_law(n: int) -> float:  # noqa: ARG001
    """One, whatever the length."""
    return 1.0


def log_law(n: int) -> float:
    """Of log n attention, over its value at two tokens."""
    return float(np.log(n) / np.log(2))


def root_law(n: int) -> float:
    """Of scores over the root of the length, over its value at two tokens."""
    return float((2 / n) ** 0.5)


# Temperatures by length, which are one at two tokens.
LAWS: dict[str, Callable[[int], float]] = {NONE: no_law, "log": log_law, "root": root_law}


@dataclass(frozen=True)
class KnownAttention:
    """Link, normaliser, position bias and length law with their constants."""

    link: str = "exp"
    cap: float = np.inf
    gate: float = 0.0  # the bias of a sigmoid
    normaliser: str = "sum"
    sink: float = 0.0  # the mass of a sink, that of a token of score zero being one
    keep: int = 2**30  # tokens that a top-k keeps
    position_bias: str = NONE
    masses: tuple[float, ...] = (1.0,)  # of a token of score zero by its distance, the own being one
    reach: int = 2**30  # of a window
    length_law: str = NONE

    def position_masses(self, length: int) -> Floats:  # (length,), the last token last
        """Masses of tokens of score zero by their places."""
        distance = np.arange(length)[::-1]
        if self.position_bias == "window":
            return np.where(distance < self.reach, 1.0, 0.0)
        if self.position_bias == "alibi":
            return np.asarray(self.masses[1] ** distance.astype(float))
        if self.position_bias == "table":
            return np.asarray(self.masses)[np.minimum(distance, len(self.masses) - 1)]
        return np.ones(length)

    def energies(self, scores: Floats) -> Floats:
        """Logarithms of masses, nothing at score zero."""
        if self.link == "softcap":
            return np.asarray(self.cap * np.tanh(scores / self.cap))
        if self.link == "sigmoid":
            return np.asarray(np.logaddexp(0.0, -self.gate) - np.logaddexp(0.0, -scores - self.gate))
        return scores

    def scores(self, energies: float) -> float:
        """The inverse of `energies`; nan where there is none."""
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            if self.link == "softcap":
                return float(self.cap * np.arctanh(np.asarray(energies / self.cap)))
            if self.link == "sigmoid":
                share = np.exp(energies - np.logaddexp(0.0, -self.gate))
                return float(np.log(share / (1 - share)) - self.gate)
            return float(energies)

    def weights(self, scores: Floats) -> Floats:  # (length,) -> (length,)
        """Weights of one sequence; of a sigmoid over that of score zero."""
        length = scores.size
        energies = self.energies(LAWS[self.length_law](max(length, 2)) * scores)
        if self.normaliser in ("sparsemax", "entmax"):
            return simplex_weights(energies, 2.0 if self.normaliser == "sparsemax" else 1.5)
        top = 0.0 if self.normaliser in (NONE, "count") else float(np.max(energies))
        masses = np.exp(energies - top) * self.position_masses(length)
        if length > self.keep:
            masses[np.argsort(-energies, kind="stable")[self.keep :]] = 0.0
        if self.normaliser in (NONE, "count"):
            return np.asarray(masses / (length if self.normaliser == "count" else 1))
        return np.asarray(masses / (masses.sum() + self.sink * np.exp(-top)))

    def score_of_weight(self, weight: float, length: int, background: float | None = None) -> float:
        """The score of the token at distance one that has this weight beside tokens of score zero; nan for none.

        `background` is the mass of these, with that of a sink, where it is known otherwise.
        """
        law = LAWS[self.length_law](max(length, 2))
        others = length - 1
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            weight, one = np.float64(weight), np.float64(1.0)
            if self.normaliser == "sparsemax":
                return float(weight - (one - weight) / others) / law
            if self.normaliser == "entmax":
                return float(2 * (np.sqrt(weight) - np.sqrt((one - weight) / others))) / law
            masses = self.position_masses(length)
            if self.normaliser in (NONE, "count"):
                mass = weight * (length if self.normaliser == "count" else 1)
            else:
                kept = float(min(masses.sum(), self.keep)) - masses[-2] + self.sink
                mass = weight / (one - weight) * (kept if background is None else background)
            return self.scores(float(np.log(mass / masses[-2]))) / law


def simplex_weights(scores: Floats, alpha: float) -> Floats:  # (length,) -> (length,)
    """Entmax of exponent α: (α−1)·score − τ, cut off at zero, to the power 1/(α−1), adding up to one."""
    scaled, power = (alpha - 1) * (scores - np.max(scores)), 1 / (alpha - 1)
    ordered = np.sort(scaled)[::-1]
    count = np.arange(1, scores.size + 1)
    sums, squares = np.cumsum(ordered), np.cumsum(ordered**2)
    if power == 1:
        edges = (sums - 1) / count
    else:  # Σ (z − τ)² = 1 over the largest ones
        spread = np.maximum(sums**2 - count * (squares - 1), 0.0)
        edges = (sums - np.sqrt(spread)) / count
    edge = edges[np.flatnonzero(edges <= ordered)[-1]]
    return np.asarray(np.maximum(scaled - edge, 0.0) ** power)
