"""Comparison of parameters modulo what no query can tell apart, by the gauge of their family. Nothing else compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic

import numpy as np

from keyhole.arrays import Array, Floats
from keyhole.errors import UsageError
from keyhole.families import F, Family
from keyhole.gauge.tolerance import check_comparable, rounding_of

if TYPE_CHECKING:
    from keyhole.gauge.redundancy import Redundancy

# (parameters of the same map, why it is the same) of given parameters; None where there are none of that kind.
MakeWitness = Callable[[F, np.random.Generator], "tuple[Callable[[Array], Array], str] | None"]


@dataclass(frozen=True)
class Gauge(Generic[F]):
    """How parameters of families that can be compared with each other are, modulo what no query shows."""

    canonical: Callable[[F, float], Family]  # (params, tolerance)
    equivalent: Callable[[F, F, float, int | None], bool]  # (first, second, tolerance, max_length)
    distance: Callable[[F, F], float]
    witnesses: Mapping[str, MakeWitness[F]] = field(default_factory=dict)  # by kind
    redundancy: Callable[[F], Redundancy] | None = None  # heads or neurons that are one, silent or nearly alike
    align: Callable[[F, F], dict[str, Floats]] | None = None  # (params, truth): entries of it that correspond


GAUGES: dict[type[Family], Gauge[Family]] = {}


def register(kind: type[F], gauge: Gauge[F]) -> None:
    """Say how the parameters of a family are compared; families that share a gauge compare with each other."""
    GAUGES[kind] = gauge  # type: ignore[assignment]


def find_gauge(params: object) -> Gauge[Family] | None:
    """The gauge of parameters, those of a subclass as its family's; None where none is known."""
    return next((GAUGES[kind] for kind in type(params).__mro__ if kind in GAUGES), None)


def canonical(params: Family, tolerance: float | None = None) -> Family:
    """The one representative of all parameters with the same map, up to rounding, in NumPy and float64.

    Heads, one or several, become a `MultiHead`: those of equal logits are one, whose value is the sum, those without a
    value are dropped, the loudest is first. Nets: one neuron per kink, of length one for ReLU, its largest weight
    positive, what that changes in the skip. One-layer Transformers: that net, a value matrix of which only what shows
    is left, no logits where none shows. `tolerance` says what counts as equal, relatively; left out, the
    rounding of the parameters' dtype.
    """
    gauge = find_gauge(params)
    if gauge is None:
        known = ", ".join(kind.__name__ for kind in GAUGES)
        raise UsageError(f"cannot compare a {type(params).__name__}; known: {known}")
    check_comparable(params)
    return gauge.canonical(params, _tolerance(tolerance, params))


def equivalent(first: Family, second: Family, tolerance: float | None = None, max_length: int | None = None) -> bool:
    """Whether two parameter sets define the same map, on sequences of up to `max_length` tokens if that is given.

    `tolerance` is the relative difference of matrices and vectors that does not count; left out, the rounding of their
    dtype.
    """
    whole = isinstance(max_length, int | np.integer) and not isinstance(max_length, bool)
    if max_length is not None and (not whole or max_length < 1):
        raise UsageError(f"max_length must be a whole number of at least 1, not {max_length!r}")
    return _common(first, second).equivalent(first, second, _tolerance(tolerance, first, second), max_length)


def distance(first: Family, second: Family) -> float:
    """Relative distance of two parameter sets modulo what no query can tell apart; 0 for the same map.

    Heads: the larger of two relative Frobenius distances, that of the affine map into logits (score and
    score_bias, a missing bias being zero) and that of the affine map into values (value and
    output_bias). A head whose value is zero answers the same whatever its logits, so two such
    heads differ by their output alone.

    Several heads: heads of equal logits are one, whose value is the sum; then heads are matched one to one and the
    largest of their distances counts, 1 where their numbers differ. The logits of a head that has none are compared
    over those of the head with the largest.

    Nets: every activation is z/2 plus an even function, so a net is a sum of even functions, one for each kink
    n·x + o = 0 with a unit vector n up to its sign, and of an affine map. Kinks are matched one to one; the
    relative Frobenius distance is that of weights, directions, offsets (of smooth activations also sharpness) and
    affine map together.

    One-layer Transformers: the larger of that of the logits and that of the net, as a function of the last token and of
    the mixture that attention makes, which is all that queries can tell of value matrix and net. Logits do not count
    where the net does not depend on the mixture.

    Whole-sequence layers: the larger of that of scores and that of projections, heads matched one to one.

    Attention with a residual: that of the attention.
    """
    return _common(first, second).distance(first, second)


def align(params: Family, truth: Family) -> dict[str, Floats]:
    """Arrays of the truth by the names of the parameters whose entries they correspond to, as far as gauges allow."""
    gauge = find_gauge(params)
    if gauge is None or gauge.align is None or type(params) is not type(truth) or params.width != truth.width:
        return {}
    return gauge.align(params, truth)


def _common(first: Family, second: Family) -> Gauge[Family]:
    one, two = find_gauge(first), find_gauge(second)
    if one is None or one is not two:
        raise UsageError(f"cannot compare a {type(first).__name__} with a {type(second).__name__}")
    check_comparable(first, second)
    return one


def _tolerance(given: float | None, *params: Family) -> float:
    if given is None:
        return rounding_of(*params)
    if isinstance(given, bool) or not isinstance(given, int | float | np.number) or not 0 <= given < 1:
        raise UsageError(f"tolerance must be a number from 0 to less than 1, not {given!r}")
    return float(given)
