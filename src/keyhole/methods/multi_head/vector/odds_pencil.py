"""Heads from the odds of one token: softmax weights at several multiplicities lie on a curve that only heads follow.

A token of odds p, in m copies against one other, has the weight w_m = m·p/(1 + m·p), so that two multiplicities obey
k·w_m − m·w_k + (m − k)·w_k·w_m = 0. Answers are sums of heads, each with its own p: a functional c with c·answer = w of
one head obeys that too, which is linear in (c, c·cᵀ). The null space of as many equations as needed has one dimension
per head, and one eigenproblem in it yields every c.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats


@dataclass(frozen=True)
class Pencil:
    """The functionals that tell heads apart, and how clearly they do."""

    functionals: Floats  # (heads, heads): row h applied to an answer is the weight in head h
    null: float  # the largest singular value of the null space, over the largest of all
    gap: float  # the smallest one outside it
    condition: float  # of the eigenproblem
    imaginary: float  # size of imaginary parts, zero for heads


def equations(heads: int) -> int:
    """Equations that determine the functionals: unknowns less the dimension of the null space."""
    return heads * (heads + 3) // 2 - heads


def solve_pencil(answers: Floats, copies: Floats, rng: np.random.Generator) -> Pencil:  # (n, multiplicities, heads)
    """All heads from whitened answers, one coordinate per head."""
    heads = answers.shape[2]
    i, j = np.triu_indices(heads)
    double = np.where(i == j, 1.0, 2.0)
    rows = []
    for a in range(copies.size):
        for b in range(a + 1, copies.size):
            one, two, k, m = answers[:, a], answers[:, b], copies[a], copies[b]
            products = (one[:, i] * two[:, j] + one[:, j] * two[:, i]) / 2 * double
            rows.append(np.hstack([k * two - m * one, (m - k) * products]) / np.hypot(k, m))
    system = np.concatenate(rows)
    sizes = np.linalg.norm(system, axis=0)
    sizes = np.where(sizes > 0, sizes, 1.0)
    full = system.shape[0] < system.shape[1]
    _, singular, right = np.linalg.svd(system / sizes, full_matrices=full)
    singular = np.concatenate([singular, np.zeros(right.shape[0] - singular.size)])
    space = right[-heads:] / sizes
    linear, quadratic = space[:, :heads], np.zeros((heads, heads, heads))
    quadratic[:, i, j] = quadratic[:, j, i] = space[:, heads:]
    turn = rng.standard_normal(heads)
    matrix = np.linalg.lstsq(linear, quadratic @ turn, rcond=None)[0].T
    eigenvalues, vectors = np.linalg.eig(matrix)
    condition = float(np.linalg.cond(vectors)) * float(np.linalg.cond(linear))
    vectors = vectors * (eigenvalues / (turn @ vectors))
    imaginary = float(np.max(np.abs(vectors.imag)) / np.max(np.abs(vectors)))
    gap = float(singular[-heads - 1] / singular[0]) if singular.size > heads else 1.0
    return Pencil(vectors.real.T, float(singular[-heads] / singular[0]), gap, condition, imaginary)
