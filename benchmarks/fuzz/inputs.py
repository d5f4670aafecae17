"""Input classes on which a recovered function is compared with the box: every length from 1 to 64 in each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.fuzz.boxes import Box, Random
from benchmarks.fuzz.maps import Floats

LONGEST, EACH = 64, 4  # sequences of every length in every class
Shape = tuple[int, int, int]
AROUND_KINKS = "around kinks"  # of the box itself: nobody else can draw these


def _mixed(rng: Random, shape: Shape, size: float) -> Floats:
    return size * rng.standard_normal(shape) * 10 ** rng.uniform(-3, 3, (*shape[:2], 1))


def _mixed_sequences(rng: Random, shape: Shape, size: float) -> Floats:
    return size * rng.standard_normal(shape) * 10 ** rng.uniform(-3, 3, (shape[0], 1, 1))


def _one_hot(rng: Random, shape: Shape, size: float) -> Floats:
    lengths = np.where(rng.random((shape[0], 1, 1)) < 0.5, 1.0, size * shape[2] ** 0.5)
    return lengths * np.eye(shape[2])[rng.integers(shape[2], size=shape[:2])]


def _repeated(rng: Random, shape: Shape, size: float) -> Floats:
    few = size * rng.standard_normal((shape[0], 3, shape[2]))
    chosen = rng.integers(3, size=shape[:2])
    return np.take_along_axis(few, chosen[:, :, None], axis=1)


def _nearly_equal(rng: Random, shape: Shape, size: float) -> Floats:
    apart = 10 ** rng.uniform(-6, -1, (shape[0], 1, 1))
    return size * (rng.standard_normal((shape[0], 1, shape[2])) + apart * rng.standard_normal(shape))


def _with_zeros(rng: Random, shape: Shape, size: float) -> Floats:
    return size * rng.standard_normal(shape) * (rng.random((*shape[:2], 1)) > 0.3)


def _clusters(rng: Random, shape: Shape, size: float) -> Floats:
    return _repeated(rng, shape, size) + 0.1 * size * rng.standard_normal(shape)


CLASSES: dict[str, Callable[[Random, Shape, float], Floats]] = {
    "ordinary": lambda rng, shape, size: rng.standard_normal(shape),
    "natural": lambda rng, shape, size: size * rng.standard_normal(shape),
    "mixed norms": _mixed,
    "norms by sequence": _mixed_sequences,
    "one-hot": _one_hot,
    "repeated": _repeated,
    "nearly equal": _nearly_equal,
    "zeros": _with_zeros,
    "clusters": _clusters,
}


def batches(box: Box, rng: Random) -> Iterator[tuple[str, Floats]]:
    """(class, tokens) for every class and length, within the norms and lengths that the box takes."""
    longest = min(LONGEST, box.max_length or LONGEST)
    for name, draw in CLASSES.items():
        for length in range(1, longest + 1):
            yield name, within(box, draw(rng, (EACH, length, box.width), box.size))
    if box.kinks is not None:
        for length in range(1, longest + 1):
            tokens = box.size * rng.standard_normal((EACH, length, box.width))
            away = box.size * 10 ** rng.uniform(-8, -1, (EACH, 1)) * rng.standard_normal((EACH, box.width))
            tokens[:, -1] = box.kinks(tokens[:, -1], rng) + away
            yield AROUND_KINKS, within(box, tokens)


def within(box: Box, tokens: Floats) -> Floats:
    """Tokens made as short as the box wants them."""
    if box.max_norm is None:
        return tokens
    norms = np.linalg.norm(tokens, axis=-1, keepdims=True)
    return tokens * np.minimum(1.0, box.max_norm / np.maximum(norms, 1e-300))
