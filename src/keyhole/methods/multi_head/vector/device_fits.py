"""The values and logits of many tokens in all heads at once, fitted together where the oracle is.

The same least squares as `token_fit` solves token by token: damped Gauss-Newton over the logits, values eliminated. A
device is kept busy by all tokens in one step, each with damping of its own, and the host looks once a step. Steps come
of normal equations, columns brought to one length: what these lose the next step mends, as residuals are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import numpy as np

from keyhole.arrays import Array, Floats, Space, floats
from keyhole.methods.multi_head.vector.token_fit import (
    DAMPING,
    LARGEST_LOGIT,
    LEAST,
    LONGEST_STEP,
    MOST_STEPS,
    MOST_TRIES,
)

# Dampings below this are lost in the rounding of normal equations.
LEAST_DAMPING = 1e-13
# Columns shorter than this part of the longest count as that long, as in `token_fit`.
SHORTEST_COLUMN = 0.03
# Fits end where a step leaves more than this of the error, or of one that is small enough already.
STALLED, GOOD_ENOUGH = 0.999, 0.95
# Steps of refinement of a guess, and its damping.
REFINED, RIDGE = 2, 1e-13


@dataclass(frozen=True)
class TokensData:
    """What tokens were asked beside: for each G last tokens in M multiplicities."""

    answers: Array  # (tokens, G, M, outputs), without the share of the last token
    odds: Array  # (G, M, heads) of the known token against the last one, copies included; zero where it is absent
    copies: Array  # (G, M) of the new token for one of the last
    known: Array  # (heads, outputs) values of the known token
    total: Array  # (tokens, outputs) sums of the new tokens' values over heads


@dataclass(frozen=True)
class TokensFit:
    """The fits of least squares, and how they follow small changes of answers."""

    values: Array  # (tokens, heads, outputs)
    logits: Array  # (tokens, G, heads)
    residual: Floats  # (tokens,) root mean square per degree of freedom
    freedom: int  # degrees of freedom of each
    condition: Floats  # (tokens,) errors of values over those of answers
    weights: Array  # (tokens, G, M, heads) of the new token
    others: Array  # (tokens, G, M, heads) of the known one
    frame: Array  # (tokens, outputs, q) what values lie in
    _state: _State
    _normal: Array
    _scale: Array

    def respond(self, changes: Array) -> tuple[Array, Array]:  # (tokens, draws, J + 1, q), of answers in the frame
        """How logits (tokens, draws, G, heads) and values (tokens, draws, heads, outputs) follow, to first order."""
        state, xp = self._state, self._state.space.xp
        tokens, draws, _, inner = changes.shape
        basis = state.basis[:, None, :, :]
        clear = changes - basis @ (xp.matrix_transpose(basis) @ changes)
        groups, heads = self.logits.shape[1:]
        blocks = xp.permute_dims(
            xp.reshape(clear[:, :, :-1, :], (tokens, draws, groups, -1, inner)), (0, 2, 3, 4, 1)
        )  # (tokens, G, M, q, draws)
        right = xp.matrix_transpose(state.slopes) @ xp.reshape(blocks, (tokens, groups, -1, draws))
        right = xp.reshape(right, (tokens, groups * heads, draws)) / self._scale[:, :, None]
        moved = xp.linalg.solve(self._normal, right) / self._scale[:, :, None]
        moved = xp.reshape(moved, (tokens, groups, heads, draws))
        change = xp.permute_dims(xp.reshape(state.slopes @ moved, (tokens, -1, inner, draws)), (0, 3, 1, 2))
        rest = xp.concat([changes[:, :, :-1, :] - change, changes[:, :, -1:, :]], axis=2)
        values = state.inverse[:, None, :, :] @ rest
        return xp.permute_dims(moved, (0, 3, 1, 2)), values @ xp.matrix_transpose(self.frame)[:, None, :, :]


@final
class _State:
    """Weights, values and residuals of all tokens at some logits, in their frames."""

    def __init__(self, space: Space, asked: TokensData, known: Array, logits: Array) -> None:
        xp = space.xp
        self.space, self.asked, self.known, self.logits = space, asked, known, logits
        tokens, groups, many, inner = asked.answers.shape
        heads = logits.shape[2]
        new = xp.exp(xp.clip(logits, -LARGEST_LOGIT, LARGEST_LOGIT))[:, :, None, :] * asked.copies[:, :, None]
        whole = 1 + asked.odds + new
        self.weights, self.others = new / whole, asked.odds / whole
        flat = xp.reshape(self.weights, (tokens, groups * many, heads))
        design = xp.concat([flat, xp.ones_like(flat[:, :1, :])], axis=1)
        left = asked.answers - self.others @ known[:, None, :, :]
        target = xp.concat([xp.reshape(left, (tokens, -1, inner)), asked.total[:, None, :]], axis=1)
        self.basis, triangle = xp.linalg.qr(design)
        ends = xp.linalg.diagonal(triangle)
        tiny = space.eps * xp.max(xp.abs(ends), axis=1, keepdims=True)  # dependent weights: the fit will not do
        triangle = triangle + xp.where(xp.abs(ends) < tiny, tiny, 0 * ends)[:, :, None] * space.eye(heads)
        self.back = xp.linalg.inv(triangle)
        self.inverse = self.back @ xp.matrix_transpose(self.basis)
        self.values = self.inverse @ target
        self.rest = target - design @ self.values
        self.error = xp.sum(self.rest**2, axis=(1, 2))

    @property
    def slopes(self) -> Array:  # (tokens, G, M·q, heads)
        """How the answers of a group respond to its logits."""
        return self._slopes()

    def _slopes(self) -> Array:
        xp = self.space.xp
        own = (self.weights * (1 - self.weights))[..., None] * self.values[:, None, None, :, :]
        own = own - (self.weights * self.others)[..., None] * self.known[:, None, None, :, :]
        own = xp.matrix_transpose(own)  # (tokens, G, M, q, heads)
        return xp.reshape(own, (*own.shape[:2], -1, own.shape[-1]))

    def normal(self, slopes: Array) -> tuple[Array, Array, Array]:
        """The normal equations of a step: (tokens, n, n), the gradient and the lengths of columns, (tokens, n)."""
        xp = self.space.xp
        tokens, groups, heads = self.logits.shape
        inner, count = self.values.shape[2], groups * heads
        blocks = xp.matrix_transpose(slopes) @ slopes  # (tokens, G, heads, heads)
        basis = xp.reshape(self.basis[:, :-1, :], (tokens, groups, -1, heads))
        shared = xp.matrix_transpose(basis) @ xp.reshape(slopes, (tokens, groups, basis.shape[2], inner * heads))
        shared = xp.permute_dims(xp.reshape(shared, (tokens, groups, heads * inner, heads)), (0, 2, 1, 3))
        shared = xp.reshape(shared, (tokens, heads * inner, count))
        matrix = -(xp.matrix_transpose(shared) @ shared)
        view = xp.reshape(matrix, (tokens, groups, heads, groups, heads))
        for group in range(groups):
            view[:, group, :, group, :] += blocks[:, group, :, :]
        matrix = xp.reshape(view, (tokens, count, count))
        rest = xp.reshape(self.rest[:, :-1, :], (tokens, groups, -1, 1))
        gradient = xp.reshape(xp.matrix_transpose(slopes) @ rest, (tokens, count))
        lengths = xp.sqrt(xp.clip(xp.linalg.diagonal(matrix), 0.0, None))
        longest = xp.max(lengths, axis=1, keepdims=True)
        return matrix, gradient, xp.maximum(lengths, SHORTEST_COLUMN * longest) + 1e-300


def fit_tokens(space: Space, asked: TokensData, logits: Array, enough: float) -> TokensFit:
    """Damped Gauss-Newton over the logits (tokens, G, heads) of all tokens.

    A fit ends where its residuals are `enough`, root mean square, and do not fall much any more, or do not fall at all.
    """
    xp = space.xp
    tokens, groups, many, outputs = asked.answers.shape
    heads, count = logits.shape[2], groups * many
    frame = _frames(space, asked)
    own, total = asked.answers @ frame[:, None], (asked.total[:, None] @ frame)[:, 0]
    # What no values of so many heads explain.
    hidden = xp.sum((asked.answers - own @ xp.matrix_transpose(frame)[:, None]) ** 2, axis=(1, 2, 3))
    inner = replace(asked, answers=own, total=total)
    known = asked.known @ frame  # (tokens, heads, q)
    state = _State(space, inner, known, logits)
    damping, tries = space.full((tokens,), DAMPING), space.zeros(tokens)
    done = enough**2 * count * outputs
    active = xp.isfinite(state.error)
    eye = space.eye(groups * heads)
    slopes = state.slopes
    matrix, gradient, scale = state.normal(slopes)
    for _ in range(MOST_STEPS + MOST_TRIES):
        scaled = matrix / (scale[:, :, None] * scale[:, None, :]) + damping[:, None, None] * eye
        step = xp.linalg.solve(scaled, (gradient / scale)[:, :, None])[:, :, 0] / scale
        step = step * xp.clip(LONGEST_STEP / (xp.max(xp.abs(step), axis=1, keepdims=True) + 1e-300), None, 1.0)
        step = xp.where(active[:, None] & xp.isfinite(step), step, xp.zeros_like(step))
        new = _State(space, inner, known, state.logits + xp.reshape(step, state.logits.shape))
        better = active & (new.error < state.error)
        part = xp.where(new.error <= done, xp.full_like(damping, GOOD_ENOUGH), xp.full_like(damping, STALLED))
        finished = better & (new.error > part * state.error)
        tries = xp.where(better, xp.zeros_like(tries), tries + 1)
        most = xp.where(state.error <= done, xp.full_like(damping, 2.0), xp.full_like(damping, float(MOST_TRIES)))
        damping = xp.where(better, xp.clip(damping / 20, LEAST_DAMPING, None), damping * 10)
        taken = xp.where(better[:, None, None], new.logits, state.logits)
        active = active & ~finished & (tries < most)
        state = _State(space, inner, known, taken)
        if not bool(xp.any(active)):
            break
        slopes = state.slopes
        matrix, gradient, scale = state.normal(slopes)
    slopes = state.slopes
    matrix, gradient, scale = state.normal(slopes)
    freedom = (count + 1 - heads) * outputs - groups * heads
    scaled = matrix / (scale[:, :, None] * scale[:, None, :]) + LEAST_DAMPING * eye
    return TokensFit(
        values=state.values @ xp.matrix_transpose(frame),
        logits=state.logits,
        residual=np.sqrt(floats(state.error + hidden) / max(freedom, 1)),
        freedom=freedom,
        condition=np.linalg.norm(floats(state.back), 2, axis=(1, 2)),
        weights=state.weights,
        others=state.others,
        frame=frame,
        _state=state,
        _normal=scaled,
        _scale=scale,
    )


def _frames(space: Space, asked: TokensData) -> Array:  # (tokens, outputs, q)
    """Directions of all values, at most 2·heads + 1 of them: answers have nothing but errors elsewhere."""
    xp = space.xp
    tokens, outputs = asked.total.shape
    heads = asked.known.shape[0]
    known = xp.broadcast_to(asked.known, (tokens, heads, outputs))
    rows = xp.concat([xp.reshape(asked.answers, (tokens, -1, outputs)), known, asked.total[:, None, :]], axis=1)
    basis, triangle = xp.linalg.qr(xp.matrix_transpose(rows))
    turn = np.linalg.svd(floats(triangle), full_matrices=False)[0][:, :, : 2 * heads + 1]
    return basis @ space.asarray(turn)


def guess_tokens(space: Space, asked: TokensData) -> Array | None:  # (tokens, G, heads)
    """First guesses of logits in all heads, by linear algebra alone, as `guess_logits` makes them token by token."""
    xp = space.xp
    tokens, groups, many, outputs = asked.answers.shape
    heads, count = asked.known.shape[0], groups * many
    if outputs < 2 * heads or count + 2 < 2 * heads or not bool(xp.any(asked.odds > 0)):
        return None
    frame = _frames(space, asked)
    known = asked.known @ frame
    answers = xp.concat([xp.reshape(asked.answers, (tokens, count, outputs)), asked.total[:, None, :]], axis=1) @ frame
    inverse = space.asarray(np.linalg.pinv(floats(known)))
    along = answers @ inverse  # ξ, (tokens, J + 1, heads)
    outside = answers - along @ known
    turn = space.asarray(np.linalg.svd(floats(outside), full_matrices=False)[2][:, :heads, :])
    coordinates = outside @ xp.matrix_transpose(turn)
    sizes = xp.sqrt(xp.mean(coordinates**2, axis=1, keepdims=True))
    coordinates = coordinates / xp.clip(sizes, 1e-300, None)  # ζ
    own, sums = coordinates[:, :-1, :], coordinates[:, -1, :]
    odds = xp.reshape(asked.odds, (count, heads))
    share = (odds / (1 + odds)).T  # (heads, J)
    halves = own[:, None, :, :] * share[:, :, None], xp.broadcast_to(own[:, None, :, :], (tokens, heads, count, heads))
    nothing = xp.zeros_like(sums)
    ends = xp.stack([xp.concat([sums, nothing], axis=1), xp.concat([nothing, sums], axis=1)], axis=1)
    ends = xp.broadcast_to(ends[:, None, :, :], (tokens, heads, 2, 2 * heads))
    system = xp.concat([xp.concat(halves, axis=3), ends], axis=2)  # (tokens, heads, J + 2, 2·heads)
    plain = share[None, :, :] - xp.matrix_transpose(along[:, :-1, :])
    last = xp.stack([xp.ones_like(along[:, -1, :]), -along[:, -1, :]], axis=2)
    right = xp.concat([plain, last], axis=2)[..., None]
    solved = _least_squares(space, system, right)
    new = xp.clip((own[:, None, :, :] @ solved[:, :, :heads, :])[..., 0], LEAST, 1 - LEAST)  # (tokens, heads, J)
    rest = (1 - new) / (1 + odds.T)[None, :, :]  # of the last token
    logits = xp.log(new / rest / xp.reshape(asked.copies, (-1,)))
    return xp.mean(xp.reshape(xp.matrix_transpose(logits), (tokens, groups, many, heads)), axis=2)


def _least_squares(space: Space, system: Array, right: Array) -> Array:
    """Solutions of many small least squares, from normal equations that are refined."""
    xp = space.xp
    turned = xp.matrix_transpose(system)
    scale = xp.sqrt(xp.sum(system**2, axis=2))[..., None] + 1e-300  # (…, n, 1)
    normal = (turned @ system) / (scale * xp.matrix_transpose(scale)) + RIDGE * space.eye(system.shape[3])
    inverse = xp.linalg.inv(normal)
    solved = 0 * (turned @ right)
    for _ in range(1 + REFINED):
        solved = solved + (inverse @ ((turned @ (right - system @ solved)) / scale)) / scale
    return solved
