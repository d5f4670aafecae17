"""What a family cannot reveal, and comparison of parameters modulo that. Nothing else compares parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from keyhole.arrays import Array, to_numpy
from keyhole.errors import UsageError
from keyhole.model.gauge_layer import distance_of_layers
from keyhole.model.head import SingleHead
from keyhole.model.layer import AttentionLayer
from keyhole.model.one_layer import OneLayer
from keyhole.model.relu_net import ReluNet

Floats = npt.NDArray[np.float64]

# Neurons whose kinks have a cosine this near to one, which is rounding, are one neuron of the net they belong to.
SAME_KINK = 4e-15


def distance(first: Any, second: Any) -> float:
    """Relative distance of two parameter sets modulo what no query can tell apart; 0 for the same map.

    Heads: the larger of two relative Frobenius distances, that of the affine map into logits (score and
    score_bias, a missing bias being zero) and that of the affine map into values (value and
    output_bias). A head whose value is zero answers the same whatever its logits, so two such
    heads differ by their output alone.

    Nets: every activation is z/2 plus an even function, so a net is a sum of even functions, one for each kink
    n·x + o = 0 with a unit vector n up to its sign, and of an affine map. Kinks are matched one to one; the
    relative Frobenius distance is that of weights, directions, offsets (of smooth activations also sharpness) and
    affine map together.

    One-layer Transformers: the larger of that of the logits and that of the net, as a function of the last token and of
    the mixture that attention makes, which is all that queries can tell of value matrix and net.

    Whole-sequence layers: the larger of that of scores and that of projections, heads matched one to one.
    """
    if isinstance(first, AttentionLayer) and isinstance(second, AttentionLayer):
        return distance_of_layers(first, second)
    if isinstance(first, SingleHead) and isinstance(second, SingleHead):
        return _distance_of_heads(first, second)
    if isinstance(first, ReluNet) and isinstance(second, ReluNet):
        return _distance_of_nets(first, second)
    if isinstance(first, OneLayer) and isinstance(second, OneLayer):
        logits = (_joined(each.attention.score, each.attention.score_bias) for each in (first, second))
        nets = _distance_of_nets(first.beside_attention(), second.beside_attention())
        return max(_relative(*logits), nets)
    raise UsageError(f"cannot compare a {type(first).__name__} with a {type(second).__name__}")


def _distance_of_heads(first: SingleHead, second: SingleHead) -> float:
    if first.width != second.width or first.outputs != second.outputs:
        raise UsageError(
            f"cannot compare heads of width {first.width} with outputs {first.outputs} "
            f"and width {second.width} with outputs {second.outputs}"
        )
    values = _relative(_joined(first.value, first.output_bias), _joined(second.value, second.output_bias))
    if _vanishes(first.value) and _vanishes(second.value):
        return values
    logits = _relative(_joined(first.score, first.score_bias), _joined(second.score, second.score_bias))
    return max(values, logits)


def _joined(linear: Array, bias: Array | None) -> Floats:  # (width, n) -> (width + 1, n)
    matrix = np.asarray(to_numpy(linear), dtype=np.float64).reshape(linear.shape[0], -1)
    row = np.zeros(matrix.shape[1]) if bias is None else np.ravel(to_numpy(bias))
    return np.vstack([matrix, row])


def _relative(first: Floats, second: Floats) -> float:
    scale = max(np.max(np.abs(first)), np.max(np.abs(second)))
    if scale == 0.0:
        return 0.0
    # Divided first, so that squares neither overflow nor vanish.
    first, second = first / scale, second / scale
    return float(np.linalg.norm(first - second) / max(np.linalg.norm(first), np.linalg.norm(second)))


def _vanishes(array: Array) -> bool:
    return not np.any(to_numpy(array))


# --- nets -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kinks:
    """A net as a sum of even functions of n·x + o and an affine map."""

    normal: Floats  # (k, width) unit vectors, up to their signs
    offset: Floats  # (k,)
    weight: Floats  # (k, outputs): |a_i|·c_i
    sharpness: Floats  # (k,) log |a_i|, zero for ReLU, which looks the same at every scale
    linear: Floats  # (outputs, width)
    constant: Floats  # (outputs,)

    def loads(self) -> Floats:  # (k,)
        """The size of each neuron's weights."""
        loads: Floats = np.linalg.norm(self.weight, axis=1)
        return loads

    def rows(self, length: float) -> Floats:  # (k, outputs + width + 2)
        """One vector per neuron, to be compared with those of another net."""
        load = self.loads()[:, None]
        return np.hstack(
            [self.weight, load * self.normal, load * self.offset[:, None] / length, load * self.sharpness[:, None]]
        )


def kinks_of(net: ReluNet) -> Kinks:
    """What of a net can be told: neurons without a kink are affine, and those of the same kink are one."""

    def plain(array: Array) -> Floats:
        return np.asarray(to_numpy(array), dtype=np.float64)

    inner, bias = plain(net.weights_in), plain(net.bias_in)
    outer = np.atleast_2d(plain(net.weights_out))  # (outputs, k)
    linear = np.zeros((outer.shape[0], net.width)) if net.skip is None else np.atleast_2d(plain(net.skip)).copy()
    norms = np.linalg.norm(inner, axis=1)
    flat = (norms == 0) | ~np.any(outer, axis=0)
    level = net.on_vectors(np.zeros((1, net.width)))  # what neurons without a kink add up to, with the others
    inner, bias, outer, norms = inner[~flat], bias[~flat], outer[:, ~flat], norms[~flat]
    kinked = ReluNet(inner, bias, outer, np.zeros(outer.shape[0]), activation=net.activation)
    constant = np.atleast_1d(plain(level[0])) - plain(kinked.on_vectors(np.zeros((1, net.width)))[0])
    linear += 0.5 * outer @ inner
    constant += 0.5 * outer @ bias
    sharpness = np.zeros_like(norms) if net.activation == "relu" else np.log(norms)
    kinks = Kinks(inner / norms[:, None], bias / norms, (outer * norms).T, sharpness, linear, constant)
    return _merged(kinks)


def _merged(kinks: Kinks) -> Kinks:
    """Neurons of the same kink, up to rounding, as one with the sum of their weights."""
    if kinks.offset.size < 2:
        return kinks
    length = _length(kinks)
    rows = np.hstack([kinks.normal, kinks.offset[:, None] / length])
    nearness = np.abs(rows @ rows.T)
    sizes = np.diag(nearness)
    near = nearness >= (1 - SAME_KINK) * np.sqrt(sizes[:, None] * sizes)
    near &= np.abs(kinks.sharpness[:, None] - kinks.sharpness) <= SAME_KINK
    leader = np.argmax(near, axis=1)  # the first of its kind
    leader = leader[leader]
    weight = np.zeros_like(kinks.weight)
    np.add.at(weight, leader, kinks.weight)
    kept = np.unique(leader)
    kept = kept[np.any(weight[kept], axis=1)]
    return Kinks(
        kinks.normal[kept], kinks.offset[kept], weight[kept], kinks.sharpness[kept], kinks.linear, kinks.constant
    )


def _length(*nets: Kinks) -> float:
    """How far out kinks typically are: the unit in which offsets and constants are like slopes."""
    lengths = []
    for kinks in nets:
        offsets = np.abs(kinks.offset[kinks.offset != 0])
        if kinks.offset.size and not offsets.size:
            return 1.0  # kinks through the origin only: offsets of another net may be its rounding
        lengths += [float(np.median(offsets))] if offsets.size else []
    return max(lengths, default=1.0)


def _distance_of_nets(first: ReluNet, second: ReluNet) -> float:
    if first.width != second.width or first.outputs != second.outputs:
        raise UsageError(
            f"cannot compare nets of width {first.width} with outputs {first.outputs} "
            f"and width {second.width} with outputs {second.outputs}"
        )
    one, two = kinks_of(first), kinks_of(second)
    length = _length(one, two)
    scale = max([np.max(np.abs(_affine(kinks, length))) for kinks in (one, two)] + [*one.loads(), *two.loads()])
    if scale == 0.0:
        return 0.0
    sizes, total = [], np.linalg.norm((_affine(one, length) - _affine(two, length)) / scale) ** 2
    for kinks in (one, two):
        neurons = np.linalg.norm(kinks.rows(length) / scale) ** 2
        sizes.append(neurons + np.linalg.norm(_affine(kinks, length) / scale) ** 2)
    total += _apart(one, two, length, scale, comparable=first.activation == second.activation)
    return float(np.sqrt(total / max(sizes)))


def _affine(kinks: Kinks, length: float) -> Floats:  # (outputs, width + 1)
    return np.hstack([kinks.linear, kinks.constant[:, None] / length])


def _apart(one: Kinks, two: Kinks, length: float, scale: float, comparable: bool) -> float:
    """Sum of squared differences over the best matching of neurons; one without a partner counts in full."""
    left, right = one.rows(length) / scale, two.rows(length) / scale
    alone_left, alone_right = np.sum(left**2, axis=1), np.sum(right**2, axis=1)
    if not (comparable and left.size and right.size):
        return float(np.sum(alone_left) + np.sum(alone_right))
    outputs = one.weight.shape[1]
    signed = slice(outputs, -1)  # direction and offset, which come with an arbitrary sign
    overlap = left[:, signed] @ right[:, signed].T
    sign = np.where(overlap < 0, -1.0, 1.0)
    other = left[:, :outputs] @ right[:, :outputs].T + left[:, -1:] @ right[:, -1:].T
    cost = alone_left[:, None] + alone_right - 2 * (np.abs(overlap) + other)
    many, few = cost.shape
    padded = np.zeros((many + few, few + many))
    padded[:many, :few] = cost
    padded[:many, few:] = alone_left[:, None]
    padded[many:, :few] = alone_right
    rows, columns = linear_sum_assignment(padded)
    matched = (rows < many) & (columns < few)
    i, j = rows[matched], columns[matched]
    turned = right[j].copy()
    turned[:, signed] *= sign[i, j][:, None]
    # Differences anew: squares from inner products lose half of the digits.
    total = np.sum((left[i] - turned) ** 2)
    total += np.sum(np.delete(alone_left, i)) + np.sum(np.delete(alone_right, j))
    return float(total)
