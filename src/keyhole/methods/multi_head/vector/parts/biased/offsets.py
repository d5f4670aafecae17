"""What offsets of logits tell, once forms are known: key biases of rotary heads, slopes, tables by distance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from keyhole.arrays import Floats, floats
from keyhole.families.forms import Rotary
from keyhole.families.forms.rotary import turned
from keyhole.methods.base import Steps, Unrecoverable
from keyhole.methods.multi_head.vector.parts.biased.scores import Offsets
from keyhole.methods.multi_head.vector.parts.biased.start import TokenOfHeads
from keyhole.methods.multi_head.vector.parts.position_biases import ask_masses
from keyhole.methods.multi_head.vector.probe import VectorQueries
from keyhole.methods.multi_head.vector.scores import inverse_of
from keyhole.numerics.svd import least_squares
from keyhole.recovery import Outcome

# Steps of Gauss and Newton: offsets beside several copies of the last token are not linear in the bias.
STEPS = 6
# Slopes fit offsets within so many errors.
MISFIT = 1e3


def with_key_bias(form: Rotary, offsets: Sequence[Offsets], last: Floats, head: int) -> Rotary:
    """The form with the bias of keys that offsets show."""
    bias = np.zeros(form.key.shape[0])
    form = replace(form, key_bias=bias)
    for _ in range(STEPS):
        rows, rest = [], []
        for each in offsets:
            asked = each.asked()
            slopes, told = _responses(form, last[asked], each)
            weights = 1 / each.errors[head][:, asked]
            rows.append((slopes * weights[:, :, None]).reshape(-1, bias.size))
            rest.append(((each.values[head][:, asked] - told) * weights).ravel())
        step = least_squares(np.concatenate(rows), np.concatenate(rest))
        bias = bias + step
        form = replace(form, key_bias=bias)
        if float(np.linalg.norm(step)) <= 1e-15 * float(np.linalg.norm(bias)):
            break
    return form.canonical().without_shift()


def _responses(form: Rotary, last: Floats, offsets: Offsets) -> tuple[Floats, Floats]:  # (k, m, d_k), (k, m)
    """How offsets respond to the bias of keys, and what they are with the one that the form has."""
    keys, queries, frequencies = floats(form.keys(last)), floats(form.queries(last)), floats(form.frequencies)

    def at(distances: Floats) -> Floats:  # (distances, m, d_k)
        return np.asarray(turned(queries[None], distances[:, None, None] * frequencies, 1.0))

    far, near = at(offsets.distances.astype(float)), at(np.arange(offsets.between + 1.0))
    own, other = np.sum(far * keys, axis=2), np.sum(near * keys, axis=2)
    masses = np.exp(other - np.max(other, axis=0))
    total = np.sum(masses, axis=0)
    mean = np.sum(masses[:, :, None] * near, axis=0) / total[:, None]
    return far - mean, own - np.max(other, axis=0) - np.log(total)


def slopes_of(offsets: Offsets) -> tuple[Floats, Floats]:  # twice (heads,)
    """By how much energies fall with each token between, and deviations."""
    asked, distances = offsets.asked(), offsets.distances[None, :, None].astype(float)
    values, errors = offsets.values[:, :, asked], offsets.errors[:, :, asked]
    weights = distances / errors**2
    total = np.sum(weights * distances, axis=(1, 2))
    falls = -np.sum(weights * values, axis=(1, 2)) / total
    off = np.max(np.abs(values + falls[:, None, None] * distances) / errors)
    if not off <= MISFIT:
        raise Unrecoverable(Outcome.WRONG_FAMILY, "energies do not fall in proportion to the distance of tokens")
    # Errors of values are common to all last tokens: these do not average them out.
    return falls, (values[0].size / total) ** 0.5


def ask_biased_table(
    queries: VectorQueries, start: TokenOfHeads, biases: Floats, bias_errors: Floats
) -> Steps[tuple[Floats, Floats]]:  # twice (heads, distances)
    """What each distance adds, from a token before zero ones, whose logit is that of score biases."""
    inverse, zero = inverse_of(start.values[:, None]), np.zeros((1, queries.width))
    token, index = queries.scale * start.token, np.zeros(1, dtype=np.int64)
    own, off = biases @ token, bias_errors * float(np.linalg.norm(token))
    error = queries.noise * np.linalg.norm(inverse, axis=0) / queries.scale

    def ask(distance: int) -> Steps[tuple[Floats, Floats]]:
        queries.between = distance - 1
        answers = (yield from queries.ask("positions", zero, index, [(token[None, :], index, np.ones(1))]))[:, 0]
        queries.between = 0
        weights = (answers @ inverse)[0] / queries.scale
        if not np.all((weights > 0) & (weights < 1)):
            return np.zeros(start.heads), error
        return weights / (1 - weights) * np.exp(-own), np.hypot(error / (weights * (1 - weights)), off)

    return (yield from ask_masses(ask, start.heads, queries.longest - 1))
