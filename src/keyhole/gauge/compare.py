"""Comparison of parameters modulo what no query can tell apart. Nothing else compares parameters.

Each family has its own module: `gauge_heads`, `gauge_nets`, `gauge_layers` and `gauge_attention`. A new family gets an
entry in `COMPARISONS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.errors import UsageError
from keyhole.families.attention_layer import AttentionLayer
from keyhole.families.multi_head import MultiHead
from keyhole.families.one_layer import OneLayer
from keyhole.families.relu_net import ReluNet
from keyhole.families.residual import Residual
from keyhole.families.single_head import SingleHead
from keyhole.gauge.attention_layer import canonical_attention, distance_of_attention, equivalent_attention
from keyhole.gauge.heads import canonical_heads, distance_of_heads, equivalent_heads
from keyhole.gauge.nets import canonical_net, distance_of_nets, equivalent_nets
from keyhole.gauge.one_layer import canonical_layer, distance_of_layers, equivalent_layers
from keyhole.gauge.tolerance import refuse_odd_numbers, rounding_of


@dataclass(frozen=True)
class Comparison:
    """How the parameters of families that can be compared with each other are."""

    canonical: Callable[[Any, float], Any]  # (params, tolerance)
    equivalent: Callable[[Any, Any, float, int | None], bool]  # (first, second, tolerance, max_length)
    distance: Callable[[Any, Any], float]


HEADS = Comparison(canonical_heads, equivalent_heads, distance_of_heads)
COMPARISONS: dict[type, Comparison] = {
    SingleHead: HEADS,
    MultiHead: HEADS,
    ReluNet: Comparison(canonical_net, equivalent_nets, distance_of_nets),
    OneLayer: Comparison(canonical_layer, equivalent_layers, distance_of_layers),
    AttentionLayer: Comparison(canonical_attention, equivalent_attention, distance_of_attention),
    Residual: Comparison(
        lambda params, tolerance: Residual(canonical_heads(params.attention, tolerance)),
        lambda one, two, *limits: equivalent_heads(one.attention, two.attention, *limits),
        lambda one, two: distance_of_heads(one.attention, two.attention),
    ),
}


def canonical(params: Any, tolerance: float | None = None) -> Any:
    """The one representative of all parameters with the same map, up to rounding, in NumPy and float64.

    Heads, one or several, become a `MultiHead`: those of equal logits are one, whose value is the sum, those without a
    value are dropped, the loudest is first. Nets: one neuron per kink, of length one for ReLU, its largest weight
    positive, what that changes in the skip. One-layer Transformers: that net, a value matrix of which only what shows
    is left, no logits where none shows. `tolerance` says what counts as equal, relatively; left out, the
    rounding of the parameters' dtype.
    """
    return _comparison(params).canonical(params, _tolerance(tolerance, params))


def equivalent(first: Any, second: Any, tolerance: float | None = None, max_length: int | None = None) -> bool:
    """Whether two parameter sets define the same map, on sequences of up to `max_length` tokens if that is given.

    `tolerance` is the relative difference of matrices and vectors that does not count; left out, the rounding of their
    dtype.
    """
    whole = isinstance(max_length, int | np.integer) and not isinstance(max_length, bool)
    if max_length is not None and (not whole or max_length < 1):
        raise UsageError(f"max_length must be a whole number of at least 1, not {max_length!r}")
    return _common(first, second).equivalent(first, second, _tolerance(tolerance, first, second), max_length)


def distance(first: Any, second: Any) -> float:
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


def _comparison_of(params: Any) -> Comparison | None:
    """How parameters are compared; those of a family's subclasses as the family is."""
    return next((COMPARISONS[kind] for kind in type(params).__mro__ if kind in COMPARISONS), None)


def _comparison(params: Any) -> Comparison:
    found = _comparison_of(params)
    if found is None:
        known = ", ".join(kind.__name__ for kind in COMPARISONS)
        raise UsageError(f"cannot compare a {type(params).__name__}; known: {known}")
    refuse_odd_numbers(params)
    return found


def _common(first: Any, second: Any) -> Comparison:
    one, two = _comparison_of(first), _comparison_of(second)
    if one is None or one is not two:
        raise UsageError(f"cannot compare a {type(first).__name__} with a {type(second).__name__}")
    refuse_odd_numbers(first, second)
    return one


def _tolerance(given: float | None, *params: Any) -> float:
    if given is None:
        return rounding_of(*params)
    if isinstance(given, bool) or not isinstance(given, int | float | np.number) or not 0 <= given < 1:
        raise UsageError(f"tolerance must be a number from 0 to less than 1, not {given!r}")
    return float(given)
