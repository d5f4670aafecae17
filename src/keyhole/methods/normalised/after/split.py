"""The sum of the heads' values split among the heads, where what they span has more dimensions than answers have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from keyhole.arrays import Floats
from keyhole.numerics.svd import pseudo_inverse

# Errors are followed by so many random draws of them, and taken for so many times as much.
DRAWS, STRESS = 4, 2.0


@dataclass(frozen=True)
class Split:
    """Values of tokens as shares of the directions of all heads."""

    directions: list[Floats]  # (rank, outputs) for each head
    shares: Floats  # (width, sum of all ranks)
    null: Floats  # (excess, sum of all ranks) orthonormal: shares that add up to nothing
    untold: Floats  # (excess,) what a unit token's part along these may be off by

    @classmethod
    def of(cls, directions: list[Floats], total: Floats) -> Split:
        """The shortest shares that add up to the values of all heads together, (width, outputs)."""
        together = np.concatenate(directions)
        null = np.linalg.qr(together, mode="complete")[0][:, together.shape[1] :].T
        return cls(directions, total @ pseudo_inverse(together), null, np.zeros(len(null)))

    def told_by(self, tokens: Floats, seen: Floats, known: Floats, noise: float) -> Split:
        """The split told by the directions of what these tokens (width, width) add to one known vector, but for noise.

        s·seen − known = Σ_h σ_h·(value_h + t·free_h) is linear in the norm s, the weights σ_h and σ_h·t. As the free
        parts add up to nothing, σ_h·t is told up to what all heads have alike.
        """
        heads, excess = len(self.directions), len(self.null)
        own, free = self._values(tokens @ self.shares), self._values(self.null)  # (n, heads, outputs)
        system = np.concatenate(
            [seen[:, None], -own, -np.tile(free.reshape(1, -1, free.shape[2]), (len(own), 1, 1))], 1
        )
        # The last unknown of every free direction is dropped: only differences are told.
        kept = np.delete(np.arange(system.shape[1]), [1 + heads + (n + 1) * heads - 1 for n in range(excess)])
        basis, triangle = np.linalg.qr(system[:, kept].transpose(0, 2, 1))
        solved = np.linalg.solve(triangle, np.swapaxes(basis, 1, 2) @ known[None, :, None])[..., 0]
        weights = solved[:, 1 : 1 + heads]
        others = np.concatenate(
            [solved[:, 1 + heads :].reshape(-1, excess, heads - 1), np.zeros((len(own), excess, 1))], axis=2
        )
        uneven = (weights - np.mean(weights, axis=1, keepdims=True))[:, None]
        missing = np.sum(others * uneven, axis=2) / np.sum(uneven**2, axis=2)
        errors = noise * np.linalg.norm(np.linalg.inv(triangle), axis=2)[:, 1 + heads :].reshape(len(own), excess, -1)
        off = np.max(errors, axis=2) / np.linalg.norm(uneven[:, 0], axis=1, keepdims=True)
        untold = np.sqrt(np.mean(off**2, axis=0)) / float(np.linalg.norm(tokens[0]))
        return replace(self, shares=self.shares + np.linalg.solve(tokens, missing) @ self.null, untold=untold)

    def _values(self, shares: Floats) -> Floats:  # (n, all ranks) -> (n, heads, outputs)
        ends = np.cumsum([0, *map(len, self.directions)])
        parts = zip(pairwise(ends), self.directions, strict=True)
        return np.stack([shares[:, first:last] @ span for (first, last), span in parts], axis=1)

    def spread(self, tilts: list[Floats], total: Floats, rng: np.random.Generator) -> Floats:  # (heads, outputs)
        """What errors of the directions, of these deviations, make of the values of a unit token."""
        own, squares = self._values(self.shares), 0.0
        for _ in range(DRAWS):
            moved = [
                span + tilt[:, None] * rng.standard_normal(span.shape)
                for span, tilt in zip(self.directions, tilts, strict=True)
            ]
            other = Split.of(moved, total)
            # Along what adds up to nothing, as near as can be: that is told otherwise.
            near = other.shares + (self.shares - other.shares) @ other.null.T @ other.null
            apart = replace(other, shares=near)._values(near) - own
            squares = squares + np.mean(apart**2, axis=0) / DRAWS
        along = np.einsum("e,eho->ho", self.untold**2, self._values(self.null) ** 2)
        return np.asarray(STRESS * np.sqrt(squares + along))
