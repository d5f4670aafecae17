"""Queries of tokens in a random plane, whose answers are single numbers without the output bias.

A head shows its parts on any plane, where its score matrix has four numbers and its value two.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keyhole.arrays import Floats
from keyhole.errors import KeyholeError
from keyhole.methods.base import Steps
from keyhole.methods.examination import Examination, Finding

# A token of the plane: its two coordinates.
Point = Floats
ONE, TWO, ZERO = np.array([1.0, 0.0]), np.array([0.0, 1.0]), np.zeros(2)
# Equal to so many digits: answers carry 16, of which a few are lost in sums over the width and in differences.
EQUAL = 1e-9


class Unnamed(KeyholeError):
    """Raised where a part cannot be named: what was found, and why."""

    def __init__(self, what: str, why: str, found: str = "other") -> None:
        super().__init__(why)
        self.finding = Finding(what, found, why)


class Plane:
    """Asks sequences of tokens of a plane."""

    def __init__(self, exam: Examination) -> None:
        self.exam = exam
        basis, _ = np.linalg.qr(exam.directions(2).T)
        self.basis = np.asarray(basis.T)  # (2, width)
        self.output_bias = np.zeros(1)
        self.reader: Floats | None = None  # (outputs,): the numbers of an answer are added up with these factors
        self.queries = 0

    def ask(self, queries: Sequence[Sequence[Point]]) -> Steps[Floats]:  # -> (count,)
        """One number per query."""
        answers = yield from self.ask_all(queries)
        return self.read(answers)

    def ask_all(self, queries: Sequence[Sequence[Point]]) -> Steps[Floats]:  # -> (count, outputs)
        """The answers as they are."""
        self.queries += len(queries)
        return (yield from self.exam.ask([[point @ self.basis for point in query] for query in queries]))

    def read(self, answers: Floats) -> Floats:  # (count, outputs) -> (count,)
        """One number per answer, the output bias taken away."""
        if self.reader is None:
            outputs = answers.shape[1]
            self.reader = np.ones(1) if outputs == 1 else np.asarray(self.exam.rng.standard_normal(outputs))
        return np.asarray((answers - self.output_bias) @ self.reader)

    def points(self, count: int) -> Floats:  # (count, 2)
        """Random points of norm around one."""
        return np.asarray(self.exam.rng.standard_normal((count, 2)))


def words(number: float, digits: int = 4) -> str:
    """A number as text."""
    return f"{number:.{digits}g}" if np.isfinite(number) else "no number"


def same(one: float | Floats, other: float | Floats, size: float | Floats = 0.0, equal: float = EQUAL) -> bool:
    """Whether numbers are equal but for `equal` of the larger of them, or of a size."""
    one, other = np.asarray(one), np.asarray(other)
    with np.errstate(invalid="ignore", over="ignore"):
        largest = np.maximum(np.maximum(np.abs(one), np.abs(other)), size)
        return bool(np.all(np.abs(one - other) <= equal * largest))
