"""The score matrices of all heads observed at all positions: every token of a query is a last one for all others.

[u_1; …; u_n; 0] shows at position u_i the weights w_j of all tokens in all heads, once the values of tokens are known,
and log(w_j / w_0) = u_jᵀ·(M·u_i + c). So one query reads n·(n + 1) forms of each head. Tokens are put in groups, of
which two are asked at a time: one group after the other beside all others, until those are in the span of what was
read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Floats, Integers
from keyhole.methods.base import Steps
from keyhole.methods.multi_head.vector import scores as common
from keyhole.methods.multi_head.vector.first_token import CLEAR, FirstToken
from keyhole.methods.multi_head.vector.polish import Asked, Block, with_constant
from keyhole.methods.multi_head.vector.probe import VectorQueries
from keyhole.methods.multi_head.vector.scores import Scores
from keyhole.methods.multi_head.vector.values import VectorValues
from keyhole.queries import Measurements, Plan, Position, Term, TokenRows

# Tokens of this part of their size are tried as long as that tells more, so often at most.
SMALLER, MOST_SIZES = 0.7, 12
# Forms known worse than this leave radii too wide to certify: beside long last tokens they are known better.
BLURRED = 3.5e-4
# So much worse where least squares over all answers follow.
ROUGHER = 8.0
# Of heads whose scores do less than this part of what the sharpest do, as of those without any, no more is asked.
FLATTEST = 1e-2
# Where some weight cannot be read after all everything is read again with shorter tokens, so often.
ATTEMPTS = 3
# Tokens beside the zero one, at least: of fewer the last position tells as much.
FEWEST_TOKENS = 4
# Logits of the first size that is tried.
AIM = 2.0
# Outputs that weights take up at most: the others tell errors, and weights are known the better.
FILLED = 0.75
# Rows beyond their rank that show that further ones lie in their span.
SPARE_ROWS = 2


def ask_scores_everywhere(queries: VectorQueries, start: FirstToken, values: VectorValues) -> Steps[Scores | None]:
    """All scores; None where only the last position has them: others are masked, or some weights saturate."""
    reader = _BlockReader(queries, start, values)
    for _ in range(ATTEMPTS):
        if reader.per_query < FEWEST_TOKENS or not (yield from reader.ask_size()):
            return None
        scores = yield from reader.ask()
        if scores is not None:
            return scores
        reader.size *= SMALLER**2
    return None


@dataclass
class _Read:
    """Forms of the tokens of some queries: their last tokens are the same ones, and the zero token."""

    forms: Floats  # (queries, heads, n, n + 1)
    errors: Floats
    seen: Floats  # (queries, n + 1, outputs) answers, without the bias
    noise: float  # their deviation

    def relative_error(self) -> float:
        """Radii over what scores make of forms, in the head that is known worst."""
        scored = np.sqrt(np.mean((self.forms[..., :-1] - self.forms[..., -1:]) ** 2, axis=(0, 2, 3)))
        scored = np.maximum(scored, FLATTEST * np.max(scored) + 1e-300)
        return float(np.max(np.sqrt(np.mean(self.errors**2, axis=(0, 2, 3))) / scored))


class _BlockReader:
    """Forms of one set of tokens, all of the same size."""

    def __init__(self, queries: VectorQueries, start: FirstToken, values: VectorValues) -> None:
        self.queries, self.values, self.heads = queries, values, start.heads
        self.unit = queries.directions(queries.width)
        sharpest = max(float(np.max(start.logit_sizes)), 1e-300)
        self.size = queries.scale * min(1.0, (AIM / sharpest) ** 0.5)
        self.tokens = queries.on_grid(self.size * self.unit)
        roomy = FILLED * queries.outputs >= FEWEST_TOKENS * self.heads
        half = max(common.affordable(queries, values, self.tokens, FILLED if roomy else 1.0) // 2, 1)
        self.per_query = 2 * half
        if queries.width <= self.per_query:
            half = queries.width
        places = np.arange(queries.width, dtype=np.int64)
        self.groups = [places[first : first + half] for first in range(0, queries.width, half)]
        self.condition = 0.0
        self.blurred = ROUGHER * BLURRED if values.rough else BLURRED
        self._clear()

    def _clear(self) -> None:
        shape = (self.heads, self.queries.width, self.queries.width + 1)
        self.forms, self.errors, self.times = np.zeros(shape), np.zeros(shape), np.zeros(shape[1:])
        self.answered: list[Block] = []
        self.noises: list[float] = []

    def ask_size(self) -> Steps[bool]:
        """Make tokens of the size at which forms are known best, if they are known well at any."""
        members = np.concatenate(self.groups[:2])[None, :]
        best, kept = np.inf, self.size
        for _ in range(MOST_SIZES):
            self.tokens = self.queries.on_grid(self.size * self.unit)
            read = yield from self._ask(members)
            unknown = np.inf if read is None else read.relative_error()
            if unknown >= best and best < np.inf:
                break
            if unknown < best:
                best, kept = unknown, self.size
            self.size *= SMALLER
        self.size = kept
        self.tokens = self.queries.on_grid(kept * self.unit)
        return best <= self.blurred

    def ask(self) -> Steps[Scores | None]:
        """Groups beside all others, until their rows span the rest; None where a weight cannot be read."""
        self._clear()
        last = max(len(self.groups) - 2, 0)
        for group in range(last + 1):
            if not (yield from self._ask_beside(group)):
                return None
            if group == last:  # all forms were read
                ranks = common.ranks_above(self.forms, self.errors)
                return self._scores(self.forms, ranks, common.rms(self.errors), self.errors, 0.0)
            scores = self.solve_spanned(np.concatenate(self.groups[: group + 1]))
            if scores is not None and self._is_sharp(scores):
                return scores
        return None

    def _is_sharp(self, scores: Scores) -> bool:
        """Whether all rows but those read are told by these so well that radii stay narrow enough to certify."""
        sizes = np.sqrt(np.mean(scores.matrices**2, axis=(1, 2)))
        sizes = np.maximum(sizes, FLATTEST * np.max(sizes))
        together = self.queries.width**0.5 * scores.dropped  # may be the same in all entries of a row
        return bool(np.all(scores.errors + together <= self.blurred * sizes))

    def _ask_beside(self, group: int) -> Steps[bool]:
        """Read one group beside all that it was not beside yet."""
        partners = self.groups[group + 1 :] or [self.groups[group][:0]]
        by_size: dict[int, list[Integers]] = {}
        for partner in partners:
            by_size.setdefault(partner.size, []).append(np.concatenate([self.groups[group], partner]))
        for members in by_size.values():
            read = yield from self._ask(np.stack(members))
            if read is None or read.relative_error() > 2 * self.blurred:
                return False
            for some, forms, errors, seen in zip(members, read.forms, read.errors, read.seen, strict=True):
                self._add(some, forms, errors)
                ends = np.append(some, self.queries.width)
                self.answered.append(Block(some, ends, np.ones(ends.size), seen))
            self.noises.append(read.noise)
        return True

    def _add(self, members: Integers, forms: Floats, errors: Floats) -> None:  # (n,), twice (heads, n, n + 1)
        """Keep the forms: of several measurements the mean and the largest error, as those of values do not average."""
        place = (slice(None), members[:, None], np.append(members, self.queries.width))
        times = self.times[place[1:]]
        self.forms[place] = (self.forms[place] * times + forms) / (times + 1)
        self.errors[place] = np.maximum(self.errors[place], errors)
        self.times[place[1:]] = times + 1

    def _ask(self, members: Integers) -> Steps[_Read | None]:  # (queries, n)
        """Forms and their radii; None where a weight is not between 0 and 1."""
        queries, space, count = self.queries, self.queries.signature.space, members.shape[1]
        rows = TokenRows(space.asarray(self.tokens))
        positions: list[Position] = [[Term(rows, space.indices(column))] for column in members.T]
        queries.asked = max(queries.asked, count + 1)
        answers: Measurements = yield Plan("scores", members.shape[0], [*positions, []])
        seen = queries.values_at(answers) - queries.bias  # (queries, n + 1, outputs)
        share = self.size * (self.heads / self.per_query) ** 0.5
        mixed = float(np.hypot(self.values.noise, self.values.error * share))
        forms, form_errors = np.zeros((2, members.shape[0], self.heads, count, count + 1))
        noises: list[float] = []
        for number, some in enumerate(members):
            own = self.tokens[some] @ self.values.matrices  # (heads, n, outputs)
            inverse = common.inverse_of(own)
            self.condition = max(self.condition, common.worst_of(inverse) * self.size)
            flat = seen[number] @ inverse
            noise = common.answer_noise(queries, self.values, seen[number], own, inverse, share, mixed)
            noises.append(noise)
            weights = flat.reshape(-1, self.heads, count)
            rest = 1 - np.sum(weights, axis=2, keepdims=True)
            if not (np.all(weights > 0) and np.all(rest > 0)):
                return None
            errors = common.weight_errors(self.values, self.tokens[some], weights, inverse, noise)
            form_error = np.hypot(errors / weights, np.linalg.norm(errors, axis=2, keepdims=True) / rest)
            if not np.all(form_error < common.SHARPEST):
                return None
            forms[number] = np.log(weights / rest).transpose(1, 2, 0)
            form_errors[number] = form_error.transpose(1, 2, 0)
        return _Read(forms, form_errors, seen, float(np.median(noises)))

    def _scores(
        self, forms: Floats, ranks: Integers, errors: Floats, read_errors: Floats, dropped: Floats | float
    ) -> Scores:
        shown, known = (self.per_query, self.condition), self.values.matrices
        found = common.scores_of(
            forms, self.tokens, self.tokens, known, ranks, errors, common.rms(read_errors), shown, dropped
        )
        last = with_constant(np.vstack([self.tokens, np.zeros(self.queries.width)]), self.queries.scale)
        asked = Asked(self.tokens, last, self.answered, self.queries.linear)
        return replace(found, asked=asked, noise=float(np.median(self.noises)))

    def solve_spanned(self, read: Integers) -> Scores | None:
        """All forms, where the rows read span the others; None where they do not show to."""
        width = self.queries.width
        rows, row_errors = self.forms[:, read], self.errors[:, read]
        ranks = common.ranks_above(rows, row_errors)
        rank = int(np.max(ranks))
        coarse = bool(np.median(row_errors) > common.KNOWN * np.median(np.abs(rows)))
        ends = np.append(read, width)  # columns that are read whole
        if coarse or rank + SPARE_ROWS > read.size:
            return None
        columns, wide = self.forms[:, :, ends], self.errors[:, :, ends]
        others = np.setdiff1d(np.arange(width), read)
        allowed = common.errors_outside(rows[:, :, ends], columns[:, others], wide[:, others], ranks)
        if not np.all(common.outside(rows[:, :, ends], columns[:, others], ranks) <= allowed):
            return None
        kept = ends[common.choose_columns(rows[:, :, ends], ranks, rank)]
        dropped = allowed + CLEAR * common.spectral(row_errors)
        whole, errors, dropped = common.cross_scores(
            rows, row_errors, kept, self.forms[:, :, kept], self.errors[:, :, kept], ranks, dropped
        )
        return self._scores(whole, ranks, errors, row_errors, dropped)
