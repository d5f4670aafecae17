"""What the stages of `relu-net` share: single tokens in, rows of numbers out; a function as kinks and an affine map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from keyhole.arrays import Floats, Integers, floats
from keyhole.methods.base import Steps
from keyhole.queries import Measurements, Plan, Signature, Term, TokenRows

# An answer errs by this many times the spacing of its dtype, and by the random walk of sums over its inputs: most of
# the sums behind it are larger than itself.
ROUNDINGS = 8.0
WALK = 1.0
# Spacing of the arithmetic that kinks are found in; what is coarser is treated as noise.
FLOAT64 = 2.0**-52


def is_exact(signature: Signature) -> bool:
    """Whether answers err by the rounding of float64 only, so that kinks can be followed."""
    return signature.noise.kind == "exact" and signature.space.spacing <= FLOAT64


@final
class TokenQueries:
    """Queries of single tokens; tokens and answers are measured in a unit of `length`, large to see them from afar."""

    def __init__(self, signature: Signature, length: float = 1.0) -> None:
        self.signature, self.length = signature, length
        self.width = signature.width
        self.scalar = True  # whether an answer is a plain number
        self.noise = 0.0
        self.rounding = (ROUNDINGS + WALK * self.width**0.5) * signature.space.eps

    def ask(self, stage: str, x: Floats) -> Steps[Floats]:  # (n, width) -> (n, outputs)
        """The answers to single tokens."""
        return (yield from self.ask_around(stage, x))

    def ask_around(
        self,
        stage: str,
        centres: Floats,  # (m, width)
        centre_of: Integers | None = None,  # (n,); None: one after the other
        directions: Floats | None = None,  # (r, width)
        direction_of: Integers | None = None,  # (n,)
        steps: Floats | None = None,  # (n,)
    ) -> Steps[Floats]:  # (n, outputs)
        """The answers at centre + step · direction, described without making all of the tokens."""
        space = self.signature.space
        index = None if centre_of is None else space.indices(centre_of)
        terms = [Term(TokenRows(space.asarray(self.length * centres)), index)]
        if directions is not None:
            assert steps is not None  # as there are directions
            away = space.asarray(self.length * steps)
            terms.append(Term(TokenRows(space.asarray(directions)), space.indices(direction_of), away))
        count = centres.shape[0] if centre_of is None else centre_of.size
        answers: Measurements = yield Plan(stage, count, [terms])
        values = floats(answers.values)
        if self.signature.positions == "all":
            values = values[:, 0, ...]
        self.scalar = values.ndim == 1
        self.noise = float(answers.radius) / self.length
        return (values[:, None] if self.scalar else values) / self.length


@dataclass(frozen=True)
class QueryLine:
    """Tokens origin + t·direction."""

    origin: Floats  # (width,)
    direction: Floats  # (width,) of unit length
    unit: float  # the length at which tokens start to grow with t
    last: float  # |t| goes up to here
    near: float | None  # most kinks are up to here

    def at(self, t: Floats) -> Floats:  # (n,) -> (n, width)
        """The tokens at t."""
        return np.asarray(self.origin + np.asarray(t)[..., None] * self.direction)


@dataclass(frozen=True)
class Pieces:
    """f(x) = Σ_i weight_i · max(0, normal_i·x + offset_i) + affine · (x, 1), normals of unit length."""

    normal: Floats  # (k, width)
    offset: Floats  # (k,)
    weight: Floats  # (k, outputs)
    affine: Floats  # (outputs, width + 1)

    @property
    def count(self) -> int:
        """Kinks."""
        return int(self.offset.size)

    def in_unit(self, factor: float) -> Pieces:
        """The same function where tokens and answers are `factor` times as large in numbers."""
        affine = self.affine.copy()
        affine[:, -1] *= factor
        return Pieces(self.normal, self.offset * factor, self.weight, affine)

    def heights(self, x: Floats) -> Floats:  # (n, width) -> (n, k)
        """Distances of tokens from the kinks, with signs."""
        return np.asarray(x @ self.normal.T + self.offset)

    def __call__(self, x: Floats) -> Floats:  # (n, width) -> (n, outputs)
        """The function."""
        return np.asarray(np.maximum(self.heights(x), 0) @ self.weight + x @ self.affine[:, :-1].T + self.affine[:, -1])

    def size(self, lengths: Floats) -> Floats:  # (n,) -> (n,)
        """How large the sums behind an answer are at tokens of these lengths: what its rounding goes by."""
        loads = np.linalg.norm(self.weight, axis=1)
        # Random signs: neurons and inputs add up like random walks.
        slope = np.sqrt(np.sum(loads**2)) + np.linalg.norm(self.affine[:, :-1])
        level = np.sqrt(np.sum((loads * self.offset) ** 2)) + np.linalg.norm(self.affine[:, -1])
        return np.asarray(level + slope * lengths / np.sqrt(self.normal.shape[1]))
