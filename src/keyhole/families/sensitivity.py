"""First-order effects of every array of heads and nets on a batch of answers, and the rounding of any arithmetic.

To first order the answer to a query moves by an inner product with the change of a part (a score matrix, a value
matrix and so on). For every part of every family here the other factor is an outer product of two vectors, left and
right, so norms and inner products of it cost no more than those of vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

import numpy as np

from keyhole.arrays import Array, Floats, floats
from keyhole.families.activations import activate, activate_slope
from keyhole.families.base import Part, Sensitivity

if TYPE_CHECKING:
    from keyhole.families.one_layer import OneLayer
    from keyhole.families.relu_net import ReluNet
    from keyhole.families.single_head import SingleHead

# An output that a head hardly speaks to is rounded at this part of the others' size: it may be a difference of them.
FAINT = 0.03
# Beyond this logits are so uncertain that any token may have the weight of any other.
LOST_LOGIT = 0.5
# Step of the differences that tell what a constant of attention does: larger, and bends count; smaller, and rounding.
CONSTANT_STEP = 1e-5
# Weights below float32's smallest normal number are zero in some arithmetic; below float16's, in any that is coarser
# than float32, whose products are rounded at this part of their size or finer.
LOST_WEIGHT, LOST_WEIGHT_COARSE = 2.0**-126, 2.0**-14
FLOAT32_PRODUCT = 1e-4


def _norms(array: Floats, axis: int = -1) -> Floats:
    return np.asarray(np.linalg.norm(array, axis=axis))


class _Head:
    """One head on a batch of queries."""

    def __init__(self, head: SingleHead, tokens: Floats, unit: float) -> None:
        self.head, self.tokens = head, tokens
        self.value = head.value_columns
        last = tokens[:, -1, :]
        keys, logits = head.form.keys(last), head.form.logits(tokens, last)
        self.weights = head.attention.weights(logits)
        self.values = tokens @ self.value  # (n, length, outputs)
        self.answers = np.sum(self.weights[:, :, None] * self.values, axis=1)
        self.mixture = np.sum(self.weights[:, :, None] * tokens, axis=1)
        self.logits = logits
        slopes = np.broadcast_to(head.attention.slopes(logits), logits.shape)[:, :, None]
        # What one logit does, (n, length, outputs).
        self.pulls = slopes * head.attention.normaliser.pulls(self.weights, self.values, self.answers)
        lengths = _norms(tokens)
        bias = 0.0 if head.score_bias is None else np.linalg.norm(head.score_bias)
        typical = 2 * np.linalg.norm(head.score) / head.width**0.5 * _norms(last) + bias
        radius = unit * np.max(lengths, axis=1) * np.maximum(_norms(keys), typical)
        radius = np.minimum(radius, 30.0)[:, None]  # so that nothing overflows; it is lost anyway
        # |f' − f| ≤ Σ weight·|value − f|·(e^δ − 1)·e^δ when logits move by up to δ, however large that is.
        moved = 2 * np.expm1(radius) * np.exp(radius) * np.sum(np.abs(self.pulls), axis=1)
        if not head.attention.is_softmax:
            moved += self._of_parts(radius, unit)
        farthest = np.max(np.abs(self.values - self.answers[:, None, :]), axis=1)
        moved += np.where(radius > LOST_LOGIT, farthest, 0.0)
        columns = _norms(self.value, 0)
        columns = columns + FAINT * np.sqrt(np.mean(columns**2))
        sizes = np.sum(self.weights * lengths, axis=1)[:, None] * columns
        lost = LOST_WEIGHT if unit <= FLOAT32_PRODUCT else LOST_WEIGHT_COARSE
        self.rounding = moved + unit * sizes + lost * np.sum(np.abs(self.values - self.answers[:, None, :]), axis=1)

    def _of_parts(self, radius: Floats, unit: float) -> Floats:  # (n, 1) -> (n, outputs)
        """How far answers move by the rounding of logits, which a part may bend, and by that of the parts."""
        attention, logits = self.head.attention, self.logits
        energies = attention.energy_radii(logits, radius + 0 * logits) + attention.energy_rounding(logits, unit)
        return np.asarray(attention.answer_radii(logits, self.weights, self.values, self.answers, energies))

    def of_constants(self) -> dict[str, Floats]:  # (n, outputs, entries) by name
        """The derivative of the answers by every constant of the parts of attention, from differences."""
        attention, found = self.head.attention, {}
        for path, array in attention.arrays().items():
            step = CONSTANT_STEP * max(1.0, float(np.max(np.abs(array))))
            columns = []
            for entry in np.eye(array.size):
                change = step * entry.reshape(array.shape)
                plus, minus = (
                    attention.with_arrays({**attention.arrays(), path: array + way * change}).weights(self.logits)
                    for way in (1, -1)
                )
                columns.append(np.sum((plus - minus)[:, :, None] * self.values, axis=1) / (2 * step))
            found[path] = np.stack(columns, axis=-1)
        return found

    def slopes(self, outputs: Array) -> Floats:  # (n, outputs, width)
        """The derivative of the answer by the key of the last token."""
        return np.asarray(np.swapaxes(self.pulls[:, :, outputs], 1, 2) @ self.tokens)

    def reach(self, pulls: Floats) -> Floats:  # (n, length, outputs) -> (n, outputs)
        """The norms of such derivatives."""
        overlaps = self.tokens @ np.swapaxes(self.tokens, 1, 2)
        return np.asarray(np.sqrt(np.maximum(np.sum(pulls * (overlaps @ pulls), axis=1), 0.0)))


def _rows(array: Floats, outputs: int) -> Floats:  # (n, m) -> (n·outputs, m)
    return np.repeat(array, outputs, axis=0)


def _units(count: int, outputs: int) -> Floats:  # (n·outputs, outputs)
    return np.tile(np.eye(outputs), (count, 1))


def _part(
    name: str,
    head: int | None,
    array: Array | None,
    left: Floats,
    right: Floats | None,
    reach: Floats,
    added: bool = False,
) -> list[Part]:
    """The part, unless it is not there or all zero: then no relative change of it can be spoken of."""
    if array is None or not np.any(own := floats(array)):
        return []
    right = np.ones((left.shape[0], 1)) if right is None else right
    return [Part(name, head, float(np.linalg.norm(own)), own.size, left, right, reach, added)]


def sensitivity_of_heads(
    heads: Sequence[SingleHead],
    output_bias: Array | None,
    tokens: Floats,  # (n, length, width)
    unit: float,
    looked_at: Array,  # numbers of outputs
    numbered: bool,
) -> Sensitivity:
    """Predictions of a sum of heads, their rounding, and the effect of every array."""
    plain = [_Head(head.like(np.zeros(1)), tokens, unit) for head in heads]
    bias = None if output_bias is None else floats(output_bias)
    answers = np.sum([each.answers for each in plain], axis=0)
    rounding = np.sum([each.rounding + unit * np.abs(each.answers) for each in plain], axis=0)
    if bias is not None:
        answers, rounding = answers + bias, rounding + unit * np.abs(bias)
    (count, _, width), looks = tokens.shape, len(looked_at)
    last, units = tokens[:, -1, :], _units(count, looks)
    parts: list[Part] = []
    for number, each in enumerate(plain):
        name = number if numbered else None
        if not np.any(each.value):
            continue  # adds nothing, whatever its logits
        slopes, reach = each.slopes(looked_at).reshape(-1, width), each.reach(each.pulls)
        parts += _part("score", name, each.head.score, slopes, _rows(last, looks), reach * _norms(last)[:, None])
        parts += _part("score_bias", name, each.head.score_bias, slopes, None, reach)
        mixed = np.broadcast_to(_norms(each.mixture)[:, None], answers.shape)
        parts += _part("value", name, each.head.value, _rows(each.mixture, looks), units, mixed)
        for path, slope in each.of_constants().items():
            left, reach = slope[:, looked_at].reshape(count * looks, -1), _norms(slope)
            parts += _part(path.replace(".", " "), name, each.head.arrays()[path], left, None, reach)
    parts += _part("output_bias", None, bias, units, None, np.ones_like(answers), added=True)
    return Sensitivity(answers, rounding, tuple(parts))


class _Net:
    """A net on single vectors."""

    def __init__(self, net: ReluNet, x: Floats) -> None:
        self.net, self.x = net, x
        self.outer = np.atleast_2d(net.weights_out)  # (outputs, k)
        height = x @ net.weights_in.T + net.bias_in
        self.hidden = activate(net.activation, height)
        self.slope = activate_slope(net.activation, height)
        self.skip = None if net.skip is None else np.atleast_2d(net.skip)
        answers = self.hidden @ self.outer.T + np.atleast_1d(net.bias_out)
        self.answers = answers if self.skip is None else answers + x @ self.skip.T

    def rounding(self, unit: float) -> Floats:  # (n, outputs)
        """Rounding at the size of all neurons: one that is off may be on, and the skip its opposite, in the oracle."""
        net, lengths = self.net, _norms(self.x)[:, None]
        heights = lengths * _norms(net.weights_in) + np.abs(net.bias_in)
        sizes = np.sqrt(heights**2 @ (self.outer**2).T) + np.abs(np.atleast_1d(net.bias_out))
        return np.asarray(unit * (sizes if self.skip is None else sizes + lengths * _norms(self.skip)))

    def gates(self, outputs: Array) -> Floats:  # (n, outputs, k)
        """The derivative of the answers by the heights over the kinks."""
        return np.asarray(self.slope[:, None, :] * self.outer[outputs])

    def gradients(self, outputs: Array) -> Floats:  # (n, outputs, inner)
        """The derivative of the answers by what enters the net."""
        found = self.gates(outputs) @ self.net.weights_in
        return np.asarray(found if self.skip is None else found + self.skip[outputs])

    def parts(self, looked_at: Array) -> list[Part]:
        """What each array of the net does."""
        (count, _), looks, everything = self.x.shape, len(looked_at), slice(None)
        gates, units = self.gates(looked_at).reshape(count * looks, -1), _units(count, looks)
        reach, ones = _norms(self.gates(everything)), np.ones_like(self.answers)
        lengths, inside = _norms(self.x)[:, None] * ones, _norms(self.hidden)[:, None] * ones
        found = _part("weights_in", None, self.net.weights_in, gates, _rows(self.x, looks), reach * lengths)
        found += _part("bias_in", None, self.net.bias_in, gates, None, reach)
        found += _part("weights_out", None, self.net.weights_out, _rows(self.hidden, looks), units, inside)
        found += _part("bias_out", None, self.net.bias_out, units, None, ones, added=True)
        return found + _part("skip", None, self.net.skip, _rows(self.x, looks), units, lengths)


def sensitivity_of_net(net: ReluNet, tokens: Floats, unit: float, looked_at: Array) -> Sensitivity:
    """Predictions of a net, their rounding, and the effect of every array."""
    own = _Net(net.like(np.zeros(1)), tokens[:, -1, :])
    return Sensitivity(own.answers, own.rounding(unit), tuple(own.parts(looked_at)))


def sensitivity_of_layer(params: OneLayer, tokens: Floats, unit: float, looked_at: Array) -> Sensitivity:
    """Predictions of heads with a net behind them, their rounding, and the effect of every array."""
    layer = params.like(np.zeros(1))
    net, last, bias = layer.anatomy.net, tokens[:, -1, :], layer.attention.output_bias
    heads = [_Head(head, tokens, unit) for head in layer.heads]
    entering = reduce(add, [head.answers for head in heads])
    entering = entering if bias is None else entering + bias
    # An oracle may have a bias in front of the net that the biases of the net take away.
    far = 0.0 if net is None else np.linalg.norm(net.bias_in) / (np.linalg.norm(net.weights_in) or 1.0)
    sizes = [np.abs(head.answers) for head in heads] if len(heads) > 1 else []  # a sum of several is rounded too
    radius = reduce(add, [head.rounding for head in heads]) + unit * reduce(add, sizes, np.abs(entering) + far)
    if layer.residual:
        entering = entering + last
        radius = radius + unit * np.abs(last)
    if net is None:  # of a net that is known as a function only nothing can be said part by part
        answers = layer.ffn(entering[:, None, :])
        through = layer.ffn.propagate_radius(entering, radius) + unit * np.abs(answers)
        return Sensitivity(answers.reshape(len(tokens), -1), through.reshape(len(tokens), -1), ())
    behind = _Net(net, entering)
    rounding = behind.rounding(unit) + net.propagate_radius(entering, radius).reshape(behind.answers.shape)
    inner, steep = behind.gradients(looked_at), _norms(behind.gradients(slice(None)))
    parts: list[Part] = []
    for number, head in enumerate(heads):
        parts += _parts_behind_net(head, behind, looked_at, number if layer.anatomy.numbered else None)
    parts += _part("output_bias", None, bias, inner.reshape(-1, inner.shape[-1]), None, steep)
    return Sensitivity(behind.answers, rounding, (*parts, *behind.parts(looked_at)))


def _parts_behind_net(head: _Head, behind: _Net, looked_at: Array, number: int | None) -> list[Part]:
    """What each array of a head does through the net."""
    tokens, (count, _, width), looks = head.tokens, head.tokens.shape, len(looked_at)
    last, own = tokens[:, -1, :], head.head
    gradients, everything = behind.gradients(looked_at), behind.gradients(slice(None))
    slopes = np.swapaxes(head.pulls @ np.swapaxes(gradients, 1, 2), 1, 2) @ tokens  # (n, looks, width)
    slopes, inner = slopes.reshape(-1, width), gradients.reshape(count * looks, -1)
    reach = head.reach(head.pulls @ np.swapaxes(everything, 1, 2))
    mixed = _norms(head.mixture)[:, None] * _norms(everything)
    found = _part("score", number, own.score, slopes, _rows(last, looks), reach * _norms(last)[:, None])
    found += _part("score_bias", number, own.score_bias, slopes, None, reach)
    return found + _part("value", number, own.value, _rows(head.mixture, looks), inner, mixed)
