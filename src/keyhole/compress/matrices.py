"""Best approximations of low rank for tokens of a given covariance."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from keyhole.arrays import Floats

# Directions in which tokens hardly vary, over the largest: what is done to them shows in no answer.
LEAST_VARIANCE = 1e-12
# Ranks of one matrix that are tried.
MOST_RANKS = 12


@dataclass(frozen=True)
class Truncation:
    """The singular value decomposition of a matrix between whitened tokens: the best of each rank are cut from it.

    With C the second moments of tokens, ‖C^½(W − W_r)C^½‖² is least, the expected square of the change of a bilinear
    form uᵀWg for independent u and g, or ‖C^½(V − V_r)‖², that of the change of uᵀV.
    """

    matrix: Floats  # (m, n)
    root: Floats  # (m, m): C^½
    inverse: Floats  # (m, m)
    both: bool  # whether tokens stand at the right too, as for a score

    @cached_property
    def svd(self) -> tuple[Floats, Floats, Floats]:
        """That of the matrix between whitened tokens."""
        left, sizes, right = np.linalg.svd(
            self.root @ self.matrix @ self.root if self.both else self.root @ self.matrix, full_matrices=False
        )
        return left, sizes, right

    @cached_property
    def rank(self) -> int:
        """The numerical rank."""
        sizes = self.svd[1]
        return int(np.sum(sizes > max(self.matrix.shape) * np.finfo(np.float64).eps * sizes[0])) if sizes[0] else 0

    def of_rank(self, rank: int) -> Floats:
        """The best approximation of this rank; the matrix itself where that is its own."""
        if rank >= self.rank and self.rank == min(self.matrix.shape):
            return self.matrix
        left, sizes, right = self.svd
        cut = self.inverse @ (left[:, :rank] * sizes[:rank]) @ right[:rank]
        return cut @ self.inverse if self.both else cut

    def ranks(self, most: int | None = None) -> list[int]:
        """Ranks to try, the largest first."""
        top = self.rank if most is None else min(most, self.rank)
        spread = np.geomspace(1, top, MOST_RANKS).tolist() if top else []
        return sorted({0, *(round(each) for each in spread)}, reverse=True)


def roots(moments: Floats) -> tuple[Floats, Floats]:  # (d, d) -> (d, d), (d, d)
    """Square root of second moments and its inverse."""
    sizes, vectors = np.linalg.eigh(moments)
    kept = np.sqrt(np.maximum(sizes, LEAST_VARIANCE * max(float(sizes[-1]), np.finfo(np.float64).tiny)))
    return (vectors * kept) @ vectors.T, (vectors / kept) @ vectors.T
