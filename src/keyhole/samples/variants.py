"""Layers that are nearly of the family: what they are called, where they explain examples that no layer of it does."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Floats
from keyhole.samples import varpro
from keyhole.samples.examples import Examples
from keyhole.samples.variable_projection import LayerPoint, logits
from keyhole.samples.varpro import VarproSettings

# Numbers per parameter that examples must have more of before a layer with biases is tried, and starts of the trial.
TRIED_RATIO, STARTS = 1.5, 3
# Numbers per parameter that the trial is fitted to at most, and steps of its starts.
ENOUGH_RATIO, STEPS = 6.0, 40
# Outputs depend on places where a linear map for each explains this part of what one for all leaves over.
PLACED = 0.1
# Outputs lie on an ellipsoid but for this part.
ON_ELLIPSOID = 1e-3
# A map of tokens is a residual connection where it is the identity but for this part.
NEARLY = 1e-3
# Biases below this part of the outputs, or of the logits, are none.
NO_BIAS = 1e-6
# Heads whose logits are smaller than this are told apart by terms of their square alone; what a fit leaves over of
# them is within so many times that.
FAINT, SECOND_ORDER = 0.05, 10.0
# Heads are nearly the same whose scores are within this part of their size.
NEAR_HEADS = 1e-2
# Examples hardly show attention that are linear in the mean token but for this part.
EVEN = 3e-3


CAUSAL = (
    "the {0} token's output is a map of that token alone, and the {1} one's is not: attention is {2}, which learn "
    "does not know"
)
NO_RESIDUAL = "no residual"
PLAIN = (
    "a layer of this family explains them nevertheless: a fit of one with biases ends at none. Starts missed it, and "
    "more restarts= or another seed= may not"
)
PLACES = (
    "outputs depend on the places of tokens, as with a mask or a position encoding: a linear map for each place "
    "explains {0:.0%} of what one for all places leaves over"
)


def name_mask(examples: Examples, noise: float) -> str | None:
    """A mask of causal attention, or of the reverse, in words: at one end the output is linear in its own token."""
    left = [_beyond_linear(examples.inputs[:, place], examples.outputs[:, place]) for place in (0, -1)]
    size = float(np.sqrt(np.mean(examples.outputs**2)))
    allowed = varpro.ROUNDING * examples.eps * size + 2 * noise
    if examples.count <= 2 * (examples.width + 1):
        return None
    if left[0] <= allowed < left[1] / 4:
        return CAUSAL.format("first", "last", "causal")
    return CAUSAL.format("last", "first", "causal in reverse") if left[1] <= allowed < left[0] / 4 else None


def _beyond_linear(tokens: Floats, outputs: Floats) -> float:  # (n, d), (n, d_out)
    features = np.hstack([tokens, np.ones((len(tokens), 1))])
    return float(np.sqrt(np.mean((outputs - features @ np.linalg.lstsq(features, outputs, rcond=None)[0]) ** 2)))


@dataclass(frozen=True)
class Trial:
    """Fits of a layer of so many heads to examples that were changed."""

    examples: Examples
    heads: int
    noise: float
    settings: VarproSettings
    seed: int

    def fit(self, tokens: Floats, *, residual: bool = False) -> LayerPoint | None:
        """A fit of other tokens that explains the examples, or of them and a map of each token itself beside it."""
        triangle = np.linalg.qr(tokens.reshape(-1, tokens.shape[2]), mode="r")
        if np.linalg.matrix_rank(triangle) < tokens.shape[2]:  # they have their 1 already, as one-hot ones do
            tokens = tokens[..., :-1]
        if not residual and np.array_equal(tokens, self.examples.inputs):
            return None
        beside = _longer(self.examples.inputs, tokens[..., self.examples.width :]) if residual else None
        changed = replace(self.examples, inputs=tokens, beside=beside)
        count = varpro.count_of(changed, self.heads)
        if count.once.ratio < TRIED_RATIO:
            return None
        changed = changed.some(slice(0, count.needed(ENOUGH_RATIO, 1.5)))
        settings = replace(self.settings, restarts=STARTS, rank=None, init="random", jobs=1, steps=STEPS)
        fitted = varpro.fit_layer(changed, self.heads, self.noise, settings, self.seed)
        return fitted.point if fitted.solved else None


def _longer(tokens: Floats, added: Floats) -> Floats:  # (n, k, d), (n, k, some) or what broadcasts to it
    return np.concatenate([tokens, np.broadcast_to(added, (*tokens.shape[:2], added.shape[-1]))], axis=2)


def name_variant(trial: Trial) -> str | None:
    """The family of layers that explains the examples where this one does not; None where none is found."""
    return _name_biases(trial) or _name_places(trial) or _name_norm(trial)


def _name_places(trial: Trial) -> str | None:
    """How outputs depend on the places of tokens, in words; None where nothing shows it."""
    examples = trial.examples
    part = _explained_by_places(examples)
    said = PLACES.format(part) if part > PLACED else ""
    begin = f"{said}. A" if said else "a"
    tokens = _longer(examples.inputs, np.eye(examples.length))
    if trial.fit(tokens) is not None:
        return f"{begin} position encoding explains them: append the one-hot vector of its place to every token"
    if part > 0 and (point := trial.fit(tokens, residual=True)) is not None:
        return f"{begin} position encoding and {_residual(point)} explain them"
    return said or None


def _explained_by_places(examples: Examples) -> float:
    """What linear maps for each place explain of what one for all leaves over, on the last third of the examples."""
    n, k, d = examples.inputs.shape
    train = (2 * n) // 3
    if train < 2 * (k * d + 1):
        return 0.0
    flat = np.hstack([examples.inputs.reshape(n, -1), np.ones((n, 1))])
    outputs = examples.outputs.reshape(n, -1)
    own = flat @ np.linalg.lstsq(flat[:train], outputs[:train], rcond=None)[0]
    mean = np.repeat(np.mean(examples.inputs, axis=1), k, axis=0)
    features = np.hstack([mean, examples.inputs.reshape(n * k, d), np.ones((n * k, 1))])
    labels = examples.outputs.reshape(n * k, -1)
    common = (features @ np.linalg.lstsq(features[: train * k], labels[: train * k], rcond=None)[0]).reshape(n, -1)
    left = [float(np.sum((outputs - each)[train:] ** 2)) for each in (own, common)]
    return 1.0 - left[0] / max(left[1], float(np.finfo(float).tiny))


def _name_norm(trial: Trial) -> str | None:
    """Outputs that are normalised, or a layer of normalised tokens."""
    examples = trial.examples
    if _is_normalised(examples.outputs.reshape(-1, examples.outputs_per_token)):
        return "the outputs of all tokens lie on one ellipsoid: they are normalised"
    centred = examples.inputs - np.mean(examples.inputs, axis=2, keepdims=True)
    for name, tokens in (("(x − mean)/deviation", centred), ("x/root mean square", examples.inputs)):
        size = np.sqrt(np.mean(tokens**2, axis=2, keepdims=True))
        if np.min(size) > 0.0:
            point = trial.fit(_longer(tokens / size, np.ones(1))[..., 1 if tokens is centred else 0 :], residual=True)
            if point is not None:
                return f"a layer of normalised tokens, {name}, explains them, with {_residual(point)} beside it"
    return None


def _is_normalised(outputs: Floats) -> bool:
    """Whether one ellipsoid along the axes holds all outputs: Σ aᵢ·fᵢ² + bᵢ·fᵢ is constant, all aᵢ of one sign."""
    width = outputs.shape[1]
    features = np.hstack([outputs**2, outputs, np.ones((len(outputs), 1))])
    size = np.sqrt(np.mean(features**2, axis=0))
    if width < 3 or len(outputs) < 2 * features.shape[1] or not np.all(size > 0):
        return False
    _, values, right = np.linalg.svd(features / size, full_matrices=False)
    squares = right[values <= ON_ELLIPSOID * values[0]][:, :width].T
    left, sizes, _ = np.linalg.svd(squares, full_matrices=False)
    if np.sum(sizes > 0.1 * np.max(sizes, initial=0.0)) != 1:
        return False
    return bool(abs(np.sum(np.sign(left[:, 0]))) == width)


def _residual(point: LayerPoint) -> str:
    problem = point.problem
    assert problem.beside is not None
    beside, rest = problem.beside.reshape(problem.rows, -1), problem.labels - point.mixed @ point.stacked
    added = np.linalg.lstsq(beside, rest, rcond=None)[0]
    identity = np.eye(*added.shape)
    if np.linalg.norm(added - identity) <= NEARLY * np.linalg.norm(identity):
        return "a residual connection (learn outputs − inputs)"
    if np.linalg.norm(added) <= NEARLY:
        return NO_RESIDUAL
    return f"a linear map of each token itself, of norm {np.linalg.norm(added):.3g}, such as a residual,"


def _name_biases(trial: Trial) -> str | None:
    """What biases, or a residual, explain the examples, in words; None where none do.

    Biases are a layer over tokens with a 1 appended: weights add up to one, so that it carries an output bias.
    """
    examples, noise = trial.examples, trial.noise
    longer = _longer(examples.inputs, np.ones(1))
    point = trial.fit(longer) or trial.fit(longer, residual=True)
    if point is None:
        return None
    if point.problem.beside is not None and (said := _residual(point)) != NO_RESIDUAL:
        return f"a layer with {said} explains them"
    size = float(np.sqrt(np.mean(examples.outputs**2)))
    bias = float(np.linalg.norm(np.sum(point.projections[:, -1], axis=0)))
    keys = np.linalg.norm(point.scores[:, -1, :-1], axis=1)  # what every token adds to the logit of each key
    scores = np.linalg.norm(point.scores[:, :-1, :-1], axis=(1, 2))
    found = []
    if bias > NO_BIAS * size + 4 * noise:
        found.append(f"an output bias of norm {bias:.3g}")
    if np.any(keys > max(NO_BIAS, noise / max(size, 1e-300)) * np.max(scores)):
        found.append(f"score biases of norm {', '.join(f'{each:.2g}' for each in keys)}, such as those of queries")
    if not found:
        return PLAIN
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


def near_heads(point: LayerPoint) -> str | None:
    """Why heads of nearly the same scores are not told apart; None where that is not the cause."""
    scores = point.scores
    size = float(np.max(np.linalg.norm(scores, axis=(1, 2))))
    pairs = [(i, j) for i in range(len(scores)) for j in range(i)]
    apart, (one, two) = min(
        ((float(np.linalg.norm(scores[i] - scores[j])), (j, i)) for i, j in pairs), default=(1.0, (0, 0))
    )
    if not size or not pairs or apart > NEAR_HEADS * size or point.relative > SECOND_ORDER * (apart / size) ** 2:
        return None
    return (
        f"heads {one} and {two} have nearly the same scores ({apart / size:.1g} of their size apart): how they differ "
        f"shows in terms of that times their projections, and what is left of it, {point.relative:.1g} of the outputs, "
        "is too near to rounding for a descent. The function is fitted to that; the two heads are not told apart"
    )
