"""Members at the edges of their families: shared and sparse matrices, uneven scales, dead neurons, tight bounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.fuzz.boxes import Box, Draw, Kinds, Random, decades, one_of
from benchmarks.fuzz.maps import Floats, Head, Heads, Layer, Net
from benchmarks.fuzz.members import boxed, draw_width, net_limit, with_residual

EDGES = Kinds("member")


def heads_box(heads: list[Head], constant: Floats | None = None, limit: str = "", size: float = 1.0) -> Box:
    width, outputs = heads[0].value.shape
    constant = np.zeros(outputs) if constant is None else constant
    scores = np.stack([head.score.ravel() for head in heads])
    values = np.hstack([head.value.T for head in heads])
    if np.linalg.matrix_rank(scores) < len(scores) and np.linalg.matrix_rank(values) < len(heads):
        limit = limit or "proportional heads behind fewer numbers than heads"
    if not np.any(values):
        limit = limit or "a value of zero shows nothing"
    return boxed(Heads(tuple(heads), constant), width, outputs == 1 and width > 2, size, limit)


def _random_heads(rng: Random, width: int, count: int, outputs: int) -> list[Head]:
    zero = np.zeros(width)
    shapes = (width, width), (width, outputs)
    return [Head(rng.standard_normal(shapes[0]), zero, rng.standard_normal(shapes[1])) for _ in range(count)]


# --- heads ------------------------------------------------------------------------------------------------------------


def _shared(rng: Random, name: str) -> Box:
    """Three heads, of which two or all have one matrix in common, and one more."""
    width = int(rng.integers(3, 6))
    heads = _random_heads(rng, width, 4, int(one_of(rng, (4, 6))))
    some = int(rng.integers(2, 4))
    heads[:some] = [replace(head, **{name: getattr(heads[0], name)}) for head in heads[:some]]
    return heads_box(heads)


def _narrow(rng: Random) -> Box:
    width, count = int(rng.integers(1, 4)), int(rng.integers(2, 4))
    heads = _random_heads(rng, width, count, int(one_of(rng, (1, 2, 3, 5))))
    return heads_box(heads, limit="width one: all heads are proportional" if width == 1 else "")


def _sparse(rng: Random, outputs: int) -> Box:
    """Entries of −1, 0 and 1, most of them 0."""
    width, count = int(rng.integers(2, 6)), int(rng.integers(2, 4))

    def entries(*shape: int) -> Floats:
        return np.asarray(rng.choice([-1.0, 0.0, 0.0, 0.0, 1.0], shape))

    heads = [Head(entries(width, width), np.zeros(width), entries(width, outputs)) for _ in range(count)]
    return heads_box(heads, one_of(rng, (np.zeros(outputs), np.ones(outputs))))


def _uneven(rng: Random, count: int) -> Box:
    """Outputs whose scales differ by up to twelve decades."""
    width = draw_width(rng, 6) if count == 1 else int(rng.integers(2, 6))
    heads = _random_heads(rng, width, count, count + 2)
    factors = 10 ** rng.uniform(-12, 0, count + 2)
    return heads_box([replace(head, value=head.value * factors) for head in heads])


def _many(rng: Random) -> Box:
    """More heads than outputs."""
    width = int(rng.integers(3, 6))
    return heads_box(_random_heads(rng, width, int(rng.integers(4, 6)), 2))


def _biased(rng: Random) -> Box:
    """Biases much larger than scores and values."""
    width, outputs = draw_width(rng, 6), int(one_of(rng, (1, 2, 4)))
    (head,) = _random_heads(rng, width, 1, outputs)
    bias = decades(rng, 0, 3) * rng.standard_normal(width)
    return heads_box([replace(head, bias=bias)], decades(rng, 0, 5) * rng.standard_normal(outputs))


def _loud(rng: Random) -> Box:
    """Attention beside which the residual is faint."""
    width, loud = draw_width(rng, 6), decades(rng, 2, 8)
    heads = _random_heads(rng, width, int(rng.integers(1, 3)) if width > 1 else 1, width)
    return with_residual(heads_box([replace(head, value=loud * head.value) for head in heads]))


EDGES.add("edges, heads", "scores shared", lambda rng: _shared(rng, "score"))
EDGES.add("edges, heads", "values shared", lambda rng: _shared(rng, "value"))
EDGES.add("edges, heads", "one to three numbers", _narrow)
EDGES.add("edges, heads", "sparse, one number", lambda rng: _sparse(rng, 1))
EDGES.add("edges, heads", "sparse", lambda rng: _sparse(rng, int(rng.integers(2, 5))))
EDGES.add("edges, heads", "outputs over decades", lambda rng: _uneven(rng, int(rng.integers(2, 4))))
EDGES.add("edges, heads", "more heads than outputs", _many)
EDGES.add("edges, one head", "outputs over decades", lambda rng: _uneven(rng, 1))
EDGES.add("edges, one head", "large biases", _biased)
EDGES.add("edges, residual", "loud attention", _loud)


# --- nets and layers --------------------------------------------------------------------------------------------------


def _net(rng: Random, width: int, neurons: int) -> Net:
    outputs = int(one_of(rng, (1, 1, 2, 3)))
    skip = rng.standard_normal((outputs, width)) * int(rng.integers(2))
    shapes = (neurons, width), (neurons,), (outputs, neurons), (outputs,)
    return Net(*(rng.standard_normal(shape) for shape in shapes), skip)


def _with_dead(rng: Random, net: Net) -> Net:
    """Neurons that nothing reaches, that reach nothing, or that are on everywhere but far out."""
    neurons = len(net.inner)
    outer, inner, bias = net.outer.copy(), net.inner.copy(), net.inner_bias.copy()
    outer[:, int(rng.integers(neurons))] = 0.0
    inner[int(rng.integers(neurons))] = 0.0
    far = int(rng.integers(neurons))
    bias[far] = rng.choice([-1.0, 1.0]) * decades(rng, 2, 6)
    return replace(net, outer=outer, inner=inner, inner_bias=bias)


def _with_opposites(rng: Random, net: Net) -> Net:
    """The first neurons once more, turned round, perhaps of other weights."""
    turned = int(rng.integers(1, 1 + len(net.inner)))
    outer = net.outer[:, :turned] * one_of(rng, (1.0, -1.0, 0.5, 1 + 1e-6))
    return replace(
        net,
        inner=np.vstack([net.inner, -net.inner[:turned]]),
        inner_bias=np.append(net.inner_bias, -net.inner_bias[:turned]),
        outer=np.hstack([net.outer, outer]),
    )


def _of_net(net: Net) -> Box:
    bends = np.any(net.inner, axis=1) & np.any(net.outer, axis=0)
    limit = net_limit(net) if np.any(bends) else "an affine map"
    return boxed(net, net.inner.shape[1], len(net.outer) == 1, 1.0, limit)


def _layer_of(rng: Random, net: Net, *, residual: bool) -> Box:
    width = net.inner.shape[1]
    (head,) = _random_heads(rng, width, 1, width)
    bends = np.any(net.inner, axis=1) & np.any(net.outer, axis=0)
    layer = Layer((head,), np.zeros(width), net, residual)
    return boxed(layer, width, len(net.outer) == 1, width**-0.5, "" if np.any(bends) else "an affine map")


def _drawn(rng: Random, least: int, most: int) -> Net:
    return _net(rng, int(rng.integers(least, 6)), int(rng.integers(1, most)))


EDGES.add("edges, nets", "dead neurons", lambda rng: _of_net(_with_dead(rng, _drawn(rng, 1, 7))))
EDGES.add("edges, nets", "opposite neurons", lambda rng: _of_net(_with_opposites(rng, _drawn(rng, 1, 5))))
EDGES.add("edges, nets", "one neuron", lambda rng: _of_net(_drawn(rng, 1, 2)))
for _residual in (False, True):
    _host = "residual, " if _residual else ""
    EDGES.add(
        "edges, layers",
        f"{_host}dead neurons",
        lambda rng, residual=_residual: _layer_of(rng, _with_dead(rng, _drawn(rng, 2, 6)), residual=residual),
    )
    EDGES.add(
        "edges, layers",
        f"{_host}opposite neurons",
        lambda rng, residual=_residual: _layer_of(rng, _with_opposites(rng, _drawn(rng, 2, 4)), residual=residual),
    )
    EDGES.add(
        "edges, layers",
        f"{_host}one neuron",
        lambda rng, residual=_residual: _layer_of(rng, _drawn(rng, 2, 2), residual=residual),
    )


# --- bounds -----------------------------------------------------------------------------------------------------------

HOSTS: dict[str, Draw] = {
    "one head": lambda rng: heads_box(_random_heads(rng, draw_width(rng, 6), 1, int(one_of(rng, (1, 3))))),
    "heads": lambda rng: heads_box(_random_heads(rng, int(rng.integers(2, 5)), 2, int(one_of(rng, (2, 4))))),
    "residual": lambda rng: with_residual(heads_box(_random_heads(rng, 4, int(rng.integers(1, 3)), 4))),
    "net": lambda rng: _of_net(_drawn(rng, 1, 6)),
    "layer": lambda rng: _layer_of(rng, _drawn(rng, 2, 4), residual=False),
}


def _bounded(rng: Random, draw: Draw, norm: float) -> Box:
    """Within norms that are short or long beside those of natural tokens."""
    box = draw(rng)
    params = box.params
    net = params if isinstance(params, Net) else params.net if isinstance(params, Layer) else None
    limit = box.limit
    if net is not None:
        values = params.heads[0].value if isinstance(params, Layer) else np.eye(box.width)
        reach = np.linalg.norm(net.inner @ values.T, axis=1) * norm
        hidden = (np.abs(net.inner_bias) > 0.6 * reach) & np.any(net.outer, axis=0)
        limit = limit or ("kinks that cut off a twentieth of the ball, or nothing" if np.any(hidden) else "")
    return replace(box, max_norm=norm, limit=limit)


def _short(rng: Random, draw: Draw, length: int) -> Box:
    box = draw(rng)
    several = isinstance(box.params, Heads) and len(box.params.heads) > 1
    return replace(box, max_length=length, limit=box.limit or ("sequences of two or three tokens" if several else ""))


for _host, _draw in HOSTS.items():
    for _norm in (0.1, 100.0):
        EDGES.add(
            "edges, max_norm", f"{_host}, {_norm:g}", lambda rng, draw=_draw, norm=_norm: _bounded(rng, draw, norm)
        )
    for _length in (2, 3):
        EDGES.add(
            "edges, max_length",
            f"{_host}, {_length}",
            lambda rng, draw=_draw, length=_length: _short(rng, draw, length),
        )
