"""Noisy queries about pairs ±x beside a last token: which to ask, how often, and with what tokens."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np

from keyhole.arrays import Floats, Integers, floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.value import unit_plan
from keyhole.methods.robust.gaussian.estimation import LARGEST_RESPONSE_SHARE, Estimation
from keyhole.methods.robust.gaussian.likelihood import Frame, HeadPoint, PairQueries, predict
from keyhole.methods.robust.gaussian.pair_design import best_pairs, pair_rows, solve_logits
from keyhole.noise import GAUSSIAN_DEVIATIONS
from keyhole.numerics.orthogonal import random_orthogonal, split_along
from keyhole.numerics.svd import svd
from keyhole.queries import Measurements, Plan, Signature, Term, TokenRows
from keyhole.recovery import Outcome

# The first queries of the first pass show how large logits are; the others are adapted to that.
PROBES = 16
# Root mean square of y/(x·v) up to which balanced pairs are near their best, and what larger ones are brought to.
LARGEST_RESPONSE = 0.5
RESPONSE_AIM = 0.4
SHRINK = 2.0**-3
MOST_PROBES = 12
# A bias shows when an answer that would be zero without it is this many standard deviations away.
BIAS_DEVIATIONS = 4.5
# A first pass whose forms have this many times the variance they could have is but a pilot.
PILOT_LOSS = 2.0
# Standard deviation of an answer's rounding in the oracle's arithmetic, in eps of the longest token's value.
OWN_ROUNDING = 1.5
# Errors that are no random draw are the same when the same is asked again: last tokens are varied by so much.
DITHER = 0.1
# A last token drowns its column with an own logit this much above the logarithm of the copies.
LARGEST_OWN_LOGIT = 1.0
# Softmax weights that differ by this do so whatever else is not accounted for.
SURE = 0.02
# Passes after a pilot, before the error tells how many are needed; and queries over the counting bound that are only
# asked where a budget allows them.
PASSES_AFTER_PILOT = 4
UNASKED = 1000
# Plans that a first pass is divided into.
PARTS = 16


class Passes(ABC):
    """Asks for pairs, pass by pass. A subclass says which pairs make a pass."""

    keys: Floats  # (width, width) W·p of the first directions p, after the first pass

    def __init__(self, signature: Signature, rng: np.random.Generator, known: Estimation) -> None:
        self.rng, self.known, self.signature = rng, known, signature
        self.width, self.max_norm, self.copies = known.width, known.max_norm, known.copies
        self.random = signature.noise.kind == "gaussian"  # else the same query has the same error

    @abstractmethod
    def ask_first_pass(self) -> Steps[None]:
        """Enough to determine the score matrix."""

    def start_at(self, frame: Frame) -> HeadPoint:
        """A point near enough to the best fit of the first pass for Gauss–Newton."""
        known = self.known
        return HeadPoint(self.keys @ known.columns[: self.width], frame.known, known.null_score_bias())

    @abstractmethod
    def next_pass(self) -> tuple[Integers, Integers]:
        """Rows and columns of the most informative pairs at the fit so far; may add to the tables."""

    def ask_value(self, repeats: int) -> Steps[None]:
        """The zero token and B·e_i, some times more."""
        known = self.known
        plan = unit_plan(self.signature, self.max_norm, repeats, known.value_repeats)
        measurements: Measurements = yield plan
        answers, known.many = measurements.by_output, measurements.values.ndim == 2
        if known.value_repeats and np.array_equal(answers, known.answers):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                "the same questions are answered the same every time: errors are no random draws, declare them as "
                "rounded or bounded, or noise='measure'",
            )
        total = known.value_repeats + repeats
        before = known.answers * (known.value_repeats / total) if known.value_repeats else 0.0
        known.answers, known.value_repeats = before + answers * (repeats / total), total
        known.asked += plan.count * repeats

    def settle(self) -> None:
        """Choose the pairs, now that the value is known."""
        known, signature = self.known, self.signature
        noise = signature.noise.deviation
        plain = (known.answers[1:] - known.answers[0]) / self.max_norm
        # The oracle's own arithmetic errs too, by about so much for tokens as long as they may be.
        largest = self.max_norm * np.linalg.norm(plain, axis=0) + np.abs(known.answers[0])
        own = OWN_ROUNDING * signature.space.eps * float(np.max(largest))
        known.noise = math.hypot(noise, own)
        sure = known.noise / math.sqrt(known.value_repeats)
        known.biased = bool(np.any(np.abs(known.answers[0]) > BIAS_DEVIATIONS * sure))
        value = known.value(known.biased)
        if not np.any(np.abs(value) > GAUSSIAN_DEVIATIONS * sure / self.max_norm):
            outcome = Outcome.TOO_NOISY if noise > 0 else Outcome.NOT_IDENTIFIABLE
            raise Unrecoverable(outcome, "the value vector cannot be told from zero in the declared noise")
        known.scalar = value.shape[1] == 1
        known.rows, known.looks = np.zeros((0, self.width)), np.zeros((0, value.shape[1]))
        self.add_rows(pair_rows(value, self.rng))
        # All directions but one have no value, so that a last token which keeps attention to itself shows as silence.
        strong = svd(value)[0][:, 0]
        strong = signature.space.asarray(-np.sign(strong @ np.sum(value @ known.looks.T, axis=1)) * strong)
        across, along = split_along(signature.space, random_orthogonal(signature.space, self.rng, self.width), strong)
        known.columns = floats(signature.space.xp.concat([across, along[None, :]]))
        self.lengths, self.shares = np.full(self.width, self.max_norm), np.zeros(self.width)

    def add_rows(self, rows: Floats) -> Integers:  # (n, width) -> (n,)
        """Add pairs to the table, and return their places there."""
        known = self.known
        seen = rows @ known.value(known.biased)  # (n, outputs)
        if known.scalar:
            rows, seen = rows * np.sign(seen), np.abs(seen)
        # Of several outputs each pair is read along the one combination in which it moves.
        looks = seen / np.linalg.norm(seen, axis=1, keepdims=True)
        before = known.rows.shape[0]
        # What the oracle is sent has the digits of its dtype.
        rows = floats(self.signature.space.asarray(self.max_norm * rows)) / self.max_norm
        known.rows, known.looks = (np.concatenate([known.rows, rows]), np.concatenate([known.looks, looks]))
        return np.arange(before, before + rows.shape[0])

    def ask_null_column(self) -> Steps[None]:
        """Pairs beside a zero token: without score bias all they answer is the output bias."""
        known = self.known
        every = np.arange(self.width)
        half = np.full(self.width, float(max(1, self.copies // 2)))
        pairs = PairQueries(every, 0 * every, np.zeros(self.width), half, self.copies - half)
        yield from self._ask("score bias", pairs, 1, 0)
        # Only where sequences are too short for a pair does the value take part.
        share = (pairs.plus - pairs.minus) / (self.copies + 1)
        answers = known.parts[-1].answer - share * self.max_norm * known.pair_values()
        deviation = known.noise * np.sqrt(1 + share**2)
        axes = known.axes()
        seen, sure = (known.looks @ axes.T) / deviation[:, None], known.value_repeats / known.noise**2
        spread = np.linalg.inv(seen.T @ seen + sure * np.eye(axes.shape[0]))
        bias = spread @ (seen.T @ (answers / deviation) + sure * axes @ known.answers[0])
        left = answers / deviation - seen @ bias
        freedom = BIAS_DEVIATIONS * math.sqrt(2 * self.width)
        known.score_bias = bool(np.any(np.abs(left) > BIAS_DEVIATIONS) or left @ left > self.width + freedom)
        known.null_logits = known.pair_logits(known.parts[-1]) if known.score_bias else np.zeros(self.width)
        if not known.score_bias:
            known.biased = known.biased or bool(np.any(np.abs(bias) > BIAS_DEVIATIONS * np.sqrt(np.diag(spread))))

    def ask_first_pairs(self, row: Integers, column: Integers) -> Steps[None]:  # (n,), (n,)
        """Ask pairs, the first few until they show how long last tokens should be."""
        few = min(PROBES, row.size)
        for _ in range(MOST_PROBES):
            yield from self.ask_pairs("scale", row[:few], column[:few])
            response = self._response(self.known.parts[-1])
            if response <= LARGEST_RESPONSE:
                break
            # atanh of a response near one says little: then a large step.
            self.lengths *= RESPONSE_AIM / math.atanh(response) if response < LARGEST_RESPONSE_SHARE else SHRINK
        else:
            raise Unrecoverable(Outcome.SATURATED, "pairs answer their full value even beside the shortest last tokens")
        # In parts, so that something is known when the budget ends between them.
        for part in np.array_split(np.arange(few, row.size), min(PARTS, max(1, row.size - few))):
            if part.size:
                yield from self.ask_pairs("forms", row[part], column[part])

    def _response(self, pairs: PairQueries) -> float:
        """How much of their full value pairs answer because of their last token, root mean square, less the noise."""
        known = self.known
        logits = known.pair_logits(pairs) - known.null_logits[pairs.row]
        noise = known.noise / (self.max_norm * known.pair_values()[pairs.row])
        square = float(np.mean(np.tanh(logits) ** 2 - noise**2))
        return min(math.sqrt(max(square, 0.0)), 1.0)

    def ask_columns(self, rows: Integers, columns: Integers, back: Any) -> Steps[Floats]:
        """W·p for some columns, (width, columns) from pairs; again with shorter last tokens where they saturate.

        `back` (width, rows) takes the forms of a column to it. A last token with a large logit of its own leaves pairs
        no weight: its column is asked again with a shorter one.
        """
        most = math.log(self.copies) + LARGEST_OWN_LOGIT
        asking = columns
        for _ in range(MOST_PROBES):
            yield from self._ask_alone(rows, asking)
            forms, own = self._solve_columns(rows, columns, back)
            drowned = own > most
            if not np.any(drowned):
                return np.asarray(back @ forms)
            asking = columns[drowned]
            # An own logit goes with the norm squared.
            self.lengths[asking] *= np.sqrt(0.5 * most / own[drowned])
            row, column = (each.ravel() for each in np.meshgrid(rows, asking, indexing="ij"))
            yield from self.ask_pairs("forms", row, column)
        raise Unrecoverable(Outcome.SATURATED, "last tokens keep all attention to themselves however short they are")

    def _ask_alone(self, rows: Integers, columns: Integers) -> Steps[None]:
        """One x without its opposite for each column: what it lacks of its full value the last token has."""
        known = self.known
        self.alone = int(np.argmax(known.pair_values()[rows]))
        if self.copies == 1:  # no pair has an opposite
            return
        row, every = np.full(columns.size, rows[self.alone]), np.full(columns.size, float(self.copies))
        yield from self._ask("scale", PairQueries(row, columns, self.lengths[columns], every, 0 * every), 1, 0)
        self.shares[columns] = known.without_bias(known.parts[-1]) / (self.max_norm * known.pair_values()[row])

    def _solve_columns(self, rows: Integers, columns: Integers, back: Floats) -> tuple[Floats, Floats]:
        """Forms x·W·p (rows, columns) from the latest answers, and the last tokens' own logits (columns,)."""
        known = self.known
        pairs = PairQueries.concat(*known.parts)
        pairs = pairs.take((pairs.norm != 0) & ((pairs.minus > 0) | (self.copies == 1)))  # no x alone
        latest = np.full((known.rows.shape[0], known.columns.shape[0]), -1)
        latest[pairs.row, pairs.column] = np.arange(pairs.row.size)
        chosen = latest[np.ix_(rows, columns)]
        asked = pairs.take(chosen.ravel())
        shape, norm = chosen.shape, self.lengths[columns]
        beside = known.null_score_bias()
        offset = self.max_norm * (known.rows[rows] @ beside)[:, None]
        logits, own = solve_logits(
            known.without_bias(asked).reshape(shape),
            asked.plus.reshape(shape),
            asked.minus.reshape(shape),
            np.broadcast_to((self.max_norm * known.pair_values()[rows])[:, None], shape),
            (known.columns[columns] @ known.value(known.biased) @ known.looks[rows].T).T * norm,
            (norm / self.max_norm)[:, None] * (known.columns[columns] @ back),
            np.broadcast_to(offset, shape),
            norm * (known.columns[columns] @ beside),
            self.alone,
            self.copies,
            self.shares[columns],
            np.inf
            if self.copies == 1
            else SURE + known.noise / (self.max_norm * known.pair_values()[rows[self.alone]]),
        )
        return (logits - offset) / (self.max_norm * norm), own

    def more_passes(self, target_error: float | None, budget: float) -> float:
        """How many passes more are wanted and can be paid, with the one-token queries that go with them."""
        known = self.known
        left = budget - known.asked
        behind = self.random and known.value_repeats < known.passes() + 1
        payable = left / (known.pass_size + (self.width + 1 if behind else 0))
        if payable * known.pass_size < 1:
            return 0.0
        error, passes = known.standard_error(), known.passes()
        if target_error is None:
            once = self._pilot() and len(known.parts) <= known.parts_of_first_pass
            return payable if budget < math.inf else float(once)
        if error <= target_error:
            return 0.0
        wanted = math.ceil(passes * ((error / target_error) ** 2 - 1))
        first = len(known.parts) <= known.parts_of_first_pass
        if first and self._pilot():  # later passes say more than a pilot, whose error does not tell how many are needed
            wanted = min(wanted, PASSES_AFTER_PILOT)
        elif budget == math.inf and wanted * known.pass_size > UNASKED * known.counting_bound:
            raise Unrecoverable(
                Outcome.TOO_NOISY,
                f"the standard error is {error:.2g} after {known.asked:,} queries: {target_error:.2g} would take about "
                f"{wanted * known.pass_size:.2g} more; set a budget of that many, or a larger target_error",
            )
        return min(max(1.0, wanted), payable)

    def _pilot(self) -> bool:
        """Whether the first pass has much less information than the design for the fit."""
        known = self.known
        asked = PairQueries.concat(*known.parts[: known.parts_of_first_pass])
        asked = asked.take((asked.norm != 0) & ((asked.minus > 0) | (self.copies == 1)))
        point = known.best().point
        said = self._form_sensitivity(point, asked)
        could = self._form_sensitivity(point, self._best(asked.row, asked.column))
        return bool(np.mean(said**-2.0) > PILOT_LOSS * np.mean(could**-2.0))

    def _form_sensitivity(self, point: HeadPoint, pairs: PairQueries) -> Floats:  # (n,)
        """By how much answers move with their forms."""
        return np.asarray(np.abs(pairs.norm * predict(self.known.frame(wide=False), point, pairs).by_pair))

    def ask_again(self, repeats: float, budget: float) -> Steps[None]:
        """All pairs by the best design at the fit: whole passes, half of each sign, and part of one more."""
        known = self.known
        whole = int(repeats)
        pairs = self._best(*self.next_pass())
        if self.random:
            for sign, count in ((1.0, (whole + 1) // 2), (-1.0, whole // 2)):
                if count:
                    yield from self._ask("forms", self._with_sign(pairs, sign), count, 0)
        else:
            for number in range(whole):
                shorter = pairs.norm * (1 - DITHER * self.rng.random(pairs.norm.size))
                yield from self._ask("forms", self._with_sign(replace(pairs, norm=shorter), (-1.0) ** number), 1, 0)
        some = round((repeats - whole) * pairs.row.size)
        if some:
            chosen = pairs.take(self.rng.permutation(pairs.row.size)[:some])
            yield from self._ask("forms", self._with_sign(chosen, -1.0 if whole % 2 else 1.0), 1, whole)
        behind = int(min(known.passes() - known.value_repeats, (budget - known.asked) / (self.width + 1)))
        if behind > 0 and self.random:
            yield from self.ask_value(behind)

    @staticmethod
    def _with_sign(pairs: PairQueries, sign: float) -> PairQueries:
        """Pairs as they are, or with the last token turned round, which turns the pair's logit too."""
        return pairs if sign > 0 else replace(pairs, norm=-pairs.norm, plus=pairs.minus, minus=pairs.plus)

    def _best(self, row: Integers, column: Integers) -> PairQueries:
        """Norms and copies for which each pair is most informative, at the fit so far."""
        known = self.known
        point, last_values = (known.best().point, known.columns @ known.value(known.biased) @ known.looks.T)
        seen = known.columns @ point.score.T  # (columns, width)
        norm, plus, minus = best_pairs(
            self.max_norm * (seen @ known.rows.T)[column, row],
            self.max_norm * (known.rows @ point.score_bias)[row],
            np.sum(seen * known.columns, axis=1)[column],
            (known.columns @ point.score_bias)[column],
            self.max_norm * known.pair_values()[row],
            last_values[column, row],
            self.max_norm,
            self.copies,
        )
        return PairQueries(row, column, norm, plus, minus)

    def ask_pairs(self, stage: str, row: Integers, column: Integers) -> Steps[None]:
        """Ask pairs with as many copies of either sign."""
        known = self.known
        # A score bias alone would tip the scales: unequal copies balance it.
        beside = np.concatenate([known.null_logits, np.zeros(known.rows.shape[0] - self.width)])[row]
        plus = np.clip(np.round(self.copies / (1 + np.exp(2 * beside))), 1, max(1, self.copies - 1))
        yield from self._ask(stage, PairQueries(row, column, self.lengths[column], plus, self.copies - plus), 1, 0)

    def _ask(self, stage: str, pairs: PairQueries, repeats: int, first_repeat: int) -> Steps[None]:
        """Ask pairs, and keep the answers in the combinations of outputs they are read in."""
        known, space = self.known, self.signature.space
        long, columns = (TokenRows(space.asarray(self.max_norm * known.rows)), TokenRows(space.asarray(known.columns)))
        row = space.indices(pairs.row)
        signs = (space.asarray(np.where(place < pairs.plus, 1.0, -1.0)) for place in range(self.copies))
        positions = [[Term(long, row, sign)] for sign in signs]
        positions.append([Term(columns, space.indices(pairs.column), space.asarray(pairs.norm))])
        measurements: Measurements = yield Plan(stage, pairs.row.size, positions, repeats, first_repeat)
        answers = np.sum(measurements.by_output * known.looks[pairs.row], axis=1)
        known.parts.append(replace(pairs, answer=answers, repeats=np.full(answers.size, float(repeats))))
        known.asked += pairs.row.size * repeats
