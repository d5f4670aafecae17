"""Gauges of wrappers: that of what is inside, without what a norm takes off, and the wrapper's own numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keyhole.arrays import Array, Floats, floats
from keyhole.families import Family, MultiHead, NormAfter, NormBefore, Residual, SingleHead
from keyhole.families.norms.inside import of_heads, seen_by
from keyhole.families.norms.normalise import centred
from keyhole.gauge.compare import Gauge, MakeWitness, find_gauge
from keyhole.gauge.redundancy import Redundancy
from keyhole.gauge.tolerance import relative

Wrapper = NormBefore | NormAfter | Residual


def inner_of(params: Family) -> Family:
    """What is inside a wrapper, without what shows in no answer."""
    if isinstance(params, NormBefore):
        return seen_by(params.attention, params.norm)
    if isinstance(params, NormAfter):
        return _answered(params.attention, params)
    assert isinstance(params, Residual)
    return params.attention


def _answered(inner: Family, around: NormAfter) -> Family:
    """What is inside a norm, its answers without what the norm takes off, of norm one where that may be any."""
    if isinstance(inner, Residual | NormBefore):
        return replace(inner, attention=_answered(inner.attention, around))  # type: ignore[arg-type]
    assert isinstance(inner, SingleHead | MultiHead)
    scale = _scale(around)

    def seen(array: Array) -> Floats:
        return np.asarray(centred(floats(array), around.norm) * scale)

    bias = None if inner.output_bias is None else seen(inner.output_bias)
    return replace(of_heads(inner, lambda head: replace(head, value=seen(head.value))), output_bias=bias)


def _scale(params: NormAfter) -> Floats:  # () or (outputs,)
    """The factor of what is normalised that no answer shows, to a standard size; one where a residual fixes it.

    LayerNorm leaves one sign to choose, RMSNorm that of every output.
    """
    inner = params.attention
    if isinstance(inner, Residual):
        return np.ones(())
    squares = sum(float(np.sum(centred(floats(head.value), params.norm) ** 2)) for head in inner.anatomy.heads)
    gain = floats(params.gain) if params.norm == "rms" else np.sum(floats(params.gain))
    return np.where(gain < 0, -1.0, 1.0) / (squares**0.5 if squares > 0 else 1.0)


def own_of(params: Family) -> dict[str, Floats]:
    """The numbers of a wrapper itself."""
    if isinstance(params, NormAfter):
        scale = _scale(params)
        return {
            "gain": floats(params.gain) * np.sign(scale),
            "bias": floats(params.bias),
            "epsilon": floats(params.epsilon) * float(np.max(np.abs(scale))) ** 2,
        }
    return {"epsilon": floats(params.epsilon)} if isinstance(params, NormBefore) else {}


def _canonical(params: Wrapper, tolerance: float) -> Wrapper:
    inner = inner_of(params)
    gauge = find_gauge(inner)
    assert gauge is not None
    inside = gauge.canonical(inner, tolerance)
    return replace(params, attention=inside, **own_of(params))  # type: ignore[arg-type]


def _own_distance(one: Family, two: Family) -> float:
    if one.words.get("norm") != two.words.get("norm"):
        return 1.0
    first, second = own_of(one), own_of(two)
    return max((relative(first[name], second[name]) for name in first), default=0.0)


def _distance(one: Family, two: Family) -> float:
    first, second = inner_of(one), inner_of(two)
    gauge = find_gauge(first)
    if gauge is None or gauge is not find_gauge(second):
        return 1.0
    return max(gauge.distance(first, second), _own_distance(one, two))


def _equivalent(one: Family, two: Family, tolerance: float, max_length: int | None) -> bool:
    first, second = inner_of(one), inner_of(two)
    gauge = find_gauge(first)
    same = gauge is not None and gauge is find_gauge(second)
    if gauge is None or not same or not _own_distance(one, two) <= tolerance:
        return False
    return gauge.equivalent(first, second, tolerance, max_length)


def _redundancy(params: Family) -> Redundancy:
    inner = inner_of(params)
    gauge = find_gauge(inner)
    assert gauge is not None
    assert gauge.redundancy is not None
    return replace(gauge.redundancy(inner), family=params.family)


def _align(params: Family, truth: Family) -> dict[str, Floats]:
    inner, true = inner_of(params), inner_of(truth)
    gauge = find_gauge(inner)
    if gauge is None or gauge.align is None or type(inner) is not type(true):
        return {}
    path = "" if isinstance(params, Residual) else "attention."
    return {**own_of(truth), **{path + name: array for name, array in gauge.align(inner, true).items()}}


def _witness(kind: str) -> MakeWitness[Wrapper]:
    """Other parameters inside that answer the same."""

    def made(params: Wrapper, rng: np.random.Generator) -> tuple[Wrapper, str] | None:
        gauge = find_gauge(params.attention)
        make = None if gauge is None else gauge.witnesses.get(kind)
        found = None if make is None else make(params.attention, rng)
        return None if found is None else (replace(params, attention=found[0]), found[1])  # type: ignore[arg-type]

    return made


def gauge_of_wrappers(kinds: tuple[str, ...]) -> Gauge[Wrapper]:
    """The gauge of everything that wraps heads; witnesses of these kinds are those of what is inside."""
    return Gauge(
        canonical=_canonical,
        equivalent=_equivalent,
        distance=_distance,
        witnesses={kind: _witness(kind) for kind in kinds},
        redundancy=_redundancy,
        align=_align,
    )
