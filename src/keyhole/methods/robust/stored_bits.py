"""Every bit of a head whose weights are stored in a small dtype, each one proven.

The oracle computes in float64 from weights that have 8, 11 or 24 digits. A query made of powers of two along the axes,
[t·e_i; γ·e_j], has the logit t·γ·W_ij without any rounding and reads W_ij to about 15 digits. Where the interval that
is left holds one number of the dtype, that number is the weight.
"""

from __future__ import annotations

import numpy as np

from keyhole.arrays import Array, Booleans, Floats, Integers, floats
from keyhole.errors import UsageError
from keyhole.families import SingleHead
from keyhole.methods.arithmetic import partial_result
from keyhole.methods.base import Estimate, Steps, Unrecoverable
from keyhole.methods.forms.value import Value, ask_value
from keyhole.methods.robust.dtypes import Grid, grid_of
from keyhole.numerics.logit import logit_with_radius
from keyhole.queries import Measurements, Plan, Signature, Term, TokenRows
from keyhole.recovery import Outcome

ASSUMPTIONS = (
    "the box computes one softmax head over its raw tokens, read at the last position, without biases",
    "its weights are numbers of the named dtype, its arithmetic is float64 and its answers are not rounded further",
    "the sign of a zero weight is not seen",
)

# Norm of the last token. No number of the dtypes exceeds 2¹²⁸, so its own logit is below 2⁻²⁷².
LAST = 2.0**-200
# Logits are aimed at this size; far larger ones saturate, far smaller ones are read with fewer digits.
AIM = 0.5
# A form that saturates is tried again smaller by this, which cannot make it vanish: it still has 2⁻³² left.
SHRINK = 2.0**-36
# Rows whose values are smaller than this share of the largest one borrow the contrast of the largest.
FAINT = 2.0**-30
# More rounds than the whole range of the dtypes needs.
MOST_ROUNDS = 40
# Random rows asked with a zero last token, and their norm, which no token of a query exceeds.
BIAS_ROWS, BIAS_NORM = 3, 2.0**360
# A float64 has this spacing; a coarser one cannot prove 24 digits.
FLOAT64 = 2.0**-52


def bit_exact(signature: Signature, rng: np.random.Generator, *, dtype: str) -> Steps[Estimate[SingleHead]]:
    """Score matrix and value of a head whose weights are float32, bfloat16 or float16 numbers, bit by bit.

    An entry is proven where exactly one number of the dtype lies in its interval; a zero, where the interval holds no
    subnormal number either. One query an entry but for entries that are tiny or huge beside the others (a zero takes
    three to five). Radii are zero: what could not be proven is not returned.
    """
    grid = grid_of(dtype)
    if signature.noise.kind != "exact" or signature.space.eps > FLOAT64:
        raise UsageError(f"bits are read from exact float64 answers, not from {signature.noise}")
    if signature.max_norm is not None:
        raise UsageError("bits are read with tokens of any norm: leave out max_norm")
    value = yield from ask_value(signature)
    exact_value = _prove_value(value, grid)
    weights = _Weights(signature, grid, exact_value)
    with partial_result(lambda _: weights.head()):
        yield from weights.ask_bias_check(rng)
        yield from weights.ask_all()
    outputs = exact_value.shape[1] if exact_value.ndim == 2 else 1
    rank = int(np.linalg.matrix_rank(exact_value)) if outputs > 1 else 1
    width = signature.width
    head = weights.head()
    return Estimate(
        params=head,
        radius=SingleHead(0 * head.score, 0 * head.value),
        counting_bound=width + -(-width * width // rank),
        assumptions=ASSUMPTIONS,
        details={"dtype": dtype, "proven": width * width + exact_value.size},
    )


def _prove_value(value: Value, grid: Grid) -> Floats:  # (width,) or (width, outputs)
    if value.has_bias:
        raise Unrecoverable(
            Outcome.WRONG_FAMILY, "the head has an output bias, beside which bits are not read: use method single-head"
        )
    first, last = grid.within(floats(value.vector), floats(value.radius))
    _check_dtype(first > last, grid, "value")
    if np.any(first < last):
        raise Unrecoverable(
            Outcome.UNCERTIFIED,
            f"{np.sum(first < last)} entries of the value may be several numbers of {grid.name}: their bits are open",
        )
    return first + 0.0  # no negative zeros


def _check_dtype(foreign: Booleans, grid: Grid, part: str) -> None:
    if np.any(foreign):
        raise Unrecoverable(
            Outcome.WRONG_FAMILY,
            f"{np.sum(foreign)} of {foreign.size} entries of the {part} are no {grid.name} numbers within their error "
            f"bar: the weights are not stored in {grid.name}, or the box is no single head; try method single-head",
        )


class _Weights:
    def __init__(self, signature: Signature, grid: Grid, value: Floats) -> None:
        self.signature, self.space, self.grid = signature, signature.space, grid
        self.all_values = value
        # One output as it is: the one with the largest entry.
        self.output = None if value.ndim == 1 else int(np.argmax(np.max(np.abs(value), axis=0)))
        self.value: Floats = value if self.output is None else value[:, self.output]  # (width,)
        self.largest = int(np.argmax(np.abs(self.value)))
        self.units = TokenRows(self.space.eye(signature.width))
        self.matrix: Floats = np.full((signature.width, signature.width), np.nan)

    def head(self) -> SingleHead:
        """What was proven; nan elsewhere."""
        return SingleHead(self.space.asarray(self.matrix), self.space.asarray(self.all_values))

    def _answers(self, answers: Measurements) -> Array:  # (n,)
        return answers.values if self.output is None else answers.values[:, self.output]

    def ask_bias_check(self, rng: np.random.Generator) -> Steps[None]:
        """[x; 0]: both tokens weigh the same, unless a score bias attracts x or repels it."""
        # Every entry takes the sign of its value, so that what is halved does not cancel.
        signs = np.where(self.value == 0, rng.choice([-1.0, 1.0], self.value.size), np.sign(self.value))
        signs = signs * rng.uniform(1, 2, (BIAS_ROWS, self.value.size))
        rows = TokenRows(self.space.asarray(BIAS_NORM * signs))
        answers = yield Plan("score bias", BIAS_ROWS, [[Term(rows)], []])
        whole = BIAS_NORM * signs @ self.value
        error = np.abs(floats(self._answers(answers)) - 0.5 * whole)
        allowed = self.space.rounding * BIAS_NORM * np.linalg.norm(signs, axis=1) * np.linalg.norm(self.value)
        if np.any(error > allowed):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                "the head has a score bias, beside which bits are not read: use method single-head",
            )

    def ask_all(self) -> Steps[None]:
        """All entries, those of the row of largest value first: its token is the contrast for the others."""
        width = self.signature.width
        every = np.arange(width)
        row = np.full(width, self.largest)
        yield from self._ask_weights(row[:1], every[:1], 1.0)  # one entry tells the scale
        yield from self._ask_weights(row[1:], every[1:], self._typical())
        rows, columns = np.divmod(np.arange(width * width), width)
        rest = rows != self.largest
        yield from self._ask_weights(rows[rest], columns[rest], self._typical())

    def _typical(self) -> float:
        """Size of a typical entry among those read, one where all are zero."""
        sizes = np.abs(self.matrix[np.isfinite(self.matrix) & (self.matrix != 0)])
        return float(np.median(sizes)) if sizes.size else 1.0

    def _ask_weights(self, row: Integers, column: Integers, size: float) -> Steps[None]:
        """Ask for entries (n,) of about this size until each is one number of the dtype."""
        scale: Floats = np.full(row.size, np.exp2(np.floor(np.log2(AIM / size))))
        for _ in range(MOST_ROUNDS):
            if not row.size:
                return
            centre, radius = yield from self._ask(row, column, scale)
            first, last = self.grid.within(centre, np.where(np.isfinite(radius), radius, np.inf))
            _check_dtype(first > last, self.grid, "score matrix")
            proven = first == last
            self.matrix[row[proven], column[proven]] = first[proven] + 0.0
            # Within ±largest for sure, so that AIM/largest cannot saturate it.
            largest = np.abs(centre) + radius
            next_scale = np.where(np.isfinite(radius), np.exp2(np.floor(np.log2(AIM / largest))), scale * SHRINK)
            row, column, scale = row[~proven], column[~proven], next_scale[~proven]
        raise Unrecoverable(
            Outcome.UNCERTIFIED,
            f"{row.size} entries of the score matrix may be several numbers of {self.grid.name}: their bits are open",
        )

    def _ask(self, row: Integers, column: Integers, scale: Floats) -> Steps[tuple[Floats, Floats]]:
        """Entries and their radii, one query each: [t·e_i; γ·e_j], where v_i is small [t·e_i + β·e_k; γ·e_j]."""
        first = scale / LAST
        own = first * self.value[row]
        faint = (np.abs(self.value[row]) < FAINT * abs(self.value[self.largest])) & (row != self.largest)
        lent, lent_logit = self._contrast(row, column, faint)
        index = self.space.indices
        tokens = [Term(self.units, index(row), self.space.asarray(first))]
        if np.any(faint):
            tokens.append(Term(self.units, index(0 * row + self.largest), self.space.asarray(lent)))
        answers = yield Plan("entries", row.size, [tokens, [Term(self.units, index(column), LAST)]])
        high, low = own + lent * self.value[self.largest], LAST * self.value[column]
        rounding = self.space.rounding
        end_radii = self.space.asarray(rounding * np.abs(low)), self.space.asarray(rounding * np.abs(high))
        ends = self.space.asarray(low), self.space.asarray(high)
        logit, radius = logit_with_radius(self.space, self._answers(answers), *ends, *end_radii, answers.radius)
        centre = floats(logit) - lent_logit
        # Two products are added in the oracle where contrast is lent.
        wide = floats(radius) + rounding * np.abs(lent_logit)
        return centre / scale, wide / scale

    def _contrast(self, row: Integers, column: Integers, faint: Booleans) -> tuple[Floats, Floats]:
        """Length β of the lent token, of the sign that adds to the own value, and its known logit of order one."""
        if not np.any(faint):
            return np.zeros(row.size), np.zeros(row.size)
        known = self.matrix[self.largest, column]
        size = np.maximum(np.abs(known), self._typical())
        length = np.exp2(np.floor(np.log2(AIM / size))) / LAST
        sign = np.where(self.value[row] * self.value[self.largest] < 0, -1.0, 1.0)
        lent = np.where(faint, sign * length, 0.0)
        return lent, lent * LAST * known
