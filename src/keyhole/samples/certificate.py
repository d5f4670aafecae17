"""Judging a fit by examples that were held back from it."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import ndtri

from keyhole.arrays import Floats
from keyhole.families.attention_layer import AttentionLayer
from keyhole.recovery import Certificate, Outcome, times
from keyhole.samples.examples import ExampleCount, Examples
from keyhole.samples.standard_errors import StandardErrors, standard_errors
from keyhole.samples.variable_projection import LayerPoint, LayerProblem, mixture
from keyhole.samples.varpro import ASSUMPTIONS, VarproFit

# Rounding errors are neither normal nor independent: radii are this much wider than if they were.
ROUNDING_SAFETY = 48.0
# Units of spacing that one output may be off by, times one plus the size of logits, over what the heads add up to.
ROUNDING_UNITS = 64.0
# Chance that any of the radii for normal errors is exceeded.
CHANCE = 1e-4
# Radii follow errors to first order; the rest is within this factor. Pooled ones stand for unequal entries.
CURVED, POOLED = 1.5, 3.0
# A result is certified only if bars of predictions are within this part of what attention does, and standard errors of
# scores within this part of their size.
RESOLVED = 0.3
# Attention is saturated where scores this much larger change no output.
SHARPER = 1.5
# Radii within which logits change by less than this, root mean square, are believed to cover that.
FIRST_ORDER = 5.0
# Repeated inputs must have at least so many degrees of freedom to tell the noise.
ENOUGH_REPEATS = 30


def judge(
    fitted: VarproFit,
    count: ExampleCount,
    heldout: Examples,
    noise: float,  # standard deviation of labels, declared or estimated; 0: exact
    trusted: bool,  # the noise was declared, or shown by repeated inputs
    rng: np.random.Generator,
) -> tuple[Outcome, str, Certificate, dict[str, Any]]:
    """Whether held-out outputs lie within the radii of their predictions: outcome, message, certificate, details."""
    point = fitted.point
    unit_errors = standard_errors(point, rng)
    exact = noise == 0.0
    scale = np.abs(point.mixed) @ np.abs(point.stacked)  # (rows, d_out)
    label_error = max(_rms(point.residual), 4 * heldout.eps * _rms(scale)) if exact else noise
    radius, standard_error = _radii(point, unit_errors, label_error, exact, count.parameters)
    layer = AttentionLayer(point.scores, point.projections)
    rest = heldout.problem()
    predictions = layer(heldout.inputs).reshape(rest.rows, -1)
    errors = np.abs(predictions - rest.labels)
    own, bars = _bars(point, rest, label_error, exact, count, heldout.eps)
    effect = _rms(rest.labels) if exact else _effect_of_attention(rest)
    resolution = _rms(own) / effect if effect > 0 else float("inf")
    worst = float(np.max(errors / bars))
    certificate = Certificate(
        radius=radius,
        standard_error=standard_error,
        heldout_queries=heldout.count,
        worst_error=float(np.max(errors)),
        worst_ratio=worst,
        resolution=resolution,
        assumptions=ASSUMPTIONS,
        predictions=predictions.reshape(-1),
        answers=rest.labels.reshape(-1),
    )
    details = {"heldout_error": _rms(errors), "error_bars": "entrywise" if unit_errors.entrywise else "pooled per head"}
    said = f"{heldout.count} held-out examples predicted within their error bars"
    loose = any(
        label_error * _rms(error) > RESOLVED * max(_rms(score), np.finfo(float).tiny)
        for error, score in zip(unit_errors.scores, point.scores, strict=True)
    )
    if worst > 1:
        outcome = Outcome.WRONG_FAMILY if count.good else Outcome.TOO_FEW_EXAMPLES
        said = f"a held-out output differs from its prediction by {times(worst)} what the error bar allows"
    elif not unit_errors.determined:
        outcome = Outcome.NOT_IDENTIFIABLE
        said += ", but the examples leave some direction of the parameters free: heads too many, or inputs too alike"
    elif (free := _saturated_head(layer, radius, heldout, bars, exact=exact)) is not None:
        outcome = Outcome.NOT_IDENTIFIABLE
        said += (
            f", but on these inputs head {free} attends so sharply that scores {SHARPER:g} times as large would give "
            "the same outputs: how large they are cannot be known from such inputs"
        )
    elif not trusted:
        outcome = Outcome.UNCERTIFIED
        said += (
            f", but the noise of {noise:.2g} is only what the fit leaves over: no examples of equal inputs confirm it, "
            "and what no fit explains looks like noise too. Declare it, noise=Noise.gaussian(scale)"
        )
    elif resolution > RESOLVED or (loose and not exact):
        outcome = Outcome.UNCERTIFIED
        said += ", but the error bars are as large as what attention does to the outputs: more examples or less noise"
    else:
        outcome = Outcome.CERTIFIED
    return outcome, said, certificate, details


def _saturated_head(
    layer: AttentionLayer, radius: AttentionLayer, heldout: Examples, bars: Floats, *, exact: bool
) -> int | None:
    """A head whose scores could be larger, beyond their radii, without a held-out output that shows it.

    Radii of many logits are no answer to that: they follow errors to first order, and this is far from it.
    """
    answers = layer(heldout.inputs).reshape(bars.shape)
    square = float(np.mean(heldout.inputs**2))
    for head in range(layer.heads):
        within = np.all((SHARPER - 1) * np.abs(layer.scores[head]) <= radius.scores[head])
        if within and square * np.linalg.norm(radius.scores[head]) <= FIRST_ORDER:
            continue
        scores = np.array(layer.scores)
        scores[head] *= SHARPER
        moved = AttentionLayer(scores, layer.projections)(heldout.inputs).reshape(bars.shape)
        shown = np.abs(moved - answers) / bars
        # Rounding adds up against us; independent errors do not, and what all outputs show together counts.
        if (np.max(shown) if exact else np.linalg.norm(shown)) <= 1:
            return head
    return None


def _radii(
    point: LayerPoint, unit_errors: StandardErrors, label_error: float, exact: bool, parameters: int
) -> tuple[AttentionLayer, AttentionLayer | None]:
    errors = [label_error * each for each in (unit_errors.scores, unit_errors.projections)]
    if exact:
        # What the descent left undone lies in the flattest directions: by its norm it is within unsettled·error.
        pooling = 1.0 if unit_errors.entrywise else POOLED
        wide = pooling * (ROUNDING_SAFETY + CURVED * unit_errors.unsettled / label_error)
        tiny = ROUNDING_UNITS * np.finfo(float).eps
        sizes = [np.max(np.abs(each)) for each in (point.scores, point.projections)]
        return AttentionLayer(*(wide * each + tiny * size for each, size in zip(errors, sizes, strict=True))), None
    wide = -CURVED * float(ndtri(CHANCE / (2 * parameters))) * (1.0 if unit_errors.entrywise else POOLED)
    return AttentionLayer(*(wide * each for each in errors)), AttentionLayer(*errors)


def _bars(
    point: LayerPoint, rest: LayerProblem, label_error: float, exact: bool, count: ExampleCount, eps: float
) -> tuple[Floats, Floats]:  # (rows, d_out) each: of the predictions, and with the errors of labels
    weights = rest.weights(point.scores)
    logits = np.max(np.abs(np.log(np.maximum(weights, np.finfo(float).tiny))))
    mixed = mixture(rest.inputs, weights).reshape(rest.rows, point.scores.shape[0], -1)
    sizes = sum(np.abs(mixed[:, i]) @ np.abs(point.projections[i]) for i in range(point.scores.shape[0]))
    rounding = ROUNDING_UNITS * eps * (1 + logits) * np.maximum(sizes, _rms(sizes))
    if exact:
        bars = rounding + ROUNDING_SAFETY * label_error / np.sqrt(count.ratio)
        return bars, bars
    wide = -float(ndtri(CHANCE / (2 * rest.labels.size)))
    own = rounding + label_error * CURVED * 2 / np.sqrt(count.ratio)  # some inputs depend on more than the mean
    return own, rounding + wide * np.hypot(label_error, own)


def _effect_of_attention(problem: LayerProblem) -> float:
    """Root mean square of what the outputs are beyond a linear map of the mean token."""
    if problem.rows <= 2 * problem.width:
        return _rms(problem.labels)
    mean = np.repeat(np.mean(problem.inputs, axis=1), problem.inputs.shape[1], axis=0)
    return _rms(problem.labels - mean @ np.linalg.lstsq(mean, problem.labels, rcond=None)[0])


def _rms(array: Floats) -> float:
    return float(np.sqrt(np.mean(np.asarray(array) ** 2)))
