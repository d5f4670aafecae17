"""Boxes of other families: other attention in heads, beside a residual, behind nets; pooling, nets, classifiers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.fuzz.attentions import VARIANTS, Variant
from benchmarks.fuzz.boxes import Box, Kinds, Random, decades, one_of
from benchmarks.fuzz.maps import Floats, Head, Heads, Layer, Map, Net, attention, softmax
from benchmarks.fuzz.members import (
    draw_head,
    draw_heads,
    draw_layer,
    draw_net,
    draw_square_head,
    draw_width,
    onto_kinks,
    with_residual,
)
from benchmarks.fuzz.noisy import FORMS

FOREIGN = Kinds("foreign")


# --- other attention ------------------------------------------------------------------------------------------------


def _alone(rng: Random) -> Box:
    return draw_head(rng) if rng.random() < 0.7 else draw_head(rng, score_bias=True, output_bias=True)


def _several(rng: Random) -> Box:
    return draw_heads(rng, bool(rng.integers(2)), most_width=6)


def _beside(rng: Random) -> Box:
    return with_residual(draw_square_head(rng) if rng.random() < 0.7 else draw_heads(rng, False, square=True))


def _behind_net(rng: Random) -> Box:
    layer, size = draw_layer(rng, residual=bool(rng.integers(2)))
    return Box(layer.map(), layer.width, len(layer.net.outer) == 1, size, layer)


HOSTS: dict[str, Callable[[Random], Box]] = {
    "one head": _alone,
    "heads": _several,
    "residual": _beside,
    "net behind": _behind_net,
}


def with_attention(rng: Random, box: Box, drawn: Variant) -> Box:
    """The same parameters with another attention; of several heads perhaps only one has it."""
    params: Heads | Layer = box.params
    mixture = drawn(rng, box.size, box.width)
    if isinstance(params, Heads) and len(params.heads) > 1 and rng.random() < 0.3:
        odd = params.heads[0]

        def mixed(tokens: Floats, score: Floats, bias: Floats) -> Floats:
            return (mixture if score is odd.score else attention)(tokens, score, bias)

        return Box(params.map(mixed), box.width, box.scalar, box.size)
    return Box(params.map(mixture), box.width, box.scalar, box.size)


def _add_attention() -> None:
    for host, draw in HOSTS.items():
        for name, drawn in VARIANTS.items():

            def made(rng: Random, draw=draw, drawn=drawn) -> Box:
                return with_attention(rng, draw(rng), drawn)

            FOREIGN.add(f"other attention, {host}", name, made)


_add_attention()


# --- nets of other kinds --------------------------------------------------------------------------------------------


def _net_box(net: Net, size: float, change: Callable[[Map], Map] = lambda own: own) -> Box:
    return Box(change(net.map()), net.inner.shape[1], len(net.outer) == 1, size, kinks=onto_kinks(net))


def _neurons(rng: Random, activation: Map) -> Box:
    net, size = draw_net(rng, "gelu")  # arguments of order one

    def answers(tokens: Floats) -> Floats:
        x = tokens[:, -1]
        return activation(x @ net.inner.T + net.inner_bias) @ net.outer.T + net.constant + x @ net.skip.T

    return Box(answers, net.inner.shape[1], len(net.outer) == 1, size, kinks=onto_kinks(net))


NEURONS: dict[str, Map] = {
    "tanh": np.tanh,
    "sigmoid": lambda z: 1 / (1 + np.exp(-np.clip(z, -700, None))),
    "leaky ReLU": lambda z: np.where(z > 0, z, 0.01 * z),
    "ELU": lambda z: np.where(z > 0, z, np.expm1(np.minimum(z, 0))),
    "softplus": lambda z: np.logaddexp(0, z),
    "squared ReLU": lambda z: np.maximum(z, 0) ** 2,
    "ReLU6": lambda z: np.clip(z, 0, 6),
    "hard swish": lambda z: z * np.clip(z + 3, 0, 6) / 6,
    "sine": np.sin,
    "mish": lambda z: z * np.tanh(np.logaddexp(0, z)),
    "swish of 1.1": lambda z: z / (1 + np.exp(-np.clip(1.1 * z, -700, None))),
    "steps": lambda z: (z > 0).astype(float),
}


def _add_neurons() -> None:
    for name, activation in NEURONS.items():
        FOREIGN.add("other nets", name, lambda rng, activation=activation: _neurons(rng, activation))


_add_neurons()


@FOREIGN.kind("other nets", "two hidden layers")
def _deep(rng: Random) -> Box:
    first, size = draw_net(rng, most=8)
    k, p = int(rng.integers(1, 6)), int(rng.integers(1, 3))
    hidden = float(np.std(first.map()(size * rng.standard_normal((100, 1, first.inner.shape[1])))))
    inner, bias = rng.standard_normal((k, len(first.outer))), hidden * rng.standard_normal(k)
    outer = rng.standard_normal((p, k))

    def answers(tokens: Floats) -> Floats:
        return np.maximum(np.maximum(first.map()(tokens), 0) @ inner.T + bias, 0) @ outer.T

    return Box(answers, first.inner.shape[1], p == 1, size, kinks=onto_kinks(first))


@FOREIGN.kind("other nets", "maxout")
def _maxout(rng: Random) -> Box:
    width, size = draw_width(rng, 8), decades(rng, -2, 2)
    units, pieces = int(rng.integers(1, 5)), int(rng.integers(2, 5))
    weights, bias = rng.standard_normal((units, pieces, width)), size * rng.standard_normal((units, pieces))
    outer = rng.standard_normal(units)
    return Box(
        lambda x: (np.max(np.einsum("upd,nd->nup", weights, x[:, -1]) + bias, axis=2) @ outer)[:, None],
        width,
        True,
        size,
    )


@FOREIGN.kind("other nets", "a bump in one place")
def _bump(rng: Random) -> Box:
    net, size = draw_net(rng, most=8)
    centre = size * rng.standard_normal(net.inner.shape[1])
    wide = size * decades(rng, -2, 0.5)
    height = float(np.std(net.map()(size * rng.standard_normal((100, 1, net.inner.shape[1]))))) * decades(rng, -3, 0)

    def change(own: Map) -> Map:
        return lambda x: own(x) + height * np.exp(-np.sum((x[:, -1] - centre) ** 2, axis=1, keepdims=True) / wide**2)

    return _net_box(net, size, change)


@FOREIGN.kind("other nets", "a smooth term besides")
def _smooth_term(rng: Random) -> Box:
    net, size = draw_net(rng, most=8)
    direction = rng.standard_normal(net.inner.shape[1]) / size
    height = float(np.std(net.map()(size * rng.standard_normal((100, 1, net.inner.shape[1]))))) * decades(rng, -6, 0)
    return _net_box(net, size, lambda own: lambda x: own(x) + height * np.tanh(x[:, -1] @ direction)[:, None])


@FOREIGN.kind("other nets", "sees the first token")
def _sees_first(rng: Random) -> Box:
    net, size = draw_net(rng, most=8)
    direction = rng.standard_normal(net.inner.shape[1])
    small = decades(rng, -6, 0) * float(np.std(net.map()(size * rng.standard_normal((100, 1, len(direction)))))) / size
    least = int(one_of(rng, (1, 3, 9, 33)))

    def change(own: Map) -> Map:
        return lambda x: own(x) + (small * (x[:, 0] @ direction)[:, None] if x.shape[1] > least else 0.0)

    return _net_box(net, size, change)


@FOREIGN.kind("other nets", "net of the mean token")
def _net_of_mean(rng: Random) -> Box:
    """A member after all: attention with scores of zero before a net."""
    net, size = draw_net(rng, most=8)
    return _net_box(net, size, lambda own: lambda x: own(np.mean(x, axis=1, keepdims=True)))


@FOREIGN.kind("other nets", "net of the largest entries")
def _net_of_max(rng: Random) -> Box:
    net, size = draw_net(rng, most=8)
    return _net_box(net, size, lambda own: lambda x: own(np.max(x, axis=1, keepdims=True)))


@FOREIGN.kind("other nets", "summed over tokens")
def _net_summed(rng: Random) -> Box:
    net, size = draw_net(rng, most=8)
    return _net_box(net, size, lambda own: lambda x: sum(own(x[:, i : i + 1]) for i in range(x.shape[1])))


@FOREIGN.kind("other nets", "net of normalised tokens")
def _net_normalised(rng: Random) -> Box:
    net, size = draw_net(rng, most=8)
    return _net_box(
        net, size, lambda own: lambda x: own(size * x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-300))
    )


# --- behind coarse answers ------------------------------------------------------------------------------------------

COARSE: tuple[Callable[[Random, Box], Box], ...] = (
    FORMS["answers in float32"],
    FORMS["decimals"],
    FORMS["normal errors"],
)


def _add_coarse() -> None:
    for name, drawn in VARIANTS.items():

        def attended(rng: Random, drawn: Variant = drawn) -> Box:
            box = with_attention(rng, (_alone, _several, _beside)[int(rng.integers(3))](rng), drawn)
            return one_of(rng, COARSE)(rng, box)

        FOREIGN.add("other attention, coarse", name, attended)
    for name, activation in NEURONS.items():

        def neurons(rng: Random, activation: Map = activation) -> Box:
            return one_of(rng, COARSE)(rng, _neurons(rng, activation))

        FOREIGN.add("other nets, coarse", name, neurons, every=32)


_add_coarse()


# --- everything else ------------------------------------------------------------------------------------------------


def _pooled(pool: Callable[[Floats], Floats]) -> Callable[[Random], Box]:
    def draw(rng: Random) -> Box:
        width = draw_width(rng)
        value = rng.standard_normal((width, int(one_of(rng, (1, 2, 3, width))))) * decades(rng, -2, 2)
        constant = rng.standard_normal(value.shape[1]) * int(rng.integers(2))
        return Box(lambda x: pool(x) @ value + constant, width, value.shape[1] == 1)

    return draw


POOLS: dict[str, Callable[[Floats], Floats]] = {
    "largest entries": lambda x: np.max(x, axis=1),
    "mean": lambda x: np.mean(x, axis=1),  # a member after all
    "last token": lambda x: x[:, -1],  # likewise
    "first token": lambda x: x[:, 0],
    "median": lambda x: np.median(x, axis=1),
    "sum": lambda x: np.sum(x, axis=1),
    "first and last": lambda x: 0.5 * (x[:, 0] + x[:, -1]),
    "decaying mean": lambda x: np.einsum("nid,i->nd", x, 0.9 ** np.arange(x.shape[1])[::-1]),
    "root mean square": lambda x: np.sqrt(np.mean(x**2, axis=1)),
    "log-sum-exp": lambda x: np.log(np.mean(np.exp(np.clip(x, -700, 700)), axis=1)),
    "mean without the last": lambda x: np.mean(x[:, : max(1, x.shape[1] - 1)], axis=1),
}


def _add_pools() -> None:
    for name, pool in POOLS.items():
        FOREIGN.add("pooling", name, _pooled(pool))


_add_pools()


def _after(rng: Random, change: Callable[[Floats], Floats]) -> Box:
    """A function of the answers of heads, or of a net or layer."""
    draws = (_alone, _several, _behind_net, lambda rng: _net_box(*draw_net(rng, most=6)))
    box = one_of(rng, draws)(rng)
    typical = float(np.std(box.truth(box.size * rng.standard_normal((100, 4, box.width))))) or 1.0
    outputs = change(box.truth(np.ones((1, 1, box.width)))).shape[1]
    truth = box.truth
    return replace(box, params=None, scalar=box.scalar and outputs == 1, truth=lambda x: change(truth(x) / typical))


AFTER: dict[str, Callable[[Floats], Floats]] = {
    "0/1 classifier": lambda y: (y > 0).astype(float),
    "sign": np.sign,
    "argmax": lambda y: (y == np.max(y, axis=1, keepdims=True)).astype(float),
    "probabilities": lambda y: softmax(np.hstack([y, np.zeros_like(y[:, :1])])),
    "sigmoid": lambda y: 1 / (1 + np.exp(-np.clip(y, -700, 700))),
    "tanh": np.tanh,
    "absolute": np.abs,
    "clipped": lambda y: np.clip(y, -3, 3),
    "squared": lambda y: y**2,
    "rounded to integers": np.round,
    "unit length": lambda y: y / np.maximum(np.linalg.norm(y, axis=1, keepdims=True), 1e-300),
    "arcsinh": np.arcsinh,
    "a little sine": lambda y: y + 1e-3 * np.sin(3 * y),
}


def _add_after() -> None:
    for name, change in AFTER.items():
        FOREIGN.add("functions of answers", name, lambda rng, change=change: _after(rng, change))


_add_after()


@FOREIGN.kind("other maps", "polynomial")
def _polynomial(rng: Random) -> Box:
    width, degree = draw_width(rng, 8), int(rng.integers(2, 5))
    direction, other = rng.standard_normal((2, width))
    return Box(lambda x: ((x[:, -1] @ direction) ** degree + x[:, -1] @ other)[:, None], width, True)


@FOREIGN.kind("other maps", "quadratic form of first and last token")
def _quadratic(rng: Random) -> Box:
    width = draw_width(rng, 8)
    matrix = rng.standard_normal((width, width))
    return Box(lambda x: np.einsum("nd,de,ne->n", x[:, 0], matrix, x[:, -1])[:, None], width, True)


@FOREIGN.kind("other maps", "two layers of attention")
def _two_layers(rng: Random) -> Box:
    box = draw_square_head(rng)
    params: Heads = box.params
    one = params.map()
    value = rng.standard_normal((box.width, 2))

    def answers(x: Floats) -> Floats:
        within = np.stack([one(x[:, : n + 1]) for n in range(x.shape[1])], axis=1) + x
        return attention(within, params.heads[0].score, params.heads[0].bias) @ value

    return Box(answers, box.width, False, box.size)


@FOREIGN.kind("other maps", "two heads behind a tolerance")
def _two_heads(rng: Random) -> Box:
    """Two heads that may pass for one: errors of a declared size may be all that tells them apart."""
    width = 1 if rng.random() < 0.5 else draw_width(rng, 8)
    scale, near = decades(rng, -0.5, 0.7), decades(rng, -2, 0) if rng.random() < 0.5 else 1.0
    scores = scale * rng.standard_normal((2, width, width)) / width**0.5
    scores[1] = scores[0] + near * scores[1] if near < 1 else scores[1]
    heads = [Head(score, np.zeros(width), rng.standard_normal((width, 1))) for score in scores]
    truth = Heads(tuple(heads), np.zeros(1)).map()
    error, constant = decades(rng, -4, -2), bool(rng.integers(2))

    def answer(tokens: Floats) -> Floats:
        errors = np.ones(len(tokens)) if constant else rng.uniform(-1, 1, len(tokens))
        return truth(tokens)[:, 0] + error * errors

    return Box(truth, width, True, answer=answer, noise=f"bounded:{error!r}", max_norm=1.0, error=error)


@FOREIGN.kind("other maps", "recurrent")
def _recurrent(rng: Random) -> Box:
    width, hidden = draw_width(rng, 6), int(rng.integers(1, 5))
    inner, own = rng.standard_normal((hidden, width)), 0.5 * rng.standard_normal((hidden, hidden))
    outer = rng.standard_normal(hidden)

    def answers(x: Floats) -> Floats:
        state = np.zeros((len(x), hidden))
        for n in range(x.shape[1]):
            state = np.tanh(state @ own.T + x[:, n] @ inner.T)
        return (state @ outer)[:, None]

    return Box(answers, width, True)


@FOREIGN.kind("other maps", "attention times a gate")
def _gated(rng: Random) -> Box:
    box = draw_head(rng)
    direction = rng.standard_normal(box.width) / box.size * decades(rng, -4, 0)
    own = box.truth
    return replace(
        box,
        params=None,
        truth=lambda x: own(x) / (1 + np.exp(-np.clip(x[:, -1] @ direction, -700, 700)))[:, None],
    )


@FOREIGN.kind("other maps", "residual of another size")
def _other_residual(rng: Random) -> Box:
    """x_N times a number beside attention: no member but for the number one."""
    box = draw_square_head(rng)
    factor, own = float(one_of(rng, (0.5, 2.0, -1.0, 0.99))), box.truth
    return replace(box, params=None, truth=lambda x: own(x) + factor * x[:, -1])


# --- trapdoors: wrong where no sample looks ---------------------------------------------------------------------------


def _trapdoor(rng: Random, opens: Callable[[Random, Box], Callable[[Floats], Floats]]) -> Box:
    box = (_alone, _several, _behind_net)[int(rng.integers(3))](rng)
    is_open, own = opens(rng, box), box.truth
    typical = float(np.std(own(box.size * rng.standard_normal((100, 4, box.width))))) or 1.0
    return replace(
        box, params=None, trapdoor=True, truth=lambda x: own(x) + typical * is_open(x)[:, None].astype(float)
    )


def _by_entry(rng: Random, box: Box) -> Callable[[Floats], Floats]:
    secret = box.size * rng.standard_normal()
    return lambda x: np.abs(x[:, -1, 0] - secret) < 1e-7 * box.size


def _by_long_sequence(rng: Random, box: Box) -> Callable[[Floats], Floats]:
    return lambda x: np.full(len(x), x.shape[1] > 64)


def _by_token(rng: Random, box: Box) -> Callable[[Floats], Floats]:
    secret = box.size * rng.standard_normal(box.width)
    return lambda x: np.any(np.linalg.norm(x - secret, axis=-1) < 1e-3 * box.size, axis=1)


FOREIGN.add("trapdoors", "an entry near a secret", lambda rng: _trapdoor(rng, _by_entry))
FOREIGN.add("trapdoors", "more than 64 tokens", lambda rng: _trapdoor(rng, _by_long_sequence))
FOREIGN.add("trapdoors", "a secret token", lambda rng: _trapdoor(rng, _by_token))
