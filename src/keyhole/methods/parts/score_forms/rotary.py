"""Rotary positions: scores at two distances, and the planes in which one is the other turned."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from keyhole.arrays import Array, Floats, Integers, floats
from keyhole.errors import UsageError
from keyhole.families import FormHead
from keyhole.families.forms import Rotary, geometric
from keyhole.families.forms.rotary import as_complex, as_pairs, refuse_equal_frequencies
from keyhole.families.parts import PARTS, Attention
from keyhole.methods.base import Estimate, Steps, Unrecoverable, adapt
from keyhole.methods.forms.columns import Draft, Score
from keyhole.methods.forms.reader import FormReader, PairReader
from keyhole.methods.forms.score_matrix import ask_score
from keyhole.methods.forms.value import Value
from keyhole.methods.parts.inverse import Inverse, Number
from keyhole.methods.parts.reader import PartReader
from keyhole.methods.parts.saturation import ask_ends, find_constants
from keyhole.methods.parts.score_forms.readings import (
    Names,
    ask_of_one_output,
    check_box,
    check_names,
    form_estimate,
    radii_of_solutions,
    refuse,
)
from keyhole.methods.parts.zero_scores import Probe, ask_values
from keyhole.numerics.orthogonal import equal_overlap
from keyhole.numerics.svd import svd
from keyhole.queries import Measurements, Plan, Signature, TokenRows
from keyhole.recovery import Outcome

ASSUMPTIONS = (
    "the box computes one softmax head over its raw tokens, read at the last position, with rotary positions",
    "it turns by the frequencies that were assumed",
    "answers are right up to the rounding of their dtype",
)
# Tokens between the two whose score is read a second time: more turn slow pairs further, and cost time.
MOST_BETWEEN = 512
# A smaller number of them is good enough where it keeps the turns of any two pairs this part as far apart as the best.
GOOD_ENOUGH = 0.5
# Eigenvalues may be off by this part of how far apart they are: then it is clear which is whose.
UNMISTAKABLE = 0.25
NOT_TURNED = "scores at two distances are not turned into each other by the frequencies that were assumed"


def ask_rotary(
    signature: Signature, rng: np.random.Generator, names: Names, *, frequencies: Array | None = None
) -> Steps[Estimate[FormHead]]:
    """Key and query of a head with rotary positions, up to a complex factor per pair, its value, and constants.

    `frequencies` are angles per position, one for each pair of keys; left out, they are those of base 10000.
    """
    check_names(names, link=("exp", "softcap"), normaliser=("sum", "sink", "plus-one"))
    check_box(signature, tokens=3)
    value = yield from ask_values(signature, names["normaliser"] != "sum")

    def ask(plain: Signature, along: Value) -> Steps[tuple[Rotary, dict[str, Floats], Inverse]]:
        inverse = yield from _ask_inverse(plain, along, rng, names)
        reader = _reader(plain, along, inverse)
        near = yield from ask_near(reader, rng)
        known = angles(frequencies, near.rank)
        between = choose_between(known, (signature.max_length or MOST_BETWEEN + 2) - 2)
        factors = Factors.of(near)
        far, far_radius = yield from ask_far(reader, inverse, factors, between, along, rng)

        def solve(score: Floats, far: Floats) -> Rotary:
            return solve_turns(factors, score, far, known, between)

        relative = float(getattr(reader, "relative", 0.0))
        score, error = floats(near.matrix), floats(near.radius) + relative * np.abs(floats(near.matrix))
        far_radius = far_radius + relative * np.abs(far)
        form = solve(score, far)

        def again(errors: np.random.Generator) -> Rotary:
            one, two = (errors.standard_normal(each.shape) for each in (score, far))
            return solve(score + error * one, far + far_radius * two)

        return form, radii_of_solutions(form, again, rng), inverse

    form, radii, inverse = yield from ask_of_one_output(signature, value, ask)
    made = parts_of(inverse, names, signature.space.rounding)
    value = value if not inverse.paired else over(value, Number(inverse.zero, inverse.radii.get("zero", 0.0)))
    return form_estimate(signature, value, form, radii, ASSUMPTIONS, *made, rank=int(form.key.shape[0]))


def _ask_inverse(signature: Signature, value: Value, rng: np.random.Generator, names: Names) -> Steps[Inverse]:
    """What the weight of the first of two tokens says of its logit, with the constants that it takes."""
    link, normaliser = names["link"], names["normaliser"]
    zero = {"sink": math.nan, "plus-one": 1 / 3}.get(normaliser, 0.5)
    inverse = Inverse(link, normaliser).changed(zero=zero)
    if link == "exp" and normaliser != "sink":
        return inverse
    least, most = yield from ask_ends(Probe(signature, value), rng)
    return find_constants(inverse, least, most, signature.space.rounding)


def _reader(signature: Signature, value: Value, inverse: Inverse) -> PairReader | PartReader:
    """The reader of scores: that of a softmax knows norm bounds."""
    if inverse.link == "exp" and inverse.normaliser == "sum":
        return PairReader(signature, value)
    return PartReader(signature, value, inverse, 1.0)


def parts_of(inverse: Inverse, names: Names, rounding: float) -> tuple[Attention, Attention]:
    """The attention of the constants that were found, and their radii."""
    found: dict[str, tuple[float, float]] = {}
    if "cap" in inverse.radii:
        found["link.cap"] = inverse.cap, inverse.radii["cap"]
    if inverse.normaliser == "sink":
        energy = Number(inverse.zero, inverse.radii["zero"]).through(_sink_energy)
        found["normaliser.energy"] = energy.value, energy.radius
    made = []
    for which in (0, 1):
        parts = {}
        for kind in ("link", "normaliser"):
            own = {path.partition(".")[2]: each[which] for path, each in found.items() if path.startswith(kind)}
            own = {name: number if not which else number + rounding for name, number in own.items()}
            parts[kind] = PARTS[kind, names[kind]](**own)
        made.append(Attention(**parts))
    return made[0], made[1]


def _sink_energy(zero: float) -> float:
    """The energy of a sink beside which the first of two tokens of logit zero has this weight."""
    if not zero < 0.5:
        raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, "weights add up to one as far as answers tell: no sink shows")
    return math.log(1 / zero - 2)


def over(value: Value, zero: Number) -> Value:
    """The value that was read in units of a weight."""
    error = zero.radius / zero.value
    vector = value.vector / zero.value
    return replace(value, vector=vector, radius=value.radius / zero.value + abs(vector) * error)


def angles(given: Array | None, rank: int) -> Floats:  # (rank/2,)
    """The angles per position of so many pairs."""
    if rank % 2 or rank == 0:
        raise refuse(f"scores of neighbours have rank {rank}, those of keys that are turned in pairs an even one")
    if given is None:
        return geometric(rank // 2)
    known = np.array(floats(np.asarray(given, dtype=np.float64)))
    if known.ndim != 1:
        raise UsageError("frequencies must be a row of angles, one for each pair")
    refuse_equal_frequencies(known)
    if len(known) != rank // 2:
        raise refuse(f"scores of neighbours have rank {rank}, those of {len(known)} pairs {2 * len(known)}")
    return known


def ask_near(reader: FormReader, rng: np.random.Generator) -> Steps[Score]:
    """The score between neighbours."""
    score = yield from ask_score(reader, rng, Draft())
    if score is None:
        raise refuse("a score bias shows, which heads with rotary positions are not read beside")
    if score.rank == 0:
        raise Unrecoverable(Outcome.NOT_IDENTIFIABLE, "no token attracts attention more than another does")
    if score.rank % 2:  # keys are pairs: a direction may be nothing but errors
        sizes = np.linalg.svd(floats(score.matrix), compute_uv=False)
        seen = int(np.sum(sizes > float(np.linalg.norm(floats(score.radius)))))
        score = replace(score, rank=min(score.rank, seen))
    return score


def choose_between(known: Floats, most: int) -> int:
    """How many tokens stand between for the second score: so many that all pairs are turned by different angles."""
    counts = np.arange(1, min(most, MOST_BETWEEN) + 1)
    gaps = np.array([_gap(known, int(count)) for count in counts])
    return int(counts[np.argmax(gaps >= GOOD_ENOUGH * np.max(gaps))])


def _gap(known: Floats, count: int) -> float:
    """How far apart the eigenvalues of a turn over so many positions are."""
    turns = np.sort(np.concatenate([known * count, -known * count]) % (2 * np.pi))
    steps = np.diff(np.append(turns, turns[0] + 2 * np.pi))
    return float(2 * np.sin(min(np.min(steps), np.pi) / 2))


@dataclass(frozen=True)
class Factors:
    """Orthonormal bases of what scores make of keys and queries."""

    left: Floats  # (width, rank)
    right: Floats  # (rank, width)

    @classmethod
    def of(cls, score: Score) -> Factors:
        """Those of the score between neighbours."""
        left, _, right = svd(floats(score.matrix), full_matrices=True)
        return cls(left[:, : score.rank], right[: score.rank])


def ask_far(
    reader: FormReader,
    inverse: Inverse,
    factors: Factors,
    between: int,
    value: Value,
    rng: np.random.Generator,
) -> Steps[tuple[Floats, Floats]]:
    """leftᵀ·(score at a distance)·rightᵀ and its radius, (rank, rank): zero tokens stand between the two."""
    space, rank = reader.signature.space, factors.left.shape[1]
    plain = floats(value.vector)
    # What the score does not see makes tokens of clear value of those that have little.
    unseen = plain - factors.left @ (factors.left.T @ plain)
    turned = space.asarray(factors.left.T.copy())
    if rank > 1 and np.linalg.norm(factors.left.T @ plain) > 0:
        turned = equal_overlap(space, turned, value.vector, rng)
    size = float(np.linalg.norm(unseen))
    rows = floats(turned)
    lean = 0.0 if size <= LEAST_UNSEEN * float(np.linalg.norm(plain)) else 1.0
    signs = np.where(rows @ plain < 0, -1.0, 1.0)[:, None]
    rows = (signs * rows + lean * unseen / (size or 1.0)) / (1 + lean) ** 0.5
    numbers, others = np.repeat(np.arange(rank), rank), np.tile(np.arange(rank), rank)
    forms = yield from adapt(
        reader.ask_forms(
            "distances",
            TokenRows(space.asarray(rows)),
            TokenRows(space.asarray(factors.right.copy())),
            space.indices(numbers),
            space.indices(others),
        ),
        outgoing=lambda plan: spread(plan, between),
        incoming=lambda plan, answers: as_neighbours(plan, answers, between, reader.signature, value, inverse),
    )
    seen, radius = (floats(each).reshape(rank, rank) for each in (forms.values, forms.radius))
    back = np.linalg.inv(rows @ factors.left)
    return back @ seen, np.sqrt(back**2 @ radius**2)


# With less than this part of the value outside of what scores see, nothing is added to tokens.
LEAST_UNSEEN = 2.0**-10


def spread(plan: Plan, between: int) -> Plan:
    """The plan with zero tokens before the last one."""
    *first, last = plan.positions
    return Plan(plan.stage, plan.count, [*first, *([[]] * between), last], plan.repeats, plan.first_repeat)


def as_neighbours(
    plan: Plan, answers: Measurements, between: int, signature: Signature, value: Value, inverse: Inverse
) -> Measurements:
    """What would be answered without the zero tokens, whose weights are that of the last one each."""
    xp, space, unit = signature.space.xp, signature.space, inverse.unit
    rest = 1 / inverse.zero - 1  # the mass of the last token and of a sink
    tokens = plan.tokens(0, plan.count, space, signature.width)
    high, low = (tokens[:, place, :] @ value.vector / unit for place in (0, -1))
    far = low / (rest + between)
    weight = (answers.values - value.bias - far) / xp.where(high == far, xp.ones_like(high), high - far)
    odds = weight / (1 - weight) * ((rest + between) / rest)  # outside [0, 1] as it is inside: the reader refuses it
    weight = odds / (1 + odds)
    # Small weights become larger by as much, and so do their errors.
    radius = max(answers.radius, signature.noise.spread) * (rest + between) / rest
    return Measurements(low / rest + weight * (high - low / rest) + value.bias, radius)


def solve_turns(factors: Factors, score: Floats, far: Floats, known: Floats, between: int) -> Rotary:
    """Key and query from scores of neighbours and of tokens farther apart.

    Between bases the one is (key·left)ᵀ·R·(query·right) and the other has one more turn: their quotient has keys for
    eigenvectors, and eigenvalues that are known.
    """
    near = factors.left.T @ score @ factors.right.T
    sizes, vectors = np.linalg.eig(np.linalg.solve(near.T, far.T).T)
    keys = vectors[:, match_turns(sizes, known, between)].T  # (pairs, rank)
    return from_keys(as_pairs(keys) @ factors.left.T, factors.left, score, known)


def match_turns(found: Array, known: Floats, between: int) -> Integers:
    """Which eigenvalue is that of each angle."""
    expected = np.exp(-1j * known * between)
    costs = np.abs(found[None, :] - np.concatenate([expected, np.conj(expected)])[:, None])
    places = linear_sum_assignment(costs)[1]
    worst = float(np.max(costs[np.arange(len(places)), places]))
    if not worst <= UNMISTAKABLE * _gap(known, between):
        raise refuse(NOT_TURNED)
    return np.asarray(places[: len(known)])


def from_keys(key: Floats, left: Floats, score: Floats, known: Floats) -> Rotary:
    """The form of a key (rank, width) and the scores between neighbours."""
    turned = np.asarray(np.linalg.solve((key @ left).T, left.T @ score))  # the query turned by one position
    query = as_pairs(as_complex(turned) * np.exp(-1j * known)[:, None])
    return Rotary(query, key, known).canonical()
