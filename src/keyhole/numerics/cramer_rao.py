"""The Cramér–Rao bound for score entries: what no choice of queries can beat under noise."""

from __future__ import annotations

import numpy as np


def universal_floor(width: int, value_norm: float, max_norm: float, noise: float, queries: float) -> float:
    """The least root-mean-square error of a score entry that any design can reach with so many noisy queries.

    For tokens of norm at most B, h = Cov_p(X)·v lies in the ball of centre c·v̂ and radius c = B²·|v|/2, which bounds
    the information Σ (h·hᵀ) ⊗ (g·gᵀ) of any queries, and by it (Cramér and Rao) the error of any unbiased estimate.
    """
    centre = max_norm**2 * value_norm / 2
    if width == 1:
        return float(noise / (max_norm * 2 * centre * np.sqrt(queries)))
    cosine = np.linspace(0.0, 1.0, 4001)[:-1]  # the best is at about 1/(d − 1)²
    spread = 1 / (1 + cosine) ** 2 + (width - 1) ** 2 / (1 - cosine**2)
    return float(noise / (max_norm * centre * np.sqrt(queries)) * np.sqrt(np.min(spread)))
