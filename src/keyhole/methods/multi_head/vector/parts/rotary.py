"""Rotary positions of all heads: scores at two distances, whose quotient turns pair by pair.

Tokens of a query stand at different distances, so that its rows of scores are those of keys turned by as much. With
zero tokens before the last one all of them turn further, and that is a product with one matrix from the right, whose
eigenvectors are the queries' pairs and whose eigenvalues are known. Then keys are solved for and turned back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from keyhole.arrays import Array, Floats, Integers, floats
from keyhole.errors import UsageError
from keyhole.families.forms import Form, Rotary, geometric
from keyhole.families.forms.rotary import as_pairs, refuse_equal_frequencies
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.multi_head.vector.probe import VectorQueries
from keyhole.methods.multi_head.vector.scores import Scores
from keyhole.methods.multi_head.vector.scores_last import ScoreReader
from keyhole.numerics.svd import pseudo_inverse, svd
from keyhole.recovery import Outcome

Complex = npt.NDArray[np.complex128]
# Zero tokens before the last one: more turn slow pairs further, and cost time.
MOST_BETWEEN = 512
# A smaller number of them is good enough where it keeps the turns of any two pairs this part as far apart as the best.
GOOD_ENOUGH = 0.5
# Eigenvalues may be off by this part of how far apart they are: then it is clear which is whose.
UNMISTAKABLE = 0.25
# Tokens and last tokens beyond the rank that are asked farther apart.
SPARE = 1
# Draws of errors behind the radii.
DRAWS = 8
# Two heads share a key where what their keys span is parallel up to this many errors, pair by pair.
PARALLEL = 64.0


@dataclass(frozen=True)
class Turned:
    """What was read of every head: scores of tokens, each at its own distance, and of some of them farther apart."""

    tokens: Floats  # (width, width)
    distances: Integers  # (width,) of each
    near: Floats  # (heads, width, width): token i with the last token g is tokens_iᵀ·near·g; one column more of biases
    near_errors: Floats  # (heads, 1, width) of one entry over a unit token and a unit last token
    some: Integers  # (n,) the tokens that were asked farther apart
    last: Floats  # (m, width) beside these last ones; with biases their last entry is one
    far: Floats  # (heads, n, m)
    far_errors: Floats  # (heads, n, m)
    between: int

    def drawn(self, rng: np.random.Generator) -> Turned:
        """The same with errors as large as those it may have."""
        near = self.near + self.near_errors * rng.standard_normal(self.near.shape)
        far = self.far + self.far_errors * rng.standard_normal(self.far.shape)
        return Turned(
            self.tokens,
            self.distances,
            near,
            self.near_errors,
            self.some,
            self.last,
            far,
            self.far_errors,
            self.between,
        )


def angles_of(given: Array | None, rank: int) -> Floats:  # (pairs,)
    """The angles per position of all pairs; UsageError for those that no form has.

    Pairs beyond those that are given do not turn: their angle is zero.
    """
    if given is None:
        return geometric(max(1, -(-rank // 2)))
    angles = np.array(floats(np.asarray(given, dtype=np.float64)))
    if angles.ndim != 1 or not angles.size:
        raise UsageError("frequencies must be a row of angles, one for each pair")
    refuse_equal_frequencies(angles)
    return np.append(angles, np.zeros(max(0, -(-rank // 2) - angles.size)))


def ask_turned(
    queries: VectorQueries, reader: ScoreReader, scores: Scores, angles: Floats, *, biased: bool = False
) -> Steps[Turned]:
    """Scores of some of the tokens with zero tokens before the last one."""
    rank = 2 * angles.size
    if int(np.max(scores.ranks)) > rank or queries.width < rank:
        raise Unrecoverable(
            Outcome.WRONG_FAMILY,
            f"scores have rank {int(np.max(scores.ranks))}, those of {angles.size} pairs of keys {rank}",
        )
    between = choose_between(angles, queries.longest - reader.per_query - 1)
    blocks, count, spare = 0, 0, rank if queries.thorough else SPARE
    while count < min(rank + spare, queries.width):
        count, blocks = count + reader.blocks[blocks].size, blocks + 1
    columns = np.arange(min(rank + spare, queries.width), dtype=np.int64)
    queries.between = between
    far: list[tuple[Floats, Floats]] = []
    for block in range(blocks):
        far += [(yield from reader.ask(block, columns))]
    queries.between = 0
    distances = np.concatenate([np.arange(block.size, 0, -1, dtype=np.int64) for block in reader.blocks])
    near, last = scores.matrices, reader.last[columns]
    near_errors = (scores.errors + scores.dropped)[:, None, None] + 0.0 * near[:, :1]
    if biased:
        near = np.concatenate([near, scores.biases[:, :, None]], axis=2)
        near_errors = np.concatenate([near_errors, scores.bias_errors[:, None, None]], axis=2)
        last = np.column_stack([last, np.ones(columns.size)])
    return Turned(
        tokens=reader.tokens,
        distances=distances,
        near=near,
        near_errors=near_errors,
        some=np.arange(count, dtype=np.int64),
        last=last,
        far=np.concatenate([forms for forms, _ in far], axis=1),
        far_errors=np.concatenate([errors for _, errors in far], axis=1),
        between=between,
    )


def room_between(queries: VectorQueries) -> int:
    """How many tokens of a sequence are left free for some between: half of all, where there are few."""
    return int(min(queries.longest - 1, 2 * MOST_BETWEEN)) // 2


def choose_between(angles: Floats, most: float) -> int:
    """How many tokens stand between for the second score: so many that all pairs are turned by different angles."""
    if most < 1:
        message = "the distances that are left show one turn only: allow longer sequences (max_length)"
        raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, message)
    counts = np.arange(1, int(min(most, MOST_BETWEEN)) + 1)
    gaps = np.array([_gap(angles, int(count)) for count in counts])
    return int(counts[np.argmax(gaps >= GOOD_ENOUGH * np.max(gaps))])


def _gap(angles: Floats, count: int) -> float:
    """How far apart the eigenvalues of a turn over so many positions are; those of what does not turn are one."""
    moving = angles[angles > 0] * count
    turns = np.sort(np.concatenate([moving, -moving, np.zeros(int(moving.size < angles.size))]) % (2 * np.pi))
    steps = np.diff(np.append(turns, turns[0] + 2 * np.pi))
    return float(2 * np.sin(min(float(np.min(steps)), np.pi) / 2))


def solve_turns(turned: Turned, head: int, angles: Floats, *, rough: bool = False) -> Rotary:
    """Key and query of one head; `rough`: pairs that hardly turn may be mixed, for least squares to tell them apart."""
    rank = 2 * angles.size
    space = svd(turned.near[head])[2][:rank]  # (rank, width) what scores make of last tokens
    rows = turned.tokens @ turned.near[head] @ space.T  # (width, rank)
    turn = pseudo_inverse(rows[turned.some]) @ turned.far[head] @ pseudo_inverse(space @ turned.last.T)
    sizes, vectors = np.linalg.eig(turn.T)
    seen = _seen_to_turn(sizes, angles, turned.between) if rough else angles
    queries = vectors[:, match_turns(sizes, seen, turned.between)].T  # (pairs, rank): eigenvectors from the left
    angles = np.concatenate([angles[seen > 0], angles[seen == 0]])
    still = angles.size - len(queries)
    if still:  # all that is not turned, as any of its bases
        rest = svd(turn.T - np.eye(rank))[2][rank - 2 * still :]
        queries = np.concatenate([queries, rest[:still] + 1j * rest[still:]])
    keys = rows @ np.linalg.inv(np.concatenate([queries.real, queries.imag]))
    whole = (keys[:, : angles.size] + 1j * keys[:, angles.size :]) * np.exp(1j * turned.distances[:, None] * angles)
    key = as_pairs(np.asarray(np.linalg.solve(turned.tokens.astype(complex), whole).T))  # (2·pairs, width)
    query, width = as_pairs(np.asarray(queries @ space)), key.shape[1]
    bias = query[:, width] if query.shape[1] > width else None
    return Rotary(query[:, :width], key, np.array(angles, dtype=float), bias).canonical()


def _seen_to_turn(found: Complex, angles: Floats, between: int) -> Floats:
    """The angles, zero in place of the slowest that errors leave no eigenvalue of their own."""
    for count in range(int(np.sum(angles > 0)), 1, -1):
        seen = np.where(angles >= np.sort(angles)[-count], angles, 0.0)
        with suppress(Unrecoverable):
            match_turns(found, seen, between)
            return seen
    return np.where(angles >= np.max(angles), angles, 0.0)


def match_turns(found: Complex, angles: Floats, between: int) -> Integers:
    """Which eigenvalue is that of each angle but zero."""
    whole, angles = angles, angles[angles > 0]
    expected = np.exp(1j * angles * between)
    costs = np.abs(found[None, :] - np.concatenate([expected, np.conj(expected)])[:, None])
    places = linear_sum_assignment(costs)[1]
    worst = float(np.max(costs[np.arange(places.size), places]))
    if not worst <= UNMISTAKABLE * _gap(whole, between):
        raise Unrecoverable(
            Outcome.WRONG_FAMILY,
            "scores at two distances are not turned into each other by the frequencies that were assumed",
        )
    return np.asarray(places[: angles.size], dtype=np.int64)


def with_deviations(solve: Callable[[np.random.Generator | None], Form], rng: np.random.Generator) -> tuple[Form, Form]:
    """The form that is solved for, and deviations of its arrays: those of solutions with errors drawn."""
    form = solve(None)
    draws = [solve(rng).aligned_to(form).arrays() for _ in range(DRAWS)]
    own = form.arrays()
    spread = {name: np.sqrt(np.mean([(draw[name] - own[name]) ** 2 for draw in draws], axis=0)) for name in own}
    return form, form.with_arrays(spread)


def groups_of_keys(forms: Sequence[Form], deviations: Sequence[Form]) -> list[list[int]]:
    """Heads that share a key, as those of grouped queries do: keys are parallel pair by pair."""
    keys, wide = [form.arrays()["key"] for form in forms], [form.arrays()["key"] for form in deviations]
    moving = np.asarray(forms[0].arrays()["frequencies"]) > 0
    pairs = [(key[: len(key) // 2] + 1j * key[len(key) // 2 :])[moving] for key in keys]
    groups: list[list[int]] = []
    for head, own in enumerate(pairs):
        for group in groups:
            other = pairs[group[0]]
            sizes = np.linalg.norm(own, axis=1) * np.linalg.norm(other, axis=1)
            across = np.sqrt(np.maximum(1 - (np.abs(np.sum(np.conj(own) * other, axis=1)) / sizes) ** 2, 0.0))
            errors = [
                float(np.max(np.linalg.norm(wide[each], axis=1)) / np.min(np.linalg.norm(keys[each], axis=1)))
                for each in (head, group[0])
            ]
            if np.max(across) <= PARALLEL * max(*errors, np.finfo(float).eps ** 0.5):
                group.append(head)
                break
        else:
            groups.append([head])
    return groups
