"""Logits of tokens of an alphabet against a last one, read through a ladder of tokens whose logits are known.

Beside a last token b the token a has the weight w = e^Δ/(1 + e^Δ), Δ the difference of their logits, and the answer
t_b + w·(t_a − t_b). Where a drowns b, or answers the same, a third token c of known logit stands beside both: then b
and c together are one token of known value z and logit λ = log(1 + e^Δ_c).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Floats, Integers
from keyhole.methods.alphabet.values import TokenValues, letters_plan
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.queries import Measurements, Signature
from keyhole.recovery import Outcome

# A logit is read where its error is at most this power of that of the dtype: e^14 times the rounding of an answer.
GOOD = 0.55
# Behind larger errors it is read at so many times the error that even weights have.
EVEN = 256.0
# Weights with larger errors are not read at all, and none is negative by so many of its errors.
UNREADABLE, OUTSIDE = 0.25, 8.0
# Logits are steps of a ladder, and not read again, where their errors are at most this many times what is good: they
# add up along it.
STEPPED = 10.0
# A step that reads nothing well is of use where the error falls to this part of what it was.
BETTER = 0.3
# Tokens of which only a bound is known are asked again once the ladder comes so near to it.
NEAR = 6.0
# Logits that are known to this are estimates.
COARSE = 1.0
# A ladder has no more steps than this, and copies of a faint token are as many.
MOST_STEPS, COPIES = 64, 63
# A ladder takes sequences of more tokens than these.
SHORTEST = 2


@dataclass(frozen=True)
class Reading:
    """Logits of some tokens beside a base of known value: those against the last token, and their errors."""

    logits: Floats  # (n,)
    errors: Floats  # (n,) infinite where a weight is zero or one within its error
    above: Floats  # (n,) of which the token has the greater weight
    reach: Floats  # (n,) the largest logit over the base that would have shown


class LogitTable:
    """What is known of the logits of all tokens against each of some last ones."""

    def __init__(self, signature: Signature, values: TokenValues) -> None:
        self.signature, self.values = signature, values
        self.lasts, self.roots = (np.zeros(0, dtype=np.int64) for _ in range(2))
        self.drowned = np.zeros(0)  # the least logit of the root over the last token, which adds its share to errors
        shape = (0, values.answers.shape[0])
        self.logits, self.errors, self.bound = (np.zeros(shape) for _ in range(3))
        self.below, self.tried = (np.zeros(shape, dtype=bool) for _ in range(2))
        moved = float(np.sqrt(np.mean(np.sum((values.answers - np.mean(values.answers, axis=0)) ** 2, axis=1))))
        least = float(np.median(values.rounding) + signature.noise.radius) / moved
        self.good = max(signature.space.eps**GOOD, EVEN * least)
        self.stepped = STEPPED * self.good

    def add(self, lasts: Integers, roots: Integers | None = None, drowned: Floats | None = None) -> None:
        """Last tokens of which nothing is known yet; logits are over them, or over roots that drown them."""
        shape, first = (lasts.size, self.logits.shape[1]), self.lasts.size
        self.lasts = np.concatenate([self.lasts, lasts])
        self.roots = np.concatenate([self.roots, lasts if roots is None else roots])
        self.drowned = np.concatenate([self.drowned, np.full(lasts.size, np.inf) if drowned is None else drowned])
        self.logits = np.concatenate([self.logits, np.zeros(shape)])
        self.errors = np.concatenate([self.errors, np.full(shape, np.inf)])
        self.errors[np.arange(first, self.lasts.size), self.roots[first:]] = 0.0
        # The logit of the last reference that a token was far above, and whether the last token drowns it.
        self.bound = np.concatenate([self.bound, np.full(shape, -np.inf)])
        self.below = np.concatenate([self.below, np.zeros(shape, dtype=bool)])
        self.tried = np.concatenate([self.tried, np.zeros(shape, dtype=bool)])
        rooted = first + np.flatnonzero(self.roots[first:] != lasts)
        self.below[rooted, self.lasts[rooted]] = self.tried[rooted, self.lasts[rooted]] = True

    @property
    def longest(self) -> float:
        """Most tokens per sequence."""
        return self.signature.max_length or np.inf

    def ask(self, places: Integers, letters: Integers) -> Steps[None]:  # (n,), (n,)
        """Read tokens beside last ones, by their place: as many a query as outputs tell apart, then alone."""
        new = ~self.tried[places, letters]
        places, letters = places[new], letters[new]
        self.tried[places, letters] = True
        count = int(min(self.values.rank, self.longest - 1))
        while count > 1 and letters.size:  # fewer tokens are told apart the better
            yield from self._ask_blocks(places, letters, count)
            poor = self.errors[places, letters] > self.stepped
            places, letters, count = places[poor], letters[poor], count // 2
        if letters.size:
            yield from self._ask_beside(places, letters, np.full(letters.size, -1, dtype=np.int64))

    def ask_ladders(self, places: Integers) -> Steps[None]:
        """Read what drowns these last tokens, or answers as they do, beside tokens that were read."""
        for _ in range(MOST_STEPS if self.longest > SHORTEST else 0):
            steps = self._steps(places)
            if not steps[0].size:
                break
            yield from self._ask_beside(*steps)

    def _ask_blocks(self, places: Integers, letters: Integers, count: int) -> Steps[None]:
        """Several tokens a query beside one last token."""
        blocks: dict[tuple[int, bool], list[tuple[int, Integers]]] = {}
        for place in np.unique(places):
            own = letters[places == place]
            for first in range(0, own.size, count):
                block = own[first : first + count]
                rooted = bool(self.roots[place] != self.lasts[place])
                blocks.setdefault((block.size, rooted), []).append((int(place), block))
        for some in blocks.values():
            where, members = np.array([place for place, _ in some]), np.stack([block for _, block in some])
            ends = self.roots[where]
            plan = letters_plan("scores", self.signature, np.column_stack([members, *self._ends(where)]))
            asked: Measurements = yield plan
            known = self.values.answers
            ways = known[members] - known[ends][:, None, :]  # (n, k, outputs)
            inverse = np.linalg.pinv(ways)  # (n, outputs, k)
            weights = ((asked.by_output - known[ends])[:, None, :] @ inverse)[:, 0, :]
            rest = 1 - np.sum(weights, axis=1, keepdims=True)
            own = self._rounding(members, np.full(members.shape, -1), ends[:, None] + 0 * members) + asked.radius
            own = own + self._share_of_last(where)[:, None]
            largest = np.max(own, axis=1, keepdims=True)
            error = largest * np.linalg.norm(inverse, axis=1)
            whole = np.linalg.norm(error, axis=1, keepdims=True)
            # Tokens whose values are dependent beside the last one's have shares that no answer tells.
            told = np.linalg.matrix_rank(ways, tol=largest[:, 0] / UNREADABLE) == ways.shape[1]
            sure = (weights > 2 * error) & (rest > 2 * whole) & told[:, None]
            safe, other = np.where(sure, weights, 0.5), np.where(sure, rest, 0.5)
            errors = np.where(sure, 2 * (error / safe + whole / other), np.inf)
            good = errors <= self.stepped
            kept, seen = np.broadcast_to(where[:, None], members.shape)[good], members[good]
            self.logits[kept, seen], self.errors[kept, seen] = np.log(safe / other)[good], errors[good]

    def ask_copies(self, places: Integers) -> Steps[None]:
        """Read tokens that these last ones drown in many copies."""
        faint = (self.errors > self.good) & self.below & self.tried
        faint[np.setdiff1d(np.arange(self.lasts.size), places)] = False
        places, letters = np.nonzero(faint)
        copies = int(min(COPIES, self.longest - 1))
        if letters.size and copies > 1:
            none = np.full(letters.size, -1, dtype=np.int64)
            yield from self._ask_beside(places, letters, none, copies)

    def _ask_beside(self, places: Integers, letters: Integers, beside: Integers, copies: int = 1) -> Steps[None]:
        """One token each, in so many copies, beside one of known logit (none where that is negative) and the last."""
        plain = beside < 0
        answers = np.zeros((letters.size, self.values.answers.shape[1]))
        radius = 0.0
        rooted = self.roots[places] != self.lasts[places]
        for with_root in (False, True):
            ends = self._ends(places) if with_root else [self.lasts[places]]
            for some, columns in ((plain, [letters] * copies + ends), (~plain, [letters] * copies + [beside, *ends])):
                here = some & (rooted == with_root)
                if np.any(here):
                    letters_of = np.stack([column[here] for column in columns], axis=1)
                    asked: Measurements = yield letters_plan("scores", self.signature, letters_of)
                    answers[here], radius = asked.by_output, asked.radius
        read = self._read(places, letters, beside, answers, radius, copies)
        better = read.errors < self.errors[places, letters]
        kept, seen = places[better], letters[better]
        self.logits[kept, seen], self.errors[kept, seen] = read.logits[better], read.errors[better]
        known = np.where(plain, 0.0, self.logits[places, np.maximum(beside, 0)])
        saturated = ~(read.errors < COARSE)
        high, low = saturated & (read.above > 0), saturated & ~(read.above > 0) & plain
        self.bound[places[high], letters[high]] = known[high] + read.reach[high]
        self.below[places[low], letters[low]] = True

    def _base(self, places: Integers, beside: Integers) -> tuple[Floats, Floats, Floats, Floats]:
        """Value (n, outputs), logit, share and error of the token or two that another stands beside."""
        answers, ends = self.values.answers, self.roots[places]
        letters = np.maximum(beside, 0)
        logits = np.where(beside < 0, -np.inf, self.logits[places, letters])
        share = np.where(beside < 0, 0.0, 1 / (1 + np.exp(-np.clip(logits, -700.0, 700.0))))
        base = answers[ends] * (1 - share)[:, None] + answers[letters] * share[:, None]
        errors = np.where(beside < 0, 0.0, self.errors[places, letters])
        return base, np.logaddexp(0.0, logits), share, errors

    def _read(
        self, places: Integers, letters: Integers, beside: Integers, answers: Floats, radius: float, copies: int
    ) -> Reading:
        values, ends = self.values, self.roots[places]
        base, logit, share, unknown = self._base(places, beside)
        ways = values.answers[letters] - base
        squares = np.maximum(np.sum(ways**2, axis=1), 1e-300)
        weight = np.sum((answers - base) * ways, axis=1) / squares
        rest = np.sum((values.answers[letters] - answers) * ways, axis=1) / squares
        own = self._rounding(letters, beside, ends) + self._share_of_last(places) + radius
        apart = np.linalg.norm(values.answers[np.maximum(beside, 0)] - values.answers[ends], axis=1)
        error = (own + share * (1 - share) * apart * np.minimum(unknown, 1.0)) / np.sqrt(squares)
        if np.any((error < UNREADABLE) & (np.minimum(weight, rest) < -OUTSIDE * error)):
            raise Unrecoverable(
                Outcome.WRONG_FAMILY,
                "an answer is no mixture of the values of its tokens, so that the box is no softmax head",
            )
        sure = (weight > 2 * error) & (rest > 2 * error)
        safe, other = np.where(sure, weight, 0.5), np.where(sure, rest, 0.5)
        errors = np.where(sure, error * (1 / safe + 1 / other) * 2 + share * unknown, np.inf)
        errors = np.where(error < UNREADABLE, errors, np.inf)
        above = np.where(error < UNREADABLE, weight - rest, 0.0)
        reach = -np.log(np.clip(2 * error, 1e-300, 1.0))
        return Reading(np.log(safe / other) + logit - np.log(copies), errors, above, reach)

    def _ends(self, places: Integers) -> list[Integers]:
        """The tokens at the end of sequences: roots, where there are others than last ones, and the last ones."""
        rooted = bool(np.any(self.roots[places] != self.lasts[places]))
        return [self.roots[places], self.lasts[places]] if rooted else [self.lasts[places]]

    def _share_of_last(self, places: Integers) -> Floats:
        """What last tokens may add to answers beside roots that drown them."""
        answers = self.values.answers
        apart = np.linalg.norm(answers[self.roots[places]] - answers[self.lasts[places]], axis=1)
        return np.asarray(np.exp(-self.drowned[places]) * apart)

    def _rounding(self, letters: Integers, beside: Integers, ends: Integers) -> Floats:
        """Radius of an answer and of the values that it is compared with."""
        errors, rounding = self.values.errors, self.values.rounding
        third = np.where(beside < 0, ends, beside)
        largest = np.maximum(np.maximum(rounding[letters], rounding[third]), rounding[ends])
        return np.asarray(largest + errors[letters] + errors[third] + errors[ends])

    def _steps(self, places: Integers) -> tuple[Integers, Integers, Integers]:
        """The next step of each ladder: last tokens, tokens that are not known well, and what to put beside them."""
        found: list[tuple[int, int, int]] = []
        for place in places:
            (poor,) = np.nonzero(self.tried[place] & (self.errors[place] > self.stepped) & ~self.below[place])
            known = np.flatnonzero(self.errors[place] <= self.stepped)
            steps = [(*self._reference(int(place), int(each), known), int(each)) for each in poor]
            sure = [step for step in steps if step[0] <= self.good]
            some = sorted(step for step in steps if step[0] <= BETTER * min(COARSE, self.errors[place, step[2]]))[:1]
            found += [(int(place), letter, other) for _, other, letter in sure or some]
        table = np.array(found, dtype=np.int64).reshape(-1, 3)
        return table[:, 0], table[:, 1], table[:, 2]

    def _reference(self, place: int, letter: int, known: Integers) -> tuple[float, int]:
        """The known token beside which another is read best, and the error to expect; infinite where none is of use."""
        known = known[(known != letter) & (known != self.roots[place]) & (known != self.lasts[place])]
        if not known.size:
            return np.inf, -1
        logits, error = self.logits[place, known], self.errors[place, letter]
        if error >= COARSE and self.bound[place, letter] > -np.inf:  # as high as the ladder reaches
            top = int(np.argmax(logits))
            return 0.0 if logits[top] >= self.bound[place, letter] - NEAR else np.inf, int(known[top])
        guess = self.logits[place, letter] if error < COARSE else 0.0
        base, logit, _, unknown = self._base(np.full(known.size, place), known)
        apart = np.linalg.norm(self.values.answers[letter] - base, axis=1)
        own = self._rounding(np.full(known.size, letter), known, np.full(known.size, self.roots[place]))
        expected = own / np.maximum(apart, 1e-300) * 2 * (2 + 2 * np.cosh(np.clip(guess - logit, -500, 500))) + unknown
        best = int(np.argmin(expected))
        return float(max(expected[best] - unknown[best], 0.0)), int(known[best])
