"""How answers err, measured by repeated queries, by digits and by neighbouring queries.

Repeats that differ show random errors, and by how much. Answers that all have few digits, binary or decimal, show
rounding. Answers to neighbouring queries that follow no smooth curve show errors of any other kind: the same
query brings the same error again, a nearly equal one does not. What no query can show is an error that changes
as slowly as the answers themselves: a constant one is the same as an output bias.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.noise_estimation.digits import (
    binary_digits,
    bits_lost_to_decimals,
    bits_lost_to_digits,
    decimals,
    distance_from_polynomials,
)
from keyhole.methods.noise_estimation.flips import ask_flip_rate
from keyhole.noise import DIGITS, Noise
from keyhole.queries import Measurements, Plan, Signature, sequences
from keyhole.recovery import Outcome

STAGE = "noise"
# Random queries, half of them of one token. Their norms cover two decades, over which whole numbers and
# numbers of few binary digits, which are the same at one size, come apart.
QUERIES = 12
DECADES = 2.0
# Answers with fewer different numbers than this say too little: then tokens a thousand times as long are asked.
DIFFERENT = 4
LONGER, ATTEMPTS = 1e3, 4
# How often each is asked once the first repeat differs: 12·27 = 324 degrees of freedom, from which a standard
# deviation is known within 4 %, so that 20 % are five of those.
REPEATS = 28
# Queries or outputs whose deviations differ by more have errors of different sizes: with 27 degrees of freedom
# each, equal ones never do.
UNEQUAL = 4.0
# Binary digits that must be missing in all answers together, before that is no coincidence.
COINCIDENCE = 40.0
# Neighbours per segment. Four segments find errors of at most τ, be they uniform or ±τ, to lie between 0.7 τ and τ
# but for one time in a million, so the estimate is raised by ALLOWANCE.
NEIGHBOURS = 18
ALLOWANCE = 1.15
# A smooth curve is a cubic so many times better than it is a line, a kink two lines; what errs at random is neither.
SMOOTH = 4.0
LINE, CUBIC = 1, 3
# Half a segment over the length of its tokens: long for single tokens, whose answers are linear if it is a head.
LONG = 2.0**-3
# Times spacing·√width·(size of answers, and how they change with their tokens): what arithmetic does to an answer.
ROUNDING = 8.0
# Rounding moves an answer by half a unit; more than this many times that is another error.
UNIT_MARGIN = 1.25
OUTPUTS = 16  # outputs looked at for neighbours: more would take time, and no fewer queries


@dataclass(frozen=True)
class NoiseEstimate:
    """A kind of errors, and in words what it rests on."""

    noise: Noise
    evidence: str = ""


@dataclass(frozen=True)
class Segment:
    """Answers to neighbouring queries."""

    points: Floats  # (NEIGHBOURS,) between −1 and 1
    answers: Floats  # (NEIGHBOURS, outputs)
    half: float  # half its length, over the length of its tokens

    def distance(self, degree: int) -> Floats:  # (outputs,)
        """How far each output is from polynomials."""
        return distance_from_polynomials(self.points, self.answers, degree)

    @property
    def distance_from_kinked(self) -> Floats:  # (outputs,)
        """How far each output is from two lines that meet between two of the points."""
        order = np.argsort(self.points)
        points, answers = self.points[order], self.answers[order]
        least = np.full(answers.shape[1], np.inf)
        for split in range(2, len(points) - 1):
            left, right = (
                floats(np.polynomial.polynomial.polyfit(points[part], answers[part], LINE))
                for part in (slice(split), slice(split, None))
            )
            with np.errstate(divide="ignore", invalid="ignore"):
                meet = (left[0] - right[0]) / (right[1] - left[1])
            fitted = np.where(np.arange(len(points))[:, None] < split, _line(left, points), _line(right, points))
            off = np.max(np.abs(answers - fitted), axis=0)
            between = (meet >= points[split - 1]) & (meet <= points[split])
            least = np.where(between, np.minimum(least, off), least)
        return least

    @property
    def slope(self) -> Floats:  # (outputs,)
        """By how much answers change when tokens change by their own length."""
        centred = self.points - np.mean(self.points)
        return np.asarray(np.abs(centred @ self.answers) / (centred @ centred) / self.half)


def _line(line: Floats, points: Floats) -> Floats:  # (2, outputs), (n,) -> (n, outputs)
    return np.asarray(line[0] + points[:, None] * line[1])


def measure_noise(signature: Signature, rng: np.random.Generator) -> Steps[NoiseEstimate]:
    """The kind and scale of an oracle's errors, from about 100 queries, or 336 where repeats differ.

    Random errors are taken for normal ones; their standard deviation is found within 20 %, as is the largest
    error of a deterministic kind. Of several kinds the largest is reported. A constant error cannot be told from
    an output bias, nor one that changes as smoothly as the answers from the answers: both are taken for right.
    """
    if signature.answers == "labels":
        rate, evidence = yield from ask_flip_rate(signature, rng)
        return NoiseEstimate(Noise.flipped(rate) if rate else Noise.exact(), evidence)
    plans, rounds, longest = yield from _ask_scales(signature, rng)
    answers, first = np.concatenate([_flat(one) for one in rounds]), _rows(rounds[-1])
    if len(np.unique(answers)) == 1:
        return NoiseEstimate(
            Noise.exact(),
            f"all {len(answers)} answers are {answers[0]:.3g}, for tokens as long as {longest:.2g}: "
            "nothing can be said of their errors, so they are taken for right",
        )
    again = _rows(_numbers((yield _repeat_plans(plans, 1)), signature))
    difference, largest = float(np.max(np.abs(first - again))), float(np.max(np.abs(first)))
    if difference > _arithmetic(signature.space.eps, signature.width) * largest:
        asked = yield [plan for repeat in range(2, REPEATS) for plan in _repeat_plans(plans, repeat)]
        more = _numbers(asked, signature)
        pairs = [_rows(more[number : number + len(plans)]) for number in range(0, len(more), len(plans))]
        return _random(np.stack([first, again, *pairs]), coarseness(answers, signature.space.eps), largest)
    telling = [_most_unlike(plan, each, signature) for plan, each in zip(plans, rounds[-1], strict=True)]
    segments = yield from _ask_neighbours(signature, rng, longest, telling, answers)
    answers = np.concatenate([answers, *(each.answers.ravel() for each in segments)])
    estimate = _deterministic(segments, answers, signature)
    same = f"within {difference:.2g}, which is rounding" if difference else "the same"
    return replace(estimate, evidence=f"{QUERIES} questions asked twice were answered {same}; {estimate.evidence}")


def _ask_scales(signature: Signature, rng: np.random.Generator) -> Steps[tuple[list[Plan], list[list[Floats]], float]]:
    """Random queries whose answers differ beyond rounding; all answers so far; the longest token."""
    # Typical tokens have entries of about one; the fourth root leaves room for the products in a logit.
    most = min(signature.norm_limit, signature.space.huge**0.25)
    longest = min(most, signature.width**0.5)
    rounds: list[list[Floats]] = []
    while True:
        plans = []
        for length in _lengths(signature):
            directions = _unit(rng.standard_normal((QUERIES // 2, length, signature.width)))
            norms = longest * 10.0 ** -rng.uniform(0, DECADES, (QUERIES // 2, length, 1))
            plans.append(sequences(STAGE, signature.space.asarray(directions * norms)))
        rounds.append(_numbers((yield plans), signature))
        if len(np.unique(_flat(rounds[-1]))) >= DIFFERENT or longest >= most or len(rounds) == ATTEMPTS:
            return plans, rounds, longest
        longest = min(most, longest * LONGER)


def _lengths(signature: Signature) -> tuple[int, int]:
    """Half of the queries have one token, the others two where that is allowed."""
    return 1, min(2, signature.max_length or 2)


def _unit(vectors: Floats) -> Floats:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True))


def _repeat_plans(plans: list[Plan], repeat: int) -> list[Plan]:
    """Plans that ask queries once more, one by one: asked as `repeats` of a plan, answers would come averaged."""
    return [replace(plan, first_repeat=repeat) for plan in plans]


def _ask_neighbours(
    signature: Signature, rng: np.random.Generator, longest: float, telling: list[Floats], answers: Floats
) -> Steps[list[Segment]]:  # telling: (length, width) each
    """A long and a short segment around a single token, and two around a pair of tokens.

    Where all answers of one are the same, as where every neuron is off, and not for their few digits, it lies around
    a `telling` query instead.
    """
    spacing = signature.space.eps
    # Beside another token answers are curved, over lengths that a large score makes small.
    halves = ((LONG, spacing**0.5), (spacing**0.5, spacing ** (2 / 3)))
    shape = [(length, half) for length, pair in zip(_lengths(signature), halves, strict=True) for half in pair]
    drawn = [0.5 * longest * _unit(rng.standard_normal((2, length, signature.width))) for length in _lengths(signature)]
    segments = yield from _ask_segments(signature, rng, shape, [drawn[n // 2] for n in range(len(shape))])
    flat = [n for n, segment in enumerate(segments) if not np.any(np.ptp(segment.answers, axis=0))]
    everything = np.concatenate([answers, *(each.answers.ravel() for each in segments)])
    if flat and coarseness(everything, spacing).noise.kind == "exact":
        lines = [np.stack([telling[n // 2], drawn[n // 2][1]]) for n in flat]
        again = yield from _ask_segments(signature, rng, [shape[n] for n in flat], lines)
        for n, segment in zip(flat, again, strict=True):
            segments[n] = segment
    return segments


def _ask_segments(
    signature: Signature, rng: np.random.Generator, shape: list[tuple[int, float]], lines: list[Floats]
) -> Steps[list[Segment]]:
    """Segments of so many tokens and half lengths, each around a query in some direction."""
    plans, places = [], []
    for (_, half), (base, direction) in zip(shape, lines, strict=True):
        points = 2 * (np.arange(NEIGHBOURS) + rng.uniform(0, 1, NEIGHBOURS)) / NEIGHBOURS - 1
        tokens = base + half * points[:, None, None] * direction
        plans.append(sequences(STAGE, signature.space.asarray(tokens)))
        places.append(points)
    answers = _numbers((yield plans), signature)
    outputs = answers[0].shape[2]
    some = np.unique(np.linspace(0, outputs - 1, min(outputs, OUTPUTS)).astype(int))
    return [
        Segment(points, each[:, -1, some], half) for points, each, (_, half) in zip(places, answers, shape, strict=True)
    ]


def _most_unlike(plan: Plan, answers: Floats, signature: Signature) -> Floats:  # (count, positions, outputs)
    """The query whose answer is the farthest from the median of all."""
    tokens = floats(plan.tokens(0, plan.count, signature.space, signature.width))
    away = np.abs(answers - np.median(answers, axis=0))
    return np.asarray(tokens[int(np.argmax(np.max(away, axis=(1, 2))))])


def _numbers(measured: list[Measurements], signature: Signature) -> list[Floats]:
    """Answers as (count, positions, outputs) each."""
    arrays = []
    for each in measured:
        values = floats(each.values)
        values = values if signature.positions == "all" else values[:, None, ...]
        arrays.append(values if values.ndim == 3 else values[..., None])
    return arrays


def _rows(answers: list[Floats]) -> Floats:  # -> (queries and positions, outputs)
    return np.concatenate([each.reshape(-1, each.shape[-1]) for each in answers])


def _flat(answers: list[Floats]) -> Floats:
    return np.concatenate([each.ravel() for each in answers])


def _arithmetic(spacing: float, width: int) -> float:
    """Relative error that the sums inside an oracle may make of the spacing of its numbers."""
    return float(ROUNDING * spacing * width**0.5)


def coarseness(answers: Floats, spacing: float, coincidence: float = COINCIDENCE) -> NoiseEstimate:
    """Rounding to decimals or to a dtype, whichever explains more of the digits that all answers lack; else exact."""
    different = np.unique(answers)
    estimate, most = NoiseEstimate(Noise.exact()), coincidence
    digits = binary_digits(different)
    fitting = [name for name in sorted(DIGITS, key=lambda name: DIGITS[name]) if digits <= DIGITS[name]]
    if fitting and DIGITS[fitting[0]] < 1 - np.log2(spacing):
        lost = bits_lost_to_digits(different, DIGITS[fitting[0]], spacing)
        if lost > most:
            said = f"all {len(different)} different answers have at most {digits} binary digits"
            estimate, most = NoiseEstimate(Noise.dtype(fitting[0]), said), lost
    places = decimals(different, spacing)
    if places is not None and bits_lost_to_decimals(different, places, spacing) > most:
        unit = f"{places} decimals" if places >= 0 else f"{-places} zeros before the point"
        at = "at most" if places >= 0 else "at least"
        estimate = NoiseEstimate(Noise.rounded(places), f"all {len(different)} different answers have {at} {unit}")
    return estimate


def _random(answers: Floats, coarse: NoiseEstimate, largest: float) -> NoiseEstimate:  # (repeats, queries, outputs)
    """Random errors, or the rounding beside them where that is larger."""
    repeats, queries, outputs = answers.shape
    variance = np.var(answers, axis=0, ddof=1)
    deviation = float(np.mean(variance) ** 0.5)
    if not deviation < np.inf:
        raise Unrecoverable(Outcome.TOO_NOISY, "answers to the same query differ by more than numbers can hold")
    said = (
        f"{queries * outputs} answers asked {repeats} times each differ by a standard deviation of {deviation:.3g}, "
        f"from {queries * outputs * (repeats - 1)} degrees of freedom"
    )
    rounding = coarse.noise.relative * largest / 3**0.5 if coarse.noise.kind == "dtype" else coarse.noise.deviation
    if 2 * rounding**2 > deviation**2:  # rounding has made its own part of what repeats differ by
        said = f"{coarse.evidence}, an error of {rounding:.2g}, which is more than that {said}"
        return NoiseEstimate(coarse.noise, said)
    if coarse.evidence:
        said += f"; {coarse.evidence}, an error of {rounding:.2g}, which is less"
    for what, axis in (("questions", 1), ("outputs", 0)):
        each = np.mean(variance, axis=axis) ** 0.5
        if UNEQUAL * np.min(each) < np.max(each):
            said += f"; it differs between {what}, from {np.min(each):.2g} to {np.max(each):.2g}, the largest is taken"
            deviation = max(deviation, float(np.max(each)))
    return NoiseEstimate(Noise.gaussian(deviation), said)


def _deterministic(segments: list[Segment], answers: Floats, signature: Signature) -> NoiseEstimate:
    """Rounding, or errors that it cannot explain, or none."""
    coarse = coarseness(answers, signature.space.eps)
    spacing = max(signature.space.eps, 2 * coarse.noise.relative)
    # Of all answers and outputs: one alone may be small by chance where its rounding errors are not.
    size = float(np.max(np.abs(answers)))
    slope = max(float(np.max(each.slope)) for each in segments[::2])  # that of short segments shows mostly errors
    explained = _arithmetic(spacing, signature.width) * (size + slope) + UNIT_MARGIN * coarse.noise.radius
    strays, bends = 0.0, 0.0
    for segment in segments:
        line, kinked = segment.distance(LINE), segment.distance_from_kinked
        rough = SMOOTH * segment.distance(CUBIC) > line
        off = np.where(SMOOTH * kinked > line, line, kinked)
        strays = max(strays, float(np.max(off[rough & (off > explained)], initial=0.0)))
        bends = max(bends, float(np.max(line[~rough & (line > explained)], initial=0.0)) if segment.half == LONG else 0)
    beyond = f"where rounding explains {explained:.2g}"
    if strays:
        noise = Noise.bounded(ALLOWANCE * strays)
        said = f"neighbouring questions have answers up to {strays:.3g} off any smooth curve, {beyond}"
        said += f"; {coarse.evidence}, which is less" if coarse.evidence else ""
    elif coarse.evidence:
        noise, said = coarse.noise, coarse.evidence
    else:
        noise, said = Noise.exact(), "neighbouring questions have answers on a smooth curve up to rounding"
    if bends:
        said += f"; answers to single tokens are curved by {bends:.2g}, {beyond}: those of one head are not"
    return NoiseEstimate(noise, said)
