"""Judging a fit by examples that were held back from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtri

from keyhole.arrays import Floats
from keyhole.families.attention_layer import AttentionLayer
from keyhole.recovery import Certificate, Outcome, times
from keyhole.samples.evidence import Evidence, StandardErrors
from keyhole.samples.examples import ExampleCount, Examples
from keyhole.samples.variable_projection import LayerProblem, mixture
from keyhole.samples.varpro import ASSUMPTIONS

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
# Of a layer that is only said to be accurate: single errors may be this much larger than those that measured it, and
# its error is given with so many standard deviations of the measurement.
ACCURACY_MARGIN, MEASURED = 2.0, 3.0
ACCURACY_ASSUMPTIONS = (
    "the layer comes as near to the outputs as it was measured to on held-out examples, on inputs drawn like these",
    "nothing is said of its parameters, or of other inputs",
)


@dataclass(frozen=True)
class Trust:
    """What is known of the errors of labels apart from the fit."""

    known: bool = True  # they were declared, or repeated inputs show them
    tolerance: float = 0.0  # they are at most this, where it is positive, and nothing else is known of them
    hidden: bool = False  # such errors may hide a head, since the number of heads was not given


@dataclass(frozen=True)
class Verdict:
    """What held-out examples say of a layer."""

    outcome: Outcome
    message: str
    certificate: Certificate
    details: dict[str, Any]


def judge(
    evidence: Evidence,
    count: ExampleCount,
    heldout: Examples,
    noise: float,  # standard deviation of labels, declared or estimated; 0: exact; the tolerance where there is one
    rng: np.random.Generator,
    trust: Trust,
) -> Verdict:
    """Whether held-out outputs lie within the radii of their predictions."""
    unit_errors = evidence.standard_errors(rng)
    exact, layer = noise == 0.0, evidence.layer
    label_error = noise
    if exact:
        label_error = max(float(np.sqrt(evidence.rss / evidence.numbers)), 4 * heldout.eps * evidence.scale)
    elif trust.tolerance > 0:
        label_error = _worst_together(evidence, count, trust.tolerance)
    radius, standard_error = _radii(layer, unit_errors, label_error, count.parameters, exact=exact, trust=trust)
    rest = heldout.problem()
    predictions = layer(heldout.inputs).reshape(rest.rows, -1)
    errors = np.abs(predictions - rest.labels)
    moved = [rest.moved(layer, *each) for each in unit_errors.draws]
    usual = np.sqrt(np.mean(np.square(moved), axis=(0, 2)))[:, None]  # (rows, 1), for errors of one
    own, bars = _bars(layer, rest, usual, label_error, count, heldout.eps, exact=exact, trust=trust)
    effect = _rms(rest.labels) if exact else _effect_of_attention(rest)
    resolution = _rms(own) / effect if effect > 0 else float("inf")
    worst = float(np.max(errors / bars))
    limits = (f"every output errs by at most {trust.tolerance:g}",) if trust.tolerance > 0 else ()
    certificate = Certificate(
        radius=radius,
        standard_error=standard_error,
        heldout_queries=heldout.count,
        worst_error=float(np.max(errors)),
        worst_ratio=worst,
        resolution=resolution,
        assumptions=(*ASSUMPTIONS, *limits),
        predictions=predictions.reshape(-1),
        answers=rest.labels.reshape(-1),
    )
    details = {"heldout_error": _rms(errors), "error_bars": "entrywise" if unit_errors.entrywise else "pooled per head"}
    said = f"{heldout.count} held-out examples predicted within their error bars"
    loose = any(
        label_error * _rms(error) > RESOLVED * max(_rms(score), np.finfo(float).tiny)
        for error, score in zip(unit_errors.scores, layer.scores, strict=True)
    )
    unresolved = resolution > RESOLVED or (loose and not exact)
    flaw = _flaw(worst, count, unit_errors, noise, trust, unresolved=unresolved, said=said)
    if flaw is None and (free := _saturated_head(layer, radius, heldout, bars, exact=exact)) is not None:
        flaw = (
            Outcome.NOT_IDENTIFIABLE,
            (
                f"{said}, but on these inputs head {free} attends so sharply that scores {SHARPER:g} times as large "
                "would give the same outputs: how large they are cannot be known from such inputs"
            ),
        )
    return Verdict(*(flaw or (Outcome.CERTIFIED, said)), certificate, details)


def _flaw(
    worst: float,
    count: ExampleCount,
    unit_errors: StandardErrors,
    noise: float,
    trust: Trust,
    *,
    unresolved: bool,
    said: str,
) -> tuple[Outcome, str] | None:
    """Why a layer is not certified."""
    if worst > 1:
        outcome = Outcome.WRONG_FAMILY if count.good else Outcome.TOO_FEW_EXAMPLES
        return outcome, f"a held-out output differs from its prediction by {times(worst)} what the error bar allows"
    if not unit_errors.determined:
        free = "the examples leave some direction of the parameters free: heads too many, or inputs too alike"
        return Outcome.NOT_IDENTIFIABLE, f"{said}, but {free}"
    if not trust.known:
        return Outcome.UNCERTIFIED, (
            f"{said}, but the noise of {noise:.2g} is only what the fit leaves over: no examples of equal inputs "
            "confirm it, and what no fit explains looks like noise too. Declare it, noise=Noise.gaussian(scale)"
        )
    if unresolved:
        wide = "the error bars are as large as what attention does to the outputs: more examples or less noise"
        if trust.tolerance > 0:
            wide = (
                f"errors of {trust.tolerance:g} that are all to one end could move scores by as much as they are, "
                "and no number of examples averages them out: a smaller tolerance, or noise=Noise.gaussian(scale) if "
                "they are independent"
            )
        return Outcome.UNCERTIFIED, f"{said}, but {wide}"
    if trust.hidden:
        return Outcome.UNCERTIFIED, (
            f"{said}, but a further head that adds less than the tolerance of {trust.tolerance:g} may hide within "
            "it: say how many there are, heads="
        )
    return None


def judge_accuracy(layer: AttentionLayer, heldout: Examples) -> Verdict:
    """Of a layer of which nothing is claimed but accuracy: its measured ε, and a check of it.

    Half of the held-out examples measure ε; the other half must lie within twice the largest error of the first.
    Nothing is said of parameters.
    """
    half = max(1, heldout.count // 2)
    rest = heldout.problem()
    predictions = layer(heldout.inputs).reshape(rest.rows, -1)
    errors = np.abs(predictions - rest.labels)
    measured, checked = errors[: half * heldout.length], errors[half * heldout.length :]
    squares = np.sum(errors.reshape(heldout.count, -1) ** 2, axis=1)
    spread = float(np.std(squares)) / heldout.count**0.5
    size = float(np.sqrt(np.mean(np.sum(heldout.outputs.reshape(heldout.count, -1) ** 2, axis=1))))
    error = float(np.sqrt(np.mean(squares))) / size if size else float("inf")
    most = float(np.sqrt(np.mean(squares) + MEASURED * spread)) / size if size else float("inf")
    bar = ACCURACY_MARGIN * float(np.max(measured)) + ROUNDING_UNITS * heldout.eps * size
    worst = float(np.max(checked)) / bar if checked.size else float("inf")
    effect = _effect_of_attention(rest)
    resolution = _rms(errors) / effect if effect > 0 else float("inf")
    certificate = Certificate(
        heldout_queries=heldout.count,
        worst_error=float(np.max(errors)),
        worst_ratio=worst,
        resolution=resolution,
        assumptions=ACCURACY_ASSUMPTIONS,
        predictions=predictions.reshape(-1),
        answers=rest.labels.reshape(-1),
    )
    said = f"a layer of accuracy ε = {error:.2g}: {heldout.count} held-out examples are predicted within "
    said += f"{100 * error:.2g} % of their outputs, root mean square, at most {100 * most:.2g} % at three deviations"
    outcome = Outcome.CERTIFIED
    if worst > 1:
        outcome, said = (
            Outcome.UNCERTIFIED,
            f"{said}, but single errors reach {worst:.2g} × twice those it was measured by",
        )
    elif resolution > RESOLVED:
        outcome = Outcome.UNCERTIFIED
        said += f", which is {100 * resolution:.2g} % of what attention does to them: more examples, or a polish"
    return Verdict(
        outcome, said, certificate, {"epsilon": error, "epsilon_at_most": most, "heldout_error": _rms(errors)}
    )


def _worst_together(evidence: Evidence, count: ExampleCount, tolerance: float) -> float:
    """What standard errors are multiplied by where errors of labels stay within a tolerance and nothing else is known.

    The truth leaves no more than N·τ² over, and the fit leaves its rss: to first order the truth lies in the ellipsoid
    ‖J·δ‖² ≤ N·τ² − rss, whose half-widths are standard errors times the root of that.
    """
    numbers = count.examples * count.length * count.outputs
    explained = evidence.rss if numbers == evidence.numbers else 0.0
    return float(np.sqrt(max(numbers * tolerance**2 - explained, 0.0)))


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
    layer: AttentionLayer,
    unit_errors: StandardErrors,
    label_error: float,
    parameters: int,
    *,
    exact: bool,
    trust: Trust,
) -> tuple[AttentionLayer, AttentionLayer | None]:
    errors = [label_error * each for each in (unit_errors.scores, unit_errors.projections)]
    if exact:
        # What the descent left undone lies in the flattest directions: by its norm it is within unsettled·error.
        pooling = 1.0 if unit_errors.entrywise else POOLED
        wide = pooling * (ROUNDING_SAFETY + CURVED * unit_errors.unsettled / label_error)
        tiny = ROUNDING_UNITS * np.finfo(float).eps
        sizes = [np.max(np.abs(each)) for each in (layer.scores, layer.projections)]
        return AttentionLayer(*(wide * each + tiny * size for each, size in zip(errors, sizes, strict=True))), None
    pooling = 1.0 if unit_errors.entrywise else POOLED
    if trust.tolerance > 0:
        return AttentionLayer(*(CURVED * pooling * each for each in errors)), None
    wide = -CURVED * float(ndtri(CHANCE / (2 * parameters))) * pooling
    return AttentionLayer(*(wide * each for each in errors)), AttentionLayer(*errors)


def _bars(
    layer: AttentionLayer,
    rest: LayerProblem,
    usual: Floats,  # (rows, 1): standard errors of predictions for labels with errors of one
    label_error: float,
    count: ExampleCount,
    eps: float,
    *,
    exact: bool,
    trust: Trust,
) -> tuple[Floats, Floats]:  # (rows, d_out) each: of the predictions, and with the errors of labels
    weights = rest.weights(layer.scores)
    logits = np.max(np.abs(np.log(np.maximum(weights, np.finfo(float).tiny))))
    mixed = mixture(rest.inputs, weights).reshape(rest.rows, layer.scores.shape[0], -1)
    sizes = sum(np.abs(mixed[:, i]) @ np.abs(layer.projections[i]) for i in range(layer.scores.shape[0]))
    rounding = ROUNDING_UNITS * eps * (1 + logits) * np.maximum(sizes, _rms(sizes))
    if exact:
        bars = rounding + ROUNDING_SAFETY * label_error * np.maximum(usual, 1 / np.sqrt(count.ratio))
        return bars, bars
    if trust.tolerance > 0:
        numbers = count.examples * count.length * count.outputs
        own = rounding + label_error * CURVED * 2 * np.maximum(usual, np.sqrt(count.parameters / numbers))
        return own, own + rounding + trust.tolerance
    wide = -float(ndtri(CHANCE / (2 * rest.labels.size)))
    own = rounding + label_error * CURVED * 2 * np.maximum(usual, 1 / np.sqrt(count.ratio))
    return own, rounding + wide * np.hypot(label_error, own)


def _effect_of_attention(problem: LayerProblem) -> float:
    """Root mean square of what the outputs are beyond a linear map of the mean token."""
    if problem.rows <= 2 * problem.width:
        return _rms(problem.labels)
    mean = np.repeat(np.mean(problem.inputs, axis=1), problem.inputs.shape[1], axis=0)
    return _rms(problem.labels - mean @ np.linalg.lstsq(mean, problem.labels, rcond=None)[0])


def _rms(array: Floats) -> float:
    return float(np.sqrt(np.mean(np.asarray(array) ** 2)))
