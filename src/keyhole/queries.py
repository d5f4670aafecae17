"""What an oracle is (Signature), what is asked (Plan) and what comes back (Measurements)."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol, overload

import numpy as np

from keyhole.arrays import (
    BLOCK_NUMBERS,
    Array,
    Floats,
    Space,
    floats,
    gather_into,
    namespace,
    numpy_space,
    row_blocks,
    to_numpy,
)
from keyhole.errors import UsageError
from keyhole.noise import Noise

# Part of every journal key: raise it whenever the same description starts to mean other tokens.
PLAN_VERSION = 1
# Structures of sequences in which few different tokens occur, each of them often.
FEW = ("repeated", "clusters", "near", "zeros")
MATRIX = 2  # dimensions
REAL = "buif"  # kinds of NumPy's dtypes that are real numbers


@dataclass(frozen=True, eq=False)
class Alphabet:
    """Token vectors as rows; alphabets of the same numbers are equal."""

    rows: Array  # (m, width), in the library and dtype of the oracle

    @classmethod
    def of(cls, rows: Array, space: Space, width: int) -> Alphabet:
        """The alphabet of given rows; UsageError for what is none."""
        try:
            kind = to_numpy(rows).dtype.kind
        except ValueError:  # rows of several lengths
            kind = "O"
        if kind not in REAL:
            raise UsageError(f"alphabet must have tokens of {width} real numbers as rows")
        made = space.asarray(rows)
        if made.ndim != MATRIX or made.shape[0] < 1 or made.shape[1] != width:
            raise UsageError(f"alphabet must have tokens of {width} numbers as rows, not the shape {tuple(made.shape)}")
        if not np.all(np.isfinite(floats(made))):
            raise UsageError("alphabet holds numbers that are not finite")
        return cls(made)

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return int(self.rows.shape[0])

    @cached_property
    def digest(self) -> str:
        """SHA-256 over shape and numbers."""
        plain = np.ascontiguousarray(to_numpy(self.rows))
        return hashlib.sha256(f"{plain.dtype.str} {plain.shape}".encode() + plain.tobytes()).hexdigest()

    def __eq__(self, other: object) -> bool:
        """Whether the other has the same rows."""
        return isinstance(other, Alphabet) and self.digest == other.digest

    def __hash__(self) -> int:
        """By the digest."""
        return hash(self.digest)

    @cached_property
    def _keys(self) -> np.ndarray:
        return np.unique(_bytes(to_numpy(self.rows)))

    def has(self, tokens: Array) -> bool:  # (..., width)
        """Whether all these tokens are rows, to the last digit."""
        asked = np.unique(_bytes(to_numpy(tokens).reshape(-1, self.rows.shape[1])))
        return bool(np.all(np.isin(asked, self._keys)))

    def draw(self, structure: str, rng: np.random.Generator, length: int) -> Floats:  # -> (length, width)
        """A random sequence of rows, some of them often where the structure says so."""
        letters = rng.integers(self.size, size=length)
        if structure in FEW:
            letters = letters[rng.integers(1 + length // 4, size=length)]
        return floats(self.rows)[letters]


@dataclass(frozen=True)
class Signature:
    """What is known of an oracle before it is asked anything."""

    width: int  # numbers per token
    space: Space = field(default_factory=numpy_space)  # where its tokens and answers live
    max_norm: float | None = None  # no token may be longer than this
    max_length: int | None = None  # no sequence may have more tokens than this
    positions: Literal["last", "all"] = "last"  # where its output is observed
    noise: Noise = field(default_factory=Noise.exact)
    batch_limit: int | None = None  # most sequences per call
    answers: Literal["numbers", "labels"] = "numbers"  # labels: whole numbers that name classes, or a sign
    alphabet: Alphabet | None = None  # every token is one of these

    def __post_init__(self) -> None:
        _at_least_one("width", self.width)
        Noise.of(self.noise)
        for name in ("max_length", "batch_limit"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        if self.max_norm is not None and not (np.isfinite(self.max_norm) and self.max_norm > 0):
            raise UsageError(f"max_norm must be a positive number or None, not {self.max_norm}")
        if self.positions not in ("last", "all"):
            raise UsageError(f"positions must be 'last' or 'all', not {self.positions!r}")
        if self.answers not in ("numbers", "labels"):
            raise UsageError(f"answers must be 'numbers' or 'labels', not {self.answers!r}")
        if self.alphabet is not None and self.max_norm is not None:
            raise UsageError("an alphabet bounds the norms of tokens by itself: leave max_norm out")

    @property
    def norm_limit(self) -> float:
        """Longest token that may be made: `max_norm` with room for the rounding of its making."""
        return np.inf if self.max_norm is None else self.max_norm * (1 - 64 * self.space.spacing)

    def with_changes(self, **changes: Any) -> Signature:
        """The same signature with some fields changed."""
        return replace(self, **changes)

    def as_coarse(self) -> Signature:
        """The same for a method that knows no rounding but that of the dtype: answers have fewer digits."""
        if self.noise.kind != "dtype":
            return self
        return self.with_changes(space=replace(self.space, coarse=2 * self.noise.scale), noise=Noise.exact())

    def as_conspiring(self) -> Signature:
        """The same where errors may conspire, so wide that their quadrature bounds them.

        An entry of a matrix adds up as many answers as its row and column have numbers.
        """
        if not self.noise.may_conspire:
            return self
        return self.with_changes(noise=Noise.bounded(self.noise.radius * self.width))


def _at_least_one(name: str, number: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 1:
        raise UsageError(f"{name} must be a whole number of at least 1, not {number!r}")


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Vectors that tokens are made of, with a digest that is worked out at most once."""

    vectors: Array  # (count, width)

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self.vectors.shape[0])

    def some(self, start: int, stop: int) -> Array:  # -> (stop − start, width)
        """Some of them, one after the other."""
        return self.vectors[start:stop]

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over shape, dtype and numbers."""
        return digest(self.vectors)


class UnitRows(TokenRows):
    """The zero token, then every norm·e_i: made when they are wanted, as their matrix may be as large as all else."""

    _made_of: tuple[Space, int, float]

    def __init__(self, space: Space, width: int, norm: float) -> None:
        object.__setattr__(self, "_made_of", (space, width, norm))

    @property
    def vectors(self) -> Array:
        """All of them."""
        return self.some(0, self.count)

    @property
    def count(self) -> int:
        """One more than a token has numbers."""
        return int(self._made_of[1]) + 1

    def some(self, start: int, stop: int) -> Array:
        """Some of them, one after the other."""
        space, width, norm = self._made_of
        made = space.zeros(stop - start, width)
        first = max(start, 1)
        places = space.indices(np.arange(first, stop))
        made[places - start, places - 1] = norm
        return made


@dataclass(frozen=True, eq=False)
class Term:
    """scale[n] · rows[index[n]] for sequence n of a plan."""

    rows: TokenRows
    index: Array | None = None  # (count,) integers; None: sequence n takes row n
    scale: float | Array = 1.0  # one number, or (count,)

    @property
    def places(self) -> Array:
        """The row of each sequence."""
        assert self.index is not None  # where sequence n takes row n nobody asks
        return self.index

    def digest(self) -> bytes:
        """SHA-256 over everything that determines the tokens."""
        index = b"" if self.index is None else digest(self.index)
        scale = repr(self.scale).encode() if isinstance(self.scale, float) else digest(self.scale)
        return hashlib.sha256(self.rows.digest + b"|" + index + b"|" + scale).digest()

    def vectors(self, start: int, stop: int, space: Space) -> Array:  # -> (stop − start, width)
        """The term for the sequences from start to stop."""
        if self.index is None:
            picked = self.rows.some(start, stop)
        else:
            picked = space.xp.take(self.rows.vectors, self.index[start:stop], axis=0)
        if isinstance(self.scale, float):
            return picked if self.scale == 1.0 else picked * self.scale
        return picked * self.scale[start:stop, None]


# One position of every sequence: a sum of terms; the empty sum is the zero token.
Position = Sequence[Term]


class PositionsOf(Sequence[Position]):
    """The positions of sequences that are at hand, one term each."""

    def __init__(self, sequences: Array | list[Array]) -> None:  # (count, length, width), or (length, width) each
        self._sequences = sequences

    @cached_property
    def tokens(self) -> Array:  # (count, length, width)
        """All of them as one array, which those of a list become where that is wanted."""
        given = self._sequences
        return namespace(given[0]).stack(given) if isinstance(given, list) else given

    def write(self, room: Array, start: int, stop: int) -> None:  # (stop − start, length, width)
        """Write some of them, in memory that an oracle may write to."""
        if isinstance(self._sequences, list) and isinstance(room, np.ndarray):
            np.concatenate(self._sequences[start:stop], out=room.reshape(-1, room.shape[-1]))
        else:
            room[...] = self.tokens[start:stop, :, :]

    def __len__(self) -> int:
        return int(self._sequences[0].shape[0])

    @overload
    def __getitem__(self, place: int) -> Position: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Position]: ...
    def __getitem__(self, place: int | slice) -> Position | Sequence[Position]:
        if isinstance(place, slice):
            return PositionsOf(self.tokens[:, place, :])
        return [Term(TokenRows(self.tokens[:, range(len(self))[place], :]))]


@dataclass(frozen=True, eq=False)
class Sketch:
    """What a method knows before its end, for people who watch. Nothing is concluded from it."""

    matrices: Mapping[str, Array]  # by name; zero where nothing is known yet
    known: float  # the part of what is to be read that has been, 0 to 1
    error: float = math.nan  # largest error bar over the largest entry; nan where that is not known
    heldout: Sequence[float] = ()  # |prediction − answer| of the held-out answers that have come


class TokenMap(Protocol):
    """A map of tokens that stands between the plans of a method and the oracle."""

    @property
    def width(self) -> int:
        """Numbers per token that it takes."""
        ...

    @property
    def digest(self) -> bytes:
        """What determines it."""
        ...

    def __call__(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch, length, width of the oracle)
        """The tokens that the oracle receives."""
        ...


@dataclass(frozen=True, eq=False)
class Plan:
    """A description of `count` sequences of one length, which makes its tokens slice by slice.

    The description (rows, indices, scales) is small; the tokens are made in the oracle's array
    library, dtype and device, one batch at a time. The journal keys answers by the digest of
    the description and the slice.
    """

    stage: str  # what the queries are for, shown to people; no part of the digest
    count: int
    positions: Sequence[Position]  # one entry per token of a sequence
    repeats: int = 1  # how often each sequence is asked; answers are averaged
    first_repeat: int = 0  # more than 0: ask again what was asked before
    # What is known when this is asked, worked out only if somebody watches; no part of the digest.
    so_far: Callable[[], Sketch | None] | None = None

    attempt: int = 0  # which of several attempts at an oracle asks this; no part of the digest
    through: TokenMap | None = None  # what makes the oracle's tokens of those described

    @property
    def length(self) -> int:
        """Tokens per sequence."""
        return len(self.positions)

    @property
    def all_repeats(self) -> range:
        """The numbers of its repeats."""
        return range(self.first_repeat, self.first_repeat + self.repeats)

    def again(self, count: int, stage: str) -> Plan:
        """A plan that asks the first `count` sequences once more, for a stage of its own."""
        return replace(self, stage=stage, count=count, repeats=1, first_repeat=self.first_repeat + self.repeats)

    @cached_property
    def digest(self) -> str:
        """The key of this plan in a journal."""
        whole = hashlib.sha256(f"keyhole plan {PLAN_VERSION} {self.count} {self.length}".encode())
        for position in self.positions:
            whole.update(b"position")
            for term in position:
                whole.update(term.digest())
        if self.through is not None:
            whole.update(b"through" + self.through.digest)
        return whole.hexdigest()

    def tokens(self, start: int, stop: int, space: Space, width: int, room: Array | None = None) -> Array:
        """The sequences from start to stop, (stop − start, length, width), made in `room` where it is given."""
        shape = (stop - start, self.length, width)
        if self.through is not None:
            inner = replace(self, through=None).tokens(start, stop, space, self.through.width)
            return self.through(inner)
        made = space.xp.empty(shape, dtype=space.dtype, device=space.device) if room is None else room.reshape(shape)
        if isinstance(self.positions, PositionsOf):
            self.positions.write(made, start, stop)
            return made
        if self._is_table:
            table, index = self._table
            gather_into(made.reshape(-1, width), table, index[start:stop, :].reshape(-1))
            return made
        often = {term: term.vectors(start, stop, space) for term in self._repeated_terms}
        for place, position in enumerate(self.positions):
            if not position:
                made[:, place, :] = 0.0
            for number, term in enumerate(position):
                vectors = often[term] if term in often else term.vectors(start, stop, space)
                made[:, place, :] = vectors if number == 0 else made[:, place, :] + vectors
        return made

    @cached_property
    def _repeated_terms(self) -> set[Term]:
        """Terms that several positions have: the last token, where others are told by what they add to it."""
        terms = [term for position in self.positions for term in position]
        return {term for term, count in Counter(terms).items() if count > 1}

    @cached_property
    def _is_table(self) -> bool:
        """Whether tokens are best looked up in one table: single scaled rows, and more tokens than rows."""
        terms = [position[0] for position in self.positions if len(position) == 1]
        simple = [term for term in terms if term.index is not None and isinstance(term.scale, float)]
        return len(simple) == self.length and self.count >= max(term.rows.count for term in simple)

    @cached_property
    def _table(self) -> tuple[Array, Array]:
        """All rows, scaled, and for each sequence and position the row it takes: (rows, width), (count, length)."""
        terms = [_used_rows(term) for term in (position[0] for position in self.positions)]
        first = terms[0].rows.vectors
        xp = namespace(first)
        sizes = [term.rows.count for term in terms]
        offsets = [sum(sizes[:place]) for place in range(len(sizes))]
        table = xp.empty((sum(sizes), first.shape[1]), dtype=first.dtype, device=first.device)
        for term, offset in zip(terms, offsets, strict=True):
            for some in row_blocks(term.rows.count, first.shape[1]):
                table[offset + some.start : offset + some.stop, :] = term.rows.some(some.start, some.stop) * term.scale
        places = [term.places + offset for term, offset in zip(terms, offsets, strict=True)]
        return table, xp.stack(places, axis=1)


def _used_rows(term: Term) -> Term:
    """The term with no other rows than it uses, where there are many numbers of them on a device."""
    rows, index = term.rows.vectors, term.index
    space = Space.of(rows)
    if space.on_cpu or rows.shape[0] * rows.shape[1] <= BLOCK_NUMBERS:
        return term
    xp = space.xp
    used = xp.zeros(rows.shape[0], dtype=xp.int64, device=space.device)
    used[index] = 1
    (kept,) = xp.nonzero(used)
    if kept.shape[0] == rows.shape[0]:
        return term
    places = xp.cumulative_sum(used) - 1
    return Term(TokenRows(xp.take(rows, kept, axis=0)), xp.take(places, index, axis=0), term.scale)


def sequences(stage: str, tokens: Array | list[Array]) -> Plan:  # (count, length, width), or (length, width) each
    """A plan that asks exactly these sequences."""
    return Plan(stage, len(tokens), PositionsOf(tokens))


@dataclass(frozen=True, eq=False)
class Measurements:
    """Answers to a plan: centre and radius of each."""

    values: Array  # (count,) or (count, outputs); with all positions observed (count, length[, outputs])
    radius: float  # noise of each answer beyond the rounding of its dtype

    @property
    def by_output(self) -> Floats:  # (count, outputs)
        """The answers at the last position as plain numbers: one column where they are single numbers."""
        values = floats(self.values)
        return values if values.ndim == 2 else values[:, None]


def digest(array: Array) -> bytes:
    """SHA-256 over shape, dtype and numbers."""
    plain = np.ascontiguousarray(to_numpy(array))
    whole = hashlib.sha256(f"{plain.dtype.str} {plain.shape}".encode())
    whole.update(plain.data)
    return whole.digest()


def _bytes(rows: np.ndarray) -> np.ndarray:  # (n, width) -> (n,)
    """Each row as one opaque value; zero has one sign."""
    plain = np.ascontiguousarray(rows + rows.dtype.type(0))
    return plain.view(np.dtype((np.void, plain.dtype.itemsize * plain.shape[1]))).ravel()
