"""Heads of other forms or parts modulo what no query can tell: each form says that of itself, several have no order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from keyhole.arrays import Floats, floats
from keyhole.families.form_head import FormHead
from keyhole.families.multi_head import MultiHead
from keyhole.gauge.heads import (
    Heads,
    canonical_heads,
    distance_of_heads,
    distance_of_parts,
    equivalent_heads,
    output_bias_of,
)
from keyhole.gauge.tolerance import check_shapes, relative, size


def canonical_form_head(params: FormHead, tolerance: float) -> FormHead:  # noqa: ARG001
    """The head with the canonical arrays of its form."""
    bias = None if params.output_bias is None else floats(params.output_bias)
    return FormHead(params.form.canonical(), floats(params.value), bias, params.attention)


def equivalent_form_heads(first: FormHead, second: FormHead, tolerance: float, max_length: int | None) -> bool:  # noqa: ARG001
    """Whether two heads define the same map; what short sequences tell less is not counted."""
    return distance_of_form_heads(first, second) <= tolerance


def distance_of_form_heads(first: FormHead, second: FormHead) -> float:
    """The largest relative distance of what logits tell of the forms, of values with output bias, and of constants."""
    check_shapes(first, second, "heads")
    values = relative(_into_values(first), _into_values(second))
    if not np.any(floats(first.value)) and not np.any(floats(second.value)):
        return values
    parts = distance_of_parts(first.attention, second.attention)
    return max(values, parts, _distance_of_logits(first, second))


def _distance_of_logits(first: FormHead, second: FormHead) -> float:
    one, two = first.form.canonical(), second.form.canonical()
    if type(one) is not type(two):
        return 1.0
    pairs = [(one.told()[name], array) for name, array in two.aligned_to(one).told().items()]
    if any(mine.shape != theirs.shape for mine, theirs in pairs):
        return 1.0
    return max(relative(mine, theirs) for mine, theirs in pairs)


def _into_values(head: FormHead) -> Floats:  # (width + 1, outputs)
    bias = np.zeros(head.value.shape[1:]) if head.output_bias is None else floats(head.output_bias)
    return np.vstack([floats(head.value).reshape(head.width, -1), bias.ravel()])


def align_form_heads(params: FormHead, truth: FormHead) -> dict[str, Floats]:
    """The arrays of the truth, those of the form as they are closest to the recovered ones."""
    if type(params.form) is not type(truth.form):
        return {}
    closest = replace(truth, form=truth.form.aligned_to(params.form)).arrays()
    return {
        name: floats(closest[name])
        for name, array in params.arrays().items()
        if name in closest and closest[name].shape == array.shape
    }


# --- several heads, which are not merged: which of them are one follows from their parts, and is not looked into


def has_parts(params: Heads) -> bool:
    """Whether these are several heads of which some is no plain softmax head, or heads of other forms."""
    heads = MultiHead.of(params)
    return heads.has_forms or (len(heads.heads) > 1 and any(not head.attention.is_softmax for head in heads.heads))


def canonical_of_any(params: Heads, tolerance: float | None = None) -> MultiHead:
    """Each head as it would be alone, the loudest first."""
    if not has_parts(params):
        return canonical_heads(params, tolerance)
    heads = MultiHead.of(params)
    alone: list[Any] = [_alone(head, tolerance, forms=heads.has_forms) for head in heads.heads]
    alone.sort(key=lambda head: -size(floats(head.value)))
    return MultiHead(alone, heads.output_bias if np.any(output_bias_of(heads)) else None)


def _alone(head: Any, tolerance: float | None, *, forms: bool) -> Any:
    return canonical_form_head(head, tolerance or 0.0) if forms else canonical_heads(head, tolerance).heads[0]


def equivalent_of_any(first: Heads, second: Heads, tolerance: float, max_length: int | None = None) -> bool:
    """Whether two sets of heads define the same map; what short sequences tell less of parts is not counted."""
    if not (has_parts(first) or has_parts(second)):
        return equivalent_heads(first, second, tolerance, max_length)
    return distance_of_any(first, second) <= tolerance


def distance_of_any(first: Heads, second: Heads) -> float:
    """The largest distance of two heads that are matched one to one, and of the output biases; 1 for other numbers."""
    if not (has_parts(first) or has_parts(second)):
        return distance_of_heads(first, second)
    check_shapes(first, second, "heads")
    one, two = MultiHead.of(first), MultiHead.of(second)
    if len(one.heads) != len(two.heads) or one.has_forms != two.has_forms:
        return 1.0
    biases = [output_bias_of(each) for each in (one, two)]
    loudness = max(float(np.max(np.abs(floats(head.value)))) for head in (*one.heads, *two.heads))
    scale = max(loudness, *(float(np.max(np.abs(bias), initial=0.0)) for bias in biases)) or 1.0
    apart = float(np.max(np.abs(biases[0] - biases[1]), initial=0.0)) / scale
    costs = _costs(one, two)
    rows, columns = linear_sum_assignment(costs)
    return max(apart, float(np.max(costs[rows, columns])))


def _costs(one: MultiHead, two: MultiHead) -> Floats:
    of_pair: Any = distance_of_form_heads if one.has_forms else distance_of_heads
    return np.array([[of_pair(own, other) for other in two.heads] for own in one.heads])


def align_several(params: MultiHead, truth: MultiHead) -> dict[str, Floats]:
    """The arrays of the true heads in the order of those recovered, those of forms as close to them as gauges allow."""
    if len(params.heads) != len(truth.heads) or params.has_forms != truth.has_forms:
        return {}
    rows, columns = linear_sum_assignment(_costs(params, truth))
    order = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    found: dict[str, Floats] = {}
    for number, own in enumerate(params.heads):
        other: Any = truth.heads[order[number]]
        arrays = align_form_heads(own, other) if params.has_forms else other.arrays()  # type: ignore[arg-type]
        mine = own.arrays()
        found |= {
            f"heads.{number}.{name}": floats(array)
            for name, array in arrays.items()
            if name in mine and mine[name].shape == array.shape
        }
    if params.output_bias is not None:
        found["output_bias"] = output_bias_of(truth)
    return found
