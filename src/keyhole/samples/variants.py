"""Layers that are nearly of the family: what they are called, where they explain examples that no layer of it does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keyhole.arrays import Floats
from keyhole.samples import varpro
from keyhole.samples.examples import Examples
from keyhole.samples.variable_projection import LayerPoint, logits
from keyhole.samples.varpro import VarproSettings

# Numbers per parameter that examples must have more of before a layer with biases is tried, and starts of the trial.
TRIED_RATIO, STARTS = 1.5, 3
# Biases below this part of the outputs, or of the logits, are none.
NO_BIAS = 1e-6
# Heads whose logits are smaller than this are told apart by terms of their square alone; what a fit leaves over of
# them is within so many times that.
FAINT, SECOND_ORDER = 0.05, 10.0
# Examples hardly show attention that are linear in the mean token but for this part.
EVEN = 3e-3


CAUSAL = (
    "the first token's output is a map of that token alone, and the last one's is not: attention is causal, which "
    "learn "
    "does not know"
)


def is_causal(examples: Examples, noise: float) -> bool:
    """Whether the first output is linear in the first token but the last not in the last: then it sees more."""
    left = [_beyond_linear(examples.inputs[:, place], examples.outputs[:, place]) for place in (0, -1)]
    size = float(np.sqrt(np.mean(examples.outputs**2)))
    allowed = varpro.ROUNDING * examples.eps * size + 2 * noise
    return examples.count > 2 * (examples.width + 1) and left[0] <= allowed < left[1] / 4


def _beyond_linear(tokens: Floats, outputs: Floats) -> float:  # (n, d), (n, d_out)
    features = np.hstack([tokens, np.ones((len(tokens), 1))])
    return float(np.sqrt(np.mean((outputs - features @ np.linalg.lstsq(features, outputs, rcond=None)[0]) ** 2)))


def name_biases(examples: Examples, heads: int, noise: float, settings: VarproSettings, seed: int) -> str | None:
    """What biases explain the examples, in words; None where none do.

    Biases are a layer over tokens with a 1 appended: weights add up to one, so that it carries an output bias.
    """
    ones = np.ones((*examples.inputs.shape[:2], 1))
    tokens = np.linalg.qr(np.concatenate([examples.inputs, ones], axis=2).reshape(-1, examples.width + 1), mode="r")
    if np.linalg.matrix_rank(tokens) <= examples.width:  # tokens have their 1 already, as one-hot ones do
        return None
    longer = Examples(np.concatenate([examples.inputs, ones], axis=2), examples.outputs, examples.eps)
    if varpro.count_of(longer, heads).once.ratio < TRIED_RATIO:
        return None
    fitted = varpro.fit_layer(
        longer, heads, noise, replace(settings, restarts=STARTS, rank=None, init="random", jobs=1), seed
    )
    if not fitted.solved:
        return None
    size = float(np.sqrt(np.mean(examples.outputs**2)))
    bias = float(np.linalg.norm(np.sum(fitted.point.projections[:, -1], axis=0)))
    keys = np.linalg.norm(fitted.point.scores[:, -1, :-1], axis=1)  # what every token adds to the logit of each key
    scores = np.linalg.norm(fitted.point.scores[:, :-1, :-1], axis=(1, 2))
    found = []
    if bias > NO_BIAS * size + 4 * noise:
        found.append(f"an output bias of norm {bias:.3g}")
    if np.any(keys > max(NO_BIAS, noise / max(size, 1e-300)) * np.max(scores)):
        found.append(f"score biases of norm {', '.join(f'{each:.2g}' for each in keys)}, such as those of queries")
    if not found:
        return None
    return (
        f"a layer with {' and '.join(found)} explains them: append a 1 to every token and learn that layer, of "
        f"which the "
        "last rows are the biases"
    )


def nearly_even(examples: Examples) -> str | None:
    """Why heads of examples that hardly show attention are not told apart; None where it shows."""
    problem = examples.problem()
    mean = np.repeat(np.mean(examples.inputs, axis=1), examples.length, axis=0)
    rest = problem.labels - mean @ np.linalg.lstsq(mean, problem.labels, rcond=None)[0]
    part = float(np.linalg.norm(rest)) / max(float(np.sqrt(problem.energy)), float(np.finfo(float).tiny))
    if part > EVEN:
        return None
    return (
        f"the outputs are linear in the mean token but for {part:.1g} of them: if heads attend almost evenly, which "
        f"has what is in terms of {part**2:.1g}, which are too near to rounding and noise to tell heads apart"
    )


def faint_heads(point: LayerPoint, rounding: float) -> str | None:
    """Why heads that attend almost evenly are not told apart; None where that is not the cause."""
    given = logits(point.problem.inputs, point.problem.turned, point.scores)
    size = float(np.sqrt(np.mean((given - np.mean(given, axis=-1, keepdims=True)) ** 2)))
    if point.scores.shape[0] < 2 or size > FAINT or point.relative > max(SECOND_ORDER * size**2, 4 * rounding):
        return None
    return (
        f"heads attend almost evenly (logits of {size:.1g}): to first order only Σ Θᵢ ⊗ Wᵢ shows, and which head "
        f"has what is in "
        f"terms of {size**2:.1g} of the outputs, which this arithmetic does not resolve. The function is fitted to "
        f"{point.relative:.1g} of the outputs; the heads are not told apart"
    )
