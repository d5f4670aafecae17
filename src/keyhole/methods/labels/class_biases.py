"""Biases of classes, which tokens of moderate norm show: what each output has added to it, up to a common number.

Along a ray t·y a class is answered from some t on, and another one below it: V_r·y·t + b_r is V_q·y·t + b_q there. From
the class that every ray ends in down to the one that the shortest tokens have, each step is an equation for two biases.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from keyhole.arrays import Floats, Integers
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.labels.classes import ClassReader, ClassValues
from keyhole.methods.labels.comparisons import TURNS
from keyhole.methods.labels.search import Prior
from keyhole.methods.labels.value import SPACINGS, Tokens
from keyhole.queries import Position, Term, TokenRows
from keyhole.recovery import Outcome

STAGE = "biases"
# Tokens of norm one with a shorter mean have no direction in common, as a token and its opposite.
MEAN = 1e-6


def _positions(tokens: Tokens, rays: Floats, exponents: Floats, factor: float) -> list[Position]:
    """Tokens 2^x·y, as many copies as make other queries of the same meaning."""
    copies = min(1 + int(math.log2(factor)), tokens.comparer.signature.max_length or TURNS)
    rows = TokenRows(tokens.space.asarray(rays))
    return [[Term(rows, None, tokens.space.asarray(np.exp2(exponents)))]] * copies


def ask_has_biases(reader: ClassReader) -> Steps[bool]:
    """Whether the shortest token of some class has another label than long ones: without biases none has."""
    rays, kind = _rays(reader), np.asarray(reader.kind)
    least = np.full(len(kind), -reader.tokens.range)
    labels = yield from reader.comparer.ask_labels(
        STAGE, lambda some, factor: _positions(reader.tokens, rays[some], least[some], factor), len(kind)
    )
    return not np.array_equal(labels, kind)


def _rays(reader: ClassReader) -> Floats:  # (classes, width)
    """Directions well inside each class, or of one of its tokens where these have no mean direction."""
    some = [reader.vectors[reader.seen == label] for label in reader.kind]
    means = np.stack([np.mean(each, axis=0) for each in some])
    sizes = np.linalg.norm(means, axis=1, keepdims=True)
    firsts = np.stack([each[0] for each in some])
    return np.where(sizes > MEAN, means / np.where(sizes > MEAN, sizes, 1.0), firsts)


def ask_biases(reader: ClassReader, values: ClassValues, accuracy: float) -> Steps[ClassValues]:
    """The values with the biases of all classes, that of the first being zero."""
    rays, count = _rays(reader), len(reader.kind)
    known: dict[int, tuple[float, float]] = {}  # biases over that of the class of the shortest tokens, and radii
    for number in range(count):
        yield from _ask_ray(reader, values, rays[number], accuracy, known)
    missing = [f"{reader.kind[number]:g}" for number in range(count) if number not in known]
    if missing:
        raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, f"the biases of classes {', '.join(missing)} show in no label")
    biases, radii = (np.array([known[number][place] for number in range(count)]) for place in (0, 1))
    first, own = biases[0], radii[0]
    radius = np.where(np.arange(count) > 0, radii + own, 0.0)
    bits = values.bits + (count - 1) * (math.log2(2 * reader.tokens.range) + math.log2(1 / accuracy))
    return replace(values, bias=biases - first, bias_radius=radius, bits=bits)


def _ask_ray(
    reader: ClassReader, values: ClassValues, ray: Floats, accuracy: float, known: dict[int, tuple[float, float]]
) -> Steps[None]:
    """Equations along one ray, from the class that it ends in to one that is known, or to the shortest tokens."""
    tokens, top = reader.tokens, reader.tokens.range
    path: list[tuple[int, int, float, float]] = []  # class, the one below it, what its bias is over that one's, radius
    (number,) = yield from _ask_numbers(reader, ray, top)
    cell = max(2 * accuracy / math.log(2), SPACINGS * tokens.space.eps * tokens.range)

    def make(_: Integers, at: Floats, factor: float) -> tuple[list[Position], Floats]:
        return _positions(tokens, ray[None], at, factor), np.full(1, -1.0)

    while number not in known:
        search = reader.comparer.search(Prior(-tokens.range, top), 1)
        label = np.full(1, reader.kind[number])
        yield from reader.comparer.bisect(STAGE, search, make, cell, yes=label, no=np.full(1, np.nan))
        low, high = (float(each[0]) for each in search.best)
        if low == -tokens.range:
            known.setdefault(number, (0.0, 0.0))
            break
        (below,) = yield from _ask_numbers(reader, ray, low)
        if below == number or any(below == each[0] for each in path):
            raise Unrecoverable(Outcome.WRONG_FAMILY, "classes along a ray are not those of linear outputs with biases")
        size, step = 2.0 ** (0.5 * (low + high)), values.matrix[:, number] - values.matrix[:, below]
        radius = size * math.log(2) * 0.5 * (high - low) * abs(float(step @ ray))
        radius += size * float((values.radius[:, number] + values.radius[:, below]) @ np.abs(ray))
        radius += 8 * tokens.space.rounding * size * float(np.max(np.linalg.norm(values.matrix, axis=0)))
        path.append((number, below, -size * float(step @ ray), radius))
        number, top = below, low
    for number, below, bias, radius in reversed(path):
        known[number] = known[below][0] + bias, known[below][1] + radius


def _ask_numbers(reader: ClassReader, ray: Floats, exponent: float) -> Steps[list[int]]:
    """The number of the class of a token."""
    labels = yield from reader.comparer.ask_labels(
        STAGE, lambda _, factor: _positions(reader.tokens, ray[None], np.full(1, exponent), factor), 1
    )
    return [reader.number_of(float(labels[0]))]
