"""Heads of other parts than a softmax's, drawn at random."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import keyhole as kh
from keyhole.families.parts import (
    KINDS,
    Alibi,
    Attention,
    DistanceTable,
    Entmax,
    LengthTable,
    LogLength,
    NoNormaliser,
    PlusOne,
    RootLength,
    Sigmoid,
    Sink,
    Softcap,
    Sparsemax,
    TopK,
    Window,
)

Random = np.random.Generator


def _table(rng: Random) -> np.ndarray:
    return rng.standard_normal(int(rng.integers(2, 8)))


def _always(attention: Attention) -> Callable[[Random], Attention]:
    return lambda _: attention


ATTENTIONS: dict[str, Callable[[Random], Attention]] = {
    "softcap": lambda rng: Attention(link=Softcap(rng.uniform(1, 50))),
    "sink": lambda rng: Attention(normaliser=Sink(rng.standard_normal())),
    "sigmoid": lambda rng: Attention(link=Sigmoid(rng.standard_normal()), normaliser=NoNormaliser()),
    "plus one": _always(Attention(normaliser=PlusOne())),
    "sparsemax": _always(Attention(normaliser=Sparsemax())),
    "entmax-1.5": _always(Attention(normaliser=Entmax())),
    "ALiBi": lambda rng: Attention(position_bias=Alibi(rng.uniform(0.05, 1))),
    "table by distance": lambda rng: Attention(position_bias=DistanceTable(_table(rng))),
    "window": lambda rng: Attention(position_bias=Window(int(rng.integers(2, 40)))),
    "log n": _always(Attention(length_law=LogLength())),
    "1/sqrt n": _always(Attention(length_law=RootLength())),
    "table by length": lambda rng: Attention(length_law=LengthTable(np.exp(0.3 * _table(rng)))),
    "top-k": lambda rng: Attention(normaliser=TopK(int(rng.integers(2, 60)))),
    "softcap and sink": lambda rng: Attention(link=Softcap(rng.uniform(1, 50)), normaliser=Sink(rng.standard_normal())),
    "softcap and ALiBi": lambda rng: Attention(
        link=Softcap(rng.uniform(1, 50)), position_bias=Alibi(rng.uniform(0.05, 1))
    ),
    "sink and table": lambda rng: Attention(
        normaliser=Sink(rng.standard_normal()), position_bias=DistanceTable(_table(rng))
    ),
}


def names_of(attention: Attention) -> dict[str, str]:
    """What the method is told."""
    return {kind: getattr(attention, kind).name for kind in KINDS}


def random_head(kind: str, width: int, seed: int, scale: float | None = None) -> kh.SingleHead:
    """A Gaussian head of these parts, its scores of any size from 1e-2 to 1e2 unless one is given."""
    rng = np.random.default_rng([seed, width, *kind.encode()])
    attention = ATTENTIONS[kind](rng)
    size = 10 ** rng.uniform(-2, 2) if scale is None else scale
    value = rng.standard_normal(width) * 10 ** rng.uniform(-1, 1)
    return kh.SingleHead(size * rng.standard_normal((width, width)) / width, value, attention=attention)
