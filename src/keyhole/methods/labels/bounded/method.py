"""The flow for tokens of bounded norm: a plane where labels change, and forms that are read beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from keyhole.arrays import Floats, Integers
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.labels.bounded.biased_classes import BiasedReader
from keyhole.methods.labels.bounded.score import NearPlane, Plane
from keyhole.methods.labels.bounded.value import BoundedValue
from keyhole.methods.labels.class_biases import ask_has_biases
from keyhole.methods.labels.classes import Boundary, ClassReader, ClassValues
from keyhole.methods.labels.score import SCORE_BIAS, LabelScore, Rows
from keyhole.methods.labels.value import LabelValue, Tokens
from keyhole.queries import Position, Term, TokenRows
from keyhole.recovery import Outcome

# The first accuracy of values over that of the score, and by how much more accurate they are read where no form shows.
FINER, MUCH_FINER = 2.0**-4, 2.0**-12
MOST_TURNS = 8
# Errors of the plane are at most this part of a cell.
PART = 0.25
# Three tokens that weigh the same have a sum that is this part of one of them off the threshold.
THREE, UNEVEN = 3, 2.0**-8
# Points of a boundary among which the one farthest from other classes is taken.
CANDIDATES = 400


@dataclass(frozen=True)
class PlaneSource:
    """A plane where labels change, and how to read it more accurately: refine(accuracy)."""

    plane: Callable[[], Plane]
    refine: Callable[[float], Steps[None]]


def ask_near_plane(
    reader: NearPlane, source: PlaneSource, accuracy: float, rng: np.random.Generator
) -> Steps[LabelScore]:
    """The score matrix beside a plane, which is read as accurately as that needs."""
    fine, width = accuracy * FINER, reader.comparer.signature.width
    every = np.arange(width)
    for _ in range(MOST_TURNS):
        yield from source.refine(fine)
        scale = yield from reader.ask_scale(source.plane(), rng)
        exhausted = fine < reader.space.eps
        zero = np.zeros(width)
        error = float(np.max(reader.errors(every, every, zero)))
        if scale is None:
            if exhausted and reader.closeness > 1:
                break
            if exhausted:  # no form is larger than what arithmetic makes of the plane
                wide = np.full((width, width), 64 * error * width / float(reader.beta[0]))
                return LabelScore(np.zeros((width, width)), wide, 0.0, 0.0)
            fine *= MUCH_FINER
            continue
        reader.place(source.plane())
        error = float(np.max(reader.errors(every, every, zero)))
        wanted = PART * reader.cell(scale, accuracy)
        if error > wanted and not exhausted:
            fine = max(fine * wanted / error / 2, reader.space.eps / 2)
            yield from source.refine(fine)
            reader.place(source.plane())
            error = float(np.max(reader.errors(every, every, zero)))
        # No finer than the plane is known.
        return (yield from reader.ask_score(scale, accuracy * max(1.0, error / (4 * wanted))))
    raise Unrecoverable(Outcome.SATURATED, "no two tokens of this norm are told apart by their logits: raise max_norm")


def ask_signs(
    value: BoundedValue, negative: float, positive: float, accuracy: float, rng: np.random.Generator
) -> Steps[tuple[LabelValue, LabelScore]]:
    """Value, threshold and score from signs."""
    yield from value.ask_pivot(negative, positive)
    comparer = value.comparer

    def plane() -> Plane:
        vector, radius = value.matrix, value.radius
        size = float(np.linalg.norm(vector))
        point = vector * (value.threshold / size**2)
        room = 0.999 * (value.longest - float(np.linalg.norm(point)))

        def off(tokens: Floats) -> Floats:
            return np.asarray((np.abs(tokens) @ radius + value.threshold_radius) / size)

        return Plane(point, vector / size, room, off)

    yield from _check_score_bias(value, rng)
    reader = NearPlane(comparer, value.copies)
    score = yield from ask_near_plane(reader, PlaneSource(plane, value.ask_ratios), accuracy, rng)
    width = comparer.signature.width
    bits = np.log2(2 * width) + (width - 1) * np.log2(1 / accuracy) + (np.log2(1 / accuracy) if value.threshold else 0)
    # Over the largest of them, which is then known exactly.
    largest = int(np.argmax(np.abs(value.matrix)))
    size, off = abs(float(value.matrix[largest])), float(value.radius[largest])
    radius = (value.radius + np.abs(value.matrix) * (off / size)) / size
    radius[largest] = comparer.space.eps
    threshold, threshold_radius = value.threshold / size, value.threshold_radius / size
    threshold_radius += abs(threshold) * off / size
    return LabelValue(value.matrix / size, radius, largest, threshold, threshold_radius, float(bits)), score


def _check_score_bias(value: BoundedValue, rng: np.random.Generator) -> Steps[None]:
    """Of tokens x, y and 0 all weigh the same, so that their sum decides: unless there is a score bias."""
    longest = value.comparer.signature.max_length
    if longest is not None and longest < THREE:
        return
    yield from value.ask_ratios(UNEVEN / 4)
    vector, width = value.matrix, value.matrix.size
    size = float(np.linalg.norm(vector))
    across = rng.standard_normal(width)
    across -= vector * (across @ vector / size**2)
    first = vector / size + across / (np.linalg.norm(across) or 1.0)
    first *= 0.5 * value.longest / np.linalg.norm(first)
    uneven = UNEVEN * abs(float(first @ vector))
    sums = THREE * value.threshold + uneven * np.array([1.0, -1.0])
    seconds = sums[:, None] * vector / size**2 - first
    if np.max(np.linalg.norm(seconds, axis=1)) > value.longest:
        return
    space = value.space
    tokens = [TokenRows(space.asarray(each)) for each in (np.tile(first, (2, 1)), seconds)]

    def make(some: Integers, factor: float) -> list[Position]:
        index = space.indices(some)
        return value.copies([*([Term(rows, index)] for rows in tokens), []], factor)

    positive = yield from value.comparer.decide("score bias", make, 2)
    if not positive[0] or positive[1]:
        raise Unrecoverable(Outcome.WRONG_FAMILY, SCORE_BIAS)


def ask_classes(
    value: BoundedValue, tokens: Tokens, accuracy: float, rng: np.random.Generator, *, biased: bool
) -> Steps[tuple[tuple[float, ...], ClassValues, LabelScore]]:
    """Values of all classes, and the score from the boundary that is farthest from all others.

    With biases, where short tokens show some or it is known that there are.
    """
    classes = ClassReader(tokens, rng)
    # Not of unit tokens, where values that are zero or whole numbers may tie.
    dense = slice(tokens.width, None)
    rows = Rows(value.vectors[dense], value.yes[dense], value.no[dense])
    looked = ClassReader(tokens, rng)
    looked.add_rows(rows)
    if biased or (yield from ask_has_biases(looked)):
        return (yield from ask_biased_classes(value, BiasedReader(tokens, value, rng), rows, accuracy, rng))
    values = yield from classes.ask_all(rows, accuracy)
    boundary, point, room = _widest(classes, values, rng)
    far = 0.5 * value.longest

    def plane() -> Plane:
        size = float(np.linalg.norm(boundary.normal))
        normal = boundary.normal / size
        place = point - normal * (point @ normal)

        def off(some: Floats) -> Floats:
            return np.asarray(np.abs(some) @ boundary.radius / size)

        return Plane(far * place, normal, min(far, 0.5 * far * room), off, cone=True)

    def refine(fine: float) -> Steps[None]:
        if not (yield from classes.ask_normal(boundary, fine)):
            raise Unrecoverable(Outcome.TOO_NOISY, "a boundary between two classes could not be read: try another seed")

    value.comparer.negative, value.comparer.positive = classes.kind[boundary.two], classes.kind[boundary.one]
    reader = NearPlane(value.comparer, value.copies)
    score = yield from ask_near_plane(reader, PlaneSource(plane, refine), accuracy, rng)
    return classes.kind, values, score


def ask_biased_classes(
    value: BoundedValue, classes: BiasedReader, rows: Rows, accuracy: float, rng: np.random.Generator
) -> Steps[tuple[tuple[float, ...], ClassValues, LabelScore]]:
    """Values and biases of all classes, and the score from the boundary with most room around it."""
    values = classes.values_of((yield from classes.ask_all(rows, accuracy)))
    boundary, point, room = classes.widest(values)
    value.comparer.negative, value.comparer.positive = classes.kind[boundary.two], classes.kind[boundary.one]
    source = PlaneSource(partial(classes.plane, boundary, point, room), partial(classes.refine_normal, boundary))
    score = yield from ask_near_plane(NearPlane(value.comparer, value.copies), source, accuracy, rng)
    return classes.kind, values, score


def _widest(classes: ClassReader, values: ClassValues, rng: np.random.Generator) -> tuple[Boundary, Floats, float]:
    """A boundary, a point of norm one on it, and how far it is from any third class there."""
    best: tuple[Boundary, Floats, float] | None = None
    matrix = values.matrix.T  # (classes, width)
    for each in classes.boundaries:
        normal = matrix[each.one] - matrix[each.two]
        points = each.point / np.linalg.norm(each.point) + rng.standard_normal((CANDIDATES, matrix.shape[1])) * 0.3
        points = np.vstack([each.point, points])
        points = points - np.outer(points @ normal, normal) / (normal @ normal)
        points /= np.linalg.norm(points, axis=1, keepdims=True)
        others = [n for n in range(len(matrix)) if n not in (each.one, each.two)]
        gaps = (points @ matrix[each.one])[:, None] - points @ matrix[others].T
        steps = np.maximum(*(np.linalg.norm(matrix[others] - matrix[own], axis=1) for own in (each.one, each.two)))
        room = np.min(gaps / steps, axis=1, initial=np.inf)  # two classes have no third
        place = int(np.argmax(room))
        if best is None or room[place] > best[2]:
            best = each, points[place], float(room[place])
    assert best is not None
    return best
