"""A head whose answers are rounded to a few binary digits, to the precision of the arithmetic behind them.

Rounding to a floating-point dtype is relative: an answer of nearly zero is known nearly exactly. Questions whose
predicted answer is zero therefore show what is still wrong with the prediction, to all the digits of the dtype, and
each round of them adds that many digits to what is known.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from keyhole.arrays import Array, Floats, Integers, floats
from keyhole.errors import KeyholeError, UsageError
from keyhole.measure import DIGITS, Measurements, Plan, Rows, Signature, Term
from keyhole.methods.base import BiasShows, Estimate, Steps, Unrecoverable
from keyhole.methods.pair_queries import OwnForms, pair_plan, read_own_forms, refuse_short_sequences
from keyhole.methods.scale import LEVER, floor_power
from keyhole.model import SingleHead
from keyhole.numerics.dtypes import grid_of
from keyhole.numerics.logit import rounding
from keyhole.numerics.steering import SECOND_ORDER, Design, Pairs
from keyhole.recovery import Outcome

ASSUMPTIONS = (
    "the box computes one softmax head over its raw tokens, read at the last position, without biases",
    "answers are rounded to the nearest number of the declared dtype and to nothing else",
    "rounding errors of different answers are independent",
)

CONTRADICTION = (
    "two readings of a form contradict each other: the box is no single head without biases, or its answers are "
    "rounded otherwise than declared; try method single-head"
)

# The largest logit of a column is brought to this size: large against rounding, small against saturation.
AIM = 0.5
# A column that saturates is read again with a last token shorter by this.
SHRINK = 1 / 16
# The first probe of a scale where norms are free, and how many forms are probed.
FIRST_PROBE, PROBES = 2.0**-20, 8
MOST_PROBES = 80
# The last token along the value vector is so much shorter than others, so that its value can be balanced.
ALONG = 0.25
# A round that does not shrink the error by this factor is the last: the arithmetic has no more digits.
GAIN = 0.5
MOST_ROUNDS = 40
# Questions that show whether answers are rounded to the nearest number and not, say, towards zero.
CHECKS = 4
# Rows that are also read with a zero last token, where only a score bias has a logit.
BIAS_ROWS = 3
# Thresholds tried at once for the length of the value vector; each round divides its interval by one more than that.
THRESHOLDS = 3
# The first reading wants the length of the value vector so many times sharper than one answer tells it.
SHARPER = 16.0
# Largest value that may be answered where numbers beyond 65504 do not exist, with room for what is unknown.
HALF_PRECISION_LIMIT = 2.0**14


def by_null_queries(
    signature: Signature,
    rng: np.random.Generator,
    *,
    target_error: float | None = None,
    budget: float = math.inf,
) -> Steps[Estimate]:
    """W and v of f(X) = Σ softmax_i(x_iᵀ·W·x_N)·(x_i·v) from answers rounded to float32, float16 or bfloat16.

    One query an entry reads W about as well as one answer is; each further round of d² + d multiplies the error by
    about the unit roundoff of the dtype. Rounds go on until the error of an entry is `target_error` (root mean square
    of its radius before it is spread), the budget is spent, or the arithmetic of the box has no more digits.
    """
    if signature.noise.kind != "dtype":
        raise UsageError(f"null queries are for answers rounded to a dtype, not {signature.noise}")
    refuse_short_sequences(signature)
    value = _Ratios(signature)
    yield from value.read()
    yield from value.sharpen(value.relative / SHARPER, [value.main])
    yield from value.refine()  # one round ahead of the forms, so that its errors do not count
    forms = _Forms(signature, rng, value)
    try:
        yield from forms.read_first()
        rounds = 1
        while (
            rounds < MOST_ROUNDS
            and not forms.silent
            and not (target_error is not None and forms.error() <= target_error)
        ):
            if value.spent + forms.spent + forms.cost() + value.cost() + value.sharpening_cost() > budget:
                break
            before = forms.error()
            yield from value.refine()
            yield from forms.refine()
            rounds += 1
            if forms.error() > GAIN * before:
                break
        if value.spent + forms.spent + value.sharpening_cost() + CHECKS <= budget:
            goal = forms.error() if target_error is None else target_error
            yield from value.sharpen(goal / value.size(), range(value.outputs))
            yield from value.check_rounding()
    except KeyholeError as error:
        error.partial = forms.head() if forms.started else None
        raise
    width, rank = signature.width, value.rank
    return Estimate(
        params=forms.head(),
        radius=forms.radius_head(),
        counting_bound=width + -(-width * width // rank),
        assumptions=ASSUMPTIONS,
        details={"rounds": rounds, "expected_error": forms.error()},
    )


class _Ratios:
    """The value as ratios to its largest entry, which null queries sharpen, and that entry, which thresholds do."""

    def __init__(self, signature: Signature) -> None:
        self.signature, self.space = signature, signature.space
        noise = signature.noise
        self.unit, self.digits = noise.scale, DIGITS[noise.name]
        self.grid = grid_of(noise.name)
        # Whether answers below the smallest normal number lose digits: until one shows that they do not.
        self.flushed = True
        self.norm = 1.0 if signature.max_norm is None else floor_power(signature.norm_limit)
        self.units = Rows(self.space.eye(signature.width))
        self.spent = 0

    def told(self, values: Array) -> tuple[Floats, Floats]:
        """Answers and their radii."""
        answers = floats(values)
        steps = answers / self.grid.smallest
        if np.any((steps != np.round(steps)) & (np.abs(steps) < 2.0**self.digits)):
            self.flushed = False
        radius = np.abs(answers) * (self.unit / (1 - self.unit))
        return answers, radius + (self.grid.smallest / 2 if self.flushed else 0.0)

    def read(self) -> Steps[None]:
        """One-token queries, the zero token among them, which shows an output bias."""
        width, xp = self.signature.width, self.space.xp
        tokens = xp.concat([self.space.zeros(1, width), self.norm * self.space.eye(width)])
        measured: Measurements = yield Plan("value", width + 1, [[Term(Rows(tokens))]])
        self.spent += width + 1
        self.scalar = measured.values.ndim == 1
        answers, radius = self.told(measured.values[:, None] if self.scalar else measured.values)
        if np.any(np.abs(answers[0]) > radius[0]):
            raise BiasShows("the head has an output bias, which null queries do not read: use single-head")
        read, error = answers[1:] / self.norm, radius[1:] / self.norm
        self.outputs = read.shape[1]
        each = np.arange(self.outputs)
        self.place = np.argmax(np.abs(read), axis=0)  # (outputs,) of the largest entry
        largest, largest_error = read[self.place, each], error[self.place, each]
        self.main = int(np.argmax(np.linalg.norm(read, axis=0)))
        if np.abs(largest[self.main]) <= largest_error[self.main]:
            raise Unrecoverable(
                Outcome.NOT_IDENTIFIABLE,
                "the value vector is zero, so every answer is the same whatever the score matrix: it cannot be known",
            )
        silent = np.abs(largest) <= largest_error  # an output that is zero throughout
        self.low = np.where(silent, 0.0, np.abs(largest) - largest_error)
        self.high = np.where(silent, 0.0, np.abs(largest) + largest_error)
        self.sign = np.sign(largest)
        self.silent_radius = np.where(silent, np.max(error, axis=0), 0.0)
        divisor = np.where(silent, np.inf, largest)
        self.ratio = read / divisor
        self.settled = np.zeros(read.shape, dtype=bool)  # ratios that null queries cannot improve
        relative = largest_error / np.abs(divisor)
        self.radius = SECOND_ORDER * (error / np.abs(divisor) + np.abs(self.ratio) * relative)
        self.radius[self.place, each] = 0.0
        self.rank = int(np.linalg.matrix_rank(read)) if self.outputs > 1 else 1

    @property
    def largest(self) -> Floats:  # (outputs,)
        """The largest entries, with their signs."""
        return np.asarray(self.sign * (self.low + self.high) / 2)

    @property
    def relative(self) -> float:
        """Relative radius of the largest entry of the main output."""
        low, high = self.low[self.main], self.high[self.main]
        return float((high - low) / (high + low))

    def size(self) -> float:
        """The largest entry of all."""
        return float(np.max(self.high))

    def cost(self) -> int:
        """Queries of a round of `refine`."""
        return int(self.ratio.size - self.outputs)

    def refine(self) -> Steps[None]:
        """α·(e_i − ρ·e_k) for the ratio ρ as it is known: the answer is what is wrong with it."""
        row, output = np.nonzero(np.ones_like(self.ratio))
        keep = (row != self.place[output]) & (self.high[output] > 0) & ~self.settled[row, output]
        row, output = row[keep], output[keep]
        if not row.size:
            return
        length = floor_power(self.norm / 1.5)  # the second part is at most as long as the first
        known = self.ratio[row, output]
        index, scale = self.space.indices, self.space.asarray(-length * known)
        token = [Term(self.units, index(row), length), Term(self.units, index(self.place[output]), scale)]
        measured: Measurements = yield Plan("value", row.size, [token])
        self.spent += row.size
        answers, error = self.told(measured.values)
        if not self.scalar:
            picked = np.arange(row.size), output
            answers, error = answers[picked], error[picked]
        unit = length * self.largest[output]
        change = answers / unit
        apart = (self.high - self.low)[output] / (self.high + self.low)[output]
        radius = SECOND_ORDER * (error / np.abs(unit) + np.abs(change) * apart)
        radius = radius + 2 * rounding(self.space) * np.abs(known) + self.space.tiny
        if np.any(np.abs(change) > radius + self.radius[row, output]):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY, "answers to one token are not linear in it: no head without biases"
            )
        self.settled[row, output] = answers == 0  # the same question would be asked again
        better = radius < self.radius[row, output]
        row, output = row[better], output[better]
        self.ratio[row, output] += change[better]
        self.radius[row, output] = radius[better]

    def sharpening_cost(self) -> int:
        """Queries that `sharpen` may take, at most."""
        bits = max(0.0, math.log2(max(self.relative, self.space.eps) / self.space.eps))
        return int(self.outputs) * THRESHOLDS * math.ceil(bits / math.log2(THRESHOLDS + 1))

    def sharpen(self, relative: float, outputs: list[int] | range) -> Steps[None]:
        """Largest entries ρ from t·e_k: t brings a guess of ρ to where answers are rounded up or down."""
        goal = max(relative, 8 * rounding(self.space))
        chosen = np.asarray([number for number in outputs if self.high[number] > 0], dtype=np.int64)
        parts = np.arange(1, THRESHOLDS + 1) / (THRESHOLDS + 1)
        while True:
            chosen = chosen[(self.high - self.low)[chosen] > goal * (self.high + self.low)[chosen]]
            if not chosen.size:
                return
            low, high = self.low[chosen], self.high[chosen]
            guess = low[:, None] + (high - low)[:, None] * parts
            # Halfway between two numbers of the dtype, just above a power of two.
            power = np.exp2(np.floor(np.log2(self.norm * low)) - 1)
            halfway = (power * (1 + 2.0**-self.digits))[:, None]
            scale = self.sign[chosen][:, None] * halfway / guess
            place = np.repeat(self.place[chosen], THRESHOLDS)
            term = Term(self.units, self.space.indices(place), self.space.asarray(scale.reshape(-1)))
            measured: Measurements = yield Plan("value", place.size, [[term]])
            self.spent += place.size
            answers, _ = self.told(measured.values)
            if not self.scalar:
                answers = answers[np.arange(place.size), np.repeat(chosen, THRESHOLDS)]
            above = answers.reshape(guess.shape) > halfway
            slack = rounding(self.space) * guess
            low = np.maximum(low, np.max(np.where(above, guess - slack, 0.0), axis=1))
            high = np.minimum(high, np.min(np.where(above, np.inf, guess + slack), axis=1))
            if np.any(low > high):
                raise Unrecoverable(Outcome.WRONG_FAMILY, "answers to one token do not grow with it, as a value does")
            same = (low == self.low[chosen]) & (high == self.high[chosen])
            self.low[chosen], self.high[chosen] = low, high
            chosen = chosen[~same]

    def check_rounding(self) -> Steps[None]:
        """Answers a quarter of a spacing beside numbers of the dtype, on either side: the nearest must come back."""
        apart = (self.high - self.low)[self.main] / (self.high + self.low)[self.main]
        if apart > self.unit / 8:  # not known well enough to tell
            return
        power = 2.0 ** (math.floor(math.log2(self.norm * self.low[self.main])) - 1)
        spacing = 2 * power * self.unit
        near = power * np.linspace(1.2, 1.8, CHECKS)
        near = np.round(near / spacing) * spacing
        aim = near + np.where(np.arange(CHECKS) % 2, 0.25, -0.25) * spacing
        place = self.space.indices(np.full(CHECKS, self.place[self.main]))
        scale = self.space.asarray(aim / self.largest[self.main])
        measured: Measurements = yield Plan("value", CHECKS, [[Term(self.units, place, scale)]])
        self.spent += CHECKS
        answers, _ = self.told(measured.values)
        answers = answers if self.scalar else answers[:, self.main]
        if np.any(np.abs(answers - near) > 0.25 * spacing):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY, f"answers are not rounded to the nearest {self.signature.noise.name} number"
            )

    def vector(self) -> Array:
        """The value, as the space holds it."""
        whole = self.ratio * self.largest
        return self.space.asarray(whole[:, 0] if self.scalar else whole)

    def vector_radius(self) -> Array:
        """Radii of its entries."""
        half = (self.high - self.low) / 2
        whole = self.radius * self.high + np.abs(self.ratio) * half + self.silent_radius
        whole = whole + 2 * self.space.eps * np.abs(self.ratio) * self.high
        return self.space.asarray(whole[:, 0] if self.scalar else whole)


class _Forms:
    """Forms x_kᵀ·W·g_j of a design, in units in which the largest entry of the value is one."""

    def __init__(self, signature: Signature, rng: np.random.Generator, value: _Ratios) -> None:
        self.signature, self.space, self.rng, self.value = signature, signature.space, rng, value
        self.width = signature.width
        self.design = Design(self.space, rng, value.ratio[:, value.main])
        self._learn_value()
        limit = signature.norm_limit
        if signature.noise.name == "float16":  # longer tokens may be answered by infinity
            limit = min(limit, HALF_PRECISION_LIMIT / (abs(value.largest[value.main]) * self.design.norm))
        self.free = math.isinf(limit)
        self.limit = limit
        shape = (self.width, self.width + 1)  # a column for the zero token, which stays empty
        self.forms, self.radius, self.common = np.zeros(shape), np.full(shape, np.inf), np.zeros(shape)
        self.norm = np.full(self.width + 1, 1.0 if self.free else limit)  # of the pair, by column
        self.last = self.norm.copy()
        self.bias_rows = rng.permutation(self.width)  # those that are still to be read
        self.spent = 0
        self.started = self.silent = False
        self.probed: OwnForms | None = None

    def _learn_value(self) -> None:
        self.design.learn_value(self.value.ratio[:, self.value.main], self.value.radius[:, self.value.main])

    def told(self, measured: Measurements) -> tuple[Floats, Floats]:
        """Answers of the main output and their radii, over the largest entry of the value."""
        value = self.value
        answers, radius = value.told(measured.values)
        if not value.scalar:
            answers, radius = answers[:, value.main], radius[:, value.main]
        largest = value.largest[value.main]
        self.spent += answers.size
        answers, radius = answers / largest, radius / abs(largest)
        return answers, SECOND_ORDER * (radius + value.relative * np.abs(answers))

    def cost(self) -> int:
        """Queries of a round."""
        return self.width**2 + min(BIAS_ROWS, self.width)

    def read_first(self) -> Steps[None]:
        """Norms, then every form from a pair of equal lengths; columns with saturated ones again, shorter."""
        if self.free:
            yield from self._probe()
        else:
            last = self.last.copy()
            last[-2] *= ALONG
            found = yield from read_own_forms(self.design, self.rng, self.limit, last, 1, self.told)
            self.last, self.probed = found.last, found
        columns = np.arange(self.width)
        for number in range(MOST_PROBES):
            large = yield from self._ask(columns, bias=number == 0, steer=False)
            columns = columns[large]
            if not columns.size:
                break
            self.last[columns] *= SHRINK
        else:
            raise Unrecoverable(Outcome.SATURATED, f"{columns.size} columns saturate however short the tokens")
        self.started = True

    def _probe(self) -> Steps[None]:
        """Where norms are free: their product that brings logits to their aim, and a lever that hides the last."""
        few = np.arange(min(PROBES, self.width))
        scale, norm = FIRST_PROBE, 1.0
        quiet, loud = 0.0, math.inf  # scales that are too small and too large
        for _ in range(MOST_PROBES):
            norm = LEVER * floor_power(math.sqrt(scale))
            self.norm[:], self.last[:] = norm, scale / norm
            pairs = self._pairs(few, few, steer=False)
            answers, _ = self.told((yield pair_plan(self.design, "scale", pairs)))
            share = np.abs(answers / (norm * self.design.row_values[few]))  # (2/3)·logit where that is small
            size = float(np.max(share))
            if size > 0.5:
                loud = scale
                scale = scale * 2.0**-36 if quiet == 0 else math.sqrt(quiet * loud)
                continue
            if size > 64 * rounding(self.space):
                wanted = scale * AIM / (3 * size)  # the largest of all forms is some times the largest of a few
                self.norm[:] = LEVER * floor_power(math.sqrt(wanted))
                self.last[:] = wanted / self.norm
                return
            quiet = scale
            scale = scale * 2.0**36 if math.isinf(loud) else math.sqrt(quiet * loud)
            if scale > self.space.huge**0.4:
                self.silent = True  # the score matrix is zero, and its radius will say so
                return
        raise Unrecoverable(
            Outcome.WRONG_FAMILY, "the answers respond at no scale of the tokens as a softmax head's do"
        )

    def refine(self) -> Steps[None]:
        """A round of null queries."""
        self._learn_value()
        self._choose_norms()
        yield from self._ask(np.arange(self.width), bias=True, steer=True)

    def _ask(self, columns: Integers, *, bias: bool, steer: bool) -> Steps[npt.NDArray[np.bool_]]:  # (columns,)
        """Read whole columns, and a few rows with the zero token; tell which columns have saturated forms."""
        row = np.repeat(np.arange(self.width), columns.size)
        column = np.tile(columns, self.width)
        grid = self._pairs(row, column, steer=steer)
        plans = [pair_plan(self.design, "forms", grid)]
        bias = bias and bool(self.bias_rows.size)
        some, self.bias_rows = np.split(self.bias_rows, [BIAS_ROWS if bias else 0])  # others in every round
        few = self._pairs(some, 0 * some + self.width, steer=False)
        if bias:
            plans.append(pair_plan(self.design, "score bias", few))
        measured: list[Measurements] = yield plans
        if bias:
            self._refuse_bias(few, *self.told(measured[1]))
        answers, error = self.told(measured[0])
        known = self.forms[row, column]
        read = self.design.read_columns(grid, answers, SECOND_ORDER * error, known)
        again = read.saturated
        if self.probed is not None:
            again = again | self.probed.contradict(columns, read)
        usable = ~np.tile(again, self.width)
        parts = (part[usable] for part in (read.form, read.radius, read.common))
        self._keep(row[usable], column[usable], *parts)
        return again

    def _pairs(self, row: Integers, column: Integers, *, steer: bool) -> Pairs:
        norm, last = self.norm[column], self.last[column]
        if not steer:
            return Pairs(row, column, norm, norm, last, 1)
        own = self.design.own_forms(self.forms)
        pairs, _ = self.design.steered(row, column, norm, last, 1, self.forms[row, column], own[column], 0.0)
        return pairs

    def _keep(self, row: Integers, column: Integers, form: Floats, radius: Floats, common: Floats) -> None:
        """Keep forms that are better known than before."""
        old = self.radius[row, column] + self.common[row, column]
        if np.any(np.abs(form - self.forms[row, column]) > radius + common + old):
            raise Unrecoverable(Outcome.WRONG_FAMILY, CONTRADICTION)
        better = radius + common < old
        row, column = row[better], column[better]
        self.forms[row, column] = form[better]
        self.radius[row, column], self.common[row, column] = radius[better], common[better]

    def _choose_norms(self) -> None:
        """Bring the largest logit of every column to its aim, as far as norms allow."""
        sizes = np.abs(self.forms)
        largest = np.max(np.where(sizes > self.radius + self.common, sizes, 0.0), axis=0)
        known = largest > 0  # a column of zeros is left as it is
        wanted = AIM / np.where(known, largest, 1.0)
        if self.free:
            norm = LEVER * np.exp2(np.floor(np.log2(wanted) / 2))
            self.norm, self.last = np.where(known, norm, self.norm), np.where(known, wanted / norm, self.last)
            return
        most = np.full(self.width + 1, self.limit)
        most[-2] *= ALONG
        own = np.maximum(np.abs(self.design.own_forms(self.forms)), self.space.tiny)
        self.last = np.minimum(np.minimum(most, wanted / self.limit), np.sqrt(AIM / own))

    def _refuse_bias(self, pairs: Pairs, answers: Floats, error: Floats) -> None:
        """Opposite tokens before a zero token answer zero, unless a score bias prefers one of them."""
        if np.any(np.abs(answers) > error + self.design.slack(pairs)):
            raise BiasShows("the head has a score bias, which null queries do not read: use single-head")

    def error(self) -> float:
        """Root-mean-square error of an entry of W, if every form is off by its radius."""
        return self.design.matrix_error(self.radius + self.common)

    @property
    def _zero(self) -> bool:
        """Whether no form can be told from zero: then the score matrix is taken for zero."""
        return bool(np.all(np.abs(self.forms[:, :-1]) <= (self.radius + self.common)[:, :-1]))

    def head(self) -> SingleHead:
        """What is known now."""
        matrix = self.design.matrix(0 * self.forms if self._zero else self.forms)
        return SingleHead(self.space.asarray(matrix), self.value.vector())

    def radius_head(self) -> SingleHead:
        """Radii of that."""
        radius = self.radius + np.abs(self.forms) if self._zero else self.radius
        whole = self.design.matrix_radius(radius, self.common)
        whole = whole + 4 * rounding(self.space) * np.linalg.norm(self.design.matrix(self.forms))
        return SingleHead(self.space.asarray(whole), self.value.vector_radius())
