"""Normed keys and queries with rotary positions: keys as without positions, gains from the planes that turn."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Array, Floats
from keyhole.families import FormHead
from keyhole.families.forms import QKNormRotary
from keyhole.families.forms.rotary import as_pairs, turned
from keyhole.methods.base import Estimate, Steps
from keyhole.methods.forms.value import Value
from keyhole.methods.parts.score_forms.normed_keys import (
    NOT_NORMED,
    STRETCHES,
    Block,
    KeyLearner,
    Side,
    most_different,
)
from keyhole.methods.parts.score_forms.readings import (
    LARGEST,
    Names,
    Norms,
    PaddedLogits,
    PairLogits,
    ask_of_one_output,
    ask_values,
    check_box,
    check_names,
    even_rows,
    form_estimate,
    refuse,
    solved_again,
)
from keyhole.methods.parts.score_forms.rotary import MOST_BETWEEN, angles, choose_between, match_turns
from keyhole.numerics.svd import least_squares, svd
from keyhole.queries import Signature

ASSUMPTIONS = (
    "the box computes one softmax head over its raw tokens, read at the last position, of normed keys and queries with "
    "rotary positions, in which a zero token has logit zero",
    "it turns by the frequencies that were assumed",
    "answers are right up to the rounding of their dtype",
)
# Places on the way from one query to another at which a reading must rise or fall, and halvings of the way.
PLACES, HALVINGS = 33, 60


def ask_qk_norm_rotary(
    signature: Signature, rng: np.random.Generator, names: Names, *, frequencies: Array | None = None
) -> Steps[Estimate[FormHead]]:
    """Key, query, gains and value of a head with normed keys and queries and rotary positions.

    `frequencies` are angles per position, one for each pair of keys; left out, they are those of base 10000.
    """
    check_names(names)
    check_box(signature, tokens=3)
    value = yield from ask_values(signature, rng)

    def ask(plain: Signature, along: Value) -> Steps[tuple[QKNormRotary, dict[str, Floats]]]:
        rows, others = even_rows(plain, along, rng), even_rows(plain, along, rng)
        learner = _Learner(rows, others, Norms.of(plain, along), frequencies)
        reader = PaddedLogits(plain, along)
        form = yield from learner.solve(reader)
        return form, solved_again(form, reader, learner.solve, rng)

    form, radii = yield from ask_of_one_output(signature, value, ask)
    return form_estimate(signature, value, form, radii, ASSUMPTIONS, rank=int(form.key.shape[0]))


@dataclass(frozen=True)
class _Planes:
    """Keys of length one as they are turned: s_Δ(x, g) = (gains·turn·y)ᵀ·R_Δ·h, y in orthonormal coordinates."""

    into: Floats  # (rank, rank): key coordinates to orthonormal ones
    turn: Floats  # (rank, rank) orthogonal
    gains: Floats  # (rank,)
    known: Floats  # (rank/2,) angles

    def seen(self, units: Floats, distance: int) -> Floats:  # (n, rank) -> (n, rank)
        """What last tokens' turned queries are multiplied by, of keys of length one in key coordinates."""
        keys = (units @ self.into @ self.turn.T) * self.gains
        return np.asarray(turned(keys, distance * self.known, -1.0))


@dataclass(frozen=True)
class _Learner(KeyLearner):
    """Asks and solves; with a reader that replays, solves only."""

    frequencies: Array | None

    def solve(self, reader: PairLogits) -> Steps[QKNormRotary]:
        """The form from what is read."""
        block = yield from self.ask_block(reader)
        return (yield from replace(self, rows=self.rows[block.order])._solve(reader, block))

    def _solve(self, reader: PairLogits, block: Block) -> Steps[QKNormRotary]:
        """The form, once the first rows are those that the others depend on."""
        keys = yield from self.ask_key_lengths(reader, block)
        keys = yield from self.ask_outer_keys(reader, block, keys)
        planes, inner = yield from self._ask_planes(reader, block, keys)
        queries = yield from self._ask_outer_queries(reader, block, keys, planes, inner)  # (width, rank): gain·unit
        shares = least_squares(queries**2, np.ones(len(queries)))
        if not np.all(shares > 0):
            raise refuse(NOT_NORMED)
        gains = np.asarray(shares**-0.5)
        units = queries / gains
        units = np.asarray(units / np.linalg.norm(units, axis=1, keepdims=True))
        sizes = yield from self._ask_query_lengths(reader, keys, planes, units, gains)
        key = planes.turn @ planes.into.T @ keys.vectors.T @ self.rows
        query = (sizes[:, None] * units).T @ self.rows
        return QKNormRotary(query, key, gains, planes.gains, planes.known).canonical()

    def _ask_planes(self, reader: PairLogits, block: Block, keys: Side) -> Steps[tuple[_Planes, Floats]]:
        """The planes that turn, the gains of keys, and the queries of the first rows times their gains."""
        rank = block.rank
        known = angles(self.frequencies, rank)
        between = choose_between(known, (reader.signature.max_length or MOST_BETWEEN + 2) - 2)
        rows, columns = np.repeat(np.arange(rank), rank), np.tile(np.arange(rank), rank)
        found = yield from reader.read(
            "distances", None, *self._units(rows, columns), block.own[columns], between=between
        )
        seen = found.above(block.own[columns]).reshape(rank, rank)
        try:
            into: Floats = np.asarray(np.linalg.cholesky(keys.gram))
        except np.linalg.LinAlgError as error:
            raise refuse(NOT_NORMED) from error
        sizes = np.sqrt(np.diag(keys.gram))[:, None]
        near, far = (np.linalg.solve(into, sizes * each) for each in (block.scores[:rank, :rank], seen))
        eigenvalues, vectors = np.linalg.eig(np.linalg.solve(near.T, far.T).T)
        pairs = as_pairs(vectors[:, match_turns(eigenvalues, known, between)].T)
        turn, gains = _untangled(pairs)
        planes = _Planes(into, turn, gains, known)
        queries = turned(((turn @ near) / gains[:, None]).T, known, -1.0)
        return planes, np.asarray(queries)

    def _ask_outer_queries(
        self, reader: PairLogits, block: Block, keys: Side, planes: _Planes, inner: Floats
    ) -> Steps[Floats]:
        """The queries of all rows, of length one before their gains: as many readings as there are numbers, and one."""
        width, rank, known = len(self.rows), block.rank, block.known
        units, found = np.eye(width), list(inner)
        near = planes.seen(keys.units(units), 1)
        for row in range(rank, known):
            some = [*range(rank), row]
            found.append(least_squares(near[some], block.scores[some, row]))
        if width > known:
            outer = np.arange(known, width)
            selves = yield from reader.read_own("queries", self.firsts(units[outer]), self.lasts(units[outer]))
            own, masses = selves.of_itself()
            first = np.concatenate([units, self.others @ self.rows.T])
            scores = planes.seen(keys.units(first), 1)
            choice = np.concatenate([most_different(scores, near[row], rank - 1) for row in outer])
            rows, masses = np.repeat(outer, rank - 1), np.repeat(masses, rank - 1)
            read = yield from reader.read(
                "queries", choice, lambda each: self.firsts(first[each]), lambda _: self.lasts(units[rows]), masses
            )
            seen = np.column_stack([own, read.above(masses).reshape(len(outer), -1)])
            parts = np.concatenate([near[outer][:, None, :], scores[read.choice].reshape(len(outer), -1, rank)], axis=1)
            found += list(np.linalg.solve(parts, seen[:, :, None])[:, :, 0])
        return np.stack(found)

    def _ask_query_lengths(
        self, reader: PairLogits, keys: Side, planes: _Planes, units: Floats, gains: Floats
    ) -> Steps[Floats]:
        """Lengths of all queries, that of the first being one, from a sum of it and each of the others."""
        width = len(units)
        if width == 1:
            return np.ones(1)
        ways = [_Way.between(units[0], np.sign(stretch) * units[1:], gains) for stretch in STRETCHES]
        rows, zeros = np.arange(1, width), np.zeros(width - 1, dtype=np.int64)
        lasts = [self.sums(zeros, np.full(width - 1, stretch), rows) for stretch in STRETCHES]
        own = [planes.seen(keys.units(last), 0) for last in lasts]
        first = np.concatenate([np.eye(width), self.others @ self.rows.T])
        first = np.concatenate([first, -first])
        scores = planes.seen(keys.units(first), 1)
        clear = np.stack([way.clear(scores, each) for way, each in zip(ways, own, strict=True)], axis=1)
        choice = np.argmax(clear.reshape(width - 1, -1), axis=1)
        choice = np.stack(np.unravel_index(choice, clear.shape[1:]))
        found = yield from reader.read(
            "lengths",
            choice,
            lambda each: self.firsts(first[each[1]]),
            lambda each: self.lasts(self.sums(zeros, STRETCHES[each[0]], rows)),
        )
        number, place = found.choice
        ratio, size = np.zeros(width - 1), np.abs(STRETCHES[number])
        for each, (way, mine) in enumerate(zip(ways, own, strict=True)):
            some = number == each
            if np.any(some):
                ratio[some] = way.take(some).ratio(scores[place[some]], mine[some], found.logits[some])
        return np.concatenate([np.ones(1), ratio / size])


@dataclass(frozen=True)
class _Way:
    """Queries, times their gains, on the way from one to others."""

    begin: Floats  # (n, rank)
    side: Floats  # (n, rank)
    angle: Floats  # (n,)

    @classmethod
    def between(cls, begin: Floats, ends: Floats, gains: Floats) -> _Way:
        """From one unit vector (rank,) to others (n, rank)."""
        cosine = np.clip(ends @ begin, -1.0, 1.0)
        rest = ends - cosine[:, None] * begin
        sine = np.linalg.norm(rest, axis=1)
        side = rest / np.where(sine > 0, sine, 1.0)[:, None]
        return cls(np.tile(begin * gains, (len(ends), 1)), side * gains, np.arctan2(sine, cosine))

    def take(self, some: Array) -> _Way:
        """Some ways."""
        return _Way(self.begin[some], self.side[some], self.angle[some])

    def readings(self, scores: Floats, own: Floats, angles: Floats) -> Floats:  # (n, m, rank), (n, rank), (n, k)
        """Logits (n, m, k) of first tokens beside a zero token and the last one, at angles on the way."""
        ways = np.stack([self.begin, self.side], axis=-1)  # (n, rank, 2)
        steps = np.stack([np.cos(angles), np.sin(angles)], axis=1)  # (n, 2, k)
        masses = np.logaddexp(0.0, own[:, None, :] @ ways @ steps)
        return np.asarray(scores @ ways @ steps - masses)

    def clear(self, scores: Floats, own: Floats) -> Floats:  # (m, rank), (n, rank) -> (n, m)
        """How fast readings rise or fall at least on the way; 0 where they turn round or leave what can be read."""
        places = np.linspace(0, 1, PLACES) * self.angle[:, None]
        found = self.readings(np.broadcast_to(scores, (len(own), *scores.shape)), own, places)
        steps = np.diff(found, axis=2)
        one_way = np.all(steps > 0, axis=2) | np.all(steps < 0, axis=2)
        slow = np.min(np.abs(steps), axis=2) * np.sin(self.angle)[:, None] / self.angle[:, None]
        return np.where(one_way & (np.max(found, axis=2) < LARGEST), slow, 0.0)

    def ratio(self, scores: Floats, own: Floats, seen: Floats) -> Floats:  # (n, rank), (n, rank), (n,) -> (n,)
        """How much of the end there is to one of the start, where readings are those of the sum of both."""

        def at(angle: Floats) -> Floats:
            return self.readings(scores[:, None, :], own, angle[:, None])[:, 0, 0]

        low, high = np.zeros(len(seen)), self.angle
        rises = at(high) > at(low)
        if not np.all((at(low) < seen) == rises) or not np.all((at(high) > seen) == rises):
            raise refuse(NOT_NORMED)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            before = (at(middle) < seen) == rises
            low, high = np.where(before, middle, low), np.where(before, high, middle)
        return np.asarray(np.sin(low) / np.sin(self.angle - low))


def _untangled(pairs: Floats) -> tuple[Floats, Floats]:  # (rank, rank) -> (rank, rank), (rank,)
    """The orthogonal matrix and the gains of which, but for a complex factor per pair, these are the product."""
    half = len(pairs) // 2
    turn, gains = np.zeros_like(pairs), np.zeros(len(pairs))
    for pair in range(half):
        both = pairs[[pair, pair + half]]
        squares, axes = np.linalg.eigh(both @ both.T)
        if not squares[0] > 0:
            raise refuse(NOT_NORMED)
        if np.linalg.det(axes) < 0:
            axes[:, 0] = -axes[:, 0]
        gains[[pair, pair + half]] = np.sqrt(squares)
        turn[[pair, pair + half]] = axes.T @ both / np.sqrt(squares)[:, None]
    left, _, right = svd(turn, full_matrices=True)  # nearly orthogonal: the nearest one that is
    return left @ right, gains
