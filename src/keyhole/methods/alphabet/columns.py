"""Keys of last tokens: logits of others beside them, chosen so that they can be read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import orth

from keyhole.arrays import Booleans, Floats, Integers
from keyhole.gauge.identifiability import AlphabetSpan
from keyhole.methods.alphabet.logits import LogitTable
from keyhole.methods.alphabet.values import TokenValues, combined, pivots
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.queries import Signature
from keyhole.recovery import Outcome

# Where a token cannot be read beside a last one, or a last one drowns too many, others are tried instead, so often.
REPLACEMENTS = 8
# Other last tokens are looked at beside so many tokens, and so many of them for each that is wanted.
LOOKS, CANDIDATES = 6, 3
# Keys are solved from logits whose errors are at most this many times what is good; of worse ones where it must be.
SOLVED = 1e2
# Logits are this many times as large as their differences.
SELF = 2.0
# Roots of further ladders beside one last token, and the sequences of more tokens than these that they take.
ISLANDS, FEWEST = 6, 3
# Tokens depend on others from which they differ by less than this.
DEPENDENT = 1e-8


@dataclass(frozen=True)
class Columns:
    """The keys W·e_b + c of some last tokens b along the directions that tokens differ by."""

    lasts: Integers  # (n,)
    keys: Floats  # (n, r₀)
    errors: Floats  # (n, r₀)

    def with_more(self, more: Columns) -> Columns:
        """These and others."""
        lasts = np.concatenate([self.lasts, more.lasts])
        return Columns(lasts, np.concatenate([self.keys, more.keys]), np.concatenate([self.errors, more.errors]))


def ask_columns(
    signature: Signature, span: AlphabetSpan, values: TokenValues, lasts: Integers, known: Integers | None = None
) -> Steps[Columns]:
    """Keys of these last tokens, or of others than those known where they drown what stands beside them."""
    return (yield from _ColumnReader(signature, span, values, known).steps(lasts))


class _ColumnReader:
    """The tokens that are read beside each last one."""

    def __init__(
        self, signature: Signature, span: AlphabetSpan, values: TokenValues, known: Integers | None = None
    ) -> None:
        self.known = np.zeros(0, dtype=np.int64) if known is None else known
        self.span, self.values, self.table = span, values, LogitTable(signature, values)
        self.tokens = span.rows @ span.span  # last tokens are to be independent; beside known ones, with a constant
        if known is not None:
            size = float(np.sqrt(np.mean(np.sum(self.tokens**2, axis=1))))
            self.tokens = np.column_stack([self.tokens, np.full(len(self.tokens), size)])
        self.signature, self.rounding = signature, signature.space.rounding

    def steps(self, lasts: Integers) -> Steps[Columns]:
        """Read beside last tokens that drown little, and beside others where that was not enough."""
        solved, count = np.zeros(0, dtype=np.int64), lasts.size
        places = yield from self._ask_looks(lasts)
        for _ in range(REPLACEMENTS):
            places = yield from self._ask_usable(solved, places)
            yield from self._ask_all(places)
            solved = np.concatenate([solved, places[[self._is_solved(place) for place in places]]])
            missing, spare = count - self._rank(solved), self._spare()
            if not missing or not spare.size:
                break
            places = yield from self._ask_others(solved, spare, missing)
        places = solved if self._rank(solved) == count else np.union1d(solved, places)
        yield from self.table.ask_copies(np.setdiff1d(places, solved))
        if self._rank(places) < count:
            raise Unrecoverable(
                Outcome.SATURATED,
                f"beside all but {places.size} tokens of the alphabet too few others keep a weight that can be read, "
                f"and {count} independent ones are needed: they drown the others",
            )
        keys, errors = (np.stack(each) for each in zip(*map(self._keys, places), strict=True))
        return Columns(self.table.lasts[places], keys, errors)

    def _ask_usable(self, solved: Integers, places: Integers) -> Steps[Integers]:
        """Of last tokens those that drown little, others in the place of the rest; all of them where there are none."""
        wanted = places.size
        usable = places[[not self._drowns(place) for place in places]]
        for _ in range(REPLACEMENTS):
            spare = self._spare()
            if usable.size == wanted or not spare.size:
                break
            known = np.concatenate([solved, usable])
            usable = np.concatenate([usable, (yield from self._ask_others(known, spare, wanted - usable.size))])
        rest = np.setdiff1d(places, usable)[: wanted - usable.size]
        return np.concatenate([usable, rest])

    def _ask_all(self, places: Integers) -> Steps[None]:
        """Everything beside last tokens: the tokens that span all, and others in the place of drowned ones."""
        yield from self._ask_beside(places)
        yield from self.table.ask_ladders(places)
        for _ in range(REPLACEMENTS):
            pairs = [(place, letter) for place in places for letter in self._replacements(place)]
            if not pairs:
                break
            where, letters = np.array(pairs, dtype=np.int64).T
            yield from self.table.ask(where, letters)
            yield from self.table.ask_ladders(places)
        yield from self._ask_islands(places)

    def _ask_islands(self, places: Integers) -> Steps[None]:
        """What no ladder reaches from a last token, over one of those tokens: it drowns the last, as they all do."""
        known = self.table
        for _ in range(ISLANDS if known.longest > FEWEST else 0):
            found = [root for place in places for root in self._island(int(place))]
            if not found:
                return
            lasts, roots, drowned, letters = zip(*found, strict=True)
            new = known.lasts.size + np.arange(len(found))
            known.add(np.array(lasts), np.array(roots), np.array(drowned))
            where = np.repeat(new, [each.size for each in letters])
            yield from known.ask(where, np.concatenate(letters))
            yield from known.ask_ladders(new)

    def _island(self, place: int) -> list[tuple[int, int, float, Integers]]:
        """A last token, a root, by how much it drowns the last one at least, and others to read over it; or nothing."""
        known, rows = self.table, self._rows(place)
        if self._is_solved(place):
            return []
        unread = np.all(~(known.errors[rows] <= known.stepped), axis=0) & self._others(place)
        offsets = np.where(np.isfinite(known.drowned[rows]), known.drowned[rows], 0.0)
        bounds = np.max(known.bound[rows] + offsets[:, None], axis=0)
        others = np.flatnonzero(unread & (bounds > np.log(1 / self.table.good)))
        others = others[~np.isin(others, known.roots[rows])]
        if others.size < 2:
            return []
        root = int(others[np.argsort(bounds[others], kind="stable")[others.size // 2]])
        return [(self._last(place), root, float(bounds[root]), others[others != root])]

    def _ask_looks(self, lasts: Integers) -> Steps[Integers]:
        """A few tokens beside new last ones, whose places come back."""
        places = self.table.lasts.size + np.arange(lasts.size)
        self.table.add(lasts)
        most = self.values.rank * -(-LOOKS // self.values.rank)  # so many that each query is full
        yield from self._ask_beside(places, most)
        return places

    def _spare(self) -> Integers:
        """Tokens that are no last ones yet."""
        return np.setdiff1d(np.arange(len(self.span.rows)), np.union1d(self.table.lasts, self.known))

    def _ask_beside(self, places: Integers, most: int | None = None) -> Steps[None]:
        """The tokens that span all, or as many of them, beside last ones."""
        others = {place: self.values.chosen[self.values.chosen != self._last(place)][:most] for place in places}
        pairs = [(place, letter) for place, letters in others.items() for letter in letters]
        where, beside = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        yield from self.table.ask(where, beside)

    def _ask_others(self, usable: Integers, spare: Integers, wanted: int) -> Steps[Integers]:
        """Places of further last tokens: of some that a few tokens stand beside, those that drown the fewest."""
        known = np.concatenate([self.known, self.table.lasts[usable]])
        count = min(CANDIDATES * wanted, spare.size)
        spare = (
            spare[outside(self.tokens, known, spare, count)]
            if self.known.size
            else spare[farthest(self.tokens, known, spare, count)]
        )
        places = yield from self._ask_looks(spare)
        places = places[[not self._drowns(place) for place in places]]
        drowned = np.sum(self.table.below[places], axis=1)
        places = places[np.argsort(drowned, kind="stable")][: 2 * wanted]
        return places[farthest(self.tokens, known, self.table.lasts[places], min(wanted, places.size))]

    def _rank(self, places: Integers) -> int:
        """Independent last tokens among these, of each other and of known ones."""
        if not places.size:
            return 0
        known, both = self.tokens[self.known], np.concatenate([self.known, self.table.lasts[places]])
        return int(np.linalg.matrix_rank(self.tokens[both]) - (np.linalg.matrix_rank(known) if len(known) else 0))

    def _last(self, place: int) -> int:
        return int(self.table.lasts[place])

    def _others(self, place: int) -> Booleans:  # (m,)
        return np.asarray(np.arange(len(self.span.rows)) != self._last(place))

    def _drowns(self, place: int) -> bool:
        """Whether fewer tokens than needed can be expected to keep a weight beside a last one."""
        tried, below = self.table.tried[place], self.table.below[place]
        share = float(np.sum(below)) / max(int(np.sum(tried)), 1)
        return (len(self.span.rows) - 1) * (1 - share) < self.span.numbers[1]

    def _differences(self, place: int, letters: Integers) -> Floats:  # (n, r₀)
        return np.asarray((self.span.rows[letters] - self.span.rows[self._last(place)]) @ self.span.differences)

    def _replacements(self, place: int) -> Integers:
        """Tokens in the place of those that cannot be read beside a last one: the farthest from the span of others."""
        read = np.flatnonzero((self.table.errors[place] <= self.table.stepped) & self._others(place))
        spare = np.flatnonzero(~self.table.tried[place] & self._others(place))
        missing = self.span.numbers[1] - read.size
        if missing <= 0 or not spare.size:
            return spare[:0]
        both = np.concatenate([read, spare])
        rows = self._differences(place, both)
        return spare[farthest(rows, np.arange(read.size), np.arange(read.size, both.size), min(missing, spare.size))]

    def _rows(self, place: int) -> Integers:
        """All rows of the table with this last token: over itself, and over roots that drown it."""
        return np.flatnonzero(self.table.lasts == self.table.lasts[place])

    def _read(self, place: int, most: float) -> tuple[Floats, Floats, Floats]:  # (n, r₀), (n,), (n,)
        """Differences of tokens that were read beside a last one, their logits and errors of at most so much."""
        differences, logits, errors, table = [], [], [], self.table
        for row in self._rows(place):
            letters = np.flatnonzero((table.errors[row] <= most) & np.isfinite(table.errors[row]) & self._others(place))
            letters = letters[letters != table.roots[row]]
            apart = self.span.rows[letters] - self.span.rows[table.roots[row]]
            differences.append(apart @ self.span.differences)
            logits.append(table.logits[row, letters])
            # A logit is an inner product of the oracle's, rounded at the size of what it adds up.
            size = float(np.max(np.abs(logits[-1]), initial=0.0))
            size += float(table.drowned[row]) if np.isfinite(table.drowned[row]) else 0.0
            made = SELF * self.rounding * self.span.rows.shape[1] ** 0.5 * size
            errors.append(np.hypot(table.errors[row, letters], made))
        return np.concatenate(differences), np.concatenate(logits), np.concatenate(errors)

    def _is_solved(self, place: int) -> bool:
        """Whether what was read well beside a last token determines its key."""
        rows = self._read(place, SOLVED * self.table.good)[0]
        count = self.span.numbers[1]
        return len(rows) >= count and bool(np.linalg.matrix_rank(rows) == count)

    def _keys(self, place: int) -> tuple[Floats, Floats]:  # (r₀,), (r₀,)
        """The key of a last token by least squares, weighted by errors."""
        rows, logits, errors = self._read(place, np.inf)
        if len(rows) < rows.shape[1] or np.linalg.matrix_rank(rows) < rows.shape[1]:
            raise Unrecoverable(
                Outcome.SATURATED,
                f"beside a token of the alphabet only {len(rows)} others keep a weight that can be read, and "
                f"{rows.shape[1]} are needed: it drowns the others",
            )
        inverse = np.asarray(np.linalg.pinv(rows / errors[:, None]), dtype=np.float64)
        keys = inverse @ (logits / errors)
        solving = self.rounding * float(np.linalg.cond(rows)) * float(np.max(np.abs(keys)))
        return keys, combined(inverse, np.ones(len(errors)), self.signature) + solving


def outside(rows: Floats, known: Integers, spare: Integers, count: int) -> Integers:  # -> places in spare
    """Of spare rows those that lie the farthest outside the span of known ones, whatever they are to each other."""
    basis = orth(rows[known].T)
    apart = np.linalg.norm(rows[spare] - (rows[spare] @ basis) @ basis.T, axis=1)
    order = np.argsort(-apart, kind="stable")[:count]
    return np.asarray(order[apart[order] > DEPENDENT * float(np.max(np.abs(rows)))], dtype=np.int64)


def farthest(rows: Floats, known: Integers, spare: Integers, count: int) -> Integers:  # -> (count,) places in spare
    """Of spare rows those that lie the farthest outside the span of known ones, and of each other."""
    basis = orth(rows[known].T)
    rest = rows[spare] - (rows[spare] @ basis) @ basis.T
    chosen = pivots(rest, count)
    return chosen[: int(np.linalg.matrix_rank(rest, tol=DEPENDENT * float(np.max(np.abs(rows)))))]
