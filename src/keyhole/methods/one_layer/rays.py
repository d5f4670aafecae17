"""The score matrix behind a net that grows evenly far out: no more queries than without the net.

Far out a net of ReLUs (GELUs, SiLUs) is homogeneous, φ(t·x) = t·φ(x), since its biases no longer matter. A first token
L·row of enormous length and a last token c·column too short to matter then answer

    f([L·row; c·column]) = σ(L·c·rowᵀ·W·column) · φ(L·row),

and φ(L·row) is asked once for each row. How accurately φ was learned plays no part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from keyhole.arrays import Array, Space, namespace
from keyhole.families.one_layer import UNKNOWN_ARITHMETIC, OneLayer
from keyhole.families.relu_net import ReluNet
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.reader import CLEAR_ENOUGH, Forms, SearchingReader, check_average, longest_token
from keyhole.methods.forms.scale import NORM_RATIO, floor_power
from keyhole.methods.one_layer.cells import SMOOTH_BEND
from keyhole.numerics.logit import logit_with_radius
from keyhole.queries import Measurements, Plan, Signature, Term, TokenRows
from keyhole.recovery import Outcome

# First tokens are longer by this than where biases drop below the last digit, so that slopes may cancel this far
# (or a value matrix behind a residual be this small) before biases show again.
ROOM = 2.0**24
# What a net makes of a token can be read from this many times the rounding of its answers on.
READABLE = 2.0**20
# Growth that is off by less than this, in square roots of eps, may be an error of the learned net.
ROUGHLY = 64.0
# Slopes below this part of what the neurons of a net could make together are cancellation, not growth.
EVEN_GROWTH = 2.0**-20

OTHER_GROWTH = (
    "long single tokens are not answered as the learned net answers them: the net behind attention is another"
)


@dataclass(frozen=True)
class Growth:
    """How a net grows far out, from its weights."""

    gain: float  # what rounding is proportional to: the slope if no two neurons cancelled
    level: float  # largest offset of the asymptote of any ray
    length: float  # norm at which offsets no longer matter
    shortest: float  # norm at which what the net makes of a token can be read beside its offsets

    @classmethod
    def of(cls, space: Space, net: ReluNet) -> Growth:
        """The growth of a net."""
        xp = namespace(net.weights_in)
        outer = net.weights_out if net.weights_out.ndim == 2 else net.weights_out[None, :]  # (outputs, neurons)
        norms = xp.linalg.vector_norm(net.weights_in, axis=1)
        gains = xp.sqrt((outer**2) @ norms**2)  # (outputs,)
        if net.skip is not None:
            skip = net.skip if net.skip.ndim == 2 else net.skip[None, :]
            gains = gains + xp.linalg.vector_norm(skip, axis=1)
        bend = 0.0 if net.activation == "relu" else SMOOTH_BEND
        level = float(xp.max(xp.abs(outer) @ (xp.abs(net.bias_in) + bend) + xp.abs(net.bias_out)))
        gain = float(xp.max(gains))
        ratio = level / gain if gain > 0 else 1.0
        length = floor_power(ROOM / space.eps * ratio) if ratio > 0 else ROOM / space.eps
        return cls(gain, level, length, READABLE * space.rounding * ratio)


# Asks for the far answers of rows: signs (n,), such that sign·row grows more than its opposite, and φ(sign·length·row).
Rays = Callable[[TokenRows], Steps[tuple[Array, Array]]]


def rays_of_net(signature: Signature, net: ReluNet, growth: Growth) -> Rays:
    """Rays of a layer without residual: one token each, its sign chosen with the net that was learned."""

    def ask(rows: TokenRows) -> Steps[tuple[Array, Array]]:
        xp, far = signature.space.xp, growth.length * rows.vectors
        signs = _larger_side(net.on_vectors(far), net.on_vectors(-far))
        plan = Plan("rays", rows.vectors.shape[0], [[Term(rows, None, growth.length * signs)]])
        answers: Measurements = yield plan
        expected = net.on_vectors(far * signs[:, None])
        allowed = _same_growth(xp, answers.values) * growth.gain * growth.length
        if bool(xp.any(xp.abs(answers.values - expected) > allowed)):
            raise Unrecoverable(Outcome.WRONG_FAMILY, OTHER_GROWTH)
        return xp.astype(signs, signature.space.dtype), answers.values

    return ask


def rays_past_residual(signature: Signature, odd: Array, growth: Growth) -> Rays:  # (width,) or (width, outputs)
    """Rays of what a net makes of attention alone: beside a last token of zero both tokens weigh the same.

    `odd` is the linear part of the growth: what a row and its opposite differ by.
    """

    def ask(rows: TokenRows) -> Steps[tuple[Array, Array]]:
        there = yield from ask_attention_rays(rows, growth.length)
        back = there - 2 * growth.length * (rows.vectors @ odd)
        signs = _larger_side(there, back)
        xp = signature.space.xp
        chosen = signs if there.ndim == 1 else signs[:, None]
        return signs, xp.where(chosen > 0, there, back)

    return ask


def ask_attention_rays(rows: TokenRows, length: float) -> Steps[Array]:
    """What the net makes of attention of length·row beside a last token of zero, which passes nothing by."""
    answers: Measurements = yield Plan("rays", rows.vectors.shape[0], [[Term(rows, None, 2 * length)], []])
    return answers.values


def odd_growth_of_net(space: Space, net: ReluNet, growth: Growth) -> Array:  # -> (width,) or (width, outputs)
    """Half of what the growth along a row and along its opposite differ by: a linear map of the row."""
    far = growth.length * space.eye(net.width)
    return (net.on_vectors(far) - net.on_vectors(-far)) / (2 * growth.length)


@dataclass(frozen=True)
class Far:
    """What the net makes of long tokens along all axes, both ways, by attention alone."""

    answers: Array  # (2·width,) or (2·width, outputs)
    odd: Array  # (width,) or (width, outputs): half of what there and back differ by, over the length
    largest: float  # slope

    def has_growth_of(self, layer: OneLayer, growth: Growth) -> bool:
        """Whether the layer that was recovered answers the same, but for small errors."""
        xp = namespace(self.answers)
        unit = xp.eye(layer.width, dtype=self.answers.dtype, device=self.answers.device)
        tokens = 2 * growth.length * xp.concat([unit, -unit])
        expected = layer(xp.stack([tokens, xp.zeros_like(tokens)], axis=1))
        allowed = _same_growth(xp, self.answers) * growth.gain * growth.length
        return bool(xp.all(xp.abs(expected - self.answers) <= allowed))


def _same_growth(xp: Any, answers: Array) -> float:
    """Errors far out that are no contradiction, over what the neurons could make together."""
    return ROUGHLY * math.sqrt(float(xp.finfo(answers.dtype).eps))


def ask_growth(signature: Signature, growth: Growth) -> Steps[Far]:
    """What the net makes of long tokens along all axes, both ways, by attention alone."""
    xp, unit = signature.space.xp, signature.space.eye(signature.width)
    answers = yield from ask_attention_rays(TokenRows(xp.concat([unit, -unit])), growth.length)
    odd = (answers[: signature.width, ...] - answers[signature.width :, ...]) / (2 * growth.length)
    return Far(answers, odd, float(xp.max(xp.abs(answers))) / growth.length)


def guide_of(odd: Array) -> Array:  # (width,) or (width, outputs) -> (width,)
    """The vector that rows must share evenly for all to grow: of several outputs the combination of largest growth."""
    if odd.ndim == 1:
        return odd
    left, sizes, _ = namespace(odd).linalg.svd(odd, full_matrices=False)
    return left[:, 0] * sizes[0]


def _larger_side(there: Array, back: Array) -> Array:  # (n,) or (n, outputs) -> (n,) of ±1
    xp = namespace(there)
    if there.ndim == 2:
        there, back = xp.linalg.vector_norm(there, axis=1), xp.linalg.vector_norm(back, axis=1)
    there, back = xp.abs(there), xp.abs(back)
    return xp.where(there >= back, xp.ones_like(there), -xp.ones_like(there))


@final
class RayReader(SearchingReader):
    """Reads bilinear forms rowᵀ·score·column behind a net that grows evenly, one query each."""

    def __init__(self, signature: Signature, guide: Array, rays: Rays, growth: Growth) -> None:
        super().__init__(signature, guide)
        self.largest_scale = floor_power(longest_token(signature.space, self.guide_norm) / NORM_RATIO) ** 2
        self._rays = rays
        self._growth = growth
        self._rounding = UNKNOWN_ARITHMETIC * signature.space.rounding * growth.gain  # over the norm of first tokens
        self._known: dict[bytes, tuple[Array, Array, Array]] = {}  # by rows: signs, directions, slopes

    def first_norm(self, scale: float) -> float:
        """Norm of first tokens: so long that the net grows evenly and the last token does not matter."""
        return max(self._growth.length, NORM_RATIO * floor_power(math.sqrt(scale)))

    def radius_at_zero(self, scale: float) -> float:
        """Radius of a logit of zero, for a row of average overlap with the guide."""
        noise = self.signature.noise.radius / self.first_norm(scale)
        radius = float(4 * (self._rounding + noise) * self.signature.width**0.5 / self.guide_norm)
        return min(radius, CLEAR_ENOUGH) if radius < 0.5 else radius  # longer tokens do not make it clearer

    def _ask_rays(self, rows: TokenRows) -> Steps[tuple[Array, Array, Array]]:
        """Signs (n,), directions of the answer (n, outputs), and slopes (n,) of rows, asked once for all of them."""
        if rows.digest not in self._known:
            xp = self.signature.space.xp
            signs, far = yield from self._rays(rows)
            far = far if far.ndim == 2 else far[:, None]
            size = xp.linalg.vector_norm(far, axis=1)
            safe = xp.where(size > 0, size, xp.ones_like(size))
            self._known[rows.digest] = (signs, far / safe[:, None], size / self._growth.length)
        return self._known[rows.digest]

    def ask_at(
        self, stage: str, rows: TokenRows, columns: TokenRows, row_index: Array, column_index: Array, scale: float
    ) -> Steps[Forms]:
        """The forms of the given pairs (n,) from queries [L·row; c·column], the rays of new rows asked for before."""
        space, xp = self.signature.space, self.signature.space.xp
        signs, directions, slopes = (xp.take(each, row_index, axis=0) for each in (yield from self._ask_rays(rows)))
        first = self.first_norm(scale)
        last = scale / first
        positions = [[Term(rows, row_index, first * signs)], [Term(columns, column_index, last)]]
        answers: Measurements = yield Plan(stage, int(row_index.shape[0]), positions, so_far=self.so_far)
        values = answers.values if answers.values.ndim == 2 else answers.values[:, None]
        values = xp.sum(values * directions, axis=1)
        high = first * slopes
        rounding = first * self._rounding + 0 * high
        noise = answers.radius * xp.sum(xp.abs(directions), axis=1)
        level = self._growth.level
        logits, radius = logit_with_radius(space, values, 0 * high, high, level, rounding + noise, rounding + noise)
        total = level + 2 * rounding + noise
        if bool(xp.any(xp.isinf(radius))):
            check_average(values, 0 * high, high, total)
        saturation = radius * xp.where(high == 0, xp.ones_like(high), high) / (4 * total)
        own = space.rounding * self.estimate.size * self.signature.width**0.5
        return Forms(signs * logits / scale, radius / scale + own, 0 * values + last / first, saturation)
