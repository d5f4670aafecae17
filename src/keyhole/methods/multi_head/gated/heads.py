"""Gates of all heads at one last token after the other, and values that all of them share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.token_doubles import DOUBLES, check_token_doubles
from keyhole.methods.gated_sum.joint import JointHeads, JointLinear, JointQueries
from keyhole.methods.gated_sum.known_values import fit_known_values
from keyhole.methods.gated_sum.model import GatedQueries, GatedSum
from keyhole.methods.gated_sum.search import GatedFit, fit_unknown
from keyhole.methods.multi_head.gated.orders import ask_orders
from keyhole.methods.multi_head.gated.queries import TokenPairs
from keyhole.methods.multi_head.gated.rows import ask_rows, draw_rows
from keyhole.methods.multi_head.gated.scale import Norms
from keyhole.numerics.orthogonal import random_orthogonal, split_along
from keyhole.recovery import Outcome

# At the first last token the number of heads is not known: queries for so many, and the numbers tried with these.
FIRST = ((2, (1, 2, 3)), (4, (3, 4, 5, 6)), (8, (5, 6, 8, 10, 12)))
# Gates and values of heads that are looked for at once, at most: what a search takes grows with its cube.
MOST_UNKNOWN = 640
# Searches before more is asked, of answers that are dear because they are read one by one.
SEARCHES = 4
# Queries over unknowns at the first last token and at the others, and some more; errors take more to average out.
FIRST_EXCESS, EXCESS, MORE, FIRST_MORE, NOISY = 2.2, 1.3, 4, 12, 3.2
# Other first last tokens where heads are not told apart beside one.
OTHERS = 1
# Further last tokens lie this far off the first, over its norm, tried in this order.
STEPS_ASIDE, STEPS_ASIDE_NOISY = (0.6, -0.6, 0.2, -0.2), (3.0, -3.0, 1.0, -1.0, 0.3)
# Rows that one on the far side of two last tokens is chosen from.
CHOICE = 16
# Random starts where gates do not follow from those of the first last token.
STARTS = 24
# Where values are known up to an error, residuals are so many times what they are in the end, and this part of answers,
# or at most that part.
LOOSE, LOOSE_PART, LOOSEST_PART = 30.0, 1e-9, 1e-6
# Values that are so nearly dependent tell no more weights, at so many random tokens.
DEPENDENT, SAMPLE = 0.03, 8
# Gates that respond to answers so many times more than those of the first last token are asked for elsewhere.
WORSE, WORSE_NOISY = 200.0, 8.0
# Heads of smaller logits may be there though none are found.
FAINT = 0.5
# Heads that leave less than this part of the answers are nearly right.
NEARLY = 1e-3

NOT_EXPLAINED = (
    "no {} softmax heads or fewer explain the answers to tokens of one norm: the box has more heads, some too near to "
    "each other or too quiet to be told apart, or it is no sum of softmax heads"
)


@dataclass(frozen=True)
class HeadGates:
    """Heads at as many last tokens as determine their scores."""

    points: Floats  # (groups, width), with a last column of ones where there are score biases
    queries: JointQueries  # raw
    heads: JointHeads


def ask_head_gates(pairs: TokenPairs, norms: Norms) -> Steps[HeadGates]:
    """Gates at d last tokens, d + 1 where there are score biases, and values that fit all of them."""
    norms, raw, fit = yield from _ask_first(pairs, norms)
    first = norms.last * norms.direction
    space, width = pairs.signature.space, pairs.signature.width
    basis = random_orthogonal(space, pairs.rng, width)
    aside = np.asarray(split_along(space, basis, space.asarray(norms.direction))[0], dtype=np.float64)
    follow = _Followers(pairs, norms, fit, _sensitivity(pairs.bare_of_one(raw), fit.heads))
    groups, gates, points = [raw], [fit.heads.gates], [first]
    for direction in aside:
        candidates = [
            _turned(norms, step * direction) for step in (STEPS_ASIDE_NOISY if pairs.noise > 0 else STEPS_ASIDE)
        ]
        if pairs.noise == 0 and pairs.reader is None:
            candidates = yield from _louder_first(pairs, norms, candidates)
        queries, found, last = yield from follow.ask(candidates, gates[0])
        groups, gates, points = [*groups, queries], [*gates, found], [*points, last]
    if norms.has_bias:
        queries, found, last = yield from follow.ask([-first, first / 2, -first / 2], gates[0])
        groups, gates, points = [*groups, queries], [*gates, found], [*points, last]
    lasts = np.stack(points)
    wide = np.column_stack([lasts, np.ones(len(lasts))]) if norms.has_bias else lasts
    ordered = yield from ask_orders(pairs, norms, lasts, np.stack(gates), fit.heads.values)
    heads = JointHeads(ordered, fit.heads.values, pairs.constant)
    return HeadGates(wide, pairs.together(groups), heads)


def _louder_first(pairs: TokenPairs, norms: Norms, lasts: list[Floats]) -> Steps[list[Floats]]:
    """Last tokens, that of the first two at which attention does more put first, from a query to each.

    Where all heads respond to one direction of last tokens, a step aside may lead to where none of them does much.
    """
    both, middle = np.stack(lasts[:2]), 0.5 * (lasts[0] + lasts[1])
    rows = draw_rows(pairs, norms, middle, CHOICE)
    row = rows[np.argmin(np.max(rows @ both.T, axis=1))]  # on the far side of both
    asked = yield from pairs.ask("gates", both, np.tile(row, (2, 1)), np.zeros(2, dtype=np.int64))
    ratio = pairs.copies[0, 0] / np.sum(pairs.copies[0])
    effects = np.linalg.norm(pairs.bare(asked).answers - ratio * asked.rows @ pairs.linear, axis=1)
    return [lasts[1], lasts[0], *lasts[2:]] if effects[1] > effects[0] else lasts


def _turned(norms: Norms, aside: Floats) -> Floats:
    """A last token off the first, as long."""
    last = norms.direction + aside
    return np.asarray(norms.last * last / np.linalg.norm(last))


def _ask_first(pairs: TokenPairs, norms: Norms) -> Steps[tuple[Norms, GatedQueries, GatedFit]]:
    """Gates and values at the first last token: at another one where heads are too much alike or too faint at that."""
    for _ in range(OTHERS if pairs.noise == 0 and pairs.reader is None else 0):
        try:
            return norms, *(yield from _ask_gates_at(pairs, norms, norms.last * norms.direction))
        except Unrecoverable as error:
            if error.outcome is not Outcome.TOO_NOISY:
                raise
        direction = pairs.rng.standard_normal(norms.direction.size)
        norms = replace(norms, direction=direction / np.linalg.norm(direction))
    return norms, *(yield from _ask_gates_at(pairs, norms, norms.last * norms.direction))


def _ask_gates_at(pairs: TokenPairs, norms: Norms, last: Floats) -> Steps[tuple[GatedQueries, GatedFit]]:
    """Gates and values at one last token, of as many heads as it takes."""
    width, outputs = pairs.linear.shape
    raw: GatedQueries | None = None
    tried, left = 0, 1.0
    for most, sizes in FIRST:
        unknown = most * width * (1 + outputs)
        if unknown > MOST_UNKNOWN and tried:
            break
        count = int(np.ceil(_noisy(pairs) * FIRST_EXCESS * unknown / outputs)) + FIRST_MORE
        more = yield from ask_rows(pairs, norms, "heads", last, count - (0 if raw is None else len(raw.offsets)))
        raw = more if raw is None else raw.beside(more)
        for _ in range(1 if pairs.reader is None else SEARCHES):
            fit = fit_unknown(pairs.bare_of_one(raw), pairs.floor(raw), pairs.rng, sizes, norms.logit, pairs.rounding)
            if fit.explains:
                return raw, fit
        if not tried and pairs.reader is None:
            firsts = last + draw_rows(pairs, norms, last, DOUBLES)
            lasts = np.tile(last, (DOUBLES, 1))
            yield from check_token_doubles(pairs.signature, "heads", firsts, lasts, pairs.floor(raw))
        tried, left = max(sizes), fit.rms / raw.size
    raise failure(norms, NOT_EXPLAINED.format(tried), left)


def failure(norms: Norms, message: str, left: float) -> Unrecoverable:
    """What a search that leaves a part of the answers amounts to: heads may only be too much alike to be told apart."""
    if norms.logit < FAINT:
        message = f"logits reach about {norms.logit:.2g}, where all heads answer alike: allow longer tokens; {message}"
    faint = norms.logit < FAINT or left < NEARLY
    return Unrecoverable(Outcome.TOO_NOISY if faint else Outcome.WRONG_FAMILY, message)


def _noisy(pairs: TokenPairs) -> float:
    return NOISY if pairs.noise > 0 else 1.0


def _told(rows: Floats, values: Floats) -> int:  # (n, width), (heads, width, outputs)
    """How many weights of heads one answer tells: dependent values tell fewer than there are outputs."""
    shares = np.einsum("nd,hdp->nhp", rows, values)
    return max(int(np.min(np.linalg.matrix_rank(shares, rtol=DEPENDENT))), 1)


def _sensitivity(queries: GatedQueries, heads: GatedSum) -> float:
    """By how much the logits of gates respond to the answers, values being known: the largest, over their size."""
    joint = JointHeads(heads.gates[None], heads.values, np.zeros(queries.answers.shape[1]))
    (inverse,) = JointLinear(JointQueries([queries]), joint).inverses
    return float(np.max(np.linalg.norm(inverse, axis=1)))


@dataclass(frozen=True)
class _Followers:
    """Gates at further last tokens: values are known."""

    pairs: TokenPairs
    norms: Norms
    first: GatedFit
    usual: float  # sensitivity at the first last token

    def ask(self, lasts: list[Floats], start: Floats) -> Steps[tuple[GatedQueries, Floats, Floats]]:
        """Raw queries, gates and the last token, of the first of several last tokens at which gates can be told."""
        pairs, values = self.pairs, self.first.heads.values
        told = _told(self.pairs.rng.standard_normal((SAMPLE, values.shape[1])), values)
        count = int(np.ceil(_noisy(pairs) * EXCESS * start.size / told)) + MORE
        best: tuple[float, GatedQueries, Floats, Floats] | None = None
        for last in lasts:
            raw = yield from ask_rows(pairs, self.norms, "gates", last, count)
            bare = pairs.bare_of_one(raw)
            enough = LOOSE * pairs.floor(raw) + LOOSE_PART * bare.size
            gates, rms = self._fit(bare, start, enough)
            if rms > enough + LOOSEST_PART * bare.size:
                continue
            worse = _sensitivity(bare, GatedSum(gates, values)) / self.usual
            if best is None or worse < best[0]:
                best = worse, raw, gates, last
            if worse <= (WORSE_NOISY if pairs.noise > 0 else WORSE):
                break
        if best is None:
            raise failure(
                self.norms,
                f"{values.shape[0]} heads explain the answers beside one last token, but not beside another: the box "
                "is no sum of softmax heads, or has more of them that show only there",
                1.0,
            )
        return best[1:]

    def _fit(self, bare: GatedQueries, start: Floats, enough: float) -> tuple[Floats, float]:
        """The gates of the start that fits, or of the best."""
        values, floor = self.first.heads.values, enough / LOOSE
        best = fit_known_values(bare, values, start, floor)
        for _ in range(STARTS):
            if best[1] <= enough:
                break
            size = float(np.sqrt(np.mean(start**2)))
            other = fit_known_values(bare, values, size * self.pairs.rng.standard_normal(start.shape), floor)
            best = min(best, other, key=lambda each: each[1])
        return best
