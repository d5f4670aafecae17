"""Nets of one hidden layer modulo what no query can tell: a sum of even functions of one kink each, and an affine map.

Every activation is z/2 plus an even function of z. So c·act(a·x + b) is half of c·(a·x + b), which is affine, plus an
even function of the height over the kink a·x + b = 0, whichever way it is oriented. Even functions of different kinks
(of smooth activations also of different sharpness |a|) are linearly independent modulo affine maps. So two nets are
the same map iff the weights of every kink and the affine maps agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from keyhole.arrays import Floats, floats
from keyhole.families.activations import activate
from keyhole.families.relu_net import ReluNet
from keyhole.gauge.tolerance import check_shapes, rounding_of

# Pairs of neurons whose kinks have a cosine this near to one are looked at closely, entry by entry.
LIKELY_THE_SAME = 1e-6


@dataclass(frozen=True)
class Sizes:
    """How large the terms were that a net's numbers were added up from, where they may have cancelled."""

    inner: Floats  # (k,) of the rows of weights_in
    bias: Floats  # (k,) of bias_in
    skip: Floats  # (outputs,) of the rows of skip
    constant: Floats  # (outputs,) of bias_out


@dataclass(frozen=True)
class Kinks:
    """A net as a sum of even functions of n·x + o and an affine map; `radius` times a tolerance is its rounding."""

    normal: Floats  # (k, width) unit vectors, up to their signs
    offset: Floats  # (k,)
    weight: Floats  # (k, outputs): |a_i|·c_i
    sharpness: Floats  # (k,) log |a_i|, zero for ReLU, which looks the same at every scale
    linear: Floats  # (outputs, width)
    constant: Floats  # (outputs,)
    normal_radius: Floats  # (k,)
    offset_radius: Floats  # (k,)
    weight_radius: Floats  # (k,)
    linear_radius: Floats  # (outputs,)
    constant_radius: Floats  # (outputs,)

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

    def only(self, kept: Any) -> Kinks:
        """The same with some of the kinks."""
        names = ("normal", "offset", "weight", "sharpness", "normal_radius", "offset_radius", "weight_radius")
        return replace(self, **{name: getattr(self, name)[kept] for name in names})

    def minus(self, other: Kinks) -> Kinks:
        """The difference of two nets, kinks not yet merged."""
        joined = {
            name: np.concatenate([getattr(self, name), getattr(other, name)])
            for name in ("normal", "offset", "sharpness", "normal_radius", "offset_radius", "weight_radius")
        }
        return Kinks(
            weight=np.concatenate([self.weight, -other.weight]),
            linear=self.linear - other.linear,
            constant=self.constant - other.constant,
            linear_radius=self.linear_radius + other.linear_radius,
            constant_radius=self.constant_radius + other.constant_radius,
            **joined,
        )

    def is_nothing(self, tolerance: float) -> bool:
        """Whether the net is zero everywhere, but for rounding."""
        return bool(
            not self.offset.size
            and np.all(np.linalg.norm(self.linear, axis=1) <= tolerance * self.linear_radius)
            and np.all(np.abs(self.constant) <= tolerance * self.constant_radius)
        )


def kinks_of(net: ReluNet, tolerance: float | None = None, sizes: Sizes | None = None) -> Kinks:
    """What of a net can be told: neurons without a kink are affine, and those of the same kink are one."""
    tolerance = rounding_of(net) if tolerance is None else tolerance
    inner, bias = floats(net.weights_in), floats(net.bias_in)
    outer = np.atleast_2d(floats(net.weights_out))  # (outputs, k)
    linear = np.zeros((outer.shape[0], net.width)) if net.skip is None else np.atleast_2d(floats(net.skip)).copy()
    constant = np.atleast_1d(floats(net.bias_out)).copy()
    norms: Floats = np.linalg.norm(inner, axis=1)
    if sizes is None:
        sizes = Sizes(norms, np.abs(bias), np.linalg.norm(linear, axis=1), np.abs(constant))
    kinked = (norms > tolerance * sizes.inner) & np.any(outer, axis=0)
    flat, weights = ~kinked, np.abs(outer)
    levels = floats(activate(net.activation, bias))
    constant += outer[:, flat] @ levels[flat]
    share = np.where(kinked, 0.5, 1.0)  # of its bias that a neuron adds to the constant
    constant_radius = sizes.constant + weights @ (share * sizes.bias)
    inner, bias, outer, norms = inner[kinked], bias[kinked], outer[:, kinked], norms[kinked]
    loads = np.linalg.norm(outer, axis=0) * norms
    kinks = Kinks(
        normal=inner / norms[:, None],
        offset=bias / norms,
        weight=(outer * norms).T,
        sharpness=np.zeros_like(norms) if net.activation == "relu" else np.log(norms),
        linear=linear + 0.5 * outer @ inner,
        constant=constant + 0.5 * outer @ bias,
        normal_radius=sizes.inner[kinked] / norms,
        offset_radius=sizes.bias[kinked] / norms,
        weight_radius=loads,
        linear_radius=sizes.skip + 0.5 * weights[:, kinked] @ sizes.inner[kinked],
        constant_radius=constant_radius,
    )
    return merged(kinks, tolerance)


def same_kinks(kinks: Kinks, tolerance: float) -> list[list[int]]:
    """Which neurons have the same kink, each group in order."""
    count = kinks.offset.size
    leaders = np.arange(count)
    if count > 1:
        cosines = kinks.normal @ kinks.normal.T
        rows, columns = np.nonzero(np.triu(np.abs(cosines) >= 1 - LIKELY_THE_SAME, 1))
        sign = np.where(cosines[rows, columns] < 0, -1.0, 1.0)
        tilt = np.linalg.norm(kinks.normal[rows] - sign[:, None] * kinks.normal[columns], axis=1)
        shift = np.abs(kinks.offset[rows] - sign * kinks.offset[columns])
        stretch = np.abs(kinks.sharpness[rows] - kinks.sharpness[columns])
        room = tolerance * (kinks.normal_radius[rows] + kinks.normal_radius[columns])
        far = tolerance * (kinks.offset_radius[rows] + kinks.offset_radius[columns])
        # Where the direction is only known up to rounding, the offset is too.
        far = far + room * np.minimum(np.abs(kinks.offset[rows]), np.abs(kinks.offset[columns]))
        same = (tilt <= room) & (stretch <= room) & (shift <= far)
        for one, two in zip(rows[same], columns[same], strict=True):  # in the order of `one`: leaders are settled
            leaders[two] = min(leaders[two], leaders[one])
    return [list(np.flatnonzero(leaders == leader)) for leader in np.unique(leaders)]


def merged(kinks: Kinks, tolerance: float) -> Kinks:
    """Neurons of the same kink, up to rounding, as one with the sum of their weights."""
    groups = same_kinks(kinks, tolerance)
    weight, radius = kinks.weight.copy(), kinks.weight_radius.copy()
    for group in groups:
        weight[group[0]], radius[group[0]] = kinks.weight[group].sum(axis=0), kinks.weight_radius[group].sum()
    first = np.array([group[0] for group in groups], dtype=int)
    left = np.linalg.norm(weight[first], axis=1) > tolerance * radius[first]
    return replace(kinks, weight=weight, weight_radius=radius).only(first[left])


def canonical_net(net: ReluNet, tolerance: float | None = None, sizes: Sizes | None = None) -> ReluNet:
    """One neuron per kink, of unit length where scale cannot be seen, the largest entry positive; the loudest first."""
    kinks = kinks_of(net, tolerance, sizes)
    kinks = kinks.only(np.lexsort((kinks.offset, -kinks.loads())))
    largest = np.argmax(np.abs(kinks.normal), axis=1) if kinks.offset.size else np.zeros(0, dtype=int)
    sign = np.sign(kinks.normal[np.arange(kinks.offset.size), largest])
    found = net_of(kinks, sign, net)
    tolerance = rounding_of(net) if tolerance is None else tolerance
    straight = np.all(np.linalg.norm(np.atleast_2d(floats(found.skip)), axis=1) <= tolerance * kinks.linear_radius)
    return replace(found, skip=None) if straight else found


def net_of(kinks: Kinks, sign: Floats | float, like: ReluNet) -> ReluNet:
    """One neuron per kink, oriented by the signs of their normals, of unit length where scale cannot be seen."""
    length = np.exp(kinks.sharpness)  # one for ReLU
    inner = (sign * length)[:, None] * kinks.normal
    bias = sign * length * kinks.offset
    outer = (kinks.weight / length[:, None]).T  # (outputs, k)
    skip, constant = kinks.linear - 0.5 * outer @ inner, kinks.constant - 0.5 * outer @ bias
    if like.outputs is None:
        outer, skip, constant = outer[0], skip[0], constant[0]
    return ReluNet(inner, bias, outer, np.asarray(constant), skip, like.activation)


def equivalent_nets(first: ReluNet, second: ReluNet, tolerance: float, max_length: int | None = None) -> bool:  # noqa: ARG001
    """Whether two nets are the same map. They see the last token only, so the length of sequences is no matter."""
    check_shapes(first, second, "nets")
    return equivalent_kinks(
        kinks_of(first, tolerance), kinks_of(second, tolerance), tolerance, first.activation == second.activation
    )


def equivalent_kinks(one: Kinks, two: Kinks, tolerance: float, comparable: bool) -> bool:
    """Whether the difference of two nets is nothing; different activations share affine maps only."""
    if not comparable and (one.offset.size or two.offset.size):
        return False
    return merged(one.minus(two), tolerance).is_nothing(tolerance)


# --- distance ---------------------------------------------------------------------------------------------------


def distance_of_nets(first: ReluNet, second: ReluNet) -> float:
    """The relative Frobenius distance of kinks, matched one to one, and affine map."""
    check_shapes(first, second, "nets")
    tolerance = rounding_of(first, second)
    kinks = kinks_of(first, tolerance), kinks_of(second, tolerance)
    return distance_of_kinks(*kinks, comparable=first.activation == second.activation)


def distance_of_kinks(one: Kinks, two: Kinks, comparable: bool) -> float:
    """The same of nets whose kinks are known."""
    length = _length(one, two)
    scale = max([np.max(np.abs(_affine(kinks, length))) for kinks in (one, two)] + [*one.loads(), *two.loads()])
    if scale == 0.0:
        return 0.0
    sizes, total = [], np.linalg.norm((_affine(one, length) - _affine(two, length)) / scale) ** 2
    for kinks in (one, two):
        neurons = np.linalg.norm(kinks.rows(length) / scale) ** 2
        sizes.append(neurons + np.linalg.norm(_affine(kinks, length) / scale) ** 2)
    total += _apart(one, two, length, scale, comparable)
    return float(np.sqrt(total / max(sizes)))


def _length(*nets: Kinks) -> float:
    """How far out kinks typically are: the unit in which offsets and constants are like slopes."""
    lengths = []
    for kinks in nets:
        offsets = np.abs(kinks.offset[kinks.offset != 0])
        if kinks.offset.size and not offsets.size:
            return 1.0  # kinks through the origin only: offsets of another net may be its rounding
        lengths += [float(np.median(offsets))] if offsets.size else []
    return max(lengths, default=1.0)


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
