"""What of given parameters cannot be told apart: heads that are one, silent or nearly alike, neurons of one kink."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.errors import UsageError
from keyhole.families.base import Family
from keyhole.families.multi_head import MultiHead
from keyhole.families.one_layer import OneLayer
from keyhole.families.relu_net import ReluNet
from keyhole.families.single_head import SingleHead
from keyhole.gauge.compare import find_gauge
from keyhole.gauge.heads import Heads, has_parts, merge_heads
from keyhole.gauge.nets import Kinks, kinks_of
from keyhole.gauge.one_layer import kinks_of_layer, plain_layer, sees_mixture
from keyhole.gauge.tolerance import check_comparable, relative, rounding_of, size

# Heads or kinks no further apart than this, relatively, are nearly alike: answers show what each of them is only at
# second order of their distance.
NEAR = 0.1
# Sequences on which the effect of making two heads one is measured, and the logits they have.
SEQUENCES, LENGTH, LOGITS = 256, 4, 1.5


@dataclass(frozen=True)
class Pair:
    """Two heads or neurons that are nearly alike."""

    first: int
    second: int
    distance: float  # relative, of logits or of kinks
    shows: float | None  # how much of its answers a head that replaces both gets wrong; None where none can


@dataclass(frozen=True)
class Redundancy:
    """What parameters have more than their map tells."""

    family: str
    units: str  # what they are made of: heads or neurons
    given: int  # how many there are
    shown: int  # how many the map shows
    same: tuple[tuple[int, ...], ...]  # groups that are one
    silent: tuple[int, ...]  # those that are not heard, or do not do what makes them one
    near: tuple[Pair, ...]
    logits_show: bool = True  # whether attention shows at all

    @property
    def minimal(self) -> bool:
        """Whether every head or neuron can be known."""
        return self.given == self.shown


def is_examined(params: Family) -> bool:
    """Whether it is known what of such parameters cannot be told apart."""
    gauge = find_gauge(params)
    of_parts = isinstance(params, MultiHead) and has_parts(params)
    return gauge is not None and gauge.redundancy is not None and not of_parts


def redundancy(params: Family) -> Redundancy:
    """What of given parameters cannot be told apart."""
    gauge = find_gauge(params)
    if gauge is None or gauge.redundancy is None:
        raise UsageError(f"nothing is known of the structure of a {type(params).__name__}")
    check_comparable(params)
    return gauge.redundancy(params)


def redundancy_of_net(net: ReluNet) -> Redundancy:
    """Neurons of one kink, silent ones, and those nearly alike."""
    tolerance = rounding_of(net)
    return _of_net(net, kinks_of(net, tolerance), net.family, tolerance)


def redundancy_of_layer(layer: OneLayer) -> Redundancy:
    """Neurons of one kink as a function of last token and mixture, and whether logits show at all."""
    tolerance = rounding_of(layer)
    kinks = kinks_of_layer(layer, tolerance)
    found = _of_net(plain_layer(layer).net, kinks, layer.family, tolerance)
    return replace(found, logits_show=sees_mixture(layer, tolerance))


def redundancy_of_heads(params: Heads) -> Redundancy:
    """Heads of equal logits, silent ones, and those nearly alike."""
    if has_parts(params):
        raise UsageError("nothing is known of the structure of several heads of other parts or forms than a softmax's")
    tolerance = rounding_of(params)
    heads = MultiHead.of(params).like(np.zeros(1)).heads
    groups = list(merge_heads(params, tolerance))
    silent = [number for group, _, value in groups if not np.any(value) for number in group]
    loud = [(group[0], logits, value) for group, logits, value in groups if np.any(value)]
    same, near = tuple(tuple(group) for group, _, _ in groups if len(group) > 1), tuple(_near_heads(loud))
    return Redundancy(
        params.family, "heads", len(heads), len(loud), same, tuple(sorted(silent)), near, logits_show=bool(loud)
    )


def _near_heads(heads: list[tuple[int, Floats, Floats]]) -> Iterator[Pair]:
    for number, (second, logits, value) in enumerate(heads):
        for first, others, other in heads[:number]:
            distance = relative(others, logits)
            if distance <= NEAR:
                yield Pair(first, second, distance, _replacement_error(others, other, logits, value))


def _replacement_error(one: Floats, first: Floats, two: Floats, second: Floats) -> float | None:
    """The relative error of the best single head in place of two: its logits the mean of theirs, weighted by values."""
    total = first + second
    if size(total) <= NEAR * size(first):
        return None
    share = float(np.sum(second * total) / np.sum(total * total))
    mean = one + share * (two - one)
    heads = [
        SingleHead(each[:, :-1], value, each[:, -1]) for each, value in ((one, first), (two, second), (mean, total))
    ]
    norm = heads[2].token_norm(LOGITS)
    rng, width = np.random.default_rng(0), one.shape[0]
    norm = norm if np.isfinite(norm) else 1.0
    tokens = rng.standard_normal((SEQUENCES, LENGTH, width)) * (norm / width**0.5)
    both, merged = heads[0](tokens) + heads[1](tokens), heads[2](tokens)
    return size(floats(both - merged)) / size(floats(both))


def _of_net(net: ReluNet, shown: Kinks, family: str, tolerance: float) -> Redundancy:
    inner, outer = floats(net.weights_in), np.atleast_2d(floats(net.weights_out))
    kinked = np.flatnonzero(np.any(inner, axis=1) & np.any(outer, axis=0))
    rows = np.column_stack([inner, floats(net.bias_in)])[kinked]
    distances = _between_kinks(rows, net.activation == "relu")
    groups: list[list[int]] = []
    for place in range(kinked.size):
        known = next((group for group in groups if distances[place, group[0]] <= tolerance * inner.shape[1]), None)
        if known is None:
            groups.append([place])
        else:
            known.append(place)
    leaders = [group[0] for group in groups]
    near = [
        Pair(int(kinked[one]), int(kinked[two]), float(distances[one, two]), None)
        for position, two in enumerate(leaders)
        for one in leaders[:position]
        if distances[one, two] <= NEAR
    ]
    same = tuple(tuple(int(kinked[place]) for place in group) for group in groups if len(group) > 1)
    silent = tuple(int(number) for number in np.setdiff1d(np.arange(net.neurons), kinked))
    return Redundancy(family, "neurons", net.neurons, shown.offset.size, same, silent, tuple(near))


def _between_kinks(rows: Floats, scaleless: bool) -> Floats:  # (k, width + 1) -> (k, k)
    """Relative distances of kinks, whichever way they look."""
    if not rows.size:
        return np.zeros((0, 0))
    if scaleless:
        rows = rows / np.linalg.norm(rows[:, :-1], axis=1, keepdims=True)
    sizes = np.linalg.norm(rows, axis=1)
    apart = [np.linalg.norm(rows[:, None] - sign * rows[None], axis=2) for sign in (1, -1)]
    return np.asarray(np.minimum(*apart) / np.maximum(sizes[:, None], sizes))
