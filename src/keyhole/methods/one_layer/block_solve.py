"""Linear systems in blocks: which blocks to ask for, their solution, and the value matrix behind a residual."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats, Integers

# What is left of a block of rows, relative to the largest of all, once others explain it.
EXPLAINED = 1e-9
# Each step of refinement gains as many digits as the inverse has.
REFINEMENTS = 2
# Singular values below so many times the errors of their matrix cannot be told from zero.
SURE = 4.0


def choose_blocks(blocks: Floats, count: int) -> Integers:  # (n, rows, unknowns) -> (≥ count,) places
    """Blocks of rows that determine all unknowns, greedily: each time the block with most that is new.

    For blocks of one row this is elimination with pivoting. Once nothing is new, the others count anew, until there are
    `count` of them and all unknowns are determined as far as any choice could.
    """
    chosen: list[int] = []
    left, free, all_told = blocks.copy(), np.ones(len(blocks), dtype=bool), False
    largest = float(np.max(np.sum(blocks**2, axis=(1, 2)), initial=0.0)) ** 0.5
    begun = 0  # how many were chosen when all counted anew
    while free.any() and not (all_told and len(chosen) >= count):
        news = np.where(free, np.sum(left**2, axis=(1, 2)), -1.0)
        best = int(np.argmax(news))
        if news[best] <= (EXPLAINED * largest) ** 2:
            if begun == len(chosen):
                break  # the others tell nothing, even by themselves
            left, all_told, begun = blocks.copy(), True, len(chosen)
            continue
        chosen.append(best)
        free[best] = False
        _, sizes, basis = np.linalg.svd(left[best], full_matrices=False)
        basis = basis[sizes > EXPLAINED * largest]
        left = left - (left @ basis.T) @ basis
    return np.asarray(chosen, dtype=np.int64)


@dataclass(frozen=True)
class WeightedSolution:
    """The least-squares solution of a linear system and what its errors amount to."""

    values: Floats  # (unknowns, n)
    inverse: Floats  # (unknowns, equations)
    residual: Floats  # (equations, n)


def solve_weighted(system: Floats, right: Floats, bars: Floats) -> WeightedSolution:  # (m, unknowns), (m, n), (m, n)
    """Least squares, equations weighed by the inverse of their bars."""
    weight = 1 / np.maximum(np.max(bars, axis=1), np.finfo(np.float64).tiny)
    weighed = system * weight[:, None]
    inverse = np.linalg.pinv(weighed) * weight
    values = inverse @ right
    for _ in range(REFINEMENTS):  # weights of many sizes cost the inverse digits, which the residual gives back
        values = values + inverse @ (right - system @ values)
    return WeightedSolution(values, inverse, np.abs(system @ values - right))


def solve_value(
    inner: Floats,  # (n, width) A
    inner_radius: Floats,
    product: Floats,  # (n, width) A·Vᵀ
    product_radius: Floats,
) -> tuple[Floats, Floats, Floats, Floats, bool]:
    """V (width, width) of least norm, its radius, |A·Vᵀ − product|, what errors explain of it, whether V is unique."""
    both = np.linalg.norm(np.hstack([inner, product]), axis=1)
    errors = np.linalg.norm(np.hstack([inner_radius, product_radius]), axis=1)
    errors = np.maximum(errors, np.finfo(np.float64).eps * both)
    # Equations weigh by the inverse of their errors: one that is nothing but error must not count.
    scale = 1 / np.where(errors > 0, errors, 1.0)[:, None]
    left, values, right = np.linalg.svd(inner * scale, full_matrices=False)
    shown = np.linalg.norm(left.T @ (product * scale), axis=1)
    cut = SURE * float(inner.size) ** 0.5 / inner.shape[1] ** 0.5
    # A direction that the net cannot tell from nothing is left out, unless the product shows something there.
    known = (values > cut) | ((shown > cut) & (values > 0))
    inverse = (right[known].T / values[known]) @ left[:, known].T * scale.T  # (width, n)
    turned = inverse @ product  # Vᵀ
    spread = np.sqrt(inverse**2 @ (product_radius**2 + inner_radius**2 @ turned**2))
    explained = np.sqrt(product_radius**2 + inner_radius**2 @ turned**2) + np.abs(inner) @ spread + errors[:, None]
    missed = np.abs(inner @ turned - product)
    return turned.T, spread.T, missed, explained, int(np.sum(known)) == inner.shape[1]
