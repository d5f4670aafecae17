"""The certificate: an estimate is judged by fresh answers, their radii, and how much these queries tell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic

import numpy as np
from scipy.special import bdtrc, bdtri

from keyhole.arrays import FLOAT32, Array, Booleans, Floats, floats, namespace
from keyhole.errors import BudgetExhausted
from keyhole.families import F, F_co, Family
from keyhole.methods.base import Estimate, Steps
from keyhole.methods.batches import apart, in_batches
from keyhole.methods.explanation import has_explanation
from keyhole.methods.heldout import HeldOut, draw_heldout, elsewhere, prediction_radii
from keyhole.noise import GAUSSIAN_DEVIATIONS
from keyhole.numerics.domain import LONGEST, Sampler, class_label, length_class
from keyhole.queries import Measurements, Plan, Signature, Sketch
from keyhole.recovery import Certificate, Outcome, Tested, typical_error

# Held-out queries over those of the recovery, the fewest and the most: 120 leave 2.5 % of such queries unsaid, 256
# leave 1.2 %.
SHARE, LEAST, MOST = 0.025, 120, 256
LABELS = 2  # times as many are asked of labels, as far as MOST: one tells a box from another on one side of it only

# A radius above this fraction of what attention does would certify anything; of an oracle known to be noisy less can
# be asked, and the resolution says how much it was.
COARSEST = 0.05
COARSEST_NOISY = 0.3
COARSEST_FLOAT32 = 0.1  # of answers of few digits; long sequences, of which attention makes less, are among the queries
COARSEST_NET = 1e-4  # of exact answers without attention, which kinks are read from to many more digits
UNDERFLOW = 2.0**-1068  # numbers of this size have few digits
# The part of usual queries that may be ties of large logits, of which no score matrix that has radii says much.
TIES = 1 / 20
# Squared residuals behind normal errors may exceed what is expected by this many standard deviations.
SCATTER_DEVIATIONS = 5.0
# Behind a tolerance, parameters that are all off by their radii leave a mean square of one, over radii of predictions,
# and constant errors a fifth. More than half is taken for another family.
MOST_BEYOND = 0.5
# What is said of held-out queries is said at this confidence.
CONFIDENCE = 0.95
# Where answers at all positions are seen, those at so many besides the last are compared, in a sequence of more tokens
# than that: the first, the one before the last, and others at random.
PLACES = 4
# Wrong labels may be as many as this chance allows.
FLIPS_CHANCE = 1e-6
# Untested parts that a message names before it counts.
FEW_NAMES = 3


@dataclass(frozen=True)
class Judgement(Generic[F_co]):
    """A certificate and the outcome it amounts to."""

    outcome: Outcome
    message: str
    certificate: Certificate[F_co]
    refuted: Floats | None = None  # (n, width) single tokens that are not answered as predicted, as far as it is known


@dataclass(frozen=True)
class Comparison:
    """Held-out answers beside their predictions, one number after the other."""

    predictions: Floats
    answers: Floats
    radii: Floats
    resolution: float  # radii over what the answers vary by, and over what attention does to them
    scatters: bool  # whether normal errors, each within its radius, are too large together
    beyond: bool = False  # whether too many errors behind a tolerance are larger than one radius
    unexplained: bool = False  # whether no parameters within their radii explain all answers at once
    widening: float = 1.0  # by which radii of parameters are widened, so that those of predictions hold
    labels: bool = False  # whether answers are labels
    wrong: int = 0  # labels that are not as predicted, where some may be wrong

    @property
    def errors(self) -> Floats:
        """|prediction − answer|."""
        return np.abs(self.predictions - self.answers)

    @property
    def ratios(self) -> Floats:
        """Errors over their radii."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.errors == 0, 0.0, self.errors / self.radii)

    @property
    def typical_error(self) -> float:
        """The median of errors over the size of their answer."""
        return typical_error(self.predictions, self.answers)

    @property
    def holds(self) -> bool:
        """Whether every answer was predicted within its radius; not so where a radius is nan."""
        return not (self.scatters or self.beyond or self.unexplained) and bool(np.max(self.ratios) <= 1.0)

    @property
    def miss(self) -> str:
        """What the worst answer is off by."""
        if self.labels and self.scatters:
            return f"{self.wrong} of {self.answers.size} fresh labels are not as predicted, more than may be wrong"
        if self.scatters:
            times = np.sqrt(np.mean((self.errors * GAUSSIAN_DEVIATIONS / self.radii) ** 2))
            around = "around their predictions as the declared noise allows"
            return f"fresh answers scatter {times:.2g} times as much {around}"
        if self.beyond and np.max(self.ratios) <= 1.0:
            return "too many fresh answers differ from their predictions by more than radii and the tolerance explain"
        if self.unexplained:
            return (
                "fresh answers differ from predictions by less than radii, but no parameters within theirs explain all"
            )
        worst = int(np.argmax(np.where(np.isnan(self.ratios), np.inf, self.ratios)))
        if self.labels:
            told, expected = (f"{each[worst]:g}" for each in (self.answers, self.predictions))
            return f"a fresh label is {told} where {expected} was predicted beyond doubt"
        bar = f"where the error bar is {self.radii[worst]:.2g}"
        return f"a fresh answer differs from its prediction by {self.errors[worst]:.2g}, {bar}"


def certify(
    estimate: Estimate[F],
    signature: Signature,
    rng: np.random.Generator,
    count: int,
    domain: Sampler | None = None,
) -> Steps[Judgement[F]]:
    """Ask `count` held-out sequences, and as many of `domain`, and compare the answers with predictions."""
    asked = draw_heldout(estimate, signature, rng, count, domain)
    answers: list[Measurements] = []
    everywhere: list[Measurements] = []
    half = len(asked.plans) // 2
    for plans in filter(None, (asked.plans[:half], asked.plans[half:])):  # who watches sees how it goes
        so_far = partial(_so_far, estimate, asked, list(answers))
        replies: list[Measurements] = yield [replace(plan, so_far=so_far) for plan in plans]
        everywhere += replies
        answers = [_at_last(reply, signature) for reply in everywhere]
    compared = _compare_at_last(estimate, signature, asked, _concatenate([answer.values for answer in answers]))
    # Families predict what the last token is answered: so any token is, among all of them or those up to it.
    others = _compare_elsewhere(estimate, signature, asked, everywhere, rng) if compared.holds else None
    estimate = _widen(estimate, max(compared.widening, others.widening if others is not None else 1.0))
    certificate = Certificate(
        radius=estimate.radius,
        standard_error=estimate.standard_error,
        heldout_queries=int(asked.usual.size),
        worst_error=float(np.max(compared.errors)),
        worst_ratio=float(np.max(compared.ratios)),
        resolution=compared.resolution,
        assumptions=(*estimate.assumptions, _limits(signature)),
        tested=tuple(_tested(asked, signature, compared)),
        untested=asked.untested,
        predictions=compared.predictions,
        answers=compared.answers,
    )
    refuted: Floats | None = None
    if not compared.holds:
        refuted = _refuted(estimate.params, signature, asked, compared)
        outcome, message = yield from _explain_miss(asked.plans, answers, compared.miss, signature)
    elif others is not None and not others.holds:
        outcome = Outcome.UNCERTIFIED
        message = "answers at the last position are as predicted, but not at others, whether these see all tokens or "
        message += f"those before them: {others.miss}; read the last position (positions='last')"
    elif compared.resolution > _coarsest(estimate.params, signature):
        doing = "the questions do" if estimate.params.without_attention() is None else "attention does"
        message = f"the error bar is {compared.resolution:.2g} of what {doing} to the answers"
        if compared.resolution == float("inf") and signature.max_norm is not None:
            message = f"what {doing} to the answers shows for no tokens that are allowed: allow longer ones (max_norm)"
        outcome = Outcome.UNCERTIFIED
    elif asked.untested:
        few = ", ".join(asked.untested[:FEW_NAMES])
        more = f" and {len(asked.untested) - FEW_NAMES} more" if len(asked.untested) > FEW_NAMES else ""
        outcome, message = Outcome.UNCERTIFIED, f"held-out queries say too little of {few}{more}: raise heldout="
    else:
        outcome = Outcome.CERTIFIED
        message = f"{asked.usual.size} fresh answers predicted within their error bars, half of them "
        message += f"to {compared.typical_error:.1g} of their size" if compared.typical_error else "exactly"
        if compared.labels:
            but = f", but for {compared.wrong} that are wrong" if compared.wrong else ""
            message = f"{asked.usual.size} fresh labels predicted{but}"
    return Judgement(outcome, message, certificate, refuted)


def _compare_at_last(estimate: Estimate, signature: Signature, asked: HeldOut, answers: Floats) -> Comparison:
    """The comparison, and whether parameters within their radii explain all answers where each alone is predicted."""
    compared = _compare(estimate, signature, asked, answers)
    alone = compared.holds and not compared.labels
    return replace(compared, unexplained=alone and not has_explanation(estimate, signature, asked, answers))


def _compare_elsewhere(
    estimate: Estimate, signature: Signature, asked: HeldOut, answers: list[Measurements], rng: np.random.Generator
) -> Comparison | None:
    """The comparison at other positions than the last, where these are seen: as they see all tokens, or are causal."""
    if signature.positions == "last" or all(plan.length == 1 for plan in asked.plans):
        return None
    places = [_places(plan.length, rng) for plan in asked.plans]
    seen = _concatenate(
        [each.values[:, place, ...] for each, own in zip(answers, places, strict=True) for place in own]
    )
    whole = _compare(estimate, signature, elsewhere(asked, places, estimate, signature, causal=False), seen)
    if whole.holds:
        return whole
    causal = _compare(estimate, signature, elsewhere(asked, places, estimate, signature, causal=True), seen)
    return min(causal, whole, key=lambda each: (not each.holds, float(np.sum(~(each.ratios <= 1.0)))))


def _places(length: int, rng: np.random.Generator) -> list[int]:
    """Some positions before the last."""
    if length <= PLACES:
        return list(range(length - 1))
    return [0, length - 2, *map(int, rng.choice(np.arange(1, length - 2), PLACES - 2, replace=False))]


def coarseness(estimate: Estimate, signature: Signature, rng: np.random.Generator) -> float:
    """The resolution that a certificate would have, over the largest that proves something; no queries.

    It is judged by held-out queries that answer what they are predicted to; infinite where they say too little of a
    part. A method that may go on asks by it whether it should.
    """
    asked = draw_heldout(estimate, signature, rng, LEAST)
    return float("inf") if asked.untested else coarseness_of(estimate, signature, asked)


def coarseness_of(estimate: Estimate, signature: Signature, asked: HeldOut) -> float:
    """The same, judged by these held-out queries."""
    compared = _compare(estimate, signature, asked, asked.predictions)
    return compared.resolution / _coarsest(estimate.params, signature)


def _compare(estimate: Estimate, signature: Signature, asked: HeldOut, answers: Floats) -> Comparison:
    # Normal errors are looked at all together too, and their standard errors say more than radii that hold for each.
    normal = signature.noise.kind == "gaussian" and estimate.standard_error is not None
    predictions, known = asked.predictions, asked.known
    if estimate.params.tells_labels:  # where the label is not sure, none is predicted
        predictions, known = np.where(known > 0, answers, predictions), 0 * known
    fine = np.repeat(_fine(asked, signature), predictions.size // asked.usual.size)
    noise = signature.noise.radius + signature.noise.smallest + signature.noise.relative * np.abs(predictions)
    # A weight below the smallest normal number may be zero in the oracle's arithmetic, whatever value it is for.
    noise = noise + signature.space.tiny * float(np.max(np.abs(predictions), initial=0.0)) + UNDERFLOW
    noise *= 1 + signature.space.eps  # a bound, too, is met as the dtype has it
    beyond, widening = False, 1.0
    if signature.noise.kind == "bounded" or signature.noise.is_cut:
        # Radii hold whatever the errors are, which may conspire; held-out queries do not know them, so what they see
        # of it is as random as they are: single ones are off by several radii, all together by less than one.
        with np.errstate(divide="ignore", invalid="ignore"):
            excess = np.maximum(np.abs(predictions - answers) - noise, 0.0) / known
        beyond = bool(np.nanmean(np.minimum(excess, GAUSSIAN_DEVIATIONS) ** 2) > MOST_BEYOND)
        # A sum of n terms is at most √n times their quadrature. Where errors conspire so anywhere, radii say it: among
        # few held-out queries the worst is seldom met.
        most = min(GAUSSIAN_DEVIATIONS, (signature.width * (signature.width + 1)) ** 0.5)
        widening = most if np.nanmax(excess, initial=0.0) > 1.0 else 1.0
        known = most * known
    radii = np.hypot(GAUSSIAN_DEVIATIONS * known, noise) if normal else known + noise
    changes = answers - _constant(estimate.params, asked.plans)
    attention = _attention(estimate.params, signature, asked, fine)
    if estimate.params.anatomy.net is not None and (attention == 0 or _rms(changes[fine]) <= _rms(radii[fine])):
        # Neurons are off at the usual tokens, or these lie on their kinks.
        shows = np.repeat(asked.informative, fine.size // asked.usual.size)
        fine = shows if np.any(shows) else fine
        attention = _attention(estimate.params, signature, asked, fine)
    coarse, size = _rms(radii[fine]), _rms(changes[fine])
    if normal:
        coarse = float(np.sqrt(np.mean(known[fine] ** 2) + signature.noise.scale**2 / known.size))
    if attention > 0 or signature.max_norm is not None:
        size = min(size, attention)
    if not normal and coarse > _coarsest(estimate.params, signature) * size:
        coarse = _rms(_without_ties(radii[fine].reshape(-1, predictions.size // asked.usual.size)))
    resolution = coarse / size if size > 0 else float("inf")
    if estimate.params.tells_labels:
        resolution = _resolution_of_numbers(estimate, signature, asked, fine)
    scatters = normal and _has_scatter(np.abs(predictions - answers), radii)
    labels = estimate.params.tells_labels
    compared = Comparison(predictions, answers, radii, resolution, scatters, beyond, widening=widening, labels=labels)
    return _allow_flips(compared, signature.noise.scale) if signature.noise.kind == "flipped" else compared


def _rms(values: Floats) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _without_ties(radii: Floats) -> Floats:  # (queries, outputs) -> fewer queries
    """The radii of all but a few queries: two tokens that weigh alike leave next to nothing known of an answer."""
    order = np.argsort(np.max(radii, axis=1))
    return radii[order[: len(radii) - int(TIES * len(radii))]]


def _widen(estimate: Estimate[F], times: float) -> Estimate[F]:
    """The estimate with radii so many times as wide."""
    if times == 1.0:
        return estimate
    radii = {name: times * array for name, array in estimate.radius.arrays().items()}
    return replace(estimate, radius=estimate.radius.with_arrays(radii))


def _fine(asked: HeldOut, signature: Signature) -> Booleans:  # (queries,)
    """The queries that tell how fine radii are: usual ones, as among long tokens radii are as wide as can be.

    Where none of these shows attention (single tokens, those so short that a net behind is flat, repeated ones), those
    that inform.
    """
    several = asked.lengths > 1
    shows = np.asarray(asked.informative & several)
    seen = asked.usual & (shows if signature.noise.kind == "exact" else several)
    if np.any(shows) and not np.any(seen & shows):
        return shows
    return asked.usual if np.any(asked.usual) else ~asked.usual


def _resolution_of_numbers(estimate: Estimate, signature: Signature, asked: HeldOut, fine: Booleans) -> float:
    """Median radius of the numbers behind labels over what attention does to them."""
    params, radius = estimate.params.numbers(), estimate.radius.numbers()
    tokens = [plan.tokens(0, plan.count, signature.space, signature.width) for plan in asked.plans]
    outputs = params.outputs or 1
    known = _concatenate([prediction_radii(params, radius, each, signature) for each in tokens]).reshape(-1, outputs)
    wide = np.repeat(fine, outputs)
    attention = _attention(params, signature, asked, wide)
    if not attention < float("inf"):
        return 0.0
    if attention == 0 and signature.max_norm is None:  # there is none at tokens of any norm
        attention = float(np.sqrt(np.mean(_concatenate([params(each) for each in tokens])[wide] ** 2)))
    return float(np.median(known[fine])) / attention if attention > 0 else float("inf")


def _allow_flips(compared: Comparison, rate: float) -> Comparison:
    """The comparison where some labels are wrong: as many as that may be count as predicted."""
    wrong = compared.ratios > 1
    sure, count = wrong.size, int(np.sum(wrong))
    scatters = count > 0 and bool(bdtrc(count - 1, sure, rate) < FLIPS_CHANCE)
    return replace(compared, radii=np.where(wrong, compared.errors, compared.radii), scatters=scatters, wrong=count)


def heldout_count(wanted: int | None, queries: float, labels: bool = False) -> int:
    """Held-out queries for a recovery of so many: as many as are wanted, else a share of them."""
    times = LABELS if labels else 1
    return int(min(times * max(LEAST, np.ceil(SHARE * queries)), MOST)) if wanted is None else wanted


def _tested(asked: HeldOut, signature: Signature, compared: Comparison) -> Iterator[Tested]:
    """What the held-out queries say, all together, by length, and of a user's own inputs."""
    own = ~asked.domain
    rate = signature.noise.scale if signature.noise.kind == "flipped" else 0.0
    tested_of = partial(_tested_of, asked=asked, compared=compared, rate=rate)
    yield tested_of("all", own)
    classes = np.array([length_class(int(length)) for length in asked.lengths])
    for number in range(length_class(signature.max_length or LONGEST) + 1):
        yield tested_of(class_label(int(number), signature.max_length), own & (classes == number))
    if np.any(asked.domain):
        yield tested_of("domain", asked.domain)


def _tested_of(label: str, some: Booleans, asked: HeldOut, compared: Comparison, rate: float) -> Tested:
    """Queries and informative ones; the bound is exact: a share x of misses passes n queries with (1 − x)^n.

    Of labels that are wrong at a rate q a share q + x·(1 − 2q) is not as predicted.
    """
    chosen = some & (asked.informative | asked.domain)
    informative = int(np.sum(chosen))
    bound = 1.0 - (1.0 - CONFIDENCE) ** (1.0 / informative) if informative else 1.0
    if rate and informative:
        missed = int(np.sum(compared.errors[chosen] > 0))
        most = float(bdtri(missed, informative, 1.0 - CONFIDENCE)) if missed < informative else 1.0
        bound = min(max((most - rate) / (1 - 2 * rate), 0.0), 1.0)
    return Tested(label, int(np.sum(some)), informative, bound, compared.labels)


def _limits(signature: Signature) -> str:
    """What no sample of queries can rule out."""
    longest = min(LONGEST, signature.max_length or LONGEST)
    return (
        f"the oracle behaves alike on inputs that no sample meets: a trapdoor, or sequences of more than {longest} "
        "tokens, are out of reach of any held-out query"
    )


def _so_far(estimate: Estimate, asked: HeldOut, answers: list[Measurements]) -> Sketch:
    """The estimate, and how far it is from the held-out answers that have come, for people who watch."""
    sketch = Sketch(estimate.params.anatomy.matrices(), 1.0)
    if not answers:
        return sketch
    came = _concatenate([answer.values for answer in answers])
    return replace(sketch, heldout=[float(error) for error in np.abs(asked.predictions[: came.size] - came)])


def _coarsest(params: Family, signature: Signature) -> float:
    """The largest resolution that proves something."""
    if signature.noise.kind != "exact":
        return COARSEST_NOISY
    if signature.space.spacing >= FLOAT32:
        return COARSEST_FLOAT32
    return COARSEST_NET if params.without_attention() is None else COARSEST


def _has_scatter(errors: Floats, radii: Floats | float) -> bool:
    """Whether errors within their radii, each for itself, are too large together to be normal."""
    squares = (errors * GAUSSIAN_DEVIATIONS / radii) ** 2
    return bool(np.sum(squares) > squares.size + SCATTER_DEVIATIONS * np.sqrt(2 * squares.size))


def _explain_miss(
    plans: list[Plan], answers: list[Measurements], miss: str, signature: Signature
) -> Steps[tuple[Outcome, str]]:
    """Ask the same queries again: an oracle that contradicts itself is not of another family."""
    miss = f"{miss}: the box is not of the assumed family"
    try:
        again: list[Measurements] = yield [replace(plan, first_repeat=1) for plan in plans]
    except BudgetExhausted:
        return Outcome.WRONG_FAMILY, miss
    again = [_at_last(answer, signature) for answer in again]
    first, second = _concatenate([a.values for a in answers]), _concatenate([a.values for a in again])
    difference = float(np.max(np.abs(first - second)))
    if signature.noise.kind == "flipped":
        rate, changed = 2 * signature.noise.scale * (1 - signature.noise.scale), int(np.sum(first != second))
        if changed and bdtrc(changed - 1, first.size, rate) < FLIPS_CHANCE:
            said = (
                f"{changed} of {first.size} labels were others when asked again, more than the declared rate explains"
            )
            return Outcome.INCONSISTENT, said
        return Outcome.WRONG_FAMILY, miss
    if signature.noise.kind == "gaussian" and _has_scatter(np.abs(first - second), 2**0.5 * signature.noise.radius):
        times = np.sqrt(np.mean((first - second) ** 2) / 2) / signature.noise.scale
        return (
            Outcome.INCONSISTENT,
            f"the same questions asked twice were answered {times:.2g} times as far apart as the declared noise says",
        )
    relative = 64 * signature.space.eps + 4 * signature.noise.relative
    allowed = 4 * signature.noise.radius + relative * float(np.max(np.abs(first)))
    if difference > allowed:
        return (Outcome.INCONSISTENT, f"the same questions asked twice gave answers that differ by {difference:.2g}")
    return Outcome.WRONG_FAMILY, miss


def _refuted(params: Family, signature: Signature, asked: HeldOut, compared: Comparison) -> Floats | None:
    """The single tokens for which sequences count that are not answered as predicted; None where that is not known."""
    wrong = np.any(~(compared.ratios <= 1.0).reshape(asked.usual.size, -1), axis=1)
    if compared.labels:  # those of classes that were not known
        wrong &= ~np.isin(compared.answers, params.label_names)
    places, first = [], 0
    for plan in asked.plans:
        tokens = params.as_single_tokens(plan.tokens(0, plan.count, signature.space, signature.width))
        if tokens is None:
            return None
        places.append(floats(tokens)[wrong[first : first + plan.count]])
        first += plan.count
    return np.concatenate(places)


def _at_last(answers: Measurements, signature: Signature) -> Measurements:
    """What was answered at the last position, which is what families predict."""
    return answers if signature.positions == "last" else replace(answers, values=answers.values[:, -1, ...])


def _constant(params: Family, plans: list[Plan]) -> Floats | float:
    """What the answers are whatever the query: predicting that proves nothing."""
    constant = params.constant
    return 0.0 if constant is None else np.tile(np.ravel(floats(constant)), sum(plan.count for plan in plans))


def _attention(params: Family, signature: Signature, asked: HeldOut, fine: Booleans) -> float:
    """What attention contributes to the answers: radii as large as that say nothing of the score matrix."""
    moved = np.zeros((len(asked.tokens), params.outputs or 1))
    (some,) = np.nonzero(np.any(fine.reshape(len(moved), -1), axis=1))
    for batch in in_batches(params, apart(asked.tokens, some), signature.space):
        without = batch.params.without_attention()
        if without is None:
            return float("inf")
        # In the same batches, so that rounding is the same: what has no attention makes no difference at all.
        difference = batch.params(batch.tokens) - without(batch.tokens)
        moved[batch.places] = floats(difference).reshape(len(batch.places), -1)
    return float(np.sqrt(np.mean(np.ravel(moved)[fine] ** 2)))


def _concatenate(arrays: list[Array]) -> Floats:
    """All numbers; those of a device are brought together there."""
    xp = namespace(arrays[0])
    return floats(xp.concat([xp.reshape(array, (-1,)) for array in arrays]))
