"""Values of all tokens in heads of any positions whose tokens may not be long, with nothing assumed of their logits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from keyhole.arrays import Floats, Integers
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.multi_head.vector.first_token import CLEAR
from keyhole.methods.multi_head.vector.parts.bounded.planes import Planes, solve_beside, solve_planes, spans_of
from keyhole.methods.multi_head.vector.probe import HeadsHidden, VectorQueries
from keyhole.methods.multi_head.vector.values import VectorValues, solve_spanned
from keyhole.numerics.svd import least_squares, singular_values, svd
from keyhole.recovery import Outcome

# Last tokens beside which the first two tokens are asked, and any other one.
LAST, FEW = 7, 3
# Answers beyond those that span what there is.
SPARE = 2
# The first answers from which heads are counted.
FIRST = 8
# Tokens of a sequence: one or two that move the sum of all masses, two that are told, and the last one.
SHORTEST, USUAL = 4, 5
# Errors of answers are first taken for so many times what single tokens show: these have no logits.
LOOSE = 2.0**6
# Tokens that move the sum of all masses are this part as long as others, or longer; the longest stay off the bound.
UNEVEN, FROM_RIM = 0.5, 2.0**-20
# Random draws of errors that show what they make of values.
DRAWS = 8
# Answers are those of heads where they are off by no more than so many times what errors of their size make of that.
MISFIT = 64.0
# Values from spans that may be off by more than this part of them are not used: all tokens are read instead.
BLURRED = 1e-3


@dataclass(frozen=True)
class KnownValues:
    """Heads, the size of their logits, and their values; of one token as that was read."""

    logit_sizes: Floats  # (heads,)
    known: VectorValues
    token: Floats  # (width,) of about norm one
    values: Floats  # (heads, outputs) of it
    scale: float  # norm of tokens at which logits are of that size

    @property
    def heads(self) -> int:
        """Heads that show."""
        return int(self.values.shape[0])

    @property
    def relative_error(self) -> float:
        """What answers are off by where weights are as different as logits make them, over values."""
        size = float(np.sqrt(np.mean(self.known.matrices**2)))
        return self.known.error / size * min(1.0, float(np.max(self.logit_sizes)))


@dataclass
class _Answers:
    """All that was answered, each less what the last token alone is answered."""

    movers: Floats  # (n, outputs) of tokens that move the sum of all masses
    lines: Floats  # (last tokens, n, outputs) beside the first two tokens
    free: Floats  # (n, outputs) of these alone
    tokens: Floats  # (2 + known, width) of about norm one: the first two, and others
    sums: Floats  # (2 + known, outputs) their values over all heads
    more_lines: list[Floats] = field(default_factory=list)  # of every other token
    more_free: list[Floats] = field(default_factory=list)

    def drawn(self, noise: float, rng: np.random.Generator) -> _Answers:
        """The same with errors as large as those they may have."""

        def moved(array: Floats) -> Floats:
            return np.asarray(array + noise * rng.standard_normal(array.shape))

        return replace(
            self,
            movers=moved(self.movers),
            lines=moved(self.lines),
            free=moved(self.free),
            sums=moved(self.sums),
            more_lines=[moved(each) for each in self.more_lines],
            more_free=[moved(each) for each in self.more_free],
        )


@dataclass(frozen=True)
class _Solved:
    """Values of the tokens that were read."""

    values: Floats  # (heads, tokens, outputs)
    misfit: float  # root mean square of what answers are off by
    weights: Floats  # (n, 2, heads) of the first two tokens, of the answers to them alone


def ask_bounded_values(queries: VectorQueries) -> Steps[KnownValues]:
    """The number of heads and their values, whatever their logits are, as long as masses are those of tokens alone.

    Beside a last token g the answer to tokens x + g is Σ_h Σ_x weight_h(x)·x·V_h, for weights add up to one. The first
    two tokens are told by `solve_planes`, all others beside the second of them by `solve_beside`, and answers to
    nothing else then tell values in full. Tokens that move the sum of all masses take H − 1 directions, or as many as
    outputs leave room for: 3·H numbers an answer at least. About H·(H + 10) + 30 queries, and 4·H + 4 for each token
    whose values are asked for.
    """
    reader = _Reader(queries)
    yield from reader.ask_heads()
    if reader.heads == 1:
        return reader.single_head()
    yield from reader.ask_movers()
    yield from reader.ask_first()
    known = 2
    while True:
        count = min(queries.outputs // reader.heads + SPARE if known == 2 else known, queries.width) - known
        yield from reader.ask_more(max(count, 1))
        known = len(reader.answers.tokens)
        solved = reader.solve(complete=known >= queries.width)
        if solved is not None:
            return solved


class _Reader:
    def __init__(self, queries: VectorQueries) -> None:
        self.queries, self.rng = queries, queries.rng
        if queries.longest < SHORTEST:
            raise HeadsHidden(
                Outcome.WRONG_FAMILY,
                f"telling heads apart within a bound on norms takes sequences of {SHORTEST} tokens: allow those "
                "(max_length)",
            )
        self.places = 1 if queries.longest < USUAL else 2
        drawn = queries.rng.standard_normal((queries.width, queries.width))
        self.basis = np.linalg.qr(drawn)[0]
        self.heads, self.mover = 0, queries.directions(1)
        self.far = 2 * queries.scale * (1 - FROM_RIM)

    def _units(self, count: int) -> Floats:
        drawn = self.rng.standard_normal((count, self.queries.width))
        return np.asarray(drawn / np.linalg.norm(drawn, axis=1, keepdims=True))

    def _floor(self, shape: tuple[int, ...]) -> float:
        return float(CLEAR * self.queries.noise * (shape[0] ** 0.5 + shape[1] ** 0.5))

    def _rank(self, answers: Floats) -> int:  # (n, outputs)
        """How many directions answers have; what errors make of the others tells how large these are."""
        sizes = singular_values(answers)
        rank = int(np.sum(sizes > LOOSE * self._floor(answers.shape)))
        free = (answers.shape[0] - rank) * (answers.shape[1] - rank)
        if free > 0:
            self.queries.noise = max(self.queries.noise, float(np.sqrt(np.sum(sizes[rank:] ** 2) / free)))
        return int(np.sum(sizes > self._floor(answers.shape)))

    def _movers(self, count: int, norm: float) -> Floats:  # -> (count, width)
        """Random tokens of the directions that move the sum of all masses, not all of one norm."""
        tokens = self.rng.standard_normal((count, len(self.mover))) @ self.mover
        tokens *= norm * self.rng.uniform(UNEVEN, 1.0, (count, 1)) / np.linalg.norm(tokens, axis=1, keepdims=True)
        return self.queries.on_grid(tokens)

    def _ask(self, last: Floats, index: Integers, tokens: list[Floats]) -> Steps[Floats]:
        """Answers to tokens + g, (n, width), for last tokens g."""
        every = np.arange(index.size, dtype=np.int64)
        added = [(each, every, np.ones(index.size)) for each in tokens]
        return (yield from self.queries.ask("values", last, index, added))[:, 0]

    def _ask_movers(self, count: int) -> Steps[Floats]:
        """Answers to tokens that move the sum of all masses alone, each beside a last one of its own."""
        last = self.queries.on_grid(self.queries.scale * self._units(count))
        movers = [self._movers(count, self.queries.scale) for _ in range(self.places)]
        return (yield from self._ask(last, np.arange(count, dtype=np.int64), movers))

    def _ask_lines(self, index: Integers, tokens: list[Floats]) -> Steps[Floats]:
        """Answers to tokens behind others that move the sum of all masses, as long as any; last ones are such, too.

        What last ones add lies in the span of these.
        """
        own = self.last[index]
        movers = [self._movers(index.size, self.far) for _ in range(self.places)]
        return (yield from self._ask(self.last, index, [each - own for each in (*movers, *tokens)]))

    def ask_heads(self) -> Steps[None]:
        """How many heads there are: one token beside many last ones spans one direction in each."""
        queries, self.places = self.queries, self.places
        answers, count = np.zeros((0, queries.outputs)), FIRST
        while True:
            answers = np.concatenate([answers, (yield from self._ask_movers(count - len(answers)))])
            rank = self._rank(answers)
            if rank + SPARE <= count:
                break
            if count >= queries.outputs + SPARE:
                raise HeadsHidden(
                    Outcome.WRONG_FAMILY, "there are as many heads as outputs, or the box is no layer of heads"
                )
            count *= 2
        if rank == 0:
            raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, "one token adds nothing to any answer")
        room = queries.outputs // rank - 2
        if rank > 1 and room < 1:
            raise HeadsHidden(
                Outcome.WRONG_FAMILY,
                f"{rank} heads within a bound on norms are told apart by {3 * rank} outputs, and there are "
                f"{queries.outputs}",
            )
        self.heads, self.counted = rank, answers
        self.mover = np.concatenate([self.mover, queries.directions(max(min(max(rank - 1, 2), room), 1))[1:]])

    def ask_movers(self) -> Steps[None]:
        """What the values of tokens that move the sum of all masses span."""
        count = len(self.mover) * self.heads + SPARE
        more = count - len(self.counted) if len(self.mover) == 1 else count
        answers = self.counted
        if more > 0:
            answers = np.concatenate([answers, (yield from self._ask_movers(more))])
        self.movers, self.last = answers, self._movers(LAST, self.far)

    def ask_first(self) -> Steps[None]:
        """The first two tokens: beside tokens that move the sum of all masses, and without."""
        queries, many = self.queries, self.heads + SPARE
        tokens = queries.on_grid(self.far * self.basis[:2])
        index = np.repeat(np.arange(LAST, dtype=np.int64), many)
        lines = yield from self._ask_lines(index, [np.tile(each, (index.size, 1)) for each in tokens[::-1]])
        count = 2 * self.heads + SPARE
        self.ends = queries.on_grid(queries.scale * self._units(count))
        pair = [np.tile(each / 2, (count, 1)) for each in tokens[::-1]]
        free = yield from self._ask(self.ends, np.arange(count, dtype=np.int64), pair)
        self.answers = _Answers(self.movers, lines.reshape(LAST, many, -1), free, tokens, tokens @ queries.linear)

    def ask_more(self, count: int) -> Steps[None]:
        """The next tokens of the basis beside the second one."""
        queries, known = self.queries, len(self.answers.tokens)
        tokens, second = queries.on_grid(self.far * self.basis[known : known + count]), self.answers.tokens[1]
        many, ends = self.heads + 1, self.heads + 1
        index = np.tile(np.repeat(np.arange(FEW, dtype=np.int64), many), count)
        own = np.repeat(tokens, FEW * many, axis=0)
        lines = yield from self._ask_lines(index, [np.tile(second, (index.size, 1)), own])
        index, own = np.tile(np.arange(ends, dtype=np.int64), count), np.repeat(tokens, ends, axis=0)
        free = yield from self._ask(self.ends, index, [np.tile(second / 2, (index.size, 1)), own / 2])
        answers = self.answers
        self.answers = replace(
            answers,
            tokens=np.concatenate([answers.tokens, tokens]),
            sums=np.concatenate([answers.sums, tokens @ queries.linear]),
            more_lines=[*answers.more_lines, *lines.reshape(count, FEW, many, -1)],
            more_free=[*answers.more_free, *free.reshape(count, ends, -1)],
        )

    def _read(self, answers: _Answers) -> _Solved:
        """Values of all tokens that were asked for."""
        heads = self.heads
        outer = svd(answers.movers, full_matrices=True)[2][len(self.mover) * heads :].T  # (outputs, the others)
        planes = solve_planes(spans_of(answers.lines @ outer, heads), *(answers.sums[:2] @ outer))
        weights = planes.weights(answers.free @ outer)
        sums = np.kron(np.eye(2), np.ones(heads))
        design = np.concatenate([weights.reshape(len(weights), -1), sums])
        right = np.concatenate([answers.free, answers.sums[:2]])
        both = least_squares(design, right)
        rests = [design @ both - right]
        values = [both[:heads], both[heads:]]
        for number, (lines, free) in enumerate(zip(answers.more_lines, answers.more_free, strict=True)):
            total = answers.sums[2 + number]
            own, misfit = solve_beside(spans_of(lines @ outer, heads), planes.second, total @ outer)
            shares = Planes(own, planes.second, misfit).weights(free @ outer)
            design = np.concatenate([shares[:, 0], np.ones((1, heads))])
            right = np.concatenate([free - shares[:, 1] @ values[1], total[None]])
            values.append(least_squares(design, right))
            rests.append(design @ values[-1] - right)
        misfit = float(np.sqrt(np.mean(np.concatenate(rests) ** 2)))
        return _Solved(np.stack(values, axis=1), misfit, weights)

    def solve(self, *, complete: bool) -> KnownValues | None:
        """Values of all tokens from the spans of those that were read, or all of a basis; None: more are needed."""
        queries, heads = self.queries, self.heads
        found = self._read(self.answers)
        draws = [self._read(self.answers.drawn(queries.noise, self.rng)) for _ in range(DRAWS)]
        allowed = float(np.sqrt(np.mean([each.misfit**2 for each in draws]))) + queries.noise
        if not found.misfit <= MISFIT * allowed:
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                f"values of {heads} heads are {found.misfit:.2g} off answers that err by {allowed:.2g}: the box is no "
                "layer of heads",
            )
        tokens = self.answers.tokens
        others = [each.values[_matching(each.values, found.values)] for each in draws]
        errors = np.sqrt(np.mean([(each - found.values) ** 2 for each in others], axis=0))  # (heads, tokens, outputs)
        floors = CLEAR * np.sqrt(np.mean(errors**2, axis=(1, 2))) * (len(tokens) ** 0.5 + queries.outputs**0.5)
        ranks = [
            max(1, int(np.sum(singular_values(own) > floor))) for own, floor in zip(found.values, floors, strict=True)
        ]
        spanned = max(ranks) < len(tokens) and sum(ranks) <= queries.outputs
        if not spanned and not complete:
            return None

        def whole(values: Floats) -> Floats:
            if spanned:
                return solve_spanned(values, queries.linear, ranks)
            return np.asarray(np.linalg.solve(tokens, values))

        matrices = whole(found.values)
        moved = np.sqrt(np.mean([(whole(each) - matrices) ** 2 for each in others], axis=0))
        spread = np.sqrt(np.mean(moved**2, axis=1))  # (heads, outputs)
        error = float(np.sqrt(np.mean(spread**2)))
        if spanned and not complete and error > BLURRED * float(np.sqrt(np.mean(matrices**2))):
            return None
        return self._whole(matrices, np.array(ranks), error, spread, found.weights)

    def _whole(self, matrices: Floats, ranks: Integers, error: float, spread: Floats, weights: Floats) -> KnownValues:
        count = 1 if self.heads == 1 else len(self.answers.tokens)
        nothing, weak = matrices[None][:0], np.zeros((0, *spread.shape))
        values = VectorValues(matrices, ranks, count, error, spread, self.queries.noise, nothing, weak, traded=0.0)
        weights = 2 * weights  # of tokens half as long
        rest = 1 - np.sum(weights, axis=1, keepdims=True)
        with np.errstate(all="ignore"):
            logits = np.where((weights > 0) & (rest > 0), np.log(weights / rest), np.inf)
        if not np.all(np.isfinite(logits)):
            raise Unrecoverable(Outcome.SATURATED, "some head has all of its weight on one token")
        # What distances and biases add is nearly the same beside every last token.
        sizes = np.sqrt(np.mean((logits - np.mean(logits, axis=0)) ** 2, axis=(0, 1)))
        token = self.basis[0]
        return KnownValues(sizes, values, token, token @ matrices, self.queries.scale)

    def single_head(self) -> KnownValues:
        """The values of a single head, which are those of the sum."""
        queries = self.queries
        error = queries.noise / queries.scale
        matrices = queries.linear[None]
        rank = max(1, int(np.sum(singular_values(matrices[0]) > self._floor(matrices[0].shape) / queries.scale)))
        weights = np.full((1, 2, 1), 1 / 6)
        return self._whole(matrices, np.array([rank]), error, np.full((1, queries.outputs), error), weights)


def _matching(values: Floats, others: Floats) -> Integers:  # (heads, tokens, outputs) -> (heads,)
    """The order in which heads are nearest to others."""
    apart = np.sum((values[None] - others[:, None]) ** 2, axis=(2, 3))
    return np.asarray(linear_sum_assignment(apart)[1], dtype=np.int64)
