"""Strips between near parallel kinks of neurons that cancel outside: the rounding of what cancels tells where they are.

Neurons w·(z + a)⁺ − 2w·z⁺ + w·(z − a)⁺ add up to nothing but where |z| < a. On the one side all are off. On the other
each is as large as w·z, and so is the rounding of their sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.families.relu_net import ReluNet
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.relu_net.exact.estimate import ANOTHER_FUNCTION
from keyhole.methods.relu_net.exact.queries import Pieces, TokenQueries
from keyhole.queries import Signature
from keyhole.recovery import Outcome

# Rounding at a place is what answers to so many tokens around it depart from an affine map, over steps of this part of
# its norm: so short that a kink is between them once in 10⁷ nets of a hundred neurons.
AROUND, STEP = 9, 1e-9
# It is looked at so far out, in units of the typical distance of a kink: there all that cancels is large on one side.
FAR, OUTERMOST = 30.0, 0.99
# Rounding in units of that of the terms that were read, each rounded once: of 260 nets without strips the largest was
# 5.7. On a line where it is more at one end, a strip begins where it is so many times what is usual on the other.
ROUGH, RISE = 6.0, 3.0
# That is sought among so many places, and between two of them by halving so often, with so many looks at each.
PLACES, HALVINGS, LOOKS = 16, 12, 3
# The strip is nearer to the smooth end by what rounding grows along the line, up to this factor; so many tokens there
# meet one that is as high as answers are, and most of a tenth of that.
UNSURE, ACROSS = 3.0, 512

HIDDEN = "neurons that cancel but in a strip"


@dataclass(frozen=True)
class Strip:
    """A token at which a strip shows, and how far from it other tokens were asked."""

    token: Floats  # (width,)
    apart: float


def ask_strip(queries: TokenQueries, pieces: Pieces, scale: float, rng: np.random.Generator) -> Steps[Strip | None]:
    """A strip that these pieces lack: 18 queries where rounding shows none, some 1,000 more to find one.

    Unrecoverable where answers err by more than the rounding of the pieces can explain, and no strip is met.
    """
    line = _Line(queries, pieces, scale, rng)
    rough, beyond = yield from line.ask_rounding(np.array([-1.0, 1.0]))
    found = (yield from line.ask_where()) if np.any(rough > ROUGH) else None
    if found is None and np.any(beyond > 1.0):
        raise Unrecoverable(
            Outcome.TOO_NOISY,
            f"answers err by {np.max(beyond):.2g} times what rounding explains in the net that was read: {HIDDEN} may "
            "hide in it; use an oracle of higher precision",
        )
    return found


def check_strips(signature: Signature, net: ReluNet, rng: np.random.Generator) -> Steps[None]:
    """Unrecoverable where answers err on one side of a strip only: that is no noise.

    18 queries where they err everywhere, or nowhere.
    """
    inner, bias = floats(net.weights_in), floats(net.bias_in)
    lengths = np.linalg.norm(inner, axis=1)
    lengths = np.where(lengths > 0, lengths, 1.0)
    outer, constant = np.atleast_2d(floats(net.weights_out)), np.atleast_1d(floats(net.bias_out))
    skip = np.zeros((len(outer), inner.shape[1])) if net.skip is None else np.atleast_2d(floats(net.skip))
    affine = np.column_stack([skip, constant])
    pieces = Pieces(inner / lengths[:, None], bias / lengths, (outer * lengths).T, affine)
    norm = net.token_norm(1.0)
    scale = (norm if 0 < norm < np.inf else 1.0) / net.width**0.5
    line = _Line(TokenQueries(signature), pieces, scale, rng)
    rough, _ = yield from line.ask_rounding(np.array([-1.0, 1.0]))
    if np.any(rough > ROUGH) and np.any(rough <= ROUGH) and (yield from line.ask_where()) is not None:
        raise Unrecoverable(
            Outcome.TOO_NOISY,
            f"answers err on one side of a strip only, where the net bends: {HIDDEN} are no noise, and too close to "
            "each other to be read; use an oracle of higher precision",
        )


class _Line:
    """A line through the origin, its places from −1 to 1 spread like arsinh of the distance."""

    def __init__(self, queries: TokenQueries, pieces: Pieces, scale: float, rng: np.random.Generator) -> None:
        self.queries, self.pieces, self.rng = queries, pieces, rng
        self.direction, self.step = (x / np.linalg.norm(x) for x in rng.standard_normal((2, queries.width)))
        self.limit = OUTERMOST * queries.signature.norm_limit
        self.unit = min(scale * queries.width**0.5, self.limit)
        self.last = min(FAR * self.unit, self.limit)

    def at(self, places: Floats) -> Floats:  # (n,) -> (n,)
        """How far out places are."""
        return np.asarray(self.unit * np.sinh(places * np.arcsinh(self.last / self.unit)))

    def ask_rounding(self, places: Floats) -> Steps[tuple[Floats, Floats]]:  # (n,) -> (n,), (n,)
        """Rounding over that of the terms that were read, and its spread over the largest that they explain."""
        away = self.at(places)
        steps = self.rng.permuted(np.tile(np.arange(float(AROUND)), (places.size, 1)), axis=1)
        steps += self.rng.uniform(-0.25, 0.25, steps.shape)
        sizes = STEP * np.maximum(np.abs(away), self.unit)[:, None] * steps
        x = away[:, None, None] * self.direction + sizes[..., None] * self.step
        answers = yield from self.queries.ask("checks", x.reshape(-1, self.queries.width))
        left = np.empty((places.size, AROUND, answers.shape[1]))
        for n, values in enumerate(answers.reshape(left.shape)):
            base = np.column_stack([np.ones(AROUND), steps[n]])
            left[n] = values - base @ np.linalg.lstsq(base, values, rcond=None)[0]
        errors = np.sqrt(np.sum(left**2, axis=1) / (AROUND - 2))
        explained = self.queries.noise + self.queries.rounding * self.pieces.size(np.abs(away))[:, None]
        return np.max(errors / self._rounding(away), axis=1), np.max(np.ptp(left, axis=1) / explained, axis=1)

    def _rounding(self, away: Floats) -> Floats:  # (n,) -> (n, outputs)
        """Standard deviation of answers so far out, if all terms are rounded once."""
        pieces, share = self.pieces, away[:, None] ** 2 / self.queries.width
        slopes = np.sum(pieces.weight**2, axis=0) + np.sum(pieces.affine[:, :-1] ** 2, axis=1)
        levels = pieces.offset**2 @ pieces.weight**2 + pieces.affine[:, -1] ** 2
        return np.asarray(self.queries.signature.space.eps * np.sqrt(slopes * share + levels) + np.finfo(float).tiny)

    def ask_where(self) -> Steps[Strip | None]:
        """Where the line gets rough, from either end, and what is there."""
        places = np.linspace(-1.0, 1.0, PLACES)
        rough, _ = yield from self.ask_rounding(places)
        smooth = rough[rough <= ROUGH]
        most = min(max(RISE * float(np.median(smooth)), 1.0), ROUGH) if smooth.size else ROUGH
        for order in (np.arange(PLACES), np.arange(PLACES)[::-1]):
            (inside,) = np.nonzero(rough[order] <= most)
            if rough[order[0]] > ROUGH and inside.size:
                first = inside[0]
                begin = float(places[order[first - 1]]), float(places[order[first]]), float(rough[order[first - 1]])
                hard, easy, level = yield from self._ask_edge(*begin, most)
                strip = yield from self._ask_across(hard, easy, level, float(rough[order[0]]))
                if strip is not None:
                    return strip
        return None

    def _ask_edge(self, hard: float, easy: float, level: float, most: float) -> Steps[tuple[float, float, float]]:
        """Two near places, rougher than `most` and not, and how rough the first is."""
        for _ in range(HALVINGS):
            middle = 0.5 * (easy + hard)
            rough = float(np.mean((yield from self.ask_rounding(np.full(LOOKS, middle)))[0]))
            hard, easy, level = (middle, easy, rough) if rough > most else (hard, middle, level)
        return hard, easy, level

    def _ask_across(self, hard: float, easy: float, level: float, at_end: float) -> Steps[Strip | None]:
        """Tokens about where the line gets rough."""
        towards = np.sign(hard - easy)
        near, begin, far = self.at(np.array([easy, hard, towards]))
        # Rounding grows like the distance from the strip.
        here, there = self._rounding(np.array([begin, far]))
        growth = float(np.max(level * here / np.maximum(at_end * there, np.finfo(float).tiny)))
        back = max(UNSURE * min(growth, 1.0) * abs(far - begin), abs(begin - near))
        first, last = np.clip([begin - towards * back, begin + towards * back / 2], -self.limit, self.limit)
        t = np.linspace(first, last, ACROSS)
        x = t[:, None] * self.direction
        answers = yield from self.queries.ask("checks", x)
        size = np.max(np.abs(answers), axis=0) + np.finfo(float).tiny
        off = np.max(np.abs(answers - self.pieces(x)) / size, axis=1)
        worst = int(np.argmax(off))
        return Strip(x[worst], abs(t[1] - t[0])) if off[worst] > ANOTHER_FUNCTION else None
