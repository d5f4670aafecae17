"""Queries of single tokens and of opposite pairs, and gᵀ·W·g of their last tokens g, from two queries for each.

[m × x; g] and [m × −x; g] have the logits ±xᵀWg − gᵀWg, whose sum is the form wanted; g is made shorter where they
saturate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Booleans, Floats, Integers
from keyhole.errors import UsageError
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.forms.value import check_length, unit_plan
from keyhole.methods.robust.quantised.pair_model import ColumnForms, SteeredDesign, SteeredPairs
from keyhole.queries import Measurements, Plan, Position, Signature, Term, TokenRows
from keyhole.recovery import Outcome

# Tokens of a pair and its last token.
SHORTEST = 3
# Logits at which a column is read: beyond them its last token is made shorter by SHRINK.
LARGEST, SHRINK = 1.5, 0.25
# More rounds than the whole range of norms needs.
MOST_ROUNDS = 200
# A logit that is not known better than this is lost in rounding.
BLURRED = 0.5


def check_lengths(signature: Signature) -> None:
    """End where a pair and a last token are too long a sequence."""
    check_length(signature)
    if (signature.max_length or SHORTEST) < SHORTEST:
        raise UsageError(f"questions of pairs need sequences of {SHORTEST} tokens: raise max_length")


def pair_plan(design: SteeredDesign, stage: str, pairs: SteeredPairs) -> Plan:
    """The queries; a side of norm zero is left out, where all of them have it."""
    space = design.space
    rows, columns = TokenRows(space.asarray(design.rows)), TokenRows(space.asarray(design.columns))
    row, column = space.indices(pairs.row), space.indices(pairs.column)
    sides: list[Position] = [
        [Term(rows, row, space.asarray(scale))] for scale in (pairs.plus, -pairs.minus) if np.any(scale != 0)
    ]
    last: Position = [Term(columns, column, space.asarray(pairs.last))]
    return Plan(stage, pairs.row.size, [side for side in sides for _ in range(pairs.copies)] + [last])


@dataclass(frozen=True)
class OwnForms:
    """The last tokens' norms and own forms, (columns,) each."""

    last: Floats
    form: Floats  # S_j
    radius: Floats

    def contradict(self, columns: Integers, read: ColumnForms) -> Booleans:  # (columns,)
        """Whether forms read together have another sum: answers that hardly move have several explanations."""
        apart = np.abs(self.form[columns] - read.own)
        return np.asarray(~(apart <= self.radius[columns] + read.own_radius))


def ask_own_forms(
    design: SteeredDesign,
    rng: np.random.Generator,
    norm: float,
    last: Floats,  # (columns,) norms of last tokens to start from
    copies: int,
    solve_answers: Callable[[Measurements], tuple[Floats, Floats]],  # -> answers and their radii, (n,) each
) -> Steps[OwnForms]:
    """Shorten last tokens until two logits of each are moderate; the zero column has no form."""
    width = last.size - 1
    last, form, radius = last.copy(), np.zeros(width + 1), np.zeros(width + 1)
    open_: Integers = np.arange(width)
    rows = rng.integers(width, size=width)
    for _ in range(MOST_ROUNDS):
        if not open_.size:
            return OwnForms(last, form, radius)
        row, count = rows[open_], open_.size
        sides = np.repeat([norm, -norm], count)
        pairs = SteeredPairs(np.tile(row, 2), np.tile(open_, 2), sides, 0 * sides, np.tile(last[open_], 2), copies)
        values, errors = solve_answers((yield pair_plan(design, "own forms", pairs)))
        logits, radii = _logits(design, pairs, values, errors)
        first, second = logits[:count], logits[count:]
        own, other = -(first + second) / 2, (first - second) / 2
        own_radius = (radii[:count] + radii[count:]) / 2
        moderate = np.isfinite(own_radius) & (np.maximum(np.abs(own), np.abs(other)) <= LARGEST)
        if np.any(moderate & (own_radius > BLURRED)):
            raise Unrecoverable(
                Outcome.TOO_NOISY, "answers are rounded by as much as one token's logit changes them: allow longer ones"
            )
        settled = open_[moderate]
        form[settled] = (own / last[open_] ** 2)[moderate]
        radius[settled] = (own_radius / last[open_] ** 2)[moderate]
        last[open_[~moderate]] *= SHRINK
        open_ = open_[~moderate]
    raise Unrecoverable(
        Outcome.SATURATED, f"{open_.size} columns have softmax weights of 0 or 1 however short the last token is"
    )


def _logits(design: SteeredDesign, pairs: SteeredPairs, values: Floats, errors: Floats) -> tuple[Floats, Floats]:
    """Logits of the first tokens against the last, and their radii; infinite ones where saturated."""
    c = pairs.last * design.column_values[pairs.column]
    c_radius = pairs.last * design.column_radius[pairs.column]
    high = pairs.plus * design.row_values[pairs.row]
    high_radius = np.abs(pairs.plus) * design.row_radius[pairs.row]
    share = (values - c) / (high - c)
    inside = (share > 0) & (share < 1)
    share = np.where(inside, share, 0.5)
    error = errors + design.rounding_radius(pairs) + (1 - share) * c_radius + share * high_radius
    radius = error / (np.abs(high - c) * share * (1 - share))
    return np.log(share / (1 - share) / pairs.copies), np.where(inside & (radius < 1), radius, np.inf)


class TokenValues(ABC):
    """Asks single tokens and counts them. A subclass says what it makes of the answers."""

    def __init__(self, signature: Signature) -> None:
        self.signature, self.space = signature, signature.space
        self.units = TokenRows(self.space.eye(signature.width))
        self.spent = 0

    @abstractmethod
    def ask_value(self) -> Steps[None]:
        """A first estimate of the value."""

    def ask_units(self, norm: float) -> Steps[Floats]:  # (width + 1, outputs)
        """The zero token, then every norm·e_i."""
        measured: Measurements = yield unit_plan(self.signature, norm)
        self.spent += self.signature.width + 1
        self.scalar = measured.values.ndim == 1
        return measured.by_output

    def ask(self, token: Position, count: int) -> Steps[Floats]:  # (count, outputs)
        """Some tokens, each a sum of terms."""
        measured: Measurements = yield Plan("value", count, [token])
        self.spent += count
        return measured.by_output

    def choose(self, read: Floats) -> None:  # (width, outputs)
        """The largest entry of every output, the longest output, and the rank of all."""
        self.outputs = read.shape[1]
        self.place = np.argmax(np.abs(read), axis=0)  # (outputs,) of the largest entry
        self.main = int(np.argmax(np.linalg.norm(read, axis=0)))
        self.rank = int(np.linalg.matrix_rank(read)) if self.outputs > 1 else 1

    @property
    def counting_bound(self) -> int:
        """Queries below which a head of full rank has more unknown numbers than answers."""
        width = self.signature.width
        return width + -(-width * width // self.rank)

    def in_shape(self, entries: Floats) -> Array:  # (width, outputs)
        """In the shape and space of the oracle."""
        return self.space.asarray(entries[:, 0] if self.scalar else entries)
