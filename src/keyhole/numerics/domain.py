"""Distributions of sequences that fresh queries come from: length, token structure and norm, each drawn for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import cycle, islice
from os import PathLike

import numpy as np

from keyhole.arrays import Array, Floats, floats
from keyhole.errors import UsageError

# A sampler of inputs that a user cares about: (rng, count) -> sequences (length, width), as a list or one array.
Sampler = Callable[[np.random.Generator, int], Sequence[Array]]
# What draws standard normal numbers of a shape.
Normals = Callable[[tuple[int, ...]], Floats]

# Lengths by class.
LENGTH_CLASSES = (range(1, 2), range(2, 4), range(4, 9), range(9, 17), range(17, 33), range(33, 65))
LONGEST = LENGTH_CLASSES[-1][-1]
# Up to this many tokens every length is asked as often as every other, by every other query; the others are spread
# over the longer ones, the longest among them: windows, top-k and the like show there. 112 queries have every length,
# so that no oracle is another function at some lengths unseen.
SHORT = 8
ONE_IN_SHORT = 2
# Tokens of the sequences, in the order in which queries take them.
STRUCTURE_ORDER = (
    "ordinary",
    "clusters",
    "mixed",
    "ordinary",
    "zeros",
    "repeated",
    "ordinary",
    "near",
    "one-hot",
    "ordinary",
    "mixed",
)
# Norms of mixed tokens, distances of near ones and radii of clusters, over the largest norm: ranges of logarithms.
MIXED = (-3.0, 0.0)
NEAR = (-4.0, -0.5)
CLUSTER = 0.1
# How often a token is zero among zeros, and how often the last one is.
ZERO_SHARE, ZERO_LAST = 0.4, 0.4


@cache
def length_class(length: int) -> int:
    """The number of the class of a length; what is longer than all of them is of the last."""
    return next((number for number, each in enumerate(LENGTH_CLASSES) if length in each), len(LENGTH_CLASSES) - 1)


def class_label(number: int, most: int | None = None) -> str:
    """The lengths of a class in words, where sequences have at most `most` tokens."""
    first, last = LENGTH_CLASSES[number][0], min(LENGTH_CLASSES[number][-1], most or LONGEST)
    return f"{first} token{'s' * (first > 1)}" if first == last else f"{first}–{last} tokens"


def draw_lengths(rng: np.random.Generator, count: int, most: int | None) -> list[int]:
    """Lengths from 1 to 64, or to the most that an oracle takes, spread evenly and shuffled."""
    limit = min(LONGEST, most or LONGEST)
    if limit <= SHORT:
        return _spread(rng, count, range(1, limit), [limit])
    short = count // ONE_IN_SHORT
    both = [
        *_spread(rng, short, range(1, SHORT + 1), []),
        *_spread(rng, count - short, range(SHORT + 1, limit), [limit]),
    ]
    return [int(each) for each in rng.permutation(both)]


def _spread(rng: np.random.Generator, count: int, lengths: range, always: list[int]) -> list[int]:
    """`count` lengths in random order: one of each of as many equal stretches, and those that always occur."""
    if not count:
        return []
    stretches = min(count - len(always), len(lengths))
    edges = np.linspace(lengths.start, lengths.stop, stretches + 1)
    drawn = np.floor(rng.uniform(edges[:-1], edges[1:])).astype(int)
    return [int(each) for each in np.resize(rng.permutation([*drawn, *always]), count)]


def draw_structures(rng: np.random.Generator, count: int) -> list[str]:
    """Token structures, shuffled: 4 in 11 are ordinary."""
    return [str(name) for name in rng.permutation(list(islice(cycle(STRUCTURE_ORDER), count)))]


def draw_tokens(
    structure: str, rng: np.random.Generator, length: int, width: int, normal: Normals | None = None
) -> Floats:  # -> (length, width)
    """One sequence of a structure; its longest tokens have a norm of about one.

    Normal numbers come of `rng`, or of `normal` where something else makes many faster.
    """
    ordinary = (normal or rng.standard_normal)((length, width))
    ordinary /= width**0.5
    return ordinary if structure == "ordinary" else STRUCTURES[structure](rng, ordinary)


def _mixed(rng: np.random.Generator, tokens: Floats) -> Floats:
    return np.asarray(tokens * 10.0 ** rng.uniform(*MIXED, (len(tokens), 1)))


def _one_hot(rng: np.random.Generator, tokens: Floats) -> Floats:
    size, made = rng.uniform(0.5, 1.0), np.zeros_like(tokens)
    made[np.arange(len(tokens)), rng.integers(tokens.shape[1], size=len(tokens))] = size
    return made


def _repeated(rng: np.random.Generator, tokens: Floats) -> Floats:
    return np.asarray(tokens[rng.integers(1 + len(tokens) // 2, size=len(tokens))])


def _near(rng: np.random.Generator, tokens: Floats) -> Floats:
    return np.asarray(tokens[-1] + 10.0 ** rng.uniform(*NEAR) * tokens)


def _clusters(rng: np.random.Generator, tokens: Floats) -> Floats:
    centres = tokens[rng.permutation(len(tokens))[: 1 + len(tokens) // 4]]
    own = centres[rng.integers(len(centres), size=len(tokens))]
    return np.asarray(own + CLUSTER * rng.standard_normal(tokens.shape) / tokens.shape[1] ** 0.5)


def _zeros(rng: np.random.Generator, tokens: Floats) -> Floats:
    zero = rng.uniform(size=len(tokens)) < ZERO_SHARE
    zero[-1] = rng.uniform() < ZERO_LAST
    if not np.any(zero[:-1]):
        zero[: len(tokens) // 2] = True
    if np.all(zero):  # which an oracle may have been asked before
        zero[rng.integers(len(tokens))] = False
    return np.asarray(np.where(zero[:, None], 0.0, tokens))


STRUCTURES: dict[str, Callable[[np.random.Generator, Floats], Floats]] = {
    "mixed": _mixed,
    "one-hot": _one_hot,
    "repeated": _repeated,
    "near": _near,
    "clusters": _clusters,
    "zeros": _zeros,
}


def draw_from(
    sampler: Sampler,
    rng: np.random.Generator,
    count: int,
    width: int,
    max_norm: float | None = None,
    max_length: int | None = None,
) -> list[Floats]:
    """Sequences of a user's sampler, (length, width) each; UsageError for anything that an oracle does not take."""
    drawn = [floats(each) for each in islice(sampler(rng, count), count)]
    for each in drawn:
        if each.ndim != 2 or each.shape[0] < 1 or each.shape[1] != width:
            raise UsageError(f"domain must draw sequences (length, {width}), not an array of shape {each.shape}")
        if not np.all(np.isfinite(each)):
            raise UsageError("domain drew a token that is not finite")
        longest = float(np.max(np.linalg.norm(each, axis=1)))
        if max_norm is not None and longest > max_norm:
            raise UsageError(f"domain drew a token of norm {longest:.3g}, the oracle takes up to {max_norm:g}")
        if max_length is not None and len(each) > max_length:
            raise UsageError(f"domain drew {len(each)} tokens, the oracle takes up to {max_length}")
    if not drawn:
        raise UsageError("domain has no sequences: sampler(rng, count) must return some")
    return drawn


def sampler_of(inputs: Sequence[Array] | Array | Sampler) -> Sampler:
    """A sampler as it is; of given sequences, one that draws them in random order, none twice."""
    if callable(inputs):
        return inputs
    if isinstance(inputs, str | PathLike):
        raise UsageError(
            f"domain must be a sampler or sequences (length, width), not the path {str(inputs)!r}: load it"
        )
    try:
        sequences = list(inputs)
    except TypeError as error:
        kind = type(inputs).__name__
        raise UsageError(f"domain must be a sampler or sequences (length, width), not {kind}") from error

    def draw(rng: np.random.Generator, count: int) -> list[Array]:
        return [sequences[number] for number in rng.permutation(len(sequences))[:count]]

    return draw
