"""Keys of normed attention: their directions by last tokens, their lengths by sums of two of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.linalg

from keyhole.arrays import Floats, Integers
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.parts.score_forms.readings import LARGEST, Norms, PairLogits, Tokens, refuse
from keyhole.recovery import Outcome

# A token that does not lie in the span of the others has a part outside of so many times its error, or that is nothing.
DEPENDENT = 4.0
# So many rows are candidates for the next one that is chosen: more make better choices, and a query more each.
CANDIDATES = 8
# Sums of two tokens, of which the second is multiplied by one of these: with either sign, and of clear value.
STRETCHES = np.array([1.0, -2.0])
NOT_NORMED = "sums of tokens are not answered as normed keys and queries answer them"


@dataclass(frozen=True)
class Side:
    """Vectors of rows (keys or queries) in the coordinates of the first ones, and their Gram matrix there."""

    vectors: Floats  # (count, rank)
    gram: Floats  # (rank, rank)

    def units(self, weights: Floats) -> Floats:  # (n, count) -> (n, rank)
        """Mixtures of the rows, their vectors of length one."""
        mixed = weights @ self.vectors
        return np.asarray(mixed / lengths(mixed, self.gram)[:, None])


def lengths(vectors: Floats, gram: Floats) -> Floats:  # (n, rank) -> (n,)
    """Lengths by a Gram matrix."""
    squares = np.sum((vectors @ gram) * vectors, axis=1)
    if not np.all(squares > 0):
        raise refuse(NOT_NORMED)
    return np.asarray(np.sqrt(squares))


@dataclass(frozen=True)
class Block:
    """Scores of rows with each other, those first that all depend on."""

    order: Integers  # (width,) of rows
    scores: Floats  # (width, width), known of the first `rank` with the first `known`
    own: Floats  # (width,): what they are read beside, the weight of the last token
    rank: int
    known: int


@dataclass(frozen=True)
class KeyLearner:
    """Asks for keys; with a reader that replays, solves for them only."""

    rows: Floats  # (width, width) orthonormal, of which first tokens and last ones are made
    others: Floats  # (width, width) more rows for first tokens
    norms: Norms

    # --- which tokens: weights of rows ------------------------------------------------------------------------------

    def firsts(self, weights: Floats) -> Floats:  # (n, width) -> (n, width)
        """First tokens."""
        return self.norms.first * (weights @ self.rows)

    def lasts(self, weights: Floats) -> Floats:
        """Last tokens."""
        return self.norms.last * (weights @ self.rows)

    def _units(self, rows: Integers, columns: Integers) -> tuple[Tokens, Tokens]:
        """First and last tokens that are rows."""
        units = np.eye(len(self.rows))
        return lambda _: self.firsts(units[rows]), lambda _: self.lasts(units[columns])

    def sums(self, some: Integers, stretch: Floats, others: Integers) -> Floats:  # (n,) each -> (n, width)
        """Weights of rows some + stretch·others."""
        units = np.eye(len(self.rows))
        return np.asarray(units[some] + stretch[:, None] * units[others])

    # --- the first rows, of keys and queries, until they depend on each other ----------------------------------------

    def ask_block(self, reader: PairLogits) -> Steps[Block]:
        """Rows whose scores with each other make a matrix of full rank, chosen one by one among a few."""
        width = len(self.rows)
        scores, own = np.zeros((width, width)), np.zeros(width)
        fresh = min(CANDIDATES, width)
        chosen, pool = list[int](), list(range(fresh))
        yield from self._ask_scores(reader, scores, own, pool, [], [])
        while pool:
            found = [_remainder(scores, chosen, row) for row in pool]
            best = max(range(len(pool)), key=lambda place: found[place][0])
            clear = found[best][0] > DEPENDENT * reader.typical * found[best][1]
            best = reader.decide(best if clear else -1)
            if best < 0:
                break
            chosen.append(pool.pop(best))
            new = [fresh] if fresh < width else []
            yield from self._ask_scores(reader, scores, own, new, chosen, pool)
            pool, fresh = pool + new, fresh + len(new)
        if not chosen:
            raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, "no token attracts attention more than another does")
        order = np.array([*chosen, *pool, *range(fresh, width)])
        return Block(order, scores[np.ix_(order, order)], own[order], len(chosen), len(chosen) + len(pool))

    def _ask_scores(
        self, reader: PairLogits, scores: Floats, own: Floats, new: list[int], chosen: list[int], pool: list[int]
    ) -> Steps[None]:
        """Scores of new rows with themselves and with those chosen, and of a pool with the one that was chosen last."""
        units = np.eye(len(self.rows))
        if new:
            read = yield from reader.read_own("directions", self.firsts(units[new]), self.lasts(units[new]))
            scores[new, new], own[new] = read.of_itself()
        pairs = [(one, other) for one in new for other in chosen] + [(each, chosen[-1]) for each in pool if chosen]
        if pairs:
            rows, columns = (np.array(each) for each in zip(*pairs, strict=True))
            rows, columns = np.concatenate([rows, columns]), np.concatenate([columns, rows])
            read = yield from reader.read("directions", None, *self._units(rows, columns), own[columns])
            scores[rows, columns] = read.above(own[columns])

    # --- keys -------------------------------------------------------------------------------------------------------

    def ask_key_lengths(self, reader: PairLogits, block: Block) -> Steps[Side]:
        """Lengths of the first keys and their inner products, that of the first being one."""
        count = block.rank
        scores, own = block.scores[:count, :count], block.own
        sizes, gram = np.ones(count), np.ones((count, count))
        if count > 1:
            # s(b_0 + t·b_i, g)·n = s(b_0, g) + t·n_i·s(b_i, g) at two g for the two unknown lengths n, n_i.
            rows, stretch = np.arange(1, count), np.full(count - 1, STRETCHES[0])
            turning = scores[0][None, :, None] * scores[1:, None, :] - scores[0][None, None, :] * scores[1:, :, None]
            pairs = np.argmax(np.abs(turning).reshape(count - 1, -1), axis=1)
            choice = np.stack([pairs // count, pairs % count])  # (2, count - 1) last tokens
            zeros = np.zeros(2 * (count - 1), dtype=np.int64)
            found = yield from reader.read(
                "lengths",
                choice,
                lambda _: self.firsts(self.sums(zeros, np.tile(stretch, 2), np.tile(rows, 2))),
                lambda each: self.lasts(np.eye(len(self.rows))[each.ravel()]),
                own[choice.ravel()],
            )
            choice = found.choice
            seen = found.above(own[choice.ravel()]).reshape(2, -1)
            system = np.stack([seen, -stretch * scores[rows, choice]], axis=-1).transpose(1, 0, 2)  # (n, 2, 2)
            solved = np.linalg.solve(system, scores[0][choice].T[:, :, None])[:, :, 0]
            if not np.all(solved > 0):
                raise refuse(NOT_NORMED)
            both, sizes[1:] = solved[:, 0], solved[:, 1]
            gram[0, 1:] = gram[1:, 0] = (both**2 - 1 - (stretch * sizes[1:]) ** 2) / (2 * stretch)
        np.fill_diagonal(gram, sizes**2)
        some, others = np.triu_indices(count - 1, 1)
        some, others = some + 1, others + 1
        if some.size:
            weighed = sizes[:, None] * scores
            sums = weighed[some][:, None, :] + STRETCHES[:, None] * weighed[others][:, None, :]  # (n, 2, count)
            clear = np.abs(sums) / (1 + np.abs(STRETCHES))[:, None]
            choice = np.argmax(clear.reshape(len(some), -1), axis=1)
            signs = np.sign(-sums.reshape(len(some), -1)[np.arange(len(some)), choice])
            found = yield from reader.read(
                "lengths",
                (choice, signs),
                lambda each: self.firsts(each[1][:, None] * self.sums(some, STRETCHES[each[0] // count], others)),
                lambda each: self.lasts(np.eye(len(self.rows))[each[0] % count]),
                own[choice % count],
            )
            choice, signs = found.choice
            stretch, last = STRETCHES[choice // count], choice % count
            seen = signs * found.above(own[last])
            both = (weighed[some, last] + stretch * weighed[others, last]) / seen
            met = (both**2 - sizes[some] ** 2 - (stretch * sizes[others]) ** 2) / (2 * stretch)
            gram[some, others] = gram[others, some] = met
        return Side(np.eye(count), gram)

    def ask_outer_keys(self, reader: PairLogits, block: Block, keys: Side) -> Steps[Side]:
        """The keys of the other rows: their directions from the first last tokens, their lengths from one sum each."""
        width, count, known = len(self.rows), block.rank, block.known
        if width == count:
            return keys
        scores = block.scores[:count, :count]
        own, units = block.own, np.eye(width)
        seen = block.scores[count:known, :count]
        if width > known:
            rows, columns = np.repeat(np.arange(known, width), count), np.tile(np.arange(count), width - known)
            found = yield from reader.read("directions", None, *self._units(rows, columns), own[columns])
            seen = np.concatenate([seen, found.above(own[columns]).reshape(-1, count)])
        sizes = np.sqrt(np.diag(keys.gram))
        onto = sizes[:, None] * scores
        directions = np.asarray(np.linalg.solve(onto.T, seen.T).T)
        directions = directions / lengths(directions, keys.gram)[:, None]
        seen = directions @ onto
        towards = directions @ keys.gram / sizes  # (outer, count): cosines
        # From each first key to each of the others, as seen by each last token.
        paths = Paths.between(scores[None, :, None, :], seen[:, None, None, :], towards[:, :, None, None])
        choice = np.argmax(paths.clear.reshape(len(seen), -1), axis=1)
        rows, shape = np.arange(count, width), paths.clear.shape[1:]
        found = yield from reader.read(
            "lengths",
            choice,
            lambda each: self.firsts(self.sums(unravel(each, shape)[0], STRETCHES[unravel(each, shape)[1]], rows)),
            lambda each: self.lasts(units[unravel(each, shape)[2]]),
            own[unravel(choice, shape)[2]],
        )
        start, stretch, last = unravel(found.choice, shape)
        ratio = paths.at(found.choice).ratio(found.above(own[last]))
        outer = directions * (ratio * sizes[start] / np.abs(STRETCHES[stretch]))[:, None]
        return Side(np.concatenate([keys.vectors, outer]), keys.gram)


def unravel(choice: Integers, shape: tuple[int, ...]) -> tuple[Integers, ...]:
    """Places along every axis from places in the flat array."""
    return tuple(np.asarray(each) for each in np.unravel_index(choice, shape))


@dataclass(frozen=True)
class Paths:
    """Unit vectors on the way from one to another, of which one coordinate is seen."""

    begin: Floats  # the coordinate at the start
    side: Floats  # that of the direction to go
    angle: Floats  # from start to end
    clear: Floats  # how fast the coordinate changes everywhere on the way; 0 where it turns round

    @classmethod
    def between(cls, begin: Floats, end: Floats, cosine: Floats) -> Paths:
        """Paths from vectors to others times each of STRETCHES: arrays (n, m, 1, k) or as wide, (n, m, 2, k) then."""
        signs = np.sign(STRETCHES)[:, None]
        cosine, end = np.clip(signs * cosine, -1.0, 1.0), signs * end
        sine = np.sqrt(np.maximum(1 - cosine**2, np.finfo(np.float64).tiny))
        side = (end - cosine * begin) / sine
        begin, side, angle = np.broadcast_arrays(begin, side, np.arccos(cosine))
        leaving = side * np.cos(angle) - begin * np.sin(angle)
        clear = np.where(side * leaving > 0, np.minimum(np.abs(side), np.abs(leaving)), 0.0)
        # An angle beside nothing or all of it shows no length.
        clear = np.where(np.maximum(begin, end) < LARGEST, clear, 0.0)  # none that would be turned round
        return cls(begin, side, angle, clear * np.sin(angle))

    def at(self, choice: Integers) -> Paths:
        """One path for each of the first axis."""

        def take(array: Floats) -> Floats:
            return np.asarray(array.reshape(len(choice), -1)[np.arange(len(choice)), choice])

        return Paths(*(take(each) for each in (self.begin, self.side, self.angle, self.clear)))

    def ratio(self, seen: Floats) -> Floats:
        """How much of the end there is to one of the start, from the coordinate of the sum of both."""
        size, turn = np.hypot(self.begin, self.side), np.arctan2(self.side, self.begin)
        angle = turn - np.where(self.side > 0, 1.0, -1.0) * np.arccos(np.clip(seen / size, -1.0, 1.0))
        if not np.all((angle > 0) & (angle < self.angle)):
            raise refuse(NOT_NORMED)
        return np.asarray(np.sin(angle) / np.sin(self.angle - angle))


def most_different(rows: Floats, first: Floats, count: int) -> Integers:  # (n, rank), (rank,) -> (count,)
    """Rows that are as nearly orthogonal to each other and to the first as there are."""
    rest = rows - np.outer(rows @ first, first) / (first @ first)
    return np.asarray(scipy.linalg.qr(rest.T, mode="r", pivoting=True)[1][:count])


def _remainder(scores: Floats, chosen: list[int], row: int) -> tuple[float, float]:
    """What the score of a row with itself is beyond what those chosen predict, and how much errors add up to there."""
    if not chosen:
        return abs(float(scores[row, row])), 1.0
    block, along, across = scores[np.ix_(chosen, chosen)], scores[row, chosen], scores[chosen, row]
    left, right = np.linalg.solve(block.T, along), np.linalg.solve(block, across)
    rest = abs(float(scores[row, row] - left @ across))
    return rest, float((1 + np.linalg.norm(left)) * (1 + np.linalg.norm(right)))
