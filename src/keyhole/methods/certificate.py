"""Held-out queries: the certificate nobody can argue with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Generic

import numpy as np

from keyhole.arrays import Array, Floats, floats, to_numpy
from keyhole.errors import BudgetExhausted
from keyhole.families import F, F_co, Family
from keyhole.methods.base import Estimate, Steps
from keyhole.noise import GAUSSIAN_DEVIATIONS
from keyhole.queries import Measurements, Plan, Signature, Sketch, sequences
from keyhole.recovery import Certificate, Outcome

# Lengths of held-out sequences; how long tokens are, the family says.
LENGTHS = (1, 2, 3, 5, 8)
# The longest of them are in turn longer still: what sees a few last tokens only, or changes with the length, shows.
LONGER = (8, 16, 64, 32)
# Every so many queries have tokens as long as a logit stays known to this, or shorter by one of these: heads that
# cancel among short tokens, or whose scores were taken for zero, do not there.
LONG_EVERY, LONG_PARTS, KNOWN_LOGIT = 8, (1.0, 2.0, 4.0, 16.0), 1.0
# Held-out tokens have logits of about these sizes, from flat to nearly saturated attention, or (None) a norm that does
# not depend on what was recovered: a wrong recovery must not choose its own queries.
LOGIT_SIZES = (0.5, 2.0, 6.0, None)
# Without attention: norms over that of the kinks; far out every piece of a function is wide.
KINK_SIZES = (1.0, 30.0, 1000.0, None)
# A radius above this fraction of what attention does would certify anything; of an oracle known to be noisy less can
# be asked, and the resolution says how much it was.
COARSEST = 0.05
COARSEST_NOISY = 0.3
COARSEST_NET = 1e-4  # of exact answers without attention, which kinks are read from to many more digits
FLOAT32 = 2.0**-23
# Squared residuals behind normal errors may exceed what is expected by this many standard deviations.
SCATTER_DEVIATIONS = 5.0
# Behind noise every other query has tokens of strong and opposite values, so that attention shows.
LOUD_EVERY = 2


@dataclass(frozen=True)
class Judgement(Generic[F_co]):
    """A certificate and the outcome it amounts to."""

    outcome: Outcome
    message: str
    certificate: Certificate[F_co]


def certify(estimate: Estimate[F], signature: Signature, rng: np.random.Generator, count: int) -> Steps[Judgement[F]]:
    """Ask `count` held-out random sequences and compare the answers with predictions."""
    usual, long = heldout_plans(estimate, signature, rng, count)
    plans = usual + long
    answers: list[Measurements] = []
    for plan in plans:
        answer: Measurements = yield replace(plan, so_far=partial(_so_far, estimate, signature, plans, answers))
        answers.append(_at_last(answer, signature))
    # Normal errors are looked at all together too, and their standard errors say more than radii that hold for each.
    normal = signature.noise.kind == "gaussian" and estimate.standard_error is not None
    predictions, known = _predict(estimate, signature, plans, normal)
    # How fine radii are is told by usual tokens: among the long ones they are as wide as can be.
    fine = slice(predictions.size * sum(plan.count for plan in usual) // count)
    noise = signature.noise.radius + signature.noise.relative * np.abs(predictions)
    radii = known + noise
    if signature.noise.kind == "bounded":
        # Radii hold whatever the errors are, which may conspire; held-out queries do not know them, so what they see
        # of it is as random as they are.
        known = GAUSSIAN_DEVIATIONS * known
        radii = known + noise
    coarse = float(np.sqrt(np.mean(radii[fine] ** 2)))
    if normal:
        radii = np.hypot(GAUSSIAN_DEVIATIONS * known, noise)
        coarse = float(np.sqrt(np.mean(known**2) + signature.noise.scale**2 / known.size))
    answered = _concatenate([a.values for a in answers])
    errors = np.abs(predictions - answered)
    size = float(np.sqrt(np.mean((answered - _constant(estimate.params, plans))[fine] ** 2)))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(errors == 0, 0.0, errors / radii)
        resolution = coarse / size if size > 0 else float("inf")
        attention = _attention(estimate.params, signature, usual, predictions[fine])
        if attention > 0 or signature.max_norm is not None:
            resolution = max(resolution, coarse / attention if attention else float("inf"))
    certificate = Certificate(
        radius=estimate.radius,
        standard_error=estimate.standard_error,
        heldout_queries=count,
        worst_error=float(np.max(errors)),
        worst_ratio=float(np.max(ratios)),
        resolution=resolution,
        assumptions=estimate.assumptions,
        predictions=predictions,
        answers=answered,
    )
    scatters = normal and _has_scatter(errors, radii)
    if scatters or not np.max(ratios) <= 1.0:  # also when a radius is nan
        worst = int(np.argmax(np.where(np.isnan(ratios), np.inf, ratios)))
        bar = f"where the error bar is {radii[worst]:.2g}"
        miss = f"a fresh answer differs from its prediction by {errors[worst]:.2g}, {bar}"
        if scatters:
            times = np.sqrt(np.mean((errors * GAUSSIAN_DEVIATIONS / radii) ** 2))
            around = "around their predictions as the declared noise allows"
            miss = f"fresh answers scatter {times:.2g} times as much {around}"
        outcome, message = yield from _explain_miss(plans, answers, miss, signature)
    elif resolution > _coarsest(estimate.params, signature):
        doing = "the questions do" if estimate.params.without_attention() is None else "attention does"
        outcome, message = Outcome.UNCERTIFIED, f"the error bar is {resolution:.2g} of what {doing} to the answers"
    else:
        outcome = Outcome.CERTIFIED
        message = f"{count} fresh answers predicted within {certificate.worst_error:.2g}"
    return Judgement(outcome, message, certificate)


def _so_far(estimate: Estimate, signature: Signature, plans: list[Plan], answers: list[Measurements]) -> Sketch:
    """The estimate, and how far it is from the held-out answers that have come, for people who watch."""
    sketch = Sketch(estimate.params.matrices(), 1.0)
    if not answers:
        return sketch
    predictions, _ = _predict(estimate, signature, plans[: len(answers)], normal=False)
    errors = np.abs(predictions - _concatenate([answer.values for answer in answers]))
    return replace(sketch, heldout=[float(error) for error in errors])


def _coarsest(params: Family, signature: Signature) -> float:
    """The largest resolution that proves something."""
    if signature.noise.kind != "exact":
        return COARSEST_NOISY
    kinked = params.without_attention() is None and signature.space.spacing < FLOAT32
    return COARSEST_NET if kinked else COARSEST


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


def _at_last(answers: Measurements, signature: Signature) -> Measurements:
    """What was answered at the last position, which is what families predict."""
    return answers if signature.positions == "last" else replace(answers, values=answers.values[:, -1, ...])


def heldout_plans(
    estimate: Estimate, signature: Signature, rng: np.random.Generator, count: int
) -> tuple[list[Plan], list[Plan]]:
    """Random sequences of several lengths and sizes, `count` in all, a plan per length, those of long tokens apart."""
    space, params = signature.space, estimate.params
    lengths = _lengths(signature.max_length, count)
    sizes = KINK_SIZES if params.without_attention() is None else LOGIT_SIZES
    loudest = params.loudest() if signature.noise.kind != "exact" else None
    norms = [_norm(params, signature, sizes[number % len(sizes)]) for number in range(count)]
    longest = _longest_predictable(estimate, signature)
    far = [False] * count
    for place, number in enumerate(range(LONG_EVERY - 1, count, LONG_EVERY)):
        norm = longest / LONG_PARTS[place % len(LONG_PARTS)]
        if norm > norms[number]:
            norms[number], far[number] = norm, True
    plans: tuple[list[Plan], list[Plan]] = ([], [])
    kinds = list(zip(far, lengths, strict=True))
    for long, length in sorted(set(kinds)):
        scale = np.array([norm for norm, kind in zip(norms, kinds, strict=True) if kind == (long, length)])
        tokens = rng.standard_normal((scale.size, length, signature.width))
        if loudest is not None:
            signs = rng.choice([-1.0, 1.0], (scale.size, length, 1))
            signs[1::LOUD_EVERY] = 0.0
            tokens += signature.width**0.5 * signs * to_numpy(loudest)
        tokens /= np.linalg.norm(tokens, axis=-1, keepdims=True)
        tokens *= scale[:, None, None] * rng.uniform(0.5, 1.0, (scale.size, length, 1))
        if signature.max_norm is None:
            tokens[::2, -1, :] = params.onto_kinks(tokens[::2, -1, :], rng)
        plans[long].append(sequences("held-out", space.asarray(tokens)))
    return plans


def _lengths(most: int | None, count: int) -> list[int]:
    """Longer ones first: they see more of the oracle when only a few can be afforded."""
    limit = max(LONGER) if most is None else most
    usual = [length for length in LENGTHS if length <= limit]
    lengths = [usual[-1 - number % len(usual)] for number in range(count)]
    for place, number in enumerate(range(0, count, len(usual))):
        lengths[number] = max(usual[-1], min(LONGER[place % len(LONGER)], limit))
    return lengths


def _constant(params: Family, plans: list[Plan]) -> Floats | float:
    """What the answers are whatever the query: predicting that proves nothing."""
    constant = params.constant
    return 0.0 if constant is None else np.tile(np.ravel(floats(constant)), sum(plan.count for plan in plans))


def _attention(params: Family, signature: Signature, plans: list[Plan], predictions: Floats) -> float:
    """What attention contributes to the answers: radii as large as that say nothing of the score matrix."""
    without = params.without_attention()
    if without is None:
        return float("inf")
    tokens = [plan.tokens(0, plan.count, signature.space, signature.width) for plan in plans]
    flat = _concatenate([without(each) for each in tokens])
    return float(np.sqrt(np.mean((predictions - flat) ** 2)))


def _norm(params: Family, signature: Signature, logit_size: float | None) -> float:
    if logit_size is None:
        return float(min(1.0, signature.norm_limit))
    norm = params.token_norm(logit_size)
    return float(min(norm if np.isfinite(norm) else 1.0, signature.norm_limit, signature.space.huge**0.25))


def _longest_predictable(estimate: Estimate, signature: Signature) -> float:
    """The norm at which the radii of scores still leave logits known: attention that they miss shows there at last."""
    anatomy = estimate.radius.anatomy
    radii = [] if anatomy.behind else [head.score for head in anatomy.heads]
    if signature.noise.kind != "exact" or not radii:
        return 0.0
    widest = max(float(np.linalg.norm(to_numpy(radius).astype(np.float64))) for radius in radii)
    if not widest < np.inf:
        return 0.0
    if widest == 0:
        return float(min(signature.norm_limit, signature.space.huge**0.125))
    # Random tokens of norm n make of a matrix a number of about n² times its norm over the width.
    return float(min((KNOWN_LOGIT * signature.width / widest) ** 0.5, signature.norm_limit, signature.space.huge**0.25))


def _predict(estimate: Estimate, signature: Signature, plans: list[Plan], normal: bool) -> tuple[Floats, Floats]:
    """Predictions, and what they are off by: radii, or standard errors where errors are normal."""
    predictions, radii = [], []
    errors = estimate.standard_error if normal and estimate.standard_error is not None else estimate.radius
    for plan in plans:
        tokens = plan.tokens(0, plan.count, signature.space, signature.width)
        predictions.append(estimate.params(tokens))
        radii.append(estimate.params.error_bar(errors, tokens, signature.space.rounding))
    return _concatenate(predictions), _concatenate(radii)


def _concatenate(arrays: list[Array]) -> Floats:
    return np.concatenate([np.ravel(to_numpy(array)).astype(np.float64) for array in arrays])
