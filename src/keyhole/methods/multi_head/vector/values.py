"""The value matrices of all heads: tokens beside one that is known, a few queries each whatever the heads' number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import ROUNDING_DEVIATIONS, Floats, Integers, floats
from keyhole.methods.base import Steps
from keyhole.methods.multi_head.vector.first_token import CLEAR, ENOUGH, LARGEST, MISFIT, FirstToken
from keyhole.methods.multi_head.vector.probe import HeadsHidden, Shares, Spans, VectorQueries
from keyhole.methods.multi_head.vector.token_fit import TokenData, TokenFit, fit_token, guess_logits
from keyhole.numerics.svd import condition, least_squares, pseudo_inverse, singular_values, svd
from keyhole.recovery import Outcome

# Copies of the known token, of the new one and of the last, by the length they need.
COPIES = {
    10: ((1, 2, 2), (2, 1, 1), (8, 1, 1)),
    6: ((1, 2, 2), (1, 1, 1), (4, 1, 1)),
    4: ((1, 1, 2), (1, 1, 1), (2, 1, 1)),
}
# Where outputs are twice as many as heads logits need not be guessed, so that tokens have natural norms and two
# multiplicities do.
ROOMY = {6: ((1, 1, 1), (4, 1, 1)), 4: ((1, 1, 1), (2, 1, 1))}
# Where logits are the same beside all last tokens, as those of heads without a score are, only multiplicities make
# weights different.
MANY = {
    10: ((8, 1, 1), (4, 1, 1), (2, 1, 1), (1, 1, 1), (1, 2, 2), (1, 4, 2), (1, 1, 4), (1, 1, 8)),
    6: ((4, 1, 1), (2, 1, 1), (1, 1, 1), (1, 2, 2), (1, 1, 4)),
    4: ((2, 1, 1), (1, 1, 1), (1, 2, 1), (1, 1, 2)),
}
# They are the same if they differ by no more than this part of them, and weights if the condition number for small
# tokens is above this.
FLAT, DEPENDENT = 1e-3, 1e8
# Elsewhere new tokens have logits of about this size in the sharpest head: large ones are not found from a guess of
# zero, small ones lose digits.
AIM = 0.1
# A token that is not found is asked again at this part of its size, so often.
AGAIN, ATTEMPTS = 0.2, 5
# Sets of last tokens that are compared.
DRAWN = 32
# Values need less patience than the first token, which all others are read beside: this part of it.
MILDER = 8
# Tokens read beyond those that span all values, as a part of those: spans of just enough have errors in some direction.
SPARE_TOKENS = 1 / 8
# Combinations of all spans that nearly vanish are those of singular values below this part of the median, and so many
# at most: values along them are mended later.
WEAK, MOST_WEAK = 0.05, 6
# Errors that heads trade are taken for this many times those drawn: a fit of near-equal heads rounds as well.
STRESS = 2.0
# Values from spans that may be off by more than this part of them are not used: all tokens are read instead.
BLURRED = 1e-4
# Queries that test whether a few tokens told the values of all.
TESTS = 2


@dataclass(frozen=True)
class VectorValues:
    """The values of all heads."""

    matrices: Floats  # (heads, width, outputs)
    ranks: Integers  # (heads,)
    tokens: int  # read
    error: float  # deviation of one value of a unit token, as far as answers tell
    spread: Floats  # (heads, outputs) the same, with what heads may trade for each other
    noise: float  # deviation of an answer that values and start explain no further
    draws: Floats  # (draws, heads, width, outputs) errors that values may have together; none where spans tell values
    weak: Floats  # (n, heads, outputs) what heads can exchange at little cost to the sum: told worst by spans
    traded: float  # deviation of one value of a unit token by what heads may trade, where there are no draws of it

    @property
    def sharp(self) -> bool:
        """Whether values are known so well that what they are off by cannot be taken for what heads do."""
        sizes = np.sqrt(np.mean(self.matrices**2, axis=(1, 2)))
        return bool(np.all(np.sqrt(np.mean(self.spread**2, axis=1)) <= BLURRED * sizes))


def ask_values(queries: VectorQueries, start: FirstToken) -> Steps[VectorValues]:
    """Values of tokens until their spans are complete; then those of all tokens from the sum over heads."""
    reader = _ValueReader(queries, start)
    if start.heads == 1:
        return reader.single_head()
    filled = queries.outputs // start.heads
    limit, filled = queries.width, filled + int(np.ceil(SPARE_TOKENS * reader.more * filled))
    while True:
        known = len(reader.values)
        if known >= limit:
            return reader.solve_basis()
        spans = reader.spans()
        shares = None if spans is None else (yield from queries.ask_shares(spans))
        values = None if spans is None or shares is None else reader.solve_spanned(spans, shares)
        if values is not None and values.sharp and (yield from reader.ask_test(values)):
            return values
        count = min(known, limit - known)
        if known < filled:
            count = min(count, filled - known)
        yield from reader.ask(count)


class _ValueReader:
    def __init__(self, queries: VectorQueries, start: FirstToken) -> None:
        if queries.longest < min(COPIES):
            raise HeadsHidden(
                Outcome.WRONG_FAMILY,
                "telling the values of heads apart takes sequences of four tokens: allow those (max_length)",
            )
        self.queries, self.start = queries, start
        self.more = 1 + (queries.patience - 1) / MILDER
        drawn = queries.rng.standard_normal((queries.width, queries.width))
        drawn[0] = start.token
        self.basis = np.linalg.qr(drawn.T)[0].T  # the first is that of the known token
        self.basis[0] = start.token / np.linalg.norm(start.token)
        self.tokens: list[Floats] = [self.basis[0]]
        size = np.linalg.norm(start.token)
        self.values: list[Floats] = [start.values / size]  # of each basis token, (heads, outputs)
        self.draws: list[Floats] = [start.value_draws / size]  # (draws, heads, outputs)
        self._settle(roomy=queries.outputs >= 2 * start.heads)
        self.noise, self.error = max(queries.noise, start.residual), start.residual / queries.scale

    def _settle(self, *, roomy: bool) -> None:
        """Choose multiplicities, last tokens and the size of tokens, with or without a guess of the logits."""
        start, queries = self.start, self.queries
        self.roomy, self.shrink = roomy, 1.0
        sharpest = max(float(np.max(start.logit_sizes)), 1e-300)
        self.size = queries.scale * min(1.0, (1.0 if roomy else AIM) / sharpest)
        flat = FLAT * sharpest
        for table in (ROOMY, COPIES, MANY)[0 if roomy else 1 :]:
            suiting = next(copies for length, copies in table.items() if queries.longest >= length)
            self.copies = queries.copies or suiting
            self.chosen = self._choose()
            apart = float(np.max(np.ptp(start.logits[self.chosen], axis=0)))
            if apart >= flat and self._condition(self.chosen) <= DEPENDENT:
                break

    def _choose(self) -> Integers:
        """Last tokens whose known logits make the weights of heads as different as they get."""
        start, heads = self.start, self.start.heads
        # Without a guess of the logits, as many as make values and logits determined to first order.
        count = int(heads * self.more) if self.roomy else -(-(heads + 1) // (len(self.copies) - 1))
        views = len(self.queries.views)
        count = max(-(-count // views), 1 if self.roomy else 2)  # both views of one last token are much alike
        calm = np.max(np.abs(start.logits).reshape(-1, views * start.heads), axis=1)
        order = np.argsort(np.maximum(calm, LARGEST), kind="stable")
        pool = order[: max(count, int(np.sum(calm <= LARGEST)))]
        best, chosen = np.inf, self._views(pool[:count])
        for _ in range(DRAWN if pool.size > count else 1):
            some = self._views(self.queries.rng.permutation(pool)[:count])
            worst = self._condition(some)
            if worst < best:
                best, chosen = worst, some
        return np.sort(chosen)

    def _views(self, ends: Integers) -> Integers:
        """All last tokens that tokens were measured beside: each g, and token + g where that attends to as much."""
        views = np.arange(len(self.queries.views), dtype=np.int64)
        return (ends[:, None] * views.size + views).ravel()

    def _condition(self, some: Integers) -> float:
        """Of the linear problem for small tokens: values and logits of one head along the known value."""
        odds = np.exp(np.clip(self.start.logits[some], -LARGEST, LARGEST))
        known, new, last = (np.array(each, dtype=float)[:, None] for each in zip(*self.copies, strict=True))
        whole = known * odds[:, None] + new + last  # (n, copies, heads)
        weight, other = new / whole, known * odds[:, None] / whole
        count, many, heads = weight.shape
        slopes = np.zeros((heads, count, many, count))
        index = np.arange(count)
        slopes[:, index, :, index] = (weight * other).transpose(0, 2, 1)
        shared = np.broadcast_to(weight.reshape(-1, heads), (heads, count * many, heads))
        system = np.concatenate([shared, slopes.reshape(heads, -1, count)], axis=2)
        total = np.concatenate([np.ones((heads, 1, heads)), np.zeros((heads, 1, count))], axis=2)
        return float(np.max(condition(np.concatenate([system, total], axis=1))))

    def ask(self, count: int) -> Steps[None]:
        """The values of the next tokens of the basis."""
        known = len(self.values)
        missing = list(range(known, known + count))
        fits: dict[int, tuple[Floats, Floats, Floats]] = {}
        for _ in range(ATTEMPTS):
            tokens = self.queries.on_grid(self.size * self.shrink * self.basis[missing])
            answers = yield from self._ask(tokens)
            failed = []
            for place, number in enumerate(missing):
                fit = self._fit(answers[place], tokens[place])
                if fit.residual <= self._allowed():
                    length = float(np.linalg.norm(tokens[place]))
                    errors = self._errors(fit, answers[place].shape[:2])
                    fits[number] = (tokens[place] / length, fit.values / length, errors / length)
                    self.noise = max(self.noise, fit.residual)
                    self.error = max(self.error, fit.state.condition * max(fit.residual, self.queries.noise) / length)
                else:
                    failed.append(number)
            missing = failed
            if not missing:
                break
            if self.roomy:  # values of one token are spanned by those of another, which spoils the guess
                self._settle(roomy=False)
            else:
                self.shrink *= AGAIN
        else:
            raise HeadsHidden(
                Outcome.WRONG_FAMILY,
                f"{len(missing)} tokens beside a known one were answered as no {self.start.heads} heads answer them: "
                f"the box is no sum of heads, or its logits are too small at the norms allowed (max_norm)",
            )
        for number in sorted(fits):
            self.tokens.append(fits[number][0])
            self.values.append(fits[number][1])
            self.draws.append(fits[number][2])

    def _ask(self, tokens: Floats) -> Steps[Floats]:  # (n, width) -> (n, groups, copies, outputs)
        queries, count, views = self.queries, tokens.shape[0], len(self.queries.views)
        plain = self.chosen[::views]
        new = np.repeat(np.arange(count, dtype=np.int64), plain.size)
        last = np.tile(plain, count)
        ones, zeros = np.ones(last.size), np.zeros(last.size, dtype=np.int64)
        known, own = (self.start.token[None, :], zeros, ones), (tokens, new, ones)
        each = [([known] * held + [own] * copies, ends) for held, copies, ends in self.copies]
        answers = yield from queries.ask_each("values", self.start.last, last, each)
        return answers.reshape(count, self.chosen.size, len(self.copies), queries.outputs)

    def _fit(self, answers: Floats, token: Floats) -> TokenFit:  # (groups, copies, outputs)
        groups, many, outputs = answers.shape
        held, copies, ends = (np.tile(np.array(each, dtype=float), groups) for each in zip(*self.copies, strict=True))
        group = np.repeat(np.arange(groups, dtype=np.int64), many)
        odds = np.exp(self.start.logits[self.chosen][group]) * (held / ends)[:, None]
        asked = TokenData(
            answers=answers.reshape(-1, outputs),
            group=group,
            odds=odds,
            copies=copies / ends,
            known=self.start.values,
            total=token @ self.queries.linear,
        )
        enough, nothing = ENOUGH * self.queries.noise, np.zeros((groups, self.start.heads))
        guess = guess_logits(asked, groups)
        fit = fit_token(asked, nothing if guess is None else guess, enough)
        if guess is None or fit.residual <= self._allowed():
            return fit
        other = fit_token(asked, nothing, enough)  # values that share a direction spoil the guess
        return min(fit, other, key=lambda each: each.residual)

    def _allowed(self) -> float:
        return MISFIT * self.queries.errors(self.start.logits[self.chosen], self.start.values)

    def _errors(self, fit: TokenFit, shape: tuple[int, ...]) -> Floats:  # -> (draws, heads, outputs)
        """Errors that values may have: by those of the answers, and by those of what is known of the other token."""
        start, draws = self.start, self.start.value_draws
        group = np.repeat(np.arange(shape[0]), shape[1])
        size = self.queries.residual_error(fit, start.logits[self.chosen], start.values)
        changes = size * self.queries.rng.standard_normal((draws.shape[0], group.size + 1, self.queries.outputs))
        logits = start.logit_draws[:, self.chosen][:, group]  # (draws, J, heads)
        known, new = fit.state.others, fit.state.weights
        own = (known * (1 - known) * logits) @ start.values - (known * new * logits) @ fit.values
        changes[:, :-1] -= known @ draws
        changes[:, :-1] -= own
        return fit.respond(changes)[1]

    def single_head(self) -> VectorValues:
        """The values of a single head, which are those of the sum."""
        matrices = self.queries.linear[None]
        each = (
            np.max(floats(self.queries.value.radius) / self.queries.units, axis=0) / ROUNDING_DEVIATIONS
        )  # (outputs,)
        return self._whole(matrices, float(np.max(each)), each[None], matrices[None][:0], 0)

    def solve_basis(self) -> VectorValues:
        """The values where all tokens of a basis were read."""
        tokens, values = np.stack(self.tokens), np.stack(self.values, axis=1)  # (heads, width, outputs)
        drawn = STRESS * np.asarray(
            np.linalg.solve(tokens, np.stack(self.draws, axis=2))
        )  # (draws, heads, width, outputs)
        # Errors go along one direction for the most part, so that some of the numbers of an output have far more of it.
        spread = np.maximum(np.sqrt(np.max(np.mean(drawn**2, axis=0), axis=1)), self.error)
        return self._whole(np.asarray(np.linalg.solve(tokens, values)), self.error, spread, drawn, len(self.tokens))

    def _whole(self, matrices: Floats, error: float, spread: Floats, draws: Floats, tokens: int) -> VectorValues:
        """Values that were read entry by entry, with their ranks."""
        floor = CLEAR * error * (self.queries.width**0.5 + self.queries.outputs**0.5)
        ranks = np.maximum(np.sum(singular_values(matrices) > floor, axis=1), 1)
        weak = np.zeros((0, *spread.shape))
        return VectorValues(matrices, ranks, tokens, error, spread, self.noise, draws, weak, traded=0.0)

    def spans(self) -> Spans | None:
        """What the values of each head span; None where those of the tokens that were read do not fill it."""
        values = np.stack(self.values, axis=1)  # (heads, tokens, outputs)
        count = values.shape[1]
        floor = CLEAR * self.error * (count**0.5 + self.queries.outputs**0.5)
        directions, tilts = [], []
        for own in values:
            _, singular, right = svd(own)
            rank = max(int(np.sum(singular > floor)), 1)
            directions.append(right[:rank])
            tilts.append(self.error / np.maximum(singular[:rank], 1e-300))
        return None if max(map(len, directions)) == count else Spans(directions, tilts)

    def solve_spanned(self, found: Spans, known: Shares) -> VectorValues:
        """Values of all tokens, where those read span all that heads answer: as shares of these spans."""
        values = np.stack(self.values, axis=1)  # (heads, tokens, outputs)
        count, heads, spans = values.shape[1], self.start.heads, found.directions
        ranks = [len(span) for span in spans]
        together = np.concatenate(spans)
        ends = np.cumsum([0, *ranks])
        matrices = [known.matrix[:, ends[h] : ends[h + 1]] @ spans[h] for h in range(heads)]
        stacked = np.stack(matrices)
        told = np.stack(self.tokens) @ stacked
        # Read once more from the sum over heads: what spans are wrong by, of which fitting them hides a part.
        hides = 2 * count / (count - max(ranks))
        apart = np.sqrt(np.mean((told - values) ** 2, axis=1)) * hides  # (heads, outputs)
        drawn = np.sqrt(np.mean(np.stack(self.draws, axis=2) ** 2, axis=(0, 2)))
        error = max(self.error, float(np.sqrt(np.mean(apart**2))))
        turn, sizes, _ = svd(together)
        low = turn[:, sizes < WEAK * np.median(sizes)][:, -MOST_WEAK:].T  # (n, all ranks)
        weak = np.stack([low[:, ends[h] : ends[h + 1]] @ spans[h] for h in range(heads)], axis=1)
        return VectorValues(
            matrices=stacked,
            ranks=np.array(ranks),
            tokens=count,
            error=error,
            spread=np.maximum(np.maximum(STRESS * drawn, apart), np.maximum(error, known.moved)),
            noise=self.noise,
            draws=stacked[None][:0],
            weak=weak,
            traded=float(np.sqrt(np.mean(drawn**2))),
        )

    def ask_test(self, vector_values: VectorValues) -> Steps[bool]:
        """Whether held-out tokens have the values that the matrices predict."""
        queries, heads = self.queries, self.start.heads
        if queries.outputs == heads:
            return False
        tokens = queries.on_grid(queries.scale * queries.directions(TESTS))
        every = np.arange(TESTS, dtype=np.int64)
        plain = self.chosen[:: len(queries.views)]
        last = plain[every % plain.size]
        queries.expect(vector_values.matrices)
        answers = yield from queries.ask("values", self.start.last, last, [(tokens, every, np.ones(TESTS))])
        rests = []
        for token, answer in zip(tokens, answers[:, 0], strict=True):
            values = token @ vector_values.matrices
            rests.append(answer - values.T @ least_squares(values.T, answer))
        error = vector_values.noise + vector_values.error * queries.scale * heads**0.5
        return bool(np.sqrt(np.mean(np.square(rests))) <= MISFIT * error)


def solve_spanned(
    values: Floats, linear: Floats, ranks: Sequence[int]
) -> Floats:  # (heads, n, outputs), (width, outputs)
    """Values of all tokens from the sum over heads, those of each head in the span of what was read of it."""
    spans = [svd(own)[2][:rank] for own, rank in zip(values, ranks, strict=True)]
    shares, ends = linear @ pseudo_inverse(np.concatenate(spans)), np.cumsum([0, *ranks])
    return np.stack([shares[:, ends[h] : ends[h + 1]] @ spans[h] for h in range(len(spans))])
