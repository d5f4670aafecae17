"""Changes of parameters that show what inputs can tell: each is applied to every head that it makes sense for.

A change returns None for parameters it does not apply to, for example the scale of a neuron that is not ReLU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from keyhole.arrays import Array
from keyhole.families.activations import activate
from keyhole.families.base import Family
from keyhole.families.multi_head import MultiHead
from keyhole.families.one_layer import OneLayer
from keyhole.families.relu_net import ReluNet
from keyhole.families.residual import Residual
from keyhole.families.single_head import SingleHead
from keyhole.gauge.factored import FactoredHeads
from keyhole.gauge.heads import Heads, output_bias_of
from keyhole.gauge.tolerance import size
from keyhole.gauge.witness import kinds, witness

Random = np.random.Generator
# What answers like given parameters, or does not; None where the change does not apply to them.
Changed = Callable[[Array], Array] | None
Change = Callable[[Family, Random], Changed]
# Relative size of changes that are to be seen.
VISIBLE = 0.3


def of_kind(kind: str) -> Change:
    """The witness of some kind."""

    def change(params: Family, rng: Random) -> Changed:
        return witness(params, kind, seed=int(rng.integers(2**31))).params if kind in kinds(params) else None

    return change


def _like(array: Array, rng: Random) -> Array:
    """Random numbers about as large as those of an array, or one where they are zero."""
    return np.asarray(
        rng.standard_normal(np.shape(array)) * (size(np.asarray(array)) / max(1, np.size(array)) ** 0.5 or 1)
    )


def _perturb(array: Array, rng: Random) -> Array:
    return np.asarray(array + VISIBLE * _like(array, rng))


def _bias(head: SingleHead) -> Array:
    return np.zeros(head.width) if head.score_bias is None else head.score_bias


def of_heads(how: Callable[[SingleHead, Random], SingleHead], first_only: bool = True) -> Change:
    """The change that is one of the head, of the first head or of all heads."""

    def change(params: Family, rng: Random) -> Changed:
        params = params.like(np.zeros(1))
        if isinstance(params, OneLayer):
            return replace(params, attention=changed(params.attention, rng))
        return changed(params, rng)

    def changed(params: Family, rng: Random) -> Heads:
        if isinstance(params, SingleHead):
            return how(params, rng)
        params = MultiHead.of(params)
        chosen = params.heads[:1] if first_only else params.heads
        heads = [*(how(head, rng) for head in chosen), *params.heads[len(chosen) :]]
        bias = sum((head.output_bias for head in heads if head.output_bias is not None), output_bias_of(params))
        return MultiHead(
            [replace(head, output_bias=None) for head in heads], np.asarray(bias) if np.any(bias) else None
        )

    return change


def beside_last_token(how: Change) -> Change:
    """The change of attention to whose answers the last token is added."""

    def change(params: Family, rng: Random) -> Changed:
        changed = how(params.attention, rng) if isinstance(params, Residual) else None
        return None if changed is None else lambda tokens: changed(tokens) + tokens[:, -1, :]

    return change


def of_net(how: Callable[[ReluNet, Random], ReluNet | None]) -> Change:
    """The change that is one of the net."""

    def change(params: Family, rng: Random) -> Changed:
        params = params.like(np.zeros(1))
        net = params.anatomy.net
        changed = None if net is None else how(net, rng)
        return replace(params, ffn=changed) if isinstance(params, OneLayer) and changed is not None else changed

    return change


# --- heads: what shows -------------------------------------------------------------------------------------------

value = of_heads(lambda head, rng: replace(head, value=_perturb(head.value, rng)))
score = of_heads(lambda head, rng: replace(head, score=_perturb(head.score, rng)))
score_bias = of_heads(lambda head, rng: replace(head, score_bias=_perturb(_bias(head), rng)))


def output_bias(params: Heads, rng: Random) -> Changed:
    """Another output bias."""
    params = params.like(np.zeros(1))
    return replace(params, output_bias=_perturb(output_bias_of(params), rng))


# --- heads: what does not ----------------------------------------------------------------------------------------


def _column_for_bias(head: SingleHead, rng: Random) -> SingleHead:
    column = _like(head.score[0], rng)
    return replace(head, score=head.score + column[:, None], score_bias=_bias(head) - column)


# Other logits altogether.
logits = of_heads(
    lambda head, rng: replace(head, score=_like(head.score, rng), score_bias=_like(_bias(head), rng)), False
)
# W + 1·rᵀ; W + s·1ᵀ; W + s·1ᵀ and c − s; c + α·1; and v + α·1, with a number for every output.
equal_rows = of_heads(lambda head, rng: replace(head, score=head.score + _like(head.score[0], rng)), False)
equal_columns = of_heads(lambda head, rng: replace(head, score=head.score + _like(head.score[:, :1], rng)), False)
column_for_bias = of_heads(_column_for_bias, False)
bias_constant = of_heads(lambda head, rng: replace(head, score_bias=_bias(head) + rng.standard_normal()), False)
value_constant = of_heads(lambda head, rng: replace(head, value=head.value + _like(head.value[:1], rng)), False)


def value_for_bias(params: Heads, rng: Random) -> Changed:
    """A number added to v of the first head and taken from b: v + α·1 and b − α."""
    params = params.like(np.zeros(1))
    heads = MultiHead.of(params)
    step = _like(heads.heads[0].value[0], rng)
    first = replace(heads.heads[0], value=heads.heads[0].value + step)
    return MultiHead([first, *heads.heads[1:]], np.asarray(output_bias_of(params) - step))


def exchange_columns(params: MultiHead, _: Random) -> Changed:
    """One column of W exchanged between two heads of equal value, and with it what the score bias adds to it."""
    params = params.like(np.zeros(1))
    for one, first in enumerate(params.heads):
        for two, second in enumerate(params.heads[:one]):
            if np.array_equal(first.value, second.value):
                column = np.arange(first.width) == 0
                left, right = first.score + _bias(first)[:, None], second.score + _bias(second)[:, None]
                changed = list(params.heads)
                changed[one] = replace(first, score=np.where(column, right, left), score_bias=None)
                changed[two] = replace(second, score=np.where(column, left, right), score_bias=None)
                return MultiHead(changed, params.output_bias)
    return None


def factors(params: Family, rng: Random) -> FactoredHeads:
    """Other key and query, value and output matrices of the same products."""
    found = witness(params, "factor gauge", seed=int(rng.integers(2**31))).params
    assert isinstance(found, FactoredHeads)
    return found


def key_bias(params: Family, rng: Random) -> Changed:
    """A key bias."""
    found = factors(params, rng)
    return replace(
        found, heads=[replace(head, key_bias=rng.standard_normal(head.key.shape[1])) for head in found.heads]
    )


def value_bias(params: Heads, rng: Random) -> Changed:
    """Value biases, and an output bias that makes up for them."""
    found, bias, heads = factors(params, rng), output_bias_of(params.like(np.zeros(1))), []
    for head in found.heads:
        heads.append(replace(head, value_bias=rng.standard_normal(head.value.shape[1])))
        bias = np.asarray(bias - heads[-1].value_bias @ head.output)
    return replace(found, heads=heads, output_bias=bias)


# --- nets --------------------------------------------------------------------------------------------------------


def _skip(net: ReluNet) -> Array:
    return np.zeros((*net.weights_out.shape[:-1], net.width)) if net.skip is None else net.skip


def _without_first(net: ReluNet, _: Random) -> ReluNet | None:
    """The first neuron as a skip that has its values on the unit vectors."""
    if not net.neurons:
        return None
    answers = np.asarray(activate(net.activation, net.weights_in[0] + net.bias_in[0]))  # one per token
    return replace(
        net,
        weights_in=net.weights_in[1:],
        bias_in=net.bias_in[1:],
        weights_out=net.weights_out[..., 1:],
        skip=_skip(net) + np.multiply.outer(net.weights_out[..., 0], answers),
    )


def _added_to_rows(net: ReluNet, rng: Random) -> ReluNet:
    """Numbers added to the rows of weights_in and skip."""
    rows, skip = rng.standard_normal((net.neurons, 1)), _skip(net)
    return replace(net, weights_in=net.weights_in + rows, skip=skip + rng.standard_normal((*skip.shape[:-1], 1)))


kink = of_net(lambda net, rng: replace(net, weights_in=_perturb(net.weights_in, rng)))
weight = of_net(lambda net, rng: replace(net, weights_out=_perturb(net.weights_out, rng)))
affine = of_net(lambda net, rng: replace(net, bias_out=_perturb(net.bias_out, rng)))  # the constant
neuron_by_table = of_net(_without_first)
equal_weights = of_net(_added_to_rows)


# --- layers ------------------------------------------------------------------------------------------------------


def unseen_value(params: OneLayer, rng: Random) -> Changed:
    """Other values where the net does not look."""
    return of_kind("unseen value")(params, rng) if params.residual else None


def _row_for_bias(head: SingleHead, rng: Random) -> SingleHead:
    row = _like(head.value[0], rng)
    return replace(head, value=head.value + row, output_bias=output_bias_of(head) - row)


value_row_for_bias = of_heads(_row_for_bias)  # V + 1·rᵀ, and the output bias of attention less r
