"""Comparison of parameters modulo what no query can tell apart. Nothing else compares parameters."""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats
from keyhole.errors import UsageError
from keyhole.families import Family
from keyhole.gauge.base import Gauge, find_gauge, gauge_of
from keyhole.gauge.tolerance import refuse_odd_numbers, rounding_of


def canonical(params: Family, tolerance: float | None = None) -> Family:
    """The one representative of all parameters with the same map, up to rounding, in NumPy and float64.

    Heads, one or several, become a `MultiHead`: those of equal logits are one, whose value is the sum, those without a
    value are dropped, the loudest is first. Nets: one neuron per kink, of length one for ReLU, its largest weight
    positive, what that changes in the skip. One-layer Transformers: that net, a value matrix of which only what shows
    is left, no logits where none shows. `tolerance` says what counts as equal, relatively; left out, the
    rounding of the parameters' dtype.
    """
    gauge = gauge_of(params)
    refuse_odd_numbers(params)
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
    largest of their distances counts, 1 where their numbers differ.

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


def aligned(params: Family, truth: Family) -> dict[str, Floats]:
    """Arrays of the truth by the names of the parameters whose entries they correspond to, as far as gauges allow."""
    gauge = find_gauge(params)
    if gauge is None or gauge.aligned is None or type(params) is not type(truth) or params.width != truth.width:
        return {}
    return gauge.aligned(params, truth)


def _common(first: Family, second: Family) -> Gauge[Family]:
    one, two = find_gauge(first), find_gauge(second)
    if one is None or one is not two:
        raise UsageError(f"cannot compare a {type(first).__name__} with a {type(second).__name__}")
    refuse_odd_numbers(first, second)
    return one


def _tolerance(given: float | None, *params: Family) -> float:
    if given is None:
        return rounding_of(*params)
    if isinstance(given, bool) or not isinstance(given, int | float | np.number) or not 0 <= given < 1:
        raise UsageError(f"tolerance must be a number from 0 to less than 1, not {given!r}")
    return float(given)
