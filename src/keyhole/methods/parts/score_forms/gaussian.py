"""The Gaussian kernel: what tokens lose by their own length beside a zero token, then what they gain by each other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from keyhole.arrays import Floats, Integers
from keyhole.families import FormHead
from keyhole.families.forms import Gaussian
from keyhole.methods.base import Estimate, Steps, Unrecoverable
from keyhole.methods.forms.scale import ScaleSearch, floor_power
from keyhole.methods.forms.value import Value
from keyhole.methods.parts.score_forms.readings import (
    LARGEST,
    LOST,
    Names,
    PairLogits,
    always,
    ask_of_one_output,
    ask_values,
    check_names,
    even_rows,
    form_estimate,
    solved_again,
)
from keyhole.queries import Signature
from keyhole.recovery import Outcome

ASSUMPTIONS = (
    "the box computes one softmax head over its raw tokens, read at the last position, whose logits are distances of "
    "keys and queries",
    "answers are right up to the rounding of their dtype",
)
# Logits are aimed at this size, and asked for again at shorter tokens, by this factor, where they are too large.
AIM, SHORTER = 0.7, 0.25
# The norm of the first probe, and a logit that can be told from rounding by many digits.
PROBE, CLEAR = 2.0**-10, 1e-7
FEW = 3  # pairs that are asked before the rest of a column
TINY = 1e-300  # instead of a size of zero
NO_LENGTH = "tokens of any length weigh as much as a zero token: logits are none of distances"


def ask_gaussian(signature: Signature, rng: np.random.Generator, names: Names) -> Steps[Estimate[FormHead]]:
    """Score and Gram matrix of a head of Gaussian kernel, and its value, at the counting bound."""
    check_names(names)
    value = yield from ask_values(signature, rng)

    def ask(plain: Signature, along: Value) -> Steps[tuple[Gaussian, dict[str, Floats]]]:
        reader = PairLogits(plain, along)
        learner = _Learner(even_rows(plain, along, rng), plain.norm_limit / 3)
        form = yield from learner.solve(reader)
        return form, solved_again(form, reader, learner.solve, rng)

    form, radii = yield from ask_of_one_output(signature, value, ask)
    return form_estimate(signature, value, form, radii, ASSUMPTIONS)


@dataclass(frozen=True)
class _Learner:
    """Asks and solves; with a reader that replays, solves only."""

    rows: Floats  # (width, width) orthonormal
    longest: float

    def solve(self, reader: PairLogits) -> Steps[Gaussian]:
        """The form from what is read."""
        gram = yield from self._ask_gram(reader)
        score = yield from self._ask_score(reader, gram)
        return Gaussian(self.rows.T @ score @ self.rows, self.rows.T @ gram @ self.rows).canonical()

    def _ask_gram(self, reader: PairLogits) -> Steps[Floats]:
        """xᵀ·gram·x from queries [x; 0], of rows and of sums of two."""
        width = len(self.rows)
        one, two = np.triu_indices(width)
        units = np.eye(width)
        tokens = (units[one] + (one != two)[:, None] * units[two]) @ self.rows
        # A sum has about twice the logit of a row.
        shares = np.where(one == two, 1.0, 0.5**0.5)
        norm = yield from self._ask_norm(reader)
        logits = yield from self._ask_short(reader, tokens, 0 * tokens, norm * shares, np.zeros(len(one)))
        gram = np.zeros((width, width))
        own = one == two
        gram[one[own], two[own]] = -logits[own]
        sizes = np.diag(gram)
        gram[one[~own], two[~own]] = (-logits[~own] - sizes[one[~own]] - sizes[two[~own]]) / 2
        return np.asarray(gram + gram.T - np.diag(sizes))

    def _ask_norm(self, reader: PairLogits) -> Steps[float]:
        """The norm at which logits of tokens beside a zero token are of the size that is aimed at."""
        if reader.errors is not None:
            found = yield from reader.read("scale", None, _nothing, _nothing)
            return float(found.choice)
        search = ScaleSearch(PROBE, smallest=2.0**-200, largest=2.0**200, failure=NO_LENGTH)
        for norm in search:
            kept = len(reader.tape)
            short = min(norm, self.longest)
            first = short * self.rows[:1]
            found = yield from reader.read("scale", None, always(first), always(0 * first))
            size = abs(float(found.logits[0]))
            if size > LARGEST:
                search.lower_scale(2.0**8)
            elif size > CLEAR:
                wanted = min(float(floor_power(short * (AIM / size) ** 0.5)), self.longest)
                reader.tape[kept:] = [type(found)(wanted, found.anchored, found.signs, found.logits, found.radius)]
                return wanted
            elif short == self.longest:
                raise Unrecoverable(Outcome.WRONG_FAMILY, NO_LENGTH)
            else:
                search.raise_scale(min((AIM / max(size, 1e-15)) ** 0.5, 2.0**20))
            del reader.tape[kept:]
        raise AssertionError  # the search ends by itself

    def _ask_short(self, reader: PairLogits, first: Floats, last: Floats, norms: Floats, own: Floats) -> Steps[Floats]:
        """Logits of pairs over the square of their norm, at shorter tokens again where they are too large.

        `own` (n,) are what both tokens add to the logit by their own length, over the square of the norm.
        """
        found, open_ = np.zeros(len(first)), np.arange(len(first))
        while open_.size:
            read = yield from reader.read(
                "score",
                (open_, norms),
                lambda each: each[1][each[0], None] * first[each[0]],
                lambda each: each[1][each[0], None] * last[each[0]],
            )
            open_, norms = read.choice
            squares = norms[open_] ** 2
            # Turned round, a token has the same length and the opposite score.
            found[open_] = read.signs * (read.logits / squares - own[open_])
            bad = (np.abs(read.logits) > 2 * LARGEST) | ((read.signs < 0) & _alike(first, last)[open_])
            open_ = reader.decide(open_[bad])
            norms = np.where(np.isin(np.arange(len(norms)), open_), SHORTER * norms, norms)
        return found

    def _ask_score(self, reader: PairLogits, gram: Floats) -> Steps[Floats]:
        """Scores of all pairs of rows from queries [−x; g]: those of g with itself are in all of its column."""
        width, sizes = len(self.rows), np.diag(gram)
        # First tokens of the norm that suits their own lengths; last ones as long, or shorter where scores are large.
        first = min((AIM / float(np.max(np.abs(sizes)))) ** 0.5, self.longest)
        first = last = reader.decide(float(floor_power(first)))
        lasts, lengths, signs = (np.full((width, width), each) for each in (last, 0.0, 1.0))
        # One pair says how large scores may be, a few more of its column better, and the column how large they are.
        every, zeros = np.arange(width), np.zeros(width, dtype=int)
        ends = (0, 1, 1 + FEW, width)
        batches = [(every[one:two], zeros[one:two]) for one, two in pairwise(ends)]
        batches.append((np.repeat(every, width - 1), np.tile(every[1:], width)))
        for one, two in batches:
            lasts[one, two], lengths[one, two], signs[one, two] = yield from self._ask_pairs(
                reader, sizes, (one, two), first, last
            )
            score = _solve_scores(lasts, lengths, signs, first)
            known = score[: one[-1] + 1, 0] if one.size else score[:1, 0]
            size = max(float(np.sqrt(np.mean(known**2))), TINY)
            last = reader.decide(float(floor_power(min(first, AIM / (first * size)))))
        return score

    def _ask_pairs(
        self, reader: PairLogits, sizes: Floats, pairs: tuple[Integers, Integers], first: float, last: float
    ) -> Steps[tuple[Floats, Floats, Floats]]:
        """Norms of last tokens, logits less what lengths add, and signs, of pairs (row, column): (n,) each.

        Where a logit is too large, its last token is asked for again, shorter.
        """
        one, two = pairs
        norms, logits, signs = np.full(len(one), last), np.zeros(len(one)), np.ones(len(one))
        open_ = np.arange(len(one))
        while open_.size:
            read = yield from reader.read_any(
                "score",
                (open_, norms),
                lambda each: -first * self.rows[one[each[0]]],
                lambda each: each[1][each[0], None] * self.rows[two[each[0]]],
            )
            open_, norms = read.choice
            short = norms[open_]
            logits[open_] = read.logits - short**2 * sizes[two[open_]] + first**2 * sizes[one[open_]]
            signs[open_] = read.signs
            bad = np.abs(read.logits) > 2 * LARGEST
            bad |= (one[open_] == two[open_]) & (read.signs < 0) & (short > first / 2)
            shares = AIM / np.maximum(np.abs(read.logits), AIM / SHORTER)
            shares = np.where(np.abs(read.logits) < LOST, shares, SHORTER)  # nothing is known of those
            norms = norms.copy()  # the tape keeps the others
            norms[open_[bad]] *= shares[bad]
            open_, norms = reader.decide((open_[bad], norms))
        return norms, logits, signs


def _solve_scores(lasts: Floats, logits: Floats, signs: Floats, first: float) -> Floats:
    """Scores s from logits −σ·first·last·s_ij − last²·s_jj, where σ says which first tokens were turned round."""
    own = -np.diag(logits) / (np.diag(signs) * first * np.diag(lasts) + np.diag(lasts) ** 2)
    score = np.asarray(-signs * (logits + lasts**2 * own) / (first * lasts))
    np.fill_diagonal(score, own)
    return score


def _alike(first: Floats, last: Floats) -> Any:
    """Which pairs are of one direction."""
    return np.abs(np.sum(first * last, axis=1)) > np.finfo(np.float64).eps ** 0.5


def _nothing(_: Any) -> Floats:
    return np.zeros((0, 0))
