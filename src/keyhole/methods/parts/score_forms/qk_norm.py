"""Normed keys and queries: directions from d² readings, lengths from sums of two tokens, gains by a decomposition."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keyhole.arrays import Floats, Integers
from keyhole.families import FormHead
from keyhole.families.forms import QKNorm
from keyhole.methods.base import Estimate, Steps
from keyhole.methods.forms.value import Value
from keyhole.methods.parts.score_forms.normed_keys import (
    NOT_NORMED,
    STRETCHES,
    Block,
    KeyLearner,
    Paths,
    Side,
    lengths,
    most_different,
    unravel,
)
from keyhole.methods.parts.score_forms.readings import (
    Names,
    Norms,
    PairLogits,
    ask_of_one_output,
    ask_values,
    check_names,
    even_rows,
    form_estimate,
    refuse,
    solved_again,
)
from keyhole.numerics.svd import least_squares, svd
from keyhole.queries import Signature

ASSUMPTIONS = (
    "the box computes one softmax head over its raw tokens, read at the last position, of normed keys and queries",
    "answers are right up to the rounding of their dtype",
)


def ask_qk_norm(signature: Signature, rng: np.random.Generator, names: Names) -> Steps[Estimate[FormHead]]:
    """Key, query and gains of a head with normed keys and queries, and its value, at about the counting bound."""
    check_names(names)
    value = yield from ask_values(signature, rng)

    def ask(plain: Signature, along: Value) -> Steps[tuple[QKNorm, dict[str, Floats]]]:
        learner = _Learner(even_rows(plain, along, rng), even_rows(plain, along, rng), Norms.of(plain, along))
        reader = PairLogits(plain, along)
        form = yield from learner.solve(reader)
        return form, solved_again(form, reader, learner.solve, rng)

    form, radii = yield from ask_of_one_output(signature, value, ask)
    return form_estimate(signature, value, form, radii, ASSUMPTIONS, rank=int(form.key.shape[0]))


class _Learner(KeyLearner):
    """Asks and solves; with a reader that replays, solves only."""

    def solve(self, reader: PairLogits) -> Steps[QKNorm]:
        """The form from what is read."""
        block = yield from self.ask_block(reader)
        return (yield from replace(self, rows=self.rows[block.order])._solve(reader, block))

    def _solve(self, reader: PairLogits, block: Block) -> Steps[QKNorm]:
        """The form, once the first rows are those that the others depend on."""
        rank = block.rank
        keys = yield from self.ask_key_lengths(reader, block)
        keys = yield from self.ask_outer_keys(reader, block, keys)
        # What a first token, a mixture of rows, scores with each of the first last ones.
        onto = np.sqrt(np.diag(keys.gram))[:, None] * block.scores[:rank, :rank]
        first = np.concatenate([np.eye(len(self.rows)), self.others @ self.rows.T])
        queries = yield from _QuerySide(self, keys, onto, first).ask(reader, block)
        sizes = np.sqrt(np.diag(queries.gram))
        return self._assemble(keys, onto * sizes, queries)

    def _assemble(self, keys: Side, meeting: Floats, queries: Side) -> QKNorm:
        try:
            left, right = np.linalg.cholesky(keys.gram), np.linalg.cholesky(queries.gram)
        except np.linalg.LinAlgError as error:
            raise refuse(NOT_NORMED) from error
        core = np.linalg.solve(right, np.linalg.solve(left, meeting).T).T
        turn, gains, back = svd(core, full_matrices=True)
        key = turn.T @ left.T @ keys.vectors.T @ self.rows
        query = back @ right.T @ queries.vectors.T @ self.rows
        return QKNorm(query, key, gains).canonical()


@dataclass(frozen=True)
class _QuerySide:
    """The same for queries, when all keys are known: any first token may be asked for, turned round or not."""

    learner: _Learner
    keys: Side
    onto: Floats  # (rank, rank): inner products of key coordinates with the first last tokens
    first: Floats  # (m, width): first tokens to choose from

    def ask(self, reader: PairLogits, block: Block) -> Steps[Side]:
        """The queries of all rows."""
        gram = yield from self._ask_lengths(reader, block.rank)
        inner = Side(np.eye(block.rank), gram)
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
            own, _ = (yield from reader.read_own("queries", learner.firsts(last), learner.lasts(last))).of_itself()
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

    def _ask_outer(self, reader: PairLogits, inner: Side, block: Block) -> Steps[Side]:
        """The queries of the other rows: directions from as many readings as there are numbers, lengths from one."""
        learner, width, rank, known = self.learner, len(self.learner.rows), block.rank, block.known
        units = np.eye(width)
        solved = [self._of_block(block, row) for row in range(rank, known)]
        if width > known:
            outer = np.arange(known, width)
            selves = yield from reader.read_own("queries", learner.firsts(units[outer]), learner.lasts(units[outer]))
            own, _ = selves.of_itself()
            # In coordinates in which keys of length one are unit vectors, the best first tokens are nearly orthogonal.
            plain = np.linalg.solve(self.onto, np.linalg.cholesky(self.keys.gram))
            scores, ends = self.seen(self.first), self.seen(units[outer])
            choice = np.concatenate([most_different(scores @ plain, each @ plain, rank - 1) for each in ends])
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
            lambda each: learner.sums(unravel(each[1], shape)[0], STRETCHES[unravel(each[1], shape)[1]], outer),
        )
        start, stretch = unravel(choice[1], shape)
        paths = self._paths(inner, directions, start, parts)
        ratio = paths.at(stretch).ratio(logits)
        queries = directions * (ratio * sizes[start] / np.abs(STRETCHES[stretch]))[:, None]
        return Side(np.concatenate([inner.vectors, queries]), inner.gram)

    def _of_block(self, block: Block, row: int) -> Floats:  # -> (rank,)
        """The direction of the query of a row of which scores with the first rows and with itself were read."""
        units = np.eye(len(self.learner.rows))
        some = [*range(block.rank), row]
        return np.asarray(least_squares(self.seen(units[some]), block.scores[some, row]))

    def _paths(self, inner: Side, directions: Floats, start: Integers, parts: Floats) -> Paths:
        """The ways from some first queries to those of the outer rows, as seen by parts (n, rank)."""
        sizes, each = np.sqrt(np.diag(inner.gram)), np.arange(len(start))
        begin, end = parts[each, start], np.sum(parts * sizes * directions, axis=1)
        cosine = (directions @ inner.gram)[each, start] / sizes[start]
        return Paths.between(begin[:, None, None, None], end[:, None, None, None], cosine[:, None, None, None])

    def _choose_paths(self, inner: Side, directions: Floats, outer: Integers) -> tuple[Any, tuple[int, int]]:
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
