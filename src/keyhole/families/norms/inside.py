"""Heads in the coordinates that a norm before them sees: its gain and bias folded in, its blind direction left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from keyhole.arrays import Array, Floats, floats
from keyhole.families.form_head import FormHead
from keyhole.families.multi_head import MultiHead
from keyhole.families.norms.normalise import mean_free
from keyhole.families.single_head import SingleHead

Heads = SingleHead | MultiHead


def of_heads(attention: Heads, change: Callable[[SingleHead], SingleHead]) -> Heads:
    """The same attention with every head changed."""
    if isinstance(attention, SingleHead):
        return change(attention)
    return replace(attention, heads=[change(head) for head in attention.heads])


def turned(attention: Heads, turn: Floats) -> Heads:  # (new width, width)
    """The heads of tokens turnᵀ·w, of the tokens w."""

    def turned_head(head: SingleHead) -> SingleHead:
        if isinstance(head, FormHead):
            return replace(head, form=head.form.turned(turn), value=turn @ floats(head.value))
        bias = None if head.score_bias is None else turn @ floats(head.score_bias)
        return replace(head, score=turn @ floats(head.score) @ turn.T, value=turn @ floats(head.value), score_bias=bias)

    return of_heads(attention, turned_head)


def turned_radii(attention: Heads, turn: Floats) -> Heads:
    """Radii of turned heads, as errors of entries add in quadrature."""
    squared = of_heads(attention, lambda head: _each(head, lambda array: floats(array) ** 2))
    return of_heads(turned(squared, turn**2), lambda head: _each(head, np.sqrt))


def _each(head: SingleHead, change: Callable[[Array], Array]) -> SingleHead:
    if isinstance(head, FormHead):
        form = head.form.with_arrays({name: change(floats(array)) for name, array in head.form.arrays().items()})
        return replace(head, form=form, value=change(floats(head.value)))
    bias = None if head.score_bias is None else change(head.score_bias)
    return replace(head, score=change(head.score), value=change(head.value), score_bias=bias)


def seen_by(attention: Heads, norm: str) -> Heads:
    """The heads without what they make of the direction that a norm before them takes off."""
    basis = mean_free(attention.width, norm)
    return attention if norm == "rms" else turned(turned(attention, basis.T), basis)


def folded(attention: Heads, gain: Array, bias: Array | None) -> Heads:
    """Heads of tokens n that answer as these do to gain·n + bias."""
    shift = np.zeros(attention.width) if bias is None else floats(bias)
    constant = sum(shift @ floats(head.value) for head in MultiHead.of(attention).heads)

    def shifted(head: SingleHead) -> SingleHead:
        known = floats(head.score) @ shift + (0.0 if head.score_bias is None else floats(head.score_bias))
        return replace(head, score_bias=known) if np.any(known) else head

    made = turned(of_heads(attention, shifted), np.diag(floats(gain)))
    whole = constant + (0.0 if attention.output_bias is None else floats(attention.output_bias))
    return replace(made, output_bias=np.asarray(whole) if np.any(whole) else None)
