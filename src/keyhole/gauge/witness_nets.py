"""Witnesses of nets and of layers: other weights with the same map."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from keyhole.arrays import Floats
from keyhole.families.activations import activate
from keyhole.families.multi_head import MultiHead
from keyhole.families.one_layer import OneLayer
from keyhole.families.relu_net import ReluNet
from keyhole.gauge.nets import kinks_of, net_of
from keyhole.gauge.one_layer import plain_layer, sees_mixture, without_unseen
from keyhole.gauge.tolerance import rounding_of, size
from keyhole.gauge.witness_heads import HEAD_KINDS

FoundNet = tuple[ReluNet, str] | None
FoundLayer = tuple[OneLayer, str] | None
Random = np.random.Generator


def _plain(net: ReluNet) -> ReluNet:
    return net.like(np.zeros(1))


def _with(net: ReluNet, inner: Floats, bias: Floats, outer: Floats) -> ReluNet:
    return replace(net, weights_in=inner, bias_in=bias, weights_out=outer)


def _one_more(net: ReluNet, row: Floats, bias: float, weight: Floats) -> ReluNet:  # (width,), (), () or (outputs,)
    """The net with a neuron behind the others."""
    outer = np.concatenate([net.weights_out, weight[..., None]], axis=-1)
    return _with(net, np.vstack([net.weights_in, row]), np.append(net.bias_in, bias), outer)


def _active_neurons(net: ReluNet) -> npt.NDArray[np.intp]:
    """The numbers of neurons that bend and are heard."""
    heard = np.any(np.atleast_2d(net.weights_out), axis=0)
    return np.flatnonzero(heard & np.any(net.weights_in, axis=1))


def merge(params: ReluNet, _: Random) -> FoundNet:
    """Neurons of the same kink as one."""
    net = _plain(params)
    kinks = kinks_of(net, rounding_of(params))
    if kinks.offset.size == _active_neurons(net).size:
        return None
    fewer = net_of(kinks, 1.0, net)
    return fewer, "neurons of the same kink are one, and what remains of them is affine and goes into skip and bias"


def sign_trade(params: ReluNet, _: Random) -> FoundNet:
    """One neuron turned round, at the expense of the skip."""
    net = _plain(params)
    if not _active_neurons(net).size:
        return None
    number = int(_active_neurons(net)[0])
    turned = np.where(np.arange(net.neurons) == number, -1.0, 1.0)
    row, shift, weight = net.weights_in[number], net.bias_in[number], net.weights_out[..., number]
    skip = np.zeros((*np.shape(weight), net.width)) if net.skip is None else net.skip
    other = replace(
        _with(net, turned[:, None] * net.weights_in, turned * net.bias_in, net.weights_out),
        skip=skip + np.multiply.outer(weight, row),
        bias_out=np.asarray(net.bias_out + weight * shift),
    )
    said = f"neuron {number} looks the other way; act(z) = z + act(−z), and z is affine, so the skip makes up for it"
    return other, said


def scaling(params: ReluNet, rng: Random) -> FoundNet:
    """Weights into ReLU neurons times a factor, weights out of them over it."""
    net = _plain(params)
    if net.activation != "relu" or not _active_neurons(net).size:
        return None
    factor = np.exp(rng.uniform(0.1, 1.0, net.neurons) * rng.choice([-1, 1], net.neurons))
    other = _with(net, factor[:, None] * net.weights_in, factor * net.bias_in, net.weights_out / factor)
    return other, "weights into every neuron are multiplied by a positive number, those out of it divided by it"


def permutation(params: ReluNet, rng: Random) -> FoundNet:
    """The neurons in another order."""
    net = _plain(params)
    if net.neurons < 2:
        return None
    order = (np.arange(net.neurons) + rng.integers(1, net.neurons)) % net.neurons
    other = _with(net, net.weights_in[order], net.bias_in[order], net.weights_out[..., order])
    return other, "the neurons are in another order"


def split(params: ReluNet, rng: Random) -> FoundNet:
    """One neuron as two."""
    net = _plain(params)
    if not _active_neurons(net).size:
        return None
    number = int(_active_neurons(net)[0])
    weight = net.weights_out[..., number]
    part = weight * rng.uniform(0.2, 0.8)
    outer = net.weights_out.copy()
    outer[..., number] = weight - part
    less = replace(net, weights_out=outer)
    other = _one_more(less, net.weights_in[number], net.bias_in[number], part)
    return other, f"neuron {number} is two, whose weights outwards add up to its own"


def dead_neuron(params: ReluNet, rng: Random) -> FoundNet:
    """A neuron that nobody hears."""
    net = _plain(params)
    silent = np.zeros(net.weights_out.shape[:-1])
    other = _one_more(net, rng.standard_normal(net.width), rng.standard_normal(), silent)
    return other, "there is one neuron more, whose weights outwards are zero"


def constant_neuron(params: ReluNet, rng: Random) -> FoundNet:
    """A neuron that sees nothing but its bias, at the expense of the output bias."""
    net = _plain(params)
    level, weight = np.asarray(rng.uniform(0.5, 2.0)), np.asarray(rng.standard_normal(net.weights_out.shape[:-1]))
    bias_out = np.asarray(net.bias_out - weight * activate(net.activation, level))
    other = replace(_one_more(net, np.zeros(net.width), float(level), weight), bias_out=bias_out)
    return other, "there is one neuron more, which sees nothing but its bias; the output bias makes up for it"


NET_KINDS: dict[str, Callable[[ReluNet, Random], FoundNet]] = {
    "merge": merge,
    "sign trade": sign_trade,
    "scaling": scaling,
    "permutation": permutation,
    "split": split,
    "dead neuron": dead_neuron,
    "constant neuron": constant_neuron,
}


# --- layers -----------------------------------------------------------------------------------------------------


def silent_logits(params: OneLayer, rng: Random) -> FoundLayer:
    """Other logits where the net does not see the mixture."""
    layer, tolerance = plain_layer(params), rounding_of(params)
    if sees_mixture(params, tolerance):
        return None
    other = replace(layer.heads[0], score=rng.standard_normal(layer.heads[0].score.shape))
    said = "the net does not depend on what attention makes, so logits can be anything"
    return replace(layer, attention=MultiHead([other, *layer.heads[1:]]).simplest()), said


def value_basis(params: OneLayer, rng: Random) -> FoundLayer:
    """Another basis between value matrix and net."""
    layer = plain_layer(params)
    inner = layer.net.width
    if layer.residual:
        return None
    turn, _ = np.linalg.qr(rng.standard_normal((inner, inner)))
    turn = turn * rng.uniform(0.5, 2.0, inner)
    back = np.linalg.inv(turn).T
    net = layer.net
    changed = replace(net, weights_in=net.weights_in @ back, skip=None if net.skip is None else net.skip @ back)
    attention = MultiHead([replace(head, value=head.value @ turn) for head in layer.heads]).simplest()
    said = "the value matrix is multiplied by a matrix and the weights behind it by its inverse: only the products show"
    return OneLayer(attention, changed, residual=False), said


def unseen_value(params: OneLayer, rng: Random) -> FoundLayer:
    """Another value matrix where the net does not look."""
    layer = plain_layer(params)
    net = layer.net
    heard = net.weights_in[np.any(np.atleast_2d(net.weights_out), axis=0)]
    rows = heard if net.skip is None else np.vstack([heard, np.atleast_2d(net.skip)])
    _, sizes, basis = np.linalg.svd(np.vstack([rows, np.zeros((net.width, net.width))]), full_matrices=False)
    blind = basis[sizes <= rounding_of(params) * max(sizes[0], np.finfo(float).tiny)]
    if not blind.shape[0]:
        return None
    first, *others = layer.heads
    entry = size(first.value) / first.value.size**0.5 or 1.0
    moved = first.value + entry * rng.standard_normal((layer.width, blind.shape[0])) @ blind
    said = f"the net does not look in {blind.shape[0]} of {net.width} directions, and there values can be anything"
    return replace(layer, attention=MultiHead([replace(first, value=moved), *others]).simplest()), said


def bias_trade(params: OneLayer, rng: Random) -> FoundLayer:
    """The bias of attention, at the expense of those of the net."""
    layer = plain_layer(params)
    net = layer.net
    # About as large as the biases it makes up for.
    weights, biases = size(net.weights_in), size(net.bias_in)
    if not weights and net.skip is not None:
        weights, biases = size(net.skip), size(np.asarray(net.bias_out))
    entry = biases / (weights or 1.0) or 1.0
    bias = entry * rng.standard_normal(net.width)
    changed = replace(
        net,
        bias_in=net.bias_in - net.weights_in @ bias,
        bias_out=net.bias_out if net.skip is None else np.asarray(net.bias_out - net.skip @ bias),
    )
    attention = replace(layer.attention, output_bias=bias)
    said = "attention has another output bias, and the biases of the net make up for it"
    return replace(layer, attention=attention, ffn=changed), said


def length_one(params: OneLayer, rng: Random) -> FoundLayer:
    """Other logits: a token alone has all the weight."""
    layer, tolerance = plain_layer(params), rounding_of(params)
    if not sees_mixture(params, tolerance):
        return None
    width = layer.width
    heads = [
        replace(head, score=rng.standard_normal((width, width)) * (size(head.score) / width or 1.0))
        for head in layer.heads
    ]
    said = "attention has other logits: a token alone has all the weight"
    return replace(layer, attention=MultiHead(heads).simplest()), said


def _behind(make: Callable[[ReluNet, Random], FoundNet]) -> Callable[[OneLayer, Random], FoundLayer]:
    """A witness of the net as one of the layer."""

    def made(params: OneLayer, rng: Random) -> FoundLayer:
        layer = plain_layer(params)
        found = make(layer.net, rng)
        return None if found is None else (replace(layer, ffn=found[0]), found[1])

    return made


def _in_front(kind: str) -> Callable[[OneLayer, Random], FoundLayer]:
    """A witness of the heads as one of the layer: the same mixtures, and so the same answers."""

    def made(params: OneLayer, rng: Random) -> FoundLayer:
        layer, tolerance = plain_layer(params), rounding_of(params)
        if kind == "length-2-only":  # of a head that the net does not see nothing shows at any length
            if not sees_mixture(layer, tolerance):
                return None
            layer = without_unseen(layer, tolerance)
        found = HEAD_KINDS[kind](layer.attention, rng)
        if found is None:
            return None
        assert isinstance(found[0], MultiHead)
        return replace(layer, attention=found[0].simplest()), found[1]

    return made


LAYER_KINDS: dict[str, Callable[[OneLayer, Random], FoundLayer]] = {
    "silent logits": silent_logits,
    "factor gauge": value_basis,
    "unseen value": unseen_value,
    "bias trade": bias_trade,
    **{kind: _behind(make) for kind, make in NET_KINDS.items()},
    "merge of heads": _in_front("merge"),
    "order of heads": _in_front("permutation"),
    "split of a head": _in_front("split"),
    "zero head": _in_front("zero head"),
    "length-2-only": _in_front("length-2-only"),
    "length-1-only": length_one,
}
