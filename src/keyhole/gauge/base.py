"""What is known of the gauge of each family: how parameters compare, and which others have the same map."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic

import numpy as np

from keyhole.arrays import Floats
from keyhole.errors import UsageError
from keyhole.families import F, Family

if TYPE_CHECKING:
    from keyhole.gauge.redundancy import Redundancy

# (parameters of the same map, why it is the same) of given parameters; None where there are none of that kind.
MakeWitness = Callable[[F, np.random.Generator], "tuple[Callable[..., object], str] | None"]


@dataclass(frozen=True)
class Gauge(Generic[F]):
    """How parameters of families that can be compared with each other are, modulo what no query shows."""

    canonical: Callable[[F, float], Family]  # (params, tolerance)
    equivalent: Callable[[F, F, float, int | None], bool]  # (first, second, tolerance, max_length)
    distance: Callable[[F, F], float]
    witnesses: Mapping[str, MakeWitness[F]] = field(default_factory=dict)  # by kind
    redundancy: Callable[[F], Redundancy] | None = None  # heads or neurons that are one, silent or nearly alike
    aligned: Callable[[F, F], dict[str, Floats]] | None = None  # (params, truth): entries of it that correspond


GAUGES: dict[type[Family], Gauge[Family]] = {}


def register(kind: type[F], gauge: Gauge[F]) -> None:
    """Say how the parameters of a family are compared; families that share a gauge compare with each other."""
    GAUGES[kind] = gauge  # type: ignore[assignment]


def find_gauge(params: object) -> Gauge[Family] | None:
    """The gauge of parameters, those of a subclass as its family's; None where none is known."""
    return next((GAUGES[kind] for kind in type(params).__mro__ if kind in GAUGES), None)


def gauge_of(params: object) -> Gauge[Family]:
    """The gauge of parameters; UsageError where none is known."""
    found = find_gauge(params)
    if found is None:
        known = ", ".join(kind.__name__ for kind in GAUGES)
        raise UsageError(f"cannot compare a {type(params).__name__}; known: {known}")
    return found
