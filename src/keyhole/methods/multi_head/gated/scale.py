"""Norms of rows and last tokens at which gates neither saturate nor lie flat, and a last token that shows heads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.multi_head.gated.queries import TokenPairs
from keyhole.recovery import Outcome

# Last tokens and rows of each that show what attention does.
LASTS, ROWS = 3, 2
# Logits are aimed at this root mean square.
LOGIT = 2.0
# Smaller ones are not told from each other by how they grow.
LEAST_LOGIT = 0.05
# Norms go up and down by this factor, logits by its square; by that one where nothing shows; so often at most.
STEP, LEAP, MOST_STEPS = 2.0, 2.0**8, 40
# A norm twice as large makes this much of a difference at most where gates are saturated, and that much at least where
# logits are so small that their size does not show.
SATURATED, FLAT = 1.25, 3.8
# Where norms are bounded, both tokens have this part of the largest: the product of the two is largest there.
BOTH = 0.7
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


def ask_norms(pairs: TokenPairs) -> Steps[Norms]:
    """Norms and a last token, from six queries a norm; whether it is a sum of heads from six, score biases from two."""
    probes = _Probes(pairs)
    norm, logit = yield from probes.ask_scale()
    yield from probes.ask_swap(norm)
    nearest = min(probes.effects, key=lambda each: abs(np.log(each / norm)))
    loudest = np.argmax(np.linalg.norm(probes.effects[nearest].reshape(LASTS, -1), axis=1))
    direction = probes.lasts[ROWS * int(loudest)]
    row, last = norm, norm
    limit = pairs.signature.norm_limit
    if pairs.noise > 0:
        row = min(LONGER * norm, max(norm, (limit**2 - norm**2) ** 0.5 if np.isfinite(limit) else np.inf))
        last = norm**2 / row
    biased = yield from probes.ask_bias(row)
    if biased and row > norm:
        row, last = norm, norm
        biased = yield from probes.ask_bias(row)
    return Norms(row, last, direction, logit, biased)


class _Probes:
    """Queries [g + u; g] of rows and last tokens of one norm."""

    def __init__(self, pairs: TokenPairs) -> None:
        self.pairs = pairs
        width, rng = pairs.signature.width, pairs.rng
        draws = rng.standard_normal((LASTS * (1 + ROWS), width))
        draws /= np.linalg.norm(draws, axis=1, keepdims=True)
        self.lasts = np.repeat(draws[:LASTS], ROWS, axis=0)
        self.rows = draws[LASTS:]
        # Tokens g + u of opposite sides are shorter.
        self.rows *= -np.where(np.sum(self.rows * self.lasts, axis=1, keepdims=True) > 0, 1.0, -1.0)
        self.effects = dict[float, Floats]()  # by norm: what attention does, over the norm

    def ask(self, norm: float) -> Steps[float]:
        """Root mean square of what attention does at a norm, over that norm; 0 where errors may be all there is."""
        if norm not in self.effects:
            self.effects[norm] = yield from self._ask_effects(norm * self.lasts, norm * self.rows)
        return float(np.sqrt(np.mean(self.effects[norm] ** 2)))

    def _ask_effects(self, lasts: Floats, rows: Floats) -> Steps[Floats]:  # -> (n, outputs)
        pairs = self.pairs
        raw = yield from pairs.ask("scale", lasts, rows, np.zeros(len(rows), dtype=np.int64))
        effects = pairs.bare(raw).answers - raw.rows @ pairs.linear / 2
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
        allowed = SHOWS * np.hypot(pairs.noise, pairs.floor(raw))
        if np.max(off) > allowed:
            raise Unrecoverable(
                Outcome.WRONG_FAMILY, f"{NO_SUM}, off by {np.max(off):.2g} where {allowed:.2g} is allowed"
            )

    def ask_bias(self, row: float) -> Steps[bool]:
        """Whether a row is not weighed as a token of zero beside it is."""
        rows = row * self.rows[:ROWS]
        effects = yield from self._ask_effects(np.zeros_like(rows), rows)
        return bool(np.any(effects != 0))

    def ask_scale(self) -> Steps[tuple[float, float]]:
        """A norm of rows and last tokens at which logits are about `LOGIT`, or as large as they may be; and these."""
        limit = BOTH * self.pairs.signature.norm_limit
        norm = min(limit, 1.0)
        if np.isfinite(limit) and (yield from self.ask(limit)) > 0:
            norm = limit
        for _ in range(MOST_STEPS):
            here = yield from self.ask(norm)
            shorter = (yield from self.ask(norm / 2)) if here > 0 else 0.0
            if shorter > 0 and here <= SATURATED * shorter:
                norm /= STEP
            elif here > 0 and (here <= FLAT * shorter or norm >= limit):
                logit = _logit_of(here / shorter) if shorter > 0 else LEAST_LOGIT
                longer = float(min((LOGIT / logit) ** 0.5, limit / norm))
                return longer * norm, longer**2 * logit
            elif norm >= limit:
                break
            else:
                norm = min(norm * (STEP if here > 0 else LEAP), limit)
        outcome = Outcome.TOO_NOISY if self.pairs.noise > 0 else Outcome.NOT_IDENTIFIABLE
        raise Unrecoverable(outcome, NO_EFFECT)


def _logit_of(growth: float) -> float:
    """The root mean square of normal logits of which four times as small ones have gates that do so much less."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    logits = np.geomspace(LEAST_LOGIT, 64.0, 200)

    def effect(sizes: Floats) -> Floats:
        return np.asarray(np.sqrt(np.tanh(sizes[:, None] * nodes / 2) ** 2 @ weights))

    return float(np.interp(-growth, -effect(logits) / effect(logits / 4), logits))
