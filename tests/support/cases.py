"""A row of the table of outcomes, and how its boxes are built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import keyhole as kh
from keyhole.arrays import Array, Space
from keyhole.oracles import Oracle
from keyhole.recovery import Outcome
from support import targets as t

DOUBLES = ("numpy-float64", "torch-float64")
CERTIFIED = frozenset({Outcome.CERTIFIED})


@dataclass(frozen=True)
class Case:
    """A box, and what a recovery of it must come to."""

    name: str
    build: Callable[[np.random.Generator, Array], tuple[Oracle, kh.SingleHead | None]]  # (rng, like)
    outcomes: frozenset[Outcome] = CERTIFIED  # any of these
    most_queries: float = np.inf  # held-out ones apart
    worst_error: float = np.inf  # kh.distance from the truth, where it is certified
    says: tuple[str, ...] = ()  # what the message must mention, in lower case
    options: dict[str, Any] = field(default_factory=lambda: {"method": "single-head"})
    libraries: tuple[str, ...] = DOUBLES
    details: dict[str, Any] = field(default_factory=dict)  # what the method must have found out, where it is certified
    # Figures that a few seeds in a hundred miss by bad luck: with a fresh seed it must be right or admitted, no more.
    depends_on_luck: bool = False


def head(
    score: Callable[[np.random.Generator, int], t.Floats],
    value: Callable[[np.random.Generator, int], t.Floats],
    width: int,
    score_bias: float | None = None,  # its norm
    output_bias: float | None = None,
    view: str = "last",  # "all" positions, or "causal": all, each blind to what comes after it
    **signature: Any,
) -> Callable[[np.random.Generator, Array], tuple[Oracle, kh.SingleHead]]:
    """A box that is one head, its parameters numbers of the box's own dtype."""

    def build(rng: np.random.Generator, like: Array) -> tuple[Oracle, kh.SingleHead]:
        made = None if score_bias is None else t.bias(rng, width, score_bias)
        matrix, values = score(rng, width), value(rng, width)
        offset = output_bias
        if output_bias is not None and values.ndim == 2:
            offset = t.bias(rng, values.shape[1], output_bias)
        truth = t.head_in(Space.of(like), matrix, values, made, offset)
        if view != "last":
            box = truth.at_all_positions if view == "all" else t.causal(truth)
            return kh.FunctionOracle(box, width=width, like=like, positions="all", name=view, **signature), truth
        return kh.FunctionOracle(truth, width=width, like=like, **signature), truth

    return build


def other(
    box: Callable[[np.random.Generator, int, Space], t.Box], width: int = 6, **signature: Any
) -> Callable[[np.random.Generator, Array], tuple[Oracle, None]]:
    """A box that is no head."""

    def build(rng: np.random.Generator, like: Array) -> tuple[Oracle, None]:
        function = box(rng, width, Space.of(like))
        return kh.FunctionOracle(function, width=width, like=like, name=box.__name__, **signature), None

    return build
