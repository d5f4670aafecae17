"""The values and logits of one token in all heads at once, from answers in which it stands beside a known one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Floats, Integers
from keyhole.numerics.svd import least_squares, pseudo_inverse, spectral_norm, svd

# A step moves no logit by more than this: weights are linear in it no further.
LONGEST_STEP = 1.5
MOST_STEPS = 60
DAMPING = 1e-6
# Least squares of more unknowns than this are solved by normal equations.
MOST_COLUMNS = 1200
# How often a step is shortened until it is one down: less where nothing is left to gain.
MOST_TRIES, FEWEST_TRIES = 16, 2
# Logits beyond this have weights that no answer shows.
LARGEST_LOGIT = 60.0
# Weights are kept this far from 0 and 1 before their logits are taken.
LEAST = 1e-12


@dataclass(frozen=True)
class TokenData:
    """What a token was asked beside: J answers in n groups of one last token each."""

    answers: Floats  # (J, outputs), without the share of the last token
    group: Integers  # (J,)
    odds: Floats  # (J, heads) of the known token against the last one, copies included; zero where it is absent
    copies: Floats  # (J,) of the new token for one of the last
    known: Floats  # (heads, outputs) values of the known token
    total: Floats  # (outputs,) the sum of the new token's values over heads


@dataclass(frozen=True)
class TokenFit:
    """The fit of least squares."""

    values: Floats  # (heads, outputs)
    logits: Floats  # (n, heads)
    residual: float  # root mean square per degree of freedom
    freedom: int  # degrees of freedom that it was told by
    state: TokenState
    _slopes: Floats
    _frame: Floats

    def respond(self, changes: Floats) -> tuple[Floats, Floats]:  # (draws, J + 1, outputs)
        """How logits (draws, n, heads) and values (draws, heads, outputs) follow small changes of answers and total."""
        state, heads = self.state, self.values.shape[0]
        slim = changes @ self._frame
        clear = slim - state.basis @ (state.basis.T @ slim)
        scale = np.linalg.norm(self._slopes, axis=0) + 1e-300
        basis, triangle = np.linalg.qr(self._slopes / scale)
        floor = 1e-14 * float(np.max(np.abs(np.diag(triangle))))  # directions that nothing tells stay finite
        triangle = triangle + np.diag(np.where(np.abs(np.diag(triangle)) < floor, floor, 0.0))
        logits = np.linalg.solve(triangle, basis.T @ clear.reshape(changes.shape[0], -1).T).T / scale
        logits = logits.reshape(changes.shape[0], -1, heads)
        moved = np.einsum("jho,rjh->rjo", state.own(), logits[:, state.asked.group])
        rest = slim.copy()
        rest[:, :-1] -= moved
        values = least_squares(state.triangle, state.basis.T) @ rest
        return logits, values @ self._frame.T


def fit_token(asked: TokenData, logits: Floats, enough: float) -> TokenFit:
    """Gauss-Newton with damping over the logits (n, heads); values are linear and eliminated (variable projection).

    Ends where residuals are `enough`, root mean square, and do not fall much any more, or do not fall at all.
    """
    outputs, (groups, heads) = asked.answers.shape[1], logits.shape
    # The directions of all values, (outputs, at most 2·heads + 1): answers have nothing but errors elsewhere.
    rows = np.vstack([asked.answers, asked.known, asked.total[None, :]])
    frame = np.asarray(svd(rows)[2][: 2 * heads + 1].T)
    slim = replace(asked, answers=asked.answers @ frame, known=asked.known @ frame, total=asked.total @ frame)
    state, damping = TokenState(slim, logits), DAMPING
    done = enough**2 * asked.answers.size
    for _ in range(MOST_STEPS):
        slopes = state.slopes(groups)
        scale = np.linalg.norm(slopes, axis=0)
        scale = np.maximum(scale, 0.03 * np.max(scale)) + 1e-300
        for _ in range(FEWEST_TRIES if state.error <= done else MOST_TRIES):
            step = _step(slopes / scale, state.rest.ravel(), damping) / scale
            step = step.reshape(groups, heads)
            step *= min(1.0, LONGEST_STEP / max(float(np.max(np.abs(step))), 1e-300))
            new = TokenState(slim, logits + step)
            if new.error < state.error:
                break
            damping *= 10
        else:
            break
        finished = new.error > (0.95 if new.error <= done else 0.999) * state.error
        logits, state, damping = logits + step, new, max(damping / 20, 1e-15)
        if finished:
            break
    freedom = (asked.answers.shape[0] + 1 - heads) * outputs - logits.size
    hidden = float(np.sum((asked.answers - slim.answers @ frame.T) ** 2))  # what no values of so many heads explain
    residual = float(np.sqrt((state.error + hidden) / max(freedom, 1)))
    return TokenFit(state.values @ frame.T, logits, residual, freedom, state, state.slopes(groups), frame)


def _step(slopes: Floats, rest: Floats, damping: float) -> Floats:
    """The step of least squares, damped; by normal equations where that is all one can afford."""
    if slopes.shape[1] > MOST_COLUMNS:
        return np.asarray(np.linalg.solve(slopes.T @ slopes + damping * np.eye(slopes.shape[1]), slopes.T @ rest))
    rows = np.vstack([slopes, damping**0.5 * np.eye(slopes.shape[1])])
    basis, triangle = np.linalg.qr(rows)
    return np.asarray(np.linalg.solve(triangle, basis[: rest.size].T @ rest))


class TokenState:
    """Weights of the new token and of the known one, (J, heads) each, values and residuals at some logits."""

    def __init__(self, asked: TokenData, logits: Floats) -> None:
        self.asked = asked
        new = np.exp(np.clip(logits[asked.group], -LARGEST_LOGIT, LARGEST_LOGIT)) * asked.copies[:, None]
        whole = 1 + asked.odds + new
        self.weights, self.others = new / whole, asked.odds / whole
        design = np.vstack([self.weights, np.ones((1, logits.shape[1]))])
        target = np.vstack([asked.answers - self.others @ asked.known, asked.total[None, :]])
        self.basis, self.triangle = np.linalg.qr(design)
        self.condition = spectral_norm(pseudo_inverse(self.triangle))
        self.values = least_squares(self.triangle, self.basis.T @ target)
        self.rest = target - design @ self.values
        self.error = float(np.sum(self.rest**2))

    def own(self) -> Floats:  # (J, heads, outputs)
        """How each answer responds to the new token's logits."""
        own: Floats = (self.weights * (1 - self.weights))[:, :, None] * self.values
        return own - (self.weights * self.others)[:, :, None] * self.asked.known

    def slopes(self, groups: int) -> Floats:  # ((J + 1)·outputs, groups·heads)
        """How answers respond to logits, less what values can follow."""
        heads, outputs = self.values.shape
        own = self.own()
        whole = np.zeros((self.basis.shape[0], outputs, groups, heads))
        place = np.arange(self.weights.shape[0])
        whole[place, :, self.asked.group, :] = own.transpose(0, 2, 1)
        flat = whole.reshape(self.basis.shape[0], -1)
        flat -= self.basis @ (self.basis.T @ flat)
        return flat.reshape(-1, groups * heads)


def guess_logits(asked: TokenData, groups: int) -> Floats | None:  # (groups, heads)
    """A first guess of a token's logits in all heads, by linear algebra alone; None where answers are too few for it.

    Beside a known token of odds o the weights of the known and of the new one obey y = 1 − (1 + 1/o)·x. Both are linear
    in the answer: x = ξ + f·ζ and y = k·ζ, where ξ are its coordinates along the known values and ζ is what lies
    outside them. So every answer is one linear equation for (f, k) of each head, and the sum of the new token's values
    over heads is two. That takes twice as many outputs as heads.
    """
    heads, outputs = asked.known.shape
    count = asked.answers.shape[0]
    if outputs < 2 * heads or count + 2 < 2 * heads or not np.any(asked.odds > 0):
        return None
    inverse = pseudo_inverse(asked.known)  # (outputs, heads)
    answers = np.vstack([asked.answers, asked.total[None, :]])
    along = answers @ inverse  # ξ
    outside = answers - along @ asked.known
    turn = svd(outside)[2][:heads]
    coordinates = outside @ turn.T
    sizes = np.maximum(np.sqrt(np.mean(coordinates**2, axis=0)), 1e-300)
    coordinates = coordinates / sizes  # ζ
    own, sums, share = coordinates[:-1], coordinates[-1], asked.odds / (1 + asked.odds)
    logits = np.zeros((count, heads))
    for head in range(heads):
        # Times o/(1 + o), so that no equation drowns the others, and where the known token is absent x is zero.
        system = np.hstack([own * share[:, head, None], own])
        ends = np.array([np.concatenate([sums, 0 * sums]), np.concatenate([0 * sums, sums])])
        right = np.concatenate([share[:, head] - along[:-1, head], [1.0, -along[-1, head]]])
        solved = least_squares(np.vstack([system, ends]), right)
        new = np.clip(own @ solved[:heads], LEAST, 1 - LEAST)
        rest = (1 - new) / (1 + asked.odds[:, head])  # of the last token
        logits[:, head] = np.log(new / rest / asked.copies)
    member = (np.arange(groups)[:, None] == asked.group).astype(float)
    return np.asarray((member @ logits) / np.sum(member, axis=1, keepdims=True))
