"""Boxes of folds that are no nets of one hidden layer: how often `relu-net` certifies one that it got wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import keyhole as kh
from benchmarks.support.rows import markdown

WIDTHS = (1, 2, 3, 4, 6)
BOXES = 100  # of each kind and width
TOKENS = 20_000  # of norms from 1e-2 to 1e2, on which a function must be within its bars

Draw = Callable[[np.random.Generator, int], Callable[[Any], Any]]


def _layer(rng: np.random.Generator, neurons: int, width: int) -> Callable[[Any], Any]:
    weights, bias = rng.standard_normal((neurons, width)) / width**0.5, 0.5 * rng.standard_normal(neurons)
    return lambda x: np.maximum(x @ weights.T + bias, 0)


def _affine(rng: np.random.Generator, outputs: int, width: int) -> Callable[[Any], Any]:
    weights, bias = rng.standard_normal((outputs, width)), rng.standard_normal(outputs)
    return lambda x: x @ weights.T + bias


def maximum(rng: np.random.Generator, width: int) -> Callable[[Any], Any]:
    maps = _affine(rng, int(rng.integers(3, 5)), width)
    return lambda x: np.max(maps(x), axis=1)


def maxout(rng: np.random.Generator, width: int) -> Callable[[Any], Any]:
    groups = int(rng.integers(1, 5))
    maps, outer = _affine(rng, 3 * groups, width), rng.standard_normal(groups)
    return lambda x: np.max(maps(x).reshape(-1, groups, 3), axis=2) @ outer


def beside_a_net(rng: np.random.Generator, width: int) -> Callable[[Any], Any]:
    neurons = int(rng.integers(1, 10))
    hidden, outer, maps = _layer(rng, neurons, width), rng.standard_normal(neurons), _affine(rng, 3, width)
    return lambda x: hidden(x) @ outer / neurons**0.5 + np.max(maps(x), axis=1)


def of_minima(rng: np.random.Generator, width: int) -> Callable[[Any], Any]:
    maps = _affine(rng, 4, width)
    return lambda x: np.max(np.min(maps(x).reshape(-1, 2, 2), axis=2), axis=1)


def two_layers(rng: np.random.Generator, width: int) -> Callable[[Any], Any]:
    inner, outer = rng.integers(1, 10, 2)
    first, second, last = _layer(rng, inner, width), _layer(rng, outer, inner), rng.standard_normal(outer)
    return lambda x: second(first(x)) @ last


def small_second_layer(rng: np.random.Generator, width: int) -> Callable[[Any], Any]:
    neurons, size = int(rng.integers(2, 16)), 10 ** rng.uniform(-3, 0)
    first, second, last = _layer(rng, neurons, width), _layer(rng, 1, neurons), rng.standard_normal(neurons)
    return lambda x: first(x) @ last / neurons**0.5 + size * second(first(x))[:, 0]


def clipped(rng: np.random.Generator, width: int) -> Callable[[Any], Any]:
    neurons, most = int(rng.integers(1, 10)), 3 * abs(rng.standard_normal())
    hidden, outer = _layer(rng, neurons, width), rng.standard_normal(neurons)
    return lambda x: np.clip(hidden(x) @ outer / neurons**0.5, -most, most)


def one_layer(rng: np.random.Generator, width: int) -> Callable[[Any], Any]:
    neurons = int(rng.integers(1, 20))
    hidden, outer = _layer(rng, neurons, width), rng.standard_normal(neurons)
    return lambda x: hidden(x) @ outer / neurons**0.5


KINDS: dict[str, Draw] = {
    "maximum of 3 or 4 affine maps": maximum,
    "maxout": maxout,
    "a net and a maximum": beside_a_net,
    "maximum of two minima": of_minima,
    "two hidden layers": two_layers,
    "second layer of one small neuron": small_second_layer,
    "clipped net": clipped,
    "one hidden layer": one_layer,
}


def judged(draw: Draw, width: int, seed: int, polish: bool) -> tuple[bool, bool]:
    """Whether a box was certified, and whether that was wrong."""
    rng = np.random.default_rng([width, seed])
    box = draw(rng, width)
    oracle = kh.FunctionOracle(lambda tokens: box(tokens[:, -1]), width=width)
    result = kh.recover(oracle, method="relu-net", polish=polish, seed=seed, throw=False)
    if not result.certified:
        return False, False
    x = rng.standard_normal((TOKENS, width))
    x *= (10 ** rng.uniform(-2, 2, TOKENS) / np.linalg.norm(x, axis=1))[:, None]
    bars = result.params.error_bar(result.certificate.radius, x[:, None, :], oracle.signature.space.rounding)
    return True, bool(np.any(np.abs(result.params.on_vectors(x) - box(x)) > bars))


def table() -> str:
    rows = []
    for name, draw in KINDS.items():
        for polish in (False, True):
            runs = [judged(draw, width, seed, polish) for width in WIDTHS for seed in range(BOXES)]
            certified, wrong = np.sum(runs, axis=0)
            rows.append([name, "polished" if polish else "lean", len(runs), certified, wrong])
    return markdown(["box", "mode", "runs", "certified", "of these wrong"], rows)
