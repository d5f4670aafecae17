"""Values of single tokens, for methods that steer answers: what is asked, and which output scores are read from."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from keyhole.arrays import Array, Floats
from keyhole.methods.base import Steps
from keyhole.methods.forms.value import unit_plan
from keyhole.queries import Measurements, Plan, Position, Signature, TokenRows


class TokenValues(ABC):
    """Asks single tokens and counts them. A subclass says what it makes of the answers."""

    def __init__(self, signature: Signature) -> None:
        self.signature, self.space = signature, signature.space
        self.units = TokenRows(self.space.eye(signature.width))
        self.spent = 0

    @abstractmethod
    def ask_value(self) -> Steps[None]:
        """A first estimate of the value."""

    def ask_units(self, norm: float) -> Steps[Floats]:  # (width + 1, outputs)
        """The zero token, then every norm·e_i."""
        measured: Measurements = yield unit_plan(self.signature, norm)
        self.spent += self.signature.width + 1
        self.scalar = measured.values.ndim == 1
        return measured.by_output

    def ask(self, token: Position, count: int) -> Steps[Floats]:  # (count, outputs)
        """Some tokens, each a sum of terms."""
        measured: Measurements = yield Plan("value", count, [token])
        self.spent += count
        return measured.by_output

    def choose(self, read: Floats) -> None:  # (width, outputs)
        """The largest entry of every output, the longest output, and the rank of all."""
        self.outputs = read.shape[1]
        self.place = np.argmax(np.abs(read), axis=0)  # (outputs,) of the largest entry
        self.main = int(np.argmax(np.linalg.norm(read, axis=0)))
        self.rank = int(np.linalg.matrix_rank(read)) if self.outputs > 1 else 1

    @property
    def counting_bound(self) -> int:
        """Queries below which a head of full rank has more unknown numbers than answers."""
        width = self.signature.width
        return width + -(-width * width // self.rank)

    def in_shape(self, entries: Floats) -> Array:  # (width, outputs)
        """In the shape and space of the oracle."""
        return self.space.asarray(entries[:, 0] if self.scalar else entries)
