"""What parameters say of a batch of questions: predictions, the rounding of any arithmetic, and what each part does.

To first order the answer to a question moves by an inner product with the change of a part (a score matrix, a value
matrix and so on). For every part of every family here the other factor is an outer product of two vectors, left and
right, so norms and inner products of it cost no more than those of vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keyhole.arrays import Floats, to_numpy
from keyhole.families import MultiHead, OneLayer, ReluNet, Residual, SingleHead
from keyhole.families.one_layer import passed_through
from keyhole.families.relu_net import activate, activate_slope

# Rounding of an inner product by unknown arithmetic (another order, factors instead of their product, a fused kernel)
# over eps·|x|·|y|. One standard deviation is about a third; what is left is for products of factors, whose sizes do not
# show in the product and whose rounding is that of the parameters: four has been seen.
ARITHMETIC = 32.0
# An output that a head hardly speaks to is rounded at this part of the others' size: it may be a difference of them.
FAINT = 0.03
# Beyond this logits are so uncertain that any token may have the weight of any other.
LOST_LOGIT = 0.5


@dataclass(frozen=True)
class Part:
    """One array of the parameters, and how answers move with it."""

    name: str  # score, value and so on
    head: int | None
    size: float  # Frobenius norm
    count: int  # numbers in it
    left: Floats  # (rows, m): for each looked-at answer
    right: Floats  # (rows, n)
    reach: Floats  # (questions, outputs): how far a change of norm one may move each answer
    added: bool = False  # every entry is added to one number of every answer

    @property
    def label(self) -> str:
        """The part in words."""
        name = self.name.replace("_", " ")
        return name if self.head is None else f"{name} of head {self.head}"

    def powers(self) -> Floats:  # (rows,)
        """Variances of the answers under random changes of the part's own size."""
        return np.asarray(np.sum(self.left**2, axis=1) * np.sum(self.right**2, axis=1) * (self.size**2 / self.count))

    def gram(self) -> Floats:  # (rows, rows)
        """Covariance of the answers under random changes of the part's own size."""
        whole: Floats = (self.left @ self.left.T) * (self.right @ self.right.T) * (self.size**2 / self.count)
        return whole


@dataclass(frozen=True)
class View:
    """Predictions of some questions, their rounding, and what each part does to them."""

    answers: Floats  # (questions, outputs)
    rounding: Floats  # (questions, outputs)
    parts: tuple[Part, ...]


def view(params: Any, tokens: Floats, eps: float, looked_at: Floats) -> View:  # (n, length, width), (outputs,) numbers
    """How parameters see one batch of questions, answered in arithmetic of relative spacing `eps`."""
    unit = ARITHMETIC * eps
    if isinstance(params, SingleHead | MultiHead):
        return _view_of_heads(params, tokens, unit, looked_at)
    if isinstance(params, ReluNet):
        return _view_of_net(params, tokens, unit, looked_at)
    if isinstance(params, Residual):
        seen, last = _view_of_heads(params.attention, tokens, unit, looked_at), tokens[:, -1, :]
        return View(seen.answers + last, seen.rounding + unit * np.abs(last), seen.parts)
    return _view_of_layer(params, tokens, unit, looked_at)


def joined(views: list[View]) -> View:
    """Several batches as one; parts that none of their answers can show are left out."""
    parts = []
    for same in zip(*(each.parts for each in views), strict=True):
        first = same[0]
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in same]) for name in ("left", "right", "reach")
        }
        if np.any(arrays["reach"]):
            parts.append(replace(first, **arrays))
    return View(
        np.concatenate([each.answers for each in views]),
        np.concatenate([each.rounding for each in views]),
        tuple(parts),
    )


def _plain(params: Any) -> Any:
    return params.like(np.zeros(1))


def _norms(array: Floats, axis: int = -1) -> Floats:
    return np.asarray(np.linalg.norm(array, axis=axis))


def _column(array: Any) -> Floats:  # (width,) -> (width, 1); a matrix stays
    return np.asarray(to_numpy(array), dtype=np.float64).reshape(array.shape[0], -1)


class _Head:
    """One head on a batch of questions."""

    def __init__(self, head: SingleHead, tokens: Floats, unit: float) -> None:
        self.head, self.tokens = head, tokens
        self.value = _column(head.value)
        bias = np.zeros(head.width) if head.score_bias is None else head.score_bias
        last = tokens[:, -1, :]
        keys = last @ head.score.T + bias
        logits = np.vecdot(tokens, keys[:, None, :])
        self.weights = np.exp(logits - np.max(logits, axis=1, keepdims=True))
        self.weights /= np.sum(self.weights, axis=1, keepdims=True)
        self.values = tokens @ self.value  # (n, length, outputs)
        self.answers = np.sum(self.weights[:, :, None] * self.values, axis=1)
        self.mixture = np.sum(self.weights[:, :, None] * tokens, axis=1)
        # What one logit does: weight·(value − answer).
        self.pulls = self.weights[:, :, None] * (self.values - self.answers[:, None, :])  # (n, length, outputs)
        lengths = _norms(tokens)
        typical = 2 * np.linalg.norm(head.score) / head.width**0.5 * _norms(last) + np.linalg.norm(bias)
        blur = unit * np.max(lengths, axis=1) * np.maximum(_norms(keys), typical)
        blur = np.minimum(blur, 30.0)[:, None]  # so that nothing overflows; it is lost anyway
        # |f' − f| ≤ Σ weight·|value − f|·(e^δ − 1)·e^δ when logits move by up to δ, however large that is.
        moved = 2 * np.expm1(blur) * np.exp(blur) * np.sum(np.abs(self.pulls), axis=1)
        spread = np.max(np.abs(self.values - self.answers[:, None, :]), axis=1)
        moved += np.where(blur > LOST_LOGIT, spread, 0.0)
        columns = _norms(self.value, 0)
        columns = columns + FAINT * np.sqrt(np.mean(columns**2))
        sizes = np.sum(self.weights * lengths, axis=1)[:, None] * columns
        self.rounding = moved + unit * sizes

    def slopes(self, outputs: Any) -> Floats:  # (n, outputs, width)
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


Maker = Callable[..., Part | None]


def _part(
    name: str, head: int | None, array: Any, left: Floats, right: Floats | None, reach: Floats, added: bool = False
) -> list[Part]:
    """The part, unless it is not there or all zero: then no relative change of it can be spoken of."""
    if array is None or not np.any(to_numpy(array)):
        return []
    own = np.asarray(to_numpy(array), dtype=np.float64)
    right = np.ones((left.shape[0], 1)) if right is None else right
    return [Part(name, head, float(np.linalg.norm(own)), own.size, left, right, reach, added)]


def _view_of_heads(params: SingleHead | MultiHead, tokens: Floats, unit: float, looked_at: Floats) -> View:
    several = isinstance(params, MultiHead)
    params = _plain(params)
    heads = params.heads if isinstance(params, MultiHead) else (params,)
    views = [_Head(head, tokens, unit) for head in heads]
    answers = np.sum([each.answers for each in views], axis=0)
    rounding = np.sum([each.rounding + unit * np.abs(each.answers) for each in views], axis=0)
    if params.output_bias is not None:
        answers = answers + params.output_bias
        rounding = rounding + unit * np.abs(params.output_bias)
    (count, _, width), looks = tokens.shape, len(looked_at)
    last, units = tokens[:, -1, :], _units(count, looks)
    parts: list[Part] = []
    for number, each in enumerate(views):
        name = number if several else None
        if not np.any(each.value):
            continue  # says nothing, whatever its logits
        slopes, reach = each.slopes(looked_at).reshape(-1, width), each.reach(each.pulls)
        parts += _part("score", name, each.head.score, slopes, _rows(last, looks), reach * _norms(last)[:, None])
        parts += _part("score_bias", name, each.head.score_bias, slopes, None, reach)
        mixed = np.broadcast_to(_norms(each.mixture)[:, None], answers.shape)
        parts += _part("value", name, each.head.value, _rows(each.mixture, looks), units, mixed)
    parts += _part("output_bias", None, params.output_bias, units, None, np.ones_like(answers), added=True)
    return View(answers, rounding, tuple(parts))


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
        """Rounding at the size of all neurons: one that is off may be on, and the skip its opposite, in the box."""
        net, lengths = self.net, _norms(self.x)[:, None]
        heights = lengths * _norms(net.weights_in) + np.abs(net.bias_in)
        sizes = np.sqrt(heights**2 @ (self.outer**2).T) + np.abs(np.atleast_1d(net.bias_out))
        return np.asarray(unit * (sizes if self.skip is None else sizes + lengths * _norms(self.skip)))

    def gates(self, outputs: Any) -> Floats:  # (n, outputs, k)
        """The derivative of the answers by the heights over the kinks."""
        return np.asarray(self.slope[:, None, :] * self.outer[outputs])

    def gradients(self, outputs: Any) -> Floats:  # (n, outputs, inner)
        """The derivative of the answers by what enters the net."""
        found = self.gates(outputs) @ self.net.weights_in
        return np.asarray(found if self.skip is None else found + self.skip[outputs])

    def parts(self, looked_at: Floats) -> list[Part]:
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


def _view_of_net(params: ReluNet, tokens: Floats, unit: float, looked_at: Floats) -> View:
    net = _plain(params)
    own = _Net(net, tokens[:, -1, :])
    return View(own.answers, own.rounding(unit), tuple(own.parts(looked_at)))


def _view_of_layer(params: OneLayer, tokens: Floats, unit: float, looked_at: Floats) -> View:
    layer = _plain(params)
    head, net, last = _Head(layer.attention, tokens, unit), layer.ffn, tokens[:, -1, :]
    entering = head.answers if layer.attention.output_bias is None else head.answers + layer.attention.output_bias
    # A box may have a bias in front of the net that the biases of the net take away.
    taken = np.linalg.norm(net.bias_in) / (np.linalg.norm(net.weights_in) or 1.0) if isinstance(net, ReluNet) else 0.0
    blur = head.rounding + unit * (np.abs(entering) + taken)
    if layer.residual:
        entering = entering + last
        blur = blur + unit * np.abs(last)
    if not isinstance(net, ReluNet):  # of a net that is only known as a function nothing can be said part by part
        answers = net(entering[:, None, :])
        through = passed_through(net, entering, blur) + unit * np.abs(answers)
        return View(answers.reshape(len(tokens), -1), through.reshape(len(tokens), -1), ())
    behind = _Net(net, entering)
    shape = behind.answers.shape
    rounding = behind.rounding(unit) + passed_through(net, entering, blur).reshape(shape)
    (count, _, width), looks = tokens.shape, len(looked_at)
    gradients, everything = behind.gradients(looked_at), behind.gradients(slice(None))
    slopes = np.swapaxes(head.pulls @ np.swapaxes(gradients, 1, 2), 1, 2) @ tokens  # (n, looks, width)
    slopes = slopes.reshape(-1, width)
    reach = head.reach(head.pulls @ np.swapaxes(everything, 1, 2))
    steep = _norms(everything)
    score, inner, mixed = layer.attention.score, gradients.reshape(count * looks, -1), _norms(head.mixture)[:, None]
    parts = _part("score", None, score, slopes, _rows(last, looks), reach * _norms(last)[:, None])
    parts += _part("score_bias", None, layer.attention.score_bias, slopes, None, reach)
    parts += _part("value", None, layer.attention.value, _rows(head.mixture, looks), inner, mixed * steep)
    parts += _part("output_bias", None, layer.attention.output_bias, inner, None, steep)
    return View(behind.answers, rounding, (*parts, *behind.parts(looked_at)))
