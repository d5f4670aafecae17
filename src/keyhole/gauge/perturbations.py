"""Changes of parameters that show what inputs can tell: each is applied to every head that it makes sense for.

A change returns None for parameters it does not apply to, for example the scale of a neuron that is not ReLU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from keyhole.families.factored import Factored
from keyhole.families.multi_head import MultiHead
from keyhole.families.one_layer import OneLayer
from keyhole.families.relu_net import ReluNet, activate
from keyhole.families.single_head import SingleHead
from keyhole.gauge.heads import as_multi_head, output_bias_of
from keyhole.gauge.tolerance import size
from keyhole.gauge.witness import kinds, witness

Random = np.random.Generator
# Relative size of changes that are to be seen.
VISIBLE = 0.3


def of_kind(kind: str) -> Callable[[Any, Random], Any]:
    """The witness of some kind."""

    def change(params: Any, rng: Random) -> Any:
        return witness(params, kind, seed=int(rng.integers(2**31))).params if kind in kinds(params) else None

    return change


def _plain(params: Any) -> Any:
    return params.like(np.zeros(1))


def _like(array: Any, rng: Random) -> Any:
    """Random numbers about as large as those of an array, or one where they are zero."""
    return np.asarray(
        rng.standard_normal(np.shape(array)) * (size(np.asarray(array)) / max(1, np.size(array)) ** 0.5 or 1)
    )


def _moved(array: Any, rng: Random) -> Any:
    return np.asarray(array + VISIBLE * _like(array, rng))


def _heads(params: Any, how: Callable[[SingleHead], SingleHead], first_only: bool = True) -> Any:
    """Parameters with their head, their first head or all their heads changed."""
    params = _plain(params)
    if isinstance(params, OneLayer):
        return replace(params, attention=how(params.attention))
    if isinstance(params, SingleHead):
        return how(params)
    changed = [how(head) if number == 0 or not first_only else head for number, head in enumerate(params.heads)]
    return MultiHead(changed, params.output_bias)


def _bias(head: SingleHead) -> Any:
    return np.zeros(head.width) if head.score_bias is None else head.score_bias


# --- heads: what shows -------------------------------------------------------------------------------------------


def value(params: Any, rng: Random) -> Any:
    """Another value."""
    return _heads(params, lambda head: replace(head, value=_moved(head.value, rng)))


def score(params: Any, rng: Random) -> Any:
    """Another score matrix."""
    return _heads(params, lambda head: replace(head, score=_moved(head.score, rng)))


def score_bias(params: Any, rng: Random) -> Any:
    """Another score bias."""
    return _heads(params, lambda head: replace(head, score_bias=_moved(_bias(head), rng)))


def output_bias(params: Any, rng: Random) -> Any:
    """Another output bias."""
    params = _plain(params)
    return replace(params, output_bias=_moved(output_bias_of(params), rng))


def sign(params: Any, rng: Random) -> Any:
    """A head of other signs and an average, as two tokens cannot tell it."""
    return of_kind("length-2-only")(params, rng)


# --- heads: what does not ----------------------------------------------------------------------------------------


def logits(params: Any, rng: Random) -> Any:
    """Other logits altogether."""
    return _heads(
        params, lambda head: replace(head, score=_like(head.score, rng), score_bias=_like(_bias(head), rng)), False
    )


def equal_rows(params: Any, rng: Random) -> Any:
    """W + 1·rᵀ."""
    return _heads(params, lambda head: replace(head, score=head.score + _like(head.score[0], rng)), False)


def equal_columns(params: Any, rng: Random) -> Any:
    """W + s·1ᵀ."""
    return _heads(params, lambda head: replace(head, score=head.score + _like(head.score[:, :1], rng)), False)


def column_for_bias(params: Any, rng: Random) -> Any:
    """W + s·1ᵀ and c − s."""

    def change(head: SingleHead) -> SingleHead:
        column = _like(head.score[0], rng)
        return replace(head, score=head.score + column[:, None], score_bias=_bias(head) - column)

    return _heads(params, change, False)


def bias_constant(params: Any, rng: Random) -> Any:
    """A number added to c: c + α·1."""
    return _heads(params, lambda head: replace(head, score_bias=_bias(head) + rng.standard_normal()), False)


def value_constant(params: Any, rng: Random) -> Any:
    """Numbers added to v, one for every output: v + α·1."""
    return _heads(params, lambda head: replace(head, value=head.value + _like(head.value[:1], rng)), False)


def value_for_bias(params: Any, rng: Random) -> Any:
    """A number added to v of the first head and taken from b: v + α·1 and b − α."""
    params = _plain(params)
    heads = as_multi_head(params)
    step = _like(heads.heads[0].value[0], rng)
    first = replace(heads.heads[0], value=heads.heads[0].value + step)
    return MultiHead([first, *heads.heads[1:]], np.asarray(output_bias_of(params) - step))


def columns_exchanged(params: Any, _: Random) -> Any:
    """One column of W exchanged between two heads of equal value, and with it what the score bias adds to it."""
    params = _plain(params)
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


def _factors(params: Any, rng: Random) -> Factored:
    found = witness(params, "factor gauge", seed=int(rng.integers(2**31))).params
    assert isinstance(found, Factored)
    return found


def key_and_query(params: Any, rng: Random) -> Any:
    """Other key and query matrices."""
    return _factors(params, rng)


def value_and_output(params: Any, rng: Random) -> Any:
    """Other value and output matrices."""
    return _factors(params, rng)


def key_bias(params: Any, rng: Random) -> Any:
    """A key bias."""
    found = _factors(params, rng)
    return replace(
        found, heads=[replace(head, key_bias=rng.standard_normal(head.key.shape[1])) for head in found.heads]
    )


def value_bias(params: Any, rng: Random) -> Any:
    """Value biases, and an output bias that makes up for them."""
    found, bias, heads = _factors(params, rng), output_bias_of(_plain(params)), []
    for head in found.heads:
        heads.append(replace(head, value_bias=rng.standard_normal(head.value.shape[1])))
        bias = np.asarray(bias - heads[-1].value_bias @ head.output)
    return replace(found, heads=heads, output_bias=bias)


# --- nets --------------------------------------------------------------------------------------------------------


def _net(params: Any, how: Callable[[ReluNet], ReluNet | None]) -> Any:
    """Parameters with their net changed."""
    params = _plain(params)
    changed = how(params.ffn if isinstance(params, OneLayer) else params)
    return replace(params, ffn=changed) if isinstance(params, OneLayer) and changed is not None else changed


def _skip(net: ReluNet) -> Any:
    return np.zeros((*net.weights_out.shape[:-1], net.width)) if net.skip is None else net.skip


def kink(params: Any, rng: Random) -> Any:
    """Other kinks."""
    return _net(params, lambda net: replace(net, weights_in=_moved(net.weights_in, rng)))


def weight(params: Any, rng: Random) -> Any:
    """Other weights outwards."""
    return _net(params, lambda net: replace(net, weights_out=_moved(net.weights_out, rng)))


def affine(params: Any, rng: Random) -> Any:
    """Another constant."""
    return _net(params, lambda net: replace(net, bias_out=_moved(net.bias_out, rng)))


def neuron_scale(params: Any, rng: Random) -> Any:
    """Other scales of ReLU neurons."""
    return of_kind("scaling")(params, rng)


def neuron_by_table(params: Any, _: Random) -> Any:
    """The first neuron as a skip that has its values on the unit vectors."""

    def change(net: ReluNet) -> ReluNet | None:
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

    return _net(params, change)


def equal_weights(params: Any, rng: Random) -> Any:
    """Numbers added to the rows of weights_in and skip."""

    def change(net: ReluNet) -> ReluNet:
        rows = rng.standard_normal((net.neurons, 1))
        skip = _skip(net)
        return replace(net, weights_in=net.weights_in + rows, skip=skip + rng.standard_normal((*skip.shape[:-1], 1)))

    return _net(params, change)


# --- layers ------------------------------------------------------------------------------------------------------


def value_of_layer(params: OneLayer, rng: Random) -> Any:
    """Another value matrix, the net on single tokens being the same where there is a residual."""
    return value(params, rng)


def unseen_value(params: OneLayer, rng: Random) -> Any:
    """Other values where the net does not look."""
    return of_kind("unseen value")(params, rng) if params.residual else None


def value_row(params: OneLayer, rng: Random) -> Any:
    """V + 1·rᵀ."""
    return value_constant(params, rng)


def value_row_for_bias(params: OneLayer, rng: Random) -> Any:
    """V + 1·rᵀ, and the output bias of attention less r."""

    def change(head: SingleHead) -> SingleHead:
        row = _like(head.value[0], rng)
        return replace(head, value=head.value + row, output_bias=output_bias_of(head) - row)

    return _heads(params, change)
