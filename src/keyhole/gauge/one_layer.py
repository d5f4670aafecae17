"""One-layer Transformers modulo what no query can tell.

The answer is G(x_N, m_1, …, m_H): G, the net, is a function of the last token and of the mixture m_h of tokens that
each head makes. With one head every pair (x_N, m) can be asked for, with two tokens and their copies. If G does not
depend on m, logits do not matter. If it does, they are determined whatever G is. Take tokens g + tu and g, last g, with
any numbers of copies: m = g + τu, where the weight τ/t runs through (0, 1) as the ratio of copies does. Were two layers
with logits apart by δ ≠ 0 per unit of t the same map, then G(g, g + τu) = G(g, g + M(τ)u) for the map M of [0, t] that
adds tδ to the logit of τ/t. Repeated, M moves every τ towards an end of the interval, so G is constant along it. So two
layers are the same map iff their G are the same, and their logits too unless G does not depend on m.

With several heads, heads of equal logits make one mixture, and the others' weights are as independent functions as
those of heads without a net: inside a linear cell of G the answers are those of heads whose values are the gradients of
G by their mixtures, so that W_h and these gradients, cell by cell, are told, hence M_h = A·V_hᵀ for every neuron that
bends. So two layers are the same map iff G are the same functions of the last token and of mixtures of equal logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from keyhole.arrays import Booleans, Floats, floats
from keyhole.families.multi_head import MultiHead
from keyhole.families.one_layer import OneLayer
from keyhole.families.relu_net import ReluNet
from keyhole.families.single_head import SingleHead
from keyhole.gauge.heads import (
    TWO_TOKENS,
    canonical_heads,
    groups_of,
    into_logits,
    largest_logits,
    logits_apart,
    merge_heads,
    uprighted,
)
from keyhole.gauge.nets import Kinks, Sizes, canonical_net, distance_of_kinks, equivalent_kinks, kinks_of
from keyhole.gauge.tolerance import check_shapes, rounding_of


def plain_layer(layer: OneLayer) -> OneLayer:
    """The same layer in NumPy and float64, the bias of attention moved into the net."""
    example = np.zeros(1)
    attention, net = layer.attention.like(example), layer.net.like(example)
    bias_in, bias_out = net.bias_in, net.bias_out
    if attention.output_bias is not None:
        bias_in = bias_in + net.weights_in @ attention.output_bias
        bias_out = bias_out if net.skip is None else np.asarray(bias_out + net.skip @ attention.output_bias)
    net = ReluNet(net.weights_in, bias_in, net.weights_out, bias_out, net.skip, net.activation)
    return OneLayer(replace(attention, output_bias=None), net, layer.residual)


def kinks_of_layer(layer: OneLayer, tolerance: float) -> Kinks:
    """The kinks of G, a net on the last token followed by the mixtures."""
    return kinks_of(plain_layer(layer).beside_attention(), tolerance, _sizes(layer, _reach(layer)))


def _reach(layer: OneLayer) -> float:
    """How many times as long as the longest token what enters the net may be."""
    return float(layer.residual) + sum(float(np.linalg.norm(floats(head.value), 2)) for head in layer.heads)


def _sizes(layer: OneLayer, reach: float) -> Sizes:
    """How large the terms are that the net is added up from, with what enters it `reach` times as long as a token."""
    bias, net = layer.attention.output_bias, layer.net.like(np.zeros(1))
    far = 0.0 if bias is None else float(np.linalg.norm(floats(bias)))
    rows = np.linalg.norm(net.weights_in, axis=1)
    outputs = np.atleast_1d(net.bias_out).shape
    skips = np.zeros(outputs) if net.skip is None else np.linalg.norm(np.atleast_2d(net.skip), axis=1)
    return Sizes(
        rows * reach, np.abs(net.bias_in) + rows * far, skips * reach, np.abs(np.atleast_1d(net.bias_out)) + skips * far
    )


def seen_mixtures(kinks: Kinks, width: int, tolerance: float) -> Booleans:  # (heads,)
    """On which mixtures G depends, beyond rounding."""

    def sizes(rows: Floats) -> Floats:  # (n, (1 + heads)·width) -> (n, heads)
        return np.asarray(np.linalg.norm(rows.reshape(rows.shape[0], rows.shape[1] // width, width)[:, 1:], axis=2))

    bent = sizes(kinks.normal) > tolerance * kinks.normal_radius[:, None]
    sloped = sizes(kinks.linear) > tolerance * kinks.linear_radius[:, None]
    return np.asarray(np.any(bent, axis=0) | np.any(sloped, axis=0))


def sees_mixture(layer: OneLayer, tolerance: float) -> bool:
    """Whether G depends on any mixture, beyond rounding."""
    return bool(np.any(seen_mixtures(kinks_of_layer(layer, tolerance), layer.width, tolerance)))


def _with_heads(layer: OneLayer, heads: Sequence[SingleHead]) -> OneLayer:
    return replace(layer, attention=MultiHead(heads, layer.attention.output_bias))


def _merged(layer: OneLayer, tolerance: float) -> OneLayer:
    """The layer with heads of equal logits as one."""
    groups = merge_heads(MultiHead.of(layer.attention), tolerance)
    return _with_heads(layer, [SingleHead(logits[:, :-1], value, logits[:, -1]) for _, logits, value in groups])


def without_unseen(layer: OneLayer, tolerance: float) -> OneLayer:
    """The layer without heads whose mixture G does not see; the first of all where it sees none."""
    seen = seen_mixtures(kinks_of_layer(layer, tolerance), layer.width, tolerance)
    heads = [head for head, is_seen in zip(layer.heads, seen, strict=True) if is_seen]
    return _with_heads(layer, heads or layer.heads[:1])


def equivalent_layers(first: OneLayer, second: OneLayer, tolerance: float, max_length: int | None = None) -> bool:
    """Whether two layers are the same map, on sequences of up to `max_length` tokens; three tokens tell all.

    Two tokens do not tell (W, V) from (−W, −V) and an average of 2V: the weight of one is one minus that of the other.
    """
    check_shapes(first, second, "layers")
    comparable = first.net.activation == second.net.activation
    layers = first, second
    if max_length == 1:  # a token alone is its own mixture
        one, two = (kinks_of(_alone(layer), tolerance, _sizes(layer, _reach(layer))) for layer in layers)
        return equivalent_kinks(one, two, tolerance, comparable)
    sizes = [_sizes(layer, (1 + (max_length == TWO_TOKENS)) * _reach(layer)) for layer in layers]
    pairs = [[(into_logits(head), floats(head.value)) for head in layer.heads] for layer in layers]
    if max_length == TWO_TOKENS:
        pairs = [uprighted(each, pairs[0] + pairs[1], tolerance) for each in pairs]
    logits = [[own for own, _ in each] for each in pairs]
    groups = groups_of(logits[0] + logits[1], tolerance)
    kinks = []
    for layer, own, start, size in zip(layers, pairs, (0, len(pairs[0])), sizes, strict=True):
        places = [[number - start for number in group] for group in groups]
        values = [sum((own[place][1] for place in group if 0 <= place < len(own)), 0.0 * own[0][1]) for group in places]
        # Of G only values matter: every group of equal logits is a mixture of its own.
        nothing = np.zeros((layer.width, layer.width))
        together = _with_heads(plain_layer(layer), [SingleHead(nothing, np.asarray(value)) for value in values])
        kinks.append(kinks_of(together.beside_attention(), tolerance, size))
    return equivalent_kinks(kinks[0], kinks[1], tolerance, comparable)


def _alone(layer: OneLayer) -> ReluNet:
    """The net on single tokens."""
    net, width = plain_layer(layer).beside_attention(), layer.width

    def added(weights: Floats) -> Floats:  # (..., (1 + heads)·width) -> (..., width)
        return np.asarray(np.sum(weights.reshape(*weights.shape[:-1], weights.shape[-1] // width, width), axis=-2))

    skip = None if net.skip is None else added(net.skip)
    return ReluNet(added(net.weights_in), net.bias_in, net.weights_out, net.bias_out, skip, net.activation)


def distance_of_layers(first: OneLayer, second: OneLayer) -> float:
    """The larger distance of logits, heads matched one to one, and of G; logits do not count where G does not see them.

    1 where the numbers of heads that G sees differ.
    """
    check_shapes(first, second, "layers")
    tolerance = rounding_of(first, second)
    one, two = _merged(first, tolerance), _merged(second, tolerance)
    if len(one.heads) != len(two.heads):
        one, two = without_unseen(one, tolerance), without_unseen(two, tolerance)
        if len(one.heads) != len(two.heads):
            return 1.0
    two = _with_heads(two, match_heads(one.heads, two.heads))
    kinks = kinks_of_layer(one, tolerance), kinks_of_layer(two, tolerance)
    nets = distance_of_kinks(*kinks, comparable=first.net.activation == second.net.activation)
    seen = [seen_mixtures(each, first.width, tolerance) for each in kinks]
    beside = largest_logits(one.heads, two.heads)
    apart = [
        logits_apart(own, other, beside)
        for own, other, matters in zip(one.heads, two.heads, seen[0] | seen[1], strict=True)
        if matters
    ]
    return max(nets, *apart) if apart else nets


def match_heads(wanted: Sequence[SingleHead], heads: Sequence[SingleHead]) -> list[SingleHead]:
    """As many heads in the order in which their logits are nearest to those wanted."""
    beside = largest_logits(wanted, heads)
    costs = [[logits_apart(own, other, beside) for other in heads] for own in wanted]
    _, order = linear_sum_assignment(np.minimum(np.nan_to_num(np.asarray(costs), nan=2.0), 2.0))
    return [heads[int(number)] for number in order]


def canonical_layer(layer: OneLayer, tolerance: float | None = None) -> OneLayer:
    """The canonical net, and of the value matrices what it sees.

    Without a residual only products with the value matrices show: that of one head becomes the identity, and of several
    the weights into the neurons do. With one the value matrices show on the span of what the net looks at, and are zero
    beside it. Logits that do not matter become zero; heads are ordered by their values.
    """
    tolerance = rounding_of(layer) if tolerance is None else tolerance
    inner, width = plain_layer(without_unseen(_merged(layer, tolerance), tolerance)), layer.width
    net, heads = inner.net, list(inner.heads)
    blind = not sees_mixture(inner, tolerance)
    reach = sum(float(np.linalg.norm(head.value, 2)) for head in heads)
    if layer.residual:
        net = canonical_net(net, tolerance, _sizes(layer, 1.0))
        seen = net.weights_in if net.skip is None else np.vstack([net.weights_in, np.atleast_2d(net.skip)])
        projector = _projector(seen, tolerance)
        heads = [replace(head, value=head.value @ projector) for head in heads]
    else:
        beside = inner.beside_attention()
        skip = None if beside.skip is None else beside.skip[..., width:]
        net = replace(net, weights_in=beside.weights_in[:, width:], skip=skip)
        net = canonical_net(net, tolerance, _sizes(layer, reach))
        if len(heads) == 1:
            heads = [replace(heads[0], value=np.eye(width))]
        else:
            net, values = _products(net, len(heads))
            heads = [replace(head, value=value) for head, value in zip(heads, values, strict=True)]
    if blind:
        return OneLayer(SingleHead(np.zeros((width, width)), 0.0 * heads[0].value), net, layer.residual)
    return OneLayer(canonical_heads(MultiHead(heads), tolerance).simplest(), net, layer.residual)


def _products(net: ReluNet, heads: int) -> tuple[ReluNet, list[Floats]]:
    """A net on mixtures, one behind the other, as values and a net whose neurons each take one of their numbers."""
    rows = net.weights_in if net.skip is None else np.vstack([net.weights_in, np.atleast_2d(net.skip)])
    unit, shape = np.eye(rows.shape[0]), net.weights_out.shape[:-1]
    skip = None if net.skip is None else unit[net.neurons :].reshape(*shape, -1)
    values = [np.asarray(block.T) for block in np.split(rows, heads, axis=1)]
    return replace(net, weights_in=unit[: net.neurons], skip=skip), values


def _projector(rows: Floats, tolerance: float) -> Floats:  # (n, width) -> (width, width)
    """The orthogonal projector onto the span of the rows, each of which counts as much as the others."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    _, sizes, basis = np.linalg.svd(rows / np.where(lengths > 0, lengths, 1.0), full_matrices=False)
    basis = basis[sizes > tolerance * max(sizes, default=0.0)]
    return np.asarray(basis.T @ basis)
