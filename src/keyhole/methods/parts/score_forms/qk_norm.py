"""Normed keys and queries: directions from d² readings, lengths from sums of two tokens, gains by a decomposition."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.linalg

from keyhole.arrays import Floats, Integers
from keyhole.families import FormHead
from keyhole.families.forms import QKNorm
from keyhole.methods.base import Estimate, Steps, Unrecoverable
from keyhole.methods.forms.value import Value
from keyhole.methods.parts.score_forms.readings import (
    LARGEST,
    Norms,
    PairLogits,
    Tokens,
    ask_of_one_output,
    ask_values,
    even_rows,
    form_estimate,
    refuse,
    solved_again,
)
from keyhole.queries import Signature
from keyhole.recovery import Outcome

ASSUMPTIONS = (
    "the box computes one softmax head over its raw tokens, read at the last position, of normed keys and queries",
    "answers are right up to the rounding of their dtype",
)
# A token that does not lie in the span of the others has a part outside of so many times its error, or that is nothing.
DEPENDENT = 4.0
# So many rows are candidates for the next one that is chosen: more make better choices, and a query more each.
CANDIDATES = 8
# Sums of two tokens, of which the second is multiplied by one of these: with either sign, and of clear value.
STRETCHES = np.array([1.0, -2.0])
NOT_NORMED = "sums of tokens are not answered as normed keys and queries answer them"


def ask_qk_norm(signature: Signature, rng: np.random.Generator, **_: Any) -> Steps[Estimate[FormHead]]:
    """Key, query and gains of a head with normed keys and queries, and its value, at about the counting bound."""
    value = yield from ask_values(signature, rng)

    def ask(plain: Signature, along: Value) -> Steps[tuple[QKNorm, dict[str, Floats]]]:
        learner = _Learner(even_rows(plain, along, rng), even_rows(plain, along, rng), Norms.of(plain, along))
        reader = PairLogits(plain, along)
        form = yield from learner.solve(reader)
        return form, solved_again(form, reader, learner.solve, rng)

    form, radii = yield from ask_of_one_output(signature, value, ask)
    return form_estimate(signature, value, form, radii, ASSUMPTIONS, rank=int(form.key.shape[0]))


@dataclass(frozen=True)
class _Side:
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
class _Block:
    """Scores of rows with each other, those first that all depend on."""

    order: Integers  # (width,) of rows
    scores: Floats  # (width, width), known of the first `rank` with the first `known`
    rank: int
    known: int


@dataclass(frozen=True)
class _Learner:
    """Asks and solves; with a reader that replays, solves only."""

    rows: Floats  # (width, width) orthonormal, of which first tokens and last ones are made
    others: Floats  # (width, width) more rows for first tokens
    norms: Norms

    def solve(self, reader: PairLogits) -> Steps[QKNorm]:
        """The form from what is read."""
        block = yield from self._ask_block(reader)
        return (yield from replace(self, rows=self.rows[block.order])._solve(reader, block))

    def _solve(self, reader: PairLogits, block: _Block) -> Steps[QKNorm]:
        """The form, once the first rows are those that the others depend on."""
        rank = block.rank
        keys = yield from self._ask_key_lengths(reader, block.scores[:rank, :rank])
        keys = yield from self._ask_outer_keys(reader, block, keys)
        # What a first token, a mixture of rows, scores with each of the first last ones.
        onto = np.sqrt(np.diag(keys.gram))[:, None] * block.scores[:rank, :rank]
        first = np.concatenate([np.eye(len(self.rows)), self.others @ self.rows.T])
        queries = yield from _QuerySide(self, keys, onto, first).ask(reader, block)
        sizes = np.sqrt(np.diag(queries.gram))
        return self._assemble(keys, onto * sizes, queries)

    def _assemble(self, keys: _Side, meeting: Floats, queries: _Side) -> QKNorm:
        try:
            left, right = np.linalg.cholesky(keys.gram), np.linalg.cholesky(queries.gram)
        except np.linalg.LinAlgError as error:
            raise refuse(NOT_NORMED) from error
        core = np.linalg.solve(right, np.linalg.solve(left, meeting).T).T
        turn, gains, back = np.linalg.svd(core)
        key = turn.T @ left.T @ keys.vectors.T @ self.rows
        query = back @ right.T @ queries.vectors.T @ self.rows
        return QKNorm(query, key, gains).canonical()

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

    def _ask_block(self, reader: PairLogits) -> Steps[_Block]:
        """Rows whose scores with each other make a matrix of full rank, chosen one by one among a few."""
        width = len(self.rows)
        scores = np.zeros((width, width))
        fresh = min(CANDIDATES, width)
        chosen, pool = list[int](), list(range(fresh))
        yield from self._ask_scores(reader, scores, pool, [], [])
        while pool:
            found = [_remainder(scores, chosen, row) for row in pool]
            best = max(range(len(pool)), key=lambda place: found[place][0])
            clear = found[best][0] > DEPENDENT * reader.typical * found[best][1]
            best = reader.decide(best if clear else -1)
            if best < 0:
                break
            chosen.append(pool.pop(best))
            new = [fresh] if fresh < width else []
            yield from self._ask_scores(reader, scores, new, chosen, pool)
            pool, fresh = pool + new, fresh + len(new)
        if not chosen:
            raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, "no token attracts attention more than another does")
        order = np.array([*chosen, *pool, *range(fresh, width)])
        return _Block(order, scores[np.ix_(order, order)], len(chosen), len(chosen) + len(pool))

    def _ask_scores(
        self, reader: PairLogits, scores: Floats, new: list[int], chosen: list[int], pool: list[int]
    ) -> Steps[None]:
        """Scores of new rows with themselves and with those chosen, and of a pool with the one that was chosen last."""
        units = np.eye(len(self.rows))
        if new:
            own = yield from reader.read_own("directions", self.firsts(units[new]), self.lasts(units[new]))
            scores[new, new] = own.own()
        pairs = [(one, other) for one in new for other in chosen] + [(each, chosen[-1]) for each in pool if chosen]
        if pairs:
            rows, columns = (np.array(each) for each in zip(*pairs, strict=True))
            rows, columns = np.concatenate([rows, columns]), np.concatenate([columns, rows])
            own_logits = np.diag(scores)[columns]
            read = yield from reader.read("directions", None, *self._units(rows, columns), own_logits)
            scores[rows, columns] = read.above(own_logits)

    # --- keys -------------------------------------------------------------------------------------------------------

    def _ask_key_lengths(self, reader: PairLogits, scores: Floats) -> Steps[_Side]:
        """Lengths of the first keys and their inner products, that of the first being one."""
        count = len(scores)
        sizes, gram = np.ones(count), np.ones((count, count))
        own = np.diag(scores)
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
        return _Side(np.eye(count), gram)

    def _ask_outer_keys(self, reader: PairLogits, block: _Block, keys: _Side) -> Steps[_Side]:
        """The keys of the other rows: their directions from the first last tokens, their lengths from one sum each."""
        width, count, known = len(self.rows), block.rank, block.known
        if width == count:
            return keys
        scores = block.scores[:count, :count]
        own, units = np.diag(scores), np.eye(width)
        seen = block.scores[count:known, :count]
        if width > known:
            rows, columns = np.repeat(np.arange(known, width), count), np.tile(np.arange(count), width - known)
            found = yield from reader.read("directions", None, *self._units(rows, columns), own[columns])
            seen = np.concatenate([seen, found.above(own[columns]).reshape(-1, count)])
        sizes = np.sqrt(np.diag(keys.gram))
        onto = sizes[:, None] * scores
        directions = np.linalg.solve(onto.T, seen.T).T
        directions = directions / lengths(directions, keys.gram)[:, None]
        seen = directions @ onto
        towards = directions @ keys.gram / sizes  # (outer, count): cosines
        # From each first key to each of the others, as seen by each last token.
        paths = _Paths.between(scores[None, :, None, :], seen[:, None, None, :], towards[:, :, None, None])
        choice = np.argmax(paths.clear.reshape(len(seen), -1), axis=1)
        rows, shape = np.arange(count, width), paths.clear.shape[1:]
        found = yield from reader.read(
            "lengths",
            choice,
            lambda each: self.firsts(self.sums(_unravel(each, shape)[0], STRETCHES[_unravel(each, shape)[1]], rows)),
            lambda each: self.lasts(units[_unravel(each, shape)[2]]),
            own[_unravel(choice, shape)[2]],
        )
        start, stretch, last = _unravel(found.choice, shape)
        ratio = paths.at(found.choice).ratio(found.above(own[last]))
        outer = directions * (ratio * sizes[start] / np.abs(STRETCHES[stretch]))[:, None]
        return _Side(np.concatenate([keys.vectors, outer]), keys.gram)


def _unravel(choice: Integers, shape: tuple[int, ...]) -> tuple[Integers, ...]:
    return tuple(np.asarray(each) for each in np.unravel_index(choice, shape))


@dataclass(frozen=True)
class _Paths:
    """Unit vectors on the way from one to another, of which one coordinate is seen."""

    begin: Floats  # the coordinate at the start
    side: Floats  # that of the direction to go
    angle: Floats  # from start to end
    clear: Floats  # how fast the coordinate changes everywhere on the way; 0 where it turns round

    @classmethod
    def between(cls, begin: Floats, end: Floats, cosine: Floats) -> _Paths:
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

    def at(self, choice: Integers) -> _Paths:
        """One path for each of the first axis."""

        def take(array: Floats) -> Floats:
            return np.asarray(array.reshape(len(choice), -1)[np.arange(len(choice)), choice])

        return _Paths(*(take(each) for each in (self.begin, self.side, self.angle, self.clear)))

    def ratio(self, seen: Floats) -> Floats:
        """How much of the end there is to one of the start, from the coordinate of the sum of both."""
        size, turn = np.hypot(self.begin, self.side), np.arctan2(self.side, self.begin)
        angle = turn - np.where(self.side > 0, 1.0, -1.0) * np.arccos(np.clip(seen / size, -1.0, 1.0))
        if not np.all((angle > 0) & (angle < self.angle)):
            raise refuse(NOT_NORMED)
        return np.asarray(np.sin(angle) / np.sin(self.angle - angle))


@dataclass(frozen=True)
class _QuerySide:
    """The same for queries, when all keys are known: any first token may be asked for, turned round or not."""

    learner: _Learner
    keys: _Side
    onto: Floats  # (rank, rank): inner products of key coordinates with the first last tokens
    first: Floats  # (m, width): first tokens to choose from

    def ask(self, reader: PairLogits, block: _Block) -> Steps[_Side]:
        """The queries of all rows."""
        gram = yield from self._ask_lengths(reader, block.rank)
        inner = _Side(np.eye(block.rank), gram)
        if block.rank == len(block.order):
            return inner
        return (yield from self._ask_outer(reader, inner, block))

    def seen(self, weights: Floats) -> Floats:  # (n, width) -> (n, rank)
        """What the keys of mixtures of rows, of length one, score with the first last tokens."""
        return self.keys.units(weights) @ self.onto

    def _against(self, last: Floats) -> Floats:  # (n, width) -> (n, 2m, rank)
        """What each first token, and each turned round, scores with the first last tokens more than each last one."""
        scores = self.seen(self.first)
        both = np.concatenate([scores, -scores])
        return np.asarray(both[None, :, :] - self.seen(last)[:, None, :])

    def _tokens(self, choice: Integers) -> Floats:
        count = len(self.first)
        return self.learner.firsts(np.where(choice < count, 1.0, -1.0)[:, None] * self.first[choice % count])

    def _read(self, reader: PairLogits, choice: Any, last: Any) -> Steps[Any]:
        """Readings, and what they are of: coordinates (n, rank) of the first tokens against the last ones."""
        found = yield from reader.read(
            "queries", choice, lambda each: self._tokens(each[0]), lambda each: self.learner.lasts(last(each))
        )
        choice, number, count = found.choice, found.choice[0], len(self.first)
        side = found.signs * np.where(number < count, 1.0, -1.0)
        scores = self.seen(self.first)[number % count]
        return choice, found.logits, side[:, None] * scores - self.seen(last(choice))

    def _ask_lengths(self, reader: PairLogits, rank: int) -> Steps[Floats]:
        """Inner products of the first queries, the first one being of length one."""
        learner, sizes, gram = self.learner, np.ones(rank), np.ones((rank, rank))
        if rank > 1:
            rows, zeros = np.arange(1, rank), np.zeros(rank - 1, dtype=np.int64)
            scores = self.seen(self.first)
            # A sum b_0 + t·b_j scores with itself and with one more token: two equations for two lengths.
            ends = np.stack([self.seen(learner.sums(zeros, np.full(rank - 1, t), rows)) for t in STRETCHES], axis=1)
            one, two = ends[:, :, None, 0], np.take_along_axis(ends, rows[:, None, None], 2)
            turning = np.abs(one * scores[:, rows].T[:, None, :] - two * scores[:, 0])  # (rank - 1, 2, m)
            choice = np.argmax(turning.reshape(rank - 1, -1), axis=1)
            choice = reader.decide(np.stack(np.unravel_index(choice, turning.shape[1:])))
            stretch, number = STRETCHES[choice[0]], choice[1]
            last = learner.sums(zeros, stretch, rows)
            own = (yield from reader.read_own("queries", learner.firsts(last), learner.lasts(last))).own()
            found = yield from reader.read(
                "queries",
                None,
                lambda _: learner.firsts(self.first[number]),
                lambda _: learner.lasts(last),
                own,
            )
            parts = np.stack([self.seen(last), scores[number]], axis=1)  # (rank - 1, 2, rank)
            seen = np.stack([own, found.above(own)], axis=1)
            turned = np.take_along_axis(parts, rows[:, None, None], 2)[:, :, 0]
            system = np.stack([seen, -stretch[:, None] * turned], axis=-1)
            solved = np.linalg.solve(system, parts[:, :, :1])[:, :, 0]
            if not np.all(solved > 0):
                raise refuse(NOT_NORMED)
            sizes[1:] = solved[:, 1]
            gram[0, 1:] = gram[1:, 0] = (solved[:, 0] ** 2 - 1 - (stretch * sizes[1:]) ** 2) / (2 * stretch)
        np.fill_diagonal(gram, sizes**2)
        yield from self._ask_pairs(reader, sizes, gram)
        return gram

    def _ask_pairs(self, reader: PairLogits, sizes: Floats, gram: Floats) -> Steps[None]:
        """Inner products of two queries each, from one reading of their sum."""
        rank, learner = len(sizes), self.learner
        some, others = np.triu_indices(rank - 1, 1)
        some, others = some + 1, others + 1
        if not some.size:
            return
        best, choice = np.full(len(some), -1.0), np.zeros((2, len(some)), dtype=np.int64)
        for number, stretch in enumerate(STRETCHES):
            last = learner.sums(some, np.full(len(some), stretch), others)
            for part in np.array_split(np.arange(len(some)), max(1, len(some) // 256)):
                found = self._against(last[part])
                one = np.take_along_axis(found, some[part][:, None, None], 2)[:, :, 0] * sizes[some[part]][:, None]
                two = np.take_along_axis(found, others[part][:, None, None], 2)[:, :, 0] * sizes[others[part]][:, None]
                # Readings below zero are of small weights, which are known to more digits than those close to one.
                clear = -(one + stretch * two) / (1 + abs(stretch))
                place = np.argmax(clear, axis=1)
                clear = clear[np.arange(len(part)), place]
                better = clear > best[part]
                best[part[better]] = clear[better]
                choice[:, part[better]] = np.stack([place[better], np.full(int(np.sum(better)), number)])
        choice, logits, parts = yield from self._read(
            reader, choice, lambda each: learner.sums(some, STRETCHES[each[1]], others)
        )
        stretch, each = STRETCHES[choice[1]], np.arange(len(some))
        both = (sizes[some] * parts[each, some] + stretch * sizes[others] * parts[each, others]) / logits
        found = (both**2 - sizes[some] ** 2 - (stretch * sizes[others]) ** 2) / (2 * stretch)
        gram[some, others] = gram[others, some] = found

    def _ask_outer(self, reader: PairLogits, inner: _Side, block: _Block) -> Steps[_Side]:
        """The queries of the other rows: directions from as many readings as there are numbers, lengths from one."""
        learner, width, rank, known = self.learner, len(self.learner.rows), block.rank, block.known
        units = np.eye(width)
        solved = [self._of_block(block, row) for row in range(rank, known)]
        if width > known:
            outer = np.arange(known, width)
            selves = yield from reader.read_own("queries", learner.firsts(units[outer]), learner.lasts(units[outer]))
            own = selves.own()
            # In coordinates in which keys of length one are unit vectors, the best first tokens are nearly orthogonal.
            plain = np.linalg.solve(self.onto, np.linalg.cholesky(self.keys.gram))
            scores, ends = self.seen(self.first), self.seen(units[outer])
            choice = np.concatenate([_most_different(scores @ plain, each @ plain, rank - 1) for each in ends])
            rows = np.repeat(outer, rank - 1)
            found = yield from reader.read(
                "queries",
                choice,
                lambda each: learner.firsts(self.first[each]),
                lambda _: learner.lasts(units[rows]),
                np.repeat(own, rank - 1),
            )
            seen = np.column_stack([own, found.above(np.repeat(own, rank - 1)).reshape(len(outer), -1)])
            parts = np.concatenate([ends[:, None, :], scores[found.choice].reshape(len(outer), -1, rank)], axis=1)
            solved += list(np.linalg.solve(parts, seen[:, :, None])[:, :, 0])
        sizes = np.sqrt(np.diag(inner.gram))
        directions = np.stack(solved) / sizes  # in coordinates of the first queries, not of those of length one
        directions = directions / lengths(directions, inner.gram)[:, None]
        outer = np.arange(rank, width)
        choice, shape = self._choose_paths(inner, directions, outer)
        choice, logits, parts = yield from self._read(
            reader,
            choice,
            lambda each: learner.sums(_unravel(each[1], shape)[0], STRETCHES[_unravel(each[1], shape)[1]], outer),
        )
        start, stretch = _unravel(choice[1], shape)
        paths = self._paths(inner, directions, start, parts)
        ratio = paths.at(stretch).ratio(logits)
        queries = directions * (ratio * sizes[start] / np.abs(STRETCHES[stretch]))[:, None]
        return _Side(np.concatenate([inner.vectors, queries]), inner.gram)

    def _of_block(self, block: _Block, row: int) -> Floats:  # -> (rank,)
        """The direction of the query of a row of which scores with the first rows and with itself were read."""
        units = np.eye(len(self.learner.rows))
        some = [*range(block.rank), row]
        return np.asarray(np.linalg.lstsq(self.seen(units[some]), block.scores[some, row], rcond=None)[0])

    def _paths(self, inner: _Side, directions: Floats, start: Integers, parts: Floats) -> _Paths:
        """The ways from some first queries to those of the outer rows, as seen by parts (n, rank)."""
        sizes, each = np.sqrt(np.diag(inner.gram)), np.arange(len(start))
        begin, end = parts[each, start], np.sum(parts * sizes * directions, axis=1)
        cosine = (directions @ inner.gram)[each, start] / sizes[start]
        return _Paths.between(begin[:, None, None, None], end[:, None, None, None], cosine[:, None, None, None])

    def _choose_paths(self, inner: _Side, directions: Floats, outer: Integers) -> tuple[Any, tuple[int, int]]:
        """The first token, the first row and the stretch by which the length of each outer row shows most."""
        rank, count = len(inner.gram), len(outer)
        best, choice = np.full(count, -1.0), np.zeros((2, count), dtype=np.int64)
        each, (shape) = np.arange(count), (rank, len(STRETCHES))
        for start in range(rank):
            rows = np.full(count, start)
            for number, stretch in enumerate(STRETCHES):
                found = self._against(self.learner.sums(rows, np.full(count, stretch), outer))
                flat, many = found.reshape(-1, rank), found.shape[1]
                paths = self._paths(inner, np.repeat(directions, many, 0), np.repeat(rows, many), flat)
                clear = paths.clear.reshape(count, many, -1)[:, :, number]
                place = np.argmax(clear, axis=1)
                better = clear[each, place] > best
                best = np.where(better, clear[each, place], best)
                choice = np.where(better, np.stack([place, np.full(count, start * shape[1] + number)]), choice)
        return choice, shape


def _most_different(rows: Floats, first: Floats, count: int) -> Integers:  # (n, rank), (rank,) -> (count,)
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
