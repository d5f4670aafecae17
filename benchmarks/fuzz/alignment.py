"""Recovered parameters against true ones: the largest error over its radius, in the order and gauge of the recovery.

Heads of equal logits are one, neurons of one kink are one; the order of heads and neurons, the scale of ReLU neurons
and the way a neuron looks are free; of a layer the products of value matrix and weights behind it count.
"""

from __future__ import annotations

import numpy as np

from benchmarks.fuzz.maps import ACTIVATIONS, Floats, Head, Heads, Layer, Net, Params

EPS = float(np.finfo(float).eps)
SLACK = 8 * EPS  # of an entry: what the alignment itself rounds
NEAR = 0.1  # neurons that are further apart, over the size of one, are no partners


def worst_ratio(truth: Params, found: Params, radius: Params) -> float | None:
    """The largest |error| over its radius; None where parameters do not correspond."""
    if isinstance(truth, Heads) and isinstance(found, Heads) and isinstance(radius, Heads):
        return _heads(truth, found, radius)
    if isinstance(truth, Net) and isinstance(found, Net) and isinstance(radius, Net):
        return _nets(truth, found, radius) if truth.activation == found.activation else None
    if isinstance(truth, Layer) and isinstance(found, Layer) and isinstance(radius, Layer):
        return _layers(truth, found, radius)
    return None


def ratio(error: Floats, radius: Floats, slack: Floats | float = 0.0) -> float:
    """The largest of error/radius; errors within the slack are none, a radius that is no number covers none."""
    error, radius = np.abs(error), np.asarray(radius, dtype=float)
    over = np.where(error <= slack, 0.0, error)
    with np.errstate(all="ignore"):
        ratios = np.where(over == 0, 0.0, over / radius)
    ratios = np.where(np.isnan(radius) | np.isnan(error), np.inf, ratios)
    return float(np.max(ratios, initial=0.0))


# --- heads ----------------------------------------------------------------------------------------------------------


def _merged(heads: tuple[Head, ...]) -> list[Head]:
    """Heads of equal logits as one; none without a value."""
    kept: list[Head] = []
    for head in heads:
        for number, other in enumerate(kept):
            if np.array_equal(head.score, other.score) and np.array_equal(head.bias, other.bias):
                kept[number] = Head(other.score, other.bias, other.value + head.value)
                break
        else:
            kept.append(head)
    largest = max((float(np.max(np.abs(head.value))) for head in heads), default=0.0)
    return [head for head in kept if np.max(np.abs(head.value)) > 4 * EPS * largest]


def _heads(truth: Heads, found: Heads, radius: Heads) -> float | None:
    true = _merged(truth.heads)
    if truth.residual != found.residual or len(true) > len(found.heads) or found.constant.shape != truth.constant.shape:
        return None
    largest = max((float(np.max(np.abs(head.value))) for head in truth.heads), default=0.0)
    partners = nearest_pairs(np.array([[_apart(head, own) for head in true] for own in found.heads]))
    parts = [ratio(truth.constant - found.constant, radius.constant, SLACK * np.abs(truth.constant))]
    for number, (own, wide) in enumerate(zip(found.heads, radius.heads, strict=True)):
        if number not in partners:  # a head that is not there may have any value within its radius
            parts.append(ratio(own.value, wide.value, SLACK * largest))
            continue
        head = true[partners[number]]
        value_slack = SLACK * (largest if len(true) < len(truth.heads) else np.abs(head.value))
        parts += [
            ratio(head.score - own.score, wide.score, SLACK * np.abs(head.score)),
            ratio(head.bias - own.bias, wide.bias, SLACK * np.abs(head.bias)),
            ratio(head.value - own.value, wide.value, value_slack),
        ]
    return max(parts)


def nearest_pairs(apart: Floats) -> dict[int, int]:  # (found, true) -> true ones by the number of a found one
    """Partners, nearest pairs first."""
    pairs: dict[int, int] = {}
    for flat in np.argsort(apart, axis=None):
        number, true = divmod(int(flat), apart.shape[1])
        if number not in pairs and true not in pairs.values():
            pairs[number] = true
    return pairs


def _apart(head: Head, own: Head) -> float:
    scores = np.linalg.norm(head.score - own.score) + np.linalg.norm(head.bias - own.bias)
    sizes = np.linalg.norm(head.score) + np.linalg.norm(head.bias) + 1e-300
    return float(scores / sizes + np.linalg.norm(head.value - own.value) / np.linalg.norm(head.value))


# --- nets -----------------------------------------------------------------------------------------------------------


class _Truth:
    """A net with one neuron for every kink, that can be turned round neuron by neuron."""

    def __init__(self, net: Net) -> None:
        self.smooth = net.activation != "relu"
        self.skip, self.constant = net.skip.astype(float), net.constant.astype(float)
        self.skip_size, self.constant_size = np.abs(self.skip), np.abs(self.constant)
        self.rows: list[Floats] = []  # (d + 1,): weights and bias
        self.outer: list[Floats] = []  # (p,)
        act = ACTIVATIONS[net.activation]
        for inner, bias, outer in zip(net.inner, net.inner_bias, net.outer.T, strict=True):
            if not np.any(inner):
                self.constant = self.constant + outer * act(np.array([bias]))
            elif np.any(outer):
                self._add(np.append(inner, bias), outer)
        loudest = max((np.max(np.abs(outer)) * np.linalg.norm(row) for row, outer in self._pairs()), default=0.0)
        kept = [(r, o) for r, o in self._pairs() if np.max(np.abs(o)) * np.linalg.norm(r) > 1e-14 * loudest]
        self.rows, self.outer = [row for row, _ in kept], [outer for _, outer in kept]

    def _pairs(self) -> list[tuple[Floats, Floats]]:
        return list(zip(self.rows, self.outer, strict=True))

    def _add(self, row: Floats, outer: Floats) -> None:
        for number, known in enumerate(self.rows):
            factor = float(row[:-1] @ known[:-1] / (known[:-1] @ known[:-1]))
            if self.smooth:
                factor = float(np.sign(factor))
            if np.max(np.abs(row - factor * known)) <= 1e-13 * np.max(np.abs(row)):
                self.outer[number] = self.outer[number] + abs(factor) * outer
                if factor < 0:  # act(−z) = act(z) − z
                    self._affine(known, -abs(factor) * outer)
                return
        self.rows.append(row)
        self.outer.append(outer)

    def _affine(self, row: Floats, outer: Floats) -> None:
        """Add outer·(a·x + b)."""
        self.skip, self.constant = self.skip + np.outer(outer, row[:-1]), self.constant + outer * row[-1]
        self.skip_size = self.skip_size + np.abs(np.outer(outer, row[:-1]))
        self.constant_size = self.constant_size + np.abs(outer * row[-1])

    def turn(self, number: int) -> None:
        """act(z) = z + act(−z)."""
        self._affine(self.rows[number], self.outer[number])
        self.rows[number] = -self.rows[number]


def _nets(true_net: Net, found: Net, radius: Net) -> float | None:
    truth = _Truth(true_net)
    if found.outer.shape[0] != true_net.outer.shape[0] or len(truth.rows) > len(found.inner):
        return None
    pairs = _matched(truth, found)
    if pairs is None:
        return None
    parts = []
    for number in range(len(found.inner)):
        if number not in pairs:  # a neuron that is not there may have any weight within its radius
            parts.append(ratio(found.outer[:, number], radius.outer[:, number]))
            continue
        own = np.append(found.inner[number], found.inner_bias[number])
        if truth.rows[pairs[number]][:-1] @ own[:-1] < 0:
            truth.turn(pairs[number])
        row, outer = truth.rows[pairs[number]], truth.outer[pairs[number]]
        wide = np.append(radius.inner[number], radius.inner_bias[number])
        own_outer, wide_outer = found.outer[:, number], radius.outer[:, number]
        if truth.smooth:
            parts += [
                ratio(row - own, wide, SLACK * np.abs(row)),
                ratio(outer - own_outer, wide_outer, SLACK * np.abs(outer)),
            ]
        else:
            parts.append(_up_to_scale(row, outer, own, own_outer, wide, wide_outer))
    parts.append(ratio(truth.skip - found.skip, radius.skip, SLACK * truth.skip_size))
    parts.append(ratio(truth.constant - found.constant, radius.constant, SLACK * truth.constant_size))
    return max(parts)


def _matched(truth: _Truth, found: Net) -> dict[int, int] | None:
    """The true neuron of every recovered one, nearest pairs first; None where a true one has no partner near it."""
    own = np.hstack([found.inner, found.inner_bias[:, None]])
    if not truth.rows:
        return {}
    rows = np.array(truth.rows)
    if not truth.smooth:
        own = own / np.maximum(np.linalg.norm(own[:, :-1], axis=1, keepdims=True), 1e-300)
        rows = rows / np.linalg.norm(rows[:, :-1], axis=1, keepdims=True)
    sizes = np.linalg.norm(rows, axis=1)[None, :]
    apart = np.minimum(
        np.linalg.norm(own[:, None] - rows[None], axis=2), np.linalg.norm(own[:, None] + rows[None], axis=2)
    )
    apart = apart / sizes
    pairs = nearest_pairs(apart)
    return pairs if all(apart[pair] < NEAR for pair in pairs.items()) else None


def _up_to_scale(row: Floats, outer: Floats, own: Floats, own_outer: Floats, wide: Floats, wide_outer: Floats) -> float:
    """The least λ such that some scale s > 0 puts s·row and outer/s within λ radii of what was found."""
    if np.any(np.isnan(wide)) or np.any(np.isnan(wide_outer)):
        return float("inf")
    low, high = -60.0, 200.0  # powers of two
    if not _has_scale(row, outer, own, own_outer, wide, wide_outer, 2.0**high):
        return float("inf")
    if _has_scale(row, outer, own, own_outer, wide, wide_outer, 2.0**low):
        return 0.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        if _has_scale(row, outer, own, own_outer, wide, wide_outer, 2.0**middle):
            high = middle
        else:
            low = middle
    return float(2.0**high)


def _has_scale(
    row: Floats, outer: Floats, own: Floats, own_outer: Floats, wide: Floats, wide_outer: Floats, times: float
) -> bool:
    """Whether the intervals of s from all entries have a point in common."""
    reach = times * np.append(wide, wide_outer) + SLACK * np.abs(np.append(own, own_outer))
    middle = np.append(own, own_outer)
    true, inverse = np.append(row, outer), np.arange(len(middle)) >= len(row)
    low, high = np.where(true < 0, -middle, middle) - reach, np.where(true < 0, -middle, middle) + reach
    true = np.abs(true)
    used = true > 0
    if np.any(~used & ((low > 0) | (high < 0))) or np.any(used & (high <= 0)):
        return False
    with np.errstate(all="ignore"):
        least = np.where(inverse, true / high, low / true)
        most = np.where(inverse, np.where(low > 0, true / low, np.inf), high / true)
    return bool(np.max(least[used], initial=0.0) <= np.min(most[used], initial=np.inf) * (1 + 4 * EPS))


# --- layers ---------------------------------------------------------------------------------------------------------


def _beside(layer: Layer) -> Net:
    """The net as a function of the last token and the mixture that attention makes, one behind the other."""
    net, value = layer.net, layer.heads[0].value

    def seen(weights: Floats) -> Floats:  # (..., inner) -> (..., 2·width)
        mixture = weights @ value.T
        return np.hstack([weights if layer.residual else np.zeros_like(mixture), mixture])

    inner_bias = net.inner_bias + net.inner @ layer.constant
    constant = net.constant + net.skip @ layer.constant
    return Net(seen(net.inner), inner_bias, net.outer, constant, seen(net.skip), net.activation)


def _radius_beside(found: Layer, radius: Layer) -> Net:
    """Radii of the products, by the radii of their factors."""
    net, wide = found.net, radius.net
    value, wide_value = np.abs(found.heads[0].value), radius.heads[0].value

    def product(weights: Floats, own: Floats, factor: Floats, factor_radius: Floats) -> Floats:
        def times(a: Floats, b: Floats) -> Floats:  # zero times infinity is nothing
            return np.where((a == 0) | (b == 0), 0.0, np.where(a == 0, 1.0, a) * np.where(b == 0, 1.0, b))

        a, b = np.abs(weights)[:, None, :], factor[None]
        ra, rb = own[:, None, :], factor_radius[None]
        return np.sum(times(a, rb) + times(ra, b) + times(ra, rb), axis=2)

    def seen(weights: Floats, own: Floats) -> Floats:
        mixture = product(weights, own, value, wide_value)
        return np.hstack([own if found.residual else np.zeros_like(mixture), mixture])

    def shift(weights: Floats, own: Floats) -> Floats:
        return product(weights, own, np.abs(found.constant)[None], radius.constant[None])[:, 0]

    return Net(
        seen(net.inner, wide.inner),
        wide.inner_bias + shift(net.inner, wide.inner),
        wide.outer,
        wide.constant + shift(net.skip, wide.skip),
        seen(net.skip, wide.skip),
        net.activation,
    )


def _layers(truth: Layer, found: Layer, radius: Layer) -> float | None:
    if truth.residual != found.residual or truth.net.activation != found.net.activation:
        return None
    if len(truth.heads) != 1 or len(found.heads) != 1:  # compared as functions
        return None
    behind = _nets(_beside(truth), _beside(found), _radius_beside(found, radius))
    if behind is None:
        return None
    (head,), (own,), (wide,) = truth.heads, found.heads, radius.heads
    return max(
        behind,
        ratio(head.score - own.score, wide.score, SLACK * np.abs(head.score)),
        ratio(head.bias - own.bias, wide.bias, SLACK * np.abs(head.bias)),
    )
