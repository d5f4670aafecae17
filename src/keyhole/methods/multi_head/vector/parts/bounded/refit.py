"""Heads of any positions by least squares over all answers there are, from what was read stage by stage.

What was read carries the errors of one stage into the next. All answers together tell values, keys, queries and what
distances add at once. Where values of heads have no more dimensions together than answers, and heads are not
large, each is fitted by itself (`fit_apart`); elsewhere Gauss-Newton steps of all are solved by LSMR with products of
the Jacobian.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from scipy.sparse.linalg import LinearOperator, lsmr

from keyhole.arrays import Floats
from keyhole.families import MultiHead
from keyhole.methods.multi_head.vector.parts.bounded.apart import fit_apart, fits_apart
from keyhole.methods.multi_head.vector.parts.bounded.factors import (
    Answered,
    FactoredHead,
    LinearisedHead,
    factored,
    whole,
)

# Steps of Gauss and Newton, and of LSMR in each; a step that does not lower the sum of squares is halved so often.
STEPS, INNER, HALVINGS = 4, 300, 3
# Steps go on while answers are off by more than this part of them, or so many roundings, and while a step lowers that
# to less than half.
ENOUGH, ROUNDINGS, GAIN = 1e-9, 8.0, 0.5
# LSMR ends where what it has left of a residual is this part of it.
SOLVED = 1e-6
# Eigenvalues of moments are lifted to this part of the largest.
LIFTED = 1e-10


def refit(heads: MultiHead, ranks: Sequence[tuple[int, int]], asked: Sequence[Answered], rounding: float) -> MultiHead:
    """Heads that answer what was asked better, of the same ranks of scores and values; those given where none do."""
    found = [factored(head, *each) for head, each in zip(heads.heads, ranks, strict=True)]
    tokens = [each.with_constant() for each in asked]
    answers = [each.answers for each in asked]
    enough = max(ENOUGH, ROUNDINGS * rounding) * sum(float(np.vdot(own, own)) for own in answers) ** 0.5

    def fit(heads: Sequence[FactoredHead]) -> tuple[list[list[LinearisedHead]], list[Floats], float]:
        parts = [[LinearisedHead(head, each) for head in heads] for each in tokens]
        rests = [own - sum(part.answers() for part in each) for own, each in zip(answers, parts, strict=True)]
        return parts, rests, sum(float(np.vdot(rest, rest)) for rest in rests) ** 0.5

    parts, rests, off = fit(found)
    if off <= enough:
        return heads
    if fits_apart(found, together := np.concatenate(answers)):
        found = fit_apart(found, tokens, together, max(ENOUGH, ROUNDINGS * rounding))
        return replace(heads, heads=[whole(own, head) for own, head in zip(heads.heads, found, strict=True)])
    start = off
    for _ in range(STEPS):
        if off <= enough:
            break
        step = _step(found, parts, rests)
        for halving in range(HALVINGS):
            moved = [head.moved([0.5**halving * part for part in own]) for head, own in zip(found, step, strict=True)]
            after = fit(moved)
            if after[2] < off:
                break
        else:
            break
        gained = after[2] < GAIN * off
        found, (parts, rests, off) = moved, after
        if not gained:
            break
    if not off < start:
        return heads
    return replace(heads, heads=[whole(own, head) for own, head in zip(heads.heads, found, strict=True)])


def _step(heads: Sequence[FactoredHead], parts: list[list[LinearisedHead]], rests: list[Floats]) -> list[list[Floats]]:
    """The step of Gauss and Newton of every part of every head."""
    shapes = [[part.shape for part in head.parts] for head in heads]
    evens = [_Even(own) for own in zip(*parts, strict=True)]
    ends = np.cumsum([int(np.prod(shape)) for own in shapes for shape in own])
    rows = np.cumsum([rest.size for rest in rests])

    def split(step: Floats) -> list[list[Floats]]:
        each = iter(np.split(np.ravel(step), ends[:-1]))
        return [
            even.apart([next(each).reshape(shape) for shape in own]) for even, own in zip(evens, shapes, strict=True)
        ]

    def apply(step: Floats) -> Floats:
        own = split(step)
        moved = [sum(part.apply(one) for part, one in zip(each, own, strict=True)) for each in parts]
        return np.concatenate([np.ravel(each) for each in moved])

    def transpose(rest: Floats) -> Floats:
        total = np.zeros(ends[-1])
        for each, own, usual in zip(parts, np.split(np.ravel(rest), rows[:-1]), rests, strict=True):
            answers = own.reshape(usual.shape)
            gradients = [even.transposed(part.transpose(answers)) for even, part in zip(evens, each, strict=True)]
            total += np.concatenate([part.ravel() for gradient in gradients for part in gradient])
        return total

    operator = LinearOperator((rows[-1], ends[-1]), matvec=apply, rmatvec=transpose, dtype=float)
    right = np.concatenate([rest.ravel() for rest in rests])
    return split(lsmr(operator, right, atol=SOLVED, btol=SOLVED, maxiter=INNER)[0])


class _Even:
    """Changes of one head in coordinates in which all do about as much to answers."""

    def __init__(self, parts: Sequence[LinearisedHead]) -> None:
        every = [list(part.moments()) for part in parts]
        pairs = [list(zip(*own, strict=True)) for own in zip(*every, strict=True)]  # rows, then columns, of each part
        self.sides = [tuple(_root(np.sum(side, axis=0)) for side in pair) for pair in pairs]

    def apart(self, step: list[Floats]) -> list[Floats]:
        """The change that a vector of these coordinates is."""
        return [*(one @ part @ two.T for part, (one, two) in zip(step[:-1], self.sides, strict=True)), step[-1]]

    def transposed(self, gradient: Iterator[Floats]) -> list[Floats]:
        """The gradient in these coordinates."""
        *parts, added = gradient
        return [*(one.T @ part @ two for part, (one, two) in zip(parts, self.sides, strict=True)), added]


def _root(moment: Floats) -> Floats:
    """A root of the inverse, small eigenvalues lifted."""
    sizes, vectors = np.linalg.eigh(moment)
    sizes = np.maximum(sizes, LIFTED * sizes[-1]) if sizes[-1] > 0 else np.ones_like(sizes)
    return np.asarray(vectors * sizes**-0.5)
