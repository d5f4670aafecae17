"""Members of unusual shape, and boxes that change tokens, values or answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.fuzz.boxes import Box, Kinds, Random, decades, one_of
from benchmarks.fuzz.foreign import HOSTS
from benchmarks.fuzz.maps import Floats, Head, Heads, Layer, Map, Net, logits, softmax
from benchmarks.fuzz.members import (
    boxed,
    draw_labels,
    draw_net,
    natural_size,
    net_limit,
    onto_kinks,
    plain_matrix,
)

UNUSUAL = Kinds("member")
CHANGED = Kinds("foreign")

# --- labels ---------------------------------------------------------------------------------------------------------


def labels_of(score: Floats, values: Floats, max_norm: float | None = None) -> Box:
    """Labels of one head of these parameters."""
    width, outputs = values.shape
    numbers = Heads((Head(score, np.zeros(width), values),), np.zeros(outputs)).map()

    def labels(tokens: Floats) -> Floats:
        answers = numbers(tokens)
        return np.where(answers[:, 0] > 0, 1.0, -1.0) if outputs == 1 else np.argmax(answers, axis=1) * 1.0

    def truth(tokens: Floats) -> Floats:  # nan on a boundary, where arithmetic decides
        ordered = np.sort(np.hstack([numbers(tokens), np.zeros((len(tokens), int(outputs == 1)))]), axis=1)
        sure = ordered[:, -1] > ordered[:, -2] + 1e-12 * np.abs(ordered[:, -1])
        return np.where(sure, labels(tokens), np.nan)[:, None]

    limit = "classes of tokens of two numbers meet in too few boundaries" if width == 2 and outputs > 3 else ""
    size = natural_size(1.0, width)
    return Box(truth, width, True, size, answer=labels, labels=True, max_norm=max_norm, limit=limit)


def draw_label_values(rng: Random, kind: str) -> Box:
    width, outputs = int(rng.integers(2, 6)), int(one_of(rng, (1, 3, 4)))
    values = rng.standard_normal((width, outputs))
    score = rng.standard_normal((width, width))
    if kind == "zeros":
        values *= rng.random(values.shape) > 0.4
    elif kind == "whole numbers":
        values, score = rng.integers(-2, 3, values.shape) * 1.0, rng.integers(-2, 3, score.shape) * 1.0
    elif kind == "uneven classes":
        values = rng.standard_normal((width, 3)) * 10 ** rng.uniform(-1, 0, 3)
    if not np.any(values):
        values[0, 0] = 1.0
    return labels_of(score, values, float(one_of(rng, (1.0, 2.0, 4.0))) if rng.integers(2) else None)


for _kind in ("zeros", "whole numbers", "uneven classes"):
    UNUSUAL.add("labels", _kind, lambda rng, kind=_kind: draw_label_values(rng, kind))
UNUSUAL.add("labels", "noise to be measured", lambda rng: replace(draw_labels(rng, 1), noise="measure"))

# --- nets and layers ------------------------------------------------------------------------------------------------


def net_of(rng: Random, neurons: int) -> Net:
    """Weights and biases of size one, perhaps a skip."""
    width, outputs = int(rng.integers(1, 7)), int(one_of(rng, (1, 1, 2, 3)))
    skip = rng.standard_normal((outputs, width)) * int(rng.integers(2))
    return Net(
        rng.standard_normal((neurons, width)),
        rng.standard_normal(neurons),
        rng.standard_normal((outputs, neurons)),
        rng.standard_normal(outputs) * int(rng.integers(2)),
        skip,
    )


def net_box(net: Net, limit: str = "") -> Box:
    return boxed(net, net.inner.shape[1], len(net.outer) == 1, 1.0, limit or net_limit(net))


def _with_constant(rng: Random) -> Box:
    net = net_of(rng, int(rng.integers(1, 9)))
    constant = decades(rng, 3, 7) * rng.standard_normal(len(net.outer))
    return net_box(replace(net, constant=constant, skip=decades(rng, 0, 4) * rng.standard_normal(net.skip.shape)))


def _near_origin(rng: Random) -> Box:
    net = net_of(rng, int(rng.integers(1, 3)))
    return net_box(replace(net, inner_bias=net.inner_bias * 10 ** rng.uniform(-3, 0)))


def _near_and_far(rng: Random) -> Box:
    net = net_of(rng, int(rng.integers(1, 9)))
    return net_box(replace(net, inner_bias=net.inner_bias * 10 ** rng.uniform(-3, 3, len(net.inner))))


def _parallel(rng: Random) -> Box:
    net, count = net_of(rng, int(rng.integers(1, 6))), int(rng.integers(2, 5))
    sides = rng.uniform(0.5, 2, (count, 1)) * rng.choice([-1, 1], (count, 1))
    inner = np.vstack([net.inner, sides * rng.standard_normal(net.inner.shape[1])])
    bias = np.append(net.inner_bias, rng.standard_normal(count))
    return net_box(replace(net, inner=inner, inner_bias=bias, outer=rng.standard_normal((len(net.outer), len(inner)))))


def _one_point(rng: Random) -> Box:
    net = net_of(rng, int(rng.integers(2, 9)))
    limit = "all kinks in one point of two dimensions" if net.inner.shape[1] <= 2 else ""
    return net_box(replace(net, inner_bias=-net.inner @ rng.standard_normal(net.inner.shape[1])), limit)


def _integer_layer(rng: Random, *, residual: bool) -> Box:
    width, neurons = int(rng.integers(2, 5)), int(rng.integers(1, 6))
    inside = width if residual else int(one_of(rng, (1, 2, width)))

    def whole(*shape: int) -> Floats:
        return np.asarray(rng.integers(-2, 3, shape), dtype=float)

    net = Net(whole(neurons, inside), whole(neurons) + 0.5, whole(1, neurons), np.zeros(1), np.zeros((1, inside)))
    values = whole(width, inside)
    reaches = np.any(net.inner, axis=1) if residual else np.any(net.inner @ values.T, axis=1)
    limit = "" if np.any(reaches & (net.outer[0] != 0)) else "an affine map"
    layer = Layer((Head(whole(width, width), np.zeros(width), values),), np.zeros(inside), net, residual)
    return boxed(layer, width, True, 1.0, limit)


def _typed_heads(rng: Random) -> Box:
    width, outputs = int(rng.integers(2, 6)), int(rng.integers(1, 5))
    heads = [
        Head(plain_matrix(rng, width), np.zeros(width), rng.integers(-2, 3, (width, outputs)) * 1.0) for _ in range(2)
    ]
    both = np.stack([head.score.ravel() for head in heads])
    limit = "proportional heads behind fewer numbers than heads" if np.linalg.matrix_rank(both) < 2 else ""
    if not any(np.any(head.value) for head in heads):
        limit = "a value of zero shows nothing"
    return boxed(Heads(tuple(heads), np.zeros(outputs)), width, outputs == 1, width**-0.25, limit)


UNUSUAL.add("ReLU net", "large constant and skip", _with_constant)
UNUSUAL.add("ReLU net", "kinks near the origin", _near_origin)
UNUSUAL.add("ReLU net", "kinks near and far", _near_and_far)
UNUSUAL.add("ReLU net", "parallel kinks", _parallel)
UNUSUAL.add("ReLU net", "kinks through one point", _one_point)
UNUSUAL.add("one layer", "integers", lambda rng: _integer_layer(rng, residual=False))
UNUSUAL.add("one layer", "integers, residual", lambda rng: _integer_layer(rng, residual=True))
UNUSUAL.add("heads, several outputs", "typed-in matrices", _typed_heads)

# --- tokens, values and answers changed -----------------------------------------------------------------------------


def draw_host(rng: Random) -> Box:
    if rng.random() < 0.2:
        net, size = draw_net(rng, most=6)
        return Box(net.map(), net.inner.shape[1], len(net.outer) == 1, size, kinks=onto_kinks(net))
    return one_of(rng, HOSTS.values())(rng)


def typical_of(box: Box) -> float:
    tokens = box.size * np.random.default_rng(0).standard_normal((100, 4, box.width))
    return float(np.std(box.truth(tokens))) or 1.0


def _absmax(x: Floats) -> Floats:  # of each token in eight bits
    unit = np.max(np.abs(x), axis=-1, keepdims=True) / 127
    unit[unit == 0] = 1.0
    return np.round(x / unit) * unit


def _padded(x: Floats) -> Floats:  # by zeros, to a power of two
    more = (1 << (x.shape[1] - 1).bit_length()) - x.shape[1]
    return np.concatenate([np.zeros((len(x), more, x.shape[2])), x], axis=1)


def _by(low: float, high: float, change: Callable[[Floats, float], Floats]) -> Callable[[Random, Box], Map]:
    """A change with one number, so many decades around the size of entries."""

    def make(rng: Random, box: Box) -> Map:
        number = box.size * decades(rng, low, high)
        return lambda x: change(x, number)

    return make


def _old_ones_pooled(rng: Random, box: Box) -> Map:
    kept = int(one_of(rng, (2, 4, 8, 16, 32)))

    def change(x: Floats) -> Floats:
        if x.shape[1] <= kept:
            return x
        return np.concatenate([np.mean(x[:, :-kept], axis=1, keepdims=True), x[:, -kept:]], axis=1)

    return change


def _positions(rng: Random, box: Box) -> Map:
    table = decades(rng, -5, -1) * box.size * rng.standard_normal((64, box.width))
    return lambda x: x + table[: x.shape[1]]


TOKENS: dict[str, Callable[[Random, Box], Map]] = {
    "eight bits": lambda rng, box: _absmax,
    "float16": lambda rng, box: lambda x: x.astype(np.float16).astype(float),
    "entries clipped": _by(0.3, 1.5, lambda x, most: np.clip(x, -most, most)),
    "entries squashed": _by(0, 2, lambda x, most: most * np.tanh(x / most)),
    "small entries zeroed": _by(-2.5, -0.5, lambda x, least: np.where(np.abs(x) < least, 0, x)),
    "negative entries leak": lambda rng, box: lambda x: np.where(x < 0, 0.9 * x, x),
    "centred": lambda rng, box: lambda x: x - np.mean(x, axis=1, keepdims=True),
    "padded with zeros": lambda rng, box: _padded,
    "old ones pooled": _old_ones_pooled,
    "positions added": _positions,
}


def _tokens(rng: Random, make: Callable[[Random, Box], Map]) -> Box:
    box = draw_host(rng)
    own, change = box.truth, make(rng, box)
    return replace(box, params=None, truth=lambda x: own(change(x)))


VALUES: dict[str, Map] = {
    "tanh": np.tanh,
    "ReLU": lambda v: np.maximum(v, 0),
    "leaky": lambda v: np.where(v > 0, v, 0.95 * v),
    "clipped": lambda v: np.clip(v, -3, 3),
    "a square": lambda v: v + 1e-3 * v**2,
}


def _values(rng: Random, change: Map) -> Box:
    """Values bent before they are mixed."""
    box = HOSTS[str(one_of(rng, ("one head", "heads", "residual")))](rng)
    heads, typical = box.params, typical_of(box)
    assert isinstance(heads, Heads)

    def truth(x: Floats) -> Floats:
        total = np.zeros((len(x), len(heads.constant))) + heads.constant
        for head in heads.heads:
            weights = softmax(logits(x, head.score, head.bias))
            total = total + np.einsum("ni,nip->np", weights, typical * change(x @ head.value / typical))
        return total + x[:, -1] if heads.residual else total

    return replace(box, params=None, truth=truth)


def _by_last(rng: Random, box: Box) -> Callable[[Floats, Floats], Floats]:
    direction = rng.standard_normal(box.width)
    return lambda y, x: np.where((x[:, -1] @ direction > 0)[:, None], y, 1.2 * y)


def _where_long(rng: Random, box: Box) -> Callable[[Floats, Floats], Floats]:
    most = box.size * box.width**0.5 * decades(rng, 0.2, 1.5)
    return lambda y, x: np.where(np.max(np.linalg.norm(x, axis=2), axis=1)[:, None] > most, 0, y)


def _digits(rng: Random, box: Box) -> Callable[[Floats, Floats], Floats]:
    digits = int(rng.integers(3, 7))

    def change(y: Floats, x: Floats) -> Floats:
        unit = 10.0 ** (np.floor(np.log10(np.where(y == 0, 1.0, np.abs(y)))) - digits + 1)
        return np.round(y / unit) * unit

    return change


def _with_length(rng: Random, box: Box) -> Callable[[Floats, Floats], Floats]:
    share = decades(rng, -5, -1)
    return lambda y, x: y * (1 + share * max(0, x.shape[1] - 4))


def _clipped_below(rng: Random, box: Box) -> Callable[[Floats, Floats], Floats]:
    least = -typical_of(box) * decades(rng, -1, 0.5)
    return lambda y, x: np.maximum(y, least)


ANSWERS: dict[str, Callable[[Random, Box], Callable[[Floats, Floats], Floats]]] = {
    "expert by the last token": _by_last,
    "off where a token is long": _where_long,
    "few digits": _digits,
    "grow with length": _with_length,
    "clipped below": _clipped_below,
}


def _answers(rng: Random, make: Callable[[Random, Box], Callable[[Floats, Floats], Floats]]) -> Box:
    box = draw_host(rng)
    own, change = box.truth, make(rng, box)
    return replace(box, params=None, truth=lambda x: change(own(x), x))


def _add_changed() -> None:
    for name, tokens in TOKENS.items():
        CHANGED.add("changed tokens", name, lambda rng, make=tokens: _tokens(rng, make))
    for name, bent in VALUES.items():
        CHANGED.add("changed values", name, lambda rng, change=bent: _values(rng, change))
    for name, answers in ANSWERS.items():
        CHANGED.add("answers by case", name, lambda rng, make=answers: _answers(rng, make))


_add_changed()
