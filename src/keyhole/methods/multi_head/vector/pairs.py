"""Whether a head is one: two near heads are told from one by long tokens whose logit is zero.

At natural norms two heads of nearly equal logits differ from one head by the square of their distance, which answers do
not show though they tell scores much better. A token u beside a last one g with uᵀ·(W·g + c) = 0 has half
of the head's weight however long both are, and in two copies two thirds. If the head is two, their logits there are ±x
with x growing as |u|·|g|, and in two copies it has less.
"""

from __future__ import annotations

import numpy as np

from keyhole.arrays import ROUNDING_DEVIATIONS, Floats, floats, namespace, times
from keyhole.families import MultiHead, SingleHead
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.multi_head.vector.probe import VectorQueries
from keyhole.noise import GAUSSIAN_DEVIATIONS
from keyhole.queries import Measurements, sequences
from keyhole.recovery import Outcome

# Queries for each head, and the deviation of each logit that is zero: larger ones hide what is looked for, smaller ones
# come of tokens that show little of it.
QUERIES, UNKNOWN_LOGIT = 8, 0.15
# The same for fine answers, each of which can decide alone; and the largest entry of a distance over what so few show.
FEW_QUERIES, KNOWN_LOGIT, LARGEST = 2, 0.07, 6.0
# Of wide heads, beside whose queries these are few, one for each so many numbers of a token: distances that do not show
# are most of what predictions are off by, the more the wider heads are, and n queries narrow them by the fourth root.
WIDTH_EACH = 192
COPIES = 2
# Two logits of ±x move the weight by this much x² while x is small, and by this much at most.
CURVATURE, MOST_SHIFT = 1 / 27, 1 / 6
# Tokens of which less than this is left by that are not made long again: it is rounding.
SHORTEST = 1e-3


def ask_distances(queries: VectorQueries, found: MultiHead, radius: MultiHead) -> Steps[Floats]:  # (heads,)
    """How far apart scores of two heads that pass for one may be, per unit token; ends where one is two for sure."""
    space, noise, heads = queries.signature.space, queries.signature.noise, len(found.heads)
    count = QUERIES if queries.coarse else max(FEW_QUERIES, queries.width // WIDTH_EACH)
    if queries.width == 1:  # no token of any length has a logit of zero
        return np.zeros(heads)
    pairs = [_undecided(queries, count, *each) for each in zip(found.heads, radius.heads, strict=True)]
    last = np.concatenate([pair[0] for pair in pairs])
    first = last + np.concatenate([pair[1] for pair in pairs])
    plan = sequences("heads", space.asarray(np.stack([first] * COPIES + [last], axis=1)))
    answers: Measurements = yield plan
    tokens = plan.tokens(0, plan.count, space, queries.width)
    first, last = floats(tokens)[:, 0], floats(tokens)[:, -1]
    own = np.concatenate([times((first - last)[n * count :][:count], found.heads[n].value) for n in range(heads)])
    own = own / queries.units  # (n, outputs) what the token adds in the head it is for
    onto = own / np.maximum(np.sum(own**2, axis=1, keepdims=True), 1e-300)  # takes answers to weights
    silent = MultiHead([SingleHead(0 * head.score, 0 * head.value) for head in found.heads])
    bars = floats(found.error_bar(silent, tokens, space.rounding)) + noise.radius
    rest = queries.values_at(answers, (-1,))[:, 0] - floats(found(tokens)) / queries.units
    shifts = np.sum(rest * onto, axis=1).reshape(heads, count)
    rounded = np.sum(bars / queries.units * np.abs(onto), axis=1).reshape(heads, count)
    variances = _variances(queries, found, radius, first, last, onto).reshape(heads, count)
    # One by one, and all together: what two heads do has the same sign everywhere. What rounds is not independent.
    alone = np.any(np.abs(shifts) > GAUSSIAN_DEVIATIONS * np.sqrt(variances) + rounded, axis=1)
    errors = GAUSSIAN_DEVIATIONS * np.sqrt(np.sum(variances, axis=1)) + np.sum(rounded, axis=1)
    several = int(np.sum(alone | ~(np.abs(np.sum(shifts, axis=1)) <= errors)))
    if several == 0:
        lengths = np.mean(np.linalg.norm(first - last, axis=1).reshape(heads, count), axis=1)
        shown = np.sqrt(np.minimum(errors / count, MOST_SHIFT) / CURVATURE) / lengths**2
        return np.asarray(shown if queries.coarse else LARGEST * shown)
    error = Unrecoverable(
        Outcome.TOO_NOISY,
        f"{several} of {heads} heads are several each, nearer to each other than answers of this precision tell but at "
        "long tokens: use an oracle of higher precision",
    )
    error.partial = found
    raise error


def _affine(head: SingleHead, last: Floats) -> Floats:  # (n, width) -> (n, width)
    """What tokens are multiplied with for their logits."""
    keys = times(last, head.score.T)
    return keys if head.score_bias is None else keys + floats(head.score_bias)


def _undecided(queries: VectorQueries, count: int, head: SingleHead, radius: SingleHead) -> tuple[Floats, Floats]:
    """Last tokens and what to add to them for a logit of zero, as long as that stays known: twice (count, width)."""
    last, token = (queries.directions(count) for _ in range(2))
    score = float(namespace(radius.score).mean(radius.score**2)) ** 0.5 / ROUNDING_DEVIATIONS  # of unit tokens
    bias = float(np.sqrt(np.mean(floats(radius.score_bias) ** 2))) / ROUNDING_DEVIATIONS
    logit = UNKNOWN_LOGIT if queries.coarse else KNOWN_LOGIT
    norm = 2 * logit / (bias + (bias**2 + 4 * score * logit) ** 0.5 + 1e-300)  # score·n² + bias·n may be unknown
    norm = float(min(max(norm, queries.scale), queries.signature.norm_limit / 2, queries.signature.space.huge**0.125))
    last, token = norm * last, norm * token
    keys = _affine(head, last)
    sizes = np.sum(keys**2, axis=1, keepdims=True)
    token = token - keys * np.sum(token * keys, axis=1, keepdims=True) / np.where(sizes > 0, sizes, 1.0)
    return last, norm * token / np.maximum(np.linalg.norm(token, axis=1, keepdims=True), SHORTEST * norm)


def _variances(
    queries: VectorQueries, found: MultiHead, radius: MultiHead, first: Floats, last: Floats, onto: Floats
) -> Floats:  # (n,)
    """What combinations of predictions may be off by: logits and values of all heads, as independent errors."""
    token = first - last
    onto = onto / queries.units
    variance = np.sum(times(last**2, queries.value.radius**2) * onto**2, axis=1)
    for head, wide in zip(found.heads, radius.heads, strict=True):
        logits = np.clip(np.sum(token * _affine(head, last), axis=1), -500.0, 500.0)
        weights = COPIES / (COPIES + np.exp(-logits))
        slopes = weights * (1 - weights) * np.sum(times(token, head.value) * onto, axis=1)
        logit = np.sum(token**2 * (times(last**2, wide.score.T**2) + floats(wide.score_bias) ** 2), axis=1)
        value = np.sum(times(token**2, wide.value**2) * onto**2, axis=1)
        variance = variance + slopes**2 * logit + weights**2 * value
    return np.asarray(variance) / ROUNDING_DEVIATIONS**2
