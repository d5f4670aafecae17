"""The value matrices of all heads: tokens beside one that is known, a few queries each whatever the heads' number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import ROUNDING_DEVIATIONS, Array, Floats, Integers, Space, floats, namespace, times
from keyhole.methods.base import Steps
from keyhole.methods.multi_head.vector.device_fits import TokensData, TokensFit, fit_tokens, guess_tokens
from keyhole.methods.multi_head.vector.first_token import CLEAR, ENOUGH, LARGEST, MISFIT, FirstToken
from keyhole.methods.multi_head.vector.probe import HeadsHidden, Shares, Spans, VectorQueries
from keyhole.methods.multi_head.vector.token_fit import TokenData, TokenFit, fit_token, guess_logits
from keyhole.numerics.orthogonal import orthonormal
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
# Numbers of token fits that are held at a time on a device.
TOGETHER = 2**30
# Queries that test whether a few tokens told the values of all.
TESTS = 2


@dataclass(frozen=True)
class VectorValues:
    """The values of all heads."""

    matrices: Array  # (heads, width, outputs), where large matrices are worked with
    ranks: Integers  # (heads,)
    tokens: int  # read
    error: float  # deviation of one value of a unit token, as far as answers tell
    spread: Floats  # (heads, outputs) the same, with what heads may trade for each other
    noise: float  # deviation of an answer that values and start explain no further
    draws: Floats  # (draws, heads, width, outputs) errors that values may have together; none where spans tell values
    weak: Floats  # (n, heads, outputs) what heads can exchange at little cost to the sum: told worst by spans
    traded: float  # deviation of one value of a unit token by what heads may trade, where there are no draws of it
    rough: bool = False  # whether they are only a start of least squares over all answers

    @property
    def sharp(self) -> bool:
        """Whether values are known so well that what they are off by cannot be taken for what heads do."""
        sizes = np.sqrt(floats(namespace(self.matrices).mean(self.matrices**2, axis=(1, 2))))
        return bool(np.all(np.sqrt(np.mean(self.spread**2, axis=1)) <= BLURRED * sizes))

    @property
    def apart(self) -> bool:
        """Whether what heads may trade for each other is as small, however tilted the spans are."""
        sizes = np.sqrt(np.mean(self.matrices**2, axis=(1, 2)))
        return bool(self.traded <= BLURRED * np.min(sizes))


def ask_values(queries: VectorQueries, start: FirstToken, *, rough: bool = False) -> Steps[VectorValues]:
    """Values of tokens until their spans are complete; then those of all tokens from the sum over heads.

    `rough`: also where these spans are too tilted to be exact, for least squares over all answers to go on from.
    """
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
        if rough and values is not None and values.apart and known >= filled and (yield from reader.ask_test(values)):
            return replace(values, rough=True)
        count = min(known, limit - known)
        if known < filled:
            count = min(count, filled - known)
        yield from reader.ask(count)


@dataclass(frozen=True)
class _Read:
    """What is read of one token."""

    values: Floats  # (heads, outputs)
    residual: float
    condition: float  # errors of values over those of answers
    errors: Floats  # (draws, heads, outputs) that the values may have


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
        self.basis = orthonormal(queries.work, drawn)  # the first is that of the known token
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
            for number, token, read in zip(missing, tokens, self._read(answers, tokens), strict=True):
                if read is None:
                    failed.append(number)
                    continue
                length = float(np.linalg.norm(token))
                fits[number] = (token / length, read.values / length, read.errors / length)
                self.noise = max(self.noise, read.residual)
                self.error = max(self.error, read.condition * max(read.residual, self.queries.noise) / length)
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

    def _read(self, answers: Floats, tokens: Floats) -> Iterable[_Read | None]:  # (n, groups, copies, outputs)
        """What tokens are fitted by; None for those that are not."""
        if not self.queries.work.on_cpu:
            return self._read_together(answers, tokens)
        return (self._read_alone(*each) for each in zip(answers, tokens, strict=True))

    def _read_alone(self, answers: Floats, token: Floats) -> _Read | None:
        fit = self._fit(answers, token)
        if not fit.residual <= self._allowed():
            return None
        return _Read(fit.values, fit.residual, fit.state.condition, self._errors(fit, answers.shape[:2]))

    def _read_together(self, answers: Floats, tokens: Floats) -> Iterable[_Read | None]:
        """The same for all tokens at once, on the device, as many together as do not fill it."""
        groups, heads = self.chosen.size, self.start.heads
        each = (groups * heads) ** 2 * 3 + groups * heads**2 * (2 * heads + 1) * 2
        together = max(1, TOGETHER // each)
        for first in range(0, len(tokens), together):
            some = slice(first, first + together)
            yield from self._read_some(answers[some], tokens[some])

    def _read_some(self, answers: Floats, tokens: Floats) -> list[_Read | None]:
        space, start, allowed = self.queries.work, self.start, self._allowed()
        held, copies, ends = (np.array(each, dtype=float) for each in zip(*self.copies, strict=True))
        odds = np.exp(start.logits[self.chosen])[:, None, :] * (held / ends)[:, None]
        asked = TokensData(
            answers=space.asarray(answers),
            odds=space.asarray(odds),
            copies=space.asarray(np.tile(copies / ends, (self.chosen.size, 1))),
            known=space.asarray(start.values),
            total=space.asarray(tokens @ self.queries.linear),
        )
        enough = ENOUGH * self.queries.noise
        guess, nothing = guess_tokens(space, asked), space.zeros(len(tokens), self.chosen.size, start.heads)
        reads = self._reads_of(fit_tokens(space, asked, nothing if guess is None else guess, enough), allowed)
        missing = [n for n, read in enumerate(reads) if read is None]
        if guess is not None and missing:  # values that share a direction spoil the guess
            index = space.indices(missing)
            fewer = replace(
                asked,
                answers=space.xp.take(asked.answers, index, axis=0),
                total=space.xp.take(asked.total, index, axis=0),
            )
            again = self._reads_of(fit_tokens(space, fewer, nothing[: len(missing), ...], enough), allowed)
            for n, read in zip(missing, again, strict=True):
                reads[n] = read
        return reads

    def _reads_of(self, fit: TokensFit, allowed: float) -> list[_Read | None]:
        """What was fitted, with errors by those of the answers and by those of what is known of the other token."""
        space, start, queries = self.queries.work, self.start, self.queries
        xp, draws = space.xp, start.value_draws
        tokens, groups, many, heads = fit.weights.shape
        sizes = [
            queries.residual_error(float(each), fit.freedom, start.logits[self.chosen], start.values)
            for each in fit.residual
        ]
        shape = (tokens, draws.shape[0], groups * many + 1, fit.frame.shape[2])
        changes = space.normal(queries.rng, *shape) * space.asarray(sizes)[:, None, None, None]
        # (draws, J, heads), and weights (tokens, 1, J, heads)
        logits = space.asarray(np.repeat(start.logit_draws[:, self.chosen], many, axis=1))
        known, new = (xp.reshape(each, (tokens, 1, groups * many, heads)) for each in (fit.others, fit.weights))
        inner = space.asarray(start.values) @ fit.frame  # (tokens, heads, q)
        own = (known * (1 - known) * logits) @ inner[:, None, :, :]
        own = own - (known * new * logits) @ (fit.values @ fit.frame)[:, None, :, :]
        own = own + known @ (space.asarray(draws) @ fit.frame[:, None, :, :])
        changes[:, :, :-1, :] -= own
        moved, values = floats(fit.respond(changes)[1]), floats(fit.values)
        return [
            _Read(values[n], float(residual), float(fit.condition[n]), moved[n]) if residual <= allowed else None
            for n, residual in enumerate(fit.residual)
        ]

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
        size = self.queries.residual_error(fit.residual, fit.freedom, start.logits[self.chosen], start.values)
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
        work = Space.of(known.matrix)
        matrices = [known.matrix[:, ends[h] : ends[h + 1]] @ work.asarray(spans[h]) for h in range(heads)]
        stacked = work.xp.stack(matrices)
        told = floats(work.asarray(np.stack(self.tokens)) @ stacked)
        # Read once more from the sum over heads: what spans are wrong by, of which fitting them hides a part.
        hides = 2 * count / (count - max(ranks))
        apart = np.sqrt(np.mean((told - values) ** 2, axis=1)) * hides  # (heads, outputs)
        drawn = np.sqrt(np.mean(np.stack(self.draws, axis=2) ** 2, axis=(0, 2)))
        error = max(self.error, float(np.sqrt(np.mean(apart**2))))
        turn, sizes = svd(together)[:2] if known.turn is None or known.sizes is None else (known.turn, known.sizes)
        weakest = int(np.sum(sizes < WEAK * np.median(sizes)))
        low = floats(turn)[:, sizes.size - min(weakest, MOST_WEAK) : sizes.size].T  # (n, all ranks)
        weak = np.stack([low[:, ends[h] : ends[h + 1]] @ spans[h] for h in range(heads)], axis=1)
        return VectorValues(
            matrices=stacked,
            ranks=np.array(ranks),
            tokens=count,
            error=error,
            spread=np.maximum(np.maximum(STRESS * drawn, apart), np.maximum(error, known.moved)),
            noise=self.noise,
            draws=np.zeros((0, *stacked.shape)),
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
            values = times(token, vector_values.matrices)
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
