"""Attention behind labels modulo what no label shows: a positive factor of its values, and a row common to all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.families import Labels, MultiHead
from keyhole.gauge.heads import Heads, output_bias_of


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
    heads, true = params.anatomy.heads, truth.anatomy.heads
    if len(heads) != 1 or len(true) != 1 or heads[0].value.shape != true[0].value.shape:
        return {}
    own, other = floats(heads[0].value), floats(true[0].value)
    if own.ndim == 2:
        other = other - other[:, :1] + own[:, :1]
    # The recovered values have a largest entry (or difference) that is exact: the truth is brought to its size.
    common = own[:, :1] if own.ndim == 2 else 0.0
    place = np.unravel_index(int(np.argmax(np.abs(own - common))), own.shape)
    theirs = abs(float((other - common)[place]))
    factor = abs(float((own - common)[place])) / theirs if theirs else 1.0
    aligned = {"score": floats(true[0].score), "value": common + factor * (other - common)}
    if heads[0].output_bias is not None and own.ndim == 1:
        aligned["output_bias"] = factor * output_bias_of(truth.attention)
    return aligned
