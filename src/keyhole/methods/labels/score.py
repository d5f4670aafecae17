"""The score matrix from labels of null queries [x; −κx; g], where tokens may be of any norm.

With a long first token and a last one as short, the answer is x·v·(e^z − κe^(−κz)), z = xᵀWg, up to a positive factor
and what the last token adds, which is nothing beside it. Its sign compares z with ln κ/(1 + κ): values drop out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln

from keyhole.arrays import Floats, Integers
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.labels.comparisons import Comparer
from keyhole.methods.labels.search import HeavyPrior, Search
from keyhole.methods.labels.value import SPACINGS, Tokens
from keyhole.queries import Position, Term, TokenRows
from keyhole.recovery import Outcome

KAPPA = 2.0
BALANCE = math.log(KAPPA) / (1 + KAPPA)  # the logit at which the two long tokens balance
# Forms of dense tokens that tell the scale of the matrix, and how wide their logarithms lie around the first.
FORMS, FEW_FORMS, FEW_WIDTH = 16, 8, 16
OCTAVES, OCTAVE = 2.5, 0.5
# Rounds after which the share of larger entries corrects the scale of the prior, by no more than the factor, and
# rounds by that before the root mean square of the entries sets the cells.
MOST_CORRECTION = 4.0
BESIDE = 0.1  # thresholds closer to zero than this part of the scale are beside it
SCALE_ROUNDS, PRIOR_ROUNDS = 2, 4
# Cells are smaller by this than that says, which is right to a few per cent.
FINER = 0.95
# Of labels that may be wrong cells are set by forms: somewhat smaller, as 16 of them say little.
CAUTION = 0.8
SCORE_BIAS = (
    "of three tokens that should weigh the same one weighs more: the box has a score bias, which this method "
    "does not recover, or is no softmax head"
)
# A row without a value of its own is read with this part of the loudest row added.
ADDED = 2.0**-20


@dataclass(frozen=True)
class Rows:
    """Long tokens to read rows of the matrix with, and the labels of them and of their negatives."""

    vectors: Floats  # (rows, width)
    yes: Floats  # (rows,): the label of the token
    no: Floats  # (rows,): that of its negative

    def beside(self, more: Rows) -> Rows:
        """These and some more."""
        pairs = ((self.vectors, more.vectors), (self.yes, more.yes), (self.no, more.no))
        return Rows(*(np.concatenate(pair) for pair in pairs))


@dataclass(frozen=True)
class LabelScore:
    """The score matrix, radii, and how many bits that is."""

    matrix: Floats  # (width, width)
    radius: Floats  # (width, width)
    scale: float  # root mean square of the entries
    bits: float


class ScoreReader:
    """Compares forms xᵀWg of rows x and unit or dense tokens g with thresholds."""

    def __init__(self, tokens: Tokens, rows: Rows) -> None:
        self.tokens, self.space, self.rows = tokens, tokens.space, rows
        self.comparer: Comparer = tokens.comparer
        self.row_tokens = TokenRows(self.space.asarray(rows.vectors))

    def positions(
        self, row: Integers, last: TokenRows, column: Integers, at: Floats, unit: float, factor: float
    ) -> tuple[list[Position], Floats]:
        """Null queries that compare forms with thresholds; forms of about `unit` with zero."""
        zero = at == 0
        kappa = np.where(zero, 1.0, KAPPA)
        scale = np.where(zero, 1 / unit, BALANCE / np.where(zero, 1.0, np.abs(at)))
        sense = np.where(at < 0, -1.0, 1.0)
        long = factor * self.tokens.long_norm
        index, space = self.space.indices(row), self.space
        first = Term(self.row_tokens, index, space.asarray(np.full(row.size, long)))
        second = Term(self.row_tokens, index, space.asarray(-kappa * long))
        third = Term(last, space.indices(column), space.asarray(sense * scale / long))
        return [[first], [second], [third]], sense

    def ask_scale(self, rng: np.random.Generator) -> Steps[float]:
        """The root mean square of the entries, from forms of dense tokens; 0 where it is below all that is sought."""
        width, comparer = self.tokens.width, self.comparer
        count = FEW_FORMS if width < FEW_WIDTH or comparer.flip_rate else FORMS
        left, right = rng.standard_normal((2, count, width)) / width**0.5
        rows = yield from ask_rows(self.tokens, left, "scale")
        dense, reader, dull = TokenRows(self.space.asarray(right)), ScoreReader(self.tokens, rows), rows.yes == rows.no
        every = np.flatnonzero(~dull)
        if not every.size:
            raise Unrecoverable(
                Outcome.WRONG_FAMILY, "labels of long tokens do not change with their sign: they are of no softmax head"
            )

        def compare(some: Integers, at: Floats, factor: float) -> tuple[list[Position], Floats]:
            return reader.positions(every[some], dense, every[some], at, unit, factor)

        unit, first = 1.0, np.zeros(2, np.int64)
        low, high = -self.tokens.range, self.tokens.range
        while high - low > 1:  # a threshold on either side of zero, as the sign is not known
            middle = 0.5 * (low + high)
            sizes = np.exp2(middle) * np.array([1.0, -1.0])

            def both(some: Integers, factor: float, sizes: Floats = sizes) -> list[Position]:
                return compare(first[some], sizes[some], factor)[0]

            labels = rows.yes[every[first]], rows.no[every[first]]
            yes = yield from comparer.decide("scale", both, 2, *labels)
            low, high = (middle, high) if np.any(yes) else (low, middle)
        unit = float(np.exp2(0.5 * (low + high)))
        if low == -self.tokens.range:
            return 0.0
        labels = rows.yes[every], rows.no[every]
        signs = yield from comparer.decide(
            "scale", lambda some, factor: compare(some, np.zeros(some.size), factor)[0], every.size, *labels
        )
        sides = np.where(signs, 1.0, -1.0)

        def sized(some: Integers, exponents: Floats, factor: float) -> tuple[list[Position], Floats]:
            positions, sense = compare(some, sides[some] * np.exp2(exponents), factor)
            return positions, sense * sides[some]

        search = comparer.search(HeavyPrior.around(float(np.log2(unit)), OCTAVES), every.size)
        yield from comparer.bisect("scale", search, sized, OCTAVE, yes=labels[0], no=labels[1])
        return float(np.sqrt(np.mean(np.exp2(2 * search.centres))))

    def ask_score(self, scale: float, accuracy: float) -> Steps[LabelScore]:
        """All entries at once by bisection, to the accuracy over their root mean square."""
        width, comparer = self.tokens.width, self.comparer
        row, column = np.divmod(np.arange(width * width), width)
        yes, no = self.rows.yes[row], self.rows.no[row]

        def compare(some: Integers, at: Floats, factor: float) -> tuple[list[Position], Floats]:
            return self.positions(row[some], self.tokens.units, column[some], at, scale, factor)

        search = comparer.search(HeavyPrior.around(0.0, scale), row.size)
        if comparer.flip_rate:
            cell = 2 * accuracy * CAUTION * scale
        else:
            yield from comparer.bisect("entries", search, compare, rounds=SCALE_ROUNDS, yes=yes, no=no)
            search.prior = scaled_prior(search, scale)
            yield from comparer.bisect("entries", search, compare, rounds=PRIOR_ROUNDS, yes=yes, no=no)
            cell = 2 * accuracy * FINER * root_mean_square(search, scale)
        cell = max(cell, SPACINGS * self.space.eps * scale)
        yield from comparer.bisect("entries", search, compare, cell, yes=yes, no=no)
        matrix, radius = (each.reshape(width, width) for each in (search.centres, search.radii))
        # What the oracle's arithmetic does to a form, and to the balance of two long tokens.
        norms = np.linalg.norm(matrix, axis=0)[None, :] + np.linalg.norm(matrix, axis=1)[:, None]
        radius = radius + self.space.rounding * norms + 8 * self.space.eps * np.abs(matrix)
        rms = float(np.sqrt(np.mean(matrix**2)))
        return LabelScore(matrix, radius, rms, bits_of_ball(row.size, rms, cell))


def scaled_prior(search: Search, scale: float) -> HeavyPrior:
    """The prior with the scale at which as many numbers are beyond the first threshold beside zero as are."""
    low, high = search.best
    beyond = np.minimum(np.abs(low), np.abs(high))
    beyond = np.where(beyond > BESIDE * scale, beyond, 0.0)
    share = float(np.mean(beyond > 0))
    prior = HeavyPrior.around(0.0, 1.0)
    found = 1.0
    if 0 < share < 1:
        unit = float(prior.point(np.zeros(1), np.full(1, prior.high), 1 - share)[0])
        found = float(np.median(beyond[beyond > 0])) / (unit * scale)
    corrected = scale * float(np.clip(found, 1 / MOST_CORRECTION, MOST_CORRECTION))
    return HeavyPrior(search.prior.low, search.prior.high, search.prior.sure, 0.0, corrected)


def root_mean_square(search: Search, scale: float) -> float:
    """That of entries known to lie within intervals, of the outermost of which only the near end counts."""
    low, high = search.best
    nearest = np.where(low * high > 0, np.minimum(np.abs(low), np.abs(high)), 0.0)
    widest = np.minimum(np.maximum(np.abs(low), np.abs(high)), nearest + scale)
    return float(np.sqrt(np.mean((nearest**2 + nearest * widest + widest**2) / 3)))


def bits_of_ball(count: int, rms: float, cell: float) -> float:
    """log₂ of how many cells the ball of vectors of this root mean square, or less, holds: what an answer must tell."""
    if rms == 0:
        return 0.0
    volume = 0.5 * count * math.log(math.pi) - float(gammaln(0.5 * count + 1)) + count * math.log(rms * count**0.5)
    return (volume - count * math.log(cell)) / math.log(2)


def ask_rows(tokens: Tokens, vectors: Floats, stage: str) -> Steps[Rows]:  # (rows, width)
    """The labels of long tokens in some directions and in the opposite ones: equal ones tell nothing."""
    rows, count = TokenRows(tokens.space.asarray(vectors)), len(vectors)
    sides, index = np.repeat([1.0, -1.0], count), np.tile(np.arange(count), 2)

    def make(some: Integers, factor: float) -> list[Position]:
        scales = tokens.space.asarray(factor * tokens.long_norm * sides[some])
        return [[Term(rows, tokens.space.indices(index[some]), scales)]]

    labels = yield from tokens.comparer.ask_labels(stage, make, 2 * count)
    return Rows(vectors, labels[:count], labels[count:])
