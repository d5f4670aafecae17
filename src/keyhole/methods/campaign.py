"""Noisy questions about pairs ±x beside a last token, kept together with what they say: the work of `gaussian`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.special import ndtri

from keyhole.arrays import Floats, Integers, Space, floats
from keyhole.measure import GAUSSIAN_DEVIATIONS, Measurements, Plan, Rows, Signature, Term
from keyhole.methods.base import Estimate, Steps, Unrecoverable
from keyhole.methods.value import unit_plan
from keyhole.model import SingleHead
from keyhole.numerics.balance import best_pairs, pair_rows, settled_logits, universal_floor
from keyhole.numerics.likelihood import Fit, Frame, Pairs, Point, fit, predicted
from keyhole.numerics.rotation import random_orthogonal, split_along
from keyhole.recovery import Outcome

ASSUMPTIONS = (
    "the box computes one softmax head over its raw tokens, read at the last position",
    "errors of answers are independent and normal, of the declared standard deviation",
)

# The first questions of the first pass show how large logits are; the others are adapted to that.
PROBES = 16
# Root mean square of y/(x·v) up to which balanced pairs are near their best, and what larger ones are brought to.
LARGEST_RESPONSE = 0.5
RESPONSE_AIM = 0.4
SHRINK = 2.0**-3
# Beyond this, a response is no more than a sign.
LARGEST_READ = 0.9
MOST_PROBES = 12
# A bias shows when an answer that would be zero without it is this many standard deviations away.
BIAS_DEVIATIONS = 4.5
# A first pass whose forms have this many times the variance they could have is but a pilot.
PILOT_LOSS = 2.0
# Standard deviation of an answer's rounding in the oracle's arithmetic, in eps of the longest token's value.
OWN_ROUNDING = 1.5
# Errors that are no random draw are the same when the same is asked again: last tokens are varied by so much.
DITHER = 0.1
# How often, in how many recoveries, any entry at all may lie outside its radius.
MISSES = 1e-9
# Squared residuals may exceed what is expected by this many standard deviations.
MISFIT_DEVIATIONS = 6.0
# A last token drowns its column with an own logit this much above the logarithm of the copies.
DROWNED = 1.0
# Softmax weights that differ by this do so whatever else is not accounted for.
SURE = 0.02
# Passes after a pilot, before the error tells how many are needed; and queries over the counting bound that are only
# asked where a budget allows them.
PASSES_AFTER_PILOT = 4
UNASKED = 1000
# Plans that a first pass is divided into.
PARTS = 16
# Singular values below this fraction of the largest are rounding errors.
ROUNDED_OFF = 1e-14
# What keeps the covariance of nearly equal pairs invertible, relative to its diagonal.
JITTER = 1e-9


class Campaign(ABC):
    """What has been asked so far, and what it says. A subclass says which pairs make a pass."""

    rank: int | None = None  # of the score matrix, where it is known
    assumptions: tuple[str, ...] = ASSUMPTIONS

    def __init__(self, signature: Signature, rng: np.random.Generator, copies: int) -> None:
        self.signature, self.rng, self.width = signature, rng, signature.width
        self.max_norm = signature.norm_limit
        self.random = signature.noise.kind == "gaussian"  # else the same question has the same error
        room = (signature.max_length or math.inf) - 1
        self.copies = int(min(2 * copies, room - room % 2 if room > 1 else 1)) if room < math.inf else 2 * copies
        self.asked = 0
        self.value_repeats = 0
        self.answers: Floats = np.zeros(0)
        self.parts: list[Pairs] = []
        self.fitted: Fit | None = None
        self.score_bias = False
        self.parts_of_first_pass = 0

    @abstractmethod
    def ask_first_pass(self) -> Steps[None]:
        """Enough to determine the score matrix."""

    @abstractmethod
    def start(self, frame: Frame) -> Point:
        """Near enough to the best fit of the first pass for Gauss–Newton."""

    @abstractmethod
    def next_pass(self) -> tuple[Integers, Integers]:
        """Rows and columns of the pairs that say most, now that something is known; may add to the tables."""

    @property
    @abstractmethod
    def pass_size(self) -> int:
        """Pairs of a pass."""

    @property
    @abstractmethod
    def counting_bound(self) -> int:
        """Numbers that determine score matrix and value."""

    # --- what is asked -----------------------------------------------------------------------------------------

    def ask_value(self, repeats: int) -> Steps[None]:
        """The zero token and B·e_i, some times more."""
        plan = unit_plan(self.signature, self.max_norm, repeats, self.value_repeats)
        found: Measurements = yield plan
        answers, self.many = found.by_output, found.values.ndim == 2
        if self.value_repeats and np.array_equal(answers, self.answers):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                "the same questions are answered the same every time: errors are no random draws, declare them as "
                "rounded or bounded, or noise='measure'",
            )
        total = self.value_repeats + repeats
        before = self.answers * (self.value_repeats / total) if self.value_repeats else 0.0
        self.answers, self.value_repeats = before + answers * (repeats / total), total
        self.asked += plan.count * repeats

    def settle(self) -> None:
        """Choose the pairs, now that the value is known."""
        signature = self.signature
        noise = signature.noise.deviation
        plain = (self.answers[1:] - self.answers[0]) / self.max_norm
        # The oracle's own arithmetic errs too, by about so much for tokens as long as they may be.
        largest = self.max_norm * np.linalg.norm(plain, axis=0) + np.abs(self.answers[0])
        own = OWN_ROUNDING * signature.space.eps * float(np.max(largest))
        self.noise = math.hypot(noise, own)
        sure = self.noise / math.sqrt(self.value_repeats)
        self.biased = bool(np.any(np.abs(self.answers[0]) > BIAS_DEVIATIONS * sure))
        value = self.value(self.biased)
        if not np.any(np.abs(value) > GAUSSIAN_DEVIATIONS * sure / self.max_norm):
            outcome = Outcome.TOO_NOISY if noise > 0 else Outcome.NOT_IDENTIFIABLE
            raise Unrecoverable(outcome, "the value vector cannot be told from zero in the declared noise")
        self.scalar = value.shape[1] == 1
        self.rows, self.looks = np.zeros((0, self.width)), np.zeros((0, value.shape[1]))
        self.add_rows(pair_rows(value, self.rng))
        # All directions but one have no value, so that a last token which keeps attention to itself shows as silence.
        strong = np.linalg.svd(value, full_matrices=False)[0][:, 0]
        strong = signature.space.asarray(-np.sign(strong @ np.sum(value @ self.looks.T, axis=1)) * strong)
        across, along = split_along(signature.space, random_orthogonal(signature.space, self.rng, self.width), strong)
        self.columns = floats(signature.space.xp.concat([across, along[None, :]]))
        self.lengths, self.shares = np.full(self.width, self.max_norm), np.zeros(self.width)

    def add_rows(self, rows: Floats) -> Integers:  # (n, width) -> (n,)
        """Add pairs to the table, and return their places there."""
        seen = rows @ self.value(self.biased)  # (n, outputs)
        if self.scalar:
            rows, seen = rows * np.sign(seen), np.abs(seen)
        # Of several outputs each pair is read along the one combination in which it moves.
        looks = seen / np.linalg.norm(seen, axis=1, keepdims=True)
        before = self.rows.shape[0]
        # What the oracle is sent has the digits of its dtype.
        rows = floats(self.signature.space.asarray(self.max_norm * rows)) / self.max_norm
        self.rows, self.looks = np.concatenate([self.rows, rows]), np.concatenate([self.looks, looks])
        return np.arange(before, before + rows.shape[0])

    def add_columns(self, columns: Floats) -> Integers:  # (n, width) -> (n,)
        """Add directions of last tokens to the table, and return their places there."""
        before = self.columns.shape[0]
        self.columns = np.concatenate([self.columns, columns])
        return np.arange(before, before + columns.shape[0])

    def value(self, biased: bool) -> Floats:  # (width, outputs)
        """The value as the one-token queries have it."""
        bias = self.answers[0] if biased else np.zeros_like(self.answers[0])
        return np.asarray((self.answers[1:] - bias) / self.max_norm)

    def ask_null_column(self) -> Steps[None]:
        """Pairs beside a zero token: without score bias all they answer is the output bias."""
        every = np.arange(self.width)
        half = np.full(self.width, float(max(1, self.copies // 2)))
        pairs = Pairs(every, 0 * every, np.zeros(self.width), half, self.copies - half)
        yield from self._ask("score bias", pairs, 1, 0)
        # Only where sequences are too short for a pair does the value take part.
        share = (pairs.plus - pairs.minus) / (self.copies + 1)
        answers = self.parts[-1].answer - share * self.max_norm * self._worth()
        bar = self.noise * np.sqrt(1 + share**2)
        axes = self._looked_at()
        seen, sure = (self.looks @ axes.T) / bar[:, None], self.value_repeats / self.noise**2
        spread = np.linalg.inv(seen.T @ seen + sure * np.eye(axes.shape[0]))
        bias = spread @ (seen.T @ (answers / bar) + sure * axes @ self.answers[0])
        left = answers / bar - seen @ bias
        freedom = BIAS_DEVIATIONS * math.sqrt(2 * self.width)
        self.score_bias = bool(np.any(np.abs(left) > BIAS_DEVIATIONS) or left @ left > self.width + freedom)
        self._beside = self._logits(self.parts[-1]) if self.score_bias else np.zeros(self.width)
        if not self.score_bias:
            self.biased = self.biased or bool(np.any(np.abs(bias) > BIAS_DEVIATIONS * np.sqrt(np.diag(spread))))

    def ask_probing(self, row: Integers, column: Integers) -> Steps[None]:  # (n,), (n,)
        """Ask pairs, the first few until they show how long last tokens should be."""
        few = min(PROBES, row.size)
        for _ in range(MOST_PROBES):
            yield from self.ask_plain("scale", row[:few], column[:few])
            response = self._response(self.parts[-1])
            if response <= LARGEST_RESPONSE:
                break
            # atanh of a response near one says little: then a large step.
            self.lengths *= RESPONSE_AIM / math.atanh(response) if response < LARGEST_READ else SHRINK
        else:
            raise Unrecoverable(Outcome.SATURATED, "pairs answer their full value even beside the shortest last tokens")
        # In parts, so that something is known when the budget ends between them.
        for part in np.array_split(np.arange(few, row.size), min(PARTS, max(1, row.size - few))):
            if part.size:
                yield from self.ask_plain("forms", row[part], column[part])

    def ask_until_heard(self, rows: Integers, columns: Integers, back: Any) -> Steps[Floats]:
        """W·p for some columns, (width, columns), from pairs that were asked; again where last tokens drown them.

        `back` (width, rows) takes the forms of a column to it. A last token with a large logit of its own leaves pairs
        no weight: its column is asked again with a shorter one.
        """
        most = math.log(self.copies) + DROWNED
        asking = columns
        for _ in range(MOST_PROBES):
            yield from self._ask_alone(rows, asking)
            forms, own = self._read_columns(rows, columns, back)
            drowned = own > most
            if not np.any(drowned):
                return np.asarray(back @ forms)
            asking = columns[drowned]
            # An own logit goes with the norm squared.
            self.lengths[asking] *= np.sqrt(0.5 * most / own[drowned])
            row, column = (each.ravel() for each in np.meshgrid(rows, asking, indexing="ij"))
            yield from self.ask_plain("forms", row, column)
        raise Unrecoverable(Outcome.SATURATED, "last tokens keep all attention to themselves however short they are")

    def _ask_alone(self, rows: Integers, columns: Integers) -> Steps[None]:
        """One x without its opposite for each column: what it lacks of its full value the last token has."""
        self.alone = int(np.argmax(self._worth()[rows]))
        if self.copies == 1:  # no pair has an opposite
            return
        row, every = np.full(columns.size, rows[self.alone]), np.full(columns.size, float(self.copies))
        yield from self._ask("scale", Pairs(row, columns, self.lengths[columns], every, 0 * every), 1, 0)
        self.shares[columns] = self._without_bias(self.parts[-1]) / (self.max_norm * self._worth()[row])

    def _read_columns(self, rows: Integers, columns: Integers, back: Floats) -> tuple[Floats, Floats]:
        """Forms x·W·p (rows, columns) from the latest answers, and the last tokens' own logits (columns,)."""
        pairs = Pairs.joined(self.parts)
        pairs = pairs.picked((pairs.norm != 0) & ((pairs.minus > 0) | (self.copies == 1)))  # no x alone
        latest = np.full((self.rows.shape[0], self.columns.shape[0]), -1)
        latest[pairs.row, pairs.column] = np.arange(pairs.row.size)
        chosen = latest[np.ix_(rows, columns)]
        asked = pairs.picked(chosen.ravel())
        shape, norm = chosen.shape, self.lengths[columns]
        beside = self.score_bias_read()
        offset = self.max_norm * (self.rows[rows] @ beside)[:, None]
        logits, own = settled_logits(
            self._without_bias(asked).reshape(shape),
            asked.plus.reshape(shape),
            asked.minus.reshape(shape),
            np.broadcast_to((self.max_norm * self._worth()[rows])[:, None], shape),
            (self.columns[columns] @ self.value(self.biased) @ self.looks[rows].T).T * norm,
            (norm / self.max_norm)[:, None] * (self.columns[columns] @ back),
            np.broadcast_to(offset, shape),
            norm * (self.columns[columns] @ beside),
            self.alone,
            self.copies,
            self.shares[columns],
            np.inf if self.copies == 1 else SURE + self.noise / (self.max_norm * self._worth()[rows[self.alone]]),
        )
        return (logits - offset) / (self.max_norm * norm), own

    def score_bias_read(self) -> Floats:  # (width,)
        """The score bias as the null column has it."""
        return np.asarray(np.linalg.inv(self.max_norm * self.rows[: self.width]) @ self._beside)

    def partial(self) -> SingleHead | None:
        """What the forms read so far say, those that are missing taken for zero; None before there are any."""
        if self.fitted is not None:
            return self._head(self.frame(wide=False), self.fitted)
        if not any(np.any(part.norm) for part in self.parts):
            return None
        pairs = Pairs.joined(self.parts)
        pairs = pairs.picked((pairs.norm != 0) & (pairs.row < self.width) & (pairs.column < self.width))
        beside = self.score_bias_read()
        logits = self._logits(pairs) - self.max_norm * (self.rows @ beside)[pairs.row]
        matrix = np.zeros((self.width, self.width))
        matrix[pairs.row, pairs.column] = logits / (self.max_norm * pairs.norm)
        score = np.linalg.inv(self.rows[: self.width]) @ matrix @ self.columns[: self.width]
        return self._shaped(score, self.value(self.biased), beside, self.answers[0] * self.biased)

    def _response(self, pairs: Pairs) -> float:
        """How much of their full value pairs answer because of their last token, root mean square, less the noise."""
        logits = self._logits(pairs) - self._beside[pairs.row]
        noise = self.noise / (self.max_norm * self._worth()[pairs.row])
        square = float(np.mean(np.tanh(logits) ** 2 - noise**2))
        return min(math.sqrt(max(square, 0.0)), 1.0)

    def ask_again(self, repeats: float, budget: float) -> Steps[None]:
        """All pairs as the fit says they are best asked: whole passes, half of each sign, and part of one more."""
        whole = int(repeats)
        pairs = self._best(*self.next_pass())
        if self.random:
            for sign, count in ((1.0, (whole + 1) // 2), (-1.0, whole // 2)):
                if count:
                    yield from self._ask("forms", self._signed(pairs, sign), count, 0)
        else:
            for number in range(whole):
                shorter = pairs.norm * (1 - DITHER * self.rng.random(pairs.norm.size))
                yield from self._ask("forms", self._signed(replace(pairs, norm=shorter), (-1.0) ** number), 1, 0)
        some = round((repeats - whole) * pairs.row.size)
        if some:
            chosen = pairs.picked(self.rng.permutation(pairs.row.size)[:some])
            yield from self._ask("forms", self._signed(chosen, -1.0 if whole % 2 else 1.0), 1, whole)
        behind = int(min(self._passes() - self.value_repeats, (budget - self.asked) / (self.width + 1)))
        if behind > 0 and self.random:
            yield from self.ask_value(behind)

    @staticmethod
    def _signed(pairs: Pairs, sign: float) -> Pairs:
        """The same with the last token turned round, which turns the pair's logit too."""
        return pairs if sign > 0 else replace(pairs, norm=-pairs.norm, plus=pairs.minus, minus=pairs.plus)

    def _best(self, row: Integers, column: Integers) -> Pairs:
        """Norms and copies for which each pair says most, at the fit so far."""
        point, last_values = self.best().point, self.columns @ self.value(self.biased) @ self.looks.T
        seen = self.columns @ point.score.T  # (columns, width)
        norm, plus, minus = best_pairs(
            self.max_norm * (seen @ self.rows.T)[column, row],
            self.max_norm * (self.rows @ point.score_bias)[row],
            np.sum(seen * self.columns, axis=1)[column],
            (self.columns @ point.score_bias)[column],
            self.max_norm * self._worth()[row],
            last_values[column, row],
            self.max_norm,
            self.copies,
        )
        return Pairs(row, column, norm, plus, minus)

    def ask_plain(self, stage: str, row: Integers, column: Integers) -> Steps[None]:
        """Ask pairs with as many copies of either sign."""
        # A score bias alone would tip the scales: unequal copies balance it.
        beside = np.concatenate([self._beside, np.zeros(self.rows.shape[0] - self.width)])[row]
        plus = np.clip(np.round(self.copies / (1 + np.exp(2 * beside))), 1, max(1, self.copies - 1))
        yield from self._ask(stage, Pairs(row, column, self.lengths[column], plus, self.copies - plus), 1, 0)

    def _ask(self, stage: str, pairs: Pairs, repeats: int, first_repeat: int) -> Steps[None]:
        """Ask pairs, and keep what was answered along the outputs they are looked at."""
        space = self.signature.space
        long, columns = Rows(space.asarray(self.max_norm * self.rows)), Rows(space.asarray(self.columns))
        row = space.indices(pairs.row)
        positions = []
        for place in range(self.copies):
            sign = space.asarray(np.where(place < pairs.plus, 1.0, -1.0))
            positions.append([Term(long, row, sign)])
        positions.append([Term(columns, space.indices(pairs.column), space.asarray(pairs.norm))])
        found: Measurements = yield Plan(stage, pairs.row.size, positions, repeats, first_repeat)
        answers = np.sum(found.by_output * self.looks[pairs.row], axis=1)
        self.parts.append(replace(pairs, answer=answers, repeats=np.full(answers.size, float(repeats))))
        self.asked += pairs.row.size * repeats

    # --- what it says ------------------------------------------------------------------------------------------

    def frame(self, *, wide: bool) -> Frame:
        """What is fixed in a fit; the wide one has biases even where none shows."""
        biased = wide or self.biased
        value = self.value(biased)
        # Fitted is the value itself, or, of several outputs, what each pair is worth along those it is looked at.
        tokens, looks = (np.eye(self.width), np.ones((self.width, 1))) if self.scalar else (self.rows, self.looks)
        known, same = np.sum((tokens @ value) * looks, axis=1), looks @ looks.T
        sure, sums = self.noise**2 / self.value_repeats, np.sum(tokens, axis=1)
        covariance = (tokens @ tokens.T) * same / self.max_norm**2
        covariance = covariance + JITTER * np.diag(np.diag(covariance))
        bias_map = np.zeros((self.rows.shape[0], 0))
        if biased:  # the error of the zero token's answer is in every value
            axes = self._looked_at()
            bias_map = self.looks @ axes.T
            covariance = covariance + np.outer(sums, sums) * same / self.max_norm**2
            cross = -sums[:, None] * (looks @ axes.T) / self.max_norm
            covariance = np.block([[covariance, cross], [cross.T, np.eye(axes.shape[0])]])
            known = np.concatenate([known, axes @ self.answers[0]])
        return Frame(
            rows=self.rows,
            columns=self.columns,
            max_norm=self.max_norm,
            noise=self.noise,
            row_map=self.rows if self.scalar else np.eye(self.rows.shape[0]),
            last_values=(0.0 if self.scalar else 1.0) * (self.columns @ value @ self.looks.T),
            last_map=self.columns if self.scalar else np.zeros((self.columns.shape[0], self.rows.shape[0])),
            bias_map=bias_map,
            known=known,
            covariance=sure * covariance,
            score_bias=wide or self.score_bias,
        )

    def _looked_at(self) -> Floats:  # (biases, outputs)
        """Orthonormal combinations of the outputs that pairs are looked at along: never more than there are pairs."""
        _, sizes, right = np.linalg.svd(self.looks, full_matrices=False)
        # However rarely an output is looked at, its bias may be large.
        return np.asarray(right[sizes > sizes[0] * ROUNDED_OFF])

    def _worth(self) -> Floats:  # (rows,)
        """What each pair is worth along the outputs it is looked at."""
        return np.asarray(np.sum((self.rows @ self.value(self.biased)) * self.looks, axis=1))

    def _without_bias(self, pairs: Pairs) -> Floats:  # (n,)
        """Answers less the output bias, where one shows."""
        return np.asarray(pairs.answer - (self.looks @ self.answers[0])[pairs.row] * self.biased)

    def fit(self) -> None:
        """Fit all parameters to all answers."""
        frame, pairs = self.frame(wide=False), Pairs.joined(self.parts)
        start = self.start(frame) if self.fitted is None else replace(self.fitted.point, shared=frame.known)
        self.parts_of_first_pass = self.parts_of_first_pass or len(self.parts)
        self.fitted = self._fit(frame, start, pairs)

    def _fit(self, frame: Frame, start: Point, pairs: Pairs) -> Fit:
        try:
            return fit(frame, start, pairs, self.rank)
        except np.linalg.LinAlgError as error:
            raise Unrecoverable(Outcome.SATURATED, "the answers do not determine the score matrix") from error

    def best(self) -> Fit:
        """The fit to all that was asked before the last pass."""
        assert self.fitted is not None  # every use is behind the first fit
        return self.fitted

    def _logits(self, pairs: Pairs) -> Floats:  # (n,)
        """Logits of pairs one by one, as if a last token were worth nothing and had none."""
        response = self._without_bias(pairs) / (self.max_norm * self._worth()[pairs.row])
        if self.copies == 1:  # [x; g]: a share between nothing and all
            share = np.clip(response, 0.5 - LARGEST_READ / 2, 0.5 + LARGEST_READ / 2)
            return np.asarray(np.log(share / (1 - share)))
        response = np.clip(response * (1 + 1 / self.copies), -LARGEST_READ, LARGEST_READ)
        minus = np.maximum(pairs.minus, 0.5)  # none at all where a question was about the last token alone
        return np.asarray(np.arctanh(response) - np.log(pairs.plus / minus) / 2)

    def _passes(self) -> float:
        """Passes so far."""
        return (sum(float(np.sum(part.repeats)) for part in self.parts) - self.width) / self.pass_size

    def more_passes(self, target_error: float | None, budget: float) -> float:
        """How many passes more are wanted and can be paid, with the one-token queries that go with them."""
        left = budget - self.asked
        behind = self.random and self.value_repeats < self._passes() + 1
        payable = left / (self.pass_size + (self.width + 1 if behind else 0))
        if payable * self.pass_size < 1:
            return 0.0
        error, passes = self.standard_error(), self._passes()
        if target_error is None:
            once = self._pilot() and len(self.parts) <= self.parts_of_first_pass
            return payable if budget < math.inf else float(once)
        if error <= target_error:
            return 0.0
        wanted = math.ceil(passes * ((error / target_error) ** 2 - 1))
        first = len(self.parts) <= self.parts_of_first_pass
        if first and self._pilot():  # later passes say more than a pilot, whose error does not tell how many are needed
            wanted = min(wanted, PASSES_AFTER_PILOT)
        elif budget == math.inf and wanted * self.pass_size > UNASKED * self.counting_bound:
            raise Unrecoverable(
                Outcome.TOO_NOISY,
                f"the standard error is {error:.2g} after {self.asked:,} queries: {target_error:.2g} would take about "
                f"{wanted * self.pass_size:.2g} more; set a budget of that many, or a larger target_error",
            )
        return min(max(1.0, wanted), payable)

    def _pilot(self) -> bool:
        """Whether the first pass said much less than the same queries could have, had the score matrix been known."""
        asked = Pairs.joined(self.parts[: self.parts_of_first_pass])
        asked = asked.picked((asked.norm != 0) & ((asked.minus > 0) | (self.copies == 1)))
        point = self.best().point
        said = self._said(point, asked)
        could = self._said(point, self._best(asked.row, asked.column))
        return bool(np.mean(said**-2.0) > PILOT_LOSS * np.mean(could**-2.0))

    def _said(self, point: Point, pairs: Pairs) -> Floats:  # (n,)
        """By how much answers move with their forms."""
        return np.asarray(np.abs(pairs.norm * predicted(self.frame(wide=False), point, pairs).by_pair))

    def standard_error(self) -> float:
        """Root mean square of the standard errors of score entries."""
        return float(np.sqrt(np.mean(self.best().score_variance)))

    def estimate(self, target_error: float | None) -> Estimate:
        """Parameters, standard errors and radii."""
        frame, pairs, narrow = self.frame(wide=False), Pairs.joined(self.parts), self.best()
        self._refuse_misfit(pairs, narrow)
        # Radii allow for biases that did not show: they are those of a fit that has them, and reach as far as that is.
        broad = self.frame(wide=True)
        wide = self._fit(broad, replace(narrow.point, shared=broad.known), pairs)
        params = self._head(frame, narrow)
        errors = self._errors(frame, narrow)
        other, others = self._head(broad, wide), self._errors(broad, wide)
        deviations = -float(ndtri(MISSES / 2 / (self.width * (self.width + self.answers.shape[1] + 2))))
        radius = SingleHead(
            *(
                deviations * spread + np.abs(theirs - mine)
                for mine, theirs, spread in zip(_parts(params), _parts(other), _parts(others), strict=True)
            )
        )
        if not self.score_bias:
            params, errors = replace(params, score_bias=None), replace(errors, score_bias=None)
        if not self.biased:
            params, errors = replace(params, output_bias=None), replace(errors, output_bias=None)
        space = self.signature.space
        return Estimate(
            params=_moved(space, params),
            radius=_moved(space, radius),
            standard_error=_moved(space, errors),
            counting_bound=self.counting_bound + self.width * self.score_bias + self.biased,
            assumptions=self.assumptions,
            details=self._details(target_error),
        )

    def _head(self, frame: Frame, fitted: Fit) -> SingleHead:
        """The fit as parameters, with all biases."""
        point, biased = fitted.point, bool(frame.bias_map.shape[1])
        value = self.value(biased)
        bias = self.answers[0] if biased else np.zeros_like(self.answers[0])
        if self.scalar:
            value = point.shared[: self.width, None]
            bias = frame.bias_map[0] * point.shared[self.width :] if biased else bias
        return self._shaped(point.score, value, point.score_bias, bias)

    def _errors(self, frame: Frame, fitted: Fit) -> SingleHead:
        """Standard errors of all parameters."""
        own, biased = self.noise / math.sqrt(self.value_repeats), bool(frame.bias_map.shape[1])
        value = np.full(self.answers[1:].shape, own / self.max_norm * (math.sqrt(2) if biased else 1.0))
        bias = np.full(self.answers[0].shape, own if biased else 0.0)
        if self.scalar:
            shared = np.sqrt(np.diag(fitted.shared_covariance))
            value, bias = shared[: self.width, None], shared[self.width :] if biased else bias
        return self._shaped(np.sqrt(fitted.score_variance), value, np.sqrt(fitted.score_bias_variance), bias)

    def _shaped(self, score: Floats, value: Floats, score_bias: Floats, bias: Floats) -> SingleHead:
        """As the oracle's answers are shaped: one number, or a row of outputs."""
        return SingleHead(score, value if self.many else value[:, 0], score_bias, bias if self.many else bias[0])

    def _refuse_misfit(self, pairs: Pairs, fitted: Fit) -> None:
        """End where answers scatter more than their noise explains."""
        parameters = self.counting_bound - self.width + self.width * self.score_bias
        freedom = pairs.answer.size - parameters
        most = freedom + MISFIT_DEVIATIONS * math.sqrt(2 * max(freedom, 1)) + MISFIT_DEVIATIONS**2
        if fitted.misfit > most:
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                f"answers scatter {math.sqrt(fitted.misfit / max(freedom, 1)):.2g} times as much around the best fit "
                f"as the declared noise of {self.noise:.2g}: the box is no single head, errs more than declared, or "
                "its logits are too large for a fit to be found (lower max_norm)",
            )

    def _details(self, target_error: float | None) -> dict[str, Any]:
        error = self.standard_error()
        score = self.best().point.score
        noise_level = 2 * math.sqrt(self.width) * error  # of the largest singular value of noise alone
        details = {
            "standard_error": error,
            "passes": round(self._passes(), 3),
            "copies": max(1, self.copies // 2),
            "score_bias": self.score_bias,
            "output_bias": self.biased,
            "rank_above_noise": int(np.sum(np.linalg.svd(score, compute_uv=False) > noise_level)),
        }
        if not self.many and self.rank is None:  # the floor is that of a matrix of any rank
            norm = float(np.linalg.norm(self.value(self.biased)))
            floor = universal_floor(self.width, norm, self.max_norm, self.noise, self.asked)
            details |= {"floor": floor, "over_floor": error / floor}
        if target_error is not None:
            details |= {"target_error": target_error, "target_reached": error <= target_error}
        return details


def _parts(head: SingleHead) -> tuple[Any, ...]:
    return head.score, head.value, head.score_bias, head.output_bias


def _moved(space: Space, head: SingleHead) -> SingleHead:
    """The same in the oracle's library, dtype and device."""
    return SingleHead(*(None if part is None else space.asarray(part) for part in _parts(head)))
