"""Heads of other score forms modulo what no query can tell, which every form says itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.families.form_head import FormHead
from keyhole.gauge.heads import distance_of_parts
from keyhole.gauge.tolerance import check_shapes, relative


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
