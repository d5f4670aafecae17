"""The gauges of the families that come with Keyhole; those of a wrapper are the inner family's, translated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from keyhole.arrays import Floats, floats
from keyhole.families import (
    AttentionLayer,
    F,
    Family,
    FormHead,
    Labels,
    MultiHead,
    NormAfter,
    NormBefore,
    OneLayer,
    ReluNet,
    Residual,
    SingleHead,
)
from keyhole.gauge.compare import Gauge, MakeWitness, register
from keyhole.gauge.heads import (
    Heads,
    align_form_heads,
    align_several,
    canonical_form_head,
    canonical_heads,
    canonical_of_any,
    distance_of_any,
    distance_of_form_heads,
    equivalent_form_heads,
    equivalent_of_any,
    has_parts,
    hidden_by_form,
    into_logits,
    output_bias_of,
    with_links_alike,
)
from keyhole.gauge.nets import canonical_net, distance_of_nets, equivalent_nets
from keyhole.gauge.one_layer import canonical_layer, distance_of_layers, equivalent_layers, match_heads
from keyhole.gauge.redundancy import redundancy_of_heads, redundancy_of_layer, redundancy_of_net
from keyhole.gauge.tolerance import relative
from keyhole.gauge.witness_heads import HEAD_KINDS
from keyhole.gauge.witness_nets import LAYER_KINDS, NET_KINDS
from keyhole.gauge.wrappers.attention_layer import as_heads, as_layer, distance_of_attention
from keyhole.gauge.wrappers.norms import gauge_of_wrappers


def around(inner: Gauge[Heads], unwrap: Callable[[F], Heads], wrap: Callable[[MultiHead], F]) -> Gauge[F]:
    """The gauge of a family that is heads in another dress."""

    def translated(make: MakeWitness[Heads]) -> MakeWitness[F]:
        def made(params: F, rng: np.random.Generator) -> tuple[F, str] | None:
            found = make(unwrap(params), rng)
            return None if found is None else (wrap(found[0]), found[1])  # type: ignore[arg-type]

        return made

    assert inner.redundancy is not None
    count = inner.redundancy
    return Gauge(
        canonical=lambda params, tolerance: wrap(canonical_heads(unwrap(params), tolerance)),
        equivalent=lambda one, two, *limits: inner.equivalent(unwrap(one), unwrap(two), *limits),
        distance=lambda one, two: inner.distance(unwrap(one), unwrap(two)),
        # Factors have no container of their own.
        witnesses={kind: translated(make) for kind, make in inner.witnesses.items() if kind != "factor gauge"},
        redundancy=lambda params: replace(count(unwrap(params)), family=params.family),
        align=align_heads,
    )


def matched(found: Sequence[SingleHead], true: Sequence[SingleHead]) -> list[SingleHead] | None:
    """The true heads in the order of those recovered, which no query can tell; None where their numbers differ."""
    if len(found) != len(true) or not found or found[0].width != true[0].width or found[0].outputs != true[0].outputs:
        return None
    maps = [[_finite(each(head)) for each in (into_logits, lambda head: head.value)] for head in (*found, *true)]
    # By logits and, where those are as near to another head's, by values.
    costs = np.array(
        [
            [sum(relative(one, two) for one, two in zip(a, b, strict=True)) for b in maps[len(found) :]]
            for a in maps[: len(found)]
        ]
    )
    rows, columns = linear_sum_assignment(np.minimum(costs, 1e6))
    order = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    return [true[order[number]] for number in range(len(found))]


def _finite(array: Floats) -> Floats:
    return np.nan_to_num(floats(array), nan=0.0, posinf=0.0, neginf=0.0)


def align_heads(params: Family, truth: Family) -> dict[str, Floats]:
    """The true heads in the order of those recovered, array by array, under the names that the parameters have."""
    if isinstance(params, MultiHead) and isinstance(truth, MultiHead) and has_parts(params):
        return align_several(params, truth)
    heads, true = params.anatomy.heads, truth.anatomy.heads
    order = matched(heads, true) if params.anatomy.numbered else list(true)
    if len(heads) == len(true) == 1 and not params.anatomy.numbered:
        order = [with_links_alike(heads[0], true[0])[1]]
    return {
        f"heads.{number}.{name}" if params.anatomy.numbered else name: floats(other)
        for number, (own, one) in enumerate(zip(heads, order or (), strict=False))
        for name, array in own.arrays().items()
        if (other := one.arrays().get(name)) is not None and other.shape == array.shape
    }


def align_layers(params: AttentionLayer, truth: AttentionLayer) -> dict[str, Floats]:
    """Scores and projections of the true heads in the order of those recovered."""
    order = matched(params.anatomy.heads, truth.anatomy.heads)
    if order is None:
        return {}
    pairs = {"scores": [head.score for head in order], "projections": [head.value for head in order]}
    return {name: np.stack([floats(array) for array in arrays]) for name, arrays in pairs.items()}


# --- attention behind labels: modulo a positive factor of its values, and a row common to all outputs


def normalised_heads(params: Labels) -> Heads:
    """The heads with values and output bias of norm one together, of several outputs with mean zero over them."""
    heads, bias = MultiHead.of(params.attention).heads, output_bias_of(params.attention)
    if params.attention.outputs == 2:  # which of two is larger is a sign
        heads = [replace(head, value=floats(head.value) @ [-1.0, 1.0]) for head in heads]
        bias = np.asarray(bias @ [-1.0, 1.0])
    values = [_centred(floats(head.value)) for head in heads]
    bias = _centred(bias[None])[0]
    size = float(np.sqrt(sum(np.sum(value**2) for value in values) + np.sum(bias**2))) or 1.0
    made = [replace(head, value=value / size) for head, value in zip(heads, values, strict=True)]
    return MultiHead(made, bias / size if np.any(bias) else None).simplest()


def _centred(values: Floats) -> Floats:  # (width,) or (width, outputs)
    """Values without what is common to all outputs."""
    return values if values.ndim == 1 else values - np.mean(values, axis=1, keepdims=True)


def as_labels(heads: MultiHead) -> Labels:
    """Labels of heads: signs, or the numbers of their outputs."""
    return Labels(heads) if heads.outputs is None else Labels(heads, tuple(range(heads.outputs)))


def align_labels(params: Labels, truth: Labels) -> dict[str, Floats]:
    """Scores of the truth, and its values by the factor and with the common row that the recovered ones have."""
    own, other = ([floats(head.value) for head in each.anatomy.heads] for each in (params, truth))
    if len(own) != len(other) or own[0].shape != other[0].shape:
        return {}
    if own[0].ndim == 2 and len(own) == 1:
        other = [other[0] - other[0][:, :1] + own[0][:, :1]]
    # The sums of recovered values have a largest entry (or difference) that is exact: the truth is brought to its size.
    common = own[0][:, :1] if own[0].ndim == 2 else 0.0
    sums = [np.sum(values, axis=0) - common for values in (own, other)]
    place = np.unravel_index(int(np.argmax(np.abs(sums[0]))), own[0].shape)
    theirs = abs(float(sums[1][place]))
    factor = abs(float(sums[0][place])) / theirs if theirs else 1.0
    scaled = [
        replace(head, value=common + factor * (value - common), output_bias=None)
        for head, value in zip(truth.anatomy.heads, other, strict=True)
    ]
    aligned = align_heads(params.attention, MultiHead(scaled))
    if "output_bias" in params.arrays():
        bias, shift = output_bias_of(truth.attention), output_bias_of(params.attention)
        aligned["output_bias"] = factor * bias if own[0].ndim == 1 else factor * (bias - bias[0]) + shift[0]
    return aligned


def align_scores(params: OneLayer, truth: OneLayer) -> dict[str, Floats]:
    """The scores of the true heads in the order of those recovered: values show only beside the net."""
    if len(params.heads) != len(truth.heads):
        return {}
    order = match_heads([_finite_logits(head) for head in params.heads], truth.heads)
    several = params.anatomy.numbered
    return {
        f"attention.heads.{number}.score" if several else "attention.score": floats(head.score)
        for number, head in enumerate(order)
    }


def _finite_logits(head: SingleHead) -> SingleHead:
    logits = _finite(into_logits(head))
    return replace(head, score=logits[:, :-1], score_bias=logits[:, -1])


HEADS: Gauge[Heads] = Gauge(
    canonical_of_any, equivalent_of_any, distance_of_any, HEAD_KINDS, redundancy_of_heads, align_heads
)
register(SingleHead, HEADS)
register(MultiHead, HEADS)
register(ReluNet, Gauge(canonical_net, equivalent_nets, distance_of_nets, NET_KINDS, redundancy_of_net))
register(
    OneLayer,
    Gauge(
        canonical_layer,
        equivalent_layers,
        distance_of_layers,
        LAYER_KINDS,
        redundancy_of_layer,
        align_scores,
    ),
)
# Factors have no container of their own.
WRAPPERS = gauge_of_wrappers(tuple(kind for kind in HEAD_KINDS if kind != "factor gauge"))
register(Residual, WRAPPERS)
register(NormBefore, WRAPPERS)
register(NormAfter, WRAPPERS)
register(AttentionLayer, replace(around(HEADS, as_heads, as_layer), distance=distance_of_attention, align=align_layers))
register(Labels, replace(around(HEADS, normalised_heads, as_labels), align=align_labels))
FORM_KINDS: dict[str, MakeWitness[FormHead]] = {"form gauge": hidden_by_form}
register(
    FormHead,
    Gauge(canonical_form_head, equivalent_form_heads, distance_of_form_heads, FORM_KINDS, align=align_form_heads),
)
