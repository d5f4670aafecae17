"""Comparisons by labels: each query has one label for yes and one for no, and wrong answers come at a known rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from keyhole.arrays import Booleans, Floats, Integers, floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.labels.search import Search
from keyhole.queries import Measurements, Plan, Position, Signature
from keyhole.recovery import Outcome

# (rows, factor): the queries of some comparisons, their tokens made another query of the same meaning by the factor.
MakePositions = Callable[[Integers, float], Sequence[Position]]
# (rows, thresholds, factor): queries that compare some numbers with thresholds, and +1 where yes means larger, else −1.
MakeComparisons = Callable[[Integers, Floats, float], "tuple[Sequence[Position], Floats]"]
# Factors of tokens by which the same comparison becomes another query, so that errors that repeat are seen too.
TURNS = 16
# A comparison is answered within so many queries where labels are right more often than not.
MOST_ROUNDS = 2000
# Answers of one kind in a row after which the bound on the other side is asked for again, at the end and on the way.
LONG_STREAK, LONGER_STREAK, EARLY_ROUND = 6, 9, 12
# A number on such a bound is answered by rounding, one this part of its interval beside it is not.
BESIDE = 2.0**-4


class OtherLabel(Unrecoverable):
    """Raised where neither of two labels is answered: a class that was not known, or labels are wrong at times."""

    def __init__(self, label: float) -> None:
        super().__init__(
            Outcome.INCONSISTENT,
            f"label {label:g} was answered where only two others can be: labels are wrong at times "
            "(declare how often, noise=Noise.flipped(rate)), or it is a class of few tokens, as where its bias "
            "is large and its values are not, or these are not the largest of linear outputs of one head",
        )
        self.label = label


class Comparer:
    """Asks comparisons, and knows how sure their answers are."""

    def __init__(self, signature: Signature, flip_rate: float, doubt: float, negative: float, positive: float) -> None:
        self.signature, self.space = signature, signature.space
        self.flip_rate, self.doubt = flip_rate, doubt  # doubt: the chance that a decision is wrong
        self.negative, self.positive = negative, positive  # labels below and above zero
        self.ties = True  # whether a third label is that of zero, and neither
        self.asked = 0

    def search(self, prior: object, count: int) -> Search:
        """A search for numbers, of as many digits as the oracle has."""
        return Search(prior, count, self.flip_rate, self.doubt, self.space.eps)  # type: ignore[arg-type]

    def votes(
        self,
        stage: str,
        positions: Sequence[Position],
        count: int,
        yes: Floats | float | None = None,
        no: Floats | float | None = None,
        ties: Booleans | bool = False,
    ) -> Steps[Floats]:
        """1 for each query answered with the label for yes, −1 for no, nan being any other, 0 for neither."""
        answers: Measurements = yield Plan(stage, count, positions)
        self.asked += count
        labels = floats(answers.values).reshape(count)
        for_yes = self.positive if yes is None else yes
        for_no = self.negative if no is None else no
        is_no = (labels == for_no) | np.isnan(for_no)
        votes = np.where(labels == for_yes, 1.0, np.where(is_no, -1.0, 0.0))
        if not self.flip_rate:
            odd = (votes == 0) & ~(ties | np.full(count, self.ties))
            if np.any(odd):
                raise OtherLabel(float(labels[odd][0]))
            votes = np.where(votes == 0, -1.0, votes)
        return np.where((votes == 0) & ties, -1.0, votes)

    def ask_labels(self, stage: str, make: MakePositions, count: int) -> Steps[Floats]:  # (count,)
        """The label of each query; where labels are wrong at times the one ahead, once that leaves no doubt."""
        seen: dict[float, Floats] = {}
        rows = np.arange(count)
        for turn in range(MOST_ROUNDS):
            answers: Measurements = yield Plan(stage, rows.size, make(rows, self.factor(turn)))
            self.asked += rows.size
            labels = floats(answers.values).reshape(rows.size)
            for label in np.unique(labels):
                seen.setdefault(float(label), np.zeros(count))[rows[labels == label]] += 1
            counts = np.sort(np.stack([np.zeros(count), *seen.values()]), axis=0)
            rows = np.flatnonzero(counts[-1] - counts[-2] < self.enough)
            if not rows.size:
                break
        names, table = np.array(list(seen)), np.stack(list(seen.values()))
        return np.asarray(names[np.argmax(table, axis=0)])

    @property
    def enough(self) -> float:
        """By how many answers one of two must be ahead, before it is right but for the doubt."""
        rate = self.flip_rate
        return math.log(1 / self.doubt) / math.log((1 - rate) / rate) if rate else 1.0

    def factor(self, turn: int) -> float:
        """By how much tokens are longer at a turn: always one where answers are right."""
        return 2.0 ** (turn % TURNS) if self.flip_rate else 1.0

    def decide(
        self,
        stage: str,
        make: MakePositions,
        count: int,
        yes: Floats | float | None = None,
        no: Floats | float | None = None,
    ) -> Steps[Booleans]:  # (count,)
        """Yes or no of each comparison, asked until the odds leave no more than the doubt."""
        total, rows = np.zeros(count), np.arange(count)
        for turn in range(MOST_ROUNDS):
            for_yes, for_no = (
                each if each is None or np.ndim(each) == 0 else np.asarray(each)[rows] for each in (yes, no)
            )
            total[rows] += yield from self.votes(stage, make(rows, self.factor(turn)), rows.size, for_yes, for_no)
            rows = rows[np.abs(total[rows]) < self.enough]
            if not rows.size:
                return total > 0
        raise Unrecoverable(Outcome.TOO_NOISY, f"{rows.size} comparisons stayed undecided after {MOST_ROUNDS} labels")

    def bisect(
        self,
        stage: str,
        search: Search,
        make: MakeComparisons,
        cell: Floats | float | None = None,
        rounds: int = MOST_ROUNDS,
        yes: Floats | None = None,
        no: Floats | None = None,
    ) -> Steps[None]:
        """Compare numbers with their medians until each lies within one cell, or for so many rounds."""

        def ask(rows: Integers, at: Floats, turn: int) -> Steps[Floats]:
            positions, sense = make(rows, at, 2.0 ** (turn % TURNS) if turn < 0 else self.factor(turn))
            for_yes, for_no = (None if each is None else each[rows] for each in (yes, no))
            # A form that is zero is answered by what is beside it, by any label.
            return sense * (yield from self.votes(stage, positions, rows.size, for_yes, for_no, at == 0))

        every = np.arange(len(search.edges))
        for turn in range(rounds):
            if turn == EARLY_ROUND:
                yield from self._check_streaks(search, ask, LONGER_STREAK)
            rows = every if cell is None else search.unfinished(cell)
            if not rows.size:
                break
            at = search.thresholds(rows, cell if cell is None or np.ndim(cell) == 0 else np.asarray(cell)[rows])
            search.update(rows, at, (yield from ask(rows, at, turn)))
        else:
            if cell is not None:
                raise Unrecoverable(Outcome.TOO_NOISY, f"{rows.size} numbers were not found by {rounds} labels each")
        if cell is not None:
            yield from self._check_streaks(search, ask, LONG_STREAK)

    def _check_streaks(
        self, search: Search, ask: Callable[[Integers, Floats, int], Steps[Floats]], least: int
    ) -> Steps[None]:
        """Ask again for bounds that all later answers have run up against, by other tokens of the same meaning.

        After a wrong answer every later one points to the bound that it has set.
        """
        if self.flip_rate:
            return
        rows = np.flatnonzero(np.abs(search.streak) >= least)
        upwards = search.streak[rows] > 0
        at = np.where(upwards, search.edges[rows, 1], search.edges[rows, 0])
        asked = (at != search.prior.low) & (at != search.prior.high)
        rows, at, upwards = rows[asked], at[asked], upwards[asked]
        if np.any(~asked) and not search.prior.sure:
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                f"{np.sum(~asked)} numbers lie beyond all bounds: the labels are of several heads (heads=auto), of "
                "another family, or set against a threshold beyond all answers, which should be lowered",
            )
        checked = rows.size
        if not checked:
            return
        outwards = BESIDE * (search.edges[rows, 1] - search.edges[rows, 0]) * np.where(upwards, 1.0, -1.0)
        search.beyond[rows] = 0.0
        for part in (0.0, 1.0):  # rounding answers for a number that lies on the bound, and not beside it
            wrong = ((yield from ask(rows, at + part * outwards, -1)) > 0) == upwards
            rows, at, upwards, outwards = rows[wrong], at[wrong], upwards[wrong], outwards[wrong]
            if not rows.size:
                return
            search.beyond[rows] = np.abs(outwards)
        raise Unrecoverable(
            Outcome.INCONSISTENT,
            f"{rows.size} of {checked} comparisons were answered both ways: labels are wrong at times; declare how "
            "often (noise=Noise.flipped(rate)), or have it measured (noise='measure')",
        )
