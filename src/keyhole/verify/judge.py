"""From answers to a verdict: radii, what would have been noticed, and which part explains a difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve
from scipy.special import chdtri, ndtri

from keyhole.arrays import Array, Floats
from keyhole.families import Family
from keyhole.families.base import Part, Sensitivity
from keyhole.queries import Signature
from keyhole.verify.verdict import Difference

# Probability of an alarm for an oracle that is the same, where errors of answers are random.
FALSE_ALARM = 1e-6
# Probability with which a change of the stated size goes unnoticed.
MISS = 1e-6
# First-order effects of changes within a tolerance are trusted up to this factor.
SECOND_ORDER = 1.25
# A part matters to an answer with this share of what the average part does to it, as a variance.
MATTERS = 0.25
# Directions that the bound on the miss probability is multiplied over, at most.
MOST_DIRECTIONS = 64
# Covariances of answers hold to first order; beyond this part of them they are not believed.
UNMODELLED = 1e-3
# Answers further off than this many times what is typical were moved beyond first order, and so was what changed more
# than this part of its size.
OUTLIER = 100.0
LINEAR = 0.1
# No answer may be off by more standard deviations than this of what a change of the named part explains.
DEVIATIONS = 8.0
# Sizes of a change that are tried, within a factor of e³ of what the typical answer says.
SIZES = 13
# The median of the absolute value of a standard normal number.
MEDIAN = 0.6745
# A part is named when no part of another head explains the answers nearly as well: odds of this many to one.
ODDS = 1e3
# Steps in which the changes of all parts are fitted together; each raises the likelihood.
CHANGE_STEPS = 200
# Parts that have changed by less than this times the most are not told from unchanged ones.
FAINT = 1e-6

# Rounding of an inner product by unknown arithmetic (another order, factors instead of their product, a fused kernel)
# over eps·|x|·|y|. One standard deviation is about a third; what is left is for products of factors, whose sizes do not
# show in the product and whose rounding is that of the parameters: four has been seen.
ARITHMETIC = 32.0


def sensitivity_of(params: Family, batches: Sequence[Floats], eps: float, looked_at: Array) -> Sensitivity:
    """The sensitivity of batches (n, length, width) as one, answered in arithmetic of relative spacing `eps`.

    Parts are for the outputs that `looked_at` numbers; those that no answer can show are left out.
    """
    found = [params.sensitivity(tokens, ARITHMETIC * eps, looked_at) for tokens in batches]
    parts = []
    for batches_of_part in zip(*(each.parts for each in found), strict=True):
        arrays: dict[str, Array] = {
            name: np.concatenate([getattr(part, name) for part in batches_of_part])
            for name in ("left", "right", "reach")
        }
        if np.any(arrays["reach"]):
            parts.append(replace(batches_of_part[0], **arrays))
    answers = np.concatenate([each.answers for each in found])
    return Sensitivity(answers, np.concatenate([each.rounding for each in found]), tuple(parts))


@dataclass(frozen=True)
class AnswerRadii:
    """How far answers may be off, and what follows."""

    known: Floats  # (queries, outputs): by rounding, and by what the tolerance allows
    radii: Floats  # (queries, outputs): with the noise
    false_alarm: float


def radii_of(seen: Sensitivity, signature: Signature, tolerance: float) -> AnswerRadii:
    """Rounding, declared noise, and what changes within the tolerance may do."""
    noise = signature.noise
    known = seen.rounding + noise.relative * np.abs(seen.answers)
    for part in seen.parts:
        known = known + SECOND_ORDER * tolerance * part.size * part.reach
    if noise.kind == "gaussian":
        deviations = -float(ndtri(FALSE_ALARM / 4 / known.size))  # half of the probability is for all together
        return AnswerRadii(known, known + deviations * noise.scale, FALSE_ALARM)
    return AnswerRadii(known, known + noise.radius, 0.0)


def has_scatter(errors: Floats, known: Floats, scale: float) -> bool:
    """Whether normal errors are too large all together, beyond what is known of the predictions."""
    beyond = np.maximum(np.abs(errors) - known, 0.0) / scale
    return bool(np.sum(beyond**2) > chdtri(errors.size, FALSE_ALARM / 2))


def resolution_of(part: Part, allowed: Floats) -> float:  # (rows,)
    """The smallest relative change of a part, in a random direction, that is noticed but for the miss probability.

    A change δ of normal entries moves the answers by normal numbers. One after the other, each given those before has
    the deviation r_i of a pivoted Cholesky factor, in units of what its radius hides, so it stays hidden with a
    probability of at most √(2/π)/r_i; the product over any number of them bounds the miss.
    """
    left = part.gram() / np.outer(allowed, allowed)
    own = np.diag(left).copy()
    most = min(MOST_DIRECTIONS, own.size)
    rows = np.zeros((most, own.size))
    best, total = np.inf, np.log(MISS)
    for count in range(1, most + 1):
        pivot = int(np.argmax(own))
        deviation = float(np.sqrt(max(own[pivot], 0.0)))
        if not (deviation > 0 and np.isfinite(deviation)):
            break
        known = rows[: count - 1]
        rows[count - 1] = (left[pivot] - known[:, pivot] @ known) / deviation
        own -= rows[count - 1] ** 2
        own[pivot] = 0.0
        total += np.log(deviation) - 0.5 * np.log(2 / np.pi)
        best = min(best, float(np.exp(-total / count)))
    if part.count <= own.size:  # more answers than numbers: no direction at all is hidden
        spectrum = np.linalg.eigvalsh(left)
        least = float(spectrum[-part.count])
        if least > own.size * np.finfo(np.float64).eps * spectrum[-1]:  # else it is rounding
            best = min(best, (own.size / (least * part.count)) ** 0.5)
    return best


def explain(seen: Sensitivity, errors: Floats, allowed: Floats) -> tuple[Difference, ...]:  # (rows,), (rows,)
    """The head, and if possible the part, whose change explains the errors, where no other head does.

    Under a random change of one part errors are normal with a known covariance, up to its size, which is fitted. The
    part of the largest likelihood is named unless a part of another head, or a change of everything, comes close.
    """
    parts = [part for part in seen.parts if np.any(part.left) and np.any(part.right)]
    if not parts or not np.any(np.abs(errors) > allowed):
        return ()
    kept = _straight(parts, errors, allowed)
    errors, allowed = errors[kept], allowed[kept]
    grams = [part.gram()[np.ix_(kept, kept)] for part in parts]
    scores = [_likelihood(gram, errors, allowed) for gram in grams]
    everything = _likelihood(np.sum(grams, axis=0), errors, allowed)
    best = max(range(len(parts)), key=lambda number: scores[number][0])
    most, size = scores[best]
    gap = np.log(ODDS)
    own = parts[best]
    if most < everything[0] - gap or not size <= LINEAR:
        return ()
    # Every single answer must be explained too, or something else has changed besides.
    reach = np.sqrt((DEVIATIONS * size) ** 2 * np.diag(grams[best]) + allowed**2)
    if np.any(np.abs(errors) > reach):
        return ()
    strangers = [
        score for part, (score, _) in zip(parts, scores, strict=True) if part.head != own.head or own.head is None
    ]
    siblings = [score for part, (score, _) in zip(parts, scores, strict=True) if part.head == own.head]
    if own.head is None:
        return (Difference(None, own.name, size),) if _stands_out(most, strangers, gap) else ()
    if any(score > most - gap for score in strangers):
        return ()
    return (Difference(own.head, own.name if _stands_out(most, siblings, gap) else None, size),)


def _straight(parts: list[Part], errors: Floats, allowed: Floats) -> npt.NDArray[np.intp]:
    """The answers that a change moves in proportion to its size: others are off by more than all the rest together."""
    powers = np.sum([part.powers() for part in parts], axis=0)
    ratios = np.abs(errors) / np.sqrt(np.maximum(powers, np.finfo(np.float64).tiny))
    typical = float(np.median(ratios[np.abs(errors) > allowed]))
    return np.flatnonzero(ratios <= OUTLIER * typical)


def _stands_out(best: float, scores: list[float], gap: float) -> bool:
    return sum(score > best - gap for score in scores) == 1


def _likelihood(covariance: Floats, errors: Floats, allowed: Floats) -> tuple[float, float]:
    """The largest log-likelihood over the size of the change, and a size that the typical answer speaks for."""
    power = np.diag(covariance)
    covariance = covariance + UNMODELLED**2 * np.diag(power + 1e-300)
    sizes = np.abs(errors) / np.sqrt(np.maximum(power, 1e-300))
    sizes = sizes[(power > 0) & (np.abs(errors) > allowed)]
    if not sizes.size:
        return -np.inf, float("nan")
    best, typical = -np.inf, float(np.median(sizes))
    for log_size in np.log(typical) + np.linspace(-3.0, 3.0, SIZES):
        whole = np.exp(2 * log_size) * covariance + np.diag((allowed / 3) ** 2)
        scale = np.sqrt(np.diag(whole))
        try:
            factor = cho_factor(whole / np.outer(scale, scale), lower=True, check_finite=False)
        except np.linalg.LinAlgError:
            continue
        unit = errors / scale
        value = -0.5 * float(unit @ cho_solve(factor, unit, check_finite=False))
        value -= float(np.sum(np.log(np.diag(factor[0]))) + np.sum(np.log(scale)))
        best = max(best, value)
    return best, typical / MEDIAN


def changes(seen: Sensitivity, errors: Floats, allowed: Floats) -> dict[str, float]:  # (rows,), (rows,)
    """About how much of each part has changed, relatively, where all of them may have: by part.

    Random changes of all parts make errors normal, with the sum of the parts' covariances. Their sizes are those of the
    largest likelihood, found by minorising it, where every step multiplies each by a positive number. It holds to first
    order: of a part that is another altogether it says only that.
    """
    parts = [part for part in seen.parts if np.any(part.powers())]
    powers = np.sum([part.powers() for part in parts], axis=0)
    shown = np.flatnonzero((powers > 0) & np.isfinite(errors)) if parts else np.zeros(0, np.intp)
    if not shown.size:
        return {}
    unit = np.sqrt(powers[shown])
    relative = errors[shown] / unit
    grams = np.stack([part.gram()[np.ix_(shown, shown)] / np.outer(unit, unit) for part in parts])
    rest = np.diag((allowed[shown] / 3 / unit) ** 2)
    typical = max(float(np.mean(relative**2)), np.finfo(np.float64).tiny)
    found = np.full(len(parts), typical)
    for _ in range(CHANGE_STEPS):
        floor = UNMODELLED**2 * typical * np.eye(shown.size)
        inverse = np.linalg.inv(np.tensordot(found, grams, 1) / typical + (rest + floor) / typical)
        weighed = inverse @ relative / typical**0.5
        explained = np.einsum("i,pij,j->p", weighed, grams, weighed)
        found = found * np.sqrt(explained / np.maximum(np.einsum("ij,pij->p", inverse, grams), 1e-300))
    sizes = np.sqrt(np.where(found > FAINT**2 * np.max(found), found, 0.0))
    return {part.label: float(size) for part, size in zip(parts, sizes, strict=True)}


def resolutions(
    seen: Sensitivity,
    allowed: Floats,  # (rows,) what radii hide of each looked-at answer
    hidden: Floats,  # (queries, outputs) the same of all answers
) -> tuple[dict[str, float], list[str]]:
    """For each part the smallest change that is noticed; and the parts that matter to some answer."""
    found = {part.label: resolution_of(part, allowed) for part in seen.parts}
    for part in seen.parts:
        if part.added:  # the largest entry of a change is at least an average one, and it shows as it is
            shown = float(np.max(np.min(hidden, axis=0))) * part.count**0.5 / part.size
            found[part.label] = min(found[part.label], shown)
    powers = {part.label: part.powers() for part in seen.parts}
    total = np.maximum(sum(powers.values()), np.finfo(np.float64).tiny)
    shares = {label: float(np.max(power / total)) for label, power in powers.items()}
    return found, [label for label, share in shares.items() if share >= MATTERS / len(shares)]
