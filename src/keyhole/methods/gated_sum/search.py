"""Gates and values of an unknown number of heads: many starts with more heads than needed, then as few as will do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Floats
from keyhole.methods.gated_sum.descent import descend
from keyhole.methods.gated_sum.model import GatedQueries, GatedSum
from keyhole.methods.gated_sum.polish import polish
from keyhole.methods.gated_sum.twins import has_twins, mirror_images

# Numbers of heads that are tried, in this order: one too many and more are what leads out of local minima.
SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16)
# Starts of each, steps of all of them, and steps of the best few.
STARTS, FIRST_STEPS, BEST, MORE_STEPS = 8, 25, 3, 100
# Random gates have logits of this root mean square.
LOGIT = 2.0
# Residuals below this may be those of two heads that are nearly alike, or of their mirror image.
TWINS_BELOW, MIRRORS = 1e-3, 2
# A start has arrived, over the size of the answers: below it only `polish` tells.
ARRIVED = 1e-7
# Heads this much alike, or this quiet beside the loudest, are one or none; tried from coarse to fine.
ALIKE = (0.3, 0.1, 0.03, 1e-2, 1e-3, 1e-4, 1e-5)
# Steps of a fit that had a head taken away.
REDUCED_STEPS = 40
# Heads that cancel round as what they add up does, which is taken for so many times the answers at most.
LOUDEST = 2.0**8
# Equations over unknowns at least: with fewer every answer is explained by any heads.
LEAST_EXCESS = 1.1


@dataclass(frozen=True)
class GatedFit:
    """The fewest heads found that explain the answers, or the best there were."""

    heads: GatedSum
    rms: float  # root mean square of the residual over its degrees of freedom
    explains: bool  # whether the residual is what errors of the answers make it


def loudness(queries: GatedQueries, heads: GatedSum) -> float:
    """Root mean square of what all heads together add up, weights aside, as far as it counts."""
    parts = np.abs(np.einsum("nd,hdp->nhp", queries.rows, heads.values))
    return min(float(np.sqrt(np.mean(np.sum(parts, axis=1) ** 2))), LOUDEST * queries.size)


@dataclass(frozen=True)
class _Errors:
    """Root mean squares of the errors of answers, and of their rounding over what is added up."""

    floor: float
    rounding: float

    def of(self, queries: GatedQueries, heads: GatedSum) -> float:
        """Of answers that such heads add up to."""
        return max(self.floor, self.rounding * loudness(queries, heads))


def fit_unknown(
    queries: GatedQueries,
    floor: float,  # root mean square of the errors of answers
    rng: np.random.Generator,
    sizes: tuple[int, ...] = SIZES,
    logit: float = LOGIT,  # about the root mean square of u·k
    rounding: float = 0.0,  # of answers, over what heads add up, where that may be more than the answers
) -> GatedFit:
    """Gates (H, width) and values (H, width, outputs) of as few heads as explain the answers up to their errors."""
    scale = float(np.sqrt(np.mean(queries.rows**2) * queries.rows.shape[1])) or 1.0
    size = queries.size or 1.0
    unit = replace(queries, rows=queries.rows / scale, answers=queries.answers / size)
    found = GatedFit(GatedSum(np.zeros((0, queries.rows.shape[1])), np.zeros((0, *_value_shape(queries)))), 1.0, False)
    for count in sizes:
        if queries.answers.size <= LEAST_EXCESS * (queries.answers.size - _freedom(unit, count)):
            break
        starts = logit * rng.standard_normal((STARTS, count, unit.rows.shape[1]))
        trial = _fit_count(
            unit, starts * 2.0 ** rng.uniform(-1, 1, (STARTS, count, 1)), found.heads, _Errors(floor / size, rounding)
        )
        found = trial if trial.explains or trial.rms < found.rms else found
        if found.explains:
            break
    heads = GatedSum(found.heads.gates / scale, found.heads.values * (size / scale))
    return replace(found, heads=heads, rms=found.rms * size)


def _value_shape(queries: GatedQueries) -> tuple[int, int]:
    return queries.rows.shape[1], queries.answers.shape[1]


def _freedom(queries: GatedQueries, count: int) -> int:
    """Equations beyond unknowns."""
    width, outputs = _value_shape(queries)
    return queries.answers.size - count * width * (1 + outputs)


def _fit_count(queries: GatedQueries, gates: Floats, before: GatedSum, errors: _Errors) -> GatedFit:
    """The best fit with as many heads as starts (starts, heads, width) have, or with fewer if these explain as much."""
    count = gates.shape[1]
    kept = min(before.heads, count)
    gates[: STARTS // 2, :kept] = before.gates[:kept]
    enough = max(errors.floor, ARRIVED)
    sums, rms = descend(queries, gates, FIRST_STEPS, enough)
    best = np.argsort(rms)[:BEST]
    sums, rms = descend(queries, sums.gates[best], MORE_STEPS, enough)
    ranked = np.argsort(rms)
    first = _polished(queries, sums.gates[ranked[0]], errors)
    if not first.explains and first.rms <= TWINS_BELOW and has_twins(first.heads):
        first = _mirrored(queries, first, errors)
    if rms[ranked[0]] > enough and not first.explains:
        return first
    return _fewest(queries, first, errors)


def _mirrored(queries: GatedQueries, found: GatedFit, errors: _Errors) -> GatedFit:
    """The fit further down its valley, or with its nearest two heads in place of their mirror image, if that is better.

    To first order in their distance δ two near heads add σ'·(u·δ)·(u·v) to one, in which δ and v may trade places.
    """
    found = _polished(queries, found.heads.gates, errors, valley=True)
    for _ in range(MIRRORS):
        if found.explains:
            break
        sums, rms = descend(queries, mirror_images(found.heads), REDUCED_STEPS, max(errors.floor, ARRIVED))
        trials = [_polished(queries, sums.gates[each], errors, valley=True) for each in np.argsort(rms)[:BEST]]
        trial = min(trials, key=lambda fit: fit.rms)
        if trial.rms > 0.5 * found.rms:
            break
        found = trial
    return found


def _polished(queries: GatedQueries, gates: Floats, errors: _Errors, *, valley: bool = False) -> GatedFit:
    heads, rms = polish(queries, gates, valley=valley)
    free = _freedom(queries, heads.heads)
    rms *= np.sqrt(queries.answers.size / max(free, 1))
    return GatedFit(heads, float(rms), bool(rms <= errors.of(queries, heads) * (1 + 4 / np.sqrt(2 * max(free, 1)))))


def _fewest(queries: GatedQueries, found: GatedFit, errors: _Errors) -> GatedFit:
    """Fewer heads that explain as much, as long as there are any."""
    while found.heads.heads > 1:
        for gates in reductions(found.heads):
            sums, rms = descend(queries, gates, REDUCED_STEPS, max(errors.floor, ARRIVED))
            trial = _polished(queries, sums.gates[np.argmin(rms)], errors)
            if trial.explains or (not found.explains and trial.rms < found.rms):
                found = trial
                break
        else:
            break
    return found


def reductions(heads: GatedSum) -> Iterator[Floats]:  # of (starts, fewer, width)
    """Gates of fewer heads: those alike as one and quiet ones left out, from coarse to fine, then each left out."""
    loud = np.linalg.norm(heads.values, axis=(1, 2))
    order = np.argsort(-loud)
    sizes = np.linalg.norm(heads.gates, axis=1)
    apart = np.linalg.norm(heads.gates[:, None] - heads.gates[None], axis=2) / np.maximum(sizes, 1.0)
    seen = {0, heads.heads}  # where nothing is loud, or not a number, no head is
    for alike in ALIKE:
        kept = list[int]()
        for head in order[loud[order] > alike * np.max(loud)]:
            if not np.any(apart[head, kept] <= alike):
                kept.append(int(head))
        if len(kept) not in seen:
            seen.add(len(kept))
            yield heads.gates[None, kept]
    yield np.stack([np.delete(heads.gates, head, axis=0) for head in range(heads.heads)])
