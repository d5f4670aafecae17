"""Norms of rows and last tokens at which gates neither saturate nor lie flat, and a last token that shows heads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from keyhole.arrays import Floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.gated_sum.search import LOUDEST
from keyhole.methods.multi_head.gated.queries import TokenPairs
from keyhole.recovery import Outcome

# Last tokens and rows of each that show what attention does.
LASTS, ROWS = 3, 2
# Logits are aimed at this root mean square.
LOGIT = 2.0
# Smaller ones are not told from each other by how they grow.
LEAST_LOGIT = 0.05
# Norms go up and down by this factor; by that one where nothing shows; so often at most.
STEP, LEAP, MOST_STEPS = 2.0, 2.0**8, 40
# A norm twice as large makes this much of a difference at most where gates are saturated.
SATURATED = 1.25
# Where norms are bounded, both tokens have this part of the largest: the product of the two is largest there.
BOTH = 0.7
# Score biases beside which scores do less than this part hide how that grows with the norm, but where norms are bounded
# at about this part of what was found. Rows are then so long that logits of biases are about this.
HIDING, BOUND, BIAS_LOGIT = 0.3, 0.9, 1.0
# Rows of this part of the norm may be added and taken off.
SHORT = 0.4
# Errors of answers are averaged out by rows so many times longer, and last tokens as much shorter.
LONGER = 2.0**10
# What attention does shows where it is so many times the errors of answers.
SHOWS = 32.0

NO_SUM = "adding a row to the first of two tokens and taking it off are not answered as by a sum of softmax heads"
NO_EFFECT = "attention makes no difference to the answers at tokens of any norm that may be asked"


@dataclass(frozen=True)
class Norms:
    """Where to ask."""

    row: float  # norm of u
    last: float  # norm of g
    direction: Floats  # (width,) of the last token that heads respond to most
    logit: float  # about the root mean square of logits
    has_bias: bool  # whether rows beside a last token of zero do not weigh as much as that


@dataclass(frozen=True)
class _Way:
    """What is made longer, and how answers to that grow."""

    copies: int = 1  # of the first token
    power: float = 2.0  # of the norm, that logits grow with
    flat: float = 3.8  # twice the norm makes so much of a difference where logits are too small to show their size
    row: float | None = None  # the norm of rows, where that stays the same
    lasts: bool = True  # False: last tokens of zero
    logit: float = LOGIT  # aimed at


# One head of many is odd in its logit; of two heads (W, v) and (−W, v) only the even part shows, and of uneven copies.
BOTH_LONGER, EVEN, ROWS_LONGER = (
    _Way(),
    _Way(copies=2, flat=14.0),
    _Way(power=1.0, flat=1.9, lasts=False, logit=BIAS_LOGIT),
)


def ask_norms(pairs: TokenPairs) -> Steps[Norms]:
    """Norms and a last token, from six queries a norm; whether it is a sum of heads from six, score biases from two."""
    probes = _Probes(pairs)
    way = BOTH_LONGER
    found = yield from probes.ask_scale(way)
    if found is None:
        way = EVEN
        found = yield from probes.ask_scale(way)
    if found is None:
        outcome = Outcome.TOO_NOISY if pairs.noise > 0 else Outcome.NOT_IDENTIFIABLE
        raise Unrecoverable(outcome, NO_EFFECT)
    norm, logit = found
    yield from probes.ask_swap(norm)
    row, last = norm, norm
    limit = pairs.signature.norm_limit
    if pairs.noise > 0:
        row = min(LONGER * norm, max(norm, (limit**2 - norm**2) ** 0.5 if np.isfinite(limit) else np.inf))
        last = norm**2 / row
    biased = yield from probes.ask_bias(row)
    if biased and row > norm:
        row, last = norm, norm
        biased = yield from probes.ask_bias(row)
    if biased and way is BOTH_LONGER and norm < BOUND * BOTH * limit and (yield from probes.ask_whether_hidden(norm)):
        beside = yield from probes.ask_scale_beside_bias()
        row, last, logit = beside or (row, last, logit)
    return Norms(row, last, probes.loudest(last), logit, biased)


class _Probes:
    """Queries [g + u; g] of a few rows and last tokens."""

    def __init__(self, pairs: TokenPairs) -> None:
        self.pairs = pairs
        width, rng = pairs.signature.width, pairs.rng
        draws = rng.standard_normal((LASTS * (1 + ROWS), width))
        draws /= np.linalg.norm(draws, axis=1, keepdims=True)
        self.lasts = np.repeat(draws[:LASTS], ROWS, axis=0)
        self.rows = draws[LASTS:]
        # Tokens g + u of opposite sides are shorter.
        self.rows *= -np.where(np.sum(self.rows * self.lasts, axis=1, keepdims=True) > 0, 1.0, -1.0)
        self.effects = dict[float, Floats]()  # by norm: what attention does, over the norm of rows

    def ask(self, way: _Way, norm: float) -> Steps[float]:
        """Root mean square of what attention does at a norm, over that of rows; 0 where errors may be all there is."""
        if norm not in self.effects:
            rows = (way.row or norm) * (self.rows if way.lasts else self.rows[:ROWS])
            lasts = norm * self.lasts if way.lasts else np.zeros_like(rows)
            effects = yield from self._ask_effects(lasts, rows, way.copies)
            if way.row is not None:  # what biases do alone is the same to [g + u; g] and less [−g − u; −g]
                effects = (effects - (yield from self._ask_effects(-lasts, -rows, way.copies))) / 2
            self.effects[norm] = effects
        return float(np.sqrt(np.mean(self.effects[norm] ** 2)))

    def _ask_effects(self, lasts: Floats, rows: Floats, copies: int = 1) -> Steps[Floats]:  # -> (n, outputs)
        pairs = self.pairs
        kind = np.flatnonzero(np.all(pairs.copies == (copies, 1), axis=1))
        raw = yield from pairs.ask("scale", lasts, rows, np.repeat(kind, len(rows)))
        effects = pairs.bare(raw).answers - raw.rows @ pairs.linear * (copies / (copies + 1))
        sizes = np.linalg.norm(lasts, axis=1) + np.linalg.norm(rows, axis=1)
        own = sizes[:, None] * np.linalg.norm(pairs.linear, axis=0) + np.abs(raw.answers)
        errors = SHOWS * np.hypot(pairs.noise, pairs.signature.space.eps * own)
        clear = np.where(np.abs(effects) > errors, effects, 0.0)
        return np.asarray(clear / np.linalg.norm(rows, axis=1)[:, None])

    def ask_swap(self, norm: float) -> Steps[None]:
        """End where [g + u; g] does not answer u·v̄ more than [g − u; g], as it does for every sum of softmax heads."""
        pairs = self.pairs
        lasts, rows = norm * self.lasts[::ROWS], SHORT * norm * self.rows[::ROWS]
        both = np.concatenate([rows, -rows])
        raw = yield from pairs.ask("family", np.concatenate([lasts, lasts]), both, np.zeros(len(both), dtype=np.int64))
        bare = pairs.bare(raw).answers
        off = np.abs(bare[: len(rows)] - bare[len(rows) :] - (raw.rows[: len(rows)] @ pairs.linear))
        rounding = pairs.rounding * LOUDEST * raw.size  # values that cancel in their sum may be much louder than it
        allowed = SHOWS * np.hypot(pairs.noise, pairs.floor(raw) + rounding)
        if np.max(off) > allowed:
            raise Unrecoverable(
                Outcome.WRONG_FAMILY, f"{NO_SUM}, off by {np.max(off):.2g} where {allowed:.2g} is allowed"
            )

    def ask_bias(self, row: float) -> Steps[bool]:
        """Whether a row is not weighed as a token of zero beside it is."""
        rows = row * self.rows[:ROWS]
        effects = yield from self._ask_effects(np.zeros_like(rows), rows)
        return bool(np.any(effects != 0))

    def loudest(self, norm: float) -> Floats:  # (width,)
        """The last token, of unit length, that heads respond to most."""
        effects = self.effects[self._near(norm)]
        if len(effects) < len(self.lasts):  # it was asked at last tokens of zero: none responds more than another
            return np.asarray(self.lasts[0])
        return np.asarray(self.lasts[ROWS * int(np.argmax(np.linalg.norm(effects.reshape(LASTS, -1), axis=1)))])

    def ask_whether_hidden(self, norm: float) -> Steps[bool]:
        """Whether scores do so much less than score biases at a norm that it was chosen for these."""
        near = self._near(norm)
        there = self.effects[near]
        back = yield from self._ask_effects(-near * self.lasts, -near * self.rows)
        return float(np.linalg.norm(there - back)) < HIDING * float(np.linalg.norm(there + back))

    def _near(self, norm: float) -> float:
        """The norm nearest to this one that was asked at."""
        return min(self.effects, key=lambda each: abs(np.log(each / norm)))

    def ask_scale_beside_bias(self) -> Steps[tuple[float, float, float] | None]:
        """The norms of rows and last tokens, and logits, where score biases hide them.

        Rows from two queries a norm, last tokens from twelve.
        """
        rows = yield from self.ask_scale(ROWS_LONGER)
        if rows is None:
            return None
        row, of_bias = rows
        lasts = yield from self.ask_scale(_Way(power=1.0, flat=1.9, row=row))
        return None if lasts is None else (row, lasts[0], float(np.hypot(of_bias, lasts[1])))

    def ask_scale(self, way: _Way) -> Steps[tuple[float, float] | None]:
        """A norm at which logits are as aimed at, or as large as they may be, and these; None where nothing shows."""
        limit = self.pairs.signature.norm_limit
        limit = BOTH * limit if way.row is None else max(limit**2 - way.row**2, 0.0) ** 0.5
        self.effects = {}
        norm = min(limit, 1.0)
        if np.isfinite(limit) and (yield from self.ask(way, limit)) > 0:
            norm = limit
        for _ in range(MOST_STEPS):
            here = yield from self.ask(way, norm)
            shorter = (yield from self.ask(way, norm / 2)) if here > 0 else 0.0
            if shorter > 0 and here <= SATURATED * shorter:
                norm /= STEP
            elif here > 0 and (here <= way.flat * shorter or norm >= limit):
                logit = _logit_of(here / shorter, way) if shorter > 0 else LEAST_LOGIT
                longer = float(min((way.logit / logit) ** (1 / way.power), limit / norm))
                return longer * norm, longer**way.power * logit
            elif norm >= limit:
                break
            else:
                norm = min(norm * (STEP if here > 0 else LEAP), limit)
        return None


def _logit_of(growth: float, way: _Way) -> float:
    """The root mean square of normal logits whose gates do so much more than those of logits at half the norm."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    logits = np.geomspace(LEAST_LOGIT, 64.0, 200)

    def effect(sizes: Floats) -> Floats:
        own = sizes[:, None] * nodes
        one, other, none = (_gate(each, way.copies) for each in (own, -own, 0.0))
        return np.asarray(np.sqrt((one - none if way.copies == 1 else one + other - 2 * none) ** 2 @ weights))

    return float(np.interp(-growth, -effect(logits) / effect(logits / 2**way.power), logits))


def _gate(logit: Floats | float, copies: int) -> Floats:
    """The weight of all copies of a token together beside one of another."""
    return np.asarray(expit(logit + np.log(copies)))
