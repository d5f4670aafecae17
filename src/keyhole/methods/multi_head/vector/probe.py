"""An oracle of several heads with several outputs, asked at tokens of natural norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from keyhole.arrays import Array, Floats, Integers, Space, floats, namespace, numpy_space
from keyhole.methods.base import Steps, Unrecoverable, together
from keyhole.methods.forms.scale import floor_power
from keyhole.methods.forms.value import Value
from keyhole.numerics.orthogonal import orthonormal
from keyhole.numerics.svd import decomposed
from keyhole.queries import Measurements, Plan, Position, Signature, Term, TokenRows
from keyhole.recovery import Outcome

# One-token answers are affine up to errors of this many roundings of their size, root mean square.
AFFINE = 2.0**8
# Values that add up to less than this part of what they do may be larger than that by as much.
CANCELLED = 1 / 16
# Random tokens that precision is measured with.
PRECISION_QUERIES = 3
# Relative errors of 10 to this are as small as they come; each that many decades more asks for once more as much.
PRECISE, LESS = -15.0, 2.0
# Answers are coarse from this patience on: a relative error of 1e-13.
COARSE = 2.0
# The shortest of directions that cannot be orthogonal.
UNEVEN = 0.5
# Bits of a token's entries that are left for sums of two tokens.
SPARE_BITS = 4
# The scale is looked for with this many pairs of tokens, in steps of this factor ...
PAIRS, LADDER = 3, 4.0
# ... until attention does no more than this much more at the next; tokens are chosen where it does this part of it.
PLATEAU, PART = 1.15, 0.6
MOST_RUNGS = 40
# Heads are counted beside so many last tokens.
FIRST_ROUND = 4
# Sequences of so many tokens decide everything; of fewer they do not.
FEWEST_TOKENS = 3
# Residuals of so many degrees of freedom tell errors, and errors are taken for so many times as much.
TOLD_BY, SHOWN = 64, 2.0


# Matrices of fewer numbers stay on the host, which is done with them before a device has begun.
LARGE = 2**16


class HeadsHidden(Unrecoverable):
    """Raised where vectors of answers do not separate the heads: single outputs and long tokens still may."""


@dataclass(frozen=True)
class Spans:
    """Orthonormal bases of what the values of each head span."""

    directions: list[Floats]  # (rank, outputs) for each head
    tilts: list[Floats]  # (rank,) deviations of the entries of each direction

    @property
    def total(self) -> int:
        """The sum of all ranks."""
        return sum(map(len, self.directions))


@dataclass(frozen=True)
class Shares:
    """The values of tokens as combinations of such directions, those of all heads one after the other."""

    matrix: Array  # (width, sum of all ranks)
    moved: Floats | float  # (heads, outputs) what errors of the directions make of a value of a unit token
    # Left singular vectors and singular values of all directions together, where they are known.
    turn: Array | None = None
    sizes: Floats | None = None


@dataclass
class VectorQueries:
    """The oracle, and what is known of it: its affine part and the size of its errors."""

    signature: Signature
    value: Value
    rng: np.random.Generator
    scale: float = 1.0  # norm of tokens
    noise: float = 0.0  # deviation of one number of an answer at that norm
    patience: float = 1.0  # how many times more to ask, for errors to average out
    on_device: ClassVar[bool] = True  # whether large matrices may be worked with there
    everywhere: bool = False  # whether answers at all positions are seen, and are those of the last one
    asked: int = 1  # tokens of the longest sequence
    first_round: int = FIRST_ROUND  # last tokens that the first token is asked beside before heads are counted
    linear: Floats = field(init=False)  # (width, outputs) the sum of all heads' values
    bias: Floats = field(init=False)  # (outputs,)
    units: Floats = field(init=False)  # (outputs,) what answers, linear part and bias are divided by
    outputs: int = field(init=False)  # numbers per answer
    # Copies of a known token, of a new one and of the last that values are read from; None: those that suit the heads.
    copies: tuple[tuple[int, int, int], ...] | None = None
    filled: float = 1.0  # the part of the outputs that weights may take up
    thorough: bool = False  # whether all forms are read, though few tell the others: they do so to fewer digits
    coarse: bool = False  # whether answers have few digits, as those of float32: errors decide what is told at once
    between: int = 0  # further tokens between those asked for and the last one: here copies of that
    window: float = np.inf  # tokens that the last one sees, itself included

    def __post_init__(self) -> None:
        self.linear = floats(self.value.vector)
        self.bias = floats(self.value.bias)
        self.outputs = int(self.bias.shape[0])
        self.units = np.ones(self.outputs)
        self._last: tuple[Floats, TokenRows, Floats] | None = None  # last tokens that were asked, and their answers
        self._effects = np.zeros(self.outputs)  # what tokens add to answers, over their norm, the most seen

    @property
    def width(self) -> int:
        """Numbers per token."""
        return self.signature.width

    @property
    def longest(self) -> float:
        """Most tokens per sequence that matter, less those between."""
        return min(self.signature.max_length or float("inf"), self.window) - self.between

    def on_grid(self, tokens: Floats) -> Floats:
        """Tokens with so few digits that sums of two of them, and their halves, are exact in the oracle's dtype."""
        unit = floor_power(2 * self.scale) * self.signature.space.spacing * 2.0**SPARE_BITS
        return np.asarray(np.round(tokens / unit) * unit)

    def directions(self, count: int) -> Floats:  # (count, width)
        """Random unit vectors, orthogonal as far as that goes; elsewhere shorter ones, no two of the same length.

        In one dimension only lengths are different.
        """
        drawn = self.rng.standard_normal((count, self.width))
        if 1 < self.width >= count:
            return orthonormal(self.work, drawn)
        lengths = self.rng.uniform(UNEVEN, 1.0, (count, 1))
        return np.asarray(drawn * lengths / np.linalg.norm(drawn, axis=1, keepdims=True))

    def ask(
        self,
        stage: str,
        last: Floats,  # (m, width) last tokens
        index: Integers,  # (n,) which of them ends sequence n
        added: list[tuple[Floats, Integers, Floats]],  # (rows, index, scale): tokens before it, less the last one
        plain: int = 1,  # copies of the last token
        places: tuple[int, ...] = (-1,),  # positions whose answers are wanted: any where all are seen, else the last
    ) -> Steps[Floats]:  # (n, places, outputs)
        """Answers of [added_1 + g; …; g; …; g] at several positions, less the share g has of them."""
        space = self.signature.space
        if self._last is None or self._last[0] is not last:  # mostly they are those of the query before
            self._last = last, TokenRows(space.asarray(last)), self._own_answers(last)
        _, rows_of_last, own = self._last
        ends = Term(rows_of_last, space.indices(index))
        positions: list[Position] = [
            [Term(TokenRows(space.asarray(rows)), space.indices(which), space.asarray(scale)), ends]
            for rows, which, scale in added
        ]
        plain = plain + self.between
        self.asked = max(self.asked, len(positions) + plain)
        answers: Measurements = yield Plan(stage, index.size, [*positions, *([[ends]] * plain)])
        return self.values_at(answers, places) - own[index][:, None]

    def _own_answers(self, last: Floats) -> Floats:  # (m, width) -> (m, outputs)
        """What tokens are answered alone."""
        work = self.work
        return floats(work.asarray(last) @ work.asarray(self.linear)) + self.bias

    def ask_each(
        self,
        stage: str,
        last: Floats,  # (m, width) last tokens
        index: Integers,  # (n,) which of them ends sequence n
        each: list[tuple[list[tuple[Floats, Integers, Floats]], int]],  # tokens before it, and its copies: k of them
    ) -> Steps[Floats]:  # (n, views, k, outputs)
        """Answers with several numbers of copies."""
        asked = [self.ask(stage, last, index, added, plain, self.views) for added, plain in each]
        columns = yield from together(asked)
        return np.stack(columns, axis=2)

    def ask_shares(self, spans: Spans) -> Steps[Shares | None]:
        """Values of tokens as combinations of what heads span, from their sum; None where heads share directions."""
        if spans.total > self.outputs:
            return None
        work = self.work
        turn, sizes, inverse = decomposed(work, np.concatenate(spans.directions))
        shares = work.asarray(self.linear) @ inverse
        # Spans that are tilted by errors of what was read move all shares, the more the nearer heads are to each other.
        size = float(work.xp.mean(work.xp.sum(shares**2, axis=1))) ** 0.5
        tilt = max(float(each[-1]) for each in spans.tilts)
        least = float(np.min(sizes[sizes > max(inverse.shape) * work.spacing * sizes[0]]))
        return Shares(shares, size * tilt * (1 + 1 / least), turn, sizes)
        yield  # pragma: no cover - others ask

    def origin(self, width: int) -> Floats:  # (1, width)
        """The last token, over the scale, beside which logits are those of the score bias: the zero token."""
        return np.zeros((1, width))

    def expect(self, values: Floats) -> None:
        """Say what values of all heads (heads, width, outputs) are expected, where answers need that to be read."""

    def values_at(self, answers: Measurements, places: tuple[int, ...] | None = None) -> Floats:  # (n, places, outputs)
        """Answers at some positions, or at all of them, as plain numbers."""
        values = floats(answers.values) / self.units
        if self.signature.positions == "last":
            return values[:, None]
        return values if places is None else values[:, list(places)]

    @property
    def views(self) -> tuple[int, ...]:
        """Positions whose answers depend on one token beside a last one: also its own where unmasked."""
        return (-1, 0) if self.everywhere else (-1,)

    def ask_pairs(
        self, stage: str, last: Floats, token: Floats, copies: Sequence[tuple[int, int]]
    ) -> Steps[Floats]:  # (last tokens, views, multiplicities, outputs)
        """[copies × (token + g); copies × g] for each last token g, at the position of g, and at that of token + g."""
        count = last.shape[0]
        rows = (token[None, :], np.zeros(count, dtype=np.int64), np.ones(count))
        every = np.arange(count, dtype=np.int64)
        return (yield from self.ask_each(stage, last, every, [([rows] * many, few) for many, few in copies]))

    def ask_probes(self) -> Steps[None]:
        """Settle scale, precision, and whether all positions may be used."""
        yield from self._ask_scale()
        self._even_out()
        yield from self.ask_precision()
        yield from self._ask_positions()

    def _even_out(self) -> None:
        """Choose units, powers of two, in which all outputs have errors of one size.

        Rounding errs in proportion to what an output is made of: the values of tokens, which may cancel in the sum over
        heads, and the bias. An output that nothing is written to has none.
        """
        values = np.maximum(self._effects, np.sqrt(np.mean(self.linear**2, axis=0)))
        made = self.scale * values + np.abs(self.bias)
        errors = made + (made > 0) * self.signature.noise.deviation / self.signature.space.eps
        largest = float(np.max(errors, initial=0.0))
        self.units = np.array([floor_power(error / largest) if error > 0 else 1.0 for error in errors])
        self.linear, self.bias, self._effects = (each / self.units for each in (self.linear, self.bias, self._effects))
        self._last = None

    def _ask_positions(self) -> Steps[None]:
        """Whether every position answers as the last one does: three tokens in two orders.

        A causal mask or encoded positions show; then only the last position is read.
        """
        if self.signature.positions == "last":
            return
        space = self.signature.space
        tokens = space.asarray(self.on_grid(self.scale * self.directions(FEWEST_TOKENS)))
        turned = np.arange(FEWEST_TOKENS)[None, :] - np.arange(2)[:, None]  # in the second, each moves up by one
        order = turned % FEWEST_TOKENS
        plan = Plan("precision", 2, [[Term(TokenRows(tokens), space.indices(column))] for column in order.T])
        answers = self.values_at((yield plan))
        apart = float(np.sqrt(np.mean((answers[0] - np.roll(answers[1], -1, axis=0)) ** 2)))
        size = float(np.sqrt(np.mean(answers**2)))
        self.everywhere = apart <= AFFINE * self.signature.space.eps * size + 2 * SPARE_BITS * self.noise

    def ask_precision(self) -> Steps[None]:
        """Errors at tokens of the chosen norm: one-token answers are affine but for those."""
        last = self.on_grid(self.scale * self.directions(PRECISION_QUERIES))
        rest = (yield from self.ask("precision", last, np.arange(last.shape[0], dtype=np.int64), []))[:, 0]
        own, effect = (float(np.sqrt(np.mean(each**2))) for each in (last @ self.linear, self.scale * self._effects))
        own = max(own, effect if own > CANCELLED * effect else effect / CANCELLED)
        size = float(np.hypot(own, np.sqrt(np.mean(self.bias**2))))
        error = float(np.sqrt(np.mean(rest**2)))
        declared, rounded = self.signature.noise.deviation, self.signature.space.eps * size
        if self.signature.noise.kind == "exact" and not error <= AFFINE * rounded:
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                f"answers to single tokens are not affine: {error:.2g} off where they are {size:.2g}, so there is more "
                f"in the box than heads and biases, or noise that was not declared",
            )
        self.noise = max(error, declared, rounded)
        self.patience = max(1.0, 1 + (math.log10(self.noise / size) - PRECISE) / LESS if size > 0 else 1.0)
        self.coarse = self.patience > COARSE

    def _ask_effect(self, ways: Floats, norm: float, plain: int = 1) -> Steps[float]:
        """What attention adds to the mean of a token and so many copies of a last one, over their norm."""
        self.scale, every = norm, np.arange(PAIRS, dtype=np.int64)
        tokens = self.on_grid(norm * ways)
        rows = (tokens[:PAIRS], every, np.ones(PAIRS))
        answers = (yield from self.ask("scale", tokens[PAIRS:], every, [rows], plain))[:, 0]
        self._effects = np.maximum(self._effects, np.sqrt(np.mean(answers**2, axis=0)) / norm)
        return float(np.linalg.norm(answers - tokens[:PAIRS] @ self.linear / (plain + 1))) / norm

    def _pairs(self) -> Floats:  # (2·PAIRS, width)
        """Tokens, then last tokens, none orthogonal to its partner: a multiple of the identity does nothing there."""
        return np.concatenate([self.directions(PAIRS), self.directions(PAIRS)])

    def _ask_scale(self) -> Steps[None]:
        """The norm of tokens at which attention chooses, without being decided."""
        if self.longest < FEWEST_TOKENS:
            raise Unrecoverable(
                Outcome.NOT_IDENTIFIABLE,
                "sequences of two tokens do not tell heads apart: allow sequences of three (max_length)",
            )
        limit = float(min(self.signature.norm_limit / 2, self.signature.space.huge**0.25))
        pairs = self._pairs()
        seen: dict[float, float] = {}

        def ask_effect(norm: float) -> Steps[float]:
            if norm not in seen:
                seen[norm] = yield from self._ask_effect(pairs, norm)
            return seen[norm]

        norm = limit if self.signature.max_norm is not None else min(1.0, limit)
        top = yield from ask_effect(norm)
        for _ in range(MOST_RUNGS):  # up, as long as attention does more there
            if norm >= limit:
                break
            higher = yield from ask_effect(min(norm * LADDER, limit))
            if higher <= PLATEAU * top and higher > self.zero_effect(norm):
                break
            norm, top = min(norm * LADDER, limit), max(top, higher)
        floor = self.zero_effect(norm)
        if top <= floor:  # no attention at all, or one that cancels beside a single last token
            ways = self._pairs()
            for tried in list(seen):  # heads of opposite logits and equal values
                if (yield from self._ask_effect(ways, tried, 2)) > self.zero_effect(tried):
                    raise HeadsHidden(Outcome.WRONG_FAMILY, "heads cancel wherever two tokens are asked, but not three")
            self.scale = min(1.0, limit)
            return
        for _ in range(MOST_RUNGS):  # down, until it does less
            if seen[norm] <= PART * top:
                break
            norm /= LADDER
            yield from ask_effect(norm)
            if self.zero_effect(norm) > PART * top:
                break
        if not seen[norm] <= PART * top:  # also when nan
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                f"attention does the same to tokens of norms from {norm:.1g} to {max(seen):.1g}, which no softmax does",
            )
        above = norm * LADDER
        if above in seen and seen[above] > PART * top > seen[norm] > 0:  # between two rungs
            share = np.log(PART * top / seen[norm]) / np.log(seen[above] / seen[norm])
            norm *= LADDER**share
        self.scale = float(min(norm, limit))

    def errors(self, logits: Floats, values: Floats) -> float:
        """Deviation of an answer: its own rounding, and that of the logits behind its weights."""
        spread = self.signature.space.eps * self.width**0.5 * float(np.sqrt(np.mean(np.minimum(logits**2, 100.0))))
        return float(self.noise + spread * float(np.sqrt(np.mean(values**2))))

    def residual_error(self, residual: float, freedom: int, logits: Floats, values: Floats) -> float:
        """Deviation of an answer by the residual of a fit, or its bound where degrees of freedom are few."""
        if freedom < TOLD_BY:
            return residual + self.errors(logits, values)
        return SHOWN * max(residual, self.noise)

    @property
    def work(self) -> Space:
        """Where large matrices are worked with: where the oracle is, if that is a device and they are large."""
        space = self.signature.space
        if not (self.on_device and space.runs_ahead and self.width * self.outputs >= LARGE):
            return numpy_space()
        return replace(space, dtype=space.xp.float64, coarse=0.0)

    def logits(self, odds: Array) -> tuple[Array, Array | float]:  # (n, heads, k)
        """Logits of tokens by their odds against the last one, and how much more uncertain they are than the odds."""
        return namespace(odds).log(odds), 1.0

    def zero_effect(self, norm: float) -> float:
        """What rounding makes of an effect that is not there."""
        size = float(np.linalg.norm(self.linear)) + float(np.linalg.norm(self.bias)) / norm
        return float(2.0**SPARE_BITS * self.signature.space.eps * size + self.signature.noise.deviation / norm)
