"""Least squares over all answers: what was read with errors comes near to what answered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from keyhole.families import FormHead, MultiHead, SingleHead
from keyhole.families.forms import Rotary, geometric
from keyhole.families.parts import Alibi, Attention, DistanceTable, PositionBias, Window
from keyhole.methods.multi_head.vector.parts.bounded.factors import Answered
from keyhole.methods.multi_head.vector.parts.bounded.refit import refit

WIDTH, RANK, HEADS, OUTPUTS = 6, 2, 2, 8
FEW = 3  # outputs, fewer than values of all heads have dimensions: heads are not told apart by a linear map
# What is read is off by this part; afterwards by so much less.
OFF, BETTER = 1e-5, 1e-2
FIXED = ("form.frequencies",)


def _low_rank(rng: np.random.Generator, outputs: int) -> np.ndarray:
    return rng.standard_normal((WIDTH, RANK)) @ rng.standard_normal((RANK, outputs)) / WIDTH**0.5


def _heads(rng: np.random.Generator, distances: PositionBias | None, outputs: int = OUTPUTS) -> MultiHead:
    made: list[Any] = []
    for _ in range(HEADS):
        value = _low_rank(rng, outputs)
        if distances is None:
            query, key, query_bias, key_bias = (
                rng.standard_normal((RANK, n)) / WIDTH**0.5 for n in (WIDTH,) * 2 + (1,) * 2
            )
            form = Rotary(query, key, geometric(RANK // 2), query_bias[:, 0], key_bias[:, 0])
            made.append(FormHead(form, value))
        else:
            score = _low_rank(rng, WIDTH + 1)
            made.append(SingleHead(score[:, :-1], value, score[:, -1], attention=Attention(position_bias=distances)))
    return MultiHead(made)


@pytest.mark.parametrize(
    "distances",
    [None, Alibi(np.asarray(0.3)), DistanceTable(np.array([0.5, -0.4, 0.2])), Window(3)],
    ids=["rotary", "alibi", "table", "window"],
)
@pytest.mark.parametrize("outputs", [OUTPUTS, FEW])
def test_all_answers_together_tell_more(distances: PositionBias | None, outputs: int) -> None:
    rng = np.random.default_rng(0)
    truth = _heads(rng, distances, outputs)
    asked = []
    for length in (1, 3, 5):
        tokens = rng.standard_normal((80, length, WIDTH))
        asked.append(Answered(tokens, truth(tokens)))
    read = truth.with_arrays(
        {
            name: array if name.endswith(FIXED) else array * (1 + OFF * rng.standard_normal(np.shape(array)))
            for name, array in truth.arrays().items()
        }
    )
    found = refit(read, [(RANK, RANK)] * HEADS, asked, 1e-16)
    tokens = rng.standard_normal((50, 4, WIDTH))
    before, after = (np.max(np.abs(each(tokens) - truth(tokens))) for each in (read, found))
    assert after <= BETTER * before


def test_heads_that_answer_well_are_left_as_they_are() -> None:
    rng = np.random.default_rng(1)
    truth = _heads(rng, None)
    tokens = rng.standard_normal((40, 4, WIDTH))
    assert refit(truth, [(RANK, RANK)] * HEADS, [Answered(tokens, truth(tokens))], 1e-16) is truth
