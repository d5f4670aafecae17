"""Tokens that are normalised to any vector of a ball: what opens attention behind a norm to the learners of heads."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

from keyhole.arrays import Array, Floats, like
from keyhole.families.norms.normalise import undone
from keyhole.methods.base import Found, Steps, adapt
from keyhole.queries import digest


@dataclass(frozen=True, eq=False)
class Ball:
    """The tokens that a norm maps to vectors of norms below √(width of a token)."""

    basis: Floats  # (width of a token, width) of what the norm sees, orthonormal
    epsilon: float

    @property
    def width(self) -> int:
        """Numbers per vector."""
        return int(self.basis.shape[1])

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over basis and epsilon."""
        return hashlib.sha256(digest(self.basis) + self.epsilon.hex().encode()).digest()

    def __call__(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch, length, width of a token)
        """The tokens that are normalised to these vectors."""
        return undone(tokens @ like(self.basis, tokens).T, self.epsilon)

    def steps(self, inner: Steps[Found]) -> Steps[Found]:
        """Run a generator whose tokens are vectors of the ball."""
        return adapt(inner, outgoing=lambda plan: replace(plan, through=self))
