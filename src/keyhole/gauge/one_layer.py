"""One-layer Transformers modulo what no query can tell.

The answer is G(x_N, m): G, the net, is a function of the last token and of the mixture m of tokens that attention
makes. Every pair (x_N, m) can be asked for, with two tokens and their copies. If G does not depend on m, logits do not
matter. If it does, they are determined whatever G is. Take tokens g + tu and g, last g, with any numbers of copies:
m = g + τu, where the weight τ/t runs through (0, 1) as the ratio of copies does. Were two layers with logits apart by
δ ≠ 0 per unit of t the same map, then G(g, g + τu) = G(g, g + M(τ)u) for the map M of [0, t] that adds tδ to the logit
of τ/t. Repeated, M moves every τ towards an end of the interval, so G is constant along it. So two layers are the same
map iff their G are the same, and their logits too unless G does not depend on m.
"""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.families.one_layer import OneLayer
from keyhole.families.relu_net import ReluNet
from keyhole.families.single_head import SingleHead
from keyhole.gauge.heads import into_logits, same_logits
from keyhole.gauge.nets import Kinks, Sizes, canonical_net, distance_of_kinks, equivalent_kinks, kinks_of
from keyhole.gauge.tolerance import check_shapes, relative, rounding_of


def plain_layer(layer: OneLayer) -> OneLayer:
    """The same layer in NumPy and float64, the bias of attention moved into the net."""
    example = np.zeros(1)
    attention, net = layer.attention.like(example), layer.net.like(example)
    bias_in, bias_out = net.bias_in, net.bias_out
    if attention.output_bias is not None:
        bias_in = bias_in + net.weights_in @ attention.output_bias
        bias_out = bias_out if net.skip is None else np.asarray(bias_out + net.skip @ attention.output_bias)
    net = ReluNet(net.weights_in, bias_in, net.weights_out, bias_out, net.skip, net.activation)
    return OneLayer(SingleHead(attention.score, attention.value, attention.score_bias), net, layer.residual)


def kinks_of_layer(layer: OneLayer, tolerance: float) -> Kinks:
    """The kinks of G, a net on the last token followed by the mixture."""
    return kinks_of(plain_layer(layer).beside_attention(), tolerance, _sizes(layer, _reach(layer)))


def _reach(layer: OneLayer) -> float:
    """How many times as long as the longest token what enters the net may be."""
    return float(layer.residual) + float(np.linalg.norm(floats(layer.attention.value), 2))


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


def sees_mixture(kinks: Kinks, tolerance: float) -> bool:
    """Whether G depends on the mixture, beyond rounding."""
    width = kinks.normal.shape[1] // 2
    bent = np.linalg.norm(kinks.normal[:, width:], axis=1) > tolerance * kinks.normal_radius
    sloped = np.linalg.norm(kinks.linear[:, width:], axis=1) > tolerance * kinks.linear_radius
    return bool(np.any(bent) or np.any(sloped))


def equivalent_layers(first: OneLayer, second: OneLayer, tolerance: float, max_length: int | None = None) -> bool:
    """Whether two layers are the same map, on sequences of up to `max_length` tokens; two tokens tell all."""
    check_shapes(first, second, "layers")
    comparable = first.net.activation == second.net.activation
    if max_length == 1:  # a token alone is its own mixture
        one, two = (kinks_of(_alone(layer), tolerance, _sizes(layer, _reach(layer))) for layer in (first, second))
        return equivalent_kinks(one, two, tolerance, comparable)
    one, two = kinks_of_layer(first, tolerance), kinks_of_layer(second, tolerance)
    if not equivalent_kinks(one, two, tolerance, comparable):
        return False
    blind = not (sees_mixture(one, tolerance) or sees_mixture(two, tolerance))
    return blind or same_logits(into_logits(first.attention), into_logits(second.attention), tolerance)


def _alone(layer: OneLayer) -> ReluNet:
    """The net on single tokens."""
    net, width = plain_layer(layer).beside_attention(), layer.width

    def added(weights: Floats) -> Floats:  # (..., 2·width) -> (..., width)
        return np.asarray(weights[..., :width] + weights[..., width:])

    skip = None if net.skip is None else added(net.skip)
    return ReluNet(added(net.weights_in), net.bias_in, net.weights_out, net.bias_out, skip, net.activation)


def distance_of_layers(first: OneLayer, second: OneLayer) -> float:
    """The larger distance of logits and of G; logits do not count where neither G depends on the mixture."""
    check_shapes(first, second, "layers")
    tolerance = rounding_of(first, second)
    one, two = kinks_of_layer(first, tolerance), kinks_of_layer(second, tolerance)
    nets = distance_of_kinks(one, two, comparable=first.net.activation == second.net.activation)
    if not (sees_mixture(one, tolerance) or sees_mixture(two, tolerance)):
        return nets
    return max(nets, relative(into_logits(first.attention), into_logits(second.attention)))


def canonical_layer(layer: OneLayer, tolerance: float | None = None) -> OneLayer:
    """The canonical net, and of the value matrix what it sees.

    Without a residual only products with the value matrix show, which becomes the identity. With one the value matrix
    shows on the span of what the net looks at, and is zero beside it. Logits that do not matter become zero.
    """
    tolerance = rounding_of(layer) if tolerance is None else tolerance
    inner, width = plain_layer(layer), layer.width
    value, net = inner.attention.value, inner.net
    if layer.residual:
        net = canonical_net(net, tolerance, _sizes(layer, 1.0))
        seen = net.weights_in if net.skip is None else np.vstack([net.weights_in, np.atleast_2d(net.skip)])
        value = value @ _projector(seen, tolerance)
    else:
        beside = inner.beside_attention()
        mixture = beside.weights_in[:, width:]
        skip = None if beside.skip is None else beside.skip[..., width:]
        net = ReluNet(mixture, net.bias_in, net.weights_out, net.bias_out, skip, net.activation)
        reach = float(np.linalg.norm(value, 2))
        net, value = canonical_net(net, tolerance, _sizes(layer, reach)), np.eye(width)
    if not sees_mixture(kinks_of_layer(layer, tolerance), tolerance):
        return OneLayer(SingleHead(np.zeros((width, width)), 0.0 * value), net, layer.residual)
    return OneLayer(SingleHead(inner.attention.score, value, inner.attention.score_bias), net, layer.residual)


def _projector(rows: Floats, tolerance: float) -> Floats:  # (n, width) -> (width, width)
    """The orthogonal projector onto the span of the rows, each of which counts as much as the others."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    _, sizes, basis = np.linalg.svd(rows / np.where(lengths > 0, lengths, 1.0), full_matrices=False)
    basis = basis[sizes > tolerance * max(sizes, default=0.0)]
    return np.asarray(basis.T @ basis)
