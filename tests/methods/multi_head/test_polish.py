"""Least squares over all answers: its linear maps are those of the model, and it comes nearer to the truth."""

from __future__ import annotations

import numpy as np
import pytest

from keyhole.methods.multi_head.vector import polish as least_squares
from keyhole.methods.multi_head.vector.polish import Asked, Block, Heads, polish, residuals, start_heads, with_constant

WIDTH, HEADS, RANK = 12, 3, 3
NOISE = 1e-7


def problem(rng, outputs, value_rank):
    """Answers of heads beside random last tokens, and the heads."""
    scores = np.stack(
        [rng.standard_normal((WIDTH, RANK)) @ rng.standard_normal((RANK, WIDTH + 1)) / 4 for _ in range(HEADS)]
    )
    values = np.stack(
        [rng.standard_normal((WIDTH, value_rank)) @ rng.standard_normal((value_rank, outputs)) for _ in range(HEADS)]
    )
    tokens = np.linalg.qr(rng.standard_normal((WIDTH, WIDTH)))[0]
    last = with_constant(rng.standard_normal((30, WIDTH)), WIDTH**0.5)
    places = [np.arange(first, first + 2) for first in range(0, WIDTH, 2)]
    ends = [np.sort(rng.permutation(30)[:24]) for _ in places]
    blocks = [
        Block(place, end, np.where(end % 2, 1.0, 0.5), np.zeros((24, outputs)))
        for place, end in zip(places, ends, strict=True)
    ]
    asked = Asked(tokens, last, blocks, np.sum(values, axis=0))
    truth = Heads(list(scores), [np.eye(WIDTH + 1)] * HEADS, values, None)
    answered = [
        Block(block.tokens, block.last, block.scale, -rest + NOISE * rng.standard_normal(rest.shape))
        for block, rest in zip(blocks, residuals(asked, truth), strict=True)
    ]
    return Asked(tokens, last, answered, asked.total), scores, values


@pytest.mark.parametrize(("outputs", "value_rank"), [(12, 3), (9, 3), (6, 6)])
def test_products_are_those_of_the_derivative_and_of_its_transpose(outputs, value_rank):
    rng = np.random.default_rng([outputs, value_rank])
    asked, scores, values = problem(rng, outputs, value_rank)
    heads = start_heads(asked, scores, [RANK] * HEADS, values, [value_rank] * HEADS)
    tangent = least_squares._Tangent(asked, heads)
    change = rng.standard_normal(int(tangent.places[-1]))
    change *= 1e-6 / np.linalg.norm(change)
    moved = [a - b for a, b in zip(residuals(asked, heads), residuals(asked, tangent.move(change)), strict=True)]
    said = tangent.apply(1e6 * change)
    for one, other in zip(moved, said, strict=True):
        assert np.allclose(1e6 * one, other, atol=1e-4 * np.max(np.abs(other)))
    rests = [rng.standard_normal(each.shape).astype(np.float32) for each in said]
    across = sum(float(np.vdot(one, other)) for one, other in zip(said, rests, strict=True))
    assert np.isclose(across, 1e6 * change @ tangent.transpose(rests), rtol=1e-4)


@pytest.mark.parametrize(("outputs", "value_rank"), [(12, 3), (6, 6)])
def test_errors_of_what_was_read_fall_to_those_of_answers(outputs, value_rank):
    rng = np.random.default_rng([7, outputs])
    asked, scores, values = problem(rng, outputs, value_rank)
    near = values + 1e-3 * rng.standard_normal(values.shape)
    near += (asked.total - np.sum(near, axis=0)) / HEADS
    read = scores + 1e-3 * rng.standard_normal(scores.shape)
    heads = polish(asked, start_heads(asked, read, [RANK] * HEADS, near, [value_rank] * HEADS))
    assert np.max(np.abs(heads.scores - scores)) < 0.1 * np.max(np.abs(read - scores))
    assert np.linalg.norm(heads.values - values) < 0.5 * np.linalg.norm(near - values)
    before = np.sqrt(np.mean(np.concatenate([each.answers.ravel() for each in asked.blocks]) ** 2))
    assert least_squares.mean_square(asked, heads) ** 0.5 < 1e-5 * before
