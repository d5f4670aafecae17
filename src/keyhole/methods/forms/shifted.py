"""Linear systems changed by rank one: what a last token that is not short against the first adds to a form."""

from __future__ import annotations

from dataclasses import dataclass

from keyhole.arrays import Array, namespace


@dataclass(frozen=True)
class ShiftedSolution:
    """Solutions a of A·a − ratio·(own·a) = values, one per column."""

    coefficients: Array  # (rank, n)
    form: Array  # (n,) own·a
    damping: Array  # (n,) at most one: errors are amplified by up to its inverse


def solve_shifted(
    inverse: Array,  # (rank, m) of A
    own: Array,  # (rank, n)
    values: Array,  # (m, n)
    ratio: Array,  # (m, n)
) -> ShiftedSolution:
    """The Sherman–Morrison formula, column by column."""
    xp = namespace(values)
    plain, shift = inverse @ values, inverse @ ratio
    denominator = 1 - xp.sum(own * shift, axis=0)
    form = xp.sum(own * plain, axis=0) / denominator
    return ShiftedSolution(plain + shift * form, form, xp.minimum(xp.abs(denominator), xp.ones_like(denominator)))
