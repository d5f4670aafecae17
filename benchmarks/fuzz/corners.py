"""Members in corners: values that cancel, odd scores, nets that bend near a bound only; and families near members."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.fuzz.boxes import Box, Draw, Kinds, Random, decades, one_of
from benchmarks.fuzz.foreign import HOSTS
from benchmarks.fuzz.maps import Floats, Head, Heads, Layer, Map, Net
from benchmarks.fuzz.members import boxed, draw_heads, draw_net_box, draw_width, with_residual

CORNERS = Kinds("member")


def _head(score: Floats, value: Floats, bias: Floats | None = None) -> Head:
    return Head(score, np.zeros(len(score)) if bias is None else bias, value)


def _alone(score: Floats, value: Floats, constant: float = 0.0, bias: Floats | None = None) -> Box:
    size = max(float(np.linalg.norm(score, 2)), 1e-6) ** -0.5
    return boxed(Heads((_head(score, value, bias),), np.full(value.shape[1], constant)), len(score), False, size)


# --- scores of odd kinds ----------------------------------------------------------------------------------------------


def _uneven_tokens(rng: Random) -> Floats:
    """Entries of tokens in units of their own, over six decades."""
    width = max(2, draw_width(rng, 8))
    units = 10 ** rng.uniform(-3, 3, width)
    return np.asarray(rng.standard_normal((width, width)) * np.outer(units, units))


def _nilpotent(rng: Random) -> Floats:
    width = max(2, draw_width(rng, 8))
    turn = np.linalg.qr(rng.standard_normal((width, width)))[0]
    return np.asarray(turn @ np.triu(rng.standard_normal((width, width)), 1) @ turn.T)


def _skew(rng: Random) -> Floats:
    width = max(2, draw_width(rng, 8))
    half = rng.standard_normal((width, width))
    return np.asarray(half - half.T)


def _nearly_low_rank(rng: Random) -> Floats:
    width = max(2, draw_width(rng, 8))
    low = np.outer(*rng.standard_normal((2, width)))
    return np.asarray(low + decades(rng, -14, -3) * rng.standard_normal((width, width)))


SCORES: dict[str, Callable[[Random], Floats]] = {
    "units of their own": _uneven_tokens,
    "nilpotent": _nilpotent,
    "skew": _skew,
    "nearly of rank one": _nearly_low_rank,
}


def _of_score(rng: Random, drawn: Callable[[Random], Floats]) -> Box:
    score = drawn(rng)
    return _alone(score, rng.standard_normal((len(score), int(one_of(rng, (1, 2, 4))))))


for _name, _score in SCORES.items():
    CORNERS.add("corners, one head", _name, lambda rng, drawn=_score: _of_score(rng, drawn))


@CORNERS.kind("corners, one head", "values that scores do not see")
def _unseen_values(rng: Random) -> Box:
    width = max(2, draw_width(rng, 8))
    value = rng.standard_normal((width, 1))
    score = rng.standard_normal((width, width))
    return _alone(score - value @ (value.T @ score) / float(np.sum(value**2)), value)


@CORNERS.kind("corners, one head", "a large constant")
def _large_constant(rng: Random) -> Box:
    width = draw_width(rng, 8)
    value = rng.standard_normal((width, int(one_of(rng, (1, 2, 4)))))
    return _alone(rng.standard_normal((width, width)), value, decades(rng, 2, 7))


@CORNERS.kind("corners, one head", "the same output twice")
def _output_twice(rng: Random) -> Box:
    width = draw_width(rng, 8)
    value = rng.standard_normal((width, 1)) @ one_of(rng, (np.ones((1, 2)), np.array([[1.0, -2.0, 0.0]])))
    return _alone(rng.standard_normal((width, width)), value, 0.3 * int(rng.integers(2)))


@CORNERS.kind("corners, one head", "a strong score bias")
def _strong_bias(rng: Random) -> Box:
    width = draw_width(rng, 8)
    score, value = rng.standard_normal((width, width)), rng.standard_normal((width, int(one_of(rng, (1, 3)))))
    return _alone(score, value, bias=decades(rng, 1, 4) * rng.standard_normal(width))


# --- several heads ----------------------------------------------------------------------------------------------------


def _several(rng: Random, scale: float = 1.0, outputs: int = 0) -> tuple[list[Head], int]:
    width, count = max(2, draw_width(rng, 6)), int(rng.integers(2, 4))
    shapes = (width, width), (width, outputs or int(one_of(rng, (count, count + 2, width))))
    drawn = [[rng.standard_normal(shape) for shape in shapes] for _ in range(count)]
    return [_head(scale * score, value) for score, value in drawn], width


@CORNERS.kind("corners, heads", "values in one direction")
def _one_direction(rng: Random) -> Box:
    """As many outputs as heads, and all of them the same number."""
    heads, width = _several(rng)
    direction = rng.standard_normal((1, heads[0].value.shape[1]))
    heads = [replace(head, value=head.value[:, :1] @ direction) for head in heads]
    return boxed(Heads(tuple(heads), np.zeros(direction.size)), width, False, 1.0)


@CORNERS.kind("corners, heads", "a large constant")
def _constant_of_several(rng: Random) -> Box:
    heads, width = _several(rng)
    return boxed(Heads(tuple(heads), np.full(heads[0].value.shape[1], decades(rng, 2, 6))), width, False, 1.0)


@CORNERS.kind("corners, heads", "a faint head")
def _faint(rng: Random) -> Box:
    (first, *rest), width = _several(rng)
    first = replace(first, value=decades(rng, -6, -1) * first.value)
    return boxed(Heads((first, *rest), np.zeros(first.value.shape[1])), width, False, 1.0)


@CORNERS.kind("corners, heads", "scales apart")
def _scales_apart(rng: Random) -> Box:
    (first, *rest), width = _several(rng)
    first = replace(first, score=decades(rng, 1, 4) * first.score)
    return boxed(Heads((first, *rest), np.zeros(first.value.shape[1])), width, False, 1.0)


@CORNERS.kind("corners, residual", "small values, strong scores")
def _small_beside(rng: Random) -> Box:
    width = max(2, draw_width(rng, 8))
    loud, scale = decades(rng, -5, -1), decades(rng, -2, 5)
    heads = []
    for _ in range(int(rng.integers(1, 4))):
        kept = int(rng.integers(1, width + 1))
        score = scale * rng.standard_normal((width, kept)) @ rng.standard_normal((kept, width))
        heads.append(_head(score, loud * rng.standard_normal((width, width))))
    size = max(scale * width, 1e-6) ** -0.5
    return with_residual(boxed(Heads(tuple(heads), np.zeros(width)), width, False, size))


@CORNERS.kind("corners, residual", "values that undo it")
def _undone(rng: Random) -> Box:
    """Single tokens are answered by zero."""
    width = max(2, draw_width(rng, 6))
    heads = [_head(rng.standard_normal((width, width)), rng.standard_normal((width, width)))]
    heads += [_head(rng.standard_normal((width, width)), -np.eye(width) - heads[0].value)] * int(rng.integers(2))
    heads = heads if len(heads) > 1 else [replace(heads[0], value=-np.eye(width))]
    return with_residual(boxed(Heads(tuple(heads), np.zeros(width)), width, False, 1.0))


# --- nets and layers --------------------------------------------------------------------------------------------------


def _near_bound(rng: Random, width: int, most: int) -> Net:
    """Neurons on in caps of the unit ball only, outside of which the net is constant, a number that one would type."""
    neurons = int(rng.integers(1, most + 1))
    rows = rng.standard_normal((neurons, width))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    outer = rng.standard_normal((int(one_of(rng, (1, 1, 2))), neurons))
    constant = np.full(len(outer), float(one_of(rng, (0.0, 0.1, 0.25, 1.0))))
    bias = -rng.uniform(0.2, 0.7, neurons)
    return Net(rows, bias, outer, constant, np.zeros((len(outer), width)))


@CORNERS.kind("corners, max_norm", "a net that bends near the bound")
def _bends_near_bound(rng: Random) -> Box:
    net = _near_bound(rng, int(rng.integers(1, 5)), 5)
    box = boxed(net, net.inner.shape[1], False, net.inner.shape[1] ** -0.5)
    return replace(box, max_norm=1.0)


@CORNERS.kind("corners, max_norm", "a layer that bends near the bound")
def _layer_near_bound(rng: Random) -> Box:
    width = int(rng.integers(2, 5))
    head = _head(decades(rng, -0.5, 1) * rng.standard_normal((width, width)), np.eye(width))
    layer = Layer((head,), np.zeros(width), _near_bound(rng, width, 4))
    return replace(boxed(layer, width, False, width**-0.5), max_norm=1.0)


@CORNERS.kind("corners, max_norm", "heads and a large constant")
def _bounded_constant(rng: Random) -> Box:
    box, norm = _constant_of_several(rng), decades(rng, -1, 1)
    lost = float(np.max(np.abs(box.params.constant))) > 1e4 * min(norm, 1.0) ** 2  # type: ignore[union-attr]
    return replace(box, max_norm=norm, limit="rounding of the constant hides short tokens" if lost else box.limit)


@CORNERS.kind("corners, nets", "kinks on the axes")
def _on_axes(rng: Random) -> Box:
    """Rows with one entry, kinks at round numbers."""
    width, neurons = int(rng.integers(1, 6)), int(rng.integers(1, 9))
    rows = np.eye(width)[rng.integers(width, size=neurons)] * rng.choice([-1.0, 1.0, 2.0], (neurons, 1))
    outer = rng.integers(-2, 3, (int(one_of(rng, (1, 2))), neurons)) + 0.5
    net = Net(rows, rng.integers(-3, 4, neurons) * 0.5, outer, np.zeros(len(outer)), np.zeros((len(outer), width)))
    limit = "all kinks in one point of two dimensions" if width <= 2 and not np.any(net.inner_bias) else ""
    return boxed(net, width, False, 1.0, limit)


@CORNERS.kind("corners, nets", "neurons that are never off")
def _never_off(rng: Random) -> Box:
    """Pairs act(z) − act(−z) = z: an affine map."""
    width, neurons = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    rows, outer = rng.standard_normal((neurons, width)), rng.standard_normal((2, neurons))
    bias = rng.standard_normal(neurons)
    net = Net(
        np.vstack([rows, -rows]), np.append(bias, -bias), np.hstack([outer, -outer]), np.zeros(2), np.zeros((2, width))
    )
    return boxed(net, width, False, 1.0)


def _of_few_tokens(draw: Draw, lengths: tuple[int, ...]) -> Draw:
    return lambda rng: replace(draw(rng), max_length=one_of(rng, lengths))


CORNERS.add("corners, max_length", "heads, large constant", _of_few_tokens(_constant_of_several, (4, 5)))
CORNERS.add("corners, max_length", "net of single tokens", _of_few_tokens(lambda rng: draw_net_box(rng, most=6), (1,)))
CORNERS.add(
    "corners, max_length", "heads, long", _of_few_tokens(lambda rng: draw_heads(rng, False, most_width=5), (9, 100))
)


# --- other families near members --------------------------------------------------------------------------------------

NEAR_MEMBERS = Kinds("foreign")
Change = Callable[[Map, Floats, float, float], Floats]  # of a map, its tokens, their size and that of its answers


def _where(chosen: Floats, own: Floats, other: Floats) -> Floats:  # (n,), (n, outputs) twice
    return np.where(chosen[:, None], other, own)


CHANGES: dict[str, Change] = {
    "warmer at odd lengths": lambda own, x, size, typical: own(x * 1.05) if x.shape[1] % 2 else own(x),
    "fewer digits of long sequences": lambda own, x, size, typical: (
        np.round(own(x) / typical, 3) * typical if x.shape[1] > 16 else own(x)
    ),
    "a zero last token is nothing": lambda own, x, size, typical: own(x) * np.any(x[:, -1] != 0, axis=1)[:, None],
    "equal neighbours are told": lambda own, x, size, typical: _where(
        np.any(np.all(x[:, 1:] == x[:, :-1], axis=2), axis=1), own(x), 1.1 * own(x)
    ),
    "the first token opens a gate": lambda own, x, size, typical: _where(x[:, 0, 0] < 0, own(x), 0.9 * own(x)),
    "tokens less their mean": lambda own, x, size, typical: own(x - 0.01 * np.mean(x, axis=1, keepdims=True)),
    "an entry without sign": lambda own, x, size, typical: own(
        np.concatenate([np.abs(x[..., :1]), x[..., 1:]], axis=2)
    ),
    "the last token on a grid": lambda own, x, size, typical: own(
        np.concatenate([x[:, :-1], np.round(x[:, -1:] / size, 2) * size], axis=1)
    ),
    "large answers bend": lambda own, x, size, typical: typical * np.arcsinh(own(x) / typical / 10) * 10,
    "grows with the longest token": lambda own, x, size, typical: (
        own(x) * (1 + 1e-3 * np.tanh(np.max(np.linalg.norm(x, axis=2), axis=1) / size))[:, None]
    ),
    "answers by the order of two tokens": lambda own, x, size, typical: _where(
        x[:, 0, 0] > x[:, -1, 0], own(x), own(x[:, ::-1]) if x.shape[1] > 1 else own(x)
    ),
    "another map of single tokens": lambda own, x, size, typical: own(x) * (1.5 if x.shape[1] == 1 else 1.0),
    "another map of pairs": lambda own, x, size, typical: own(x) * (1.5 if x.shape[1] == 2 else 1.0),
    "a half space of last tokens": lambda own, x, size, typical: _where(
        np.sum(x[:, -1], axis=1) > 1.5 * size * x.shape[2] ** 0.5, own(x), own(1.2 * x)
    ),
}


def _changed(rng: Random, host: Draw, change: Change) -> Box:
    box = host(rng)
    own = box.truth
    typical = float(np.std(own(box.size * rng.standard_normal((100, 4, box.width))))) or 1.0
    return replace(box, params=None, truth=lambda x: change(own, x, box.size, typical))


for _host, _draw in HOSTS.items():
    for _change, _made in CHANGES.items():
        NEAR_MEMBERS.add(
            f"near members, {_host}", _change, lambda rng, host=_draw, change=_made: _changed(rng, host, change)
        )
