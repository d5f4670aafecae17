"""One long token in all heads: their number, its values in each, and its logits against all last tokens.

Far out along a half-circle of last tokens every weight is at one end or the other, and each head changes its side
once: the answers are constant but for one jump per head, along the values of the token in that head. Once the jumps
are apart, with as many as answers to random last tokens span dimensions, every answer is taken apart into weights,
however those depend on the logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Booleans, Floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.multi_head.vector.first_token import CLEAR, MISFIT
from keyhole.methods.multi_head.vector.parts.caps import solve_cap
from keyhole.methods.multi_head.vector.parts.long_tokens import FAR, LongQueries, Odds
from keyhole.methods.multi_head.vector.probe import HeadsHidden
from keyhole.methods.multi_head.vector.scores import inverse_of
from keyhole.numerics.svd import pseudo_inverse, singular_values
from keyhole.recovery import Outcome

# Last tokens beyond those of a basis: their logits are sums of those, which tells caps; at these sizes.
SPARE = (0.7, 1.0)
# Logits are aimed at this size, by probes that move answers by this part of them at most and this at least.
AIM, LARGEST_PROBE, SMALLEST_PROBE, MOST_PROBES = 0.7, 0.02, 1e-9, 40
PROBES = 2
# Caps show best at logits of this size, or of this part of the cap where that is less.
BENT, BENT_PART = 2.5, 1.2
# Points of the half-circle for each head and beyond, and how often intervals are halved.
POINTS, MORE_POINTS, HALVINGS = 2, 8, 36
# Logits are asked once more beside shorter last tokens where weights are this near to an end, of a range that a cap
# limits and of others.
EDGE, FAR_EDGE, SHORTER, ATTEMPTS = 0.1, 1e-3, 1 / 8, 12


@dataclass(frozen=True)
class FirstHeads:
    """One token in all heads."""

    token: Floats  # (width,)
    values: Floats  # (heads, outputs)
    keys: Floats  # (heads, width): logits of the token are products of the last one with these
    odds: Odds
    errors: Odds  # deviations of each number of it
    noise: float  # deviation of one number of an answer
    scale: float

    @property
    def heads(self) -> int:
        """Heads that show."""
        return int(self.values.shape[0])

    @property
    def logit_sizes(self) -> Floats:  # (heads,)
        """Root mean squares of logits of the token at the norm of the last tokens."""
        return np.asarray(np.linalg.norm(self.keys, axis=1) * self.scale / self.keys.shape[1] ** 0.5)


def ask_first_heads(queries: LongQueries, token: Floats, link: str, *, rest_known: bool) -> Steps[FirstHeads]:
    """A unit token, made as long as queries are, in all heads.

    `rest_known` says whether a lone token of logit zero has half of the weight.
    """
    yield from _ask_scale(queries, token)
    token = queries.scale * token
    zero = token @ queries.linear
    ends, answers = yield from _ask_spread(queries, token, len(SPARE) if link == "softcap" else 1)
    whole = np.vstack([answers - zero, zero[None, :]])
    count = _rank(queries, answers - zero)
    if _rank(queries, whole) != count:
        raise HeadsHidden(Outcome.WRONG_FAMILY, "some head weighs all tokens alike, or weights do not tell the heads")
    if count > queries.width:
        raise HeadsHidden(Outcome.WRONG_FAMILY, f"{count} heads are more than tokens have numbers")
    jumps = yield from ask_jumps(queries, token, count)
    reader = _Reader(queries, token, zero, jumps, link, rest_known)
    ends, answers = yield from reader.ask_again(ends, answers)
    start = reader.solve(ends, answers)
    if start.odds.cap is None:
        return start
    bent = reader.bent(start)
    ends, answers = np.vstack([ends, bent]), np.vstack([answers, (yield from queries.ask_token("heads", token, bent))])
    return reader.solve(ends, answers)


def _ask_scale(queries: LongQueries, token: Floats) -> Steps[None]:
    """The norm of tokens at which logits are of order one, from what short last tokens change."""
    zero = token @ queries.linear
    ways, size = queries.directions(PROBES), float(np.max(np.abs(zero)))
    norm = 2.0**-20
    for _ in range(MOST_PROBES):
        moved = (yield from queries.ask_token("scale", token, norm * ways)) - zero
        part = float(np.sqrt(np.mean(np.max(np.abs(moved), axis=1) ** 2))) / size
        if part > LARGEST_PROBE:
            norm *= 2.0**-12
        elif not part >= SMALLEST_PROBE:
            norm *= 2.0**20
        else:
            queries.set_scale((norm * AIM / (4 * part)) ** 0.5)
            return
        if not 2.0**-400 < norm < 2.0**300:
            break
    raise Unrecoverable(
        Outcome.WRONG_FAMILY, "the weight of a long token responds to no last token as that of heads does"
    )


def _ask_spread(queries: LongQueries, token: Floats, spare: int) -> Steps[tuple[Floats, Floats]]:
    """Answers beside last tokens of a basis, and beside sums of those, some longer."""
    basis = queries.directions(queries.width) if queries.width > 1 else np.ones((1, 1))
    sums = np.array(SPARE[:spare])[:, None] * queries.directions(spare)
    more = max(0, queries.outputs + 2 - queries.width) if queries.width < 4 * spare else 0
    ends = queries.scale * np.vstack([basis, sums, queries.directions(more)] if more else [basis, sums])
    return ends, (yield from queries.ask_token("heads", token, ends))


def _rank(queries: LongQueries, answers: Floats) -> int:
    floor = CLEAR * queries.noise * (answers.shape[0] ** 0.5 + queries.outputs**0.5)
    return int(np.sum(singular_values(answers) > floor))


def ask_jumps(queries: LongQueries, token: Floats, heads: int) -> Steps[Floats]:  # (heads, outputs)
    """What each head adds to the answers as it changes its side."""
    plane = queries.directions(2) if queries.width > 1 else np.ones((2, 1))

    def ask(angles: Floats) -> Steps[Floats]:
        around = np.cos(angles)[:, None] * plane[0] + np.sin(angles)[:, None] * plane[1]
        return (yield from queries.ask_token("heads", token, FAR * queries.scale * around))

    count = POINTS * heads + MORE_POINTS
    angles = np.pi * np.linspace(0, 1, count + 1) if queries.width > 1 else np.array([0.0, np.pi])
    answers = yield from ask(angles)
    floor = CLEAR * queries.noise * queries.outputs**0.5
    for _ in range(HALVINGS):
        steps = np.diff(answers, axis=0)
        changed = np.linalg.norm(steps, axis=1) > floor
        if int(np.sum(changed)) == heads:
            return np.asarray(steps[changed])
        if int(np.sum(changed)) > heads or queries.width == 1:
            break
        middles = ((angles[1:] + angles[:-1]) / 2)[changed]
        between = yield from ask(middles)
        angles, answers = np.concatenate([angles, middles]), np.vstack([answers, between])
        order = np.argsort(angles, kind="stable")
        angles, answers = angles[order], answers[order]
    raise HeadsHidden(
        Outcome.WRONG_FAMILY,
        f"answers to one token span {heads} dimensions and jump {int(np.sum(changed))} times along a half-circle: "
        f"values of heads are dependent, or two heads have proportional scores",
    )


@dataclass
class _Reader:
    """Answers to one token taken apart by head."""

    queries: LongQueries
    token: Floats
    zero: Floats  # (outputs,) the answer beside a zero token
    jumps: Floats
    link: str
    rest_known: bool

    def __post_init__(self) -> None:
        self.inverse = inverse_of(self.jumps[:, None])
        middle = self.zero @ self.inverse
        self.jumps = self.jumps * np.sign(middle)[:, None]  # weights are positive
        self.inverse = self.inverse * np.sign(middle)
        self.middle = np.abs(middle)  # (heads,) the weight of a logit of zero, over the height of the jump
        self.errors = self.queries.noise * np.linalg.norm(self.inverse, axis=0)  # (heads,) of each such number

    def ask_again(self, ends: Floats, answers: Floats) -> Steps[tuple[Floats, Floats]]:
        """Beside shorter last tokens where some weight is too near its end."""
        ends, answers, width = ends.copy(), answers.copy(), self.queries.width
        for _ in range(ATTEMPTS):
            dull = np.any(self._dull(answers @ self.inverse), axis=1)
            dull[width:] = False  # these show the ends
            if not np.any(dull):
                return ends, answers
            ends[dull] *= SHORTER
            answers[dull] = yield from self.queries.ask_token("heads", self.token, ends[dull])
        raise Unrecoverable(Outcome.SATURATED, "weights stay at their ends however short last tokens are")

    def _dull(self, shares: Floats) -> Booleans:  # (n, heads)
        """Whether some weight is nearer to an end than this; of jumps that a cap limits half is below the middle."""
        if self.link == "softcap":
            edge, high, low = EDGE, np.full(1, 0.5), np.minimum(0.5, self.middle)
        else:
            edge, high, low = FAR_EDGE, 1 - np.minimum(self.middle, 0.99), self.middle
        far = (shares - self.middle > (1 - edge) * high) | (self.middle - shares > (1 - edge) * low)
        return np.asarray(far)

    def _solve_cap(self, ends: Floats, shares: Floats, head: int) -> tuple[float, float, float, float]:
        """From the last tokens that are no longer than this head takes, the first of them and those chosen for it."""
        width = self.queries.width
        told = ~self._dull(shares)[:, head]
        told[: width + 1] = True
        told[width + len(SPARE) :] = True  # chosen for all heads
        mixes = np.asarray(np.linalg.solve(ends[:width].T, ends[width:][told[width:]].T).T)  # (spare, width)
        return solve_cap(shares[told, head], mixes, self.middle[head], self.errors[head], rest_known=self.rest_known)

    def bent(self, start: FirstHeads) -> Floats:  # (2, width)
        """Last tokens beside which the cap bends the logits of all heads, and weights are far from their ends."""
        assert start.odds.cap is not None
        wanted = np.minimum(BENT, BENT_PART * start.odds.cap)
        return np.asarray(np.outer([1.0, -1.0], wanted @ pseudo_inverse(start.keys).T))

    def solve(self, ends: Floats, answers: Floats) -> FirstHeads:
        """Constants and keys of all heads."""
        shares, width, heads = answers @ self.inverse, self.queries.width, self.middle.size
        rest, height = 1 / self.middle - 1, np.ones(heads)
        rest_errors, cap, cap_errors = self.errors / self.middle**2, None, None
        if self.link == "softcap":
            caps = [self._solve_cap(ends, shares, head) for head in range(heads)]
            cap, cap_errors, rest, height = (np.array(each) for each in zip(*caps, strict=True))
        elif self.rest_known:
            rest = np.ones(heads)
        odds = Odds(rest, cap)
        weights = shares * height
        logits, steep = odds.logits((weights / (1 - weights))[:, :, None])
        spread = steep[:, :, 0] * self.errors * height / np.abs(weights * (1 - weights))
        keys = np.linalg.solve(ends[:width], logits[:width, :, 0])
        errors = Odds(0 * rest if self.rest_known else rest_errors, cap_errors)
        self._check(ends[width:] @ keys, spread, weights, odds)
        values = np.asarray(self.jumps / height[:, None])
        return FirstHeads(self.token, values, np.array(keys.T), odds, errors, self.queries.noise, self.queries.scale)

    def _check(self, logits: Floats, spread: Floats, weights: Floats, odds: Odds) -> None:
        """End where last tokens that are sums of others are not answered so."""
        told, seen = odds.weights(logits), weights[self.queries.width :]
        known = float(np.sqrt(np.mean(spread[: self.queries.width] ** 2)))
        allowed = MISFIT * (self.errors + known * np.maximum(1.0, np.max(np.abs(logits))) * self.queries.width**0.5)
        if not np.all(np.abs(told - seen) <= allowed):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                f"weights of a token are {float(np.max(np.abs(told - seen))):.2g} off what logits linear in the last "
                f"token give: the parts of attention are others",
            )
