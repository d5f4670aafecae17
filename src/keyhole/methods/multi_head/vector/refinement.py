"""Least squares over all answers, where these are coarse: values and scores that fit them better than those read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keyhole.arrays import Array, Floats, floats
from keyhole.families import MultiHead, SingleHead
from keyhole.methods.base import Steps
from keyhole.methods.multi_head.vector.polish import Heads, mean_square, polish, start_heads
from keyhole.methods.multi_head.vector.probe import VectorQueries
from keyhole.methods.multi_head.vector.scores import Scores
from keyhole.methods.multi_head.vector.standard_errors import draw_tokens
from keyhole.methods.multi_head.vector.values import VectorValues
from keyhole.queries import Measurements, sequences

# Sequences that say whether least squares predict better than what was read.
HELD_OUT = 8


def ask_refined(
    queries: VectorQueries, bias: Array, values: VectorValues, scores: Scores
) -> Steps[tuple[VectorValues, Scores] | None]:
    """Values and scores by least squares over all answers; None where held-out answers are not predicted better.

    What was read is off from them by its own errors, nearly, so that these are what they may err by at most.
    """
    asked = scores.asked
    if asked is None:
        return None
    constant = float(asked.last[0, -1])
    read = np.concatenate([scores.matrices, scores.biases[:, :, None] / constant], axis=2)
    # In coordinates in which last tokens are orthogonal, the zero one included, forms err alike.
    basis, triangle = np.linalg.qr(asked.last)
    even = replace(asked, last=basis)
    heads = polish(even, start_heads(even, read @ triangle.T, scores.ranks, scores.values, values.ranks))
    noise = mean_square(even, heads) ** 0.5
    heads = replace(heads, right=[np.linalg.solve(triangle, right.T).T for right in heads.right])
    before = MultiHead(
        [SingleHead(*each) for each in zip(scores.matrices, scores.values * queries.units, scores.biases, strict=True)],
        bias,
    )
    after = _layer(heads, queries, constant, bias)
    plans = [
        sequences("bar", queries.signature.space.asarray(each[None])) for each in draw_tokens(queries, before, HELD_OUT)
    ]
    answers: list[Measurements] = yield plans
    tokens = [floats(plan.tokens(0, 1, queries.signature.space, queries.width)) for plan in plans]
    rests = np.zeros(2)
    for each, answer in zip(tokens, answers, strict=True):
        seen = floats(answer.values)
        seen = seen if queries.signature.positions == "last" else seen[:, -1]
        rests += [float(np.sum((layer(each) - seen) ** 2)) for layer in (before, after)]
    if not rests[1] < rests[0]:
        return None
    return _with_errors(values, scores, heads, read, constant, noise)


def _layer(heads: Heads, queries: VectorQueries, constant: float, bias: Array) -> MultiHead:
    made = [
        SingleHead(score[:, :-1], value * queries.units, constant * score[:, -1])
        for score, value in zip(heads.scores, heads.values, strict=True)
    ]
    return MultiHead(made, bias)


def _with_errors(
    values: VectorValues, scores: Scores, heads: Heads, read: Floats, constant: float, noise: float
) -> tuple[VectorValues, Scores]:
    """The new estimate, its errors those of answers and what was read being off from it."""
    matrices, off = heads.scores, read - heads.scores
    calm = min(1.0, noise / scores.noise) if values.rough else 1.0
    moved = np.sqrt(np.mean(off[:, :, :-1] ** 2, axis=(1, 2)))
    biases = constant * np.sqrt(np.mean(off[:, :, -1] ** 2, axis=1))
    apart = np.sqrt(np.mean((scores.values - heads.values) ** 2, axis=1))  # (heads, outputs)
    spread = np.maximum(apart, np.sqrt(np.mean(apart**2, axis=1, keepdims=True)))
    found = replace(
        scores,
        matrices=matrices[:, :, :-1].copy(),
        biases=constant * matrices[:, :, -1],
        values=heads.values,
        errors=np.hypot(calm * scores.errors, moved),
        bias_errors=np.hypot(calm * scores.bias_errors, biases),
    )
    known = spread if values.rough else np.hypot(values.spread, spread)
    return replace(values, matrices=heads.values, spread=known, rough=False), found
