"""All queries together: gates for each of several last tokens, values that these share, and how sure they are.

Gates of one last token enter its own queries only, so that they are eliminated token by token: what is solved at once
is as large as the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from scipy.linalg import solve_triangular

from keyhole.arrays import Floats
from keyhole.methods.gated_sum.model import GatedQueries, GatedSum, gate_columns, gate_weights, value_columns
from keyhole.numerics.svd import least_squares

# Gauss–Newton steps at most, and how often one is halved before it is given up.
MOST_STEPS, MOST_HALVINGS = 10, 4
# A step that lowers the residual by less than this part is the last.
SETTLED = 1e-3


@dataclass(frozen=True)
class JointHeads:
    """Heads at several last tokens."""

    gates: Floats  # (groups, heads, width)
    values: Floats  # (heads, width, outputs)
    constant: Floats  # (outputs,) added to every answer

    def at(self, group: int) -> GatedSum:
        """The heads at one of the last tokens."""
        return GatedSum(self.gates[group], self.values)

    def after(self, move: JointHeads, part: float) -> JointHeads:
        """The heads after a part of a move."""
        pairs = ((self.gates, move.gates), (self.values, move.values), (self.constant, move.constant))
        return JointHeads(*(own + part * change for own, change in pairs))


@dataclass(frozen=True)
class JointQueries:
    """Queries by last token, and those of single tokens, which are rows of zero and bases."""

    groups: Sequence[GatedQueries]
    plain: GatedQueries | None = None
    has_constant: bool = False  # whether a constant is unknown too

    def residuals(self, heads: JointHeads) -> Floats:  # -> (n · outputs,)
        """Answers without what the heads say, group after group, single tokens last."""
        parts = [each.answers - heads.at(n).predict(each) for n, each in enumerate(self.groups)]
        if self.plain is not None:
            parts.append(self.plain.answers - heads.at(0).predict(self.plain))
        return np.concatenate([np.ravel(part - heads.constant) for part in parts])

    def value_block(self, queries: GatedQueries, heads: GatedSum) -> Floats:  # -> (n · outputs, value unknowns)
        """By how much answers of one group move with the values and the constant."""
        columns = value_columns(queries, gate_weights(queries, heads.gates))
        if self.has_constant:
            columns = np.column_stack([columns, np.ones(columns.shape[0])])
        return np.asarray(np.kron(columns, np.eye(queries.answers.shape[1])), dtype=np.float64)


@final
class JointLinear:
    """The queries linearised at heads: gates of each group eliminated, then the values solved for.

    Nothing is cut off as rounding: what answers do not determine responds without bound. Raises LinAlgError where
    that is exactly so.
    """

    def __init__(self, queries: JointQueries, heads: JointHeads) -> None:
        self.queries, self.heads = queries, heads
        self.blocks, self.inverses, across = [], [], []
        for number, group in enumerate(queries.groups):
            here = heads.at(number)
            columns = gate_columns(group, gate_weights(group, here.gates), here.values)
            columns = np.moveaxis(columns, 0, 1).reshape(-1, here.gates.size)
            self.blocks.append(queries.value_block(group, here))
            basis, factor = np.linalg.qr(columns)
            self.inverses.append(solve_triangular(factor, basis.T))  # (heads · width, n · outputs)
            across.append(self.blocks[-1] - basis @ (basis.T @ self.blocks[-1]))
        if queries.plain is not None:
            across.append(queries.value_block(queries.plain, heads.at(0)))
        self.across = np.concatenate(across)
        self.starts = np.cumsum([0, *(block.shape[0] for block in self.blocks)])

    def step(self, residual: Floats) -> JointHeads:  # (n · outputs,)
        """By how much the heads move in a Gauss–Newton step."""
        heads, size = self.heads, self.heads.values.size
        move = least_squares(self.across, residual)
        gates = [
            inverse @ (residual[start : start + block.shape[0]] - block @ move)
            for inverse, block, start in zip(self.inverses, self.blocks, self.starts, strict=False)
        ]
        constant = move[size:] if self.queries.has_constant else np.zeros_like(heads.constant)
        return JointHeads(np.stack(gates).reshape(heads.gates.shape), move[:size].reshape(heads.values.shape), constant)

    def value_responses(self) -> Floats:  # -> (value unknowns, n · outputs)
        """By how much values, and the constant, move with each answer."""
        basis, factor = np.linalg.qr(self.across)
        return np.asarray(solve_triangular(factor, basis.T))

    def gate_responses(self, of_values: Floats, shares: Floats) -> Floats:  # (groups,) -> (heads · width, n · outputs)
        """By how much a combination of the groups' gates moves with each answer, by how much values do being known."""
        follow = np.zeros((self.inverses[0].shape[0], of_values.shape[0]))
        own = np.zeros((self.inverses[0].shape[0], of_values.shape[1]))
        for share, inverse, block, start in zip(shares, self.inverses, self.blocks, self.starts, strict=False):
            follow += share * (inverse @ block)
            own[:, start : start + block.shape[0]] = share * inverse
        return np.asarray(own - follow @ of_values)


def fit_joint(queries: JointQueries, heads: JointHeads) -> tuple[JointHeads, float]:
    """The nearest best fit of everything, and the root mean square of its residual."""
    residual = queries.residuals(heads)
    best = float(np.sum(residual**2))
    for _ in range(MOST_STEPS):
        move, before = JointLinear(queries, heads).step(residual), best
        for halving in range(MOST_HALVINGS):
            trial = heads.after(move, 0.5**halving)
            left = queries.residuals(trial)
            if float(np.sum(left**2)) < best:
                heads, residual, best = trial, left, float(np.sum(left**2))
                break
        if best > (1 - SETTLED) * before:
            break
    return heads, float(np.sqrt(best / residual.size))
