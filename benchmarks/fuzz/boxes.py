"""A box: what is asked, what it truly computes, and what is known of it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from benchmarks.fuzz.maps import Floats, Map, Params

Random = np.random.Generator
Choice = TypeVar("Choice")


@dataclass(frozen=True)
class Box:
    """A box of one kind and seed."""

    truth: Map  # (n, length, width) -> (n, outputs), without noise
    width: int
    scalar: bool  # answers are plain numbers
    size: float = 1.0  # of the entries of tokens at which something happens: logits or kinks of order one
    params: Params | None = None  # of a member
    answer: Callable[[Floats], object] | None = None  # what the oracle returns, where that is not the truth itself
    noise: str = ""  # declared
    float32: bool = False  # tokens and answers are float32
    max_norm: float | None = None
    max_length: int | None = None
    limit: str = ""  # why a refusal is as documented
    error: float = 0.0  # of an answer, absolute: noise that the box adds
    kinks: Callable[[Floats, Random], Floats] | None = field(default=None)  # moves last tokens (n, d) to kinks
    trapdoor: bool = False  # wrong only where no sample looks
    labels: bool = False  # answers are labels

    def __call__(self, tokens: Floats) -> object:
        with np.errstate(all="ignore"):
            if self.answer is not None:
                return self.answer(tokens)
            answers = self.truth(tokens)
        return answers[:, 0] if self.scalar else answers


Draw = Callable[[Random], Box]


@dataclass(frozen=True)
class Kind:
    """How boxes of one name are drawn. `group` says how they are judged: member, foreign or careless."""

    name: str
    family: str  # a row of the table
    group: str
    draw: Draw
    every: int = 1  # rounds of a run: more for what takes long, so that others get their share of time

    def box(self, seed: int) -> Box:
        return self.draw(np.random.default_rng([seed, zlib.crc32(self.name.encode())]))


class Kinds(dict[str, Kind]):
    """Kinds by name, and a decorator that adds one."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group

    def add(self, family: str, name: str, draw: Draw, every: int = 1) -> None:
        name = f"{family}: {name}"
        self[name] = Kind(name, family, self.group, draw, every)

    def kind(self, family: str, name: str) -> Callable[[Draw], Draw]:
        def keep(draw: Draw) -> Draw:
            self.add(family, name, draw)
            return draw

        return keep


def decades(rng: Random, low: float, high: float) -> float:
    """A number that is uniform in its logarithm, by powers of ten."""
    return float(10 ** rng.uniform(low, high))


def one_of(rng: Random, choices: Iterable[Choice]) -> Choice:
    listed = list(choices)
    return listed[int(rng.integers(len(listed)))]
